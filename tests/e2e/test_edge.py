"""What hostile or unlucky clients do to the listeners: framing, ids, floods, half-sent requests."""
import json
import signal
import socket
import threading
import time

import grpc
import httpx
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from conftest import MODEL_NAME, Server

LONG = {"model": MODEL_NAME, "prompt": "Go on", "max_tokens": 8000, "ignore_eos": True}


def raw_post(port, body, *headers):
    s = socket.create_connection(("127.0.0.1", port))
    head = ["POST /v1/completions HTTP/1.1", "Host: x", "Content-Type: application/json", *headers]
    s.sendall("\r\n".join(head).encode() + b"\r\n\r\n" + body)
    return s


def wait_running(server, count, timeout=10):
    end = time.monotonic() + timeout
    while time.monotonic() < end:
        if server.metrics()["loupe_requests_running"] == count:
            return
        time.sleep(0.02)
    raise AssertionError(server.metrics())


@pytest.mark.parametrize("framing", ["Transfer-Encoding: gzip", "Transfer-Encoding: xchunked", "Transfer-Encoding: chunked, identity",
                                     "Transfer-Encoding: chunked\r\nContent-Length: 2", "Content-Length: 2\r\nTransfer-Encoding: gzip"])
def test_no_request_is_smuggled(server, framing):
    with raw_post(server.http_port, b"{}GET /version HTTP/1.1\r\nHost: x\r\n\r\n", framing) as s:
        s.shutdown(socket.SHUT_WR)
        s.settimeout(10)
        data = b""
        while part := s.recv(65536):
            data += part
    assert data.startswith(b"HTTP/1.1 400") and b"HTTP/1.1 200" not in data, data
    assert b"Connection: close" in data


@pytest.mark.parametrize("pipelined", [0, 1, 2500, 40_000])
def test_a_client_that_leaves_is_noticed_whatever_it_pipelined(server, pipelined):
    body = json.dumps(LONG).encode()
    with raw_post(server.http_port, body, f"Content-Length: {len(body)}") as s:
        wait_running(server, 1)
        s.settimeout(5)
        try:
            s.sendall(b"GET /version HTTP/1.1\r\nHost: x\r\n\r\n" * pipelined)
        except OSError:
            pass  # given up already
    server.wait_idle(10)


def test_logs_hold_no_prompt_text(server):
    secret = "TheSecretOfTheLog"
    bodies = [b'{"prompt": "' + secret.encode() + tail for tail in (b"\x01\"}", b"\xff\"}", b"\"", b"\", x}")]
    bodies += [json.dumps(b).encode() for b in (
        {"prompt": "x", secret: 1, "temperature": 9}, {"prompt": "x", "model": secret}, {"prompt": "x", "logit_bias": {secret: 1}},
        {"prompt": "x", "kv": {"policy": secret}}, {"prompt": "x", "stream_options": {secret: True}}, {"prompt": {secret: secret}})]
    for body in bodies:
        r = httpx.post(server.url + "/v1/completions", content=body, headers={"Content-Type": "application/json"})
        assert 400 <= r.status_code < 500, r.text
    for role in (secret, "user"):
        httpx.post(server.url + "/v1/chat/completions", json={"messages": [{"role": role, "content": secret}], "temperature": 9})
    httpx.post(server.url + "/tokenize", content=bodies[0], headers={"Content-Type": "application/json"})
    time.sleep(0.2)
    assert secret not in server.log()
    assert '"error":"INVALID_ARGUMENT in temperature"' in server.log()


def test_ids_shown_to_a_client_cancel_its_request_and_no_other(server):
    def run(request_id, out):
        with httpx.stream("POST", server.url + "/v1/completions", json={**LONG, "stream": True}, headers={"X-Request-Id": request_id},
                          timeout=60) as r:
            out["status"] = r.status_code
            for line in r.iter_lines():
                if line.startswith("data: {"):
                    out["id"] = json.loads(line[6:])["id"]
                    out["running"] = True
        out["running"] = False

    def cancel(request_id):
        return httpx.post(f"{server.url}/v1/requests/{request_id}/cancel").status_code

    names = ["q", "q%231", "q#1", "twin", "twin"]
    outs = [{} for _ in names]
    threads = [threading.Thread(target=run, args=(n, o)) for n, o in zip(names, outs)]
    for t in threads:
        t.start()
    end = time.monotonic() + 30
    while not all(o.get("running") for o in outs):
        assert time.monotonic() < end, outs
        time.sleep(0.02)
    assert [o["id"] for o in outs] == ["cmpl-" + n for n in names], "the header is echoed, duplicates are welcome"
    assert cancel("nobody") == 404
    assert cancel(outs[0]["id"]) == 200
    threads[0].join(10)
    time.sleep(0.3)
    assert [o["running"] for o in outs] == [False, True, True, True, True]
    assert cancel("q%231") == 200  # decoded: q#1
    threads[2].join(10)
    time.sleep(0.3)
    assert [o["running"] for o in outs] == [False, True, False, True, True]
    assert cancel("twin") == 200
    assert cancel("q%25231") == 200
    for t in threads:
        t.join(10)
    assert not any(o["running"] for o in outs)
    server.wait_idle(10)


