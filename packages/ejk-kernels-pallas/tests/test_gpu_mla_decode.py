"""Latent decoding for Hopper where there is no Hopper GPU: what is lowered, and what is merged.

The kernels themselves run on a GPU only (``test_gpu_card.py``).
"""

from __future__ import annotations

import contextlib
from functools import partial
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ejkernel.kernels.pallas import compat

if compat.mosaic_gpu_problem() is not None:
    pytest.skip(compat.mosaic_gpu_problem(), allow_module_level=True)

from ejkernel.kernels.pallas.gpu.serving import implementation
from ejkernel.kernels.pallas.gpu.serving import mla_decode as kernel
from ejkernel.kernels.pallas.gpu.serving.implementation import mla_decode
from ejkernel.kernels.pallas.gpu.serving.mla_merge import merge_fixed_lse, merge_lse
from ejkernel.ops import batch_invariant
from ejkernel.types.masks.structure import Unsupported
from ejkernel.types.serving.split import fixed_split, split_schedule
from ejktest.bound import on, struct
from ejktest.split_units import LENGTHS, partial_of, unit_steps

STEP = 64


@pytest.mark.parametrize("name", LENGTHS)
def test_lse_of_partial_results_is_that_of_the_sequence(name: str) -> None:
    rng = np.random.default_rng(0)
    lengths, units, c = np.asarray(LENGTHS[name], np.int32), 5, 0.3
    scores = [rng.normal(size=(2, n)) * 9 for n in lengths]
    m = np.full((2 * units + len(lengths), 2), np.nan, np.float32)  # what nobody wrote
    total = m.copy()
    schedule = split_schedule(lengths, units, STEP)
    for (unit, sequence), steps in unit_steps(schedule, lengths, STEP).items():
        n = partial_of(schedule, lengths, STEP, unit, sequence)
        x = np.concatenate([scores[sequence][:, j * STEP : (j + 1) * STEP] for j in steps], axis=1)
        m[n] = x.max(1)
        total[n] = np.exp2((x - x.max(1, keepdims=True)) * c).sum(1)
    splits = np.asarray([unit.cut for unit in schedule], np.int32)
    got = np.asarray(jax.jit(merge_lse)(c, m, total, splits, lengths))
    for x, lse in zip(scores, got, strict=True):
        logits = x * c * np.log(2.0)
        want = np.logaddexp.reduce(logits, axis=1) if x.size else np.full(2, -np.inf)
        np.testing.assert_allclose(lse, want, rtol=1e-5, atol=1e-5)
    if not lengths.any():
        return
    total[n, 0] = np.nan  # of the last partial result: the sequence has seen NaN
    has_nan = np.isnan(jax.jit(merge_lse)(c, m, total, splits, lengths))
    assert has_nan[sequence, 0] and has_nan.sum() == 1


def test_lse_of_fixed_splits_is_that_of_the_sequence_and_has_its_bits_in_any_batch() -> None:
    rng, c = np.random.default_rng(0), 0.3
    lengths = np.array([1, 0, 9000, 2304, 2305, 40_000], np.int32)
    scores = [rng.normal(size=(2, n)) * 9 for n in lengths]

    def lse_of(members: list[int], splits: int) -> np.ndarray:
        """Returns the result of a batch whose tables have room for that number of splits."""
        b = len(members)
        m = np.full((b * splits + b, 2), np.nan, np.float32)
        total, cuts = m.copy(), np.zeros((b, 4), np.int32)
        for i, n in enumerate(members):
            for split in range(splits):
                first, steps, count = (int(x) for x in fixed_split(lengths[n], split, step=STEP))
                x = scores[n][:, first * STEP : (first + steps) * STEP]
                cuts[i] = i, i * splits, count if count > 1 else 0, 0
                if x.size:
                    number = i * splits + split if count > 1 else b * splits + i
                    m[number] = x.max(1)
                    total[number] = np.exp2((x - x.max(1, keepdims=True)) * c).sum(1)
        return np.asarray(jax.jit(merge_fixed_lse)(c, m, total, cuts, lengths[members]))

    every = lse_of(list(range(6)), 16)
    for x, lse in zip(scores, every, strict=True):
        logits = x * c * np.log(2.0)
        want = np.logaddexp.reduce(logits, axis=1) if x.size else np.full(2, -np.inf)
        np.testing.assert_allclose(lse, want, rtol=1e-5, atol=1e-5)
    np.testing.assert_array_equal(lse_of([2], 5), every[2:3])
    np.testing.assert_array_equal(lse_of([4, 0, 3], 2), every[[4, 0, 3]])
    scores[2][0, 5] = np.nan
    has_nan = np.isnan(lse_of([2, 4], 5))
    assert has_nan[0, 0] and has_nan.sum() == 1


