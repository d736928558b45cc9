"""Caches over a mesh: heads, rows, and pages of one sequence on several devices, on eight CPUs."""

from __future__ import annotations

import collections
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import ejkernel.modules as modules
from ejkernel.ops import InvalidArgument
from ejktest.drawn import normal
from ejktest.oracles import paged
from ejktest.tolerance import check_close

pytestmark = pytest.mark.skipif(len(jax.devices()) < 8, reason="needs eight devices")

COLLECTIVES = re.compile(r" (all-gather|all-to-all|all-reduce|collective-permute)(-start)?\(")
H, HK, D, PS, COLUMNS, PAGES = 8, 4, 16, 4, 5, 24
LENS = np.array([17, 0, 1, 20], np.int32)
TABLES = np.random.default_rng(0).permutation(PAGES)[: 4 * COLUMNS].reshape(4, COLUMNS)
TABLES = np.where(np.arange(COLUMNS) * PS < LENS[:, None], TABLES, [[-1], [99], [-5], [0]])
TABLES = TABLES.astype(np.int32)
STARTS = np.array([0, 4, 4, 5, 11], np.int32)
TOKENS, COUNT = 13, 4
SINKS = normal(H, 2, seed=9)
SCALE = D**-0.5


@pytest.fixture(autouse=True)
def untuned(monkeypatch):
    monkeypatch.setenv("EJKERNEL_AUTOTUNE_POLICY", "heuristics")


def mesh_of(*shape):
    names = ("pages", "tp", "dp")[: len(shape)]
    return Mesh(np.array(jax.devices()[: int(np.prod(shape))]).reshape(shape), names)


def collectives(compiled):
    return collections.Counter(m[1] for m in COLLECTIVES.finditer(compiled.as_text()))


def run(function, arrays, mesh, specs, **options):
    """Compiles for arrays that lie as the specs say; returns the program and its outputs."""
    placed = [jax.device_put(x, NamedSharding(mesh, s)) for x, s in zip(arrays, specs, strict=True)]

    def call(*arrays):
        return function(*arrays, mesh=mesh, in_specs=specs, **options)

    compiled = jax.jit(call).lower(*placed).compile()
    return compiled, compiled(*placed)


def wide(*arrays):
    return [np.asarray(x).astype(np.float64) for x in arrays]


POOL = P("pages", None, "tp")


def page_call():
    arrays = normal(4, H, D), normal(PAGES, PS, HK, D), normal(PAGES, PS, HK, D, seed=1)
    specs = P("dp", "tp"), POOL, POOL, P("dp"), P("dp")
    return (*arrays, LENS, TABLES), specs, {"softmax_aux": SINKS, "logits_soft_cap": 3.0}


def latent_call():
    arrays = normal(4, 3, H, 24), normal(PAGES, PS, 24)
    specs = P("dp", None, "tp"), P("pages"), P("dp"), P("dp")
    return (*arrays, LENS, TABLES), specs, {"softmax_aux": SINKS, "latent_dim": 16}


def ragged_call():
    arrays = normal(TOKENS, H, D), normal(PAGES, PS, 2 * HK, D)
    specs = P(None, "tp"), POOL, P(), P(), P(), P()
    return (*arrays, LENS, TABLES, STARTS, np.int32(COUNT)), specs, {"softmax_aux": SINKS}


def reference(operation, arrays, **options):
    names = {"softmax_aux": "aux", "logits_soft_cap": "cap"}
    options = {names.get(n, n): x for n, x in options.items()}
    with jax.enable_x64(True):
        if operation == "mla_decode":
            q, cache, lens, tables = arrays
            options |= {"aux": wide(options["aux"])[0], "scale": 24**-0.5}
            latent_dim = options.pop("latent_dim")
            return paged.mla_decode(*wide(q, cache), lens, tables, latent_dim, **options)
        options |= {"aux": wide(options["aux"])[0], "scale": SCALE, "return_lse": True}
        if operation == "page_attention":
            return paged.page_attention(*wide(*arrays[:3]), *arrays[3:], **options)
        return paged.ragged_page_attention(*wide(*arrays[:2]), *arrays[2:5], COUNT, **options)


