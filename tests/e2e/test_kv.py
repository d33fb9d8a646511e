"""A request says what its cache keeps."""
import concurrent.futures
import json
import re
import subprocess

import httpx
import pytest

from conftest import MODEL, MODEL_NAME, ROOT, Server, cli_json, run_cli

LONG = " ".join(f"Line {i}: the value of item {i * 37 % 101} is {i * i % 97}." for i in range(130))  # about 2,500 tokens


def ask(server, kv, prompt=LONG, max_tokens=24, **more):
    body = {"model": MODEL_NAME, "prompt": prompt, "max_tokens": max_tokens, "temperature": 0, "ignore_eos": True, **more}
    if kv is not None:
        body["kv"] = kv
    return httpx.post(server.url + "/v1/completions", json=body, timeout=300)


def answer(server, kv, **more):
    r = ask(server, kv, **more)
    assert r.status_code == 200, r.text
    return r.json()["choices"][0]["text"], r.json()["usage"]["kv"]


MIXED = [{"policy": "full"}, {"policy": "snapkv", "budget": {"ratio": 0.25}}, {"policy": "h2o", "budget": {"tokens": 256}},
         {"policy": "streaming", "budget": {"ratio": 0.1}}, {"policy": "adakv", "budget": {"bytes": 24_000_000}},
         {"policy": "tova", "budget": {"ratio": 0.5}}]


def test_one_batch_mixes_policies_and_each_gets_what_it_gets_alone(server):
    alone = [answer(server, kv) for kv in MIXED]
    with concurrent.futures.ThreadPoolExecutor(len(MIXED)) as pool:
        together = list(pool.map(lambda kv: answer(server, kv), MIXED))
    for kv, (text, report), (text_alone, report_alone) in zip(MIXED, together, alone):
        assert text == text_alone, kv
        assert report["policy"] == kv["policy"] and report["reason"] == "requested"
        assert report["bytes"] == report_alone["bytes"] and report["entries"] == report_alone["entries"]
    for kv, (_, report) in zip(MIXED, together):
        if "ratio" in kv.get("budget", {}):
            assert report["bytes_ratio"] <= kv["budget"]["ratio"]
        if "bytes" in kv.get("budget", {}):
            assert report["bytes_ratio"] * len(LONG) > 0 and report["entries"]["dropped"] > 0
    server.wait_idle()


def test_the_ratio_of_several_answers_is_that_of_one(server):
    kv = {"policy": "snapkv", "budget": {"ratio": 0.25}}
    _, alone = answer(server, kv, prompt=LONG[:2000], max_tokens=60)
    _, three = answer(server, kv, prompt=LONG[:2000], max_tokens=60, n=3)
    assert three["bytes_ratio"] == pytest.approx(alone["bytes_ratio"]) and alone["bytes_ratio"] <= 0.25
    _, two = answer(server, kv, prompt=[LONG[:2000], LONG[:3000]], max_tokens=60)
    assert two["bytes_ratio"] <= 0.25


def test_ratio_one_is_full(server):
    text, full = answer(server, {"policy": "full"})
    for policy in ("streaming", "h2o", "snapkv", "pyramidkv"):
        other, report = answer(server, {"policy": policy, "budget": {"ratio": 1}})
        assert other == text and report["bytes"] == full["bytes"] and report["policy"] == policy


