"""An independent forward pass of a llama GGUF model in numpy, f32 over the dequantised weights.

Shares no code with the server: tensors are read and dequantised by the `gguf` package, the formulas are written here
from the papers. It recomputes the whole prefix with one batched pass and keeps no cache. Used to write goldens; nothing
that the project builds or runs needs it.
"""

import numpy as np
from gguf import GGUFReader
from gguf.quants import dequantize


class ReferenceModel:
    """Computes in `dtype`."""

    def __init__(self, path, dtype=np.float32):
        self.dtype = dtype
        reader = GGUFReader(path)

        def key(name, default=None):
            field = reader.fields.get("llama." + name)
            if field is None and default is None:
                raise KeyError("llama." + name)
            return default if field is None else field.contents()

        self.layers = key("block_count")
        self.heads = key("attention.head_count")
        self.kv_heads = key("attention.head_count_kv", self.heads)
        self.width = key("embedding_length")
        self.head_dim = key("attention.key_length", self.width // self.heads)
        self.eps = dtype(key("attention.layer_norm_rms_epsilon"))
        self.base = key("rope.freq_base", 10000.0)
        self.weights = {}
        for tensor in reader.tensors:
            values = dequantize(tensor.data, tensor.tensor_type).astype(dtype)
            # GGUF lists the innermost dimension first.
            self.weights[tensor.name] = values.reshape(tuple(int(d) for d in tensor.shape[::-1]))
        self.head = self.weights.get("output.weight", self.weights["token_embd.weight"])

    def norm(self, x, name):
        scale = 1 / np.sqrt(np.mean(x * x, axis=-1, keepdims=True) + self.eps)
        return x * scale * self.weights[name]

    def rotate(self, x):
        """x is [T, heads, head_dim]; GGUF's llama tensors rotate neighbours (2i, 2i + 1)."""
        half = np.arange(self.head_dim // 2, dtype=np.float64)
        angles = np.arange(len(x))[:, None] * self.base ** (-2 * half / self.head_dim)
        cos, sin = np.cos(angles).astype(self.dtype)[:, None], np.sin(angles).astype(self.dtype)[:, None]
        even, odd = x[..., 0::2], x[..., 1::2]
        out = np.empty_like(x)
        out[..., 0::2] = even * cos - odd * sin
        out[..., 1::2] = even * sin + odd * cos
        return out

    def attention(self, x, layer):
        prefix = f"blk.{layer}."
        normed = self.norm(x, prefix + "attn_norm.weight")
        heads = [(normed @ self.weights[f"{prefix}attn_{part}.weight"].T).reshape(len(x), -1, self.head_dim)
                 for part in "qkv"]
        q, k, v = self.rotate(heads[0]), self.rotate(heads[1]), heads[2]
        group = self.heads // self.kv_heads
        k, v = np.repeat(k, group, axis=1), np.repeat(v, group, axis=1)
        scores = np.einsum("thd,shd->hts", q, k) / self.dtype(np.sqrt(self.head_dim))
        scores = np.where(np.tri(len(x), dtype=bool), scores, -np.inf)
        scores = np.exp(scores - scores.max(axis=-1, keepdims=True))
        scores /= scores.sum(axis=-1, keepdims=True)
        out = np.einsum("hts,shd->thd", scores, v).reshape(len(x), -1)
        return out @ self.weights[prefix + "attn_output.weight"].T

    def feed_forward(self, x, layer):
        prefix = f"blk.{layer}."
        normed = self.norm(x, prefix + "ffn_norm.weight")
        gate = normed @ self.weights[prefix + "ffn_gate.weight"].T
        up = normed @ self.weights[prefix + "ffn_up.weight"].T
        return (gate / (1 + np.exp(-gate)) * up) @ self.weights[prefix + "ffn_down.weight"].T

    def logits(self, ids):
        """[T, V] for a list of token ids."""
        x = self.weights["token_embd.weight"][np.asarray(ids)]
        for layer in range(self.layers):
            x = x + self.attention(x, layer)
            x = x + self.feed_forward(x, layer)
        return self.norm(x, "output_norm.weight") @ self.head.T
