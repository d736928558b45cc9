"""Linear attention in Triton: three operations, one kernel object each over the same walk."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp

from ejkernel.kernels.triton.bridge import call
from ejkernel.kernels.triton.kernel import TritonKernel
from ejkernel.kernels.triton.linear_attention import roles
from ejkernel.kernels.triton.linear_attention import tiles as choice
from ejkernel.kernels.triton.linear_attention.plans import (
    ChannelPlan,
    GatePlan,
    PreparePlan,
    ScanPlan,
    WalkPlan,
)
from ejkernel.kernels.triton.linear_attention.problem import Problem, problem_of
from ejkernel.kernels.triton.linear_attention.roles import Roles
from ejkernel.kernels.triton.linear_attention.tiles import Tiles
from ejkernel.kernels.triton.targets import Target
from ejkernel.ops.differentiate import Arrays, Work
from ejkernel.types import calls

GATES = ("g", "g_gamma", "gk", "gv")


class LinearAttention(TritonKernel):
    """What the three have in common."""

    def problem(self, a: Mapping[str, Any]) -> Problem:
        return problem_of(a)

    def refuse(self, problem: Problem, target: Target) -> str | None:
        return problem.unsupported or None

    def choose(self, problem: Problem, target: Target) -> Tiles:
        return choice.choose(problem, target)

    def near(self, problem: Problem, target: Target, chosen: Tiles) -> Iterable[Tiles]:
        return choice.near(problem, chosen, target)

    def honour(self, chosen: Tiles, cfg: Any, problem: Problem, target: Target) -> Tiles:
        return choice.honour(chosen, cfg, problem, target)

    def fields(self, chosen: Tiles) -> dict[str, Any]:
        return choice.fields(chosen)

    def forward(self, work: Work, arrays: Arrays) -> tuple[tuple[Any, ...], Any]:
        run = Passes(work, arrays)
        ends = run.walk(roles.SUMS)
        starts, state = run.scan(ends, arrays.get("initial_state"), later=False)
        (o,) = run.walk(replace(roles.OUTPUT, out=work.problem.out), starts)
        return (o, state), starts

    def backward(
        self,
        work: Work,
        arrays: Arrays,
        outputs: tuple[Any, ...],
        saved: Any,
        cotangents: tuple[Any, ...],
    ) -> Mapping[str, Any]:
        p = work.problem
        do, dstate = cotangents
        run = Passes(work, arrays | {"do": do})
        gated = any(name in arrays for name in GATES)
        dstarts, dinitial = run.scan(run.walk(roles.LATER_SUMS), dstate, later=True)
        # gradients of heads that share a key are summed in float32
        own = "float32" if p.heads != p.kv_heads else ""
        dtypes = {n: own or str(arrays[n].dtype) for n in ("key", "value")}
        keys, values = bool(p.key_parts), bool(p.value_parts)
        found = {"initial_state": dinitial}
        states: tuple[Any, ...] = ()
        dstates: tuple[Any, ...] = ()
        # gradients of arrays that meet through decaying channels come with that of the gate
        if keys:
            states = run.walk(roles.STATES, saved)
        else:
            dq, *states = run.walk(replace(roles.DQ, out=p.out, states=gated), saved)
            of_keys = replace(roles.DK, out=dtypes["key"], states=values)
            dk, *dstates = run.walk(of_keys, dstarts)
            found |= {"query": dq, "key": run.of_keys(dk)}
        if not values:
            dv, *dstates = run.walk(replace(roles.DV, out=dtypes["value"], states=gated), dstarts)
            found["value"] = run.of_keys(dv)
        elif keys:
            dstates = run.walk(roles.LATER_STATES, dstarts)
        if p.scalar:
            found |= run.gate_gradient(*states, *dstates)
        elif gated:
            found |= run.channel_gradients(arrays, dtypes, *states, *dstates)
        return {name: x for name, x in found.items() if name in arrays}


class Passes:
    """The launches of one call, which share its arrays."""

    def __init__(self, work: Work, arrays: Arrays):
        self.problem, self.tiles = work.problem, work.tiles
        self.arrays: dict[str, Any] = {name[0]: arrays[name] for name in ("query", "key", "value")}
        self.arrays |= {"do": arrays.get("do"), **_gates(work.problem, arrays)}
        cu = arrays.get("cu_seqlens")
        self.arrays["cu"] = None if cu is None else cu[None]
        if self.problem.key_parts:
            self.prepare("q", "k", "gk", of_values=False)
        if self.problem.value_parts and "do" in arrays:
            self.prepare("do", "v", "gv", of_values=True)

    def prepare(self, reader: str, source: str, gate: str, *, of_values: bool) -> None:
        """What walks read in the place of two arrays whose channels decay."""
        plan = PreparePlan(self.problem, self.tiles, of_values)
        results = call(plan, *self.named(reader, source, gate, "cu"))
        names = [f"{name} {gate[1]}" for name in ("pairs", "totals", "halves")]
        names[1:1] = [reader + "'", source + "'"]
        self.arrays |= dict(zip(names, results, strict=True))

    def named(self, *names: str) -> list[jax.Array]:
        return [self.arrays[n] for n in names if self.arrays[n] is not None]

    def walk(self, role: Roles, starts: Any = None) -> tuple[jax.Array, ...]:
        known = self.arrays | {"starts": starts}
        operands = [known[name] for name in role.operands(self.problem).values()]
        return call(WalkPlan(self.problem, self.tiles, role), *operands)

    def scan(self, ends: Any, initial: Any, *, later: bool) -> tuple[jax.Array, ...]:
        given = [] if initial is None else [initial]
        plan = ScanPlan(self.problem, self.tiles, later, bool(given))
        return call(plan, *ends, *given, *self.named("cu"))

    def gate_gradient(self, states: Any, dstates: Any) -> Arrays:
        """That of one number a row and head, whatever it is the sum of."""
        operands = [*self.named("q", "k", "v", "do", "gate"), states, dstates, *self.named("cu")]
        (one,) = call(GatePlan(self.problem, self.tiles), *operands)
        return {"g": one, "g_gamma": jnp.sum(one, (0, 1))}

    def channel_gradients(
        self, arrays: Arrays, dtypes: Mapping[str, str], states: Any, dstates: Any
    ) -> Arrays:
        """Those of arrays that meet through decaying channels, and of all gates."""
        p = self.problem
        found: Arrays = {}
        own = {n: str(self.arrays[n].dtype) for n in ("gk", "gv") if self.arrays[n] is not None}
        tail = [states, dstates, *self.named("cu")]
        if p.value_parts:
            other = ("q'", "k'") if p.key_parts else ("q", "k")
            more = ("pairs k", "totals k") if p.key_parts else ()
            operands = self.named("do", "v", *other, "gv", "halves v", *more)
            plan = ChannelPlan(p, self.tiles, True, (dtypes["value"], own["gv"]))
            dv, found["gv"] = call(plan, *operands, *tail)
            found["value"] = self.of_keys(dv)
        if p.key_parts:
            other = ("do'", "v'") if p.value_parts else ("do", "v")
            more = ("pairs v", "totals v") if p.value_parts else ()
            operands = self.named("q", "k", *other, "gk", "halves k", *more)
            plan = ChannelPlan(p, self.tiles, False, (p.out, dtypes["key"], own["gk"]))
            found["query"], dk, found["gk"] = call(plan, *operands, *tail)
            found |= {"key": self.of_keys(dk), "g": found["gk"]}
        one = jnp.sum(found["gk" if p.key_parts else "gv"], 3)
        if "g" in arrays and arrays["g"].ndim == 3:
            found["g"] = one
        return found | {"g_gamma": jnp.sum(one, (0, 1))}

    def of_keys(self, x: jax.Array) -> jax.Array:
        """Gradients of all heads, summed over those that share a key."""
        p = self.problem
        if p.heads == p.kv_heads:
            return x
        return jnp.sum(x.reshape(*x.shape[:2], p.kv_heads, -1, x.shape[3]), 3)


def _gates(p: Problem, arrays: Arrays) -> Arrays:
    """What the walk takes: ``gate`` [batch, rows, heads], ``gk`` and ``gv`` with channels.

    One number a row or head is added to the channels of keys if those decay, else of values.
    """
    ahead, channels = [], []
    if p.slopes:
        ahead.append(jnp.asarray(p.slopes, jnp.float32)[None, None])
    if "g_gamma" in arrays:
        ahead.append(arrays["g_gamma"][None, None])
    if "g" in arrays:
        (channels if arrays["g"].ndim == 4 else ahead).append(arrays["g"])
    channels += [arrays["gk"]] if "gk" in arrays else []
    found: Arrays = {"gate": None, "gk": None, "gv": arrays.get("gv")}
    if p.scalar:
        one = _sum(ahead, wide=True)
        found["gate"] = jnp.broadcast_to(one, (p.batch, p.rows, p.heads))
    else:
        ahead = [x[..., None] for x in ahead]
        if channels:
            found["gk"] = _sum([*channels, *ahead])
        elif "gv" in arrays:
            found["gv"] = _sum([arrays["gv"], *ahead])
    return found


def _sum(parts: list[jax.Array], *, wide: bool = False) -> jax.Array:
    """In float32; a single one as it is, unless ``wide``."""
    if len(parts) == 1 and not wide:
        return parts[0]
    total = parts[0].astype(jnp.float32)
    for part in parts[1:]:
        shape = jnp.broadcast_shapes(total.shape, part.shape)
        total = jnp.broadcast_to(total, shape) + jnp.broadcast_to(part, shape).astype(jnp.float32)
    return total


class RecurrentAttention(LinearAttention):
    """The gated recurrence, on a GPU; see the operation of this name.

    float16, bfloat16 and float32, states and sums in float32; head dims up to 256. Gates of
    every kind. Two runs give the same bits. Differentiable once.
    ``vmap`` is one launch. ``cfg``: time_tile, dv_tile, num_warps, num_stages.

    Source: Yang et al. 2023, "Gated linear attention transformers" (arXiv 2312.06635), section 4.
    """

    call = calls.RecurrentAttention


class GLAttention(LinearAttention):
    """Gated linear attention, on a GPU; see the operation of this name, and recurrent_attention.

    Source: Yang et al. 2023, "Gated linear attention transformers" (arXiv 2312.06635), section 4.
    """

    call = calls.GLAttention


class LightningAttention(LinearAttention):
    """Linear attention with one decay a head and layer, on a GPU; see the operation of this name,
    and recurrent_attention.

    Source: Qin et al. 2024, "Lightning Attention-2" (arXiv 2401.04658), section 3.
    """

    call = calls.LightningAttention


recurrent_attention = RecurrentAttention()
gla_attention = GLAttention()
lightning_attention = LightningAttention()
