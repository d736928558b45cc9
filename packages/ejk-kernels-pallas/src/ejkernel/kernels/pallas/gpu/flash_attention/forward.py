"""Forward flash attention on Hopper: a persistent, warp-specialised kernel.

    s = scale * q k^T (soft-capped);  m = rowmax;  p = exp2(s - m);  o = p v / rowsum(p)

Work split: one program a multiprocessor loops over (batch, head, query block) tiles. A producer
warpgroup copies q, k and v tiles to shared memory with TMA; two or three consumers own 64 query
rows each. A consumer's step issues the matmul of q with the next key block and the matmul of p with
the current value block, then does the softmax of the next block while the second matmul runs. The
mainloop continues across tiles: the first matmul of the next tile is issued with the last of this
one. Programs of a cluster visit the same keys, and each copies a part of a block to all of them.

Bound: 4 * q_len * kv_len * d FLOPs a head (half when causal) on the tensor cores; one exponential
a score on the special function units, 16 a clock and multiprocessor: at d = 64 as long as the
matmuls, at d = 128 half. Least bytes q, k, v, o once: a tenth of the time at 4096 keys and d 128.

Sources: Shah et al. 2024, FlashAttention-3, sections 3.1 (warp specialisation) and 3.2 (overlap
within a warpgroup); Dao 2023, FlashAttention-2, section 3.
"""

from __future__ import annotations

from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from ejkernel.kernels.pallas.common.units import unit
from ejkernel.kernels.pallas.gpu.common.masks import row_of
from ejkernel.kernels.pallas.gpu.common.registers import LAYOUT, read
from ejkernel.kernels.pallas.gpu.common.rows import scale_rows
from ejkernel.kernels.pallas.gpu.common.schedule import Tile
from ejkernel.kernels.pallas.gpu.common.tma import pad_rows, padded_rows, tiled
from ejkernel.kernels.pallas.gpu.common.warps import OWN_BARRIERS
from ejkernel.kernels.pallas.gpu.flash_attention.forward_form import MEMBER, Form
from ejkernel.kernels.pallas.gpu.flash_attention.forward_softmax import (
    F32,
    ROWS,
    has_one_id,
    one_id,
    only_ids,
    softmax,
    start,
)
from ejkernel.types.attention.problem import LOG2E