def test_a_list_of_prompts_is_taken_whole_or_not_at_all():
    s = Server("--max-queue", "2")
    try:
        ask = {"model": MODEL_NAME, "max_tokens": 2}
        r = httpx.post(s.url + "/v1/completions", json={**ask, "prompt": ["a", "b", "c", "d"]}, timeout=60)
        assert r.status_code == 400 and "4 prompts" in r.text and "at most 2" in r.text, r.text
        assert r.json()["error"]["param"] == "prompt"
        assert len(httpx.post(s.url + "/v1/completions", json={**ask, "prompt": ["a", "b"]}, timeout=60).json()["choices"]) == 2
        m = s.wait_idle(10)
        assert m['loupe_requests_rejected_total{reason="invalid"}'] == 1 
        assert sum(v for k, v in m.items() if k.startswith("loupe_prompt_tokens_total")) < 10, "nothing was computed for the refused"
    finally:
        assert s.stop() == 0


def test_idle_connections_leave_room_for_probes_and_grpc():
    s = Server("--max-connections", "1024", prefix=["prlimit", "--nofile=300:300"])
    idle = []
    try:
        assert "--max-connections is 44 instead of 1024" in s.log()
        for _ in range(400):
            idle.append(socket.create_connection(("127.0.0.1", s.http_port)))
        time.sleep(0.5)
        assert httpx.get(s.management + "/livez").status_code == 200
        with grpc.insecure_channel(s.grpc) as channel:
            health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(), timeout=10)
        idle[-1].settimeout(5)
        assert idle[-1].recv(100).startswith(b"HTTP/1.1 503")
    finally:
        for c in idle:
            c.close()
        assert s.stop() == 0


def test_the_soft_limit_of_descriptors_does_not_matter():
    s = Server(prefix=["prlimit", "--nofile=128:4096"])
    try:
        assert s.metrics()["process_max_fds"] == 4096 and "instead of" not in s.log()
    finally:
        assert s.stop() == 0


def test_watchers_and_half_sent_requests_do_not_delay_the_end():
    s = Server()
    with grpc.insecure_channel(s.grpc) as channel, socket.create_connection(("127.0.0.1", s.http_port)) as half:
        watcher = health_pb2_grpc.HealthStub(channel).Watch(health_pb2.HealthCheckRequest())
        assert next(watcher).status == health_pb2.HealthCheckResponse.SERVING
        half.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Le")
        time.sleep(0.1)
        start = time.monotonic()
        s.process.send_signal(signal.SIGTERM)
        assert s.process.wait(30) == 0
        assert time.monotonic() - start < 3
    s.stop()


@pytest.mark.parametrize("field, value", [("repetition_penalty", 1e-4), ("repetition_penalty", 101), ("prompt", ""), ("prompt", [10**6]),
                                          ("temperature", 2.5), ("top_p", 0)])
def test_a_refused_value_is_named_with_its_field(server, field, value):
    r = httpx.post(server.url + "/v1/completions", json={"model": MODEL_NAME, "prompt": "x", "max_tokens": 1, field: value})
    assert r.status_code == 400 and r.json()["error"]["param"] == field, r.text


def test_the_smallest_top_p_is_greedy(server):
    ask = {"model": MODEL_NAME, "prompt": "The capital of France is", "max_tokens": 4}
    texts = [httpx.post(server.url + "/v1/completions", json={**ask, **how}).json()["choices"][0]["text"]
             for how in ({"top_p": 1e-12}, {"temperature": 0})]
    assert texts[0] == texts[1]


def test_big_bodies_do_not_stall_others(server):
    body = b'{"prompt": [' + b"1," * 2_000_000 + b'1], "max_tokens": 1}'
    done = threading.Event()

    def flood():
        while not done.is_set():
            httpx.post(server.url + "/v1/completions", content=body, headers={"Content-Type": "application/json"}, timeout=120)

    threads = [threading.Thread(target=flood) for _ in range(6)]
    for t in threads:
        t.start()
    try:
        time.sleep(0.5)
        waits = []
        for _ in range(10):
            start = time.monotonic()
            assert httpx.get(server.url + "/version", timeout=60).status_code == 200
            waits.append(time.monotonic() - start)
    finally:
        done.set()
        for t in threads:
            t.join(120)
    assert sorted(waits)[5] < 0.3, waits
