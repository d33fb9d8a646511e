"""Who may ask, and how much: API keys and their limits over both protocols, web origins, the access log."""
import json
import re
import threading
import time

import grpc
import httpx
import openai
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from conftest import MODEL, MODEL_NAME, Server, run_cli

ALICE, BOB, CAROL = "sk-alice-0001", "sk-bob-0002", "sk-carol-0003"
SHORT = {"model": MODEL_NAME, "prompt": "Go on", "max_tokens": 2}
LONG = {**SHORT, "max_tokens": 8000, "ignore_eos": True, "stream": True}


def bearer(key):
    return {"Authorization": f"Bearer {key}"}


def complete(server, key, ask=SHORT):
    return httpx.post(server.url + "/v1/completions", json=ask, headers=bearer(key), timeout=60)


def eventually(check, seconds=10):
    end = time.monotonic() + seconds
    while not check():
        assert time.monotonic() < end, f"not within {seconds} s"
        time.sleep(0.05)


@pytest.fixture
def guarded(tmp_path):
    keys = tmp_path / "keys"
    keys.write_text(f"# team keys\nalice: {ALICE} max_requests=1\n\nbob:{BOB}\n")
    s = Server("--api-keys", keys, "--cors-origins", "https://app.example.org, http://localhost:3000", "--admin", "127.0.0.1:0")
    s.keys = keys
    yield s
    assert s.stop() == 0, s.log()


def test_every_route_but_health_needs_a_key(guarded):
    listed = httpx.get(guarded.url + "/nowhere", headers=bearer(ALICE)).json()["error"]["message"]
    routes = re.findall(r"(GET|POST) (/[^, ]*)", listed.split("; there are ")[1])
    assert len(routes) >= 11
    for method, path in [*routes, ("GET", "/nowhere"), ("OPTIONS", "/v1/models"), ("DELETE", "/v1/models")]:
        r = httpx.request(method, guarded.url + path.replace("{id}", "x"))
        if path == "/health":
            assert r.status_code == 200
            continue
        assert r.status_code == 401, (method, path)
        assert r.headers["www-authenticate"] == "Bearer" and r.json()["error"]["type"] == "authentication_error"
    for wrong in (f"Bearer {ALICE}x", f"Bearer {ALICE[:-1]}", "Bearer", f"Basic {ALICE}", ALICE):
        assert httpx.get(guarded.url + "/v1/models", headers={"Authorization": wrong}).status_code == 401, wrong
    assert httpx.get(guarded.url + "/v1/models", headers={"Authorization": f"bearer {ALICE}"}).status_code == 200
    with pytest.raises(openai.AuthenticationError):
        openai.OpenAI(base_url=guarded.url + "/v1", api_key="wrong-key", max_retries=0).models.list()
    assert guarded.metrics()['loupe_requests_rejected_total{reason="no_key"}'] > 15


def test_a_large_body_without_a_key_is_not_read(guarded):
    r = httpx.post(guarded.url + "/v1/completions", content=b"x" * (8 << 20), timeout=30)
    assert r.status_code == 401


def test_grpc_needs_a_key(guarded, protos):
    service = protos.inference.DESCRIPTOR.services_by_name["Inference"]
    with grpc.insecure_channel(guarded.grpc) as channel:
        assert health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest()).status == health_pb2.HealthCheckResponse.SERVING
        stub = protos.inference_grpc.InferenceStub(channel)
        for method in service.methods:
            request = getattr(protos.inference, method.input_type.name)()
            for metadata in ((), (("authorization", "Bearer wrong-key"),)):
                with pytest.raises(grpc.RpcError) as caught:
                    answer = getattr(stub, method.name)(request, metadata=metadata, timeout=20)
                    list(answer) if method.server_streaming else None
                assert caught.value.code() == grpc.StatusCode.UNAUTHENTICATED, method.name
        ask = protos.inference.GenerateRequest(prompt="Go on", sampling=protos.inference.Sampling(max_tokens=2))
        assert list(stub.Generate(ask, metadata=[("authorization", f"Bearer {BOB}")]))[-1].finished.usage.completion_tokens == 2


