"""Triton kernels as JAX primitives: the one way from a kernel here into a JAX program.

A ``launch.Launch`` describes one call: a frozen, hashable object that knows the types of its
results, which operand and which scalar goes to which kernel parameter, and how each operand
batches. ``call(launch, **operands)`` binds one primitive:

* lowered for CUDA or ROCm it compiles the kernel (through the code cache) and emits jax-triton's
  custom call, with exactly one configuration: nothing is timed at launch;
* under ``vmap`` it becomes one launch over the batch rows of all calls, or a loop of launches where
  a mapped operand is sequential;
* lowered for the CPU while interpretation is on (``EJKERNEL_INTERPRET=1``) it runs the same
  kernel through Triton's interpreter; otherwise lowering for the CPU is an error.

Differentiation is the business of the operation (``custom_vjp``). Nothing here imports triton
or jax_triton before a kernel is lowered.
"""

from __future__ import annotations

import functools
import os
import zlib
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax.extend.core import Primitive
from jax.interpreters import batching, mlir

from ejkernel.kernels.triton import compat
from ejkernel.kernels.triton.bound_launch import (
    BoundLaunch,
    In,
    Out,
    TensorMap,
    input_order,
    leaves,
    map_leaves,
)
from ejkernel.kernels.triton.compiled import CONSTANT, Code, ParameterPath, Source, compile_kernel
from ejkernel.kernels.triton.interpret import run_interpreted
from ejkernel.kernels.triton.launch import Launch
from ejkernel.kernels.triton.targets import current_target
from ejkernel.ops.execution.program_cache import bounded_jit
from ejkernel.ops.interpret import interpreting
from ejkernel.ops.sequential_vmap import sequential_vmap

TRITON_TYPES = {
    "bfloat16": "bf16",
    "float16": "fp16",
    "float32": "fp32",
    "float64": "fp64",
    "float8_e4m3fn": "fp8e4nv",
    "float8_e5m2": "fp8e5",
    "int8": "i8",
    "uint8": "u8",
    "int16": "i16",
    "int32": "i32",
    "uint32": "u32",
    "int64": "i64",
    "bool": "i1",
}


def call(launch: Launch, /, **operands: jax.Array | None) -> dict[str, jax.Array]:
    """Launches a kernel on operands by name, None for one left out; returns its results by name.

    Raises:
        TypeError: the launch does not declare an operand.
    """
    arrays = {name: x for name, x in operands.items() if x is not None}
    launch = launch.with_operands(arrays)
    names = [name for name, kind in launch.outputs().items() if kind is not None]
    return dict(zip(names, _primitive.bind(*arrays.values(), launch=launch), strict=True))


_primitive = Primitive("ejkernel_triton")
_primitive.multiple_results = True


@_primitive.def_abstract_eval
def _abstract(*avals, launch):
    return [compat.result_aval(avals, o.shape, o.dtype) for o in launch.result_types()]


@bounded_jit
def _eager(*arrays, launch):
    return _primitive.bind(*arrays, launch=launch)


@_primitive.def_impl
def _run_eagerly(*arrays, launch):
    return _eager(*arrays, launch=launch)


