"""Start, drain and stop; model files and machines that do not do."""
import json
import signal
import subprocess
import threading
import time

import grpc
import httpx
import pytest

from conftest import BINARY, MODEL, MODEL_NAME, Server, free_port, run_cli


def test_listeners_are_open_before_the_weights_are_read(tmp_path):
    s = Server(wait=False)
    seen = set()
    end = time.monotonic() + 60
    while time.monotonic() < end:
        try:
            r = httpx.get(s.management + "/readyz")
        except httpx.TransportError:
            continue
        seen.add((r.status_code, r.json()["phase"]))
        if r.status_code == 200:
            break
        assert httpx.get(s.management + "/livez").status_code == 200
        main = httpx.post(s.url + "/v1/completions", json={"prompt": "x"})
        assert main.status_code in (200, 503)
        if main.status_code == 503:
            assert int(main.headers["retry-after"]) >= 1
    assert (200, "ready") in seen
    assert any(code == 503 for code, _ in seen), f"never seen loading: {seen}"
    assert httpx.get(s.management + "/startupz").status_code == 200
    assert s.stop() == 0


def test_sigterm_lets_a_running_stream_finish():
    s = Server("--drain-max-s", "60")
    words = []
    refused = []

    def read():
        with httpx.stream("POST", s.url + "/v1/completions", timeout=60, json={
                "model": MODEL_NAME, "prompt": "Count", "max_tokens": 300, "ignore_eos": True, "stream": True}) as r:
            words.extend(line for line in r.iter_lines() if line)

    thread = threading.Thread(target=read)
    thread.start()
    while len(words) < 3:
        time.sleep(0.01)
    s.process.send_signal(signal.SIGTERM)
    time.sleep(0.2)
    assert httpx.get(s.management + "/readyz").status_code == 503
    assert httpx.get(s.management + "/readyz").json()["phase"] == "draining"
    try:
        refused.append(httpx.post(s.url + "/v1/completions", json={"model": MODEL_NAME, "prompt": "x"}).status_code)
    except httpx.TransportError:
        refused.append(503)
    thread.join(60)
    assert refused == [503]
    assert words[-1] == "data: [DONE]"
    assert json.loads(words[-2][6:])["choices"][0]["finish_reason"] == "length"
    assert s.process.wait(30) == 0


def test_drain_has_an_end():
    s = Server("--drain-max-s", "1")
    words = []

    def read():
        with httpx.stream("POST", s.url + "/v1/completions", timeout=60, json={
                "model": MODEL_NAME, "prompt": "Count", "max_tokens": 8000, "ignore_eos": True, "stream": True}) as r:
            words.extend(line for line in r.iter_lines() if line)

    thread = threading.Thread(target=read)
    thread.start()
    while len(words) < 3:
        time.sleep(0.01)
    s.process.send_signal(signal.SIGTERM)
    assert s.process.wait(30) == 0
    thread.join(10)
    assert words[-1] == "data: [DONE]"


class Reader(threading.Thread):
    """Reads a stream of `tokens` tokens; there once three lines have come."""

    def __init__(self, s, tokens):
        super().__init__()
        self.s, self.tokens, self.lines = s, tokens, []
        self.start()
        while len(self.lines) < 3:
            time.sleep(0.01)

    def run(self):
        with httpx.stream("POST", self.s.url + "/v1/completions", timeout=60, json={
                "model": MODEL_NAME, "prompt": "Count", "max_tokens": self.tokens, "ignore_eos": True, "stream": True,
                "stream_options": {"include_usage": True}}) as r:
            self.lines.extend(line for line in r.iter_lines() if line)

    def completion_tokens(self):
        self.join(60)
        assert self.lines[-1] == "data: [DONE]"
        return json.loads(self.lines[-2][6:])["usage"]["completion_tokens"]


def server_with_admin(protos):
    address = f"127.0.0.1:{free_port()}"
    s = Server("--admin", address)
    admin = protos.admin_grpc.AdminStub(grpc.insecure_channel(address))
    return s, lambda: admin.Drain(protos.admin.DrainRequest(), timeout=10)


def test_drain_and_then_sigterm_lets_a_stream_finish(protos):
    # As Kubernetes does it: preStop calls Drain, then comes SIGTERM.
    s, drain = server_with_admin(protos)
    reader = Reader(s, 300)
    drain()
    time.sleep(0.2)
    assert httpx.get(s.management + "/readyz").json()["phase"] == "draining"
    drain()
    time.sleep(0.2)
    s.process.send_signal(signal.SIGTERM)
    assert reader.completion_tokens() == 300
    assert s.process.wait(30) == 0


