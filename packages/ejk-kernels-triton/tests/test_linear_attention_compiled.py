"""The shipped launches of linear attention compile for five chips; they spill next to nothing."""

from __future__ import annotations

from dataclasses import replace

import jax
import jax.numpy as jnp
import pytest

from ejkernel.kernels.triton.linear_attention import roles, tiles
from ejkernel.kernels.triton.linear_attention.plans import (
    ChannelPlan,
    GatePlan,
    PreparePlan,
    ReadPlan,
    ScanPlan,
    StepPlan,
    SumsPlan,
    WalkPlan,
)
from ejkernel.kernels.triton.linear_attention.problem import Problem
from ejkernel.kernels.triton.resources import launch_source, measure
from ejkernel.kernels.triton.targets import cuda_target, rocm_target

pytest.importorskip("triton")

TARGETS = {
    "sm_80": cuda_target(80, 108),
    "sm_89": cuda_target(89, 128),
    "sm_90": cuda_target(90),
    "sm_100": cuda_target(100, 148),
    "gfx942": rocm_target("gfx942"),
}
# batch, rows, heads, kv_heads, dim, value_dim, sequences, dtype, parts of decays per channel of
# (keys, values)
SHAPES = {
    "large": (2, 8192, 16, 16, 128, 128, 0, "bfloat16", (0, 0)),
    "long": (1, 65536, 16, 16, 128, 128, 0, "bfloat16", (0, 0)),
    "small": (2, 8192, 32, 8, 64, 64, 20, "bfloat16", (0, 0)),
    "wide": (2, 8192, 8, 8, 256, 256, 0, "bfloat16", (0, 0)),
    "odd": (2, 5000, 8, 8, 80, 96, 0, "float16", (0, 0)),
    "float32": (2, 8192, 16, 16, 128, 128, 0, "float32", (0, 0)),
    "small float32": (2, 8192, 16, 8, 64, 128, 0, "float32", (0, 0)),
    "wide float32": (2, 8192, 8, 8, 256, 256, 0, "float32", (0, 0)),
    "channels": (2, 8192, 16, 16, 128, 128, 0, "bfloat16", (1, 0)),
    "wide gates": (2, 8192, 16, 16, 128, 128, 0, "bfloat16", (3, 0)),
    "values": (2, 8192, 16, 16, 128, 128, 0, "bfloat16", (0, 1)),
    "small channels": (2, 8192, 32, 8, 64, 64, 20, "bfloat16", (1, 0)),
}
PREPARED = {
    False: ("pairs k", "q'", "k'", "totals k", "halves k"),
    True: ("pairs v", "do'", "v'", "totals v", "halves v"),
}
PASSES = {
    "sums": roles.SUMS,
    "out": roles.OUTPUT,
    "later sums": roles.LATER_SUMS,
    "states": roles.STATES,
    "dq": roles.DQ,
    "dk": roles.DK,
    "dv": roles.DV,
}
# what runs with every change; the rest is slow
SAMPLE = [
    ("large", "out", "sm_90"),
    ("float32", "out", "sm_90"),
    ("small float32", "dk", "sm_90"),
    ("wide float32", "out", "sm_90"),
    ("large", "read", "sm_90"),
    ("large", "steps", "sm_90"),
    ("channels", "prepare", "sm_90"),
    ("channels", "gate", "sm_90"),
    ("values", "rows", "sm_90"),
]
OTHERS = ("scan", "gate", "gate sums", "steps")
ALL = [(s, p, c) for s in SHAPES for p in (*PASSES, *OTHERS) for c in TARGETS]
# where channels decay, the kernel of the gate's gradient reads states and gives what would come out
# per such channel
NEVER = {(0, 0): ("states",), (1, 0): ("dq", "dk"), (3, 0): ("dq", "dk"), (0, 1): ("out", "dv")}
ALL = [(s, p, c) for s, p, c in ALL if p not in NEVER[SHAPES[s][8]]]
ALL += [(s, "read", "sm_90") for s in ("large", "long", "small")]
ALL += [(s, "prepare", c) for s in SHAPES if any(SHAPES[s][8]) for c in TARGETS]
ALL += [("values", "rows", c) for c in TARGETS]


