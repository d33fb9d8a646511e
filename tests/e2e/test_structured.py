"""What an answer may be, and tools, through the official clients: every answer is validated, every refusal names its field."""
import json
import re
import time
from concurrent.futures import ThreadPoolExecutor

import grpc
import httpx
import jsonschema
import openai
import pytest

from conftest import MODEL_NAME

ASK = [{"role": "user", "content": "Describe a person: name, age, hobbies. Answer in JSON."}]
PERSON = {"type": "object", "required": ["name", "age", "hobbies"], "additionalProperties": False, "properties": {
    "name": {"type": "string", "minLength": 1, "maxLength": 24}, "age": {"type": "integer", "minimum": 0, "maximum": 120},
    "hobbies": {"type": "array", "items": {"enum": ["chess", "rowing", "caf\u00e9s \u65e5\u672c"]}, "minItems": 1, "maxItems": 3},
    "note": {"anyOf": [{"type": "null"}, {"type": "string", "pattern": "^[A-Z][a-z]{0,12}$"}]}}}
TOOLS = [{"type": "function", "function": {"name": "get_weather", "description": "The weather of a city", "parameters": {
              "type": "object", "required": ["city", "unit"], "additionalProperties": False,
              "properties": {"city": {"type": "string", "maxLength": 20}, "unit": {"enum": ["celsius", "fahrenheit"]}}}}},
         {"type": "function", "function": {"name": "add", "parameters": {
              "type": "object", "required": ["a", "b"], "additionalProperties": False,
              "properties": {"a": {"type": "integer", "minimum": -99, "maximum": 99}, "b": {"type": "integer", "minimum": -99, "maximum": 99}}}}}]
SCHEMAS = {t["function"]["name"]: t["function"]["parameters"] for t in TOOLS}


def schema_format(schema):
    return {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema, "strict": True}}


def chat(client, **kwargs):
    return client.chat.completions.create(**{"model": MODEL_NAME, "messages": ASK, "temperature": 0, "max_tokens": 200, **kwargs})


@pytest.mark.parametrize("sampling", [{"temperature": 0}, {"temperature": 1, "seed": 1}, {"temperature": 1.5, "seed": 2, "top_p": 0.9}])
def test_schema(client, sampling):
    r = chat(client, response_format=schema_format(PERSON), **sampling)
    assert r.choices[0].finish_reason == "stop"
    jsonschema.validate(json.loads(r.choices[0].message.content), PERSON)
    stream = chat(client, response_format=schema_format(PERSON), stream=True, **sampling)
    assert "".join(c.choices[0].delta.content or "" for c in stream) == r.choices[0].message.content


def test_json_object_regex_and_choice(client):
    r = chat(client, response_format={"type": "json_object"}, max_tokens=400)
    if r.choices[0].finish_reason == "stop":
        assert isinstance(json.loads(r.choices[0].message.content), dict)
    assert r.choices[0].message.content.startswith("{")
    expression = "(Paris|Rome), [0-9]{4}-[0-9]{2}"
    r = client.completions.create(model=MODEL_NAME, prompt="A place and a month:", max_tokens=40, extra_body={"regex": expression})
    assert re.fullmatch(expression, r.choices[0].text) and r.choices[0].finish_reason == "stop"
    choices = ["yes", "no", "yes, but\nonly on \u65e5\u66dc\u65e5"]
    for seed in range(4):
        assert chat(client, extra_body={"choice": choices}, temperature=2, seed=seed).choices[0].message.content in choices


def test_several_samples_and_log_probabilities(client):
    r = chat(client, response_format=schema_format(PERSON), n=4, temperature=1, seed=3, logprobs=True, top_logprobs=2)
    assert len({c.message.content for c in r.choices}) > 1
    for c in r.choices:
        jsonschema.validate(json.loads(c.message.content), PERSON)
        joined = b"".join(bytes(t.bytes) for t in c.logprobs.content)
        assert joined.decode() == c.message.content
        assert all(t.logprob <= 0 for t in c.logprobs.content)


def test_a_stop_string_ends_it_early(client):
    r = chat(client, response_format=schema_format(PERSON), stop=["\"age\""])
    assert r.choices[0].finish_reason == "stop" and "age" not in r.choices[0].message.content
    assert r.choices[0].model_dump()["stop_reason"] == "\"age\""


