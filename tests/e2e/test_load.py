"""Many clients at a time: the same tokens as alone, exact accounting after chaos."""
import concurrent.futures
import random
import socket
import json
import time

import grpc
import httpx

from conftest import MODEL_NAME, Server, resident_bytes

PROMPTS = [f"Question {i}: what do you know about the number {i * 37 % 101}? Answer:" + " and" * (i * 7 % 60) for i in range(32)]


def complete(url, prompt, **kwargs):
    ask = {"model": MODEL_NAME, "prompt": prompt, "max_tokens": 16, "temperature": 0, "return_token_ids": True, **kwargs}
    r = httpx.post(url + "/v1/completions", json=ask, timeout=240)
    assert r.status_code == 200, r.text
    return r.json()["choices"][0]["text"]


def test_32_streams_give_the_tokens_of_each_alone(server):
    alone = [complete(server.url, p) for p in PROMPTS]
    with concurrent.futures.ThreadPoolExecutor(32) as pool:
        together = list(pool.map(lambda p: complete(server.url, p), PROMPTS))
    assert together == alone
    sampled = dict(temperature=1.0, seed=11)
    alone = complete(server.url, PROMPTS[3], **sampled)
    with concurrent.futures.ThreadPoolExecutor(32) as pool:
        together = list(pool.map(lambda p: complete(server.url, p, **sampled), PROMPTS))
    assert together[3] == alone, "a seed gives the same text whatever else runs"


def test_200_disconnects_and_cancels_leave_nothing(server, protos):
    rng = random.Random(5)

    def leave_http(i):
        with socket.create_connection(("127.0.0.1", server.http_port)) as s:
            body = json.dumps({"model": MODEL_NAME, "prompt": PROMPTS[i % 32] * rng.randint(1, 8), "max_tokens": 200,
                               "ignore_eos": True, "stream": i % 2 == 0}).encode()
            s.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
                      b"Content-Length: %d\r\n\r\n" % len(body) + body)
            time.sleep(rng.random() * 0.4)

    def leave_grpc(i):
        with grpc.insecure_channel(server.grpc) as channel:
            call = protos.inference_grpc.InferenceStub(channel).Generate(protos.inference.GenerateRequest(
                prompt=PROMPTS[i % 32], sampling=protos.inference.Sampling(max_tokens=200, ignore_eos=True)))
            time.sleep(rng.random() * 0.4)
            call.cancel()

    with concurrent.futures.ThreadPoolExecutor(16) as pool:
        list(pool.map(lambda i: leave_http(i) if i % 4 else leave_grpc(i), range(200)))
    metrics = server.wait_idle(60)
    assert resident_bytes(metrics) == 0
    assert complete(server.url, PROMPTS[0], ignore_eos=True)


def test_a_small_cache_preempts_and_changes_no_token(server):
    # 90 lists of dense pages: a sequence of 300 tokens takes about 8 MiB; 24 MiB hold three of the eight.
    small = Server("--kv-device-bytes", "24MiB")
    try:
        ask = dict(max_tokens=160, ignore_eos=True)
        alone = [complete(server.url, p, **ask) for p in PROMPTS[:8]]
        with concurrent.futures.ThreadPoolExecutor(8) as pool:
            together = list(pool.map(lambda p: complete(small.url, p, **ask), PROMPTS[:8]))
        metrics = small.wait_idle()
        assert together == alone
        assert resident_bytes(metrics) == 0
        assert sum(v for k, v in metrics.items() if k.startswith("loupe_preemptions_total")) > 0, "the arena was too large to test this"
    finally:
        assert small.stop() == 0


def test_a_full_queue_answers_429(server):
    tiny = Server("--max-sequences", "1", "--max-queue", "2")
    try:
        def ask(_):
            return httpx.post(tiny.url + "/v1/completions", timeout=120, json={
                "model": MODEL_NAME, "prompt": "Go on", "max_tokens": 40, "ignore_eos": True})
        with concurrent.futures.ThreadPoolExecutor(12) as pool:
            answers = list(pool.map(ask, range(12)))
        refused = [a for a in answers if a.status_code == 429]
        assert refused and all(int(a.headers["retry-after"]) >= 1 for a in refused)
        assert all(a.status_code in (200, 429) for a in answers) and any(a.status_code == 200 for a in answers)
        assert resident_bytes(tiny.wait_idle()) == 0
    finally:
        assert tiny.stop() == 0
