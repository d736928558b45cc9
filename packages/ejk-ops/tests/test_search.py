"""The search for the fastest config, with a clock that tells what the test wants."""

from __future__ import annotations

import dataclasses
import signal
import subprocess
import sys
import threading
import time
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import pytest

from ejkernel.ops import (
    AutotunePolicy,
    Autotuner,
    BwdParams,
    ConfigCache,
    ConfigSelectorChain,
    Executor,
    FwdParams,
    Invocation,
    Kernel,
    OpConfig,
    PersistentCache,
    TuningInterrupted,
    autotune_recorded,
)
from ejkernel.ops.config import failures
from ejkernel.ops.execution import progress, timing
from ejkernel.ops.execution.autotuner import shortlist
from ejkernel.ops.execution.candidates import Workbench
from ejkernel.ops.execution.search import Search
from ejkernel.ops.params import params_field, tile_field

X = jnp.ones(4)


@dataclass(frozen=True)
class Tile(OpConfig):
    tile: int | None = tile_field()


@dataclass(frozen=True)
class Split(OpConfig):
    fwd_params: FwdParams | None = params_field(FwdParams)
    bwd_params: BwdParams | None = params_field(BwdParams)


def split(fwd, bwd, platform="xla"):
    return Split(platform, fwd_params={"q_blocksize": fwd}, bwd_params={"q_blocksize": bwd})


class Attempts(Kernel[Tile, jax.Array]):
    """Candidates are tiles; ``failing`` maps those that do not compile to the error."""

    tiles = (16, 32, 64, 128)

    def __init__(self, failing=None):
        super().__init__("attempts")
        self.failing = failing or {}
        self.compiled = []

    def run(self, x, *, cfg):
        self.compiled.append(cfg.tile)
        if cfg.tile in self.failing:
            raise self.failing[cfg.tile]
        return x * 2

    def config_space(self, inv):
        return [Tile(tile=t) for t in self.tiles]


class Both(Kernel[Split, jax.Array]):
    """Two platforms, gradients, forward and backward tiles."""

    def run_xla(self, x, *, cfg):
        return x * 2

    def run_triton(self, x, *, cfg):
        return x * 2

    def custom_vjp(self, primals, cfg, kwargs, cotangents):
        return (2 * cotangents[0],)

    def config_space(self, inv):
        return [split(16, 16), split(32, 16), split(16, 32), split(64, 64, "triton")]


class FakeClock:
    """Seconds by what a program was compiled for; counts the samples taken of each."""

    def __init__(self):
        self.table, self.samples, self.on_sample = {}, {}, None

    def __call__(self, clock, racer, calls):
        name = (racer.cfg, racer.phase)
        self.samples[name] = self.samples.get(name, 0) + 1
        if self.on_sample is not None:
            self.on_sample(name)
        return self.table[name]

    def tiles(self, seconds):
        self.table = {(Tile(tile=t), "fwd"): s for t, s in seconds.items()}

    def splits(self, seconds):
        for cfg, (fwd, total) in seconds.items():
            self.table[cfg, "fwd"], self.table[cfg, "fwd+bwd"] = fwd, total


@pytest.fixture
def clock(monkeypatch):
    fake = FakeClock()
    monkeypatch.setattr(timing.QueueClock, "seconds", lambda *a: fake(*a))
    return fake


POLICY = AutotunePolicy(True, num_warmup=1, num_iters=8, validate_backward=False)


def tune(kernel, configs=None, policy=POLICY, **options):
    return Autotuner(policy, **options).tune(Invocation(kernel, (X,)), configs)


# ---- the race -----------------------------------------------------------------------------------


def test_the_slower_half_leaves(clock):
    clock.tiles({16: 4e-3, 32: 1e-3, 64: 2e-3, 128: 1.5e-3})
    result = tune(Attempts())
    assert result.best == Tile(tile=32) and result.best_ms == pytest.approx(1.0)
    assert [t.ms for t in result.trials] == pytest.approx([4.0, 1.0, 2.0, 1.5])
    taken = [clock.samples[Tile(tile=t), "fwd"] for t in (16, 32, 64, 128)]
    assert taken[1] == taken[3] > taken[2] >= taken[0] >= 1  # first calls included
    assert result.heuristic_ms == pytest.approx(4.0) and result.spread == 0
    assert set(result.phases) == {"inputs", "compile", "time"}
    assert result.measured()["timed"] == 4 and result.measured()["pass"] == "fwd"


