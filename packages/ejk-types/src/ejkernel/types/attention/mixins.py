"""Mixins for kernel objects of softmax attention, which Triton and Mosaic kernels share.

They know masks, which ejk-ops does not, and belong to no backend: hence their place here.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np

from ejkernel.types.attention.latent import (
    EINSUMS,
    LATENT,
    Arrays,
    RowProducts,
    drop_masked_rows,
    expand_rows,
    latent_gradients,
)
from ejkernel.types.attention.problem import LOG2E, Problem
from ejkernel.types.attention.rows import DEAD, Rows, RowScales
from ejkernel.types.attention.softmax import row_delta, sink_gradient
from ejkernel.types.masks.hidden import clear_dead_rows, clear_rows_unless
from ejkernel.types.masks.pattern import inside_blocks
from ejkernel.types.masks.structure import HULL, LISTED

QKV = {"q": "query", "k": "key", "v": "value"}


class SoftmaxKernel:
    """A kernel that implements the gradients of q, k and v.

    Rows that see no key are cleared where a kernel would read them: their weights are 0, but
    0 * NaN is NaN.
    """

    heads_first: ClassVar[bool] = True
    """Whether the axis of heads is before the axis of queries in row values."""

    def notes_on(self, problem: Problem, target: Any) -> tuple[str, ...]:
        if problem.pattern_blocks is not None:
            return (LISTED,)
        return (HULL,) if problem.rules.arrays else ()

    def backward_tiles(self, work: Any) -> Iterable[tuple[int, int]]:
        """Returns the rows and keys of each tile of the backward pass over a pattern."""
        return ()

    def finds_delta(self, work: Any) -> bool:
        """Returns whether ``gradients`` finds delta itself."""
        return False

    def gradients(self, work: Any, arrays: dict[str, Any]) -> dict[str, Any]:
        """Returns gradients by name.

        ``arrays`` has the arrays of the call, do, ``base`` (saved by the forward pass) and delta;
        where ``finds_delta`` is True, o and dlse in place of delta.
        """
        raise NotImplementedError

    # ---- a part of the keys -----------------------------------------------------------------

    def row_unit(self, problem: Problem) -> float:
        """Returns the natural logit of one unit of ``Rows.m``."""
        raise NotImplementedError

    def row_shift(self, problem: Problem) -> float:
        """Returns what ``Rows.m`` has more than the value that the forward pass saves."""
        return 0.0

    def partial_dtypes(self, problem: Problem) -> tuple[Any, Any]:
        """Returns the dtypes of the arrays and of the row values of a part."""
        return np.dtype(problem.dtype), np.dtype(np.float32)

    def partial_result(self, work: Any, arrays: Arrays) -> tuple[jax.Array, Rows]:
        """Returns o ``[b, q, h, dv]`` and ``Rows`` ``[b, q, h]`` over these keys, without sinks."""
        (o, lse), saved = self.forward(work, arrays)  # ty: ignore[missing-attribute]
        return o, self.rows_of(work.problem, lse, saved)

    def rows_of(self, problem: Problem, lse: jax.Array, saved: Any) -> Rows:
        """Returns ``Rows`` ``[b, q, h]`` from what the forward pass returns and saves."""
        shift = self.row_shift(problem)
        base, *tail = jax.tree.leaves(saved) or [lse / self.row_unit(problem) - shift]
        m = jnp.where(lse != -jnp.inf, base + shift, -jnp.inf)
        rows = (m, tail[0] if tail else jnp.zeros_like(m))
        return Rows(*(x.swapaxes(1, 2) for x in rows))

    def partial_gradients(
        self,
        work: Any,
        arrays: Arrays,
        *,
        scales: RowScales,
        delta: jax.Array,
        dlse: jax.Array | None,
        o: jax.Array | None,
        do: jax.Array,
    ) -> Arrays:
        """Returns gradients of query, key, value and bias over these keys.

        ``scales``, delta, dlse ``[b, q, h]``, o and do ``[b, q, h, dv]`` belong to the full rows.
        Without o and dlse, kernels that could find delta from them read it.
        """
        p = work.problem
        base = self.saved_of(p, scales)
        arrays = arrays | {"do": do.astype(p.dtype), "base": base}
        if o is not None and dlse is not None and self.finds_delta(work):
            rows = {"o": o.astype(p.dtype), "dlse": dlse.swapaxes(1, 2)}
        else:
            rows = {"delta": delta.swapaxes(1, 2)}
        gradients = self.gradients(work, arrays | rows)
        return {QKV.get(name, name): gradient for name, gradient in gradients.items()}

    def saved_of(self, problem: Problem, scales: RowScales) -> Any:
        """Returns row values ``[b, q, h]`` as the forward pass saves them, ``[b, h, q]``."""
        alive, m = scales.alive, scales.m - self.row_shift(problem)
        if problem.biased:
            base, tail = m, [jnp.where(alive, -scales.log2_scale, 0.0)]
        else:
            base, tail = m - scales.log2_scale / (self.row_unit(problem) * LOG2E), []
        rows = [x.swapaxes(1, 2) for x in (jnp.where(alive, base, jnp.inf), *tail)]
        return self.saved_rows(rows)

    def scales_of(
        self, problem: Problem, saved: Any, lse: jax.Array, sinks: jax.Array | None
    ) -> RowScales:
        """Returns ``RowScales`` ``[b, q, h]`` from the result of ``saved_of``.

        lse ``[b, q, h]``, sinks ``[h, n]``.
        """
        base, *tail = (x.swapaxes(1, 2) for x in jax.tree.leaves(saved))
        alive = lse != -jnp.inf
        m = jnp.where(alive, base + self.row_shift(problem), 0.0)
        log2_scale = jnp.where(alive, -tail[0] if tail else 0.0, DEAD)
        if sinks is None or sinks.shape[1] == 0:
            return RowScales(m, log2_scale)
        top = sinks.astype(jnp.float32).max(-1)
        log2_sinks = jnp.where(alive, (top - jnp.where(alive, lse, 0.0)) * LOG2E, DEAD)
        return RowScales(m, log2_scale, jnp.maximum(log2_sinks, DEAD))

    def saved_rows(self, rows: list[jax.Array]) -> Any:
        """Returns row values in the structure that the forward pass saves."""
        return rows[0]

    def backward(self, work, arrays, outputs, saved, cotangents) -> Mapping[str, Any]:
        p, q = work.problem, arrays["q"]
        (o, lse), (do, dlse) = outputs, cotangents
        if p.pattern_blocks is None and p.mask_mod is None:
            q, do, dlse = clear_dead_rows(
                arrays["mask"], p.kv_len, lse, q, do, dlse, biased=p.biased
            )
        elif (
            p.biased  # its gradient reads every row
            or p.mask_mod is not None
            or not all(_rows_see_tiles(p, *tile) for tile in self.backward_tiles(work))
        ):
            q, do, dlse = clear_rows_unless(lse != -jnp.inf, q, do, dlse)
        arrays = arrays | {"q": q, "do": do, "base": saved}
        if "sink" not in arrays and self.finds_delta(work):
            return self.gradients(work, arrays | {"o": o, "dlse": dlse})
        delta = row_delta(o, do, dlse, in_order=work.batch_invariant)
        gradients = self.gradients(work, arrays | {"delta": delta})
        if "sink" in arrays:
            gradients["sink"] = sink_gradient(arrays["sink"], lse, delta)
        return gradients


def _rows_see_tiles(problem: Problem, tile_q: int, tile_kv: int) -> bool:
    """Returns whether every row of a tile sees a key in every tile of keys that its tile visits.

    Then no row that sees nothing is ever read.
    """
    p, band = problem, problem.rules.band
    if p.pattern_blocks is None or p.rules.arrays or band.lo is not None:
        return False
    if not inside_blocks(p.pattern_blocks, p.q_len, p.kv_len, tile_q, tile_kv):
        return False
    # the first key of a block is then at or before the last that the tile's first row sees
    block = p.pattern_blocks[1]
    return band.hi is None or (band.hi % tile_q == 0 and (block % tile_q == 0 or block >= p.kv_len))


class FromLatent:
    """Latent attention by a kernel of flash attention, the next of its base classes."""

    def row_products(self, work: Any) -> RowProducts:
        """Returns the matmuls around the kernel."""
        return EINSUMS

    def forward(self, work: Any, arrays: Arrays) -> tuple[tuple[Any, ...], Any]:
        return super().forward(work, self._flash(work, arrays)[1])  # ty: ignore[missing-attribute]

    def backward(self, work, arrays, outputs, saved, cotangents) -> Mapping[str, Any]:
        latent, flash = self._flash(work, arrays)
        flash_gradients = dict(super().backward(work, flash, outputs, saved, cotangents))  # ty: ignore[missing-attribute]
        qkv = (flash_gradients.pop(name) for name in "qkv")
        return latent_gradients(latent, *qkv, self.row_products(work)) | flash_gradients

    def _flash(self, work: Any, arrays: Arrays) -> tuple[Arrays, Arrays]:
        """Returns the arrays that only latent attention has, and the arrays of flash attention."""
        latent = {name: x for name, x in arrays.items() if name in LATENT}
        flash = {name: x for name, x in arrays.items() if name not in LATENT}
        latent = drop_masked_rows(latent, arrays["mask"])
        qkv = expand_rows(latent, rows=self.row_products(work))
        q, k, v = (x.astype(work.problem.dtype) for x in qkv)
        return latent, flash | {"q": q, "k": k, "v": v}
