"""Outcomes of a random call on each platform, next to the call in float64 on the CPU."""

from __future__ import annotations

import contextlib
import functools
import traceback
from collections.abc import Generator, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

ORACLE = "numpy"
"""The platform that is the oracles of the tests."""
FLOAT64 = 1e-10
"""The RMS error of float64 that its rounding explains."""
NAN, SMALL = 0xFF, 0x3C
"""Bytes in freed memory: NaN in every floating dtype, and about 0.01."""


class Outcome(NamedTuple):
    """The end of a call on a platform; ``share``: its largest error, 1 is the bound."""

    operation: str
    number: int
    platform: str
    outcome: str
    share: float = 0.0
    reason: str = ""


def function_of(call: Any, platform: str) -> Any:
    """Returns the operation as a function of the arrays of a call by name."""
    from ejkernel import modules

    if call.operation == "merge_attention":
        return modules.merge_attention
    static = dict(call.static)
    if call.operation != "quantize_attention":
        return functools.partial(getattr(modules, call.operation), **static, platform=platform)
    blocks = {name: static.pop(name) for name in ("block", "smooth")}

    def quantized(query: Any, key: Any, value: Any) -> Any:
        *operands, q_scale, k_scale, v_scale = modules.quantize_attention(
            query, key, value, **blocks
        )
        scales = {"q_scale": q_scale, "k_scale": k_scale, "v_scale": v_scale}
        return modules.flash_attention(*operands, **scales, **static, platform=platform)

    return quantized


def is_wide(x: Any) -> bool:
    """Returns whether an array has floats of 16 bits or more."""
    import jax.numpy as jnp

    return jnp.issubdtype(x.dtype, jnp.floating) and np.dtype(x.dtype).itemsize > 1


def compute(call: Any, function: Any, **compiler_options: Any) -> Any:
    """Returns a jitted function of the arrays, in two parts, to outputs and gradients by name."""
    import jax

    def both(smooth: dict[str, Any], fixed: dict[str, Any]) -> dict[str, Any]:
        def outputs(smooth: dict[str, Any]) -> Any:
            leaves = jax.tree.leaves(function(**smooth, **fixed))
            return [x for x in leaves if is_wide(x)], [x for x in leaves if not is_wide(x)]

        if not smooth:
            floats, others = outputs(smooth)
            gradients = {}
        else:
            floats, back, others = jax.vjp(outputs, smooth, has_aux=True)
            cotangents = [jax.numpy.asarray(cotangent(x), x.dtype) for x in floats]
            # else XLA computes with them while it compiles
            gradients = back(jax.lax.optimization_barrier(cotangents))[0]
        flat = {f"d{n}": jax.tree.leaves(x) for n, x in gradients.items()}
        named = {f"output {i}": x for i, x in enumerate([*floats, *others])}
        return named | {f"{n} {i}": x for n, xs in flat.items() for i, x in enumerate(xs)}

    return jax.jit(both, compiler_options=compiler_options)


def cotangent(x: Any) -> np.ndarray:
    """Draws the cotangent of an output, exact in every dtype."""
    drawn = np.random.default_rng(3).standard_normal(x.shape)
    return np.round(drawn * 64) / 64


