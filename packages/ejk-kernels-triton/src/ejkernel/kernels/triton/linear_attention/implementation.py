"""Linear attention in Triton: three operations, one kernel object each over the same walk."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp

from ejkernel.kernels.triton.bridge import call_plan
from ejkernel.kernels.triton.kernel import TritonKernel
from ejkernel.kernels.triton.linear_attention import roles
from ejkernel.kernels.triton.linear_attention import tiles as choice
from ejkernel.kernels.triton.linear_attention.plans import (
    ChannelPlan,
    GatePlan,
    PreparePlan,
    PullPlan,
    ReadPlan,
    ScanPlan,
    StepPlan,
    SumsPlan,
    WalkPlan,
)
from ejkernel.kernels.triton.linear_attention.problem import Problem, problem_of
from ejkernel.kernels.triton.linear_attention.roles import Roles
from ejkernel.kernels.triton.targets import Target
from ejkernel.ops.differentiate import Arrays, Work
from ejkernel.types import calls
from ejkernel.types.calls import arguments

GATES = ("g", "g_gamma", "gk", "gv")


class LinearAttention(TritonKernel):
    """What the three have in common."""

    problem = staticmethod(problem_of)
    choose = staticmethod(choice.choose)
    neighbours = staticmethod(choice.neighbours)

    def unsupported_reason(self, problem: Problem, target: Target) -> str | None:
        return problem.unsupported or None

    def forward(self, work: Work, arrays: Arrays) -> tuple[tuple[Any, ...], Any]:
        if choice.few_tokens(work.problem):
            return _steps(work, arrays), None
        run = Passes(work, arrays)
        ends = run.walk(roles.SUMS)
        starts, state = run.scan(ends, arrays.get("initial_state"), later=False)
        return (run.output(starts), state), starts

    def backward(self, work, arrays, outputs, saved, cotangents) -> Mapping[str, Any]:
        p = work.problem
        do, dstate = cotangents
        run = Passes(work, arrays | {"do": do})
        if saved is None:
            saved, _ = run.scan(run.walk(roles.SUMS), arrays.get("initial_state"), later=False)
        dstarts, dinitial = run.scan(run.walk(roles.LATER_SUMS), dstate, later=True)
        # gradients of heads that share a key are summed in float32
        own = "float32" if p.heads != p.kv_heads else ""
        dtypes = {n: own or str(arrays[n].dtype) for n in ("key", "value")}
        found = {"initial_state": dinitial}
        if choice.whole_state(p, work.tiles, work.target):
            found |= run.whole_gradients(dtypes, saved, outputs[1], dstarts)
        else:
            found |= run.gradients(arrays, dtypes, saved, dstarts)
        return {name: x for name, x in found.items() if name in arrays}


class Passes:
    """The launches of one call, which share its arrays."""

    def __init__(self, work: Work, arrays: Arrays):
        self.problem, self.tiles = work.problem, work.tiles
        self.gated = any(name in arrays for name in GATES)
        self.arrays: dict[str, Any] = {name[0]: arrays[name] for name in ("query", "key", "value")}
        self.arrays |= {"do": arrays.get("do"), **_channels(work.problem, arrays)}
        cu = arrays.get("cu_seqlens")
        self.arrays["cu"] = None if cu is None else cu[None]
        constant = _constant(self.problem, arrays)
        self.arrays["constant"] = constant
        sums: tuple[Any, ...] = (None,) * len(roles.GATE_SUMS)
        # walks have sums of constants at hand, the gradients of what was read have not
        if self.problem.scalar and not (self.problem.steady and self.arrays["do"] is None):
            known = {"gate": arrays.get("g"), "constant": constant}
            known = {n: x for n, x in (known | {"cu": self.arrays["cu"]}).items() if x is not None}
            sums = call_plan(
                SumsPlan(self.problem, self.tiles, tuple(known), True), *known.values()
            )
        self.arrays |= dict(zip(roles.GATE_SUMS, sums, strict=True))
        if self.problem.key_parts or self.problem.value_parts:
            found = choice.cuts(work.tiles.chunk, self.problem.reverse)
            self.arrays["cuts"] = jnp.asarray(found, jnp.bfloat16)
        if self.problem.key_parts:
            self.prepare("q", "k", "gk", of_values=False)
        if self.problem.value_parts:
            self.prepare("do", "v", "gv", of_values=True)

    def prepare(self, reader: str, source: str, gate: str, *, of_values: bool) -> None:
        """What walks read in the place of two arrays whose channels decay; of the second alone,
        where there is no first."""
        reads = self.arrays[reader] is not None
        plan = PreparePlan(self.problem, self.tiles, of_values, reads)
        results = call_plan(plan, *self.named(reader, source, gate, "cuts", "cu"))
        names = [f"pairs {gate[1]}", reader + "'"] if reads else []
        names += [source + "'", f"totals {gate[1]}", f"halves {gate[1]}"]
        self.arrays |= dict(zip(names, results, strict=True))

    def named(self, *names: str) -> list[jax.Array]:
        return [self.arrays[n] for n in names if self.arrays[n] is not None]

    def walk(self, role: Roles, starts: Any = None) -> tuple[jax.Array, ...]:
        known = self.arrays | {"starts": starts}
        operands = [known[name] for name in role.operands(self.problem).values()]
        return call_plan(WalkPlan(self.problem, self.tiles, role), *operands)

    def scan(self, ends: Any, initial: Any, *, later: bool) -> tuple[jax.Array, ...]:
        given = [] if initial is None else [initial]
        plan = ScanPlan(self.problem, self.tiles, later, bool(given))
        return call_plan(plan, *ends, *given, *self.named("cu"))

    def output(self, starts: Any) -> jax.Array:
        p = self.problem
        if not p.value_parts:
            return self.walk(replace(roles.OUTPUT, out=p.out), starts)[0]
        # what rows read through decaying channels is formed like a gradient, from states
        other = ("q'", "k'") if p.key_parts else ("q", "k")
        pairs = ("pairs k",) if p.key_parts else ()
        operands = self.named("v", *other, "gv", "halves v", "cuts", *pairs)
        plan = ChannelPlan(p, self.tiles, True, (("dreader", p.out),))
        return call_plan(plan, *operands, *self.walk(roles.STATES, starts), *self.named("cu"))[0]

    def gradients(
        self, arrays: Arrays, dtypes: Mapping[str, str], starts: Any, dstarts: Any
    ) -> Arrays:
        """A walk for each array, and then the gates' from states before every chunk."""
        p, gated = self.problem, self.gated
        keys, values = bool(p.key_parts), bool(p.value_parts)
        found: Arrays = {}
        states: tuple[Any, ...] = ()
        dstates: tuple[Any, ...] = ()
        # gradients of arrays that meet through decaying channels come with that of the gate
        if keys:
            states = self.walk(roles.STATES, starts)
        else:
            dq, *states = self.walk(replace(roles.DQ, out=p.out, states=gated), starts)
            of_keys = replace(roles.DK, out=dtypes["key"], states=values)
            dk, *dstates = self.walk(of_keys, dstarts)
            found |= {"query": dq, "key": self.of_keys(dk)}
        if not values:
            dv, *dstates = self.walk(replace(roles.DV, out=dtypes["value"], states=gated), dstarts)
            found["value"] = self.of_keys(dv)
        elif keys:
            dstates = self.walk(roles.LATER_STATES, dstarts)
        if keys or values:
            found |= self.channel_gradients(arrays, dtypes, *states, *dstates)
        elif gated:
            found |= self.gate_gradient(*states, *dstates)
        return found

    def whole_gradients(
        self, dtypes: Mapping[str, str], starts: Any, final: Any, dstarts: Any
    ) -> Arrays:
        """Two walks, and then the gate's from numbers of rows."""
        p, gated = self.problem, self.gated
        role = replace(roles.DQ, out=p.out, partner="q" if gated else "")
        dq, *reached = self.walk(role, starts)
        results = (("dkey", dtypes["key"]), ("dvalue", dtypes["value"]))
        plan = ReadPlan(p, self.tiles, gated, results)
        states = [starts, final] if gated else []
        given = self.named("q", "k", "v", "do", *roles.GATE_SUMS)
        dk, dv, *of_gate = call_plan(plan, *given, dstarts, *states, *self.named("cu"))
        found = {"query": dq, "key": self.of_keys(dk), "value": self.of_keys(dv)}
        if gated:
            totals = self.named("gate_totals", "cu")
            (one,) = call_plan(PullPlan(p, self.tiles), *of_gate, *reached, *totals)
            found |= {"g": one, "g_gamma": jnp.sum(one, (0, 1))}
        return found

    def gate_gradient(self, states: Any, dstates: Any) -> Arrays:
        """That of one number a row and head, whatever it is the sum of."""
        operands = [
            *self.named("q", "k", "v", "do", *roles.GATE_SUMS),
            states,
            dstates,
            *self.named("cu"),
        ]
        (one,) = call_plan(GatePlan(self.problem, self.tiles), *operands)
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
            operands = self.named("do", "v", *other, "gv", "halves v", "cuts", *more)
            results = (("dsource", dtypes["value"]), ("dgate", own["gv"]))
            plan = ChannelPlan(p, self.tiles, True, results)
            dv, found["gv"] = call_plan(plan, *operands, *tail)
            found["value"] = self.of_keys(dv)
        if p.key_parts:
            other = ("do'", "v'") if p.value_parts else ("do", "v")
            more = ("pairs v", "totals v") if p.value_parts else ()
            operands = self.named("q", "k", *other, "gk", "halves k", "cuts", *more)
            results = (("dreader", p.out), ("dsource", dtypes["key"]), ("dgate", own["gk"]))
            plan = ChannelPlan(p, self.tiles, False, results)
            found["query"], dk, found["gk"] = call_plan(plan, *operands, *tail)
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


