"""Flash attention's TPU kernels over a sequence on two devices, against the float64 oracle."""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import tpu as pltpu
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from ejkernel.kernels.pallas.tpu.flash_attention.implementation import ring_attention
from ejkernel.kernels.pallas.tpu.flash_attention.send_keys import neighbours
from ejktest.attention import Call, arrays, check, oracle_case, run
from ejktest.device import assert_no_races, interpreted_tpu
from ejktest.oracles import attention as oracle
from ejktest.tolerance import check_close

N = 2
pytestmark = pytest.mark.skipif(len(jax.devices()) < N, reason="needs two devices")


SENDING = "ring_remote_copy"
# copies between devices are in the simulator of TPUs alone, which also watches for races
PARAMS = pltpu.InterpretParams(detect_races=True, uninitialized_memory="nan")


def is_sending(test: str) -> bool:
    return SENDING in test or "sent" in test


@pytest.fixture(autouse=True)
def interpreted(request):
    with interpreted_tpu(PARAMS if is_sending(request.node.name) else True):
        yield


def on_devices(layout, strategy, q, k, v, *, bias, softmax_aux, q_segment_ids=None, n=N, **options):
    """The operation on the full arrays, a device for each shard."""
    assert bias is None
    chunks = np.arange(q.shape[1]).reshape(2 * n, -1)
    pairs = [i for r in range(n) for i in (r, 2 * n - 1 - r)]
    order = (chunks[pairs] if layout == "zigzag" else chunks).ravel()
    given = {"query": q, "key": k, "value": v, "q_segment_ids": q_segment_ids}
    given = {name: jnp.take(x, order, 1) for name, x in given.items() if x is not None}
    options["cfg"] = {**options["cfg"], "context_parallel": strategy}
    attend = partial(ring_attention, axis_name="sp", layout=layout, **options)
    mesh = jax.make_mesh((n,), ("sp",), axis_types=(AxisType.Auto,))
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
        # contiguous devices run other numbers of backward kernels, which the simulator waits for
        pytest.param("zigzag", SENDING, marks=pytest.mark.slow),
    ],
)
def test_against_oracle(layout: str, strategy: str) -> None:
    x = arrays(CALL)
    # at once: XLA's threads are few, and the interpreter needs them while the reference runs
    results = jax.block_until_ready(run(partial(on_devices, layout, strategy), CALL, x))
    check(CALL, x, *results)
    if strategy == SENDING:
        assert_no_races()


@pytest.mark.parametrize("layout", ["zigzag", pytest.param("contiguous", marks=pytest.mark.slow)])
def test_keys_sent_by_the_kernel(layout: str) -> None:
    """Three remote copies on each of four devices, whose shards see other parts of them."""
    n = 4
    if len(jax.devices()) < n:
        pytest.skip("needs four devices")
    call = Call(
        "sent", b=1, q=256, k=256, h=2, hk=1, d=64, blocks=(128, 128), mask={"causal": True}
    )
    x = arrays(call)
    attend = partial(on_devices, layout, SENDING, x["q"], x["k"], x["v"], n=n, return_lse=True)
    options = {"bias": None, "softmax_aux": None, "causal": True, "cfg": {}}
    o, lse = jax.block_until_ready(jax.jit(partial(attend, **options))())
    good = oracle.attention(oracle_case(call, x, 0))
    check_close(np.asarray(o), good.o, name="o")
    check_close(np.asarray(lse), good.lse, name="lse")
    assert_no_races()


def test_neighbours_have_numbers_in_the_mesh() -> None:
    if len(jax.devices()) < 6:
        pytest.skip("needs six devices")
    mesh = jax.make_mesh((3, 2), ("sp", "dp"), axis_types=(AxisType.Auto,) * 2)
    every = jax.shard_map(
        lambda: neighbours("sp")[None, None], mesh=mesh, in_specs=(), out_specs=P("sp", "dp")
    )
    numbers = np.arange(6).reshape(3, 2)
    want = np.stack([np.roll(numbers, 1, axis=0), np.roll(numbers, -1, axis=0)], axis=-1)
    np.testing.assert_array_equal(jax.jit(every)(), want)
