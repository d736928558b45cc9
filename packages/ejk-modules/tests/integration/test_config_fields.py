"""Which config fields each implementation reads: as registered, as documented, as run."""

import re
import warnings
from dataclasses import fields
from functools import partial
from pathlib import Path

import jax
import pytest

import ejkernel.modules as modules
from ejkernel.modules import explain
from ejkernel.modules._table import OPERATIONS, operation_class
from ejkernel.ops import BwdParams, EjkernelWarning, WarpgroupParams, kernel_registry
from ejkernel.ops.implementation import LazyFunction
from ejktest.calls import CALLS, call

PAGE = Path(__file__).resolve().parents[4] / "docs" / "configs.md"


def implementations(name):
    return kernel_registry.list_implementations(operation_class(name).spec.algorithm)


@pytest.mark.parametrize("name", OPERATIONS)
def test_every_implementation_says_which_fields_of_the_config_it_reads(name):
    nested = {"fwd_params": WarpgroupParams, "bwd_params": BwdParams}
    documented = set()
    for field in fields(operation_class(name).config_cls):
        inner = nested.get(field.name)
        names = [f"{field.name}.{f.name}" for f in fields(inner)] if inner else [field.name]
        documented.update(names)
    for implementation in implementations(name):
        assert set(implementation.config_fields) <= documented, implementation.name


@pytest.mark.parametrize("name", OPERATIONS)
def test_every_hook_that_a_package_lists_exists(name):
    for i in implementations(name):
        for hook in (i.supports, i.heuristic, i.candidates, i.sample_inputs, i.priority_for):
            assert not isinstance(hook, LazyFunction) or callable(hook.resolve()), i.name


def test_the_page_lists_the_same_fields():
    text = PAGE.read_text().partition("### What each field does")[2].partition("\n#")[0]
    rows = re.findall(r"^\| (`.*?) \| (.*?) \| (.*?) \|", text, re.MULTILINE)
    documented = {
        (field, operation, platform)
        for names, operations, platforms in rows
        for field in re.findall(r"`([\w.]+)`", names)
        for operation in re.findall(r"`(\w+)`", operations)
        for platform in platforms.split(", ")
    }
    registered = {
        (field, name, i.platform.value + (f" {i.backend.value}" if i.platform == "pallas" else ""))
        for name in OPERATIONS
        for i in implementations(name)
        for field in i.config_fields
    }
    assert documented == registered


class Recorder:
    """A config whose every field is None, and that notes which are read."""

    def __init__(self, read, prefix=""):
        self._read, self._prefix = read, prefix

    def __getattr__(self, name):
        if name in ("fwd_params", "bwd_params"):
            return Recorder(self._read, f"{name}.")
        if name.startswith("__"):
            raise AttributeError(name)
        self._read.add(self._prefix + name)


@pytest.mark.parametrize("name", sorted(CALLS))
def test_xla_reads_what_it_says(name, monkeypatch):
    operation, read = operation_class(name), set()

    def runner(self, resolved, cfg):
        return partial(resolved.fn, cfg=Recorder(read))

    monkeypatch.setattr(operation, "runner", runner)
    # so few tokens need no chunks
    monkeypatch.setattr("ejkernel.kernels.xla.linear_attention.tiles.STEP_LIMIT", 0)
    c = call(name)
    jax.clear_caches()
    jax.eval_shape(lambda: getattr(modules, name)(**c.arguments, platform="xla"))
    (implementation,) = (i for i in implementations(name) if i.platform == "xla")
    # the base of all kernels asks for warpgroups, to refuse them
    # a strategy is read where devices share the sequence
    read |= {"context_parallel"} if implementation.fn.context is not None else set()
    assert read - {"fwd_params.warpgroups"} == set(implementation.config_fields)


def test_explain_names_the_fields_of_a_given_config_that_have_no_effect(capsys):
    q = jax.ShapeDtypeStruct((1, 64, 2, 16), "float32")
    given = {"fwd_params": {"q_blocksize": 32, "num_warps": 4}, "bwd_params": {"num_stages": 2}}
    answer = explain("flash_attention", q, q, q, cfg=given, platform="xla")
    assert answer.unused == ("fwd_params.num_warps", "bwd_params.num_stages")
    line = "no effect       fwd_params.num_warps, bwd_params.num_stages: not read here"
    assert line in capsys.readouterr().out
    assert explain("flash_attention", q, q, q, cfg={"fwd_params": {"q_blocksize": 32}}).unused == ()
    assert explain("flash_attention", q, q, q).unused == ()


def test_config_fields_that_have_no_effect_are_named_in_one_warning():
    q = jax.numpy.ones((1, 16, 2, 16), "float32")
    cfg = {"fwd_params": {"q_blocksize": 32, "num_warps": 4}, "bwd_params": {"num_stages": 2}}
    with pytest.warns(EjkernelWarning) as caught:
        out = modules.flash_attention(q, q, q, cfg=cfg, platform="xla")
        jax.jit(lambda q: modules.flash_attention(q, q, q, cfg=cfg, platform="xla"))(q)
    (warning,) = caught
    assert str(warning.message) == (
        "flash_attention: fields of cfg without effect: fwd_params.num_warps, "
        "bwd_params.num_stages (flash_attention/xla/any does not read them)"
    )
    cfg = {"fwd_params": {"q_blocksize": 32}}
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        read = modules.flash_attention(q, q, q, cfg=cfg, platform="xla")
    assert (read == out).all()
