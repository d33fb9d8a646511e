"""The rows of compare_llamacpp.py that need both servers running: readiness, streams over HTTP, peak resident memory."""
import concurrent.futures
import contextlib
import json
import socket
import statistics
import subprocess
import time
import urllib.request

WORDS = "the river carried the small boat past the mill and the old stone bridge until the evening light was gone and "


def free_port():
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


class Server:
    def __init__(self, args, ours, context, sequences):
        self.ours, self.port = ours, free_port()
        bind = f"127.0.0.1:{self.port}"
        if ours:
            grpc, management = (f"127.0.0.1:{free_port()}" for _ in range(2))
            command = [args.loupe, "serve", "--model", args.model, "--http", bind, "--grpc", grpc, "--management", management,
                       "--threads", args.threads, "--kv-device-bytes", f"{context * sequences * 24 // 1000 + 64}MiB", "--log-level", "warning"]
        else:
            command = [f"{args.llama_bin}/llama-server", "-m", args.model, "--host", "127.0.0.1", "--port", self.port, "-t", args.threads,
                       "-c", context * sequences, "-np", sequences]
        self.start = time.perf_counter()
        self.process = subprocess.Popen([str(c) for c in command], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        while not self.ready():
            if self.process.poll() is not None:
                raise SystemExit(f"error: {' '.join(map(str, command))} ended with {self.process.returncode}")
            time.sleep(0.002)
        self.ready_s = time.perf_counter() - self.start

    def ready(self):
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{self.port}/health", timeout=1) as r:
                return r.status == 200
        except OSError:
            return False

    def complete(self, prompt, tokens):
        """Seconds to the first token, and until the end, of one stream."""
        body = {"model": "default", "prompt": prompt, "max_tokens": tokens, "temperature": 0, "stream": True, "ignore_eos": True}
        if not self.ours:
            body["cache_prompt"] = False
        else:
            del body["model"]
        request = urllib.request.Request(f"http://127.0.0.1:{self.port}/v1/completions", json.dumps(body).encode(),
                                         {"Content-Type": "application/json"})
        start, first = time.perf_counter(), None
        with urllib.request.urlopen(request, timeout=600) as r:
            for line in r:
                if line.startswith(b"data: {") and first is None:
                    first = time.perf_counter() - start
        return first, time.perf_counter() - start

    def peak_mib(self):
        with open(f"/proc/{self.process.pid}/status") as f:
            return next(int(line.split()[1]) / 1024 for line in f if line.startswith("VmHWM"))

    def stop(self):
        self.process.terminate()
        self.process.wait()


@contextlib.contextmanager
def server(args, ours, context=2048, sequences=1):
    s = Server(args, ours, context, sequences)
    try:
        yield s
    finally:
        s.stop()


def prompt_of(words):
    return " ".join((WORDS * (words // 20 + 1)).split()[:words])


def both(args, one):
    """Medians of `one(ours)` for both sides, measured in turn."""
    a, b = [], []
    for _ in range(args.repeat):
        b.append(one(False))
        a.append(one(True))
    return statistics.median(a), statistics.median(b)


def ready_row(args):
    def one(ours):
        with server(args, ours) as s:
            return s.ready_s
    a, b = both(args, one)
    print(f"| start to ready | {b:.2f} s | {a:.2f} s | {a / b:.2f} of the time |", flush=True)


def server_row(args):
    with server(args, False, 2048, 8) as theirs, server(args, True, 2048, 8) as ours:
        sides = {False: theirs, True: ours}
        for s in sides.values():
            s.complete(prompt_of(40), 8)
        a, b = both(args, lambda side: sides[side].complete(prompt_of(120), 16)[0])
        print(f"| server, 1 client, first token of a 128-token prompt | {b * 1e3:.0f} ms | {a * 1e3:.0f} ms | {a / b:.2f} of the time |", flush=True)

        def eight(side):
            start = time.perf_counter()
            with concurrent.futures.ThreadPoolExecutor(8) as pool:
                list(pool.map(lambda i: sides[side].complete(f"{i} " + prompt_of(119), 64), range(8)))
            return 8 * 64 / (time.perf_counter() - start)
        a, b = both(args, eight)
        print(f"| server, 8 clients of 128 + 64 tokens, total | {b:.0f} tokens/s | {a:.0f} tokens/s | {a / b:.2f} |", flush=True)


def memory_row(args):
    def one(ours):
        with server(args, ours, 8192, 1) as s:
            s.complete(prompt_of(7600), 8)
            return s.peak_mib()
    a, b = one(True), one(False)
    print(f"| peak resident memory, one sequence of 8K | {b:.0f} MiB | {a:.0f} MiB | {a / b:.2f} |", flush=True)


SERVER_ROWS = {"ready": ready_row, "server": server_row, "memory": memory_row}
