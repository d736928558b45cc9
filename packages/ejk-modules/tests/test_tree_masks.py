"""Rows whose new tokens are nodes of a tree, on every backend that runs on a CPU."""

import contextlib
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import ejkernel.modules as modules
from ejkernel.ops import interpret_mode
from ejktest.drawn import grow_tree
from ejktest.oracles import paged as oracle
from ejktest.tolerance import check_close

H, HK, D, PS, COLUMNS = 4, 2, 16, 8, 12
LATENT = 32
PLATFORMS = ["xla", "triton"]
# lengths and new tokens: trees, ordinary rows, a sequence that is new as a whole
SERVER = (np.array([40, 70, 7, 0, 90], np.int32), np.array([5, 1, 7, 0, 12]))
FEW = (np.array([61], np.int32), np.array([5]))  # with the three rows behind them: one launch
LONG = (np.array([80, 33], np.int32), np.array([40, 20]))


def on(platform):
    return interpret_mode() if platform == "triton" else contextlib.nullcontext()


def call_of(sizes, *, seed=0, dtype=np.float32, columns=None):
    """Arguments of a ragged call whose sequences have a random tree each, and its positions."""
    rng = np.random.default_rng(seed)
    lens, new = sizes
    n, tokens = len(lens), int(new.sum()) + 3
    starts = np.concatenate([[0], np.cumsum(new)]).astype(np.int32)
    tables = rng.permutation(n * COLUMNS + 2)[: n * COLUMNS].reshape(n, COLUMNS).astype(np.int32)
    columns = int(new.max()) if columns is None else columns
    mask = rng.random((tokens, columns)) < 0.3  # rows behind the last sequence: anything
    positions = np.zeros(tokens, np.int32)
    for r, count in enumerate(new):
        ancestors, depth = grow_tree(rng, count)
        rows = slice(starts[r], starts[r + 1])
        mask[rows] = False
        mask[rows, :count] = ancestors[:, :columns]
        positions[rows] = lens[r] - count + depth
    pages = rng.standard_normal((n * COLUMNS + 2, PS, 2 * HK, D))
    pages = np.clip(np.round(pages * 40), -127, 127) if dtype == np.int8 else pages
    return {
        "queries": rng.standard_normal((tokens, H, D)).astype(np.float32),
        "kv_pages": jnp.asarray(pages, dtype),
        "context_lens": lens,
        "block_tables": tables,
        "query_start_loc": starts,
        "num_seqs": np.array([n], np.int32),
        "tree_mask": mask,
    }, positions


def expected(call, **options):
    a = {name: np.asarray(x) for name, x in call.items() if hasattr(x, "dtype")}
    with jax.enable_x64(True):
        return oracle.ragged_page_attention(
            a["queries"].astype(np.float64), np.asarray(call["kv_pages"]).astype(np.float64),
            a["context_lens"], a["block_tables"], a["query_start_loc"], int(a["num_seqs"][0]),
            tree_mask=a["tree_mask"], positions=a.get("positions"), scale=D**-0.5, **options,
        )  # fmt: skip


@pytest.mark.parametrize("sizes", [SERVER, FEW, LONG], ids=["server", "few", "long"])
@pytest.mark.parametrize("platform", PLATFORMS)
def test_trees_of_several_sequences(platform, sizes):
    call, _ = call_of(sizes)
    with on(platform):
        o, lse = modules.ragged_page_attention(**call, platform=platform, return_lse=True)
    reference = expected(call, return_lse=True)
    check_close(o, reference[0], dtype=np.float32)
    np.testing.assert_allclose(lse, reference[1], atol=1e-5)


def test_few_rows_take_one_launch_of_triton():
    """So the calls of FEW run another kernel than the calls of SERVER and LONG."""
    pytest.importorskip("ejkernel.kernels.triton", reason="the Triton package is not installed")
    launches = {}
    for sizes in (SERVER, FEW, LONG):
        call, _ = call_of(sizes)
        with interpret_mode():
            run = jax.make_jaxpr(lambda a: modules.ragged_page_attention(**a, platform="triton"))
            launches[len(call["queries"])] = "FewRowsAttention" in str(run(call))
    assert [rows for rows, few in launches.items() if few] == [8]