@pytest.mark.parametrize("kv, words", [
    ({"policy": "no-such-policy"}, ["kv.policy", "no-such-policy", "snapkv"]),
    ({"policy": "random", "budget": {"ratio": 0.5}}, ["kv.policy", "random", "--allow-baselines"]),
    ({"policy": "snapkv", "budget": {"ratio": 0}}, ["kv.budget.ratio", "0"]),
    ({"policy": "snapkv", "budget": {"ratio": 0.5, "tokens": 3}}, ["kv.budget", "one of"]),
    ({"policy": "snapkv", "budget": {"bytes": 5}}, ["kv.budget.bytes", "5", "90 lists"]),
    ({"policy": "snapkv", "budget": {"tokens": 20}, "protect": {"ranges": [[0, 100]]}}, ["kv.budget.tokens", "20", "105"]),
    ({"policy": "snapkv", "budget": {"tokens": 20}, "protect": {"ranges": [[0, 100000]]}}, ["kv.protect.ranges", "100000"]),
    ({"policy": "snapkv", "budget": {"tokens": 20}, "params": {"window": 1000}}, ["kv.params.window", "1000", "512"]),
    ({"policy": "snapkv", "params": {"wind": 3}}, ["kv.params.wind", "window"]),
    ({"policy": "h2o", "params": {"sums": "cubed"}}, ["kv.params.sums", "cubed", "raw"]),
    ({"policy": "full", "budget": {"ratio": 0.5}}, ["kv.budget.ratio", "full"]),
    ({"policy": "snapkv", "bits": {"key": 5}}, ["kv.bits.key", "5", "16, 8, 4, 3, 2"]),
    ({"policy": "snapkv", "bits": {"keys": 4}}, ["kv.bits.keys", "key and value"]),
    ({"policy": "full", "bits": {"key": 4, "value": 4}, "floor": {"bits": 8}}, ["kv.floor.bits", "8", "4"]),
    ({"policy": "snapkv", "budget": {"ratio": 0.25}, "floor": {"ratio": 0.5}}, ["kv.floor.ratio", "0.5", "0.25"]),
    ({"policy": "full", "floor": {"ratio": 2}}, ["kv.floor.ratio", "2"]),
    ({"policy": "full", "params": {"prefill": "coded"}}, ["kv.params.prefill", "16"]),
    ({"policy": "full", "bits": {"key": 4}, "params": {"prefill": "coded", "protected_bits": 16}}, ["kv.params.protected_bits", "16"]),
    ({"policy": "snapkv", "bits": {"key": 4, "value": 4}, "budget": {"ratio": 0.3}, "protect": {"ranges": [[0, 1000]]}},
     ["kv.budget.ratio", "protected", "bytes"]),
    ({"policy": "snapkv", "on_miss": "block"}, ["kv.on_miss"]),
    ({"policy": "snapkv", "strategy": "mine"}, ["kv.strategy", "mine"]),
    ({"policy": "snapkv", "protect": {"messages": [0]}}, ["kv.protect.messages", "chat"]),
    ({"policy": "snapkv", "protect": {"colour": 1}}, ["kv.protect.colour"]),
])
def test_what_cannot_be_is_refused_with_numbers(server, kv, words):
    r = ask(server, kv)
    assert r.status_code == 400 and r.json()["error"]["param"].startswith("kv"), r.text
    for word in words:
        assert word in r.json()["error"]["message"], r.text


DENSE_ENTRY = 256  # bytes of key and value, 64 dimensions each


def test_bits_store_what_is_kept(server):
    _, full = answer(server, {"policy": "full"}, max_tokens=100)
    for bits, coded, ratio in ((8, 132, 0.56), (4, 68, 0.32), (2, 36, 0.21)):
        _, kv = answer(server, {"policy": "full", "bits": {"key": bits, "value": bits}}, max_tokens=100)
        assert kv["entries"]["dropped"] == 0 and kv["entries"]["kept"] == full["entries"]["kept"]
        formats = kv["entries_by_format"]
        assert set(formats) == {"dense", f"s{bits}"} and sum(formats.values()) == kv["entries"]["kept"]
        assert formats["dense"] <= 90 * (68 + 80)  # sinks, recent ones and less than a page and an interval that wait
        assert kv["bytes_ratio"] < ratio and kv["read_bytes_per_token"] == formats["dense"] * DENSE_ENTRY + formats[f"s{bits}"] * coded
        assert bits < kv["bits"]["key"] == kv["bits"]["value"] < 16 and kv["peak_bytes_ratio"] > 1


def test_key_and_value_may_differ(server):
    _, kv = answer(server, {"policy": "streaming", "budget": {"tokens": 500}, "bits": {"key": 4, "value": 2}})
    assert set(kv["entries_by_format"]) == {"dense", "s4v2"} and kv["bits"]["value"] < kv["bits"]["key"]


