"""The ring: the tokens each device holds, the arrays that travel, and the hops needed.

Device r of n holds shard r of every sequence. In step t it works on the keys of device
``(r - start - t) % n``, which have then moved ``start + t`` places along the ring.

Source: Liu et al. 2023, Ring Attention (arXiv 2310.01889), section 3.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ejkernel.types.attention.context.pieces import Cells, Piece
from ejkernel.types.collectives import permute
from ejkernel.types.masks.rules import Rule


@dataclass(frozen=True)
class Ring:
    """A bound mesh axis and how the sequence lies on it.

    zigzag: device r holds chunks r and 2n - 1 - r of 2n; otherwise block r of n.
    """

    axis_name: str
    size: int
    zigzag: bool

    def device_index(self) -> jax.Array:
        """Returns the index of this device, int32 ``[]``."""
        return jax.lax.axis_index(self.axis_name)

    @property
    def chunks(self) -> int:
        """Number of contiguous ranges that a shard has."""
        return 2 if self.zigzag else 1

    def starts(self, device: Any, length: int) -> tuple[tuple[Any, int], ...]:
        """Returns (first index in the sequence, length) of each contiguous range of a shard."""
        if not self.zigzag:
            return ((device * length, length),)
        half = length // 2
        return (device * half, half), ((2 * self.size - 1 - device) * half, half)

    def index(self, device: Any, length: int) -> jax.Array:
        """Returns the index in the sequence of each token of a shard, int32 ``[length]``."""
        ranges = self.starts(device, length)
        return jnp.concatenate([first + jnp.arange(n, dtype=jnp.int32) for first, n in ranges])

    def shift(self, tree: Any, places: int) -> Any:
        """Sends every array ``places`` devices along the ring and returns those that arrive."""
        if places % self.size == 0:
            return tree
        return permute(
            tree, self.axis_name, [(i, (i + places) % self.size) for i in range(self.size)]
        )


@dataclass(frozen=True)
class Schedule:
    """Steps to take: ``count`` of them, the first after a hop of ``start`` places."""

    start: int
    count: int

    def local_step(self, ring: Ring) -> int | None:
        """Returns the step of a device's own keys; None: there is none."""
        step = -self.start % ring.size
        return step if step < self.count else None

    def order(self, ring: Ring, *, backward: bool = False) -> tuple[int, ...]:
        """Returns all steps in the order of a pass.

        That of the device's own keys, which never travel, is the first one, so that the first
        transfer is hidden; in a backward pass it is the last, to hide the gradients' way home.
        """
        local_step = self.local_step(ring)
        others = tuple(step for step in range(self.count) if step != local_step)
        if local_step is None:
            return others
        return (*others, local_step) if backward else (local_step, *others)

    def source(self, ring: Ring, step: Any) -> Any:
        """Returns the device whose keys this device works on in ``step``."""
        return (ring.device_index() - self.start - step) % ring.size

    @classmethod
    def shortest(cls, ring: Ring, rules: Sequence[Rule], q_len: int, kv_len: int) -> Schedule:
        """Returns the fewest consecutive hops that bring every device all keys it may see.

        ``rules`` hold between indices in the whole sequence. A causal rule alone needs every
        hop on the last device; a window needs few.
        """
        n = ring.size
        devices = np.arange(n)
        queries = [(first, first + m - 1) for first, m in ring.starts(devices, q_len)]
        keys = [(first, first + m - 1) for first, m in ring.starts(devices, kv_len)]
        sees = np.zeros((n, n), bool)
        for q_first, q_last in queries:
            for k_first, k_last in keys:
                pair = np.ones((n, n), bool)
                for rule in rules:
                    low, high = rule.key_bounds(q_first)[0], rule.key_bounds(q_last)[1]
                    if low is not None:
                        pair &= k_last[None] >= low[:, None]
                    if high is not None:
                        pair &= k_first[None] <= high[:, None]
                sees |= pair
        hops = [t for t in range(n) if sees[devices, (devices - t) % n].any()]
        if not hops:
            return cls(0, 1)
        # start after the widest gap; a start of 0 needs no hop before the first step
        gaps = [((t - hops[i - 1] - 1) % n, t == 0, t) for i, t in enumerate(hops)]
        gap, _, start = max(gaps)
        return cls(start, n - gap)


