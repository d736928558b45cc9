"""What the registry asks about a call: can it be done here, and with which tiles."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp

from ejkernel.kernels.triton import compat
from ejkernel.kernels.triton.flash_attention import tiles
from ejkernel.kernels.triton.flash_attention.arguments import dot_precision, refusal
from ejkernel.kernels.triton.flash_attention.fits import fits
from ejkernel.kernels.triton.targets import current_target, too_old
from ejkernel.types import attention as arg
from ejkernel.types import combine_masks
from ejkernel.types.problem import Problem
from ejkernel.types.structure import Unsupported, split_mask


def _mask_reason(a: Mapping[str, Any]) -> str | None:
    q, k = a["query"], a["key"]
    reasons: list[str] = []

    def probe(arrays: dict[str, Any]) -> int:
        mask = combine_masks(
            arrays["mask_info"],
            attention_mask=arrays["attention_mask"],
            causal=a.get("causal", False),
            causal_offset=a.get("causal_offset", 0),
            sliding_window=a.get("sliding_window"),
            cum_seqlens_q=arrays["cum_seqlens_q"],
            cum_seqlens_k=arrays["cum_seqlens_k"],
            q_len=q.shape[1],
            kv_len=k.shape[1],
            batch=q.shape[0],
            heads=q.shape[2],
        )
        try:
            split_mask(mask)
        except Unsupported as error:
            reasons.append(str(error))
        return 0

    names = ("mask_info", "attention_mask", "cum_seqlens_q", "cum_seqlens_k")
    given = {name: a.get(name) for name in names}
    if any(value is not None for value in given.values()):
        jax.eval_shape(probe, given)
    return reasons[0] if reasons else None


def reason_against(a: Mapping[str, Any]) -> str | None:
    """Why the kernels cannot do the call, from static facts; None if they can."""
    q, k, v = a["query"], a["key"], a["value"]
    reason = refusal(
        q.shape,
        v.shape,
        jnp.result_type(q.dtype, k.dtype, v.dtype),
        a.get("logits_dtype", "float32"),
    )
    return reason or _mask_reason(a)


def supports(inv: Any) -> str | None:
    """None, or why these kernels cannot do the call."""
    return compat.problem() or too_old(current_target()) or reason_against(inv.arguments)


def problem_of(a: Mapping[str, Any]) -> Problem:
    """The static facts of a call, from its arguments by name."""
    q, k, v = a["query"], a["key"], a["value"]
    scale = a.get("softmax_scale")
    return Problem(
        batch=q.shape[0],
        q_len=q.shape[1],
        kv_len=k.shape[1],
        heads=q.shape[2],
        kv_heads=k.shape[2],
        dim=q.shape[3],
        value_dim=v.shape[3],
        dtype=jnp.result_type(q.dtype, k.dtype, v.dtype).name,
        scale=arg.scale_of(scale, q.shape[3]),
        soft_cap=a.get("logits_soft_cap"),
        dropout=a.get("dropout_prob") or 0.0,
        precision=dot_precision(a.get("precision")),
        biased=a.get("bias") is not None,
        seed_batches=max(q.shape[0], 1),
    )


def _as_config(fwd: tiles.Tiles, dq: tiles.Tiles, dkv: tiles.Tiles) -> dict[str, Any]:
    return {
        "fwd_params": {
            "q_blocksize": fwd.block_q,
            "kv_blocksize": fwd.block_kv,
            "num_warps": fwd.num_warps,
            "num_stages": fwd.num_stages,
        },
        "bwd_params": {
            "q_blocksize": dkv.block_q,
            "kv_blocksize": dkv.block_kv,
            "blocksize_m": dq.block_q,
            "blocksize_n": dq.block_kv,
            "num_warps": dkv.num_warps,
            "num_stages": dkv.num_stages,
        },
    }


def heuristic(inv: Any) -> dict[str, Any]:
    """Fields of the config that the arithmetic of ``tiles`` gives."""
    problem, target = problem_of(inv.arguments), current_target()
    return _as_config(tiles.forward_tiles(problem, target), *tiles.backward_tiles(problem, target))


def candidates(inv: Any) -> list[dict[str, Any]]:
    """Configs worth timing: the heuristic's, and its neighbours that fit in each direction."""
    problem, target = problem_of(inv.arguments), current_target()
    fwd = tiles.forward_tiles(problem, target)
    dq, dkv = tiles.backward_tiles(problem, target)
    first = _as_config(fwd, dq, dkv)
    near = [
        first | {"fwd_params": _as_config(tile, dq, dkv)["fwd_params"]}
        for tile in tiles.neighbours(fwd, problem)
        if fits("forward", tile, fwd, problem, target)
    ]
    near += [
        first | {"bwd_params": _as_config(fwd, dq, tile)["bwd_params"]}
        for tile in tiles.neighbours(dkv, problem)
        if fits("dkv", tile, dkv, problem, target)
    ]
    near += [
        first | {"bwd_params": _as_config(fwd, tile, dkv)["bwd_params"]}
        for tile in tiles.neighbours(dq, problem)
        if fits("dq", tile, dq, problem, target) and _same_launch(tile, dkv)
    ]
    return [first, *(c for i, c in enumerate(near) if c != first and c not in near[:i])]


def _same_launch(a: tiles.Tiles, b: tiles.Tiles) -> bool:
    """A config has one number of warps and of stages for both backward kernels."""
    return (a.num_warps, a.num_stages) == (b.num_warps, b.num_stages)
