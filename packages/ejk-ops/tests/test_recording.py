"""Offline tuning: calls recorded in a file, calls behind the stamps of a lowered program."""

from __future__ import annotations

import enum
import json
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ejkernel.ops import (
    ConfigCache,
    ConfigSelectorChain,
    EjkernelWarning,
    Executor,
    Invocation,
    Kernel,
    allow_in_files,
    autotune_recorded,
    clear_invocations,
    get_invocations,
    invocations_in_lowered,
    load_invocations,
    save_invocations,
    tune,
)
from ejkernel.ops.core.keys import is_array
from ejkernel.ops.core.route import Route
from ejkernel.ops.errors import reset_warnings
from ejkernel.ops.utils import labels


@dataclass(frozen=True)
class Config:
    tile: int = 0


@allow_in_files
class Rule(enum.Enum):
    FULL = 1


@allow_in_files
@jax.tree_util.register_pytree_node_class
@dataclass(frozen=True)
class Mask:
    ids: object
    window: tuple | None = None

    def tree_flatten(self):
        return (self.ids,), (self.window, Rule.FULL)

    @classmethod
    def tree_unflatten(cls, static, children):
        return cls(children[0], static[0])


class Op(Kernel[Config, jax.Array]):
    def run(self, x, mask=None, *, dtype=None, options=None, scale=None, cfg):
        return jnp.cos(x)

    def config_space(self, inv):
        return [Config(1), Config(2)]


class Sibling(Op):
    pass


@pytest.fixture
def executor():
    clear_invocations()
    yield Executor(ConfigSelectorChain(ConfigCache(), autotune=False))
    clear_invocations()


X = jnp.ones((4, 8))
MASK = Mask(jnp.zeros(4, jnp.int32), (3, 0))
STATIC = {"dtype": jnp.bfloat16, "options": [1, (2.5, None), float("inf")], "scale": 0.5}


def program(executor):
    def f(x):
        y = executor(Op(), x, MASK, **STATIC)
        return executor(Op(), y) + executor(Sibling(), x)

    return f


def shapes(tree):
    leaves, structure = jax.tree_util.tree_flatten(tree)
    return structure, [(x.shape, x.dtype) if is_array(x) else _dtype(x) for x in leaves]


def _dtype(x):  # jnp.bfloat16 comes back as its dtype
    return np.dtype(x) if isinstance(x, (type, np.dtype)) else x


def test_recorded_calls_survive_in_a_file(executor, tmp_path, monkeypatch):
    monkeypatch.setenv("EJKERNEL_OPS_RECORD", "1")
    jax.jit(program(executor)).lower(X)
    recorded = get_invocations()
    path = tmp_path / "calls.json"
    assert save_invocations(path) == len(recorded) == 3
    loaded = load_invocations(path)
    assert [i.key for i in loaded] == [i.key for i in recorded]
    for a, b in zip(recorded, loaded, strict=True):
        assert type(a.kernel) is type(b.kernel) and dict(a.payload) == dict(b.payload)
        assert shapes((a.abstract_args, a.abstract_kwargs)) == shapes((b.args, b.kwargs))
    clear_invocations()
    results = autotune_recorded(loaded, executor=executor, num_warmup=0, num_iters=1)
    assert len(results) == 3
    for told in (executor.explanation(Op(), X, MASK, **STATIC), executor.explanation(Op(), X)):
        assert told.tier == "memory"


def test_another_device_gives_other_keys(executor, tmp_path, monkeypatch):
    monkeypatch.setenv("EJKERNEL_OPS_RECORD", "1")
    executor(Op(), X)
    path = tmp_path / "calls.json"
    save_invocations(path)
    (inv,) = get_invocations()
    content = path.read_text().replace(inv.device_fingerprint, "gpu:nvidia-h200:9.0")
    path.write_text(content)
    assert load_invocations(path)[0].key == inv.key  # as a call on the device at hand
    elsewhere = Invocation(Op(), (X,), route=Route(device="gpu:nvidia-h200:9.0"))
    assert elsewhere.key != inv.key and save_invocations(path, [elsewhere]) == 1
    assert load_invocations(path)[0].key == inv.key


