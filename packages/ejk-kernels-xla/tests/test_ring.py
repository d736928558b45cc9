"""Ring attention on virtual devices against the float64 oracle of the whole sequence."""

from __future__ import annotations

import re
from collections import Counter
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from ejkernel.kernels.xla import flash_attention, ring_attention
from ejkernel.types import InvalidArgument, MaskInfo, Rule
from ejkernel.types.attention.context import strategy
from ejkernel.types.attention.context.ring import Ring, Schedule
from ejkernel.types.attention.context.transport import GatheredTransport, PackedRingTransport
from ejktest.attention import Call, arrays, check, run
from ejktest.drawn import array, normal
from ejktest.grids import cover

pytestmark = pytest.mark.skipif(len(jax.devices()) < 8, reason="needs eight devices")
RING = {"context_parallel": "ring"}
TOKENS = ("q_segment_ids", "kv_segment_ids", "q_positions", "kv_positions")


def order(length: int, n: int, layout: str) -> np.ndarray:
    """Where every token of the arrays comes from."""
    chunks = np.arange(length).reshape(2 * n, -1) if layout == "zigzag" else None
    if chunks is None:
        return np.arange(length)
    return np.concatenate([chunks[c] for r in range(n) for c in (r, 2 * n - 1 - r)])


def on_ring(
    n: int, layout: str, strategy: str, q, k, v, *, bias, softmax_aux, attention_mask=None,
    kernel=ring_attention, **options,
):  # fmt: skip
    """The operation on whole arrays: permute, shard, run, and permute the rows back."""
    options["cfg"] = {**options["cfg"], "context_parallel": strategy}
    mesh = Mesh(np.array(jax.devices()[:n]), ("sp",))
    rows, cols = (order(x.shape[1], n, layout) for x in (q, k))
    given = {"q": (q[:, rows], P(None, "sp")), "k": (k[:, cols], P(None, "sp"))}
    given |= {"v": (v[:, cols], P(None, "sp"))}
    for name, x in (("bias", bias), ("attention_mask", attention_mask)):
        if x is not None:
            given[name] = (jnp.asarray(x)[:, :, rows][..., cols], P(None, None, "sp"))
    if softmax_aux is not None:
        given["softmax_aux"] = (softmax_aux, P())
    for name in TOKENS:
        if options.get(name) is not None:
            index = rows if name.startswith("q") else cols
            given[name] = (jnp.asarray(options.pop(name))[:, index], P(None, "sp"))

    def local(x):
        fields = {m: x.pop(m) for m in ("attention_mask", "q_positions", "kv_positions") if m in x}
        mask = MaskInfo(**fields) if fields else None
        return kernel(
            x.pop("q"), x.pop("k"), x.pop("v"), mask_info=mask, axis_name="sp", layout=layout,
            **x, **options,
        )  # fmt: skip

    out = jax.shard_map(
        local,
        mesh=mesh,
        in_specs=({name: spec for name, (_, spec) in given.items()},),
        out_specs=(P(None, "sp"), P(None, "sp")),
    )({name: x for name, (x, _) in given.items()})
    back = np.argsort(rows)
    return jax.tree.map(lambda x: x[:, back], out)


IDS = np.array([[0] * 11 + [3] * 26 + [-1] * 4 + [1] * 23, [5] * 64], np.int32)
DENSE = np.random.default_rng(1).random((1, 2, 32, 32)) < 0.5
DENSE[..., 9, :] = False
SMALL = {"b": 1, "q": 32, "k": 32, "h": 2, "hk": 1, "d": 8, "blocks": (16, 16)}
CASES = [
    (2, "contiguous", Call("causal", mask={"causal": True}, sinks=(2, 2), cap=2.0, **SMALL)),
    (4, "zigzag", Call("zigzag", mask={"causal": True}, sinks=(2,), **SMALL)),
    (8, "contiguous", Call("window", mask={"sliding_window": (3, 2)}, **SMALL)),
    # own keys between those of devices on both sides, and a loop on one of them
    (8, "contiguous", Call("far", mask={"sliding_window": (4, 16)}, **SMALL)),
    (
        2,
        "zigzag",
        Call(
            "segments",
            q=64,
            k=64,
            h=4,
            hk=2,
            d=8,
            sinks=(4, 1),
            mask={"q_segment_ids": IDS, "causal": True, "sliding_window": (20, 0)},
        ),
    ),
    (
        4,
        "zigzag",
        Call("dense", mask={"attention_mask": DENSE}, bias=(1, 2), dropout=0.3, **SMALL),
    ),
    (
        4,
        "contiguous",
        Call("lengths", mask={"causal": True, "causal_offset": -9}, **{**SMALL, "k": 16}),
    ),
    (
        2,
        "contiguous",
        Call(
            "positions",
            dtypes=("bfloat16", "float32", "bfloat16"),
            mask={
                "q_positions": np.arange(32)[None] // 2,
                "kv_positions": np.arange(32)[None] // 2,
                "causal": True,
            },
            **SMALL,
        ),
    ),
    (1, "zigzag", Call("alone", mask={"causal": True}, bias=(1, 1), **SMALL)),
]

