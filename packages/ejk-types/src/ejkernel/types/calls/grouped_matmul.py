"""The call of grouped_matmul."""

import jax
from jax.typing import DTypeLike

from ejkernel.types.calls import settle
from ejkernel.types.calls.spec import Arguments, Call
from ejkernel.types.calls.words import Array, F, I


class GroupedMatmul(Call):
    """One matrix per run of rows."""

    name = "grouped_matmul"
    outputs = ("rows columns",)

    @staticmethod
    def takes(
        lhs: F[Array, "rows inner"],
        rhs: F[Array, "groups _ _"],
        group_sizes: I[Array, " all_groups"],
        group_offset: int | I[Array, ""] | I[Array, "1"] | None = None,
        existing_out: F[Array, "rows columns"] | None = None,
        *,
        preferred_element_type: DTypeLike | None = None,
        transpose_rhs: bool = False,
        precision: jax.lax.PrecisionLike = None,
    ) -> None: ...

    @classmethod
    def argument_axes(cls, a: Arguments) -> dict[str, str]:
        columns = "columns inner" if a["transpose_rhs"] else "inner columns"
        return {"rhs": "groups " + columns}

    @staticmethod
    def check_values(a: Arguments) -> None:
        settle.check_group_sizes(a)
        settle.integers_to_arrays(a, "group_offset")

    @staticmethod
    def canonicalise(a: Arguments) -> None:
        settle.groups(a)
