"""Call: arguments and meaning of one operation, defined once for every backend."""

from __future__ import annotations

import contextlib
from collections import namedtuple
from collections.abc import Callable, Iterator, Mapping
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np

from ejkernel.types.arrays import MAX_LENGTH, check_int32, is_symbolic
from ejkernel.types.calls import canonicalize, sample_inputs, values
from ejkernel.types.calls.axes import bare
from ejkernel.types.calls.canonicalize import Arguments
from ejkernel.types.calls.distributed import DistributedCall
from ejkernel.types.calls.signature import Boundary, axes_of
from ejkernel.types.calls.words import invalid, out_of_range
from ejkernel.types.masks.mask_info import MaskInfo
from ejkernel.types.masks.structure import Unsupported
from ejkernel.types.mods import Mod
from ejkernel.types.serving.plan import AttentionPlan

Step = Callable[[Arguments], None]
TREES = (MaskInfo, Mod, AttentionPlan)
"""Arguments that consist of arrays."""


class Call(DistributedCall):
    """The calls of one operation; a subclass is used as it is and never instantiated.

    A subclass has ``signature``, a function with the parameters of the operation, annotated with
    the types of ``words``, and overrides the other methods where it needs to. Checks that belong
    to an argument name in every operation are in ``values.BY_NAME`` and ``canonicalize.BY_NAME``.

    Attributes:
        algorithm: its name in a registry; default: ``name``.
        symbolic: the axes that an exported program may leave open.
        outputs: axes of every output, in the words of the signature; ``=name``: an argument's.
        extra_outputs_flag: the flag without which there is only the first output; "": none.
        untuned_arguments: arguments that change what is computed and not how it is cut into tiles.
        size_arguments: static integers that are sizes, such as a window.
        divisors: scales that something is divided by, so that they are never 0.
        normal_samples: whether sample inputs are normally distributed, of both signs.
        merged: arguments that ``check_values`` or ``canonicalize`` moves into another one, and the
            name of that one. A kernel that reads the latter has no need to read the former.
        StaticArguments: tuple with a field for every parameter but ``mask_info``.
        Options: tuple with a field for every parameter whose annotation is no array.
        Unsupported: what ``problem`` raises for a call that no kernel of its kind can do.
    """

    algorithm: ClassVar[str] = ""
    outputs: ClassVar[tuple[str, ...]] = ()
    extra_outputs_flag: ClassVar[str] = ""
    untuned_arguments: ClassVar[frozenset[str]] = frozenset({"softmax_scale", "return_lse"})
    size_arguments: ClassVar[frozenset[str]] = frozenset({"sliding_window", "chunk_size"})
    divisors: ClassVar[tuple[str, ...]] = ()
    normal_samples: ClassVar[bool] = False
    merged: ClassVar[Mapping[str, str]] = {}
    symbolic: ClassVar[tuple[str, ...]] = (
        "batch", "states", "q_len", "kv_len", "seq", "tokens", "rows", "q_blocks", "kv_blocks",
        "pages", "max_blocks", "inner", "columns", "channels",
    )  # fmt: skip
    signature: ClassVar[Any]
    StaticArguments: ClassVar[Any]
    Options: ClassVar[Any]
    Unsupported: ClassVar[type[Exception]] = Unsupported
    _value_checks: ClassVar[tuple[Step, ...]] = ()
    _canonicalizers: ClassVar[tuple[Step, ...]] = ()

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if "signature" not in vars(cls):
            return
        cls.boundary = Boundary.from_function(cls.name, cls.signature, cls.seeds)
        cls.boundary.check_words(cls.outputs)
        cls.algorithm = cls.algorithm or cls.name
        flags = (name for name in cls.boundary.names if name.startswith("return_"))
        cls.extra_outputs_flag = next(flags, "")
        names = [name for name in cls.boundary.names if name != "mask_info"]
        cls.StaticArguments = namedtuple(f"{cls.__name__}Arguments", names)
        static = [name for name in names if name in cls.boundary.static_names]
        cls.Options = namedtuple(f"{cls.__name__}Options", static)
        cls._value_checks, cls._canonicalizers = (
            tuple(dict.fromkeys(step for name, step in table.items() if name in cls.boundary.names))
            for table in (values.BY_NAME, canonicalize.BY_NAME)
        )

    # ---- what a subclass says ---------------------------------------------------------------

    @classmethod
    def check_values(cls, a: Arguments) -> None:
        """Check Python and numpy values, call builders, turn scalars that vary into arrays."""
        for step in cls._value_checks:
            step(a)

    @classmethod
    def check_contents(cls, a: Arguments) -> None:
        """Check values that a call relies on or clips; every index array is a NumPy array.

        A call does not ask: these values are on a device, or looking costs too much each time.
        """

    @classmethod
    def canonicalize(cls, a: Arguments) -> None:
        """Check how arguments agree, then canonicalize what is optional, in place."""
        for step in cls._canonicalizers:
            step(a)

    @classmethod
    def cautions(cls, a: Arguments) -> Iterator[str]:
        """Yield sentences about a call that is legal, but probably not what its caller wants.

        The arguments have the right form and are not canonical yet.
        """
        if a.get("dropout_prob") and any(a[name] is None for name in cls.seeds):
            yield (
                f"{cls.name}: dropout_prob without dropout_seed drops the same entries in every "
                "call; give a key for each call, such as "
                "dropout_seed=jax.random.fold_in(key, step), or a seed that is made of one, "
                'jax.random.bits(key, (), "uint32")'
            )

    @classmethod
    def constant_arguments(cls, a: Mapping[str, Any]) -> Mapping[str, str]:
        """Returns the arguments of a call that have no gradient, by name, each with the error."""
        return {}

    @classmethod
    def output_axes(cls, a: Arguments) -> tuple[str, ...]:
        """Axes of the outputs of this call."""
        return cls.select_outputs(a, cls.outputs)

    @classmethod
    def returned_axes(cls, a: Arguments, count: int) -> tuple[str, ...]:
        """Returns the axes of ``count`` outputs, which a call may have without requesting them."""
        requested = cls.output_axes(a)
        if len(requested) == count:
            return requested
        return cls.output_axes({**a, cls.extra_outputs_flag: True})[:count]

    @classmethod
    def forward_axes(cls, a: Arguments, count: int) -> tuple[str, ...]:
        """Returns the axes of the ``count`` outputs of a kernel's forward pass."""
        return cls.returned_axes(a, count)

    # ---- the two steps of a call ------------------------------------------------------------

    @classmethod
    def prepare(cls, args: tuple, kwargs: Mapping[str, Any]) -> Arguments:
        """Checks values outside any trace and returns all arguments by name.

        Scalars that vary from call to call become arrays.

        Raises:
            TypeError: arguments that do not fit the signature.
            InvalidArgument, ValueError: a value that is known and wrong.
        """
        boundary = cls.boundary
        names = kwargs.keys()
        if args or not boundary.required <= names <= boundary.defaults.keys():
            a = boundary.by_name(args, kwargs)
        else:
            a = {**boundary.defaults, **kwargs}
        for name, value in (a if args else kwargs).items():
            if isinstance(value, np.generic):
                static = name in boundary.static_names
                a[name] = value.item() if static else np.asarray(value)
            elif isinstance(value, np.ndarray) and not value.dtype.isnative:
                # refused by JAX as well, but only until it has compiled a program for the shapes
                raise invalid(name, "bytes in this machine's order", value)
            elif type(value) is tuple and name in boundary.static_names:
                a[name] = tuple(x.item() if isinstance(x, np.generic) else x for x in value)
        values.seeds_to_arrays(a, *cls.seeds)
        try:
            for name in boundary.index_names:
                if getattr(a[name], "dtype", np.int32) != np.int32:
                    check_int32(a[name], name)
            for name in boundary.scale_names:
                values.scale_to_array(a, name, divide=name in cls.divisors)
            cls.check_values(a)
        except (AttributeError, LookupError, TypeError, ValueError):
            with contextlib.suppress(OverflowError):  # a wrong value, which JAX does not name
                cls.bind(dict(a))  # a wrong form is why values look wrong, where it is one
            raise
        return a

    @classmethod
    def bind(
        cls,
        a: Arguments,
        *,
        typecheck: bool = True,
        warn: Callable[[str], object] | None = None,
    ) -> Arguments:
        """Makes arguments canonical, inside the trace: checks dtypes, ranks and axes.

        Canonical arguments stay as they are. ``warn`` is called with each of the ``cautions``.

        Raises:
            InvalidArgument: wrong dtype, rank, axis size or inconsistent axes.
            ValueError: a value out of range, contradictory arguments.
        """
        cls.check_axes(a)
        if typecheck:
            cls.boundary.check(a)
        for name in cls.boundary.index_names:
            value = a[name]
            if hasattr(value, "dtype") and value.dtype != np.int32:
                a[name] = jnp.asarray(value).astype(jnp.int32)
        cautions = tuple(cls.cautions(a))
        cls.canonicalize(a)
        if warn is not None:
            for caution in cautions:
                warn(caution)
        return a

    @classmethod
    def check_axes(cls, a: Arguments) -> None:
        """Check the size of every axis of every array.

        Raises:
            ValueError: an axis longer than ``MAX_LENGTH``.
            InvalidArgument: a symbolic size on an axis that is not among ``symbolic``.
        """
        override: Mapping[str, str] | None = None
        for p in cls.boundary.array_parameters:
            # a MaskInfo where an array belongs has a shape without sizes
            shape = a[p.name].shape if hasattr(a[p.name], "dtype") else ()
            if set(map(type, shape)) <= {int} and max(shape, default=0) <= MAX_LENGTH:
                continue
            override = cls.argument_axes(a) if override is None else override
            words = map(bare, axes_of(p, a[p.name], override))
            for i, (axis, size) in enumerate(zip(words, shape, strict=True)):
                if is_symbolic(size):
                    if axis not in (*cls.symbolic, "_"):
                        raise invalid(p.name, cls._needs_number(axis), a[p.name])
                elif size > MAX_LENGTH:
                    legal = f"at most {MAX_LENGTH} for axis {axis!r}"
                    raise out_of_range(f"{p.name}.shape[{i}]", legal, size)

    @classmethod
    def _needs_number(cls, axis: str) -> str:
        forms = (axes for p in cls.boundary.parameters for _, axes in p.forms)
        words = {bare(word) for axes in forms for word in axes.split()}
        legal = ", ".join(name for name in cls.symbolic if name in words)
        way = "export a program for each size"
        if axis == "sequences_plus_1":
            way = "repeat the last entry, as empty sequences, up to the most there will be"
        return f"a number for axis {axis!r} ({cls.name} takes symbolic {legal}; {way})"

    # ---- what a kernel asks of canonical arguments ------------------------------------------
    # Each call asks, so these loops call no functions of ours: ``test_call_cost`` counts them.

    @classmethod
    def static_arguments(cls, a: Mapping[str, Any]) -> Any:
        """All arguments but ``mask_info``, every array as its shape and dtype; hashable.

        Dtypes are names: to NumPy ``np.dtype("float64") == None`` is true, and ``jax.jit`` finds
        its programs by the equality of static arguments alone.
        """
        values = []
        for name in cls.StaticArguments._fields:
            x = a[name]
            if isinstance(x, np.dtype):
                x = x.name
            elif isinstance(x, (Mod, AttentionPlan)):
                x = x.form
            elif hasattr(x, "shape") and hasattr(x, "dtype"):
                x = jax.ShapeDtypeStruct(x.shape, x.dtype)
            values.append(x)
        return cls.StaticArguments(*values)

    @classmethod
    def options(cls, a: Mapping[str, Any]) -> Any:
        """Returns the arguments that are no arrays, hashable; dtypes are names, as above.

        None stands for a PRNG key, which is an array in canonical form, and for a plan.
        """
        values = []
        for name in cls.Options._fields:
            x = a[name]
            if isinstance(x, np.dtype):
                x = x.name
            elif isinstance(x, Mod):
                x = x.form
            elif isinstance(x, AttentionPlan) or (hasattr(x, "shape") and hasattr(x, "dtype")):
                x = None
            values.append(x)
        return cls.Options(*values)

    @classmethod
    def array_arguments(cls, a: Mapping[str, Any]) -> dict[str, Any]:
        """The arrays among the arguments, the mask, the mods and the plan, by name."""
        arrays = {}
        for name in cls.boundary.names:
            x = a[name]
            if isinstance(x, TREES) or (hasattr(x, "shape") and hasattr(x, "dtype")):
                arrays[name] = x
        return arrays

    @classmethod
    def problem(cls, a: Mapping[str, Any]) -> Any:
        """Returns the static properties a kernel needs, hashable; arrays may be abstract.

        Raises:
            Unsupported: a call that no kernel of this kind takes.
        """
        return cls.static_arguments(a)

    @classmethod
    def operands(cls, a: Mapping[str, Any], problem: Any) -> dict[str, Any]:
        """Returns the arrays a kernel reads by its names for them; None for absent arrays."""
        return cls.array_arguments(a)

    @classmethod
    def empty_outputs(cls, a: Mapping[str, Any], problem: Any) -> tuple[Any, ...] | None:
        """The outputs of a call without rows, keys or heads; None for every other call."""
        return None

    @classmethod
    def name_residuals(cls, outputs: tuple[Any, ...], saved: Any) -> tuple[tuple[Any, ...], Any]:
        """Names the outputs and the other residuals of a gradient for ``jax.checkpoint``."""
        return outputs, saved

    @classmethod
    def results(cls, a: Mapping[str, Any], outputs: tuple[Any, ...]) -> Any:
        """Returns the result of the operation from the outputs of a kernel."""
        outputs = cls.select_outputs(a, outputs)
        return outputs[0] if len(outputs) == 1 else outputs

    @classmethod
    def select_outputs(cls, a: Mapping[str, Any], outputs: tuple[Any, ...]) -> tuple[Any, ...]:
        """Returns the outputs that the call requests."""
        return outputs if a.get(cls.extra_outputs_flag, True) else outputs[:1]

    @classmethod
    def samples(cls, a: Mapping[str, Any], rng: np.random.Generator) -> dict[str, Any]:
        """Valid values, by name, of the arguments that random floats and zeros do not fit.

        Packed sequences are of equal length, contexts full, their pages in random order.
        """
        samples = sample_inputs.pack_sequences(a, cls.boundary.names[0])
        if "block_tables" in a:
            samples |= sample_inputs.draw_tables(a, rng, cls.boundary.pools[0])
        names = cls.boundary.float_names if cls.normal_samples else ()
        return samples | sample_inputs.draw_normal(a, rng, names)
