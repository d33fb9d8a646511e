"""Runs both sides of each row in turn and prints medians and ratios as a Markdown table. Called by compare_llamacpp.sh."""
import argparse
import json
import statistics
import subprocess

parser = argparse.ArgumentParser()
parser.add_argument("--llama-bin", required=True)
parser.add_argument("--threads", type=int, default=2)
parser.add_argument("--repeat", type=int, default=5)
parser.add_argument("--model", required=True)
parser.add_argument("--rows", default="prefill:128,prefill:512,prefill:2048,decode:0,decode:512,decode:2048,batch:8,batch:32")
args = parser.parse_args()


def output(command):
    r = subprocess.run(command, capture_output=True, text=True)
    if r.returncode:
        raise SystemExit(f"error: {' '.join(map(str, command))} ended with {r.returncode}:\n{r.stderr[-2000:]}")
    return r.stdout


def loupe(case, context, batch=1, tokens=48):
    out = output(["build/release/loupe", "bench", case, "--model", args.model, "--threads", str(args.threads), "--context", str(context),
                  "--batch", str(batch), "--tokens", str(tokens), "--repeat", "1", "--json"])
    return json.loads(out)["tokens_per_s"]


def llama_bench(prompt, tokens, depth):
    best = 0
    for flash in ("0", "1"):
        rows = json.loads(output([f"{args.llama_bin}/llama-bench", "-m", args.model, "-t", str(args.threads), "-p", str(prompt), "-n", str(tokens),
                                  "-d", str(depth), "-fa", flash, "-r", "1", "-o", "json"]))
        best = max([best] + [r["avg_ts"] for r in rows])
    return best


def llama_batched(batch, depth, tokens=48):
    out = output([f"{args.llama_bin}/llama-batched-bench", "-m", args.model, "-t", str(args.threads), "-npp", str(depth), "-ntg", str(tokens),
                  "-npl", str(batch), "-c", str((depth + tokens) * batch + 256), "--output-format", "jsonl"])
    return json.loads([line for line in out.splitlines() if line.startswith("{")][-1])["speed_tg"]


print("| work | llama.cpp, best of its options | loupe | ratio |\n|---|---|---|---|", flush=True)
for row in args.rows.split(","):
    kind, number = row.split(":")
    number = int(number)
    ours, theirs = [], []
    for _ in range(args.repeat):
        if kind == "prefill":
            theirs.append(llama_bench(number, 0, 0))
            ours.append(loupe("prefill", number))
        elif kind == "decode":
            theirs.append(llama_bench(0, 48, number))
            ours.append(loupe("decode", number))
        else:
            theirs.append(llama_batched(number, 128))
            ours.append(loupe("decode", 128, number))
    a, b = statistics.median(ours), statistics.median(theirs)
    name = {"prefill": f"prefill of {number} tokens", "decode": f"decode at depth {number}", "batch": f"{number} sequences at depth 128"}[kind]
    print(f"| {name} | {b:.0f} tokens/s | {a:.0f} tokens/s | {a / b:.2f} |", flush=True)