def split(call: Any, arrays: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Returns the arrays that are differentiated, and the others."""
    smooth = {n: arrays[n] for n in call.gradients}
    return smooth, {n: x for n, x in arrays.items() if n not in smooth}


def reference(call: Any) -> dict[str, np.ndarray]:
    """Returns the results of a call in float64, on the CPU."""
    import jax
    import jax.numpy as jnp

    from ejkernel import modules
    from ejktest.random_calls import WIDE, RandomCall

    cpu = jax.local_devices(backend="cpu")[0]
    arrays, operation = call.arrays, call.operation
    static = {n: x for n, x in call.static.items() if n not in WIDE}
    with jax.default_device(cpu):
        if operation == "quantize_attention":  # rounds to 8 bits as the call does
            blocks = {name: static.pop(name) for name in ("block", "smooth")}
            *operands, q_scale, k_scale, v_scale = modules.quantize_attention(**arrays, **blocks)
            arrays = {
                name: dequantized(x, scale)
                for name, x, scale in zip(
                    arrays, operands, (q_scale, k_scale, v_scale), strict=True
                )
            }
            operation = "flash_attention"
        packed = arrays.get("kv_cache", np.zeros(0))
        if packed.ndim == 5:
            arrays = {**arrays, "kv_cache": unpacked(packed, *arrays["keys"].shape[1:])}
        with jax.enable_x64(True):
            wide = jax.tree.map(
                lambda x: jnp.asarray(np.asarray(x), jnp.float64) if is_wide(x) else x, arrays
            )
            exact = RandomCall(operation, wide, static, call.gradients)
            # half of the time of a reference is a compiler's
            quickly = {"xla_backend_optimization_level": 0}
            program = compute(exact, function_of(exact, "xla"), **quickly)
            outputs = program(*split(exact, wide))
    results = {name: np.asarray(x) for name, x in outputs.items()}
    if packed.ndim == 5:
        written = list(results)[-1]
        full = packed.astype(results[written].dtype)
        unpacked(full, *arrays["keys"].shape[1:])[...] = results[written]
        results[written] = full
    return results


def unpacked(cache: np.ndarray, heads: int, dim: int) -> np.ndarray:
    """Returns the heads of keys and values in a packed cache of rank 5, a view."""
    pages, size, *_, width = cache.shape
    return cache.reshape(pages, size, -1, width)[:, :, : 2 * heads, :dim]


def dequantized(x: Any, scale: Any) -> np.ndarray:
    """Returns float64 values of 8 bits ``[b, n, h, d]`` with scales ``[b, h]`` or of blocks."""
    x, scale = np.asarray(x).astype(np.float64), np.asarray(scale).astype(np.float64)
    scale = scale.reshape(*scale.shape[:2], -1)
    tokens = -(-x.shape[1] // max(scale.shape[2], 1)) or 1
    of_tokens = np.repeat(scale, tokens, 2)[:, :, : x.shape[1]]
    return x * of_tokens.swapaxes(1, 2)[..., None]


def compare_oracle(call: Any, number: int, exact: dict[str, np.ndarray]) -> Outcome:
    """Holds the reference to the oracle's formulas in numpy, in the parts that the oracle has."""
    import jax

    from ejktest.oracles import of_calls
    from ejktest.random_calls import WIDE

    widened = jax.tree.map(
        lambda x: np.asarray(x).astype(np.float64) if is_wide(x) else x, call.arrays
    )
    static = {n: x for n, x in call.static.items() if n not in WIDE}
    expected = of_calls.expected(call.operation, widened | static, cotangent)
    common = {n: x for n, x in expected.items() if n in exact}
    share, text, _ = worst_share(call, exact, common, {}, FLOAT64)
    assert share <= 1, f"{text}, {share:.2f} of the bound"
    return Outcome(call.operation, number, ORACLE, "passed", share, text)


def fill_memory(device: Any, byte: int, sizes: Sequence[int]) -> None:
    """Frees memory of a device that was filled with a byte."""
    import jax

    usual = [1 << i for i in range(9, 25) for _ in range(3)]
    host = np.full(max([*usual, *sizes]), byte, np.uint8)
    filled = [jax.device_put(host[:size], device) for size in (*usual, *sizes)]
    jax.block_until_ready(filled)


def bits(x: Any) -> bytes:
    return np.asarray(x).tobytes()


class Error(NamedTuple):
    """RMS error over the RMS of a reference, and the largest of an entry over its size and that."""

    rms: float
    entry: float


def error_of(actual: np.ndarray, exact: np.ndarray, least: float) -> Error:
    """Returns the error of an array; what is not finite is the same.

    ``least``: an RMS; a reference of less may be all rounding.

    Raises:
        AssertionError: another shape, or other entries that are not finite.
    """
    a, r = actual.astype(np.float64), exact.astype(np.float64)
    assert a.shape == r.shape, f"shape {a.shape}, expected {r.shape}"
    finite = np.isfinite(r)
    same = np.array_equal(a[~finite], r[~finite], equal_nan=True)
    wrong = np.count_nonzero(~np.isfinite(a[finite]))
    assert wrong == 0, (
        f"{wrong} of {a.size} entries are NaN or infinite, first at {first(a, finite)}"
    )
    assert same, "entries that are not finite in the reference differ"
    a, r = a[finite], r[finite]
    if a.size == 0:
        return Error(0.0, 0.0)
    off, size = np.abs(a - r), max(rms_of(r), least, 1e-20)
    return Error(rms_of(off) / size, float(np.max(off / (np.abs(r) + size))))


def rms_of(x: np.ndarray) -> float:
    """Returns the RMS of the finite entries."""
    x = x[np.isfinite(x)].astype(np.float64)
    return float(np.sqrt(np.mean(x**2))) if x.size else 0.0


def first(a: np.ndarray, finite: np.ndarray) -> list[int]:
    """Returns the index of the first wrong entry."""
    return np.argwhere(finite & ~np.isfinite(a))[0].tolist()


def bound(call: Any, on_gpu: bool) -> float:
    """Returns the RMS error of an output that rounding explains."""
    from ejktest.at_size import BOUND

    if call.dtype == "float8_e4m3fn":
        return 3e-2  # probabilities may have 3 bits of mantissa
    if call.dtype == "float32" and (not on_gpu or call.static.get("precision") == "highest"):
        return 3e-5
    return BOUND[call.dtype]


def worst_share(
    call: Any, results: dict[str, Any], exact: dict[str, Any], usual: dict[str, Error], limit: float
) -> tuple[float, str, dict[str, Error]]:
    """Returns the largest error as a share of the accepted one, the name of its array, and errors.

    ``usual``: errors of the XLA implementation in the same dtype; twice as much is accepted.
    """
    worst, name_of, errors = 0.0, "", {}
    # gradients in which all terms cancel have errors of the terms
    least = 1e-2 * max(map(rms_of, exact.values()))
    for name, reference in exact.items():
        errors[name] = error = error_of(np.asarray(results[name]), reference, least)
        factor = 1.0 if name.startswith("output") else 2.0
        plain = usual.get(name, Error(0.0, 0.0))
        shares = (
            error.rms / max(factor * limit, 2 * plain.rms),
            error.entry / max(16 * factor * limit, 2 * plain.entry),
        )
        if max(shares) > worst:
            worst, name_of = max(shares), f"{name}: rms {error.rms:.1e}, entry {error.entry:.1e}"
    return worst, name_of, errors


@contextlib.contextmanager
def interpreters(on_gpu: bool) -> Generator[None]:
    """Within the block kernels run on a machine without a GPU too."""
    if on_gpu:
        yield
        return
    from accuracy import interpreters as usual

    with usual():
        yield


def outcomes_of(
    operation: str, seed: int, number: int, platforms: Sequence[str], verbose: bool = False
) -> Iterator[Outcome]:
    """Yields what becomes of a call on each platform, the reference first where it fails."""
    import jax

    from accuracy import have
    from ejkernel.modules._table import OPERATIONS
    from ejkernel.ops import KernelNotSupported, batch_invariant
    from ejktest.random_calls import random_call

    call, on_gpu = random_call(operation, seed, number), jax.default_backend() == "gpu"
    if verbose:
        print(call, flush=True)
    made_of = operation if operation in OPERATIONS else "flash_attention"
    present = [p for p in platforms if p != ORACLE and have(made_of, p)]
    if operation == "merge_attention":  # which is no kernel
        present = [p for p in platforms if p == "xla"]
    try:
        exact = reference(call)
    except Exception as error:
        yield failure(call, operation, number, "float64", error, verbose)
        return
    if ORACLE in platforms:
        try:
            yield compare_oracle(call, number, exact)
        except NotImplementedError as error:
            yield Outcome(operation, number, ORACLE, "refused", 0.0, str(error))
        except Exception as error:
            yield failure(call, operation, number, ORACLE, error, verbose)
    usual: dict[str, Error] = {}
    device = jax.devices()[0]
    for platform in present:
        try:
            with interpreters(on_gpu), batch_invariant(call.invariant):
                arrays = jax.device_put(split(call, call.arrays), device)
                program = compute(call, function_of(call, platform)).lower(*arrays).compile()
                runs = []
                for byte in (NAN, SMALL):
                    if on_gpu:
                        fill_memory(device, byte, [x.nbytes for x in exact.values()])
                    runs.append(jax.tree.map(np.asarray, program(*arrays)))
            share, text, errors = worst_share(call, runs[0], exact, usual, bound(call, on_gpu))
            changed = [n for n, x in runs[0].items() if bits(x) != bits(runs[1][n])]
            assert not changed, f"another run has other bits: {', '.join(changed)}"
            assert share <= 1, f"{text}, {share:.2f} of the bound"
            if platform == "xla":
                usual = errors
            yield Outcome(operation, number, platform, "passed", share, text)
        except KernelNotSupported as error:
            yield Outcome(operation, number, platform, "refused", 0.0, str(error))
        except Exception as error:
            yield failure(call, operation, number, platform, error, verbose)


def failure(
    call: Any, operation: str, number: int, platform: str, error: Exception, verbose: bool
) -> Outcome:
    """Returns the outcome of a call that raised; ``verbose``: after its traceback."""
    if verbose:
        traceback.print_exception(error)
    line = " ".join(str(error).split())
    text = f"{type(error).__name__}: {line[:600]}"
    return Outcome(operation, number, platform, "failed", 0.0, f"{text} | {call}")
