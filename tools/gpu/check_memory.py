"""Calls of the Triton kernels, for a checker of memory accesses on this GPU.

    compute-sanitizer --report-api-errors no --error-exitcode 9 python tools/gpu/check_memory.py
    compute-sanitizer --tool racecheck --error-exitcode 9 python tools/gpu/check_memory.py

The calls are cases of ``pytest -m gpu`` and small ones with every option, whose lengths cut tiles;
some alone are chosen by kind or by their whole name: ``check_memory.py flash "paged page 16"``.
A checker knows only the allocations of CUDA, and JAX hands out parts of larger ones. So
each launch is made by PyTorch's allocator without its cache: every operand and result is an
allocation that ends with its last element. ``--control`` takes an element from the end of each
operand: a checker that then reports nothing sees nothing. The option of the first line leaves out
attributes that Triton's launcher asks for and CUDA refuses. What is not a launch of ours runs on
JAX's CPU: XLA's compiler for GPUs does not survive a checker. Exits with 1 when a result is not a
number.
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path
from typing import Any

os.environ["PYTORCH_NO_CUDA_MEMORY_CACHING"] = "1"
os.environ["XLA_PYTHON_CLIENT_PREALLOCATE"] = "false"
os.environ["JAX_PLATFORMS"] = "cuda,cpu"
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import checkout

checkout.use()

import jax  # noqa: E402
import jax.numpy as jnp  # noqa: E402
import ml_dtypes  # noqa: E402
import numpy as np  # noqa: E402
import torch  # noqa: E402  # ty: ignore
import triton.language as tl  # noqa: E402

from ejkernel.kernels import triton  # noqa: E402
from ejkernel.kernels.triton import bridge  # noqa: E402
from ejkernel.kernels.triton.targets import current_target  # noqa: E402
from ejktest import (  # noqa: E402
    attention_at_size,
    grouped_cases,
    latent_at_size,
    paged_at_size,
    ragged_cases,
    sparse_cases,
    variants,
)

kernels: Any = triton  # its operations are found by name


def dense(name: str, operation):
    return attention_at_size.kernel(name, operation)(*attention_at_size.inputs(name))


def flash(name: str):
    return dense(name, kernels.flash_attention)


def sparse(name: str):
    return dense(name, kernels.blocksparse_attention)


def paged(name: str):
    return paged_at_size.runner(name, kernels.page_attention)(*paged_at_size.draw(name))


def latent(name: str):
    return latent_at_size.runner(name, kernels.mla_decode)(*latent_at_size.draw(name))


def ragged(name: str):
    mix = ragged_cases.CASES[name]
    x = ragged_cases.draw(mix)
    if name == "page 16":  # out of order, beyond the table, pages that are none
        x["starts"], x["lens"] = x["starts"].at[1].set(9999), x["lens"] + 1000
        x["tables"] = x["tables"] - 5
    f, arrays = ragged_cases.writing(kernels.ragged_page_attention_v3, mix, x)
    return f(*arrays)


def contiguous():
    q, k, v = (
        jnp.ones(shape, jnp.bfloat16) for shape in ((3, 4, 64), (3, 77, 2, 64), (3, 77, 2, 40))
    )
    start, end = jnp.asarray([0, -9, 76]), jnp.asarray([77, 10, 1000])
    return kernels.ragged_decode_attention(q, k, v, start, end)


def grouped(*case):
    run, arrays = grouped_cases.pull(kernels.grouped_matmul, *case)
    return run(*arrays)


def stored(case: str):
    run, arrays, _ = grouped_cases.stored_case(kernels.grouped_matmul, case)
    return run(*arrays)


def lists(name: str):
    run, arrays = sparse_cases.pull(kernels.native_sparse_attention, name)
    return run(**arrays)


def branches(name: str):
    x = sparse_cases.draw(sparse_cases.CASES[name])
    gate = jnp.ones(x["query"].shape[:3], x["query"].dtype)
    cu = jnp.asarray([0, 5, 5, 170, 251])

    def call(q, k, v):
        return kernels.native_sparse_attention(
            q, k, v, gate, None, None, 3, cu, block_size=10, sliding_window=20
        )

    arrays = [x[name] for name in ("query", "key", "value")]
    out, back = jax.vjp(call, *arrays)
    return out, back(x["do"]), call(*arrays)  # which without gradients is another launch


def whole(reverse: bool):
    """Linear attention of float32 numbers in whole chunks: on Hopper a kernel of its own."""
    q, k, v = (jnp.ones((1, 192, h, 128), jnp.float32) for h in (2, 1, 1))
    g = jnp.full((1, 192, 2), -0.1)
    run = lambda *x: kernels.recurrent_attention(*x[:3], g=x[3], reverse=reverse)  # noqa: E731
    out, back = jax.vjp(run, q, k, v, g)
    return out, back(out)


def varied(operation: str, label: str):
    call = VARIANTS[operation, label]
    smooth = {name: call.arrays[name] for name in call.gradients}
    fixed = {name: x for name, x in call.arguments.items() if name not in smooth}
    out, back = jax.vjp(lambda x: getattr(kernels, operation)(**x, **fixed), smooth)
    return out, back(jax.tree.map(jnp.ones_like, out))


VARIANTS = {
    (operation, label): call
    for operation in ("recurrent_attention", "gla_attention", "lightning_attention", "mean_pooling")
    for label, call in variants.options()[operation]
}
CALLS = (
    *((flash, name) for name in (
        "odd causal", "odd gqa cap d256", "d40/24 window", "d112 odd", "bias odd rows", "dropout",
        "segments q>k", "everything d96", "float32 d128",
    )),
    *((sparse, name) for name in ("causal 128", "32 x 16", "across, odd", "options", "none seen")),
    *((paged, name) for name in (
        "page 16", "splits 5", "window cap sinks", "int8 page 1", "e4m3 d64 window",
    )),
    *((latent, name) for name in (
        "page 16, rows", "16 heads", "page 3, 40 heads", "e4m3", "int8, 16 heads", "e4m3, 16 heads",
        "float16 and e5m2, page 16", "int8, 20 heads",
    )),
    *((ragged, name) for name in (
        "page 16", "page 1 mqa 64", "page 64", "window cap sinks", "int8 packed d72", "few long",
    )),
    (contiguous,),
    (grouped, "around a tile", "bfloat16", False),
    (grouped, "some of eight", "bfloat16", True),
    (grouped, "around a tile", "odd bfloat16", False),
    (grouped, "around a tile", "odd float32", False),
    *((stored, case) for case in ("int8", "e4m3 transposed", "e5m2", "e5m2 transposed")),
    *((lists, name) for name in ("odd group d80", "one head d64", "float32")),
    *((branches, name) for name in ("one head d64", "float32")),
    *((whole, reverse) for reverse in (False, True)),
    *((varied, *names) for names in VARIANTS),
)  # fmt: skip


# ---- launches in allocations of their own ------------------------------------------------------

BITS = {  # what NumPy and PyTorch exchange as integers
    np.dtype(ml_dtypes.bfloat16): (np.int16, torch.bfloat16),
    np.dtype(ml_dtypes.float8_e4m3fn): (np.uint8, torch.float8_e4m3fn),
    np.dtype(ml_dtypes.float8_e5m2): (np.uint8, torch.float8_e5m2),
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


def descriptors(kernel):
    """What makes the descriptors that a kernel takes: in Gluon they say how a tile lies."""
    from triton.experimental.gluon._runtime import GluonJITFunction
    from triton.experimental.gluon.language import NVMMASharedLayout
    from triton.experimental.gluon.nvidia import hopper
    from triton.tools.tensor_descriptor import TensorDescriptor

    if not isinstance(kernel, GluonJITFunction):
        return TensorDescriptor
    return lambda x, shape, strides, block: hopper.TensorDescriptor(
        x, shape, strides, block, NVMMASharedLayout(128, 8 * x.element_size(), len(block))
    )


def launch_alone(*arrays, plan, short=False):
    """The results of a plan, launched by Triton itself."""
    global launches
    launch, outs = plan.launch(current_target()), plan.outputs()
    given = [to_torch(x, short) for x in arrays]
    results = [to_torch(np.zeros(o.shape, o.dtype), False) for o in outs]
    for operand, result in launch.aliases.items():
        results[result] = given[operand]

    described = descriptors(launch.kernel)

    def argument(value, path, constant):
        if constant and value is not None:
            return tl.constexpr(value)
        if isinstance(value, (bridge.In, bridge.Out)):
            x = (given if isinstance(value, bridge.In) else results)[value.index]
            return x if value.view is None else x.view(getattr(torch, value.view))
        if isinstance(value, bridge.TensorMap):
            x = (results if value.result else given)[value.index]
            x = x if value.view is None else x.view(getattr(torch, value.view))
            return described(x, list(value.shape), list(value.strides), list(value.block))
        return value

    arguments = {name: bridge.rebuilt(x, argument) for name, x in launch.arguments.items()}
    launch.kernel[launch.grid](
        **arguments, **launch.constants, num_warps=launch.num_warps,
        num_stages=launch.num_stages, **launch.options,
    )  # fmt: skip
    torch.cuda.synchronize()
    launches += 1
    return [to_jax(x, o) for x, o in zip(results, outs, strict=True)]


def label(call) -> str:
    return " ".join((call[0].__name__, *map(str, call[1:])))


def chosen(wanted):
    """The calls of these kinds and of these names; none wanted: all."""
    kinds = {call[0].__name__: 0 for call in CALLS}
    unknown = [x for x in wanted if x not in kinds and x not in map(label, CALLS)]
    if unknown:
        sys.exit(f"no such calls: {', '.join(unknown)}; kinds are {', '.join(kinds)}")
    return [c for c in CALLS if not wanted or c[0].__name__ in wanted or label(c) in wanted]


def main() -> None:
    start, failed, control = time.time(), 0, "--control" in sys.argv[1:]
    print(jax.devices()[0], flush=True)
    torch.empty(1, device="cuda")
    bridge._primitive.def_impl(lambda *x, plan: launch_alone(*x, plan=plan, short=control))
    wanted = [name for name in sys.argv[1:] if name != "--control"]
    calls = chosen(wanted)
    for run, *case in calls[: 1 if control else None]:
        before, earlier = time.time(), launches
        with jax.disable_jit(), jax.default_device(jax.devices("cpu")[0]):
            out = run(*case)
        good = not any(np.isnan(np.asarray(x, np.float32)).any() for x in jax.tree.leaves(out))
        good = good and launches > earlier
        failed += not good
        mark = "ok  " if good else "FAIL"
        made, took = launches - earlier, time.time() - before
        print(f"{mark} {label((run, *case))}: {made} launches [{took:.1f}s]", flush=True)
    print(f"{failed} failed; {launches} launches, {time.time() - start:.0f}s in all", flush=True)
    sys.exit(bool(failed))


if __name__ == "__main__":
    main()
