"""Hopper flash attention where there is no Hopper GPU: its tiles, and what it refuses."""

from __future__ import annotations

import itertools
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractDevice

from ejkernel.kernels.pallas import PACKAGE, compat
from ejkernel.kernels.pallas.gpu.common.chip import Chip, current_chip
from ejkernel.ops import ConfigError, FwdParams, WarpgroupParams
from ejkernel.ops.config.store import read_table
from ejkernel.ops.implementation import LazyFunction
from ejkernel.types import InvalidArgument
from ejkernel.types.masks.structure import Unsupported

if compat.mosaic_gpu_problem() is not None:
    pytest.skip(compat.mosaic_gpu_problem(), allow_module_level=True)

from ejkernel.kernels.pallas.gpu.blocksparse_attention.implementation import blocksparse_attention
from ejkernel.kernels.pallas.gpu.common.eight_bit import in_operand_order
from ejkernel.kernels.pallas.gpu.flash_attention import tile_scheduler, tiles
from ejkernel.kernels.pallas.gpu.flash_attention.backward import backward
from ejkernel.kernels.pallas.gpu.flash_attention.backward_common import CONSUMER_REGISTERS
from ejkernel.kernels.pallas.gpu.flash_attention.backward_kernel import KeyBlockProgram
from ejkernel.kernels.pallas.gpu.flash_attention.backward_plan import (
    BackwardTiles,
    Plan,
    backward_tiles,
)
from ejkernel.kernels.pallas.gpu.flash_attention.forward import flash_kernel
from ejkernel.kernels.pallas.gpu.flash_attention.forward_form import Form
from ejkernel.kernels.pallas.gpu.flash_attention.forward_softmax import FACTORS, factors
from ejkernel.kernels.pallas.gpu.flash_attention.implementation import DIMS, flash_attention
from ejkernel.types.attention.problem import Problem
from ejkernel.types.masks.structure import Band, Rules
from ejktest.bound import bound, on, struct

H200 = AbstractDevice(device_kind="NVIDIA H200", num_cores=132, platform="cuda")


@pytest.mark.parametrize("d, dv", DIMS)
def test_tiles_are_what_the_kernels_take(d, dv):
    masks = (Rules(), Rules(Band(None, 0)), Rules(Band(-512, 0)), Rules(arrays=True))
    lengths = (1, 100, 777, 1600, 4096)
    for rules, q_len, kv_len, cap in itertools.product(masks, lengths, lengths, (None, 30.0, 99.0)):
        p = Problem(1, q_len, kv_len, 8, 8, d, dv, "bfloat16", 1.0, soft_cap=cap)
        t = tiles.forward_tiles(p, rules, Chip())
        assert t.shared(p) <= Chip().shared
        assert t.consumers * t.consumer_registers + t.producer_registers <= 512
        assert t.consumer_registers % 8 == t.producer_registers % 8 == 0
        assert t.block_kv * 2 % t.swizzle == t.q_held % 64 == dv % t.o_columns == 0
        assert t.q_held == 0 or (t.consumers == 2 and t.q_held <= d)  # three have no registers
        # programs of a cluster wait for each other: all of them visit all keys
        assert t.cluster == 1 or rules == Rules()
        scheduler = flash_kernel(replace(p, rules=rules), t, (), 132).scheduler
        assert scheduler.strips * t.cluster * t.block_q >= q_len
        assert 1 <= scheduler.grid * t.cluster <= 132


@pytest.mark.parametrize("cap", [1e-3, 5.0, 27.0, 30.0, 50.0, 55.0, 56.0, 1e4, None])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_capped_logits_are_shifted_by_a_constant_where_exponentials_fit(cap, dtype):
    p = Problem(1, 4096, 4096, 8, 8, 128, 128, dtype, -0.3, soft_cap=cap)
    form = Form(p, tiles.forward_tiles(p, Rules(), Chip()), ())
    if cap is None or cap > 55 or dtype == "float16":
        assert form.shift is None
        return
    ends = np.float32(2.0) ** (np.float32([-1, 1]) * np.float32(form.log2_unit) - form.shift)
    tiny, huge = np.finfo(np.float32).tiny, np.finfo(np.float32).max
    assert ends[0] * 2.0**-40 > tiny  # a value of 2^-40 still counts
    assert ends[1] * 2.0**20 * 2.0**20 < huge  # a million keys, values of a million


