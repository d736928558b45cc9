"""Small calls of the Triton kernels, for a checker of memory accesses on this GPU.

    compute-sanitizer --report-api-errors no --error-exitcode 9 python tools/gpu/check_memory.py
    compute-sanitizer --tool racecheck --error-exitcode 9 python tools/gpu/check_memory.py

A checker knows only the allocations of CUDA, and JAX hands out parts of larger ones. So each launch
is made by PyTorch's allocator without its cache: every operand and result is an allocation that
ends with its last element. Lengths are odd, so that every tile at an end is cut. ``--control``
takes an element from the end of each operand: a checker that then reports nothing sees nothing.
The option of the first line leaves out attributes that Triton's launcher asks for and CUDA refuses.
Exits with 1 when a result is not finite.
"""

from __future__ import annotations

import os
import sys
import time

os.environ["PYTORCH_NO_CUDA_MEMORY_CACHING"] = "1"
os.environ["XLA_PYTHON_CLIENT_PREALLOCATE"] = "false"
sys.path.insert(0, __file__.rsplit("/", 3)[0])

import ml_dtypes
import numpy as np
import torch  # ty: ignore
from tools.gpu.common import jax, jnp

from ejkernel.kernels.triton import bridge
from ejkernel.kernels.triton.flash_attention import flash_attention
from ejkernel.kernels.triton.grouped_matmul import grouped_matmul
from ejkernel.kernels.triton.page_attention import page_attention
from ejkernel.kernels.triton.ragged_decode_attention import ragged_decode_attention
from ejkernel.kernels.triton.ragged_page_attention_v3 import ragged_page_attention_v3
from ejkernel.kernels.triton.targets import current_target
from ejkernel.types import MaskInfo
from ejktest.ragged_cases import Mix, writing
from ejktest.ragged_cases import draw as draw_mix

BF, F32, I8, E4 = jnp.bfloat16, jnp.float32, jnp.int8, jnp.float8_e4m3fn
RNG = np.random.default_rng(0)


def normal(*shape, dtype=BF):
    # NumPy's cast is not one more program to compile
    return jnp.asarray(RNG.standard_normal(shape, np.float32).astype(jnp.dtype(dtype)))


# name: (q_len, kv_len, heads, kv_heads, d, dv, dtype), options
FLASH = {
    "causal gqa d128": ((131, 131, 4, 2, 128, 128, BF), dict(causal=True)),
    "d256": ((70, 70, 1, 1, 256, 256, BF), dict(causal=True)),
    "d40/24 window": ((67, 133, 2, 2, 40, 24, BF), dict(sliding_window=(20, 5))),
    "bias sinks cap dense": (
        (75, 75, 2, 1, 96, 96, BF),
        dict(causal=True, logits_soft_cap=9.0, bias=True, sinks=True, dense=True),
    ),
    "dropout": ((129, 129, 1, 1, 64, 64, BF), dict(dropout_prob=0.5, dropout_seed=1)),
    "segments": ((100, 100, 2, 2, 64, 64, BF), dict(causal=True, ids=True)),
    "float32": ((65, 65, 1, 1, 64, 64, F32), dict(causal=True)),
}
# name: (context lengths, heads, kv heads, head dim, page size, cache dtype), options
PAGES = {
    "page 16": (((1, 17, 131), 4, 2, 64, 16, BF), {}),
    "int8": (((70, 0), 4, 1, 128, 16, I8), dict(k_scale=0.1, v_scale=0.1)),
    "float8 window": (((70, 33), 4, 2, 128, 32, E4), dict(sliding_window=20)),
}
# name: mix, options
MIXES = {
    "page 16": Mix((1, 0, 70, 2), (37, 5, 131, 2), h=4, hk=2, d=64),
    "page 1 window": Mix((1, 33), (40, 61), h=4, hk=2, d=80, ps=1, window=20),
    "int8 packed": Mix((3, 40), (40, 40), h=4, hk=1, d=72, kv="int8", packed=True),
    "cut into parts": Mix((9, 1), (9001, 500), h=2, hk=1, d=64, sinks=1),
}
# name: (group sizes, rows, matrices, inner, columns, dtype), options
GROUPED = {
    "descriptors": (((130, 0, 1, 127), 261, 4, 192, 264, BF), {}),
    "transposed some": (
        ((5, 70, 60, 9), 150, 2, 128, 136, BF),
        dict(transpose_rhs=True, offset=1, existing=True),
    ),
    "odd": (((33, 100), 135, 2, 75, 67, BF), {}),
    "odd float32": (((33, 100), 120, 2, 35, 67, F32), {}),
}


