"""Policy spherical beside uniform bits, snapkv and adakv at equal bytes, and llama.cpp's q8_0 and q4_0 caches: the tables of
docs/quality.md. Goes on where it was interrupted.

  python3 tests/quality/spherical_table.py --model models/SmolLM2-135M-Instruct.Q4_1.gguf --text build/quality/heldout \\
    --items build/quality/items-1024.jsonl --items build/quality/items-2048.jsonl --items build/quality/items-4096.jsonl

Contexts are compressed before the continuation or the question is seen. Rivals are computed once a context, in the row of the
budget that is nearest to theirs."""

import argparse
import concurrent.futures
import json
import os
import pathlib
import subprocess
import sys

RATIOS = {2048: [.54, .27, .18, .125, .10, .0625, .031], 4096: [.53, .27, .18, .125, .10, .0625, .031]}
FORM_RATIOS = [.20, .125, .06]
UNIFORM = [({"key": 8, "value": 8}, "s8"), ({"key": 4, "value": 4}, "s4"), ({"key": 4, "value": 2}, "s4v2"),
           ({"key": 3, "value": 2}, "s3v2"), ({"key": 2, "value": 2}, "s2")]


def budget(policy, ratio, **more):
    return {"policy": policy, "budget": {"ratio": ratio}, **more}


def run(args, *command):
    command = [args.loupe, *command, "--json", "--model", args.model, "--threads", str(args.threads)]
    for artifact in args.strategy:
        command += ["--strategy", artifact]
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    if done.returncode != 0:
        print(f"error: {' '.join(command)}\n{done.stderr[-1000:]}", file=sys.stderr)
        return []
    return [json.loads(line) for line in done.stdout.splitlines()]


def objects(ratio):
    drop = {"params": {"decode": "append"}}
    return [("spherical", budget("spherical", ratio)), ("snapkv", budget("snapkv", ratio, **drop)),
            ("adakv", budget("adakv", ratio, **drop)),
            ("snapkv, 4 bits", budget("snapkv", ratio, bits={"key": 4, "value": 4}, **drop))]


def fixed():
    rows = [(f"spherical, uniform {name}", {"policy": "spherical", "bits": bits}) for bits, name in UNIFORM]
    return rows + [(f"llama.cpp {block}", {"policy": f"llamacpp-{block}"}) for block in ("q8_0", "q4_0")]


def forms(ratio):
    return [(form, budget("spherical", ratio, params={"retention": form})) for form in ("joint", "drop", "bits")]


def tasks_of(args):
    """(table, context, ratio or None, [(name, object)], command without --kv)"""
    tasks = []
    for context in args.contexts:
        flags = ["--text", str(args.text), "--context", str(context), "--windows", str(args.windows[context]), "--continuation",
                 str(args.continuation)]
        for ratio in RATIOS[context]:
            tasks.append(("kl", context, ratio, objects(ratio), ["eval", "kl", *flags]))
        for ratio in FORM_RATIOS:
            tasks.append(("forms", context, ratio, forms(ratio), ["eval", "kl", *flags]))
        tasks.append(("kl", context, None, fixed(), ["eval", "kl", *flags]))
    for items in args.items:
        length = int(items.stem.split("-")[-1])
        command = ["eval", "items", "--items", str(items)]
        for ratio in RATIOS[4096 if length > 2048 else 2048]:
            tasks.append(("items", length, ratio, objects(ratio), command))
        tasks.append(("items", length, None, fixed(), command))
    return tasks


def work(args, number, task):
    table, context, ratio, kinds, command = task
    rows = {}
    # One refusal does not lose the others.
    lines = run(args, *command, "--results", str(args.out / f"spherical-{table}-{context}-{ratio}.jsonl"),
                *[flag for _, kv in kinds for flag in ("--kv", json.dumps(kv))])
    if lines:
        for (name, _), line in zip(kinds, lines):
            rows[table, context, ratio, name] = line
        return rows
    for name, kv in kinds:
        for line in run(args, *command, "--results", str(args.out / f"spherical-{table}-{context}-{ratio}-{name.replace(' ', '')}.jsonl"),
                        "--kv", json.dumps(kv)):
            rows[table, context, ratio, name] = line
    return rows


