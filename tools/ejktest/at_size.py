"""Comparisons on a GPU with a float32 reference of full matrices, which runs there.

The float64 oracles in ``oracles`` are for small arrays; here full ``[q, k]`` matrices of a
thousand rows are compared by the relative error of each array.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Generator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ejkernel.types.calls.scaled_operands import tokens_of
from ejktest.attention import Call, arrays, oracle_case, split, with_gradients, with_mask_info

# relative error of a whole array; float32 matmuls at default precision are TF32
BOUND = {"bfloat16": 8e-3, "float16": 2e-3, "float32": 5e-3}
# A reference is run once: its matmuls are not worth tuning.
UNTUNED: dict[str, Any] = {"xla_gpu_autotune_level": 0, "xla_gpu_enable_triton_gemm": False}
SEED = 11


def reference(q, k, v, *, mask=None, scale=None, bias=None, sinks=None, cap=None, drop=None):
    """Returns (o, lse) in float32 with full matmuls; mask bool broadcastable to [b, h, q, k].

    ``drop`` ``[b, h, q, k]``: factors of the probabilities.
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
    if drop is not None:
        p = p * drop
    p = p.reshape(b, k.shape[2], -1, n, k.shape[1])
    o = jnp.einsum("bhgqk,bkhd->bqhgd", p, v, precision="highest").reshape(b, n, h, -1)
    lse = jnp.where(alive, total, -jnp.inf)[..., 0]
    return o, lse.swapaxes(1, 2)


