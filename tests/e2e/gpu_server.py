#!/usr/bin/env python3
"""The server on a GPU, by whoever has one:  tests/e2e/gpu_server.py LOUPE MODEL.gguf [--only NAME] [--log-dir DIR]

Starts `loupe serve` on the GPU and on the CPU and checks: the CPU's greedy tokens (another one only where the CPU's two best
logits lie less than 0.05 apart), 32 clients at a time, policies mixed in one batch, 200 clients that leave, drain, a device
that fails for good, a cache that does not fit. Needs nothing but Python, and a C compiler for the failing device.
Closes with 'N passed, N failed'."""
import argparse
import concurrent.futures
import http.client
import json
import os
import pathlib
import random
import re
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time

HERE = pathlib.Path(__file__).resolve().parent
NEAR_LOGITS = 0.05
PROMPTS = [f"Question {i}: what do you know about the number {i * 37 % 101}? Answer:" + " and" * (i * 7 % 60) for i in range(32)]
LONG = " ".join(f"Line {i}: the value of item {i * 37 % 101} is {i * i % 97}." for i in range(130))  # about 2,500 tokens
POLICIES = [{"policy": "full"}, {"policy": "snapkv", "budget": {"ratio": 0.25}}, {"policy": "h2o", "budget": {"tokens": 256}},
            {"policy": "streaming", "budget": {"ratio": 0.1}}, {"policy": "adakv", "budget": {"bytes": 24_000_000}},
            {"policy": "tova", "budget": {"ratio": 0.5}}, {"policy": "pyramidkv", "budget": {"ratio": 0.3}},
            {"policy": "keydiff", "budget": {"ratio": 0.4}}, {"policy": "chunkkv", "budget": {"ratio": 0.25}},
            {"policy": "polykv", "budget": {"ratio": 0.25}}]


class Server:
    def __init__(self, options, *flags, env=None):
        ports = []
        for _ in range(3):
            with socket.socket() as s:
                s.bind(("127.0.0.1", 0))
                ports.append(s.getsockname()[1])
        self.http, self.management = ports[0], ports[2]
        self.log_path = pathlib.Path(options.log_dir) / f"gpu-server-{self.http}.log"
        command = [options.loupe, "serve", "--model", options.model, "--http", f"127.0.0.1:{self.http}", "--grpc", f"127.0.0.1:{ports[1]}",
                   "--management", f"127.0.0.1:{self.management}", *flags]
        self.process = subprocess.Popen(command, stdout=open(self.log_path, "wb"), stderr=subprocess.STDOUT, env={**os.environ, **(env or {})})

    def __enter__(self):
        end = time.monotonic() + 120
        while time.monotonic() < end:
            if self.process.poll() is not None:
                raise AssertionError(f"the server ended with {self.process.returncode}: {self.log()[-2000:]}")
            try:
                if self.probe("/readyz")[0] == 200:
                    return self
            except OSError:
                pass
            time.sleep(0.05)
        raise AssertionError("not ready after 120 s: " + self.log()[-2000:])

    def __exit__(self, *_):
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()

    def log(self):
        return self.log_path.read_text(errors="replace")

    def probe(self, path):
        connection = http.client.HTTPConnection("127.0.0.1", self.management, timeout=5)
        connection.request("GET", path)
        response = connection.getresponse()
        return response.status, response.read().decode()

    def metrics(self):
        return {m.group(1): float(m.group(2)) for m in re.finditer(r"^([a-z_]\S*) (\S+)$", self.probe("/metrics")[1], re.M)}

    def idle_metrics(self):
        end = time.monotonic() + 60
        while time.monotonic() < end:
            m = self.metrics()
            if m["loupe_requests_running"] == 0 and m["loupe_requests_waiting"] == 0:
                return m
            time.sleep(0.05)
        raise AssertionError("still busy after 60 s")

    def post(self, **body):
        connection = http.client.HTTPConnection("127.0.0.1", self.http, timeout=300)
        connection.request("POST", "/v1/completions", json.dumps({"temperature": 0, "return_token_ids": True, **body}),
                           {"Content-Type": "application/json"})
        response = connection.getresponse()
        return response.status, response.read().decode()

    def complete(self, prompt, max_tokens=24, **more):
        status, body = self.post(prompt=prompt, max_tokens=max_tokens, ignore_eos=True, **more)
        assert status == 200, f"status {status}: {body}"
        return json.loads(body)

    def tokens(self, prompt, **more):
        return self.complete(prompt, **more)["choices"][0]["token_ids"]

    def stop(self):
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(60)


def all_at_once(function, items, workers=32):
    with concurrent.futures.ThreadPoolExecutor(workers) as pool:
        return list(pool.map(function, items))