class TestCalls:
    """Calls of the operation, lowered."""

    @staticmethod
    def decode(
        *shapes: jax.ShapeDtypeStruct, mapped: jax.ShapeDtypeStruct | None = None, **options
    ):
        """Returns the lowered call; ``mapped``: values of ``k_scale`` to map it over."""

        def call(q, cache, lengths, tables, *k_scales):
            def one(**k_scale):
                arrays = (q, cache, lengths, tables)
                return mla_decode(*arrays, latent_dim=512, **options, **k_scale)

            return jax.vmap(lambda x: one(k_scale=x))(*k_scales) if k_scales else one()

        device = jax.sharding.AbstractDevice(
            device_kind="NVIDIA H200", num_cores=132, platform="cuda"
        )
        with on(device):
            return (
                jax.jit(call)
                .trace(*shapes, *([] if mapped is None else [mapped]))
                .lower(lowering_platforms=("cuda",))
                .as_text()
            )

    @staticmethod
    def shapes(
        heads: int = 128, page: int = 64, dim: int = 576, dtype=jnp.bfloat16, cache=None, batch=4
    ):
        ints = [struct(batch, dtype=jnp.int32), struct(batch, 10, dtype=jnp.int32)]
        pages = struct(40, page, dim, dtype=cache or dtype)
        return struct(batch, 2, heads, dim, dtype=dtype), pages, *ints

    def test_lowers_for_a_hopper_gpu(self) -> None:
        text = self.decode(*self.shapes(page=16), return_lse=True)
        assert text.count("custom_call @mosaic_gpu") == 2 and "paged_split" not in text

    def test_lowers_batch_invariant_calls(self) -> None:
        with batch_invariant():
            text = self.decode(*self.shapes(), return_lse=True)
        assert text.count("custom_call @mosaic_gpu") == 2 and "paged_split" not in text
        assert text != self.decode(*self.shapes(), return_lse=True)

    @pytest.mark.parametrize(
        ("dtype", "cache"), [("float16", "int8"), ("bfloat16", "float8_e4m3fn")]
    )
    def test_lowers_8_bit_caches(self, dtype: str, cache: str) -> None:
        shapes = self.shapes(dtype=jnp.dtype(dtype), cache=jnp.dtype(cache))
        text = self.decode(*shapes, return_lse=True, k_scale=-0.5)
        assert text.count("custom_call @mosaic_gpu") == 2 and "paged_split" not in text

    @pytest.mark.parametrize(
        ("batch", "invariant", "at_once"),
        [(1, False, True), (2, False, False), (1, True, True), (3, True, True)],
    )
    def test_merges_one_sequence_and_fixed_splits_at_once(
        self, batch, invariant, at_once, monkeypatch
    ) -> None:
        called = []
        for name in ("merge", "merge_at_once"):
            original = getattr(implementation, name)

            def spy(*args, original=original, name=name, **options):
                called.append(name)
                return original(*args, **options)

            monkeypatch.setattr(implementation, name, spy)
        with batch_invariant() if invariant else contextlib.nullcontext():
            text = self.decode(*self.shapes(batch=batch), k_scale=0.5, return_lse=True)
        assert text.count("custom_call @mosaic_gpu") == 2
        assert set(called) == {"merge_at_once" if at_once else "merge"}

    @pytest.mark.parametrize(("batch", "is_sorted"), [(1, True), (128, True), (129, False)])
    def test_begins_with_the_longest_splits_in_batches_that_a_warp_sorts(
        self, batch, is_sorted, monkeypatch
    ) -> None:
        found = []

        def find_split(*args, original=kernel.find_split, **options):
            found.append(options)
            return original(*args, **options)

        monkeypatch.setattr(kernel, "find_split", find_split)
        with batch_invariant():
            text = self.decode(*self.shapes(batch=batch))
        assert text.count("custom_call @mosaic_gpu") == 2 and bool(found) == is_sorted

    @pytest.mark.parametrize(
        ("batch", "cache", "invariant", "staged"),
        [
            (1, "bfloat16", False, True),
            (1, "int8", False, False),  # whose buffers are in use from the beginning
            (2, "bfloat16", False, False),
            (1, "bfloat16", True, False),
        ],
    )
    def test_rows_of_a_single_sequence_go_through_shared_memory(
        self, batch, cache, invariant, staged, monkeypatch
    ) -> None:
        shapes = {"read": [], "write": []}
        for name, seen in shapes.items():
            original = getattr(kernel, f"{name}_matrices")

            def spy(ref, *args, original=original, seen=seen):
                seen.append(ref.shape)
                return original(ref, *args)

            monkeypatch.setattr(kernel, f"{name}_matrices", spy)
        with batch_invariant() if invariant else contextlib.nullcontext():
            text = self.decode(*self.shapes(batch=batch, cache=jnp.dtype(cache)), k_scale=0.5)
        assert text.count("custom_call @mosaic_gpu") == 2
        assert {*shapes["read"]} == ({(64, 256), (64, 192)} if staged else set())
        assert {*shapes["write"]} == ({(64, 128)} if staged else set())

    def test_lowers_a_scale_for_each_mapped_row(self) -> None:
        decode = partial(self.decode, mapped=struct(3, dtype=jnp.float32))
        text = decode(*self.shapes(cache=jnp.float8_e5m2), return_lse=True)
        assert text.count("custom_call @mosaic_gpu") == 2 and "paged_split" not in text

    @pytest.mark.parametrize(
        ("shapes", "options", "reason"),
        [
            (dict(heads=40), {}, "40 heads"),
            (dict(page=24), {}, "pages of 24"),
            (dict(dim=544), {}, "544 with 512"),
            (dict(dtype=jnp.float32), {}, "float32"),
            ({}, dict(sliding_window=100), "sliding_window"),
            ({}, dict(logits_soft_cap=9.0), "logits_soft_cap"),
            ({}, dict(num_splits=3), "num_splits"),
        ],
    )
    def test_refuses_by_name_what_it_does_not_do(self, shapes, options, reason: str) -> None:
        with pytest.raises(Unsupported, match=reason):
            self.decode(*self.shapes(**shapes), **options)

    @pytest.mark.parametrize(
        ("batch", "capacity", "invariant", "ahead"),
        [(2, 1024, False, False), (1, 2**12, False, True), (2, 1024, True, True)],
    )
    def test_leads_where_there_is_enough_to_read(
        self, batch, capacity, invariant, ahead, monkeypatch
    ) -> None:
        """A batch-invariant call has one kernel whatever its size."""
        problem = SimpleNamespace(batch=batch, capacity=capacity)
        monkeypatch.setattr(mla_decode, "problem_of", lambda call: problem)
        call: Any = SimpleNamespace(route=SimpleNamespace(batch_invariant=invariant))
        assert (mla_decode.priority_for(call) > 100) == ahead
