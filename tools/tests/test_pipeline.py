"""Several calls in a row: compiling overlaps, the device belongs to one at a time."""

from __future__ import annotations

import sys
import threading
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ejkernel.ops import AutotunePolicy, Autotuner, AutotuneResult, Invocation, Kernel
from ejkernel.ops.execution import timing
from ejkernel.ops.execution.candidates import Workbench
from ejktest.tunable import Tile
from tuned.pipeline import Job, tune_in_turn

POLICY = AutotunePolicy(True, num_warmup=0, num_iters=4, validate_backward=False)
TILES = (16, 32, 64)


class Op(Kernel[Tile, jax.Array]):
    """Compiling takes ``compile_s``; a call of three elements cannot be done."""

    compile_s = 0.0

    def __init__(self, platform="triton"):
        super().__init__("op")
        self.platform = platform

    def run_triton(self, x, *, cfg):
        time.sleep(self.compile_s)
        if x.shape == (3,):
            raise RuntimeError("no such shape")
        return x * 2

    run_xla = run_triton

    def config_space(self, inv):
        return [Tile(self.platform, tile=t) for t in TILES]


class Log:
    """Who does what on the device, and whether anybody else is on it."""

    def __init__(self):
        self.lock = threading.Lock()
        self.busy = None
        self.met = []  # two searches on the device at once
        self.events = []

    def on_device(self, who, what, seconds):
        with self.lock:
            if self.busy not in (None, who):
                self.met.append((self.busy, who, what))
            self.busy = who
            self.events.append((who, what))
        time.sleep(seconds)
        with self.lock:
            self.busy = None


@pytest.fixture
def log(monkeypatch):
    log = Log()
    check, compile_one = Workbench.check, Workbench.compile

    def seconds(self, racer, calls):
        log.on_device(racer.arguments[0].shape[0], "time", 0.002)
        return 1e-3 * TILES.index(racer.cfg.tile) + 1e-3

    def checked(self, candidate):
        log.on_device(self.arrays[0].shape[0], "check", 0.002)
        return check(self, candidate)

    def compiled(self, cfg):
        size = self.arrays[0].shape[0]
        log.events.append((size, "compile"))
        if cfg.platform == "xla":
            log.on_device(size, "compile on the device", 0.002)
        return compile_one(self, cfg)

    monkeypatch.setattr(timing.QueueClock, "seconds", seconds)
    monkeypatch.setattr(Workbench, "check", checked)
    monkeypatch.setattr(Workbench, "compile", compiled)
    return log


def job(log, n, kernel=None):
    def inputs():
        log.on_device(n, "inputs", 0.002)
        return (jnp.ones(n),), {}

    x = jax.ShapeDtypeStruct((n,), jnp.float32)
    return Job(Invocation(kernel or Op(), (x,)), inputs, n)


@pytest.mark.parametrize("platform", ["triton", "xla"])
def test_the_device_is_never_shared_and_results_are_those_of_tune(log, platform):
    kernel = Op(platform)
    tuner = Autotuner(POLICY)
    found = dict(
        (done.about, result)
        for done, result in tune_in_turn(
            tuner, [job(log, n, kernel) for n in (1, 2, 3, 4, 5, 6)], ahead=2
        )
    )
    assert log.met == [] and sorted(found) == [1, 2, 3, 4, 5, 6]
    assert "no such shape" in str(found.pop(3))
    alone = Autotuner(POLICY).tune(Invocation(kernel, (jnp.ones(1),)))
    for result in found.values():
        assert isinstance(result, AutotuneResult) and result.best == alone.best
        assert [t.ms for t in result.trials] == pytest.approx([t.ms for t in alone.trials])
        assert set(result.phases) == {"inputs", "compile", "check", "time"}
    assert tuner.gate is None and sys.getswitchinterval() > 1e-3


