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


COSTLY = [{"kind": "regex", "text": t} for t in (
    "a{0,65536}", "a{0,60000}b{0,60000}c{0,60000}", "\\p{L}{0,300}", "\\p{L}{0,1500}", "(\\p{L}|\\p{N}){0,400}", "[^x]{0,20000}", "[^\\p{L}]{0,900}",
    "(((a?){50}){50}){50}b", "((a{0,60000}){0,60000}){0,60000}", "([ab]*a[ab]{900}c|[ab]*b[ab]{899}d)x*", "(.*|.){1,287}\\w{0,900}", "(\\w*){0,3000}",
    "(" + "|".join(f"\\p{{L}}{{{i}}}" for i in range(60)) + ")", "[" + "".join(chr(0x100 + 2 * i) for i in range(4000)) + "]{0,60}")]
COSTLY += [{"kind": "json_schema", "text": json.dumps(s)} for s in (
    {"type": "array", "minItems": 20000}, {"type": "string", "maxLength": 60000}, {"type": "string", "minLength": 9000, "maxLength": 30000},
    {"type": "object", "properties": {f"p{i}": {"type": "string", "maxLength": 200} for i in range(300)}},
    {"type": "object", "properties": {f"p{i}": {"type": "number", "minimum": -10**9 + .123, "maximum": 10**9 + .7} for i in range(800)}},
    {"enum": [f"value {i} " * 9 for i in range(3000)]}, {"type": "string", "pattern": "\\p{L}{0,900}"},
    {"$defs": {"t": {"anyOf": [{"type": "array", "items": {"$ref": "#/$defs/t"}, "minItems": i} for i in range(40)]}}, "$ref": "#/$defs/t"},
    {"allOf": [{"anyOf": [{"properties": {f"k{i}{j}": {"type": "string"}}} for j in range(12)]} for i in range(6)]},
    {"properties": {f"o{i}": {"type": "integer", "multipleOf": 997} for i in range(40)}})]


def compiling(seeds=(6, 7, 8)):
    """Bounded in size, so any that is slow is a fault. CPU time beside the clock's: a busy machine stretches only the latter."""
    for seed in seeds:
        rng = random.Random(seed)
        lines = [{"kind": "json_schema", "text": json.dumps(random_schema(rng))} for _ in range(500)]
        lines += [{"kind": "regex", "text": random_regex(rng)} for _ in range(500)]
        report(f"1,000 random schemas and expressions, seed {seed}", run(lines, "--model", str(MODEL)))
    report("the costliest that are known", run(COSTLY, "--model", str(MODEL)))


def report(what, out):
    out = [o for o in out if "compile_us" in o]
    for clock in ("compile_us", "compile_cpu_us"):
        times = sorted(o[clock] / 1000 for o in out)
        print(f"{what}, {clock}: median {statistics.median(times):.2f} ms, p99 {times[int(.99 * (len(times) - 1))]:.1f} ms, most {times[-1]:.1f} ms, "
              f"refused {sum(bool(o['status']) for o in out)} of {len(out)}", flush=True)


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
