"""What the calls of all recurrent operations have in common: a state a batch row or sequence."""

from __future__ import annotations

from ejkernel.types.calls import settle
from ejkernel.types.calls.spec import Arguments, Call


class LinearCall(Call):
    """A call with an initial state, one per batch row or per packed sequence."""

    @staticmethod
    def _state(a: Arguments) -> str:
        return ("batch" if a["cu_seqlens"] is None else "states") + " heads key_dim v_dim"

    @classmethod
    def argument_axes(cls, a: Arguments) -> dict[str, str]:
        return {"initial_state": cls._state(a)}

    @classmethod
    def output_axes(cls, a: Arguments) -> tuple[str, ...]:
        out = ("batch seq heads v_dim",)
        return (*out, cls._state(a)) if a["return_state"] else out

    @staticmethod
    def check_values(a: Arguments) -> None:
        settle.check_packed(a, "cu_seqlens", "query", axis=1)

    @staticmethod
    def canonicalise(a: Arguments) -> None:
        settle.grouped_heads(a)
        settle.packed(a, "cu_seqlens", "query")
        settle.states(a)
        settle.softmax_options(a)
