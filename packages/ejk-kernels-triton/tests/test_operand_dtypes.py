"""Every operand passes tracing and the front end of Triton's compiler in every dtype it may have.

Kernels compute in float32. An operand that a kernel loads without a conversion breaks the kernel
for other dtypes, and the front end says so in a tenth of the time of a full compilation. Launches
are compiled until each operand was checked in each of its dtypes, with and without each of the
other operands.
``ejktest.operand_dtypes`` derives the calls from the signatures of the operations.
"""

from __future__ import annotations

import contextlib
import importlib
import itertools
import pkgutil
import warnings
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

pytest.importorskip("triton", reason="Triton is not installed")

import triton.language as tl
from triton.runtime.jit import JITFunction

from ejkernel.kernels import triton as package
from ejkernel.kernels.triton import compat
from ejkernel.kernels.triton.compiled import Source, compile_stages
from ejkernel.kernels.triton.flash_attention import mods
from ejkernel.kernels.triton.resources import launch_source
from ejkernel.kernels.triton.serving.implementation import CacheKernel
from ejkernel.kernels.triton.targets import compile_for
from ejkernel.types import InvalidArgument
from ejkernel.types.masks.structure import Unsupported
from ejktest.operand_dtypes import UNIFORM, DtypeCase, dtype_cases
from ejktest.triton_calls import TARGETS, launches_of

HOPPER = TARGETS["sm_90"]
# ring attention launches flash attention's kernels, over a mesh axis that a call here does not have
ENTRIES = {e.public: e for e in package.PACKAGE.entries if e.public != "ring_attention"}


@dataclass
class Traced:
    """Launches of the calls of an operation.

    Attributes:
        cases: the calls.
        refused: those that the operation or the kernel refuses, with the reason.
        sources: every specialisation that the others launch, with the first of these calls.
    """

    cases: list[DtypeCase] = field(default_factory=list)
    refused: list[tuple[DtypeCase, str]] = field(default_factory=list)
    sources: dict[Source, DtypeCase] = field(default_factory=dict)


def is_float(x: Any) -> bool:
    return jnp.issubdtype(x.dtype, jnp.floating)


@contextlib.contextmanager
def _as_called(case: DtypeCase) -> Iterator[None]:
    """The state in which a call is traced: with 64 bits where it has them.

    JAX promotes nothing, as strict callers set it. 8-bit caches without scales may warn.
    """
    wide = any(np.dtype(dtype).itemsize == 8 for _, dtype in case.called.arrays.values())
    with (
        jax.enable_x64(wide),
        jax.numpy_rank_promotion("raise"),
        jax.numpy_dtype_promotion("strict"),
        compile_for(HOPPER),
        warnings.catch_warnings(),
    ):
        warnings.simplefilter("ignore")
        yield


def canonical_call(kernel: Any, case: DtypeCase, arrays: Any) -> Any:
    """A key that equal launches share: the problem, and the types of the canonical operands."""
    problem = None

    def operands(arrays: Any) -> Any:
        nonlocal problem
        canonical = kernel.call.bind(kernel.call.prepare((), {**arrays, **case.called.options}))
        problem = kernel.problem(canonical)
        reason = kernel.unsupported_reason(problem, HOPPER)
        if reason is not None:
            raise kernel.unsupported_error(reason)
        return {name: x for name, x in kernel.operands(canonical, problem).items() if x is not None}

    leaves, tree = jax.tree.flatten(jax.eval_shape(operands, arrays))
    types = tuple((x.shape, x.dtype) for x in leaves)
    return problem, tree, types, jax.config.jax_enable_x64


def program(kernel: Any, case: DtypeCase, arrays: Any) -> Any:
    """The traced call, with the gradients of its floats where those have kernels here."""
    smooth = {n: x for n, x in arrays.items() if is_float(x) and x.dtype.itemsize > 1}
    fixed = {n: x for n, x in arrays.items() if n not in smooth}

    def sum_outputs(smooth: Any, fixed: Any) -> Any:
        outputs = jax.tree.leaves(kernel(**smooth, **fixed, **case.called.options))
        return sum(jnp.sum(x.astype(jnp.float32)) for x in outputs if is_float(x))

    # XLA differentiates attention over caches; matrices of 8 bits have no gradient
    if not isinstance(kernel, CacheKernel):
        with contextlib.suppress(NotImplementedError):
            return jax.make_jaxpr(jax.grad(sum_outputs))(smooth, fixed)
    return jax.make_jaxpr(sum_outputs)(smooth, fixed)


# integers that others stand for: besides the usual int32 one narrow and one without a sign
REPEATED = ("int16", "uint8", "uint16", "uint64")


def cases_of(kernel: Any, few: bool) -> Iterator[DtypeCase]:
    """The calls of a kernel; ``few``: an operand that differs from others in one dtype alone."""
    cases = (case for case in dtype_cases(kernel.call) if case.dtype not in REPEATED)
    for (operand, _), group in itertools.groupby(cases, lambda case: (case.operand, case.axes)):
        yield from itertools.islice(group, 1 if few and operand != UNIFORM else None)


