"""The shipped launches of linear attention compile for five chips; they spill next to nothing."""

from __future__ import annotations

from dataclasses import replace

import jax
import jax.numpy as jnp
import pytest

from ejkernel.kernels.triton.linear_attention import passes, tiles
from ejkernel.kernels.triton.linear_attention.backward_kv import BackwardKv
from ejkernel.kernels.triton.linear_attention.channel_gradient import ChannelGradient
from ejkernel.kernels.triton.linear_attention.chunk_loop import ChunkLoop
from ejkernel.kernels.triton.linear_attention.decay_channels import DecayChannels
from ejkernel.kernels.triton.linear_attention.decode import DecodeTokens
from ejkernel.kernels.triton.linear_attention.gate_gradient import GateGradient
from ejkernel.kernels.triton.linear_attention.gates import GatePrefixSums
from ejkernel.kernels.triton.linear_attention.launch import GATE_SUMS
from ejkernel.kernels.triton.linear_attention.problem import Problem
from ejkernel.kernels.triton.linear_attention.state_scan import StateScan
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
PASSES = {
    "sums": passes.SEGMENT_STATES,
    "out": passes.OUTPUT,
    "later sums": passes.LATER_SEGMENT_STATES,
    "states": passes.CHUNK_STATES,
    "dq": passes.DQ,
    "dk": passes.DK,
    "dv": passes.DV,
}
# what runs with every change; the rest is slow
SAMPLE = [
    ("float32", "out", "sm_90"),
    ("small float32", "dk", "sm_90"),
    ("large", "read", "sm_90"),
    ("large", "steps", "sm_90"),
    ("channels", "gate", "sm_90"),
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


def launched(shape, which, target):
    b, s, h, hk, dk, dv, n, dtype, parts = SHAPES[shape]
    scalar, of_values = not any(parts), parts[1] > 0
    p = Problem(b, s, h, hk, dk, dv, n, dk**-0.5, False, dtype, dtype, dtype, scalar, *parts)
    t = tiles.choose(p, target)
    aval = jax.ShapeDtypeStruct
    gates = jnp.dtype(jnp.bfloat16 if max(parts) == 1 else jnp.float32)
    arrays = {
        "q": aval((b, s, h, dk), jnp.dtype(dtype)),
        "k": aval((b, s, hk, dk), jnp.dtype(dtype)),
        "v": aval((b, s, hk, dv), jnp.dtype(dtype)),
        "do": aval((b, s, h, dv), jnp.dtype(dtype)),
    }
    cu = {"cu": aval((b, n + 1), jnp.int32)} if n else {}
    splits = {"cut_matrices": aval((4, t.chunk, t.chunk), jnp.bfloat16)}
    channel_gate = aval((b, s, h, dv if of_values else dk), gates)
    ends = ChunkLoop(p, t, passes.SEGMENT_STATES).outputs()
    rows = {"query": arrays["q"], "key": arrays["k"], "value": arrays["v"]}
    reader, source = ("do", "v") if of_values else ("q", "k")
    gate = {"gate": aval((b, s, h), jnp.float32)}
    prefix_sums = GatePrefixSums(p, t).with_operands(gate | cu)
    pair = {"reader": arrays[reader], "source": arrays[source], "gate": channel_gate}
    decay = DecayChannels(p, t, of_values).with_operands(pair | splits | cu)
    halves = {}
    if scalar:
        arrays |= prefix_sums.outputs()
    else:
        decayed, side = decay.outputs(), "v" if of_values else "k"
        halves = {"halves": decayed["halves"]}
        arrays |= {f"{reader}_decayed": decayed["reader_decayed"]}
        arrays |= {f"{source}_decayed": decayed["source_decayed"]}
        arrays |= {f"{name}_{side}": decayed[name] for name in ("pairs", "totals")}
    if which == "prepare":
        return decay, pair | splits | cu
    if which == "gate sums":
        return prefix_sums, gate | cu
    if which == "steps":
        state = aval((b * max(n, 1), h, dk, dv), jnp.float32)
        launch = DecodeTokens(p, replace(t, columns=32), True)
        return launch, rows | gate | cu | {"initial": state}
    states = ChunkLoop(p, t, passes.CHUNK_STATES).outputs()["states"]
    sums = {name: arrays[name] for name in GATE_SUMS if name in arrays}
    if which == "read":
        last = aval((b * max(n, 1), h, dk, dv), jnp.float32)
        more = {"dout": arrays["do"], "dstarts": ends["ends"], "starts": ends["ends"]}
        launch = BackwardKv(p, t, True, dtype, dtype)
        return launch, rows | sums | more | {"final": last} | cu
    if which == "scan":
        given = {name: ends[name] for name in ("ends", "decays") if ends[name] is not None}
        return StateScan(p, t, False), given | cu
    of_chunks = {"states": states, "dstates": states}
    if which == "gate" and scalar:
        return GateGradient(p, t), rows | {"dout": arrays["do"]} | sums | of_chunks | cu
    if which in ("gate", "rows"):
        other = ("q", "k") if of_values else ("do", "v")
        others = dict(zip(("reader_other", "source_other"), map(arrays.get, other), strict=True))
        if which == "rows":
            launch = ChannelGradient(p, t, True, (dtype, "", ""))
            pair.pop("reader")
            of_chunks.pop("dstates")
        else:
            results = ("" if of_values else dtype, dtype, gates.name)
            launch = ChannelGradient(p, t, of_values, results)
        return launch, pair | others | halves | splits | of_chunks | cu
    spec = PASSES[which]
    named = spec.operands(p).items()
    operands = arrays | cu | {"starts": ends["ends"]}
    return ChunkLoop(p, t, spec), {name: operands[array] for name, array in named}


def source_of(launch, operands, target):
    return launch_source(launch.with_operands(operands), list(operands.values()), target)


def check(shape, which, chip):
    target = TARGETS[chip]
    launch, operands = launched(shape, which, target)
    used = measure(source_of(launch, operands, target), target)
    print(f"{shape} {which} {chip}: {launch.tiles}: {used}")
    bound = launch.with_operands(operands).bind(target)
    # halvings of columns; sums in float32 from addresses of a padded head dim
    few = 64 if any(SHAPES[shape][8]) else 16
    if "maxnreg" in bound.options:
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
            assert bound.kernel.__name__ == "chunk_loop_sm90"
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
        ({}, "chunk_loop_sm90"),
        ({"narrowest": "float16", "dtype": "float16"}, "chunk_loop"),
        ({"narrowest": "bfloat16"}, "chunk_loop"),
        ({"out": "bfloat16"}, "chunk_loop"),
        ({"rows": 8190}, "chunk_loop"),
        ({"sequences": 3}, "chunk_loop"),
        ({"dim": 100}, "chunk_loop"),
        ({"key_parts": 1, "scalar": False}, "chunk_loop"),
    ],
)
def test_float32_numbers_in_whole_chunks_have_a_kernel_by_hand(changed, kernel):
    target = TARGETS["sm_90"]
    p = replace(launched("float32", "out", target)[0].problem, **changed)
    launch = ChunkLoop(p, tiles.choose(p, target), passes.OUTPUT)
    names = passes.OUTPUT.operands(p)
    shape = (p.batch, p.rows, p.heads, p.dim)
    launch = launch.with_operands(
        {name: jax.ShapeDtypeStruct(shape, jnp.float32) for name in names}
    )
    assert launch.bind(target).kernel.__name__ == kernel


