"""The assembly that converts 8-bit values to float16, run in numpy on every pair of bytes."""

from __future__ import annotations

import re
from collections.abc import Callable

import ml_dtypes
import numpy as np
import pytest

pytest.importorskip("triton")

import triton
import triton.language as tl

from ejkernel.kernels.triton.bound_launch import BoundLaunch, In, Out
from ejkernel.kernels.triton.common import eight_bit
from ejkernel.kernels.triton.interpret import run_launch
from ejkernel.kernels.triton.serving.quantize import round_to_8_bits

U32 = np.uint32


def halves(x):
    return np.stack([x & 0xFFFF, x >> 16]).astype(np.uint16).view(np.float16)


def without_bias(x):
    return halves(x).astype(np.float32) * 2**24 - 128


def brains(x):
    return np.stack([x & 0xFFFF, x >> 16]).astype(np.uint16).view(ml_dtypes.bfloat16)


def joined(parts, dtype=np.float16):
    low, high = parts.astype(dtype).view(np.uint16).astype(U32)
    return low | (high << U32(16))


def permute(a, b, selector):
    both = a.astype(np.uint64) | (np.uint64(b) << np.uint64(32))
    out = np.zeros_like(a)
    for i in range(4):
        place = np.uint64((selector >> (4 * i)) & 0x7) * np.uint64(8)
        out |= ((both >> place) & np.uint64(0xFF)).astype(U32) << U32(8 * i)
    return out


def three_inputs(a, b, c, table):
    out = np.zeros(np.broadcast_shapes(*(np.shape(x) for x in (a, b, c))), U32)
    for i in range(8):
        if (table >> i) & 1:
            terms = [x if (i >> bit) & 1 else ~x for x, bit in ((a, 2), (b, 1), (c, 0))]
            out |= terms[0] & terms[1] & terms[2]
    return out


def from_e4m3(x):
    both = np.stack([x & 0xFF, (x >> 8) & 0xFF]).astype(np.uint8).view(ml_dtypes.float8_e4m3fn)
    return joined(both.astype(np.float16))


def fma_bfloat16(a, b, c):
    a, b, c = (brains(x).astype(np.float32) for x in (a, b, c))
    return joined(a * b + c, ml_dtypes.bfloat16)  # exact in float32


def to_bfloat16(a, b):
    return joined(np.stack([b.view(np.float32), a.view(np.float32)]), ml_dtypes.bfloat16)


OPERATIONS: dict[str, Callable] = {
    "mov.b32": lambda a: a,
    "shr.u32": lambda a, n: a >> n,
    "shl.b32": lambda a, n: a << n,
    "and.b32": lambda a, b: a & b,
    "prmt.b32": permute,
    "lop3.b32": three_inputs,
    "sub.rn.f16x2": lambda a, b: joined(halves(a) - halves(b)),
    "mul.rn.f16x2": lambda a, b: joined(halves(a) * halves(b)),
    # the product is 0 or NaN, so a rounding in between changes nothing
    "fma.rn.f16x2": lambda a, b, c: joined(halves(a) * halves(b) + halves(c)),
    "cvt.rn.f16x2.e4m3x2": from_e4m3,
    "xor.b32": lambda a, b: a ^ b,
    "fma.rn.bf16x2": fma_bfloat16,
    "cvt.f32.f16": lambda a: halves(a)[0].astype(np.float32).view(U32),
    "cvt.rn.bf16x2.f32": to_bfloat16,
}


def run(text, word):
    """($0, $1) of the assembly for 32-bit words in $2."""
    names = {"$2": word}

    def value(name):
        return names[name] if name in names else np.full_like(word, int(name, 16))

    with np.errstate(over="ignore", invalid="ignore"):
        for line in (x.strip() for x in text.strip("{}\n").splitlines()):
            if line.startswith(".reg"):
                continue
            if found := re.fullmatch(r"mov\.b32 \{(\w+), (\w+)\}, (\$?\w+);", line):
                low, high, source = found.groups()
                names[low], names[high] = names[source] & 0xFFFF, names[source] >> 16
                continue
            operation, arguments = line.rstrip(";").split(" ", 1)
            target, *operands = (x.strip() for x in arguments.split(","))
            immediate = {"prmt.b32": 2, "lop3.b32": 1, "shr.u32": 1, "shl.b32": 1}.get(operation, 0)
            count = len(operands)
            given = []
            for i, name in enumerate(operands):
                constant = name not in names and i >= count - immediate
                given.append(int(name, 0) if constant else value(name))
            names[target] = OPERATIONS[operation](*given)
    return names["$0"], names["$1"]