# key heads that several devices need, and a mask and a bias with an axis of heads and without
FEW_HEADS = (
    4,
    "zigzag",
    Call(
        "shared",
        mask={"attention_mask": np.random.default_rng(2).random((1, 4, 32, 32)) < 0.6},
        bias=(1, 1),
        sinks=(4, 2),
        dropout=0.2,
        **{**SMALL, "h": 4, "hk": 2},
    ),
)
OTHERS = {"all_gather": ("zigzag", "dense", "lengths"), "ulysses": ("causal", "segments", "shared")}
STRATEGIES = [("ring", case) for case in CASES] + [
    (strategy, case)
    for strategy, names in OTHERS.items()
    for case in (*CASES, FEW_HEADS)
    if str(case[2]) in names
]


@pytest.mark.parametrize(
    ("way", "case"),
    # a dense mask with bias and dropout takes longest, and the ring has it
    cover(STRATEGIES, *(x for x in STRATEGIES if x[0] == "ring" or str(x[1][2]) != "dense")),
    ids=[f"{s}-{case[2]}" for s, case in STRATEGIES],
)
def test_against_oracle(way: str, case: tuple[int, str, Call]) -> None:
    n, layout, call = case
    x = arrays(call)
    check(call, x, *run(partial(on_ring, n, layout, way), call, x))


class AsOnGpus(type(ring_attention)):
    """The ring as kernels for GPUs have it."""

    ring_strategy, short_shard = "ring_packed", 2**15
    divides_local_step, shortest_loop = True, 7


ON_GPUS = [
    (
        8,
        "zigzag",
        Call(
            "two dtypes",
            dtypes=("bfloat16", "float32", "bfloat16"),
            mask={"causal": True},
            sinks=(2,),
            **SMALL,
        ),
    ),
    *(case for case in CASES if str(case[2]) in ("zigzag", "segments", "far", "dense")),
]


@pytest.mark.parametrize(("n", "layout", "call"), ON_GPUS, ids=[str(call) for *_, call in ON_GPUS])
def test_steps_of_gpus_against_oracle(n: int, layout: str, call: Call) -> None:
    """Steps written out, with the own step of a backward pass divided and keys packed."""
    x, kernel = arrays(call), AsOnGpus()
    check(call, x, *run(partial(on_ring, n, layout, "ring_packed", kernel=kernel), call, x))


@pytest.mark.parametrize(("n", "keys", "sent"), [(2, 2**15, 1), (2, 2**16, 2), (4, 2**16, 3)])
def test_which_ring_auto_takes_on_gpus(n: int, keys: int, sent: int) -> None:
    """Packed over more than two devices, and over two where a transfer is long for its kernel."""
    spec, x = P(None, "sp"), jax.ShapeDtypeStruct((1, n * keys, 4, 64), jnp.bfloat16)
    attend = partial(AsOnGpus(), axis_name="sp", layout="zigzag", causal=True)
    mesh = AbstractMesh((n,), ("sp",), axis_types=(AxisType.Auto,))
    program = jax.shard_map(attend, mesh=mesh, in_specs=spec, out_specs=spec)
    text = str(jax.make_jaxpr(program)(x, x, x))
    # as integers on CPUs, in the dtype of the keys elsewhere
    assert len(re.findall(r"bf16\[[\d,]+\]\S* = ppermute\[", text)) == sent


