"""Spherical: codes and budgets over HTTP, with and without a profile; rivals are for evaluation alone."""
import json
import random

import pytest

from conftest import MODEL, ROOT, Server, cli_json
from test_kv import LONG, answer, ask


@pytest.fixture(scope="session")
def profile(tmp_path_factory):
    """Costs of no model: the first lists are the most sensitive ones."""
    folder = tmp_path_factory.mktemp("profile")
    weights = cli_json("inspect", MODEL)
    model = cli_json("inspect", ROOT / "artifacts" / "SmolLM2-135M-Instruct.polykv.json")
    rng = random.Random(1)
    lists = []
    for i in range(90):
        most = 0.02 * 0.9 ** i
        lists.append({"key": [most, most / 4, most / 16], "value": [most / 3, most / 12, most / 48],
                      "share": [most / 8 + most * x for x in (.1, .2, .4, .6, .8, 1)], "mean_key": [rng.gauss(0, 1) for _ in range(64)]})
    file = {"kind": "spherical-profile", "version": 1,
            "model": {"name": model["model"], "weights_hash": model["weights_hash"], "layers": 30, "kv_heads": 3, "head_dim": 64},
            "calibration": {"command": "by hand"}, "bits": [2, 3, 4], "shares": [.5, .25, .125, .0625, .03, 0], "lists": lists}
    assert weights["layers"] == 30
    (folder / "hand.json").write_text(json.dumps(file))
    return folder / "hand.json"


@pytest.fixture(scope="session")
def serving(profile):
    s = Server("--strategy", profile)
    yield s
    assert s.stop() == 0, s.log()


def test_the_profile_is_shown(profile):
    out = cli_json("inspect", profile)
    assert out["kind"] == "spherical-profile" and out["lists"] == 90 and out["supported"]
    assert out["share_of_the_ten_most_sensitive"] == pytest.approx((1 - .9 ** 10) / (1 - .9 ** 90), rel=1e-3)


@pytest.mark.parametrize("ratio", [0.54, 0.27, 0.125, 0.0625, 0.031])
def test_budgets_hold(serving, ratio):
    _, kv = answer(serving, {"policy": "spherical", "budget": {"ratio": ratio}})
    assert kv["policy"] == "spherical" and kv["reason"] == "requested"
    assert 0.9 * ratio < kv["bytes_ratio"] <= ratio
    assert sum(kv["entries_by_format"].values()) == kv["entries"]["kept"]
    assert answer(serving, {"policy": "spherical", "budget": {"ratio": ratio}})[1] == kv
    serving.wait_idle()


def test_bits_are_formats_and_a_ratio_of_one_is_full(serving):
    _, kv = answer(serving, {"policy": "spherical"})
    assert kv["entries"]["dropped"] == 0 and set(kv["entries_by_format"]) == {"s4", "dense"}
    assert 4 < kv["bits"]["key"] < 5
    _, kv = answer(serving, {"policy": "spherical", "bits": {"key": 4, "value": 2}})
    assert set(kv["entries_by_format"]) == {"s4v2", "dense"}
    text, kv = answer(serving, {"policy": "spherical", "budget": {"ratio": 1}, "bits": {"key": 16, "value": 16}})
    text_full, full = answer(serving, {"policy": "full"})
    assert text == text_full and kv["bytes"] == full["bytes"]
    _, kv = answer(serving, {"policy": "spherical", "budget": {"ratio": 0.1}, "params": {"prefill": "coded"}})
    assert kv["peak_bytes_ratio"] < 0.6
    serving.wait_idle()


@pytest.mark.parametrize("kv, words", [
    ({"policy": "spherical", "budget": {"ratio": 0.0001}}, ["kv.budget.ratio", "0.0001"]),
    ({"policy": "spherical", "budget": {"ratio": 0.05}, "protect": {"ranges": [[0, 1000]]}}, ["kv.budget.ratio", "0.05", "protected"]),
    ({"policy": "spherical", "budget": {"ratio": 0.05}, "params": {"retention": "bits"}}, ["kv.budget.ratio", "drops nothing"]),
    ({"policy": "spherical", "bits": {"key": 4, "value": 4}, "floor": {"bits": 8}}, ["kv.floor.bits", "8", "4"]),
    ({"policy": "spherical", "strategy": "nobody", "budget": {"ratio": 0.2}}, ["kv.strategy", "nobody", "hand"]),
    ({"policy": "spherical", "params": {"retention": "some"}}, ["kv.params.retention", "joint, drop, bits"]),
    ({"policy": "llamacpp-q8_0"}, ["kv.policy", "llamacpp-q8_0"]),
])
def test_what_cannot_be_is_refused(serving, kv, words):
    r = ask(serving, kv)
    assert r.status_code == 400 and all(word in r.json()["error"]["message"] for word in words), r.text


def test_without_a_profile_all_lists_are_alike():
    one = json.dumps({"policy": "spherical", "budget": {"ratio": 0.3}})
    out = cli_json("generate", "--model", MODEL, "--no-artifacts", "--prompt", LONG, "--max-tokens", 4, "--kv", one, timeout=300)
    kv = out["usage"]["kv"]
    assert set(kv["entries_by_format"]) == {"s4", "dense"} and kv["entries"]["dropped"] == 0 and kv["bytes_ratio"] <= 0.3
