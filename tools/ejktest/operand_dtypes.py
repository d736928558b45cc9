"""Calls that give an operation each of its operands in every dtype that its signature names.

The operands, their axes and their dtypes are read from the operation's ``Call``, so that a new
operand is tried without being listed here. A call has the required operands in bfloat16 and one
operand in another dtype; an optional operand is given alone, and with others where a ``Path`` says
so, because kernels compute differently where other operands are absent.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from ejkernel.types.calls.spec import Call
from ejktest.abstract import FLOATS, PREFERRED, AbstractCall, Arrays, accepted_dtypes, shape_of

UNIFORM = "all floats"
SIZES = {
    "batch": 2, "heads": 4, "kv_heads": 2, "combined_kv_heads": 4, "q_len": 32, "kv_len": 32,
    "seq": 64, "tokens": 24, "sequences": 3, "sequences_plus_1": 4, "states": 2, "pages": 8,
    "page_size": 16, "max_blocks": 4, "table_entries": 12, "q_blocks": 1, "kv_blocks": 1,
    "rows": 64, "columns": 64, "channels": 16, "groups": 3, "all_groups": 3, "inner": 64,
    "head_dim": 64, "v_dim": 64, "key_dim": 64, "nope_dim": 48, "rope_dim": 16, "q_dim": 64,
    "latent": 32, "padded_head_dim": 128, "sinks": 2, "selected": 2,
    "width": 4, "history": 3, "max_new": 4,
}  # fmt: skip


@dataclass(frozen=True)
class Path:
    """Arguments of calls besides the required operands.

    Attributes:
        sizes: of axes, where they differ from ``SIZES``.
        options: static arguments.
        optional: optional operands that every call has.
        dtypes: of operands, where they differ from ``PREFERRED``.
        forms: of operands that have several forms: the number of the one that they take.
        varied: the operands whose dtypes are tried, ``UNIFORM`` for all floats together; none: all
            of these.
    """

    sizes: Mapping[str, int] = field(default_factory=dict)
    options: Mapping[str, Any] = field(default_factory=dict)
    optional: tuple[str, ...] = ()
    dtypes: Mapping[str, str] = field(default_factory=dict)
    forms: Mapping[str, int] = field(default_factory=dict)
    varied: tuple[str, ...] = ()

    def __or__(self, other: Path) -> Path:
        return Path(
            {**self.sizes, **other.sizes},
            {**self.options, **other.options},
            (*self.optional, *other.optional),
            {**self.dtypes, **other.dtypes},
            {**self.forms, **other.forms},
            self.varied,
        )


_ONE_SEQUENCE = {"batch": 1, "states": 3}
# the form [batch, q_len, heads, cache_dim] of latent queries: one row sees all tokens before it
_SEVERAL_ROWS = Path(forms={"query": 1})
# what a call needs so that it may have an operand
NEEDED = {
    "b_q": Path({"q_dim": SIZES["nope_dim"]}),
    "block_counts": Path(options={"max_block_count": 2}),
    "cu_seqlens": Path(_ONE_SEQUENCE),
    "cum_seqlens_k": Path(_ONE_SEQUENCE, optional=("cum_seqlens_q",)),
    "cum_seqlens_q": Path(_ONE_SEQUENCE, optional=("cum_seqlens_k",)),
    "dropout_seed": Path(options={"dropout_prob": 0.1}),
    "g_swa": Path(options={"sliding_window": 8}),
    "positions": _SEVERAL_ROWS,
    "rhs_scale": Path(dtypes={"rhs": "int8"}),
    "tree_mask": _SEVERAL_ROWS,
}
_DECAYS = ("g", "g_gamma")
_PER_HEAD = {"g": 1}  # the form [batch, seq, heads]
_TOKEN = {"seq": 1}
_LINEAR = (Path(), Path(_TOKEN))
_LINEAR_GATES = (
    *_LINEAR,
    *(Path(sizes, optional=_DECAYS, forms=_PER_HEAD, varied=_DECAYS) for sizes in ({}, _TOKEN)),
    # states too large for one program
    Path({"key_dim": 256, "v_dim": 256}, optional=("g",), forms=_PER_HEAD, varied=(UNIFORM, "g")),
)
_SCALES = ("k_scale", "v_scale")  # of 8-bit caches, which other operands do not depend on
_LAYER = Path(options={"layer_idx": 1, "num_layers": 4})
_LATENT = Path({"cache_dim": 576, "page_size": 64}, {"latent_dim": 512})
# ways through the kernels of an operation, where there is more than one or it has static arguments
PATHS = {
    "flash_attention": (Path(), Path({"q_len": 1})),
    "gated_delta_rule": (
        *_LINEAR,
        # more programs than Hopper has cores: its own reverse scan
        Path({"batch": 64}, varied=(UNIFORM,)),
    ),
    "gla_attention": _LINEAR_GATES,
    "lightning_attention": tuple(path | _LAYER for path in _LINEAR),
    "mean_pooling": (
        Path(options={"chunk_size": 16}, forms={"x": 0, "attention_mask": 0}),
        Path(optional=("cu_seqlens",), forms={"x": 1, "attention_mask": 1}),
        # groups so long that several programs add their parts
        Path({"seq": 4096}, forms={"x": 0, "attention_mask": 0}),
    ),
    "mla_attention": (Path(optional=("b_k",)),),
    "mla_decode": (
        _LATENT,
        _LATENT | Path(optional=("k_scale",), dtypes={"latent_cache": "int8"}),
    ),
    "native_sparse_attention": (Path(options={"block_size": 16, "block_counts": 2}),),
    "page_attention": (
        Path(),
        Path(
            optional=_SCALES,
            dtypes={"key_cache": "int8", "value_cache": "int8"},
            varied=(UNIFORM, *_SCALES),
        ),
    ),
    "ragged_page_attention": (
        Path(),
        Path(optional=_SCALES, dtypes={"kv_pages": "int8"}, varied=(UNIFORM, *_SCALES)),
        Path({"tokens": 3}, varied=("queries",)),  # few rows: one launch
    ),
    "ragged_page_attention_v3": (
        Path(),
        Path(optional=_SCALES, dtypes={"kv_cache": "int8"}, varied=(UNIFORM, *_SCALES)),
        *(
            Path(optional=_SCALES, dtypes={"kv_cache": dtype}, varied=("keys", "values"))
            for dtype in ("float8_e4m3fn", "float8_e5m2")
        ),
    ),
    "recurrent_attention": _LINEAR_GATES,
}


@dataclass(frozen=True)
class DtypeCase:
    """A call in which ``operand``, in the form ``axes``, has ``dtype``."""

    operand: str
    axes: str
    dtype: str
    called: AbstractCall

    @property
    def name(self) -> str:
        return f"{self.called.operation}: {self.operand}[{self.axes}] {self.dtype}"


def dtype_cases(call: type[Call]) -> Iterator[DtypeCase]:
    """Every operand of an operation, in every form and dtype, on each of its paths."""
    operands = {p.name: accepted_dtypes(p) for p in call.boundary.array_parameters}

    def shape(name: str, axes: str, dtype: str, path: Path) -> tuple[int, ...]:
        sizes = {**SIZES, **path.sizes}
        # a packed cache holds its heads in words of 32 bits
        sizes["packing"] = max(1, 4 // np.dtype(dtype).itemsize)
        sizes["packed_kv_heads"] = sizes["combined_kv_heads"] // sizes["packing"]
        return shape_of(call.name, name, axes, sizes)

    def case(path: Path, operand: str, axes: str, dtype: str) -> DtypeCase:
        arrays: Arrays = {}
        for name, forms in operands.items():
            if name == operand:
                arrays[name] = shape(name, axes, dtype, path), dtype
            elif name in call.boundary.required or name in path.optional:
                form, dtypes = list(forms.items())[path.forms.get(name, 0)]
                usual = path.dtypes.get(name) or next(d for d in PREFERRED if d in dtypes)
                if operand == UNIFORM and usual in FLOATS:
                    usual = dtype
                arrays[name] = shape(name, form, usual, path), usual
        options = {name: x for name, x in path.options.items() if name not in arrays}
        return DtypeCase(operand, axes, dtype, AbstractCall(call.name, arrays, options))

    for path in PATHS.get(call.name, (Path(),)):
        for operand in path.varied or (UNIFORM, *operands):
            needed = path | NEEDED.get(operand, Path())
            forms = {"": FLOATS} if operand == UNIFORM else operands[operand]
            for number, (axes, dtypes) in enumerate(forms.items()):
                if number == needed.forms.get(operand, number):
                    yield from (case(needed, operand, axes, dtype) for dtype in dtypes)
