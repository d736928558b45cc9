"""The call of gated_delta_rule."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ejkernel.types.calls.linear import LinearCall, state_dtype
from ejkernel.types.calls.spec import Arguments
from ejkernel.types.calls.words import Array, F, I, invalid
from ejkernel.types.states.line import LocalSequences
from ejkernel.types.states.recurrence import Effect, Passed, make_delta_effect
from ejkernel.types.states.saved import read_states


class GatedDeltaRule(LinearCall):
    """Linear attention that replaces what a key reads instead of adding to it.

    ``heads`` counts value heads; several of them may share a query and key head.
    """

    name = "gated_delta_rule"

    @staticmethod
    def signature(
        query: F[Array, "batch seq kv_heads key_dim"],
        key: F[Array, "batch seq kv_heads key_dim"],
        value: F[Array, "batch seq heads v_dim"],
        g: F[Array, "batch seq heads"] | F[Array, "batch seq heads key_dim"] | None = None,
        beta: F[Array, "batch seq heads"] | None = None,
        initial_state: F[Array, "states heads key_dim v_dim"] | None = None,
        cu_seqlens: I[Array, " sequences_plus_1"] | None = None,
        *,
        softmax_scale: float | None = None,
        normalize_qk: bool = False,
        reverse: bool = False,
        return_state: bool = False,
    ) -> None: ...

    @classmethod
    def num_heads(cls, a: Mapping[str, Any]) -> int:
        return a["value"].shape[2]

    @classmethod
    def make_effect(
        cls, a: Mapping[str, Any], sequences: LocalSequences, run: Callable[..., Any], dtype: Any
    ) -> Any:
        return make_delta_effect(a, sequences, run, dtype)

    @classmethod
    def passed_types(cls, a: Mapping[str, Any]) -> dict[tuple[str, ...], Any]:
        """States, and their transitions."""
        b, heads, width = a["key"].shape[0], cls.num_heads(a), a["key"].shape[3]
        transition = jax.ShapeDtypeStruct((b, heads, width, width), state_dtype(a))
        return super().passed_types(a) | {("batch", "heads", "key_dim", "key_dim"): transition}

    @classmethod
    def saved_state_types(cls, a: Mapping[str, Any], devices: int) -> list[tuple[str, Any]]:
        """States, transitions, and the queries that have gone through the steps of a device."""
        types, q, heads = super().saved_state_types(a, devices), a["query"], cls.num_heads(a)
        shape = (*q.shape[:2], heads, q.shape[3])
        queries = ("batch seq heads key_dim", jax.ShapeDtypeStruct(shape, q.dtype))
        return [*types, queries] if types else []

    @classmethod
    def saved_arrays(cls, passed: Passed) -> tuple[Any, ...]:
        return passed.state, passed.effect.transition, passed.effect.queries

    @classmethod
    def restore_passed(
        cls,
        a: Mapping[str, Any],
        s: LocalSequences,
        run: Callable[..., Any],
        saved_states: Sequence[Any],
    ) -> Passed:
        width = a["key"].shape[3]
        state = read_states(saved_states[0], (width, a["value"].shape[3]))
        transition = read_states(saved_states[1], (width, width))
        queries = saved_states[2].astype(state.dtype)
        return Passed(state, Effect.of_delta_rule(queries, transition, a["value"]))

    @classmethod
    def canonicalize(cls, a: Arguments) -> None:
        super().canonicalize(a)
        heads, kv_heads = cls.num_heads(a), a["key"].shape[2]
        if heads % kv_heads if kv_heads else heads:
            legal = f"a multiple of the {kv_heads} query and key heads, not {heads} heads"
            raise invalid("value", legal, a["value"])

    @classmethod
    def samples(cls, a: Mapping[str, Any], rng: np.random.Generator) -> dict[str, Any]:
        """Returns samples with keys of about unit length, so that the states stay bounded."""
        samples = super().samples(a, rng)
        for name in ("query", "key"):
            x = a[name]
            entries = rng.standard_normal(x.shape) * max(x.shape[-1], 1) ** -0.5
            samples[name] = jnp.asarray(entries, x.dtype)
        beta = a.get("beta")
        if beta is not None:
            samples["beta"] = jnp.asarray(rng.random(beta.shape), beta.dtype)
        return samples