def _steps(work: Work, arrays: Arrays) -> tuple[jax.Array, ...]:
    """The forward pass of a few tokens: o, final state."""
    p = work.problem
    gates = [arrays[name] for name in ("g", "gk") if name in arrays]
    channels = [x for x in gates if x.ndim == 4]
    cu, state = arrays.get("cu_seqlens"), arrays.get("initial_state")
    known = {
        "query": arrays["query"],
        "key": arrays["key"],
        "value": arrays["value"],
        "constant": _constant(p, arrays),
        "gate": next((x for x in gates if x.ndim == 3), None),
        "key_gate": _sum(channels) if channels else None,
        "value_gate": arrays.get("gv"),
        "cu": None if cu is None else cu[None],
        "initial": state,
    }
    operands = {name: x for name, x in known.items() if x is not None}
    in_place = state is not None and state.dtype == jnp.float32
    return call_plan(StepPlan(p, work.tiles, tuple(operands), True, in_place), *operands.values())


def _constant(p: Problem, arrays: Arrays) -> jax.Array | None:
    """One log decay a head [1, heads], None = there is none."""
    found = jnp.asarray(p.slopes, jnp.float32) if p.slopes else arrays.get("g_gamma")
    return None if found is None else found[None]


def _channels(p: Problem, arrays: Arrays) -> Arrays:
    """Decays per channel of keys and of values.

    One number a row or head is added to the channels of keys if those decay, else of values.
    """
    found: Arrays = {"gk": None, "gv": arrays.get("gv")}
    if p.scalar:
        return found
    gates = [arrays[name] for name in ("g", "gk") if name in arrays]
    channels = [x for x in gates if x.ndim == 4]
    constant = _constant(p, arrays)
    ahead = [] if constant is None else [constant[:, None, :, None]]
    ahead += [x[..., None] for x in gates if x.ndim == 3]
    if channels:
        found["gk"] = _sum([*channels, *ahead])
    elif "gv" in arrays:
        found["gv"] = _sum([arrays["gv"], *ahead])
    return found