def test_one_log_line_a_request_names_the_key(guarded, protos):
    assert complete(guarded, BOB).status_code == 200
    with grpc.insecure_channel(guarded.grpc) as channel:
        ask = protos.inference.GenerateRequest(prompt="Go on", sampling=protos.inference.Sampling(max_tokens=2), request_id="over-grpc")
        stub = protos.inference_grpc.InferenceStub(channel)
        list(stub.Generate(ask, metadata=[("authorization", f"Bearer {ALICE}")]))
        stub.Tokenize(protos.inference.TokenizeRequest(text="x"), metadata=[("authorization", f"Bearer {ALICE}")])
        health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest())

    def lines(field="policy"):
        return [x for x in map(json.loads, guarded.log().splitlines()) if x["msg"] == "request" and field in x]
    eventually(lambda: len(lines("status")) == 3)
    [unary] = [x for x in lines("status") if x["method"] == "Tokenize"]
    assert (unary["key"], unary["status"]) == ("alice", "OK") and unary["duration_s"] >= 0
    eventually(lambda: len(lines()) == 2)
    http, over_grpc = sorted(lines(), key=lambda x: "protocol" in x)
    assert http["key"] == "bob" and http["status"] == 200 and http["path"] == "/v1/completions"
    assert over_grpc["key"] == "alice" and over_grpc["status"] == "OK" and over_grpc["request_id"] == "over-grpc"
    for line in (http, over_grpc):
        assert line["prompt_tokens"] == 2 and line["completion_tokens"] == 2 and line["policy"] == "full" and line["request_id"]
        assert line["duration_s"] >= line["first_token_s"] >= line["prefill_s"] > 0 and line["queue_s"] >= 0
    assert ALICE not in guarded.log() and BOB not in guarded.log()


def test_keys_are_read_again(guarded):
    guarded.keys.write_text(f"alice: {ALICE}\ncarol: {CAROL}\n")
    eventually(lambda: httpx.get(guarded.url + "/v1/models", headers=bearer(CAROL)).status_code == 200)
    assert httpx.get(guarded.url + "/v1/models", headers=bearer(BOB)).status_code == 401
    guarded.keys.write_text("dave: \n")
    eventually(lambda: httpx.get(guarded.url + "/v1/models", headers=bearer(CAROL)).status_code == 200 and "stay as they were" in guarded.log())
    guarded.keys.unlink()
    time.sleep(1.2)
    assert httpx.get(guarded.url + "/v1/models", headers=bearer(CAROL)).status_code == 200
    assert CAROL not in guarded.log()


def test_a_key_has_so_many_requests_at_a_time(guarded, protos):
    with httpx.stream("POST", guarded.url + "/v1/completions", json=LONG, headers=bearer(ALICE), timeout=60) as running:
        lines = running.iter_lines()  # closed with its stream when it goes
        next(lines)
        r = complete(guarded, ALICE)
        assert r.status_code == 429 and int(r.headers["retry-after"]) >= 1
        assert "alice" in r.text and "limit is 1" in r.text and r.json()["error"]["type"] == "rate_limit_error"
        assert complete(guarded, BOB).status_code == 200
        assert httpx.get(guarded.url + "/v1/models", headers=bearer(ALICE)).status_code == 200, "only generation is limited"
        with grpc.insecure_channel(guarded.grpc) as channel, pytest.raises(grpc.RpcError) as caught:
            list(protos.inference_grpc.InferenceStub(channel).Generate(protos.inference.GenerateRequest(prompt="x"),
                                                                       metadata=[("authorization", f"Bearer {ALICE}")]))
        assert caught.value.code() == grpc.StatusCode.RESOURCE_EXHAUSTED
        assert int(dict(caught.value.trailing_metadata())["grpc-retry-pushback-ms"]) >= 1000
    eventually(lambda: complete(guarded, ALICE).status_code == 200)
    assert guarded.metrics()['loupe_requests_rejected_total{reason="key_limit"}'] >= 2


def test_a_key_has_so_much_cache_a_minute(guarded):
    guarded.keys.write_text(f"alice: {ALICE} kv_byte_seconds=1000\nbob: {BOB} kv_byte_seconds=1000\ncarol: {CAROL} kv_byte_seconds=1000000000000\n")
    eventually(lambda: httpx.get(guarded.url + "/v1/models", headers=bearer(CAROL)).status_code == 200)
    assert complete(guarded, ALICE).status_code == 200, "what a request costs is known at its end"
    r = complete(guarded, ALICE)
    assert r.status_code == 429 and "byte-seconds" in r.text and "1000 a minute" in r.text
    assert 1 <= int(r.headers["retry-after"]) <= 120
    # Who leaves early pays as well.
    with httpx.stream("POST", guarded.url + "/v1/completions", json=LONG, headers=bearer(BOB), timeout=60) as running:
        next(running.iter_lines())
    guarded.wait_idle()
    assert complete(guarded, BOB).status_code == 429
    assert complete(guarded, CAROL).status_code == complete(guarded, CAROL).status_code == 200


