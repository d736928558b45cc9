"""Random calls: they follow from a seed, are legal, and a wrong result is found."""

from __future__ import annotations

import itertools
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import ejktest.random_calls
from ejkernel import modules
from ejktest.random_calls import DRAWN, random_call
from ejktest.variants import SPECS
from gpu import call_outcomes, random_calls


@pytest.mark.parametrize("operation", DRAWN)
def test_calls_follow_from_seeds(operation):
    first, second = (random_call(operation, 7, 3) for _ in range(2))
    assert str(first) == str(second) != str(random_call(operation, 8, 3))
    for a, b in zip(jax.tree.leaves(first.arrays), jax.tree.leaves(second.arrays), strict=True):
        assert np.asarray(a).tobytes() == np.asarray(b).tobytes()


CLIPPED = {"ragged_decode_attention", "grouped_matmul"}
"""Bounds and groups of these may lie outside of their arrays."""
COMPOSED = {"quantize_attention", "merge_attention"}


@pytest.mark.parametrize("operation", sorted({*DRAWN} - COMPOSED - CLIPPED))
def test_calls_are_legal(operation):
    for number in range(8):
        call = random_call(operation, 1, number)
        modules.check_call(operation, **call.arrays, **call.static)


OMITTED = {"dtype", "softmax_dtype", "logits_dtype", "init_bias", "mask_builder"}
"""Arguments that cast others, or make what another argument is."""


def test_every_argument_of_every_operation_is_drawn():
    folder = Path(ejktest.random_calls.__file__).parent
    source = "".join(path.read_text() for path in folder.glob("*.py"))
    assert {*SPECS} - {*DRAWN} == {"ring_attention"}  # which needs several devices
    names = {name for operation in {*DRAWN} - COMPOSED for name in SPECS[operation].boundary.names}
    assert {name for name in names - OMITTED if f'"{name}"' not in source} == set()


def outcomes(*call, platforms=("xla",)):
    return list(call_outcomes.outcomes_of(*call, platforms))


def test_a_platform_is_compared_with_float64():
    pytest.importorskip("triton")
    first, second = outcomes("mean_pooling", 0, 2, platforms=("xla", "triton"))
    assert (first.platform, second.platform) == ("xla", "triton")
    assert {first.outcome, second.outcome} == {"passed"}
    assert 0 < first.share < 1


@pytest.mark.parametrize("operation", ["grouped_matmul", "causal_conv1d", "mean_pooling"])
def test_the_reference_is_compared_with_the_oracle(monkeypatch, operation):
    (outcome,) = outcomes(operation, 0, 0, platforms=("numpy",))
    assert outcome.outcome == "passed", outcome.reason
    reference = call_outcomes.reference

    def wrong(call):
        return {name: x * (1 + 1e-8) for name, x in reference(call).items()}

    monkeypatch.setattr(call_outcomes, "reference", wrong)
    (outcome,) = outcomes(operation, 0, 0, platforms=("numpy",))
    assert outcome.outcome == "failed" and "of the bound" in outcome.reason


def unset(out):
    return out.at[..., -1].set(jnp.nan)


def too_far_off(out):
    return out.at[0, 0, 0].add(1.0)


def unrepeatable(out):
    number = jax.pure_callback(lambda: np.float32(next(NUMBERS)), F32)
    return out * (1 + 1e-6 * number)


def broken(out):
    raise ValueError("block_q: given 0")


NUMBERS = itertools.count()
F32 = jax.ShapeDtypeStruct((), np.float32)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (unset, "entries are NaN or infinite, first at"),
        (too_far_off, "of the bound"),
        (unrepeatable, "another run has other bits: output 0"),
        (broken, "ValueError: block_q: given 0"),
    ],
)
def test_what_is_wrong_is_a_failure(monkeypatch, capsys, change, reason):
    function_of = call_outcomes.function_of

    def changed(call, platform):
        right = function_of(call, platform)
        is_reference = call.arrays["x"].dtype == np.float64
        return right if is_reference else lambda **arrays: change(right(**arrays))

    monkeypatch.setattr(call_outcomes, "function_of", changed)
    (outcome,) = outcomes("mean_pooling", 0, 2)
    assert outcome.outcome == "failed" and reason in outcome.reason
    table = random_calls.Table(seed=0)
    table.add(outcome)
    row = list(table.lines())[1].split()
    assert table.failed == 1 and row[:5] == ["mean_pooling", "xla", "1", "0", "1"]
    assert "FAILED --seed 0 --only mean_pooling:2 --platform xla" in capsys.readouterr().out


def test_a_process_that_dies_is_a_failure_and_replaced():
    """The first of two calls has no operation."""
    done = random_calls.run_calls(
        random_calls.Work(("no_such_operation", "merge_attention"), 0, ("xla",), 1, 0), 1, 60
    )
    assert done.cells["no_such_operation", "any"]["failed"] == 1
    assert done.cells["merge_attention", "xla"]["passed"] == 1


@pytest.mark.parametrize(
    "options",
    [["--only", "mean_pooling:x"], ["--only", "mean_pooling:-1"], ["--processes", "0"]],
)
def test_options_that_it_cannot_use(options, capsys):
    with pytest.raises(SystemExit):
        random_calls.main(options)
    assert options[0] in capsys.readouterr().err
