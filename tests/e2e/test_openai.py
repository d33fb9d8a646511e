"""The official openai client against the real server."""
import openai
import pytest

from conftest import MODEL_NAME

CAPITAL = [{"role": "user", "content": "What is the capital of France?"}]


def test_models(client):
    models = client.models.list().data
    assert [m.id for m in models] == [MODEL_NAME]
    assert models[0].max_model_len == 8192
    assert client.models.retrieve(MODEL_NAME).id == MODEL_NAME
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("no-such-model")


def test_chat(client):
    r = client.chat.completions.create(model=MODEL_NAME, messages=CAPITAL, temperature=0, max_tokens=24)
    assert "Paris" in r.choices[0].message.content
    assert r.choices[0].message.role == "assistant"
    assert r.choices[0].finish_reason in ("stop", "length")
    assert r.object == "chat.completion" and r.model == MODEL_NAME and r.id
    assert r.usage.total_tokens == r.usage.prompt_tokens + r.usage.completion_tokens
    kv = r.usage.model_dump()["kv"]
    assert kv["policy"] == "full" and kv["reason"]
    assert kv["lists"] == 90 and kv["entries"]["dropped"] == 0
    assert kv["bits"] == {"key": 16, "value": 16}
    assert kv["bytes"]["device"] >= kv["bytes"]["full"] > 0
    assert 1.0 <= kv["bytes_ratio"] < 2.0


def test_chat_stream_equals_whole(client):
    whole = client.chat.completions.create(model=MODEL_NAME, messages=CAPITAL, temperature=0, max_tokens=32)
    chunks = list(client.chat.completions.create(model=MODEL_NAME, messages=CAPITAL, temperature=0, max_tokens=32, stream=True,
                                                 stream_options={"include_usage": True}))
    text = "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
    assert text == whole.choices[0].message.content
    assert chunks[0].choices[0].delta.role == "assistant"
    reasons = [c.choices[0].finish_reason for c in chunks if c.choices and c.choices[0].finish_reason]
    assert reasons == [whole.choices[0].finish_reason]
    assert chunks[-1].usage.completion_tokens == whole.usage.completion_tokens and not chunks[-1].choices
    assert len({c.id for c in chunks}) == 1


def test_completion(client):
    r = client.completions.create(model=MODEL_NAME, prompt="The capital of France is", temperature=0, max_tokens=8)
    assert "Paris" in r.choices[0].text
    assert r.usage.completion_tokens == 8 and r.choices[0].finish_reason == "length"
    text = "".join(c.choices[0].text for c in client.completions.create(
        model=MODEL_NAME, prompt="The capital of France is", temperature=0, max_tokens=8, stream=True))
    assert text == r.choices[0].text


def test_prompts_in_a_list_and_as_ids(client):
    r = client.completions.create(model=MODEL_NAME, prompt=["The capital of France is", "Two plus two is"], temperature=0, max_tokens=4)
    assert [c.index for c in r.choices] == [0, 1]
    alone = client.completions.create(model=MODEL_NAME, prompt="Two plus two is", temperature=0, max_tokens=4)
    assert r.choices[1].text == alone.choices[0].text


def test_echo(client):
    r = client.completions.create(model=MODEL_NAME, prompt="Once upon", temperature=0, max_tokens=3, echo=True)
    assert r.choices[0].text.startswith("Once upon")


def test_n_seed_and_temperature(client):
    ask = dict(model=MODEL_NAME, prompt="My favourite animal is", max_tokens=12, temperature=1.0, n=3, seed=7)
    first, second = client.completions.create(**ask), client.completions.create(**ask)
    texts = [c.text for c in first.choices]
    assert [c.index for c in first.choices] == [0, 1, 2]
    assert texts == [c.text for c in second.choices], "the same seed gives the same text"
    assert len(set(texts)) > 1, "samples differ"
    assert first.usage.completion_tokens == second.usage.completion_tokens <= 36


def test_stop_strings(client):
    plain = client.completions.create(model=MODEL_NAME, prompt="1, 2, 3, 4,", temperature=0, max_tokens=24)
    stop = plain.choices[0].text.strip()[3:8]
    r = client.completions.create(model=MODEL_NAME, prompt="1, 2, 3, 4,", temperature=0, max_tokens=24, stop=["never there", stop])
    assert r.choices[0].finish_reason == "stop"
    assert r.choices[0].text == plain.choices[0].text.split(stop)[0]
    assert r.choices[0].model_dump()["stop_reason"] == stop


