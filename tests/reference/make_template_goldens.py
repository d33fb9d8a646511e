#!/usr/bin/env python3
"""Writes tests/golden/templates/goldens.json: what jinja2, set up as transformers does, makes of templates.

Needs jinja2==3.1.6 and gguf==0.19.0. Usage: make_template_goldens.py MODEL.gguf
The model's own template goes through the same conversations as the hand-written ones beside goldens.json; the short
cases below exercise one construct each. A case whose template fails has "error" in place of "output".
"""
import copy
import datetime
import json
import pathlib
import sys

import jinja2
from jinja2.ext import Extension
from jinja2.sandbox import ImmutableSandboxedEnvironment

from template_cases import CASES, CONVERSATIONS

OUT = pathlib.Path(__file__).resolve().parent.parent / "golden" / "templates"
NOW = datetime.datetime(2026, 7, 26, 15, 4, 5)  # a Sunday; the C++ test injects the same moment
BOS, EOS = "<s>", "</s>"


class Generation(Extension):
    """The {% generation %} tag, which only marks text."""
    tags = {"generation"}

    def parse(self, parser):
        line = next(parser.stream).lineno
        body = parser.parse_statements(["name:endgeneration"], drop_needle=True)
        return jinja2.nodes.CallBlock(self.call_method("_same"), [], [], body).set_lineno(line)

    def _same(self, caller):
        return caller()


def environment():
    def raise_exception(message):
        raise jinja2.exceptions.TemplateError(message)

    def tojson(x, ensure_ascii=False, indent=None, separators=None, sort_keys=False):
        return json.dumps(x, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)

    env = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[Generation, jinja2.ext.loopcontrols])
    env.filters["tojson"] = tojson
    env.globals["raise_exception"] = raise_exception
    env.globals["strftime_now"] = NOW.strftime
    return env


def render(source, variables):
    try:
        # A copy, because some filters of jinja2 change the lists they are given.
        shown = {"bos_token": BOS, "eos_token": EOS, "tools": None, "documents": None, **copy.deepcopy(variables)}
        return {"output": environment().from_string(source).render(**shown)}
    except Exception as error:  # any failure is an expected result
        return {"error": f"{type(error).__name__}: {error}"}


def model_template(path):
    from gguf import GGUFReader
    field = GGUFReader(path).get_field("tokenizer.chat_template")
    return bytes(field.parts[field.data[0]]).decode()


def main():
    families = {"model": model_template(sys.argv[1])}
    for file in sorted(OUT.glob("*.jinja")):
        families[file.stem] = file.read_text()
    cases = []
    for family, source in families.items():
        for name, variables in CONVERSATIONS.items():
            cases.append({"name": f"{family}/{name}", "family": family, "variables": variables, **render(source, variables)})
    for name, source, variables in CASES:
        cases.append({"name": name, "template": source, "variables": variables, **render(source, variables)})
    names = [c["name"] for c in cases]
    assert len(names) == len(set(names)), "case names must differ"
    head = json.dumps({"jinja2": jinja2.__version__, "model_template": families["model"]}, ensure_ascii=False)
    lines = ",\n".join(json.dumps(c, ensure_ascii=False) for c in cases)  # a case a line, for readable diffs
    (OUT / "goldens.json").write_text(head[:-1] + ', "cases": [\n' + lines + "\n]}\n", encoding="utf-8")
    failed = sum("error" in c for c in cases)
    print(f"{len(cases)} cases, {failed} of them fail on purpose")
    for c in cases:
        if "error" in c and not c["name"].startswith(("error ", "undefined ")):
            print(f"  {c['name']}: {c['error']}")


if __name__ == "__main__":
    main()
