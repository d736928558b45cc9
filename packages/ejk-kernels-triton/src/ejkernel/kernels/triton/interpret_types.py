"""What Triton's interpreter works out anew at every operation, worked out once.

An interpreted operation goes through the compiler's front end, which makes types, writes their
names and compares shapes. For blocks of a test's size that is nearly all of the time. Nothing here
changes what an operation computes or refuses.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

# A block of one of these stays what it is beside another of its type and beside a number that the
# type holds, in a division too.
_INTEGERS = frozenset(f"{sign}int{bits}" for sign in ("", "u") for bits in (8, 16, 32, 64))
_FLOATS = frozenset(("fp32", "fp64"))
_KEPT = _INTEGERS | _FLOATS


def _made_once(make: Callable[..., None], key: Callable[..., Any], own: str = "") -> Any:
    """A constructor that copies the fields, all but ``own``, of what was made for an equal key."""
    known: dict[Any, dict[str, Any]] = {}

    def init(self: Any, *args: Any) -> None:
        name = key(*args)
        if name not in known:
            make(self, *args)
            known[name] = {field: x for field, x in vars(self).items() if field != own}
        else:
            vars(self).update(known[name])
            if own:
                setattr(self, own, args[0])

    return init


@functools.cache
def constructors() -> list[tuple[type, Any]]:
    """(class, constructor) of types of blocks and of tensors, for as long as kernels are run."""
    import triton.language as tl

    def block(element: Any, shape: Any) -> Any:
        return element.name, *(getattr(n, "value", n) for n in shape)

    def tensor(_handle: Any, kind: Any) -> Any:
        return kind.name

    return [
        (tl.block_type, _made_once(tl.block_type.__init__, block)),
        (tl.tensor, _made_once(tl.tensor.__init__, tensor, own="handle")),
    ]


def quicken(semantic: Any) -> None:
    """The interpreter's rules for types, without the steps that change nothing."""
    promote = semantic.binary_op_type_checking_impl

    def constant(x: Any, beside: Any) -> Any:
        """A number as the tensor beside it takes it, where that is plain."""
        kind = getattr(beside, "dtype", None)
        if kind is None or not isinstance(x, (int, float)):
            return x
        held = kind.name in _FLOATS or (
            kind.name in _INTEGERS
            and isinstance(x, int)
            and kind.get_int_min_value() <= x <= kind.get_int_max_value()
        )
        return semantic.scalar_constant(x, kind) if held else x

    def promoted(lhs: Any, rhs: Any, *args: Any, **kwargs: Any) -> Any:
        lhs, rhs = constant(lhs, rhs), constant(rhs, lhs)
        left, right = getattr(lhs, "dtype", None), getattr(rhs, "dtype", None)
        if left is None or right is None or left.name != right.name or left.name not in _KEPT:
            return promote(lhs, rhs, *args, **kwargs)
        if lhs.type.name == rhs.type.name:
            return lhs, rhs
        return semantic.broadcast_impl_value(lhs, rhs)

    semantic.binary_op_type_checking_impl = promoted
    # without ``debug`` it computes everything again in 64 bits and asserts nothing
    options = semantic.builder.options
    if not options.debug:
        semantic.builder.options = dataclasses.replace(options, sanitize_overflow=False)