@pytest.mark.parametrize(
    ("platform", "dtype", "sizes"),
    [("xla", np.int8, SERVER), ("triton", np.int8, LONG), ("triton", jnp.float8_e4m3fn, FEW)],
)
def test_trees_over_8_bits(platform, dtype, sizes):
    call, _ = call_of(sizes, dtype=dtype)
    scales = {"k_scale": 0.02, "v_scale": 0.05}
    with on(platform):
        o = modules.ragged_page_attention(**call, **scales, platform=platform)
    check_close(o, expected(call, **scales), dtype=np.float32, rms_limit=2e-3)


@pytest.mark.parametrize(
    ("platform", "sizes", "positioned"),
    [
        ("xla", SERVER, True),
        ("xla", LONG, False),
        ("triton", SERVER, True),
        ("triton", FEW, False),
        ("triton", LONG, True),
    ],
)
def test_a_window_over_trees(platform, sizes, positioned):
    call, positions = call_of(sizes)
    if positioned:
        call["positions"] = positions
    with on(platform):
        o = modules.ragged_page_attention(**call, sliding_window=(6, 2), platform=platform)
    check_close(o, expected(call, window=(6, 2)), dtype=np.float32)


@pytest.mark.parametrize(
    ("platform", "sizes"), [("xla", SERVER), ("triton", SERVER), ("triton", FEW)]
)
def test_a_chain_equals_causal_rows_bit_by_bit(platform, sizes):
    call, _ = call_of(sizes)
    starts = call["query_start_loc"]
    number = np.arange(len(call["queries"]))
    number -= starts[np.clip(np.searchsorted(starts[1:], number, side="right"), 0, len(starts) - 2)]
    call["tree_mask"] = np.arange(call["tree_mask"].shape[1]) <= number[:, None]
    with on(platform):
        ours = modules.ragged_page_attention(**call, platform=platform)
        causal = modules.ragged_page_attention(**call | {"tree_mask": None}, platform=platform)
    np.testing.assert_array_equal(ours, causal)


@pytest.mark.parametrize("platform", PLATFORMS)
def test_columns_that_are_missing_are_not_seen(platform):
    call, _ = call_of(SERVER, columns=4)
    with on(platform):
        o = modules.ragged_page_attention(**call, platform=platform)
    check_close(o, expected(call), dtype=np.float32)


@pytest.mark.parametrize("platform", PLATFORMS)
def test_positions_without_a_tree(platform):
    call, positions = call_of(SERVER)
    call |= {"tree_mask": None, "positions": positions}
    causal = np.tri(len(positions), dtype=bool)
    starts = call["query_start_loc"]
    for first, last in itertools.pairwise(starts):
        causal[first:last] = False
        causal[first:last, : last - first] = np.tri(last - first, dtype=bool)
    with on(platform):
        o = modules.ragged_page_attention(**call, sliding_window=(5, 5), platform=platform)
    check_close(o, expected(call | {"tree_mask": causal}, window=(5, 5)), dtype=np.float32)


@pytest.mark.parametrize("platform", PLATFORMS)
def test_trees_that_are_written_first(platform):
    call, _ = call_of(SERVER)
    rng = np.random.default_rng(1)
    tokens = len(call["queries"])
    keys, values = rng.standard_normal((2, tokens, HK, D)).astype(np.float32)
    n = len(call["context_lens"])
    with on(platform):
        o, cache = modules.ragged_page_attention_v3(
            call["queries"], keys, values, call["kv_pages"], call["context_lens"],
            call["block_tables"], call["query_start_loc"], np.array([0, 0, n], np.int32),
            tree_mask=call["tree_mask"], platform=platform,
        )  # fmt: skip
    written = oracle.write_pages(
        call["kv_pages"], keys, values, call["context_lens"], call["block_tables"],
        call["query_start_loc"], n,
    )  # fmt: skip
    np.testing.assert_array_equal(cache, written)
    check_close(o, expected(call | {"kv_pages": written}), dtype=np.float32)