def reference_rows(q, k, v, position, *, window=None, **options):
    """Returns (o, lse) of rows ``[rows, h, d]`` at positions of tokens ``[t, hk, d]``, causally.

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
    """Returns ||a - b|| / ||b|| over entries that are finite in b; NaN in a never passes."""
    return float(_relative(a, b))


@jax.jit
def _compare(first, second, exact):
    errors = {n: _relative(first[n], exact[n]) for n in first}
    same = [jnp.array_equal(first[n], second[n], equal_nan=True) for n in first]
    return errors, jnp.all(jnp.stack(same))


def small(*lead):
    """Returns q, k and v, bfloat16 ``[*lead, 2, 300, 4, 64]``."""
    keys = jax.random.split(jax.random.key(0), 3)
    return [jax.random.normal(k, (*lead, 2, 300, 4, 64), jnp.bfloat16) for k in keys]


def check_eight_bit(kernel: Any, d: int, *, causal: bool, blocks: int = 1) -> None:
    """Holds a call of 8-bit operands to float32 on the same values, and a second run to its bits.

    Probabilities may be rounded to 3 bits of mantissa. A head has a negative scale.

    Hopper's tensor cores align the terms that they add to the largest and keep 14 bits of each
    (DeepSeek-V3, arXiv 2412.19437, section 3.5.2). So each of the d terms of a logit is off by up
    to 2^-13 of the largest partial sum, 3 sqrt(d), and their sum by about 3 d 2^-13, times the
    scale of about 2.25 / sqrt(d): 0.013 at d = 256, 2^-9 of an lse of 7 or more.
    """
    keys = jax.random.split(jax.random.key(d), 5)
    shapes = (2, 1037, 4, d), (2, 777, 2, d), (2, 777, 2, d)
    arrays = [
        jax.random.normal(key, shape).astype(jnp.float8_e4m3fn)
        for key, shape in zip(keys, shapes, strict=False)
    ]
    q_scale, k_scale = (
        1.0 + jax.random.uniform(key, (2, heads, blocks))
        for key, heads in zip(keys[3:], (4, 2), strict=True)
    )
    k_scale, v_scale = k_scale.at[0, 1].multiply(-1.0), jnp.array([[0.5, 2.0]])
    factors = (tokens_of(q_scale, 1037), tokens_of(k_scale, 777), tokens_of(v_scale, 777))
    values = [x.astype(jnp.float32) * f for x, f in zip(arrays, factors, strict=True)]
    mask = jnp.tri(1037, 777, dtype=bool) if causal else None
    o, lse = jax.jit(partial(reference, mask=mask), compiler_options=UNTUNED)(*values)
    scales = {"q_scale": q_scale, "k_scale": k_scale, "v_scale": v_scale}
    run = jax.jit(lambda x, s: kernel(*x, **s, causal=causal, return_lse=True))
    first, second = run(arrays, scales), run(arrays, scales)
    assert first[0].dtype == jnp.bfloat16
    assert relative(first[0], o) <= 3e-2
    assert relative(first[1], lse) <= 2**-9
    assert jnp.array_equal(first[0], second[0])


@contextmanager
def ahead(request, work: Callable[[str], Any], threads: int) -> Generator[Callable[[str], Any]]:
    """Yields ``work`` of a case by its name; threads have begun with the cases of this run.

    Workers of pytest-xdist run side by side already: there a case begins when it is asked for.
    """
    names = [] if "PYTEST_XDIST_WORKER" in os.environ else names_in_run(request)
    with ThreadPoolExecutor(threads) as pool:
        begun = {name: pool.submit(work, name) for name in names}
        yield lambda name: begun.pop(name).result() if name in begun else work(name)


def names_in_run(request) -> list[str]:
    """Returns the cases that this run of pytest asks of the file of ``request``."""
    items = [x for x in request.session.items if x.path == request.path and hasattr(x, "callspec")]
    return [x.callspec.params["name"] for x in items if "name" in x.callspec.params]


# ---- calls of softmax attention ------------------------------------------------------------------


def kernel(call: Call, operation: Callable[..., Any]) -> Any:
    """Returns a jitted function of ``inputs(call)``: o, lse and all gradients of an operation."""
    return jax.jit(with_gradients(with_mask_info(operation), call, SEED))


def inputs(call: Call) -> tuple[dict[str, Any], dict[str, Any]]:
    """Returns the arrays of a call that have gradients, and the others."""
    return jax.device_put(split(arrays(call)))


def bound(call: Call) -> float:
    """Returns the largest relative error of an array that is accepted."""
    return 1e-5 if call.precision == "highest" else BOUND[call.dtypes[0]]


def expected(call: Call) -> tuple[dict[str, Any], dict[str, Any], dict[str, Any]]:
    """Returns the inputs of a call and what float32 makes of them."""
    x = arrays(call)
    case = oracle_case(call, x, SEED)

    def attend(q, k, v, *, bias, softmax_aux, softmax_scale, logits_soft_cap, see, drop, **_):
        return reference(
            q, k, v, mask=see, scale=softmax_scale, bias=bias, sinks=softmax_aux,
            cap=logits_soft_cap, drop=drop,
        )  # fmt: skip

    diff, fixed = split(x)
    wide = {n: a.astype(np.float32) for n, a in {**diff, "do": fixed["do"]}.items()}
    drop = None if case.drop is None else case.drop.astype(np.float32)
    others = {"do": wide.pop("do"), "dlse": fixed["dlse"], "see": case.see, "drop": drop}
    run = jax.jit(with_gradients(attend, call), compiler_options=UNTUNED)
    return *jax.device_put((diff, fixed)), run(wide, others)


def check(call: Call, operation: Callable[..., Any], reference: Any = None) -> dict[str, float]:
    """Asserts that errors are within the bound and that two runs agree bit for bit.

    ``reference``: what ``expected`` returned, when it was computed before.
    """
    diff, fixed, exact = reference or expected(call)
    run = kernel(call, operation)
    errors, same = _compare(run(diff, fixed), run(diff, fixed), exact)
    errors = {n: float(e) for n, e in errors.items()}
    print(call.name, {n: f"{e:.1e}" for n, e in errors.items()})
    assert same
    assert {n: e for n, e in errors.items() if not e <= bound(call)} == {}
    return errors
