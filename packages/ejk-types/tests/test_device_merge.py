"""Parts of rows on several devices, merged on all of them: values, gradients, collectives."""

from __future__ import annotations

import collections
import re
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from ejkernel.types.attention.device_merge import START_BYTES, MergeBytes, merge_over_devices
from ejktest.tolerance import check_close

N, HEADS, DIM = 8, 4, 64
pytestmark = pytest.mark.skipif(len(jax.devices()) < N, reason="needs eight devices")
COLLECTIVES = re.compile(r" (all-gather|all-to-all|all-reduce|reduce-scatter)(-start)?\(")
ROWS = {"all-gather": 3, "all-reduce": 4096 // HEADS}
"""Rows of which the devices send each other parts in one way or the other."""
BOTH = [("all-gather", "float32"), ("all-gather", "bfloat16"), ("all-reduce", "float32")]


def parts(rows, dtype):
    """Outputs ``[n, rows, heads, dim]`` and lse of every device; some rows see nothing."""
    rng = np.random.default_rng(0)
    o = jnp.asarray(rng.standard_normal((N, rows, HEADS, DIM)), dtype)
    lse = rng.standard_normal((N, rows, HEADS)).astype(np.float32) * 3
    lse[1, 0], lse[:, 1] = -np.inf, -np.inf
    return o.at[1, 0].set(jnp.nan).at[:, 1].set(jnp.nan), jnp.asarray(lse)


def exact(o, lse):
    o, lse = (np.asarray(x).astype(np.float64) for x in (o, lse))
    weight = np.exp(lse)
    total = weight.sum(0)
    terms = np.where(weight[..., None] > 0, o, 0) * weight[..., None]
    with np.errstate(divide="ignore", invalid="ignore"):
        merged = np.where(total[..., None] > 0, terms.sum(0) / total[..., None], 0)
        return merged, np.log(total)


def merge(o, lse):
    """Merges over two mesh axes; returns what the last device has."""
    mesh = Mesh(np.array(jax.devices()[:N]).reshape(2, 4), ("a", "b"))

    def body(o, lse):
        return merge_over_devices(o[0], lse[0], ("a", "b"))

    split = partial(jax.shard_map, mesh=mesh, in_specs=P(("a", "b")), check_vma=False)
    return split(body, out_specs=P())(o, lse)


@pytest.mark.parametrize(("kind", "dtype"), BOTH)
def test_merged_parts_are_the_attention_over_all_keys(kind, dtype):
    o, lse = parts(ROWS[kind], dtype)
    compiled = jax.jit(merge).lower(o, lse).compile()
    count = collections.Counter(m[1] for m in COLLECTIVES.finditer(compiled.as_text()))
    assert count == {kind: 1 if kind == "all-gather" else 2}
    found, reference = compiled(o, lse), exact(o, lse)
    assert found[0].dtype == found[1].dtype == jnp.float32
    for name, x, y in zip(("o", "lse"), found, reference, strict=True):
        check_close(x, y, name=name)


@pytest.mark.parametrize(("kind", "dtype"), BOTH)
def test_gradients_reach_every_device(kind, dtype):
    o, lse = parts(ROWS[kind], dtype)
    o = jnp.where(jnp.isnan(o), 0, o)
    alive = jnp.isfinite(lse).any(0)

    def loss(merging, o, lse):
        out, total = merging(o, lse)
        return jnp.sum(jnp.sin(out)) + jnp.sum(jnp.where(alive, total, 0) ** 2)

    def plainly(o, lse):
        base = jnp.where(alive, jax.lax.stop_gradient(lse).max(0), 0)
        weight = jnp.exp(lse - base[None])
        total = jnp.where(alive, weight.sum(0), 1)
        merged = (weight[..., None] * o.astype(lse.dtype)).sum(0) / total[..., None]
        return merged, base + jnp.log(total)

    found = jax.jit(jax.grad(partial(loss, merge), (0, 1)))(o, lse)
    with jax.enable_x64(True):
        wide = o.astype(jnp.float64), lse.astype(jnp.float64)
        reference = jax.jit(jax.grad(partial(loss, plainly), (0, 1)))(*wide)
    for name, x, y in zip(("do", "dlse"), found, reference, strict=True):
        check_close(x, np.asarray(y), name=name)


@pytest.mark.parametrize("devices", [2, 4, 8, 64])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_fewer_bytes_decide_where_there_are_many(dtype, devices):
    """A gather costs a device what the others have; all-reduces move each array nearly twice."""
    size = np.dtype(jnp.dtype(dtype)).itemsize
    dtypes = {"out_dtype": dtype, "lse_dtype": "float32"}
    of = partial(MergeBytes.for_rows, dim=512, devices=devices, **dtypes)
    few, many = of(rows=1), of(rows=10**6)
    assert few.is_one_gather and few.gathered == 512 * size + 4
    assert (few.summed, few.largest) == (513 * 4, 4)
    assert many.is_one_gather == (devices <= (4 if dtype == "bfloat16" else 2))
    most = max(rows for rows in range(1, 20000) if of(rows=rows).is_one_gather)
    assert (devices - 1) * of(rows=most + 1).gathered > START_BYTES
