#!/usr/bin/env python3
"""Writes docs/api.md from a server's /openapi.json:  docs/make_api.py http://127.0.0.1:8000 > docs/api.md

The field tables come from the table that the parser reads by. A test compares the page with what the binary serves."""
import json
import sys
import urllib.request

HEAD = """# The HTTP API

Made by `docs/make_api.py` from `/openapi.json`; do not edit by hand. The same over gRPC: `proto/loupe/v1/inference.proto`.
Keys, TLS, limits and web origins: [operations](operations.md). The `kv` object: [kvcache](kvcache.md#policies).

## Routes

A path that is not offered answers 404 naming those that are, a wrong method 405 with `Allow`.
"""

FIELDS = """
## Request fields

*Honoured* fields do what they say. *Refused* fields answer 400 and name the field, unless the value asks for what happens anyway;
the column *takes* lists those values. *Ignored* fields are checked for their type; nothing is lost without them. `null` means absent
everywhere. A field that is not listed is ignored, or refused if the server runs with `--strict-fields`.
"""

TAIL = """
## What an answer may be

`response_format`, `regex` and `choice` hold an answer to a form, token by token; one of them may be sent. The answer ends where nothing
may follow; one that is cut (`length`, a stop string) is a beginning of what was asked for. Compiled forms are kept, the last 64.

**Schemas** are JSON Schema 2020-12, and the older names of the same things. What is kept: `type` (also a list), `enum`, `const`,
`properties`, `required`, `additionalProperties`, `patternProperties` (one pattern, without `properties`), `minProperties` and `maxProperties`
(without `properties`), `items`, `prefixItems`, `minItems`, `maxItems`, `minLength`, `maxLength`, `pattern`, `minimum`, `maximum`,
`exclusiveMinimum`, `exclusiveMaximum`, `multipleOf` (whole numbers up to 1000, without bounds), `anyOf`, `allOf`, `oneOf` (if the branches
differ in type or in the value of a required property), `$ref` inside the schema, also in circles, and the formats `date`, `time`,
`date-time`, `duration`, `uuid`, `ipv4`, `ipv6`, `hostname`, `email`, `uri`. Other formats, and keywords that say nothing about what is
valid, are passed over. Refused by name: `not`, `if`, `then`, `else`, `dependentRequired`, `dependentSchemas`, `unevaluatedProperties`,
`unevaluatedItems`, `contains`, `propertyNames`, `uniqueItems` of more than one item, a length beside `pattern` or `format`, two different
patterns in `allOf`. Answers are a little narrower than the schema: properties come in the order of their declaration, undeclared ones
only if `additionalProperties` says so, a schema without `type` has the type that its keywords speak of, exponents have at most two digits,
29 February is no date. White space between tokens is nothing, a space, or a line end with indentation.

**Expressions** match the whole answer: characters, classes, `.`, `\\d \\w \\s` and their opposites, `\\p{...}`, groups, `|`, `* + ? {m,n}`
(up to 65,536). `\\d` and `\\w` are ASCII. `^` and `$` may stand at the ends. Refused: look-around, back references, flags, `\\b`.

A form may have 200,000 states and 45 ms of processor time to compile; a token's choice has 1,000,000 elementary steps. What needs more is refused with 400,
or ends its own request if that shows later.

## Tools

`tools` are shown by the model's chat template; a template that knows none gets them in a system message. How calls are written is read
from the template, or said by `serve --tool-format`: `hermes` (`<tool_call>`, Qwen), `llama` (JSON, `<|python_tag|>`), `harmony`. With
`tool_choice` `required` or a named function the answer is calls only, 16 at most, whose arguments satisfy the tool's schema; with `auto` the model is
free, and what is no call stays text. A call is streamed as its name with empty arguments, then the arguments in pieces. The answer
ends with `finish_reason` `tool_calls`. What a model thinks between `<think>` and `</think>` comes as `reasoning_content`.
A form of the answer and tools exclude each other unless `tool_choice` is `none`.

## Answers

* `usage.kv` says what became of the request's KV cache; `stop_reason` says why the answer ended: the matched stop string or token id,
  `deadline`, `context` when the context is full, `cancelled`, `drain`, or null for the model's own end. `finish_reason` is OpenAI's: what
  was cut is `length`.
* A stream is frames `data: {...}` and ends with `data: [DONE]`. The first frame of a chat choice carries the role, the one before the end
  `finish_reason`, then comes usage with `choices: []` if `stream_options.include_usage` is set. While a prompt is computed, a comment
  (`: still working`) is sent every 15 s. A stream that fails after its first byte gets one frame with the error object, then `[DONE]`.
* `prompt_logprobs` gives a list with null for the first prompt token and an object by token id for each further one (in a chat beside
  `choices`, in a stream with the first frame). `echo` with `logprobs` gives those of the prompt in front of the answer's, and, if the
  model ends the answer, those of the token that did: texts are scored with `max_tokens` 0, or 1 as evaluation harnesses do. The numbers
  are those of the whole prompt, whatever `kv` keeps of it.
* `X-Request-Id` is echoed, or made; a request is cancelled by it or by the id of its answer. A second cancel answers
  like the first (the last 4096 cancelled ids are kept); an id that nobody carries is 404. `traceparent` is passed on.

## Errors

`{"error": {"message", "type", "param", "code"}}`. `param` names the field. A prompt beyond the context is 400 with the code
`context_length_exceeded` and both numbers; 413 is about the bytes of the body. 429 and 503 carry `Retry-After` in seconds: for a full
queue, the time in which half of it will have been served at the rate measured over the last minute.

## Limits

| what | limit |
|---|---|
| header | 64 KiB, 20 s |
| body | `--max-body-bytes` (16 MiB), 120 s; 16 bodies over 1 MiB at a time |
| text of a request | 4 MiB |
| JSON | 64 levels, 16,384 keys an object, 4,000,000 values, no key twice |
| prompts | 128 a request; prompts times `n` at most 256 |
| `stop` | 16 strings of 4096 bytes; 256 `stop_token_ids`; 4096 `logit_bias` entries |
| log-probabilities of prompts | 1,048,576 a request, those beside each token and all samples counted |
| waiting | `--max-queue` (256) requests; `--max-connections` (1024) |
| a slow reader | what it has not read stays in its request's own output; a write that takes 60 s ends the request |
"""


