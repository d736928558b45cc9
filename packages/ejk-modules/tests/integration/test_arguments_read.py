"""Every kernel reads an argument or refuses the call that gives it."""

import contextlib
import inspect
from functools import partial

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AbstractMesh, PartitionSpec

from ejkernel.kernels.pallas.compat import mosaic_gpu_problem
from ejkernel.modules._table import OPERATIONS, operation_class
from ejkernel.ops import KernelNotSupported, kernel_registry
from ejkernel.ops.call_kernel import CallKernel
from ejkernel.types import calls
from ejkernel.types.masks.structure import Unsupported
from ejktest.argument_values import IN_FLOAT64, REQUIRED, calls_with
from ejktest.bound import bound
from ejktest.dependence import is_array, shown_launches, trace
from ejktest.device import H200, described, on

IMPLEMENTATIONS = [
    i
    for name in OPERATIONS
    for i in kernel_registry.list_implementations(operation_class(name).spec.algorithm)
]

REFUSALS = (Unsupported, KernelNotSupported)
PROGRAMS = {}


@pytest.fixture(params=IMPLEMENTATIONS, ids=lambda i: i.name)
def kernel(request):
    implementation = request.param
    if implementation.backend == "gpu":
        pytest.importorskip("triton")
        if implementation.platform == "pallas" and mosaic_gpu_problem() is not None:
            pytest.skip(mosaic_gpu_problem())
    shown = shown_launches(triton=implementation.platform == "triton")
    with device_of(implementation), shown:
        yield implementation.fn
    PROGRAMS.clear()


def device_of(implementation):
    if implementation.platform == "xla":
        return contextlib.nullcontext()
    return described("TPU v5 lite", "tpu", 1) if implementation.backend == "tpu" else on(H200)


def unread(kernel):
    """Returns the names of the arguments that the kernel does not read."""
    call = kernel.call
    read = kernel.reads | {n for n, into in call.merged.items() if into in kernel.reads}
    return [name for name in call.boundary.names if name not in read]


def as_stored(kernel, arguments):
    """Returns the arguments with rows of a latent cache padded to 128 lanes, as TPUs store them."""
    if not repr(kernel).startswith("ejkernel.kernels.pallas.tpu.mla_decode"):
        return arguments
    widened = {"query", "latent_cache"} & arguments.keys()
    shapes = {n: (*arguments[n].shape[:-1], 640) for n in widened}
    wide = {n: jax.ShapeDtypeStruct(shapes[n], arguments[n].dtype) for n in widened}
    return arguments | wide


def called(kernel, arguments):
    """Returns the program of a direct call, traced once for all arguments that share a call."""
    key = repr((kernel, jax.config.jax_enable_x64, sorted(arguments.items())))
    if key not in PROGRAMS:
        PROGRAMS[key] = traced(kernel, arguments)
    return PROGRAMS[key]


def traced(kernel, arguments):
    if repr(kernel).startswith("ejkernel.kernels.pallas.gpu.grouped_matmul"):
        return trace(partial(with_gradients, kernel), arguments)
    if kernel.call.name != "ring_attention":
        return trace(kernel, arguments)
    device = jax.sharding.get_abstract_mesh().abstract_device
    mesh = AbstractMesh((2, 1), ("ring", "other"), abstract_device=device)
    options = {n: x for n, x in arguments.items() if not is_array(x)}

    def on_a_ring(**arguments):
        arrays = {n: x for n, x in arguments.items() if n not in options}
        run = jax.shard_map(
            lambda arrays: kernel(**arrays, **options),
            mesh=mesh, in_specs=PartitionSpec(), out_specs=PartitionSpec(), check_vma=False,
        )  # fmt: skip
        return run(arrays)

    return trace(on_a_ring, arguments)


def with_gradients(kernel, *, lhs, rhs, **arguments):
    """Returns the output and its gradients; Hopper's kernel computes the gradient of ``rhs``."""
    out, pull = jax.vjp(lambda lhs, rhs: kernel(lhs, rhs, **arguments), lhs, rhs)
    return out, pull(jnp.ones_like(out))


def is_consumed(kernel, name, arguments, without):
    """Returns whether the argument changes the program or its value is refused by name.

    None: the call is refused for another reason.
    """
    try:
        program = called(kernel, arguments)
    except REFUSALS as error:
        reasons = (f"{n}: " for n in (name, kernel.call.merged.get(name)))
        return any(reason in str(error) for reason in reasons) or None
    if is_array(arguments[name]):
        return name in program.read
    return program.text != called(kernel, without).text


def test_an_argument_that_is_not_read_is_refused_by_name(kernel):
    call, names = kernel.call, unread(kernel)
    for name in names:
        with jax.enable_x64(name in IN_FLOAT64):
            arguments = as_stored(kernel, next(calls_with(call.name, name))[0])
            reason = kernel.examine(bound(call, **arguments))[1]
            with pytest.raises(REFUSALS) as error:
                called(kernel, arguments)
        # some arguments are legal only with another one that is not read either
        refused = {n for n in names if n in arguments} | {call.merged.get(name)}
        assert reason.partition(": ")[0] in refused, (name, reason)
        assert reason in str(error.value)


def test_an_argument_that_is_read_is_consumed(kernel):
    for name in kernel.call.boundary.names:
        if name in unread(kernel):
            continue
        with jax.enable_x64(name in IN_FLOAT64):
            pairs = calls_with(kernel.call.name, name)
            found = [is_consumed(kernel, name, *(as_stored(kernel, x) for x in p)) for p in pairs]
        assert True in found and False not in found, (name, found)


def with_new_option(kernel):
    """Returns a kernel of the same class for an operation that takes one option more."""
    signature = inspect.signature(kernel.call.signature)
    option = inspect.Parameter(
        "attention_temperature", inspect.Parameter.KEYWORD_ONLY, default=1.0, annotation=float
    )

    def extended():
        raise NotImplementedError

    extended.__signature__ = signature.replace(parameters=[*signature.parameters.values(), option])
    call = type("Extended", (kernel.call,), {"signature": staticmethod(extended)})
    return type("Kernel", (type(kernel),), {"call": call})()


def test_an_option_that_is_added_later_is_refused_by_every_kernel(kernel):
    extended = with_new_option(kernel)
    usual = as_stored(kernel, REQUIRED[kernel.call.name])
    arguments = {**usual, "attention_temperature": 7.0}
    with pytest.raises(REFUSALS, match="attention_temperature: not supported"):
        called(extended, arguments)
    reasons = [extended.examine(bound(extended.call, **a))[1] for a in (arguments, usual)]
    assert reasons == ["attention_temperature: not supported", None]


def test_a_kernel_that_says_nothing_reads_nothing():
    kernel = type("Silent", (CallKernel,), {"call": calls.MeanPooling})()
    assert kernel.supports(bound(kernel.call, **REQUIRED["mean_pooling"])) == "x: not supported"


def test_a_name_that_the_operation_does_not_take_is_an_error():
    members = {"call": calls.MeanPooling, "reads": frozenset({"x", "chunks"})}
    with pytest.raises(TypeError, match="which mean_pooling does not take"):
        type("Misspelt", (CallKernel,), members)()
