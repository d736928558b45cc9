"""Agreement of the processes of one job."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
import threading
import time
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import pytest

from ejkernel.ops import (
    AutotuneError,
    AutotuneResult,
    ConfigCache,
    ConfigSelectorChain,
    Executor,
    Invocation,
    Kernel,
    KernelRegistry,
    NoConfigError,
    OpConfig,
    RegisteredKernel,
    Trial,
    autotune,
    autotune_recorded,
    default_key_builder_with_sharding,
)
from ejkernel.ops.execution import multihost, tuning
from ejkernel.ops.execution.multihost import PeerGroup
from ejktest.device import H200, on


@dataclass(frozen=True)
class Config:
    tile: int = 0


class Store:
    """The key-value store of a coordination service, in one process."""

    def __init__(self):
        self.values = {}
        self.changed = threading.Condition()

    def key_value_set(self, key, value):
        with self.changed:
            if key in self.values:
                raise RuntimeError("ALREADY_EXISTS")
            self.values[key] = value
            self.changed.notify_all()

    def blocking_key_value_get(self, key, timeout_ms):
        with self.changed:
            if not self.changed.wait_for(lambda: key in self.values, timeout_ms / 1000):
                raise RuntimeError("DEADLINE_EXCEEDED")
            return self.values[key]


class Tuned(Kernel[Config, jax.Array]):
    """Every process would choose another tile."""

    def __init__(self, mine):
        super().__init__(name="tuned")
        self.mine = mine

    def run(self, x, *, cfg):
        return x

    def heuristic_cfg(self, inv):
        if self.mine is None:
            raise NotImplementedError
        return Config(self.mine)


X = jnp.ones(4)


@pytest.fixture
def process(monkeypatch):
    """``process(i)``: an executor of process i, used under that process's identity."""
    store = Store()
    groups = {i: PeerGroup(store, i, timeout_s=0.3) for i in range(2)}
    current = [0]
    monkeypatch.setattr(multihost, "peers", lambda: groups[current[0]])

    class Process:
        def __init__(self, number):
            self.number = number
            self.executor = Executor(ConfigSelectorChain(ConfigCache(), autotune=False))
            self.store = store

        def choose(self, kernel, x=X, **options):
            current[0] = self.number
            return self.executor.choose_config(kernel, x, **options)

    return Process


def test_the_first_process_decides(process):
    leader, follower = process(0), process(1)
    assert leader.choose(Tuned(16)) == Config(16)
    assert follower.choose(Tuned(32)) == Config(16)
    assert len(leader.store.values) == 1
    assert leader.choose(Tuned(64)) == follower.choose(Tuned(128)) == Config(16)
    follower.executor.selector.cache.put(
        default_key_builder_with_sharding(Tuned(0), (X,)), Config(8)
    )
    assert follower.choose(Tuned(0)) == Config(8)  # in memory: no need to ask


def test_an_agreed_config_serves_only_the_calls_that_its_platform_can_do(process):
    """Values of floats are no part of a key, and some platforms know only some of them."""
    registry = KernelRegistry()

    def supports(inv):
        return "rate: only 0" if inv.arguments["rate"] else None

    for platform, priority, why_not in ("triton", 100, supports), ("cuda", 50, None):

        @registry.register("dropped", platform, "gpu", priority, supports=why_not)
        def dropped(x, rate=0.0, *, cfg=None):
            return x

    class Dropped(RegisteredKernel[OpConfig, jax.Array]):
        algorithm = "dropped"

        def run(self, x, rate=0.0, *, cfg):
            raise AssertionError("implementations run")

    kernel = Dropped(registry=registry)
    with on(H200):
        for rate, platform in (0.0, "triton"), (0.1, "cuda"), (0.0, "triton"), (0.2, "cuda"):
            for number in range(2):
                assert process(number).choose(kernel, rate=rate).platform == platform


