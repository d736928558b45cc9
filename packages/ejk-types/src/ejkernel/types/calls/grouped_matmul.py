"""The call of grouped_matmul."""

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from ejkernel.types.arrays import is_eight_bit, result_dtype
from ejkernel.types.calls import canonicalize, sample_inputs, values
from ejkernel.types.calls.spec import Arguments, Call
from ejkernel.types.calls.words import Array, F, I, Weights, invalid, out_of_range
from ejkernel.types.problems.grouped_matmul import GroupedProblem
from ejkernel.types.problems.grouped_passes import fold_groups


class GroupedMatmul(Call):
    """A matmul with one right matrix per contiguous group of rows."""

    name = "grouped_matmul"
    outputs = ("rows columns",)

    @staticmethod
    def signature(
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
        columns = "columns inner" if a["transpose_rhs"] is True else "inner columns"
        return {"rhs": "groups " + columns}

    @classmethod
    def check_values(cls, a: Arguments) -> None:
        """Sizes and the first group are not negative; a sum above the rows is clipped later."""
        sizes = values.concrete_indices(a["group_sizes"])
        if sizes is not None:
            values.check_entries("group_sizes", sizes, sizes < 0, "a size >= 0")
        first = values.concrete_value(a["group_offset"])
        if first is not None and first.size == 1 and first.dtype.kind in "iu":
            value = int(first.reshape(()))
            sizes, rhs = (getattr(a[name], "shape", ()) for name in ("group_sizes", "rhs"))
            legal = sizes[0] - rhs[0] if sizes and rhs else None
            if value < 0 or (legal is not None and legal >= 0 and value > legal):
                inside = f"0 to {legal}, so that rhs lies inside group_sizes"
                raise out_of_range("group_offset", inside, value)
        values.integer_to_array(a, "group_offset")

    @classmethod
    def check_contents(cls, a: Arguments) -> None:
        """The groups end inside the rows of lhs."""
        total, rows = int(a["group_sizes"].sum(dtype=np.int64)), a["lhs"].shape[0]
        if total > rows:
            raise out_of_range("sum(group_sizes)", f"at most the {rows} rows of lhs", total)

    @classmethod
    def canonicalize(cls, a: Arguments) -> None:
        """Shapes that fit each other, and the dtype of the output."""
        canonicalize.precision(a)
        lhs, rhs, out, scale = (a[n] for n in ("lhs", "rhs", "existing_out", "rhs_scale"))
        inner, columns = rhs.shape[1:][::-1] if a["transpose_rhs"] else rhs.shape[1:]
        if lhs.shape[1] != inner:
            axis = 2 if a["transpose_rhs"] else 1
            raise invalid("rhs", f"axis {axis} equal to the inner axis {lhs.shape[1]} of lhs", rhs)
        total, groups = a["group_sizes"].shape[0], rhs.shape[0]
        if a["group_offset"] is None and total != groups:
            raise invalid("group_sizes", f"int[{groups}], one per matrix of rhs", a["group_sizes"])
        if total < groups:
            raise invalid("group_sizes", f"at least the {groups} groups of rhs", a["group_sizes"])
        if out is not None and out.shape != (lhs.shape[0], columns):
            raise invalid("existing_out", f"float[{lhs.shape[0]}, {columns}]", out)
        dtype = a["preferred_element_type"]
        if dtype is not None:
            a["preferred_element_type"] = canonicalize.float_dtype("preferred_element_type", dtype)
        canonicalize.scalar_index(a, "group_offset")
        if scale is None:
            return
        if scale.shape not in ((), (groups,), (groups, columns)):
            legal = f"float[], float[{groups}] or float[{groups}, {columns}]"
            raise invalid("rhs_scale", legal, scale)
        if not is_eight_bit(rhs):
            raise ValueError(
                f"rhs_scale: given with rhs of {rhs.dtype}; scales belong to int8 and 8-bit float "
                "matrices, others hold their scale themselves"
            )

    @classmethod
    def constant_arguments(cls, a: Mapping[str, Any]) -> Mapping[str, str]:
        """8-bit matrices and their scale."""
        if not is_eight_bit(a["rhs"]):
            return {}
        constants = {"rhs": "8-bit matrices have", "rhs_scale": "the scale of 8-bit matrices has"}
        return {
            name: f"grouped_matmul: {name}: {subject} no gradient, lhs and existing_out have; to "
            "train the matrices, give rhs in the dtype of lhs, multiplied by its scale"
            for name, subject in constants.items()
        }

    @classmethod
    def to_shard(cls, a: Arguments, shard: Any) -> None:
        """Each shard of rows has the part of every group in it, each shard of groups its own."""
        if shard.parts("groups") > 1:
            first, before = a["group_offset"], shard.offset("groups")
            a["group_offset"] = before if first is None else first + before
            if a["existing_out"] is not None:  # a term of one device's
                is_first = shard.index("groups") == 0
                a["existing_out"] = jnp.where(is_first, a["existing_out"], 0)
        if shard.parts("rows") == 1:
            return
        ends = jnp.cumsum(a["group_sizes"].astype(jnp.int32))
        inside = jnp.stack([ends - a["group_sizes"], ends]) - shard.offset("rows")
        inside = jnp.clip(inside, 0, shard.local("rows"))
        a["group_sizes"] = inside[1] - inside[0]

    @classmethod
    def fold_batch(
        cls, problem: GroupedProblem, size: int, operands: Mapping[str, Any],
        is_batched: Mapping[str, bool],
    ) -> tuple[GroupedProblem, dict[str, Any]] | None:  # fmt: skip
        """Returns ``size`` calls as one of more groups, None if those are too many."""
        return fold_groups(problem, size, operands, is_batched)

    @classmethod
    def empty_outputs(cls, a: Mapping[str, Any], problem: Any) -> tuple[Any, ...] | None:
        """Returns zeros, or ``existing_out``, where an axis has no entries."""
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
        samples = {"group_sizes": np.diff(sample_inputs.split_evenly(groups, rows))}
        stored = ("rhs", "rhs_scale") if is_eight_bit(a["rhs"]) else ()
        return samples | sample_inputs.draw_normal(a, rng, stored)
