"""Autotuning: the reference, validation, failures, budget, and what it leaves behind."""

from __future__ import annotations

import time
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ejkernel.ops import (
    AutotuneError,
    Autotuner,
    BwdParams,
    ConfigCache,
    ConfigSelectorChain,
    EjkernelWarning,
    Executor,
    FwdParams,
    Invocation,
    Kernel,
    OpConfig,
    autotune,
    autotune_recorded,
    benchmark,
    policy_override,
)
from ejkernel.ops.config.selection import AutotunePolicy
from ejkernel.ops.params import params_field
from ejkernel.ops.second_order import not_differentiable


@dataclass(frozen=True)
class Config:
    loops: int = 1
    fault: str = ""


FAST, SLOW = Config(1), Config(300)


class Work(Kernel[Config, jax.Array]):
    """As slow as ``loops`` says, and wrong in the way ``fault`` says."""

    heuristic = SLOW
    space = (SLOW, FAST)

    def run(self, x, *, cfg):
        if cfg.fault == "compile":
            raise RuntimeError("too many registers")
        if cfg.fault == "late":
            time.sleep(0.5)
        y = jax.lax.fori_loop(0, cfg.loops, lambda i, y: jnp.cos(y) + jnp.sin(y), x)
        y = x + 0 * y
        return {"nan": y * jnp.nan, "value": y + 1, "dtype": y.astype(jnp.bfloat16)}.get(
            cfg.fault, y
        )

    def heuristic_cfg(self, inv):
        return self.heuristic

    def config_space(self, inv):
        return self.space


class WithGradient(Work):
    def custom_vjp(self, primals, cfg, kwargs, cotangents):
        return (cotangents[0] * (2 if cfg.fault == "gradient" else 1),)


X = jnp.ones((64, 64))
QUICK = AutotunePolicy(num_warmup=1, num_iters=3)


def tune(kernel, configs=None, policy=QUICK):
    return Autotuner(policy).tune(Invocation(kernel, (X,)), configs)


def test_the_fastest_wins():
    result = tune(Work())
    assert result.best == FAST and result.best_ms == min(t.ms for t in result.trials)
    assert [t.cfg for t in result.trials] == [SLOW, FAST]
    assert result.key == Invocation(Work(), (X,)).key and not result.backward
    assert autotune(Work(), X, num_warmup=1, num_iters=3) == FAST


def test_bad_candidates_are_skipped_and_reported(capsys, monkeypatch):
    monkeypatch.setenv("EJKERNEL_LOG_AUTOTUNE", "1")
    faults = ["compile", "nan", "value", "dtype", "gradient"]
    result = tune(WithGradient(), [*(Config(1, f) for f in faults), FAST])
    assert result.best == FAST and result.backward
    errors = {t.cfg.fault: t.error for t in result.trials if t.error}
    assert all(t.ms is None for t in result.trials if t.error)
    assert "too many registers" in errors["compile"]
    assert "not finite" in errors["nan"] and "wrong values" in errors["nan"]
    assert "largest difference" in errors["value"]
    assert "bfloat16" in errors["dtype"] and "gradient" in errors["gradient"]
    lines = capsys.readouterr().err.strip().splitlines()
    assert len(lines) == len(result.trials) == 7
    assert "skipped: RuntimeError: too many registers" in "".join(lines)
    skipping = AutotunePolicy(num_warmup=0, num_iters=1, validate_backward=False)
    result = tune(WithGradient(), [Config(1, "gradient")], skipping)
    assert all(t.error is None for t in result.trials)


def test_reference_is_the_first_that_runs():
    kernel = Work()
    kernel.heuristic = Config(2, "compile")
    result = tune(kernel, [Config(1, "nan"), FAST, Config(1, "value")])
    assert result.best == FAST
    assert [t.error is None for t in result.trials] == [False, False, True, False]
    late = Config(1, "late")  # compiled after all others, and the reference none the less
    result = tune(kernel, [late, Config(1, "value")])
    assert result.best == late
    assert [t.error is None for t in result.trials] == [False, True, False]


def test_all_fail():
    kernel = Work()
    kernel.heuristic = Config(2, "compile")
    with pytest.raises(AutotuneError) as error:
        tune(kernel, [Config(1, "nan")])
    text = str(error.value)
    assert "too many registers" in text and "NaN" in text and "'Work'" in text
    kernel.heuristic = FAST
    kernel.space = (Config(1, "compile"), Config(2, "compile"))
    executor = Executor(ConfigSelectorChain(cache=ConfigCache(), autotune=QUICK))
    with policy_override(autotune=True), pytest.warns(EjkernelWarning, match="all 2 candidates"):
        assert executor.choose_config(kernel, X[:3]) == FAST


def test_budget_gives_the_best_so_far():
    space = tuple(Config(n) for n in range(1, 60))
    policy = AutotunePolicy(num_warmup=1, num_iters=2, budget_s=0.0)
    result = tune(Work(), space, policy)
    assert len(result.trials) == 60 and result.best == result.trials[0].cfg == SLOW
    assert sum(t.error == "the time budget was spent" for t in result.trials) == 59


