"""Caches for the types that Triton's interpreter constructs again at every operation.

An interpreted operation goes through the compiler's front end, which makes types, writes their
names and compares shapes. For blocks of a test's size that takes nearly all of the time. Nothing
here changes what an operation computes or rejects.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import numpy as np

# A block of one of these keeps its dtype in an operation with a block of the same dtype or with a
# scalar that the dtype can hold, in a division too.
_INTEGERS = frozenset(f"{sign}int{bits}" for sign in ("", "u") for bits in (8, 16, 32, 64))
_FLOATS = frozenset(("fp32", "fp64"))
_UNPROMOTED = _INTEGERS | _FLOATS


def _cached_init(
    make: Callable[..., None], key: Callable[..., Any], instance_field: str = ""
) -> Any:
    """Returns a constructor that copies all fields but ``instance_field`` from an equal key."""
    cache: dict[Any, dict[str, Any]] = {}

    def init(self: Any, *args: Any) -> None:
        name, fields = key(*args), vars(self)
        shared_fields = cache.get(name)
        if shared_fields is None:
            make(self, *args)
            cache[name] = {n: x for n, x in fields.items() if n != instance_field}
            return
        fields.update(shared_fields)
        if instance_field:
            fields[instance_field] = args[0]

    return init


@functools.cache
def constructors() -> list[tuple[type, Any]]:
    """Returns (class, cached constructor) of block types and of tensors."""
    import triton.language as tl

    def block(element: Any, shape: Any) -> Any:
        return element.name, *(getattr(n, "value", n) for n in shape)

    def tensor(_handle: Any, kind: Any) -> Any:
        return kind.name

    return [
        (tl.block_type, _cached_init(tl.block_type.__init__, block)),
        (tl.tensor, _cached_init(tl.tensor.__init__, tensor, instance_field="handle")),
    ]


def _cached_broadcast(semantic: Any) -> Callable[[Any, Any], tuple[Any, Any]]:
    """Returns the broadcast of two tensors, which looks for the common type once per pair."""
    from triton.runtime.interpreter import TensorHandle

    broadcast = semantic.broadcast_impl_value
    cache: dict[tuple[str, str], tuple[Any, Any]] = {}  # expansions of both

    def expansion(old: Any, new: Any) -> tuple[Any, tuple[int, ...]] | None:
        return None if new is old else (new.type, new.handle.data.shape)

    def expanded(x: Any, to: tuple[Any, tuple[int, ...]] | None) -> Any:
        if to is None:
            return x
        (kind, shape), data = to, x.handle.data
        # a view takes numpy longer than to fill a block of a test's size
        data = np.broadcast_to(data, shape) if data.size > 1 else np.full(shape, data, data.dtype)
        return semantic.make_tensor(TensorHandle(data, x.handle.dtype.scalar), kind)

    def cached(lhs: Any, rhs: Any) -> tuple[Any, Any]:
        pair = lhs.type.name, rhs.type.name
        if pair[0] == pair[1]:
            return lhs, rhs
        if pair not in cache:
            left, right = broadcast(lhs, rhs)
            cache[pair] = expansion(lhs, left), expansion(rhs, right)
            return left, right
        left, right = cache[pair]
        return expanded(lhs, left), expanded(rhs, right)

    return cached


def quicken(semantic: Any) -> None:
    """Patches the interpreter's type promotion and broadcasts to skip steps that change nothing."""
    promote = semantic.binary_op_type_checking_impl
    computed: dict[tuple[Any, ...], tuple[Any, ...]] = {}  # dtypes of promoted tensors
    semantic.broadcast_impl_value = _cached_broadcast(semantic)

    def constant(x: Any, other: Any) -> Any:
        """Returns a scalar in the dtype of the other operand if that dtype can hold it."""
        kind = getattr(other, "dtype", None)
        if kind is None or not isinstance(x, (int, float)):
            return x
        fits = kind.name in _FLOATS or (
            kind.name in _INTEGERS
            and isinstance(x, int)
            and kind.get_int_min_value() <= x <= kind.get_int_max_value()
        )
        return semantic.scalar_constant(x, kind) if fits else x

    def promoted(lhs: Any, rhs: Any, *args: Any, **kwargs: Any) -> Any:
        lhs, rhs = constant(lhs, rhs), constant(rhs, lhs)
        left, right = getattr(lhs, "dtype", None), getattr(rhs, "dtype", None)
        if left is None or right is None or left.is_ptr() or right.is_ptr():
            return promote(lhs, rhs, *args, **kwargs)
        if left.name != right.name or left.name not in _UNPROMOTED:
            pair = left.name, right.name, args, *kwargs.items()
            if pair not in computed:
                made = promote(lhs, rhs, *args, **kwargs)
                computed[pair] = tuple(x.dtype for x in made)
                return made
            lhs, rhs = map(semantic.cast, (lhs, rhs), computed[pair])
        return semantic.broadcast_impl_value(lhs, rhs)

    semantic.binary_op_type_checking_impl = promoted
    # without ``debug`` it computes everything again in 64 bits and asserts nothing
    options = semantic.builder.options
    if not options.debug:
        semantic.builder.options = dataclasses.replace(options, sanitize_overflow=False)
