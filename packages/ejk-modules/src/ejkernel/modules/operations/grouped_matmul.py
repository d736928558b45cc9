"""A matmul with one right matrix per contiguous group of rows."""

from collections.abc import Mapping, Sequence
from typing import Any, Never

import jax
from jax.sharding import Mesh, PartitionSpec
from jax.typing import DTypeLike

from ejkernel.modules._configs import GroupedMatmulConfig
from ejkernel.modules._op import Operation, flatten
from ejkernel.ops import Platform
from ejkernel.ops.execution.executor import get_default_executor
from ejkernel.types import calls
from ejkernel.types.calls.words import Array, F, I, Weights


def grouped_matmul(
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
    platform: str | Platform | None = None,
    cfg: GroupedMatmulConfig | Mapping[str, Any] | None = None,
    mesh: Mesh | None = None,
    in_specs: Sequence[PartitionSpec | None] | None = None,
    out_specs: PartitionSpec | Sequence[PartitionSpec] | None = None,
    **unknown: Never,
) -> jax.Array:
    """``out[r] = lhs[r] @ rhs[group(r) - group_offset]`` for consecutive runs of rows.

    Group i owns the ``group_sizes[i]`` rows after the rows of group i - 1. Rows of no group, of
    groups outside ``[group_offset, group_offset + groups)``, and past the last group give 0.

    Args:
        lhs: ``[rows, inner]``.
        rhs: ``[groups, inner, columns]``, or ``[groups, columns, inner]`` with transpose_rhs;
            float, or stored as int8 or an 8-bit float (see ``rhs_scale``).
        group_sizes: ``[groups]``, or more groups with ``group_offset``; zeros are legal. A sum
            above ``rows`` is clipped: the last groups then have fewer rows.
        group_offset: first group that ``rhs`` holds; None = 0.
        existing_out: ``[rows, columns]``, added to the result, so that calls with different
            offsets can be chained.
        preferred_element_type: dtype of the result; default ``result_type(lhs, rhs)``, that of
            lhs for 8-bit ``rhs``.
        transpose_rhs: see ``rhs``.
        precision: of the matmul, as in ``jax.lax.dot``.
        rhs_scale: the scale of an 8-bit ``rhs``: a scalar, one per group ``[groups]``, or one per
            column of the result ``[groups, columns]``; None = 1.
        platform, cfg, mesh, in_specs, out_specs: as in :func:`flash_attention`; rows and columns
            may be sharded, the inner axis and the groups may not.

    Returns:
        ``[rows, columns]``, accumulated in float32 or better.

    Raises:
        InvalidArgument: wrong dtype, rank, axis size or inconsistent axes.
        ValueError: negative sizes or offset as Python scalars or numpy arrays; a sharded inner
            or group axis; ``rhs_scale`` with a float ``rhs``.
        NotImplementedError: a gradient of an 8-bit ``rhs`` or of its ``rhs_scale``.
        KernelNotSupported: the forced platform cannot do this call.
        ConfigError: an illegal ``cfg``.

    Differentiable in lhs, rhs and existing_out; an 8-bit ``rhs`` and its scale have no gradient.

    Source: Gale et al. 2022, "MegaBlocks" (arXiv 2211.15841), section 3.
    """
    return get_default_executor()(GroupedMatmul.shared(), **flatten(locals()))


class GroupedMatmul(Operation[GroupedMatmulConfig]):
    spec = calls.GroupedMatmul
    function = staticmethod(grouped_matmul)
