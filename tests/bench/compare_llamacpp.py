"""Runs both sides of each row in turn and prints medians and ratios as a Markdown table. Called by compare_llamacpp.sh.

Rows: prefill:TOKENS, decode:DEPTH, batch:SEQUENCES@DEPTH, q4_0-prefill:TOKENS, q4_0-decode:DEPTH (llama.cpp on the same
model requantised to Q4_0, its best file, against our Q4_1), floor (our decode beside the memory bandwidth of the run),
ready, server, memory. llama.cpp gets the best of its options: flash attention on and off, and for long prompts physical
batches of 512 and 2048 rows, are tried once for each row, and the best is then measured in turn with ours.
"""
import argparse
import json
import pathlib
import statistics
import sys

sys.path.insert(0, str(pathlib.Path(__file__).parent))
from compare_servers import SERVER_ROWS  # noqa: E402
from rows import check_files, check_rows, output  # noqa: E402

ROWS = ("prefill:128,prefill:512,prefill:2048,prefill:8000,decode:0,decode:512,decode:2048,decode:4096,decode:8000,"
        "batch:8@128,batch:32@128,batch:8@1024,batch:32@1024,q4_0-prefill:512,q4_0-decode:0,floor,ready,server,memory")

parser = argparse.ArgumentParser()
parser.add_argument("--llama-bin", required=True)
parser.add_argument("--loupe", default="build/release/loupe")
parser.add_argument("--threads", type=int, default=2)
parser.add_argument("--repeat", type=int, default=5)
parser.add_argument("--model", required=True)
parser.add_argument("--rows", default=ROWS)
parser.add_argument("--check", action="store_true", help="only look at the arguments")
args = parser.parse_args()
check_rows(parser, args.rows, {"prefill": "N", "decode": "N", "batch": "N@N", "q4_0-prefill": "N", "q4_0-decode": "N", "floor": "",
                               "ready": "", "server": "", "memory": ""})
if args.repeat < 1:
    parser.error(f"--repeat {args.repeat}: at least one run")
check_files(parser, args.model, args.loupe)
if args.check:
    sys.exit(0)
check_files(parser, *(f"{args.llama_bin}/llama-{name}" for name in ("bench", "batched-bench", "server", "quantize")))


def loupe(case, context, batch=1, tokens=48):
    return json.loads(output([args.loupe, "bench", case, "--model", args.model, "--threads", args.threads, "--context", context,
                              "--batch", batch, "--tokens", tokens, "--repeat", 1, "--json"]))


def llama_bench(model, prompt, tokens, depth, option):
    flash, _, rows = option.partition("/")
    rows = json.loads(output([f"{args.llama_bin}/llama-bench", "-m", model, "-t", args.threads, "-p", prompt, "-n", tokens, "-d", depth,
                              "-fa", flash, "-ub", rows or 512, "-r", 1, "-o", "json"] + (["--no-warmup"] if max(prompt, depth) >= 4000 else [])))
    return max(r["avg_ts"] for r in rows)


def llama_batched(batch, depth, flash, tokens=48):
    out = output([f"{args.llama_bin}/llama-batched-bench", "-m", args.model, "-t", args.threads, "-npp", depth, "-ntg", tokens, "-npl", batch,
                  "-c", (depth + tokens) * batch + 256, "-fa", flash, "--output-format", "jsonl"])
    return json.loads([line for line in out.splitlines() if line.startswith("{")][-1])["speed_tg"]


def requantised():
    path = pathlib.Path("build/llamacpp-q4_0.gguf")
    if not path.exists():
        path.parent.mkdir(exist_ok=True)
        output([f"{args.llama_bin}/llama-quantize", "--allow-requantize", args.model, path, "Q4_0", args.threads])
    return path


def measure(ours, theirs, options):
    """Medians of both sides, measured in turn; `theirs` takes an option, of which the best is found first."""
    best = max(options, key=theirs) if len(options) > 1 else options[0]
    a, b = [], []
    for _ in range(args.repeat):
        b.append(theirs(best))
        a.append(ours())
    return statistics.median(a), statistics.median(b)


def speed_row(name, ours, theirs, options=("0", "1")):
    a, b = measure(ours, theirs, options)
    print(f"| {name} | {b:.0f} tokens/s | {a:.0f} tokens/s | {a / b:.2f} |", flush=True)


def run(row):
    kind, _, value = row.partition(":")
    if kind in SERVER_ROWS:
        return SERVER_ROWS[kind](args)
    if kind == "floor":
        shares = [loupe("decode", 0, tokens=128) for _ in range(args.repeat)]
        share = statistics.median(r["share_of_limit"] for r in shares)
        limit = statistics.median(r["limit_gbps"] for r in shares)
        return print(f"| decode at depth 0, share of {limit:.1f} GB/s | | {share:.2f} | |", flush=True)
    model = requantised() if kind.startswith("q4_0-") else args.model
    note = ", llama.cpp on Q4_0" if kind.startswith("q4_0-") else ""
    if kind.endswith("prefill"):
        n = int(value)
        return speed_row(f"prefill of {n} tokens{note}", lambda: loupe("prefill", n)["tokens_per_s"],
                         lambda option: llama_bench(model, n, 0, 0, option), ("0", "1") if n <= 512 else ("0", "1", "0/2048", "1/2048"))
    if kind.endswith("decode"):
        n = int(value)
        return speed_row(f"decode at depth {n}{note}", lambda: loupe("decode", n)["tokens_per_s"],
                         lambda flash: llama_bench(model, 0, 48, n, flash))
    if kind == "batch":
        batch, depth = (int(x) for x in value.split("@"))
        return speed_row(f"{batch} sequences at depth {depth}", lambda: loupe("decode", depth, batch)["tokens_per_s"],
                         lambda flash: llama_batched(batch, depth, flash), ("off", "on"))


info = json.loads(output([f"{args.llama_bin}/llama-bench", "-m", args.model, "-t", args.threads, "-p", 8, "-n", 0, "-r", 1, "-o", "json"]))[0]
print(f"llama.cpp {info['build_commit']}: {info['cpu_info']}, {info['n_threads']} threads\n")
print("| work | llama.cpp, best of its options | loupe | ratio |\n|---|---|---|---|", flush=True)
for one in args.rows.split(","):
    run(one)