def assert_same_or_near(reference, got, what):
    """`reference`: an answer with the two best log-probabilities of every token. After another choice the texts go apart,
    so only the first one can be judged."""
    choice = reference["choices"][0]
    for i, (want, token) in enumerate(zip(choice["token_ids"], got)):
        if want != token:
            best = sorted(choice["logprobs"]["top_logprobs"][i].values(), reverse=True)
            gap = best[0] - best[1]
            assert gap < NEAR_LOGITS, f"{what}: token {i} is {token}, not {want}, and the best two logits lie {gap:.3f} apart"
            return 1
    assert len(choice["token_ids"]) == len(got), what
    return 0


def check_greedy(o):
    """Greedy tokens of one client and of 32 at a time are the CPU's."""
    with Server(o, "--device", "cpu") as cpu:
        want = all_at_once(lambda p: cpu.complete(p, 48, logprobs=2), PROMPTS)
    with Server(o, "--device", "cuda", "--kv-device-bytes", "8GiB") as gpu:
        alone = [gpu.tokens(p, max_tokens=48) for p in PROMPTS]
        start = time.monotonic()
        together = all_at_once(lambda p: gpu.tokens(p, max_tokens=48), PROMPTS)
        seconds = time.monotonic() - start
        near = sum(assert_same_or_near(w, a, f"prompt {i} alone") for i, (w, a) in enumerate(zip(want, alone)))
        near32 = sum(assert_same_or_near(w, t, f"prompt {i} of 32") for i, (w, t) in enumerate(zip(want, together)))
        assert sum(v for k, v in gpu.idle_metrics().items() if k.startswith("loupe_kv_resident_bytes")) == 0
        assert gpu.stop() == 0
    return f"{near} of 32 alone and {near32} of 32 together went another way at a near tie; 32 clients: {32 * 48 / seconds:.0f} tokens/s"


def check_auto(o):
    """--device auto takes the GPU, and most of its memory."""
    with Server(o, "--device", "auto") as gpu:
        capacity = sum(v for k, v in gpu.metrics().items() if k.startswith("loupe_kv_capacity_bytes"))
        assert "NVIDIA" in gpu.log(), gpu.log()
        assert len(gpu.tokens(PROMPTS[0])) == 24
        assert gpu.stop() == 0
    return f"KV cache {capacity / 2**30:.0f} GiB"


def check_mixed(o):
    """Policies in one batch give what each gives alone: bit for bit with --deterministic."""
    kvs = [kv for kv in POLICIES for _ in range(3)]
    with Server(o, "--device", "cuda", "--kv-device-bytes", "8GiB", "--deterministic") as gpu:
        alone = {json.dumps(kv): gpu.complete(LONG, kv=kv) for kv in POLICIES}
        together = all_at_once(lambda kv: gpu.complete(LONG, kv=kv), kvs)
        for kv, got in zip(kvs, together):
            want = alone[json.dumps(kv)]
            assert got["choices"][0]["token_ids"] == want["choices"][0]["token_ids"], kv
            for field in ("bytes", "entries"):
                assert got["usage"]["kv"][field] == want["usage"]["kv"][field], (kv, field)
        assert sum(v for k, v in gpu.idle_metrics().items() if k.startswith("loupe_kv_resident_bytes")) == 0
    with Server(o, "--device", "cpu") as cpu:
        reports = all_at_once(lambda kv: cpu.complete(LONG, kv=kv), POLICIES, 4)
    same = sum(r["choices"][0]["token_ids"] == alone[json.dumps(kv)]["choices"][0]["token_ids"] for kv, r in zip(POLICIES, reports))
    for kv, r in zip(POLICIES, reports):
        on_gpu = alone[json.dumps(kv)]["usage"]["kv"]
        assert abs(on_gpu["bytes_ratio"] - r["usage"]["kv"]["bytes_ratio"]) < 0.02, (kv, on_gpu["bytes_ratio"], r["usage"]["kv"]["bytes_ratio"])
    return f"{len(POLICIES)} policies, three of each at a time; {same} of them also with the CPU's tokens"


def check_leaving(o):
    """200 clients leave at random moments; nothing stays behind."""
    rng = random.Random(5)

    def leave(i):
        with socket.create_connection(("127.0.0.1", gpu.http)) as s:
            body = json.dumps({"prompt": PROMPTS[i % 32] * rng.randint(1, 8), "max_tokens": 400, "ignore_eos": True, "stream": i % 2 == 0,
                               "kv": rng.choice(POLICIES[:4])}).encode()
            s.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n" % len(body)
                      + body)
            time.sleep(rng.random() * 0.4)

    with Server(o, "--device", "cuda", "--kv-device-bytes", "1GiB") as gpu:
        first = gpu.tokens(PROMPTS[0])
        all_at_once(leave, range(200), 16)
        metrics = gpu.idle_metrics()
        left = {k: v for k, v in metrics.items() if re.match(r"loupe_kv_resident_(bytes|tokens|entries|pages)", k) and v != 0}
        assert not left, left
        assert gpu.tokens(PROMPTS[0]) == first
        cancelled = sum(v for k, v in metrics.items() if k.startswith("loupe_requests_total") and "cancelled" in k)
        assert cancelled > 100, f"only {cancelled} of 200 were cancelled"
        assert gpu.stop() == 0
    return f"{cancelled:.0f} of 200 cancelled"


