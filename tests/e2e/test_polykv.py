"""PolyKV: calibrate a strategy, serve it, ask for it."""
import json
import random

import pytest

from conftest import MODEL, Server, cli_json, run_cli
from test_kv import LONG, answer, ask


@pytest.fixture(scope="session")
def text(tmp_path_factory):
    folder = tmp_path_factory.mktemp("text")
    rng = random.Random(1)
    words = "the old mill by river kept its slow wheel turning while millers counted sacks of grain and wrote sums on doors".split()
    (folder / "words.txt").write_text(" ".join(rng.choice(words) + ("." if i % 11 == 0 else "") for i in range(2000)))
    return folder


@pytest.fixture(scope="session")
def strategy(text, tmp_path_factory):
    """A strategy calibrated on next to nothing."""
    folder = tmp_path_factory.mktemp("strategy")
    args = ["calibrate", "polykv", "--model", MODEL, "--text", text, "--prompts", 2, "--context", 256, "--continuation", 8,
            "--budget", 64, 128, "--results", folder / "cells.jsonl"]
    made = cli_json(*args, "--out", folder / "small.json", timeout=300)
    assert made["prompts"] == 2 and made["seconds"] > 0 and "calibrate polykv" in made["command"]
    again = cli_json(*args, "--per", "layer", "--out", folder / "layers.json")
    assert again["seconds"] == 0 and again["set_hash"] == made["set_hash"]
    return folder / "small.json"


@pytest.fixture(scope="session")
def serving(strategy):
    s = Server("--strategy", strategy, "--strategy", strategy.parent / "layers.json")
    yield s
    assert s.stop() == 0, s.log()


def test_the_file_holds_what_was_calibrated(strategy):
    out = cli_json("inspect", strategy)
    assert out["kind"] == "polykv-strategy" and out["layers"] == 30 and out["kv_heads"] == 3 and out["supported"]
    for budget in json.loads(strategy.read_text())["budgets"]:
        for phase in ("prefill", "decode"):
            assert sum(map(sum, budget[phase]["entries"])) == 90 * budget["mean"]


def test_a_served_strategy_is_followed(serving):
    text_full, full = answer(serving, {"policy": "full"})
    for budget in ({"tokens": 100}, {"tokens": 700}, {"ratio": 0.25}, {"bytes": 12_000_000}):
        _, kv = answer(serving, {"policy": "polykv", "budget": budget})
        assert kv["policy"] == "polykv" and kv["reason"] == "requested" and kv["entries"]["dropped"] > 0
        if "ratio" in budget:
            assert 0.2 < kv["bytes_ratio"] <= 0.25
        if "tokens" in budget:  # 24 generated tokens but the last come on top
            assert kv["entries"]["kept"] == 90 * (budget["tokens"] + 23)
    layers = answer(serving, {"policy": "polykv", "strategy": "layers", "budget": {"tokens": 100}})
    assert layers[1]["entries"] == answer(serving, {"policy": "polykv", "strategy": "small", "budget": {"tokens": 100}})[1]["entries"]
    text, kv = answer(serving, {"policy": "polykv", "budget": {"ratio": 1}})
    assert text == text_full and kv["bytes"] == full["bytes"]
    evict = {"policy": "polykv", "budget": {"tokens": 100}, "params": {"decode": "evict", "interval": 16}}
    _, kv = answer(serving, evict, max_tokens=90)
    assert kv["entries"]["kept"] <= 90 * (100 + 16)
    assert answer(serving, evict, max_tokens=90)[1] == kv
    serving.wait_idle()


@pytest.mark.parametrize("kv, words", [
    ({"policy": "polykv", "strategy": "nobody", "budget": {"tokens": 100}}, ["kv.strategy", "nobody", "small, layers"]),
    ({"policy": "polykv", "budget": {"ratio": 0.0001}}, ["kv.budget.ratio", "0.0001", "90 lists"]),
    ({"policy": "polykv", "budget": {"tokens": 20}, "protect": {"ranges": [[0, 100]]}}, ["kv.budget.tokens", "20"]),
    ({"policy": "polykv", "params": {"window": 3}}, ["kv.params.window", "polykv"]),
    ({"policy": "snapkv", "strategy": "small"}, ["kv.strategy", "snapkv"]),
])
def test_what_cannot_be_is_refused(serving, kv, words):
    r = ask(serving, kv)
    assert r.status_code == 400 and all(word in r.json()["error"]["message"] for word in words), r.text


