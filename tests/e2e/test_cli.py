"""The commands a person types."""
import json

import pytest

from conftest import MODEL, cli_json, run_cli


def test_generate_json():
    out = cli_json("generate", "--model", MODEL, "--prompt", "The capital of France is", "--max-tokens", 8, "--temperature", 0)
    assert "Paris" in out["text"] and len(out["token_ids"]) == 8 and out["finish_reason"] == "length"
    assert out["usage"]["prompt_tokens"] == 5 and out["usage"]["kv"]["policy"] == "full"
    assert set(out["timings"]) == {"load_s", "prefill_s", "decode_s", "prefill_tokens_per_s", "decode_tokens_per_s"}


def test_generate_streams_to_a_terminal_and_reads_stdin():
    r = run_cli("generate", "--model", MODEL, "--chat", "--max-tokens", 24, "--temperature", 0, stdin="What is the capital of France?")
    assert r.returncode == 0 and "Paris" in r.stdout and "tokens/s" in r.stderr


def test_generate_in_exact_mode_gives_the_tokens_of_the_reference_pass():
    out = cli_json("generate", "--model", MODEL, "--prompt", "The capital of France is", "--max-tokens", 20, "--temperature", 0, "--exact")
    assert out["token_ids"] == [7042, 30, 198, 198, 504, 2988, 314, 42, 216, 34, 32, 33, 40, 29, 32, 33, 29, 34, 34, 216]


def test_one_thread_gives_the_same_tokens_as_two():
    runs = [cli_json("generate", "--model", MODEL, "--prompt", "Once upon a time", "--max-tokens", 48, "--temperature", 0, "--threads", t)
            for t in (1, 2, 3)]
    assert runs[0]["token_ids"] == runs[1]["token_ids"] == runs[2]["token_ids"]


def test_tokenize_and_decode():
    out = cli_json("tokenize", "--model", MODEL, stdin="don't I'LL we've SHE'S they'd")
    assert out["tokens"] == [12420, 982, 339, 23, 16421, 392, 3543, 334, 4493, 23, 67, 502, 6737]
    back = cli_json("tokenize", "--model", MODEL, "--decode", stdin=" ".join(map(str, out["tokens"])))
    assert back["text"] == "don't I'LL we've SHE'S they'd"
    special = cli_json("tokenize", "--model", MODEL, "--parse-special", stdin="<|im_start|>user\nhi<|im_end|>")
    assert special["tokens"] == [1, 4093, 198, 6004, 2]
    assert run_cli("tokenize", "--model", MODEL, "--decode", stdin="1 two").returncode == 2
    assert run_cli("tokenize", "--model", MODEL, "--decode", stdin="99999999").returncode == 2


def test_inspect():
    out = cli_json("inspect", MODEL)
    assert out["architecture"] == "llama" and out["layers"] == 30 and out["supported"] is True
    assert out["kv_bytes_per_token"] == 30 * 3 * 64 * 2 * 2
    assert out["kv_bytes_per_token_by_format"]["dense"] == out["kv_bytes_per_token"]
    assert 134_000_000 < out["parameters"] < 135_000_000


@pytest.mark.parametrize("case", ["decode", "prefill", "serve"])
def test_bench(case):
    out = cli_json("bench", case, "--model", MODEL, "--context", 64, "--tokens", 8, "--repeat", 1, "--batch", 2)
    assert out["case"] == case and out["tokens_per_s"] > 0 and out["time_us"] > 0
    if case != "serve":
        assert out["bytes"] > 0 and out["flops"] > 0 and 0 < out["share_of_limit"] < 2


def test_health(server):
    address = f"127.0.0.1:{server.management_port}"
    assert cli_json("health", "--management", address) == {"live": True, "ready": True, "phase": "ready", "reason": ""}
    assert run_cli("health", "--http", f"127.0.0.1:{server.http_port}").returncode == 0
    assert run_cli("health", "--grpc", server.grpc).returncode == 0
    r = run_cli("health", "--management", "127.0.0.1:1", "--json")
    assert r.returncode == 1 and json.loads(r.stdout)["live"] is False


def test_origins_of_options(tmp_path):
    config = tmp_path / "c.json"
    config.write_text(json.dumps({"max-queue": 7, "max-sequences": 3, "threads": 1}))
    r = run_cli("serve", "--config", config, "--threads", 2, "--print-config", env={"LOUPE_MAX_SEQUENCES": "5", "LOUPE_PORT": "tcp://x",
                                                                                 "LOUPE_SERVICE_HOST": "x", "LOUPE_TYPO": "1"})
    out = json.loads(r.stdout)
    assert out["threads"] == {"value": "2", "origin": "flag"}
    assert out["max-sequences"] == {"value": "5", "origin": "environment"}
    assert out["max-queue"] == {"value": "7", "origin": "file"}
    assert out["http"] == {"value": "127.0.0.1:8000", "origin": "default"}
    assert "LOUPE_TYPO" in r.stderr and "LOUPE_PORT" not in r.stderr and "LOUPE_SERVICE" not in r.stderr
    config.write_text(json.dumps({"max-kueue": 7}))
    r = run_cli("serve", "--config", config, "--print-config")
    assert r.returncode == 2 and "max-kueue" in r.stderr


@pytest.mark.parametrize("args", [["serve", "--no-such-flag"], ["no-such-command"], [], ["serve", "--kv-device-bytes", "many"],
                                  ["generate", "--model"], ["serve", "--http", "nonsense", "--model", str(MODEL)], ["serve"],
                                  ["generate", "--prompt", "x"], ["bench"]])
def test_bad_usage(args):
    r = run_cli(*args)
    assert r.returncode == 2 and r.stderr.startswith("error: ") and r.stdout == "", (r.stdout, r.stderr)


def test_help_teaches():
    r = run_cli("serve", "--help")
    assert r.returncode == 0 and "Example" in r.stdout and "--kv-device-bytes" in r.stdout
    assert run_cli("--version").stdout.startswith("loupe 0.")
