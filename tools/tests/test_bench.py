"""The measuring stick measures what it says, and refuses what it does not know."""

from __future__ import annotations

import json

import jax
import jax.numpy as jnp
import pytest

from bench import __main__ as command
from bench import report
from bench.case import Case, forward_and_backward
from bench.limits import Limits
from bench.runner import run_case
from bench.shapes import AttentionShape


def small_case() -> Case:
    return Case(
        "small",
        lambda: (jnp.ones((8, 8)), jnp.ones((8, 8))),
        {"ours": jnp.matmul, "peer": lambda a, b: b @ a, "absent": "needs a GPU"},
        1024.0,
        768.0,
        "float32",
        (0, 1),
    )


def test_a_case_becomes_rows_with_ratios(tmp_path):
    limits = Limits({"float32": 1e9}, 1e9)
    rows = run_case(small_case(), "fwd+bwd", limits, rounds=2, target_s=0.001)
    ours, peer, absent = rows
    assert ours.ms > 0 and ours.speed_over["peer"] == pytest.approx(1 / peer.speed_over["ours"])
    # forward and backward together are counted as 3.5 times the forward
    assert ours.tflops == pytest.approx(3.5 * 1024 / (ours.ms * 1e-3) / 1e12)
    assert absent.ms is None and absent.note == "needs a GPU"
    as_json, as_markdown = report.write(rows, limits, "small", tmp_path)
    assert len(json.loads(as_json.read_text())["rows"]) == 3
    assert "not run: needs a GPU" in as_markdown.read_text()


def test_a_failing_contender_is_reported_not_fatal():
    def broken(a, b):
        raise ValueError("no such thing")

    case = small_case()
    case.contenders["peer"] = broken
    rows = run_case(case, "fwd", Limits({"float32": 1e9}, 1e9), rounds=1, target_s=0.001)
    assert rows[0].ms > 0 and "no such thing" in rows[1].note


def test_backward_is_the_vjp_at_the_output():
    x = jnp.arange(4.0)
    out, (grad,) = forward_and_backward(lambda x: x * x, (0,))(x)
    assert jnp.array_equal(grad, 2 * x * out) and isinstance(out, jax.Array)


@pytest.mark.parametrize(
    ("options", "pairs"),
    [
        ({"causal": False}, 64),
        ({}, 36),
        ({"window": 1}, 15),
        ({"documents": 2}, 20),
        ({"causal": False, "kv_len": 4}, 32),
        ({"kv_len": 4}, 26),
    ],
)
def test_visible_pairs_counts_the_mask(options, pairs):
    assert AttentionShape("s", 1, 8, 1, 1, 64, **options).visible_pairs() == pairs


def test_list_and_unknown_names(capsys):
    for op in command.names():
        if op in ("imports", "memory", "overhead"):
            continue
        assert command.main([op, "--list"]) == 0
    assert command.main(["flash_attention", "--cases", "nothing"]) == 2
    assert "there are: cpu-" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        command.main(["no_such_op"])