@pytest.mark.parametrize(
    ("dtype", "options"),
    [
        (np.int8, {}),
        (np.float32, {"window": (5, 1)}),
        (np.float32, {"window": (5, 1), "ahead": 0}),
        (np.float32, {"window": (5, 1), "ahead": 2, "rows": 1}),
    ],
)
@pytest.mark.parametrize("platform", PLATFORMS)
def test_latent_trees(platform, dtype, options):
    rng = np.random.default_rng(2)
    b, q, dc = 3, options.get("rows", 6), LATENT + 16
    lens = np.array([50, 6, 81], np.int32)
    trees = [grow_tree(rng, q) for _ in range(b)]
    mask = np.stack([ancestors for ancestors, _ in trees])
    depth = np.stack([depth for _, depth in trees])
    positions = None
    if "ahead" in options:
        positions = (lens[:, None] - q + depth + options["ahead"]).astype(np.int32)
    query = rng.standard_normal((b, q, H, dc)).astype(np.float32)
    tables = rng.permutation(b * COLUMNS).reshape(b, COLUMNS).astype(np.int32)
    cache = rng.standard_normal((b * COLUMNS, PS, dc)) * (40 if dtype == np.int8 else 1)
    cache = np.clip(np.round(cache), -127, 127) if dtype == np.int8 else cache
    cache = jnp.asarray(cache, dtype)
    scale = 0.025 if dtype == np.int8 else None
    window = options.get("window")
    with on(platform):
        o, lse = modules.mla_decode(
            query, cache, lens, tables, latent_dim=LATENT, tree_mask=mask, positions=positions,
            sliding_window=window, k_scale=scale, return_lse=True, platform=platform,
        )  # fmt: skip
    with jax.enable_x64(True):
        reference = oracle.mla_decode(
            query.astype(np.float64), np.asarray(cache).astype(np.float64), lens, tables, LATENT,
            k_scale=scale, scale=dc**-0.5, tree_mask=mask, positions=positions, window=window,
        )  # fmt: skip
    check_close(o, reference[0], dtype=np.float32, rms_limit=2e-3 if scale else None)
    np.testing.assert_allclose(lse, reference[1], atol=2e-3 if scale else 1e-5)


def test_gradients_through_a_tree():
    call, _ = call_of(SERVER)

    def loss(queries, platform):
        out = modules.ragged_page_attention(**call | {"queries": queries}, platform=platform)
        return jnp.sum(jnp.sin(out))

    ours = jax.grad(loss)(call["queries"], "xla")
    with jax.enable_x64(True):
        a = {name: np.asarray(x) for name, x in call.items()}
        wide = a["queries"].astype(np.float64)
        exact = jax.grad(
            lambda q: jnp.sum(jnp.sin(oracle.ragged_page_attention(
                q, a["kv_pages"].astype(np.float64), a["context_lens"], a["block_tables"],
                a["query_start_loc"], len(a["context_lens"]), tree_mask=a["tree_mask"],
                scale=D**-0.5,
            )))
        )(wide)  # fmt: skip
    check_close(ours, exact, dtype=np.float32, rms_limit=4e-5)


def test_forms_that_are_wrong_are_named():
    call, _ = call_of(SERVER)
    wrong = {
        "tree_mask": [call["tree_mask"].astype(np.float32), call["tree_mask"][:-1]],
        "positions": [np.zeros(3, np.int32), np.zeros(len(call["queries"]), np.float32)],
    }
    for name, values in wrong.items():
        for value in values:
            with pytest.raises(TypeError, match=name):
                modules.ragged_page_attention(**call | {name: value})
    query = jnp.zeros((1, 4, 2, 48))
    cache, lens, table = jnp.zeros((2, 8, 48)), jnp.array([9]), jnp.array([[0, 1]])
    with pytest.raises((TypeError, ValueError), match="tree_mask"):
        modules.mla_decode(
            query, cache, lens, table, latent_dim=32, tree_mask=np.ones((1, 4, 3), bool)
        )
