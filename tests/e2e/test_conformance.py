"""One suite over both protocols: every case goes over HTTP whole, over HTTP as a stream and over gRPC, and the transcripts
are the same: text, token ids, log-probabilities, ends, usage, and the words of every refusal."""
import json

import grpc
import httpx
import pytest
from google.protobuf import json_format

from conftest import MODEL_NAME

# What one status is called in the other protocol.
STATUS = {"INVALID_ARGUMENT": 400, "NOT_FOUND": 404, "DEADLINE_EXCEEDED": 408, "RESOURCE_EXHAUSTED": 429, "UNAVAILABLE": 503}
FINISH = {1: "stop", 2: "length", 5: "length"}
SAMPLING = {"temperature", "top_p", "top_k", "min_p", "repetition_penalty", "frequency_penalty", "presence_penalty", "seed", "max_tokens",
            "min_tokens", "ignore_eos", "stop", "stop_token_ids", "include_stop_str_in_output", "logit_bias", "logprobs", "n"}


class Transcript(dict):
    """{'error': ...}, or samples by index and usage."""

    def sample(self, index):
        return self.setdefault(index, {"text": "", "token_ids": [], "logprobs": []})


def error_of(r):
    return Transcript(error=(r.status_code, r.json()["error"]["message"].removeprefix("context_length_exceeded: ")))


def usage_of(usage):
    kv = usage["kv"]
    return {"prompt": usage["prompt_tokens"], "completion": usage["completion_tokens"], "policy": kv["policy"], "kept": kv["entries"]["kept"],
            "dropped": kv["entries"]["dropped"], "device": kv["bytes"]["device"]}


def http_body(case, stream):
    body = {"model": MODEL_NAME, "return_token_ids": True, "temperature": 0, "max_tokens": 12, **case, "stream": stream}
    if stream:
        body["stream_options"] = {"include_usage": True}
    if "messages" in case and "logprobs" in case:
        body["logprobs"], body["top_logprobs"] = True, case["logprobs"]
    return ("/v1/chat/completions" if "messages" in case else "/v1/completions"), body


def http_logprobs(case, logprobs):
    if not logprobs:
        return []
    if "messages" in case:
        return [(bytes(t["bytes"]), round(t["logprob"], 4), len(t["top_logprobs"])) for t in logprobs["content"]]
    return [(t.encode(), *((None, 0) if lp is None else (round(lp, 4), case["logprobs"]))) for t, lp in zip(logprobs["tokens"], logprobs["token_logprobs"])]


def over_http(server, case):
    path, body = http_body(case, stream=False)
    r = httpx.post(server.url + path, json=body, timeout=120)
    if r.status_code != 200:
        return error_of(r)
    answer, out = r.json(), Transcript()
    for c in answer["choices"]:
        out[c["index"]] = {"text": c["message"]["content"] if "messages" in case else c["text"], "token_ids": c["token_ids"],
                           "logprobs": http_logprobs(case, c["logprobs"]), "finish": c["finish_reason"], "stop": c["stop_reason"]}
    out["usage"] = usage_of(answer["usage"])
    return out


def over_sse(server, case):
    path, body = http_body(case, stream=True)
    out = Transcript()
    with httpx.stream("POST", server.url + path, json=body, timeout=120) as r:
        if r.status_code != 200:
            r.read()
            return error_of(r)
        frames = [line.removeprefix("data: ") for line in r.iter_lines() if line.startswith("data: ")]
    assert frames.pop() == "[DONE]"
    for frame in map(json.loads, frames):
        if not frame["choices"]:
            out["usage"] = usage_of(frame["usage"])
        for c in frame["choices"]:
            sample = out.sample(c["index"])
            sample["text"] += c["delta"].get("content", "") if "messages" in case else c["text"]
            sample["token_ids"] += c.get("token_ids", [])
            sample["logprobs"] += http_logprobs(case, c["logprobs"])
            if c["finish_reason"]:
                sample.update(finish=c["finish_reason"], stop=c["stop_reason"])
    return out


def grpc_request(protos, case):
    fields = {"temperature": 0, "max_tokens": 12, **case}
    sampling = {k: v for k, v in fields.items() if k in SAMPLING}
    if isinstance(sampling.get("stop"), str):
        sampling["stop"] = [sampling["stop"]]
    request = {"model": MODEL_NAME, "sampling": sampling, **{k: v for k, v in fields.items() if k not in SAMPLING}}
    if isinstance(request.get("prompt"), list):
        request["prompt_token_ids"] = {"ids": request.pop("prompt")}
    if ranges := request.get("kv", {}).get("protect", {}).get("ranges"):
        request["kv"] = json.loads(json.dumps(request["kv"]))
        request["kv"]["protect"]["ranges"] = [{"from": a, "to": b} for a, b in ranges]
    return json_format.ParseDict(request, protos.inference.ChatRequest() if "messages" in case else protos.inference.GenerateRequest())