def test_far_behind_is_called_once(clock):
    clock.tiles({16: 1e-3, 32: 10.0, 64: 1e-3, 128: 1e-3})
    result = tune(Attempts())
    assert clock.samples[Tile(tile=32), "fwd"] == 1 and result.trials[1].ms == 10e3


def test_the_heuristic_wins_within_noise(clock):
    clock.tiles({16: 1.000e-3, 32: 0.995e-3, 64: 2e-3, 128: 2e-3})
    assert tune(Attempts()).best == Tile(tile=16)
    clock.tiles({16: 1.000e-3, 32: 0.97e-3, 64: 2e-3, 128: 2e-3})
    assert tune(Attempts()).best == Tile(tile=32)


def test_a_gpu_program_shorter_than_a_launch_is_timed_by_its_kernels():
    gpu, cpu = (type("Device", (), {"platform": p})() for p in ("gpu", "cpu"))
    assert isinstance(timing.clock_for(1e-4, gpu), timing.KernelClock)
    assert isinstance(timing.clock_for(1e-2, gpu), timing.QueueClock)
    assert isinstance(timing.clock_for(1e-4, cpu), timing.QueueClock)


def test_kernel_clock_and_its_fallback(monkeypatch):
    ready = type("Ready", (), {"compiled": None, "arguments": (), "__call__": lambda self: X})()
    monkeypatch.setattr(timing.compat, "kernel_times", lambda c, a, n: [0.25, 0.5, 9.0])
    assert timing.KernelClock().seconds(ready, 3) == pytest.approx(0.5e-3)
    asked = []

    def refuse(*_):
        asked.append(1)
        raise RuntimeError("CUPTI_ERROR_MULTIPLE_SUBSCRIBERS")

    monkeypatch.setattr(timing.compat, "kernel_times", refuse)
    clock = timing.KernelClock()
    with pytest.warns(UserWarning, match="MULTIPLE_SUBSCRIBERS"):
        assert clock.seconds(ready, 3) >= 0
    assert clock.seconds(ready, 3) >= 0 and len(asked) == 1


# ---- which candidates ---------------------------------------------------------------------------


def test_shortlist_keeps_the_heuristic_its_neighbours_and_every_platform():
    kernel = Attempts()
    far = [Tile("triton", tile=t) for t in (64, 1024, 16, 512, 128, 32)]
    configs = [*far, Tile("xla", tile=16), Tile("cuda")]
    kept = shortlist(kernel, configs, 5)
    assert kept == [far[0], far[4], far[5], Tile("xla", tile=16), Tile("cuda")]
    assert shortlist(kernel, configs, 8) == configs


def test_a_config_space_is_cut_and_given_configs_are_not(clock):
    kernel = Attempts()
    clock.tiles({t: 1e-3 for t in kernel.tiles})
    policy = AutotunePolicy(True, 0, 1, False, max_candidates=2)
    assert len(tune(kernel, policy=policy).trials) == 2
    assert len(tune(kernel, kernel.config_space(None), policy=policy).trials) == 4


# ---- both passes --------------------------------------------------------------------------------

TRAINED = AutotunePolicy(True, num_warmup=0, num_iters=4)


def test_platforms_are_ranked_by_both_passes(clock):
    base = {split(16, 16): (3e-3, 9e-3), split(32, 16): (4e-3, 10e-3), split(16, 32): (3e-3, 12e-3)}
    clock.splits({**base, split(64, 64, "triton"): (1e-3, 10e-3)})
    result = tune(Both(), policy=TRAINED)
    assert result.best == split(16, 16) and result.backward  # 1 ms forward does not help
    assert [t.bwd_ms for t in result.trials] == pytest.approx([6.0, 6.0, 9.0, 9.0])
    clock.splits({**base, split(64, 64, "triton"): (4e-3, 8e-3)})
    assert tune(Both(), policy=TRAINED).best == split(64, 64, "triton")
    clock.splits({**base, split(64, 64, "triton"): (1e-3, 10e-3)})
    inference = AutotunePolicy(True, 0, 4, validate_backward=False)
    assert tune(Both(), policy=inference).best == split(64, 64, "triton")


def test_the_best_of_both_passes_join_if_that_is_faster(clock):
    seconds = {
        split(16, 16): (3e-3, 9e-3),
        split(32, 16): (2e-3, 8e-3),
        split(16, 32): (3e-3, 7e-3),
        split(64, 64, "triton"): (1e-3, 20e-3),
    }
    clock.splits({**seconds, split(32, 32): (2e-3, 6e-3)})
    result = tune(Both(), policy=TRAINED)
    assert result.best == split(32, 32) and len(result.trials) == 5
    assert result.best_ms == pytest.approx(6.0)
    clock.splits({**seconds, split(32, 32): (2e-3, 7.5e-3)})  # they get in each other's way
    assert tune(Both(), policy=TRAINED).best == split(16, 32)


