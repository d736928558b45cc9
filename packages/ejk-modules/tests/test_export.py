"""Exported programs with a symbolic batch: one program, any size, also after serialisation."""

import jax
import numpy as np
import pytest
from jax import export

import ejkernel.modules as modules
from ejkernel.ops import KernelNotSupported
from ejkernel.types import MaskInfo
from ejktest.calls import CALLS, B, S, call
from ejktest.variants import ids

# packed calls have no batch: their sequences share one axis of rows
PACKED = ("ragged_page_attention", "ragged_page_attention_v3", "grouped_matmul")


def symbolic(x, size):
    batched = x.ndim and x.shape[0] == B
    return jax.ShapeDtypeStruct((size, *x.shape[1:]) if batched else x.shape, x.dtype)


@pytest.mark.parametrize("operation", [name for name in sorted(CALLS) if name not in PACKED])
def test_a_symbolic_batch(operation):
    c = call(operation)
    run = jax.jit(lambda arrays: getattr(modules, operation)(**arrays, **c.static, platform="xla"))
    (size,) = export.symbolic_shape("b")
    exported = export.export(run)({n: symbolic(x, size) for n, x in c.arrays.items()})
    for rows in (B, 1):
        arrays = {n: x[:rows] if x.ndim and x.shape[0] == B else x for n, x in c.arrays.items()}
        ours, want = exported.call(arrays), run(arrays)
        for a, b in zip(jax.tree.leaves(ours), jax.tree.leaves(want), strict=True):
            np.testing.assert_allclose(a, b, atol=2e-5)


def test_a_mask_travels_with_its_program():
    c = call("flash_attention")
    qkv = {n: c.arrays[n] for n in ("query", "key", "value")}
    mask = MaskInfo.from_segments(ids([0] * 5 + [1] * (S - 5))) & MaskInfo(sliding_window=3)
    run = jax.jit(lambda a, m: modules.flash_attention(**a, mask_info=m, platform="xla"))
    (size,) = export.symbolic_shape("b")
    exported = export.export(run)({n: symbolic(x, size) for n, x in qkv.items()}, mask)
    pytest.importorskip("flatbuffers")  # what JAX serialises with
    again = export.deserialize(exported.serialize())
    np.testing.assert_allclose(again.call(qkv, mask), run(qkv, mask), atol=1e-6)


def test_symbolic_sizes_are_neither_tuned_nor_given_to_other_platforms():
    c = call("flash_attention")
    (size,) = export.symbolic_shape("b")
    arrays = {n: symbolic(x, size) for n, x in c.arrays.items()}
    found = modules.supports("flash_attention", **arrays, platform="triton")
    assert not found
    with pytest.raises(KernelNotSupported):
        jax.eval_shape(lambda a: modules.flash_attention(**a, platform="triton"), arrays)
    executor = modules.create_default_executor(autotune=True)
    told = executor.explanation(modules.FlashAttention(), **arrays)
    assert (told.tier, told.platform) == ("heuristics", "xla")