def test_a_budget_holds_more_in_fewer_bits(server):
    for policy in ("streaming", "h2o", "tova", "snapkv", "adakv", "pyramidkv", "chunkkv", "keydiff", "polykv"):
        kept = []
        for bits in (16, 4):
            _, kv = answer(server, {"policy": policy, "budget": {"ratio": 0.15}, "bits": {"key": bits, "value": bits}})
            assert kv["bytes_ratio"] <= 0.15 and kv["policy"] == policy
            kept.append(kv["entries"]["kept"])
        assert kept[1] > 1.8 * kept[0], policy


def test_a_prompt_may_be_coded_as_it_comes(server):
    kv = {"policy": "full", "bits": {"key": 4, "value": 4}, "params": {"prefill": "coded"}}
    _, report = answer(server, kv)
    assert set(report["entries_by_format"]) == {"s8", "s4"} and report["peak_bytes_ratio"] < 0.55
    _, report = answer(server, {"policy": "auto", "bits": {"key": 4, "value": 4}})
    assert report["policy"] == "full" and "bits" in report["reason"]


def test_eight_bits_say_what_sixteen_say(server):
    text, _ = answer(server, {"policy": "full"}, prompt=LONG[:1500])
    coded, kv = answer(server, {"policy": "full", "bits": {"key": 8, "value": 8}}, prompt=LONG[:1500])
    assert coded == text and kv["entries_by_format"]["s8"] > 0


def test_messages_and_roles_are_protected(server):
    messages = [{"role": "system", "content": "Answer in one word. " * 12}, {"role": "user", "content": LONG[:4000]},
                {"role": "assistant", "content": "Yes."}, {"role": "user", "content": "What is it about?"}]

    def chat(protect):
        body = {"messages": messages, "max_tokens": 8, "temperature": 0,
                "kv": {"policy": "streaming", "budget": {"tokens": 80}, "protect": {"sinks": 0, "recent": 8, **protect}}}
        return httpx.post(server.url + "/v1/chat/completions", json=body, timeout=120)

    assert chat({}).status_code == 200
    assert chat({"messages": [0]}).status_code == 200
    assert chat({"roles": ["system"]}).json()["choices"] == chat({"messages": [0]}).json()["choices"]
    assert chat({"roles": ["tool"]}).json()["choices"] == chat({}).json()["choices"]
    r = chat({"messages": [1]})  # alone more than 80 entries
    assert r.status_code == 400 and "kv.budget.tokens" in r.json()["error"]["message"], r.text
    r = chat({"messages": [4]})
    assert r.status_code == 400 and "kv.protect.messages" in r.json()["error"]["message"] and "4" in r.json()["error"]["message"]


def test_policies_are_listed(server):
    policies = {p["name"]: p for p in httpx.get(server.url + "/v1/kv/policies").json()["policies"]}
    for policy in policies.values():
        names = [p["name"] for p in policy["parameters"]]
        assert len(names) == len(set(names)), names
    assert {"auto", "full", "streaming", "h2o", "tova", "snapkv", "adakv", "pyramidkv", "chunkkv", "keydiff", "polykv", "spherical"} == set(policies)
    assert all(p["summary"] and {"dense", "s8", "s4", "s3", "s2"} <= set(p["formats"]) for p in policies.values())
    assert {"prefill", "protected_bits"} <= {p["name"] for p in policies["full"]["parameters"]}
    assert {"name": "window", "summary": "last query rows that score the entries", "default": 64, "min": 1, "max": 512} in policies["snapkv"]["parameters"]
    text = run_cli("serve", "--help-kv")
    assert text.returncode == 0 and all(f"{name}: " in text.stdout for name in policies) and "random: baseline" in text.stdout


def test_generate_takes_baselines_and_refuses_the_same():
    out = cli_json("generate", "--model", MODEL, "--prompt", LONG[:3000], "--max-tokens", 4, "--temperature", 0, "--kv",
                   json.dumps({"policy": "random", "budget": {"ratio": 0.5}, "params": {"seed": 3}}))
    kv = out["usage"]["kv"]
    assert kv["policy"] == "random" and 0.4 < kv["bytes_ratio"] <= 0.5 and kv["entries"]["dropped"] > 0
    r = run_cli("generate", "--model", MODEL, "--prompt", "x", "--kv", '{"policy": "snapkv", "budget": {"ratio": -1}}')
    assert r.returncode == 2 and "kv.budget.ratio" in r.stderr


