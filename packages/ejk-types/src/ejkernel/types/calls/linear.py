"""The calls of all recurrent operations: one state per batch row or packed sequence."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ejkernel.types.arrays import result_dtype
from ejkernel.types.attention import softmax
from ejkernel.types.calls import canonicalize
from ejkernel.types.calls.layout import Layout
from ejkernel.types.calls.sharding_notes import over_note, size_note
from ejkernel.types.calls.signature import drop_parameters
from ejkernel.types.calls.spec import Arguments, Call
from ejkernel.types.calls.words import Array, F, I, invalid, out_of_range
from ejkernel.types.states.line import Line, LocalSequences
from ejkernel.types.states.recurrence import (
    Decays,
    Passed,
    differentiate_states,
    make_decay_effect,
    run_from_state,
    run_over_devices,
    sum_gates,
)
from ejkernel.types.states.saved import lay_states_along_tokens, read_states, saved_array_types


class LinearCall(Call):
    """A call with an initial state, one per batch row or per packed sequence."""

    symbolic = (*Call.symbolic, "sequences_plus_1")
    sequence_axes = ("seq",)
    passes_states = True

    @classmethod
    def decays(cls, a: Mapping[str, Any]) -> Decays:
        """Returns the log decays of every token."""
        g, gamma = a.get("g"), a.get("g_gamma")
        if gamma is not None:
            gamma = jnp.broadcast_to(gamma[None, None, :, None], (*a["query"].shape[:3], 1))
        if g is not None and g.ndim == 3:
            g = g[..., None]
        return Decays(sum_gates(g, gamma, a.get("gk")), a.get("gv"))

    @classmethod
    def make_effect(
        cls, a: Mapping[str, Any], sequences: LocalSequences, run: Callable[..., Any], dtype: Any
    ) -> Any:
        """Returns what a state that comes from another device changes on this one."""
        return make_decay_effect(a, sequences, dtype, decays=cls.decays(a))

    @classmethod
    def passed_types(cls, a: Mapping[str, Any]) -> dict[tuple[str, ...], Any]:
        """Returns the types of the states that devices of a sequence pass on, by axes."""
        shape = (a["query"].shape[0], cls.num_heads(a), a["key"].shape[3], a["value"].shape[3])
        state = jax.ShapeDtypeStruct(shape, state_dtype(a))
        return {("batch", "heads", "key_dim", "v_dim"): state}

    @classmethod
    def sequence_note(cls, a: Mapping[str, Any], layout: Layout) -> str:
        size, over = size_note(cls.passed_types(a), layout), over_note(layout, cls.sequence_axes)
        return f"states {over}: {size} from device to device in each of a few steps"

    @classmethod
    def share_sequence(
        cls, a: Arguments, shard: Any, run: Callable[[Arguments], Any]
    ) -> tuple[Any, ...]:
        return run_over_devices(a, _sequences(a, shard), run, cls.make_effect)[0]

    @classmethod
    def saved_state_types(cls, a: Mapping[str, Any], devices: int) -> list[tuple[str, Any]]:
        return saved_array_types(cls.passed_types(a).values(), a, devices)

    @classmethod
    def share_and_save(
        cls, a: Arguments, shard: Any, run: Callable[..., Any], saved_states: Sequence[Any]
    ) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
        outputs, passed = run_over_devices(a, _sequences(a, shard), run, cls.make_effect)
        return outputs, lay_states_along_tokens(cls.saved_arrays(passed), saved_states)

    @classmethod
    def saved_arrays(cls, passed: Passed) -> tuple[Any, ...]:
        """Returns the arrays that gradients need, in the order of ``saved_state_types``."""
        return (passed.state,)

    @classmethod
    def restore_passed(
        cls,
        a: Mapping[str, Any],
        s: LocalSequences,
        run: Callable[..., Any],
        saved_states: Sequence[Any],
    ) -> Passed:
        """Returns what gradients need, of which the forward pass has saved a part."""
        state = read_states(saved_states[0], (a["key"].shape[3], a["value"].shape[3]))
        return Passed(state, cls.make_effect(a, s, run, state.dtype))

    @classmethod
    def share_gradients(
        cls,
        arguments: Callable[..., Arguments],
        floats: Sequence[Any],
        shard: Any,
        run: Callable[..., Any],
        saved_states: Sequence[Any],
        cotangents: Sequence[Any],
    ) -> tuple[Any, ...]:
        a = arguments(*floats)
        sequences = _sequences(a, shard)
        passed = cls.restore_passed(a, sequences, run, saved_states)
        do, last_gradients = cotangents
        _, heads, dk, dv = passed.state.shape
        do = do.reshape(*a["query"].shape[:2], heads, dv)
        last_gradients = last_gradients.reshape(-1, heads, dk, dv) if a["return_state"] else None
        state_gradients = differentiate_states(sequences, passed, do, last_gradients)

        def from_state(*floats: Any) -> Any:
            return run_from_state(arguments(*floats), sequences, run, passed.state)

        (o, final), pull_back = jax.vjp(from_state, *floats)
        return pull_back((do.astype(o.dtype), state_gradients.astype(final.dtype)))

    @classmethod
    def num_heads(cls, a: Mapping[str, Any]) -> int:
        """Returns the number of heads that have a state of their own."""
        return a["query"].shape[2]

    @staticmethod
    def _state(a: Arguments) -> str:
        return ("batch" if a["cu_seqlens"] is None else "states") + " heads key_dim v_dim"

    @classmethod
    def argument_axes(cls, a: Arguments) -> dict[str, str]:
        return {"initial_state": cls._state(a)}

    @classmethod
    def output_axes(cls, a: Arguments) -> tuple[str, ...]:
        return cls.select_outputs(a, ("batch seq heads v_dim", cls._state(a)))

    @classmethod
    def canonicalize(cls, a: Arguments) -> None:
        super().canonicalize(a)
        state, cu = a["initial_state"], a["cu_seqlens"]
        n = a["query"].shape[0] if cu is None else cu.shape[0] - 1
        if state is not None and state.shape[0] != n:
            owner = "batch row" if cu is None else "sequence of cu_seqlens"
            legal = f"float[{n}, heads, key_dim, v_dim], one per {owner}"
            raise invalid("initial_state", legal, state)

    @classmethod
    def empty_outputs(cls, a: Mapping[str, Any], problem: Any) -> tuple[Any, ...] | None:
        """Zeros and the initial states where an axis has no entries."""
        (b, s, _, dk), dv, cu = a["query"].shape, a["value"].shape[3], a["cu_seqlens"]
        h = cls.num_heads(a)
        states = b if cu is None else cu.shape[0] - 1
        if 0 not in (b, s, h, dk, dv, states):
            return None
        table = a["initial_state"]
        if table is None:
            table = jnp.zeros((states, h, dk, dv), jnp.float32)
        return jnp.zeros((b, s, h, dv), a["query"].dtype), table.astype(jnp.float32)

    @classmethod
    def name_residuals(cls, outputs: tuple[Any, ...], saved: Any) -> tuple[tuple[Any, ...], Any]:
        """The output, and the states that a gradient starts from."""
        o, *states = outputs
        return (softmax.name_output(o), *states), softmax.name_lse(saved)

    @classmethod
    def samples(cls, a: Mapping[str, Any], rng: np.random.Generator) -> dict[str, Any]:
        """Returns samples whose gates decay."""
        samples = super().samples(a, rng)
        for name in ("g", "g_gamma", "gk", "gv"):
            gate = a.get(name)
            if gate is not None:
                decay = -np.abs(rng.standard_normal(gate.shape)) / 16
                samples[name] = jnp.asarray(decay, gate.dtype)
        return samples


def state_dtype(a: Mapping[str, Any]) -> Any:
    """Returns the dtype in which states accumulate."""
    return result_dtype(a["query"], a["key"], a["value"], jnp.float32)


def _sequences(a: Mapping[str, Any], shard: Any) -> LocalSequences:
    line = Line.of_shard(shard, "seq", reverse=a["reverse"])
    return LocalSequences.of_line(line, a["cu_seqlens"])


class LayerOfShard(int):
    """A layer index that knows which of all heads a shard holds: decays count global heads."""

    heads: int
    first: Any

    @classmethod
    def create(cls, layer_idx: int, heads: int, first: Any) -> "LayerOfShard":
        layer = cls(layer_idx)
        layer.heads, layer.first = heads, first
        return layer


class RecurrentAttention(LinearCall):
    """Linear attention with gates, in its general form."""

    name = "recurrent_attention"
    algorithm = "recurrent"

    @staticmethod
    def signature(
        query: F[Array, "batch seq heads key_dim"],
        key: F[Array, "batch seq kv_heads key_dim"],
        value: F[Array, "batch seq kv_heads v_dim"],
        g: F[Array, "batch seq heads key_dim"] | F[Array, "batch seq heads"] | None = None,
        g_gamma: F[Array, " heads"] | None = None,
        gk: F[Array, "batch seq heads key_dim"] | None = None,
        gv: F[Array, "batch seq heads v_dim"] | None = None,
        initial_state: F[Array, "states heads key_dim v_dim"] | None = None,
        cu_seqlens: I[Array, " sequences_plus_1"] | None = None,
        *,
        softmax_scale: float | None = None,
        reverse: bool = False,
        return_state: bool = False,
    ) -> None: ...


class GLAttention(LinearCall):
    """Gated linear attention: without the gates of keys and of values."""

    name = "gla_attention"
    algorithm = "gla"
    signature = staticmethod(drop_parameters(RecurrentAttention.signature, "gk", "gv"))


class LightningAttention(LinearCall):
    """Linear attention whose decay depends on head and layer."""

    name = "lightning_attention"
    algorithm = "lightning_attn"

    @staticmethod
    def signature(
        query: F[Array, "batch seq heads key_dim"],
        key: F[Array, "batch seq kv_heads key_dim"],
        value: F[Array, "batch seq kv_heads v_dim"],
        initial_state: F[Array, "states heads key_dim v_dim"] | None = None,
        cu_seqlens: I[Array, " sequences_plus_1"] | None = None,
        *,
        layer_idx: int,
        num_layers: int,
        softmax_scale: float | None = None,
        reverse: bool = False,
        return_state: bool = False,
    ) -> None: ...

    @classmethod
    def log_decays(cls, a: Mapping[str, Any]) -> jax.Array:
        """Returns ``g_gamma`` of the heads of a call, which may be a shard's."""
        layer, heads = a["layer_idx"], a["query"].shape[2]
        every, first = heads, 0
        if isinstance(layer, LayerOfShard):
            every, first = layer.heads, layer.first
        slope = -8.0 / max(every, 1) * (1.0 - layer / a["num_layers"])
        head = first + jnp.arange(heads)
        return slope * head.astype(result_dtype(a["query"], jnp.float32))

    @classmethod
    def decays(cls, a: Mapping[str, Any]) -> Decays:
        return super().decays({"query": a["query"], "g_gamma": cls.log_decays(a)})

    @classmethod
    def canonicalize(cls, a: Arguments) -> None:
        super().canonicalize(a)
        canonicalize.positive(a, "num_layers")
        layers, index = a["num_layers"], a["layer_idx"]
        if not 0 <= index < layers:
            raise out_of_range("layer_idx", f"0 <= layer_idx < num_layers = {layers}", index)
