"""Grammars against llguidance and jsonschema: how far each text can be read, and whether it may end there, over a corpus of schemas."""
import json
import random
import re
import subprocess

import jsonschema
import llguidance

from conftest import BINARY
from schemas import corpus, texts

TOOL = BINARY.parent / "grammar_figures"
# Where both differ by intent: white space (here at most one space, or a line end with indentation, and none before ':' and ','),
# exponents of more than two digits, halves of surrogate pairs, keys that repeat.
SPACE = "( |\\n[ \\t]*)?"


def ours(cases):
    lines = "".join(json.dumps({"kind": "json_schema", "text": json.dumps(schema), "inputs": inputs}) + "\n" for schema, inputs in cases)
    out = subprocess.run([TOOL], input=lines, capture_output=True, text=True, check=True).stdout
    return [json.loads(line) for line in out.splitlines()]


def theirs(tokenizer, schema, inputs):
    grammar = llguidance.LLMatcher.grammar_from_json_schema(schema, {"whitespace_pattern": SPACE})
    read = []
    for text in inputs:
        matcher = llguidance.LLMatcher(tokenizer, grammar)
        assert not matcher.is_error(), matcher.get_error()
        data = list(text.encode())
        count = matcher.try_consume_tokens(data)
        read.append([count, count == len(data) and matcher.is_accepting()])
    return read


def differs_by_intent(text, count):
    """White space where only one of both lets it stand."""
    around = text.encode()[max(0, count - 2):count + 2].decode(errors="replace")
    return re.search(r"\s|[eE]", around) is not None


def test_prefixes_agree():
    rng = random.Random(3)
    cases = [(schema, texts(schema, rng)) for schema in corpus()]
    assert len(cases) >= 300
    tokenizer = llguidance.LLTokenizer("byte")
    refused, compared, intended, wrong = [], 0, 0, []
    for (schema, inputs), mine in zip(cases, ours(cases)):
        if mine["status"]:
            refused.append((schema, mine["status"]))
            continue
        for text, a, b in zip(inputs, mine["read"], theirs(tokenizer, schema, inputs)):
            compared += 1
            if a == b:
                continue
            if differs_by_intent(text, min(a[0], b[0])):
                intended += 1
            else:
                wrong.append((schema, text, a, b))
    print(f"{len(cases)} schemas, {compared} texts, {intended} differ by intent, {len(wrong)} otherwise, {len(refused)} refused")
    assert not refused, refused[:3]
    assert not wrong, wrong[:5]
    assert intended < compared / 50


def test_what_is_accepted_is_valid():
    rng = random.Random(4)
    cases = [(schema, texts(schema, rng)) for schema in corpus()]
    valid = 0
    for (schema, inputs), mine in zip(cases, ours(cases)):
        for text, (_, whole) in zip(inputs, mine["read"]):
            if whole:
                jsonschema.validate(json.loads(text), schema)
                valid += 1
    assert valid > 900
