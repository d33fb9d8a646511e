"""TLS and mutual TLS of both public listeners, and certificates that are replaced while the server runs."""
import json
import shutil
import socket
import ssl
import subprocess
import time

import grpc
import httpx
import pytest

from conftest import MODEL, MODEL_NAME, Server, free_port, run_cli

SHORT = {"model": MODEL_NAME, "prompt": "Go on", "max_tokens": 2}


def openssl(*args):
    subprocess.run(["openssl", *map(str, args)], check=True, capture_output=True)


class Authority:
    """A certificate authority with files of its own."""

    def __init__(self, folder):
        self.folder = folder
        self.cert = folder / "ca.pem"
        openssl("req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-days", "2", "-subj", "/CN=test ca",
                "-keyout", folder / "ca.key", "-out", self.cert)

    def issue(self, name):
        key, request, cert = (self.folder / f"{name}.{end}" for end in ("key", "csr", "pem"))
        extension = self.folder / "san"
        extension.write_text("subjectAltName=DNS:localhost,IP:127.0.0.1\n")
        openssl("req", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-subj", f"/CN={name}", "-keyout", key, "-out", request)
        openssl("x509", "-req", "-in", request, "-CA", self.cert, "-CAkey", self.folder / "ca.key", "-CAcreateserial", "-days", "2",
                "-extfile", extension, "-out", cert)
        return cert, key


@pytest.fixture(scope="module")
def authority(tmp_path_factory):
    return Authority(tmp_path_factory.mktemp("ca"))


def generate(protos, credentials, address, timeout=20):
    with grpc.secure_channel(address, credentials) as channel:
        ask = protos.inference.GenerateRequest(prompt="Go on", sampling=protos.inference.Sampling(max_tokens=2))
        return list(protos.inference_grpc.InferenceStub(channel).Generate(ask, timeout=timeout))


def subject(port, context):
    """The server's certificate as the context verifies it."""
    with socket.create_connection(("127.0.0.1", port), 10) as s, context.wrap_socket(s, server_hostname="localhost") as tls:
        return dict(x[0] for x in tls.getpeercert()["subject"])["commonName"]


def test_tls_on_both_protocols_and_new_certificates(authority, protos, tmp_path):
    cert, key = tmp_path / "tls.crt", tmp_path / "tls.key"
    for file, target in zip(authority.issue("first"), (cert, key)):
        shutil.copy(file, target)
    s = Server("--tls-cert", cert, "--tls-key", key)
    try:
        url = s.url.replace("http", "https")
        context = ssl.create_default_context(cafile=authority.cert)
        roots = grpc.ssl_channel_credentials(authority.cert.read_bytes())
        with httpx.Client(verify=context, timeout=60) as client:
            for _ in range(3):  # one connection
                assert client.post(url + "/v1/completions", json=SHORT).status_code == 200
            with client.stream("POST", url + "/v1/completions", json={**SHORT, "max_tokens": 30, "stream": True}) as stream:
                assert list(stream.iter_lines())[-2] == "data: [DONE]"
            big = {**SHORT, "prompt": "x " * 400_000}
            assert client.post(url + "/v1/completions", json=big).json()["error"]["code"] == "context_length_exceeded"
            assert client.get(url + "/nowhere").status_code == 404
        assert generate(protos, roots, s.grpc)[-1].finished.usage.completion_tokens == 2

        assert httpx.get(s.url + "/health").status_code == 400, "plain HTTP is told to use https"
        with pytest.raises(httpx.ConnectError):
            httpx.get(url + "/health")  # an authority that nobody knows
        with grpc.insecure_channel(s.grpc) as channel, pytest.raises(grpc.RpcError):
            protos.inference_grpc.InferenceStub(channel).ListModels(protos.inference.ListModelsRequest(), timeout=5)
        with pytest.raises(ssl.SSLError):
            old = ssl.create_default_context(cafile=authority.cert)
            old.maximum_version = ssl.TLSVersion.TLSv1_1
            subject(s.http_port, old)

        # A reader that leaves is noticed behind TLS too.
        with httpx.Client(verify=context, timeout=60) as client:
            with client.stream("POST", url + "/v1/completions", json={**SHORT, "max_tokens": 8000, "ignore_eos": True, "stream": True}) as stream:
                next(stream.iter_lines())
        s.wait_idle(10)

        assert subject(s.http_port, context) == "first" == subject(s.grpc_port, alpn(authority))
        key.write_text("no key at all")
        time.sleep(1.1)
        assert subject(s.http_port, context) == "first", "what is wrong changes nothing"
        for file, target in zip(authority.issue("second"), (cert, key)):
            shutil.copy(file, target)
        wait_for(lambda: subject(s.http_port, context) == "second")
        wait_for(lambda: subject(s.grpc_port, alpn(authority)) == "second")
        assert generate(protos, roots, s.grpc)[-1].finished.usage.completion_tokens == 2
        assert "the certificate stays as it was" in s.log() and "certificate read again" in s.log()
    finally:
        assert s.stop() == 0


def alpn(authority):
    context = ssl.create_default_context(cafile=authority.cert)
    context.set_alpn_protocols(["h2"])
    return context


def wait_for(check, seconds=15):
    end = time.monotonic() + seconds
    while not check():
        assert time.monotonic() < end, f"not within {seconds} s"
        time.sleep(0.1)


def test_mutual_tls(authority, protos, tmp_path):
    cert, key = authority.issue("server")
    client_cert, client_key = authority.issue("client")
    stranger = tmp_path / "strangers"
    stranger.mkdir()
    strange_cert, strange_key = Authority(stranger).issue("stranger")
    s = Server("--tls-cert", cert, "--tls-key", key, "--tls-client-ca", authority.cert)
    try:
        url = s.url.replace("http", "https")

        def ask(certificate=None):
            context = ssl.create_default_context(cafile=authority.cert)
            if certificate:
                context.load_cert_chain(*certificate)
            with httpx.Client(verify=context, timeout=60) as client:
                first = client.post(url + "/v1/completions", json=SHORT).status_code
                return first, client.get(url + "/health").status_code

        def ask_grpc(certificate=(None, None)):
            pair = [p.read_bytes() if p else None for p in certificate]
            return generate(protos, grpc.ssl_channel_credentials(authority.cert.read_bytes(), pair[1], pair[0]), s.grpc, 5)

        for _ in range(2):  # the second time may resume the session
            assert ask((client_cert, client_key)) == (200, 200)
        assert ask_grpc((client_cert, client_key))[-1].finished.usage.completion_tokens == 2
        for bad in (None, (strange_cert, strange_key)):
            with pytest.raises(httpx.TransportError):
                ask(bad)
            with pytest.raises(grpc.RpcError) as caught:
                ask_grpc(bad or (None, None))
            assert caught.value.code() == grpc.StatusCode.UNAVAILABLE
        assert httpx.get(s.management + "/readyz").status_code == 200, "probes need no certificate"
    finally:
        assert s.stop() == 0


@pytest.mark.parametrize("flags, why", [
    (["--tls-cert", "{cert}"], "--tls-key is missing"), (["--tls-key", "{key}"], "--tls-cert is missing"),
    (["--tls-client-ca", "{cert}"], "--tls-cert is missing"), (["--tls-cert", "{cert}", "--tls-key", "{other}"], "is not the key of"),
    (["--tls-cert", "{none}", "--tls-key", "{key}"], "--tls-cert: cannot use"), (["--tls-cert", "{cert}", "--tls-key", "{cert}"], "--tls-key"),
])
def test_files_that_do_not_work(authority, flags, why):
    cert, key = authority.issue("a")
    names = {"cert": cert, "key": key, "other": authority.issue("b")[1], "none": "/no/such/file"}
    r = run_cli("serve", "--model", MODEL, *[f.format(**names) for f in flags])
    assert r.returncode == 2 and why in r.stderr, r.stderr


def health(*flags):
    r = run_cli("health", *flags, "--json")
    return r.returncode, json.loads(r.stdout)["reason"] if r.stdout else r.stderr


@pytest.mark.parametrize("mutual", [False, True], ids=["tls", "mutual"])
def test_health_behind_tls(authority, tmp_path, mutual):
    cert, key = authority.issue("server")  # for localhost and 127.0.0.1
    stranger = tmp_path / "strangers"
    stranger.mkdir()
    other = Authority(stranger)
    keys = tmp_path / "keys"
    keys.write_text("someone: sk-someone-0001\n")
    s = Server("--tls-cert", cert, "--tls-key", key, "--api-keys", keys, *(["--tls-client-ca", authority.cert] if mutual else []))
    try:
        http, both = ["--http", f"127.0.0.1:{s.http_port}"], [["--http", f"127.0.0.1:{s.http_port}"], ["--grpc", s.grpc]]

        def shown_as(pair):
            return ["--tls-cert", pair[0], "--tls-key", pair[1]]
        mine = shown_as(authority.issue("probe")) if mutual else []
        ca = ["--tls-ca", authority.cert]
        for asked in (*both, both[0] + both[1]):
            for trust in (ca, [*ca, "--tls-server-name", "localhost"], ["--tls-insecure"]):
                assert health(*asked, *trust, *mine) == (0, ""), (asked, trust)
        for asked in both:
            for trust in (["--tls-ca", other.cert], [*ca, "--tls-server-name", "elsewhere.example.org"], ["--tls-server-name", "localhost"]):
                code, why = health(*asked, *trust, *mine)
                assert code == 1 and asked[1] in why, (asked, trust, why)
            for shown in ([], shown_as(other.issue("probe"))) if mutual else ():
                code, why = health(*asked, *ca, *shown)
                assert code == 1 and asked[1] in why, (asked, shown, why)
        code, why = health(*http)
        assert code == 1 and "400" in why and "--tls-ca" in why, why
        assert health("--management", s.management.removeprefix("http://"), *ca)[0] == 0, "which has no TLS"
    finally:
        assert s.stop() == 0


@pytest.mark.parametrize("flags, why", [
    (["--tls-cert", "{cert}"], "--tls-key is missing"), (["--tls-key", "{key}"], "--tls-cert is missing"), (["--tls-ca", "{none}"], "--tls-ca: cannot use"),
    (["--tls-ca", "{key}"], "--tls-ca: cannot use"), (["--tls-cert", "{cert}", "--tls-key", "{cert}"], "--tls-key: cannot use"),
])
def test_health_names_files_that_do_not_work(authority, flags, why):
    cert, key = authority.issue("c")
    r = run_cli("health", "--http", f"127.0.0.1:{free_port()}", *[f.format(cert=cert, key=key, none="/no/such/file") for f in flags])
    assert r.returncode == 2 and why in r.stderr, r.stderr
