"""Forward flash attention on Hopper: a persistent, warp-specialised kernel.

    s = scale * q k^T (soft-capped);  m = rowmax;  p = exp2(s - m);  o = p v / rowsum(p)

Work split: one program a multiprocessor loops over (batch, head, query block) tiles. A producer
warpgroup copies q, k and v tiles to shared memory with TMA; two or three consumers own 64 query
rows each, and loop over key blocks (``mainloop``). Programs of a cluster visit the same keys, and
each copies a part of a block to all of them.

A kernel is composed of parts that its members choose: a KV loader (contiguous keys, a list of
blocks, a page table), a tile scheduler (a table, a queue), an epilogue, and a prologue that some
programs run before their tiles.

Bound: 4 * q_len * kv_len * d FLOPs a head (half when causal) on the tensor cores; one exponential
a score on the special function units, 16 a clock and multiprocessor: at d = 64 as long as the
matmuls, at d = 128 half. Least bytes q, k, v, o once: a tenth of the time at 4096 keys and d 128.

Sources: Shah et al. 2024, FlashAttention-3, sections 3.1 (warp specialisation) and 3.2 (overlap
within a warpgroup); Dao 2023, FlashAttention-2, section 3.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from ejkernel.kernels.pallas.gpu.common.eight_bit import in_operand_order
from ejkernel.kernels.pallas.gpu.common.tma import pad_rows, padded_rows, row_bytes, tiled
from ejkernel.kernels.pallas.gpu.common.warps import OWN_BARRIERS
from ejkernel.kernels.pallas.gpu.flash_attention.epilogue import Epilogue
from ejkernel.kernels.pallas.gpu.flash_attention.forward_form import MEMBER, Form
from ejkernel.kernels.pallas.gpu.flash_attention.forward_softmax import (
    F32,
    ROWS,
    factors,
    has_one_id,
    only_ids,
)
from ejkernel.kernels.pallas.gpu.flash_attention.kv_loader import (
    DenseLoader,
    EightBitLoader,
    ListLoader,
)
from ejkernel.kernels.pallas.gpu.flash_attention.mainloop import FROM_START, Counts, TileLoop
from ejkernel.kernels.pallas.gpu.flash_attention.tile_scheduler import StaticScheduler
from ejkernel.kernels.pallas.gpu.flash_attention.tiles import ForwardTiles
from ejkernel.types.attention.problem import Problem

VALUES_GROUP = 128  # tokens that a tiled copy of 8-bit values moves together, at most


def _discard(_: Any) -> None:
    """Returns nothing, as branches of the compiled program do."""


@dataclass(frozen=True)
class ForwardKernel:
    """The mainloop of the forward pass, composed of its parts.

    Attributes:
        form: the compiled form of the kernel.
        scheduler: says which tiles a program computes (``tile_scheduler``).
        loader: copies keys and values (``kv_loader``).
        epilogue: stores the output of a tile (``epilogue``).
        name: name of the kernel.
        prologue: other work that a program does before its tiles, or None.
    """

    form: Form
    scheduler: Any
    loader: Any
    epilogue: Any
    name: str
    prologue: Any = None

    # ---- producer ---------------------------------------------------------------------------

    def load_queries(self, r: Any, tile: Any, first: Any, i: Any) -> None:
        """Copies the queries of this program's i-th tile, which begin at row ``first``."""
        t = self.form.tiles
        slot = lax.rem(i, t.q_stages)
        pl.when(i >= t.q_stages)(lambda: plgpu.barrier_wait(r.q_empty.at[slot]))
        source = r.q.at[tile.batch, pl.ds(first, t.block_q), tile.head]
        plgpu.copy_gmem_to_smem(source, r.q_smem.at[slot], r.q_full.at[slot])

    def load(self, r: Any, tensor: str, tile: Any, j: Any, n: Any) -> None:
        """Copies block j of "k" or "v", this program's n-th, to a free buffer."""
        buffer, full, wait_until_free = self.buffer_of(r, tensor, n)
        source = self.loader.source(r, tile, j)  # computed while waiting for the buffer
        wait_until_free()
        self.loader.copy(r, tensor, tile, source, buffer, full)

    def buffer_of(self, r: Any, tensor: str, n: Any) -> tuple[Any, Any, Callable[[], None]]:
        """Returns the buffer of this program's n-th block of "k" or "v", the barrier of its copies,
        and a function that waits until the block before has been read."""
        stages = self.form.tiles.stages
        smem, full, empty = (getattr(r, f"{tensor}_{x}") for x in ("smem", "full", "empty"))
        slot = lax.rem(n, stages)

        def wait_until_free() -> None:
            pl.when(n >= stages)(lambda: plgpu.barrier_wait(empty.at[slot]))

        return smem.at[slot], full.at[slot], wait_until_free

    # ---- consumers --------------------------------------------------------------------------

    def run_tiles(self, r: Any, start_at: Counts = FROM_START) -> Counts:
        """Computes all tiles of this program, 64 rows in this warpgroup.

        ``start_at`` tells what the program has loaded before; returns the same at the end.
        """
        return TileLoop(self, r, start_at).run()

    def run_tiles_twice(self, r: Any) -> None:
        """Computes the tiles of this program without maxima, then some with them where need be."""
        self.scheduler.clear_flags(r)
        counts = self.unshifted.run_tiles(r)
        plgpu.commit_smem()
        plgpu.barrier_arrive(r.first_pass_done.at[0])
        plgpu.barrier_wait(r.first_pass_done.at[0])
        again = self.of_flagged
        pl.when(again.scheduler.is_any_flagged(r))(lambda: _discard(again.run_tiles(r, counts)))

    def load_tiles_twice(self, r: Any) -> None:
        """Copies the operands of ``run_tiles_twice``."""
        counts = self.loader.produce(self, r)
        plgpu.barrier_wait(r.first_pass_done.at[0])
        again = self.of_flagged

        @pl.when(again.scheduler.is_any_flagged(r))
        def load_flagged():
            self.loader.produce(again, r, counts)

    @property
    def of_flagged(self) -> ForwardKernel:
        """The kernel of the tiles that consumers of this program found wrong."""
        return replace(self, scheduler=self.scheduler.of_flagged)

    @property
    def unshifted(self) -> ForwardKernel:
        """The kernel whose exponentials are of logits as they are."""
        form = replace(self.form, unshifted=True)
        return replace(self, form=form, epilogue=replace(self.epilogue, form=form))

    # ---- launch -----------------------------------------------------------------------------

    def scratch(self) -> dict[str, Any]:
        """Returns shared memory and barriers by name.

        JAX sorts a dict by its names: they decide the addresses, whichever part of the kernel a
        name comes from.
        """
        t, p = self.form.tiles, self.form.problem
        dtype = jnp.dtype(p.dtype)

        def smem(*shape):
            row = row_bytes(shape[-1], itemsize=dtype.itemsize)
            return tiled(shape, dtype, min(t.swizzle, row))

        if self.form.eight_bit:
            row = min(128, p.dim)
            q_smem, k_smem = (
                tiled((stages, rows, p.dim), dtype, row)
                for stages, rows in ((t.q_stages, t.block_q), (t.stages, t.block_kv))
            )
            row = math.gcd(128, t.block_kv)
            v_smem = tiled((t.stages, p.value_dim, t.block_kv), dtype, row)
        else:
            q_smem = smem(t.q_stages, t.block_q, p.dim)
            k_smem = smem(t.stages, t.block_kv, p.dim)
            v_smem = smem(t.stages, t.block_kv, p.value_dim)

        def consumer_barrier(n):
            return plgpu.Barrier(num_arrivals=t.consumers, num_barriers=n)

        def cluster_barrier(n):
            if t.cluster == 1:
                return consumer_barrier(n)
            return plgpu.ClusterBarrier(
                collective_axes=(MEMBER,), num_arrivals=t.consumers, num_barriers=n
            )

        out = jnp.dtype(p.output_dtype)
        o_row = row_bytes(t.o_columns, itemsize=out.itemsize)
        arrivals = self.loader.arrivals
        scratch = {
            "q_smem": q_smem,
            "k_smem": k_smem,
            "v_smem": v_smem,
            "o_smem": tiled((t.block_q, t.o_columns), out, o_row),
            "q_full": plgpu.Barrier(num_barriers=t.q_stages),
            "k_full": plgpu.Barrier(num_arrivals=arrivals, num_barriers=t.stages),
            "v_full": plgpu.Barrier(num_arrivals=arrivals, num_barriers=t.stages),
            "q_empty": consumer_barrier(t.q_stages),
            "k_empty": cluster_barrier(t.stages),
            "v_empty": cluster_barrier(t.stages),
        }
        scratch |= self.epilogue.scratch() | self.loader.scratch()
        if self.form.tiles.unshifted_first:
            scratch["first_pass_done"] = consumer_barrier(1)
        if t.cluster > 1:
            scratch["done"] = cluster_barrier(1)
        scratch |= self.scheduler.scratch()
        return scratch if self.prologue is None else scratch | self.prologue.scratch(self)

    def launch(self, inputs: tuple[str, ...], outputs: dict[str, Any]) -> Any:
        """Returns the kernel as a function of the arrays named."""
        t = self.form.tiles

        def body(*refs, **scratch):
            # operands, results, shared memory and barriers, and what ``scheduler.setup`` adds
            r = SimpleNamespace(**dict(zip((*inputs, *outputs), refs, strict=True)), **scratch)
            wg = lax.axis_index("wg")
            self.scheduler.setup(r)

            @pl.when(wg == t.consumers)
            def produce():
                plgpu.set_max_registers(t.producer_registers, action="decrease")
                if self.prologue is not None:
                    self.prologue.produce(self, r)
                if self.form.tiles.unshifted_first:
                    self.load_tiles_twice(r)
                else:
                    self.loader.produce(self, r)

            @pl.when(wg < t.consumers)
            def consume():
                plgpu.set_max_registers(t.consumer_registers, action="increase")
                if self.prologue is not None:
                    self.prologue.consume(self, r)
                run = self.run_tiles_twice if self.form.tiles.unshifted_first else self.run_tiles
                self.scheduler.run_consumer(r, lambda: _discard(run(r)))

        cluster: dict[str, Any] = {"cluster": (t.cluster,), "cluster_names": (MEMBER,)}
        return plgpu.kernel(
            body,
            out_type=tuple(outputs.values()),
            scratch_types=self.scratch(),
            grid=(self.scheduler.grid,),
            grid_names=("program",),
            **(cluster if t.cluster > 1 else {}),
            num_threads=t.consumers + 1,
            thread_name="wg",
            kernel_name=self.name,
            compiler_params=OWN_BARRIERS,
        )


