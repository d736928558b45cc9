"""The calls that the TPU check compiles: ours in every shipped shape, and JAX's kernels."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

BATCH, HEADS, LENGTH = 4, 16, 4096  # too much for VMEM, so that arrays stay in HBM


@dataclass(frozen=True)
class Call:
    """One call of ours: sizes, dtype, options."""

    name: str
    dim: int = 128
    value_dim: int | None = None
    kv_heads: int = HEADS
    length: int = LENGTH
    dtype: str = "bfloat16"
    options: dict[str, Any] = field(default_factory=dict)
    segments: bool = False

    def shapes(self) -> tuple[Any, ...]:
        import jax

        dv = self.value_dim or self.dim
        found = [
            jax.ShapeDtypeStruct((BATCH, self.length, heads, dim), self.dtype)
            for heads, dim in ((HEADS, self.dim), (self.kv_heads, self.dim), (self.kv_heads, dv))
        ]
        if "sinks" in self.name:
            found.append(jax.ShapeDtypeStruct((HEADS, 1), "float32"))
        if self.segments:
            found.append(jax.ShapeDtypeStruct((BATCH, self.length), "int32"))
        return tuple(found)

    def forward(self, q: Any, k: Any, v: Any, *more: Any) -> Any:
        from ejkernel.kernels.pallas.tpu.flash_attention.implementation import flash_attention
        from ejkernel.types import MaskInfo

        rest = list(more)
        options = dict(self.options)
        if "sinks" in self.name:
            options["softmax_aux"] = rest.pop(0)
        if self.segments:
            ids = rest.pop(0)
            options["mask_info"] = MaskInfo.from_segments(ids)
        return flash_attention(q, k, v, **options)

    def gradients(self, q: Any, k: Any, v: Any, *more: Any) -> Any:
        import jax

        def loss(*given: Any) -> Any:
            return self.forward(*given, *more).astype("float32").sum()

        return jax.grad(loss, (0, 1, 2))(q, k, v)


CALLS = (
    Call("d64", dim=64),
    Call("d128"),
    Call("d256", dim=256),
    Call("d192 values 128", dim=192, value_dim=128),
    Call("causal gqa", kv_heads=4, options={"causal": True}),
    Call("window offset", options={"sliding_window": (1024, 0), "causal_offset": 64}),
    Call("segments causal", segments=True, options={"causal": True}),
    Call("cap sinks", options={"logits_soft_cap": 30.0, "causal": True}),
    Call("length 1000", length=1000, options={"causal": True}),
    Call("length 72 d80", length=72, dim=80),
    Call("float32", dtype="float32", options={"causal": True}),
    Call("float32 highest", dtype="float32", options={"precision": "highest"}),
    Call("float32 d256", dim=256, dtype="float32"),
)


@dataclass(frozen=True)
class Cost:
    """A kernel whose steady code is counted: one tile of ``pairs`` by ``products`` times ``dim``.

    ``function`` takes q, k, v ``[b, h, s, d]`` (``[b, s, h, d]`` for ours).
    """

    who: str
    kernel: str
    tiles: str
    pairs: int
    products: int
    function: Callable[..., Any]
    shapes: tuple[Any, ...]


KERNELS = {"fwd": 2, "dq": 3, "dkv": 4}  # products of a tile


def ours(dim: int) -> Iterator[Cost]:
    from ejkernel.kernels.pallas.tpu.common.chip import current_chip
    from ejkernel.kernels.pallas.tpu.flash_attention import tiles
    from ejkernel.types.problem import Problem

    call = Call("cost", dim=dim)
    sizes: dict[str, Any] = dict(
        batch=BATCH, q_len=LENGTH, kv_len=LENGTH, heads=HEADS, kv_heads=HEADS
    )
    problem = Problem(**sizes, dim=dim, value_dim=dim, dtype="bfloat16", scale=1.0)
    choices = {"fwd": tiles.forward_tiles, "dq": tiles.dq_tiles, "dkv": tiles.dkv_tiles}
    for kernel, products in KERNELS.items():
        t = choices[kernel](problem, current_chip())
        text = f"{t.block_q}x{t.block_kv}/{t.rows}"
        function = call.forward if kernel == "fwd" else call.gradients
        name = f"ejkernel_flash_{kernel}"
        yield Cost(
            "ejkernel", name, text, t.block_q * t.block_kv, products, function, call.shapes()
        )


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

    def gradients(*given: Any) -> Any:
        return jax.grad(lambda *x: forward(*x).astype("float32").sum(), (0, 1, 2))(*given)

    for kernel, products in KERNELS.items():
        function = forward if kernel == "fwd" else gradients
        text = f"{block}x{block}"
        yield Cost(who, names[kernel], text, block * block, products, function, shapes)