def print_kl(args, rows):
    for context in args.contexts:
        kinds = [name for name, _ in objects(0)]
        print(f"\n{context} tokens, {args.windows[context]} windows, {args.continuation} predictions: KL in nats, half of its 95 % "
              "interval, bytes\n")
        print("| policy | " + " | ".join(f"{r * 100:g} %" for r in RATIOS[context]) + " |\n|" + "---|" * (len(RATIOS[context]) + 1))
        for name in kinds:
            print(f"| {name} | " + " | ".join(kl_cell(rows.get(("kl", context, r, name))) for r in RATIOS[context]) + " |")
        for name, _ in fixed():
            print(f"| {name} | {kl_cell(rows.get(('kl', context, None, name)))} |")
        print("\nForms at equal bytes: KL, its difference to joint with the paired 95 % interval, bytes\n")
        print("| form | " + " | ".join(f"{r * 100:g} %" for r in FORM_RATIOS) + " |\n|" + "---|" * (len(FORM_RATIOS) + 1))
        for name in ("joint", "drop", "bits"):
            print(f"| {name} | " + " | ".join(form_cell(rows.get(("forms", context, r, name))) for r in FORM_RATIOS) + " |")


def kl_cell(row):
    if row is None:
        return "refused"
    return f"{row['kl_mean']:.3g} ±{(row['kl_ci95'][1] - row['kl_ci95'][0]) / 2:.2g}, {row['bytes_ratio'] * 100:.2f} %"


def form_cell(row):
    if row is None:
        return "refused"
    low, high = row["kl_minus_first_ci95"]
    return f"{row['kl_mean']:.3g}, {row['kl_minus_first']:+.2g} [{low:+.2g}, {high:+.2g}], {row['bytes_ratio'] * 100:.2f} %"


def print_items(args, rows):
    lengths = sorted(int(items.stem.split("-")[-1]) for items in args.items)
    if not lengths:
        return
    print("\nNeedles, question outside the compressed span: items still answered of those that the full cache answers, at "
          + ", ".join(str(n) for n in lengths) + " tokens\n")
    names = [name for name, _ in objects(0)]
    ratios = RATIOS[2048]
    print("| policy | " + " | ".join(f"{r * 100:g} %" for r in ratios) + " |\n|" + "---|" * (len(ratios) + 1))

    def cell(ratio, name):
        counts, kept, full = [], 0, 0
        for n in lengths:
            own = RATIOS[4096][RATIOS[2048].index(ratio)] if ratio is not None and n > 2048 else ratio
            row = rows.get(("items", n, own, name))
            counts.append(f"{row['answered']}/{row['answered_full']}" if row else "refused")
            kept, full = kept + (row["answered"] if row else 0), full + (row["answered_full"] if row else 0)
        return f"{100 * kept / max(full, 1):.0f} % ({', '.join(counts)})"

    for name in names:
        print(f"| {name} | " + " | ".join(cell(r, name) for r in ratios) + " |")
    for name, _ in fixed():
        print(f"| {name} | {cell(None, name)} |")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--loupe", default="build/release/loupe")
    parser.add_argument("--model", required=True)
    parser.add_argument("--strategy", action="append", default=[], help="a profile in place of the one shipped")
    parser.add_argument("--text", type=pathlib.Path, default=pathlib.Path("build/quality/heldout"))
    parser.add_argument("--items", type=pathlib.Path, action="append", default=[], help="files of make_items.py named NAME-TOKENS.jsonl")
    parser.add_argument("--out", type=pathlib.Path, default=pathlib.Path("build/quality"))
    parser.add_argument("--contexts", type=int, nargs="*", default=[2048, 4096], choices=(2048, 4096))
    parser.add_argument("--windows", type=int, nargs=2, default=[18, 12], help="of 2048 and of 4096 tokens")
    parser.add_argument("--continuation", type=int, default=255)
    parser.add_argument("--jobs", type=int, default=os.cpu_count(), help="processes at a time")
    parser.add_argument("--threads", type=int, default=1, help="of a process")
    args = parser.parse_args()
    args.windows = dict(zip((2048, 4096), args.windows))
    args.out.mkdir(parents=True, exist_ok=True)
    tasks = sorted(tasks_of(args), key=lambda t: -t[1])
    rows = {}
    with concurrent.futures.ThreadPoolExecutor(args.jobs) as pool:
        done = [pool.submit(work, args, n, task) for n, task in enumerate(tasks)]
        for number, one in enumerate(concurrent.futures.as_completed(done), 1):
            rows.update(one.result())
            print(f"{number} of {len(tasks)}", file=sys.stderr, flush=True)
    print_kl(args, rows)
    print_items(args, rows)


if __name__ == "__main__":
    main()
