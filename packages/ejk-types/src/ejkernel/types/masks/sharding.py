"""The layout of a mask's arrays on a mesh."""

from __future__ import annotations

from typing import Any, NamedTuple

from jax.sharding import PartitionSpec

from ejkernel.types.masks.fields import ARRAYS, AxisName, MaskFields


class MaskSharding(NamedTuple):
    """A PartitionSpec for each array field of a MaskInfo, None for absent fields. A pytree."""

    attention_mask: PartitionSpec | None = None
    q_segment_ids: PartitionSpec | None = None
    kv_segment_ids: PartitionSpec | None = None
    q_positions: PartitionSpec | None = None
    kv_positions: PartitionSpec | None = None


def _present(name: AxisName, mesh: Any) -> AxisName:
    """The part of an axis name that the mesh has."""
    names = (name,) if isinstance(name, str) else name or ()
    mesh_axes = tuple(n for n in names if n in mesh.axis_names)
    return mesh_axes if len(mesh_axes) > 1 else (mesh_axes[0] if mesh_axes else None)


def mask_shardings(mask: MaskFields, sequence_parallel: bool, mesh: Any) -> MaskSharding:
    """Batch, heads and (``sequence_parallel``) sequence axes; axes of size 1 are replicated."""
    batch = _present(mask.batch_axis_name, mesh)
    heads = _present(mask.qheads_axis_name, mesh)
    sequence = _present(mask.sequence_axis_name, mesh) if sequence_parallel else None

    def spec(x: Any, *names: AxisName) -> PartitionSpec | None:
        if x is None:
            return None
        return PartitionSpec(*(None if x.shape[i] == 1 else n for i, n in enumerate(names)))

    def tokens(x: Any) -> PartitionSpec | None:
        axes = (batch, sequence) if x is None or x.ndim == 2 else (batch, heads, sequence)
        return spec(x, *axes)

    return MaskSharding(
        spec(mask.attention_mask, batch, heads, sequence, None),
        *(tokens(getattr(mask, name)) for name in ARRAYS[1:]),
    )


def empty_sharding(mask: MaskFields) -> MaskSharding:
    """Every present array replicated."""
    return MaskSharding(
        *(None if getattr(mask, name) is None else PartitionSpec() for name in ARRAYS)
    )
