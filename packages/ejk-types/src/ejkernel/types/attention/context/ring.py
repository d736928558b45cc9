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
        """Index of this device, int32 ``[]``."""
        return jax.lax.axis_index(self.axis_name)

    @property
    def chunks(self) -> int:
        """Number of contiguous ranges that a shard has."""
        return 2 if self.zigzag else 1

    def starts(self, device: Any, length: int) -> tuple[tuple[Any, int], ...]:
        """(first index in the whole sequence, length) of every contiguous range of a shard."""
        if not self.zigzag:
            return ((device * length, length),)
        half = length // 2
        return (device * half, half), ((2 * self.size - 1 - device) * half, half)

    def index(self, device: Any, length: int) -> jax.Array:
        """Index in the whole sequence of each of the ``length`` tokens of a shard, int32."""
        ranges = self.starts(device, length)
        return jnp.concatenate([first + jnp.arange(n, dtype=jnp.int32) for first, n in ranges])

    def shift(self, tree: Any, places: int) -> Any:
        """Every array sent ``places`` devices along the ring."""
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

    def own_step(self, ring: Ring) -> int | None:
        """Returns the step of a device's own keys; None: there is none."""
        step = -self.start % ring.size
        return step if step < self.count else None

    def order(self, ring: Ring, *, backward: bool = False) -> tuple[int, ...]:
        """Returns all steps in the order of a pass.

        That of the device's own keys, which never travel, is the first one, so that the first
        transfer is hidden; in a backward pass it is the last, to hide the gradients' way home.
        """
        own_step = self.own_step(ring)
        others = tuple(step for step in range(self.count) if step != own_step)
        if own_step is None:
            return others
        return (*others, own_step) if backward else (own_step, *others)

    def source(self, ring: Ring, step: Any) -> Any:
        """The device whose keys this device works on in ``step``."""
        return (ring.device_index() - self.start - step) % ring.size

    @classmethod
    def shortest(cls, ring: Ring, rules: Sequence[Rule], q_len: int, kv_len: int) -> Schedule:
        """The shortest run of consecutive hops that brings every device all keys it may see.

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
        own_step = schedule.own_step(ring)
        divided: tuple[tuple[tuple[Piece, ...], ...], ...] = ()
        if divides and ring.chunks > 1 and own_step is not None and schedule.count > 2:
            chunks = range(ring.chunks)
            divided = tuple(tuple(between(d, d, i) for d in devices) for i in chunks)
            # a call without keys to use would hide nothing
            divided = divided if all(map(all, divided)) else ()
        return cls(schedule, pieces, divided)

    @property
    def distinct(self) -> tuple[Piece, ...]:
        """All pieces that differ; each is one form of kernel call."""
        rows = (*self.pieces, *self.divided)
        every = (piece for step in rows for pieces in step for piece in pieces)
        return tuple(dict.fromkeys(every))


@dataclass(frozen=True)
class Run:
    """Steps of one form, one after the other: a loop if there are several.

    Attributes:
        steps: the steps.
        before: places by which keys have moved since the step before each; None: it is the first.
        after: places by which they move to the step after each; None: it is the last.
        regular: whether a loop may hold the steps.
    """

    steps: range
    before: int | None
    after: int | None
    regular: bool = False

    @classmethod
    def split(cls, steps: Sequence[int], apart: int | None = None) -> tuple[Run, ...]:
        """Returns runs of ``steps``, as long as possible.

        The first and the last stand alone, as nothing has arrived before the one and nothing is
        sent on after the other; so do those at a gap, and the one before ``apart``.
        """
        moves = [b - a for a, b in itertools.pairwise(steps)]
        runs: list[Run] = []
        for step, before, after in zip(steps, [None, *moves], [*moves, None], strict=True):
            regular = before == after == 1 and step + 1 != apart
            if regular and runs and runs[-1].regular and runs[-1].steps.stop == step:
                runs[-1] = replace(runs[-1], steps=range(runs[-1].steps.start, step + 1))
            else:
                runs.append(cls(range(step, step + 1), before, after, regular))
        return tuple(runs)


def run_steps(
    runs: Sequence[Run],
    body: Callable[..., Any],
    state: Any,
    *,
    convert: Callable[[Any], Any] = lambda state: state,
    unroll: int = 1,
    shortest: int = 2,
) -> Any:
    """``state = body(step, state, run)`` for every step of every run; a loop for a long one.

    ``convert``: makes the state of the first step what a loop carries. ``unroll``: steps in a turn
    of a loop. ``shortest``: fewest steps of a loop.
    """
    for run in runs:
        if len(run.steps) < shortest:
            for step in run.steps:
                state = body(step, state, replace(run, steps=range(step, step + 1)))
        else:
            turn = partial(_turned, body, run)
            first, end = run.steps.start, run.steps.stop
            state = jax.lax.fori_loop(first, end, turn, convert(state), unroll=unroll)
    return state


def _turned(body: Callable[..., Any], run: Run, step: Any, state: Any) -> Any:
    return body(step, state, run)
