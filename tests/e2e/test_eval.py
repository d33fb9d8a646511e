"""loupe eval: results are kept for what was measured, and nothing else; mistakes are said before the work begins."""
import json
import re

import pytest

from conftest import MODEL, run_cli
from test_cli import refused

SNAPKV = '{"policy":"snapkv","budget":{"ratio":0.25}}'
WORDS = "the quiet river carries cold water past old stone walls and over the weir to the mill".split()


@pytest.fixture
def text(tmp_path):
    folder = tmp_path / "text"
    folder.mkdir()
    (folder / "book.txt").write_text(" ".join(WORDS[i * i % len(WORDS)] for i in range(1200)))
    return folder


def eval_kl(text, *flags):
    return run_cli("eval", "kl", "--model", MODEL, "--text", text, "--context", 256, "--windows", 2, "--continuation", 8, "--json",
                   *flags)


def kl(text, *flags):
    r = eval_kl(text, "--kv", SNAPKV, *flags)
    assert r.returncode == 0, r.stderr
    return json.loads(r.stdout)["kl_mean"]


def test_results_belong_to_the_text_that_was_measured(text, tmp_path):
    results = tmp_path / "cells.jsonl"
    first = kl(text, "--results", results)
    assert kl(text, "--results", results) == first and len(results.read_text().splitlines()) == 2
    book = text / "book.txt"
    book.write_text(book.read_text().replace(" river ", " canal "))
    assert kl(text, "--results", results) == kl(text) != first
    assert kl(text, "--results", results, "--isa", "portable") == kl(text, "--isa", "portable")


def test_items_belong_to_the_question_that_was_asked(tmp_path):
    item = {"id": "1", "task": "needle", "group": "1", "context": "The code is 417. " + " ".join(WORDS * 20), "question": " The code is",
            "answer_prefix": "", "answers": ["417"], "scoring": "contains_all", "max_new_tokens": 4}
    items, results = tmp_path / "items.jsonl", tmp_path / "cells.jsonl"

    def nll(question, *flags):
        items.write_text(json.dumps({**item, "question": question}) + "\n")
        r = run_cli("eval", "items", "--model", MODEL, "--items", items, "--json", "--kv", SNAPKV, *flags)
        assert r.returncode == 0, r.stderr
        return json.loads(r.stdout)["gold_nll"]

    first = nll(" The code is", "--results", results)
    assert nll(" The old mill is", "--results", results) == nll(" The old mill is") != first


@pytest.mark.parametrize("flags, says", [
    (["--plot", "/nowhere/x.svg"], "--plot /nowhere/x.svg"),
    (["--plot", "x.png"], "must end in .svg"),
    (["--kv", '{"policy":"h2o","protect":{"messages":[0]}}'], "kv.protect.messages"),
    (["--kv", '{"policy":"h2o","protect":{"roles":["system"]}}'], "kv.protect.roles"),
    (["--kv", '{"policy":"h2o","policy":"tova"}'], "policy"),
])
def test_mistakes_are_said_first(text, flags, says):
    r = eval_kl(text, *([] if "--kv" in flags else ["--kv", SNAPKV]), *flags)
    assert says in refused(r) and not re.search(r"window \d", r.stderr), r.stderr


@pytest.mark.parametrize("flag", ["--needle-weight", "--pin-share"])
def test_a_weight_is_a_number(text, tmp_path, flag):
    assert flag in refused(run_cli("calibrate", "polykv", "--model", MODEL, "--text", text, "--out", tmp_path / "s.json", flag, "nan"))


def test_strategies_have_names_of_their_own(text, tmp_path):
    file = tmp_path / "one.json"
    r = run_cli("calibrate", "polykv", "--model", MODEL, "--text", text, "--prompts", 2, "--context", 256, "--continuation", 8,
                "--budget", 64, "--out", file)
    assert r.returncode == 0, r.stderr
    assert "one" in refused(eval_kl(text, "--kv", SNAPKV, "--strategy", file, "--strategy", file))
