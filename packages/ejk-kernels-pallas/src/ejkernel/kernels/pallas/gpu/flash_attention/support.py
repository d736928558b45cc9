"""What the registry asks about a call: can it be done here, and with which tiles."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp

from ejkernel.kernels.pallas.gpu.common.chip import current_chip
from ejkernel.kernels.pallas.gpu.flash_attention import tiles
from ejkernel.kernels.pallas.gpu.flash_attention.arguments import refusal
from ejkernel.kernels.pallas.gpu.flash_attention.backward import backward_tiles
from ejkernel.kernels.pallas.gpu.flash_attention.core import mask_rules
from ejkernel.types import attention as arg
from ejkernel.types import combine_masks
from ejkernel.types.problem import Problem
from ejkernel.types.structure import Rules, Unsupported

_ARRAYS = ("mask_info", "attention_mask", "cum_seqlens_q", "cum_seqlens_k")


def _rules(a: Mapping[str, Any]) -> Rules:
    """The rules of the call's mask, from shapes alone; raises Unsupported."""
    q, k = a["query"], a["key"]
    found: list[Rules | Unsupported] = []

    def probe(arrays: dict[str, Any]) -> int:
        mask = combine_masks(
            **arrays,
            causal=a.get("causal", False),
            causal_offset=a.get("causal_offset", 0),
            sliding_window=a.get("sliding_window"),
            q_len=q.shape[1],
            kv_len=k.shape[1],
            batch=q.shape[0],
            heads=q.shape[2],
        )
        try:
            found.append(mask_rules(mask)[0])
        except Unsupported as error:
            found.append(error)
        return 0

    jax.eval_shape(probe, {name: a.get(name) for name in _ARRAYS})
    if isinstance(found[0], Unsupported):
        raise found[0]
    return found[0]


def reason_against(a: Mapping[str, Any]) -> str | None:
    """Why the kernels cannot do the call, from static facts; None if they can."""
    q, k, v = a["query"], a["key"], a["value"]
    reason = refusal(
        q.shape,
        v.shape,
        jnp.result_type(q.dtype, k.dtype, v.dtype),
        a.get("logits_dtype", "float32"),
        a.get("bias") is not None,
        a.get("dropout_prob") or 0.0,
    )
    if reason is None:
        try:
            _rules(a)
        except Unsupported as error:
            return str(error)
    return reason


def supports(inv: Any) -> str | None:
    """None, or why these kernels cannot do the call."""
    try:
        current_chip()
    except Unsupported as error:
        return str(error)
    return reason_against(inv.arguments)


def problem_of(a: Mapping[str, Any]) -> Problem:
    """The static facts of a call, from its arguments by name."""
    q, k, v = a["query"], a["key"], a["value"]
    return Problem(
        batch=q.shape[0],
        q_len=q.shape[1],
        kv_len=k.shape[1],
        heads=q.shape[2],
        kv_heads=k.shape[2],
        dim=q.shape[3],
        value_dim=v.shape[3],
        dtype=jnp.result_type(q.dtype, k.dtype, v.dtype).name,
        scale=arg.scale_of(a.get("softmax_scale"), q.shape[3]),
        soft_cap=a.get("logits_soft_cap"),
    )


def _power_of_two(n: int) -> bool:
    return n & (n - 1) == 0


def _config(fwd: tiles.ForwardTiles, bwd: Any) -> dict[str, Any]:
    fwd_params = {"kv_blocksize": fwd.block_kv, "num_stages": fwd.stages}
    if _power_of_two(fwd.block_q):  # three consumers are what no block size stands for
        fwd_params["q_blocksize"] = fwd.block_q
    return {
        "fwd_params": fwd_params,
        "bwd_params": {
            "q_blocksize": bwd.block_q,
            "kv_blocksize": bwd.block_kv,
            "num_stages": bwd.stages,
        },
    }


def heuristic(inv: Any) -> dict[str, Any]:
    """Fields of the config that the arithmetic of ``tiles`` gives."""
    problem, rules = problem_of(inv.arguments), _rules(inv.arguments)
    fwd = tiles.forward_tiles(problem, rules, current_chip())
    return _config(fwd, backward_tiles(problem))


def candidates(inv: Any) -> list[dict[str, Any]]:
    """Configs worth timing: the heuristic's, and forward tiles beside it that fit."""
    problem, rules, chip = problem_of(inv.arguments), _rules(inv.arguments), current_chip()
    fwd, bwd = tiles.forward_tiles(problem, rules, chip), backward_tiles(problem)
    near = [
        replace(fwd, consumers=2),
        replace(fwd, consumers=2, block_kv=64, hand_over=0, stages=3),
        replace(fwd, stages=fwd.stages + 1),
    ]
    found = [_config(t, bwd) for t in (fwd, *near) if t.shared(problem) <= chip.shared]
    return [c for i, c in enumerate(found) if c not in found[:i]]
