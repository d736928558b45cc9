"""Route: the platform, hardware and mesh that a caller requests."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
from jax.sharding import PartitionSpec

from ejkernel.ops.errors import InvalidArgument
from ejkernel.ops.platforms import Platform

EXECUTOR_KEYWORDS = ("cfg", "platform", "mesh", "in_specs", "out_specs")
"""Keywords that belong to the executor, not to the kernel."""


@dataclass(frozen=True)
class Route:
    """The platform, hardware and mesh that a caller requests; None leaves the choice open.

    Attributes:
        platform: the platform that runs it.
        backend: the hardware that the implementation is for, as a config names it.
        mesh, in_specs, out_specs: the mesh over which it is distributed, and how.
        device: fingerprint of the device it is meant for.
        batch_invariant: whether the bits of a sequence may not depend on the batch.
        sequence_axes: of the call of one shard: the mesh axes over which devices share the
            sequence; () where each has all of it.
    """

    platform: Platform | None = None
    backend: str | None = None
    mesh: Any = None
    in_specs: Any = None
    out_specs: Any = None
    device: str | None = None
    batch_invariant: bool = False
    sequence_axes: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        checked_mesh(self.mesh)
        _check_specs("in_specs", self.in_specs, "a sequence of PartitionSpec or None")
        if not isinstance(self.out_specs, PartitionSpec):
            _check_specs("out_specs", self.out_specs, "PartitionSpec or a sequence of them")

    @property
    def placement(self) -> tuple[Any, Any, Any]:
        """The mesh, in_specs and out_specs."""
        return self.mesh, self.in_specs, self.out_specs

    @property
    def distributed(self) -> bool:
        """Returns whether a mesh or specs were given."""
        return self.placement != (None, None, None)

    @property
    def mesh_axes(self) -> tuple[tuple[str, int], ...]:
        """Names and sizes of the axes of the mesh; empty without one."""
        return () if self.mesh is None else tuple(self.mesh.shape.items())

    def info(self) -> Mapping[str, Any]:
        """The route by names, as ``Invocation.info`` shows it."""
        shown: dict[str, Any] = {
            "requested_platform": None if self.platform is None else self.platform.value
        }
        if self.backend is not None:
            shown["requested_backend"] = self.backend
        if self.distributed:
            shown |= {"mesh": self.mesh, "in_specs": self.in_specs, "out_specs": self.out_specs}
        if self.mesh is not None:
            shown["mesh_axes"] = self.mesh_axes
        if self.device is not None:
            shown["device_fingerprint"] = self.device
        if self.batch_invariant:
            shown["batch_invariant"] = True
        if self.sequence_axes:
            shown["sequence_axes"] = self.sequence_axes
        return shown


def _check_specs(argument: str, specs: Any, legal: str) -> None:
    """Raises InvalidArgument unless specs are None or a sequence of specs and None."""
    if specs is None:
        return
    if isinstance(specs, (PartitionSpec, str)) or not isinstance(specs, Sequence):
        raise InvalidArgument(f"{argument}: expected {legal}, given {specs!r}")
    for index, spec in enumerate(specs):
        if not isinstance(spec, (PartitionSpec, type(None))):
            text = f"{argument}[{index}]: expected PartitionSpec or None, given {spec!r}"
            raise InvalidArgument(text)


def checked_mesh(mesh: Any) -> Any:
    """Returns ``mesh``; InvalidArgument for what is neither a mesh nor None."""
    if not isinstance(mesh, (jax.sharding.Mesh, jax.sharding.AbstractMesh, type(None))):
        raise InvalidArgument(f"mesh: expected jax.sharding.Mesh, given {mesh!r}")
    return mesh


def specs_key(specs: Any) -> Any:
    """Partition specs as a hashable; InvalidArgument for a dict or a set."""
    if not isinstance(specs, (list, Hashable)):
        legal = "a sequence of PartitionSpec or None"
        raise InvalidArgument(f"in_specs, out_specs: expected {legal}, given {specs!r}")
    return tuple(specs) if isinstance(specs, list) else specs
