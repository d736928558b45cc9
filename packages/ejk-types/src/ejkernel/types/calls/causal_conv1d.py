"""The call of causal_conv1d."""

from collections.abc import Callable, Mapping
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np

from ejkernel.types.calls import canonicalize, sample_inputs, values
from ejkernel.types.calls.layout import Layout
from ejkernel.types.calls.sharding_notes import over_note, size_note
from ejkernel.types.calls.spec import Arguments, Call
from ejkernel.types.calls.words import Array, F, I, invalid
from ejkernel.types.states.convolution import convolve_over_devices
from ejkernel.types.states.line import Line

MIN_WIDTH, MAX_WIDTH = 2, 8


class CausalConv1D(Call):
    """A short convolution over the tokens of each channel, with the state that decoding needs."""

    name = "causal_conv1d"

    @staticmethod
    def signature(
        x: F[Array, "batch seq channels"],
        weight: F[Array, "channels width"],
        bias: F[Array, " channels"] | None = None,
        initial_state: F[Array, "states channels history"] | None = None,
        cu_seqlens: I[Array, " sequences_plus_1"] | None = None,
        *,
        activation: Literal["silu"] | None = None,
        return_state: bool = False,
    ) -> None: ...

    symbolic = (*Call.symbolic, "sequences_plus_1")
    sequence_axes = ("seq",)
    passes_states = True

    @staticmethod
    def _state(a: Mapping[str, Any]) -> str:
        return ("batch" if a["cu_seqlens"] is None else "states") + " channels history"

    @staticmethod
    def state_shape(a: Mapping[str, Any]) -> tuple[int, int, int]:
        """Returns the shape of the states: one per batch row, or per sequence of cu_seqlens."""
        (b, _, c), cu = a["x"].shape, a["cu_seqlens"]
        return b if cu is None else cu.shape[0] - 1, c, a["weight"].shape[1] - 1

    @classmethod
    def argument_axes(cls, a: Arguments) -> dict[str, str]:
        return {"initial_state": cls._state(a)}

    @classmethod
    def output_axes(cls, a: Arguments) -> tuple[str, ...]:
        return cls.select_outputs(a, ("batch seq channels", cls._state(a)))

    @classmethod
    def check_values(cls, a: Arguments) -> None:
        values.check_packed(a, "cu_seqlens", "x")

    @classmethod
    def canonicalize(cls, a: Arguments) -> None:
        """Check that width, batch and state agree."""
        x, weight, state, packed = a["x"], a["weight"], a["initial_state"], a["cu_seqlens"]
        if not MIN_WIDTH <= weight.shape[1] <= MAX_WIDTH:
            legal = f"float[channels, width] with width {MIN_WIDTH} to {MAX_WIDTH}"
            raise invalid("weight", legal, weight)
        canonicalize.at_least_one(a, "cu_seqlens")
        if packed is not None and x.shape[0] != 1:
            raise invalid("x", "batch 1 with cu_seqlens", x)
        expected = cls.state_shape(a)
        if state is not None and state.shape != expected:
            owner = "batch row" if packed is None else "sequence of cu_seqlens"
            legal = f"float{list(expected)}, the width - 1 tokens before each {owner}"
            raise invalid("initial_state", legal, state)

    @classmethod
    def sequence_note(cls, a: Mapping[str, Any], layout: Layout) -> str:
        (b, _, c), history = a["x"].shape, a["weight"].shape[1] - 1
        state = jax.ShapeDtypeStruct((b, c, history), a["x"].dtype)
        size = size_note({("batch", "channels", "history"): state}, layout)
        return f"inputs {over_note(layout, cls.sequence_axes)}: {size} from device to device"

    @classmethod
    def share_sequence(
        cls, a: Arguments, shard: Any, run: Callable[[Arguments], Any]
    ) -> tuple[Any, ...]:
        return convolve_over_devices(a, Line.of_shard(shard, "seq"), run)

    @classmethod
    def empty_outputs(cls, a: Mapping[str, Any], problem: Any) -> tuple[Any, ...] | None:
        """Zeros and the initial states where an axis has no entries."""
        x, state, shape = a["x"], a["initial_state"], cls.state_shape(a)
        if 0 not in (*x.shape, *shape):
            return None
        state = jnp.zeros(shape, x.dtype) if state is None else state.astype(x.dtype)
        return jnp.zeros(x.shape, x.dtype), state

    @classmethod
    def samples(cls, a: Mapping[str, Any], rng: np.random.Generator) -> dict[str, Any]:
        """Packed sequences of equal length."""
        cu = a["cu_seqlens"]
        return (
            {}
            if cu is None
            else {"cu_seqlens": sample_inputs.split_evenly(cu.shape[0] - 1, a["x"].shape[1])}
        )
