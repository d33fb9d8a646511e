"""The metrics page as Prometheus itself sees it."""
import subprocess
import time

import httpx

from conftest import MODEL_NAME, free_port

EXPECTED = ["loupe_requests_total", "loupe_requests_running", "loupe_requests_waiting", "loupe_time_to_first_token_seconds",
            "loupe_inter_token_latency_seconds", "loupe_request_duration_seconds", "loupe_generation_tokens_total",
            "loupe_prompt_tokens_total", "loupe_kv_resident_bytes", "loupe_kv_capacity_bytes", "loupe_queue_prompt_tokens",
            "loupe_memory_traffic_bytes_total", "loupe_memory_traffic_full_cache_bytes_total", "loupe_build_info", "loupe_lifecycle_state"]


def test_promtool_finds_nothing(server):
    page = httpx.get(server.management + "/metrics")
    assert page.headers["content-type"].startswith("text/plain; version=0.0.4")
    r = subprocess.run(["promtool", "check", "metrics"], input=page.text, capture_output=True, text=True)
    assert r.returncode == 0 and not r.stdout + r.stderr, r.stdout + r.stderr
    for name in EXPECTED:
        assert f"# TYPE {name} " in page.text, name


def test_counters_move_by_what_was_done(server, client):
    before = server.metrics()
    r = client.completions.create(model=MODEL_NAME, prompt="The capital of France is", max_tokens=9, temperature=0)
    server.wait_idle()
    after = server.metrics()

    def moved(prefix):
        return sum(v for k, v in after.items() if k.startswith(prefix)) - sum(v for k, v in before.items() if k.startswith(prefix))

    assert moved("loupe_generation_tokens_total") == 9
    assert moved("loupe_prompt_tokens_total") == r.usage.prompt_tokens == 5
    assert moved("loupe_time_to_first_token_seconds_count") == 1
    assert moved("loupe_inter_token_latency_seconds_count") == 8
    assert moved("loupe_requests_total") == 1
    weights = moved('loupe_memory_traffic_bytes_total{data="weights"') or sum(
        after[k] - before.get(k, 0) for k in after if k.startswith("loupe_memory_traffic_bytes_total") and 'data="weights"' in k)
    assert weights > 9 * 80e6, "nine steps read the weights nine times"


def test_a_request_counts_once_and_its_samples_one_by_one(server, client):
    before = server.metrics()
    r = client.completions.create(model=MODEL_NAME, prompt=["One", "Two"], n=3, max_tokens=4, extra_body={"ignore_eos": True})
    assert len(r.choices) == 6
    server.wait_idle()
    after = server.metrics()

    def moved(name):
        keys = [k for k in after if k.split("{")[0] == name]
        return sum(after[k] - before.get(k, 0) for k in keys)

    assert moved("loupe_requests_total") == 1
    assert moved("loupe_request_prompt_tokens_count") == 2
    for name in ("loupe_request_duration_seconds_count", "loupe_request_output_tokens_count", "loupe_time_to_first_token_seconds_count"):
        assert moved(name) == 6, name
    # The page says which is which.
    page = httpx.get(server.management + "/metrics").text
    assert "# HELP loupe_requests_total HTTP requests and gRPC calls answered, one each" in page
    for name in ("request_duration_seconds", "request_output_tokens", "time_to_first_token_seconds", "request_phase_seconds"):
        help_line = next(line for line in page.splitlines() if line.startswith(f"# HELP loupe_{name} "))
        assert "sample" in help_line, help_line


def test_a_real_prometheus_scrapes_it(server, tmp_path):
    port = free_port()
    (tmp_path / "prometheus.yml").write_text(
        "global: {scrape_interval: 1s}\nscrape_configs:\n- job_name: loupe\n  static_configs:\n"
        f"  - targets: ['127.0.0.1:{server.management_port}']\n")
    prometheus = subprocess.Popen(["prometheus", f"--config.file={tmp_path}/prometheus.yml", f"--storage.tsdb.path={tmp_path}/data",
                                   f"--web.listen-address=127.0.0.1:{port}"], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        end = time.monotonic() + 60
        value = None
        while time.monotonic() < end and value is None:
            time.sleep(0.5)
            try:
                r = httpx.get(f"http://127.0.0.1:{port}/api/v1/query", params={"query": "loupe_kv_capacity_bytes"})
            except httpx.TransportError:
                continue
            if r.status_code == 200 and r.json()["data"]["result"]:  # 503 while Prometheus starts
                value = float(r.json()["data"]["result"][0]["value"][1])
        assert value and value > 0
        up = httpx.get(f"http://127.0.0.1:{port}/api/v1/query", params={"query": "up"}).json()
        assert up["data"]["result"][0]["value"][1] == "1"
    finally:
        prometheus.terminate()
        prometheus.wait()
