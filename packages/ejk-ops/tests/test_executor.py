"""The executor: what is compiled and remembered, dispatched, and refused."""

from __future__ import annotations

import dataclasses
import time
import types
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from ejkernel.ops import (
    ConfigError,
    Executor,
    InvalidArgument,
    Kernel,
    KernelNotSupported,
    OpConfig,
    autotune_recorded,
    clear_invocations,
    get_invocations,
)
from ejktest.tunable import Config, Scale, make_executor, scale_of


@pytest.fixture(autouse=True)
def no_environment(monkeypatch, tmp_path):
    monkeypatch.setenv("EJKERNEL_CACHE_DIR", str(tmp_path))
    monkeypatch.setenv("EJKERNEL_AUTOTUNE_POLICY", "heuristics")
    clear_invocations()


@pytest.fixture
def x():
    return jnp.arange(1.0, 5.0)


# ---- compiling once -----------------------------------------------------------------------------


def test_second_eager_call_traces_nothing(x):
    traced = []

    class Counted(Scale):
        def run(self, x, *, power=1, cfg):
            traced.append(x.shape)
            return super().run(x, power=power, cfg=cfg)

    executor, _ = make_executor()
    for _ in range(3):
        executor(Counted(), x)
        executor(Counted(), x, power=2.0)
        executor(Counted(), x, cfg=Config(2.0))
    assert len(traced) == 3
    executor(Counted(), x, power=2)
    executor(Counted(), x, power=True)
    assert len(traced) == 5


def test_statics_that_compare_equal_stay_apart(x):
    class Typed(Kernel):
        def run(self, x, *, value, cfg):
            return jnp.full_like(x, {int: 1, float: 2, bool: 3}[type(value)])

    executor, kernel = Executor(), Typed()
    got = [float(executor(kernel, x, value=v)[0]) for v in (1, 1.0, True, 1)]
    assert got == [1, 2, 3, 1]

    class Sign(Kernel):
        def run(self, x, *, value, cfg):
            return jnp.full_like(x, np.copysign(1, value))

    assert float(executor(Sign(), x, value=0.0)[0]) == 1
    assert float(executor(Sign(), x, value=-0.0)[0]) == -1


def test_kernel_attributes_are_part_of_the_call(x):
    class Stateful(Kernel):
        def __init__(self, factor):
            super().__init__(name="stateful")
            self.factor = factor

        def run(self, x, *, cfg):
            return x * np.sum(self.factor)

    executor = Executor()
    kernel = Stateful([2.0])
    assert scale_of(executor(kernel, x), x) == 2.0
    kernel.factor.append(1.0)
    assert scale_of(executor(kernel, x), x) == 3.0
    assert scale_of(executor(Stateful(5.0), x), x) == 5.0


def test_static_values_that_cannot_be_remembered(x):
    class Mutable:
        __hash__ = None
        value = 2.0

    class Takes(Kernel):
        def run(self, x, *, box, cfg):
            return x * box.value

    executor, box = Executor(), Mutable()
    assert scale_of(executor(Takes(), x, box=box), x) == 2.0
    box.value = 3.0
    assert scale_of(executor(Takes(), x, box=box), x) == 3.0
    assert not executor._programs._plans


def test_outputs_that_are_no_arrays(x):
    class Tagged(Kernel):
        def run_xla(self, x, *, cfg):
            return "xla", {"double": x * 2, "about": frozenset({1})}, None

    executor = Executor()
    for _ in range(2):
        tag, rest, nothing = executor(Tagged(), x)
        assert (tag, rest["about"], nothing) == ("xla", frozenset({1}), None)
        assert scale_of(rest["double"], x) == 2
    assert scale_of(jax.jit(lambda x: executor(Tagged(), x)[1]["double"])(x), x) == 2


def test_dtype_precision_is_seen():
    executor = Executor()
    executor(Scale(), np.ones(3))
    with jax.enable_x64(True):
        assert executor(Scale(), np.ones(3)).dtype == jnp.float64
    assert executor(Scale(), np.ones(3)).dtype == jnp.float32


# ---- transformations ----------------------------------------------------------------------------


def test_nothing_but_the_kernel_in_the_jaxpr(x):
    executor, kernel = Executor(), Scale()
    got = jax.make_jaxpr(lambda x: executor(kernel, x, cfg=Config(2.0)))(x)
    want = jax.make_jaxpr(lambda x: x * 2.0)(x)
    (equation,) = got.jaxpr.eqns  # the call, by the kernel's name
    assert equation.params["name"] == kernel.name
    assert str(equation.params["jaxpr"]) == str(want)


def test_layers_share_what_was_traced_of_a_derivative(x):
    executor, kernel = Executor(), Scale()
    twice = lambda x: executor(kernel, jnp.sin(executor(kernel, x))).sum()  # noqa: E731
    equations = jax.make_jaxpr(jax.grad(twice))(x).jaxpr.eqns
    calls = [e.params["jaxpr"] for e in equations if e.params.get("name") == kernel.name]
    assert len(calls) > len({id(c) for c in calls}) > 0