@dataclass(frozen=True)
class Forward(Form):
    """The forward kernel, a function of q, k, v and the operands of the form."""

    # ---- producer ---------------------------------------------------------------------------

    def produce(self, r: Any) -> None:
        def per_tile(carry):
            i, n, ahead = carry
            tile = self.arrived(r, ahead)
            ahead = self.ahead(r, i + 1, ahead[2])
            self.load_queries(r, tile, self.first_row(tile), i)
            first = self.key_block(r, tile, tile.stop - 1)
            self.load(r, "k", tile, first, n)

            def per_block(x, carry):
                n, j = carry
                following = self.key_block(r, tile, tile.stop - 2 - x)
                self.load(r, "k", tile, following, n + 1)
                self.load(r, "v", tile, j, n)
                return n + 1, following

            n, j = lax.fori_loop(0, tile.stop - tile.start - 1, per_block, (n, first))
            self.load(r, "v", tile, j, n)
            return i + 1, n + 1, ahead

        zero = jnp.int32(0)
        carry = (zero, zero, self.ahead(r, zero))
        lax.while_loop(lambda carry: carry[2][0] >= 0, per_tile, carry)

    def load_queries(self, r: Any, tile: Any, first: Any, i: Any) -> None:
        """Copies the queries of this program's i-th tile, which begin at row ``first``, once their
        buffer is free."""
        t = self.tiles
        slot = lax.rem(i, t.q_stages)
        pl.when(i >= t.q_stages)(lambda: plgpu.barrier_wait(r.q_free.at[slot]))
        source = r.q.at[tile.batch, pl.ds(first, t.block_q), tile.head]
        plgpu.copy_gmem_to_smem(source, r.q_smem.at[slot], r.q_ready.at[slot])

    def load(self, r: Any, which: str, tile: Any, j: Any, n: Any) -> None:
        """Copies block j of "k" or "v", this program's n-th, once its buffer is free."""
        stages = self.tiles.stages
        smem, ready, free = (getattr(r, f"{which}_{x}") for x in ("smem", "ready", "free"))
        slot = lax.rem(n, stages)
        source = self.place(r, tile, j)  # computed while waiting for the buffer
        pl.when(n >= stages)(lambda: plgpu.barrier_wait(free.at[slot]))
        self.copy(r, which, tile, source, smem.at[slot], ready.at[slot])

    def place(self, r: Any, tile: Any, j: Any) -> Any:
        """Returns the index of block j of a tile's keys and values."""
        rows = pl.ds(j * self.tiles.block_kv, self.tiles.block_kv)
        return tile.batch, rows, lax.div(tile.head, self.problem.group)

    def copy(self, r: Any, which: str, tile: Any, place: Any, smem: Any, ready: Any) -> None:
        """Starts the copy of a block of "k" or "v", which signals to ``ready``."""
        axes = MEMBER if self.tiles.cluster > 1 else None
        plgpu.copy_gmem_to_smem(getattr(r, which).at[place], smem, ready, collective_axes=axes)

    # ---- consumers --------------------------------------------------------------------------

    def _finish(self, r: Any, tile: Tile, o, state) -> None:
        """Normalises o and hands o, lse and base (lse in ``units``) of a tile to TMA."""
        t, p = self.tiles, self.problem
        wg = lax.axis_index("wg")
        m, total, *e = state
        empty = total == 0.0
        common = jnp.exp2(-e[0]) if e else 1.0
        total = total * common
        top, alpha, above = m * unit(p), 1.0, 0.0
        if "sink" in self.operands:
            sink = r.sink[*row_of(r.sink, tile.batch), tile.head]
            # a row that sees no key stays empty, whatever the sink
            both = jnp.maximum(top, sink)
            above = both - jnp.where(empty, both, top)
            alpha = jnp.exp2(-above * LOG2E)
            total = jnp.where(empty, 0.0, total * alpha + jnp.exp2((sink - both) * LOG2E))
            top = both
        row_sum = jnp.where(empty, 1.0, total)
        log = jnp.log(row_sum)
        lse = jnp.where(empty, -jnp.inf, top + log)
        base = jnp.where(empty, jnp.inf, m + (log + above) * (1 / unit(p)))
        row_scale = alpha * common / row_sum
        rows = pl.ds(wg * ROWS, ROWS)
        out_rows = pl.ds(self.first_row(tile) + wg * ROWS, ROWS)
        for c in range(0, p.value_dim, t.o_columns):
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)
            if c == 0 and self.keeps_lse:
                r.lse_smem[rows] = lse
                r.base_smem[rows] = base
            width = min(t.o_columns, p.value_dim - c)
            part = o[:, c : c + width]  # scaled part by part: o is still needed
            part = part * lax.broadcast_in_dim(row_scale, part.shape, [0])
            self.store(r, tile, part.astype(p.dtype), c)
            if c == 0 and self.keeps_lse:
                out = (tile.batch, tile.head, out_rows)
                plgpu.copy_smem_to_gmem(r.lse_smem.at[rows], r.lse.at[out])
                plgpu.copy_smem_to_gmem(r.base_smem.at[rows], r.base.at[out])

    def store(self, r: Any, tile: Any, part: jax.Array, column: int) -> None:
        """Stores columns of this warpgroup's rows of o, starting at ``column``, by TMA."""
        wg = lax.axis_index("wg")
        columns = pl.ds(0, part.shape[1])
        staged = r.o_smem.at[pl.ds(wg * ROWS, ROWS), columns]
        staged[...] = part
        plgpu.commit_smem()
        rows = pl.ds(self.first_row(tile) + wg * ROWS, ROWS)
        target = (tile.batch, rows, tile.head, pl.ds(column, part.shape[1]))
        plgpu.copy_smem_to_gmem(staged, r.o.at[target])

    def consume(self, r: Any) -> None:
        t, p = self.tiles, self.problem
        wg = lax.axis_index("wg")
        rows = pl.ds(wg * ROWS, ROWS)
        shape = (ROWS, t.block_kv)

        def load_q(i):
            """The columns of q that are kept in registers."""
            if not t.q_held:
                return None
            return read(r.q_smem.at[lax.rem(i, t.q_stages), rows, pl.ds(0, t.q_held)], LAYOUT)

        def scores(s_acc, q_regs, i, n):
            q, k = r.q_smem.at[lax.rem(i, t.q_stages)], r.k_smem.at[lax.rem(n, t.stages)]
            if t.q_held:
                plgpu.wgmma(s_acc, q_regs, k.at[:, pl.ds(0, t.q_held)].T)
            if t.q_held < p.dim:
                others = pl.ds(t.q_held, p.dim - t.q_held)
                plgpu.wgmma(s_acc, q.at[rows, others], k.at[:, others].T)

        def mainloop_step(carry, o_acc):
            i, ahead, tile, j, n, q_regs, p_now, state = carry
            slot, next_slot = lax.rem(n, t.stages), lax.rem(n + 1, t.stages)
            new = j == tile.start  # the next block is the next tile's first
            i2 = i + new.astype(jnp.int32)

            def read_on():
                return self.ahead(r, i + 2, ahead[2])

            if self.read or self.late:
                tile2, ahead2 = lax.cond(new, lambda: self.arrived(r, ahead), lambda: tile), None
            else:
                tile2, ahead2 = lax.cond(
                    new, lambda: (self.arrived(r, ahead), read_on()), lambda: (tile, ahead)
                )
            j2 = jnp.where(new, tile2.stop - 1, j - 1)
            ids = one_id(self, r, tile2, j2)
            q_slot = lax.rem(i2, t.q_stages)
            pl.when(new)(lambda: plgpu.barrier_wait(r.q_ready.at[q_slot]))
            q_regs2 = lax.cond(new, lambda: load_q(i2), lambda: q_regs)
            plgpu.barrier_wait(r.k_ready.at[next_slot])

            def overlapped(s_acc):
                scores(s_acc, q_regs2, i2, n + 1)
                plgpu.wgmma(o_acc, p_now, r.v_smem.at[slot])
                # reads here overlap the matmuls
                if self.late:
                    ahead3 = lax.cond(
                        j2 == tile2.start, lambda: self.ahead(r, i2 + 1), lambda: ahead
                    )
                else:
                    ahead3 = lax.cond(new, read_on, lambda: ahead) if ahead2 is None else ahead2
                s = plgpu.wgmma_accumulator_load(s_acc, wait_n=1)
                plgpu.barrier_arrive(r.k_free.at[next_slot])
                last = j2 == tile2.start
                pl.when(last)(lambda: plgpu.barrier_arrive(r.q_free.at[q_slot]))
                before = lax.cond(new, lambda: start(self), lambda: state)
                p2, state2, alpha = softmax(self, r, s, tile2, j2, ids, before)
                # this wait ends the basic block: the exponentials stay before the next wait
                plgpu.barrier_wait(r.v_ready.at[next_slot])
                o = plgpu.wgmma_accumulator_load(o_acc, wait_n=0)
                plgpu.barrier_arrive(r.v_free.at[slot])

                def finish():
                    self._finish(r, tile, o, state)
                    return jnp.zeros_like(o)

                def rescale():
                    if alpha is None:
                        return o
                    if t.slack:
                        return scale_rows(o, alpha)
                    return o * lax.broadcast_in_dim(alpha, o.shape, [0])

                o_acc[...] = lax.cond(new, finish, rescale)
                self.arrived_values(r, tile2, j2, next_slot)
                return ahead3, p2.astype(p.dtype), state2

            ahead3, *softmax_state = pl.run_scoped(overlapped, plgpu.ACC(shape, F32))
            return i2, ahead3, tile2, j2, n + 1, q_regs2, *softmax_state

        def mainloop(o_acc):
            tile = self.tile(r, self.first(r))
            j = tile.stop - 1
            plgpu.barrier_wait(r.q_ready.at[0])
            plgpu.barrier_wait(r.k_ready.at[0])

            zero = jnp.int32(0)
            q_regs = load_q(zero)

            def first(s_acc):
                scores(s_acc, q_regs, zero, zero)
                return s_acc[...]

            s = pl.run_scoped(first, plgpu.ACC(shape, F32))
            plgpu.barrier_arrive(r.k_free.at[0])
            pl.when(j == tile.start)(lambda: plgpu.barrier_arrive(r.q_free.at[0]))
            ids = one_id(self, r, tile, j)
            p_now, state, _ = softmax(self, r, s, tile, j, ids, start(self))
            plgpu.barrier_wait(r.v_ready.at[0])
            self.arrived_values(r, tile, j, 0)
            if self.late:
                ahead = lax.cond(
                    j == tile.start, lambda: self.ahead(r, zero + 1), lambda: (zero, None, None)
                )
            else:
                ahead = self.ahead(r, zero + 1)
            p_now = p_now.astype(p.dtype)
            carry = (zero, ahead, tile, j, zero, q_regs, p_now, state)

            def has_work(carry):
                _, (number, *_), tile, j, *_ = carry
                return (number >= 0) | (j > tile.start)

            carry = lax.while_loop(has_work, lambda carry: mainloop_step(carry, o_acc), carry)
            _, _, tile, _, n, _, p_now, state = carry
            plgpu.wgmma(o_acc, p_now, r.v_smem.at[lax.rem(n, t.stages)])
            self._finish(r, tile, o_acc[...], state)
            plgpu.wait_smem_to_gmem(0)
            if t.cluster > 1:  # no program exits while another may still signal to it
                plgpu.barrier_arrive(r.done.at[0])
                plgpu.barrier_wait(r.done.at[0])

        pl.run_scoped(mainloop, plgpu.ACC((ROWS, p.value_dim), F32))

    def arrived_values(self, r: Any, tile: Any, j: Any, slot: Any) -> None:
        """Prepares the values of block j before they are used: nothing here."""

    # ---- launch -----------------------------------------------------------------------------

    def _scratch(self) -> dict[str, Any]:
        t, p = self.tiles, self.problem
        dtype = jnp.dtype(p.dtype)

        def smem(*shape):
            return tiled(shape, dtype, t.swizzle)

        def free(n):
            return plgpu.Barrier(num_arrivals=t.consumers, num_barriers=n)

        def free_everywhere(n):
            if t.cluster == 1:
                return free(n)
            return plgpu.ClusterBarrier(
                collective_axes=(MEMBER,), num_arrivals=t.consumers, num_barriers=n
            )

        scratch = {
            "q_smem": smem(t.q_stages, t.block_q, p.dim),
            "k_smem": smem(t.stages, t.block_kv, p.dim),
            "v_smem": smem(t.stages, t.block_kv, p.value_dim),
            "o_smem": tiled((t.block_q, t.o_columns), dtype),
            "q_ready": plgpu.Barrier(num_barriers=t.q_stages),
            "k_ready": plgpu.Barrier(num_arrivals=self.copies, num_barriers=t.stages),
            "v_ready": plgpu.Barrier(num_arrivals=self.copies, num_barriers=t.stages),
            "q_free": free(t.q_stages),
            "k_free": free_everywhere(t.stages),
            "v_free": free_everywhere(t.stages),
        }
        if self.keeps_lse:
            rows = plgpu.SMEM((t.block_q,), F32)
            scratch |= {"lse_smem": rows, "base_smem": rows}
        if t.cluster > 1:
            scratch["done"] = free_everywhere(1)
        return scratch

    def __call__(self, tensors: dict[str, jax.Array]) -> tuple[jax.Array, ...]:
        """(o [b, q, h, dv], lse float32 [b, h, q], base likewise: lse in ``units``).

        base is +inf in rows that see nothing. ``tensors``: the operands by name.
        """
        t, p = self.tiles, self.problem
        operands = {name: pad_rows(tensors[name]) for name in ("q", "k", "v")}
        operands |= {"order": self.order(tensors)}
        operands |= {name: x for name, x in tensors.items() if name not in operands}
        if has_one_id(self):
            operands["q_one_id"] = only_ids(operands["q_ids"], ROWS, -1)
            operands["kv_one_id"] = only_ids(operands["kv_ids"], t.block_kv, -2)
        rows = self.strips * t.cluster * t.block_q
        outputs = {
            "o": jax.ShapeDtypeStruct(
                (p.batch, padded_rows(p.q_len), p.heads, p.value_dim), p.dtype
            ),
            **dict.fromkeys(("lse", "base"), jax.ShapeDtypeStruct((p.batch, p.heads, rows), F32)),
        }
        o, lse, base = self.launch(tuple(operands), outputs)(*operands.values())
        return o[:, : p.q_len], lse[:, :, : p.q_len], base[:, :, : p.q_len]

    def launch(self, inputs: tuple[str, ...], outputs: dict[str, Any]) -> Any:
        """The kernel as a function of the arrays named."""
        t = self.tiles

        def body(*refs, **scratch):
            r = SimpleNamespace(**dict(zip((*inputs, *outputs), refs, strict=True)), **scratch)
            wg = lax.axis_index("wg")
            self.opened(r)

            @pl.when(wg == t.consumers)
            def produce():
                plgpu.set_max_registers(t.producer_registers, action="decrease")
                self.produce(r)

            @pl.when(wg < t.consumers)
            def consume():
                plgpu.set_max_registers(t.consumer_registers, action="increase")
                self.consume(r)

        cluster: dict[str, Any] = {"cluster": (t.cluster,), "cluster_names": (MEMBER,)}
        return plgpu.kernel(
            body,
            out_type=tuple(outputs.values()),
            scratch_types=self._scratch(),
            grid=(self.grid,),
            grid_names=("program",),
            **(cluster if t.cluster > 1 else {}),
            num_threads=t.consumers + 1,
            thread_name="wg",
            kernel_name=self.kernel_name,
            compiler_params=OWN_BARRIERS,
        )
