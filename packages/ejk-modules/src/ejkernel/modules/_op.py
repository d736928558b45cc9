"""Operation: a Kernel whose run is a public function and whose work is done by the registry."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, ClassVar, Self, cast

import jax
import jax.numpy as jnp
import numpy as np

from ejkernel.ops import InvalidArgument
from ejkernel.ops import env as environment
from ejkernel.ops.core.invocation import Invocation
from ejkernel.ops.core.keys import leaf_names
from ejkernel.ops.core.registered import RegisteredKernel
from ejkernel.ops.core.types import Cfg
from ejkernel.ops.utils.buckets import bucket
from ejkernel.types import InvalidArgument as InvalidCall
from ejkernel.types import MaskInfo
from ejkernel.types.calls import settle as canonical
from ejkernel.types.calls.signature import REQUIRED, Boundary, PublicFunction, axes_of

Arguments = dict[str, Any]

# Axes whose length varies from call to call: calls of one bucket share a config.
TOKEN_AXES = frozenset(
    "batch q_len kv_len kv_total seq tokens rows pages max_blocks table_entries sequences "
    "sequences_plus_1 states q_blocks kv_blocks".split()
)


@contextlib.contextmanager
def own_errors() -> Iterator[None]:
    """What ejk-types raises for a wrong argument, as the framework's class of the same meaning."""
    try:
        yield
    except InvalidCall as error:
        raise InvalidArgument(str(error)) from None


