"""Flash attention's TPU kernels over a sequence on two devices, against the float64 oracle."""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from ejkernel.kernels.pallas.tpu.common.chip import interpreter
from ejkernel.kernels.pallas.tpu.flash_attention.implementation import ring_attention
from ejkernel.ops import interpret_mode
from ejktest.attention import Call, arrays, check, run

N = 2
pytestmark = pytest.mark.skipif(len(jax.devices()) < N, reason="needs two devices")


@pytest.fixture(autouse=True)
def interpreted():
    before = jax.config.read("jax_disable_most_optimizations")
    jax.config.update("jax_disable_most_optimizations", True)
    with interpret_mode(), interpreter():
        yield
    jax.config.update("jax_disable_most_optimizations", before)


def on_two(layout, strategy, q, k, v, *, bias, softmax_aux, q_segment_ids, **options):
    """The operation on the full arrays, a device for each half."""
    assert bias is None
    chunks = np.arange(q.shape[1]).reshape(2 * N, -1)
    order = (chunks[[0, 3, 1, 2]] if layout == "zigzag" else chunks).ravel()
    given = {"query": q, "key": k, "value": v, "q_segment_ids": jnp.asarray(q_segment_ids)}
    given = {name: jnp.take(x, order, 1) for name, x in given.items()}
    options["cfg"] = {**options["cfg"], "context_parallel": strategy}
    attend = partial(ring_attention, axis_name="sp", layout=layout, **options)
    mesh = jax.make_mesh((N,), ("sp",), axis_types=(AxisType.Auto,))
    mapped = jax.shard_map(
        lambda given, sinks: attend(**given, softmax_aux=sinks),
        mesh=mesh, in_specs=(P(None, "sp"), P()), out_specs=P(None, "sp"), check_vma=False,
    )  # fmt: skip
    out = mapped(given, softmax_aux)
    return jax.tree.map(lambda x: jnp.take(x, np.argsort(order), 1), out)


IDS = np.repeat([0, 1, -1, 2], [70, 100, 30, 56])[None].astype(np.int32)
CALL = Call(
    "packed", b=1, q=256, k=256, h=2, hk=1, d=64, blocks=(128, 128), sinks=(2, 2), cap=3.0,
    mask={"causal": True, "q_segment_ids": IDS},
)  # fmt: skip


@pytest.mark.parametrize(
    ("layout", "strategy"),
    [
        ("contiguous", "ring"),
        pytest.param("zigzag", "ring", marks=pytest.mark.slow),
        pytest.param("contiguous", "ulysses", marks=pytest.mark.slow),
        pytest.param("contiguous", "all_gather", marks=pytest.mark.slow),
    ],
)
def test_against_oracle(layout: str, strategy: str) -> None:
    x = arrays(CALL)
    check(CALL, x, *run(partial(on_two, layout, strategy), CALL, x))
