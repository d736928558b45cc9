"""Maps a function of one batch row and key/value head over all heads, a few at a time.

Enough heads are mapped together that a step of small tiles does more work than its overhead, but no
more than that, so that the tiles of one step stay in the caches.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from ejkernel.kernels.xla._common.layout import reorder


def _divisor(n: int, limit: int) -> int:
    if not isinstance(n, int):
        return 1  # symbolic: one at a time divides any count
    return max(i for i in range(1, max(1, min(n, limit)) + 1) if n % i == 0)


@dataclass(frozen=True)
class Heads:
    """``batch`` rows and ``heads``, ``rows_at_once`` times ``heads_at_once`` in one call."""

    batch: int
    heads: int
    rows_at_once: int
    heads_at_once: int

    @classmethod
    def choose(cls, batch: int, heads: int, at_once: int) -> Heads:
        h = _divisor(heads, at_once)
        return cls(batch, heads, _divisor(batch, at_once // h), h)

    @property
    def widths(self) -> tuple[int, int]:
        return self.rows_at_once, self.heads_at_once

    @property
    def together(self) -> bool:
        return self.widths != (1, 1)

    @property
    def calls(self) -> int:
        return (self.batch // self.rows_at_once) * (self.heads // self.heads_at_once)

    def _first_row_and_head(self, call: Any) -> tuple[Any, Any]:
        """Returns the first batch row and head of a call."""
        per_row = self.heads // self.heads_at_once
        return (call // per_row) * self.rows_at_once, (call % per_row) * self.heads_at_once

    def _cut(self, x: jax.Array, call: Any, axis: int) -> jax.Array:
        """The part of ``x`` for one call, without axes of size 1; heads are on ``axis``."""
        starts, sizes = [jnp.int32(0)] * x.ndim, list(x.shape)
        first = self._first_row_and_head(call)
        for at, start, width in zip((0, axis), first, self.widths, strict=True):
            if x.shape[at] not in (1, width):
                starts[at], sizes[at] = jnp.asarray(start, jnp.int32), width
        if sizes != list(x.shape):
            x = jax.lax.dynamic_slice(x, starts, sizes)
        return x.squeeze([at for at in (0, axis) if x.shape[at] == 1])

    def _mapped(self, function: Callable, leaves: list[Any]) -> Callable:
        for axis in (1, 0):
            if self.widths[axis] > 1:
                axes = [0 if x.shape[axis] > 1 else None for x in leaves]
                function = jax.vmap(function, axes)
        return function

    def map(
        self, function: Callable, tree: Any, sequences: Any, outputs: Any, total: Any = None
    ) -> tuple:
        """``function(tree, sequences of one head) -> (outputs, part)`` for all heads.

        Leaves of ``tree`` are ``[#b, #hk, ...]``, leaves of ``sequences`` and ``outputs`` are
        ``[b, s, hk, ...]``. Returns ``outputs``, overwritten, and ``total`` ``[#b, #hk, ...]`` plus
        every ``part``; with heads that share an entry of ``total``, calls must be of one head.
        """
        # one head is cut out of its sequence as it is; more are moved together first
        at = 2
        if self.together:
            at = 1
            sequences = jax.tree.map(lambda x: reorder(x, 0, 2, 1, *range(3, x.ndim)), sequences)
        leaves, form = jax.tree.flatten((tree, sequences))
        axes = [*[1] * len(jax.tree.leaves(tree)), *[at] * len(jax.tree.leaves(sequences))]
        leaves = [jnp.asarray(x) for x in leaves]
        mapped = self._mapped(lambda *x: function(*jax.tree.unflatten(form, x)), leaves)

        def run_call(call: Any, carry: tuple) -> tuple:
            outputs, total = carry
            inputs = (self._cut(x, call, axis) for x, axis in zip(leaves, axes, strict=True))
            out, part = mapped(*inputs)
            if total is not None:
                total = self._add(total, part, call)
            return jax.tree.map(lambda x, new: self._put(x, new, call), outputs, out), total

        carry = (outputs, total)
        if self.calls == 1:
            return run_call(0, carry)
        return jax.lax.fori_loop(0, self.calls, run_call, carry)

    def _put(self, x: jax.Array, new: jax.Array, call: Any) -> jax.Array:
        """``x`` ``[b, s, hk, ...]`` with ``new`` ``[rows if many, heads if many, s, ...]``."""
        new = new.reshape(*self.widths, x.shape[1], *x.shape[3:])
        new = reorder(new, 0, 2, 1, *range(3, x.ndim))
        if new.shape == x.shape:
            return new
        start = [jnp.int32(0)] * x.ndim
        start[0], start[2] = (jnp.asarray(i, jnp.int32) for i in self._first_row_and_head(call))
        return jax.lax.dynamic_update_slice(x, new, start)

    def _add(self, total: jax.Array, part: jax.Array, call: Any) -> jax.Array:
        zero = jnp.int32(0)
        starts_and_sizes = zip(self._first_row_and_head(call), total.shape, strict=False)
        start = [jnp.asarray(i, jnp.int32) if n != 1 else zero for i, n in starts_and_sizes]
        start += [zero] * (total.ndim - 2)
        part = part.reshape(*self.widths, *total.shape[2:])
        old = jax.lax.dynamic_slice(total, start, part.shape)
        return jax.lax.dynamic_update_slice(total, old + part, start)
