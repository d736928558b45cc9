"""Launches in allocations of their own, made through PyTorch: what a checker of memory can watch.

A checker knows only the allocations of CUDA, and JAX hands out parts of larger ones. PyTorch's
allocator without its cache (``PYTORCH_NO_CUDA_MEMORY_CACHING``) makes one for every operand and
result, which ends with its last element. XLA's compiler for GPUs does not survive a checker: only
the launches are on the GPU, and no program of XLA.
"""

from __future__ import annotations

import ctypes
import functools
import re
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import torch  # ty: ignore
import triton.language as tl
from jax._src.pallas import mpmd
from jax.experimental.mosaic.gpu import core as mosaic

from ejkernel.kernels.triton import bridge
from ejkernel.kernels.triton.bound_launch import In, Out, TensorMap, map_leaves
from ejkernel.kernels.triton.targets import current_target

BITS = {  # what NumPy and PyTorch exchange as integers
    np.dtype(ml_dtypes.bfloat16): (np.int16, torch.bfloat16),
    np.dtype(ml_dtypes.float8_e4m3fn): (np.uint8, torch.float8_e4m3fn),
    np.dtype(ml_dtypes.float8_e5m2): (np.uint8, torch.float8_e5m2),
    np.dtype(np.uint32): (np.int32, torch.uint32),
}
launched: list[str] = []  # names of kernels


def install(short: bool) -> None:
    """Every launch of Triton's and Mosaic's kernels outside of jit is made here.

    ``short``: its operands lack their last element.
    """
    bridge._primitive.def_impl(lambda *x, launch: launch_triton(*x, launch=launch, short=short))
    mpmd.mpmd_map_p.def_impl(lambda *x, **params: launch_mosaic(*x, short=short, **params))


def to_torch(x, short=False):
    """A tensor with an allocation of its own, one element short if asked."""
    x = np.array(x, order="C")
    raw, kind = BITS.get(x.dtype, (x.dtype, None))
    flat = torch.from_numpy(x.view(raw).reshape(-1))
    flat = (flat[: flat.numel() - 1] if short else flat).clone().cuda()
    return flat if kind is None else flat.view(kind)


def to_jax(tensor, aval):
    raw, kind = BITS.get(np.dtype(aval.dtype), (None, None))
    bits = tensor if kind is None else tensor.view(getattr(torch, np.dtype(raw).name))
    return jnp.asarray(bits.cpu().numpy().view(aval.dtype).reshape(aval.shape))


def operands_and_results(arrays, outs, aliases, short):
    """Tensors of both; a result that is an operand is that operand's."""
    tensors = [to_torch(x, short) for x in arrays]
    results = [to_torch(np.zeros(o.shape, o.dtype)) for o in outs]
    for operand, result in aliases.items():
        results[result] = tensors[operand]
    return tensors, results


# ---- Triton ------------------------------------------------------------------------------------


def descriptors(kernel):
    """Returns the class of a kernel's descriptors: in Gluon they have the layout of a tile."""
    from triton.experimental.gluon._runtime import GluonJITFunction
    from triton.experimental.gluon.nvidia import hopper
    from triton.tools.tensor_descriptor import TensorDescriptor

    if not isinstance(kernel, GluonJITFunction):
        return TensorDescriptor
    return lambda x, shape, strides, block: hopper.TensorDescriptor(
        x, shape, strides, block, bridge.tile_layout(block, 8 * x.element_size())
    )


def launch_triton(*arrays, launch, short=False):
    """Returns the results of a launch, made by Triton itself."""
    bound, outs = launch.bind(current_target()), launch.result_types()
    tensors, results = operands_and_results(arrays, outs, bound.aliases, short)
    described = descriptors(bound.kernel)

    def argument(value, path, constant):
        if constant and value is not None:
            return tl.constexpr(value)
        if isinstance(value, (In, Out)):
            x = (tensors if isinstance(value, In) else results)[value.index]
            return x if value.view is None else x.view(getattr(torch, value.view))
        if isinstance(value, TensorMap):
            x = (results if value.result else tensors)[value.index]
            x = x if value.view is None else x.view(getattr(torch, value.view))
            return described(x, list(value.shape), list(value.strides), list(value.block))
        return value

    arguments = {name: map_leaves(x, argument) for name, x in bound.arguments.items()}
    bound.kernel[bound.grid](**arguments, **bound.constants, **bound.options)
    torch.cuda.synchronize()
    launched.append(bound.kernel.__name__)
    return [to_jax(x, o) for x, o in zip(results, outs, strict=True)]


# ---- Mosaic GPU --------------------------------------------------------------------------------

compiled = functools.cache(mosaic._compile_as_torch_gpu_kernel)


TYPES = {
    "i8": "int8", "i32": "int32", "ui32": "uint32", "f16": "float16", "bf16": "bfloat16",
    "f32": "float32", "f8E4M3FN": "float8_e4m3fn", "f8E5M2": "float8_e5m2",
}  # fmt: skip


def shape_and_dtype(value) -> tuple[tuple[int, ...], Any]:
    """Returns the shape and dtype of a value of StableHLO."""
    *shape, kind = str(value.type).removeprefix("tensor<").removesuffix(">").split("x")
    return tuple(map(int, shape)), jnp.dtype(TYPES[kind])


class Kernel(NamedTuple):
    """The one kernel of a Pallas call, as XLA would call it."""

    name: str
    module: bytes  # what Mosaic's compiler takes
    operands: list[Any]
    results: list[jax.ShapeDtypeStruct]
    aliases: dict[int, int]  # operand -> the result that is in its place
    returned: list[int]  # the results of the call


def mosaic_call(arrays, params) -> Kernel:
    """Returns the kernel of a call; scratch memory is an operand of zeros and an unused result."""
    mosaic.KNOWN_KERNELS.clear()
    types = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in arrays]
    with jax.disable_jit(False):
        call = jax.jit(functools.partial(mpmd.mpmd_map_p.bind, **params))
        lowered = call.trace(*types).lower(lowering_platforms=("cuda",))
    (module,) = mosaic.KNOWN_KERNELS.values()
    (main,) = lowered.compiler_ir("stablehlo").body.operations
    (block,) = main.regions[0].blocks
    *others, kernel, out = block.operations
    if any("dense<0" not in str(x) for x in others if "broadcast" not in x.operation.name):
        raise NotImplementedError(f"not only zeros next to a kernel: {list(map(str, others))}")
    inputs, results = list(block.arguments), list(kernel.results)
    operands = [
        arrays[inputs.index(x)] if x in inputs else np.zeros(*shape_and_dtype(x))
        for x in kernel.operands
    ]
    alias = r"output_tuple_indices = \[(\d*)\], operand_index = (\d+)"
    aliases = re.findall(alias, str(kernel.attributes["output_operand_aliases"]))
    return Kernel(
        params["name"],
        module,
        operands,
        [jax.ShapeDtypeStruct(*shape_and_dtype(x)) for x in results],
        {int(operand): int(result or 0) for result, operand in aliases},
        [results.index(x) for x in out.operands],
    )


def launch_mosaic(*arrays, short=False, **params):
    """The results of a Pallas kernel, compiled and launched without XLA."""
    k = mosaic_call(arrays, params)
    tensors, results = operands_and_results(k.operands, k.results, k.aliases, short)
    launch, _ = compiled(k.module)
    places = [x.data_ptr() for x in (*tensors, *results)]
    launch((ctypes.c_void_p * len(places))(*places), "cuda")
    torch.cuda.synchronize()
    launched.append(k.name)
    return [to_jax(results[i], k.results[i]) for i in k.returned]
