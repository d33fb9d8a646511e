"""What broke other servers, by the ids of the project's list of real cases (families B, C and D). Cases that concern the engine
alone are tested below tests/sim; those of features that do not exist are refused by name."""
import collections
import concurrent.futures
import json
import os
import random
import re
import signal
import socket
import threading
import time

import grpc
import httpx
import pytest
from openai.types import Completion
from openai.types.chat import ChatCompletion, ChatCompletionChunk

from conftest import MODEL_NAME, Server, resident_bytes

FULL = os.environ.get("LOUPE_TEST_FULL") == "1"
ASK = [{"role": "user", "content": "What is the capital of France?"}]
FOREVER = {"model": MODEL_NAME, "prompt": "Go on", "max_tokens": 8000, "ignore_eos": True}


def complete(server, **ask):
    return httpx.post(server.url + "/v1/completions", json={"model": MODEL_NAME, "temperature": 0, **ask}, timeout=120)


def frames(server, path, **ask):
    with httpx.stream("POST", server.url + path, json={"model": MODEL_NAME, "stream": True, **ask}, timeout=120) as r:
        assert r.status_code == 200, r.read()
        lines = [line for line in r.iter_lines() if line]
    assert lines[-1] == "data: [DONE]" and all(line.startswith(("data: ", ":")) for line in lines)
    return [json.loads(line[6:]) for line in lines[:-1] if line.startswith("data: ")]


def streamed_text(server, **ask):
    return "".join(c["text"] for f in frames(server, "/v1/completions", temperature=ask.pop("temperature", 0), **ask) for c in f["choices"])


def running(server, count, timeout=20):
    end = time.monotonic() + timeout
    while server.metrics()["loupe_requests_running"] != count:
        assert time.monotonic() < end
        time.sleep(0.02)


@pytest.fixture(scope="module")
def single():
    """A server that computes one request at a time."""
    s = Server("--max-sequences", "1", "--max-queue", "16")
    yield s
    assert s.stop() == 0, s.log()


def preemptions(server):
    """Their log lines."""
    return [line for line in map(json.loads, server.log().splitlines()) if line["msg"] == "preempted"]


def test_r39_nobody_is_preempted_without_end():
    """Requests that grow far beyond what their admission saw, in a cache that holds a third of them."""
    s = Server("--kv-device-bytes", "24MiB", "--max-sequences", "8")
    try:
        asks = [dict(prompt=f"Story {i}:", max_tokens=200, ignore_eos=True, seed=i) for i in range(16)]
        with concurrent.futures.ThreadPoolExecutor(16) as pool:
            answers = list(pool.map(lambda ask: complete(s, **ask), asks))
        assert all(a.status_code == 200 and a.json()["usage"]["completion_tokens"] == 200 for a in answers)
        counts = collections.Counter(line["request_id"] for line in preemptions(s))
        m = s.wait_idle()
        assert counts and sum(counts.values()) == m['loupe_preemptions_total{kind="recompute"}']
        assert max(counts.values()) <= 6, counts
        again = sum(v for k, v in m.items() if k.startswith("loupe_prompt_tokens_total") and 'source="recomputed"' in k)
        assert again < 16 * 200, f"{again} tokens were computed again for the 3200 of all answers"
        assert resident_bytes(m) == 0
    finally:
        assert s.stop() == 0, s.log()


def test_r80_a_preemption_says_who_what_and_why(single):
    before = len(preemptions(single))
    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        low = pool.submit(httpx.post, single.url + "/v1/completions", headers={"X-Request-Id": "victim"}, timeout=60,
                          json={**FOREVER, "max_tokens": 150, "priority": -2, "temperature": 0})
        running(single, 1)
        time.sleep(0.3)
        assert complete(single, prompt="x", max_tokens=2, priority=1).status_code == 200
        assert low.result().json()["usage"]["completion_tokens"] == 150
    [line] = preemptions(single)[before:]
    assert line["request_id"].startswith("victim/") and line["cause"] == "priority" and line["priority"] == -2 and line["sample"] == 0
    assert line["tokens"] > 0 and line["bytes"] >= line["tokens"] * 90 * 64 * 2 * 2, line  # 90 lists of keys and values, 2 bytes a number at least


