"""The gated delta rule in Triton as one kernel object."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp

from ejkernel.kernels.triton.bridge import call
from ejkernel.kernels.triton.gated_delta_rule import tiles
from ejkernel.kernels.triton.gated_delta_rule.channel_gradients import ChannelGradientsLaunch
from ejkernel.kernels.triton.gated_delta_rule.channel_prepare import ChannelPrepareLaunch
from ejkernel.kernels.triton.gated_delta_rule.decode import DecodeLaunch
from ejkernel.kernels.triton.gated_delta_rule.prepare import PrepareLaunch
from ejkernel.kernels.triton.gated_delta_rule.problem import (
    NORM_EPSILON,
    Problem,
    problem_of,
)
from ejkernel.kernels.triton.gated_delta_rule.reverse_scan import ReverseScanLaunch
from ejkernel.kernels.triton.gated_delta_rule.row_gradients import RowGradientsLaunch
from ejkernel.kernels.triton.gated_delta_rule.scan import ScanLaunch
from ejkernel.kernels.triton.kernel import TritonKernel
from ejkernel.kernels.triton.targets import Target
from ejkernel.ops.differentiate import Arrays, Work
from ejkernel.types import calls
from ejkernel.types.calls import arguments

NAMES = {
    "query": "query",
    "key": "key",
    "value": "value",
    "gate": "g",
    "beta": "beta",
    "initial": "initial_state",
}

GLUON = "scans and row gradients by the kernels in Gluon, unless a config has other tiles"
NO_GLUON = (
    "the kernels in Triton: those in Gluon take bfloat16 with head dims of 64 or 128 and at least "
    "64 tokens a sequence, and need Triton 3.9 and TMA descriptors"
)


class GatedDeltaRule(TritonKernel):
    """The gated delta rule with a gate per head or per key channel, on a GPU.

    float16, bfloat16 and float32, states and accumulators in float32; head dims up to 128. Two runs
    give the same bits. Differentiable once, from the inputs alone: everything else is computed
    again. ``vmap`` is one launch. ``cfg``: time_tile, dv_tile, num_warps, num_stages.
    """

    call = calls.GatedDeltaRule
    reads = arguments.RECURRENCE | {"g", "beta", "normalize_qk"}
    problem = staticmethod(problem_of)
    choose = staticmethod(tiles.choose)
    neighbours = staticmethod(tiles.neighbours)

    def variant_reason(self, problem: Any) -> str | None:
        return None

    def sequence_problem(self, problem: Any) -> Any:
        return replace(problem, batch=1)

    def notes_on(self, problem: Problem, target: Target) -> tuple[str, ...]:
        if problem.compute_dtype != "bfloat16" or not target.hopper or tiles.few_tokens(problem):
            return ()
        chosen = tiles.choose(problem, target)
        return (GLUON if tiles.has_sm90_kernel(problem, chosen, target) else NO_GLUON,)

    def unsupported_reason(self, problem: Problem, target: Target) -> str | None:
        return problem.unsupported or None

    def forward(self, work: Work, arrays: Arrays) -> tuple[tuple[Any, ...], Any]:
        p, t, operands = work.problem, work.tiles, _operands(work.problem, arrays)
        if tiles.few_tokens(p):
            state = operands["initial"]
            overwrites = state is not None and state.dtype == jnp.float32
            results = call(DecodeLaunch(p, t, overwrites=overwrites), **operands)
        else:
            results = call(ScanLaunch(p, t, for_gradients=False), **_prepared(p, t, operands))
        return (results["out"], results["final"]), None

    def backward(self, work, arrays, outputs, saved, cotangents) -> Mapping[str, Any]:
        p, t, operands = work.problem, work.tiles, _operands(work.problem, arrays)
        do, dstate = cotangents
        prepared = _prepared(p, t, operands)
        of_reverse = {x: prepared[x] for x in prepared if x not in ("value", "initial")}
        scanned = call(ReverseScanLaunch(p, t), **of_reverse, dout=do, dfinal=dstate)
        # states come after the gradients of states, when the scores are no longer kept
        del prepared["query"], prepared["scores"]
        prepared["value"], scanned["dvalue"] = jax.lax.optimization_barrier(
            (prepared["value"], scanned["dvalue"])
        )
        scanned |= call(ScanLaunch(p, t, for_gradients=True), **prepared)
        del operands["value"], operands["initial"]
        dinitial = scanned.pop("dinitial")
        of_rows = ChannelGradientsLaunch if p.channel_gates else RowGradientsLaunch
        gradients = call(of_rows(p, t), **operands, **scanned, dout=do)
        if p.channel_gates:
            for name in ("query", "key"):
                gradients[f"d{name}"] = _key_gradient(p, gradients[f"d{name}"], arrays[name])
        gradients |= {"dvalue": scanned["dvalue"], "dinitial": dinitial}
        named = {theirs: gradients.get(f"d{ours}") for ours, theirs in NAMES.items()}
        return {name: x for name, x in named.items() if name in arrays}


def _operands(p: Problem, arrays: Arrays) -> dict[str, Any]:
    """Returns the operands of launches by name, None for those not given.

    Channels of the value heads decay each in their own way: with gates per channel each of them has
    its own queries and keys.
    """
    cu = arrays.get("cu_seqlens")
    operands = {ours: arrays.get(theirs) for ours, theirs in NAMES.items()}
    repeats = p.kv_heads // operands["key"].shape[2] if operands["key"].shape[2] else 1
    if repeats > 1:
        operands |= {name: jnp.repeat(operands[name], repeats, 2) for name in ("query", "key")}
    return operands | {"cu": None if cu is None else cu[None]}


def _prepared(p: Problem, t: tiles.Tiles, operands: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the operands of the scans: arrays of the call, and the results of ``prepare``."""
    of_chunks = {name: operands[name] for name in ("query", "key", "gate", "beta", "cu")}
    of_scan = {name: operands[name] for name in ("query", "key", "value", "initial", "cu")}
    if not p.channel_gates:
        return call(PrepareLaunch(p, t), **of_chunks) | of_scan
    prepared = call(ChannelPrepareLaunch(p, t), **of_chunks)
    decayed = {name: prepared.pop(f"read_{name}") for name in ("query", "key")}
    return prepared | of_scan | decayed


def _key_gradient(p: Problem, gradient: jax.Array, x: jax.Array) -> jax.Array:
    """Returns the gradient of queries or keys from that of their repeated, normalized heads."""
    b, s, heads, channels = x.shape
    if heads != p.kv_heads:
        groups = gradient.reshape(b, s, heads, -1, channels)
        gradient = jnp.sum(groups, 3, dtype=jnp.float32)
    if p.normalize:
        # rows past the last sequence, whose gradient is 0, may hold anything
        wide = jnp.where(jnp.isfinite(x), x.astype(jnp.float32), 0)
        length = jnp.sqrt(jnp.sum(wide * wide, -1, keepdims=True) + NORM_EPSILON)
        unit = wide / length
        # what lies along a vector does not change its direction
        along = jnp.sum(gradient * unit, -1, keepdims=True)
        gradient = (gradient - unit * along) / length
    return gradient


gated_delta_rule = GatedDeltaRule()
