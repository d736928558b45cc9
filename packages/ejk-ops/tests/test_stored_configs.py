"""Configs of files that this device cannot run: passed over with one warning, never an error."""

from __future__ import annotations

import warnings
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import pytest
from jax.extend.core import Primitive
from jax.interpreters import ad, mlir

from ejkernel.ops import (
    ConfigCache,
    ConfigSelectorChain,
    EjkernelWarning,
    Executor,
    Invocation,
    Kernel,
    OpConfig,
    PersistentCache,
    target_device,
)
from ejkernel.ops.config.store import Entry, encode_config, format_file
from ejkernel.ops.errors import ConfigError, reset_warnings
from ejkernel.ops.params import count_field

pytestmark = pytest.mark.skipif(jax.default_backend() != "cpu", reason="the choice on a CPU")

UNTRACEABLE, UNLOWERABLE, SOUND, HEURISTIC = 1, 2, 3, 4
X = jnp.arange(4.0)


@dataclass(frozen=True)
class Pages(OpConfig):
    pages: int | None = count_field()


lowered: list[int] = []
broken: set[int] = {UNLOWERABLE}


def _lower(context, x, *, pages):
    lowered.append(pages)
    if pages in broken:
        raise RuntimeError(f"needs {pages} bytes of shared memory\nand a second line")
    return [x]


_launch = Primitive("launch")
_launch.def_impl(lambda x, *, pages: jax.jit(lambda x: _launch.bind(x, pages=pages))(x))
_launch.def_abstract_eval(lambda x, *, pages: x)
ad.deflinear2(_launch, lambda ct, x, *, pages: [ct])
mlir.register_lowering(_launch, _lower)


class Paged(Kernel[Pages, jax.Array]):
    tables = ()

    def run(self, x, *, cfg):
        if cfg.pages == UNTRACEABLE:
            raise ConfigError("pages do not fit")
        return _launch.bind(x, pages=cfg.pages) * 2

    def heuristic_cfg(self, inv):
        return Pages(pages=HEURISTIC)

    def config_tables(self, inv):
        return self.tables


@pytest.fixture(autouse=True)
def nothing_lowered():
    lowered.clear()
    yield
    broken.clear()
    broken.add(UNLOWERABLE)


def chain(folder, kernel, pages):
    """A chain whose file has a config with these pages for the call of X."""
    cache = PersistentCache(folder)
    cache.put(Invocation(kernel, (X,)).key, Pages(pages=pages))
    return ConfigSelectorChain(ConfigCache(), PersistentCache(folder), autotune=False)


WAYS = {
    "eager": lambda call: call(X),
    "jit": lambda call: jax.jit(call)(X),
    "grad": lambda call: X * jax.jit(jax.grad(lambda x: call(x).sum()))(X),
}


@pytest.mark.parametrize("pages", [UNTRACEABLE, UNLOWERABLE])
@pytest.mark.parametrize("way", ["eager", "jit", "grad"])
def test_a_stored_config_that_does_not_lower_is_passed_over(tmp_path, way, pages):
    kernel = Paged()
    executor = Executor(chain(tmp_path, kernel, pages))
    with pytest.warns(EjkernelWarning, match="stored config of kernel 'Paged' is not used") as told:
        for _ in range(2):
            assert jnp.array_equal(WAYS[way](lambda x: executor(kernel, x)), 2 * X)
    assert len(told) == 1 and "second line" not in str(told[0].message)
    explained = executor.explanation(kernel, X)
    assert explained.tier == "heuristics" and explained.cfg.pages == HEURISTIC
    assert dict(explained.tiers)["persistent"].startswith("not used: ")
    # the next process knows: it compiles nothing again, and says why
    lowered.clear()
    reset_warnings()
    again = Executor(ConfigSelectorChain(ConfigCache(), PersistentCache(tmp_path), autotune=False))
    with pytest.warns(EjkernelWarning, match="is not used"):
        assert jnp.array_equal(again(kernel, X), 2 * X)
    assert pages not in lowered


def test_an_explicit_config_is_not_passed_over(tmp_path):
    kernel = Paged()
    executor = Executor(chain(tmp_path, kernel, SOUND))
    with pytest.raises(ConfigError, match="do not fit"):
        executor(kernel, X, cfg=Pages(pages=UNTRACEABLE))
    with pytest.raises(RuntimeError, match="shared memory"):
        executor(kernel, X, cfg=Pages(pages=UNLOWERABLE))


def test_a_sound_config_is_used_and_lowered_once_to_see(tmp_path):
    kernel = Paged()
    executor = Executor(chain(tmp_path, kernel, SOUND))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert executor.explanation(kernel, X).tier == "persistent"
        assert lowered == []  # an explanation compiles nothing
        for _ in range(3):
            executor(kernel, X)
    assert executor.choose_config(kernel, X).pages == SOUND
    assert lowered == [SOUND, SOUND]


def test_the_nearest_entry_of_a_table_is_passed_over_too(tmp_path):
    kernel, inv = Paged(), Invocation(Paged(), (X,))
    path = tmp_path / "table.json"
    entry = Entry(encode_config(Pages(pages=UNLOWERABLE)), dict(inv.payload))
    path.write_text(format_file({"device": target_device().fingerprint}, {inv.key: entry}))
    kernel.tables = (path,)
    executor = Executor(ConfigSelectorChain(ConfigCache(), autotune=False))
    assert executor.explanation(kernel, X).tier == "persistent"
    with pytest.warns(EjkernelWarning, match="is not used: RuntimeError: needs 2 bytes") as told:
        assert jnp.array_equal(executor(kernel, X), 2 * X)
    assert len(told) == 1 and executor.explanation(kernel, X).tier == "heuristics"


def test_where_nothing_lowers_no_config_is_blamed(tmp_path):
    kernel = Paged()
    broken.update((SOUND, HEURISTIC))
    executor = Executor(chain(tmp_path, kernel, SOUND))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(RuntimeError, match="needs 3 bytes"):
            executor(kernel, X)
    broken.clear()  # the compiler is found
    assert jnp.array_equal(executor(kernel, X), 2 * X)
    assert executor.explanation(kernel, X).cfg.pages == SOUND
