"""Calls with every optional argument at least once, for what must hold whatever is asked for."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ejkernel.types import MaskInfo, calls
from ejkernel.types.calls.axes import bare
from ejkernel.types.calls.signature import axes_of
from ejktest.calls import DV, HK, B, Call, D, H, S, call
from ejktest.drawn import array, normal


def ids(*rows: Any) -> Any:
    return array(rows, jnp.int32)


def is_float(x: Any) -> bool:
    return jnp.issubdtype(x.dtype, jnp.floating)


SPECS = {spec.name: spec for spec in (getattr(calls, name) for name in vars(calls)["__all__"])}


def axis_words(c: Call) -> dict[str, list[str]]:
    """The words of the axes of every array of a call: ``{"query": ["batch", "q_len", ...]}``."""
    spec = SPECS[c.operation]
    override = spec.argument_axes({**spec.boundary.defaults, **c.arguments})
    return {
        p.name: [bare(word) for word in axes_of(p, c.arrays[p.name], override)]
        for p in spec.boundary.parameters
        if p.name in c.arrays
    }


def shapes_of(c: Call, **sizes: Any) -> dict[str, jax.ShapeDtypeStruct]:
    """The arrays of a call as shapes; axes whose word is in ``sizes`` have that size."""
    words = axis_words(c)

    def resized(name: str, x: Any) -> jax.ShapeDtypeStruct:
        named = zip(words[name], x.shape, strict=True)
        return jax.ShapeDtypeStruct([sizes.get(word, n) for word, n in named], x.dtype)

    return {name: resized(name, x) for name, x in c.arrays.items()}


def packed(c: Call) -> Call:
    """The call on its first batch row alone: cumulative lengths need batch 1."""
    rows = {n: x[:1] if x.ndim and x.shape[0] == B else x for n, x in c.arrays.items()}
    return replace(c, arrays=rows)


def options(value_dim: int = DV) -> dict[str, list[tuple[str, Call]]]:
    """Operation to ``(what is asked for, call)``; some kernels ask for a rounder ``value_dim``."""
    segments = MaskInfo.from_segments(ids([0] * 5 + [1] * 5 + [-1] * 2, [2] * S))
    placed = MaskInfo(
        causal=True, q_positions=ids(range(3, S + 3)), kv_positions=ids(range(S)), chunk_size=5
    )
    dense = MaskInfo(attention_mask=jnp.asarray(np.tril(np.ones((1, 1, S, S), bool))))
    cu = jnp.asarray([0, 5, 5, 9], jnp.int32)
    drop = {"dropout_prob": 0.3, "dropout_seed": jnp.int32(7)}
    softmax: list[tuple[str, dict[str, Any]]] = [
        ("plain", {}),
        ("shared_sinks", {"softmax_aux": normal(2)}),
        ("padding", {"attention_mask": jnp.ones((B, S), jnp.int32)}),
        ("mask_of_heads", {"attention_mask": jnp.ones((B, H, S, S), bool), "causal": True}),
        ("segments", {"mask_info": segments, "causal": True, "causal_offset": 1}),
        ("positions", {"mask_info": placed}),
        ("two_masks", {"mask_info": segments & placed & dense}),
        ("cap", {"logits_soft_cap": 3.0, "softmax_aux": normal(H, 1), "causal": True}),
    ]

    def calls_of(operation: str, extra: list[tuple[str, dict[str, Any]]]) -> list[tuple[str, Call]]:
        base = call(operation)
        usual = ("bias", "softmax_aux", "causal", "sliding_window", "logits_soft_cap")
        variants = [("as_is", base)]
        for label, arguments in extra:
            left_out = {*usual, *arguments}
            static = {n: v for n, v in base.static.items() if n not in left_out}
            arrays = {n: v for n, v in base.arrays.items() if n not in left_out}
            for name in ("value", "value_cache"):
                if name in arrays and value_dim != DV:
                    arrays[name] = normal(*arrays[name].shape[:-1], value_dim)
            c = packed(Call(operation, arrays)) if "cu" in label else Call(operation, arrays)
            floats = {n for n, v in arguments.items() if isinstance(v, jax.Array) and is_float(v)}
            arrays = {**c.arrays, **{n: arguments[n] for n in floats}}
            static |= {n: v for n, v in arguments.items() if n not in floats}
            gradients = tuple(n for n in arrays if n in base.gradients or n in floats)
            variants.append((label, Call(operation, arrays, static, gradients)))
        return variants

    without_sinks = [(n, a) for n, a in softmax if "softmax_aux" not in a]
    states = normal(3, H, D, DV)
    linear: list[tuple[str, dict[str, Any]]] = [
        ("reverse", {"reverse": True}),
        ("cu", {"cu_seqlens": cu, "initial_state": states}),
    ]
    paged: list[tuple[str, dict[str, Any]]] = [
        ("cap_and_sinks", {"logits_soft_cap": 3.0, "softmax_aux": normal(2)}),
        ("scales", {"k_scale": 0.5, "v_scale": normal(HK)}),
        ("splits", {"num_splits": 2}),
    ]
    table: dict[str, list[tuple[str, dict[str, Any]]]] = {
        "flash_attention": [
            *softmax,
            ("dropout", drop),
            ("bias_row", {"bias": normal(B, 1, 1, S), "return_lse": True}),
            ("cu", {"cum_seqlens_q": cu, "causal": True}),
            ("cu_pair", {"cum_seqlens_q": cu, "cum_seqlens_k": cu + 0, "sliding_window": 2}),
        ],
        "attention": [
            *softmax,
            ("dropout", {"dropout_prob": 0.3, "deterministic": False,
                         "dropout_rng": jax.random.key(3)}),
            ("dtype", {"dtype": jnp.bfloat16, "init_bias": lambda: normal(1, H, S, S)}),
        ],
        "scaled_dot_product_attention": [*without_sinks, ("cu", {"cum_seqlens_q": cu})],
        "blocksparse_attention": [
            *softmax,
            ("dropout", drop),
            ("chunks", {"chunk_size": 5, "bias": normal(1, H, S, S)}),
        ],
        "mla_attention": [
            *[(n, a) for n, a in softmax if n in ("segments", "cap", "two_masks")],
            ("dropout", drop),
            ("bias", {"bias": normal(1, H, S, S), "return_lse": True}),
            ("cu", {"cu_seqlens": cu}),
        ],
        "native_sparse_attention": [
            ("counts", {"block_counts": jnp.ones((B, S, HK), jnp.int32), "max_block_count": 2,
                        "sliding_window": 3}),
            ("indices", {"block_indices": jnp.zeros((B, S, HK, 2), jnp.int32),
                         "sliding_window": 3}),
            ("cu", {"cu_seqlens": cu, "sliding_window": 3}),
        ],
        "page_attention": paged,
        "mla_decode": [(paged[0][0], paged[0][1]), ("scales", {"k_scale": 0.5}), paged[2]],
        "ragged_page_attention": paged[:2],
        "ragged_page_attention_v3": paged[:2],
        "ragged_decode_attention": [paged[0]],
        "recurrent_attention": linear,
        "gla_attention": [*linear, ("gate_of_heads", {"g": -jnp.abs(normal(B, S, H))})],
        "lightning_attention": linear,
        "gated_delta_rule": [
            *linear,
            ("gate_of_channels", {"g": -jnp.abs(normal(B, S, H, D)), "normalize_qk": True}),
        ],
        "causal_conv1d": [
            ("no_activation", {"activation": None}),
            ("cu", {"cu_seqlens": cu, "initial_state": normal(3, D, 3)}),
        ],
        "mean_pooling": [
            ("whole", {"chunk_size": None, "attention_mask": jnp.ones((B, S), jnp.int32)}),
        ],
        "grouped_matmul": [
            ("offset", {"group_offset": jnp.int32(0), "precision": "highest"}),
            ("half", {"preferred_element_type": jnp.bfloat16}),
        ],
    }  # fmt: skip
    return {operation: calls_of(operation, extra) for operation, extra in table.items()}