def planned(shape, which, target):
    b, s, h, hk, dk, dv, n, dtype, parts = SHAPES[shape]
    scalar, of_values = not any(parts), parts[1] > 0
    p = Problem(b, s, h, hk, dk, dv, n, dk**-0.5, False, scalar, dtype, dtype, dtype, *parts)
    t = tiles.choose(p, target)
    aval = jax.ShapeDtypeStruct
    gates = jnp.dtype(jnp.bfloat16 if max(parts) == 1 else jnp.float32)
    known = {
        "q": aval((b, s, h, dk), jnp.dtype(dtype)),
        "k": aval((b, s, hk, dk), jnp.dtype(dtype)),
        "v": aval((b, s, hk, dv), jnp.dtype(dtype)),
        "do": aval((b, s, h, dv), jnp.dtype(dtype)),
        "gate": aval((b, s, h, dv if of_values else dk), gates),
        "cuts": aval((4, t.chunk, t.chunk), jnp.bfloat16),
        "cu": aval((b, n + 1), jnp.int32),
    }
    ends, decays = WalkPlan(p, t, roles.SUMS).outputs()
    gate = aval((b, s, h), jnp.float32)
    if scalar:
        sums = SumsPlan(p, t, ("gate", "cu") if n else ("gate",), True)
        known |= dict(zip(roles.GATE_SUMS, sums.outputs(), strict=True))
    else:
        prepare = PreparePlan(p, t, of_values, True)
        known |= dict(zip(PREPARED[of_values], prepare.outputs(), strict=True))
    pair = ("do", "v") if of_values else ("q", "k")
    cu = [known["cu"]] * bool(n)
    if which == "prepare":
        return prepare, [*(known[name] for name in (*pair, "gate", "cuts")), *cu]
    if which == "gate sums":
        return SumsPlan(p, t, ("gate", "cu") if n else ("gate",), True), [gate, *cu]
    if which == "steps":
        state = aval((b * max(n, 1), h, dk, dv), jnp.float32)
        names = ("query", "key", "value", "gate", *["cu"] * bool(n), "initial")
        operands = [*(known[x] for x in ("q", "k", "v")), gate, *cu, state]
        return StepPlan(p, replace(t, columns=32), names, True, True), operands
    if which == "read":
        last = aval((b * max(n, 1), h, dk, dv), jnp.float32)
        rows = [known[x] for x in ("q", "k", "v", "do", *roles.GATE_SUMS)]
        plan = ReadPlan(p, t, True, (("dkey", dtype), ("dvalue", dtype)))
        return plan, [*rows, ends, ends, last, *cu]
    if which == "scan":
        return ScanPlan(p, t, False, False), [ends, decays, *cu]
    states = WalkPlan(p, t, roles.STATES).outputs()[0]
    if which == "rows":
        names = ("v", "q", "k", "gate", "halves v", "cuts")
        plan = ChannelPlan(p, t, True, (("dreader", dtype),))
        return plan, [*(known[n] for n in names), states, *cu]
    if which == "gate" and scalar:
        names = ("q", "k", "v", "do", *roles.GATE_SUMS)
        return GatePlan(p, t), [*(known[n] for n in names), states, states, *cu]
    if which == "gate":
        results = (("dreader", dtype), ("dsource", dtype), ("dgate", gates.name))
        plan = ChannelPlan(p, t, of_values, results[of_values:])
        other, halves = (("q", "k"), "halves v") if of_values else (("do", "v"), "halves k")
        names = (*pair, *other, "gate", halves, "cuts")
        return plan, [*(known[n] for n in names), states, states, *cu]
    role = PASSES[which]
    return WalkPlan(p, t, role), [known.get(name, ends) for name in role.operands(p).values()]


def check(shape, which, chip):
    target = TARGETS[chip]
    plan, avals = planned(shape, which, target)
    used = measure(launch_source(plan, avals, target), target)
    print(f"{shape} {which} {chip}: {plan.tiles}: {used}")
    # halvings of columns; sums in float32 from addresses of a padded head dim
    few = 64 if any(SHAPES[shape][8]) else 16
    if dict(plan.launch(target).options):
        few = 320  # bound for the sake of near chunks; halvings spill
    if shape == "odd" and which == "gate":
        few = 144
    if which == "steps":
        few = 32  # once, not in a loop
    if shape in ("float32", "small float32"):
        few = 96  # TF32 operands of transposed products lie in registers
        if target.hopper and which in ("out", "dq", "dk", "dv"):
            # what two programs spill has no room in the first cache beside their shared memory
            few = 0
            assert plan.launch(target).kernel.__name__ == "split_walk"
            assert 2 * (used.shared + 2**10) <= 228 * 2**10  # two programs a multiprocessor
    if which == "read" or shape == "wide float32":
        # the state that a segment begins with passes through registers; in the walk of bfloat16
        # 8 B are spilled
        few = 320
    assert used.spills <= few
    assert not used.serialized or which == "gate"  # two products end where one is summed up
    assert used.products > 0 or which in OTHERS or chip == "sm_100"
    assert used.shared <= target.shared_limit


@pytest.mark.parametrize(
    ("changed", "kernel"),
    [
        ({}, "split_walk"),
        ({"narrowest": "float16", "dtype": "float16"}, "walk"),
        ({"narrowest": "bfloat16"}, "walk"),
        ({"out": "bfloat16"}, "walk"),
        ({"rows": 8190}, "walk"),
        ({"sequences": 3}, "walk"),
        ({"dim": 100}, "walk"),
        ({"key_parts": 1, "scalar": False}, "walk"),
    ],
)
def test_float32_numbers_in_whole_chunks_have_a_kernel_by_hand(changed, kernel):
    target = TARGETS["sm_90"]
    p = replace(planned("float32", "out", target)[0].problem, **changed)
    plan = WalkPlan(p, tiles.choose(p, target), roles.OUTPUT)
    assert plan.launch(target).kernel.__name__ == kernel


def test_a_walk_of_constants_spills_nothing():
    """Though all of their exponentials are held outside the loop."""
    target = TARGETS["sm_90"]
    p = replace(planned("large", "out", target)[0].problem, constant=True)
    t = tiles.choose(p, target)
    starts = WalkPlan(p, t, roles.SUMS).outputs()[0]
    rows = jax.ShapeDtypeStruct((p.batch, p.rows, p.heads, p.dim), jnp.bfloat16)
    constant = jax.ShapeDtypeStruct((1, p.heads), jnp.float32)
    assert list(roles.OUTPUT.operands(p)) == ["query", "key", "value", "constant", "starts"]
    plan = WalkPlan(p, t, replace(roles.OUTPUT, out=p.out))
    used = measure(launch_source(plan, [rows, rows, rows, constant, starts], target), target)
    assert used.spills == 0 and not used.serialized


@pytest.mark.parametrize(("shape", "which", "chip"), SAMPLE)
def test_sample(shape, which, chip):
    check(shape, which, chip)


@pytest.mark.slow
@pytest.mark.parametrize(("shape", "which", "chip"), [c for c in ALL if c not in SAMPLE])
def test_all(shape, which, chip):
    check(shape, which, chip)
