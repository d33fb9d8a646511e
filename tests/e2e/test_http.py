"""HTTP as curl speaks it: routes, statuses, framing, bad bodies."""
import json
import socket
import subprocess

import httpx
import pytest

from conftest import MODEL_NAME


@pytest.fixture
def http(server):
    with httpx.Client(base_url=server.url, timeout=60) as c:
        yield c


CHAT = {"model": MODEL_NAME, "messages": [{"role": "user", "content": "Say hi"}], "max_tokens": 4, "temperature": 0}


def test_curl_as_in_the_readme(server):
    r = subprocess.run(["curl", "-sS", "--fail-with-body", server.url + "/v1/chat/completions", "-H", "Content-Type: application/json",
                        "-d", json.dumps({"messages": CHAT["messages"], "max_tokens": 4})], capture_output=True, text=True)
    assert r.returncode == 0, r.stdout
    assert json.loads(r.stdout)["choices"][0]["message"]["content"]


def test_health_version_and_request_id(http):
    assert http.get("/health").status_code == 200
    assert http.get("/version").json()["version"]
    r = http.post("/v1/chat/completions", json=CHAT, headers={"X-Request-Id": "mine-1"})
    assert r.headers["x-request-id"] == "mine-1"


def test_tokenize_and_back(http):
    r = http.post("/tokenize", json={"text": "1234567 and 3.14159"}).json()
    assert r["tokens"] == [33, 34, 35, 36, 37, 38, 39, 284, 216, 35, 30, 33, 36, 33, 37, 41] and r["count"] == 16
    assert len(r["pieces"]) == 16
    assert http.post("/detokenize", json={"tokens": r["tokens"]}).json()["text"] == "1234567 and 3.14159"
    special = "<|im_start|>user\nhi<|im_end|>"
    assert http.post("/tokenize", json={"text": special, "parse_special": True}).json()["tokens"] == [1, 4093, 198, 6004, 2]
    assert http.post("/tokenize", json={"text": special}).json()["tokens"] != [1, 4093, 198, 6004, 2]
    assert http.post("/tokenize", json={"messages": CHAT["messages"]}).json()["count"] > 3
    assert http.post("/detokenize", json={"tokens": [10**9]}).status_code == 400


@pytest.mark.parametrize("body, status", [
    (b"{", 400), (b"", 400), (b"[]", 400), (b"null", 400), (b'{"messages": 3}', 400), (b'{"messages": []}', 400),
    (b'{"messages": [{"content": "no role"}]}', 400), (b'{"messages": [{"role": "king", "content": "x"}]}', 400),
    (b'{"messages": [{"role": "user", "content": "x"}], "max_tokens": "three"}', 400),
    (b'{"messages": [{"role": "user", "content": "x"}], "temperature": NaN}', 400),
    (b'{"messages": [{"role": "user", "content": "x"}], "stream": "yes"}', 400),
    (b'{"messages": [{"role": "user", "content": "\xff\xfe"}]}', 400),
    (b"[" * 100000, 400), (b'{"a":' * 5000 + b"1" + b"}" * 5000, 400),
    (b'{"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]}', 400),
])
def test_bad_bodies(http, body, status):
    for path in ["/v1/chat/completions"]:
        r = http.post(path, content=body, headers={"Content-Type": "application/json"})
        assert r.status_code == status, r.text
        error = r.json()["error"]
        assert error["message"] and error["type"] == "invalid_request_error"


def test_routes_and_methods(http):
    r = http.get("/v1/embeddings")
    assert r.status_code == 404 and "/v1/chat/completions" in r.json()["error"]["message"]
    r = http.get("/v1/chat/completions")
    assert r.status_code == 405 and "POST" in r.headers["allow"]
    assert http.post("/v1/models", json={}).status_code == 405


def test_content_type_and_size(http):
    assert http.post("/v1/chat/completions", content=json.dumps(CHAT), headers={"Content-Type": "text/plain"}).status_code == 415
    r = http.post("/v1/completions", json={"model": MODEL_NAME, "prompt": "x" * (17 << 20)})
    assert r.status_code == 413


def test_garbage_and_half_requests_do_no_harm(server, http):
    for raw in [b"\x00\x01\x02\r\n\r\n", b"GET\r\n\r\n", b"POST /v1/completions HTTP/1.1\r\nContent-Length: 99\r\n\r\n{",
                b"GET /health HTTP/1.1\r\n" + b"A: " + b"b" * 100000 + b"\r\n\r\n"]:
        with socket.create_connection(("127.0.0.1", server.http_port)) as s:
            s.sendall(raw)
            s.settimeout(0.3)
            try:
                s.recv(4096)
            except (TimeoutError, ConnectionError):
                pass
    assert http.post("/v1/chat/completions", json=CHAT).status_code == 200


def test_pipelined_requests_are_answered_in_order(server):
    with socket.create_connection(("127.0.0.1", server.http_port)) as s:
        s.sendall(b"GET /version HTTP/1.1\r\nHost: x\r\n\r\n" * 3)
        data = b""
        while data.count(b"HTTP/1.1 200") < 3:
            part = s.recv(65536)
            assert part
            data += part
    assert data.count(b"HTTP/1.1 200") == 3


def test_sse_framing(http):
    with http.stream("POST", "/v1/chat/completions", json={**CHAT, "stream": True}) as r:
        assert r.status_code == 200 and r.headers["content-type"].startswith("text/event-stream")
        raw = r.read().decode()
    frames = [f for f in raw.split("\n\n") if f]
    assert all(f.startswith("data: ") for f in frames) and frames[-1] == "data: [DONE]"
    assert all(json.loads(f[6:])["object"] == "chat.completion.chunk" for f in frames[:-1])


def test_emoji_across_tokens_is_never_cut(http):
    ask = {"model": MODEL_NAME, "prompt": "Repeat: 🦊🐼🦄 日本語 🦊🐼🦄 日本語 🦊🐼", "max_tokens": 24, "temperature": 0, "stream": True}
    with http.stream("POST", "/v1/completions", json=ask) as r:
        raw = r.read()
    raw.decode("utf-8")
    text = "".join(json.loads(f[6:])["choices"][0]["text"] for f in raw.decode().split("\n\n") if f.startswith("data: {"))
    whole = http.post("/v1/completions", json={**ask, "stream": False}).json()["choices"][0]["text"]
    assert text == whole


def test_cancel_by_id(server, http):
    with http.stream("POST", "/v1/completions", headers={"X-Request-Id": "to-cancel"},
                     json={"model": MODEL_NAME, "prompt": "Go on", "max_tokens": 8000, "ignore_eos": True, "stream": True}) as r:
        lines = r.iter_lines()
        next(lines)
        assert httpx.post(server.url + "/v1/requests/to-cancel/cancel").status_code == 200
        rest = list(lines)
    assert rest[-1] == "data: [DONE]" or rest[-2] == "data: [DONE]"
    assert httpx.post(server.url + "/v1/requests/to-cancel/cancel").status_code == 200
    server.wait_idle(10)


def test_deadline_before_the_first_token(http):
    r = http.post("/v1/completions", json={"model": MODEL_NAME, "prompt": "word " * 7000, "max_tokens": 5, "timeout_ms": 1})
    assert r.status_code == 408 and r.json()["error"]["message"]
