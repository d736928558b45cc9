"""What the registry asks about a call: can it be done here, and with which tiles."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ejkernel.kernels.pallas.tpu.common.chip import current_chip
from ejkernel.kernels.pallas.tpu.common.masks import tile_rules
from ejkernel.kernels.pallas.tpu.flash_attention import tiles
from ejkernel.kernels.pallas.tpu.flash_attention.arguments import dot_precision, refusal
from ejkernel.types import call
from ejkernel.types.arrays import result_dtype
from ejkernel.types.problem import Problem
from ejkernel.types.structure import Unsupported


def _mask_reason(a: Mapping[str, Any]) -> str | None:
    q, k = a["query"], a["key"]
    try:
        call.read_mask(a, lambda mask: tile_rules(mask, q.shape[1], k.shape[1]))
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
        a.get("bias") is not None,
        a.get("dropout_prob") or 0.0,
    )
    return reason or _mask_reason(a)


def supports(inv: Any) -> str | None:
    """None, or why these kernels cannot do the call."""
    try:
        current_chip()
    except Unsupported as error:
        return str(error)
    return reason_against(inv.arguments)


def problem_of(a: Mapping[str, Any]) -> Problem:
    """The static facts of a call, from its arguments by name."""
    return call.problem_of(a, precision=dot_precision(a.get("precision")))


def _as_config(fwd: tiles.Tiles, dq: tiles.Tiles, dkv: tiles.Tiles) -> dict[str, Any]:
    return {
        "fwd_params": {"q_blocksize": fwd.block_q, "kv_blocksize": fwd.block_kv},
        "bwd_params": {
            "q_blocksize": dkv.block_q,
            "kv_blocksize": dkv.block_kv,
            "blocksize_m": dq.block_q,
            "blocksize_n": dq.block_kv,
        },
    }


def _tiles(inv: Any) -> tuple[tiles.Tiles, tiles.Tiles, tiles.Tiles]:
    problem, chip = problem_of(inv.arguments), current_chip()
    return (
        tiles.forward_tiles(problem, chip),
        tiles.dq_tiles(problem, chip),
        tiles.dkv_tiles(problem, chip),
    )


def heuristic(inv: Any) -> dict[str, Any]:
    """Fields of the config that the arithmetic of ``tiles`` gives."""
    return _as_config(*_tiles(inv))


def candidates(inv: Any) -> list[dict[str, Any]]:
    """Configs worth timing: the heuristic's, and half or twice each block of each kernel."""
    fwd, dq, dkv = _tiles(inv)
    first = _as_config(fwd, dq, dkv)
    found = [first]
    for near in tiles.neighbours(fwd):
        found.append(first | {"fwd_params": _as_config(near, dq, dkv)["fwd_params"]})
    for near in tiles.neighbours(dkv):
        found.append(first | {"bwd_params": _as_config(fwd, dq, near)["bwd_params"]})
    for near in tiles.neighbours(dq):
        found.append(first | {"bwd_params": _as_config(fwd, near, dkv)["bwd_params"]})
    return [c for i, c in enumerate(found) if c not in found[:i]]
