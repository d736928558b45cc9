"""Counts of the TPU check besides bundles: bytes of a pipeline, and outside kernels."""

from __future__ import annotations

import sys
from pathlib import Path

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from tools.tpu.copies import count_copies, decoding
from tools.tpu.outside import written_outside
from tools.tpu.traffic import Traffic, count_traffic


def _copy(table, x_ref, again_ref, o_ref):
    o_ref[...] = x_ref[...] + again_ref[...]


@jax.jit
def _gather_blocks(x, lengths):
    """Reads blocks in the order of a table that is computed from lengths, and block 0 always."""
    table = jnp.cumsum(lengths) - lengths
    spec = pl.BlockSpec((8, 128), lambda i, table: (table[i], 0))
    return pl.pallas_call(
        _copy,
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=1,
            grid=(4,),
            in_specs=[spec, pl.BlockSpec((8, 128), lambda i, table: (0, 0))],
            out_specs=pl.BlockSpec((8, 128), lambda i, table: (i, 0)),
        ),
        out_shape=jax.ShapeDtypeStruct((32, 128), jnp.float32),
        name="gather_blocks",
    )(table, x, x)


def test_blocks_that_stay_are_copied_once():
    shapes = jax.ShapeDtypeStruct((32, 128), "float32"), jax.ShapeDtypeStruct((4,), "int32")
    lengths = jnp.array([1, 0, 0, 2], jnp.int32)
    block, array = 8 * 128 * 4, 32 * 128 * 4
    # blocks 0, 1, 1, 1 by the table, block 0 once, four blocks of the result
    counted = count_traffic(_gather_blocks, shapes, (None, lengths), "gather_blocks")
    assert counted == Traffic((2 + 1 + 4) * block, 2 * array, 0, (8, 128))
    assert count_traffic(_gather_blocks, shapes, (None, None), "gather_blocks") is None
    assert count_traffic(_gather_blocks, shapes, (None, lengths), "another") is None


PROGRAM = """
%fused (p: f32[9,9]) -> f32[9,9] {
  ROOT %c = f32[9,9]{1,0} copy(%p)
}

ENTRY %main (p: bf16[8,128]) -> f32[8,128] {
  %p = bf16[8,128]{1,0:T(8,128)(2,1)} parameter(0)
  %copy.1 = bf16[128,8]{1,0:T(8,128)(2,1)} copy(%p)
  %pair = (f32[2]{0}, s32[]) fusion(%copy.1), kind=kLoop, calls=%fused
  %copy-start = (f32[4]{0}, f32[4]{0}, u32[]) copy-start(%pair)
  %copy-done = f32[4]{0} copy-done(%copy-start)
  ROOT %out = f32[8,128]{1,0:T(8,128)} custom-call(%copy.1), custom_call_target="tpu_custom_call"
}
"""


def test_what_is_written_around_a_kernel():
    """Transfers ahead of a kernel, and what lies inside a fusion, do not count."""
    counts = [(x.kind, x.bytes) for x in written_outside(PROGRAM)]
    assert counts == [("copy", 128 * 8 * 2), ("fusion", 2 * 4 + 4)]


def test_decoding_moves_little_more_than_it_reads():
    from ejktest.cases.paged import PAGED

    traffic = decoding(PAGED["paged"], lens=(300, 520, 77)).traffic("TPU v5 lite")
    assert 1.0 <= traffic.ratio <= 1.1


def test_copies_by_hand_are_counted_by_their_ends():
    def kernel(x_ref, o_ref, held_ref):
        pltpu.sync_copy(x_ref.at[pl.ds(0, 8)], held_ref)  # one end in device memory
        pltpu.sync_copy(x_ref.at[pl.ds(8, 24)], o_ref.at[pl.ds(8, 24)])  # two
        pltpu.sync_copy(held_ref, o_ref.at[pl.ds(0, 8)])

    def run():
        return pl.pallas_call(
            kernel,
            in_specs=[pl.BlockSpec(memory_space=pltpu.HBM)],
            out_specs=pl.BlockSpec(memory_space=pltpu.HBM),
            out_shape=jax.ShapeDtypeStruct((32, 128), jnp.float32),
            scratch_shapes=[pltpu.VMEM((8, 128), jnp.float32)],
            interpret=pltpu.InterpretParams(),
        )(jnp.ones((32, 128)))

    assert count_copies(run, "TPU v5 lite") == (8 + 2 * 24 + 8) * 128 * 4