@pytest.mark.parametrize("drained", [False, True])
def test_a_second_signal_ends_at_once(protos, drained):
    s, drain = server_with_admin(protos)
    reader = Reader(s, 8000)
    if drained:
        drain()
    s.process.send_signal(signal.SIGTERM)
    time.sleep(0.3)
    assert s.process.poll() is None
    s.process.send_signal(signal.SIGINT)
    assert s.process.wait(30) == 0
    assert reader.completion_tokens() < 8000


def test_port_in_use(server):
    r = subprocess.run([str(BINARY), "serve", "--model", str(MODEL), "--http", f"127.0.0.1:{server.http_port}", "--grpc", "127.0.0.1:0",
                        "--management", "127.0.0.1:0"], capture_output=True, text=True, timeout=60)
    assert r.returncode == 2 and str(server.http_port) in r.stderr and "use" in r.stderr
    r = subprocess.run([str(BINARY), "serve", "--model", str(MODEL), "--http", "127.0.0.1:0", "--grpc", server.grpc,
                        "--management", "127.0.0.1:0"], capture_output=True, text=True, timeout=60)
    # One clear message: gRPC's own words stay out of it.
    assert r.returncode == 2 and str(server.grpc_port) in r.stderr and r.stderr.startswith("error: ") and r.stderr.count("\n") == 1, r.stderr


def broken_models(tmp_path):
    data = MODEL.read_bytes()
    yield "missing", tmp_path / "missing.gguf", "missing.gguf"
    for name, content, says in [
        ("empty", b"", ""), ("magic", b"GGML" + data[4:4096], "GGML"), ("version", data[:4] + b"\x09\x00\x00\x00" + data[8:4096], "9"),
        ("header", data[:100], ""), ("tensors", data[: len(data) // 2], ""), ("counts", data[:8] + b"\xff" * 16 + data[24:4096], ""),
        ("text", b"This is no model.\n" * 50, "GGUF"),
    ]:
        path = tmp_path / f"{name}.gguf"
        path.write_bytes(content)
        yield name, path, says


def test_broken_models_are_refused(tmp_path):
    for name, path, says in broken_models(tmp_path):
        for command in (["serve", "--http", "127.0.0.1:0", "--grpc", "127.0.0.1:0", "--management", "127.0.0.1:0", "--model"],
                        ["generate", "--prompt", "x", "--model"], ["inspect"]):
            r = run_cli(*command, path)
            assert r.returncode == 2, (name, command, r.returncode, r.stderr)
            assert "error" in r.stderr and says in r.stderr, (name, command, r.stderr)


@pytest.mark.parametrize("flags", [["--kv-device-bytes", "1MiB"], ["--kv-device-bytes", "900TiB"]])
def test_too_little_memory(flags):
    r = run_cli("serve", "--model", MODEL, "--http", "127.0.0.1:0", "--grpc", "127.0.0.1:0", "--management", "127.0.0.1:0", *flags)
    assert r.returncode in (1, 2) and "error" in r.stderr and "kv-device-bytes" in r.stderr, r.stderr


@pytest.mark.parametrize("size", ["2MiB", "8MiB", "16MiB"])
def test_a_small_cache_holds_the_context_that_it_promises(size):
    s = Server("--kv-device-bytes", size)
    context = httpx.get(s.url + "/v1/models").json()["data"][0]["max_model_len"]
    for prompt in (1 if size == "2MiB" else context - 80, context - 17, context - 1):
        r = httpx.post(s.url + "/v1/completions", timeout=120, json={
            "model": MODEL_NAME, "prompt": [500] * prompt, "max_tokens": context - prompt, "ignore_eos": True, "temperature": 0}).json()
        assert r["usage"]["completion_tokens"] == context - prompt, (size, context, r)
    assert s.stop() == 0


def test_the_smallest_context_starts():
    s = Server("--max-context", "1")
    r = httpx.post(s.url + "/v1/completions", json={"model": MODEL_NAME, "prompt": "Hello there", "max_tokens": 1})
    assert r.status_code == 400 and r.json()["error"]["code"] == "context_length_exceeded"
    assert s.stop() == 0
