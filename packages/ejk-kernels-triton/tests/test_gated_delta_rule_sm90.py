"""The delta rule's kernels in Gluon, run by NumPy, against the float64 recurrence."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

pytest.importorskip("triton")

from ejkernel.kernels.triton import compat, gated_delta_rule
from ejkernel.kernels.triton.targets import compile_for, cuda_target
from ejkernel.ops import interpret_mode
from ejktest.cases.delta import check_delta
from ejktest.cases.delta import delta_arguments as make
from ejktest.cases.linear import cotangents
from ejktest.grids import without

HOPPER = cuda_target(90)

pytestmark = pytest.mark.skipif(not compat.has_gluon(), reason="Gluon is older than the kernels")

CU = np.array([0, 3, 3, 100, 101, 180], np.int32)
CASES = {
    "groups of heads": ("head", dict(s=192, h=2, hk=1, dk=64, dv=64), None, {}),
    "wide": ("head", dict(s=128, h=1, hk=1, dk=128, dv=128), None, {"normalize_qk": True}),
    "reversed": ("head", dict(s=150, h=2, hk=2, dk=64, dv=128), None, {"reverse": True}),
    "packed": ("head", dict(s=200, h=2, hk=1, dk=64, dv=64), CU, {"normalize_qk": True}),
    "channels": ("channel", dict(s=150, h=2, hk=2, dk=64, dv=64), None, {}),
    "wide channels": ("channel", dict(s=300, h=1, hk=1, dk=128, dv=64), None, {}),
    "two slots": ("head", dict(s=300, h=1, hk=1, dk=64, dv=64), None, {"cfg": {"num_stages": 2}}),
    "one slot": ("head", dict(s=300, h=1, hk=1, dk=64, dv=64), None, {"cfg": {"num_stages": 1}}),
    "long": ("head", dict(s=640, h=2, hk=1, dk=64, dv=64), None, {"normalize_qk": True}),
}


def kernels():
    from ejkernel.kernels.triton.gated_delta_rule.reverse_scan_sm90 import scan_gradients_sm90
    from ejkernel.kernels.triton.gated_delta_rule.row_gradients_sm90 import row_gradients_sm90
    from ejkernel.kernels.triton.gated_delta_rule.scan_sm90 import scan_chunks_sm90
    from ejkernel.kernels.triton.gated_delta_rule.scan_with_writer_sm90 import scan_with_writer_sm90

    return scan_chunks_sm90, scan_with_writer_sm90, scan_gradients_sm90, row_gradients_sm90


# late: each kernel, and pipelines that wrap around
@pytest.mark.parametrize(
    ("name", "eager"),
    without(
        [(name, eager) for name in CASES for eager in (True, False)],
        *((name, False) for name in ("groups of heads", "wide", "reversed", "wide channels")),
    ),
)
def test_values_and_gradients(name, eager):
    """Whichever partition of a program runs ahead."""
    from ejktest.gluon_interpreter import interpreted_gluon

    gate, dims, cu, options = CASES[name]
    states = None if cu is None else len(cu) - 1
    args = make(gate, b=1, states=states, dtype=jnp.bfloat16, **dims)

    def apply(args):
        return gated_delta_rule(**args, cu_seqlens=cu, return_state=True, **options)

    running = interpreted_gluon(*kernels(), eager=eager)
    with interpret_mode(), compile_for(HOPPER), running as ran:
        out, back = jax.vjp(apply, args)
        gradients = back(cotangents(*out))[0]
    has_writer = gate == "head" and "cfg" not in options
    scan = "scan_with_writer_sm90" if has_writer else "scan_chunks_sm90"
    of_rows = ["row_gradients_sm90"] if gate == "head" else []
    assert ran == [scan, "scan_gradients_sm90", scan, *of_rows]
    state_dtype = args["query"].dtype
    options = {name: x for name, x in options.items() if name != "cfg"}
    check_delta(args, (*out, gradients), cu_seqlens=cu, state_dtype=state_dtype, **options)


def test_given_tiles_are_taken():
    """Other columns are those of the kernels in Triton."""
    from ejktest.gluon_interpreter import interpreted_gluon

    args = make("head", b=1, s=64, h=1, hk=1, dk=64, dv=64, dtype=jnp.bfloat16)
    for columns, count in ((32, 0), (64, 1)):
        with interpret_mode(), compile_for(HOPPER), interpreted_gluon(*kernels()) as ran:
            gated_delta_rule(**args, cfg={"dv_tile": columns})
        assert len(ran) == count


def test_explain_says_which_kernels_run():
    from ejkernel.kernels.triton.gated_delta_rule.implementation import GLUON, NO_GLUON
    from ejkernel.kernels.triton.gated_delta_rule.problem import Problem

    sizes = {"batch": 1, "rows": 256, "heads": 2, "kv_heads": 2, "value_dim": 64, "sequences": 0}
    options = {"scale": 1.0, "reverse": False, "channel_gates": False, "normalize": False}
    dtypes = dict.fromkeys(("dtype", "out", "narrowest"), "bfloat16")
    for dim, target, notes in (
        (64, cuda_target(90), (GLUON,)),
        (80, cuda_target(90), (NO_GLUON,)),
        (64, cuda_target(80), ()),
    ):
        problem = Problem(dim=dim, **sizes, **options, **dtypes)
        assert gated_delta_rule.notes_on(problem, target) == notes
