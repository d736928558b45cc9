"""The call of grouped_matmul."""

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from ejkernel.types.arrays import is_eight_bit, result_dtype
from ejkernel.types.calls import drawn, settle
from ejkernel.types.calls.spec import Arguments, Call
from ejkernel.types.calls.words import Array, F, I, Weights


class GroupedMatmul(Call):
    """One matrix per run of rows."""

    name = "grouped_matmul"
    symbolic = (*Call.symbolic, "inner", "columns")
    outputs = ("rows columns",)
    FORWARD_ONLY = (
        "grouped_matmul: rhs of 8-bit numbers is for inference, no gradient goes through it; to "
        "train, give rhs in the dtype of lhs, multiplied by its scale"
    )

    @staticmethod
    def takes(
        lhs: F[Array, "rows inner"],
        rhs: Weights[Array, "groups _ _"],
        group_sizes: I[Array, " all_groups"],
        group_offset: int | I[Array, ""] | I[Array, "1"] | None = None,
        existing_out: F[Array, "rows columns"] | None = None,
        *,
        preferred_element_type: DTypeLike | None = None,
        transpose_rhs: bool = False,
        precision: jax.lax.PrecisionLike = None,
        rhs_scale: float
        | F[Array, ""]
        | F[Array, " groups"]
        | F[Array, "groups columns"]
        | None = None,
    ) -> None: ...

    @classmethod
    def argument_axes(cls, a: Arguments) -> dict[str, str]:
        columns = "columns inner" if a["transpose_rhs"] else "inner columns"
        return {"rhs": "groups " + columns}

    @staticmethod
    def check_values(a: Arguments) -> None:
        settle.check_group_sizes(a)
        settle.integers_to_arrays(a, "group_offset")
        settle.scalars_to_arrays(a, "rhs_scale")

    @staticmethod
    def canonicalise(a: Arguments) -> None:
        settle.groups(a)

    @classmethod
    def localise(cls, a: Arguments, shard: Any) -> None:
        """Each shard of rows has the part of every group that lies in it."""
        if shard.parts("rows") == 1:
            return
        ends = jnp.cumsum(a["group_sizes"].astype(jnp.int32))
        inside = jnp.stack([ends - a["group_sizes"], ends]) - shard.offset("rows")
        inside = jnp.clip(inside, 0, shard.local("rows"))
        a["group_sizes"] = inside[1] - inside[0]

    @classmethod
    def without_work(cls, a: Mapping[str, Any], problem: Any) -> tuple[Any, ...] | None:
        """Zero, or what is added to it, where an axis has no entries."""
        lhs, rhs, existing = a["lhs"], a["rhs"], a["existing_out"]
        if 0 not in (*lhs.shape, *rhs.shape):
            return None
        dtype = a["preferred_element_type"] or result_dtype(lhs.dtype, rhs.dtype)
        columns = rhs.shape[1 if a["transpose_rhs"] else 2]
        zero = jnp.zeros((lhs.shape[0], columns), dtype)
        return (zero if existing is None else existing.astype(dtype),)

    @classmethod
    def samples(cls, a: Mapping[str, Any], rng: np.random.Generator) -> dict[str, Any]:
        """Groups of equal size."""
        rows, groups = a["lhs"].shape[0], a["group_sizes"].shape[0]
        found = {"group_sizes": np.diff(drawn.starts(groups, rows))}
        return found | drawn.normal(a, rng, "rhs", "rhs_scale") if is_eight_bit(a["rhs"]) else found
