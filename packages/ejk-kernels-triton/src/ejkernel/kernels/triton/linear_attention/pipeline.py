"""The launches of one call of linear attention, in order."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp

from ejkernel.kernels.triton.bridge import call
from ejkernel.kernels.triton.linear_attention import passes, tiles
from ejkernel.kernels.triton.linear_attention.backward_kv import BackwardKv
from ejkernel.kernels.triton.linear_attention.channel_gradient import ChannelGradient
from ejkernel.kernels.triton.linear_attention.chunk_loop import ChunkLoop
from ejkernel.kernels.triton.linear_attention.decay_channels import DecayChannels
from ejkernel.kernels.triton.linear_attention.decode import DecodeTokens
from ejkernel.kernels.triton.linear_attention.gate_gradient import GateGradient
from ejkernel.kernels.triton.linear_attention.gate_gradient_rows import GateGradientRows
from ejkernel.kernels.triton.linear_attention.gates import GatePrefixSums
from ejkernel.kernels.triton.linear_attention.launch import GATE_SUMS
from ejkernel.kernels.triton.linear_attention.passes import Pass
from ejkernel.kernels.triton.linear_attention.problem import Problem
from ejkernel.kernels.triton.linear_attention.state_scan import StateScan
from ejkernel.ops.differentiate import Arrays, Work

GATES = ("g", "g_gamma", "gk", "gv")


class Pipeline:
    """The launches of one call, which share its arrays.

    ``arrays`` has q, k, v, do, the gates ``gk`` and ``gv`` of channels, prefix sums of one gate a
    row and head or its ``constant``, ``cu``, and the results of ``decay_channels``: ``q_decayed``,
    ``pairs_k``, ``totals_k``, ``halves_k`` and so on.
    """

    def __init__(self, work: Work, arrays: Arrays):
        self.problem, self.tiles, self.target = work.problem, work.tiles, work.target
        self.gated = any(name in arrays for name in GATES)
        self.arrays: dict[str, Any] = {name[0]: arrays[name] for name in ("query", "key", "value")}
        self.arrays |= {"do": arrays.get("do"), **_channel_gates(work.problem, arrays)}
        cu = arrays.get("cu_seqlens")
        self.arrays["cu"] = None if cu is None else cu[None]
        constant = _constant_gate(self.problem, arrays)
        self.arrays["constant"] = constant
        p = self.problem
        # the forward loop computes the sums of a constant itself, the gradients read them
        if p.scalar and not (p.steady and self.arrays["do"] is None):
            launch = GatePrefixSums(p, self.tiles)
            gate = arrays.get("g")
            self.arrays |= call(launch, gate=gate, constant=constant, cu=self.arrays["cu"])
        if p.key_parts or p.value_parts:
            matrices = tiles.cut_matrices(work.tiles.chunk, p.reverse)
            self.arrays["cut_matrices"] = jnp.asarray(matrices, jnp.bfloat16)
        if p.key_parts:
            self.decay_channels("q", "k", "k")
        if p.value_parts:
            self.decay_channels("do", "v", "v")

    def decay_channels(self, reader: str, source: str, side: str) -> None:
        """Applies the decays per channel of keys (k) or values (v) to the arrays that have them.

        Before there is a do, only the values have decaying channels of values.
        """
        launch = DecayChannels(self.problem, self.tiles, side == "v")
        results = call(
            launch,
            reader=self.arrays[reader],
            source=self.arrays[source],
            gate=self.arrays[f"g{side}"],
            cut_matrices=self.arrays["cut_matrices"],
            cu=self.arrays["cu"],
        )
        names = {"reader_decayed": f"{reader}_decayed", "source_decayed": f"{source}_decayed"}
        names |= {name: f"{name}_{side}" for name in ("pairs", "totals", "halves")}
        self.arrays |= {names[name]: x for name, x in results.items()}

    def run_pass(self, spec: Pass, starts: Any = None) -> dict[str, jax.Array]:
        """Runs one pass of ``chunk_loop``."""
        arrays = self.arrays | {"starts": starts}
        operands = {name: arrays[array] for name, array in spec.operands(self.problem).items()}
        return call(ChunkLoop(self.problem, self.tiles, spec), **operands)

    def segment_starts(self, initial: Any, *, later: bool = False) -> tuple[jax.Array, jax.Array]:
        """Returns the states before all segments and the last state.

        ``later``: gradients of states, from the last segment to the first.
        """
        spec = passes.LATER_SEGMENT_STATES if later else passes.SEGMENT_STATES
        launch = StateScan(self.problem, self.tiles, later)
        scanned = call(launch, **self.run_pass(spec), initial=initial, cu=self.arrays["cu"])
        return scanned["starts"], scanned["final"]

    def compute_output(self, starts: Any) -> jax.Array:
        """Returns o."""
        p, a = self.problem, self.arrays
        if not p.value_parts:
            return self.run_pass(replace(passes.OUTPUT, out=p.out), starts)["out"]
        # through decaying channels of values the output is computed like a gradient, from states
        states = self.run_pass(passes.CHUNK_STATES, starts)["states"]
        launch = ChannelGradient(p, self.tiles, True, (p.out, "", ""))
        return call(launch, source=a["v"], **self.value_channels(), states=states)["dreader"]

    def value_channels(self) -> dict[str, Any]:
        """Returns operands of ``channel_gradient`` over values, besides reader and source."""
        a, suffix = self.arrays, "_decayed" if self.problem.key_parts else ""
        return {
            "reader_other": a[f"q{suffix}"],
            "source_other": a[f"k{suffix}"],
            "gate": a["gv"],
            "halves": a["halves_v"],
            "cut_matrices": a["cut_matrices"],
            "pairs": a.get("pairs_k"),
            "cu": a["cu"],
        }

    def compute_gradients(self, arrays: Arrays, starts: Any, final: Any, dstate: Any) -> Arrays:
        """Returns the gradients of the arguments that a call has.

        ``starts`` and ``final``: states before all segments and the last one; ``dstate``: the
        gradient of the last one.
        """
        p = self.problem
        dstarts, dinitial = self.segment_starts(dstate, later=True)
        # gradients of heads that share a key are added in float32
        shared = "float32" if p.heads != p.kv_heads else ""
        dtypes = {name: shared or str(arrays[name].dtype) for name in ("key", "value")}
        grads = {"initial_state": dinitial}
        if tiles.holds_full_state(p, self.tiles, self.target):
            grads |= self.full_state_gradients(dtypes, starts, final, dstarts)
        else:
            grads |= self.separate_gradients(arrays, dtypes, starts, dstarts)
        return {name: x for name, x in grads.items() if name in arrays}

    def separate_gradients(
        self, arrays: Arrays, dtypes: Mapping[str, str], starts: Any, dstarts: Any
    ) -> Arrays:
        """Returns gradients from a pass for each array; gates' come from states before chunks."""
        p, gated = self.problem, self.gated
        keys, values = bool(p.key_parts), bool(p.value_parts)
        grads: Arrays = {}
        states = dstates = None
        # gradients of arrays that meet through decaying channels come with the gate's
        if keys:
            states = self.run_pass(passes.CHUNK_STATES, starts)["states"]
        else:
            dq = self.run_pass(replace(passes.DQ, out=p.out, states=gated), starts)
            dk = self.run_pass(replace(passes.DK, out=dtypes["key"], states=values), dstarts)
            states, dstates = dq.get("states"), dk.get("states")
            grads |= {"query": dq["out"], "key": self.sum_shared_heads(dk["out"])}
        if not values:
            dv = self.run_pass(replace(passes.DV, out=dtypes["value"], states=gated), dstarts)
            dstates = dv.get("states")
            grads["value"] = self.sum_shared_heads(dv["out"])
        elif keys:
            dstates = self.run_pass(passes.LATER_CHUNK_STATES, dstarts)["states"]
        if keys or values:
            grads |= self.channel_gradients(arrays, dtypes, states, dstates)
        elif gated:
            launch = GateGradient(p, self.tiles)
            operands = self.scalar_operands() | {"states": states, "dstates": dstates}
            grads |= _scalar_gate_gradients(call(launch, **operands)["dgate"])
        return grads

    def full_state_gradients(
        self, dtypes: Mapping[str, str], starts: Any, final: Any, dstarts: Any
    ) -> Arrays:
        """Returns gradients from two loops, and the gate's from one value of every row."""
        p, gated = self.problem, self.gated
        dq = self.run_pass(replace(passes.DQ, out=p.out, dot_with="q" if gated else ""), starts)
        launch = BackwardKv(p, self.tiles, gated, dtypes["key"], dtypes["value"])
        states = {"starts": starts, "final": final} if gated else {}
        results = call(launch, **self.scalar_operands(), dstarts=dstarts, **states)
        dk, dv = (self.sum_shared_heads(results.pop(name)) for name in ("dkey", "dvalue"))
        grads = {"query": dq["out"], "key": dk, "value": dv}
        if gated:
            rows = {name: self.arrays[name] for name in ("gate_totals", "cu")}
            launch = GateGradientRows(p, self.tiles)
            dgate = call(launch, **results, state_dots=dq["state_dots"], **rows)["dgate"]
            grads |= _scalar_gate_gradients(dgate)
        return grads

    def scalar_operands(self) -> dict[str, Any]:
        """Returns the operands of ``ScalarGradientLaunch``."""
        a = self.arrays
        rows = {"query": a["q"], "key": a["k"], "value": a["v"], "dout": a["do"]}
        return rows | {name: a.get(name) for name in (*GATE_SUMS, "cu")}

    def channel_gradients(
        self, arrays: Arrays, dtypes: Mapping[str, str], states: Any, dstates: Any
    ) -> Arrays:
        """Returns gradients of arrays that meet through decaying channels, and of all gates."""
        p, a = self.problem, self.arrays
        grads: Arrays = {}
        states = {"states": states, "dstates": dstates}
        if p.value_parts:
            launch = ChannelGradient(p, self.tiles, True, ("", dtypes["value"], str(a["gv"].dtype)))
            rows = {"reader": a["do"], "source": a["v"], "totals": a.get("totals_k")}
            results = call(launch, **rows, **self.value_channels(), **states)
            grads["gv"] = results["dgate"]
            grads["value"] = self.sum_shared_heads(results["dsource"])
        if p.key_parts:
            suffix = "_decayed" if p.value_parts else ""
            launch = ChannelGradient(
                p, self.tiles, False, (p.out, dtypes["key"], str(a["gk"].dtype))
            )
            results = call(
                launch,
                reader=a["q"],
                source=a["k"],
                reader_other=a[f"do{suffix}"],
                source_other=a[f"v{suffix}"],
                gate=a["gk"],
                halves=a["halves_k"],
                cut_matrices=a["cut_matrices"],
                pairs=a.get("pairs_v"),
                totals=a.get("totals_v"),
                cu=a["cu"],
                **states,
            )
            grads |= {"query": results["dreader"], "gk": results["dgate"], "g": results["dgate"]}
            grads["key"] = self.sum_shared_heads(results["dsource"])
        row_gate = jnp.sum(grads["gk" if p.key_parts else "gv"], 3)
        if "g" in arrays and arrays["g"].ndim == 3:
            grads["g"] = row_gate
        return grads | {"g_gamma": jnp.sum(row_gate, (0, 1))}

    def sum_shared_heads(self, x: jax.Array) -> jax.Array:
        """Returns gradients of all heads, added over heads that share a key."""
        p = self.problem
        if p.heads == p.kv_heads:
            return x
        return jnp.sum(x.reshape(*x.shape[:2], p.kv_heads, -1, x.shape[3]), 3)