def test_forward_passes_are_shared_by_configs_that_differ_behind(clock):
    clock.splits({c: (1e-3, 2e-3) for c in Both().config_space(None)})
    tune(Both(), policy=TRAINED)
    assert sum(phase == "fwd" for _, phase in clock.samples) == 3


def test_a_kernel_that_is_not_trained_is_ranked_by_its_forward_pass(clock):
    class Decode(Both):
        trained = False

    clock.splits({c: (1e-3, 2e-3) for c in Both().config_space(None)})
    assert not tune(Decode(), policy=TRAINED).backward


# ---- failures -----------------------------------------------------------------------------------


def test_failures_are_remembered_for_the_same_versions(clock, tmp_path, monkeypatch):
    clock.tiles({t: 1e-3 for t in Attempts.tiles})

    def run(**failing):
        kernel = Attempts({int(t[1:]): RuntimeError(why) for t, why in failing.items()})
        chain = ConfigSelectorChain(ConfigCache(), PersistentCache(tmp_path), POLICY)
        (result,) = autotune_recorded(
            [Invocation(kernel, (X,))], executor=Executor(chain), validate_backward=False
        )
        return kernel, {t.cfg.tile: t.error for t in result.trials if t.error}

    kernel, errors = run(_32="out of shared memory", _64="CUDA: out of memory")
    assert set(kernel.compiled) == {16, 32, 64, 128} and set(errors) == {32, 64}
    kernel, errors = run()  # another process: what was not the moment's fault is not tried
    assert 32 not in kernel.compiled and 64 in kernel.compiled
    assert errors == {32: "failed before: RuntimeError: out of shared memory"}
    monkeypatch.setattr(failures, "versions", lambda: {"triton": "99"})
    kernel, errors = run()
    assert 32 in kernel.compiled and not errors
    assert len(PersistentCache(tmp_path)) == 1  # failures are no configs


def test_everything_failed_before_is_tried_again(clock):
    memory = failures.FailureCache()
    kernel = Attempts()
    clock.tiles({t: 1e-3 for t in kernel.tiles})
    for t in kernel.tiles:
        memory.remember(Invocation(kernel, (X,)).key, Tile(tile=t), "driver too old")
    assert len([t for t in tune(kernel, failures=memory).trials if t.ms]) == 4


# ---- stopping -----------------------------------------------------------------------------------


def test_ctrl_c_carries_what_was_measured(clock, monkeypatch):
    """Pressed while the last candidate of the second call gets its first call."""
    clock.tiles({16: 4e-3, 32: 1e-3, 64: 2e-3, 128: 1.5e-3})
    told, done = threading.Event(), []
    stop = Search.stop
    monkeypatch.setattr(Search, "stop", lambda self: (stop(self), told.set()))

    def press(name):
        if name[0].tile == 128 and done and not told.is_set():
            signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)
            assert told.wait(20)

    clock.on_sample = press
    executor = Executor(ConfigSelectorChain(ConfigCache(), autotune=False))
    calls = [Invocation(Attempts(), (jnp.ones(n),)) for n in (2, 4)]
    with pytest.raises(TuningInterrupted) as stopped:
        autotune_recorded(calls, executor=executor, on_result=done.append, validate_backward=False)
    assert stopped.value.results == done and done[0].best == Tile(tile=32)
    assert executor.selector.cache.keys() == [calls[0].key]
    partial = stopped.value.partial
    assert partial.interrupted and partial.best == Tile(tile=16)  # the only one with a sample
    assert [t.error for t in partial.trials] == [None, *["tuning was stopped"] * 3]


INTERRUPTED = """
import os, signal, time
import jax
from ejkernel.ops.execution.isolation import Surroundings, outside_trace

def press(x):
    os.kill(os.getpid(), signal.SIGINT)
    time.sleep(0.5)
    return x

def run():
    return jax.jit(lambda x: jax.pure_callback(press, x, x))(1.0).block_until_ready()

try:
    outside_trace(run, Surroundings.capture())
except KeyboardInterrupt:
    print("interrupted")
"""


def test_a_process_ends_after_a_program_that_outlasts_ctrl_c():
    """Python aborts when it ends below a thread that runs a program of XLA."""
    run = subprocess.run([sys.executable, "-c", INTERRUPTED], capture_output=True, text=True)
    assert (run.returncode, run.stdout) == (0, "interrupted\n"), run.stderr
    assert "waiting for the interrupted program to end" in run.stderr


