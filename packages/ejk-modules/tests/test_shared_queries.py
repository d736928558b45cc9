"""blocksparse_attention over queries that devices share, against one device and the oracle."""

from __future__ import annotations

import re
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from ejkernel.modules import blocksparse_attention, explain
from ejkernel.types import MaskInfo
from ejktest.drawn import normal
from ejktest.grids import cover
from ejktest.oracles.attention import Case, attention
from ejktest.tolerance import check_close

pytestmark = pytest.mark.skipif(len(jax.devices()) < 8, reason="needs eight devices")

B, S, H, HK, D = 2, 24, 4, 2, 8
TOKENS = P("dp", "sp", "tp")
KEYS = P("dp", None, "tp")


@pytest.fixture(autouse=True)
def untuned(monkeypatch):
    monkeypatch.setenv("EJKERNEL_AUTOTUNE_POLICY", "heuristics")


def qkv():
    return [normal(B, S, n, D, seed=i) for i, n in enumerate((H, HK, HK))]


def mesh_of(kind):
    return jax.make_mesh((4, 2, 1), ("sp", "tp", "dp"), axis_types=(kind,) * 3)


# a device has 6 rows: two blocks, or parts of them
@pytest.mark.parametrize("q_block", cover([3, 8], 3))
def test_devices_share_the_queries_of_a_call(q_block):
    """Indices, patterns, segments, bias and dropout of the whole call, in each of three ways."""
    blocks = -(-S // q_block)
    pattern = np.random.default_rng(0).random((1, H, blocks, 6)) < 0.7
    ids = jnp.repeat(jnp.asarray([[0] * 9 + [1] * 11 + [-1] * 4], jnp.int32), B, 0)
    options = {
        "causal": True, "causal_offset": 2, "sliding_window": (13, 0), "q_block_size": q_block,
        "kv_block_size": 4, "return_lse": True, "dropout_prob": 0.3, "dropout_seed": jnp.int32(5),
    }  # fmt: skip

    def run(q, k, v, bias, pattern, ids, do, **where):
        def call(q, k, v, bias):
            mask = MaskInfo.from_segments(ids)
            arrays = {"bias": bias, "block_mask": pattern, "mask_info": mask}
            return blocksparse_attention(q, k, v, **arrays, **options, **where)

        (out, lse), pull = jax.vjp(call, q, k, v, bias)
        return out, lse, *pull((do, jnp.zeros_like(lse)))

    arrays = *qkv(), normal(1, H, S, S, seed=4), pattern, ids, normal(B, S, H, D, seed=5)
    specs = TOKENS, KEYS, KEYS, P(None, "tp", "sp"), P(None, "tp"), P("dp", "sp"), TOKENS
    expected = jax.jit(run)(*arrays)

    def check(results):
        for x, y in zip(results, expected, strict=True):
            np.testing.assert_allclose(x, y, rtol=2e-5, atol=2e-5)

    mesh = mesh_of(AxisType.Auto)
    placed = [jax.device_put(x, NamedSharding(mesh, s)) for x, s in zip(arrays, specs, strict=True)]
    compiled = jax.jit(run).lower(*placed).compile()
    check(compiled(*placed))
    text = compiled.as_text()
    # of tokens, only the key ids, which say the same as the sharded query ids, are gathered
    assert not re.search(r" f32\[[\d,]*\]\S* (all-gather|all-to-all)(-start)?\(", text)
    assert compiled.output_shardings[0].is_equivalent_to(placed[0].sharding, 4)
    in_specs = (*specs[:3], None, specs[3])
    check(jax.jit(partial(run, mesh=mesh, in_specs=in_specs))(*arrays))
    explicit = mesh_of(AxisType.Explicit)
    with jax.set_mesh(explicit):
        typed = [NamedSharding(explicit, s if i != 5 else P("dp")) for i, s in enumerate(specs)]
        check(jax.jit(run)(*map(jax.device_put, arrays, typed)))


def test_shared_queries_are_those_of_the_oracle():
    q, k, v = qkv()
    mesh = mesh_of(AxisType.Auto)
    placed = [
        jax.device_put(x, NamedSharding(mesh, s))
        for x, s in zip((q, k, v), (TOKENS, KEYS, KEYS), strict=True)
    ]
    pattern = np.random.default_rng(1).random((6, 6)) < 0.6
    call = partial(
        blocksparse_attention, causal=True, block_mask=pattern, q_block_size=4, kv_block_size=4
    )
    visible = np.kron(pattern, np.ones((4, 4), bool)) & np.tri(S, dtype=bool)
    expected = attention(Case(q, k, v, see=visible[None, None]))
    check_close(jax.jit(call)(*placed), expected.o, dtype="float32")
    notes = explain("blocksparse_attention", *placed, causal=True).notes
    assert "queries over sp: each device attends to all keys with its own" in notes
