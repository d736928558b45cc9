"""Two processes of one job: sharded calls over the devices of both, and the death of one.

Run as a program, this file is one of the processes.
"""

from __future__ import annotations

import dataclasses
import os
import socket
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

PROCESSES, DEVICES = 2, 2


def run_process(rank: int, port: str, progress: str) -> None:
    """Writes a line for each thing that works; process 1 dies before the last."""
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.distributed.initialize("localhost:" + port, PROCESSES, rank)

    from ejkernel.kernels.xla.kernel import XlaKernel
    from ejkernel.modules import flash_attention, ring_attention

    # Gloo's threads print pieces of lines between those of Python
    def tell(*words):
        with open(progress, "a") as file:
            print(*words, file=file)

    XlaKernel.partitioned = True  # as the kernels of GPUs are
    mesh = jax.make_mesh((PROCESSES * DEVICES,), ("x",), axis_types=(AxisType.Auto,))
    rng = np.random.default_rng(0)
    q, k, v = (rng.standard_normal((1, 16, n, 8), np.float32) for n in (8, 4, 4))

    def over_devices(spec):
        place = NamedSharding(mesh, spec)
        return [jax.make_array_from_callback(x.shape, place, x.__getitem__) for x in (q, k, v)]

    def attend(q, k, v):
        return flash_attention(q, k, v, causal=True, platform="xla")

    def attend_in_ring(q, k, v):
        return ring_attention(q, k, v, axis_name="x", mesh=mesh, causal=True)

    expected = pulled(attend)(q, k, v)
    heads, sequence = P(None, None, "x"), P(None, "x")
    program = pulled(attend).lower(*over_devices(heads)).compile()
    assert "all-gather" not in program.as_text()
    assert_same(program(*over_devices(heads)), expected)
    tell("partitioned")
    ring, arrays = pulled(attend_in_ring), over_devices(sequence)
    assert_same(ring(*arrays), expected)
    tell("ring")
    tell("agreed", *agreed_configs(rank))

    if rank == 1:
        os._exit(1)
    try:
        jax.block_until_ready(ring(*arrays))
    except jax.errors.JaxRuntimeError:
        tell("error")
    os._exit(0)  # a shutdown would wait for process 1


def agreed_configs(rank: int):
    """The configs that the tuner and the heuristics choose, each process by itself another one."""
    from ejkernel.ops import ConfigCache, ConfigSelectorChain, Executor, Kernel

    @dataclasses.dataclass(frozen=True)
    class Config:
        tile: int = 0

    class Tuned(Kernel[Config, jax.Array]):
        def run(self, x, *, cfg):
            return x

        def heuristic_cfg(self, inv):
            return Config(10 + rank)

        def config_space(self, inv):
            return [Config(20 + rank), Config(30 + rank)]

    for tune in (False, True):
        executor = Executor(ConfigSelectorChain(ConfigCache(), autotune=tune))
        yield executor.choose_config(Tuned(), jnp.ones(4 + tune)).tile


def pulled(function):
    def run(*arrays):
        out, pull = jax.vjp(function, *arrays)
        return out, *pull(jnp.sin(out))

    return jax.jit(run)


def assert_same(found, expected):
    """On the devices of this process."""
    for x, y in zip(found, expected, strict=True):
        assert x.addressable_shards
        for shard in x.addressable_shards:
            np.testing.assert_allclose(shard.data, np.asarray(y)[shard.index], atol=2e-5)


def test_two_processes_share_calls_and_notice_a_death(tmp_path):
    with socket.socket() as s:
        s.bind(("localhost", 0))
        port = str(s.getsockname()[1])
    # programs for several devices must not be read from the disk
    environment = {n: x for n, x in os.environ.items() if n != "JAX_COMPILATION_CACHE_DIR"}
    flags = [x for x in environment.get("XLA_FLAGS", "").split() if "device_count" not in x]
    flags.append(f"--xla_force_host_platform_device_count={DEVICES}")
    environment |= {"XLA_FLAGS": " ".join(flags), "EJKERNEL_AUTOTUNE_POLICY": "heuristics"}
    processes = [
        subprocess.Popen(
            [sys.executable, __file__, str(rank), port, str(tmp_path / str(rank))],
            env=environment, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        )
        for rank in range(PROCESSES)
    ]  # fmt: skip
    try:
        found = [process.communicate(timeout=240) for process in processes]
    finally:
        for process in processes:
            process.kill()
    (_, error), _ = found
    first, second = ((tmp_path / str(rank)).read_text().splitlines() for rank in range(PROCESSES))
    assert [x.split()[0] for x in first] == ["partitioned", "ring", "agreed", "error"], error
    assert second == first[:3]  # the same configs
    assert [process.returncode for process in processes] == [0, 1]


if __name__ == "__main__":
    run_process(int(sys.argv[1]), *sys.argv[2:])