def decode(work: Work, arrays: Arrays) -> tuple[jax.Array, jax.Array]:
    """Returns o and the final state of a few tokens."""
    p = work.problem
    gates = [arrays[name] for name in ("g", "gk") if name in arrays]
    channels = [x for x in gates if x.ndim == 4]
    cu, state = arrays.get("cu_seqlens"), arrays.get("initial_state")
    results = call(
        DecodeTokens(p, work.tiles, state is not None and state.dtype == jnp.float32),
        query=arrays["query"],
        key=arrays["key"],
        value=arrays["value"],
        constant=_constant_gate(p, arrays),
        gate=next((x for x in gates if x.ndim == 3), None),
        key_gate=_add_gates(channels) if channels else None,
        value_gate=arrays.get("gv"),
        cu=None if cu is None else cu[None],
        initial=state,
    )
    return results["out"], results["final"]


def _scalar_gate_gradients(dgate: jax.Array) -> Arrays:
    """Returns gradients of gates whose sum is one log decay a row and head."""
    return {"g": dgate, "g_gamma": jnp.sum(dgate, (0, 1))}


def _constant_gate(p: Problem, arrays: Arrays) -> jax.Array | None:
    """Returns one log decay a head ``[1, heads]``, None without."""
    gate = arrays.get("decays", arrays.get("g_gamma"))
    if p.slopes:
        gate = jnp.asarray(p.slopes, jnp.float32)
    return None if gate is None else gate[None]


def _channel_gates(p: Problem, arrays: Arrays) -> Arrays:
    """Returns decays per channel of keys and of values.

    One value a row or head is added to the channels of keys if those decay, otherwise of values.
    """
    decays: Arrays = {"gk": None, "gv": arrays.get("gv")}
    if p.scalar:
        return decays
    gates = [arrays[name] for name in ("g", "gk") if name in arrays]
    channels = [x for x in gates if x.ndim == 4]
    constant = _constant_gate(p, arrays)
    others = [] if constant is None else [constant[:, None, :, None]]
    others += [x[..., None] for x in gates if x.ndim == 3]
    if channels:
        decays["gk"] = _add_gates([*channels, *others])
    elif "gv" in arrays:
        decays["gv"] = _add_gates([arrays["gv"], *others])
    return decays


def _add_gates(parts: list[jax.Array]) -> jax.Array:
    """Returns the sum of gates in float32; a single gate keeps its dtype."""
    if len(parts) == 1:
        return parts[0]
    total = parts[0].astype(jnp.float32)
    for part in parts[1:]:
        shape = jnp.broadcast_shapes(total.shape, part.shape)
        total = jnp.broadcast_to(total, shape) + jnp.broadcast_to(part, shape).astype(jnp.float32)
    return total
