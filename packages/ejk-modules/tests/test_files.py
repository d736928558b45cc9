"""Recorded calls of the operations: what they hold is declared, in whatever process reads them."""

from __future__ import annotations

import sys

import jax
import jax.numpy as jnp

from ejkernel.modules._table import operation_class
from ejkernel.ops import load_invocations, save_invocations
from ejkernel.ops.core.abstract import bind_abstract
from ejkernel.ops.core.invocation import call_invocation
from ejkernel.ops.utils import known
from ejkernel.types import MaskInfo


def test_recorded_calls_come_back_where_only_ops_was_imported(tmp_path, monkeypatch):
    x = jax.ShapeDtypeStruct((1, 32, 2, 16), jnp.bfloat16)
    ids = jax.ShapeDtypeStruct((1, 32), jnp.int32)
    mask = MaskInfo.from_segments(ids).apply_causal()
    given = {"mask_info": mask, "precision": jax.lax.Precision.HIGHEST, "platform": "xla"}
    kernel = operation_class("flash_attention").shared()
    inv = bind_abstract(call_invocation(kernel, (x, x, x), given))
    path = tmp_path / "calls.json"
    assert save_invocations(path, [inv]) == 1
    # in place: what the import below declares stays declared for the tests that follow
    for declared in (known._classes, known._offers):
        for name in [n for n in declared if n.startswith(("ejkernel.modules", "ejkernel.types"))]:
            monkeypatch.delitem(declared, name)
    monkeypatch.delitem(sys.modules, "ejkernel.modules._declared", raising=False)
    (found,) = load_invocations(path)
    assert found.kernel is kernel and found.key == inv.key
    assert found.abstract_kwargs["mask_info"].causal
