"""For every argument of every operation a call that gives it and the same call without it.

The calls are made of shapes that the kernels for every device take. They are traced, never run.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ejkernel.types import MaskInfo
from ejkernel.types.serving.plan import make_plan
from ejktest.abstract import abstract_call
from ejktest.dependence import is_array

Struct = jax.ShapeDtypeStruct
TOKENS = 256
F16_SUMS = jax.lax.DotAlgorithm(np.float16, np.float16, np.float16)
IN_FLOAT64 = frozenset({"logits_dtype", "softmax_dtype"})
"""Arguments whose other values are legal under ``jax_enable_x64`` only."""


def bf16(*shape: int) -> Struct:
    return Struct(shape, jnp.bfloat16)


def f32(*shape: int) -> Struct:
    return Struct(shape, jnp.float32)


def i32(*shape: int) -> Struct:
    return Struct(shape, jnp.int32)


def boolean(*shape: int) -> Struct:
    return Struct(shape, jnp.bool_)


_SELF_ATTENTION = {"batch": 1, "q_len": TOKENS, "heads": 2, "head_dim": 64}
_LINEAR = {"batch": 1, "seq": 128, "heads": 2, "key_dim": 16}
_PAGES = {"batch": 2, "pages": 8, "page_size": 16, "max_blocks": 4}
_SERVER = {
    "tokens": 2048, "heads": 32, "kv_heads": 8, "head_dim": 128, "sequences": 2, "max_blocks": 128,
    "pages": 256, "page_size": 16,
}  # fmt: skip
_LATENT = {"q_dim": 64, "latent": 32, "nope_dim": 32, "rope_dim": 32, "v_dim": 64}
_SIZES: dict[str, dict[str, int]] = {
    **dict.fromkeys(
        ("attention", "blocksparse_attention", "flash_attention", "ring_attention",
         "scaled_dot_product_attention"),
        _SELF_ATTENTION,
    ),
    **dict.fromkeys(
        ("gated_delta_rule", "gla_attention", "lightning_attention", "recurrent_attention"),
        _LINEAR,
    ),
    "causal_conv1d": {"batch": 1, "seq": 128, "channels": 16, "width": 4},
    **dict.fromkeys(("ragged_page_attention", "ragged_page_attention_v3"), _SERVER),
    "grouped_matmul": {"rows": 256, "inner": 256, "columns": 256, "groups": 4},
    "mla_attention": _SELF_ATTENTION | _LATENT,
    "mla_decode": _PAGES | {"heads": 64, "page_size": 64, "cache_dim": 576},
    "native_sparse_attention": {"batch": 1, "seq": 128, "heads": 16, "kv_heads": 1, "head_dim": 64},
    "page_attention": _PAGES | {"heads": 4, "kv_heads": 2, "head_dim": 128},
    "ragged_decode_attention": _SELF_ATTENTION | {"kv_len": TOKENS, "head_dim": 128},
}  # fmt: skip
_STATIC: dict[str, dict[str, Any]] = {
    "lightning_attention": {"layer_idx": 1, "num_layers": 4},
    "ring_attention": {"axis_name": "ring"},
}


def _required(operation: str) -> dict[str, Any]:
    optional = ["b_k"] if operation == "mla_attention" else []
    decodes = operation in ("page_attention", "ragged_decode_attention")
    call = abstract_call(
        operation, _SIZES[operation], *optional, forms={"query": 1} if decodes else {}
    )
    return call.structs() | _STATIC.get(operation, {})


REQUIRED = {operation: _required(operation) for operation in _SIZES} | {
    "mean_pooling": {"x": bf16(2, 128, 16)}
}
"""The required arguments of every operation."""

_LATENT_TREE = {"query": bf16(2, 4, 64, 576), "tree_mask": boolean(2, 4, 4)}
_PATTERN = {"block_mask": boolean(1, 1, 2, 2)}
_DROPOUT = {"dropout_prob": 0.3, "dropout_seed": i32()}
_RANDOM = {"dropout_prob": 0.3, "dropout_rng": Struct((2,), jnp.uint32), "deterministic": False}
_COUNTS = {"block_counts": i32(1, 128, 1), "block_size": 16}
_EIGHT_BIT = {n: Struct(x.shape, jnp.float8_e4m3fn) for n, x in REQUIRED["flash_attention"].items()}
_FLOAT32 = {n: Struct(x.shape, jnp.float32) for n, x in REQUIRED["attention"].items()}


@dataclass(frozen=True)
class Case:
    """A value of an argument, and other arguments that both calls have."""

    value: Any
    others: Mapping[str, Any]


def _of_every_operation() -> dict[str, list[Case]]:
    def alone(**values: Any) -> dict[str, list[Case]]:
        return {name: [Case(value, {})] for name, value in values.items()}

    masks = alone(
        mask_info=MaskInfo(causal=True),
        attention_mask=boolean(1, TOKENS),
        causal=True,
        sliding_window=(4, 4),
        bias=bf16(1, 2, TOKENS, TOKENS),
        init_bias=lambda: jnp.zeros((1, 2, TOKENS, TOKENS)),
        chunk_size=16,
        block_mask=_PATTERN["block_mask"],
        mask_builder=lambda q_len, kv_len, heads: np.eye(2, dtype=bool),
        cum_seqlens_q=i32(3),
        cu_seqlens=i32(3),
        q_segment_ids=i32(1, TOKENS),
    ) | {
        "causal_offset": [Case(1, {"causal": True})],
        "cum_seqlens_k": [Case(i32(3), {"cum_seqlens_q": i32(3)})],
        "kv_segment_ids": [Case(i32(1, TOKENS), {"q_segment_ids": i32(1, TOKENS)})],
        "q_block_size": [Case(192, _PATTERN)],
        "kv_block_size": [Case(192, _PATTERN)],
        "layout": [Case("zigzag", {"causal": True})],
    }
    logits = alone(
        softmax_aux=f32(3),
        softmax_scale=0.3,
        logits_soft_cap=5.0,
        return_lse=True,
        dtype=jnp.float32,
        softmax_dtype=jnp.float64,
        logits_dtype=jnp.float64,
        out_dtype=jnp.float32,
        score_mod=lambda score, b, h, q, k: score + 0.1 * (k - q),
        mask_mod=lambda b, h, q, k: (k <= q + h) & (k != b),
    ) | {
        # an algorithm is refused by kernels for which levels mean nothing with 16 bits
        "precision": [Case("highest", _FLOAT32), Case(F16_SUMS, {})],
        "dropout_prob": [Case(0.3, {"dropout_seed": i32()})],
        "dropout_seed": [Case(i32(), {"dropout_prob": 0.3})],
        "dropout_rng": [Case(_RANDOM["dropout_rng"], _RANDOM)],
        "deterministic": [Case(False, _RANDOM)],
    }
    caches = alone(k_scale=f32(), v_scale=f32(), q_scale=f32(), num_splits=3, latent_dim=500)
    rows = _SERVER["tokens"]
    caches |= alone(plan=make_plan(np.array([300, rows]), np.array([0, 1, rows]), 2, rows))
    tree = {"tree_mask": boolean(rows, 8)}
    caches |= alone(**tree) | {"positions": [Case(i32(rows), {"sliding_window": (4, 4), **tree})]}
    recurrences = alone(
        g=f32(1, 128, 2, 16),
        g_gamma=f32(2),
        gk=f32(1, 128, 2, 16),
        gv=f32(1, 128, 2, 16),
        beta=f32(1, 128, 2),
        normalize_qk=True,
        activation="silu",
        initial_state=f32(1, 2, 16, 16),
        reverse=True,
        return_state=True,
        layer_idx=2,
        num_layers=8,
    )
    sparse = alone(
        g_cmp=bf16(1, 128, 16),
        g_slc=bf16(1, 128, 16),
        block_indices=i32(1, 128, 1, 2),
        block_size=32,
    ) | {
        "g_swa": [Case(bf16(1, 128, 16), {"sliding_window": 4})],
        "block_counts": [Case(2, {"block_size": 16})],
        "max_block_count": [Case(2, _COUNTS)],
    }
    products = alone(
        group_offset=i32(),
        existing_out=bf16(256, 256),
        preferred_element_type=jnp.float32,
        transpose_rhs=True,
    ) | {"rhs_scale": [Case(f32(4), {"rhs": Struct((4, 256, 256), jnp.int8)})]}
    return masks | logits | caches | recurrences | sparse | products | alone(axis_name="other")


_VALUES = _of_every_operation()
_OF_OPERATION: dict[tuple[str, str], list[Case]] = {
    # in a packed call the rules of the mask are joined with the lengths, by the kernel
    **{
        (operation, name): [Case(value, {}), Case(value, {lengths: i32(3)})]
        for operation, lengths in (
            ("flash_attention", "cum_seqlens_q"),
            ("scaled_dot_product_attention", "cum_seqlens_q"),
            ("mla_attention", "cu_seqlens"),
        )
        for name, value in (("causal", True), ("sliding_window", (4, 4)))
    },
    # scales of wider operands are multiplied into these before a kernel sees them
    **{
        ("flash_attention", name): [Case(f32(1, heads), _EIGHT_BIT)]
        for name, heads in (("q_scale", 2), ("k_scale", 2), ("v_scale", 2))
    },
    ("mla_decode", "tree_mask"): [Case(boolean(2, 4, 4), {"query": bf16(2, 4, 64, 576)})],
    ("mla_decode", "positions"): [Case(i32(2, 4), {"sliding_window": (4, 4), **_LATENT_TREE})],
    ("mla_attention", "b_q"): [
        Case(bf16(1, TOKENS, 2 * 16), {"query": bf16(1, TOKENS, 2, 32)}),
    ],
    ("attention", "dropout_prob"): [
        Case(0.3, {name: x for name, x in _RANDOM.items() if name != "dropout_prob"})
    ],
    ("causal_conv1d", "bias"): [Case(bf16(16), {})],
    ("causal_conv1d", "initial_state"): [Case(bf16(1, 16, 3), {})],
    ("attention", "precision"): [Case("highest", {})],
    ("grouped_matmul", "precision"): [
        Case("highest", {"lhs": f32(256, 256), "rhs": f32(4, 256, 256)}),
        Case(F16_SUMS, {}),
    ],
    ("mean_pooling", "attention_mask"): [Case(boolean(2, 128), {})],
    ("ring_attention", "bias"): [Case(bf16(1, 2, TOKENS, 2 * TOKENS), {})],
    ("mean_pooling", "cu_seqlens"): [Case(i32(3), {"x": bf16(128, 16)})],
}


def calls_with(operation: str, name: str) -> Iterator[tuple[dict[str, Any], dict[str, Any]]]:
    """Yields the arguments of a call that gives the argument ``name``, and of one without it.

    Of a required argument the second call has the usual value.
    """
    required = REQUIRED[operation]
    usual = [Case(required[name], {})] if is_array(required.get(name)) else []
    for case in usual or _OF_OPERATION.get((operation, name)) or _VALUES[name]:
        call = required | dict(case.others)
        without = {n: x for n, x in call.items() if n != name}
        if name in required:
            without[name] = required[name]
        yield call | {name: case.value}, without
