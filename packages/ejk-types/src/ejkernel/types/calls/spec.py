"""Call: what one operation takes and means, said once for every backend."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import jax.numpy as jnp
import numpy as np

from ejkernel.types.calls import settle
from ejkernel.types.calls.signature import REQUIRED, Boundary

Arguments = dict[str, Any]


class Call:
    """The calls of one operation; a subclass is used as it is and never instantiated.

    A subclass has ``takes``, a function whose parameters are those of the operation, annotated
    with the words of ``words``, and overrides the other methods where it needs to;
    ``check_values`` and ``canonicalise`` change a dict of all arguments in place.

    Attributes:
        name: of the operation, as users call it.
        algorithm: its name in a registry; default: ``name``.
        outputs: axes of every output, in the words of the signature.
        boundary: the parameters, read from ``takes``.
    """

    name: ClassVar[str]
    algorithm: ClassVar[str] = ""
    outputs: ClassVar[tuple[str, ...]] = ()
    takes: ClassVar[Any]
    boundary: ClassVar[Boundary]

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if "takes" not in vars(cls):
            return
        cls.boundary = Boundary.of(cls.name, cls.takes)
        cls.algorithm = cls.algorithm or cls.name

    # ---- what a subclass says ---------------------------------------------------------------

    @staticmethod
    def check_values(a: Arguments) -> None:
        """Check Python and numpy values, call builders, turn changing numbers into arrays."""

    @staticmethod
    def canonicalise(a: Arguments) -> None:
        """Check how arguments agree, then settle what is optional."""

    @classmethod
    def argument_axes(cls, a: Arguments) -> Mapping[str, str]:
        """Axes of arguments whose annotation cannot say them."""
        return {}

    @classmethod
    def output_axes(cls, a: Arguments) -> tuple[str, ...]:
        """Axes of the outputs of this call: all of ``outputs``, unless a flag leaves out some."""
        optional = any(a.get(flag) is False for flag in ("return_lse", "return_state"))
        return cls.outputs[:1] if optional else cls.outputs

    # ---- the two steps of a call ------------------------------------------------------------

    @classmethod
    def prepare(cls, args: tuple, kwargs: Mapping[str, Any]) -> Arguments:
        """All arguments by name, outside any trace: values checked, changing numbers as arrays.

        Raises:
            TypeError: arguments that do not fit the signature.
            InvalidArgument, ValueError: a value that is known and wrong.
        """
        boundary = cls.boundary
        if args or any(name not in boundary.defaults for name in kwargs):
            a = boundary.by_name(args, kwargs)
        else:
            a = {**boundary.defaults, **kwargs}
        for name, value in kwargs.items():
            if isinstance(value, np.generic):
                static = name in boundary.static_names
                a[name] = value.item() if static else np.asarray(value)
        if "dropout_seed" in kwargs:
            settle.seed_to_array(a)
        if "cum_seqlens_k" in kwargs:
            settle.one_packing(a)
        for name, value in a.items():
            if value is REQUIRED:
                raise TypeError(f"{cls.name}() is missing the argument {name!r}")
        settle.check_int32(a, *boundary.index_names)
        cls.check_values(a)
        return a

    @classmethod
    def bind(cls, a: Arguments, *, typecheck: bool = True) -> Arguments:
        """Canonical arguments, inside the trace: dtypes, ranks and axes checked, options settled.

        Canonical arguments stay as they are.

        Raises:
            InvalidArgument: wrong dtype, rank, axis size or inconsistent axes.
            ValueError: a value out of range, contradictory arguments.
        """
        if typecheck:
            cls.boundary.check(a)
        for name in cls.boundary.index_names:
            value = a[name]
            if hasattr(value, "dtype") and value.dtype != np.int32:
                a[name] = jnp.asarray(value).astype(jnp.int32)
        cls.canonicalise(a)
        return a