def over_grpc(stub, protos, case):
    out, completion = Transcript(), 0
    call = stub.Chat if "messages" in case else stub.Generate
    try:
        events = list(call(grpc_request(protos, case), timeout=120))
    except grpc.RpcError as e:
        return Transcript(error=(STATUS[e.code().name], e.details().removeprefix("context_length_exceeded: ")))
    reports = []
    for event in events:
        if event.HasField("delta"):
            sample = out.sample(event.delta.index)
            sample["text"] += event.delta.text
            sample["token_ids"] += event.delta.token_ids
            sample["logprobs"] += [(t.chosen.token, round(max(t.chosen.logprob, -9999.0), 4) if t.chosen.HasField("logprob") else None, len(t.top))
                                   for t in event.delta.logprobs]
        if event.HasField("finished"):
            f = event.finished
            stop = int(f.stop_reason) if f.stop_reason.isdigit() and f.stop_reason not in case.get("stop", []) else f.stop_reason or None
            out.sample(f.index).update(finish=FINISH[f.finish_reason], stop=stop)
            completion += f.usage.completion_tokens
            reports.append(f.usage)
    kv = [u.kv for u in reports]
    out["usage"] = {"prompt": reports[0].prompt_tokens, "completion": completion, "policy": kv[0].policy, "kept": sum(k.entries_kept for k in kv),
                    "dropped": sum(k.entries_dropped for k in kv), "device": sum(k.device_bytes for k in kv)}
    return out


@pytest.fixture(scope="module")
def transcripts(server, protos):
    with grpc.insecure_channel(server.grpc) as channel:
        stub = protos.inference_grpc.InferenceStub(channel)
        yield lambda case: {"http": over_http(server, case), "sse": over_sse(server, case), "grpc": over_grpc(stub, protos, case)}