def test_what_has_no_end_ends_by_length(client):
    for schema in ({}, {"type": "array", "items": {"type": "array", "minItems": 1}, "minItems": 400}, {"type": "string", "minLength": 5000},
                   {"type": "integer", "minimum": 10**30}):
        r = chat(client, response_format=schema_format(schema), max_tokens=60)
        assert r.usage.completion_tokens <= 60
    r = client.completions.create(model=MODEL_NAME, prompt="Digits:", max_tokens=50, extra_body={"regex": "[0-9]{60,}[ \\n]*x"})
    assert re.fullmatch("[0-9 \n]*x?", r.choices[0].text) and r.choices[0].finish_reason == "length"


@pytest.mark.parametrize("policy", ["full", "streaming", "h2o", "snapkv", "tova", "polykv"])
def test_under_every_policy(client, policy):
    kv = {"policy": policy} if policy == "full" else {"policy": policy, "budget": {"ratio": 0.5}}
    r = chat(client, messages=[{"role": "user", "content": "word " * 300 + ASK[0]["content"]}], response_format=schema_format(PERSON), extra_body={"kv": kv})
    # A model that has lost half of its prompt may indent without end: then the answer is cut, and a beginning.
    if r.choices[0].finish_reason == "stop":
        jsonschema.validate(json.loads(r.choices[0].message.content), PERSON)
    else:
        assert re.match(r'\{\s*"name":', r.choices[0].message.content)