def test_transformations_keep_results(x):
    executor, kernel = Executor(), Scale()
    run = lambda x: executor(kernel, x, cfg=Config(3.0))  # noqa: E731
    np.testing.assert_allclose(jax.grad(lambda x: run(x).sum())(x), 3 * np.ones(4))
    np.testing.assert_allclose(jax.vmap(run)(x[None]), 3 * x[None])
    np.testing.assert_allclose(jax.vmap(jax.grad(run))(x), 3 * np.ones(4))
    np.testing.assert_allclose(jax.checkpoint(run)(x), 3 * x)
    carried, _ = jax.lax.scan(lambda c, _: (run(c), None), x, length=2)
    np.testing.assert_allclose(carried, 9 * x)
    np.testing.assert_allclose(jax.lax.cond(True, run, lambda x: x, x), 3 * x)
    mesh = Mesh(np.asarray(jax.devices()[:2]), ("d",))
    sharded = jax.shard_map(run, mesh=mesh, in_specs=P("d"), out_specs=P("d"))
    np.testing.assert_allclose(jax.jit(sharded)(x), 3 * x)
    np.testing.assert_allclose(sharded(x), 3 * x)
    abstract = jax.ShapeDtypeStruct((4,), jnp.float32)
    assert jax.eval_shape(run, abstract).shape == (4,)
    assert "stablehlo" in jax.jit(run).lower(abstract).as_text()


def test_mesh_of_a_plain_kernel(x):
    shapes = []

    class Local(Scale):
        def run(self, x, *, cfg):
            shapes.append(x.shape)
            return x * cfg.scale

        def heuristic_cfg(self, inv):
            assert inv.args[0].shape == (2,)  # of one shard
            return Config(2.0)

    mesh = Mesh(np.asarray(jax.devices()[:2]), ("d",))
    executor = Executor()
    got = executor(Local(), x, mesh=mesh, in_specs=[P("d")])
    np.testing.assert_allclose(got, 2 * x)
    assert shapes == [(2,)]
    typed = jax.make_mesh((2,), ("d",), axis_types=(AxisType.Explicit,))
    for array in np.asarray(x), x, jax.device_put(x, NamedSharding(typed, P())):
        got = executor(Local(), array, mesh=typed, in_specs=[P("d")])
        np.testing.assert_allclose(got, 2 * x)
        assert got.sharding.spec == P("d")
    explained = executor.explain(Local(), x, mesh=mesh, in_specs=(P("d"),))
    assert explained.cfg == Config(2.0)
    with pytest.raises(ValueError, match="without in_specs"):
        executor(Local(), x, mesh=mesh)
    with pytest.raises(InvalidArgument, match=r"mesh: expected jax\.sharding\.Mesh, given 3"):
        executor(Local(), x, mesh=3, in_specs=(P("d"),))
    with pytest.raises(ValueError, match="without mesh"):
        executor(Local(), x, in_specs=(P("d"),))
    with pytest.raises(ValueError, match=r"2 entries.*1 array"):
        executor(Local(), x, mesh=mesh, in_specs=(P("d"), P()))


# ---- platforms ----------------------------------------------------------------------------------


@pytest.mark.skipif(jax.default_backend() != "cpu", reason="the choice on a CPU")
def test_platform_choice_on_cpu(x):
    @dataclass(frozen=True)
    class Named(OpConfig):
        pass

    class Both(Kernel[Named, jax.Array]):
        def run_triton(self, x, *, cfg):
            return x * 2

        def run_xla(self, x, *, cfg):
            return x * 3

        def heuristic_cfg(self, inv):
            return Named()

    executor, kernel = Executor(), Both()
    assert scale_of(executor(kernel, x), x) == 3
    assert scale_of(executor(kernel, x, platform="AUTO"), x) == 3
    assert scale_of(executor(kernel, x, platform="triton"), x) == 2
    assert scale_of(executor(kernel, x, cfg=Named(platform="triton")), x) == 2
    assert scale_of(executor(kernel, x, cfg={"platform": "triton"}), x) == 2
    with pytest.raises(TypeError, match=r"platform must be .* got \['xla'\]"):
        executor(kernel, x, platform=["xla"])
    with pytest.raises(ValueError, match="contradict"):
        executor(kernel, x, cfg=Named(platform="triton"), platform="xla")
    with pytest.raises(KernelNotSupported, match=r"run_pallas.*run_triton, run_xla") as error:
        executor(kernel, x, platform="pallas")
    assert (error.value.platform, error.value.nearest) == ("pallas", "xla")
    with pytest.raises(ValueError, match="auto, triton, pallas, xla, cuda"):
        executor(kernel, x, platform="gpu")
    assert kernel.supports(x) and not kernel.supports(x, platform="cuda")
    assert kernel.supports(x, cfg={"platform": "triton"})
    assert "run_pallas" in kernel.supports(x, cfg=Named(platform="pallas")).reason
    for args, options in ((x, x), {}), ((x,), {"platform": "gpu"}), ((x,), {"mesh": 3}):
        assert not kernel.supports(*args, **options)
    explained = executor.explain(kernel, x)
    assert (explained.platform, explained.implementation) == ("xla", "run_xla")
    assert [name for name, _ in explained.skipped] == ["run_triton"]
    assert "not chosen" in str(explained) and "run_triton" in repr(explained)
    assert executor.explain(kernel, x, platform="pallas").tier == "error"
    # the kernel's generic method serves the platform at home here, and no other
    assert scale_of(executor(Scale(), x, platform="xla"), x) == 1
    assert executor.explain(Scale(), x).platform == "xla"
    with pytest.raises(KernelNotSupported):
        executor(Scale(), x, platform="triton")