def test_a_loop_with_constant_gates_spills_nothing():
    """Though all of their exponentials are held outside the loop."""
    target = TARGETS["sm_90"]
    p = replace(launched("large", "out", target)[0].problem, constant=True)
    t = tiles.choose(p, target)
    starts = ChunkLoop(p, t, passes.SEGMENT_STATES).outputs()["ends"]
    rows = jax.ShapeDtypeStruct((p.batch, p.rows, p.heads, p.dim), jnp.bfloat16)
    constant = jax.ShapeDtypeStruct((1, p.heads), jnp.float32)
    operands = {name: rows for name in ("query", "key", "value")}
    operands |= {"constant": constant, "starts": starts}
    assert list(passes.OUTPUT.operands(p)) == list(operands)
    launch = ChunkLoop(p, t, replace(passes.OUTPUT, out=p.out))
    used = measure(source_of(launch, operands, target), target)
    assert used.spills == 0 and not used.serialized


@pytest.mark.parametrize(("shape", "which", "chip"), SAMPLE)
def test_sampled_calls_compile(shape, which, chip):
    check(shape, which, chip)


@pytest.mark.slow
@pytest.mark.parametrize(("shape", "which", "chip"), [c for c in ALL if c not in SAMPLE])
def test_all_calls_compile(shape, which, chip):
    check(shape, which, chip)
