"""grpcio against the real server."""
import concurrent.futures
import time

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from conftest import MODEL_NAME, Server


@pytest.fixture(scope="module")
def channel(server):
    with grpc.insecure_channel(server.grpc) as c:
        yield c


@pytest.fixture
def stub(channel, protos):
    return protos.inference_grpc.InferenceStub(channel)


def request(protos, prompt="The capital of France is", **kwargs):
    sampling = {"temperature": 0, "max_tokens": 8, **kwargs.pop("sampling", {})}
    return protos.inference.GenerateRequest(model=MODEL_NAME, prompt=prompt, sampling=protos.inference.Sampling(**sampling), **kwargs)


def test_generate(stub, protos, client):
    events = list(stub.Generate(request(protos)))
    kinds = [e.WhichOneof("event") for e in events]
    assert kinds[0] == "started" and kinds[-1] == "finished" and set(kinds[1:-1]) == {"delta"}
    text = "".join(e.delta.text for e in events if e.WhichOneof("event") == "delta")
    same = client.completions.create(model=MODEL_NAME, prompt="The capital of France is", temperature=0, max_tokens=8)
    assert text == same.choices[0].text, "both protocols give the same answer"
    usage = events[-1].finished.usage
    assert usage.completion_tokens == 8 and usage.kv.policy == "full" and usage.kv.lists == 90


def test_generate_from_ids(stub, protos):
    ids = stub.Tokenize(protos.inference.TokenizeRequest(text="The capital of France is")).tokens
    by_ids = protos.inference.GenerateRequest(prompt_token_ids=protos.inference.TokenIds(ids=ids),
                                              sampling=protos.inference.Sampling(temperature=0, max_tokens=8))
    texts = ["".join(e.delta.text for e in stub.Generate(r)) for r in (by_ids, request(protos))]
    assert texts[0] == texts[1]
    assert stub.Detokenize(protos.inference.DetokenizeRequest(tokens=ids)).text == "The capital of France is"


def test_chat(stub, protos):
    ask = protos.inference.ChatRequest(
        messages=[protos.inference.ChatMessage(role="user", content="What is the capital of France?")],
        sampling=protos.inference.Sampling(temperature=0, max_tokens=24))
    assert "Paris" in "".join(e.delta.text for e in stub.Chat(ask))


def test_health_and_reflection(channel):
    health = health_pb2_grpc.HealthStub(channel)
    for name in ("", "loupe.v1.Inference"):
        assert health.Check(health_pb2.HealthCheckRequest(service=name)).status == health_pb2.HealthCheckResponse.SERVING
    reflection = reflection_pb2_grpc.ServerReflectionStub(channel)
    answers = reflection.ServerReflectionInfo(iter([reflection_pb2.ServerReflectionRequest(list_services="")]))
    names = [s.name for s in next(answers).list_services_response.service]
    assert "loupe.v1.Inference" in names and "grpc.health.v1.Health" in names


@pytest.mark.parametrize("change, code", [
    ({"model": "gpt-9"}, grpc.StatusCode.NOT_FOUND), ({"prompt": "word " * 9000}, grpc.StatusCode.INVALID_ARGUMENT),
    ({"sampling": {"temperature": -1}}, grpc.StatusCode.INVALID_ARGUMENT), ({"sampling": {"top_p": 2}}, grpc.StatusCode.INVALID_ARGUMENT),
])
def test_bad_requests(stub, protos, change, code):
    ask = request(protos, prompt=change.get("prompt", "x"), sampling=change.get("sampling", {}))
    if "model" in change:
        ask.model = change["model"]
    with pytest.raises(grpc.RpcError) as caught:
        list(stub.Generate(ask))
    assert caught.value.code() == code and caught.value.details()


def test_kv_policies_are_listed(stub, protos):
    policies = {p.name: p for p in stub.ListKvPolicies(protos.inference.ListKvPoliciesRequest()).policies}
    assert {"auto", "full", "streaming", "h2o", "tova", "snapkv", "adakv", "pyramidkv", "chunkkv", "keydiff", "polykv", "spherical"} == set(policies)
    window = policies["snapkv"].parameters[0]
    assert (window.name, window.default_number, window.min, window.max) == ("window", 64, 1, 512)


def test_call_deadline_gives_partial_text(stub, protos):
    # On a machine so busy that the server's last 100 ms are not enough, the call itself runs out first: then again.
    for _ in range(3):
        try:
            events = list(stub.Generate(request(protos, sampling={"max_tokens": 8000, "ignore_eos": True}), timeout=2))
            break
        except grpc.RpcError as error:
            assert error.code() == grpc.StatusCode.DEADLINE_EXCEEDED
    finished = events[-1].finished
    assert 0 < finished.usage.completion_tokens < 8000
    assert "DEADLINE" in protos.inference.FinishReason.Name(finished.finish_reason).upper()