def test_the_next_call_compiles_while_one_is_timed(log, monkeypatch):
    monkeypatch.setattr(Op, "compile_s", 0.02)
    list(tune_in_turn(Autotuner(POLICY), [job(log, n) for n in (1, 2, 4, 5)], ahead=1))
    last_time = {n: max(i for i, e in enumerate(log.events) if e == (n, "time")) for n in (1, 2)}
    first_compile = {n: log.events.index((n, "compile")) for n in (2, 4)}
    assert first_compile[2] < last_time[1] or first_compile[4] < last_time[2]


def test_waiting_for_the_device_is_no_part_of_the_budget(log):
    gate = threading.Lock()
    policy = AutotunePolicy(True, 0, 4, False, budget_s=0.5)
    tuner = Autotuner(policy, gate=gate)
    found = []
    gate.acquire()
    work = threading.Thread(target=lambda: found.append(tuner.tune(job(log, 2).inv)))
    work.start()
    time.sleep(1.0)
    assert not log.events  # its inputs, too, have to wait
    gate.release()
    work.join(30)
    assert all(t.error is None for t in found[0].trials) and found[0].seconds < 0.9


def test_calls_not_begun_in_time_are_left_out(log):
    jobs = [job(log, n) for n in (1, 2)]
    assert list(tune_in_turn(Autotuner(POLICY), jobs, end=time.monotonic() - 1)) == []
    with pytest.raises(ValueError, match="ahead=-1"):
        list(tune_in_turn(Autotuner(POLICY), jobs, ahead=-1))


def test_an_interrupt_gives_up_what_is_under_way(log):
    tuner = Autotuner(POLICY)
    begun = []

    def press(trial, index, total):
        begun.append(index)

    tuner.on_trial = press
    outcomes = tune_in_turn(tuner, (job(log, n) for n in (1, 2, 4, 5, 6, 7, 8, 9)), ahead=1)
    first, result = next(outcomes)
    assert first.about in (1, 2) and result.best == Tile("triton", tile=16)
    outcomes.close()
    assert not tuner._running and tuner.gate is None
    sizes = {n for n, _ in log.events}
    assert not sizes & {6, 7, 8, 9}


def test_hopeless_candidates_are_not_compiled_and_say_why(log):
    def hopeless(inv, cfg):
        return "it moves too much" if cfg.tile != 32 else None

    result = Autotuner(POLICY, hopeless=hopeless).tune(Invocation(Op(), (np.ones(2),)))
    assert [t.error for t in result.trials] == [None, None, "not tried: it moves too much"]
    assert sum(what == "compile" for _, what in log.events) == 2


def test_beside_compilers_programs_are_timed_by_their_kernels(monkeypatch):
    gpu = type("Device", (), {"platform": "gpu"})()
    clock = timing.clock_for(5e-3, gpu, busy_host=True)
    assert clock is timing.busy_kernel_clock and clock.attached
    assert isinstance(timing.clock_for(5e-3, gpu), timing.QueueClock)
    assert isinstance(timing.clock_for(0.1, gpu, busy_host=True), timing.QueueClock)
    answers = [RuntimeError("not divisible"), [0.5, 0.25, 0.25]]
    asked = []

    def times(compiled, arguments, calls, *, detach):
        asked.append(detach)
        answer = answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer

    monkeypatch.setattr(timing.compat, "kernel_times", times)
    ready = type("Ready", (), {"compiled": None, "arguments": ()})()
    clock = timing.KernelClock(attached=True)
    assert clock.seconds(ready, 3) == pytest.approx(0.25e-3)
    assert asked == [False, False] and clock.refusal is None


def test_large_cotangents_repeat():
    from ejkernel.ops.core.samples import DRAWN, sample_generator
    from ejkernel.ops.execution.candidates import _random

    made = np.asarray(_random((3, DRAWN // 2), jnp.float32, sample_generator())).reshape(-1)
    assert made.shape == (3 * (DRAWN // 2),) and (made[DRAWN:] == made[: made.size - DRAWN]).all()
    assert 0.1 <= made.min() < made.max() < 1
    assert _random((2, 3), jnp.bfloat16, sample_generator()).shape == (2, 3)
