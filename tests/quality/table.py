"""Runs `loupe eval` over every policy and budget, prints the tables of docs/quality.md. Goes on where it was interrupted.

  python3 tests/quality/table.py --model models/SmolLM2-135M-Instruct.Q4_1.gguf --out build/quality
"""

import argparse
import json
import pathlib
import subprocess

POLICIES = "streaming h2o tova snapkv adakv pyramidkv chunkkv keydiff knorm random".split()
RATIOS = [0.5, 0.25, 0.125, 0.0625]
ITEM_RATIOS = [0.25, 0.125]


def kv_flags(policies, ratios):
    objects = [{"policy": p, "budget": {"ratio": r}} for p in policies for r in ratios]
    return [flag for o in objects for flag in ("--kv", json.dumps(o))]


def loupe(args, *command):
    done = subprocess.run([args.loupe, "eval", command[0], "--json", "--model", args.model, "--threads", str(args.threads), *command[1:]],
                          stdout=subprocess.PIPE, text=True, check=True)
    return [json.loads(line) for line in done.stdout.splitlines()]


def kl_table(args, context):
    rows = loupe(args, "kl", "--text", str(args.text), "--context", str(context), "--windows", str(args.windows), "--continuation", "128",
                 "--results", str(args.out / f"kl-{context}.jsonl"), "--plot", str(args.out / f"kl-{context}.svg"),
                 *kv_flags(args.policies, RATIOS))
    print(f"\n{context} tokens, {args.windows} windows: KL in nats, half of its 95 % interval, top-1 agreement, NLL gap\n")
    pivot(rows, RATIOS, lambda r: f"{r['kl_mean']:.4f} ±{(r['kl_ci95'][1] - r['kl_ci95'][0]) / 2 / r['kl_mean'] * 100:.0f} %, "
                                  f"{r['top1'] * 100:.1f} %, {r['nll_gap']:+.3f}")


def pivot(rows, ratios, cell):
    """A line for each policy, a column for each budget."""
    print("| policy | " + " | ".join(f"{r * 100:g} % of the bytes" for r in ratios) + " |\n|" + "---|" * (len(ratios) + 1))
    for at in range(0, len(rows), len(ratios)):
        line = rows[at:at + len(ratios)]
        print(f"| {line[0]['kv']['policy']} | " + " | ".join(cell(r) for r in line) + " |", flush=True)


def item_table(args, items, question):
    rows = loupe(args, "items", "--items", str(items), "--question", question,
                 "--results", str(args.out / f"{items.stem}-{question}.jsonl"), *kv_flags(args.policies, ITEM_RATIOS))
    print(f"\n{items.stem}, question {question} the compressed span; the full cache answers {rows[0]['recall_full'] * 100:.0f} % of "
          f"{rows[0]['items']} items, gold NLL {rows[0]['gold_nll_full']:.3f}: recall beside it, gold NLL\n")
    pivot(rows, ITEM_RATIOS, lambda r: f"{r['recall_relative'] * 100:.0f} %, {r['gold_nll']:.3f}")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--loupe", default="build/release/loupe")
    parser.add_argument("--model", required=True)
    parser.add_argument("--text", type=pathlib.Path, default=pathlib.Path("build/quality/heldout"))
    parser.add_argument("--items", type=pathlib.Path, action="append", default=[], help="files of make_items.py")
    parser.add_argument("--out", type=pathlib.Path, default=pathlib.Path("build/quality"))
    parser.add_argument("--contexts", type=int, nargs="*", default=[2048, 4096])
    parser.add_argument("--windows", type=int, default=32)
    parser.add_argument("--policies", nargs="*", default=POLICIES)
    parser.add_argument("--threads", type=int, default=0)
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    for context in args.contexts:
        kl_table(args, context)
    for items in args.items:
        for question in ("outside", "inside"):
            item_table(args, items, question)


if __name__ == "__main__":
    main()