def flash_kernel(
    problem: Problem, tiles: ForwardTiles, operands: tuple[str, ...], programs: int
) -> ForwardKernel:
    """Returns the kernel over contiguous keys, or over lists of their blocks."""
    form = Form(problem, tiles, operands)
    scheduler = StaticScheduler(form, programs)
    loader = ListLoader(form) if form.listed else DenseLoader(form)
    if form.eight_bit:
        loader = EightBitLoader(form)
    epilogue = Epilogue(form, scheduler)
    return ForwardKernel(form, scheduler, loader, epilogue, "flash_attention_forward")


def values_of_8_bits(v: jax.Array) -> jax.Array:
    """``v [b, k, hk, dv]`` as ``[b, hk, dv, k]``, tokens in the order of probabilities."""
    missing = -v.shape[1] % VALUES_GROUP
    v = jnp.pad(v, [(0, 0), (0, missing), (0, 0), (0, 0)]) if missing else v
    return in_operand_order(v.transpose(0, 2, 3, 1))


def with_factors(form: Form, tensors: dict[str, jax.Array]) -> dict[str, jax.Array]:
    """Returns the operands with ``factors`` in place of the scales."""
    p = form.problem
    scales = {name: x for name, x in tensors.items() if name.endswith("_scale")}
    k_scale, v_scale = (
        jnp.repeat(x, p.group, axis=1) for x in (scales["k_scale"][..., 0], scales["v_scale"])
    )
    scale = scales["q_scale"][..., 0] * k_scale * p.scale
    others = {name: x for name, x in tensors.items() if name not in scales}
    return others | {"factors": factors(form, scale, v_scale)}


