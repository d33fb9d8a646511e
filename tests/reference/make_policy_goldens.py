#!/usr/bin/env python3
"""Writes tests/golden/policies/kvpress.json: what kvpress keeps of a random prompt, list by list.

    python3 -m venv /tmp/kvpress && /tmp/kvpress/bin/pip install kvpress==0.5.5
    /tmp/kvpress/bin/python tests/reference/make_policy_goldens.py

A tiny random Llama runs over random tokens once a press. Queries and keys after RoPE are recorded, so the test needs no
model: it feeds them to the cache and compares index sets. Never needed to build or run.
"""
import base64
import json
import pathlib
from importlib.metadata import version

import numpy as np
import torch
from kvpress import (AdaKVPress, ChunkKVPress, KeyDiffPress, KnormPress, ObservedAttentionPress, PyramidKVPress, SnapKVPress,
                     StreamingLLMPress, TOVAPress)
from kvpress.utils import get_prerope_query_states
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.models.llama.modeling_llama import rotate_half

LAYERS, HEADS, GROUPS, DIM, PROMPT, WINDOW = 4, 6, 2, 16, 120, 8
KEEP = [24, 40, 60]  # entries a list; all are whole chunks of 20 or make the pyramid differ from a flat one


def model(attention, dtype):
    torch.manual_seed(7)
    config = LlamaConfig(vocab_size=512, hidden_size=HEADS * DIM, intermediate_size=64, num_hidden_layers=LAYERS,
                         num_attention_heads=HEADS, num_key_value_heads=GROUPS, head_dim=DIM, max_position_embeddings=512,
                         attn_implementation=attention, initializer_range=0.2)
    return LlamaForCausalLM(config).eval().to(dtype)


def run(press, attention, ids, record=None, dtype=torch.float32):
    """Positions that the press keeps: [layer][group]. Kept keys are found again among all keys, which are distinct."""
    net = model(attention, dtype)
    kept, full = {}, {}

    def compress(module, hidden, keys, values, attentions, kwargs):
        layer = module.layer_idx
        full[layer] = keys.detach().clone()
        if record is not None:
            cos, sin = kwargs["position_embeddings"]
            q = get_prerope_query_states(module, hidden)
            record.append((layer, q * cos.unsqueeze(1) + rotate_half(q) * sin.unsqueeze(1), keys))
        out = original(module, hidden, keys.clone(), values, attentions, kwargs)
        masked = getattr(module, "masked_key_indices", None)
        lists = []
        for g in range(GROUPS):
            if masked is not None:
                gone = {int(t) for b, h, t in zip(*masked) if int(h) == g}
                lists.append([t for t in range(keys.shape[2]) if t not in gone])
            else:
                distance = torch.cdist(out[0][0, g], keys[0, g])
                lists.append(sorted(int(i) for i in distance.argmin(dim=1)))
        kept[layer] = lists
        module.masked_key_indices = None
        return keys, values

    original, press.compress = press.compress, compress
    with torch.no_grad(), press(net):
        net(ids, use_cache=True)
    return [kept[layer] for layer in range(LAYERS)]


def presses(keep):
    ratio = 1 - (keep + 0.25) / PROMPT  # int() of the product must not fall below the number meant
    snap = dict(compression_ratio=ratio, window_size=WINDOW)
    return {
        "streaming": (StreamingLLMPress(compression_ratio=ratio), "sdpa"),
        "h2o": (ObservedAttentionPress(compression_ratio=ratio), "eager"),
        "tova": (TOVAPress(compression_ratio=ratio), "sdpa"),
        "snapkv": (SnapKVPress(**snap), "sdpa"),
        "adakv": (AdaKVPress(SnapKVPress(**snap)), "sdpa"),
        # Its formula takes the ratio itself, so no margin.
        "pyramidkv": (PyramidKVPress(compression_ratio=1 - keep / PROMPT, window_size=WINDOW, beta=4), "sdpa"),
        "chunkkv": (ChunkKVPress(SnapKVPress(**snap)), "sdpa"),
        "keydiff": (KeyDiffPress(compression_ratio=ratio), "sdpa"),
        "knorm": (KnormPress(compression_ratio=ratio), "sdpa"),
    }


def encode(tensors):
    rows = torch.stack([t[0].transpose(0, 1) for t in tensors])  # [layers, prompt, heads, dim]
    return base64.b64encode(rows.numpy().astype("<f4").tobytes()).decode()


def stable(ids):
    """Whether double precision makes the same choices: no two scores at a border are equal but for rounding."""
    return all(run(*presses(keep)[name], ids) == run(*presses(keep)[name], ids, dtype=torch.float64)
               for keep in KEEP for name in presses(keep))


def main():
    for seed in range(100):
        torch.manual_seed(seed)
        ids = torch.randperm(512)[None, :PROMPT]  # distinct: equal tokens have keys of equal norm in the first layer
        if stable(ids):
            break
    print("prompt of seed", seed)
    record = []
    run(KnormPress(compression_ratio=0.5), "sdpa", ids, record)
    record.sort(key=lambda r: r[0])
    out = {"made_with": f"kvpress {version('kvpress')}", "layers": LAYERS, "heads": HEADS,
           "groups": GROUPS, "dim": DIM, "prompt": PROMPT, "window": WINDOW,
           "queries": encode([r[1] for r in record]), "keys": encode([r[2] for r in record]), "cases": []}
    for keep in KEEP:
        for name, (press, attention) in presses(keep).items():
            kept = run(press, attention, ids)
            out["cases"].append({"policy": name, "keep": keep, "kept": kept})
            print(name, keep, [[len(g) for g in layer] for layer in kept])
    path = pathlib.Path(__file__).resolve().parents[1] / "golden/policies/kvpress.json"
    path.write_text(json.dumps(out, separators=(",", ":")).replace('{"policy"', '\n{"policy"') + "\n")
    print(path, path.stat().st_size, "bytes")


if __name__ == "__main__":
    main()
