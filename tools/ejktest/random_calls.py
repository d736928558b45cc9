"""Random calls of every operation: odd shapes, all dtypes, any options together.

A call follows from a seed, its operation and a number alone. Its values are numpy arrays; memory
that no token may see is NaN in half of the calls.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ejkernel.types import MaskInfo
from ejktest.drawn import grow_tree, wild_tables

LENGTHS = (1, 2, 7, 31, 64, 65, 129, 200, 333)
LONG = 1000
HEADS = (
    (1, 1),
    (2, 1),
    (3, 1),
    (5, 1),
    (8, 1),
    (16, 1),
    (2, 2),
    (3, 3),
    (4, 2),
    (6, 2),
    (6, 3),
    (8, 8),
)
DIMS = (16, 24, 40, 64, 64, 72, 80, 96, 112, 128, 128, 160, 192, 256)
USUAL_DIMS = (64, 128, 128, 192, 256)
PAGE_SIZES = (8, 16, 16, 24, 32, 64, 128)
EIGHT_BIT = ("int8", "float8_e4m3fn", "float8_e5m2")
WIDE = {"preferred_element_type", "precision", "out_dtype", "dtype"}
"""Options that say how precise a call is: a reference has none of them."""


@dataclass
class RandomCall:
    """A call.

    Attributes:
        operation: its name.
        arrays: arguments that are traced, by name.
        static: the other arguments.
        gradients: names of the arrays that are differentiated, none in a call without gradients.
        dtype: of the least precise matmul.
        invariant: whether it is batch-invariant.
    """

    operation: str
    arrays: dict[str, Any]
    static: dict[str, Any] = field(default_factory=dict)
    gradients: tuple[str, ...] = ()
    dtype: str = "float32"
    invariant: bool = False

    def __str__(self) -> str:
        shapes = [f"{n}={describe(x)}" for n, x in self.arrays.items()]
        options = [f"{n}={describe(x)}" for n, x in self.static.items()]
        mode = ["gradients"] * bool(self.gradients) + ["batch_invariant"] * self.invariant
        return f"{self.operation}({', '.join(shapes + options)}) {' '.join(mode)}".rstrip()


def describe(x: Any) -> str:
    """Returns shape and dtype of an array, else the value."""
    if isinstance(x, (list, tuple)) and x and hasattr(x[0], "dtype"):
        return f"{len(x)} of {describe(x[0])}"
    if hasattr(x, "dtype") and hasattr(x, "shape"):
        return f"{np.dtype(x.dtype).name}{list(x.shape)}"
    if callable(x):
        return getattr(x, "__name__", type(x).__name__)
    return type(x).__name__ if isinstance(x, MaskInfo) or hasattr(x, "starts") else repr(x)


class Draw:
    """A random generator of a call's parts.

    Attributes:
        dtype: of the call's floats.
        plain: whether the call has usual dims and few options: kernels for one device refuse most
            of the others.
    """

    def __init__(self, *seed: int) -> None:
        self.rng = np.random.default_rng(seed)
        self.dtype = str(self.rng.choice(["bfloat16", "bfloat16", "float16", "float32"]))
        self.plain = bool(self.rng.random() < 0.4)

    def chance(self, share: float) -> bool:
        return bool(self.rng.random() < share)

    def option(self, share: float) -> bool:
        """Draws whether a call has an option."""
        return self.chance(share * 0.3 if self.plain else share)

    def pick(self, values: Sequence[Any]) -> Any:
        return values[int(self.rng.integers(len(values)))]

    def integer(self, low: int, high: int) -> int:
        """Draws from ``low`` to ``high``, both included."""
        return int(self.rng.integers(low, high + 1))

    def length(self) -> int:
        return LONG if self.chance(0.05) else self.pick(LENGTHS)

    def normal(self, *shape: int, dtype: str | None = None, scale: float = 1.0) -> np.ndarray:
        values = scale * self.rng.standard_normal(shape)
        return values.astype(jnp.dtype(dtype or self.dtype))

    def dim(self, limit: int = 256) -> int:
        return self.pick([d for d in (USUAL_DIMS if self.plain else DIMS) if d <= limit])

    def cumulative(self, total: int, sequences: int) -> np.ndarray:
        """Draws starts of sequences in ``total`` rows: some are empty, some rows are of none."""
        ends = np.sort(self.rng.integers(0, total + 1, sequences))
        if self.chance(0.5) and sequences:
            ends[-1] = total
        return np.concatenate([[0], ends]).astype(np.int32)

    def window(self) -> int | tuple[int, int]:
        left = self.pick((0, 1, 5, 30, 64, 127, 500))
        return left if self.chance(0.5) else (left, self.pick((0, 3, 64)))

    def sinks(self, heads: int) -> np.ndarray:
        shape = (self.integer(1, 3),)
        dtype = self.pick(("float32", self.dtype))
        return self.normal(*(shape if self.chance(0.3) else (heads, *shape)), dtype=dtype)

    def pages(self, pages: int, *row: int, dtype: str) -> np.ndarray:
        """Draws a cache ``[pages, *row]``."""
        if dtype == "int8":
            return self.rng.integers(-127, 128, (pages, *row)).astype(np.int8)
        return self.normal(pages, *row, dtype=dtype)


def hide(d: Draw, cache: np.ndarray, lens: Sequence[int], tables: np.ndarray) -> None:
    """Puts NaN where no context has a token, in place."""
    if not jnp.issubdtype(cache.dtype, jnp.floating) or d.chance(0.5):
        return
    seen, page_size = np.zeros(cache.shape[:2], bool), cache.shape[1]
    for n, row in zip(lens, tables, strict=False):
        j = np.arange(n)
        seen[row[j // page_size], j % page_size] = True
    cache[~seen] = np.nan


# ---- dense attention -----------------------------------------------------------------------------


def relative_bias(score: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
    return score + 0.01 * (k - q) * (h + 1)


def striped(b: Any, h: Any, q: Any, k: Any) -> Any:
    return ((q + k + h) % 3 != 0) | (q == k)


def softmax_options(
    d: Draw, b: int, q: int, k: int, h: int, allowed: set[str], packed: bool
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Draws arrays and options of softmax attention among the ``allowed``."""
    arrays: dict[str, Any] = {}
    static: dict[str, Any] = {}

    def has(name: str, share: float) -> bool:
        return name in allowed and d.option(share)

    if has("causal", 0.5):
        static["causal"] = True
    if has("sliding_window", 0.25):
        static["sliding_window"] = d.window()
    if static and has("causal_offset", 0.3):
        static["causal_offset"] = d.pick((k - q, 1, -1, -5, 40))
    if has("softmax_aux", 0.25):
        arrays["softmax_aux"] = d.sinks(h)
    if has("logits_soft_cap", 0.2):
        static["logits_soft_cap"] = d.pick((2.0, 20.0))
    if has("softmax_scale", 0.15):
        static["softmax_scale"] = d.pick((0.05, -0.1, 0.0))
    if has("bias", 0.2):
        shape = d.pick((1, b)), d.pick((1, h)), d.pick((1, q, q)), k
        arrays["bias"] = d.normal(*shape, dtype=d.pick(("float32", d.dtype)))
    if has("attention_mask", 0.2):
        rank3 = (b, q, k) if b != h else (b, 1, q, k)  # which has one reading
        shape = d.pick(((b, k), rank3, (1, 1, q, k), (b, h, q, k)))
        mask = d.rng.random(shape) < d.pick((0.2, 0.9))
        arrays["attention_mask"] = mask.astype(d.pick(("bool", "int32")))
    if has("mask_info", 0.2) and not packed:
        arrays["mask_info"] = mask_info(d, b, q, k)
    if has("dropout_prob", 0.15):
        static["dropout_prob"] = d.pick((0.1, 0.5))
        arrays["dropout_seed"] = np.int32(d.integer(0, 1000))
    if has("return_lse", 0.4):
        static["return_lse"] = True
    if has("score_mod", 0.07):
        static["score_mod"] = relative_bias
    if has("mask_mod", 0.07):
        static["mask_mod"] = striped
    if d.dtype == "float32" and has("precision", 0.3):
        static["precision"] = "highest"
    return arrays, static


