"""Random calls of attention on dense arrays."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ejkernel.types import MaskInfo
from ejktest.random_calls.draw import HEADS, Draw, RandomCall


def relative_bias(score: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
    return score + 0.01 * (k - q) * (h + 1)


def striped(b: Any, h: Any, q: Any, k: Any) -> Any:
    return ((q + k + h) % 3 != 0) | (q == k)


def softmax_options(
    d: Draw, b: int, q: int, k: int, h: int, allowed: set[str], packed: bool
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Draws arrays and options of softmax attention among the ``allowed``."""
    arrays: dict[str, Any] = {}
    static: dict[str, Any] = {}

    def has(name: str, share: float) -> bool:
        return name in allowed and d.option(share)

    if has("causal", 0.5):
        static["causal"] = True
    if has("sliding_window", 0.25):
        static["sliding_window"] = d.window()
    if static and has("causal_offset", 0.3):
        static["causal_offset"] = d.pick((k - q, 1, -1, -5, 40))
    if has("softmax_aux", 0.25):
        arrays["softmax_aux"] = d.sinks(h)
    if has("logits_soft_cap", 0.2):
        static["logits_soft_cap"] = d.pick((2.0, 20.0))
    if has("softmax_scale", 0.15):
        static["softmax_scale"] = d.pick((0.05, -0.1, 0.0))
    if has("bias", 0.2):
        shape = d.pick((1, b)), d.pick((1, h)), d.pick((1, q, q)), k
        arrays["bias"] = d.normal(*shape, dtype=d.pick(("float32", d.dtype)))
    if has("attention_mask", 0.2):
        rank3 = (b, q, k) if b != h else (b, 1, q, k)  # which has one reading
        shape = d.pick(((b, k), rank3, (1, 1, q, k), (b, h, q, k)))
        mask = d.rng.random(shape) < d.pick((0.2, 0.9))
        arrays["attention_mask"] = mask.astype(d.pick(("bool", "int32")))
    if has("mask_info", 0.2) and not packed:
        arrays["mask_info"] = mask_info(d, b, q, k)
    if has("dropout_prob", 0.15):
        static["dropout_prob"] = d.pick((0.1, 0.5))
        arrays["dropout_seed"] = np.int32(d.integer(0, 1000))
    if has("return_lse", 0.4):
        static["return_lse"] = True
    if has("score_mod", 0.07):
        static["score_mod"] = relative_bias
    if has("mask_mod", 0.07):
        static["mask_mod"] = striped
    if d.dtype == "float32" and has("precision", 0.3):
        static["precision"] = "highest"
    return arrays, static


