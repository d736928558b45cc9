"""Kernels whose cost the TPU check counts: ours, and JAX's own."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

from ejkernel.kernels import pallas
from ejktest.cases.attention import flash

BATCH, HEADS, LENGTH = 4, 16, 4096
_flash = partial(flash, b=BATCH, h=HEADS, kv_heads=HEADS, q=LENGTH)


@dataclass(frozen=True)
class Cost:
    """A kernel whose steady code is counted: ``matmuls`` matmuls of ``pairs`` by ``dim`` a tile.

    ``function`` takes q, k, v ``[b, h, s, d]`` (``[b, s, h, d]`` for ours).
    """

    who: str
    kernel: str
    tiles: str
    pairs: int
    matmuls: int
    function: Callable[..., Any]
    shapes: tuple[Any, ...]


KERNELS = {"fwd": 2, "dq": 3, "dkv": 4}  # matmuls of a tile


def ours(dim: int) -> Iterator[Cost]:
    from ejkernel.kernels.pallas.tpu.common.chip import current_chip
    from ejkernel.kernels.pallas.tpu.flash_attention import tiles
    from ejkernel.types.attention.problem import Problem

    call = _flash(dim)
    forward, backward = call.forward(pallas), call.backward(pallas)
    sizes: dict[str, Any] = dict(
        batch=BATCH, q_len=LENGTH, kv_len=LENGTH, heads=HEADS, kv_heads=HEADS
    )
    problem = Problem(**sizes, dim=dim, value_dim=dim, dtype="bfloat16", scale=1.0)
    choices = {"fwd": tiles.forward_tiles, "dq": tiles.dq_tiles, "dkv": tiles.dkv_tiles}
    for kernel, matmuls in KERNELS.items():
        t = choices[kernel](problem, current_chip())
        text = f"{t.block_q}x{t.block_kv}/{t.rows}"
        function = forward if kernel == "fwd" else backward
        name = f"ejkernel_flash_{kernel}"
        yield Cost("ejkernel", name, text, t.block_q * t.block_kv, matmuls, function, call.shapes())


def jax_flash(dim: int, block: int) -> Iterator[Cost]:
    import jax
    from jax.experimental.pallas.ops.tpu import flash_attention as fa

    shape = jax.ShapeDtypeStruct((BATCH, HEADS, LENGTH, dim), "bfloat16")
    names = [f for f in fa.BlockSizes.__dataclass_fields__ if f != "block_b"]
    blocks = fa.BlockSizes(block_b=1, **dict.fromkeys(names, block))

    def forward(q: Any, k: Any, v: Any) -> Any:
        return fa.flash_attention(q, k, v, sm_scale=dim**-0.5, block_sizes=blocks)

    yield from _others("jax flash", _FLASH, forward, block, (shape,) * 3)


def jax_splash(dim: int, block: int) -> Iterator[Cost]:
    import jax
    from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel as sk
    from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_mask as sm

    shape = jax.ShapeDtypeStruct((BATCH, HEADS, LENGTH, dim), "bfloat16")
    names = [f for f in sk.BlockSizes.__dataclass_fields__ if f.startswith("block_")]
    blocks: dict[str, Any] = dict.fromkeys(names, block)
    mask = sm.MultiHeadMask([sm.FullMask((LENGTH, LENGTH))] * HEADS)
    kernel = sk.make_splash_mha(
        mask, block_sizes=sk.BlockSizes(**blocks), head_shards=1, q_seq_shards=1
    )

    def forward(q: Any, k: Any, v: Any) -> Any:
        return jax.vmap(kernel)(q * dim**-0.5, k, v)

    yield from _others("jax splash", _SPLASH, forward, block, (shape,) * 3)


_FLASH = {"fwd": "flash_attention", "dq": "flash_mha_bwd_dq", "dkv": "flash_mha_bwd_dkv"}
_SPLASH = {"fwd": "splash_mha_fwd", "dq": "splash_mha_dq", "dkv": "splash_mha_dkv"}


def _others(
    who: str, names: dict[str, str], forward: Any, block: int, shapes: tuple
) -> Iterator[Cost]:
    import jax

    def gradients(*arrays: Any) -> Any:
        return jax.grad(lambda *x: forward(*x).astype("float32").sum(), (0, 1, 2))(*arrays)

    for kernel, matmuls in KERNELS.items():
        function = forward if kernel == "fwd" else gradients
        text = f"{block}x{block}"
        yield Cost(who, names[kernel], text, block * block, matmuls, function, shapes)