def test_inside_a_trace():
    executor = Executor(ConfigSelectorChain(cache=ConfigCache(), autotune=QUICK))
    with policy_override(autotune=True):
        jaxpr = jax.make_jaxpr(jax.vmap(lambda x: executor(Work(), x)))(X[None])
    direct = jax.make_jaxpr(jax.vmap(lambda x: Work().run(x, cfg=FAST)))(X[None])
    assert len(executor.selector.cache) == 1
    (equation,) = jaxpr.eqns  # the call
    inside = equation.params["jaxpr"].eqns
    assert [e.primitive for e in inside] == [e.primitive for e in direct.eqns]
    assert executor.choose_config(Work(), X) == FAST
    grad = jax.jit(jax.grad(lambda x: executor(WithGradient(), x).sum()))
    with policy_override(autotune=True):
        np.testing.assert_allclose(grad(X), 1)


def test_surroundings_reach_the_tuning_thread():
    seen = []

    class Precise(Work):
        def run(self, x, *, cfg):
            seen.append((x.dtype, jax.config.jax_default_matmul_precision))
            return x

    with jax.enable_x64(True), jax.default_matmul_precision("highest"):
        autotune(Precise(), np.ones(4), num_warmup=0, num_iters=1)
    assert set(seen) == {(np.dtype("float64"), "highest")}


def test_forward_and_backward_tiles_are_chosen_apart():
    @dataclass(frozen=True)
    class Split(OpConfig):
        fwd_params: FwdParams | None = params_field(FwdParams)
        bwd_params: BwdParams | None = params_field(BwdParams)

    def config(fwd, bwd):
        return Split(fwd_params=FwdParams(q_blocksize=fwd), bwd_params=BwdParams(q_blocksize=bwd))

    def delay(x, tile):  # small tiles are slow
        loops = 1 if tile == 128 else 5_000
        return x + 0 * jax.lax.fori_loop(0, loops, lambda i, y: jnp.cos(y), x)

    class Tiles(Kernel[Split, jax.Array]):
        def run(self, x, *, cfg):
            return delay(x, cfg.fwd_params.q_blocksize)

        def custom_vjp(self, primals, cfg, kwargs, cotangents):
            return (delay(cotangents[0], cfg.bwd_params.q_blocksize),)

        def config_space(self, inv):
            return [config(16, 128), config(128, 16)]

    assert tune(Tiles()).best == config(128, 128)


def test_arguments_without_gradient_are_not_differentiated():
    class Scaled(Kernel[Config, jax.Array]):
        def run(self, x, scale, *, cfg):
            return x * not_differentiable(scale, "scale: has no gradient")

        def constant_arguments(self, inv):
            return ("scale",)

        def config_space(self, inv):
            return [FAST]

    def tuned(validate_backward):
        policy = AutotunePolicy(num_warmup=0, num_iters=1, validate_backward=validate_backward)
        return Autotuner(policy).tune(Invocation(Scaled(), (X,), {"scale": X}))

    result = tuned(True)
    assert result.best == FAST and result.backward
    assert not tuned(None).backward, "what is frozen is served more often than trained around"


def test_platforms_compete_and_a_forced_one_does_not():
    @dataclass(frozen=True)
    class Named(OpConfig):
        pass

    class Two(Kernel[Named, jax.Array]):
        def run_xla(self, x, *, cfg):
            return Work().run(x, cfg=SLOW)

        def run_triton(self, x, *, cfg):
            return Work().run(x, cfg=FAST)

        def config_space(self, inv):
            names = ["xla", "triton"]
            forced = inv.info.get("requested_platform")
            return [Named(platform=n) for n in names if forced in (None, n)]

    executor = Executor(ConfigSelectorChain(cache=ConfigCache(), autotune=QUICK))
    with policy_override(autotune=True):
        assert executor.choose_config(Two(), X) == Named(platform="triton")
        assert executor.explain(Two(), X).implementation == "run_triton"
        forced = executor.explain(Two(), X, platform="xla")
    assert (forced.tier, forced.implementation) == ("heuristics", "run_xla")


def test_recorded_invocations_fill_the_tiers():
    executor = Executor(ConfigSelectorChain(cache=ConfigCache(), autotune=False))

    class Plain(Kernel):
        def run(self, x, *, cfg):
            return x

    invocations = [Invocation(Work(), (X,)), Invocation(Plain(), (X,))]
    (result,) = autotune_recorded(invocations, executor=executor, num_warmup=1, num_iters=3)
    assert executor.explain(Work(), X).cfg == result.best == FAST
    assert executor.explain(Work(), X).tier == "memory"
    with pytest.raises(TypeError, match="num_rounds"):
        autotune_recorded([], executor=executor, num_rounds=3)


def test_benchmark_waits_and_counts():
    calls = []

    def fn():
        calls.append(1)
        return {"a": X @ X, "b": (X, 1)}

    assert benchmark(fn, num_iters=7, num_warmup=2) > 0 and len(calls) == 9
    with pytest.raises(ValueError, match="num_iters"):
        benchmark(fn, num_iters=0)


@pytest.mark.parametrize(
    "option",
    [{"num_iters": 2.5}, {"budget_s": -1}, {"budget_s": "3"}],
    ids=str,
)
def test_wrong_counts_and_budgets_are_refused(option):
    with pytest.raises(ValueError, match=f"{next(iter(option))}=.*expected"):
        autotune(Work(), X, **option)


def test_abstract_arguments():
    abstract = jax.ShapeDtypeStruct(X.shape, X.dtype)
    assert autotune(Work(), abstract, num_warmup=1, num_iters=3) == FAST
    picked = []
    jax.eval_shape(
        lambda x: picked.append(autotune(Work(), x, num_warmup=1, num_iters=3)) or x, abstract
    )
    assert picked == [FAST]
