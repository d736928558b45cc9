"""One small valid call of every operation, by name: what tests that hold for all of them run."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import jax.numpy as jnp
import numpy as np

from ejktest.abstract import F32, Arrays, abstract_call
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
SIZES = {
    "head_dim": D, "key_dim": D, "v_dim": DV, "sinks": 2, "pages": 7, "page_size": 4,
    "max_blocks": 3, "cache_dim": D + 4, "tokens": 6, "q_dim": D + 4, "latent": 5,
    "nope_dim": D, "rope_dim": 4, "rows": 8, "inner": 5, "columns": 6, "groups": 3,
    "channels": D, "width": 4, "history": 3,
}  # fmt: skip
DECAYS = ("g", "g_gamma", "gk", "gv")


@dataclass(frozen=True)
class Form:
    """Arguments of a call besides its required operands; ``integers``: operands with a meaning."""

    optional: tuple[str, ...] = ()
    static: Mapping[str, Any] = field(default_factory=dict)
    integers: Mapping[str, Any] = field(default_factory=dict)


_TABLES = ((3, 1, -1), (0, 6, 2))
_PAGED = {"context_lens": (5, 11), "block_tables": _TABLES}
_RAGGED = {
    "context_lens": (5, 9, 0), "block_tables": (*_TABLES, (9, 9, 9)),
    "query_start_loc": (0, 1, 5, 5), "num_seqs": 2,
}  # fmt: skip
_RAGGED_V3 = {
    "kv_lens": (5, 9), "block_tables": _TABLES, "query_start_loc": (0, 1, 5),
    "distribution": (1, 1, 2),
}  # fmt: skip
_RANGES = {"sequence_start": (0, 3), "sequence_end": (7, 12)}
_MASK = {"causal": True, "sliding_window": (5, 5)}
_STATE = {"return_state": True}

CALLS: dict[str, Form] = {
    "flash_attention": Form(
        ("bias", "softmax_aux"), {**_MASK, "logits_soft_cap": 3.0, "return_lse": True}
    ),
    "attention": Form(("bias", "softmax_aux"), _MASK),
    "scaled_dot_product_attention": Form(("bias",), _MASK),
    "page_attention": Form((), {"sliding_window": 6}, _PAGED),
    "ragged_page_attention": Form(integers=_RAGGED),
    "ragged_page_attention_v3": Form(integers=_RAGGED_V3),
    "ragged_decode_attention": Form(integers=_RANGES),
    "blocksparse_attention": Form(
        ("block_mask",), {"q_block_size": 4, "kv_block_size": 4, "causal": True}
    ),
    "native_sparse_attention": Form(
        ("g_cmp", "g_slc", "g_swa"), {"block_size": 4, "block_counts": 2, "sliding_window": 3}
    ),
    "recurrent_attention": Form((*DECAYS, "initial_state"), _STATE),
    "gla_attention": Form(("g", "g_gamma", "initial_state"), _STATE),
    "lightning_attention": Form(("initial_state",), {**_STATE, "layer_idx": 1, "num_layers": 4}),
    "gated_delta_rule": Form(("g", "beta", "initial_state"), _STATE),
    "causal_conv1d": Form(("bias", "initial_state"), {"activation": "silu", **_STATE}),
    "mla_attention": Form(("b_k",), {"causal": True}),
    "mla_decode": Form((), {"latent_dim": D}, _PAGED),
    "mean_pooling": Form((), {"chunk_size": 5}),
    "grouped_matmul": Form(("existing_out",), integers={"group_sizes": (3, 0, 4)}),
}
"""Every operation but ring_attention, which needs a mesh."""


def call(
    operation: str,
    *,
    batch: int = B,
    length: int = S,
    heads: int = H,
    kv_heads: int = HK,
    form: Form | None = None,
    sizes: Mapping[str, int] | None = None,
) -> Call:
    """Returns the call of an operation: normal float32 arrays, decays below 0, beta in [0, 1).

    Args:
        form: besides required operands; None = the one in ``CALLS``.
        sizes: of the other axes; None = ``SIZES``.
    """
    form, sizes = form or CALLS[operation], SIZES if sizes is None else sizes
    blocks, d = -(-length // form.static.get("q_block_size", 4)), sizes["head_dim"]
    sizes = {**sizes, "batch": batch, "heads": heads, "kv_heads": kv_heads}
    sizes |= dict.fromkeys(("q_len", "kv_len", "seq"), length)
    sizes["sequences"] = len(form.integers.get("query_start_loc", (0,))) - 1
    shapes: Arrays = {  # other shapes than the signature's axes
        "bias": ((1, heads, length, length), F32),
        "block_mask": ((batch, 1, blocks, blocks), "bool"),
        "x": ((batch, length, d), F32),
    }
    required = ("x",) if operation == "mean_pooling" else ()
    special = {n: shapes[n] for n in (*form.optional, *required) if n in shapes}
    if operation == "causal_conv1d":  # a bias per channel
        special = {}
    abstract = abstract_call(
        operation, sizes, *form.optional, arrays=special, dtype=F32, trained=True
    )
    arrays = {}
    for seed, (name, struct) in enumerate(abstract.structs().items(), 1):
        rng = np.random.default_rng(seed)
        if struct.dtype == jnp.int32:  # rows of a batch repeat
            arrays[name] = array(np.resize(form.integers[name], struct.shape), jnp.int32)
        elif struct.dtype == bool:
            arrays[name] = array(rng.random(struct.shape) < 0.6)
        elif name == "beta":
            arrays[name] = array(rng.random(struct.shape), jnp.float32)
        else:
            x = rng.standard_normal(struct.shape)
            if name in DECAYS:
                x = -np.abs(x)
            elif (operation, name) == ("gated_delta_rule", "key"):
                x = x * d**-0.5  # of about length 1: the states stay bounded
            arrays[name] = array(x, jnp.float32)
    return Call(operation, arrays, form.static, abstract.gradients)