def test_kernel_without_run(x):
    with pytest.raises(KernelNotSupported, match="neither run nor"):
        Executor()(Kernel("empty"), x)


def test_bad_input(x):
    executor, kernel = Executor(), Scale()
    with pytest.raises(TypeError, match=r"cfg must be a Config.*got MyOther"):
        executor(kernel, x, cfg=dataclasses.make_dataclass("MyOther", [])())
    with pytest.raises(ConfigError, match="nope"):
        executor(kernel, x, cfg={"nope": 1})
    with pytest.raises(TypeError, match=r"Scale: .*powr"):
        executor(kernel, x, powr=2)
    with pytest.raises(TypeError, match="instance"):
        executor(Scale, x)
    with pytest.raises(TypeError, match=r"jax\.eval_shape"):
        executor(kernel, jax.ShapeDtypeStruct((4,), jnp.float32))
    with pytest.raises(TypeError, match="choose"):
        Executor(object())


# ---- stamps -------------------------------------------------------------------------------------


def test_stamps_appear_in_lowered_text(x, monkeypatch):
    from ejkernel.ops import find_labels_in_lowered, labels_to_configs

    executor, kernel = Executor(), Scale()
    plain = jax.jit(lambda x: executor(kernel, x)).lower(x)
    assert find_labels_in_lowered(plain) == []
    for mode in ("hash", "json"):
        monkeypatch.setenv("EJKERNEL_OPS_STAMP", mode)
        own = time.time_ns() % 10**9  # a cache of compiled programs would give one of other labels
        lowered = jax.jit(lambda x, own=own: executor(kernel, x, cfg=Config(2.0)) + own).lower(x)
        (stamp,) = find_labels_in_lowered(lowered)
        assert stamp.startswith("Scale.v1#")
        assert find_labels_in_lowered(lowered.compile()) == [stamp]
        assert labels_to_configs([stamp], executor=executor) == {stamp: Config(2.0)}


def test_specs_follow_the_signature_and_recorded_calls_keep_their_mesh(x, monkeypatch):
    class Named(Scale):
        def run(self, *, zeta, alpha, cfg):
            assert zeta.shape == (2,) and alpha.shape == (4,)
            return zeta * cfg.scale

        def config_space(self, inv):
            assert inv.arguments["zeta"].shape == (2,)
            return [Config(1.0), Config(1.0 + 1e-9)]

    monkeypatch.setenv("EJKERNEL_OPS_RECORD", "1")
    mesh = Mesh(np.asarray(jax.devices()[:2]), ("d",))
    executor = Executor()
    got = executor(Named(), alpha=x, zeta=x, mesh=mesh, in_specs=[P("d")])
    np.testing.assert_allclose(got, x)
    (result,) = autotune_recorded(get_invocations(), executor=executor, num_warmup=0, num_iters=1)
    explained = executor.explain(Named(), alpha=x, zeta=x, mesh=mesh, in_specs=(P("d"),))
    assert explained.tier == "memory" and explained.key == result.key


def test_configs_that_cannot_be_remembered(x):
    class Loose(Kernel):
        def run(self, x, *, cfg):
            return x * cfg.scale

        def heuristic_cfg(self, inv):
            return types.SimpleNamespace(scale=2.0)

    assert scale_of(Executor()(Loose(), x), x) == 2.0
    cfg = types.SimpleNamespace(scale=3.0)
    assert scale_of(Executor()(Loose(), x, cfg=cfg), x) == 3.0


def test_explain_prints_what_it_returns(capsys):
    x = jnp.ones(4)
    told = Executor().explain(Scale(), x)
    assert capsys.readouterr().out.strip() == str(told)
    silent = Executor().explanation(Scale(), x)
    assert capsys.readouterr().out == "" and silent.key == told.key


def test_a_small_mask_in_numpy_is_static_where_other_arrays_are_traced():
    """Another mask is another program there; eagerly both share one."""
    seen = []

    class Masked(Kernel[Config, jax.Array]):
        def run(self, x, mask, *, cfg):
            seen.append(type(mask) is np.ndarray)
            return jnp.where(mask, x, 0.0)

    kernel, executor, x = Masked(config_cls=Config), Executor(), jnp.ones(4)
    masks = [np.arange(4) < n for n in (1, 2)]
    traced = [jax.jit(lambda x, m=m: executor(kernel, x, m))(x) for m in masks]
    assert seen == [True, True]
    eager = [executor(kernel, x, m) for m in masks]
    assert seen == [True, True, False]
    for m, *outs in zip(masks, traced, eager, strict=True):
        for out in outs:
            np.testing.assert_array_equal(out, m)
