"""Dynamic scheduling of the tiles of groups: one warpgroup takes tiles and publishes them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from ejkernel.kernels.pallas.gpu.common.work_counter import fetch_index_in_warpgroup

TILES_AHEAD = 4  # that the scheduler may have published before all consumers have read them


class TileQueue:
    """A mixin for persistent kernels whose tiles belong to groups of rows.

    Attributes:
        tile_of: the type of a tile: a NamedTuple with the field ``steps``.
        published: number of its first fields, those that consumers need.
        programs: programs of a launch.
    """

    tile_of: ClassVar[Callable[..., Any]]
    published: ClassVar[int]

    @property
    def programs(self) -> int:
        raise NotImplementedError

    def find_tile(self, r: Any, number: Any, cursor: Any) -> tuple[Any, Any]:
        """Returns tile ``number``, and a cursor from which following tiles are found."""
        raise NotImplementedError

    def first_cursor(self) -> Any:
        """Returns the cursor before all tiles."""
        raise NotImplementedError

    def exists(self, tile: Any) -> Any:
        """Returns whether a tile, of which ``published`` fields are known, is not past the last."""
        raise NotImplementedError

    def schedule_tiles(self, r: Any, body: Callable[..., Any], carry: Any) -> tuple[Any, Any, Any]:
        """Takes tiles, publishes them, and runs ``carry = body(tile, n, carry)`` for each.

        n is the number of steps before the tile. Returns (tiles, steps, carry) at the end.
        """

        def publish(i: Any, tile: Any) -> None:
            slot = lax.rem(i, TILES_AHEAD)
            pl.when(i >= TILES_AHEAD)(lambda: plgpu.barrier_wait(r.tile_empty.at[slot]))
            for n, word in enumerate(tile[: self.published]):
                r.next_tiles[slot, n] = word
            plgpu.barrier_arrive(r.tile_full.at[slot])

        def schedule_one(state: Any) -> Any:
            i, n, tile, cursor, carry = state
            carry = body(tile, n, carry)
            # while the copies that the body started are in flight
            slot = lax.rem(i + 1, TILES_AHEAD)
            index = fetch_index_in_warpgroup(r.counter, r.next_tiles, slot, True)
            following, cursor = self.find_tile(r, self.programs + index, cursor)
            publish(i + 1, following)
            return i + 1, n + tile.steps, following, cursor, carry

        zero = jnp.int32(0)
        first = self.find_tile(r, lax.axis_index("program"), self.first_cursor())
        publish(zero, first[0])
        start = (zero, zero, *first, carry)
        i, n, _, _, carry = lax.while_loop(lambda s: self.exists(s[2]), schedule_one, start)
        return i, n, carry

    def follow_tiles(self, r: Any, body: Callable[..., Any], carry: Any) -> Any:
        """Runs ``body(tile, n, follow, carry)`` for every tile that is published.

        tile has the published fields, n is the number of steps before it. The body returns
        (``follow()``, carry), and so decides when to wait for the next tile. Returns the last
        carry.
        """

        def receive(i: Any) -> Any:
            slot = lax.rem(i, TILES_AHEAD)
            plgpu.barrier_wait(r.tile_full.at[slot])
            tile = self.tile_of(*(r.next_tiles[slot, n] for n in range(self.published)))
            plgpu.barrier_arrive(r.tile_empty.at[slot])
            return tile

        def follow_one(state: Any) -> Any:
            i, n, tile, carry = state
            following, carry = body(tile, n, lambda: receive(i + 1), carry)
            return i + 1, n + tile.steps, following, carry

        zero = jnp.int32(0)
        start = (zero, zero, receive(zero), carry)
        return lax.while_loop(lambda s: self.exists(s[2]), follow_one, start)[3]

    def wait_for_consumers(self, r: Any, tiles: Any, steps: Any, stages: int) -> None:
        """Waits for the last signals: no warpgroup may signal to a program that has exited.

        stages: steps in shared memory, whose barriers are ``empty``.
        """
        for slot in range(stages):
            pl.when(slot < steps)(lambda slot=slot: plgpu.barrier_wait(r.empty.at[slot]))
        for slot in range(TILES_AHEAD):
            pl.when(slot <= tiles)(lambda slot=slot: plgpu.barrier_wait(r.tile_empty.at[slot]))

    def queue_scratch(self, consumers: int) -> dict[str, Any]:
        """Returns the shared memory and barriers of the queue by name."""
        # the published fields, and last the index taken from the counter
        words = -(-(self.published + 1) // 4) * 4
        return {
            "next_tiles": plgpu.SMEM((TILES_AHEAD, words), jnp.int32),
            "tile_full": plgpu.Barrier(num_barriers=TILES_AHEAD),
            "tile_empty": plgpu.Barrier(num_arrivals=consumers, num_barriers=TILES_AHEAD),
        }
