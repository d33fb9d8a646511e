"""The commands a person types."""
import json
import struct
import subprocess

import pytest

from conftest import BINARY, MODEL, cli_json, free_port, run_cli


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
    measured = {"bytes", "flops", "gbps", "limit_gbps", "share_of_limit"}
    assert all(out[name] > 0 for name in measured)
    assert case != "serve" or out["first_token_ms"]["p95"] > 0


def test_bench_takes_more_sequences_than_a_step_has_rows():
    assert cli_json("bench", "decode", "--model", MODEL, "--batch", 9, "--max-step-tokens", 4, "--tokens", 2)["tokens_per_s"] > 0


def test_threads_that_the_system_refuses():
    command = f"ulimit -v 500000; exec {BINARY} generate --model {MODEL} --prompt x --max-tokens 1 --kv-device-bytes 32MiB --threads 512"
    r = subprocess.run(["bash", "-c", command], capture_output=True, text=True, timeout=60)
    assert r.returncode == 2 and "threads" in r.stderr, (r.returncode, r.stderr)


@pytest.mark.parametrize("case", ["attention", "decode", "prefill"])
def test_bench_needs_no_model_file(case):
    tokens = [] if case == "attention" else ["--tokens", 4]
    out = cli_json("bench", case, "--random-weights", "smollm2-135m", "--context", 64, "--repeat", 1, *tokens)
    assert out["case"] == case and all(out[name] > 0 for name in ("time_us", "bytes", "flops", "gbps", "share_of_limit"))
    message = refused(run_cli("bench", case, "--random-weights", "no-such-shape"))
    assert "no-such-shape" in message and "llama-3.1-8b" in message
    refused(run_cli("bench", case, "--random-weights", "smollm2-135m", "--model", MODEL))


def test_bench_says_what_policies_cost():
    flags = [f for kv in ('{"policy":"full"}', '{"policy":"h2o","budget":{"ratio":0.25}}') for f in ("--kv", kv)]
    r = run_cli("bench", "policies", "--json", "--model", MODEL, "--context", 192, "--tokens", 4, "--repeat", 1, *flags)
    full, h2o = (json.loads(line) for line in r.stdout.splitlines())
    assert full["prefill_time_ratio"] == full["decode_speed_ratio"] == 1 and full["bytes_ratio"] >= 1
    assert h2o["bytes_ratio"] <= 0.25 and h2o["prefill_ms"] > 0 and h2o["decode_us"] > 0
    assert "--kv" in refused(run_cli("bench", "policies", "--model", MODEL))


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


@pytest.mark.parametrize("args, says", [
    ([], "loupe needs a command: serve, generate, "),
    (["sing"], "loupe has no command 'sing': serve, generate, "),
    (["bench"], "loupe bench needs a command: attention, decode, prefill, serve, policies; see loupe bench --help"),
    (["bench", "sing"], "loupe bench has no command 'sing': attention, decode, prefill, serve, policies"),
    (["generate", "--wings", "2"], "loupe generate does not know '--wings'; see loupe generate --help"),
    (["eval", "kl", "--context", "many"], "see loupe eval kl --help"),
    (["serve", "--model", "nowhere.gguf"], "deploy/quickstart.sh"),
])
def test_a_mistake_is_explained_by_the_command_that_it_reached(args, says):
    assert says in refused(run_cli(*args))


def test_help_teaches():
    r = run_cli("serve", "--help")
    assert r.returncode == 0 and "Example" in r.stdout and "--kv-device-bytes" in r.stdout
    assert run_cli("--version").stdout.startswith("loupe 0.")


def refused(r):
    """Exit 2, one line that begins with "error: ", no output."""
    assert r.returncode == 2 and r.stdout == "", (r.returncode, r.stdout, r.stderr)
    assert r.stderr.startswith("error: ") and r.stderr.count("\n") == 1, r.stderr
    return r.stderr


def test_files_that_cannot_be_read(tmp_path):
    commands = {"chat template": ["serve", "--model", MODEL, "--chat-template"], "config file": ["serve", "--print-config", "--config"],
                "prompt file": ["generate", "--model", MODEL, "--prompt-file"]}
    for what, command in commands.items():
        for path, reason in ((tmp_path, "directory"), (tmp_path / "missing", "No such file")):
            message = refused(run_cli(*command, path))
            assert what in message and reason in message, message
    for command in (["inspect"], ["tokenize", "--model"], ["generate", "--prompt", "x", "--model"]):
        refused(run_cli(*command, tmp_path))
    empty = tmp_path / "empty.jinja"
    empty.touch()
    assert "0 bytes" in refused(run_cli("serve", "--model", MODEL, "--chat-template", empty))


def test_a_result_that_cannot_be_written_is_a_failure():
    for command in (["generate", "--model", MODEL, "--prompt", "x", "--max-tokens", 8], ["tokenize", "--model", MODEL], ["inspect", MODEL],
                    ["serve", "--print-config"], ["bench", "decode", "--model", MODEL, "--tokens", 2, "--repeat", 1], ["--version"],
                    ["health", "--help"], ["generate", "--model", MODEL, "--prompt", "x", "--max-tokens", 8, "--json"]):
        with open("/dev/full", "w") as full:
            r = subprocess.run([str(BINARY), *map(str, command)], stdin=subprocess.DEVNULL, stdout=full, stderr=subprocess.PIPE, text=True)
        assert r.returncode == 1 and "error: cannot write to standard output" in r.stderr, (command, r)


