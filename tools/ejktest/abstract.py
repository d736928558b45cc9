"""Calls by shapes alone, derived from the signatures of the operations.

They are traced or compiled ahead, on machines that have neither the device nor room for the arrays.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import jax
import jax.numpy as jnp

from ejkernel.types import MaskInfo, calls
from ejkernel.types.calls.axes import bare
from ejkernel.types.calls.signature import Parameter
from ejkernel.types.calls.spec import Call
from ejkernel.types.calls.words import alternatives

BF16, F32, I32 = "bfloat16", "float32", "int32"
FLOATS = ("bfloat16", "float16", "float32", "float64")
PREFERRED = ("bfloat16", "int32", "bool")  # dtypes of operands whose dtype does not matter
Arrays = dict[str, tuple[tuple[int, ...], str]]
"""Shape and dtype by name. The array "segments" stands for a mask of these segment ids."""

# sizes that follow from others, unless they are given
IMPLIED: dict[str, Callable[[Mapping[str, int]], int]] = {
    "kv_len": lambda s: s["q_len"],
    "kv_heads": lambda s: s["heads"],
    "combined_kv_heads": lambda s: 2 * s["kv_heads"],
    "v_dim": lambda s: s["head_dim"] if "head_dim" in s else s["key_dim"],
    "states": lambda s: s["batch"],
    "sequences_plus_1": lambda s: s["sequences"] + 1,
    "all_groups": lambda s: s["groups"],
}


@dataclass(frozen=True)
class AbstractCall:
    """An operation's arrays, its options, and the names of the arrays that are differentiated."""

    operation: str
    arrays: Arrays
    options: dict[str, Any] = field(default_factory=dict)
    gradients: tuple[str, ...] = ()

    def structs(self) -> dict[str, jax.ShapeDtypeStruct]:
        return {name: jax.ShapeDtypeStruct(*form) for name, form in self.arrays.items()}

    def shapes(self) -> tuple[dict[str, Any], dict[str, Any]]:
        """Returns the arrays that are differentiated, and the others."""
        others = self.structs()
        return {name: others.pop(name) for name in self.gradients}, others

    def forward(self, package: Any) -> Callable[[Any, Any], Any]:
        """Returns a function of ``shapes`` that runs the call by the kernels of a package."""

        def call(smooth: Any, fixed: Any) -> Any:
            arguments = {**smooth, **fixed}
            if "segments" in arguments:
                arguments["mask_info"] = MaskInfo.from_segments(arguments.pop("segments"))
            return getattr(package, self.operation)(**arguments, **self.options)

        return call

    def backward(self, package: Any) -> Callable[[Any, Any], Any]:
        """Returns the same for the gradients of the sum, which runs the kernels of both passes."""
        run = self.forward(package)
        return jax.grad(lambda smooth, fixed: jnp.sum(run(smooth, fixed).astype(jnp.float32)))


@cache
def call_class(operation: str) -> type[Call]:
    """Returns the ``Call`` of an operation's name."""
    classes = (getattr(calls, name) for name in vars(calls)["MODULES"])
    return next(c for c in classes if c.name == operation)


def accepted_dtypes(parameter: Parameter) -> dict[str, tuple[str, ...]]:
    """Returns the dtypes that an annotation names, by the axes of each form.

    Random keys are left out: no kernel gets one, since the call takes an integer from it.
    """
    forms: dict[str, dict[str, None]] = {}
    for arm in alternatives(parameter.annotation):
        if hasattr(arm, "dim_str"):
            axes = arm.dim_str.strip()
            dtypes = (name for name in arm.dtype.dtypes if name != "prng_key")
            forms.setdefault(axes, {}).update(dict.fromkeys(dtypes))
    return {axes: tuple(dtypes) for axes, dtypes in forms.items()}


def shape_of(operation: str, operand: str, axes: str, sizes: Mapping[str, int]) -> tuple[int, ...]:
    """Returns the shape of an operand; KeyError for an axis that ``sizes`` lacks."""
    if (operation, operand) == ("grouped_matmul", "rhs"):
        axes = "groups inner columns"
    return tuple(int(word) if word.isdigit() else sizes[bare(word)] for word in axes.split())


def abstract_call(
    operation: str,
    sizes: Mapping[str, int],
    *optional: str,
    arrays: Arrays | None = None,
    dtype: str = BF16,
    dtypes: Mapping[str, str] | None = None,
    forms: Mapping[str, int] | None = None,
    trained: bool = False,
    options: Mapping[str, Any] | None = None,
) -> AbstractCall:
    """Returns a call with the required operands and some ``optional`` ones.

    Args:
        sizes: of the axes of the signature, as far as ``IMPLIED`` does not have them.
        arrays: operands whose shapes are not the signature's axes.
        dtype: of floating operands; ``dtypes``: of those with another.
        forms: the number of the form of operands that have several; else the first that fits.
        trained: whether all floating operands are differentiated.
    """
    sizes, call = dict(sizes), call_class(operation)
    for axis, implied in IMPLIED.items():
        if axis not in sizes:
            try:
                sizes[axis] = implied(sizes)
            except KeyError:
                continue
    operands: Arrays = {}
    for parameter in call.boundary.array_parameters:
        name = parameter.name
        if name in (arrays or {}) or not (name in call.boundary.required or name in optional):
            continue
        usable = list(accepted_dtypes(parameter).items())
        axes, accepted = usable[(forms or {}).get(name, 0)]
        usual = dtype if dtype in accepted else next(d for d in PREFERRED if d in accepted)
        shape = shape_of(operation, name, axes, sizes)
        operands[name] = shape, (dtypes or {}).get(name, usual)
    operands |= arrays or {}
    smooth = tuple(n for n, (_, d) in operands.items() if d in FLOATS) if trained else ()
    return AbstractCall(operation, operands, dict(options or {}), smooth)