def test_keys_and_values_in_one_transfer() -> None:
    """The values of a ring, forward and backward, with half of its transfers or less."""
    mesh = Mesh(np.array(jax.devices()[:4]), ("sp",))
    shapes = ((1, 16, 2, 8), (1, 16, 1, 8), (1, 16, 1, 6), (1, 16, 2, 6))
    *x, do = (normal(*shape, seed=i) for i, shape in enumerate(shapes))
    ids = jnp.repeat(jnp.arange(2, dtype=jnp.int32), 8)[None]

    def gradients(way: str) -> Any:
        options = {"axis_name": "sp", "cfg": {"context_parallel": way}}

        def local(q: Any, k: Any, v: Any, do: Any, ids: Any) -> Any:
            masks = {"q_segment_ids": ids, "kv_segment_ids": ids}
            out, pull = jax.vjp(lambda *x: ring_attention(*x, **masks, **options), q, k, v)
            return out, pull(do)

        spec = P(None, "sp")
        return jax.jit(jax.shard_map(local, mesh=mesh, in_specs=spec, out_specs=spec))

    # ids are of 32 bits with a sign
    sent = re.compile(r"collective_permute.*-> tensor<[\dx]*(?:f32|ui32)>")
    results, transfers = [], []
    for way in ("ring", "ring_packed"):
        lowered = gradients(way).lower(*x, do, ids)
        transfers.append(len(sent.findall(lowered.as_text())))
        results.append(jax.tree.leaves(lowered.compile()(*x, do, ids)))
    # forward: the first hop and the loop's; backward: before and after the first step, then with
    # the gradients, which at last go on and home alone
    assert transfers == [2 * (2 + 2 + 2 + 2), 2 + 2 + 1 + 2]
    for packed, apart in zip(*results, strict=True):  # XLA may fuse, and so round, differently
        np.testing.assert_allclose(packed, apart, rtol=2**-20, atol=2**-22)


def test_keys_in_one_transfer_with_wider_gradients() -> None:
    """Keys of 16 bits and sums of 32, in a loop of steps that send both, and written out."""
    mesh, spec = Mesh(np.array(jax.devices()[:8]), ("sp",)), P(None, "sp")
    x = [normal(1, 32, n, 8, seed=i).astype(jnp.bfloat16) for i, n in enumerate((2, 1, 1, 2))]

    def gradients(way: str, kernel: Any) -> Any:
        options = {"axis_name": "sp", "layout": "zigzag", "causal": True}

        def local(q: Any, k: Any, v: Any, do: Any) -> Any:
            attend = partial(kernel, **options, cfg={"context_parallel": way})
            return jax.vjp(attend, q, k, v)[1](do)

        program = jax.shard_map(local, mesh=mesh, in_specs=spec, out_specs=spec)
        lowered = jax.jit(program).lower(*x)
        return lowered.as_text(), lowered.compile()(*x)

    programs = [
        ("ring", ring_attention),
        ("ring_packed", ring_attention),
        ("ring_packed", AsOnGpus()),
    ]
    (_, apart), (text, packed), (text_of_gpus, divided) = (gradients(*x) for x in programs)
    keys, words = 2 * 4 * 8, 16  # a device's keys and values, and the bits of a word
    for program in (text, text_of_gpus):
        assert f"-> tensor<{keys + 32 // words * keys}xui16>" in program
    for grads in (packed, divided):
        for a, b in zip(grads, apart, strict=True):
            a, b = (np.asarray(y, np.float32) for y in (a, b))
            assert np.abs(a - b).max() <= 2**-7 * np.abs(b).max()


@pytest.mark.parametrize("batch", [1, 2])
def test_rows_of_packed_keys_and_values(batch: int) -> None:
    """Rows of two dtypes, from an array with nothing else and from one with other arrays behind."""
    k, v = normal(batch, 4, 2, 8).astype(jnp.bfloat16), normal(batch, 4, 2, 6, seed=1)
    transport = PackedRingTransport(Ring("sp", 4, False), Schedule(0, 4), (k, v, "masks"))
    words, *others = transport.to_send(transport.local_keys)
    for packed in (words, jnp.concatenate([words, words])):
        found = transport.keys((packed, *others), 1, slice(1, 3))
        assert found[2] == "masks"
        for x, y in zip(found, (k, v), strict=False):
            assert x.dtype == y.dtype
            np.testing.assert_array_equal(x, y[:, 1:3])


def test_own_keys_wait_for_no_gathered_ones() -> None:
    transport = GatheredTransport(Ring("sp", 4, True), Schedule(0, 4), ("own keys",))
    assert transport.stored(None, 0) is transport.local_keys


IN_GROUPS = Call(
    "groups",
    q=64,
    k=64,
    h=8,
    hk=4,
    d=8,
    sinks=(8, 1),
    dropout=0.2,
    mask={"q_segment_ids": IDS, "causal": True, "sliding_window": (20, 0)},
)