def test_the_config_file_and_print_config_from_the_environment(tmp_path):
    config = tmp_path / "c.json"
    config.write_text('{"max-queue": 7, "json": true}')
    r = run_cli("serve", env={"LOUPE_CONFIG": str(config), "LOUPE_PRINT_CONFIG": "true"})
    assert r.returncode == 0 and r.stderr == "" and r.stdout.count("\n") == 1, r
    out = json.loads(r.stdout)
    assert out["max-queue"] == {"value": "7", "origin": "file"} and out["config"]["origin"] == "environment"
    assert out["print-config"] == {"value": "true", "origin": "environment"}
    assert "LOUPE_CONFIG" not in run_cli("serve", "--print-config", env={"LOUPE_CONFIG": str(config)}).stderr
    assert "LOUPE_HELP" in run_cli("serve", "--print-config", env={"LOUPE_HELP": "1"}).stderr
    assert str(tmp_path) in refused(run_cli("serve", env={"LOUPE_CONFIG": str(tmp_path)}))
    assert json.loads(run_cli("serve", "--print-config", env={"LOUPE_CONFIG": ""}).stdout)["max-queue"]["origin"] == "default"


@pytest.mark.parametrize("text, says", [('{"max-queue": 1, "threads": 1, "max-queue": 2}', "max-queue"), ('{"config": "x"}', "config"),
                                        ('{"kv": {"policy": "full", "policy": "auto"}}', "policy"), ('{"max-queue": 1', "not a JSON object"),
                                        ("[]", "not a JSON object"), ('{"max-queue": null}', "null")])
def test_config_files_that_are_refused(tmp_path, text, says):
    config = tmp_path / "c.json"
    config.write_text(text)
    assert says in refused(run_cli("serve", "--print-config", "--config", config))


@pytest.mark.parametrize("size, says", [("99999999TiB", "too large"), ("1e300", "too large"), ("many", "not a size"), ("-1", "not a size"),
                                        ("nan", "not a size"), ("1QiB", "not a size")])
def test_sizes_that_are_refused(size, says):
    r = run_cli("serve", f"--kv-device-bytes={size}", "--print-config")
    assert r.returncode == 2 and says in r.stderr, r.stderr


def test_bench_refuses_what_the_context_cannot_hold():
    for case, flags in {"decode": ["--context", 8190, "--tokens", 2], "prefill": ["--context", 8193], "serve": ["--context", 8190, "--tokens", 3]}.items():
        message = refused(run_cli("bench", case, "--model", MODEL, "--repeat", 1, *flags))
        assert "8193" in message and "8192" in message, message


def test_health_asks_every_listener_that_is_named(server):
    http, dead = f"127.0.0.1:{server.http_port}", f"127.0.0.1:{free_port()}"
    assert cli_json("health", "--http", http, "--grpc", server.grpc)["ready"] is True
    for asked in (["--http", http, "--grpc", dead], ["--http", dead, "--grpc", server.grpc]):
        r = run_cli("health", *asked, "--json")
        out = json.loads(r.stdout)
        assert r.returncode == 1 and r.stderr == "" and out["ready"] is False and dead in out["reason"], r
    # The management listener's question to the main listener.
    r = run_cli("health", "--management", http, "--json")
    out = json.loads(r.stdout)
    assert r.returncode == 1 and out["ready"] is False and http in out["reason"] and "404" in out["reason"]


@pytest.mark.parametrize("flag", ["--http", "--grpc", "--management"])
@pytest.mark.parametrize("address", ["nonsense", "127.0.0.1:http", "127.0.0.1:99999", ":1", "127.0.0.1:"])
def test_health_refuses_addresses(flag, address):
    assert address in refused(run_cli("health", flag, address))


def test_inspect_leaves_out_what_the_file_does_not_say(tmp_path):
    def text(value):
        return struct.pack("<Q", len(value)) + value

    entries = [text(b"general.architecture") + struct.pack("<I", 8) + text(b"mamba"), text(b"mamba.block_count") + struct.pack("<II", 4, 3)]
    path = tmp_path / "mamba.gguf"
    path.write_bytes(b"GGUF" + struct.pack("<IQQ", 3, 0, len(entries)) + b"".join(entries) + bytes(64))
    out = cli_json("inspect", path)
    assert out["architecture"] == "mamba" and out["layers"] == 3 and out["supported"] is False and "mamba" in out["reason"]
    assert not {"heads", "width", "context", "vocab", "parameters", "kv_bytes_per_token", "tokenizer"} & set(out), out
    lines = run_cli("inspect", path).stdout
    assert "3 layers" in lines and " 0 " not in lines, lines


def test_tokenize_says_when_bytes_are_left_out():
    command = [str(BINARY), "tokenize", "--model", str(MODEL), "--json"]
    r = subprocess.run(command, input=b"a\xff\xfe\xf5b", capture_output=True)
    assert r.returncode == 0 and b"warning: 3 of 5 bytes" in r.stderr, r
    r = subprocess.run(command, input="häß\0 ✓".encode(), capture_output=True)
    assert r.returncode == 0 and r.stderr == b"", r
    ids = " ".join(map(str, json.loads(r.stdout)["tokens"]))
    r = subprocess.run([str(BINARY), "tokenize", "--model", str(MODEL), "--decode"], input=ids.encode(), capture_output=True)
    assert r.stdout == "häß\0 ✓\n".encode()
