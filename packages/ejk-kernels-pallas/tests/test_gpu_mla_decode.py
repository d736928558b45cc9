"""Latent decoding for Hopper where there is no Hopper GPU: how steps are dealt, and what is merged.

The kernels themselves run on the card only (``test_gpu_card.py``).
"""

from __future__ import annotations

from collections import defaultdict
from functools import partial
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ejkernel.kernels.pallas import compat

if compat.mosaic_gpu_problem() is not None:
    pytest.skip(compat.mosaic_gpu_problem(), allow_module_level=True)

from ejkernel.kernels.pallas.gpu.mla_decode.merge import merged_lse
from ejkernel.kernels.pallas.gpu.mla_decode.shares import OPENING, SHORT, numbers, shares
from ejkernel.types.masks.structure import Unsupported
from ejktest.bound import on, struct

STEP = 64
LENGTHS = {
    "even": [512] * 8,
    "uneven": [1, 0, 700, 64, 65, 0, 3000, 63],
    "one": [20000],
    "none": [0, 0, 0],
    "empty ends": [0, 0, 130, 0],
    "many": [i % 97 for i in range(200)],
}


dealt = jax.jit(shares, static_argnums=(1, 2))


def walked(runs, sequences) -> dict[tuple[int, int], list[int]]:
    """(run, sequence) -> its steps, as the kernel's programs walk."""
    found = defaultdict(list)
    for run, (sequence, j, count) in enumerate(runs):
        for _ in range(count):
            found[run, sequence].append(j)
            ended = j + 1 == sequences[sequence, 1]
            sequence, j = (sequences[sequence, 2], 0) if ended else (sequence, j + 1)
    return found


def part(runs, sequences, run: int, sequence: int) -> int:
    """Number of what a run sums of a sequence, as the kernel has it."""
    if sequences[sequence, 4] == 1:
        return 2 * len(runs) + sequence
    return 2 * run + (sequence != runs[run, 0])


@pytest.mark.parametrize("groups", [1, 5, 66])
@pytest.mark.parametrize("name", LENGTHS)
def test_every_step_has_one_program_and_parts_follow_each_other(name: str, groups: int) -> None:
    lengths = np.asarray(LENGTHS[name], np.int32)
    runs, sequences = (np.asarray(x) for x in dealt(lengths, groups, STEP))
    found = walked(runs, sequences)
    steps, parts = defaultdict(list), defaultdict(list)
    for (run, sequence), taken in found.items():
        steps[sequence] += taken
        parts[sequence].append(part(runs, sequences, run, sequence))
    assert len({n for taken in parts.values() for n in taken}) == len(found)
    for sequence, length in enumerate(lengths):
        assert steps[sequence] == list(range(-(-length // STEP)))
        first, count = sequences[sequence, 3:]
        assert parts[sequence] == [int(numbers(first, i)) for i in range(count)]
        assert all(
            n < 2 * groups or (count == 1 and n < 2 * groups + len(lengths))
            for n in parts[sequence]
        )


def test_runs_are_even_and_sequences_whole_where_that_is_as_even() -> None:
    runs, sequences = dealt(jnp.full(64, 8192), 66, STEP)
    assert (np.asarray(sequences)[:, 4] == 1).all()
    assert np.asarray(runs)[:, 2].max() == 128
    runs, _ = dealt(jnp.asarray([100_000, 64, 64]), 66, STEP)
    assert np.asarray(runs)[:, 2].max() == -(-(1563 + 2 + 3 * (1565 // (66 * SHORT))) // 66)


def test_a_run_that_begins_sequences_has_so_many_steps_less() -> None:
    lengths = np.random.default_rng(0).integers(0, 20_000, 64, dtype=np.int32)
    runs, sequences = (np.asarray(x) for x in dealt(lengths, 66, STEP))
    walk = walked(runs, sequences)
    cost = [
        sum(len(j) + OPENING * (i != runs[run, 0]) for (g, i), j in walk.items() if g == run)
        for run in range(66)
    ]
    most = (sequences[:, 1] + OPENING * (lengths > 0)).sum()
    assert max(cost) <= -(-most // 66)
    assert max(cost) - min(cost[:-1]) <= 2 * OPENING  # a bound may lie where a sequence begins


def test_lse_of_parts_is_that_of_the_sequence() -> None:
    rng = np.random.default_rng(0)
    lengths, c = np.asarray(LENGTHS["uneven"], np.int32), 0.3
    runs, sequences = (np.asarray(x) for x in dealt(lengths, 5, STEP))
    scores = [rng.normal(size=(2, n)) * 9 for n in lengths]
    m = np.full((2 * 5 + len(lengths), 2), np.nan, np.float32)  # what nobody wrote
    total = m.copy()
    for (run, sequence), taken in walked(runs, sequences).items():
        n = part(runs, sequences, run, sequence)
        x = np.concatenate([scores[sequence][:, j * STEP : (j + 1) * STEP] for j in taken], axis=1)
        m[n] = x.max(1)
        total[n] = np.exp2((x - x.max(1, keepdims=True)) * c).sum(1)
    got = np.asarray(jax.jit(merged_lse)(m, total, sequences, c))
    for x, lse in zip(scores, got, strict=True):
        logits = x * c * np.log(2.0)
        want = np.logaddexp.reduce(logits, axis=1) if x.size else np.full(2, -np.inf)
        np.testing.assert_allclose(lse, want, rtol=1e-5, atol=1e-5)


class TestBesideTriton:
    """What needs the kernels for every GPU too."""

    @pytest.fixture(autouse=True)
    def both(self) -> None:
        pytest.importorskip("ejkernel.kernels.triton", reason="it does part of the work")

    @staticmethod
    def decode(
        *shapes: jax.ShapeDtypeStruct, mapped: jax.ShapeDtypeStruct | None = None, **options
    ):
        """The lowered call; ``mapped`` over a ``k_scale`` of so many."""
        from ejkernel.kernels.pallas.gpu.mla_decode.implementation import mla_decode

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
    def shapes(heads: int = 128, page: int = 64, dim: int = 576, dtype=jnp.bfloat16, cache=None):
        ints = [struct(4, dtype=jnp.int32), struct(4, 10, dtype=jnp.int32)]
        pages = struct(40, page, dim, dtype=cache or dtype)
        return struct(4, 2, heads, dim, dtype=dtype), pages, *ints

    def test_lowers_for_a_hopper_gpu(self) -> None:
        text = self.decode(*self.shapes(page=16), return_lse=True)
        assert text.count("custom_call @mosaic_gpu") == 2 and "paged_split" not in text

    @pytest.mark.parametrize(
        ("dtype", "cache"), [("float16", "int8"), ("bfloat16", "float8_e4m3fn")]
    )
    def test_lowers_8_bit_caches(self, dtype: str, cache: str) -> None:
        shapes = self.shapes(dtype=jnp.dtype(dtype), cache=jnp.dtype(cache))
        text = self.decode(*shapes, return_lse=True, k_scale=-0.5)
        assert text.count("custom_call @mosaic_gpu") == 2 and "paged_split" not in text

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

    @pytest.mark.parametrize(("batch", "capacity", "ahead"), [(4, 2048, False), (1, 2**14, True)])
    def test_leads_where_there_is_enough_to_read(self, batch, capacity, ahead, monkeypatch) -> None:
        from ejkernel.kernels.pallas.gpu.mla_decode.implementation import mla_decode

        problem = SimpleNamespace(batch=batch, capacity=capacity)
        monkeypatch.setattr(mla_decode, "problem_of", lambda call: problem)
        assert (mla_decode.priority_for(None) > 100) == ahead
