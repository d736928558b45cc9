"""The devices that share a sequence, in the order in which states pass, and what each one has."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from ejkernel.types.collectives import permute


@dataclass(frozen=True)
class Line:
    """The devices of some mesh axes, each with as many tokens as the others.

    Attributes:
        axes: the mesh axes, major first.
        size: number of devices.
        length: tokens of each device.
        reverse: whether states pass from the last token to the first.
    """

    axes: tuple[str, ...]
    size: int
    length: int
    reverse: bool = False

    @classmethod
    def of_shard(cls, shard: Any, word: str, *, reverse: bool = False) -> Line:
        """Returns the devices over which a shard's axis of tokens is spread."""
        return cls(shard.layout.axes(word), shard.parts(word), shard.local(word), reverse)

    @property
    def index(self) -> jax.Array:
        """Number of this device along the sequence."""
        return jax.lax.axis_index(self.axes).astype(jnp.int32)

    @property
    def offset(self) -> jax.Array:
        """Index in the whole sequence of the first token of this device."""
        return self.index * self.length

    @property
    def position(self) -> jax.Array:
        """Number of devices that states pass before this one."""
        return self.size - 1 - self.index if self.reverse else self.index

    def receive(self, tree: Any, places: int = 1) -> Any:
        """Returns the arrays of the device ``places`` before this one, zeros if there is none."""
        route = [(i, i + places) for i in range(self.size - places)]
        if self.reverse:
            route = [(target, source) for source, target in route]
        return permute(tree, self.axes, route)

    def sum(self, x: jax.Array) -> jax.Array:
        """Returns the sum over the devices, on each of them."""
        return jax.lax.psum(x, self.axes)


def scan_states(
    line: Line,
    added: jax.Array,
    transition: jax.Array,
    *,
    apply: Callable[[jax.Array, jax.Array], jax.Array],
    compose: Callable[[jax.Array, jax.Array], jax.Array],
) -> jax.Array:
    """Returns the state that reaches this device, zeros on the first.

    A device that is reached by state S leaves ``apply(transition, S) + added`` behind.
    ``compose(later, earlier)`` is the transition of both. Distances double, so that n devices send
    ``1 + log2(n)`` times.
    """
    state, through = line.receive((added, transition))
    distance = 1
    while distance < line.size - 1:
        earlier, through_earlier = line.receive((state, through), distance)
        state = state + apply(through, earlier)
        through = compose(through, through_earlier)
        distance *= 2
    return state


@dataclass(frozen=True)
class LocalSequences:
    """The sequences of which a device may have tokens: rows of a batch, or packed ones.

    Bools are of shape ``[]`` for a batch, whose rows are alike, else ``[n]``.

    Attributes:
        cu_seqlens: cumulative lengths of this device's parts; None: rows of a batch.
        enters, leaves: whether a state of the sequence comes from the device before, and goes on to
            the next.
        ends_here: whether its last state is on this device.
        first, last: the range of the tokens of the sequence that enters, empty where none does.
    """

    line: Line
    cu_seqlens: jax.Array | None
    enters: jax.Array
    leaves: jax.Array
    ends_here: jax.Array
    first: jax.Array
    last: jax.Array

    @classmethod
    def of_line(cls, line: Line, cu_seqlens: jax.Array | None) -> LocalSequences:
        """Returns the sequences of this device; ``cu_seqlens`` counts the tokens of all devices."""
        position, length = line.position, line.length
        if cu_seqlens is None:
            enters, ends = position > 0, position == line.size - 1
            return cls(line, None, enters, ~ends, ends, jnp.int32(0), jnp.int32(length))
        total, begin = line.size * length, line.offset
        end = begin + length
        cu = jnp.clip(cu_seqlens, 0, total)
        starts, stops = cu[:-1], jnp.maximum(cu[1:], cu[:-1])
        comes = (starts < begin) & (stops > begin)
        goes = (starts < end) & (stops > end)
        enters, leaves = (goes, comes) if line.reverse else (comes, goes)
        has_tokens = jnp.minimum(stops, end) > jnp.maximum(starts, begin)
        # a sequence without tokens has its initial state, which every device knows
        ends_here = jnp.where(stops > starts, has_tokens & ~leaves, position == 0)
        local = jnp.clip(cu - begin, 0, length)
        first = jnp.sum(jnp.where(enters, local[:-1], 0), dtype=jnp.int32)
        last = jnp.sum(jnp.where(enters, local[1:], 0), dtype=jnp.int32)
        return cls(line, local, enters, leaves, ends_here, first, last)

    @property
    def is_entering_token(self) -> jax.Array:
        """Returns whether each token belongs to the sequence that enters, bool ``[length]``."""
        token = jnp.arange(self.line.length, dtype=jnp.int32)
        return (token >= self.first) & (token < self.last)

    @property
    def passes_through(self) -> jax.Array:
        """Returns whether a sequence enters and leaves."""
        return jnp.any(self.enters & self.leaves)

    def initial_states(self, initial: jax.Array | None) -> jax.Array | None:
        """Returns the initial states, zeros of sequences that begin on another device."""
        return (
            None if initial is None else jnp.where(expand_flags(self.enters, initial), 0, initial)
        )

    def leaving_state(self, final: jax.Array) -> jax.Array:
        """Returns the states that leave, of packed sequences one: ``[batch or 1, ...]``."""
        if self.cu_seqlens is None:
            return final
        state = jax.lax.dynamic_index_in_dim(final, jnp.argmax(self.leaves), 0)
        return jnp.where(jnp.any(self.leaves), state, 0)

    def last_states(self, final: jax.Array) -> jax.Array:
        """Returns the last state of every sequence, from those that devices have."""
        return self.line.sum(jnp.where(expand_flags(self.ends_here, final), final, 0))


def expand_flags(flags: jax.Array, x: jax.Array) -> jax.Array:
    """Returns bools of the first axis of ``x``, or of all of it, with as many axes as it has."""
    return flags.reshape(flags.shape + (1,) * (x.ndim - flags.ndim))