def flash(name):
    (q_len, kv_len, h, hk, d, dv, dtype), options = FLASH[name]
    o, b = dict(options), 2
    x = {
        "q": normal(b, q_len, h, d, dtype=dtype),
        "k": normal(b, kv_len, hk, d, dtype=dtype),
        "v": normal(b, kv_len, hk, dv, dtype=dtype),
    }
    if o.pop("bias", False):
        x["bias"] = normal(1, h, q_len, kv_len, dtype=dtype)
    if o.pop("sinks", False):
        x["sinks"] = normal(h, 1, dtype=F32)
    fixed = {}
    if o.pop("ids", False):
        fixed["ids"] = jnp.asarray((np.arange(q_len) // 30)[None].repeat(b, 0).astype(np.int32))
    if o.pop("dense", False):
        seen = RNG.random((b, 1, q_len, kv_len)) < 0.7
        fixed["dense"] = jnp.asarray(seen | np.eye(q_len, kv_len, dtype=bool))

    def whole(x, fixed):
        info = MaskInfo.from_segments(fixed["ids"]) if "ids" in fixed else None

        def run(x):
            return flash_attention(
                x["q"], x["k"], x["v"], x.get("bias"), softmax_aux=x.get("sinks"), mask_info=info,
                attention_mask=fixed.get("dense"), return_lse=True, **o,
            )  # fmt: skip

        out, back = jax.vjp(run, x)
        return out, back(jax.tree.map(jnp.ones_like, out))

    return whole(x, fixed)


def pages(name):
    (lens, h, hk, d, size, kind), options = PAGES[name]
    counts = [-(-n // size) for n in lens]
    total, columns = sum(counts), max(1, *counts)
    order, tables, at = RNG.permutation(total), np.full((len(lens), columns), -1, np.int32), 0
    for row, n in enumerate(counts):
        tables[row, :n] = order[at : at + n]
        at += n
    caches = []
    for _ in range(2):
        raw = RNG.standard_normal((total, size, hk, d), np.float32)
        caches.append(jnp.asarray((raw * 20 if kind == I8 else raw).astype(jnp.dtype(kind))))
    lengths = jnp.asarray(lens, jnp.int32)
    return page_attention(
        normal(len(lens), h, d), *caches, lengths, jnp.asarray(tables), num_splits=2, **options
    )


def ragged(name):
    m = MIXES[name]
    x = draw_mix(m)
    if name == "page 16":  # out of order, beyond the table, pages that are none
        x["starts"], x["lens"] = jnp.asarray([3, 90, 40, 60, 99]), x["lens"] + 1000
        x["tables"] = x["tables"] - 5
    f, args = writing(ragged_page_attention_v3, m, x)
    return f(*args)


def contiguous(_):
    k, v = normal(3, 77, 2, 64), normal(3, 77, 2, 40)
    start, end = jnp.asarray([0, -9, 76]), jnp.asarray([77, 10, 1000])
    return ragged_decode_attention(normal(3, 4, 64), k, v, start, end)


def grouped(name):
    (sizes, m, held, k, n, dtype), options = GROUPED[name]
    o = dict(options)
    shape = (held, n, k) if o.get("transpose_rhs") else (held, k, n)
    existing, offset = normal(m, n) if o.pop("existing", False) else None, o.pop("offset", None)

    def run(lhs, rhs):
        return grouped_matmul(lhs, rhs, jnp.asarray(sizes, jnp.int32), offset, existing, **o)

    out, back = jax.vjp(run, normal(m, k, dtype=dtype), normal(*shape, dtype=dtype))
    return out, back(jnp.ones_like(out))


CALLS = {f"flash {n}": (flash, n) for n in FLASH} | {f"page {n}": (pages, n) for n in PAGES}
CALLS |= {f"ragged {n}": (ragged, n) for n in MIXES} | {"contiguous": (contiguous, "")}
CALLS |= {f"grouped {n}": (grouped, n) for n in GROUPED}


# ---- launches in allocations of their own ------------------------------------------------------

BITS = {  # what NumPy and PyTorch exchange as integers
    np.dtype(ml_dtypes.bfloat16): (np.int16, torch.bfloat16),
    np.dtype(ml_dtypes.float8_e4m3fn): (np.uint8, torch.float8_e4m3fn),
    np.dtype(np.uint32): (np.int32, torch.uint32),
}
launches = 0


def to_torch(x, short):
    """A tensor with an allocation of its own, one element short if asked."""
    x = np.ascontiguousarray(x)
    raw, kind = BITS.get(x.dtype, (x.dtype, None))
    flat = torch.from_numpy(x.view(raw).reshape(-1))
    flat = (flat[: flat.numel() - 1] if short else flat).clone().cuda()
    return flat if kind is None else flat.view(kind)


def to_jax(tensor, aval):
    raw, kind = BITS.get(np.dtype(aval.dtype), (None, None))
    bits = tensor if kind is None else tensor.view(getattr(torch, np.dtype(raw).name))
    return jnp.asarray(bits.cpu().numpy().view(aval.dtype).reshape(aval.shape))


def launch_alone(*arrays, plan, short=False):
    """The results of a plan, launched by Triton itself."""
    global launches
    launch, outs = plan.launch(current_target()), plan.outputs()
    given = [to_torch(x, short) for x in arrays]
    results = [to_torch(np.zeros(o.shape, o.dtype), False) for o in outs]
    for operand, result in launch.aliases.items():
        results[result] = given[operand]
    arguments = {}
    for name, value in launch.arguments.items():
        if isinstance(value, (bridge.In, bridge.Out)):
            x = (given if isinstance(value, bridge.In) else results)[value.index]
            value = x if value.view is None else x.view(getattr(torch, value.view))
        elif isinstance(value, bridge.TensorMap):
            from triton.tools.tensor_descriptor import TensorDescriptor

            x = given[value.index]
            value = TensorDescriptor(x, list(value.shape), list(value.strides), list(value.block))
        arguments[name] = value
    launch.kernel[launch.grid](
        **arguments, **launch.constants, num_warps=launch.num_warps,
        num_stages=launch.num_stages, **launch.options,
    )  # fmt: skip
    torch.cuda.synchronize()
    launches += 1
    return [to_jax(x, o) for x, o in zip(results, outs, strict=True)]


def main() -> None:
    start, failed, control = time.time(), 0, "--control" in sys.argv[1:]
    print(jax.devices()[0], flush=True)
    torch.empty(1, device="cuda")
    bridge._primitive.def_impl(lambda *x, plan: launch_alone(*x, plan=plan, short=control))
    for call, (run, name) in list(CALLS.items())[: 1 if control else None]:
        before, earlier = time.time(), launches
        out = run(name)
        good = all(np.isfinite(np.asarray(x, np.float32)).all() for x in jax.tree.leaves(out))
        good = good and launches > earlier
        failed += not good
        mark = "ok  " if good else "FAIL"
        print(f"{mark} {call}: {launches - earlier} launches [{time.time() - before:.1f}s]")
    print(f"{failed} failed; {launches} launches, {time.time() - start:.0f}s in all", flush=True)
    sys.exit(bool(failed))


if __name__ == "__main__":
    main()