def test_r41_the_higher_priority_goes_first(single):
    ends = []

    def ask(name, priority):
        assert complete(single, prompt="Go on", max_tokens=30, priority=priority).status_code == 200
        ends.append(name)

    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        blocker = pool.submit(complete, single, prompt="Go on", max_tokens=120, ignore_eos=True)
        running(single, 1)
        jobs = []
        for name, priority in (("low", -1), ("plain", 0), ("high", 3)):
            jobs.append(pool.submit(ask, name, priority))
            time.sleep(0.1)
        for job in [blocker, *jobs]:
            job.result()
    assert ends == ["high", "plain", "low"]


def test_r44_a_huge_prompt_costs_nothing(server):
    before = server.metrics()["process_resident_memory_bytes"]
    for prompt in ("word " * 800_000, [1] * 2_000_000):
        start = time.monotonic()
        r = complete(server, prompt=prompt, max_tokens=1)
        assert r.status_code == 400 and r.json()["error"]["code"] == "context_length_exceeded" and "8192" in r.text
        assert time.monotonic() - start < 10
    assert server.metrics()["process_resident_memory_bytes"] - before < 300e6


def test_r45_log_probabilities_have_a_cap(server):
    assert complete(server, prompt="x", logprobs=21).json()["error"]["param"] == "logprobs"
    assert complete(server, prompt="x", prompt_logprobs=21).json()["error"]["param"] == "prompt_logprobs"
    full = [500 + i % 3000 for i in range(8192)]
    assert complete(server, prompt=full, max_tokens=0).status_code == 200  # the cache's memory has been used before
    before = server.metrics()["process_resident_memory_bytes"]
    # 128 prompts of 500 tokens with 20 alternatives each are refused by their numbers, before anything is computed.
    r = complete(server, prompt=[[i + 1] * 500 for i in range(128)], prompt_logprobs=20, max_tokens=0)
    assert r.status_code == 400 and r.json()["error"]["param"] == "prompt_logprobs" and "1344000" in r.text and "1048576" in r.text
    # A prompt that fills the context, with all there is to ask.
    r = complete(server, prompt=full, prompt_logprobs=20, logprobs=20, echo=True, max_tokens=0)
    [choice] = r.json()["choices"]
    assert len(choice["prompt_logprobs"]) == len(choice["logprobs"]["tokens"]) == 8192
    assert server.metrics()["process_resident_memory_bytes"] - before < 300e6, "logits are held a block at a time"
    r = complete(server, prompt="x", logprobs=20, max_tokens=60, ignore_eos=True, n=3, seed=1)
    assert all(len(c["logprobs"]["top_logprobs"]) == 60 for c in r.json()["choices"])


def test_r49_a_deadline_covers_the_queue(single):
    with httpx.stream("POST", single.url + "/v1/completions", json={**FOREVER, "stream": True}, timeout=60) as blocker:
        lines = blocker.iter_lines()  # closed with its stream when it goes
        next(lines)
        start = time.monotonic()
        r = complete(single, prompt="x", timeout_ms=300)
        assert r.status_code == 408 and 0.25 < time.monotonic() - start < 2
    single.wait_idle()


def test_r51_a_stop_drops_nothing():
    s = Server("--drain-propagation-s", "2", "--drain-max-s", "60", "--max-sequences", "1")
    ask = dict(max_tokens=400, ignore_eos=True)
    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        streams = [pool.submit(streamed_text, s, prompt=f"Story {i}:", **ask) for i in range(2)]  # one runs, one waits
        while s.metrics()["loupe_requests_waiting"] != 1:
            time.sleep(0.01)
        s.process.send_signal(signal.SIGTERM)
        start = time.monotonic()
        end = start + 10
        while httpx.get(s.management + "/readyz").status_code != 503:
            assert time.monotonic() < end, "routers must learn first"
            time.sleep(0.01)
        late = pool.submit(complete, s, prompt="late, but the router did not know", max_tokens=2)
        while time.monotonic() - start < 2.5:
            assert httpx.get(s.management + "/livez").status_code == 200, "alive while it drains"
            time.sleep(0.1)
        try:
            r = complete(s, prompt="too late", max_tokens=2)
            assert r.status_code == 503 and int(r.headers["retry-after"]) >= 1
        except httpx.TransportError:
            assert s.process.poll() is not None or all(f.done() for f in streams), "whoever is refused while others run is told so"
        assert late.result().status_code == 200
        texts = [f.result() for f in streams]
    assert s.process.wait(60) == 0
    again = Server("--max-sequences", "1")
    try:
        assert texts == [complete(again, prompt=f"Story {i}:", **ask).json()["choices"][0]["text"] for i in range(2)], "to the last token"
    finally:
        assert again.stop() == 0


