"""Probabilities of 8 bits as the left operand of a matmul, without exchanging values between lanes.

A thread has columns 2 t, 2 t + 1, 2 t + 8, 2 t + 9 of every 16 of a float32 result (t: its lane
modulo 4), and an 8-bit operand wants 4 t to 4 t + 3 there. A matmul sums over these columns: it may
take them in any order in which its other operand comes too.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir

from ejkernel.kernels.pallas.gpu.common.registers import LAYOUT, asm, element, i32

PERMUTED = 16  # neighbouring columns whose order changes among themselves
FLOAT8 = jnp.float8_e4m3fn
TEXT = (
    "{ .reg .b16 a, b; cvt.rn.satfinite.e4m3x2.f32 a, $2, $1; "
    "cvt.rn.satfinite.e4m3x2.f32 b, $4, $3; mov.b32 $0, {a, b}; }"
)


def in_operand_order(x: jax.Array) -> jax.Array:
    """Returns ``x`` with every 16 entries of its last axis in the order of ``to_8_bit``."""
    *leading, n = x.shape
    halves = x.reshape(*leading, n // PERMUTED, 2, 4, 2)
    return halves.swapaxes(-3, -2).reshape(x.shape)


def to_8_bit(x: jax.Array) -> jax.Array:
    """Returns float32 ``x``, in the layout of matmul results, as an 8-bit left operand.

    Its columns are in the order of ``in_operand_order``. Values beyond 448 become 448.
    """
    kind = plgpu.ShapeDtypeStruct(x.shape, FLOAT8, layout=plgpu.Layout.WGMMA_8BIT)

    @plgpu.inline_mgpu(arg_types=(LAYOUT,), return_type=kind)
    def apply(_: Any, x: Any) -> Any:
        layout = mgpu.WGMMA_LAYOUT_8BIT
        four = ir.VectorType.get((4,), mgpu.utils.dtype_to_ir_type(FLOAT8))
        out = np.empty(layout.registers_shape(x.shape), dtype=object)
        for at in np.ndindex(out.shape):
            # axes as in ``TileRegister``; here axis 1 is 16 columns
            pairs = []
            for eight in (2 * at[1], 2 * at[1] + 1):
                source = [0] * x.registers.ndim
                source[0], source[1], source[4] = at[0], eight, at[4]
                pairs.append(x.registers[tuple(source)])
            values = [element(pair, n) for pair in pairs for n in range(2)]
            word = asm(TEXT, "=r,f,f,f,f", i32(), *values)
            out[at] = mgpu.utils.bitcast(word, four)
        return mgpu.FragmentedArray(_registers=out, _layout=layout, _is_signed=None)

    return apply(x)
