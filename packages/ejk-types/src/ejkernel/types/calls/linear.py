"""What the calls of all recurrent operations have in common: a state a batch row or sequence."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax.numpy as jnp
import numpy as np

from ejkernel.types import softmax
from ejkernel.types.calls import settle
from ejkernel.types.calls.spec import Arguments, Call


class LinearCall(Call):
    """A call with an initial state, one per batch row or per packed sequence."""

    asks_for_more = "return_state"
    symbolic = (*Call.symbolic, "sequences_plus_1")

    @staticmethod
    def _state(a: Arguments) -> str:
        return ("batch" if a["cu_seqlens"] is None else "states") + " heads key_dim v_dim"

    @classmethod
    def argument_axes(cls, a: Arguments) -> dict[str, str]:
        return {"initial_state": cls._state(a)}

    @classmethod
    def output_axes(cls, a: Arguments) -> tuple[str, ...]:
        return cls.asked(a, ("batch seq heads v_dim", cls._state(a)))

    @staticmethod
    def check_values(a: Arguments) -> None:
        settle.check_packed(a, "cu_seqlens", "query", axis=1)

    @staticmethod
    def canonicalise(a: Arguments) -> None:
        settle.grouped_heads(a)
        settle.packed(a, "cu_seqlens", "query")
        settle.states(a)
        settle.softmax_options(a)

    @classmethod
    def without_work(cls, a: Mapping[str, Any], problem: Any) -> tuple[Any, ...] | None:
        """Zeros and the initial states where an axis has no entries."""
        (b, s, h, dk), dv, cu = a["query"].shape, a["value"].shape[3], a["cu_seqlens"]
        states = b if cu is None else cu.shape[0] - 1
        if 0 not in (b, s, h, dk, dv, states):
            return None
        table = a["initial_state"]
        if table is None:
            table = jnp.zeros((states, h, dk, dv), jnp.float32)
        return jnp.zeros((b, s, h, dv), a["query"].dtype), table.astype(jnp.float32)

    @classmethod
    def named(cls, outputs: tuple[Any, ...], saved: Any) -> tuple[tuple[Any, ...], Any]:
        """The output, and the states that a gradient starts from."""
        o, *rest = outputs
        return (softmax.named_out(o), *rest), softmax.named_lse(saved)

    @classmethod
    def results(cls, a: Mapping[str, Any], outputs: tuple[Any, ...]) -> Any:
        return outputs if a["return_state"] else outputs[0]

    @classmethod
    def samples(cls, a: Mapping[str, Any], rng: np.random.Generator) -> dict[str, Any]:
        """Gates that decay, sequences of equal length."""
        found = {}
        for name in ("g", "g_gamma", "gk", "gv"):
            gate = a.get(name)
            if gate is not None:
                drawn = -np.abs(rng.standard_normal(gate.shape)) / 16
                found[name] = jnp.asarray(drawn, gate.dtype)
        if a["cu_seqlens"] is not None:
            ends = np.linspace(0, a["query"].shape[1], a["cu_seqlens"].shape[0])
            found["cu_seqlens"] = ends.astype(np.int32)
        return found
