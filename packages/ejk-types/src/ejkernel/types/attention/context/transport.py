"""Transports of keys to the queries of other devices, and of their gradients back."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from ejkernel.types.attention.context.ring import Ring, Run, Schedule


class RingTransport:
    """Keys go from device to device; their accumulators follow, one step behind.

    The device's own keys are used first and, in the backward pass, last: the gradients that other
    devices have accumulated come home meanwhile, and are added to its own, which are never sent.
    """

    def __init__(self, ring: Ring, schedule: Schedule, local_keys: Any) -> None:
        self.ring, self.schedule, self.local_keys = ring, schedule, local_keys
        self.own_step = schedule.own_step(ring)

    def runs(self, *, backward: bool = False) -> tuple[Run, ...]:
        """Returns the steps in their order."""
        return Run.split(self.schedule.order(self.ring, backward=backward), self.own_step)

    def start(self, step: int) -> Any:
        """Returns the keys of ``step``, which is the first."""
        return self.ring.shift(self.local_keys, self.schedule.start + step)

    def following(self, visitors: Any, run: Run) -> Any:
        """Sends the keys on and returns those that visit next; none before the device's own."""
        places = self.places_to_next(run)
        return None if places is None else self.ring.shift(visitors, places)

    def places_to_next(self, run: Run) -> int | None:
        """Returns places to the step in which visiting keys are used next; None: there is none."""
        is_before_own = run.after is not None and run.steps[-1] + run.after == self.own_step
        return None if is_before_own else run.after

    def keys(self, visitors: Any, step: Any) -> Any:
        """Returns the keys of this step."""
        return self.local_keys if isinstance(step, int) and step == self.own_step else visitors

    def accumulators(self, sums: Any, run: Run) -> Any:
        """Sends the gradients so far after their keys; in a last step of the device's own, home."""
        return None if run.before is None else self.ring.shift(sums, run.before)

    def exchange(self, visitors: Any, sums: Any, run: Run) -> tuple[Any, Any]:
        """Sends keys and accumulators on; returns the next keys, and the gradients that arrive."""
        return self.following(visitors, run), self.accumulators(sums, run)

    def accumulated(
        self, sums: Any, new: Sequence[jax.Array], step: Any, run: Run, dtypes: Sequence[Any]
    ) -> Any:
        """Adds the gradients of a step; ``dtypes``: of sums that go home or are home."""
        if sums is not None:
            wide = jnp.promote_types(new[0].dtype, jnp.float32)
            new = [a.astype(wide) + b.astype(wide) for a, b in zip(sums, new, strict=True)]
        if self.places_to_next(run) is None:
            new = [x.astype(dtype) for x, dtype in zip(new, dtypes, strict=True)]
        return tuple(new)

    def returned(self, sums: Any, step: int) -> Any:
        """Returns the gradients of this device's own keys, after the last ``step``."""
        return self.ring.shift(sums, -(self.schedule.start + step))