def test_offline_tuning_is_done_once_for_all(process, monkeypatch):
    tuned = []

    class Chosen(Tuned):
        def config_space(self, inv):
            return [Config(1), Config(2)]

    def tune(self, inv, configs=None):
        tuned.append(current)
        return AutotuneResult(inv.kernel, inv.key, Config(current), 1.0, [Trial(Config(current))])

    monkeypatch.setattr(tuning.Autotuner, "tune", tune)
    found = {}
    for current in (0, 1):
        member = process(current)
        member.choose(Tuned(64), X[:1])  # takes the identity of this process
        (result,) = autotune_recorded([Invocation(Chosen(8), (X,))], executor=member.executor)
        found[current] = (result.best, autotune(Chosen(8), X[:3]), member.choose(Chosen(8)))
    assert found[0] == found[1] == (Config(0), Config(0), Config(0)) and tuned == [0, 0]


def test_timeout_names_the_key(process):
    follower = process(1)
    start = time.monotonic()
    with pytest.raises(AutotuneError) as error:
        follower.choose(Tuned(16))
    assert time.monotonic() - start < 5
    assert default_key_builder_with_sharding(Tuned(16), (X,)) in str(error.value)


def test_failures_of_the_first_process_reach_the_others(process):
    leader, follower = process(0), process(1)

    class Broken(Tuned):
        def heuristic_cfg(self, inv):
            raise RuntimeError("no such tile")

    with pytest.raises(RuntimeError, match="no such tile"):
        leader.choose(Broken(1))
    with pytest.raises(AutotuneError, match=r"process 0 failed.*no such tile"):
        follower.choose(Broken(1))
    with pytest.raises(NoConfigError):
        leader.choose(Tuned(None), X[:2])
    with pytest.raises(NoConfigError):
        follower.choose(Tuned(None), X[:2])


def test_answers_that_cannot_be_read(process):
    leader, follower = process(0), process(1)
    leader.choose(Tuned(16))
    ((topic, text),) = leader.store.values.items()
    message = json.loads(text)
    message["cfg"]["config"] = {"nope": 1}
    leader.store.values[topic] = json.dumps(message)
    with pytest.raises(AutotuneError, match=r"cannot be read.*nope"):
        follower.choose(Tuned(16))


PROGRAM = """
import sys, dataclasses, jax, jax.numpy as jnp
jax.config.update("jax_platforms", "cpu")
rank = int(sys.argv[1])
jax.distributed.initialize("localhost:" + sys.argv[2], 2, rank)
from ejkernel.ops import ConfigCache, ConfigSelectorChain, Executor, Kernel

@dataclasses.dataclass(frozen=True)
class Config:
    tile: int = 0

class Tuned(Kernel[Config, jax.Array]):
    def run(self, x, *, cfg):
        return x * cfg.tile
    def config_space(self, inv):
        return [Config(1), Config(1 + rank), Config(3)]
    def heuristic_cfg(self, inv):
        return Config(10 + rank)

class Same(Tuned):
    def run(self, x, *, cfg):
        return x
    def heuristic_cfg(self, inv):
        return Config(2)
    def config_space(self, inv):
        return [Config(2), Config(3), Config(4)]

off = Executor(ConfigSelectorChain(ConfigCache(), autotune=False))
on = Executor(ConfigSelectorChain(ConfigCache(), autotune=True))
x = jnp.ones(4)
print("RESULT", float(off(Tuned(), x)[0]), jax.jit(lambda x: on(Same(), x))(x).shape,
      on.choose_config(Same(), x), flush=True)
jax.distributed.shutdown()
"""


def test_two_real_processes():
    with socket.socket() as s:
        s.bind(("localhost", 0))
        port = str(s.getsockname()[1])
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", PROGRAM, str(rank), port],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    results = []
    for process in processes:
        out, err = process.communicate(timeout=120)
        assert process.returncode == 0, err
        results.append([line for line in out.splitlines() if line.startswith("RESULT")])
    assert results[0] == results[1] and results[0][0].startswith("RESULT 10.0 (4,)")