def test_total_budget_leaves_out_what_is_not_begun(clock):
    clock.tiles({t: 1e-3 for t in Attempts.tiles})
    executor = Executor(ConfigSelectorChain(ConfigCache(), autotune=False))
    calls = [Invocation(Attempts(), (jnp.ones(n),)) for n in (1, 2)]
    assert autotune_recorded(calls, executor=executor, total_s=0.0) == []
    assert len(autotune_recorded(calls, executor=executor, total_s=60.0)) == 2


def test_a_single_candidate_is_not_timed(clock):
    kernel = Attempts()
    kernel.tiles = (16,)
    executor = Executor(ConfigSelectorChain(ConfigCache(), autotune=False))
    (result,) = autotune_recorded([Invocation(kernel, (X,))], executor=executor)
    assert result.best == Tile(tile=16) and result.best_ms is None and not kernel.compiled
    assert len(executor.selector.cache) == 0


# ---- budgets -----------------------------------------------------------------------------------


class Stuck(Attempts):
    """The second candidate compiles for as long as the test lasts."""

    def __init__(self):
        super().__init__()
        self.over = threading.Event()

    def run(self, x, *, cfg):
        if cfg.tile == 32:
            self.over.wait(60)
        return x * 2


def test_a_slow_compiler_holds_up_neither_the_others_nor_the_budget(clock):
    clock.tiles({16: 4.0, 64: 2.0, 128: 3.0})
    kernel = Stuck()
    try:
        policy = dataclasses.replace(POLICY, num_iters=2, budget_s=3.0)
        result = tune(kernel, policy=policy)
    finally:
        kernel.over.set()
    assert result.seconds < 5.0 and result.best == Tile(tile=64) and result.compared
    assert [t.error for t in result.trials] == [None, "the time budget was spent", None, None]


def test_nothing_is_run_once_the_budget_is_spent(clock, monkeypatch):
    """Compiled candidates that take long to run are not even checked then."""
    clock.tiles(dict.fromkeys(Attempts.tiles, 1.0))
    checked = []

    def check(self, candidate):
        checked.append(candidate.cfg.tile)
        time.sleep(0.3)

    monkeypatch.setattr(Workbench, "check", check)
    result = tune(Attempts(), policy=dataclasses.replace(POLICY, budget_s=0.2))
    assert checked == [16] and not result.compared


def test_what_was_compared_with_nobody_is_not_kept_on_disk(clock, tmp_path):
    clock.tiles(dict.fromkeys(Attempts.tiles, 1.0))
    chain = ConfigSelectorChain(
        ConfigCache(), PersistentCache(tmp_path), dataclasses.replace(POLICY, budget_s=0.0)
    )
    inv = Invocation(Attempts(), (X,))
    choice = chain.decide(inv, inv.kernel)
    assert choice.tier == "autotune" and choice.cfg == Tile(tile=16)
    assert "1 of 4 candidates timed: not enough compared" in choice.answers[-1][1]
    assert chain.decide(inv, inv.kernel).tier == "memory"
    assert len(PersistentCache(tmp_path)) == 0
    chain.cache.clear()
    (result,) = autotune_recorded([inv], executor=Executor(chain), budget_s=0.0)
    assert not result.compared and len(PersistentCache(tmp_path)) == 0
    # a heuristic config that is no good is no competitor
    kernel = Attempts({16: ValueError("no")})
    chain = ConfigSelectorChain(ConfigCache(), PersistentCache(tmp_path), POLICY)
    inv = Invocation(kernel, (X,))
    assert chain.decide(inv, kernel).cfg.tile in (32, 64, 128) and len(PersistentCache(tmp_path))


def test_a_call_that_waits_for_tuning_says_so_once(clock, capfd, monkeypatch):
    clock.tiles(dict.fromkeys(Attempts.tiles, 1.0))
    clock.on_sample = lambda name: time.sleep(0.02)
    executor = Executor(ConfigSelectorChain(ConfigCache(), None, POLICY))
    for silent_s, expected in ((60.0, 0), (0.01, 1)):
        monkeypatch.setattr(progress, "SILENT_S", silent_s)
        executor.selector.cache.clear()
        jax.jit(lambda x: executor(Attempts(), x)).lower(X)
        told = capfd.readouterr().err.splitlines()
        assert len(told) == expected
    assert "tuning attempts for this call: 4 candidates, about 60 s at most" in told[0]
    assert "EJKERNEL_AUTOTUNE_POLICY=heuristics turns it off" in told[0]
    tune(Attempts())  # asked for by name
    assert capfd.readouterr().err == ""
