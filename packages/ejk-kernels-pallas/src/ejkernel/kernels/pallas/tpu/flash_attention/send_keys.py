"""Flash attention on the keys at hand, while remote copies send them to the next device of a ring.

    o, lse over the keys of this step;  next keys = keys of the device before

The mainloop is that of ``forward``. Its first grid step starts two copies from device memory to
device memory, keys and values, and its last one waits for them, so that they run under all matmuls
in between. Present and next keys are two arrays, an operand and a result, which a loop over the
steps of a ring exchanges.

All devices run one program with one mask, whose rules compare positions: whose keys they are is
known on the device alone. A result has the same address on every device. A copy may begin when the
next device has entered the same launch, before which its result may be an array in use: it says so
by the barrier semaphore. The same launch cannot be entered twice before the copy, since it ends
only when the keys that it waits for have come.

Bound: that of ``forward``, or 2 kv d elements over a link where that takes longer. One core of a
chip runs the grid, since a copy is sent once.

Source: Liu et al. 2023, Ring Attention (arXiv 2310.01889), section 3.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from ejkernel.kernels.pallas.tpu.flash_attention.forward import flash_kernel, operands_of
from ejkernel.kernels.pallas.tpu.flash_attention.layout import Layout
from ejkernel.kernels.pallas.tpu.flash_attention.specs import Specs, launch_kernel
from ejkernel.ops.varying import vary_like

COLLECTIVE_ID = 20
"""Number of the barrier semaphore: launches that may run at once need different ones."""


@dataclass(frozen=True)
class SingleCoreSpecs(Specs):
    """Specs of a grid that one core runs in order."""

    @property
    def semantics(self) -> tuple[str, ...]:
        return ("arbitrary",) * len(self.grid)


BEFORE, AFTER = range(2)
LOGICAL = pl.DeviceIdType.LOGICAL


def neighbours(axis_name: str) -> jax.Array:
    """Returns the logical ids of the devices before and after this one, int32 ``[2]``.

    Computed here, because Pallas cannot compute them of indices of an axis inside a kernel where
    shard_map tracks the axes over which arrays vary.
    """
    ids = jnp.zeros(2, jnp.int32)
    for name, size in jax.sharding.get_abstract_mesh().shape.items():
        index = lax.axis_index(name)
        if name == axis_name:
            index = (index + jnp.array([size - 1, 1], jnp.int32)) % size
        ids = ids * size + index
    return ids


def wait_until_ready(devices: Any) -> None:
    """Tells the device before that its copies may come, and waits for the one after."""
    barrier = pltpu.get_barrier_semaphore()
    pl.semaphore_signal(barrier, 1, device_id=devices[BEFORE], device_id_type=LOGICAL)
    pl.semaphore_wait(barrier, 1)


def _kernel(
    layout: Layout,
    table: Any,
    devices: Any,
    operands: list[Any],
    keys: list[Any],
    o_ref: Any,
    lse_ref: Any,
    base_ref: Any,
    next_k: Any,
    next_v: Any,
    scratch: list[Any],
    sent: Any,
    received: Any,
) -> None:
    """Runs a grid step of ``forward``, the first and last of which start and end the copies.

    ``operands`` and ``scratch`` go to ``flash_kernel``; ``keys``: keys and values as whole
    arrays; ``sent`` and ``received``: two semaphores each.
    """
    copies = [
        pltpu.make_async_remote_copy(
            source, target, sent.at[n], received.at[n], devices[AFTER], LOGICAL
        )
        for n, (source, target) in enumerate(zip(keys, (next_k, next_v), strict=True))
    ]
    indices = [(pl.program_id(axis), pl.num_programs(axis) - 1) for axis in range(4)]

    @pl.when(functools.reduce(lambda a, b: a & b, (index == 0 for index, _ in indices)))
    def _send() -> None:
        wait_until_ready(devices)
        for copy in copies:
            copy.start()

    flash_kernel(layout, table, *operands, o_ref, lse_ref, base_ref, *scratch)

    @pl.when(functools.reduce(lambda a, b: a & b, (index == last for index, last in indices)))
    def _wait() -> None:
        for copy in copies:
            copy.wait()


def attend_and_send(
    layout: Layout,
    table: Any,
    arrays: tuple[jax.Array, ...],
    pairs: Sequence[tuple[jax.Array, jax.Array]],
    axis_name: str,
) -> list[jax.Array]:
    """Returns what ``forward.forward`` returns, and the keys and values of the device before.

    Calls under ``vmap`` run one after the other: their barriers are one semaphore.
    """
    launch = functools.partial(launch_sending, layout, axis_name)
    return jax.custom_batching.sequential_vmap(launch)(table, arrays, list(pairs))


def launch_sending(
    layout: Layout,
    axis_name: str,
    table: Any,
    arrays: tuple[jax.Array, ...],
    pairs: Sequence[tuple[jax.Array, jax.Array]],
) -> list[jax.Array]:
    """Returns what ``attend_and_send`` does, by one launch."""
    specs, keys = SingleCoreSpecs(layout), arrays[1:]
    devices = vary_like(neighbours(axis_name), arrays[0])
    operands, in_specs, outputs, scratch = operands_of(specs, arrays, None, pairs)
    # XLA puts other operands and results into vector memory where they fit
    hbm_outputs = [pltpu.HBM.from_type(jax.typeof(x)) for x in keys]
    if not layout.chip.interpret:
        keys = tuple(pltpu.with_memory_space_constraint(x, pltpu.HBM) for x in keys)
    return launch_kernel(
        _kernel,
        "ejkernel_flash_fwd_send",
        specs,
        table,
        [devices, operands, list(keys)],
        [
            pl.BlockSpec(memory_space=pltpu.SMEM),
            in_specs,
            [pl.BlockSpec(memory_space=pltpu.HBM) for _ in keys],
        ],
        outputs,
        [scratch, *[pltpu.SemaphoreType.DMA((2,))] * 2],
        accumulators=1,
        columns=layout.dim + layout.value_dim,
        moved=2 * sum(x.nbytes for x in arrays),
        hbm_outputs=hbm_outputs,
        collective_id=COLLECTIVE_ID,
    )
