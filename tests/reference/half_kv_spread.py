"""How far two right passes over a half-precision cache may be from each other: the floor of any bound on logits.

  python tests/reference/half_kv_spread.py models/SmolLM2-135M-Instruct.Q4_1.gguf

The same formulas are computed in f32 and in f64, with keys and values rounded to half precision and without. Without
the rounding the two agree to about 1e-6 of the largest logit. With it a value near a rounding border falls on one side
in one pass and on the other side in the other; later layers multiply such flips, and the passes end up as far from each
other as the rounding itself moves them.
"""

import sys
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).parent))
from make_logits_goldens import CHAT, FRANCE, GREEDY  # noqa: E402
from reference_forward import ReferenceModel  # noqa: E402


def main():
    passes = {(dtype, kv): ReferenceModel(sys.argv[1], dtype, kv)
              for dtype in (np.float32, np.float64) for kv in (None, np.float16)}
    pairs = {
        "f32 against f64, no rounding": ((np.float32, None), (np.float64, None)),
        "f32 against f64, both rounded": ((np.float32, np.float16), (np.float64, np.float16)),
        "f64, rounded against not": ((np.float64, np.float16), (np.float64, None)),
    }
    for name, ids in (("greedy continuation", FRANCE + GREEDY), ("chat", CHAT)):
        logits = {key: model.logits(ids) for key, model in passes.items()}
        for what, (a, b) in pairs.items():
            rows = np.abs(logits[a] - logits[b]).max(axis=1) / np.abs(logits[b]).max(axis=1)
            print(f"{name}: {what}: median {np.median(rows):.2e}, worst row {rows.max():.2e}")


if __name__ == "__main__":
    main()