CALLS = {
    "page_attention": page_call,
    "mla_decode": latent_call,
    "ragged_page_attention": ragged_call,
}


@pytest.mark.parametrize("operation", CALLS)
def test_pages_on_several_devices(operation):
    """With heads and, where rows can be, rows over the other axes; sinks count once."""
    arrays, specs, options = CALLS[operation]()
    function = getattr(modules, operation)
    want = reference(operation, arrays, **options)
    alone = jax.jit(lambda *x: function(*x, return_lse=True, **options))(*arrays)
    compiled, outputs = run(function, arrays, mesh_of(2, 2, 2), specs, return_lse=True, **options)
    for name, found, one, exact in zip(("o", "lse"), outputs, alone, want, strict=True):
        assert (found.shape, found.dtype) == (one.shape, one.dtype)
        check_close(np.asarray(found), exact, name=name)
    # of the outputs and their log-sum-exps
    assert collectives(compiled) == {"all-gather": 1}
    options.pop("softmax_aux")
    specs = [P("pages") if "pages" in spec else P() for spec in specs]
    alone = jax.jit(lambda *x: function(*x, **options))(*arrays)
    found = run(function, arrays, mesh_of(4), specs, **options)[1]
    np.testing.assert_allclose(found, alone, atol=2e-6)


@pytest.mark.parametrize("operation", CALLS)
def test_gradients_over_pages(operation):
    arrays, specs, options = CALLS[operation]()
    function, count = getattr(modules, operation), 2 + (operation == "page_attention")
    sinks = options.pop("softmax_aux")

    def gradients(*arrays, **where):
        floats, others = arrays[:count], arrays[count:]

        def loss(sinks, *floats):
            o, lse = function(
                *floats, *others, softmax_aux=sinks, return_lse=True, **options, **where
            )
            return jnp.sum(jnp.sin(o)) + jnp.sum(jnp.where(lse > -jnp.inf, lse, 0))

        return jax.grad(loss, tuple(range(count + 1)))(sinks, *floats)

    expected = jax.jit(gradients)(*arrays)
    found = run(gradients, arrays, mesh_of(4), [P("pages") if "pages" in s else P() for s in specs])
    for x, y in zip(found[1], expected, strict=True):
        np.testing.assert_allclose(x, y, atol=5e-6)


V3 = ("plain", "int8 packed", "donated")


def v3_call(form):
    cache = normal(PAGES, PS, 2 * HK, D)
    scales = {}
    if form == "int8 packed":
        cache = np.asarray(jnp.clip(cache * 40, -128, 127).astype(jnp.int8))
        packed = np.full((PAGES, PS, 2, 4, 128), 7, np.int8)
        packed[..., :D] = cache.reshape(PAGES, PS, 2, 4, D)
        cache, scales = packed, {"k_scale": 0.02, "v_scale": 0.03}
    arrays = (
        normal(TOKENS, H, D), normal(TOKENS, HK, D), normal(TOKENS, HK, D, seed=1), cache,
        LENS, TABLES, STARTS, np.array([0, 0, COUNT], np.int32),
    )  # fmt: skip
    rows = P(None, "tp")
    return arrays, [rows, rows, rows, POOL, P(), P(), P(), P()], scales


@pytest.mark.parametrize("form", V3)
def test_new_tokens_are_written_where_their_pages_are(form):
    arrays, specs, scales = v3_call(form)
    mesh, function = mesh_of(4, 2), modules.ragged_page_attention_v3
    places = [NamedSharding(mesh, spec) for spec in specs]
    placed = [jax.device_put(x, place) for x, place in zip(arrays, places, strict=True)]

    def step(*arrays, **where):
        return function(*arrays, softmax_aux=SINKS, return_lse=True, **scales, **where)

    expected = jax.jit(step)(*arrays)
    donated = (3,) if form == "donated" else ()
    call = jax.jit(lambda *x: step(*x, mesh=mesh, in_specs=specs), donate_argnums=donated)
    compiled = call.lower(*placed).compile()
    assert collectives(compiled) == {"all-gather": 1}
    if donated:
        assert re.search(r"input_output_alias=\{ \{2\}: \(\d+", compiled.as_text())
    o, lse, cache = compiled(*placed)
    np.testing.assert_array_equal(cache, expected[2])
    assert cache.sharding.is_equivalent_to(places[3], cache.ndim)
    np.testing.assert_allclose(o, expected[0], atol=2e-6)
    np.testing.assert_allclose(lse, expected[1], atol=2e-6)


