"""Calls of flash attention and block-sparse attention."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

from ejktest.abstract import BF16, F32, I32, AbstractCall, Arrays, abstract_call
from ejktest.attention import Call, Pattern

F16 = "float16"

# ---- at a GPU's sizes ----------------------------------------------------------------------------


def _case(
    name: str,
    q: int = 1024,
    k: int | None = None,
    h: int = 4,
    hk: int | None = None,
    d: int = 128,
    *,
    b: int = 2,
    dtype: str = BF16,
    **fields: Any,
) -> Call:
    rules = ("causal", "causal_offset", "sliding_window")
    mask = {rule: fields.pop(rule) for rule in rules if rule in fields}
    dtypes = (dtype, dtype, dtype)
    return Call(name, b, q, k or q, h, hk or h, d, dtypes=dtypes, mask=mask, blocks=None, **fields)


_DENSE = (
    _case("full d128"),
    _case("causal d128", causal=True),
    _case("full d64", d=64),
    _case("causal d64", d=64, causal=True),
    _case("full d256", d=256),
    _case("causal d256", d=256, causal=True),
    _case("odd causal", 1037, causal=True),
    # programs in pairs, blocks of keys that do not divide the length, a block without a partner
    _case("pairs", 2048, dtype="float16"),
    _case("odd pairs", 2150, 3000, hk=2, sinks=(4, 2), dtype="float16"),
    _case("many full blocks", 2048),
    # logits beyond what exponentials without a shift hold: tiles are computed twice
    _case("large logits", 1037, causal=True, scale=8.0),
    _case("large logits d64", 1000, 777, hk=2, d=64, scale=-10.0),
    _case("large logits d256", 700, hk=2, d=256, causal=True, scale=8.0),
    _case("odd causal d256", 1037, hk=2, d=256, causal=True),
    _case("odd full d64", 1000, 777, hk=2, d=64, b=3),
    _case("offset q<k", 300, 1100, d=64, causal=True, causal_offset=800),
    _case("offset -200", d=64, causal=True, causal_offset=-200),
    _case("window", 2048, causal=True, sliding_window=300),
    _case("window both", 1500, d=64, sliding_window=(100, 257)),
    _case("gqa 8:2", h=8, hk=2, causal=True),
    _case("mqa", h=8, hk=1, d=64),
    _case("segments", 2048, causal=True, segments=True),
    _case("d80", d=80, causal=True),
    _case("d96", d=96),
    _case("d80 gqa segments", 1003, 777, hk=2, d=80, causal=True, segments=True),
    _case("d96 gqa odd", 1003, 777, hk=2, d=96, causal=True, sliding_window=(300, 0)),
    _case("d96 cap float16", 777, 1003, hk=2, d=96, dtype=F16, cap=20.0),
    _case("d112 odd", 999, d=112, causal=True),
    _case("d192/128", d=192, dv=128, causal=True),
    _case("d40/24 window", 1003, 777, h=2, d=40, dv=24, sliding_window=(20, 5)),
    _case("d32", d=32),
    _case("sinks", causal=True, sinks=(4, 2)),
    _case("cap", causal=True, cap=30.0),
    _case("sinks cap window", 1030, hk=2, d=64, causal=True, sliding_window=200, cap=20.0,
          sinks=(4, 2)),
    _case("dropout", causal=True, dropout=0.1),
    _case("bias", 1000, 1100, d=64, bias=(1, 4)),
    # rows by TMA that end inside a tile, where the rows of the next head begin
    _case("bias odd rows", 1000, 1096, hk=2, causal=True, bias=(1, 4)),
    _case("bias cap dropout", causal=True, bias=(2, 4), cap=50.0, dropout=0.1),
    _case("bias shared", hk=2, causal=True, bias=(2, 1)),
    _case("dense mask", d=64, dense=True),
    _case("negative scale", 512, d=64, scale=-0.1),
    _case("float16", dtype=F16, causal=True),
    _case("float32", d=64, dtype=F32, causal=True),
    _case("float32 highest", 512, h=2, d=64, b=1, dtype=F32, causal=True, precision="highest"),
    _case("float32 d128", 1000, dtype=F32, causal=True),
    # as many operands as a call can have: their order is the launcher's business
    _case("everything d96", 517, hk=2, d=96, causal=True, segments=True, dense=True, bias=(1, 4),
          sinks=(4, 2), dropout=0.1, cap=9.0),
    _case("one query", 1, 2048, h=8, hk=2, b=4),
    _case("one tile d128", 128, h=1, b=1, causal=True),
    _case("one tile d256", 128, h=1, d=256, b=1),
    _case("many keys", 1024, 20480, h=1, b=1),
    _case("gqa q<k", 512, 1024, h=8, hk=2, b=1),
    _case("odd full d128", 1003, 777, h=2, b=1),
    _case("odd offset d128", 777, 1003, h=2, causal=True, causal_offset=226),
    _case("odd causal d64", 777, 1003, h=2, d=64, causal=True),
    _case("odd full d192/128", 777, 1003, h=2, d=192, dv=128, b=1),
    _case("odd gqa cap d256", 777, 1003, hk=2, d=256, b=1, causal=True, cap=5.0),
    _case("offset -128 d128", 640, 512, h=2, b=1, causal=True, causal_offset=-128),
    _case("offset -128 d256", 640, 512, h=2, d=256, b=1, causal=True, causal_offset=-128),
    _case("window both d128", h=2, b=1, sliding_window=(200, 100)),
    _case("window both d256", h=2, d=256, b=1, dtype=F16, sliding_window=(200, 100)),
    _case("segments full", h=2, b=1, segments=True),
    _case("segments q>k", 1024, 1000, hk=2, causal=True, segments=True),
    _case("segments q>k d256", 1024, 1000, hk=2, d=256, causal=True, segments=True),
    _case("segments cap d64", hk=2, d=64, b=1, causal=True, segments=True, cap=5.0),
)  # fmt: skip
_SPARSE = (
    _case("causal 128", b=1, causal=True, pattern=Pattern(128, 128, 0.3, (1, 4))),
    _case("more than programs", 4096, h=8, b=1, causal=True, pattern=Pattern(128, 128, 0.15, (1,
          8))),
    _case("all seen", b=1, causal=True, pattern=Pattern(128, 128, 2.0, (1, 1))),
    _case("none seen", b=1, causal=True, pattern=Pattern(128, 128, -1.0, (1, 1))),
    _case("32 x 16", b=1, pattern=Pattern(32, 16, 0.2, (1, 4))),
    _case("across, odd", 1000, 777, hk=2, d=64, causal=True, pattern=Pattern(100, 48, 0.4, (1, 4))),
    _case("across in sixteens", 1000, 777, hk=2, d=64, causal=True, pattern=Pattern(96, 48, 0.4,
          (2, 4))),
    _case("64 x 32 window", b=1, sliding_window=(300, 200), pattern=Pattern(64, 32, 0.3, (1, 4))),
    _case("segments cap", 1100, h=8, hk=2, causal=True, segments=True, cap=9.0,
          pattern=Pattern(128, 64, 0.5, (2, 8))),
    _case("sinks over lists", 1000, h=8, hk=2, b=1, causal=True, sliding_window=400, sinks=(8, 2),
          pattern=Pattern(128, 64, 0.4, (1, 8))),
    _case("256 full gqa", 2048, 1536, h=8, hk=2, b=1, pattern=Pattern(256, 256, 0.3, (1, 8))),
    _case("one column", 4096, h=2, d=64, b=1, pattern=Pattern(4096, 128, 0.1, (1, 2))),
    _case("256 d256", hk=2, d=256, b=1, causal=True, pattern=Pattern(256, 256, 0.4, (1, 1))),
    _case("options", hk=2, causal=True, sliding_window=700, segments=True, sinks=(4, 2),
          dropout=0.1, cap=9.0, bias=(1, 4), dense=True, pattern=Pattern(128, 64, 0.5, (2, 4))),
)  # fmt: skip
AT_SIZE = {call.name: call for call in _DENSE}
SPARSE = {call.name: call for call in _SPARSE}


def _small(call: Call, q: int, k: int, h: int, hk: int, **fields: Any) -> Call:
    sinks = None if call.sinks is None else (h, 2)
    return replace(call, b=1, q=q, k=k, h=h, hk=hk, sinks=sinks, **fields)


# the same in a few tiles
SMALL = {
    name: _small(AT_SIZE[name], *sizes, **fields)
    for name, sizes, fields in (
        ("odd causal", (400, 400, 2, 1), {}),
        ("segments q>k", (300, 260, 2, 1), {}),
        ("segments cap d64", (300, 300, 2, 1), {}),
        ("sinks cap window", (330, 330, 2, 1), {"mask": {"causal": True, "sliding_window": 100}}),
        ("pairs", (500, 512, 1, 1), {}),  # programs of a cluster
        ("mqa", (400, 384, 2, 1), {}),  # no masks
        ("odd full d128", (700, 100, 2, 1), {}),  # tiles of one block
        ("large logits", (400, 400, 2, 1), {}),
        ("large logits d64", (500, 300, 2, 1), {}),
        ("odd full d192/128", (200, 330, 2, 1), {}),
        ("odd causal d256", (200, 200, 2, 1), {}),
        ("d96", (300, 200, 2, 1), {}),
        ("d80", (330, 330, 2, 2), {}),
    )
}
SMALL_SPARSE = {
    name: _small(SPARSE[name], *sizes, pattern=Pattern(*pattern))
    for name, sizes, pattern in (
        ("causal 128", (500, 500, 2, 1), (128, 128, 0.6, (1, 2))),
        ("across in sixteens", (290, 330, 2, 1), (96, 48, 0.5, (1, 2))),
        ("none seen", (200, 200, 1, 1), (128, 128, -1.0, (1, 1))),
        ("segments cap", (300, 300, 2, 1), (128, 64, 0.5, (1, 2))),
        ("256 d256", (300, 300, 2, 1), (256, 256, 0.6, (1, 1))),
    )
}

# ---- ahead of time -------------------------------------------------------------------------------


def flash(
    d: int = 128,
    dv: int | None = None,
    *optional: str,
    b: int = 2,
    q: int = 4096,
    h: int = 8,
    kv_heads: int = 8,
    dtype: str = BF16,
    **options: Any,
) -> AbstractCall:
    """Returns a call of flash attention with these ``optional`` arrays, or over a pattern."""
    sizes = {"batch": b, "q_len": q, "heads": h, "kv_heads": kv_heads, "head_dim": d}
    blocks = (-(-q // options.get(side, 128)) for side in ("q_block_size", "kv_block_size"))
    shapes: Arrays = {
        "bias": ((1, h, q, q), dtype),
        "softmax_aux": ((h, 1), F32),
        "segments": ((b, q), I32),
        "block_mask": ((1, h, *blocks), "bool"),
        "attention_mask": ((b, 1, q, q), "bool"),
    }
    operation = "blocksparse_attention" if "block_mask" in optional else "flash_attention"
    return abstract_call(
        operation,
        sizes if dv is None else {**sizes, "v_dim": dv},
        arrays={name: shapes[name] for name in optional},
        dtype=dtype,
        trained=True,
        options=options,
    )


_causal = partial(flash, causal=True)
COMPILED = {
    "d64": _causal(64),
    "d80": _causal(80),
    "d96": _causal(96),
    "d128": _causal(),
    "d192/128": _causal(192, 128),
    "d256": _causal(256),
    "full": _causal(causal=False),
    "short": _causal(q=64),
    "gqa": _causal(kv_heads=2),
    "window gqa": _causal(kv_heads=2, sliding_window=1024),
    "segments": _causal(128, None, "segments"),
    "dense": _causal(128, None, "attention_mask", causal=False),
    "sparse": _causal(128, None, "block_mask"),
    "sparse d64": _causal(64, None, "block_mask"),
    "sparse 64": _causal(256, None, "block_mask", q_block_size=64, kv_block_size=64),
    "sparse 32": _causal(128, None, "block_mask", q_block_size=32, kv_block_size=32),
    "cap sinks": _causal(128, None, "softmax_aux", logits_soft_cap=30.0),
    "dropout": _causal(dropout_prob=0.1),
    "bias": _causal(128, None, "bias"),
    "bias d256": _causal(256, None, "bias"),
    "float32": _causal(64, dtype=F32),
    "float32 d128": _causal(dtype=F32),
    "float32 highest": _causal(dtype=F32, precision="highest"),
}


def eight_bit(d: int = 128, *, blocks: int = 0, **options: Any) -> AbstractCall:
    """Returns a call of 8-bit operands, with a scale for each head or for each of its blocks."""
    rank = (2, 3)[bool(blocks)]
    sizes = {"batch": 2, "q_len": 4096, "heads": 8, "kv_heads": 2, "head_dim": d}
    shapes = {"q_scale": (2, 8, blocks), "k_scale": (2, 2, blocks), "v_scale": (2, 2)}
    scales: Arrays = {name: (shape[:rank], F32) for name, shape in shapes.items()}
    return abstract_call(
        "flash_attention", sizes, arrays=scales, dtype="float8_e4m3fn", options=options
    )


EIGHT_BIT = {
    "8 bits": eight_bit(),
    "8 bits causal blocks": eight_bit(causal=True, blocks=32),
    "8 bits d64": eight_bit(64, causal=True),
    "8 bits d256": eight_bit(256),
}
_on_tpu = partial(flash, b=4, h=16, kv_heads=16)  # too much for VMEM, so that arrays stay in HBM
COMPILED_TPU = {
    "d64": _on_tpu(64),
    "d128": _on_tpu(),
    "d256": _on_tpu(256),
    "joined heads": _on_tpu(cfg={"joins_heads": True}),
    "d192 values 128": _on_tpu(192, 128),
    "causal gqa": _on_tpu(kv_heads=4, causal=True),
    "window offset": _on_tpu(sliding_window=(1024, 0), causal_offset=64),
    "segments causal": _on_tpu(128, None, "segments", causal=True),
    "cap sinks": _on_tpu(128, None, "softmax_aux", logits_soft_cap=30.0, causal=True),
    "length 1000": _on_tpu(q=1000, causal=True),
    "length 72 d80": _on_tpu(80, q=72),
    "float32": _on_tpu(dtype=F32, causal=True),
    "float32 highest": _on_tpu(dtype=F32, precision="highest"),
    "float32 d256": _on_tpu(256, dtype=F32),
    "sparse": _on_tpu(128, None, "block_mask", causal=True),
    "sparse 512": _on_tpu(64, None, "block_mask", q_block_size=512, kv_block_size=512),
}