def test_the_servers_default_is_applied():
    s = Server("--kv", json.dumps({"policy": "snapkv", "budget": {"ratio": 0.25}}), "--kv-device-bytes", "96MiB", "--allow-baselines")
    try:
        _, kv = answer(s, None)
        assert kv["policy"] == "snapkv" and "--kv" in kv["reason"] and kv["bytes_ratio"] <= 0.25
        _, kv = answer(s, {"policy": "auto"}, prompt=LONG[:3000])
        assert kv["policy"] == "full" and kv["reason"].startswith("auto: full")
        _, kv = answer(s, {"policy": "auto"})
        assert kv["policy"] == "snapkv" and "more than half" in kv["reason"]
        _, kv = answer(s, {"policy": "random", "budget": {"ratio": 0.5}})
        assert kv["policy"] == "random"
        _, kv = answer(s, None, prompt="short")
        assert kv["entries"]["dropped"] == 0
    finally:
        assert s.stop() == 0
    r = run_cli("serve", "--model", MODEL, "--kv", '{"policy": "snapkv", "budget": {"ratio": -1}}')
    assert r.returncode == 2 and "kv.budget.ratio" in r.stderr


def test_grpc_says_the_same(server, protos):
    import grpc
    m = protos.inference
    with grpc.insecure_channel(server.grpc) as channel:
        stub = protos.inference_grpc.InferenceStub(channel)
        kv = m.KvOptions(policy="snapkv", budget=m.KvBudget(ratio=0.25))
        kv.protect.ranges.add(**{"from": 10, "to": 20})
        kv.params.update({"window": 32, "pool": "max"})
        sampling = m.Sampling(temperature=0, max_tokens=8, ignore_eos=True)
        events = list(stub.Generate(m.GenerateRequest(prompt=LONG, kv=kv, sampling=sampling)))
        report = events[-1].finished.usage.kv
        assert report.policy == "snapkv" and 0.2 < report.bytes_ratio <= 0.25
        _, http = answer(server, {"policy": "snapkv", "budget": {"ratio": 0.25}, "protect": {"ranges": [[10, 20]]},
                                  "params": {"window": 32, "pool": "max"}}, max_tokens=8)
        assert http["bytes"]["device"] == report.device_bytes
        bits = m.KvOptions(policy="full", bits=m.KvBits(key=4, value=2), floor=m.KvFloor(bits=2))
        finished = list(stub.Generate(m.GenerateRequest(prompt=LONG, kv=bits, sampling=sampling)))[-1].finished
        formats = dict(finished.usage.kv.entries_by_format)
        assert set(formats) == {"dense", "s4v2"} and 4 < finished.usage.kv.key_bits < 16 and finished.usage.kv.bytes_ratio < 0.4
        bits.bits.key = 7
        with pytest.raises(grpc.RpcError) as caught:
            list(stub.Generate(m.GenerateRequest(prompt="x", kv=bits, sampling=sampling)))
        assert caught.value.code() == grpc.StatusCode.INVALID_ARGUMENT and "kv.bits.key" in caught.value.details()
        kv.params.update({"window": 0})
        with pytest.raises(grpc.RpcError) as caught:
            list(stub.Generate(m.GenerateRequest(prompt="x", kv=kv, sampling=sampling)))
        assert caught.value.code() == grpc.StatusCode.INVALID_ARGUMENT and "kv.params.window" in caught.value.details()


def test_the_readme_asks_for_a_quarter(server):
    readme = (ROOT / "README.md").read_text()
    command = re.search(r"```sh\n(curl [^`]*ratio[^`]*)```", readme).group(1).replace("http://127.0.0.1:8000", server.url)
    r = subprocess.run(["bash", "-c", command], capture_output=True, text=True, timeout=120, cwd=ROOT)
    assert r.returncode == 0, r.stderr
    kv = json.loads(r.stdout)["usage"]["kv"]
    assert kv["bytes_ratio"] <= 0.25 and kv["entries"]["dropped"] > 0