def _batch(arrays, dims, *, launch):
    size = next(a.shape[d] for a, d in zip(arrays, dims, strict=True) if d is not None)
    batched = [d is not None for d in dims]
    front = [
        a if d is None else jax.numpy.moveaxis(a, d, 0) for a, d in zip(arrays, dims, strict=True)
    ]
    if launch.is_sequential(size, batched):
        run = functools.partial(_primitive.bind, launch=launch)
        results = sequential_vmap(run, front, batched)
        return results, [0] * len(results)
    folded, operands = launch.fold(size, front, batched)
    results = _primitive.bind(*operands, launch=folded)
    split = [r.reshape(size, r.shape[0] // size, *r.shape[1:]) for r in results]
    return split, [0] * len(split)


batching.primitive_batchers[_primitive] = _batch


def specialize(launch: BoundLaunch, avals: Sequence[Any], outs: Sequence[Any]) -> Source:
    """Returns the specialisation that a launch needs: types, alignment, constants.

    Arrays start at multiples of 16 bytes under XLA; integers are specialised on being a multiple
    of 16 and on nothing else, so nearby shapes share code.
    """
    kernel = launch.kernel
    input_order(launch, len(outs))
    names = list(kernel.arg_names)
    unknown = set(launch.arguments) | set(launch.constants)
    if unknown != set(names):
        raise TypeError(
            f"{kernel.__name__}: arguments differ from the kernel's parameters in "
            f"{sorted(unknown ^ set(names))}"
        )
    signature: dict[str, Any] = {}
    constants: dict[ParameterPath, Any] = {}
    aligned: list[ParameterPath] = []

    def kind(name: str, value: Any, path: tuple[int, ...], constant: bool) -> str:
        full_path = (name, *path) if path else name
        if constant or value is None:
            constants[full_path] = value
            return CONSTANT
        if isinstance(value, (In, Out)):
            aval = (avals if isinstance(value, In) else outs)[value.index]
            aligned.append(full_path)
            return "*" + TRITON_TYPES[value.view or np.dtype(aval.dtype).name]
        if isinstance(value, TensorMap):
            aval = (outs if value.result else avals)[value.index]
            dtype = np.dtype(value.view or aval.dtype)
            block = ",".join(str(b) for b in value.block)
            layout = _layout(kernel, value.block, 8 * dtype.itemsize)
            return f"tensordesc<{TRITON_TYPES[dtype.name]}[{block}]{layout}>"
        if isinstance(value, int) and not isinstance(value, bool):
            if value % 16 == 0:
                aligned.append(full_path)
            return "i32" if -(2**31) <= value < 2**31 else "i64"
        if isinstance(value, float):
            return "fp32"
        raise TypeError(f"{kernel.__name__}: parameter {name} given {value!r}")

    for name in names:
        constant = name in launch.constants
        value = (launch.constants if constant else launch.arguments)[name]
        signature[name] = map_leaves(value, functools.partial(kind, name), constant=constant)
    return Source(
        kernel=kernel,
        signature=tuple(signature.items()),
        constants=tuple(constants.items()),
        aligned=tuple(aligned),
        options=tuple(sorted(launch.options.items())),
    )


def tile_layout(block: tuple[int, ...], bits: int) -> Any:
    """Returns Gluon's shared-memory layout of a tile with elements of ``bits`` bits."""
    from triton.experimental.gluon import language as gl

    # rows shorter than the widest swizzle have a narrower one
    return gl.NVMMASharedLayout(min(128, block[-1] * bits // 8), bits, len(block))


def _layout(kernel: Any, block: tuple[int, ...], bits: int) -> str:
    """Returns ``tile_layout`` for a signature of a Gluon kernel; "" if the compiler chooses it."""
    from triton.experimental.gluon._runtime import GluonJITFunction

    return f",{tile_layout(block, bits)!r}" if isinstance(kernel, GluonJITFunction) else ""


def _parameters(native, launch: BoundLaunch, source: Source, code: Code) -> list:
    parameters, maps = [], iter(code.tensor_maps)
    values = {**launch.arguments, **launch.constants}
    for name, kinds in source.signature:
        for value, kind in zip(leaves(values[name]), leaves(kinds), strict=True):
            if kind == CONSTANT:
                continue
            if isinstance(value, (In, Out)):
                parameters.append(native.create_array_parameter(0, 16))
            elif isinstance(value, TensorMap):
                parameters.extend(_tensor_map(native, value, next(maps)))
            elif kind == "fp32":
                parameters.append(native.create_scalar_parameter(float(value), "fp32"))
            else:
                parameters.append(native.create_scalar_parameter(int(value), kind))
    return parameters


def _tensor_map(native, value: TensorMap, metadata: dict) -> list:
    from triton.backends.nvidia.driver import TMA_DTYPE_DEVICE_TO_HOST

    descriptor = native.create_tma_descriptor_parameter(
        elem_type=TMA_DTYPE_DEVICE_TO_HOST[metadata["elem_type"]],
        swizzle=metadata["swizzle"],
        shape=value.shape,
        strides=value.strides,
        block_shape=tuple(metadata["block_size"]),
        oob_fill=0,
    )
    # the kernel receives the descriptor followed by its shape and strides
    shape = [native.create_scalar_parameter(int(n), "i32") for n in value.shape]
    strides = [native.create_scalar_parameter(int(n), "i64") for n in value.strides]
    return [descriptor, *shape, *strides]


def _lower(platform: str, context, *operands, launch):
    tools = compat.toolchain()
    native = tools.native
    target = current_target()
    if target.platform != platform:
        raise compat.IncompatibleVersions(
            f"lowering for {platform}, but the target is {target.name}"
        )
    bound = launch.bind(target)
    source = specialize(bound, context.avals_in, context.avals_out)
    code = compile_kernel(source, target)
    text = code.text if platform == "cuda" else _code_object(code)
    kernel_args = [
        code.name,
        code.num_warps,
        1,
        code.shared,
        text,
        "",
        target.arch if isinstance(target.arch, int) else 0,
    ]
    if code.scratch:
        if tools.api_version < 4:
            raise compat.IncompatibleVersions(
                f"{code.name} needs scratch memory, which jax-triton 0.3 cannot give it; "
                f"{compat.WORKS}"
            )
        kernel_args += [code.scratch, code.scratch_align]
    grid = (*bound.grid, 1, 1)[:3]
    launched = native.TritonKernelCall(
        native.TritonKernel(*kernel_args),
        *(int(n) for n in grid),
        _parameters(native, bound, source, code),
    )
    opaque = zlib.compress(launched.to_proto(code.name, b""))
    order = input_order(bound, len(context.avals_out))
    operands = [operands[i] for i in order]
    context = context.replace(avals_in=[context.avals_in[i] for i in order])
    aliases = {order.index(operand): result for operand, result in bound.aliases.items()}
    lowering = functools.partial(
        jax.ffi.ffi_lowering, tools.call_target, operand_output_aliases=aliases
    )
    if tools.api_version == 4:
        return lowering(api_version=4)(context, *operands, opaque=opaque)
    return lowering(api_version=2, backend_config=opaque)(context, *operands)


def _code_object(code: Code) -> str:
    """Writes the code object to a file, whose path ROCm's launcher takes."""
    import tempfile

    handle, path = tempfile.mkstemp(suffix=".hsaco")
    with os.fdopen(handle, "wb") as file:
        file.write(bytes.fromhex(code.text))
    return path


def _lower_cpu(context, *operands, launch):
    if not interpreting():
        raise NotImplementedError(
            f"{type(launch).__name__}: a Triton kernel needs a GPU; on the CPU set "
            "EJKERNEL_INTERPRET=1 or use platform 'xla'"
        )

    def interpret(*arrays):
        run_kernel = functools.partial(run_interpreted, launch)
        return jax.pure_callback(run_kernel, list(launch.result_types()), *arrays)

    return mlir.lower_fun(interpret, multiple_results=True)(context, *operands)


mlir.register_lowering(_primitive, functools.partial(_lower, "cuda"), platform="cuda")
mlir.register_lowering(_primitive, functools.partial(_lower, "rocm"), platform="rocm")
mlir.register_lowering(_primitive, _lower_cpu, platform="cpu")