@pytest.mark.parametrize(
    ("text", "kind", "read"),
    [
        (eight_bit.PAIRED_INT8, np.int8, halves),
        (eight_bit.PAIRED_INT8_BIASED, np.int8, without_bias),
        (eight_bit.PAIRED_INT8_BFLOAT16, np.int8, brains),
        (eight_bit.PAIRED_E5M2, ml_dtypes.float8_e5m2, halves),
        (eight_bit.PAIRED_E4M3, ml_dtypes.float8_e4m3fn, halves),
        (eight_bit.PAIRED_E4M3_BITS, ml_dtypes.float8_e4m3fn, halves),
    ],
)
def test_every_pair_of_numbers_is_exact(text, kind, read):
    pair = np.arange(2**16, dtype=U32)
    word = pair | (np.roll(pair, 12345) << U32(16))
    even, odd = (read(x) for x in run(text.value, word))
    numbers = np.stack([(word >> U32(8 * i)) & 0xFF for i in range(4)]).astype(np.uint8).view(kind)
    want = numbers.astype(even.dtype)
    np.testing.assert_array_equal(even, want[0::2])
    np.testing.assert_array_equal(odd, want[1::2])
    for got, expected in ((even, want[0::2]), (odd, want[1::2])):
        there = ~np.isnan(expected)
        assert np.array_equal(np.signbit(got[there]), np.signbit(expected[there]))


@pytest.mark.parametrize("number", ["float16", "bfloat16"])
@pytest.mark.parametrize(
    ("name", "kind"),
    [("INT8", np.int8), ("E5M2", ml_dtypes.float8_e5m2), ("E4M3", ml_dtypes.float8_e4m3fn)],
)
def test_every_pair_of_neighbours_is_exact(name, kind, number):
    word = np.arange(2**16, dtype=U32)
    word = word | (np.roll(word, 12345) << U32(16))
    text = getattr(eight_bit, f"{name}_{number.upper()}").value
    read = halves if number == "float16" else brains
    got = np.concatenate([read(x) for x in run(text, word)]).astype(np.float32)
    numbers = np.stack([(word >> U32(8 * i)) & 0xFF for i in range(4)]).astype(np.uint8).view(kind)
    want = numbers.astype(np.float32)
    np.testing.assert_array_equal(got, want)
    there = ~np.isnan(want)
    assert np.array_equal(np.signbit(got[there]), np.signbit(want[there]))


@triton.jit
def narrowed(x, out, n, KIND: tl.constexpr, BLOCK: tl.constexpr):
    i = tl.arange(0, BLOCK)
    tl.store(out + i, round_to_8_bits(tl.load(x + i, mask=i < n, other=0.0), KIND, 0), mask=i < n)


@pytest.mark.parametrize("kind", ["int8", "float8_e4m3fn", "float8_e5m2"])
def test_the_way_back_rounds_to_nearest_even(kind):
    dtype = np.dtype(getattr(ml_dtypes, kind, kind))
    codes = np.arange(256, dtype=np.uint8).view(dtype).astype(np.float32)
    numbers = np.unique(codes[np.isfinite(codes)])
    ties = (numbers[1:] + numbers[:-1]) / 2
    x = np.concatenate([numbers, ties, *(np.nextafter(ties, side) for side in (-9e9, 9e9))])
    x = np.concatenate([x, [-0.0, 1e9, -1e9, 1e-30, -1e-45, np.inf, -np.inf]]).astype(np.float32)
    out = np.zeros(x.size, np.int8)
    arguments = {"x": In(0), "out": Out(0), "n": x.size}
    run_launch(BoundLaunch(narrowed, arguments, {"KIND": kind, "BLOCK": 2048}, (1,)), [x], [out])
    want = np.rint(x) if kind == "int8" else x
    want = np.clip(want, numbers[0], numbers[-1]).astype(dtype)
    np.testing.assert_array_equal(out.view(np.uint8), want.view(np.uint8))
    if kind != "int8":
        nan = np.array([np.nan, -np.nan], np.float32)
        launch = BoundLaunch(narrowed, arguments | {"n": 2}, {"KIND": kind, "BLOCK": 2}, (1,))
        with np.errstate(invalid="ignore"):
            run_launch(launch, [nan], [out[:2]])
        assert np.isnan(out[:2].view(dtype).astype(np.float32)).all()