class Operation(RegisteredKernel[Cfg, Any]):
    """What an operation says about itself; everything else follows.

    A subclass sets ``function`` (the public function: its signature is the operation's) and
    ``config``, and overrides ``check_values`` (numbers known before tracing) and ``canonicalise``
    (inside the trace), both of which change a dict of all arguments in place.

    Attributes:
        function: the public function.
        config: class of its configs.
        algorithm: name in the registry; default: the function's name.
        outputs: axes of every output, in the words of the signature.
        builders: parameters that hold a callable which makes another argument.
        aliases: other names of the function.
        whole_groups: whether a device needs whole groups of query heads per key head.
    """

    function: ClassVar[PublicFunction]
    config: ClassVar[type]
    outputs: ClassVar[tuple[str, ...]] = ()
    builders: ClassVar[tuple[str, ...]] = ()
    aliases: ClassVar[tuple[str, ...]] = ()
    whole_groups: ClassVar[bool] = False
    boundary: ClassVar[Boundary]
    _instance: ClassVar[Operation | None] = None

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if "function" not in vars(cls):
            return
        cls.boundary = Boundary.of(cls.function)
        cls.algorithm = cls.algorithm or cls.function.__name__
        cls._instance = None

        def run(self: Operation, *args: Any, cfg: Any = None, **kwargs: Any) -> Any:
            return self(*args, cfg=cfg, **kwargs)

        run.__doc__ = f"As :func:`{cls.function.__name__}`, through the default executor."
        run.__qualname__ = f"{cls.__name__}.run"
        run.__signature__ = cls.boundary.run_signature  # ty: ignore[missing-attribute]
        cls.run = run  # type: ignore[method-assign]

    def __init__(self, *, version: int = 1, registry: Any = None) -> None:
        super().__init__(version=version, config_cls=self.config, registry=registry)

    @classmethod
    def shared(cls) -> Self:
        """The instance that the public function uses."""
        if cls._instance is None:
            cls._instance = cls()
        return cast(Self, cls._instance)

    # ---- what a subclass says ---------------------------------------------------------------

    @staticmethod
    def check_values(a: Arguments) -> None:
        """Check Python and numpy values, call builders, turn changing numbers into arrays."""

    @staticmethod
    def canonicalise(a: Arguments) -> None:
        """Check how arguments agree, then settle what is optional."""

    @staticmethod
    def argument_axes(a: Arguments) -> Mapping[str, str]:
        """Axes of arguments whose annotation cannot say them."""
        return {}

    @classmethod
    def output_axes(cls, a: Arguments) -> tuple[str, ...]:
        """Axes of the outputs of this call: all of ``outputs``, unless a flag leaves out some."""
        optional = any(a.get(flag) is False for flag in ("return_lse", "return_state"))
        return cls.outputs[:1] if optional else cls.outputs

    @staticmethod
    def spreadable(a: Arguments) -> frozenset[str]:
        """Axes that may be sharded besides batch and heads."""
        return frozenset()

    @staticmethod
    def localise(a: Arguments, shard: Any) -> Callable[[tuple, dict[str, Any]], Any] | None:
        """Adapt one shard's arguments to what the operation means globally.

        May return what to call instead of the operation itself.
        """
        return None

    # ---- the steps of a call ----------------------------------------------------------------

    def prepare(self, args: tuple, kwargs: dict[str, Any]) -> tuple[tuple, dict[str, Any]]:
        boundary = self.boundary
        if args or any(name not in boundary.defaults for name in kwargs):
            arguments = boundary.by_name(args, kwargs)
        else:
            arguments = {**boundary.defaults, **kwargs}
        for name, value in kwargs.items():
            if isinstance(value, np.generic):
                static = name in boundary.static_names
                arguments[name] = value.item() if static else np.asarray(value)
        if "dropout_seed" in kwargs:
            canonical.seed_to_array(arguments)
        if "cum_seqlens_k" in kwargs:
            canonical.one_packing(arguments)
        self._require(arguments)
        with own_errors():
            canonical.check_int32(arguments, *boundary.index_names)
            self.check_values(arguments)
        return (), boundary.differing(arguments)

    def bind(self, args: tuple, kwargs: dict[str, Any]) -> tuple[tuple, dict[str, Any]]:
        arguments = self.boundary.by_name(args, kwargs)
        with own_errors():
            if environment.typecheck():
                self.boundary.check(arguments)
            for name in self.boundary.index_names:
                value = arguments[name]
                if hasattr(value, "dtype") and value.dtype != np.int32:
                    arguments[name] = jnp.asarray(value).astype(jnp.int32)
            self.canonicalise(arguments)
        return (), arguments

    def distribute(
        self,
        args: tuple,
        kwargs: dict[str, Any],
        mesh: Any,
        in_specs: Any,
        out_specs: Any,
        call: Callable[[tuple, dict[str, Any]], Any],
    ) -> Any:
        from ejkernel.modules._distribute import distribute

        arguments = self.boundary.by_name(args, kwargs)
        return distribute(self, arguments, mesh, in_specs, out_specs, call)

    def bucket(self, inv: Invocation) -> Mapping[str, Sequence[int]]:
        arguments = inv.arguments
        override = self.argument_axes(dict(arguments))
        shapes: dict[str, Sequence[int]] = {}
        for p in self.boundary.parameters:
            value = arguments.get(p.name)
            if isinstance(value, MaskInfo):
                shapes.update(_mask_buckets(p.name, value))
            elif p.forms and hasattr(value, "shape"):
                words = axes_of(p, value, override)
                shapes[p.name] = tuple(
                    bucket(n) if w.lstrip("#") in TOKEN_AXES else n
                    for w, n in zip(words, value.shape, strict=True)
                )
        return shapes

    # ---- helpers ----------------------------------------------------------------------------

    def _require(self, arguments: Arguments) -> None:
        for name, value in arguments.items():
            if value is REQUIRED:
                raise TypeError(f"{self.function.__name__}() is missing the argument {name!r}")


def _mask_buckets(name: str, mask: MaskInfo) -> dict[str, Sequence[int]]:
    """Buckets of the arrays of a mask: every axis but the heads of a dense mask."""
    leaves = jax.tree_util.tree_leaves(mask)
    return {
        leaf: tuple(n if len(x.shape) == 4 and i == 1 else bucket(n) for i, n in enumerate(x.shape))
        for leaf, x in zip(leaf_names(name, mask), leaves, strict=False)
    }