def test_what_cannot_be_kept_is_left_out_with_a_warning(executor, tmp_path, monkeypatch):
    monkeypatch.setenv("EJKERNEL_OPS_RECORD", "1")
    executor(Op(), X, options=lambda: None)
    executor(Sibling(), X)
    path = tmp_path / "calls.json"
    with pytest.warns(EjkernelWarning, match="left out"):
        assert save_invocations(path) == 1
    sound = path.read_text()
    for old, new in (("Sibling", "Gone"), ('"version": 1', '"version": 7')):
        path.write_text(sound.replace(old, new))
        with pytest.warns(EjkernelWarning, match="left out"):
            assert load_invocations(path) == []


def test_files_that_are_something_else(tmp_path):
    path = tmp_path / "calls.json"
    foreign = {"schema": 2, "kind": "x", "calls": []}
    older = {"schema": 1, "kind": "ejkernel invocations", "calls": []}
    for text in ("", "[]", "{}", json.dumps(foreign), json.dumps(older)):
        path.write_text(text)
        with pytest.raises(ValueError, match=str(path)):
            load_invocations(path)
    with pytest.raises(OSError):
        load_invocations(tmp_path / "none.json")


@pytest.mark.parametrize("mode", ["hash", "json"])
def test_a_lowered_program_leads_back_to_its_calls(executor, mode, monkeypatch):
    monkeypatch.setenv("EJKERNEL_OPS_STAMP", mode)
    lowered = jax.jit(program(executor)).lower(X)
    found = invocations_in_lowered(lowered)
    keys = [executor.explanation(Op(), X, MASK, **STATIC).key]
    keys += [executor.explanation(k, X).key for k in (Op(), Sibling())]
    assert sorted(i.key for i in found) == sorted(keys)
    # a program kept on disk has the labels of whoever compiled it first, unless they are in its key
    option = "jax_compilation_cache_include_metadata_in_key"
    before = getattr(jax.config, option)
    jax.config.update(option, True)
    try:
        compiled = invocations_in_lowered(lowered.compile())  # some calls are merged there
    finally:
        jax.config.update(option, before)
    assert {i.key for i in compiled} <= set(keys) and compiled
    results = autotune_recorded(found, executor=executor, num_warmup=0, num_iters=1)
    assert len(results) == 3 and executor.explanation(Op(), X).tier == "memory"
    assert executor.explanation(Op(), X, MASK, **STATIC).tier == "memory"


def test_stamps_of_another_process_are_looked_up(executor, monkeypatch, tmp_path):
    monkeypatch.setenv("EJKERNEL_OPS_STAMP", "hash")
    monkeypatch.setenv("EJKERNEL_OPS_RECORD", "1")
    lowered = jax.jit(program(executor)).lower(X)
    save_invocations(tmp_path / "calls.json")
    clear_invocations()
    monkeypatch.setattr(labels, "_stamped", {})
    assert invocations_in_lowered(lowered) == []
    known = load_invocations(tmp_path / "calls.json")
    assert {i.key for i in invocations_in_lowered(lowered, known)} == {i.key for i in known}


def test_values_are_not_kept(executor, tmp_path, monkeypatch):
    monkeypatch.setenv("EJKERNEL_OPS_RECORD", "1")
    executor(Op(), np.full((4, 8), 123.456, np.float32), Mask(jax.random.key(7)))
    save_invocations(tmp_path / "calls.json")
    text = (tmp_path / "calls.json").read_text()
    assert "123" not in text
    (inv,) = load_invocations(tmp_path / "calls.json")
    assert jnp.issubdtype(inv.args[1].ids.dtype, jax.dtypes.prng_key)