ASK = [{"role": "user", "content": "Name three colours."}]
LONG = " ".join(f"Item {i} costs {i * 7 % 90} coins." for i in range(60))
ANSWERS = {
    "greedy": {"prompt": "The capital of France is"},
    "chat": {"messages": ASK},
    "chat with a system message": {"messages": [{"role": "system", "content": "Answer in one word."}, *ASK]},
    "chat of several turns": {"messages": [*ASK, {"role": "assistant", "content": "Red, green, blue."}, {"role": "user", "content": "More?"}]},
    "chat that goes on": {"messages": [*ASK, {"role": "assistant", "content": "Red, gr"}], "continue_final_message": True},
    "seed": {"prompt": "My favourite animal is", "temperature": 1, "seed": 7, "max_tokens": 20},
    "large seed": {"prompt": "My favourite animal is", "temperature": 1, "seed": 2**63 + 5},
    "samples": {"prompt": "My favourite animal is", "temperature": 1, "seed": 3, "n": 3},
    "every way to draw": {"prompt": "Once upon a time", "temperature": 0.8, "top_p": 0.9, "top_k": 40, "min_p": 0.02, "seed": 11,
                          "repetition_penalty": 1.1, "frequency_penalty": 0.3, "presence_penalty": 0.2, "max_tokens": 30},
    "stop string": {"prompt": "1, 2, 3, 4,", "stop": ["never there", " 7"], "max_tokens": 40},
    "stop string kept": {"prompt": "1, 2, 3, 4,", "stop": [" 7"], "include_stop_str_in_output": True, "max_tokens": 40},
    "stop as one string": {"prompt": "1, 2, 3, 4,", "stop": "6", "max_tokens": 40},
    "sixteen stop strings": {"prompt": "1, 2, 3, 4,", "stop": [f"{i}," for i in range(7, 23)], "max_tokens": 40},
    "stop at an id": {"prompt": "1, 2, 3, 4,", "stop_token_ids": [28], "max_tokens": 40},
    "at least so many": {"prompt": "1, 2, 3, 4,", "stop": [" 5"], "min_tokens": 10, "max_tokens": 20},
    "behind the end": {"messages": ASK, "ignore_eos": True, "max_tokens": 60},
    "nothing": {"prompt": "The capital", "max_tokens": 0},
    "bias": {"prompt": "The capital of France is", "logit_bias": {"7042": -100, "260": 5}},
    "log-probabilities": {"prompt": "The capital of France is", "logprobs": 3},
    "chat log-probabilities": {"messages": ASK, "logprobs": 2},
    "log-probabilities of the chosen alone": {"messages": ASK, "logprobs": 0},
    "echo": {"prompt": "Once upon", "echo": True},
    "echo of samples": {"prompt": "Once upon", "echo": True, "n": 2, "seed": 5, "temperature": 1},
    "log-probabilities of the prompt": {"prompt": "The capital of France is Paris, a city", "logprobs": 3, "echo": True},
    "log-probabilities of the prompt alone": {"prompt": "The capital of France is Paris, a city", "logprobs": 1, "echo": True, "max_tokens": 0},
    "log-probabilities of the prompt and samples": {"prompt": "The capital of France is", "logprobs": 2, "echo": True, "n": 3, "seed": 2, "temperature": 1},
    "log-probabilities of ids": {"prompt": [504, 3575, 282, 4649, 314], "logprobs": 0, "echo": True},
    "log-probabilities of one token": {"prompt": [504], "logprobs": 2, "echo": True, "max_tokens": 1},
    "log-probabilities of a long prompt": {"prompt": LONG * 3, "logprobs": 1, "echo": True, "max_tokens": 2},
    "and of the end": {"prompt": "The capital", "logprobs": 1, "echo": True, "logit_bias": {"2": 100}},
    "ids": {"prompt": [504, 3575, 282, 4649, 314]},
    "special tokens in text": {"prompt": "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"},
    "unicode": {"prompt": "Ünïcödé 日本語 🎉 say it again: Ünïcödé 日本語 🎉 Ünïcödé", "max_tokens": 24},
    "chat unicode": {"messages": [{"role": "user", "content": "Translate 'good morning' to Japanese. 😀"}], "max_tokens": 30},
    "priority": {"prompt": "Go on", "priority": 5},
    "salt": {"prompt": "Go on", "cache_salt": "tenant"},
    "deadline in the answer": {"prompt": "Go on", "timeout_ms": 60000},
    "a quarter of the cache": {"prompt": LONG, "kv": {"policy": "snapkv", "budget": {"ratio": 0.25}}},
    "tokens a list": {"prompt": LONG, "kv": {"policy": "h2o", "budget": {"tokens": 128}}},
    "sinks and a window": {"prompt": LONG, "kv": {"policy": "streaming", "budget": {"tokens": 160}, "protect": {"sinks": 8, "recent": 32}}},
    "protected ranges": {"prompt": LONG, "kv": {"policy": "keydiff", "budget": {"ratio": 0.5}, "protect": {"ranges": [[3, 9], [40, 44]]}}},
    "parameters": {"prompt": LONG, "kv": {"policy": "snapkv", "budget": {"ratio": 0.5}, "params": {"window": 16}}},
    "whatever fits": {"prompt": LONG, "kv": {"policy": "auto", "budget": {"ratio": 0.5}}},
    "protected roles": {"messages": [{"role": "system", "content": LONG}, *ASK], "kv": {"policy": "snapkv", "budget": {"ratio": 0.9},
                                                                                        "protect": {"messages": [1]}}},
}
REFUSALS = {
    "another model": {"prompt": "x", "model": "gpt-9"},
    "too long": {"prompt": "word " * 9000},
    "no prompt": {"prompt": ""},
    "no such id": {"prompt": [10**6]},
    "temperature": {"prompt": "x", "temperature": 2.5},
    "negative temperature": {"prompt": "x", "temperature": -1},
    "top_p": {"prompt": "x", "top_p": 0},
    "top_p above one": {"prompt": "x", "top_p": 1.5},
    "top_k": {"prompt": "x", "top_k": -3},
    "min_p": {"prompt": "x", "min_p": 2},
    "repetition": {"prompt": "x", "repetition_penalty": 0},
    "frequency": {"prompt": "x", "frequency_penalty": -2.5},
    "presence": {"prompt": "x", "presence_penalty": 3},
    "negative length": {"prompt": "x", "max_tokens": -5},
    "least beyond most": {"prompt": "x", "min_tokens": 20, "max_tokens": 10},
    "no samples": {"prompt": "x", "n": 0},
    "too many samples": {"prompt": "x", "n": 129},
    "too many stops": {"prompt": "x", "stop": ["a"] * 17},
    "empty stop": {"prompt": "x", "stop": [""]},
    "long stop": {"prompt": "x", "stop": ["a" * 4097]},
    "stop id": {"prompt": "x", "stop_token_ids": [10**6]},
    "bias of no token": {"prompt": "x", "logit_bias": {"99999999": 1}},
    "bias too strong": {"prompt": "x", "logit_bias": {"5": 101}},
    "negative time": {"prompt": "x", "timeout_ms": -1},
    "two days": {"prompt": "x", "timeout_ms": 172800000},
    "no time at all": {"prompt": LONG, "timeout_ms": 1},
    "role": {"messages": [{"role": "wizard", "content": "x"}]},
    "only the template knows": {"messages": ASK, "continue_final_message": True},
    "policy": {"prompt": "x", "kv": {"policy": "no-such-policy"}},
    "ratio": {"prompt": "x", "kv": {"policy": "snapkv", "budget": {"ratio": 0}}},
    "bits": {"prompt": "x", "kv": {"policy": "full", "bits": {"key": 7}}},
    "parameter": {"prompt": "x", "kv": {"policy": "snapkv", "params": {"no_such": 1}}},
    "strategy": {"prompt": "x", "kv": {"policy": "polykv", "strategy": "none"}},
    "protected beyond the budget": {"prompt": LONG, "kv": {"policy": "snapkv", "budget": {"tokens": 64}, "protect": {"recent": 400}}},
}