IDS = Rules(arrays=True, names=("q_ids", "kv_ids"))


@pytest.mark.parametrize(
    "rules, options, unshifted",
    [
        (Rules(), {}, True),
        (Rules(), dict(dtype="float16"), False),
        (Rules(), dict(soft_cap=30.0), False),
        (Rules(), dict(pattern_blocks=(128, 128)), False),
        (Rules(Band(None, -1)), {}, False),  # the first row sees nothing
        (Rules(Band(-512, 0)), {}, True),
        (Rules(Band(-512, 0)), dict(dim=256, value_dim=256), False),  # not measured
        (IDS, {}, True),
        (replace(IDS, band=Band(-64, 64)), dict(dim=64, value_dim=64), True),
        (replace(IDS, chunk=(64, 0)), {}, False),
        (replace(IDS, names=("attention_mask",)), {}, False),
    ],
)
def test_maxima_are_left_out_where_that_was_measured(rules, options, unshifted):
    p = Problem(**dict(batch=1, q_len=1280, kv_len=1280, heads=2, kv_heads=2, dim=128)
        | dict(value_dim=128, dtype="bfloat16", scale=1.0, rules=rules) | options)  # fmt: skip
    assert tiles.forward_tiles(p, rules, Chip()).unshifted_first == unshifted


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("d, dv", DIMS)
def test_configs_give_the_tiles_they_come_from(d, dv, causal):
    x, v = struct(1, 1280, 2, d), struct(1, 1280, 2, dv)
    inv = bound(flash_attention.call, query=x, key=x, value=v, causal=causal)
    p, rules = flash_attention.problem(inv.arguments), Rules(Band(None, 0) if causal else Band())
    assert p.rules == rules
    with on(H200):
        chosen = flash_attention.choose(p, Chip())
        for config in flash_attention.candidates(inv):
            chosen.apply_config(config, p, Chip())  # none is refused
        first = chosen.apply_config(flash_attention.heuristic(inv), p, Chip())
    assert first.fwd == tiles.forward_tiles(p, rules, Chip())
    assert first.bwd == backward_tiles(p)


UNEVEN = {  # (queries, head dim, dtype): what runs there, no powers of two
    (8192, 64, "bfloat16"): dict(q_blocksize=192, kv_blocksize=128, num_stages=3, warpgroups=3),
    (4096, 80, "bfloat16"): dict(q_blocksize=192, kv_blocksize=96, num_stages=3, warpgroups=3),
    (4096, 96, "bfloat16"): dict(q_blocksize=192, kv_blocksize=96, num_stages=3, warpgroups=3),
    (4096, 128, "float16"): dict(q_blocksize=128, kv_blocksize=160, num_stages=2, warpgroups=2),
}


@pytest.mark.parametrize("n, d, dtype", UNEVEN)
def test_a_config_says_the_tiles_that_run_and_they_stay_when_the_heuristic_changes(n, d, dtype):
    x = struct(1, n, 2, d, dtype=dtype)
    inv = bound(flash_attention.call, query=x, key=x, value=x)
    p = flash_attention.problem(inv.arguments)
    with on(H200):
        config = flash_attention.heuristic(inv)
    assert config["fwd_params"] == UNEVEN[n, d, dtype]
    stored = FwdParams.from_dict(config["fwd_params"])
    assert stored == WarpgroupParams(**UNEVEN[n, d, dtype])
    for other in (tiles.ForwardTiles(block_kv=64, stages=3), tiles.ForwardTiles(q_held=64)):
        changed = replace(flash_attention.choose(p, Chip()), fwd=other)
        applied = changed.apply_config({"fwd_params": stored}, p, Chip()).fwd
        assert (applied.block_q, applied.block_kv) == (stored.q_blocksize, stored.kv_blocksize)
        assert (applied.consumers, applied.stages) == (stored.warpgroups, stored.num_stages)


def test_shipped_tiles_are_said_in_full():
    _, entries = read_table(Path(tiles.__file__).parents[2] / "tables" / "nvidia_h200.json")
    for entry in entries.values():
        params = FwdParams.from_dict(entry.plain["config"]["fwd_params"])
        tiles_in_full = params.q_blocksize and params.kv_blocksize and params.num_stages
        assert tiles_in_full, entry.plain["config"]