STAGES = ["upload", "queue", "prefill", "decode", "full socket buffer"]


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
def test_r52_who_leaves_is_noticed(single, stage, stream):
    ask = {**FOREVER, "stream": stream}
    if stage == "prefill":
        ask["prompt"] = [1000 + i % 3000 for i in range(6000)]
        ask["max_tokens"] = 1000
    if stage == "full socket buffer":
        ask["logprobs"] = 20
    body = json.dumps(ask).encode()
    blocker = None
    if stage == "queue":
        blocker = socket.create_connection(("127.0.0.1", single.http_port))
        post(blocker, json.dumps({**FOREVER, "stream": True}).encode())
        running(single, 1)
    s = socket.create_connection(("127.0.0.1", single.http_port))
    if stage == "full socket buffer":
        s.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    post(s, body[: len(body) // 2] if stage == "upload" else body, len(body))
    counts = {"upload": (0, 0), "queue": (1, 1)}.get(stage, (1, 0))
    end = time.monotonic() + 20
    while counts != ((m := single.metrics())["loupe_requests_running"], m["loupe_requests_waiting"]):
        assert time.monotonic() < end, m
        time.sleep(0.02)
    time.sleep({"full socket buffer": 4, "decode": 0.8}.get(stage, 0))
    s.close()
    start = time.monotonic()
    if stage == "queue":
        while single.metrics()["loupe_requests_waiting"] > 0:
            assert time.monotonic() - start < 20
        blocker.close()
    assert resident_bytes(single.wait_idle(20)) == 0
    assert complete(single, prompt="x", max_tokens=1).status_code == 200


def post(s, body, length=None):
    s.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n" % (length or len(body)) + body)


def test_r55_probes_answer_while_the_step_is_busy(server):
    done = threading.Event()

    def load(i):
        while not done.is_set():
            complete(server, prompt=[500 + (7 * i + j) % 4000 for j in range(700)], max_tokens=8, ignore_eos=True)

    threads = [threading.Thread(target=load, args=(i,)) for i in range(8)]
    for t in threads:
        t.start()
    try:
        waits = []
        with httpx.Client() as probe:
            time.sleep(0.5)
            for i in range(400 if FULL else 100):
                url = (server.management + "/livez", server.management + "/readyz", server.url + "/health")[i % 3]
                start = time.monotonic()
                assert probe.get(url).status_code == 200
                waits.append(time.monotonic() - start)
                time.sleep(0.01)
    finally:
        done.set()
        for t in threads:
            t.join(120)
    waits.sort()
    # The machine of CI has two cores and other work; the figure proper (p99 below 50 ms) is that of a quiet one.
    assert waits[len(waits) * 99 // 100 if FULL else len(waits) // 2] < 0.05, waits[-5:]


def test_r56_pings_of_a_waiting_client_are_welcome(single, protos):
    options = [("grpc.keepalive_time_ms", 200), ("grpc.keepalive_timeout_ms", 5000), ("grpc.keepalive_permit_without_calls", 1),
               ("grpc.http2.max_pings_without_data", 0)]
    with httpx.stream("POST", single.url + "/v1/completions", json={**FOREVER, "stream": True}, timeout=60) as blocker:
        lines = blocker.iter_lines()  # closed with its stream when it goes
        next(lines)
        with grpc.insecure_channel(single.grpc, options) as channel:
            stub = protos.inference_grpc.InferenceStub(channel)
            ask = protos.inference.GenerateRequest(prompt="x", sampling=protos.inference.Sampling(max_tokens=3, ignore_eos=True))
            waiting = stub.Generate(ask, timeout=60)
            time.sleep(20 if FULL else 4)  # 20 pings without a byte of data
            blocker.close()
            assert list(waiting)[-1].finished.usage.completion_tokens == 3
            time.sleep(2)  # and between calls
            assert list(stub.Generate(ask, timeout=60))[-1].finished.usage.completion_tokens == 3


def test_r57_no_part_of_a_stop_string_is_sent(server):
    ask = dict(prompt="Count: one, two, three, four,", max_tokens=40, ignore_eos=True)
    r = complete(server, **ask, return_token_ids=True).json()["choices"][0]
    text = r["text"]
    pieces = [httpx.post(server.url + "/detokenize", json={"tokens": [t]}).json()["text"] for t in r["token_ids"]]
    rng = random.Random(3)
    tried = 0
    for i in range(1, len(pieces) - 3):
        before = len("".join(pieces[:i]))
        first, middle, last = pieces[i], pieces[i + 1], pieces[i + 2]
        a, b = rng.randint(0, max(0, len(first) - 1)), rng.randint(1, len(last))
        stop = first[a:] + middle + last[:b]  # begins in one token, ends two later
        if text.find(stop) != before + a or tried == (30 if FULL else 6):
            continue
        tried += 1
        for kept in (False, True):
            expected = text[: before + a] + (stop if kept else "")
            more = dict(stop=[stop, "never there"], include_stop_str_in_output=kept)
            assert complete(server, **ask, **more).json()["choices"][0]["text"] == expected
            assert streamed_text(server, **ask, **more) == expected
    assert tried >= 5


def test_r58_nothing_comes_after_a_stop(server, protos):
    """Ids in, ids out: stop ids hold where no text is looked at, and with text nothing behind the stop is sent."""
    ids = httpx.post(server.url + "/tokenize", json={"text": "Count: one, two, three, four,"}).json()["tokens"]
    free = complete(server, prompt=ids, max_tokens=24, ignore_eos=True, return_token_ids=True).json()["choices"][0]["token_ids"]
    at = next(i for i in range(4, 24) if free[i] not in free[:i])
    with grpc.insecure_channel(server.grpc) as channel:
        stub = protos.inference_grpc.InferenceStub(channel)
        for kept in (False, True):
            ask = dict(prompt=ids, max_tokens=24, ignore_eos=True, return_token_ids=True, stop_token_ids=[free[at]], include_stop_str_in_output=kept)
            want = free[: at + kept]
            whole = complete(server, **ask).json()["choices"][0]
            assert whole["token_ids"] == want and whole["finish_reason"] == "stop" and whole["stop_reason"] == free[at]
            assert whole["text"] == httpx.post(server.url + "/detokenize", json={"tokens": want}).json()["text"]
            streamed, ended = [], False
            for f in frames(server, "/v1/completions", temperature=0, **ask):
                for c in f["choices"]:
                    assert not ended, "a frame behind the end"
                    streamed += c.get("token_ids", [])
                    ended = c["finish_reason"] is not None
            assert streamed == want
            message = protos.inference.GenerateRequest(prompt_token_ids={"ids": ids}, sampling={
                "temperature": 0, "max_tokens": 24, "ignore_eos": True, "stop_token_ids": [free[at]], "include_stop_str_in_output": kept})
            events = list(stub.Generate(message, timeout=60))
            assert [t for e in events if e.HasField("delta") for t in e.delta.token_ids] == want
            assert events[-1].finished.stop_reason == str(free[at])


def test_r59_bytes_make_up_the_text(server):
    messages = [{"role": "user", "content": "Repeat exactly: 😀🎉 日本語 Ünïcödé 👩‍👩‍👧"}]
    for seed in range(20 if FULL else 3):
        ask = dict(messages=messages, max_tokens=40, logprobs=True, top_logprobs=2, temperature=1.2, seed=seed)
        c = httpx.post(server.url + "/v1/chat/completions", json={"model": MODEL_NAME, **ask}, timeout=60).json()["choices"][0]
        exact = b"".join(bytes(t["bytes"]) for t in c["logprobs"]["content"])
        assert exact.decode(errors="replace").startswith(c["message"]["content"]) or exact.decode(errors="replace") == c["message"]["content"]
        content, pieces = "", b""
        for f in frames(server, "/v1/chat/completions", **ask):
            content += f["choices"][0]["delta"].get("content", "")
            pieces += b"".join(bytes(t["bytes"]) for t in (f["choices"][0]["logprobs"] or {"content": []})["content"])
        assert pieces == exact and content == c["message"]["content"]


def test_r61_detokenising_is_linear(server):
    rng = random.Random(1)
    ids = [rng.randrange(49000) for _ in range(100_000)]

    def seconds(count):
        best = 9e9
        for _ in range(3):
            start = time.monotonic()
            assert httpx.post(server.url + "/detokenize", json={"tokens": ids[:count]}, timeout=60).status_code == 200
            best = min(best, time.monotonic() - start)
        return best

    quarter, whole = seconds(25_000), seconds(100_000)
    assert whole < 8 * quarter + 0.05, (quarter, whole)


def test_r64_every_frame_is_what_the_official_types_say(server):
    options = {"include_usage": True, "continuous_usage_stats": True}
    chat = frames(server, "/v1/chat/completions", messages=ASK, max_tokens=12, logprobs=True, top_logprobs=2, n=2, seed=4, stream_options=options)
    for f in chat:
        chunk = ChatCompletionChunk.model_validate(f, strict=True)
        assert "choices" in f and chunk.object == "chat.completion.chunk"
        assert chunk.usage.total_tokens == chunk.usage.prompt_tokens + chunk.usage.completion_tokens, "usage goes along"
    assert chat[-1]["choices"] == [] and chat[-1]["usage"]["kv"]
    assert [f["usage"]["completion_tokens"] for f in chat] == sorted(f["usage"]["completion_tokens"] for f in chat)
    plain = frames(server, "/v1/chat/completions", messages=ASK, max_tokens=5, stream_options={"include_usage": True})
    assert all(f["usage"] is None for f in plain[:-1]) and plain[-1]["choices"] == []
    assert plain[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert plain[-2]["choices"][0]["finish_reason"] and plain[-2]["choices"][0]["delta"] == {}
    assert all("usage" not in f for f in frames(server, "/v1/chat/completions", messages=ASK, max_tokens=5))
    for f in frames(server, "/v1/completions", prompt="x", max_tokens=5, logprobs=1, echo=False, stream_options={"include_usage": True}):
        if f["choices"] and f["choices"][0]["finish_reason"] is None:
            f["choices"][0]["finish_reason"] = "stop"  # the type has no room for null, which OpenAI sends all the same
        Completion.model_validate(f, strict=True)
    whole = httpx.post(server.url + "/v1/chat/completions", json={"messages": ASK, "max_tokens": 5, "logprobs": True}, timeout=60).json()
    ChatCompletion.model_validate(whole, strict=True)


@pytest.mark.parametrize("calls, path", [
    ("text", "messages[1].tool_calls"), ([1], "messages[1].tool_calls[0].function"), ([{"function": {}}], "messages[1].tool_calls[0].function.name"),
    ([{"function": {"name": "f", "arguments": "{broken"}}], "messages[1].tool_calls[0].function.arguments"),
])
def test_r67_broken_histories_are_named_by_path(server, calls, path):
    messages = [*ASK, {"role": "assistant", "tool_calls": calls}, {"role": "tool", "content": "x", "tool_call_id": "1"}]
    r = httpx.post(server.url + "/v1/chat/completions", json={"messages": messages})
    assert r.status_code == 400 and r.json()["error"]["param"] == path, r.text


@pytest.mark.parametrize("field, value", [("grammar", "root ::= ("), ("functions", [{"name": "f"}]), ("stop_regex", "a+"), ("guided_json", {})])
def test_r70_what_is_not_offered_is_refused_by_name(server, field, value):
    r = httpx.post(server.url + "/v1/chat/completions", json={"messages": ASK, field: value})
    assert r.status_code == 400 and r.json()["error"]["param"] == field


TRANSCRIPTS = {
    "/v1/completions": ({"prompt": "1, 2, 3, 4,", "stop": [" 7"], "max_tokens": 40}, """\
data: {"id":"cmpl-r74","object":"text_completion","created":0,"model":"MODEL","choices":[{"index":0,"text":TEXT,"logprobs":null,"finish_reason":null}]}
data: {"id":"cmpl-r74","object":"text_completion","created":0,"model":"MODEL","choices":[{"index":0,"text":"","logprobs":null,"finish_reason":"stop","stop_reason":" 7"}]}
data: [DONE]
"""),
    "/v1/chat/completions": ({"messages": [{"role": "user", "content": "Count: 1, 2, 3, 4,"}], "continue_final_message": False, "stop": ["5"], "max_tokens": 40,
                              "logit_bias": {"37": 100}}, """\
data: {"id":"chatcmpl-r74","object":"chat.completion.chunk","created":0,"model":"MODEL","choices":[{"index":0,"delta":{"role":"assistant","content":""},"logprobs":null,"finish_reason":null}]}
data: {"id":"chatcmpl-r74","object":"chat.completion.chunk","created":0,"model":"MODEL","choices":[{"index":0,"delta":{},"logprobs":null,"finish_reason":"stop","stop_reason":"5"}]}
data: [DONE]
"""),
}


@pytest.mark.parametrize("path", TRANSCRIPTS)
def test_r74_a_stream_says_which_stop_it_was(server, path):
    """The bytes of whole streams, as recorded; only the time is put to 0, and text that may come in more pieces into one."""
    ask, want = TRANSCRIPTS[path]
    with httpx.stream("POST", server.url + path, headers={"X-Request-Id": "r74"}, timeout=60,
                      json={"model": MODEL_NAME, "temperature": 0, "stream": True, **ask}) as r:
        assert r.headers["content-type"] == "text/event-stream; charset=utf-8"
        body = b"".join(r.iter_raw()).decode()
    assert body.endswith("data: [DONE]\n\n") and all(line == "" for line in body.split("\n")[1::2])
    lines = [re.sub(r'"created":\d+', '"created":0', line) for line in body.split("\n") if line]
    pieces = [line for line in lines[:-2] if '"text":' in line]
    text = "".join(json.loads(line[6:])["choices"][0]["text"] for line in pieces)
    if pieces:
        assert text == " 5, 6,"
        lines = [re.sub(r'"text":"[^"]*"', f'"text":{json.dumps(text)}', pieces[0]), *lines[len(pieces):]]
    assert "\n".join(lines) + "\n" == want.replace("MODEL", MODEL_NAME).replace("TEXT", json.dumps(text))


def test_r75_a_conversation_brings_its_own_specials(server):
    prompt = httpx.post(server.url + "/apply-template", json={"messages": ASK, "add_generation_prompt": True}).json()["prompt"]
    count = httpx.post(server.url + "/tokenize", json={"text": prompt, "parse_special": True, "add_special": False}).json()["count"]
    r = httpx.post(server.url + "/v1/chat/completions", json={"messages": ASK, "max_tokens": 1}, timeout=60).json()
    assert r["usage"]["prompt_tokens"] == count and prompt.endswith("<|im_start|>assistant\n")


def test_r76_a_template_that_fails_is_the_requests_error(tmp_path):
    template = tmp_path / "chat.jinja"
    template.write_text("{% if messages[0].role == 'system' %}{{ raise_exception('no system here') }}{% endif %}"
                        "{% if rows is defined %}{% for k, v in rows.items() %}{{ k }}{% endfor %}{% endif %}{{ messages[0].content }}")
    s = Server("--chat-template", template)
    try:
        def ask(messages, **more):
            return httpx.post(s.url + "/v1/chat/completions", json={"messages": messages, "max_tokens": 2, **more}, timeout=60)
        assert ask(ASK).status_code == 200
        for r in (ask([{"role": "system", "content": "x"}]), ask(ASK, chat_template_kwargs={"rows": "text has no items"})):
            assert r.status_code == 400 and r.json()["error"]["param"] == "messages", r.text
        assert "no system here" in ask([{"role": "system", "content": "x"}]).text
        assert ask(ASK).status_code == 200
    finally:
        assert s.stop() == 0


def test_r79_refusals_are_counted_by_cause_from_the_start(server):
    m = server.metrics()
    for reason in ("invalid", "too_long", "queue_full", "kv_exhausted", "loading", "draining", "no_key", "key_limit"):
        assert f'loupe_requests_rejected_total{{reason="{reason}"}}' in m


ALPHABETS = ["plain words and 123", "äöüßéèçñ", "日本語中文한국어", "😀🎉👩‍👩‍👧🇫🇷", "אבג عربي", "\u0301\u200d\u00ad", "𝔘𝔫𝔦𝔠𝔬𝔡𝔢", "\\\"'{}[]<>&%\n\t"]


def test_streamed_text_is_the_whole_text(server):
    """Random Unicode prompts, drawn hot so that broken characters and byte tokens come too."""
    rng = random.Random(17)
    count = 500 if FULL else 16

    def check(i):
        prompt = "".join(rng.choice(rng.choice(ALPHABETS)) for _ in range(rng.randint(1, 60)))
        ask = dict(prompt=prompt, max_tokens=24, temperature=1.5, seed=i, ignore_eos=True, echo=i % 3 == 0)
        whole = complete(server, **ask).json()["choices"][0]["text"]
        assert streamed_text(server, **ask) == whole, (i, prompt)

    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        list(pool.map(check, range(count)))