def test_heads_in_groups(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sinks, dropout and ids of the heads of each group, in the order of the sequence."""
    monkeypatch.setattr(strategy, "GROUP_BYTES", 1)
    x = arrays(IN_GROUPS)
    check(IN_GROUPS, x, *run(partial(on_ring, 2, "zigzag", "ulysses"), IN_GROUPS, x))


INSTRUCTION = re.compile(r"^ +(?:ROOT )?(%[\w.-]+) = .*? ([\w-]+)\((.*)$")


def exchanges_before(program: str) -> list[set[str]]:
    """Returns, of each all-to-all of the main computation, those that it waits for."""
    sources: dict[str, set[str]] = {}
    waiting = []
    for line in program[program.index("ENTRY") :].splitlines():
        instruction = INSTRUCTION.match(line)
        if instruction is None:
            continue
        name, op, operands = instruction.groups()
        before = set().union(*(sources.get(x, set()) for x in re.findall(r"%[\w.-]+", operands)))
        sources[name] = before
        if op == "all-to-all":
            waiting.append(before)
            sources[name] = before | {name}
    return waiting


@pytest.mark.parametrize(("groups", "passes"), [(1, 1), (2, 1), (2, 2)])
def test_a_group_of_heads_waits_for_no_other(
    groups: int, passes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Exchanges of one group depend on no kernel of another, so that they may overlap."""
    if groups > 1:
        monkeypatch.setattr(strategy, "GROUP_BYTES", 1)
    mesh = Mesh(np.array(jax.devices()[:2]), ("sp",))
    types = [jax.ShapeDtypeStruct((1, 256, n, 16), jnp.float32) for n in (8, 4, 4)]

    def attend(q, k, v):
        cfg = {"context_parallel": "ulysses"}
        return ring_attention(q, k, v, axis_name="sp", causal=True, cfg=cfg)

    shared = jax.shard_map(
        attend, mesh=mesh, in_specs=(P(None, "sp"),) * 3, out_specs=P(None, "sp"), check_vma=False
    )

    def both(*arrays):
        out, pull = jax.vjp(shared, *arrays)
        return pull(out)

    program = jax.jit(shared if passes == 1 else both).lower(*types).compile().as_text()
    waiting = exchanges_before(program)
    # queries, keys and values of all groups travel before anything is computed
    assert sum(not before for before in waiting) == 3 * groups
    last = [before for before in waiting if len(before) == max(map(len, waiting))]
    if passes == 1:  # outputs wait for the queries, keys and values of their group
        assert [len(before) for before in last] == [3] * groups
    else:  # and gradients for the cotangents of theirs
        assert len(last) >= groups
        assert all(len(before) < len(set().union(*last)) for before in last)


def test_vmap_inside_and_scan_over_steps() -> None:
    """Under vmap, with replicated keys of a batch, and with a loop over the middle steps."""
    rng = np.random.default_rng(0)
    q = array(rng.standard_normal((3, 1, 16, 2, 8)), jnp.float32)
    k, v = array(rng.standard_normal((2, 1, 16, 1, 8)), jnp.float32)
    mesh = Mesh(np.array(jax.devices()[:4]), ("sp",))
    many, one_spec = P(None, None, "sp"), P(None, "sp")

    def loss(q, k, v):
        one = partial(ring_attention, axis_name="sp", causal=True, cfg=RING)
        f = jax.shard_map(
            jax.vmap(one, (0, None, None)), mesh=mesh, in_specs=(many, one_spec, one_spec),
            out_specs=many,
        )  # fmt: skip
        return jnp.sin(f(q, k, v)).sum()

    def single(q, k, v):
        return sum(jnp.sin(flash_attention(x, k, v, causal=True)).sum() for x in q)

    ours, theirs = (jax.jit(jax.grad(f, (0, 1, 2)))(q, k, v) for f in (loss, single))
    for a, b in zip(ours, theirs, strict=True):
        np.testing.assert_allclose(a, b, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(
    ("zigzag", "rule", "start", "count"),
    [
        (False, Rule(), 0, 8),
        (False, Rule(causal=True), 0, 8),
        (False, Rule(causal=True, window=(4, 0)), 0, 2),
        (False, Rule(causal=True, window=(5, 0)), 0, 3),
        (False, Rule(window=(1, 1)), 7, 3),
        (False, Rule(causal=True, offset=-16, window=(2, 0)), 4, 2),
        (True, Rule(causal=True, window=(1, 0)), 7, 3),
        (False, Rule(causal=True, offset=-100), 0, 1),
    ],
)
def test_only_needed_hops(zigzag: bool, rule: Rule, start: int, count: int) -> None:
    """Four tokens a device on eight devices."""
    ring = Ring("sp", 8, zigzag)
    assert Schedule.shortest(ring, [rule], 4, 4) == Schedule(start, count)


def test_next_keys_are_sent_for_before_the_current_ones_are_used() -> None:
    mesh = Mesh(np.array(jax.devices()[:2]), ("sp",))
    x = jax.ShapeDtypeStruct((1, 16, 1, 8), jnp.float32)
    f = jax.shard_map(
        partial(ring_attention, axis_name="sp", cfg=RING),
        mesh=mesh, in_specs=(P(None, "sp"),) * 3, out_specs=P(None, "sp"),
    )  # fmt: skip
    text = jax.jit(f).lower(x, x, x).as_text()
    assert text.count("stablehlo.collective_permute") == 2  # k and v, once
    assert text.index("stablehlo.collective_permute") < text.index("stablehlo.dot_general")


@pytest.mark.parametrize(
    ("layout", "dtype", "length", "factor"),
    [
        ("contiguous", jnp.float32, 512, 1.2),
        ("contiguous", jnp.bfloat16, 2048, 1.2),
        ("zigzag", jnp.bfloat16, 512, 1.0),
    ],
)
def test_compiled_program(layout: str, dtype: Any, length: int, factor: float) -> None:
    """Keys travel and nothing else does; temporaries are those of one device and two key blocks.

    Keys in bfloat16 that travelled as float32 would be over the limit.
    """
    n, heads, dim = 4, 4, 64
    mesh = Mesh(np.array(jax.devices()[:n]), ("sp",))
    shape = (1, n * length, heads, dim)
    x = jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, P(None, "sp")))
    local = jax.ShapeDtypeStruct((1, length, heads, dim), dtype)
    ring = jax.shard_map(
        partial(ring_attention, axis_name="sp", layout=layout, causal=True, cfg=RING),
        mesh=mesh, in_specs=(P(None, "sp"),) * 3, out_specs=P(None, "sp"),
    )  # fmt: skip
    single = partial(flash_attention, causal=True)
    key_blocks = 2 * 2 * length * heads * dim * jnp.dtype(dtype).itemsize
    # forward: k and v to the next device and in the loop; backward: before the first step and
    # after it, then their gradients too, in one step more, and home, while own keys are used
    cases = (lambda f: f, 3, 4, factor), (lambda f: partial(_pull, f), 4, 4 + 10, 1.2)
    for form, operands, permutes, share in cases:
        compiled = jax.jit(form(ring)).lower(*[x] * operands).compile()
        found = re.findall(r" (all-[a-z]+|collective-permute)(?:-start)?\(", compiled.as_text())
        assert Counter(found) == {"collective-permute": permutes}
        alone = jax.jit(form(single)).lower(*[local] * operands).compile()
        limit = share * alone.memory_analysis().temp_size_in_bytes + key_blocks
        assert compiled.memory_analysis().temp_size_in_bytes <= limit