def _sum(parts: list[jax.Array]) -> jax.Array:
    """In float32; a single one as it is."""
    if len(parts) == 1:
        return parts[0]
    total = parts[0].astype(jnp.float32)
    for part in parts[1:]:
        shape = jnp.broadcast_shapes(total.shape, part.shape)
        total = jnp.broadcast_to(total, shape) + jnp.broadcast_to(part, shape).astype(jnp.float32)
    return total


class RecurrentAttention(LinearAttention):
    """The gated recurrence, on a GPU.

    float16, bfloat16 and float32, states and sums in float32; head dims up to 256. Gates of
    every kind. Two runs give the same bits. Differentiable once.
    ``vmap`` is one launch. ``cfg``: time_tile, dv_tile, num_warps, num_stages.
    """

    call = calls.RecurrentAttention
    reads = arguments.RECURRENCE | {"g", "g_gamma", "gk", "gv"}


class GLAttention(LinearAttention):
    """Gated linear attention, on a GPU, as ``recurrent_attention``."""

    call = calls.GLAttention
    reads = arguments.RECURRENCE | {"g", "g_gamma"}


class LightningAttention(LinearAttention):
    """Linear attention with one decay a head and layer, on a GPU, as ``recurrent_attention``."""

    call = calls.LightningAttention
    reads = arguments.RECURRENCE | {"layer_idx", "num_layers"}


recurrent_attention = RecurrentAttention()
gla_attention = GLAttention()
lightning_attention = LightningAttention()
