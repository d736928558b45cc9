"""The equations of a mod as assignments of Triton's language, for ``mods``.

Equations become one assignment each. An array is read at the indices that slices and gathers of
single elements give; JAX clamps them, so nothing is read past its end.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import ClosedJaxpr, Literal

from ejkernel.types.masks.structure import Unsupported

TYPES = {
    "bool": "tl.int1", "int8": "tl.int8", "int16": "tl.int16", "int32": "tl.int32",
    "int64": "tl.int64", "uint8": "tl.uint8", "uint16": "tl.uint16", "uint32": "tl.uint32",
    "float16": "tl.float16", "bfloat16": "tl.bfloat16", "float32": "tl.float32",
}  # fmt: skip
_TEMPLATES = {
    "add": "{0} + {1}", "sub": "{0} - {1}", "mul": "{0} * {1}", "add_any": "{0} + {1}",
    "max": "tl.maximum({0}, {1})", "min": "tl.minimum({0}, {1})", "neg": "-{0}",
    "abs": "tl.abs({0})", "floor": "tl.floor({0})", "ceil": "tl.ceil({0})", "exp": "tl.exp({0})",
    "exp2": "tl.exp2({0})", "log": "tl.log({0})", "log1p": "tl.log(1.0 + {0})",
    "expm1": "tl.exp({0}) - 1.0", "sqrt": "tl.sqrt({0})", "rsqrt": "tl.rsqrt({0})",
    "sin": "tl.sin({0})", "cos": "tl.cos({0})", "erf": "tl.erf({0})", "square": "{0} * {0}",
    "tanh": "tanh_from_exp2({0} * 2.8853900817779268)", "logistic": "1.0 / (1.0 + tl.exp(-{0}))",
    "eq": "{0} == {1}", "ne": "{0} != {1}", "lt": "{0} < {1}", "le": "{0} <= {1}",
    "gt": "{0} > {1}", "ge": "{0} >= {1}", "and": "{0} & {1}", "or": "{0} | {1}",
    "xor": "{0} ^ {1}", "shift_left": "{0} << {1}", "shift_right_arithmetic": "{0} >> {1}",
    "clamp": "tl.minimum(tl.maximum({1}, {0}), {2})",
    "sign": "tl.where({0} > 0, 1, 0) - tl.where({0} < 0, 1, 0)",
    "log2": "tl.log2({0})", "one_minus_square": "1.0 - {0} * {0}",
    "tan": "tl.sin({0}) / tl.cos({0})",
    "is_finite": "tl.abs({0}) < float('inf')", "rem": "{0} % {1}",
}  # fmt: skip
_CALLS = {"jit": "jaxpr", "pjit": "jaxpr", "closed_call": "call_jaxpr", "core_call": "call_jaxpr",
          "remat": "jaxpr", "checkpoint": "jaxpr", "custom_jvp_call": "call_jaxpr",
          "custom_vjp_call": "call_jaxpr", "custom_vjp_call_jaxpr": "fun_jaxpr"}  # fmt: skip
_IDENTITY = frozenset({"copy", "copy_p", "stop_gradient", "reshard", "pvary", "pcast",
                       "sharding_constraint", "optimization_barrier"})  # fmt: skip


@dataclass(frozen=True)
class Scalar:
    """A variable of the function; ``least``: a lower bound of an integer, None if unknown."""

    name: str
    least: int | None = None


@dataclass(frozen=True)
class View:
    """A part of a captured array: the first index and the size of each of its axes.

    ``axes``: the axes that are left, in order.
    """

    array: int
    shape: tuple[int, ...]
    starts: tuple[Any, ...]
    sizes: tuple[int, ...]
    axes: tuple[int, ...]

    @property
    def single(self) -> bool:
        """True if the part is one element."""
        return math.prod(self.sizes) == 1


class Vector(tuple):
    """Scalars that an equation made a vector of: the indices of a gather."""

    __slots__ = ()


class Lowering:
    """The assignments of a function, made from a jaxpr.

    Values are numpy constants, or one of the classes above. Equations of constants are evaluated.

    Raises:
        Unsupported: an equation that has no form in a tile.
    """

    def __init__(self, argument: str) -> None:
        self.argument = argument
        self.lines: list[tuple[str, str, tuple[str, ...]]] = []

    def refuse(self, reason: str) -> Unsupported:
        return Unsupported(f"{self.argument}: {reason}")

    def assign(self, text: str, values: Sequence[Any], least: int | None = None) -> Scalar:
        name = f"v{len(self.lines)}"
        names = tuple(x.name for x in values if isinstance(x, Scalar))
        self.lines.append((name, text.format(*map(self.text, values)), names))
        return Scalar(name, least)

    def text(self, value: Any) -> str:
        """Returns the source of a value that stands for a scalar."""
        if isinstance(value, Scalar):
            return value.name
        if isinstance(value, View):
            raise self.refuse("an array is used other than by its elements")
        x = np.asarray(value)
        if x.size != 1:
            raise self.refuse("a constant array is used other than by its elements")
        x = x.reshape(()).item()
        if isinstance(x, float) and not math.isfinite(x):
            return f'float("{x}")'
        return f"({x!r})" if not isinstance(x, bool) else repr(x)

    def scalar(self, value: Any) -> Any:
        """Returns a value as a scalar: the element of a part of one element is loaded."""
        if isinstance(value, Vector) and len(value) == 1:
            return value[0]
        if not isinstance(value, View):
            return value
        if not value.single:
            raise self.refuse("an array is used other than by its elements")
        offset: list[str] = []
        names = []
        for axis, start in enumerate(value.starts):
            step = math.prod(value.shape[axis + 1 :])
            if isinstance(start, Scalar):
                offset.append(f"{start.name} * {step}" if step != 1 else start.name)
                names.append(start)
            elif int(start):
                offset.append(str(int(start) * step))
        address = " + ".join([f"arrays[{value.array}]", *offset])
        loaded = f"tl.load({address})"
        if value.starts and math.prod(value.shape) >= 2**31:
            raise self.refuse("captures an array of 2^31 elements or more")
        return self.assign(loaded, names)

    # ---- equations --------------------------------------------------------------------------

    def convert_jaxpr(self, jaxpr: Any, inputs: Sequence[Any]) -> list[Any]:
        """Returns the values of the outputs of a jaxpr."""
        values: dict[Any, Any] = dict(zip(jaxpr.invars, inputs, strict=True))

        def value(x: Any) -> Any:
            return np.asarray(x.val) if isinstance(x, Literal) else values[x]

        for equation in jaxpr.eqns:
            results = self._convert_equation(equation, [value(x) for x in equation.invars])
            values.update(zip(equation.outvars, results, strict=True))
        return [value(x) for x in jaxpr.outvars]

    def _convert_equation(self, e: Any, inputs: list[Any]) -> list[Any]:
        """Returns the values of the outputs of one equation."""
        name = e.primitive.name
        if name in _CALLS and _CALLS[name] in e.params:
            inner = e.params[_CALLS[name]]
            closed = isinstance(inner, ClosedJaxpr)
            consts = [np.asarray(x) for x in inner.consts] if closed else []
            jaxpr = inner.jaxpr if closed else inner
            if jaxpr.constvars:
                jaxpr = jaxpr.replace(constvars=[], invars=[*jaxpr.constvars, *jaxpr.invars])
            return self.convert_jaxpr(jaxpr, [*consts, *inputs])
        if all(isinstance(x, np.ndarray) for x in inputs) and not e.primitive.multiple_results:
            with jax.ensure_compile_time_eval():
                return [np.asarray(e.primitive.bind(*map(jnp.asarray, inputs), **e.params))]
        if name in _IDENTITY or (name == "reduce_sum" and not e.params["axes"]):
            return inputs[:1]
        shape_of = getattr(self, f"_{name}", None)
        if shape_of is not None:
            return [shape_of(e, inputs)]
        out = e.outvars[0].aval
        if name not in _TEMPLATES or math.prod(out.shape) != 1:
            shape = "" if math.prod(out.shape) == 1 else f" of shape {list(out.shape)}"
            raise self.refuse(f"primitive {name}{shape} cannot be computed in a tile")
        if out.dtype == np.float64:
            raise self.refuse(f"primitive {name} of float64 cannot be computed in a tile")
        if name == "rem" and not jnp.issubdtype(out.dtype, jnp.integer):
            raise self.refuse("primitive rem of floats cannot be computed in a tile")
        inputs = list(map(self.scalar, inputs))
        if name in ("and", "or") and out.dtype == bool:
            for x, other in (inputs, inputs[::-1]):
                if isinstance(x, np.ndarray):
                    return [other if bool(x) == (name == "and") else x]
        if name in ("lt", "ge") and self._is_not_negative(inputs):
            return [np.asarray(name == "ge")]
        made = self.assign(_TEMPLATES[name], inputs, self._least(name, inputs, out))
        if name == "sign":
            made = self.assign(f"{{0}}.to({TYPES[out.dtype.name]})", [made])
        return [made]

    def _is_not_negative(self, inputs: Sequence[Any]) -> bool:
        """Returns whether a comparison asks if an index is negative that cannot be."""
        x, zero = inputs
        is_zero = isinstance(zero, np.ndarray) and zero.dtype.kind in "iu" and not zero.any()
        return is_zero and isinstance(x, Scalar) and x.least is not None and x.least >= 0

    def _least(self, name: str, inputs: Sequence[Any], out: Any) -> int | None:
        if not jnp.issubdtype(out.dtype, jnp.integer):
            return None
        least = [
            int(x) if isinstance(x, np.ndarray) else x.least if isinstance(x, Scalar) else None
            for x in inputs
        ]
        if name == "max":
            return max((x for x in least if x is not None), default=None)
        if None in least:
            return None
        bounds = [x for x in least if x is not None]
        if name == "add":
            return sum(bounds)
        if name == "mul" and min(bounds) >= 0:
            return math.prod(bounds)
        if name == "min":
            return min(bounds)
        if name == "clamp":
            return bounds[0]
        return 0 if name == "rem" and min(bounds) >= 0 else None

    # ---- equations with a form of their own -------------------------------------------------

    def _div(self, e: Any, inputs: list[Any]) -> Any:
        x, y = map(self.scalar, inputs)
        out = e.outvars[0].aval
        integers = jnp.issubdtype(out.dtype, jnp.integer)
        least = 0 if integers and self._least("mul", [x, y], out) is not None else None
        return self.assign("{0} // {1}" if integers else "{0} / {1}", [x, y], least)

    def _not(self, e: Any, inputs: list[Any]) -> Any:
        flag = e.outvars[0].aval.dtype == bool
        return self.assign("{0} == 0" if flag else "~{0}", [self.scalar(inputs[0])])

    def _integer_pow(self, e: Any, inputs: list[Any]) -> Any:
        x, power = self.scalar(inputs[0]), e.params["y"]
        text = " * ".join(["{0}"] * abs(power)) or "{0} * 0 + 1"
        return self.assign(text if power >= 0 else f"1.0 / ({text})", [x])

    def _pow(self, e: Any, inputs: list[Any]) -> Any:
        base, power = map(self.scalar, inputs)
        if isinstance(power, np.ndarray) and float(power) % 1:  # NaN for a negative base, as in JAX
            return self.assign("tl.exp2(tl.log2({0}) * {1})", [base, power])
        if not isinstance(base, np.ndarray) or not base > 0:
            raise self.refuse("primitive pow of two values has no form in a tile")
        return self.assign("tl.exp2({0} * {1})", [power, np.asarray(math.log2(float(base)))])

    def _select_n(self, e: Any, inputs: list[Any]) -> Any:
        flag, *cases = inputs
        if isinstance(flag, np.ndarray):
            return cases[int(flag)]
        flag, *cases = map(self.scalar, inputs)
        if len(cases) != 2 or e.invars[0].aval.dtype != bool:
            raise self.refuse("primitive select_n of more than two cases has no form in a tile")
        if all(isinstance(x, np.ndarray) for x in cases):
            dtype = TYPES[e.outvars[0].aval.dtype.name]
            if dtype == "tl.int1":
                flags = [bool(x) for x in cases]
                return flag if flags == [False, True] else self._not(e, [flag])
            return self.assign(f"tl.where({{0}}, {{2}}, {{1}}).to({dtype})", [flag, *cases])
        return self.assign("tl.where({0}, {2}, {1})", [flag, *cases])

    def _convert_element_type(self, e: Any, inputs: list[Any]) -> Any:
        x, new, old = self.scalar(inputs[0]), e.outvars[0].aval.dtype, e.invars[0].aval.dtype
        if new == old:
            return x
        if new.name == "bool":
            return self.assign("{0} != 0", [x])
        if new.name not in TYPES:
            raise self.refuse(f"values of {new.name} cannot be computed in a tile")
        integers = all(jnp.issubdtype(t, jnp.integer) for t in (new, old))
        return self.assign(f"{{0}}.to({TYPES[new.name]})", [x], x.least if integers else None)

    def _shape_only(self, e: Any, inputs: list[Any]) -> Any:
        """An equation that changes the axes of a value and no element."""
        x, out = inputs[0], e.outvars[0].aval
        if isinstance(x, View):
            left = tuple(a for a in x.axes if x.sizes[a] != 1)
            if e.primitive.name == "squeeze" and not x.single:
                gone = set(e.params["dimensions"])
                left = tuple(a for i, a in enumerate(x.axes) if i not in gone)
                return View(x.array, x.shape, x.starts, x.sizes, left)
            if not x.single or math.prod(out.shape) != 1:
                raise self.refuse(f"primitive {e.primitive.name} of an array has no form in a tile")
            x = self.scalar(x)
        if math.prod(out.shape) != 1:
            raise self.refuse(f"primitive {e.primitive.name} of shape {list(out.shape)}")
        return x

    _squeeze = _reshape = _broadcast_in_dim = _expand_dims = _shape_only

    def _concatenate(self, e: Any, inputs: list[Any]) -> Any:
        parts = [x if isinstance(x, Vector) else Vector([self.scalar(x)]) for x in inputs]
        return Vector([x for part in parts for x in part])

    def _clamped(self, start: Any, size: int, length: int) -> Any:
        """Returns a start clamped as JAX clamps it, so that ``size`` of ``length`` follow."""
        last = length - size
        if isinstance(start, np.ndarray):
            return int(np.clip(start, 0, last))
        if last == 0:
            return 0
        least = start.least is not None and start.least >= 0
        text = "tl.minimum({0}, %d)" if least else "tl.minimum(tl.maximum({0}, 0), %d)"
        return self.assign(text % last, [start], 0)

    def _narrow(self, view: View, starts: Sequence[Any], sizes: Sequence[int]) -> View:
        new_starts, new_sizes = list(view.starts), list(view.sizes)
        for axis, start, size in zip(view.axes, starts, sizes, strict=True):
            before = new_starts[axis]
            if isinstance(start, Scalar) and isinstance(before, Scalar):
                start = self.assign("{0} + {1}", [before, start], 0)
            elif isinstance(start, Scalar) and before:
                start = self.assign("{0} + {1}", [start, np.asarray(before)], 0)
            elif isinstance(before, Scalar):
                if start:
                    start = self.assign("{0} + {1}", [before, np.asarray(start)], 0)
                else:
                    start = before
            else:
                start = before + start if not isinstance(start, Scalar) else start
            new_starts[axis], new_sizes[axis] = start, size
        return View(view.array, view.shape, tuple(new_starts), tuple(new_sizes), view.axes)

    def _dynamic_slice(self, e: Any, inputs: list[Any]) -> Any:
        view, sizes = inputs[0], e.params["slice_sizes"]
        if not isinstance(view, View):
            raise self.refuse("primitive dynamic_slice of a value has no form in a tile")
        lengths = e.invars[0].aval.shape
        scalars = map(self.scalar, inputs[1:])
        starts = [self._clamped(*x) for x in zip(scalars, sizes, lengths, strict=True)]
        return self._narrow(view, starts, sizes)

    def _slice(self, e: Any, inputs: list[Any]) -> Any:
        view, params = inputs[0], e.params
        if not isinstance(view, View) or any(s != 1 for s in params["strides"] or ()):
            raise self.refuse("primitive slice of these values has no form in a tile")
        starts = params["start_indices"]
        sizes = [b - a for a, b in zip(starts, params["limit_indices"], strict=True)]
        return self._narrow(view, starts, sizes)

    def _gather(self, e: Any, inputs: list[Any]) -> Any:
        view, indices = inputs
        numbers, sizes = e.params["dimension_numbers"], e.params["slice_sizes"]
        indices = indices if isinstance(indices, Vector) else Vector([self.scalar(indices)])
        mapped = numbers.start_index_map
        plain = isinstance(view, View) and not numbers.operand_batching_dims
        if not plain or math.prod(sizes) != 1 or len(indices) != len(mapped):
            raise self.refuse("primitive gather of more than an element has no form in a tile")
        if "FILL" in str(e.params["mode"]):
            raise self.refuse("primitive gather with a fill value has no form in a tile")
        starts: list[Any] = [0] * len(sizes)
        for axis, index in zip(mapped, indices, strict=True):
            starts[axis] = self._clamped(index, 1, e.invars[0].aval.shape[axis])
        return self._narrow(view, starts, sizes)