def test_gradients_through_written_pages():
    arrays, specs, _ = v3_call("plain")

    def gradients(*arrays, **where):
        def loss(*floats):
            out = modules.ragged_page_attention_v3(*floats, *arrays[4:], **where)
            return sum(jnp.sum(jnp.sin(x)) for x in out)

        return jax.grad(loss, (0, 1, 2, 3))(*arrays[:4])

    expected = jax.jit(gradients)(*arrays)
    found = run(gradients, arrays, mesh_of(4, 2), specs)[1]
    for x, y in zip(found, expected, strict=True):
        np.testing.assert_allclose(x, y, atol=5e-6)


def test_heads_and_rows_need_no_communication():
    """Caches sharded alike over heads; rows over the others; pages on all devices."""
    for operation, (arrays, specs, options) in ((n, call()) for n, call in CALLS.items()):
        whole = [P(*(None if e == "pages" else e for e in spec)) for spec in specs]
        function = getattr(modules, operation)
        alone = jax.jit(lambda *x: function(*x, **options))(*arrays)  # noqa: B023
        compiled, found = run(function, arrays, mesh_of(1, 2, 2), whole, **options)
        assert collectives(compiled) == {}
        np.testing.assert_allclose(found, alone, atol=2e-6)


def test_what_cannot_be_sharded():
    arrays, specs, _ = page_call()
    mesh = mesh_of(4)
    pages = [P("pages") if "pages" in s else P() for s in specs]
    with pytest.raises(ValueError, match="sliding_window: given with pages that are sharded"):
        modules.page_attention(*arrays, sliding_window=3, mesh=mesh, in_specs=pages)
    arrays_of_rows, *_ = ragged_call()
    with pytest.raises(ValueError, match=r"axis tokens may not be .*; shard heads or pages"):
        modules.ragged_page_attention(*arrays_of_rows, mesh=mesh, in_specs=[P("pages")])
    odd = arrays[0], *(x[:22] for x in arrays[1:3]), LENS, TABLES % 22
    with pytest.raises(InvalidArgument, match="key_cache: axis pages of size 22 is not divisible"):
        modules.page_attention(*odd, mesh=mesh, in_specs=pages)
    with pytest.raises(ValueError, match="already shards axis"):
        twice = [P(None, "pages"), *pages[1:]]
        modules.page_attention(*arrays, mesh=mesh, in_specs=twice)


def test_pages_sharded_without_specs_are_an_error_that_names_the_way():
    """When the program is compiled: types of automatic axes do not tell before."""
    mesh = jax.make_mesh((2,), ("pages",), axis_types=(AxisType.Auto,))
    arrays, _, options = page_call()
    pages = NamedSharding(mesh, P("pages"))
    query, keys, values, *others = arrays
    placed = query, jax.device_put(keys, pages), jax.device_put(values, pages), *others
    message = "page_attention: axis pages is sharded over .*'pages'.* indexed.*by mesh= and "
    with pytest.raises(ValueError, match=message):
        modules.page_attention(*placed, **options)

    def attend(*arrays):
        return modules.page_attention(*arrays, **options)

    lowered = jax.jit(attend).lower(*placed)
    with pytest.raises(jax.errors.JaxRuntimeError, match=f"ValueError: {message}"):
        lowered.compile()
    notes = modules.explain("page_attention", *placed, **options).notes
    assert any(re.match(f"refused: {message}", note) for note in notes)
    explicit = jax.make_mesh((2,), ("pages",), axis_types=(AxisType.Explicit,))
    with jax.set_mesh(explicit), pytest.raises(ValueError, match="axis pages may not be sharded"):
        typed = (jax.device_put(x, NamedSharding(explicit, P("pages"))) for x in (keys, values))
        attend(query, *typed, *others)
