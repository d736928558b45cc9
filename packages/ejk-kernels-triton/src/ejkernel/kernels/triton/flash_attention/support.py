"""What the registry asks about a call: can it be done here, and with which tiles."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ejkernel.kernels.triton import compat
from ejkernel.kernels.triton.flash_attention import tiles
from ejkernel.kernels.triton.flash_attention.arguments import dot_precision, refusal
from ejkernel.kernels.triton.flash_attention.fits import fits
from ejkernel.kernels.triton.targets import current_target, too_old
from ejkernel.types import attention as arg
from ejkernel.types import call
from ejkernel.types.arrays import result_dtype
from ejkernel.types.problem import Problem
from ejkernel.types.structure import Unsupported, split_mask


def _mask_reason(a: Mapping[str, Any]) -> str | None:
    try:
        call.read_mask(a, split_mask)
    except Unsupported as error:
        return str(error)
    return None


def reason_against(a: Mapping[str, Any]) -> str | None:
    """Why the kernels cannot do the call, from static facts; None if they can."""
    q, k, v = a["query"], a["key"], a["value"]
    reason = refusal(
        q.shape,
        v.shape,
        result_dtype(q.dtype, k.dtype, v.dtype),
        a.get("logits_dtype", "float32"),
    )
    return reason or _mask_reason(a)


def supports(inv: Any) -> str | None:
    """None, or why these kernels cannot do the call."""
    return compat.problem() or too_old(current_target()) or reason_against(inv.arguments)


def problem_of(a: Mapping[str, Any]) -> Problem:
    """The static facts of a call, from its arguments by name.

    Raises:
        InvalidArgument, ValueError: an illegal scale, soft cap or probability.
    """
    return call.problem_of(
        a,
        dropout=arg.probability(a.get("dropout_prob", 0.0)),
        precision=dot_precision(a.get("precision")),
        biased=a.get("bias") is not None,
        seed_batches=max(a["query"].shape[0], 1),
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