@pytest.mark.parametrize("case", ANSWERS.values(), ids=ANSWERS)
def test_answers_are_the_same(transcripts, case):
    t = transcripts(case)
    assert "error" not in t["http"], t["http"]
    assert t["sse"] == t["http"]
    assert t["grpc"] == t["http"]


@pytest.mark.parametrize("case", REFUSALS.values(), ids=REFUSALS)
def test_refusals_are_the_same(transcripts, case):
    t = transcripts(case)
    assert "error" in t["http"], t["http"]
    assert t["sse"] == t["http"]
    if t["http"]["error"][0] == 408:  # each names its own kind of deadline
        assert t["grpc"]["error"][0] == 408
    else:
        assert t["grpc"] == t["http"]


def test_text_to_ids_and_back(server, protos):
    with grpc.insecure_channel(server.grpc) as channel:
        stub = protos.inference_grpc.InferenceStub(channel)
        for text in ("plain", "Ünïcödé 🎉", "<|im_start|>user", "", " \n\t"):
            for special in (False, True):
                a = httpx.post(server.url + "/tokenize", json={"text": text, "add_special": special, "parse_special": special}).json()
                b = stub.Tokenize(protos.inference.TokenizeRequest(text=text, add_special=special, parse_special=special))
                assert a["tokens"] == list(b.tokens) and a["count"] == len(b.tokens)
            assert httpx.post(server.url + "/detokenize", json={"tokens": a["tokens"]}).json()["text"] == stub.Detokenize(
                protos.inference.DetokenizeRequest(tokens=a["tokens"])).text
        models = httpx.get(server.url + "/v1/models").json()["data"]
        assert [(m["id"], m["max_model_len"], m["created"]) for m in models] == [
            (m.id, m.max_model_len, m.created) for m in stub.ListModels(protos.inference.ListModelsRequest()).models]
        policies = httpx.get(server.url + "/v1/kv/policies").json()["policies"]
        assert [p["name"] for p in policies] == [p.name for p in stub.ListKvPolicies(protos.inference.ListKvPoliciesRequest()).policies]


def test_cancel_is_idempotent_and_knows_both_protocols(server, protos):
    """Whoever started a request, both protocols cancel it, and a second cancel answers like the first."""
    endless = {"model": MODEL_NAME, "prompt": "Go on", "max_tokens": 8000, "ignore_eos": True}
    with grpc.insecure_channel(server.grpc) as channel:
        stub = protos.inference_grpc.InferenceStub(channel)

        def over_http(request_id):
            r = httpx.post(f"{server.url}/v1/requests/{request_id}/cancel")
            assert r.json() == {"id": request_id, "cancelled": True} if r.status_code == 200 else r.json()["error"]["message"]
            return {200: True, 404: False}[r.status_code]

        def over_grpc(request_id):
            return stub.Cancel(protos.inference.CancelRequest(request_id=request_id), timeout=20).found

        for name, cancels in (("first-http", [over_http, over_grpc, over_http]), ("first-grpc", [over_grpc, over_http, over_grpc])):
            with httpx.stream("POST", server.url + "/v1/completions", json={**endless, "stream": True}, headers={"X-Request-Id": name}, timeout=60) as r:
                lines = r.iter_lines()
                next(lines)
                assert [cancel(name) for cancel in cancels] == [True] * 3
                assert [line for line in lines][-2] == "data: [DONE]"
            assert [cancel(name) for cancel in cancels] == [True] * 3, "also when it is gone"
            ask = protos.inference.GenerateRequest(prompt="Go on", request_id=name, sampling={"max_tokens": 8000, "ignore_eos": True})
            call = stub.Generate(ask, timeout=60)
            next(call)
            assert [cancel(name) for cancel in cancels] == [True] * 3
            with pytest.raises(grpc.RpcError) as ended:
                list(call)
            assert ended.value.code() == grpc.StatusCode.CANCELLED
            assert [cancel(name) for cancel in cancels] == [True] * 3
            # The id now belongs to a request that ends by itself: there was nothing to cancel.
            assert httpx.post(server.url + "/v1/completions", json={**endless, "max_tokens": 2}, headers={"X-Request-Id": name}, timeout=60).status_code == 200
            assert [cancel(name) for cancel in cancels] == [False] * 3
        assert not over_http("never-there") and not over_grpc("never-there")
