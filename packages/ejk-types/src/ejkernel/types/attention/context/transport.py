"""Transports of keys to the queries of other devices, and of their gradients back."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from ejkernel.types.attention.context.ring import Ring, Schedule, StepRange
from ejkernel.types.collectives import count_words, join_bits, rows_of_bits, split_bits


def rows_of_keys(keys: Any, rows: slice) -> Any:
    """Returns rows of keys and values, and the arrays of masks of all their rows."""
    k, v, *others = keys
    return k[:, rows], v[:, rows], *others


class Transport:
    """The keys of a pass and the steps in which a device uses them."""

    def __init__(
        self, ring: Ring, schedule: Schedule, local_keys: Any, *, backward: bool = False
    ) -> None:
        self.ring, self.schedule, self.local_keys = ring, schedule, local_keys
        self.local_step, self.backward = schedule.local_step(ring), backward

    def is_local(self, step: Any) -> bool:
        """Returns whether a step uses the device's own keys; no loop holds that step."""
        return isinstance(step, int) and step == self.local_step

    def stored(self, visitors: Any, step: Any) -> Any:
        """Returns the arrays that ``keys`` reads in this step; its own keys wait for no others."""
        return self.local_keys if self.is_local(step) else visitors


class RingTransport(Transport):
    """Keys go from device to device; their accumulators follow, one step behind.

    The device's own keys are used first and, in the backward pass, last: the gradients that other
    devices have accumulated come home meanwhile, and are added to its own, which are never sent.
    """

    def step_ranges(self) -> tuple[StepRange, ...]:
        """Returns the steps in their order."""
        return StepRange.split(
            self.schedule.order(self.ring, backward=self.backward), self.local_step
        )

    def start(self, step: int, after: Any = None) -> Any:
        """Returns the keys of ``step``, the first that has visitors.

        ``after``: an array that they wait for. A compiler may not then take what the forward pass
        has sent or packed, and keep it until the backward pass, of every layer.
        """
        keys = self.local_keys
        if after is not None:
            keys, _ = jax.lax.optimization_barrier((keys, after))
        return self.ring.shift(self.to_send(keys), self.schedule.start + step)

    def to_send(self, keys: Any) -> Any:
        """Returns the device's own keys as they travel."""
        return keys

    def send_on(self, visitors: Any, span: StepRange) -> Any:
        """Sends the keys on and returns those that visit next; none before the device's own."""
        places = self.places_to_next(span)
        return None if places is None else self.ring.shift(visitors, places)

    def places_to_next(self, span: StepRange) -> int | None:
        """Returns places to the step in which visiting keys are used next; None: there is none."""
        is_before_local = (
            span.hops_after is not None and span.steps[-1] + span.hops_after == self.local_step
        )
        return None if is_before_local else span.hops_after

    def keys(self, stored: Any, step: Any, rows: slice) -> Any:
        """Returns rows of the keys of this step, and their arrays of masks, of all rows."""
        return rows_of_keys(stored, rows)

    def exchange(self, visitors: Any, accumulators: Any, span: StepRange) -> tuple[Any, Any, Any]:
        """Sends the gradients so far after their keys; in a last step of the own, home.

        Returns the visitors, which may have gone to other memory, the keys that visit next where
        they have been sent too, and the gradients that arrive.
        """
        arriving = (
            None
            if span.hops_before is None
            else self.send_accumulators(accumulators, span.hops_before)
        )
        return visitors, None, arriving

    def send_accumulators(self, accumulators: Any, places: int) -> Any:
        """Sends gradients of keys."""
        return self.ring.shift(accumulators, places)

    def accumulate(
        self,
        accumulators: Any,
        new: Sequence[jax.Array],
        step: Any,
        span: StepRange,
        dtypes: Sequence[Any],
    ) -> Any:
        """Adds the gradients of a step; ``dtypes``: of accumulators that go home or are home."""
        if accumulators is not None:
            wide = jnp.promote_types(new[0].dtype, jnp.float32)
            new = [a.astype(wide) + b.astype(wide) for a, b in zip(accumulators, new, strict=True)]
        if self.places_to_next(span) is None:
            new = [x.astype(dtype) for x, dtype in zip(new, dtypes, strict=True)]
        return tuple(new)

    def collect(self, accumulators: Any, step: int) -> Any:
        """Returns the gradients of this device's own keys, after the last ``step``."""
        return self.send_accumulators(accumulators, -(self.schedule.start + step))