@pytest.mark.parametrize(
    "d, causal, given, reason",
    [
        (128, False, dict(q_blocksize=192, kv_blocksize=128, warpgroups=3), "for heads of 64"),
        (128, True, dict(q_blocksize=128, kv_blocksize=160, warpgroups=2), "without masks"),
        (64, False, dict(q_blocksize=128, kv_blocksize=160, warpgroups=2), "heads of 128"),
        (64, False, dict(q_blocksize=192, kv_blocksize=128, warpgroups=2), "192 x 128 of 3"),
        (64, False, dict(q_blocksize=192, kv_blocksize=96, warpgroups=3), "96 keys for heads of"),
        (96, True, dict(q_blocksize=192, kv_blocksize=128, warpgroups=3), "96 keys for heads of"),
        (128, True, dict(q_blocksize=192, kv_blocksize=96, warpgroups=3), "96 keys for heads of"),
        (96, False, dict(q_blocksize=128, kv_blocksize=160, warpgroups=2), "heads of 128"),
        (64, False, dict(**UNEVEN[8192, 64, "bfloat16"] | {"num_stages": 1}), "at least 2"),
        (64, False, dict(**UNEVEN[8192, 64, "bfloat16"] | {"num_stages": 6}), "shared memory"),
    ],
)
def test_uneven_tiles_run_as_given_or_are_refused(d, causal, given, reason):
    rules = Rules(Band(None, 0) if causal else Band())
    p = Problem(1, 1280, 1280, 2, 2, d, d, "bfloat16", 1.0, rules=rules)
    chosen = flash_attention.choose(p, Chip())
    with pytest.raises(ConfigError, match=rf"fwd_params: .*{reason}"):
        chosen.apply_config({"fwd_params": WarpgroupParams(**given)}, p, Chip())


def test_given_blocks_take_the_form_that_arithmetic_gives_them():
    small, large = (Problem(1, n, n, 2, 2, 128, 128, "float16", 1.0) for n in (1024, 4096))
    chosen = [tiles.forward_tiles(p, Rules(), Chip()) for p in (small, large)]
    assert [t.cluster for t in chosen] == [1, 2]
    given = {"q_blocksize": 128, "kv_blocksize": chosen[0].block_kv, "num_stages": 2}
    assert tiles.override_forward(chosen[1], large, Chip(), given) == chosen[0]


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("d, dv", DIMS)
@pytest.mark.parametrize("blocks", [{}, {"kv_blocksize": 64}, {"kv_blocksize": 256}])
@pytest.mark.parametrize("stages", [1, 2, 3, 8])
def test_given_tiles_fit_or_are_refused(d, dv, causal, blocks, stages):
    p = Problem(1, 1280, 1280, 2, 2, d, dv, "bfloat16", 1.0)
    rules, params = Rules(Band(None, 0) if causal else Band()), {**blocks, "num_stages": stages}
    chosen = tiles.forward_tiles(p, rules, Chip())
    try:
        t = tiles.override_forward(chosen, p, Chip(), params)
    except ConfigError as error:
        assert "fwd_params" in str(error) and "shared memory" in str(error)
        assert stages > 2 or blocks.get("kv_blocksize") == 256
        return
    assert t.shared(p) <= Chip().shared
    assert t.stages == max(stages, 2) and t.block_kv == blocks.get("kv_blocksize", chosen.block_kv)
    assert t.block_kv * 2 % t.swizzle == 0 and t.block_kv <= 256  # keys of one product
    assert t.block_kv / 2 < t.consumer_registers - 40  # half a row of logits in a thread


# ---- the backward pass with probabilities a step ahead ----------------------------------------


