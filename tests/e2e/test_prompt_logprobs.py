"""Log-probabilities of prompt tokens: prompt_logprobs, and echo with logprobs, by which evaluation harnesses score texts. The oracle is
a forced answer: every prefix of the prompt as a request of its own whose one token is biased to be the next one."""
import concurrent.futures
import copy
import math

import httpx
import pytest
from openai.types import Completion
from openai.types.chat import ChatCompletion

from conftest import MODEL_NAME, Server

TEXT = "The café in Paris opens at seven. Its owner, a former sailor, bakes 12 croissants – no more, no fewer."


def complete(server, **ask):
    r = httpx.post(server.url + "/v1/completions", json={"model": MODEL_NAME, "temperature": 0, "max_tokens": 0, **ask}, timeout=120)
    assert r.status_code == 200, r.text
    return r.json()


def tokens_of(server, text):
    return httpx.post(server.url + "/tokenize", json={"text": text, "parse_special": True}).json()["tokens"]


def forced(server, ids, top):
    """[(logprob, [best logprobs])] of ids[1:] by as many requests."""
    def one(i):
        a = complete(server, prompt=ids[:i], max_tokens=1, logprobs=top, logit_bias={str(ids[i]): 100}, return_token_ids=True)["choices"][0]
        assert a["token_ids"] == [ids[i]]
        return a["logprobs"]["token_logprobs"][0], sorted(a["logprobs"]["top_logprobs"][0].values(), reverse=True)[:top]
    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        return list(pool.map(one, range(1, len(ids))))


def numbers(choice):
    return [next(iter(d.values()))["logprob"] for d in choice["prompt_logprobs"][1:]]


def test_equal_forced_decoding(server):
    ids = tokens_of(server, TEXT)
    oracle = forced(server, ids, 3)
    choice = complete(server, prompt=TEXT, prompt_logprobs=3)["choices"][0]
    assert choice["prompt_logprobs"][0] is None and len(choice["prompt_logprobs"]) == len(ids)
    for i, entry in zip(ids[1:], choice["prompt_logprobs"][1:]):
        assert str(i) == next(iter(entry)), "the prompt's token comes first"
        assert 3 <= len(entry) <= 4 and sorted(e["rank"] for e in entry.values() if e["rank"]) == [1, 2, 3]
    got = [(entry[str(i)]["logprob"], sorted((e["logprob"] for e in entry.values() if e["rank"]), reverse=True))
           for i, entry in zip(ids[1:], choice["prompt_logprobs"][1:])]
    assert got == oracle, "to the last bit: rows do not depend on what is computed beside them"
    assert [entry[str(i)]["decoded_token"].encode() for i, entry in zip(ids[1:], choice["prompt_logprobs"][1:])][:3]


def test_echo_is_what_harnesses_score_by(server):
    """As lm-evaluation-harness asks (local-completions: echo, logprobs 1, max_tokens 1), and as it reads the answer."""
    texts = [(" ".join(TEXT.split()[:5]), " " + " ".join(TEXT.split()[5:])), ("2 + 2 =", " 4"), ("Q: What is the capital of France?\nA:", " Paris"),
             ("def double(x):\n    return", " 2 * x  # 二倍 🎉")]
    pairs = [(tokens_of(server, c), tokens_of(server, c + e)) for c, e in texts]
    for max_tokens in (0, 1):
        body = complete(server, prompt=[whole for _, whole in pairs], echo=True, logprobs=1, max_tokens=max_tokens, seed=1234)
        typed = copy.deepcopy(body)
        for choice in typed["choices"]:  # the type has no room for null, which OpenAI sends all the same
            choice["logprobs"]["token_logprobs"][0], choice["logprobs"]["top_logprobs"][0] = 0.0, {}
        Completion.model_validate(typed, strict=True)
        for choice, (context, whole) in zip(sorted(body["choices"], key=lambda c: c["index"]), pairs):
            lp = choice["logprobs"]
            assert len(lp["tokens"]) == len(lp["token_logprobs"]) == len(lp["top_logprobs"]) == len(lp["text_offset"]) == len(whole) + max_tokens
            assert lp["token_logprobs"][0] is None and lp["top_logprobs"][0] is None
            last = len(whole)  # harnesses cut the generated token, and count on there being one
            values, tops = lp["token_logprobs"][len(context):last], lp["top_logprobs"][len(context):last]
            assert len(values) == len(whole) - len(context) and all(v < 0 for v in values)
            greedy = all(v == max(top.values()) for v, top in zip(values, tops))
            assert values == [v for v, _ in forced(server, whole, 1)][len(context) - 1:]
            assert greedy == all(v == best[0] for v, best in forced(server, whole, 1)[len(context) - 1:])
            whole_text = choice["text"]
            for at, token in zip(lp["text_offset"][: len(whole)], lp["tokens"]):
                assert token.startswith("bytes:") or whole_text[at:at + len(token)] == token