def flash_forward(
    problem: Problem, tiles: ForwardTiles, tensors: dict[str, jax.Array], programs: int
) -> tuple[jax.Array, ...]:
    """Returns (o [b, q, h, dv], lse float32 [b, h, q], base likewise: lse in ``units``).

    base is +inf in rows that see nothing. ``tensors``: q, k, v and the operands of ``Form`` by
    name.
    """
    t, p = tiles, problem
    kernel = flash_kernel(problem, tiles, tuple(tensors), programs)
    names = ("q", "k") if kernel.form.eight_bit else ("q", "k", "v")
    inputs = {name: pad_rows(tensors[name]) for name in names}
    if kernel.form.eight_bit:
        inputs["v"] = values_of_8_bits(tensors["v"])
        tensors = with_factors(kernel.form, tensors)
    inputs |= {"order": kernel.scheduler.order(tensors)}
    kernel = replace(kernel, scheduler=kernel.scheduler.with_flags(inputs["order"]))
    inputs |= {name: x for name, x in tensors.items() if name not in inputs}
    if has_one_id(kernel.form):
        inputs["q_one_id"] = only_ids(inputs["q_ids"], ROWS, -1)
        inputs["kv_one_id"] = only_ids(inputs["kv_ids"], t.block_kv, -2)
    rows = kernel.scheduler.strips * t.cluster * t.block_q
    shape = (p.batch, padded_rows(p.q_len), p.heads, p.value_dim)
    outputs = {
        "o": jax.ShapeDtypeStruct(shape, p.output_dtype),
        **dict.fromkeys(("lse", "base"), jax.ShapeDtypeStruct((p.batch, p.heads, rows), F32)),
    }
    o, lse, base = kernel.launch(tuple(inputs), outputs)(*inputs.values())
    return o[:, : p.q_len], lse[:, :, : p.q_len], base[:, :, : p.q_len]