@pytest.mark.parametrize("body, param", [
    ({"regex": "("}, "regex"), ({"regex": "(?=a)b"}, "regex"), ({"choice": []}, "choice"), ({"choice": [""]}, "choice[0]"),
    ({"regex": "((a{0,60000}){0,60000}){0,60000}"}, "regex"),
    ({"response_format": {"type": "xml"}}, "response_format.type"), ({"response_format": {"type": "json_schema"}}, "response_format.json_schema"),
    ({"response_format": schema_format({"not": {}})}, "response_format"), ({"response_format": schema_format({"$ref": "#"})}, "response_format"),
    ({"response_format": schema_format({"type": "array", "minItems": 10**9})}, "response_format"),
    ({"response_format": {"type": "json_object"}, "regex": "a"}, "regex"),
    ({"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "nobody"}}}, "tool_choice"), ({"tool_choice": "required"}, "tool_choice"),
    ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools[0].function.name"),
    ({"tools": TOOLS, "response_format": {"type": "json_object"}}, "tool_choice"),
    ({"tools": [{"function": {"name": "f", "parameters": {"if": {}}}}], "tool_choice": "required"}, "tools"),
])
def test_what_cannot_be_is_refused_by_name(server, body, param):
    start = time.monotonic()
    r = httpx.post(server.url + "/v1/chat/completions", json={"messages": ASK, **body}, timeout=30)
    assert r.status_code == 400 and r.json()["error"]["param"] == param, r.text
    assert time.monotonic() - start < 5


def test_hostile_requests_leave_others_alone(server, client):
    hostile = [{"regex": "([ab]*a[ab]{900}c|[ab]*b[ab]{899}d)x*"}, {"regex": "(((a?){50}){50}){50}b"}, {"response_format": schema_format(
        {"$defs": {"t": {"anyOf": [{"type": "array", "items": {"$ref": "#/$defs/t"}, "minItems": i} for i in range(40)]}}, "$ref": "#/$defs/t"})}]
    with ThreadPoolExecutor(8) as pool:
        def post(body):
            return httpx.post(server.url + "/v1/chat/completions", json={"messages": ASK, "max_tokens": 60, **body}, timeout=120)
        bad = [pool.submit(post, body) for body in hostile * 2]
        good = chat(client, response_format=schema_format(PERSON))
        jsonschema.validate(json.loads(good.choices[0].message.content), PERSON)
        for r in bad:
            assert r.result().status_code in (200, 400), r.result().text
    server.wait_idle()


def calls_of(message):
    return [(c.function.name, json.loads(c.function.arguments)) for c in message.tool_calls or []]


def test_a_call_that_has_to_be(client):
    for choice in ("required", {"type": "function", "function": {"name": "add"}}):
        for seed in range(3):
            r = chat(client, tools=TOOLS, tool_choice=choice, temperature=1, seed=seed, max_tokens=400, parallel_tool_calls=False)
            assert r.choices[0].finish_reason == "tool_calls", r
            calls = calls_of(r.choices[0].message)
            assert len(calls) == 1
            for name, arguments in calls:
                assert choice == "required" or name == "add"
                jsonschema.validate(arguments, SCHEMAS[name])
            assert r.choices[0].message.content is None and r.choices[0].message.tool_calls[0].id


def test_streamed_calls_are_the_same(client):
    kwargs = dict(tools=TOOLS, tool_choice="required", temperature=1, seed=5, max_tokens=300)
    whole = chat(client, **kwargs).choices[0]
    built, order = {}, []
    for chunk in chat(client, stream=True, **kwargs):
        for call in chunk.choices[0].delta.tool_calls or []:
            order.append(call)
            if call.id:
                assert call.index not in built and call.function.arguments == "", "the name comes first, without arguments"
                built[call.index] = {"id": call.id, "name": call.function.name, "arguments": ""}
            else:
                assert call.function.name is None
                built[call.index]["arguments"] += call.function.arguments
        finish = chunk.choices[0].finish_reason or None
    assert finish == whole.finish_reason
    assert [(c["name"], c["arguments"]) for c in built.values()] == [(c.function.name, c.function.arguments) for c in whole.message.tool_calls]
    with client.chat.completions.stream(model=MODEL_NAME, messages=ASK, **kwargs) as stream:
        final = stream.get_final_completion().choices[0]
    assert [(c.function.name, c.function.arguments) for c in final.message.tool_calls] == [(c.function.name, c.function.arguments) for c in whole.message.tool_calls]


def test_a_conversation_with_a_result(client):
    call = {"id": "call-1", "type": "function", "function": {"name": "add", "arguments": "{\"a\": 1, \"b\": 2}"}}
    messages = [*ASK, {"role": "assistant", "content": None, "tool_calls": [call]}, {"role": "tool", "tool_call_id": "call-1", "content": "3"}]
    r = chat(client, messages=messages, tools=TOOLS, max_tokens=16)
    assert r.choices[0].finish_reason in ("stop", "length", "tool_calls")
    assert chat(client, tools=TOOLS, tool_choice="none", max_tokens=8).choices[0].message.tool_calls is None


def test_grpc(server, protos, client):
    p = protos.inference
    with grpc.insecure_channel(server.grpc) as channel:
        stub = protos.inference_grpc.InferenceStub(channel)
        sampling = p.Sampling(temperature=0, max_tokens=200)
        ask = [p.ChatMessage(role="user", content=ASK[0]["content"])]

        def deltas(request):
            return [e.delta for e in stub.Chat(request) if e.WhichOneof("event") == "delta"]
        text = "".join(d.text for d in deltas(p.ChatRequest(messages=ask, sampling=sampling, structure=p.Structure(json_schema=json.dumps(PERSON)))))
        assert text == chat(client, response_format=schema_format(PERSON)).choices[0].message.content
        generate = p.GenerateRequest(prompt="A month:", sampling=sampling, structure=p.Structure(regex="[0-9]{4}-[0-9]{2}"))
        text = "".join(e.delta.text for e in stub.Generate(generate))
        assert re.fullmatch("[0-9]{4}-[0-9]{2}", text)
        tools = [p.Tool(name=n, parameters=json.dumps(s)) for n, s in SCHEMAS.items()]
        request = p.ChatRequest(messages=ask, sampling=sampling, tools=tools, tool_choice="add")
        events = list(stub.Chat(request))
        calls = [c for e in events for c in e.delta.tool_calls]
        assert calls[0].name == "add" and calls[0].id and not calls[0].arguments
        jsonschema.validate(json.loads("".join(c.arguments for c in calls)), SCHEMAS["add"])
        assert events[-1].finished.finish_reason == p.FINISH_REASON_TOOL_CALLS
        for bad in (p.ChatRequest(messages=ask, structure=p.Structure(regex="(")), p.ChatRequest(messages=ask, structure=p.Structure(json_schema="{")),
                    p.ChatRequest(messages=ask, tool_choice="nobody"), p.ChatRequest(messages=ask, tools=[p.Tool(name="a b")])):
            with pytest.raises(grpc.RpcError) as caught:
                list(stub.Chat(bad))
            assert caught.value.code() == grpc.StatusCode.INVALID_ARGUMENT, caught.value


def test_a_client_that_leaves_frees_everything(server):
    with httpx.stream("POST", server.url + "/v1/chat/completions", timeout=30, json={
            "messages": ASK, "stream": True, "max_tokens": 2000, "response_format": schema_format({"type": "string", "minLength": 4000})}) as r:
        next(r.iter_lines())
    server.wait_idle()