def mask_info(d: Draw, b: int, q: int, k: int) -> MaskInfo:
    """Draws documents with padding, or positions of tokens."""
    rows = d.pick((1, b))
    if d.chance(0.6):
        ids = np.sort(d.rng.integers(-1, 4, (rows, max(q, k))), 1).astype(np.int32)
        if d.chance(0.3):
            ids = d.rng.permuted(ids, axis=1)
        return MaskInfo.from_segments(ids[:, :q], ids[:, :k])
    starts = d.rng.integers(0, max(k // 2, 1), (rows, 1))
    positions = (np.arange(q) + starts).astype(np.int32)
    keys = np.broadcast_to(np.arange(k, dtype=np.int32), (rows, k))
    chunk = d.pick((None, 50))
    return MaskInfo(causal=True, q_positions=positions, kv_positions=keys, chunk_size=chunk)


SOFTMAX = {
    "bias", "softmax_aux", "attention_mask", "mask_info", "softmax_scale", "dropout_prob", "causal",
    "causal_offset", "sliding_window", "logits_soft_cap", "return_lse",
}  # fmt: skip
ALLOWED = {
    "flash_attention": SOFTMAX | {"precision", "score_mod", "mask_mod"},
    "attention": SOFTMAX - {"return_lse", "dropout_prob"} | {"precision"},
    "scaled_dot_product_attention": SOFTMAX
    - {"softmax_aux", "logits_soft_cap", "return_lse", "dropout_prob"},
    "blocksparse_attention": SOFTMAX,
    "mla_attention": SOFTMAX,
}


def dense(d: Draw, operation: str) -> RandomCall:
    b, (h, hk) = d.integer(1, 3), d.pick(HEADS)
    q, k = d.length(), d.length()
    if d.chance(0.5):
        k = q
    if d.chance(0.04):
        k = 0
    if max(q, k) > 500:
        b, (h, hk) = 1, d.pick([x for x in HEADS if x[0] < 6])
    dim = d.dim()
    dv = dim if d.chance(0.7) else 128 if dim == 192 else d.dim()
    names = {"flash_attention": "cum_seqlens_q", "scaled_dot_product_attention": "cum_seqlens_q",
             "mla_attention": "cu_seqlens"}  # fmt: skip
    packed = operation in names and d.chance(0.2)
    arrays: dict[str, Any] = {}
    if packed:
        b, n = 1, d.integer(1, 5)
        if operation == "mla_attention" or d.chance(0.6):
            k = q
        else:
            arrays["cum_seqlens_k"] = d.cumulative(k, n)
        arrays[names[operation]] = d.cumulative(q, n)
    if operation == "mla_attention":
        operands = latent_operands(d, b, q, k, h, hk)
    else:
        operands = {
            "query": d.normal(b, q, h, dim),
            "key": d.normal(b, k, hk, dim),
            "value": d.normal(b, k, hk, dv),
        }
    optional, static = softmax_options(d, b, q, k, h, ALLOWED[operation], packed)
    if operation == "flash_attention" and d.option(0.1):
        for name, heads in (("q_scale", h), ("k_scale", hk), ("v_scale", hk)):
            optional[name] = d.normal(*d.pick(((), (b, heads), (1, 1))), dtype="float32")
    if operation == "flash_attention" and d.option(0.1):
        static["out_dtype"] = jnp.float32
    if operation == "blocksparse_attention":
        rows, keys = (d.pick((16, 50, 64, 128, 128)) for _ in range(2))
        lead = d.pick(((), (1, 1), (b, 1), (b, h)))
        blocks = (*lead, -(-q // rows), -(-k // keys))
        arrays["block_mask"] = d.rng.random(blocks) < d.pick((0.3, 0.7))
        static |= {"q_block_size": rows, "kv_block_size": keys}
        if d.chance(0.2):
            static["chunk_size"] = d.pick((16, 100))
    if operation == "attention" and d.chance(0.2):
        optional["dropout_rng"] = jax.random.PRNGKey(d.integer(0, 1000))
        static |= {"dropout_prob": 0.3, "deterministic": False}
    others = ("bias", "softmax_aux", "q_scale", "k_scale", "v_scale")
    smooth = (*operands, *(n for n in others if n in optional))
    return RandomCall(operation, operands | optional | arrays, static, smooth, d.dtype)


def latent_operands(d: Draw, b: int, q: int, k: int, h: int, hk: int) -> dict[str, Any]:
    """Draws operands of latent attention: no rotary part, of keys alone, or of both."""
    r, nope, dv = d.pick((40, 64, 128, 512)), d.dim(128), d.dim(128)
    rope, form = d.pick((16, 32, 64)), d.pick(("none", "key", "both"))
    operands = {
        "query": d.normal(b, q, h, nope + (rope if form == "key" else 0)),
        "key_value": d.normal(b, k, r),
        "w_kc": d.normal(r, hk, nope, scale=r**-0.5),
        "w_vc": d.normal(r, hk, dv, scale=r**-0.5),
    }
    if form == "both":
        operands["b_q"] = d.normal(b, q, rope)
    if form != "none":
        operands["b_k"] = d.normal(b, k, rope)
    return operands


def quantized(d: Draw, operation: str) -> RandomCall:
    """Draws operands that are quantized to 8 bits before attention."""
    b, (h, hk) = d.integer(1, 3), d.pick(HEADS)
    q, k, dim = d.length(), d.length(), d.dim()
    if max(q, k) > 500:
        b = 1
    arrays = {
        "query": d.normal(b, q, h, dim),
        "key": d.normal(b, k, hk, dim),
        "value": d.normal(b, k, hk, dim if d.chance(0.8) else d.dim()),
    }
    static: dict[str, Any] = {"block": d.pick((None, 16, 50, 128)), "smooth": d.chance(0.3)}
    if d.chance(0.5):
        static["causal"] = True
    if d.chance(0.2):
        static["sliding_window"] = d.window()
    if d.chance(0.4) and not static["smooth"]:
        static["return_lse"] = True
    return RandomCall(operation, arrays, static, (), "float8_e4m3fn")


def merged(d: Draw, operation: str) -> RandomCall:
    shape = (*d.pick(((7,), (2, 33), (129,))), d.pick((1, 3, 8)), d.dim())
    parts = d.integer(1, 4)
    lses = [d.normal(*shape[:-1], dtype="float32", scale=5.0) for _ in range(parts)]
    for x in lses:
        x[d.rng.random(x.shape) < 0.2] = -np.inf
    arrays = {"outs": [d.normal(*shape) for _ in range(parts)], "lses": lses}
    return RandomCall(operation, arrays, {}, ("outs", "lses"), d.dtype)


def native_sparse(d: Draw, operation: str) -> RandomCall:
    b, (h, hk) = d.integer(1, 2), d.pick(((1, 1), (4, 1), (6, 2), (16, 1), (16, 2), (3, 3)))
    s, dim, size = d.length(), d.dim(), d.pick((8, 16, 32, 64))
    s = min(s, 333)
    arrays: dict[str, Any] = {
        "query": d.normal(b, s, h, dim),
        "key": d.normal(b, s, hk, dim),
        "value": d.normal(b, s, hk, dim if d.chance(0.7) else d.dim()),
    }
    static: dict[str, Any] = {"block_size": size}
    if d.chance(0.3):
        arrays = {n: x[:1] for n, x in arrays.items()}
        b = 1
        arrays["cu_seqlens"] = d.cumulative(s, d.integer(1, 4))
    smooth = ["query", "key", "value"]
    if d.chance(0.2):
        static["softmax_scale"] = 0.1
    if d.chance(0.3):
        static["sliding_window"] = d.pick((0, 5, 64))
    for gate in ("g_cmp", "g_slc", "g_swa"):
        if d.chance(0.5) and (gate != "g_swa" or "sliding_window" in static):
            arrays[gate] = d.normal(b, s, h)
            smooth.append(gate)
    slots = d.integer(1, 6)
    if d.chance(0.4):
        blocks = -(-s // size)
        arrays["block_indices"] = d.rng.integers(-1, blocks + 1, (b, s, hk, slots)).astype(np.int32)
    if d.chance(0.3):
        arrays["block_counts"] = d.rng.integers(1, slots + 1, (b, s, hk)).astype(np.int32)
        if d.chance(0.5):
            static["max_block_count"] = slots
    else:
        static["block_counts"] = slots
    return RandomCall(operation, arrays, static, tuple(smooth), d.dtype)
