"""Figures of the edge, on the real binary: overload, 1,000 waiting streams beside slow readers, gateway cost a token.

    cmake --build --preset release --target gateway_bench
    .venv/bin/python tests/bench/edge_figures.py [overload] [waiting] [gateway] [--seconds 60] [--repeat 7]

Prints one JSON object a figure; exits 1 if one misses its target."""
import argparse
import asyncio
import json
import os
import pathlib
import statistics
import subprocess
import sys
import time

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1] / "e2e"))
from conftest import ROOT, Server  # noqa: E402

missed = []


def report(case, holds, **numbers):
    print(json.dumps({"case": case, "holds": holds, **numbers}), flush=True)
    if not holds:
        missed.append(case)


async def open_request(port, ask, path="/v1/completions", limit=2**16):
    reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=limit)
    body = json.dumps(ask).encode()
    writer.write(b"POST %s HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nConnection: close\r\nContent-Length: %d\r\n\r\n"
                 % (path.encode(), len(body)) + body)
    return reader, writer


async def answer(port, ask):
    """(status, headers, body, seconds)"""
    start = time.perf_counter()
    reader, writer = await open_request(port, ask)
    data = await reader.read()
    writer.close()
    head, _, body = data.partition(b"\r\n\r\n")
    lines = head.decode().split("\r\n")
    return int(lines[0].split()[1]), dict(x.lower().split(": ", 1) for x in lines[1:]), body, time.perf_counter() - start


async def get(port, path):
    start = time.perf_counter()
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(b"GET %s HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n" % path.encode())
    data = await reader.read()
    writer.close()
    assert data.startswith(b"HTTP/1.1 200"), data[:100]
    return time.perf_counter() - start


ASK = {"prompt": "Tell me about the sea.", "max_tokens": 48, "ignore_eos": True, "temperature": 0}


async def closed_loop(port, clients, seconds):
    """Tokens a second of so many clients that each ask again at once."""
    done, end = 0, time.perf_counter() + seconds

    async def client():
        nonlocal done
        while time.perf_counter() < end:
            status, _, _, _ = await answer(port, ASK)
            assert status == 200, status
            done += time.perf_counter() < end
    await asyncio.gather(*(client() for _ in range(clients)))
    return done * ASK["max_tokens"] / seconds


async def overload(seconds):
    # The clients get a core of their own: three times the load is a lot of connections a second.
    s = Server("--max-sequences", "16", "--max-queue", "16", "--threads", str(max(1, (os.cpu_count() or 2) - 1)))
    try:
        await closed_loop(s.http_port, 16, 10)
        peak = await closed_loop(s.http_port, 16, max(30, seconds))
        if peak == 0:
            raise SystemExit("error: no answer was complete within the time; this machine is too busy for a figure")
        rate = 3 * peak / ASK["max_tokens"]
        before = s.metrics()["process_resident_memory_bytes"]
        statuses, waits, probes, jobs = [], [], [], []
        start, ok_in_time = time.perf_counter(), 0

        async def one():
            nonlocal ok_in_time
            status, headers, _, _ = await answer(s.http_port, ASK)
            statuses.append(status)
            ok_in_time += status == 200 and time.perf_counter() - start < seconds
            if status == 429:
                waits.append(int(headers.get("retry-after", 0)))

        async def probe():
            while time.perf_counter() - start < seconds:
                probes.append(await get(s.management_port, "/readyz"))
                await asyncio.sleep(0.1)

        watcher = asyncio.create_task(probe())
        while time.perf_counter() - start < seconds:
            jobs.append(asyncio.create_task(one()))
            await asyncio.sleep(1 / rate)
        await asyncio.gather(watcher, *jobs)
        goodput = ok_in_time * ASK["max_tokens"] / seconds
        memory = s.metrics()["process_resident_memory_bytes"] / before
        p99 = sorted(probes)[len(probes) * 99 // 100]
        usable = all(1 <= w <= 120 for w in waits)
        only = set(statuses) <= {200, 429}
        report("overload", goodput >= 0.95 * peak and memory < 1.05 and usable and only and p99 < 0.05, peak_tokens_per_s=round(peak, 1),
               goodput=round(goodput, 1), share_of_peak=round(goodput / peak, 3), memory_ratio=round(memory, 3), answered=statuses.count(200),
               refused=statuses.count(429), retry_after=[min(waits, default=0), max(waits, default=0)], readyz_p99_ms=round(1000 * p99, 1))
    finally:
        assert s.stop() == 0


async def waiting(repeat, seconds=6):
    ratios = []
    s = Server("--max-sequences", "8", "--max-queue", "1100", "--max-connections", "2000")
    try:
        for i in range(repeat):
            speeds = {}
            for crowd in ((False, True) if i % 2 else (True, False)):
                others = []
                if crowd:
                    # Readers that never read: their answers are larger than a socket holds.
                    slow = {**ASK, "max_tokens": 150, "logprobs": 20, "stream": True}
                    others += [await open_request(s.http_port, slow, limit=1024) for _ in range(64)]
                    await asyncio.sleep(1)
                    while s.metrics()["loupe_requests_running"] + s.metrics()["loupe_requests_waiting"] > 0:
                        await asyncio.sleep(0.2)
                active = [await open_request(s.http_port, {**ASK, "max_tokens": 6000, "stream": True}) for _ in range(8)]
                while s.metrics()["loupe_requests_running"] < 8:
                    await asyncio.sleep(0.05)
                if crowd:
                    others += [await open_request(s.http_port, {**ASK, "stream": True}) for _ in range(1000)]
                    while s.metrics()["loupe_requests_waiting"] < 1000:
                        await asyncio.sleep(0.1)
                state = {"frames": 0, "on": False}

                async def read(reader):
                    while line := await reader.readline():
                        state["frames"] += state["on"] and line.startswith(b"data: ")

                readers = [asyncio.create_task(read(r)) for r, _ in active]
                await asyncio.sleep(1)
                state["on"], start = True, time.perf_counter()
                await asyncio.sleep(seconds)
                state["on"] = False
                speeds[crowd] = state["frames"] / (time.perf_counter() - start)
                for _, writer in others + active:
                    writer.transport.abort()
                await asyncio.gather(*readers, return_exceptions=True)
                s.wait_idle(60)
            ratios.append(speeds[True] / speeds[False])
        median = statistics.median(ratios)
        report("waiting", median >= 0.9, active_share_of_speed=round(median, 3), runs=[round(r, 3) for r in ratios])
    finally:
        assert s.stop() == 0


def gateway():
    for protocol in ("http", "grpc"):
        r = subprocess.run([ROOT / "build/release/gateway_bench", protocol], capture_output=True, text=True, timeout=300, check=True)
        numbers = json.loads(r.stdout)
        report(f"gateway {protocol}", numbers["cpu_us_per_token"] < 20, cpu_us_per_token=numbers["cpu_us_per_token"], streams=numbers["streams"])


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("figures", nargs="*", default=["overload", "waiting", "gateway"])
    parser.add_argument("--seconds", type=int, default=60, help="of overload")
    parser.add_argument("--repeat", type=int, default=7, help="pairs of the waiting streams")
    args = parser.parse_args()
    if "overload" in args.figures:
        asyncio.run(overload(args.seconds))
    if "waiting" in args.figures:
        asyncio.run(waiting(args.repeat))
    if "gateway" in args.figures:
        gateway()
    sys.exit(f"missed: {', '.join(missed)}" if missed else 0)


if __name__ == "__main__":
    main()