@pytest.mark.parametrize("text, why", [
    ("", "holds no key"), ("# nothing\n", "holds no key"), ("alice\n", "line 1: has no colon"), ("alice:\n", "line 1: 'alice' has no key"),
    ("a: long-enough\nb: short\n", "line 2: the key of 'b' must have 8"), ("a: same-key-1\nb: same-key-1\n", "'b' has the key of 'a'"), ("a: one-key-1\na: two-key-2\n", "stands twice"),
    ("a: some-key-1 max_requests=0\n", "max_requests=N"), ("a: some-key-1 quota=3\n", "max_requests=N"), (": some-key-1\n", "the name must have"),
])
def test_key_files_that_are_wrong(tmp_path, text, why):
    path = tmp_path / "keys"
    path.write_text(text)
    r = run_cli("serve", "--model", MODEL, "--api-keys", path, "--http", "127.0.0.1:0", "--grpc", "127.0.0.1:0", "--management", "127.0.0.1:0")
    assert r.returncode == 2 and why in r.stderr, r.stderr
    assert "same-key" not in r.stderr and "some-key" not in r.stderr


def test_a_key_file_that_is_not_there(tmp_path):
    r = run_cli("serve", "--model", MODEL, "--api-keys", tmp_path / "none")
    assert r.returncode == 2 and "No such file" in r.stderr, r.stderr


def test_web_pages_of_listed_origins_may_call(guarded):
    url, app = guarded.url + "/v1/chat/completions", "https://app.example.org"
    ask_first = {"Origin": app, "Access-Control-Request-Method": "POST", "Access-Control-Request-Headers": "authorization,content-type"}
    r = httpx.options(url, headers=ask_first)
    assert r.status_code == 204 and r.headers["access-control-allow-origin"] == app and "POST" in r.headers["access-control-allow-methods"]
    assert "authorization" in r.headers["access-control-allow-headers"].lower() and r.headers["vary"] == "Origin"
    r = httpx.get(guarded.url + "/v1/models", headers={"Origin": app, **bearer(BOB)})
    assert r.status_code == 200 and r.headers["access-control-allow-origin"] == app
    assert "X-Request-Id" in r.headers["access-control-expose-headers"]
    r = httpx.get(guarded.url + "/v1/models", headers={"Origin": app})
    assert r.status_code == 401 and r.headers["access-control-allow-origin"] == app, "a page may read why it was refused"
    for other in ("https://evil.example.org", "https://app.example.org.evil.com", "null"):
        r = httpx.options(url, headers={**ask_first, "Origin": other})
        assert "access-control-allow-origin" not in r.headers, other
    with httpx.stream("POST", url, headers={"Origin": app, **bearer(BOB)}, timeout=60,
                      json={"messages": [{"role": "user", "content": "hi"}], "max_tokens": 2, "stream": True}) as stream:
        assert stream.headers["access-control-allow-origin"] == app


def test_without_origins_no_page_may_call(server):
    r = httpx.get(server.url + "/v1/models", headers={"Origin": "https://app.example.org"})
    assert r.status_code == 200 and not [h for h in r.headers if h.startswith("access-control")]
    r = run_cli("serve", "--model", MODEL, "--cors-origins", "https://app.example.org/path")
    assert r.returncode == 2 and "is no origin" in r.stderr


def test_retry_after_grows_with_the_queue(protos):
    """R48: the wait that a full queue asks for follows from the rate at which requests end."""
    s = Server("--max-sequences", "1", "--max-queue", "8")
    slow = {**SHORT, "max_tokens": 60, "ignore_eos": True}
    try:
        start = time.monotonic()
        for _ in range(2):
            assert complete(s, "none", slow).status_code == 200
        each = (time.monotonic() - start) / 2
        running = []
        for _ in range(12):  # two or three of them find the queue full
            t = threading.Thread(target=complete, args=(s, "none", slow))
            t.start()
            running.append(t)
        eventually(lambda: s.metrics()["loupe_requests_waiting"] == 8, 20)
        r = complete(s, "none")
        assert r.status_code == 429, r.text
        assert 1 <= int(r.headers["retry-after"]) <= max(2, 8 * each * 3), (r.headers["retry-after"], each)
        with grpc.insecure_channel(s.grpc) as channel, pytest.raises(grpc.RpcError) as caught:
            list(protos.inference_grpc.InferenceStub(channel).Generate(protos.inference.GenerateRequest(prompt="x")))
        assert abs(int(dict(caught.value.trailing_metadata())["grpc-retry-pushback-ms"]) - 1000 * int(r.headers["retry-after"])) <= 3000
        for t in running:
            t.join(120)
    finally:
        assert s.stop() == 0
