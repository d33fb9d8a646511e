#!/usr/bin/env python3
"""Figures of structured output, for docs/benchmarks.md: masks over the corpus of the oracle test, compile times of random schemas
and expressions, and decode speed with a schema beside decode without, in turn.

Run after  cmake --build --preset release --target grammar_figures loupe."""
import json
import pathlib
import random
import statistics
import subprocess
import sys
import time

ROOT = pathlib.Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "tests/e2e")]
from conftest import MODEL, MODEL_NAME, Server  # noqa: E402
from schemas import corpus, random_schema, texts  # noqa: E402

TOOL = ROOT / "build/release/grammar_figures"


def run(lines, *flags):
    text = "".join(json.dumps(line) + "\n" for line in lines)
    return [json.loads(line) for line in subprocess.run([TOOL, *flags], input=text, capture_output=True, text=True, check=True).stdout.splitlines()]


def masks():
    rng = random.Random(5)
    lines = [{"kind": "json_schema", "text": json.dumps(s), "inputs": texts(s, rng)[::2]} for s in corpus()]
    print("masks, each schema compiled afresh:", json.dumps(run(lines, "--model", str(MODEL))[-1]))


def random_regex(rng, depth=0):
    atoms = ["a", "b", "[a-z]", "\\d", "\\w", ".", "\u00e9", "[^x]", "\\p{L}", "(?:foo|bar)"]
    out = ""
    for _ in range(rng.randrange(1, 6)):
        atom = rng.choice(atoms) if depth > 3 or rng.random() < .6 else f"({random_regex(rng, depth + 1)})"
        out += atom + rng.choice(["", "", "*", "+", "?", f"{{{rng.randrange(4)},{rng.randrange(4, 300)}}}"])
    return out if rng.random() < .7 else out + "|" + rng.choice(atoms)


def compiling():
    rng = random.Random(6)
    lines = [{"kind": "json_schema", "text": json.dumps(random_schema(rng))} for _ in range(500)] + [{"kind": "regex", "text": random_regex(rng)} for _ in range(500)]
    out = run(lines, "--model", str(MODEL))
    times = sorted(o["compile_us"] / 1000 for o in out if "compile_us" in o)
    print(f"compiling {len(times)} random schemas and expressions: median {statistics.median(times):.2f} ms, p99 {times[-len(times) // 100]:.1f} ms, "
          f"most {times[-1]:.1f} ms, refused {sum(bool(o['status']) for o in out if 'status' in o)}")


def decoding(rounds=7, tokens=200):
    schema = {"type": "object", "required": ["text", "more"], "additionalProperties": False,
              "properties": {"text": {"type": "string", "minLength": 4000}, "more": {"type": "array", "items": {"type": "integer"}}}}
    server = Server()
    client, ratios = server.client(), []
    for _ in range(rounds):
        speed = []
        for extra in ({}, {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}}):
            start = time.monotonic()
            r = client.chat.completions.create(model=MODEL_NAME, messages=[{"role": "user", "content": "Tell me a long story in JSON."}], temperature=1, seed=1,
                                               max_tokens=tokens, extra_body={"ignore_eos": True}, **extra)
            assert r.usage.completion_tokens == tokens
            speed.append(tokens / (time.monotonic() - start))
        ratios.append(speed[1] / speed[0])
    server.stop()
    print(f"decode with a schema beside without, {rounds} pairs of {tokens} tokens: median {statistics.median(ratios):.3f}, {min(ratios):.3f} to {max(ratios):.3f}")


if __name__ == "__main__":
    wanted = sys.argv[1:] or ["masks", "compiling", "decoding"]
    for name in wanted:
        {"masks": masks, "compiling": compiling, "decoding": decoding}[name]()
