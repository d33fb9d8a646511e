"""Writes items for `loupe eval items`: a fact hidden in running text at a drawn depth, asked for at the end.

  python3 tests/quality/make_items.py --text build/quality/heldout --tokens 2048 --items 48 --out items.jsonl

Tasks: `number` hides one number; `number_of_four` hides four that differ in their keys and asks for one of them. Depths are
the middles of eight equal parts of the text, so that a policy that keeps the last x of it sees x of the facts. Every item
draws its own text, key and value; the same arguments give the same file.
"""

import argparse
import json
import pathlib
import random
import re
import subprocess

ADJECTIVES = "amber brisk coral dusty eager frosty gilded hollow ivory jolly keen lunar mellow narrow olive plain quiet rusty silver tidy".split()
NOUNS = "anchor basket candle drum engine feather garden hammer island jacket kettle ladder mirror needle orchard pillow ribbon saddle trumpet wagon".split()


def tokens_in(loupe, model, text):
    out = subprocess.run([loupe, "tokenize", "--model", model, "--json"], input=text, capture_output=True, text=True, check=True).stdout
    return len(json.loads(out)["tokens"])


def sentences_of(book):
    """Sentences without digits: a number in the text could be mistaken for the one that is asked for."""
    text = re.sub(r"\s+", " ", book)
    return [s for s in re.findall(r"[A-Z][^.!?]{30,300}[.!?]", text) if not re.search(r"\d", s)]


def fact(key, value):
    return f"Remember that the storage number of the {key} is {value}."


def make_item(rng, sentences, size, depth, facts, name):
    start = rng.randrange(len(sentences))
    body, length = [], 0
    for i in range(len(sentences)):
        sentence = sentences[(start + i) % len(sentences)]
        body.append(sentence)
        length += len(sentence) + 1
        if length >= size:
            break
    keys = rng.sample([f"{a} {n}" for a in ADJECTIVES for n in NOUNS], facts)
    values = [str(rng.randrange(100_000, 1_000_000)) for _ in range(facts)]
    depths = [depth] + [rng.random() for _ in range(facts - 1)]
    for key, value, at in sorted(zip(keys, values, depths), key=lambda f: -f[2]):
        body.insert(round(at * len(body)), fact(key, value))
    return {
        "id": name, "task": "number" if facts == 1 else "number_of_four", "context": " ".join(body),
        "question": f"\n\nQuestion: According to the text above, what is the storage number of the {keys[0]}?\n",
        "answer_prefix": f"Answer: The storage number of the {keys[0]} is", "answers": [values[0]], "distractors": values[1:],
        "scoring": "contains_all", "max_new_tokens": 16, "depth": depth,
    }


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--text", type=pathlib.Path, required=True)
    parser.add_argument("--tokens", type=int, default=2048, help="of context and question together")
    parser.add_argument("--items", type=int, default=48)
    parser.add_argument("--facts", type=int, default=1, choices=(1, 4))
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--loupe", default="build/release/loupe")
    parser.add_argument("--model", default="models/SmolLM2-135M-Instruct.Q4_1.gguf")
    parser.add_argument("--out", type=pathlib.Path, required=True)
    args = parser.parse_args()
    for path, flag in ((args.loupe, "--loupe"), (args.model, "--model"), (args.text, "--text")):
        if not pathlib.Path(path).exists():
            parser.error(f"{flag}: no such file: {path}")
    books = [sentences_of(p.read_text("utf-8")) for p in sorted(args.text.glob("*.txt"))]
    sample = " ".join(books[0][:400])
    bytes_per_token = len(sample) / tokens_in(args.loupe, args.model, sample)
    size = int((args.tokens - 60 - 24 * args.facts) * bytes_per_token)
    with args.out.open("w", encoding="utf-8") as out:
        for i in range(args.items):
            rng = random.Random(f"{args.seed}/{args.tokens}/{args.facts}/{i}")
            item = make_item(rng, books[i % len(books)], size, (2 * (i % 8) + 1) / 16, args.facts, f"f{args.facts}-{args.tokens}-s{args.seed}-{i}")
            out.write(json.dumps(item) + "\n")


if __name__ == "__main__":
    main()