class PackedRingTransport(RingTransport):
    """A ring in which keys and values are one array, and so are their accumulators.

    In a step that sends both, they are one array of bits.

    A compiler may let few transfers be under way at once; one then takes the place of two. Keys and
    values of different dtypes travel apart.
    """

    def __init__(self, ring: Ring, schedule: Schedule, local_keys: Any) -> None:
        super().__init__(ring, schedule, local_keys)
        self.shapes = tuple(x.shape for x in local_keys[:2])

    def packed(self, k: jax.Array, v: jax.Array) -> tuple[jax.Array, ...]:
        """Returns one array of the elements of both, in which each is a contiguous range."""
        if k.dtype != v.dtype:
            return k, v
        return (jnp.concatenate([k.reshape(-1), v.reshape(-1)]),)

    def unpacked(self, arrays: Sequence[jax.Array]) -> tuple[jax.Array, ...]:
        """Returns keys and values, or their gradients."""
        if len(arrays) == 2:
            return tuple(arrays)
        size = math.prod(self.shapes[0])
        parts = arrays[0][:size], arrays[0][size:]
        return tuple(x.reshape(shape) for x, shape in zip(parts, self.shapes, strict=True))

    def start(self, step: int) -> Any:
        """Returns the keys that visit first, packed."""
        k, v, *others = self.local_keys
        return self.ring.shift((self.packed(k, v), *others), self.schedule.start + step)

    def keys(self, visitors: Any, step: Any) -> Any:
        """Returns the keys of this step; the device's own need not be unpacked."""
        if isinstance(step, int) and step == self.own_step:
            return self.local_keys
        packed, *others = visitors
        return (*self.unpacked(packed), *others)

    def accumulators(self, sums: Any, run: Run) -> Any:
        """Sends the gradients so far after their keys."""
        if run.before is None:
            return None
        return self.unpacked(super().accumulators(self.packed(*sums), run))

    def exchange(self, visitors: Any, sums: Any, run: Run) -> tuple[Any, Any]:
        """Sends keys and accumulators on; returns the next keys, and the gradients that arrive."""
        if run.before is None or run.before != self.places_to_next(run):
            return super().exchange(visitors, sums, run)
        packed, *others = visitors
        arrived = self.ring.shift_joined((*packed, *sums), run.before)
        coming = (arrived[: len(packed)], *self.ring.shift(others, run.before))
        return coming, arrived[len(packed) :]

    def returned(self, sums: Any, step: int) -> Any:
        """Returns the gradients of this device's own keys."""
        if step == self.own_step:
            return sums
        return self.unpacked(super().returned(self.packed(*sums), step))


class GatheredTransport:
    """All keys are gathered on every device at once; gradients are summed where the keys belong."""

    def __init__(self, ring: Ring, schedule: Schedule, local_keys: Any) -> None:
        self.ring, self.schedule, self.local_keys = ring, schedule, local_keys

    def runs(self, *, backward: bool = False) -> tuple[Run, ...]:
        """Returns the steps in their order."""
        return Run.split(range(self.schedule.count))

    def start(self, step: int) -> Any:
        """Returns the keys of all devices, with an axis of devices in front."""
        return jax.tree.map(lambda x: jax.lax.all_gather(x, self.ring.axis_name), self.local_keys)

    def following(self, visitors: Any, run: Run) -> Any:
        """Returns the gathered keys, which stay."""
        return visitors

    def keys(self, visitors: Any, step: Any) -> Any:
        """Returns the keys of this step.

        The device's own do not wait until all are gathered.
        """
        if isinstance(step, int) and step == self.schedule.own_step(self.ring):
            return self.local_keys
        source = self.schedule.source(self.ring, step)
        return jax.tree.map(
            lambda x: jax.lax.dynamic_index_in_dim(x, source, 0, keepdims=False), visitors
        )

    def exchange(self, visitors: Any, sums: Any, run: Run) -> tuple[Any, Any]:
        """Returns the gathered keys and the gradients so far, which stay."""
        return visitors, sums

    def accumulated(
        self, sums: Any, new: Sequence[jax.Array], step: Any, run: Run, dtypes: Sequence[Any]
    ) -> Any:
        """Stores the gradients of a step, whose keys are in no other step."""
        if sums is None:
            wide = jnp.promote_types(new[0].dtype, jnp.float32)
            # of the new values, so that they vary over the same mesh axes
            blank = (jnp.where(jnp.isnan(x), 0, x).astype(wide) * 0 for x in new)
            sums = [jnp.broadcast_to(x, (self.ring.size, *x.shape)) for x in blank]
        source = self.schedule.source(self.ring, step)
        return tuple(
            jax.lax.dynamic_update_index_in_dim(total, x.astype(total.dtype), source, 0)
            for total, x in zip(sums, new, strict=True)
        )

    def returned(self, sums: Any, step: int) -> Any:
        """Returns the gradients of this device's own keys, summed over the devices."""
        return tuple(jax.lax.psum_scatter(x, self.ring.axis_name) for x in sums)


TRANSPORTS = {
    "all_gather": GatheredTransport,
    "ring": RingTransport,
    "ring_packed": PackedRingTransport,
}
"""Transports by strategy."""