@cache
def traced(operation: str, few: bool) -> Traced:
    kernel: Any = package.PACKAGE.load(ENTRIES[operation])
    found, traced_calls = Traced(), set()
    for case in cases_of(kernel, few):
        found.cases.append(case)
        with _as_called(case):
            _, arrays = case.called.shapes()
            try:
                key = canonical_call(kernel, case, arrays)
                if key not in traced_calls:
                    launches = launches_of(program(kernel, case, arrays), HOPPER)
                    for plan, avals in launches.values():
                        found.sources.setdefault(launch_source(plan, avals, HOPPER), case)
                traced_calls.add(key)
            except (InvalidArgument, Unsupported) as error:
                found.refused.append((case, str(error)))
            except Exception as error:
                error.add_note(case.name)
                raise
    return found


def pointers(kind: Any, place: tuple[Any, ...]) -> Iterator[tuple[Any, str]]:
    """(place, type) of every array among the types of a parameter."""
    if isinstance(kind, tuple):
        for number, inner in enumerate(kind):
            yield from pointers(inner, (*place, number))
    elif kind.startswith("*"):
        yield place, kind
    elif kind.startswith("tensordesc"):
        yield place, kind.partition("[")[0]


def array_types(source: Source) -> dict[Any, str]:
    """Returns the type of every array of a launch, by its place among the parameters."""
    return dict(found for name, kind in source.signature for found in pointers(kind, (name,)))


def type_pairs(source: Source, places: set[Any]) -> set[tuple[Any, ...]]:
    """Returns what compiling a source checks: each operand's dtype with one other property.

    The other properties are whether the operand at each of ``places`` is present, and the dtypes
    that the kernel computes in.
    """
    kernel, types = source.kernel, array_types(source)
    computed = {(place, str(x)) for place, x in source.constants if isinstance(x, tl.dtype)}
    others = [*((place, place in types) for place in places), *computed]
    return {(kernel, *operand, *other) for operand in types.items() for other in others}


_checked: set[tuple[Any, ...]] = set()
_complete: set[str] = set()
"""Operations that were traced with every dtype."""


def sources_of_every_pair(sources: dict[Source, DtypeCase]) -> Iterator[Source]:
    """Yields sources with pairs that are not checked yet, those with the most first."""
    places: dict[Any, set[Any]] = {}
    for source in sources:
        places.setdefault(source.kernel, set()).update(array_types(source))
    pairs = {source: type_pairs(source, places[source.kernel]) - _checked for source in sources}
    while pairs:
        source = max(pairs, key=lambda source: len(pairs[source]))
        found = pairs.pop(source)
        if not found:
            return
        _checked.update(found)
        for other, left in pairs.items():
            if other.kernel is source.kernel:
                left -= found
        yield source


def type_errors(sources: dict[Source, DtypeCase]) -> list[str]:
    """Errors of the front end, for sources that have every pair of properties."""
    found = []
    for source in sources_of_every_pair(sources):
        # of integers it would compute everything again in 64 bits, and assert nothing
        options = (*source.options, ("sanitize_overflow", False))
        try:
            compile_stages(replace(source, options=options), HOPPER, "source")
        except Exception as error:
            cause: BaseException = error
            while cause.__cause__ is not None:
                cause = cause.__cause__
            name = f"{sources[source].name}, {source.kernel.__name__}"
            found.append(f"{name}: {type(error).__name__}: {str(cause).splitlines()[-1]}")
    return found


@pytest.mark.parametrize("operation", ENTRIES)
def test_every_dtype_of_every_operand(operation: str) -> None:
    """Compiles, or is refused by its name: no kernel refuses floats of 16 or 32 bits."""
    found = traced(operation, False)
    _complete.add(operation)
    assert type_errors(found.sources) == []
    for case, reason in found.refused:
        assert case.dtype in reason, (case.name, reason)
        assert np.dtype(case.dtype).itemsize in (1, 8), (case.name, reason)
    refused = {id(case) for case, _ in found.refused}
    taken = {(operation, c.operand, c.axes) for c in found.cases if id(c) not in refused}
    assert taken == {(operation, c.operand, c.axes) for c in found.cases}


def kernels() -> set[JITFunction]:
    """The kernels of the package: its compiled functions that no other one calls."""
    found: set[JITFunction] = set()
    for module in pkgutil.walk_packages(package.__path__, f"{package.__name__}."):
        names = vars(importlib.import_module(module.name)).values()
        found |= {x for x in names if isinstance(x, JITFunction) and x.__module__ == module.name}
    called = {name for function in found for name in function.fn.__code__.co_names}
    called.add(mods.expand_to_tile.__name__)  # by functions that are generated
    return {function for function in found if function.__name__ not in called}


@pytest.mark.skipif(not compat.has_gluon(), reason="Triton has no Gluon for two of the kernels")
def test_every_kernel_is_launched() -> None:
    programs = [traced(name, name not in _complete) for name in ENTRIES]
    launched = {source.kernel for found in programs for source in found.sources}
    assert {k.__name__ for k in kernels() - launched} == set()
