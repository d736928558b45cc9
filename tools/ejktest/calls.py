"""One small valid call of every operation, by name: what tests that hold for all of them run."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import jax.numpy as jnp
import numpy as np

from ejktest.drawn import array


@dataclass(frozen=True)
class Call:
    """Arguments of a call.

    Attributes:
        operation: name of the public function.
        arrays: array arguments by name.
        static: the other arguments.
        gradients: arrays that have gradients.
    """

    operation: str
    arrays: Mapping[str, Any]
    static: Mapping[str, Any] = field(default_factory=dict)
    gradients: tuple[str, ...] = ("query", "key", "value")

    @property
    def arguments(self) -> dict[str, Any]:
        return {**self.arrays, **self.static}


B, S, H, HK, D, DV = 2, 12, 4, 2, 8, 6
PAGES, PAGE, BLOCKS = 7, 4, 3
INNER, COLUMNS = 5, 6


def _normal(seed: int, *shape: int) -> Any:
    return array(np.random.default_rng(seed).standard_normal(shape), jnp.float32)


def _decay(seed: int, *shape: int) -> Any:
    return array(-np.abs(np.random.default_rng(seed).standard_normal(shape)), jnp.float32)


def _ints(*values: Any) -> Any:
    return array(values, jnp.int32)


def _per_row(*values: Any) -> Any:
    """The values for batch rows 0, 1, 0, 1 ..."""
    rows = np.asarray(values)
    return array(np.resize(rows, (B, *rows.shape[1:])), jnp.int32)


def _qkv() -> dict[str, Any]:
    return {
        "query": _normal(1, B, S, H, D),
        "key": _normal(2, B, S, HK, D),
        "value": _normal(3, B, S, HK, DV),
    }


def _flash(operation: str, **static: Any) -> Call:
    arrays = {**_qkv(), "bias": _normal(4, 1, H, S, S)}
    gradients = ("query", "key", "value", "bias")
    if operation != "scaled_dot_product_attention":
        arrays["softmax_aux"] = _normal(5, H, 2)
        gradients = (*gradients, "softmax_aux")
    return Call(operation, arrays, {"causal": True, "sliding_window": (5, 5), **static}, gradients)


def _paged() -> Call:
    arrays = {
        "query": _normal(1, B, 1, H, D),
        "key_cache": _normal(2, PAGES, PAGE, HK, D),
        "value_cache": _normal(3, PAGES, PAGE, HK, DV),
        "context_lens": _per_row(5, 11),
        "block_tables": _per_row([3, 1, -1], [0, 6, 2]),
    }
    gradients = ("query", "key_cache", "value_cache")
    return Call("page_attention", arrays, {"sliding_window": 6}, gradients)


def _ragged() -> Call:
    arrays = {
        "queries": _normal(1, 6, H, D),
        "kv_pages": _normal(2, PAGES, PAGE, 2 * HK, D),
        "context_lens": _ints(5, 9, 0),
        "block_tables": _ints([3, 1, -1], [0, 6, 2], [9, 9, 9]),
        "query_start_loc": _ints(0, 1, 5, 5),
        "num_seqs": jnp.int32(2),
    }
    return Call("ragged_page_attention", arrays, {}, ("queries", "kv_pages"))


def _ragged_v3() -> Call:
    arrays = {
        "queries": _normal(1, 6, H, D),
        "keys": _normal(4, 6, HK, D),
        "values": _normal(5, 6, HK, D),
        "kv_cache": _normal(2, PAGES, PAGE, 2 * HK, D),
        "kv_lens": _ints(5, 9),
        "block_tables": _ints([3, 1, -1], [0, 6, 2]),
        "query_start_loc": _ints(0, 1, 5),
        "distribution": _ints(1, 1, 2),
    }
    gradients = ("queries", "keys", "values", "kv_cache")
    return Call("ragged_page_attention_v3", arrays, {}, gradients)


def _ragged_decode() -> Call:
    arrays = {**_qkv(), "query": _normal(1, B, 1, H, D)}
    arrays |= {"sequence_start": _per_row(0, 3), "sequence_end": _per_row(7, 12)}
    return Call("ragged_decode_attention", arrays)


def _blocksparse() -> Call:
    blocks = -(-S // 4)
    mask = array(np.random.default_rng(9).random((B, 1, blocks, blocks)) < 0.6)
    arrays = {**_qkv(), "block_mask": mask}
    return Call(
        "blocksparse_attention", arrays, {"q_block_size": 4, "kv_block_size": 4, "causal": True}
    )


def _native_sparse() -> Call:
    gates = {name: _normal(i, B, S, H) for i, name in enumerate(("g_cmp", "g_slc", "g_swa"), 6)}
    static = {"block_size": 4, "block_counts": 2, "sliding_window": 3}
    return Call("native_sparse_attention", {**_qkv(), **gates}, static, (*_qkv(), *gates))


def _linear(operation: str, *names: str, **static: Any) -> Call:
    gates = {
        "g": _decay(6, B, S, H, D),
        "g_gamma": _decay(7, H),
        "gk": _decay(8, B, S, H, D),
        "gv": _decay(9, B, S, H, DV),
        "initial_state": _normal(10, B, H, D, DV),
    }
    arrays = {**_qkv(), **{name: gates[name] for name in names}}
    return Call(operation, arrays, {"return_state": True, **static}, tuple(arrays))


def _delta() -> Call:
    arrays = {
        "query": _normal(1, B, S, HK, D),
        "key": _normal(2, B, S, HK, D) * D**-0.5,  # of about length 1
        "value": _normal(3, B, S, H, DV),
        "g": _decay(6, B, S, H),
        "beta": array(np.random.default_rng(7).random((B, S, H)), jnp.float32),
        "initial_state": _normal(10, B, H, D, DV),
    }
    return Call("gated_delta_rule", arrays, {"return_state": True}, tuple(arrays))


def _convolution() -> Call:
    arrays = {
        "x": _normal(1, B, S, D),
        "weight": _normal(2, D, 4),
        "bias": _normal(3, D),
        "initial_state": _normal(4, B, D, 3),
    }
    static = {"activation": "silu", "return_state": True}
    return Call("causal_conv1d", arrays, static, tuple(arrays))


def _mla() -> Call:
    arrays = {
        "query": _normal(1, B, S, H, D + 4),
        "key_value": _normal(2, B, S, INNER),
        "w_kc": _normal(3, INNER, HK, D),
        "w_vc": _normal(4, INNER, HK, DV),
        "b_k": _normal(5, B, S, 4),
    }
    return Call("mla_attention", arrays, {"causal": True}, tuple(arrays))


def _mla_decode() -> Call:
    arrays = {
        "query": _normal(1, B, H, D + 4),
        "latent_cache": _normal(2, PAGES, PAGE, D + 4),
        "context_lens": _per_row(5, 11),
        "block_tables": _per_row([3, 1, -1], [0, 6, 2]),
    }
    return Call("mla_decode", arrays, {"latent_dim": D}, ("query", "latent_cache"))


def _pooling() -> Call:
    return Call("mean_pooling", {"x": _normal(1, B, S, D)}, {"chunk_size": 5}, ("x",))


def _grouped() -> Call:
    arrays = {
        "lhs": _normal(1, 8, INNER),
        "rhs": _normal(2, 3, INNER, COLUMNS),
        "group_sizes": _ints(3, 0, 4),
        "existing_out": _normal(3, 8, COLUMNS),
    }
    return Call("grouped_matmul", {**arrays}, {}, ("lhs", "rhs", "existing_out"))


CALLS: dict[str, Callable[[], Call]] = {
    "flash_attention": lambda: _flash("flash_attention", logits_soft_cap=3.0, return_lse=True),
    "attention": lambda: _flash("attention"),
    "scaled_dot_product_attention": lambda: _flash("scaled_dot_product_attention"),
    "page_attention": _paged,
    "ragged_page_attention": _ragged,
    "ragged_page_attention_v3": _ragged_v3,
    "ragged_decode_attention": _ragged_decode,
    "blocksparse_attention": _blocksparse,
    "native_sparse_attention": _native_sparse,
    "recurrent_attention": lambda: _linear(
        "recurrent_attention", "g", "g_gamma", "gk", "gv", "initial_state"
    ),
    "gla_attention": lambda: _linear("gla_attention", "g", "g_gamma", "initial_state"),
    "lightning_attention": lambda: _linear(
        "lightning_attention", "initial_state", layer_idx=1, num_layers=4
    ),
    "gated_delta_rule": _delta,
    "causal_conv1d": _convolution,
    "mla_attention": _mla,
    "mla_decode": _mla_decode,
    "mean_pooling": _pooling,
    "grouped_matmul": _grouped,
}
"""Every operation but ring_attention, which needs a mesh."""


def call(operation: str) -> Call:
    return CALLS[operation]()