def test_an_answer_that_ends_at_once_has_the_end_in_its_logprobs(server):
    """Or a harness that cuts the last number would cut one of the text's."""
    ids = tokens_of(server, "All done.")
    lp = complete(server, prompt=ids, echo=True, logprobs=1, max_tokens=1, logit_bias={"2": 100})["choices"][0]
    assert lp["finish_reason"] == "stop" and lp["text"] == "All done."
    assert lp["logprobs"]["tokens"][-1] == "<|im_end|>" and len(lp["logprobs"]["tokens"]) == len(ids) + 1
    assert lp["logprobs"]["text_offset"][-1] == len("All done.")


def test_a_continuation_has_what_its_decoding_said(server):
    """Prompt rows and decode rows may differ in rounding, on machines whose kernels do: within that, the two ways agree."""
    a = complete(server, prompt=TEXT, max_tokens=30, logprobs=0, ignore_eos=True, return_token_ids=True)["choices"][0]
    ids = tokens_of(server, TEXT) + a["token_ids"]
    again = complete(server, prompt=ids, prompt_logprobs=0)["choices"][0]
    for decoded, prefilled in zip(a["logprobs"]["token_logprobs"], numbers(again)[-30:]):
        assert abs(decoded - prefilled) < 0.05
    assert math.isclose(sum(a["logprobs"]["token_logprobs"]), sum(numbers(again)[-30:]), abs_tol=0.3)


@pytest.mark.parametrize("flags", [("--max-step-tokens", 7, "--max-sequences", 2), ("--max-sequences", 1), ("--threads", 1)], ids=lambda f: " ".join(map(str, f)))
def test_steps_neighbours_and_threads_change_no_bit(server, flags):
    prompts = [TEXT, TEXT * 3, "x", TEXT[:40], "Ünïcödé 日本語 🎉"]
    want = [complete(server, prompt=p, prompt_logprobs=2)["choices"][0]["prompt_logprobs"] for p in prompts]
    s = Server(*flags)
    try:
        with concurrent.futures.ThreadPoolExecutor(8) as pool:
            jobs = [pool.submit(complete, s, prompt=p, prompt_logprobs=2, max_tokens=i % 3, n=1 + i % 2) for i, p in enumerate(prompts * 3)]
            for i, job in enumerate(jobs):
                for choice in job.result()["choices"]:
                    assert choice["prompt_logprobs"] == want[i % len(prompts)]
        assert s.wait_idle()
    finally:
        assert s.stop() == 0


def test_whoever_evicts_scores_the_whole_prompt(server):
    want = complete(server, prompt=TEXT * 3, prompt_logprobs=0)["choices"][0]["prompt_logprobs"]
    for policy in ("snapkv", "h2o", "streaming", "keydiff"):
        a = complete(server, prompt=TEXT * 3, prompt_logprobs=0, max_tokens=2, kv={"policy": policy, "budget": {"ratio": 0.5}})
        assert a["usage"]["kv"]["entries"]["dropped"] > 0 and a["choices"][0]["prompt_logprobs"] == want, policy


def test_chat_and_streams(server):
    ask = {"model": MODEL_NAME, "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 3, "temperature": 0, "prompt_logprobs": 1, "n": 2,
           "return_token_ids": True}
    whole = httpx.post(server.url + "/v1/chat/completions", json=ask, timeout=60).json()
    ChatCompletion.model_validate(whole, strict=True)
    assert len(whole["prompt_logprobs"]) == whole["usage"]["prompt_tokens"] == len(whole["prompt_token_ids"])
    as_completion = complete(server, prompt=whole["prompt_token_ids"], prompt_logprobs=1)["choices"][0]["prompt_logprobs"]
    assert whole["prompt_logprobs"] == as_completion
    with httpx.stream("POST", server.url + "/v1/chat/completions", json={**ask, "stream": True}, timeout=60) as r:
        lines = [line for line in r.iter_lines() if "prompt_logprobs" in line]
    assert len(lines) == 1, "once, with the first frame"
    plain = httpx.post(server.url + "/v1/chat/completions", json={**ask, "prompt_logprobs": None}, timeout=60).json()
    assert "prompt_logprobs" not in plain
    assert [c["message"]["content"] for c in plain["choices"]] == [c["message"]["content"] for c in whole["choices"]], "asking changes no token"