def check_drain(o):
    """SIGTERM with requests running: they finish, new ones are refused, the exit code is 0."""
    with Server(o, "--device", "cuda", "--kv-device-bytes", "2GiB") as gpu:
        with concurrent.futures.ThreadPoolExecutor(8) as pool:
            running = [pool.submit(gpu.tokens, p, max_tokens=600) for p in PROMPTS[:8]]
            while gpu.metrics()["loupe_requests_running"] < 8:
                time.sleep(0.01)
            gpu.process.send_signal(signal.SIGTERM)
            time.sleep(0.1)
            try:
                status = gpu.post(prompt="late", max_tokens=1)[0]
            except ConnectionError:
                status = 503
            assert status == 503, status
            assert all(len(r.result()) == 600 for r in running)
        assert gpu.process.wait(60) == 0
    return "8 requests of 600 tokens"


def check_fault(o):
    """A device that fails for good: 503 for what runs, /livez red, exit code not 0."""
    directory = tempfile.mkdtemp()
    library = o.fault_library or f"{directory}/gpu_fault.so"
    if not o.fault_library:
        subprocess.run(["cc", "-shared", "-fPIC", "-O1", "-o", library, HERE / "gpu_fault.c", "-ldl", "-lpthread"], check=True)
    trigger = f"{directory}/now"
    with Server(o, "--device", "cuda", "--kv-device-bytes", "2GiB", env={"LD_PRELOAD": library, "LOUPE_TEST_GPU_FAULT": trigger}) as gpu:
        probes = []

        def watch():
            while gpu.process.poll() is None:
                try:
                    probes.append(gpu.probe("/livez"))
                except (OSError, http.client.HTTPException):
                    pass
                time.sleep(0.01)

        watcher = threading.Thread(target=watch)
        watcher.start()
        with concurrent.futures.ThreadPoolExecutor(12) as pool:
            running = [pool.submit(gpu.post, prompt=p, max_tokens=4000, ignore_eos=True, stream=i % 2 == 1) for i, p in enumerate(PROMPTS[:8])]
            while gpu.metrics()["loupe_requests_running"] < 8:
                time.sleep(0.01)
            pathlib.Path(trigger).touch()
            answers = [r.result() for r in running]
        code = gpu.process.wait(30)
        watcher.join()
        for i, (status, body) in enumerate(answers):
            assert "the GPU failed" in body, body
            assert status == 503 if i % 2 == 0 else status == 200 and '"error"' in body and body.rstrip().endswith("data: [DONE]"), (status, body)
        red = [body for status, body in probes if status == 503 and "the GPU failed" in body]
        assert red, f"/livez was never red: {probes[-3:]}"
        assert code not in (0, None) and code > 0, f"exit code {code}: {gpu.log()[-1500:]}"
        assert "the GPU failed" in gpu.log()
    return f"exit code {code}, /livez: {json.loads(red[0])['reason']}"


def check_memory(o):
    """A cache that does not fit: the process says what to lower and ends."""
    server = Server(o, "--device", "cuda", "--kv-device-bytes", "300GiB")
    try:
        code = server.process.wait(60)
    finally:
        server.__exit__()
    last = server.log().strip().splitlines()[-1]
    assert code in (1, 2) and "--kv-device-bytes" in last and "bytes free" in last, (code, last)
    return last


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("loupe")
    parser.add_argument("model")
    parser.add_argument("--only", default="", help="names of checks, separated by commas")
    parser.add_argument("--log-dir", default=tempfile.gettempdir())
    parser.add_argument("--fault-library", default="", help="gpu_fault.c, compiled already")
    options = parser.parse_args()
    checks = {name[6:]: f for name, f in globals().items() if name.startswith("check_")}
    wanted = options.only.split(",") if options.only else list(checks)
    failed = 0
    for name in wanted:
        start = time.monotonic()
        try:
            said, verdict = checks[name](options), "ok"
        except Exception as e:
            said, verdict, failed = f"{type(e).__name__}: {e}", "FAILED", failed + 1
        print(f"{name:8} {verdict} ({time.monotonic() - start:.1f} s): {said}", flush=True)
    print(f"{len(wanted) - failed} passed, {failed} failed")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