def test_the_key_is_that_of_the_call_whatever_the_file_says(executor, tmp_path):
    """A file that gave another call's key had its winner stored under that key."""
    path = tmp_path / "calls.json"
    calls = [Invocation(Op(), (X,)), Invocation(Sibling(), (X,))]
    mine, other = (inv.bound for inv in calls)
    save_invocations(path, [mine])
    content = json.loads(path.read_text())
    content["calls"][0] |= {"key": other.key, "payload": dict(other.payload)}
    path.write_text(json.dumps(content))
    (loaded,) = load_invocations(path)
    assert loaded.key == mine.key and loaded.payload == mine.payload
    results = autotune_recorded([loaded], executor=executor, num_warmup=0, num_iters=1)
    assert [r.key for r in results] == [mine.key]
    assert executor.explanation(Sibling(), X).tier != "memory"


@pytest.mark.parametrize("dtype", ["object", "str", "void", "datetime64", "V8", "f4,i4", "float0"])
def test_dtypes_that_no_array_has_are_refused(tmp_path, dtype):
    path = tmp_path / "calls.json"
    save_invocations(path, [Invocation(Op(), (X,), {"dtype": jnp.bfloat16})])
    sound = path.read_text()
    for old in ('"float32"', '"bfloat16"'):
        path.write_text(sound.replace(old, f'"{dtype}"'))
        reset_warnings()
        with pytest.warns(EjkernelWarning, match="left out.*(dtype|data type)"):
            assert load_invocations(path) == []


def mesh_call(axis_type):
    mesh = jax.make_mesh((2,), ("dp",), axis_types=(axis_type,), devices=jax.devices()[:2])
    spec = jax.sharding.PartitionSpec("dp")
    placed = jax.device_put(X, jax.sharding.NamedSharding(mesh, spec))
    return mesh, spec, placed


@pytest.mark.parametrize("axis_type", list(jax.sharding.AxisType)[:2])
def test_calls_over_a_mesh_keep_their_keys(executor, tmp_path, monkeypatch, axis_type):
    monkeypatch.setenv("EJKERNEL_OPS_RECORD", "1")
    mesh, spec, placed = mesh_call(axis_type)
    executor(Op(), placed)
    executor(Op(), placed, mesh=mesh, in_specs=(spec,))
    executor(Op(), placed, mesh=mesh, in_specs=[spec], out_specs=spec)
    path = tmp_path / "calls.json"
    assert save_invocations(path) == 3
    loaded = load_invocations(path)
    assert [i.key for i in loaded] == [i.key for i in get_invocations()]
    assert [i.args[0].shape for i in loaded] == [(4, 8), (2, 8), (2, 8)]  # of one shard
    results = autotune_recorded(loaded, executor=executor, num_warmup=0, num_iters=1)
    assert len(results) == 3


def test_a_functions_calls_are_tuned_together_and_used_afterwards(executor, monkeypatch):
    tiles = []

    class Seen(Op):
        def run(self, x, *, cfg):
            tiles.append(cfg.tile)
            return jnp.sin(x)

        def heuristic_cfg(self, inv):
            return Config(7)

        def config_space(self, inv):
            return [Config(7), Config(2)]

    @jax.jit
    def layer(x, _):
        return executor(Seen(), x), None

    def loss(x):
        x, _ = jax.lax.scan(layer, x, length=3)
        return executor(Op(), x[:2]).sum()

    step = jax.jit(jax.grad(loss))
    step(X)  # compiled before with the heuristic config
    assert set(tiles) == {7}
    results = tune(step, X, executor=executor, num_warmup=0, num_iters=1)
    assert [type(r.kernel) for r in results] == [Seen, Op]
    assert executor.explanation(Seen(), X).tier == "memory"
    (seen, _) = results
    tiles.clear()
    step(X)
    assert set(tiles) == {seen.best.tile}


def test_a_function_without_calls_is_refused(executor):
    with pytest.raises(ValueError, match="cos makes no call"):
        tune(jnp.cos, X, executor=executor)