def takes(schema):
    """What a JSON Schema lets in, in a few words."""
    if "anyOf" in schema:
        parts = [takes(s) for s in schema["anyOf"] if s != {"type": "null"}]
        return ", or ".join(dict.fromkeys(parts))
    if "const" in schema:
        return f"`{json.dumps(schema['const'])}`"
    if "enum" in schema:
        return ", ".join(f"`{json.dumps(v)}`" for v in schema["enum"])
    kind = schema.get("type")
    if kind == "null":
        return "nothing"
    if kind == "array":
        if schema.get("maxItems") == 0:
            return "an empty list"
        size = f" of up to {schema['maxItems']}" if "maxItems" in schema else ""
        items = takes(schema["items"]) if schema.get("items") else "anything"
        return f"list{size}: {items}"
    low, high = schema.get("minimum"), schema.get("maximum")
    if "exclusiveMinimum" in schema:
        return f"{kind} above {schema['exclusiveMinimum']} to {high}"
    if low is None:
        return kind
    widest = high is None or high >= 2**31 - 1
    if widest and low <= -2**31:
        return kind
    return f"{kind} from {low}" + ("" if widest else f" to {high}")


def fields(document, name):
    lines = ["| field | | takes | |", "|---|---|---|---|"]
    for field, schema in document["components"]["schemas"][name]["properties"].items():
        lines.append(f"| `{field}` | {schema['x-loupe-support']} | {takes(schema)} | {schema['description']} |")
    return "\n".join(lines) + "\n"


def page(document):
    out = [HEAD, "| route | | refuses with |", "|---|---|---|"]
    for path, methods in document["paths"].items():
        for method, operation in methods.items():
            statuses = ", ".join(s for s in operation["responses"] if s != "200")
            out.append(f"| `{method.upper()} {path}` | {operation['summary']} | {statuses} |")
    text = "\n".join(out) + "\n" + FIELDS
    text += "\n### /v1/chat/completions\n\n" + fields(document, "ChatRequest")
    text += "\n### /v1/completions\n\n" + fields(document, "CompletionRequest")
    return text + TAIL


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit("usage: docs/make_api.py http://HOST:PORT > docs/api.md")
    with urllib.request.urlopen(sys.argv[1] + "/openapi.json") as answer:
        sys.stdout.write(page(json.load(answer)))