@dataclass(frozen=True)
class Plan:
    """Pieces that every device computes in every step, from lengths and index rules alone.

    Attributes:
        schedule: steps to take.
        pieces: the pieces of each step, by device.
        divided: the pieces of the step of a device's own keys by chunk of keys, by device; empty:
            the step is not divided.
    """

    schedule: Schedule
    pieces: tuple[tuple[tuple[Piece, ...], ...], ...]
    divided: tuple[tuple[tuple[Piece, ...], ...], ...] = ()

    @classmethod
    def make(
        cls,
        ring: Ring,
        rules: Sequence[Rule],
        q_len: int,
        kv_len: int,
        *,
        joined: bool = True,
        divides: bool = False,
    ) -> Plan:
        """Returns the plan of shards of ``q_len`` queries and ``kv_len`` keys.

        ``joined``: whether one kernel call may hold several chunks of a shard. ``divides``: whether
        a backward pass may divide the step of a device's own keys.
        """
        schedule = Schedule.shortest(ring, rules, q_len, kv_len)
        banded = tuple(rule for rule in rules if rule.chunk is None)
        sizes = (q_len // ring.chunks, kv_len // ring.chunks)

        def between(device: int, source: int, of_keys: int | None = None) -> tuple[Piece, ...]:
            shifts = tuple(
                tuple(int(q - k) for k, _ in ring.starts(source, kv_len))
                for q, _ in ring.starts(device, q_len)
            )
            return Cells(banded, shifts, *sizes, joined).pieces(of_keys)

        steps = (schedule.start + t for t in range(schedule.count))
        devices = range(ring.size)
        pieces = tuple(
            tuple(between(device, (device - hop) % ring.size) for device in devices)
            for hop in steps
        )
        local_step = schedule.local_step(ring)
        divided: tuple[tuple[tuple[Piece, ...], ...], ...] = ()
        if divides and ring.chunks > 1 and local_step is not None and schedule.count > 2:
            chunks = range(ring.chunks)
            divided = tuple(tuple(between(d, d, i) for d in devices) for i in chunks)
            # a call without keys to use would hide nothing
            divided = divided if all(map(all, divided)) else ()
        return cls(schedule, pieces, divided)

    @property
    def distinct(self) -> tuple[Piece, ...]:
        """The pieces that differ; each is one form of kernel call."""
        rows = (*self.pieces, *self.divided)
        every = (piece for step in rows for pieces in step for piece in pieces)
        return tuple(dict.fromkeys(every))


@dataclass(frozen=True)
class StepRange:
    """Steps of one form, one after the other: a loop if there are several.

    Attributes:
        steps: the steps.
        hops_before: hops of the keys since the step before each; None: it is the first.
        hops_after: hops of the keys to the step after each; None: it is the last.
        fits_loop: whether a loop may hold the steps.
    """

    steps: range
    hops_before: int | None
    hops_after: int | None
    fits_loop: bool = False

    @classmethod
    def split(
        cls, steps: Sequence[int], isolate_before: int | None = None
    ) -> tuple[StepRange, ...]:
        """Returns ``steps`` in ranges that are as long as possible.

        The first and the last stand alone, as nothing has arrived before the one and nothing is
        sent on after the other; so do those at a gap, and the one before ``isolate_before``.
        """
        moves = [b - a for a, b in itertools.pairwise(steps)]
        ranges: list[StepRange] = []
        for step, before, after in zip(steps, [None, *moves], [*moves, None], strict=True):
            fits_loop = before == after == 1 and step + 1 != isolate_before
            if fits_loop and ranges and ranges[-1].fits_loop and ranges[-1].steps.stop == step:
                ranges[-1] = replace(ranges[-1], steps=range(ranges[-1].steps.start, step + 1))
            else:
                ranges.append(cls(range(step, step + 1), before, after, fits_loop))
        return tuple(ranges)


def run_steps(
    ranges: Sequence[StepRange],
    body: Callable[..., Any],
    state: Any,
    *,
    convert: Callable[[Any], Any] = lambda state: state,
    unroll: int = 1,
    shortest: int = 2,
) -> Any:
    """``state = body(step, state, span)`` for every step; a long range is a loop.

    ``convert``: makes the state of the first step what a loop carries. ``unroll``: steps in a turn
    of a loop. ``shortest``: fewest steps of a loop.
    """
    for span in ranges:
        if len(span.steps) < shortest:
            for step in span.steps:
                state = body(step, state, replace(span, steps=range(step, step + 1)))
        else:
            loop_body = partial(_call_body, body, span)
            first, end = span.steps.start, span.steps.stop
            state = jax.lax.fori_loop(first, end, loop_body, convert(state), unroll=unroll)
    return state


def _call_body(body: Callable[..., Any], span: StepRange, step: Any, state: Any) -> Any:
    return body(step, state, span)