def mask_info(d: Draw, b: int, q: int, k: int) -> MaskInfo:
    """Draws documents with padding, or positions of tokens."""
    rows = d.pick((1, b))
    if d.chance(0.6):
        ids = np.sort(d.rng.integers(-1, 4, (rows, max(q, k))), 1).astype(np.int32)
        if d.chance(0.3):
            ids = d.rng.permuted(ids, axis=1)
        return MaskInfo.from_segments(ids[:, :q], ids[:, :k])
    starts = d.rng.integers(0, max(k // 2, 1), (rows, 1))
    positions = (np.arange(q) + starts).astype(np.int32)
    keys = np.broadcast_to(np.arange(k, dtype=np.int32), (rows, k))
    chunk = d.pick((None, 50))
    return MaskInfo(causal=True, q_positions=positions, kv_positions=keys, chunk_size=chunk)


SOFTMAX = {
    "bias", "softmax_aux", "attention_mask", "mask_info", "softmax_scale", "dropout_prob", "causal",
    "causal_offset", "sliding_window", "logits_soft_cap", "return_lse",
}  # fmt: skip
ALLOWED = {
    "flash_attention": SOFTMAX | {"precision", "score_mod", "mask_mod"},
    "attention": SOFTMAX - {"return_lse", "dropout_prob"} | {"precision"},
    "scaled_dot_product_attention": SOFTMAX
    - {"softmax_aux", "logits_soft_cap", "return_lse", "dropout_prob"},
    "blocksparse_attention": SOFTMAX,
    "mla_attention": SOFTMAX,
}


def dense(d: Draw, operation: str) -> RandomCall:
    b, (h, hk) = d.integer(1, 3), d.pick(HEADS)
    q, k = d.length(), d.length()
    if d.chance(0.5):
        k = q
    if d.chance(0.04):
        k = 0
    if max(q, k) > 500:
        b, (h, hk) = 1, d.pick([x for x in HEADS if x[0] < 6])
    dim = d.dim()
    dv = dim if d.chance(0.7) else 128 if dim == 192 else d.dim()
    names = {"flash_attention": "cum_seqlens_q", "scaled_dot_product_attention": "cum_seqlens_q",
             "mla_attention": "cu_seqlens"}  # fmt: skip
    packed = operation in names and d.chance(0.2)
    arrays: dict[str, Any] = {}
    if packed:
        b, n = 1, d.integer(1, 5)
        if operation == "mla_attention" or d.chance(0.6):
            k = q
        else:
            arrays["cum_seqlens_k"] = d.cumulative(k, n)
        arrays[names[operation]] = d.cumulative(q, n)
    if operation == "mla_attention":
        operands = latent_operands(d, b, q, k, h, hk)
    else:
        operands = {
            "query": d.normal(b, q, h, dim),
            "key": d.normal(b, k, hk, dim),
            "value": d.normal(b, k, hk, dv),
        }
    optional, static = softmax_options(d, b, q, k, h, ALLOWED[operation], packed)
    if operation == "flash_attention" and d.option(0.1):
        for name, heads in (("q_scale", h), ("k_scale", hk), ("v_scale", hk)):
            optional[name] = d.normal(*d.pick(((), (b, heads), (1, 1))), dtype="float32")
    if operation == "flash_attention" and d.option(0.1):
        static["out_dtype"] = jnp.float32
    if operation == "blocksparse_attention":
        rows, keys = (d.pick((16, 50, 64, 128, 128)) for _ in range(2))
        lead = d.pick(((), (1, 1), (b, 1), (b, h)))
        blocks = (*lead, -(-q // rows), -(-k // keys))
        arrays["block_mask"] = d.rng.random(blocks) < d.pick((0.3, 0.7))
        static |= {"q_block_size": rows, "kv_block_size": keys}
        if d.chance(0.2):
            static["chunk_size"] = d.pick((16, 100))
    if operation == "attention" and d.chance(0.2):
        optional["dropout_rng"] = jax.random.PRNGKey(d.integer(0, 1000))
        static |= {"dropout_prob": 0.3, "deterministic": False}
    others = ("bias", "softmax_aux", "q_scale", "k_scale", "v_scale")
    smooth = (*operands, *(n for n in others if n in optional))
    return RandomCall(operation, operands | optional | arrays, static, smooth, d.dtype)


def latent_operands(d: Draw, b: int, q: int, k: int, h: int, hk: int) -> dict[str, Any]:
    """Draws operands of latent attention: no rotary part, of keys alone, or of both."""
    r, nope, dv = d.pick((40, 64, 128, 512)), d.dim(128), d.dim(128)
    rope, form = d.pick((16, 32, 64)), d.pick(("none", "key", "both"))
    operands = {
        "query": d.normal(b, q, h, nope + (rope if form == "key" else 0)),
        "key_value": d.normal(b, k, r),
        "w_kc": d.normal(r, hk, nope, scale=r**-0.5),
        "w_vc": d.normal(r, hk, dv, scale=r**-0.5),
    }
    if form == "both":
        operands["b_q"] = d.normal(b, q, rope)
    if form != "none":
        operands["b_k"] = d.normal(b, k, rope)
    return operands


def quantized(d: Draw, operation: str) -> RandomCall:
    """Draws operands that are quantized to 8 bits before attention."""
    b, (h, hk) = d.integer(1, 3), d.pick(HEADS)
    q, k, dim = d.length(), d.length(), d.dim()
    if max(q, k) > 500:
        b = 1
    arrays = {
        "query": d.normal(b, q, h, dim),
        "key": d.normal(b, k, hk, dim),
        "value": d.normal(b, k, hk, dim if d.chance(0.8) else d.dim()),
    }
    static: dict[str, Any] = {"block": d.pick((None, 16, 50, 128)), "smooth": d.chance(0.3)}
    if d.chance(0.5):
        static["causal"] = True
    if d.chance(0.2):
        static["sliding_window"] = d.window()
    if d.chance(0.4) and not static["smooth"]:
        static["return_lse"] = True
    return RandomCall(operation, arrays, static, (), "float8_e4m3fn")


def merged(d: Draw, operation: str) -> RandomCall:
    shape = (*d.pick(((7,), (2, 33), (129,))), d.pick((1, 3, 8)), d.dim())
    parts = d.integer(1, 4)
    lses = [d.normal(*shape[:-1], dtype="float32", scale=5.0) for _ in range(parts)]
    for x in lses:
        x[d.rng.random(x.shape) < 0.2] = -np.inf
    arrays = {"outs": [d.normal(*shape) for _ in range(parts)], "lses": lses}
    return RandomCall(operation, arrays, {}, ("outs", "lses"), d.dtype)


def native_sparse(d: Draw, operation: str) -> RandomCall:
    b, (h, hk) = d.integer(1, 2), d.pick(((1, 1), (4, 1), (6, 2), (16, 1), (16, 2), (3, 3)))
    s, dim, size = d.length(), d.dim(), d.pick((8, 16, 32, 64))
    s = min(s, 333)
    arrays: dict[str, Any] = {
        "query": d.normal(b, s, h, dim),
        "key": d.normal(b, s, hk, dim),
        "value": d.normal(b, s, hk, dim if d.chance(0.7) else d.dim()),
    }
    static: dict[str, Any] = {"block_size": size}
    if d.chance(0.3):
        arrays = {n: x[:1] for n, x in arrays.items()}
        b = 1
        arrays["cu_seqlens"] = d.cumulative(s, d.integer(1, 4))
    smooth = ["query", "key", "value"]
    if d.chance(0.2):
        static["softmax_scale"] = 0.1
    if d.chance(0.3):
        static["sliding_window"] = d.pick((0, 5, 64))
    for gate in ("g_cmp", "g_slc", "g_swa"):
        if d.chance(0.5) and (gate != "g_swa" or "sliding_window" in static):
            arrays[gate] = d.normal(b, s, h)
            smooth.append(gate)
    slots = d.integer(1, 6)
    if d.chance(0.4):
        blocks = -(-s // size)
        arrays["block_indices"] = d.rng.integers(-1, blocks + 1, (b, s, hk, slots)).astype(np.int32)
    if d.chance(0.3):
        arrays["block_counts"] = d.rng.integers(1, slots + 1, (b, s, hk)).astype(np.int32)
        if d.chance(0.5):
            static["max_block_count"] = slots
    else:
        static["block_counts"] = slots
    return RandomCall(operation, arrays, static, tuple(smooth), d.dtype)


# ---- caches --------------------------------------------------------------------------------------


def contexts(d: Draw, count: int) -> list[int]:
    return [d.pick((0, 1, 7, 16, 65, 129, 300, 333, 1000)) for _ in range(count)]


def cache_options(
    d: Draw, h: int, hk: int, cache: str, *, value_scale: bool = True
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Draws scales, a window, a cap and sinks."""
    arrays: dict[str, Any] = {}
    static: dict[str, Any] = {}
    for name in ("k_scale", "v_scale") if value_scale else ("k_scale",):
        if cache in EIGHT_BIT or d.chance(0.1):
            usual = 0.01 if cache == "int8" else 0.5
            forms = [usual, np.float32(usual)]
            if value_scale:
                forms.append((usual * (0.5 + d.rng.random(hk))).astype(np.float32))
            form = d.pick(forms)
            (static if isinstance(form, float) and not hasattr(form, "dtype") else arrays)[name] = (
                form
            )
    if d.option(0.25):
        static["sliding_window"] = d.window()
    if d.option(0.2):
        static["logits_soft_cap"] = d.pick((3.0, 20.0))
    if d.option(0.2):
        static["softmax_scale"] = d.pick((0.05, -0.1))
    if d.option(0.25):
        arrays["softmax_aux"] = d.sinks(h)
    if d.option(0.4):
        static["return_lse"] = True
    return arrays, static


def cache_dtype(d: Draw) -> str:
    return d.dtype if d.chance(0.55) else d.pick(EIGHT_BIT)


def paged(d: Draw, operation: str) -> RandomCall:
    (h, hk), dim, kind = d.pick(HEADS), d.dim(), cache_dtype(d)
    dv = dim if d.chance(0.7) else 128 if dim == 192 else d.dim()
    lens, size = contexts(d, d.integer(1, 6)), d.pick(PAGE_SIZES)
    tables, pages = wild_tables(d.rng, lens, size)
    arrays, static = cache_options(d, h, hk, kind)
    caches = [d.pages(pages, size, hk, x, dtype=kind) for x in (dim, dv)]
    for cache in caches:
        hide(d, cache, lens, tables)
    shape = (len(lens), 1, h, dim) if d.chance(0.3) else (len(lens), h, dim)
    operands = {
        "query": d.normal(*shape),
        "key_cache": caches[0],
        "value_cache": caches[1],
        "context_lens": np.array(lens, np.int32),
        "block_tables": tables,
    }
    if d.option(0.3):
        static["num_splits"] = d.integer(1, 7)
    return RandomCall(operation, operands | arrays, static, ("query",), d.dtype)


def latent_decoding(d: Draw, operation: str) -> RandomCall:
    h, latent = d.pick((1, 3, 5, 8, 16, 40, 64, 128)), d.pick((32, 64, 128, 256, 512, 512))
    width, kind = latent + d.pick((0, 16, 32, 64, 64)), cache_dtype(d)
    if d.plain:
        h, latent, width = d.pick((16, 64, 128)), 512, 576
    lens, size = contexts(d, d.integer(1, 5)), d.pick(PAGE_SIZES)
    tables, pages = wild_tables(d.rng, lens, size)
    arrays, static = cache_options(d, h, 1, kind, value_scale=False)
    cache = d.pages(pages, size, width, dtype=kind)
    hide(d, cache, lens, tables)
    rows = 0 if d.chance(0.4) else d.integer(1, 9)
    operands = {
        "query": d.normal(len(lens), *([rows] if rows else []), h, width),
        "latent_cache": cache,
        "context_lens": np.array(lens, np.int32),
        "block_tables": tables,
    }
    static["latent_dim"] = latent
    if rows and d.chance(0.3):
        trees = [grow_tree(d.rng, rows) for _ in lens]
        arrays["tree_mask"] = np.stack([mask for mask, _ in trees])
        if d.option(0.5):
            before = np.array(lens)[:, None] - rows
            arrays["positions"] = (before + np.stack([x for _, x in trees])).astype(np.int32)
    elif d.option(0.3):
        static["num_splits"] = d.integer(1, 7)
    return RandomCall(operation, operands | arrays, static, ("query",), d.dtype)


def contiguous(d: Draw, operation: str) -> RandomCall:
    b, (h, hk), dim, k = d.integer(1, 6), d.pick(HEADS), d.dim(), max(d.length(), 7)
    arrays, static = cache_options(d, h, hk, d.dtype)
    arrays = {n: x for n, x in arrays.items() if "_scale" not in n}
    static = {n: x for n, x in static.items() if n not in ("k_scale", "v_scale")}
    start, end = d.rng.integers(-3, k + 3, (2, b)).astype(np.int32)
    keys = d.normal(b, k, hk, dim), d.normal(b, k, hk, dim if d.chance(0.7) else d.dim())
    j = np.arange(k)
    hidden = (j < start[:, None]) | (j >= end[:, None])
    if d.option(0.5):
        for x in keys:
            x[hidden] = np.nan
    shape = (b, 1, h, dim) if d.chance(0.3) else (b, h, dim)
    operands = {
        "query": d.normal(*shape),
        "key": keys[0],
        "value": keys[1],
        "sequence_start": start,
        "sequence_end": end,
    }
    return RandomCall(operation, operands | arrays, static, ("query",), d.dtype)


def ragged(d: Draw, operation: str) -> RandomCall:
    from ejkernel.types.serving.plan import make_plan

    writes = operation.endswith("v3")
    (h, hk), dim, kind, size = d.pick(HEADS), d.dim(), cache_dtype(d), d.pick(PAGE_SIZES)
    n = d.integer(1, 6)
    new = [d.pick((1, 1, 1, 0, 3, 7, 64, 129)) for _ in range(n)]
    decoding = d.integer(0, n) if d.chance(0.4) else 0
    new[:decoding] = [1] * decoding
    lens = [x + d.pick((0, 0, 5, 16, 200, 333)) for x in new]
    count = n if d.chance(0.7) else d.integer(min(1, n // 3), n)
    tables, pages = wild_tables(d.rng, lens, size)
    arrays, static = cache_options(d, h, hk, kind)
    tokens = sum(new) + d.pick((0, 0, 1, 5))
    tokens = max(tokens, 1)
    starts = np.concatenate([[0], np.cumsum(new)]).astype(np.int32)
    packing = 32 // (8 * jnp.dtype(kind).itemsize)
    row = (2 * hk, dim)
    if writes and d.chance(0.3):
        row = (-(-2 * hk // packing), packing, -(-dim // 128) * 128)
    cache = d.pages(pages, size, *row, dtype=kind)
    used = lens[:count]
    hide(d, cache, used, tables[:count])
    operands: dict[str, Any] = {
        "queries": d.normal(tokens, h, dim),
        "block_tables": tables,
        "query_start_loc": starts,
    }
    if writes:
        operands |= {
            "keys": d.normal(tokens, hk, dim),
            "values": d.normal(tokens, hk, dim),
            "kv_cache": cache,
            "kv_lens": np.array(lens, np.int32),
            "distribution": np.array([min(decoding, count), min(decoding, count), count], np.int32),
        }
        if kind in EIGHT_BIT and d.chance(0.2):
            static["q_scale"] = 0.02 if kind == "int8" else 0.5
    else:
        operands |= {
            "kv_pages": cache,
            "context_lens": np.array(lens, np.int32),
            "num_seqs": np.array([count], np.int32),
        }
    if d.option(0.2):
        columns = max(1, max(new))
        arrays["tree_mask"] = np.zeros((tokens, columns), bool)
        positions = np.zeros(tokens, np.int32)
        for r, length in enumerate(new):
            if length:
                mask, depths = grow_tree(d.rng, length)
                rows = slice(starts[r], starts[r + 1])
                arrays["tree_mask"][rows, :length] = mask
                positions[rows] = lens[r] - length + depths
        if d.option(0.5):
            arrays["positions"] = positions
    if d.option(0.2):
        longest = max(1, max(new)) if d.chance(0.5) else None
        length = operands["kv_lens" if writes else "context_lens"]
        arrays["plan"] = make_plan(length, starts, count, tokens, longest)
    smooth: tuple[str, ...] = ("queries", "keys", "values") if writes else ("queries",)
    if len(row) == 3:  # whose reference has another form
        smooth = ()
    return RandomCall(operation, operands | arrays, static, smooth, d.dtype)


# ---- states and the others -----------------------------------------------------------------------


def linear(d: Draw, operation: str) -> RandomCall:
    b, (h, hk), s = d.integer(1, 3), d.pick(HEADS), d.length()
    if d.chance(0.03):
        s = 0
    delta = operation == "gated_delta_rule"
    dk = d.dim(128 if delta else 256)
    dv = dk if d.chance(0.6) else d.dim(256)
    if s > 300:
        b, (h, hk) = 1, d.pick([x for x in HEADS if x[0] < 6])
    query_heads, value_heads = (hk, h) if delta else (h, hk)
    arrays: dict[str, Any] = {
        "query": d.normal(b, s, query_heads, dk),
        "key": d.normal(b, s, hk, dk),
        "value": d.normal(b, s, value_heads, dv),
    }
    static: dict[str, Any] = {}
    strength = d.pick((0.02, 0.5, 4.0))

    def decay(*shape: int) -> np.ndarray:
        values = -strength * np.abs(d.rng.standard_normal(shape))
        return values.astype(jnp.dtype(d.pick(("float32", d.dtype))))

    if delta:
        if d.chance(0.7):
            static["normalize_qk"] = True
        else:
            arrays["key"] = d.normal(b, s, hk, dk, scale=dk**-0.5)
        if d.chance(0.8):
            arrays["g"] = decay(b, s, h) if d.chance(0.5) else decay(b, s, h, dk)
        if d.chance(0.8):
            arrays["beta"] = d.rng.random((b, s, h)).astype(jnp.dtype(d.dtype))
    elif operation == "lightning_attention":
        static |= {"layer_idx": d.integer(0, 3), "num_layers": 4}
    else:
        if d.chance(0.6):
            arrays["g"] = decay(b, s, h) if d.chance(0.5) else decay(b, s, h, dk)
        if d.chance(0.3):
            arrays["g_gamma"] = decay(h)
        if operation == "recurrent_attention":
            if d.chance(0.3):
                arrays["gk"] = decay(b, s, h, dk)
            if d.chance(0.3):
                arrays["gv"] = decay(b, s, h, dv)
    states = b
    if d.option(0.25):
        states = d.integer(1, 4)
        per_token = [x for x in arrays if x != "g_gamma"]
        arrays |= {n: arrays[n][:1] for n in per_token}
        arrays["cu_seqlens"] = d.cumulative(s, states)
    if d.option(0.4):
        dtype = d.pick(("float32", d.dtype))
        arrays["initial_state"] = d.normal(states, h, dk, dv, dtype=dtype)
    if d.option(0.3):
        static["reverse"] = True
    if d.option(0.5):
        static["return_state"] = True
    if d.option(0.2):
        static["softmax_scale"] = 0.1
    smooth = tuple(n for n in arrays if n != "cu_seqlens")
    return RandomCall(operation, arrays, static, smooth, d.dtype)


def convolution(d: Draw, operation: str) -> RandomCall:
    b, s, c, w = d.integer(1, 3), d.length(), d.pick((1, 7, 40, 129, 256)), d.pick((2, 3, 4, 4, 5))
    states = b
    arrays: dict[str, Any] = {}
    if d.option(0.3):
        b, states = 1, d.integer(1, 4)
        arrays["cu_seqlens"] = d.cumulative(s, states)
    arrays |= {"x": d.normal(b, s, c), "weight": d.normal(c, w)}
    static: dict[str, Any] = {"activation": d.pick((None, "silu"))}
    if d.option(0.5):
        arrays["bias"] = d.normal(c)
    if d.option(0.4):
        arrays["initial_state"] = d.normal(states, c, w - 1)
    if d.option(0.5):
        static["return_state"] = True
    smooth = tuple(n for n in arrays if n != "cu_seqlens")
    return RandomCall(operation, arrays, static, smooth, d.dtype)


def pooling(d: Draw, operation: str) -> RandomCall:
    s, channels = d.length(), d.pick(((1,), (7,), (129,), (256,), (3, 40), (2, 5, 8)))
    arrays: dict[str, Any] = {}
    if d.option(0.4):
        lead: tuple[int, ...] = (s,)
        arrays["cu_seqlens"] = d.cumulative(s, d.integer(1, 4))
    else:
        lead = (d.integer(1, 3), s)
    static = {"chunk_size": d.pick((None, 1, 5, 16, 64, 100))}
    if d.option(0.3):
        mask = d.rng.random(lead) < 0.6
        arrays["attention_mask"] = mask.astype(d.pick(("bool", "int32")))
    return RandomCall(
        operation, {"x": d.normal(*lead, *channels)} | arrays, static, ("x",), d.dtype
    )


def grouped(d: Draw, operation: str) -> RandomCall:
    rows = d.length()
    sizes = (64, 128, 256) if d.plain else (1, 7, 16, 40, 64, 129, 200, 256)
    inner, columns = d.pick(sizes), d.pick(sizes)
    groups = d.integer(1, 9)
    total = groups
    arrays: dict[str, Any] = {"lhs": d.normal(rows, inner)}
    static: dict[str, Any] = {}
    if d.option(0.25):
        total = groups + d.integer(0, 4)
        arrays["group_offset"] = np.int32(d.integer(0, total - groups))
    counts = np.diff(d.cumulative(rows, total))
    if d.option(0.1):
        counts[-1] += 9  # the sum is clipped
    arrays["group_sizes"] = d.rng.permutation(counts).astype(np.int32)
    transposed = d.chance(0.4)
    shape = (groups, columns, inner) if transposed else (groups, inner, columns)
    if transposed:
        static["transpose_rhs"] = True
    smooth = ["lhs"]
    kind = d.dtype if d.chance(0.7) else d.pick(EIGHT_BIT[:2])
    arrays["rhs"] = d.pages(*shape, dtype=kind)
    if kind == d.dtype:
        smooth.append("rhs")
    else:
        form = d.pick(((), (groups,), (groups, columns)))
        scale = 0.01 * (0.5 + d.rng.random(form))
        arrays["rhs_scale"] = np.asarray(scale, np.float32)
        smooth = []  # 8 bits are for inference
    if d.option(0.3):
        arrays["existing_out"] = d.normal(rows, columns)
        smooth += ["existing_out"] * bool(smooth)
    if d.option(0.2):
        static["preferred_element_type"] = jnp.float32
    if d.dtype == "float32" and kind == "float32" and d.chance(0.3):
        static["precision"] = "highest"
    return RandomCall(operation, arrays, static, tuple(smooth), d.dtype)


DRAWN: dict[str, Callable[[Draw, str], RandomCall]] = {
    **dict.fromkeys(ALLOWED, dense),
    "quantize_attention": quantized,
    "merge_attention": merged,
    "native_sparse_attention": native_sparse,
    "page_attention": paged,
    "mla_decode": latent_decoding,
    "ragged_decode_attention": contiguous,
    "ragged_page_attention": ragged,
    "ragged_page_attention_v3": ragged,
    **dict.fromkeys(
        ("recurrent_attention", "gla_attention", "lightning_attention", "gated_delta_rule"), linear
    ),
    "causal_conv1d": convolution,
    "mean_pooling": pooling,
    "grouped_matmul": grouped,
}
"""How a call of each operation is drawn."""
SERVING = {"page_attention", "mla_decode", "ragged_decode_attention", "ragged_page_attention",
           "ragged_page_attention_v3"}  # fmt: skip


def random_call(operation: str, seed: int, number: int) -> RandomCall:
    """Returns the call of this number."""
    d = Draw(seed, zlib.crc32(operation.encode()), number)
    call = DRAWN[operation](d, operation)
    if d.chance(0.9 if operation in SERVING else 0.3):
        call.gradients = ()
    call.invariant = d.chance(0.2)
    return call