def test_chat_logprobs(client):
    r = client.chat.completions.create(model=MODEL_NAME, messages=CAPITAL, temperature=0, max_tokens=6, logprobs=True, top_logprobs=3)
    content = r.choices[0].logprobs.content
    assert len(content) == r.usage.completion_tokens
    for token in content:
        assert token.logprob <= 0 and len(token.top_logprobs) == 3
        assert token.top_logprobs[0].token == token.token, "greedy takes the best"
        assert token.logprob == pytest.approx(token.top_logprobs[0].logprob)
        values = [t.logprob for t in token.top_logprobs]
        assert values == sorted(values, reverse=True)
    text = b"".join(bytes(t.bytes) for t in content).decode(errors="replace")
    assert r.choices[0].message.content in text


def test_completion_logprobs(client):
    r = client.completions.create(model=MODEL_NAME, prompt="The capital of France is", temperature=0, max_tokens=4, logprobs=2)
    lp = r.choices[0].logprobs
    assert len(lp.tokens) == len(lp.token_logprobs) == len(lp.top_logprobs) == 4
    assert "".join(lp.tokens) == r.choices[0].text
    assert all(len(t) >= 2 for t in lp.top_logprobs)


def test_logit_bias(client):
    banned = client.completions.create(model=MODEL_NAME, prompt="The capital of France is", temperature=0, max_tokens=1)
    ids = client.post("/../tokenize", body={"text": banned.choices[0].text}, cast_to=object)["tokens"]
    r = client.completions.create(model=MODEL_NAME, prompt="The capital of France is", temperature=0, max_tokens=1,
                                  logit_bias={str(ids[0]): -100})
    assert r.choices[0].text != banned.choices[0].text


def test_max_tokens_zero_generates_nothing(client):
    r = client.completions.create(model=MODEL_NAME, prompt="The capital", max_tokens=0)
    assert r.choices[0].text == "" and r.usage.completion_tokens == 0 and r.choices[0].finish_reason == "length"


@pytest.mark.parametrize("field, value", [
    ("temperature", -1), ("temperature", 1e9), ("top_p", 0), ("top_p", 1.5), ("n", 0), ("n", 129), ("max_tokens", -5),
    ("presence_penalty", 3), ("frequency_penalty", -2.5), ("top_logprobs", 21), ("stop", ["a"] * 17),
    ("extra_body", {"top_k": -3}), ("extra_body", {"min_p": 2}), ("extra_body", {"repetition_penalty": 0}),
    ("extra_body", {"timeout_ms": -1}), ("extra_body", {"kv": {"policy": "no-such-policy"}}),
    ("extra_body", {"kv": {"policy": "snapkv", "budget": {"ratio": 0}}}), ("extra_body", {"kv": []}), ("logit_bias", {"99999999": 1}),
])
def test_values_out_of_range_are_refused(client, field, value):
    ask = dict(model=MODEL_NAME, messages=CAPITAL, max_tokens=2)
    if field == "top_logprobs":
        ask["logprobs"] = True
    ask[field] = value
    with pytest.raises(openai.BadRequestError) as caught:
        client.chat.completions.create(**ask)
    body = caught.value.body
    assert body["message"] and body["type"] == "invalid_request_error"


def test_unknown_model(client):
    with pytest.raises(openai.NotFoundError) as caught:
        client.chat.completions.create(model="gpt-9", messages=CAPITAL)
    assert "gpt-9" in caught.value.body["message"] and caught.value.body["code"] == "model_not_found"


def test_prompt_too_long(client):
    with pytest.raises(openai.BadRequestError) as caught:
        client.completions.create(model=MODEL_NAME, prompt="word " * 9000, max_tokens=5)
    assert caught.value.body["code"] == "context_length_exceeded"
    assert "8192" in caught.value.body["message"] and "9001" in caught.value.body["message"]


def test_what_is_not_offered_is_refused_by_name(client):
    with pytest.raises(openai.BadRequestError) as caught:
        client.chat.completions.create(model=MODEL_NAME, messages=CAPITAL, functions=[{"name": "f", "parameters": {"type": "object"}}])
    assert caught.value.body["param"] == "functions"


def test_deadline_after_the_first_token_gives_partial_text(client):
    r = client.completions.create(model=MODEL_NAME, prompt="Count: 1 2 3", max_tokens=4000, temperature=0,
                                  extra_body={"timeout_ms": 1500, "ignore_eos": True})
    assert r.choices[0].finish_reason == "length" and r.choices[0].model_dump()["stop_reason"] == "deadline"
    assert 0 < r.usage.completion_tokens < 4000
