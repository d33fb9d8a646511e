"""How evenly answers get worse as budgets fall: tool calls and step-by-step notes, whose answers by the full cache are what every
policy is asked for. Prints, for each of eight budgets, the NLL of the full cache's answer, how much it rose from the budget before,
exact answers, and the share of words before the first difference.

  python3 tests/quality/graceful.py --model models/SmolLM2-135M-Instruct.Q4_1.gguf --out build/quality
"""

import argparse
import json
import pathlib
import random
import subprocess

RATIOS = [.54, .27, .18, .125, .09, .0625, .045, .031]
POLICIES = ["spherical", "snapkv", "adakv", "h2o"]
VERBS = "book cancel list move rename send share sort start stop update verify".split()
THINGS = "alarm calendar contact document folder invoice meeting note order parcel playlist report room ticket".split()
FIELDS = "name date place owner size colour price count".split()
STEPS = ["Weigh {n} grams of {a} and set them aside.", "Warm the {a} to {n} degrees.", "Mix the {a} with the {b} for {n} minutes.",
         "Wait {n} minutes until the {a} has settled.", "Cut the {a} into {n} equal parts.", "Write {n} on the label of the {a}."]
STUFF = "barley butter carrots flour honey lentils milk oats onions pepper rice salt sugar vinegar yeast".split()


def tool_prompt(rng):
    tools = rng.sample([(v, t) for v in VERBS for t in THINGS], 44)
    lines = []
    for verb, thing in tools:
        fields = rng.sample(FIELDS, 3)
        lines.append(f'Tool {verb}_{thing}: use it to {verb} a {thing}. Example of a call: {{"tool": "{verb}_{thing}", "arguments": '
                     + "{" + ", ".join(f'"{f}": "{rng.choice(STUFF)}"' for f in fields) + "}}")
    verb, thing = rng.choice(tools)
    context = "You answer every request with one call of a tool, written as in its example.\n\n" + "\n".join(lines)
    return "tool_call", context, f'\n\nRequest: please {verb} the {thing}.\nCall: {{"tool": "{verb}_{thing}",', 40


def step_prompt(rng):
    steps = []
    for i in range(110):
        a, b = rng.sample(STUFF, 2)
        steps.append(f"Step {i + 1}. " + rng.choice(STEPS).format(a=a, b=b, n=rng.randrange(2, 90)))
    at = rng.randrange(10, 90)
    return "steps", "A long recipe, step by step.\n\n" + "\n".join(steps), f"\n\nThe recipe once more from step {at} on:\nStep {at}.", 48


def run(args, *command):
    done = subprocess.run([args.loupe, *command, "--json", "--model", args.model, "--threads", str(args.threads)], capture_output=True,
                          text=True, check=True)
    return [json.loads(line) for line in done.stdout.splitlines()]


def make_items(args, path):
    """What the full cache answers is what is asked of all policies, to the letter: a first pass only collects it."""
    items = []
    for i in range(args.items):
        rng = random.Random(f"graceful/{i}")
        task, context, question, tokens = (tool_prompt if i % 2 == 0 else step_prompt)(rng)
        items.append({"id": f"{task}-{i}", "task": task, "context": context, "question": question, "answer_prefix": "", "answers": ["?"],
                      "scoring": "lcp_words", "max_new_tokens": tokens})
    unanswered, answers = path.with_suffix(".unanswered"), path.with_suffix(".answers")
    unanswered.write_text("".join(json.dumps(item) + "\n" for item in items), encoding="utf-8")
    run(args, "eval", "items", "--items", str(unanswered), "--results", str(answers), "--kv", '{"policy": "full"}')
    cells = [json.loads(line) for line in answers.open(encoding="utf-8")]
    full = {}
    for cell in cells:
        if cell.get("cell", "").endswith("|full cache"):
            full[cell["cell"].split("|")[2].split()[0]] = cell["result"]["answer"]
    part = path.with_suffix(".part")  # a file under its own name is whole
    part.write_text("".join(json.dumps({**item, "answers": [full[item["id"]]]}) + "\n" for item in items if full[item["id"]].strip()),
                    encoding="utf-8")
    part.rename(path)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--loupe", default="build/release/loupe")
    parser.add_argument("--model", required=True)
    parser.add_argument("--items", type=int, default=32, help="half of them tool calls")
    parser.add_argument("--out", type=pathlib.Path, default=pathlib.Path("build/quality"))
    parser.add_argument("--threads", type=int, default=0)
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    items = args.out / f"graceful-{args.items}.jsonl"
    if not items.exists():
        make_items(args, items)
    rows = {}
    for policy in POLICIES:
        objects = [{"policy": policy, "budget": {"ratio": r}, **({} if policy == "spherical" else {"params": {"decode": "append"}})} for r in RATIOS]
        flags = [flag for o in objects for flag in ("--kv", json.dumps(o))]
        rows[policy] = run(args, "eval", "items", "--items", str(items), "--results", str(args.out / f"graceful-{policy}.jsonl"), *flags)
    full = rows[POLICIES[0]][0]
    print(f"{full['items']} items; the full cache's own NLL is {full['gold_nll_full']:.3f}\n")
    print("| policy | " + " | ".join(f"{r * 100:g} %" for r in RATIOS) + " |\n|" + "---|" * (len(RATIOS) + 1))
    for policy, of in rows.items():
        before = full["gold_nll_full"]
        cells = []
        for row in of:
            cells.append(f"{row['gold_nll']:.3f} ({row['gold_nll'] - before:+.3f}), {row['answered']}/{row['answered_full']}, {row['recall']:.2f}")
            before = row["gold_nll"]
        print(f"| {policy} | " + " | ".join(cells) + " |")
    rises = {p: [of[i + 1]["gold_nll"] - of[i]["gold_nll"] for i in range(len(RATIOS) - 1)] for p, of in rows.items()}
    for policy in POLICIES[1:]:
        smaller = sum(a < b for a, b in zip(rises["spherical"], rises[policy]))
        print(f"\nspherical rises less than {policy} in {smaller} of {len(RATIOS) - 1} steps")


if __name__ == "__main__":
    main()