class PackedRingTransport(RingTransport):
    """A ring in which keys and values are one array, and so are their accumulators.

    A compiler may let few transfers be under way at once; one then takes the place of two, and in a
    step that sends keys and accumulators, of four. The array that travels begins with keys and
    values. Kernels read them in it, in branches too: an operand of a conditional that is a slice
    would be a copy.
    """

    @property
    def local_kv(self) -> tuple[jax.Array, jax.Array]:
        """The device's own keys and values."""
        k, v, *_ = self.local_keys
        return k, v

    def to_send(self, keys: Any) -> Any:
        """Returns the device's own keys and values as one array, and the arrays of masks."""
        k, v, *others = keys
        return (join_bits((k, v)), *others)

    def send_on(self, visitors: Any, span: StepRange) -> Any:
        """Sends the keys on, without accumulators that came with them."""
        if self.places_to_next(span) is None:
            return None
        return super().send_on(self._without_accumulators(visitors), span)

    def _kv_words(self, packed: jax.Array) -> jax.Array:
        """Returns the words of keys and values, without accumulators."""
        return packed[: count_words(self.local_kv, packed.dtype)]

    def _without_accumulators(self, visitors: Any) -> Any:
        packed, *others = visitors
        return (self._kv_words(packed), *others)

    def keys(self, stored: Any, step: Any, rows: slice) -> Any:
        """Returns rows of the keys of this step; the device's own are not packed."""
        if self.is_local(step):
            return super().keys(stored, step, rows)
        packed, *others = stored
        return (*rows_of_bits(packed, self.local_kv, rows), *others)

    def exchange(self, visitors: Any, accumulators: Any, span: StepRange) -> tuple[Any, Any, Any]:
        """Sends keys and accumulators on; see ``RingTransport.exchange``."""
        if span.hops_before is None or span.hops_before != self.places_to_next(span):
            if visitors is not None:
                # a copy of the keys, else accumulators that have been added would stay with them
                visitors = self._without_accumulators(visitors)
            return super().exchange(visitors, accumulators, span)
        packed, *others = visitors
        packed = join_bits((self._kv_words(packed), *accumulators))
        next_visitors = self.ring.shift((packed, *others), span.hops_before)
        arriving = split_bits(
            next_visitors[0][count_words(self.local_kv, packed.dtype) :], accumulators
        )
        if len(span.steps) > 1:
            # a loop carries what the first step has sent: keys alone
            words, *others = next_visitors
            next_visitors = (join_bits(split_bits(words, self.local_kv)), *others)
        return (packed, *others), next_visitors, arriving

    def send_accumulators(self, accumulators: Any, places: int) -> Any:
        """Sends gradients of keys as one array."""
        if places % self.ring.size == 0:
            return accumulators
        return split_bits(self.ring.shift(join_bits(accumulators), places), accumulators)


class GatheredTransport(Transport):
    """All keys are gathered on every device at once; gradients are summed where the keys belong."""

    def step_ranges(self) -> tuple[StepRange, ...]:
        """Returns the steps in their order."""
        return StepRange.split(range(self.schedule.count))

    def start(self, step: int, after: Any = None) -> Any:
        """Returns the keys of all devices, with an axis of devices in front."""
        return jax.tree.map(lambda x: jax.lax.all_gather(x, self.ring.axis_name), self.local_keys)

    def send_on(self, visitors: Any, span: StepRange) -> Any:
        """Returns the gathered keys, which stay."""
        return visitors

    def keys(self, stored: Any, step: Any, rows: slice) -> Any:
        """Returns rows of the keys of this step."""
        if not self.is_local(step):
            source = self.schedule.source(self.ring, step)
            stored = jax.tree.map(
                lambda x: jax.lax.dynamic_index_in_dim(x, source, 0, keepdims=False), stored
            )
        return rows_of_keys(stored, rows)

    def exchange(self, visitors: Any, accumulators: Any, span: StepRange) -> tuple[Any, Any, Any]:
        """Returns the gathered keys and the gradients so far, which stay."""
        return visitors, None, accumulators

    def accumulate(
        self,
        accumulators: Any,
        new: Sequence[jax.Array],
        step: Any,
        span: StepRange,
        dtypes: Sequence[Any],
    ) -> Any:
        """Stores the gradients of a step, whose keys are in no other step."""
        if accumulators is None:
            wide = jnp.promote_types(new[0].dtype, jnp.float32)
            # of the new values, so that they vary over the same mesh axes
            blank = (jnp.where(jnp.isnan(x), 0, x).astype(wide) * 0 for x in new)
            accumulators = [jnp.broadcast_to(x, (self.ring.size, *x.shape)) for x in blank]
        source = self.schedule.source(self.ring, step)
        return tuple(
            jax.lax.dynamic_update_index_in_dim(total, x.astype(total.dtype), source, 0)
            for total, x in zip(accumulators, new, strict=True)
        )

    def collect(self, accumulators: Any, step: int) -> Any:
        """Returns the gradients of this device's own keys, summed over the devices."""
        return tuple(jax.lax.psum_scatter(x, self.ring.axis_name) for x in accumulators)


TRANSPORTS = {
    "all_gather": GatheredTransport,
    "ring": RingTransport,
    "ring_packed": PackedRingTransport,
}
"""Transports by strategy."""
