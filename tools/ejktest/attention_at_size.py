"""Attention at the sizes a GPU is for: cases, and a float32 reference that runs on the GPU.

The float64 oracles in ``oracles`` are for small arrays; here whole ``[q, k]`` matrices of a
thousand rows are compared by the relative error of each array.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Generator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import jax
import jax.numpy as jnp

from ejkernel.types import MaskInfo
from ejktest.oracles.attention import dropout_factor


def reference(q, k, v, *, mask=None, scale=None, bias=None, sinks=None, cap=None, keep=None):
    """(o, lse) in float32 with full products; mask bool broadcastable to [b, h, q, k].

    ``keep`` (bool [b, h, q, k], float drop probability) is the dropout mask.
    """
    q, k, v = (x.astype(jnp.float32) for x in (q, k, v))
    b, n, h, _ = q.shape
    grouped = q.reshape(b, n, k.shape[2], -1, q.shape[3])
    x = jnp.einsum("bqhgd,bkhd->bhgqk", grouped, k, precision="highest")
    x = x.reshape(b, h, n, -1) * (q.shape[-1] ** -0.5 if scale is None else scale)
    if bias is not None:
        x = x + bias.astype(jnp.float32)
    if cap is not None:
        x = cap * jnp.tanh(x / cap)
    if mask is not None:
        x = jnp.where(mask, x, -jnp.inf)
    alive = jnp.any(x > -jnp.inf, -1, keepdims=True)
    x = jnp.where(alive, x, 0.0)
    total = jax.nn.logsumexp(x, -1, keepdims=True)
    if sinks is not None:
        s = jax.nn.logsumexp(sinks.astype(jnp.float32), -1)[None, :, None, None]
        total = jnp.logaddexp(total, s)
    p = jnp.where(alive, jnp.exp(x - total), 0.0)
    if keep is not None:
        p = jnp.where(keep[0], p / (1 - keep[1]), 0.0)
    p = p.reshape(b, k.shape[2], -1, n, k.shape[1])
    o = jnp.einsum("bhgqk,bkhd->bqhgd", p, v, precision="highest").reshape(b, n, h, -1)
    lse = jnp.where(alive, total, -jnp.inf)[..., 0]
    return o, lse.swapaxes(1, 2)


def reference_rows(q, k, v, position, *, window=None, **options):
    """(o, lse) of rows ``[rows, h, d]`` at these positions of tokens ``[t, hk, d]``, causally.

    Tokens that no row sees may hold anything.
    """
    j, at = jnp.arange(k.shape[0]), position[:, None]
    seen = (j <= at) & (j >= (0 if window is None else at - window))
    k, v = (jnp.where(seen.any(0)[:, None, None], x.astype(jnp.float32), 0.0) for x in (k, v))
    o, lse = reference(q[None], k[None], v[None], mask=seen, **options)
    return o[0], lse[0]


@jax.jit
def _relative(a, b):
    a, b = a.astype(jnp.float32), b.astype(jnp.float32)
    finite = jnp.isfinite(b)
    same = jnp.all(jnp.where(finite, True, a == b))
    d = jnp.where(finite, a - b, 0.0)
    size = jnp.sqrt(jnp.sum(jnp.where(finite, b, 0.0) ** 2))
    error = jnp.sqrt(jnp.sum(d**2)) / jnp.maximum(size, 1e-20)
    return jnp.where(same, error, jnp.inf)


def relative(a, b) -> float:
    """||a - b|| / ||b|| over entries that are finite in b; NaN in a never passes."""
    return float(_relative(a, b))


@jax.jit
def _compare(first, second, exact):
    errors = {n: _relative(first[n], exact[n]) for n in first}
    same = [jnp.array_equal(first[n], second[n], equal_nan=True) for n in first]
    return errors, jnp.all(jnp.stack(same))


def draw(seed, b, q, k, h, hk, d, dv, dtype):
    keys = jax.random.split(jax.random.key(seed), 4)
    shapes = ((b, q, h, d), (b, k, hk, d), (b, k, hk, dv), (b, q, h, dv))
    return [
        jax.random.normal(x, s, jnp.float32).astype(dtype)
        for x, s in zip(keys, shapes, strict=False)
    ]


def small(*lead):
    """q, k and v, bfloat16 ``[*lead, 2, 300, 4, 64]``."""
    keys = jax.random.split(jax.random.key(0), 3)
    return [jax.random.normal(k, (*lead, 2, 300, 4, 64), jnp.bfloat16) for k in keys]


def index(q, k):
    return jnp.arange(q)[:, None], jnp.arange(k)[None, :]


def segments(b, n, seed=0):
    """Sorted document ids with a tail of padding."""
    cuts = jax.random.randint(jax.random.key(seed), (b, 6), 0, n)
    ids = jnp.sum(jnp.arange(n)[None, :, None] >= jnp.sort(cuts, 1)[:, None, :], -1)
    return jnp.where(jnp.arange(n)[None] >= n - n // 10, -1, ids).astype(jnp.int32)


# name: (b, q, k, h, hk, d, dv, dtype), options
BF, HALF, F32 = jnp.bfloat16, jnp.float16, jnp.float32
CASES: dict[str, tuple[tuple[Any, ...], dict[str, Any]]] = {
    "full d128": ((2, 1024, 1024, 4, 4, 128, 128, BF), {}),
    "causal d128": ((2, 1024, 1024, 4, 4, 128, 128, BF), dict(causal=True)),
    "full d64": ((2, 1024, 1024, 4, 4, 64, 64, BF), {}),
    "causal d64": ((2, 1024, 1024, 4, 4, 64, 64, BF), dict(causal=True)),
    "full d256": ((2, 1024, 1024, 4, 4, 256, 256, BF), {}),
    "causal d256": ((2, 1024, 1024, 4, 4, 256, 256, BF), dict(causal=True)),
    "odd causal": ((2, 1037, 1037, 4, 4, 128, 128, BF), dict(causal=True)),
    # programs in pairs, blocks of keys that do not divide the length, a block without a partner
    "pairs": ((2, 2048, 2048, 4, 4, 128, 128, BF), {}),
    "odd pairs": ((2, 2150, 3000, 4, 2, 128, 128, BF), dict(sinks=True)),
    "odd causal d256": ((2, 1037, 1037, 4, 2, 256, 256, BF), dict(causal=True)),
    "odd full d64": ((3, 1000, 777, 4, 2, 64, 64, BF), {}),
    "offset q<k": ((2, 300, 1100, 4, 4, 64, 64, BF), dict(causal=True, causal_offset=800)),
    "offset -200": ((2, 1024, 1024, 4, 4, 64, 64, BF), dict(causal=True, causal_offset=-200)),
    "window": ((2, 2048, 2048, 4, 4, 128, 128, BF), dict(causal=True, sliding_window=300)),
    "window both": ((2, 1500, 1500, 4, 4, 64, 64, BF), dict(sliding_window=(100, 257))),
    "gqa 8:2": ((2, 1024, 1024, 8, 2, 128, 128, BF), dict(causal=True)),
    "mqa": ((2, 1024, 1024, 8, 1, 64, 64, BF), {}),
    "segments": ((2, 2048, 2048, 4, 4, 128, 128, BF), dict(causal=True, segments=True)),
    "d80": ((2, 1024, 1024, 4, 4, 80, 80, BF), dict(causal=True)),
    "d96": ((2, 1024, 1024, 4, 4, 96, 96, BF), {}),
    "d112 odd": ((2, 999, 999, 4, 4, 112, 112, BF), dict(causal=True)),
    "d192/128": ((2, 1024, 1024, 4, 4, 192, 128, BF), dict(causal=True)),
    "d40/24 window": ((2, 1003, 777, 2, 2, 40, 24, BF), dict(sliding_window=(20, 5))),
    "d32": ((2, 1024, 1024, 4, 4, 32, 32, BF), {}),
    "sinks": ((2, 1024, 1024, 4, 4, 128, 128, BF), dict(causal=True, sinks=True)),
    "cap": ((2, 1024, 1024, 4, 4, 128, 128, BF), dict(causal=True, cap=30.0)),
    "sinks cap window": (
        (2, 1030, 1030, 4, 2, 64, 64, BF),
        dict(causal=True, sliding_window=200, cap=20.0, sinks=True),
    ),
    "dropout": ((2, 1024, 1024, 4, 4, 128, 128, BF), dict(causal=True, dropout=0.1)),
    "bias": ((2, 1000, 1100, 4, 4, 64, 64, BF), dict(bias=(1, 4))),
    # rows by TMA that end inside a tile, before those of the next head
    "bias odd rows": ((2, 1000, 1096, 4, 2, 128, 128, BF), dict(causal=True, bias=(1, 4))),
    "bias cap dropout": (
        (2, 1024, 1024, 4, 4, 128, 128, BF),
        dict(causal=True, bias=(2, 4), cap=50.0, dropout=0.1),
    ),
    "bias shared": ((2, 1024, 1024, 4, 2, 128, 128, BF), dict(causal=True, bias=(2, 1))),
    "dense mask": ((2, 1024, 1024, 4, 4, 64, 64, BF), dict(dense=True)),
    "negative scale": ((2, 512, 512, 4, 4, 64, 64, BF), dict(scale=-0.1)),
    "float16": ((2, 1024, 1024, 4, 4, 128, 128, HALF), dict(causal=True)),
    "float32": ((2, 1024, 1024, 4, 4, 64, 64, F32), dict(causal=True)),
    "float32 highest": ((1, 512, 512, 2, 2, 64, 64, F32), dict(causal=True, precision="highest")),
    "float32 d128": ((2, 1000, 1000, 4, 4, 128, 128, F32), dict(causal=True)),
    # as many operands as a call can have: their order is the launcher's business
    "everything d96": (
        (2, 517, 517, 4, 2, 96, 96, BF),
        dict(causal=True, segments=True, dense=True, bias=(1, 4), sinks=True, dropout=0.1, cap=9.0),
    ),
    "one query": ((4, 1, 2048, 8, 2, 128, 128, BF), {}),
    "one tile d128": ((1, 128, 128, 1, 1, 128, 128, BF), dict(causal=True)),
    "one tile d256": ((1, 128, 128, 1, 1, 256, 256, BF), {}),
    "many keys": ((1, 1024, 20480, 1, 1, 128, 128, BF), {}),
    "gqa q<k": ((1, 512, 1024, 8, 2, 128, 128, BF), {}),
    "odd full d128": ((1, 1003, 777, 2, 2, 128, 128, BF), {}),
    "odd offset d128": ((2, 777, 1003, 2, 2, 128, 128, BF), dict(causal=True, causal_offset=226)),
    "odd causal d64": ((2, 777, 1003, 2, 2, 64, 64, BF), dict(causal=True)),
    "odd full d192/128": ((1, 777, 1003, 2, 2, 192, 128, BF), {}),
    "odd gqa cap d256": ((1, 777, 1003, 4, 2, 256, 256, BF), dict(causal=True, cap=5.0)),
    "offset -128 d128": ((1, 640, 512, 2, 2, 128, 128, BF), dict(causal=True, causal_offset=-128)),
    "offset -128 d256": ((1, 640, 512, 2, 2, 256, 256, BF), dict(causal=True, causal_offset=-128)),
    "window both d128": ((1, 1024, 1024, 2, 2, 128, 128, BF), dict(sliding_window=(200, 100))),
    "window both d256": ((1, 1024, 1024, 2, 2, 256, 256, HALF), dict(sliding_window=(200, 100))),
    "segments full": ((1, 1024, 1024, 2, 2, 128, 128, BF), dict(segments=True)),
    "segments q>k": ((2, 1024, 1000, 4, 2, 128, 128, BF), dict(causal=True, segments=True)),
    "segments q>k d256": ((2, 1024, 1000, 4, 2, 256, 256, BF), dict(causal=True, segments=True)),
    "segments cap d64": (
        (1, 1024, 1024, 4, 2, 64, 64, BF), dict(causal=True, segments=True, cap=5.0),
    ),
}  # fmt: skip
# patterns: blocks of rows and keys, how many are seen, the axes they differ on
SPARSE: dict[str, tuple[tuple[Any, ...], dict[str, Any]]] = {
    "causal 128": (
        (1, 1024, 1024, 4, 4, 128, 128, BF), dict(causal=True, pattern=((128, 128), 0.3, (1, 4))),
    ),
    "more than programs": (
        (1, 4096, 4096, 8, 8, 128, 128, BF), dict(causal=True, pattern=((128, 128), 0.15, (1, 8))),
    ),
    "all seen": (
        (1, 1024, 1024, 4, 4, 128, 128, BF), dict(causal=True, pattern=((128, 128), 2.0, (1, 1))),
    ),
    "none seen": (
        (1, 1024, 1024, 4, 4, 128, 128, BF), dict(causal=True, pattern=((128, 128), -1.0, (1, 1))),
    ),
    "32 x 16": ((1, 1024, 1024, 4, 4, 128, 128, BF), dict(pattern=((32, 16), 0.2, (1, 4)))),
    "across, odd": (
        (2, 1000, 777, 4, 2, 64, 64, BF), dict(causal=True, pattern=((100, 48), 0.4, (1, 4))),
    ),
    "across in sixteens": (
        (2, 1000, 777, 4, 2, 64, 64, BF), dict(causal=True, pattern=((96, 48), 0.4, (2, 4))),
    ),
    "64 x 32 window": (
        (1, 1024, 1024, 4, 4, 128, 128, BF),
        dict(sliding_window=(300, 200), pattern=((64, 32), 0.3, (1, 4))),
    ),
    "segments cap": (
        (2, 1100, 1100, 8, 2, 128, 128, BF),
        dict(causal=True, segments=True, cap=9.0, pattern=((128, 64), 0.5, (2, 8))),
    ),
    "sinks over lists": (
        (1, 1000, 1000, 8, 2, 128, 128, BF),
        dict(causal=True, sliding_window=400, sinks=True, pattern=((128, 64), 0.4, (1, 8))),
    ),
    "256 full gqa": (
        (1, 2048, 1536, 8, 2, 128, 128, BF), dict(pattern=((256, 256), 0.3, (1, 8))),
    ),
    "one column": ((1, 4096, 4096, 2, 2, 64, 64, BF), dict(pattern=((4096, 128), 0.1, (1, 2)))),
    "256 d256": (
        (1, 1024, 1024, 4, 2, 256, 256, BF), dict(causal=True, pattern=((256, 256), 0.4, (1, 1))),
    ),
    "options": (
        (2, 1024, 1024, 4, 2, 128, 128, BF),
        dict(
            causal=True, sliding_window=700, segments=True, sinks=True, dropout=0.1, cap=9.0,
            bias=(1, 4), dense=True, pattern=((128, 64), 0.5, (2, 4)),
        ),
    ),
}  # fmt: skip
# relative error of a whole array; float32 products at default precision are TF32
BOUND = {"bfloat16": 8e-3, "float16": 2e-3, "float32": 5e-3}


def case(name) -> tuple[tuple[Any, ...], dict[str, Any]]:
    return CASES.get(name) or SPARSE[name]


def bound(name) -> float:
    """The largest relative error of an array that is accepted."""
    if case(name)[1].get("precision") == "highest":
        return 1e-5
    return BOUND[jnp.dtype(case(name)[0][-1]).name]


def assert_sound(name, errors, same) -> None:
    """What ``check`` found of a case: within the bound, and the second run has the same bits."""
    print(name, {n: f"{e:.1e}" for n, e in errors.items()})
    assert same
    assert {n: e for n, e in errors.items() if not e <= bound(name)} == {}


@contextmanager
def ahead(request, work: Callable[[str], Any], threads: int) -> Generator[Callable[[str], Any]]:
    """``work`` of a case by its name; threads have begun with those of this run.

    Workers of pytest-xdist run side by side already: there a case begins when it is asked for.
    """
    names = [] if "PYTEST_XDIST_WORKER" in os.environ else names_in_run(request)
    with ThreadPoolExecutor(threads) as pool:
        begun = {name: pool.submit(work, name) for name in names}
        yield lambda name: begun.pop(name).result() if name in begun else work(name)


def names_in_run(request) -> list[str]:
    """The cases that this run of pytest asks of the file of ``request``."""
    here = [x for x in request.session.items if x.path == request.path and hasattr(x, "callspec")]
    return [x.callspec.params["name"] for x in here if "name" in x.callspec.params]


def inputs(name):
    """(differentiable arrays, other arrays) of a case."""
    shape, o = case(name)
    b, q_len, kv_len, h = shape[:4]
    q, k, v, do = draw(len(name), *shape)
    diff, fixed = {"q": q, "k": k, "v": v}, {"do": do}
    if "bias" in o:
        size = (*o["bias"], q_len, kv_len)
        diff["bias"] = jax.random.normal(jax.random.key(7), size, jnp.float32)
    if "sinks" in o:
        diff["sinks"] = jax.random.normal(jax.random.key(8), (h, 2), jnp.float32)
    if "segments" in o:
        fixed["ids"] = segments(b, max(q_len, kv_len))
    if "dense" in o:
        fixed["dense"] = jax.random.bernoulli(jax.random.key(5), 0.6, (b, 1, q_len, kv_len))
    if "pattern" in o:
        (rows, keys), share, lead = o["pattern"]
        blocks = (*lead, -(-q_len // rows), -(-kv_len // keys))
        fixed["pattern"] = jax.random.uniform(jax.random.key(6), blocks) < share
    fixed["dlse"] = jax.random.normal(jax.random.key(9), (b, q_len, h), jnp.float32)
    return diff, fixed


# A reference is run once: its products are not worth tuning.
UNTUNED: dict[str, Any] = {"xla_gpu_autotune_level": 0, "xla_gpu_enable_triton_gemm": False}


def with_gradients(f, options: dict[str, Any] | None = None):
    """o, lse and the gradients of a function (diff, fixed) -> (o, lse), as one jitted function.

    ``options``: of XLA.
    """

    def whole(x, fixed):
        (out, lse), back = jax.vjp(lambda x: f(x, fixed), x)
        dlse = jnp.where(jnp.isfinite(lse), fixed["dlse"], 0.0)
        return {"o": out, "lse": lse, **back((fixed["do"].astype(out.dtype), dlse))[0]}

    return jax.jit(whole, compiler_options=options)


def kernel(name, flash_attention: Callable[..., Any]):
    """This case through an implementation of flash attention, or of the operation it is for."""
    (_, q_len, kv_len, *_), o = case(name)
    names = ("causal", "causal_offset", "sliding_window", "precision")
    kwargs = {n: o[n] for n in names if n in o}

    def ours(x, fixed):
        ids = fixed.get("ids")
        more = {}
        if "pattern" in o:
            sizes = zip(("q_block_size", "kv_block_size"), o["pattern"][0], strict=True)
            more = {"block_mask": fixed["pattern"], **dict(sizes)}
        info = ids if ids is None else MaskInfo.from_segments(ids[:, :q_len], ids[:, :kv_len])
        return flash_attention(
            x["q"], x["k"], x["v"], bias=x.get("bias"), softmax_aux=x.get("sinks"), mask_info=info,
            attention_mask=fixed.get("dense"), softmax_scale=o.get("scale"),
            logits_soft_cap=o.get("cap"), dropout_prob=o.get("dropout", 0.0), dropout_seed=11,
            return_lse=True, **kwargs, **more,
        )  # fmt: skip

    return with_gradients(ours)


def truth(name):
    """This case in float32 on whole matrices."""
    (b, q_len, kv_len, h, *_), o = case(name)

    def theirs(x, fixed):
        i, j = index(q_len, kv_len)
        at = i + o.get("causal_offset", 0)
        mask = jnp.ones((1, 1, q_len, kv_len), bool)
        if o.get("causal"):
            mask &= j <= at
        if "sliding_window" in o:
            w = o["sliding_window"]
            left, right = w if isinstance(w, tuple) else (w, w)
            mask &= (j >= at - left) & (j <= at + right)
        if "ids" in fixed:
            ids, others = fixed["ids"][:, :q_len, None], fixed["ids"][:, None, :kv_len]
            mask = mask & ((ids == others) & (ids >= 0))[:, None]
        if "dense" in fixed:
            mask = mask & fixed["dense"]
        if "pattern" in fixed:
            rows, keys = o["pattern"][0]
            mask = mask & fixed["pattern"][:, :, i // rows, j // keys]
        keep = None
        if "dropout" in o:
            keep = dropout_factor(o["dropout"], 11, (b, h, q_len, kv_len)) > 0, o["dropout"]
        return reference(
            x["q"], x["k"], x["v"], mask=mask, scale=o.get("scale"), bias=x.get("bias"),
            sinks=x.get("sinks"), cap=o.get("cap"), keep=keep,
        )  # fmt: skip

    return with_gradients(theirs, UNTUNED)


def expected(name):
    """The inputs of a case and what float32 makes of them."""
    diff, fixed = jax.jit(inputs, static_argnums=0)(name)
    exact = truth(name)({n: x.astype(jnp.float32) for n, x in diff.items()}, fixed)
    return diff, fixed, exact


def check(name, flash_attention: Callable[..., Any], known=None):
    """Relative errors of o, lse and every gradient; whether two runs agree bit for bit.

    ``known``: what ``expected`` returned, when it was computed before.
    """
    diff, fixed, exact = known or expected(name)
    mine = kernel(name, flash_attention)
    errors, same = _compare(mine(diff, fixed), mine(diff, fixed), exact)
    return {n: float(e) for n, e in errors.items()}, bool(same)
