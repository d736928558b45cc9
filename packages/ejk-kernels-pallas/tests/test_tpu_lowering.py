"""TPU kernels lower for every chip on any machine; where libtpu is installed they compile too."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest
from jax import export

from ejkernel.kernels.pallas.tpu.common.chip import current_chip, get_chip, on_chip
from ejkernel.kernels.pallas.tpu.flash_attention import tiles
from ejkernel.kernels.pallas.tpu.flash_attention.implementation import flash_attention
from ejkernel.types import MaskInfo
from ejkernel.types.attention.problem import Problem
from ejktest.bound import bound
from ejktest.grids import without

CHIPS = {
    "v4": "TPU v4",
    "v5e": "TPU v5 lite",
    "v5p": "TPU v5",
    "v6e": "TPU v6 lite",
    "tpu7x": "TPU7x",
}
ROOT = Path(__file__).resolve().parents[3]


def shapes(dim: int, length: int = 1024, dtype: str = "bfloat16") -> list[jax.ShapeDtypeStruct]:
    return [jax.ShapeDtypeStruct((1, length, h, dim), dtype) for h in (4, 2, 2)]


def gradients(**options):
    def loss(q, k, v, segments):
        mask = MaskInfo(q_segment_ids=segments, kv_segment_ids=segments)
        o = flash_attention(q, k, v, mask_info=mask, **options)
        return o.astype(jnp.float32).sum()

    return jax.grad(loss, (0, 1, 2))


@pytest.mark.parametrize("chip", without(CHIPS, "v4", "v5p"))
def test_lowers_to_mosaic_kernels(chip):
    """Forward and gradients become Mosaic kernels, under a mask of every kind."""
    ids = jax.ShapeDtypeStruct((1, 1000), "int32")
    options = {"causal": True, "sliding_window": (300, 0), "logits_soft_cap": 30.0}
    for cfg, kernels in ((None, 2), ({"fuses_gradients": False}, 3)):
        with on_chip(CHIPS[chip]):
            made = export.export(jax.jit(gradients(cfg=cfg, **options)), platforms=["tpu"])(
                *shapes(128, 1000), ids
            )
        assert made.mlir_module().count("tpu_custom_call") == kernels


@pytest.mark.parametrize(("policy", "kernels"), [("named", 2), ("nothing_saveable", 3)])
def test_named_residuals_keep_the_forward_kernel_from_running_twice(policy, kernels):
    policies = jax.checkpoint_policies
    named = policies.save_only_these_names("ejkernel_out", "ejkernel_lse")
    policy = named if policy == "named" else getattr(policies, policy)

    def layer(q, k, v):
        o = flash_attention(jnp.sin(q), k, v, causal=True)
        return jnp.sum(jnp.sin(o.astype(jnp.float32)))

    gradient = jax.jit(jax.value_and_grad(jax.checkpoint(layer, policy=policy), (0, 1, 2)))
    with on_chip(CHIPS["v5e"]):
        made = export.export(gradient, platforms=["tpu"])(*shapes(128))
    assert made.mlir_module().count("tpu_custom_call") == kernels


@pytest.mark.parametrize("chip", CHIPS)
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("dim", [64, 128, 256])
def test_tiles_fit(chip, dtype, dim):
    """Tiles fit into vector memory, and blocks waste at most an eighth of it."""
    params = get_chip(CHIPS[chip])
    for length in (1, 129, 640, 1000, 4096, 5000):
        p = Problem(1, length, length, 4, 4, dim, dim, dtype, 1.0)
        for choose, accumulators in (
            (tiles.forward_tiles, 1),
            (tiles.dq_tiles, 1),
            (tiles.dkv_tiles, 2),
            (tiles.fused_tiles, 2),
        ):
            t = choose(p, params)
            if t is None:  # two kernels run
                assert 2 * tiles.query_bytes(p, length) > params.vmem * 3 // 4
                continue
            block = t.block_kv if accumulators == 2 else t.block_q
            needed = t.vmem(p, block, accumulators)
            if choose is tiles.fused_tiles:
                needed += tiles.query_bytes(p, -(-length // t.block_q) * t.block_q)
                needed += tiles.strip_bytes(t.block_q)
            assert needed <= params.vmem, (length, t)
            assert block % t.rows == 0 and t.rows % tiles.LANES == 0
            rounded = -(-length // tiles.LANES) * tiles.LANES
            for block in (t.block_q, t.block_kv):
                assert -(-length // block) * block * 8 <= rounded * 9


def call(*arrays, **options):
    """Returns a call as the registry hands it to the hooks."""
    names = ("query", "key", "value")
    return bound(flash_attention.call, **dict(zip(names, arrays, strict=True)), **options)


def test_hooks_follow_the_chip():
    request = call(*shapes(128, 4096))
    with on_chip(CHIPS["v5e"]):
        assert flash_attention.supports(request) is None
        assert current_chip().mxu == 128
        first = flash_attention.heuristic(request)
        found = flash_attention.candidates(request)
    assert found[0] == first and len(found) > 3
    sizes = [n for c in found for part in c.values() for n in part.values()]
    assert all(128 <= n <= 1024 and n & (n - 1) == 0 for n in sizes)


def test_reasons_name_the_argument():
    q, k, v = shapes(128)
    with on_chip(CHIPS["v6e"]):
        assert "bias" in (
            flash_attention.supports(
                call(q, k, v, bias=jax.ShapeDtypeStruct((1, 1, 1024, 1024), "float32"))
            )
            or ""
        )
        dense = jax.ShapeDtypeStruct((1, 1, 1024, 1024), "bool")
        assert "dense" in (flash_attention.supports(call(q, k, v, attention_mask=dense)) or "")
        padding = jax.ShapeDtypeStruct((1, 1024), "bool")
        assert flash_attention.supports(call(q, k, v, attention_mask=padding)) is None
        with jax.enable_x64(True):
            assert "jax_enable_x64" in (flash_attention.supports(call(q, k, v)) or "")
    assert "TPU" in (flash_attention.supports(call(q, k, v)) or "")


COMPILED = (
    *("d64", "causal gqa", "float32 d256", "grouped odd", "grouped int8", "ragged read mqa"),
    *("ragged tree", "latent tree"),
)
# all on one generation, each on one of the other chips as well
OTHER_CHIPS = [chip for chip in CHIPS if chip != "v5e"]
COMPILED_ON = {"v5e": COMPILED}
COMPILED_ON |= {chip: COMPILED[i :: len(OTHER_CHIPS)] for i, chip in enumerate(OTHER_CHIPS)}


@pytest.mark.skipif(
    importlib.util.find_spec("libtpu") is None, reason="libtpu, TPU's compiler, is not installed"
)
@pytest.mark.parametrize("chip", CHIPS)
def test_shipped_calls_compile(chip):
    """Some shipped calls, by TPU's own compiler; all of them: tools/tpu/check_tpu.py."""
    script = ROOT / "tools/tpu/check_tpu.py"
    if not script.exists():
        pytest.skip("tools/tpu is not part of this checkout")
    command = [sys.executable, script, "--child", "compile", "--chips", chip, "--calls"]
    calls = COMPILED_ON[chip]
    done = subprocess.run(
        [*map(str, command), *calls],
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    rows = json.loads(done.stdout.splitlines()[-1])
    assert len(rows) >= len(calls) and not [row for row in rows if "error" in row]