def _pull(f, *arrays):
    return jax.vjp(f, *arrays[:3])[1](arrays[3])


def test_bad_calls() -> None:
    x = jnp.zeros((1, 6, 2, 8))
    with pytest.raises(ValueError, match="axis_name: 'sp' is not bound"):
        ring_attention(x, x, x, axis_name="sp")
    mesh = Mesh(np.array(jax.devices()[:2]), ("sp",))

    def call(**options):
        return jax.shard_map(
            lambda q: ring_attention(q, q, q, axis_name="sp", **options),
            mesh=mesh, in_specs=P(None, "sp"), out_specs=P(None, "sp"), check_vma=False,
        )(x)  # fmt: skip

    with pytest.raises(InvalidArgument, match="query: expected a length divisible by 2"):
        call(layout="zigzag")
    with pytest.raises(ValueError, match=r"layout: expected .*'spiral'"):
        call(layout="spiral")
    with pytest.raises(InvalidArgument, match="bias: expected"):
        call(bias=jnp.zeros((1, 1, 3, 3)))
    with pytest.raises(InvalidArgument, match=r"mask_info.attention_mask: expected all 6 keys"):
        call(mask_info=MaskInfo(attention_mask=jnp.ones((1, 1, 3, 3), bool)))
    with pytest.raises(ValueError, match="kv_segment_ids: given without"):
        call(kv_segment_ids=jnp.zeros((1, 3), jnp.int32))