def test_without_a_strategy_the_refusal_says_what_to_do():
    s = Server("--no-artifacts")
    try:
        r = ask(s, {"policy": "polykv", "budget": {"ratio": 0.25}})
        assert r.status_code == 400 and r.json()["error"]["param"] == "kv.policy", r.text
        assert "loupe calibrate polykv" in r.json()["error"]["message"] and "--strategy FILE" in r.json()["error"]["message"]
    finally:
        assert s.stop() == 0


def test_the_shipped_strategy_loads_by_itself(server):
    _, kv = answer(server, {"policy": "polykv", "budget": {"ratio": 0.125}})
    assert kv["policy"] == "polykv" and 0.1 < kv["bytes_ratio"] <= 0.125


def test_a_strategy_of_another_model_is_refused(strategy, tmp_path):
    good = json.loads(strategy.read_text())
    other = tmp_path / "other.json"
    for change, words in (({"weights_hash": "0123456789abcdef"}, ["model.weights_hash", "0123456789abcdef", good["model"]["weights_hash"]]),
                          ({"head_dim": 128}, ["model.head_dim", "128", "64"])):
        other.write_text(json.dumps({**good, "model": {**good["model"], **change}}))
        for command in (["serve"], ["generate", "--prompt", "x"]):
            r = run_cli(*command, "--model", MODEL, "--strategy", other)
            assert r.returncode == 2 and all(word in r.stderr for word in words), r.stderr
    r = run_cli("generate", "--model", MODEL, "--prompt", "x", "--strategy", tmp_path)
    assert r.returncode == 2 and "is a directory" in r.stderr


def test_generate_and_eval_take_a_strategy(strategy, text, tmp_path):
    kv = json.dumps({"policy": "polykv", "budget": {"tokens": 100}})
    out = cli_json("generate", "--model", MODEL, "--strategy", strategy, "--prompt", LONG[:3000], "--max-tokens", 4, "--temperature", 0, "--kv", kv)
    assert out["usage"]["kv"]["entries"]["kept"] == 90 * 103
    line = cli_json("eval", "kl", "--model", MODEL, "--strategy", strategy, "--text", text, "--context", 256, "--windows", 2, "--continuation", 8,
                    "--kv", kv, "--results", tmp_path / "cells.jsonl")
    assert line["kl_mean"] > 0 and line["kv"]["strategy"].startswith("small@")
    r = run_cli("eval", "kl", "--model", MODEL, "--no-artifacts", "--text", text, "--context", 256, "--windows", 2, "--continuation", 8, "--kv", kv)
    assert r.returncode == 2 and "loupe calibrate polykv" in r.stderr


def test_bad_input_to_calibrate(text, tmp_path):
    def refused(*args):
        r = run_cli("calibrate", "polykv", "--model", MODEL, *args)
        assert r.returncode == 2, r.stderr
        return r.stderr
    assert "cannot be written" in refused("--text", text, "--out", tmp_path / "no" / "x.json")
    assert "is a directory" in refused("--text", text, "--out", tmp_path / "x.json", "--results", tmp_path)
    assert "is a directory" in refused("--text", text, "--out", tmp_path / "x.json", "--items", tmp_path)
    assert "--text" in refused("--text", tmp_path / "none", "--out", tmp_path / "x.json")
    assert "4096" in refused("--text", text, "--out", tmp_path / "x.json", "--budget", 4096)
    assert "windows" in refused("--text", text, "--out", tmp_path / "x.json", "--prompts", 4000)
    help_text = run_cli("calibrate", "polykv", "--help").stdout
    assert "make_items.py" in help_text and "--strategy strategy.json" in help_text
