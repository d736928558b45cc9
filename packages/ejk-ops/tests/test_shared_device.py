"""Tuning on a shared device: searches wait for each other, and time while others compile."""

from __future__ import annotations

import threading
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ejkernel.ops import AutotunePolicy, Autotuner, Invocation, Kernel
from ejkernel.ops.execution import timing
from ejkernel.ops.execution.candidates import Workbench
from ejktest.tunable import Tile

POLICY = AutotunePolicy(True, num_warmup=0, num_iters=4, validate_backward=False)
TILES = (16, 32, 64)


class Op(Kernel[Tile, jax.Array]):
    """Doubles, with tiles to choose from."""

    def run_triton(self, x, *, cfg):
        return x * 2

    def config_space(self, inv):
        return [Tile("triton", tile=t) for t in TILES]


@pytest.fixture
def events(monkeypatch):
    """Returns the steps of searches in order; the third tile is the slowest."""
    events = []
    check, compile_one = Workbench.check, Workbench.compile

    def seconds(self, racer, calls):
        events.append("time")
        return 1e-3 * TILES.index(racer.cfg.tile) + 1e-3

    def checked(self, candidate):
        events.append("check")
        return check(self, candidate)

    def compiled(self, cfg):
        events.append("compile")
        return compile_one(self, cfg)

    monkeypatch.setattr(timing.QueueClock, "seconds", seconds)
    monkeypatch.setattr(Workbench, "check", checked)
    monkeypatch.setattr(Workbench, "compile", compiled)
    return events


def test_waiting_for_the_device_is_no_part_of_the_budget(events):
    device_lock = threading.Lock()
    policy = AutotunePolicy(True, 0, 4, False, budget_s=0.5)
    tuner = Autotuner(policy, device_lock=device_lock)
    found, x = [], jax.ShapeDtypeStruct((2,), jnp.float32)
    device_lock.acquire()
    work = threading.Thread(target=lambda: found.append(tuner.tune(Invocation(Op("op"), (x,)))))
    work.start()
    time.sleep(1.0)
    assert not {"check", "time"} & set(events)
    device_lock.release()
    work.join(30)
    assert all(t.error is None for t in found[0].trials) and found[0].seconds < 0.9


def test_pruned_candidates_are_not_compiled_and_say_why(events):
    def refusal(inv, cfg):
        return "it moves too much" if cfg.tile != 32 else None

    result = Autotuner(POLICY, prune=refusal).tune(Invocation(Op("op"), (np.ones(2),)))
    assert [t.error for t in result.trials] == [None, None, "not tried: it moves too much"]
    assert events.count("compile") == 2


def test_while_compilers_run_programs_are_timed_by_their_kernels(monkeypatch):
    gpu = type("Device", (), {"platform": "gpu"})()
    clock = timing.clock_for(5e-3, gpu, busy_host=True)
    assert clock is timing.busy_kernel_clock and clock.attached
    assert isinstance(timing.clock_for(5e-3, gpu), timing.QueueClock)
    assert isinstance(timing.clock_for(0.1, gpu, busy_host=True), timing.QueueClock)
    answers = [RuntimeError("not divisible"), [0.5, 0.25, 0.25]]
    requests = []

    def times(compiled, arguments, calls, *, detach):
        requests.append(detach)
        answer = answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer

    monkeypatch.setattr(timing.compat, "kernel_times", times)
    ready = type("Ready", (), {"compiled": None, "arguments": ()})()
    clock = timing.KernelClock(attached=True)
    assert clock.seconds(ready, 3) == pytest.approx(0.25e-3)
    assert requests == [False, False] and clock.refusal is None


def test_large_cotangents_repeat():
    from ejkernel.ops.core.samples import DRAWN, sample_generator
    from ejkernel.ops.execution.candidates import _random

    made = np.asarray(_random((3, DRAWN // 2), jnp.float32, sample_generator())).reshape(-1)
    assert made.shape == (3 * (DRAWN // 2),) and (made[DRAWN:] == made[: made.size - DRAWN]).all()
    assert 0.1 <= made.min() < made.max() < 1
    assert _random((2, 3), jnp.bfloat16, sample_generator()).shape == (2, 3)
