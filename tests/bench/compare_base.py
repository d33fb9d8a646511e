"""Runs the same `loupe bench` with two binaries in turn and prints medians and their ratio. Called by compare_base.sh."""
import argparse
import json
import pathlib
import statistics
import sys

sys.path.insert(0, str(pathlib.Path(__file__).parent))
from rows import check_files, check_rows, output  # noqa: E402

parser = argparse.ArgumentParser()
parser.add_argument("--base", required=True)
parser.add_argument("--new", default="build/release/loupe")
parser.add_argument("--name", default="base")
parser.add_argument("--model", required=True)
parser.add_argument("--threads", default="2")
parser.add_argument("--repeat", type=int, default=7)
parser.add_argument("--rows", required=True)
parser.add_argument("--check", action="store_true", help="only look at the arguments")
args = parser.parse_args()
check_rows(parser, args.rows, {"prefill": "N", "decode": "N", "batch": "N@N"})
if args.repeat < 1:
    parser.error(f"--repeat {args.repeat}: at least one run")
check_files(parser, args.model)
if args.check:
    sys.exit(0)
check_files(parser, args.base, args.new)


def tokens_per_s(binary, row):
    kind, _, value = row.partition(":")
    batch, depth = value.split("@") if kind == "batch" else ("1", value)
    return json.loads(output([binary, "bench", "prefill" if kind == "prefill" else "decode", "--model", args.model,
                              "--threads", args.threads, "--context", depth, "--batch", batch, "--tokens", "48", "--repeat", "1",
                              "--json"]))["tokens_per_s"]


print(f"| work | {args.name} | this checkout | ratio | smallest and largest ratio of a pair |\n|---|---|---|---|---|", flush=True)
for one in args.rows.split(","):
    before, after = [], []
    for _ in range(args.repeat):
        before.append(tokens_per_s(args.base, one))
        after.append(tokens_per_s(args.new, one))
    ratios = [b / a for a, b in zip(before, after)]
    a, b = statistics.median(before), statistics.median(after)
    print(f"| {one} | {a:.0f} tokens/s | {b:.0f} tokens/s | {b / a:.3f} | {min(ratios):.3f}, {max(ratios):.3f} |", flush=True)
