#!/usr/bin/env python3
"""The GPU's attention figures beside PyTorch's SDPA (cuDNN backend, contiguous keys and values), in one run on one card.

usage: gpu_peer.py PATH/gpu_figures [coded]

With `coded`, our side reads pages of spherical codes; the peer reads what it can, fp16.
Both sides are timed over launches recorded in a CUDA graph, on random data, rotated among enough copies that no cache holds
them. Prints a table of times and of speed relative to SDPA. FlashInfer joins where it is installed.
"""
import json
import statistics
import subprocess
import sys

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

ROTATED_BYTES = 512 << 20
LAUNCHES = 60


def time_us(launch, copies, repeats=10):
    """Median time of one launch; launch(i) uses the i-th copy of the inputs."""
    launch(0)
    torch.cuda.synchronize()
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    begin.record()
    launch(0)
    end.record()
    torch.cuda.synchronize()
    launches = max(1, min(LAUNCHES, int(100 / max(begin.elapsed_time(end), 1e-3))))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for i in range(launches):
            launch(i % copies)
    times = []
    for i in range(repeats + 1):
        begin.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        if i:
            times.append(begin.elapsed_time(end) * 1e3 / launches)
    return statistics.median(times)


def sdpa_us(heads, kv_heads, dim, batch, context, prompt):
    kv_bytes = 4 * batch * kv_heads * context * dim
    copies = max(1, min(LAUNCHES, ROTATED_BYTES // kv_bytes))
    rows = max(1, prompt)
    new = lambda h, n: torch.randn(batch, h, n, dim, device="cuda", dtype=torch.float16)
    q, k, v = new(heads, rows), [new(kv_heads, context) for _ in range(copies)], [new(kv_heads, context) for _ in range(copies)]
    causal = prompt > 0 and prompt == context

    def launch(i):
        return torch.nn.functional.scaled_dot_product_attention(q, k[i], v[i], is_causal=causal, enable_gqa=True)

    with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
        return time_us(launch, copies)


def main():
    if len(sys.argv) not in (2, 3):
        sys.exit(__doc__)
    out = subprocess.run([sys.argv[1], sys.argv[2] if len(sys.argv) == 3 else "attention"], check=True, capture_output=True, text=True).stdout
    peers = {}
    ours = [json.loads(line) for line in out.splitlines() if line.startswith("{")]
    print(ours[0])
    print("| case | SDPA cuDNN, us | loupe, us | loupe TB/s or TFLOP/s | relative speed |\n|---|---|---|---|---|")
    for case in ours[1:]:
        kv_heads = 8 if case["heads"] == 32 else 3
        prompt = case["prompt"]
        if prompt and prompt != case["context"]:
            continue  # a chunk at the end of a context: SDPA's causal mask means another corner
        try:
            shape = (case["heads"], kv_heads, case["dim"], case["batch"], case["context"], prompt)
            peer = peers[shape] if shape in peers else peers.setdefault(shape, sdpa_us(*shape))
        except RuntimeError as error:
            print(f"| {case} | refused: {str(error).splitlines()[0][:60]} |")
            continue
        torch.cuda.empty_cache()
        name = f"{'prefill' if prompt else 'decode'} B{case['batch']} x {case['context']}, {case['heads']}/{kv_heads} heads of {case['dim']}, {case['format']}"
        rate = f"{case['tflops']:.0f} TFLOP/s" if prompt else f"{case['gbps'] / 1e3:.2f} TB/s"
        print(f"| {name} | {peer:.1f} | {case['time_us']:.1f} | {rate} | {peer / case['time_us']:.2f} |", flush=True)


main()
