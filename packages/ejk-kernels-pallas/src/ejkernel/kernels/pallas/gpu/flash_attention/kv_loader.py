"""Loaders of keys and values for the forward kernel: which blocks a tile visits, and their copies.

A loader has the loop of the producer, and says where the blocks of a tile lie. ``DenseLoader``
reads contiguous keys, ``ListLoader`` the blocks of a list; ``serving.prefill_loader`` has those for
page tables.

Who calls what: ``ForwardKernel.launch`` calls ``produce`` in the producer warpgroup. ``produce``
calls ``ForwardKernel.load`` for every block, which waits for a free buffer and calls ``source`` and
``copy``. Consumers call ``key_block`` for masks (``forward_softmax``) and ``prepare_values`` once
the values of a block have arrived (``TileLoop``).

Of the arguments, ``r`` has references to operands, shared memory and barriers by name, j counts the
key blocks of a tile (steps of its list in a ``ListLoader``), i the tiles and n the key blocks of a
program, and ``tensor`` is "k" or "v".
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from ejkernel.kernels.pallas.gpu.common.masks import row_of
from ejkernel.kernels.pallas.gpu.common.schedule import Tile
from ejkernel.kernels.pallas.gpu.flash_attention.forward_form import MEMBER, Form
from ejkernel.kernels.pallas.gpu.flash_attention.lists import COUNTS


@dataclass(frozen=True)
class DenseLoader:
    """Contiguous keys and values ``[b, kv_len, heads, d]``."""

    form: Form

    @property
    def arrivals(self) -> int:
        """Arrivals that fill a buffer of keys or values: its TMA copies."""
        return 1

    def scratch(self) -> dict[str, Any]:
        """Returns the loader's own shared memory and barriers by name."""
        return {}

    def produce(self, kernel: Any, r: Any, before: tuple[Any, Any] = (0, 0)) -> tuple[Any, Any]:
        """Copies queries, keys and values of all tiles of this program, all four warps together.

        The keys of a block are needed a step before its values, and so are copied that much before.

        ``before``: tiles and key blocks that the program has loaded; returned with the new ones.
        """
        scheduler = kernel.scheduler

        def per_tile(carry):
            i, n, ahead = carry
            tile = scheduler.tile_of(r, ahead)
            ahead = scheduler.read_ahead(r, i + 1 - before[0], ahead.following)
            kernel.load_queries(r, tile, scheduler.first_row(tile), i)
            first = self.key_block(r, tile, tile.stop - 1)
            kernel.load(r, "k", tile, first, n)

            def per_step(step, carry):
                n, block = carry
                next_block = self.key_block(r, tile, tile.stop - 2 - step)
                kernel.load(r, "k", tile, next_block, n + 1)
                kernel.load(r, "v", tile, block, n)
                return n + 1, next_block

            n, block = lax.fori_loop(0, tile.stop - tile.start - 1, per_step, (n, first))
            kernel.load(r, "v", tile, block, n)
            return i + 1, n + 1, ahead

        i, n = (jnp.int32(x) for x in before)
        carry = (i, n, scheduler.read_ahead(r, jnp.int32(0)))
        i, n, _ = lax.while_loop(lambda carry: carry[2].number >= 0, per_tile, carry)
        return i, n

    def key_block(self, r: Any, tile: Tile, j: Any) -> Any:
        """Returns the key block of the j-th step of a tile."""
        return j

    def source(self, r: Any, tile: Tile, j: Any) -> Any:
        """Returns where block j of a tile's keys and values lies."""
        rows = pl.ds(j * self.form.tiles.block_kv, self.form.tiles.block_kv)
        return tile.batch, rows, lax.div(tile.head, self.form.problem.group)

    def copy(self, r: Any, tensor: str, tile: Tile, source: Any, smem: Any, full: Any) -> None:
        """Starts the copy of a block of "k" or "v", which signals to ``full``."""
        axes = MEMBER if self.form.tiles.cluster > 1 else None
        plgpu.copy_gmem_to_smem(getattr(r, tensor).at[source], smem, full, collective_axes=axes)

    def prepare_values(self, r: Any, tile: Tile, j: Any, slot: Any) -> None:
        """Does nothing with the values of block j: the copy engine has zeroed rows past the end."""


@dataclass(frozen=True)
class EightBitLoader(DenseLoader):
    """Contiguous keys of 8 bits, and values ``[b, heads, d, kv_len]``: matmuls of 8 bits sum over
    adjacent values."""

    def copy(self, r: Any, tensor: str, tile: Tile, source: Any, smem: Any, full: Any) -> None:
        if tensor == "k":
            super().copy(r, tensor, tile, source, smem, full)
            return
        batch, rows, head = source
        axes = MEMBER if self.form.tiles.cluster > 1 else None
        plgpu.copy_gmem_to_smem(r.v.at[batch, head, :, rows], smem, full, collective_axes=axes)


@dataclass(frozen=True)
class ListLoader(DenseLoader):
    """The blocks of a list, for patterns of blocks; see ``lists``."""

    def key_block(self, r: Any, tile: Tile, j: Any) -> Any:
        return r.lists[*row_of(r.lists, tile.batch, tile.head), tile.block, COUNTS + j]
