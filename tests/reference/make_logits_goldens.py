"""Writes tests/golden/logits/smollm2-135m-q4_1.json: logits of a few prompts by the reference pass.

  python tests/reference/make_logits_goldens.py models/SmolLM2-135M-Instruct.Q4_1.gguf

Needs numpy==2.4.6 and gguf==0.19.0. A prompt is given as token ids, so that the golden tests the pass alone. For each
kept position: the log of the sum of exponentials, the largest logits, and a fixed sample of all of them.
"""

import json
import sys
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).parent))
from reference_forward import ReferenceModel  # noqa: E402

FRANCE = [504, 3575, 282, 4649, 314]
# What llama.cpp answers as well, with the same weights in f16.
GREEDY = [7042, 30, 198, 198, 504, 2988, 314, 42, 216, 34, 32, 33, 40, 29, 32, 33, 29, 34, 34, 216]
CHAT = [1, 9690, 198, 2683, 359, 253, 5356, 5646, 11173, 3365, 3511, 308, 34519, 28, 7018, 411, 407, 19712, 8182, 2, 198,
        1, 4093, 198, 6004, 2, 198, 1, 520, 9531, 198]
SAMPLE = 256
TOP = 40


def rounded(values):
    return [round(float(v), 5) for v in values]


def main():
    model = ReferenceModel(sys.argv[1])
    vocab = len(model.head)
    random = np.random.default_rng(1)
    sample = np.sort(random.choice(vocab, SAMPLE, replace=False))
    prompts = {
        "one token": [504],
        "greedy continuation": FRANCE + GREEDY,
        "chat": CHAT,
        "random tokens": random.integers(0, vocab, 300).tolist(),
    }
    cases = []
    for name, ids in prompts.items():
        logits = model.logits(ids).astype(np.float64)
        if name == "greedy continuation":
            greedy = logits[len(FRANCE) - 1 : -1].argmax(axis=1).tolist()
            assert greedy == GREEDY, f"the reference pass answers {greedy}"
        positions = sorted({int(p) for p in np.linspace(0, len(ids) - 1, 8)})
        rows = []
        for p in positions:
            peak = logits[p].max()
            top = np.argsort(-logits[p])[:TOP]
            rows.append({
                "position": p,
                "max_abs": round(float(np.abs(logits[p]).max()), 5),
                "log_sum_exp": round(float(peak + np.log(np.exp(logits[p] - peak).sum())), 5),
                "top_ids": top.tolist(),
                "top_logits": rounded(logits[p][top]),
                "sample_logits": rounded(logits[p][sample]),
            })
        cases.append({"name": name, "ids": ids, "rows": rows})
    out = Path(__file__).parent.parent / "golden/logits/smollm2-135m-q4_1.json"
    out.parent.mkdir(parents=True, exist_ok=True)
    golden = {"model": Path(sys.argv[1]).name, "prompt_length": len(FRANCE), "sample_ids": sample.tolist(), "cases": cases}
    out.write_text(json.dumps(golden, separators=(",", ":")).replace('{"position"', '\n{"position"').replace('{"name"', '\n{"name"') + "\n")
    print(f"{out}: {out.stat().st_size} bytes, {len(cases)} prompts")


if __name__ == "__main__":
    main()
