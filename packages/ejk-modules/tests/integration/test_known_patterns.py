"""Patterns of blocks that are known while tracing: their lists are constants of the program."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractDevice

from ejkernel import modules
from ejkernel.ops import interpret_mode
from ejktest.bound import on, struct
from ejktest.drawn import array
from ejktest.grids import cover

H200 = AbstractDevice(device_kind="NVIDIA H200", num_cores=132, platform="cuda")
PATTERN = np.tri(4, dtype=bool) & (np.arange(4) != 1)


@pytest.mark.parametrize("given", cover(["numpy", "builder", "traced"], "builder", "traced"))
def test_a_program_for_hopper_makes_no_list(given):
    pytest.importorskip("ejkernel.kernels.pallas")
    x, built = struct(1, 512, 2, 128), []

    def builder(q_len, kv_len, heads):
        built.append((q_len, kv_len, heads))
        return jnp.asarray(PATTERN) & jnp.ones((4, 4), bool)

    def loss(q, k, v, traced):
        known = {"builder": {"mask_builder": builder}, "numpy": {"block_mask": PATTERN}}
        found = known.get(given, {"block_mask": traced})
        o = modules.blocksparse_attention(q, k, v, causal=True, platform="pallas", **found)
        return o.astype(jnp.float32).sum()

    with on(H200):
        trace = jax.jit(jax.grad(loss, (0, 1, 2))).trace(x, x, x, struct(4, 4, dtype=bool))
        text = trace.lower(lowering_platforms=("cuda",)).as_text()
    # attention and two gradients; in either pass a kernel makes lists and another orders them
    assert text.count("custom_call @mosaic_gpu") == 3 + (4 if given == "traced" else 0)
    assert ("tile_lists" in text) == (given == "traced")
    assert built == ([(512, 512, 2)] if given == "builder" else [])


def test_triton_gives_the_same_bits(monkeypatch):
    """Without a list made on the device."""
    lists = pytest.importorskip(
        "ejkernel.kernels.triton.flash_attention.lists", exc_type=ImportError
    )
    rng = np.random.default_rng(0)
    q, k, v = (array(rng.standard_normal((1, 64, 2, 16)), jnp.float32) for _ in range(3))

    def gradients(q, k, v, pattern):
        def attend(*x):
            blocks = {"q_block_size": 16, "kv_block_size": 16}
            return modules.blocksparse_attention(
                *x, block_mask=pattern, causal=True, platform="triton", **blocks
            )

        out, pull = jax.vjp(attend, q, k, v)
        return out, pull(out)

    with interpret_mode():
        traced = jax.jit(gradients)(q, k, v, jnp.asarray(PATTERN))
        monkeypatch.setattr(lists, "list_operands", None)
        known = jax.jit(lambda *x: gradients(*x, PATTERN))(q, k, v)
    jax.tree.map(np.testing.assert_array_equal, traced, known)
