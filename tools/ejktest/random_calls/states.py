"""Random calls of operations with a state, of pooling and of grouped matmuls."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import numpy as np

from ejktest.random_calls.draw import EIGHT_BIT, HEADS, Draw, RandomCall


def linear(d: Draw, operation: str) -> RandomCall:
    b, (h, hk), s = d.integer(1, 3), d.pick(HEADS), d.length()
    if d.chance(0.03):
        s = 0
    delta = operation == "gated_delta_rule"
    dk = d.dim(128 if delta else 256)
    dv = dk if d.chance(0.6) else d.dim(256)
    if s > 300:
        b, (h, hk) = 1, d.pick([x for x in HEADS if x[0] < 6])
    query_heads, value_heads = (hk, h) if delta else (h, hk)
    arrays: dict[str, Any] = {
        "query": d.normal(b, s, query_heads, dk),
        "key": d.normal(b, s, hk, dk),
        "value": d.normal(b, s, value_heads, dv),
    }
    static: dict[str, Any] = {}
    strength = d.pick((0.02, 0.5, 4.0))

    def decay(*shape: int) -> np.ndarray:
        values = -strength * np.abs(d.rng.standard_normal(shape))
        return values.astype(jnp.dtype(d.pick(("float32", d.dtype))))

    if delta:
        if d.chance(0.7):
            static["normalize_qk"] = True
        else:
            arrays["key"] = d.normal(b, s, hk, dk, scale=dk**-0.5)
        if d.chance(0.8):
            arrays["g"] = decay(b, s, h) if d.chance(0.5) else decay(b, s, h, dk)
        if d.chance(0.8):
            arrays["beta"] = d.rng.random((b, s, h)).astype(jnp.dtype(d.dtype))
    elif operation == "lightning_attention":
        static |= {"layer_idx": d.integer(0, 3), "num_layers": 4}
    else:
        if d.chance(0.6):
            arrays["g"] = decay(b, s, h) if d.chance(0.5) else decay(b, s, h, dk)
        if d.chance(0.3):
            arrays["g_gamma"] = decay(h)
        if operation == "recurrent_attention":
            if d.chance(0.3):
                arrays["gk"] = decay(b, s, h, dk)
            if d.chance(0.3):
                arrays["gv"] = decay(b, s, h, dv)
    states = b
    if d.option(0.25):
        states = d.integer(1, 4)
        per_token = [x for x in arrays if x != "g_gamma"]
        arrays |= {n: arrays[n][:1] for n in per_token}
        arrays["cu_seqlens"] = d.cumulative(s, states)
    if d.option(0.4):
        dtype = d.pick(("float32", d.dtype))
        arrays["initial_state"] = d.normal(states, h, dk, dv, dtype=dtype)
    if d.option(0.3):
        static["reverse"] = True
    if d.option(0.5):
        static["return_state"] = True
    if d.option(0.2):
        static["softmax_scale"] = 0.1
    smooth = tuple(n for n in arrays if n != "cu_seqlens")
    return RandomCall(operation, arrays, static, smooth, d.dtype)


def convolution(d: Draw, operation: str) -> RandomCall:
    b, s, c, w = d.integer(1, 3), d.length(), d.pick((1, 7, 40, 129, 256)), d.pick((2, 3, 4, 4, 5))
    states = b
    arrays: dict[str, Any] = {}
    if d.option(0.3):
        b, states = 1, d.integer(1, 4)
        arrays["cu_seqlens"] = d.cumulative(s, states)
    arrays |= {"x": d.normal(b, s, c), "weight": d.normal(c, w)}
    static: dict[str, Any] = {"activation": d.pick((None, "silu"))}
    if d.option(0.5):
        arrays["bias"] = d.normal(c)
    if d.option(0.4):
        arrays["initial_state"] = d.normal(states, c, w - 1)
    if d.option(0.5):
        static["return_state"] = True
    smooth = tuple(n for n in arrays if n != "cu_seqlens")
    return RandomCall(operation, arrays, static, smooth, d.dtype)


def pooling(d: Draw, operation: str) -> RandomCall:
    s, channels = d.length(), d.pick(((1,), (7,), (129,), (256,), (3, 40), (2, 5, 8)))
    arrays: dict[str, Any] = {}
    if d.option(0.4):
        lead: tuple[int, ...] = (s,)
        arrays["cu_seqlens"] = d.cumulative(s, d.integer(1, 4))
    else:
        lead = (d.integer(1, 3), s)
    static = {"chunk_size": d.pick((None, 1, 5, 16, 64, 100))}
    if d.option(0.3):
        mask = d.rng.random(lead) < 0.6
        arrays["attention_mask"] = mask.astype(d.pick(("bool", "int32")))
    return RandomCall(
        operation, {"x": d.normal(*lead, *channels)} | arrays, static, ("x",), d.dtype
    )


def grouped(d: Draw, operation: str) -> RandomCall:
    rows = d.rows(d.length())
    sizes = (64, 128, 256) if d.plain else (1, 7, 16, 40, 64, 129, 200, 256)
    inner, columns = d.pick(sizes), d.pick(sizes)
    groups = d.integer(1, 9)
    total = groups
    arrays: dict[str, Any] = {"lhs": d.normal(rows, inner)}
    static: dict[str, Any] = {}
    if d.option(0.25):
        total = groups + d.integer(0, 4)
        arrays["group_offset"] = np.int32(d.integer(0, total - groups))
    counts = np.diff(d.cumulative(rows, total))
    if d.option(0.1):
        counts[-1] += 9  # the sum is clipped
    arrays["group_sizes"] = d.rng.permutation(counts).astype(np.int32)
    transposed = d.chance(0.4)
    shape = (groups, columns, inner) if transposed else (groups, inner, columns)
    if transposed:
        static["transpose_rhs"] = True
    smooth = ["lhs"]
    kind = d.pick(EIGHT_BIT[:2]) if d.option(0.3) else d.dtype
    arrays["rhs"] = d.pages(*shape, dtype=kind)
    if kind == d.dtype:
        smooth.append("rhs")
    else:
        form = d.pick(((), (groups,), (groups, columns)))
        scale = 0.01 * (0.5 + d.rng.random(form))
        arrays["rhs_scale"] = np.asarray(scale, np.float32)
    if d.option(0.3):
        arrays["existing_out"] = d.normal(rows, columns)
        smooth.append("existing_out")
    if d.option(0.2):
        static["preferred_element_type"] = jnp.float32
    if d.dtype == "float32" and kind == "float32" and d.chance(0.3):
        static["precision"] = "highest"
    return RandomCall(operation, arrays, static, tuple(smooth), d.dtype)
