"""The real binary, started as a user would, on free ports of the loopback interface."""
import importlib
import json
import os
import pathlib
import re
import signal
import socket
import subprocess
import sys
import time

import httpx
import openai
import pytest

ROOT = pathlib.Path(__file__).resolve().parents[2]
BINARY = pathlib.Path(os.environ.get("LOUPE_TEST_BINARY", ROOT / "build/release/loupe")).absolute()
MODEL = pathlib.Path(os.environ.get("LOUPE_TEST_MODEL", ROOT / "models/SmolLM2-135M-Instruct.Q4_1.gguf")).absolute()
MODEL_NAME = "SmolLM2-135M-Instruct.Q4_1"


def free_port():
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


class Server:
    """A running `loupe serve`. stop() drains it and returns its exit code."""

    def __init__(self, *flags, model=MODEL, env=None, wait=True, prefix=()):
        self.http_port, self.grpc_port, self.management_port = free_port(), free_port(), free_port()
        self.log_path = ROOT / "build/logs" / f"e2e-{self.http_port}.log"
        self.log_path.parent.mkdir(parents=True, exist_ok=True)
        self.url = f"http://127.0.0.1:{self.http_port}"
        self.management = f"http://127.0.0.1:{self.management_port}"
        self.grpc = f"127.0.0.1:{self.grpc_port}"
        command = [*prefix, BINARY, "serve", "--model", model, "--http", f"127.0.0.1:{self.http_port}", "--grpc", self.grpc,
                   "--management", f"127.0.0.1:{self.management_port}", *flags]
        self.log_file = open(self.log_path, "wb")
        self.process = subprocess.Popen([str(c) for c in command], stderr=self.log_file, stdout=self.log_file,
                                        env={**os.environ, **(env or {})})
        if wait:
            self.wait_ready()

    def wait_ready(self, timeout=120):
        end = time.monotonic() + timeout
        while time.monotonic() < end:
            if self.process.poll() is not None:
                raise AssertionError(f"the server ended with {self.process.returncode}:\n{self.log()}")
            try:
                if httpx.get(self.management + "/readyz").status_code == 200:
                    return
            except httpx.TransportError:
                pass
            time.sleep(0.02)
        raise AssertionError(f"not ready after {timeout} s:\n{self.log()}")

    def log(self):
        return self.log_path.read_text(errors="replace")

    def client(self):
        return openai.OpenAI(base_url=self.url + "/v1", api_key="none", max_retries=0, timeout=120)

    def metrics(self):
        """{'name{labels}': value} of the management page."""
        out = {}
        for line in httpx.get(self.management + "/metrics").text.splitlines():
            m = re.match(r"([a-zA-Z_:][^ ]*) (\S+)$", line)
            if m and not line.startswith("#"):
                out[m.group(1)] = float(m.group(2))
        return out

    def wait_idle(self, timeout=60):
        """Until nothing runs or waits: then every byte of KV cache must be free."""
        end = time.monotonic() + timeout
        while time.monotonic() < end:
            m = self.metrics()
            if m["loupe_requests_running"] == 0 and m["loupe_requests_waiting"] == 0:
                return m
            time.sleep(0.05)
        raise AssertionError(f"still busy after {timeout} s: {m}")

    def stop(self, timeout=150):
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
        try:
            return self.process.wait(timeout)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
            raise AssertionError(f"did not stop within {timeout} s:\n{self.log()}")
        finally:
            self.log_file.close()


def resident_bytes(metrics):
    values = [v for k, v in metrics.items() if k.startswith("loupe_kv_resident_bytes")]
    assert values, "no loupe_kv_resident_bytes on the page"
    return sum(values)


@pytest.fixture(scope="session", autouse=True)
def things_that_must_be_there():
    assert BINARY.exists(), f"{BINARY} is missing: cmake --preset release && cmake --build --preset release"
    assert MODEL.exists(), f"{MODEL} is missing: ./deploy/quickstart.sh --once brings it"


@pytest.fixture(scope="session")
def server():
    s = Server()
    yield s
    code = s.stop()
    assert code == 0, s.log()


@pytest.fixture
def client(server):
    return server.client()


@pytest.fixture(scope="session")
def protos(tmp_path_factory):
    """The Python classes of proto/, generated afresh."""
    from grpc_tools import protoc
    out = tmp_path_factory.mktemp("protos")
    files = sorted((ROOT / "proto/loupe/v1").glob("*.proto"))
    well_known = pathlib.Path(protoc.__file__).parent / "_proto"
    code = protoc.main(["protoc", f"-I{ROOT / 'proto'}", f"-I{well_known}", f"--python_out={out}", f"--grpc_python_out={out}", *map(str, files)])
    assert code == 0
    sys.path.insert(0, str(out))

    class Modules:
        inference = importlib.import_module("loupe.v1.inference_pb2")
        inference_grpc = importlib.import_module("loupe.v1.inference_pb2_grpc")
        admin = importlib.import_module("loupe.v1.admin_pb2")
        admin_grpc = importlib.import_module("loupe.v1.admin_pb2_grpc")

    return Modules


def run_cli(*args, stdin="", env=None, timeout=120):
    return subprocess.run([str(BINARY), *map(str, args)], input=stdin, capture_output=True, text=True, timeout=timeout,
                          env={**os.environ, **(env or {})})


def cli_json(*args, **kwargs):
    r = run_cli(*args, "--json", **kwargs)
    assert r.returncode == 0, r.stderr
    return json.loads(r.stdout)
