"""/openapi.json beside the official client's types, docs/api.md and schemathesis."""
import importlib.util
import json
import os
import re
import subprocess
import sys

import httpx
import pytest
from openai.types import completion_create_params as completion_params
from openai.types.chat import completion_create_params as chat_params

from conftest import ROOT, Server

FULL = os.environ.get("LOUPE_TEST_FULL") == "1"


@pytest.fixture(scope="module")
def document(server):
    return httpx.get(server.url + "/openapi.json").json()


@pytest.mark.parametrize("schema, params", [("ChatRequest", chat_params), ("CompletionRequest", completion_params)])
def test_every_field_of_the_official_client_is_listed(document, schema, params):
    official = set(params.CompletionCreateParamsBase.__annotations__) | set(params.CompletionCreateParamsStreaming.__annotations__)
    assert len(official) > 15
    assert official <= set(document["components"]["schemas"][schema]["properties"])


def test_the_page_is_what_the_binary_says(document):
    spec = importlib.util.spec_from_file_location("make_api", ROOT / "docs/make_api.py")
    make_api = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(make_api)
    made = make_api.page(document)
    written = (ROOT / "docs/api.md").read_text()
    assert written == made, "docs/api.md is old; with a server running: docs/make_api.py http://HOST:PORT > docs/api.md"


@pytest.mark.timeout(1200)
def test_schemathesis_finds_nothing(tmp_path):
    """Generated requests, right and wrong ones: no 500, and only statuses, types and shapes that the document knows."""
    seconds = 600 if FULL else 10
    # A short context and few samples, or most of the time would go into answers; whether each wrong value is refused is
    # openapi_test.cpp's matter.
    server = Server("--max-context", "64")
    try:
        document = httpx.get(server.url + "/openapi.json").json()
        for name in ("ChatRequest", "CompletionRequest"):
            document["components"]["schemas"][name]["properties"]["n"]["anyOf"][0]["maximum"] = 3
        path = tmp_path / "openapi.json"
        path.write_text(json.dumps(document))
        checks = "not_a_server_error,status_code_conformance,content_type_conformance,response_schema_conformance,unsupported_method"
        command = [os.path.join(os.path.dirname(sys.executable), "schemathesis"), "run", str(path), "--url", server.url, "--checks", checks]
        # Ten seconds are too short for the systematic phase, which would have nothing else run.
        command += ["--phases", "coverage,fuzzing,stateful" if FULL else "fuzzing", "--max-time", str(seconds)]
        command += ["--max-examples", "100000", "--request-timeout", "60", "--suppress-health-check", "all"]
        r = subprocess.run(command, capture_output=True, text=True, timeout=seconds + 240, cwd=tmp_path)
        assert r.returncode == 0, r.stdout[-6000:] + r.stderr[-2000:]
        assert int(re.search(r"(\d+) generated, (\d+) passed", r.stdout).group(2)) >= 20, r.stdout[-3000:]
        server.wait_idle()
    finally:
        assert server.stop() == 0
