"""What the registry asks about a call: can it be done here, and with which tiles."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from typing import Any

from ejkernel.kernels.pallas._registrations import AHEAD, BEHIND
from ejkernel.kernels.pallas.gpu.common.chip import current_chip
from ejkernel.kernels.pallas.gpu.common.schedule import band_costs
from ejkernel.kernels.pallas.gpu.flash_attention import tiles
from ejkernel.kernels.pallas.gpu.flash_attention.arguments import refusal
from ejkernel.kernels.pallas.gpu.flash_attention.backward import backward_tiles
from ejkernel.kernels.pallas.gpu.flash_attention.core import mask_rules
from ejkernel.ops.errors import ConfigError
from ejkernel.types import call
from ejkernel.types.arrays import result_dtype
from ejkernel.types.structure import Rules, Unsupported


def _rules(a: Mapping[str, Any]) -> Rules:
    """The rules of the call's mask; raises Unsupported."""
    return call.read_mask(a, lambda mask: mask_rules(mask)[0])


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


# Measured on an H200, forward and backward, against the Triton kernels: 544 keys a row 0.82, 576
# 0.79, packed documents of 8k 0.86, 448 queries of 1500 keys 0.57; 1024 keys 1.00, 2080 keys 1.08.
FEW_KEYS = 768
FEW_QUERIES = 512


def priority_for(inv: Any) -> int:
    """Behind the kernels for every GPU where heads are narrow and walks are short.

    A walk over few tiles of 64 columns is over before its ends are paid for, and with few blocks
    of queries the programs of many keys wait for their turns to add to dq.
    """
    problem, rules = call.problem_of(inv.arguments), _rules(inv.arguments)
    if max(problem.dim, problem.value_dim) > 64:
        return AHEAD
    if rules.arrays or problem.q_len <= FEW_QUERIES:
        return BEHIND
    block = 64
    seen = band_costs(problem.q_len, problem.kv_len, rules.band, block, block).mean() * block
    return BEHIND if seen <= FEW_KEYS else AHEAD


def _power_of_two(n: int) -> bool:
    return n & (n - 1) == 0


def _config(fwd: tiles.ForwardTiles, bwd: Any) -> dict[str, Any]:
    blocks = {"q_blocksize": fwd.block_q, "kv_blocksize": fwd.block_kv}
    # 192 queries and 160 keys are what no block size stands for: left out, they are chosen again
    fwd_params = {name: n for name, n in blocks.items() if _power_of_two(n)}
    fwd_params["num_stages"] = fwd.stages
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
    problem, rules = call.problem_of(inv.arguments), _rules(inv.arguments)
    fwd = tiles.forward_tiles(problem, rules, current_chip())
    return _config(fwd, backward_tiles(problem))


def candidates(inv: Any) -> list[dict[str, Any]]:
    """Configs worth timing: the heuristic's, and forward tiles beside it that fit."""
    problem, rules, chip = call.problem_of(inv.arguments), _rules(inv.arguments), current_chip()
    fwd, bwd = tiles.forward_tiles(problem, rules, chip), backward_tiles(problem)
    found = [_config(fwd, bwd)]
    for given in (
        {"q_blocksize": 128},
        {"kv_blocksize": 128},
        {"q_blocksize": 128, "kv_blocksize": 64, "num_stages": 3},
        {"num_stages": fwd.stages + 1},
    ):
        with contextlib.suppress(ConfigError):  # it does not fit
            near = _config(tiles.override_forward(fwd, problem, chip, given), bwd)
            found += [near] if near not in found else []
    return found