def test_cancel(stub, protos, server):
    call = stub.Generate(request(protos, sampling={"max_tokens": 8000, "ignore_eos": True}))
    next(call), next(call)
    call.cancel()
    with pytest.raises(grpc.RpcError):
        list(call)
    server.wait_idle(10)
    call = stub.Generate(request(protos, request_id="by-id", sampling={"max_tokens": 8000, "ignore_eos": True}))
    next(call), next(call)
    stub.Cancel(protos.inference.CancelRequest(request_id="by-id"))
    list_or_error = []
    try:
        list_or_error = list(call)
    except grpc.RpcError as error:
        assert error.code() == grpc.StatusCode.CANCELLED
    else:
        assert list_or_error[-1].WhichOneof("event") == "finished"
    server.wait_idle(10)


def test_admin(protos):
    from conftest import free_port
    address = f"127.0.0.1:{free_port()}"
    server = Server("--admin", address)
    try:
        with grpc.insecure_channel(address) as c:
            admin = protos.admin_grpc.AdminStub(c)
            stats = admin.GetStats(protos.admin.GetStatsRequest())
            assert stats.kv_capacity_bytes > 0
            with pytest.raises(grpc.RpcError) as caught:
                admin.ResetPrefixCache(protos.admin.ResetPrefixCacheRequest())
            assert caught.value.code() == grpc.StatusCode.UNIMPLEMENTED
            admin.Drain(protos.admin.DrainRequest())
        end = time.monotonic() + 30
        while server.process.poll() is None and time.monotonic() < end:
            time.sleep(0.05)
        assert server.process.poll() == 0, "Drain ends the process as SIGTERM does"
    finally:
        server.stop()


def test_so_many_calls_may_be_open(protos):
    s = Server("--max-connections", "3", "--max-sequences", "1")
    ask = request(protos, sampling={"max_tokens": 8000, "ignore_eos": True})
    try:
        with grpc.insecure_channel(s.grpc) as shared, grpc.insecure_channel(s.grpc, [("grpc.use_local_subchannel_pool", 1)]) as other:
            calls = [protos.inference_grpc.InferenceStub(shared).Generate(ask)]
            next(calls[0])  # it runs, the others will wait
            calls += [protos.inference_grpc.InferenceStub(channel).Generate(ask) for channel in (shared, other)]
            end = time.monotonic() + 20
            while s.metrics()["loupe_requests_waiting"] != 2:
                assert time.monotonic() < end
                time.sleep(0.02)
            for channel in (shared, other):
                stub = protos.inference_grpc.InferenceStub(channel)
                with pytest.raises(grpc.RpcError) as refused:
                    list(stub.Generate(request(protos), timeout=20))
                assert refused.value.code() == grpc.StatusCode.RESOURCE_EXHAUSTED
                assert refused.value.details() == "calls: 3 are open, the most allowed (--max-connections); try again soon"
                assert int(dict(refused.value.trailing_metadata())["grpc-retry-pushback-ms"]) > 0
                # What is no generation goes on.
                assert stub.Tokenize(protos.inference.TokenizeRequest(text="x"), timeout=20).tokens
                assert not stub.Cancel(protos.inference.CancelRequest(request_id="nobody"), timeout=20).found
                assert health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(), timeout=20).status == 1
            assert s.metrics()['loupe_requests_rejected_total{reason="queue_full"}'] == 2
            for call in calls:
                call.cancel()
            s.wait_idle()
            assert list(protos.inference_grpc.InferenceStub(other).Generate(request(protos), timeout=60))[-1].finished.usage.completion_tokens == 8
    finally:
        assert s.stop() == 0


def test_large_messages_from_many_do_not_add_up(server, protos):
    """Buffers of all connections share one quota; 64 messages of 8 MB at a time leave the server standing, and no larger."""
    before = server.metrics()["process_resident_memory_bytes"]
    prompt = "word " * (8_000_000 // 5)

    def ask(_):
        with grpc.insecure_channel(server.grpc, [("grpc.use_local_subchannel_pool", 1)]) as channel:
            try:
                list(protos.inference_grpc.InferenceStub(channel).Generate(protos.inference.GenerateRequest(prompt=prompt), timeout=60))
            except grpc.RpcError as e:
                return e.code()

    with concurrent.futures.ThreadPoolExecutor(16) as pool:
        codes = set(pool.map(ask, range(64)))
    assert codes <= {grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.RESOURCE_EXHAUSTED, grpc.StatusCode.UNAVAILABLE}, codes
    assert grpc.StatusCode.INVALID_ARGUMENT in codes
    assert server.metrics()["process_resident_memory_bytes"] - before < 500e6