@pytest.mark.parametrize("d", [64, 128])
@pytest.mark.parametrize("fields", [{}, {"q_stages": 3}, {"dq_stages": 2}])
def test_tiles_of_the_loop_ahead_fit(d, fields):
    p = Problem(1, 4096, 4096, 8, 2, d, d, "bfloat16", 1.0, rules=Rules(Band(None, 0)))
    chosen = BackwardTiles(block_q=backward_tiles(p).block_q)
    assert chosen.unsupported(p, Chip().shared) is None
    tile = chosen.block_q * d * p.itemsize
    ahead = replace(chosen, pipelined=True, **fields)
    assert ahead.unsupported(p, Chip().shared) is None
    more = {"q_stages": tile + 4 * chosen.block_q, "dq_stages": 2 * tile}
    assert ahead.shared(p) - chosen.shared(p) == sum(more.get(name, 0) for name in fields)
    # of a thread: dk and dv; p, dp and ds, then s, ds and half of dq; p and ds have 16 bits
    logits, sums, dq = chosen.block_q // 2, d, chosen.block_q * d // 256
    for products in (logits + 2 * (logits // 2), logits + logits // 2 + dq):
        assert sums + products <= CONSUMER_REGISTERS - 32  # what ptxas needs besides


@pytest.mark.parametrize(
    "changes, ahead",
    [
        ({}, True),
        ({"rules": Rules(Band(-127, 0))}, True),
        ({"dim": 128, "value_dim": 128}, True),
        ({"soft_cap": 30.0}, False),
        ({"pattern_blocks": (128, 128)}, False),
        ({"rules": Rules(arrays=True)}, False),
    ],
)
def test_calls_that_loop_ahead(changes, ahead):
    p = replace(Problem(1, 1024, 1024, 2, 2, 64, 64, "bfloat16", 1.0), **changes)
    chosen = backward_tiles(p)
    assert chosen.pipelined == ahead
    assert chosen.unsupported(p, Chip().shared) is None


@pytest.mark.parametrize("alone", [False, True])
def test_tiles_to_compute_again(monkeypatch, alone):
    """With a flag per tile those that a consumer flagged; else those too that share the flag."""
    monkeypatch.setattr(tile_scheduler.lax, "axis_index", lambda _: 0)
    problem = Problem(1, 128, 128, 300, 300, 64, 64, "bfloat16", 1.0)
    form = Form(problem, tiles.ForwardTiles(unshifted_first=True, flag_per_tile=alone), ())
    order = jnp.asarray(np.append(np.arange(300)[::-1], -1).astype(np.int32)[None])
    scheduler = tile_scheduler.StaticScheduler(form, 1).with_flags(order)
    shared = scheduler.tiles_per_flag(SimpleNamespace(order=order))
    assert shared == (1 if alone else 3)
    flags = np.zeros((2, scheduler.flag_words), np.uint32)
    wrong = {0: (0, 131), 1: (131, 132, 299)}
    for consumer, indices in wrong.items():
        for i in indices:
            bit = i // shared
            flags[consumer, bit // 32] |= np.uint32(1) << (bit % 32)
    r = SimpleNamespace(order=order, needs_maxima=jnp.asarray(flags.view(np.int32)))
    again = scheduler.of_flagged
    assert again.is_any_flagged(r)
    found = []
    while (number := int(again.number(r, jnp.int32(len(found))))) >= 0:
        found.append(299 - number)
    bits = sorted({i // shared for indices in wrong.values() for i in indices})
    want = [i for bit in bits for i in range(bit * shared, bit * shared + shared) if i < 300]
    assert found == want


@pytest.mark.parametrize(
    "changes, fields, reason",
    [
        ({}, {"pipelined": False, "dq_stages": 2}, "dq_stages=2: only with pipelined"),
        ({}, {"pipelined": False, "q_stages": 3}, "q_stages=3: only with"),
        ({"dim": 192}, {}, "head dim 192, at most 128"),
        ({"pattern_blocks": (128, 128)}, {}, "a pattern of blocks"),
        ({"soft_cap": 30.0}, {}, "logits_soft_cap"),
        ({}, {"stages": 1}, "1 tiles of q, at least 2"),
        ({}, {"dq_stages": 3}, "dq_stages=3, 1 or 2"),
        ({}, {"q_stages": 3, "dq_stages": 2}, "bytes of shared memory, a program has"),
    ],
)
def test_calls_that_the_loop_ahead_refuses(changes, fields, reason):
    p = Problem(1, 1024, 1024, 2, 2, 128, 128, "bfloat16", 1.0)
    p = replace(p, **changes)
    t = replace(BackwardTiles(), **({"pipelined": True} | fields))
    assert reason in str(t.unsupported(p, Chip().shared))
    x = struct(1, 1024, 2, p.dim)
    chosen = replace(flash_attention.choose(p, Chip()), bwd=t)
    if not changes:  # and before anything is launched
        with on(H200), pytest.raises(ConfigError, match="backward tiles: "):
            tensors = dict.fromkeys(("q", "k", "v", "do"), x)
            backward(p, chosen.bwd, 132, base=None, delta=None, **tensors)


@pytest.mark.parametrize("q_len, kv_len", [(700, 600), (1000, 300), (333, 64)])
def test_programs_that_wrap_around_add_in_the_order_in_which_they_arrive(q_len, kv_len):
    p = Problem(1, q_len, kv_len, 1, 1, 128, 128, "bfloat16", 1.0)
    plan = Plan(p, BackwardTiles(), circular=True, cores=4)
    assert plan.stride >= 2  # steps between additions
    visits: dict[int, list] = {}
    for block in range(plan.n_kv):
        program = object.__new__(KeyBlockProgram)
        program.plan, program.block = plan, np.int32(block)
        program.team, program.member = (np.int32(n) for n in divmod(block, plan.team))
        steps, block_at = program.blocks()
        seen = [int(block_at(np.int32(t))[0]) for t in range(steps)]
        assert sorted(seen) == list(range(plan.n_q))
        for t, i in enumerate(seen):
            turn = int(program.turn(np.int32(i)))
            visits.setdefault(i, []).append((block // plan.team, t, turn))
    for arrivals in visits.values():
        assert [turn for *_, turn in sorted(arrivals)] == list(range(plan.n_kv))
        times = [t for team, t, _ in sorted(arrivals) if team == 0]
        assert min(np.diff(times), default=2) >= 2


@pytest.mark.parametrize(
    "heads, kv_heads, n_q, n_kv, cores",
    [(5, 5, 8, 9, 9), (3, 3, 6, 3, 4), (2, 2, 1, 4, 8), (4, 2, 8, 9, 8)],
)
def test_programs_that_wrap_around_are_launched_by_teams(heads, kv_heads, n_q, n_kv, cores):
    """Every program once; a team of each head before the next team of any of them."""
    p = Problem(2, n_q * 64, n_kv * 128, heads, kv_heads, 128, 128, "bfloat16", 1.0)
    plan, rows = Plan(p, BackwardTiles(), circular=True, cores=cores), 2 * heads
    launched = [tuple(int(x) for x in plan.locate(np.int32(i))[:2]) for i in range(rows * n_kv)]
    assert sorted(launched) == [(row, block) for row in range(rows) for block in range(n_kv)]
    order = list(dict.fromkeys(row for row, _ in launched))
    places = [
        (order.index(row) // plan.heads_together, block // plan.team) for row, block in launched
    ]
    assert places == sorted(places)
    for row in range(rows):  # a head's in the order in which they add
        assert [block for r, block in launched if r == row] == list(range(n_kv))
    sharers = [row % p.group for row in order]
    assert sharers == sorted(sharers)


# ---- what is refused ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    "reason, shape, dtype, options",
    [
        ("query: float32", 64, jnp.float32, {}),
        ("head dim 72", 72, jnp.bfloat16, {}),
        ("bias", 64, jnp.bfloat16, {"bias": struct(1, 1, 64, 64)}),
        ("dropout_prob", 64, jnp.bfloat16, {"dropout_prob": 0.1}),
        ("attention_mask", 64, jnp.bfloat16, {"attention_mask": struct(1, 1, 64, 64, dtype=bool)}),
        ("precision: an algorithm", 64, jnp.bfloat16,
         {"precision": jax.lax.DotAlgorithm(jnp.float16, jnp.float16, jnp.float16)}),
        ("positions", 64, jnp.bfloat16, {"cum_seqlens_q": struct(3, dtype=jnp.int32),
                                         "cum_seqlens_k": struct(3, dtype=jnp.int32),
                                         "causal": True}),
    ],
)  # fmt: skip
def test_reasons_name_the_argument(reason, shape, dtype, options):
    x = struct(1, 64, 2, shape, dtype=dtype)
    arguments = {"query": x, "key": x, "value": x, **options}
    with on(H200):
        assert reason in flash_attention.supports(bound(flash_attention.call, **arguments))
    static = {name: x for name, x in arguments.items() if not hasattr(x, "shape")}
    given = {name: x for name, x in arguments.items() if hasattr(x, "shape")}
    with pytest.raises(Unsupported, match=reason), on(H200):
        jax.eval_shape(lambda a: flash_attention(**a, **static), given)


def test_other_devices_are_named():
    with on(AbstractDevice("NVIDIA A100-SXM4-80GB", 108, "cuda")):
        with pytest.raises(Unsupported, match="A100"):
            current_chip()
    assert "Hopper" in flash_attention.unavailable_reason()


def test_bad_shapes_name_the_argument():
    x = struct(1, 64, 2, 64)
    with on(H200), pytest.raises(InvalidArgument, match="key"):
        jax.eval_shape(flash_attention, x, struct(1, 64, 2, 128), x)


# ---- what the registry is told -----------------------------------------------------------------


@pytest.mark.parametrize("entry", PACKAGE.entries, ids=str)
def test_what_is_registered_as_text_exists(entry):
    for target in (PACKAGE.path(entry.target), *PACKAGE.hooks(entry).values()):
        assert callable(LazyFunction(target).resolve())


SHORT = {  # (queries, keys, head dim), options: whether the kernels for every GPU go first
    "vision": ((576, 576, 64), {}, True),
    "window": ((8192, 8192, 64), dict(causal=True, sliding_window=127), True),
    "packed": ((8192, 8192, 64), dict(cum_seqlens_q=np.array([0, 4000, 8192], np.int32)), True),
    "cross": ((448, 1500, 64), {}, True),
    "causal": ((4096, 4096, 64), dict(causal=True), False),
    "full": ((1024, 1024, 64), {}, False),
    "no queries": ((0, 1024, 64), {}, True),
    "wider": ((576, 576, 128), {}, False),
    "one query": ((1, 8192, 128), {}, True),
}


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("name", SHORT)
def test_short_walks_of_narrow_heads_go_to_the_kernels_for_every_gpu(name):
    (q_len, kv_len, d), options, behind = SHORT[name]
    arguments = dict(query=struct(1, q_len, 4, d), key=struct(1, kv_len, 4, d))
    inv = bound(flash_attention.call, **arguments, value=arguments["key"], **options)
    with on(H200):
        found = flash_attention.priority_for(inv)
    assert (found < 100) == behind and found > 50  # libraries have 50


def sparse_call(blocks=(128, 128), length=4096, d=128):
    x = struct(1, length, 4, d)
    counts = (-(-length // n) for n in blocks)
    return bound(
        blocksparse_attention.call, query=x, key=x, value=x,
        block_mask=struct(*counts, dtype=jnp.bool_),
        q_block_size=blocks[0], kv_block_size=blocks[1],
    )  # fmt: skip


@pytest.mark.parametrize("d, dv", DIMS)
@pytest.mark.parametrize("blocks", [(16, 16), (128, 64), (256, 256)])
@pytest.mark.parametrize("kv_heads", [2, 8])
def test_tiles_over_lists_fit(d, dv, blocks, kv_heads):
    """Forward and backward, where heads share keys too; tiles of 64 keys under blocks of 64."""
    p = Problem(1, 4096, 4096, 8, kv_heads, d, dv, "bfloat16", 1.0, pattern_blocks=blocks)
    t = tiles.choose(p, Chip())
    assert t.fwd.shared(p) <= Chip().shared
    assert d > 128 or t.bwd.shared(p) <= Chip().shared  # wide heads have other kernels
    assert t.fwd.block_q == 128 and t.fwd.cluster == 1
    assert t.fwd.block_kv == 64 if blocks[1] < 128 else t.fwd.block_kv <= 128
    if d == 128:  # two places for keys leave room for three stages
        assert replace(t.bwd, stages=4).shared(p) > Chip().shared


def test_patterns_that_cannot_be_walked_over_are_refused_by_name():
    with on(H200):
        assert blocksparse_attention.supports(sparse_call()) is None
        reason = blocksparse_attention.supports(sparse_call((128, 100)))
        wide = {"fwd_params": {"kv_blocksize": 256}}
        with pytest.raises(ConfigError, match="kv_blocksize=256: a pattern of blocks"):
            blocksparse_attention.tiles(
                blocksparse_attention.problem_of(sparse_call()), Chip(), wide
            )
    assert reason == "kv_block_size: blocks of 100 are not supported, only multiples of 16"


def test_patterns_lead_where_they_were_measured():
    calls = [sparse_call(), sparse_call((64, 128)), sparse_call(d=64), sparse_call(length=300)]
    with on(H200):
        assert [blocksparse_attention.priority_for(c) for c in calls] == [110, 90, 90, 90]


EIGHT = {
    name: struct(1, 256, 2, 128, dtype=jnp.float8_e4m3fn) for name in ("query", "key", "value")
}


@pytest.mark.parametrize(
    ("start", "change"),
    [
        (None, {"q_scale": struct(1, 2, dtype=jnp.float32), "causal": True, "sliding_window": 9}),
        ("q_scale: blocks", {"q_scale": struct(1, 2, 4, dtype=jnp.float32)}),
        ("k_scale: blocks", {"k_scale": struct(1, 2, 4, dtype=jnp.float32)}),
        ("out_dtype: float32", {"out_dtype": jnp.float32}),
        ("logits_soft_cap: not", {"logits_soft_cap": 5.0}),
        ("mask_info: segments", {"cum_seqlens_q": struct(3, dtype=jnp.int32)}),
        ("query: head dim 192", {"query": struct(1, 256, 2, 192, dtype=jnp.float8_e4m3fn),
                                 "key": struct(1, 256, 2, 192, dtype=jnp.float8_e4m3fn)}),
        ("out_dtype: another", dict.fromkeys(EIGHT, struct(1, 256, 2, 128))
         | {"out_dtype": jnp.float32}),
    ],
)  # fmt: skip
def test_8_bit_calls_that_are_refused(start, change):
    with on(H200):
        reason = flash_attention.supports(bound(flash_attention.call, **(EIGHT | change)))
    assert reason is None if start is None else reason.startswith(start)


@pytest.mark.parametrize("d", [64, 128, 256])
def test_tiles_of_8_bits_fit(d):
    p = Problem(1, 4096, 4096, 8, 8, d, d, "float8_e4m3fn", 1.0, scale_blocks=(1, 1))
    t = tiles.forward_tiles(p, Rules(), Chip())
    assert t.shared(p) <= Chip().shared
    assert t.block_kv % 32 == t.q_held == 0  # rows of values in shared memory
    chosen = tiles.choose(p, Chip())
    cfg = chosen.fields | {"fwd_params": FwdParams.from_dict(chosen.fields["fwd_params"])}
    assert chosen.apply_config(cfg, p, Chip()).fwd == chosen.fwd
    for other in flash_attention.neighbours(p, Chip(), chosen):
        assert other.fwd.q_held == 0
    with pytest.raises(ConfigError, match=r"fwd_params: .*the Hopper kernel has"):
        other = WarpgroupParams(q_blocksize=128, kv_blocksize=160, warpgroups=2)
        chosen.apply_config({"fwd_params": other}, p, Chip())
    if d == 128:  # three warpgroups have registers for 96 keys
        for keys, queries in ((64, 192), (128, 128), (192, 128)):
            fwd = chosen.apply_config({"fwd_params": {"kv_blocksize": keys}}, p, Chip()).fwd
            assert (fwd.block_q, fwd.block_kv) == (queries, keys)
        for tile in tiles.OF_8_BITS[d]:
            values = dict(zip(("q_blocksize", "kv_blocksize"), tile, strict=True))
            params = WarpgroupParams(**values, warpgroups=tile[0] // 64)
            fwd = chosen.apply_config({"fwd_params": params}, p, Chip()).fwd
            assert (fwd.block_q, fwd.block_kv) == tile and fwd.lane_maxima
    form = Form(p, t, ())
    assert 2.0 ** (t.slack + form.p_exponent) <= 448  # the largest probability


def test_columns_of_a_result_and_of_an_operand_meet():
    """By the layouts of one warpgroup: what a thread has of 16 columns, and what it gives."""
    order = np.asarray(in_operand_order(jnp.arange(64)))
    for group, lane in itertools.product(range(4), range(4)):
        mine = 16 * group + 2 * lane + np.array([0, 1, 8, 9])
        place = 16 * group + 4 * lane
        assert (order[place : place + 4] == mine).all()


def test_scales_become_factors_of_a_head():
    p = Problem(1, 64, 64, 4, 2, 64, 64, "float8_e4m3fn", -0.5, scale_blocks=(1, 1))
    form = flash_kernel(p, tiles.ForwardTiles(slack=3), (), 132).form
    scale = jnp.asarray([[0.3, -2.0, 0.0, 1e9]])
    columns = np.moveaxis(np.asarray(factors(form, scale, scale)), 2, 0)
    table = dict(zip(FACTORS, columns, strict=True))
    np.testing.assert_allclose(table["log2_unit"][0, :2], np.array([0.3, 2.0]) / np.log(2), 1e-6)
    assert table["negative"].tolist() == [[0, 1, 0, 0]]
    ratio = table["unit"] / table["large_unit"]
    assert (ratio >= 1).all() and (ratio < 2).all()
    assert (np.log2(table["large_unit"]) % 1 == 0).all()
    assert (table["log2_unit"] > 0).all() and np.isfinite(table["large_logit"]).all()
