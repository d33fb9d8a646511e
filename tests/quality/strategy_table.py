"""PolyKV beside the primitives at equal bytes and equal protection: the tables of docs/quality.md. Goes on where it was
interrupted.

  python3 tests/quality/strategy_table.py --model models/SmolLM2-135M-Instruct.Q4_1.gguf --items build/quality/items-2048.jsonl

Four strategies are fitted to the same measurements (made on train text, kept in --out): one that chooses for each kv head, one
for each layer, and two of kv heads in which only the pattern or only the budget differs between lists."""

import argparse
import concurrent.futures
import json
import os
import pathlib
import subprocess
import sys

PRIMITIVES = "streaming h2o tova snapkv adakv pyramidkv chunkkv keydiff".split()
FORMS = {"head": [], "layer": ["--per", "layer"], "pattern": ["--vary", "pattern"], "budget": ["--vary", "budget"]}
MEANS = [128, 256, 512, 1024]  # entries a list
NEEDLE_MEANS = [256, 512]


def run(args, *command):
    command = [args.loupe, *command, "--model", args.model, "--threads", str(args.threads)]
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    if done.returncode != 0:
        sys.exit(f"error: {' '.join(command)}\n{done.stderr[-2000:]}")
    return done.stdout


def calibrate(args):
    for form, flags in FORMS.items():
        out = args.out / f"{form}.json"
        if not out.exists():
            run(args, "calibrate", "polykv", "--text", str(args.train), "--items", str(args.train_items), "--results",
                str(args.out / "polykv.jsonl"), "--out", str(out), *flags)


def kv(name, ratio):
    """Answers come on top in every policy, so budgets mean the same in all of them."""
    if name in FORMS:
        return {"policy": "polykv", "strategy": name, "budget": {"ratio": ratio}, "params": {"decode": "append"}}
    return {"policy": name, "budget": {"ratio": ratio}, "params": {"decode": "append"}}


def evaluate(args, suite, context, mean, names, flags):
    """Rows of one process, by name."""
    results = args.out / f"strategy-{suite}-{context}-{mean}-{'+'.join(names)}.jsonl"
    objects = [flag for name in names for flag in ("--kv", json.dumps(kv(name, mean / context)))]
    strategies = [flag for form in FORMS for flag in ("--strategy", str(args.out / f"{form}.json"))]
    lines = run(args, "eval", suite.split("-")[0], "--json", "--results", str(results), *flags, *strategies, *objects).splitlines()
    return {(suite, context, mean, name): json.loads(line) for name, line in zip(names, lines)}


def all_rows(args):
    """The grid in pieces of a few policies, several at a time."""
    tasks = []
    for context in args.contexts:
        flags = ["--text", str(args.text), "--context", str(context), "--windows", str(args.windows), "--continuation", "128"]
        tasks += [("kl", context, mean, flags) for mean in MEANS]
    for items in args.items:
        for question in ("outside", "inside"):
            flags = ["--items", str(items), "--question", question]
            tasks += [(f"items-{question}", 2048, mean, flags) for mean in NEEDLE_MEANS]
    names = [*FORMS, *PRIMITIVES]
    pieces = [(suite, context, mean, names[i:i + args.policies_a_process], flags)
              for suite, context, mean, flags in sorted(tasks, key=lambda t: -t[1]) for i in range(0, len(names), args.policies_a_process)]
    rows = {}
    with concurrent.futures.ThreadPoolExecutor(args.jobs) as pool:
        done = [pool.submit(evaluate, args, *piece) for piece in pieces]
        for number, piece in enumerate(concurrent.futures.as_completed(done), 1):
            rows.update(piece.result())
            print(f"{number} of {len(pieces)}", file=sys.stderr, flush=True)
    return rows


def print_kl(args, rows):
    for context in args.contexts:
        print(f"\n{context} tokens, {args.windows} windows: KL in nats, half of its 95 % interval, share of the full cache's bytes\n")
        print("| policy | " + " | ".join(f"{m} entries a list" for m in MEANS) + " |\n|" + "---|" * (len(MEANS) + 1))
        for name in [*PRIMITIVES, *FORMS]:
            cells = [rows["kl", context, mean, name] for mean in MEANS]
            label = f"polykv: {name}" if name in FORMS else name
            print(f"| {label} | " + " | ".join(f"{c['kl_mean']:.4f} ±{(c['kl_ci95'][1] - c['kl_ci95'][0]) / 2:.4f}, "
                                               f"{c['bytes_ratio'] * 100:.2f} %" for c in cells) + " |")
    print("\nRecovered, 1 - KL(polykv) / KL(best primitive), mean over contexts\n")
    print("| strategy | " + " | ".join(f"{m}" for m in MEANS) + " |\n|" + "---|" * (len(MEANS) + 1))
    for form in FORMS:
        shares = []
        for mean in MEANS:
            of = [1 - rows["kl", c, mean, form]["kl_mean"] / min(rows["kl", c, mean, p]["kl_mean"] for p in PRIMITIVES)
                  for c in args.contexts]
            shares.append(f"{sum(of) / len(of):.2f} ({', '.join(f'{x:.2f}' for x in of)})")
        print(f"| {form} | " + " | ".join(shares) + " |")


def print_items(rows):
    for suite in sorted({key[0] for key in rows} - {"kl"}):
        print(f"\nRecall at 2048, beside the full cache, question {suite.split('-')[1]}; NLL of the right answer\n")
        print("| policy | " + " | ".join(f"{m} entries a list" for m in NEEDLE_MEANS) + " |\n|" + "---|" * (len(NEEDLE_MEANS) + 1))
        for name in [*PRIMITIVES, *FORMS]:
            cells = [rows[suite, 2048, mean, name] for mean in NEEDLE_MEANS]
            print(f"| {name} | " + " | ".join(f"{c['recall_relative'] * 100:.0f} %, {c['gold_nll']:.2f}" for c in cells) + " |")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--loupe", default="build/release/loupe")
    parser.add_argument("--model", required=True)
    parser.add_argument("--text", type=pathlib.Path, default=pathlib.Path("build/quality/heldout"))
    parser.add_argument("--train", type=pathlib.Path, default=pathlib.Path("build/quality/train"))
    parser.add_argument("--train-items", type=pathlib.Path, default=pathlib.Path("build/quality/train-items.jsonl"))
    parser.add_argument("--items", type=pathlib.Path, action="append", default=[], help="of 2048 tokens, made by make_items.py")
    parser.add_argument("--out", type=pathlib.Path, default=pathlib.Path("build/quality"))
    parser.add_argument("--contexts", type=int, nargs="*", default=[2048, 4096])
    parser.add_argument("--windows", type=int, default=16)
    parser.add_argument("--jobs", type=int, default=os.cpu_count(), help="processes at a time")
    parser.add_argument("--threads", type=int, default=1, help="of a process")
    parser.add_argument("--policies-a-process", type=int, default=6, help="share one pass over each window")
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    calibrate(args)
    rows = all_rows(args)
    print_kl(args, rows)
    print_items(rows)


if __name__ == "__main__":
    main()
