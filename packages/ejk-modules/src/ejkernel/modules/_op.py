"""Operation: the Kernel of a public function, with implementations from the registry."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Generator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, ClassVar, Never, Self, cast

import jax
import numpy as np
from jax.core import Tracer

from ejkernel.modules._distribute import LocalCall, distribute
from ejkernel.modules._specs import explicit_mesh
from ejkernel.ops import InvalidArgument
from ejkernel.ops import env as environment
from ejkernel.ops.call_kernel import CallKernel
from ejkernel.ops.config.key_distance import SimilarityRules
from ejkernel.ops.core.invocation import Invocation
from ejkernel.ops.core.keys import leaf_names
from ejkernel.ops.core.registered import RegisteredKernel
from ejkernel.ops.core.types import Cfg
from ejkernel.ops.errors import warn_caution
from ejkernel.ops.implementation import Resolved
from ejkernel.ops.utils.buckets import bucket
from ejkernel.types import InvalidArgument as InvalidCall
from ejkernel.types import MaskInfo
from ejkernel.types.calls.axes import mask_axes, meaning
from ejkernel.types.calls.signature import axes_of
from ejkernel.types.calls.spec import Arguments, Call
from ejkernel.types.calls.words import shown
from ejkernel.types.serving.plan import AttentionPlan

SEED = jax.ShapeDtypeStruct((), np.int32)
"""Every seed, as keys describe it."""


def flatten(parameters: Arguments) -> Arguments:
    """Returns a public function's parameters with the arguments in its ``**unknown`` as entries."""
    parameters.update(parameters.pop("unknown"))
    return parameters


@contextmanager
def own_errors() -> Generator[None]:
    """Raises errors of ejk-types about an argument as the framework's class of the same name."""
    try:
        yield
    except InvalidCall as error:
        raise InvalidArgument(str(error)) from None


class Operation(RegisteredKernel[Cfg, Any]):
    """The Kernel of a public function: ``spec`` defines its call, a registry its implementations.

    Attributes:
        spec: the arguments of a call and how they are canonicalized.
        function: the public function.
        aliases: other names of the function.
    """

    spec: ClassVar[type[Call]]
    function: ClassVar[Callable[..., Any]]
    aliases: ClassVar[tuple[str, ...]] = ()
    _instance: ClassVar[Operation | None] = None

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if "spec" not in vars(cls):
            return
        cls.__doc__ = cls.__doc__ or f"Kernel of :func:`{cls.spec.name}`."
        cls.algorithm = cls.spec.algorithm
        cls.similarity = SimilarityRules(
            cls.spec.untuned_arguments, cls.spec.size_arguments, frozenset(cls.spec.boundary.pools)
        )
        cls._instance = None

        def run(self: Operation, *args: Any, cfg: Any = None, **kwargs: Any) -> Any:
            return self(*args, cfg=cfg, **kwargs)

        run.__doc__ = f"As :func:`{cls.spec.name}`, through the default executor."
        run.__qualname__ = f"{cls.__name__}.run"
        instance = inspect.Parameter("self", inspect.Parameter.POSITIONAL_OR_KEYWORD)
        cfg = inspect.Parameter("cfg", inspect.Parameter.KEYWORD_ONLY, default=None)
        taken = inspect.signature(cls.spec.signature)
        parameters = [instance, *taken.parameters.values(), cfg]
        run.__signature__ = taken.replace(parameters=parameters)  # ty: ignore[missing-attribute]
        cls.run = run  # type: ignore[method-assign]
        show_signature(cls.function)

    def __init__(
        self, *call: Never, version: int = 1, registry: Any = None, **unknown: Never
    ) -> None:
        if call or unknown:  # ty: ignore[redundant-condition]
            raise TypeError(
                f"{type(self).__name__} is the class of an operation and takes only version and "
                f"registry: a call is ejkernel.modules.{self.spec.name}(...)"
            )
        super().__init__(version=version, registry=registry)

    @classmethod
    def shared(cls) -> Self:
        """The instance that the public function uses."""
        if cls._instance is None:
            cls._instance = cls()
        return cast(Self, cls._instance)

    # ---- what a subclass says ---------------------------------------------------------------

    @classmethod
    def to_shard(cls, a: Arguments, shard: Any) -> None:
        """Adapt one shard's arguments to what the operation means globally."""
        cls.spec.to_shard(a, shard)

    # ---- the steps of a call ----------------------------------------------------------------

    def prepare(self, args: tuple, kwargs: dict[str, Any]) -> tuple[tuple, dict[str, Any]]:
        # only arguments that differ from their defaults are carried: the eager path stays short
        default = self.spec.boundary.defaults.get
        kwargs = {name: value for name, value in kwargs.items() if value is not default(name, self)}
        try:  # eager calls run this each time: a context manager would cost them a microsecond
            arguments = self.spec.prepare(args, kwargs)
        except InvalidCall as error:
            raise InvalidArgument(str(error)) from None
        return (), self.spec.boundary.differing(arguments)

    def bind(self, args: tuple, kwargs: dict[str, Any]) -> tuple[tuple, dict[str, Any]]:
        arguments = self.spec.boundary.by_name(args, kwargs)
        with own_errors():
            self.spec.bind(arguments, typecheck=environment.typecheck(), warn=warn_caution)
        return (), arguments

    def check_call(self, args: tuple, kwargs: Mapping[str, Any]) -> None:
        """Check a call with the values of its index arrays, which are fetched for it."""
        spec = self.spec
        arguments = spec.boundary.by_name(args, kwargs)
        for name, value in arguments.items():
            if any(isinstance(x, Tracer) for x in jax.tree.leaves(value)):
                raise ValueError(
                    f"{name}: given a traced array, expected values: check_call reads them, so "
                    "call it outside jit, grad and vmap"
                )
        for name in spec.boundary.index_names:
            if isinstance(arguments[name], jax.ShapeDtypeStruct):
                raise ValueError(f"{name}: given a shape, expected values: check_call reads them")
            if isinstance(arguments[name], jax.Array):
                arguments[name] = np.asarray(arguments[name])
        with own_errors():
            prepared = spec.prepare((), arguments)
            # shapes and dtypes, without work on a device; what is on the host keeps its values
            on_device = {name: x for name, x in prepared.items() if _is_on_device(x)}
            on_host = {name: x for name, x in prepared.items() if name not in on_device}

            def bind(arrays: Arguments) -> None:
                spec.bind({**on_host, **arrays}, warn=warn_caution)

            jax.eval_shape(bind, on_device)
            spec.check_contents(prepared)

    def distributes(self, args: tuple, kwargs: dict[str, Any]) -> bool:
        """An operation on an explicit mesh runs on every shard, so that kernels see no mesh."""
        return explicit_mesh((args, kwargs)) is not None

    def distribute(
        self, args: tuple, kwargs: dict[str, Any], placement: tuple[Any, Any, Any], call: LocalCall
    ) -> Any:
        return distribute(self, self.spec.boundary.by_name(args, kwargs), placement, call)

    def runner(self, resolved: Resolved, cfg: Any) -> Callable[..., Any]:
        kernel = resolved.fn
        if isinstance(kernel, CallKernel) and kernel.call is self.spec:
            # canonical already; a shard's seed fits no signature
            return partial(kernel.run_canonical, cfg=cfg, sequence_axes=resolved.sequence_axes)
        return super().runner(resolved, cfg)

    def constant_arguments(self, inv: Invocation) -> Collection[str]:
        return self.spec.constant_arguments(inv.arguments)

    def key_arguments(self, inv: Invocation) -> Mapping[str, Any]:
        """The arguments of the call, with a seed exactly where there is dropout.

        The key holds no value of a float, so the seed is what tells a call that drops from one that
        does not: other kernels, or other tiles, may be faster.
        """
        arguments = inv.arguments
        if not self.spec.seeds:
            return arguments
        probability = arguments["dropout_prob"]
        drops = isinstance(probability, (int, float)) and probability > 0
        seeds = dict.fromkeys(self.spec.seeds, SEED if drops else None)
        return {**arguments, **seeds, "dropout_prob": 0.0}

    def bucket(self, inv: Invocation) -> Mapping[str, Sequence[int]]:
        arguments = inv.arguments
        override = self.spec.argument_axes(dict(arguments))
        shapes: dict[str, Sequence[int]] = {}
        for p in self.spec.boundary.parameters:
            value = arguments.get(p.name)
            if isinstance(value, (MaskInfo, AttentionPlan)):
                leaves = jax.tree_util.tree_leaves(value)
                is_mask = isinstance(value, MaskInfo)
                axes = map(mask_axes, leaves) if is_mask else value.AXES
                named = zip(leaf_names(p.name, value), axes, leaves, strict=True)
                shapes.update((leaf, _bucketed(words, x.shape)) for leaf, words, x in named)
            elif p.forms and hasattr(value, "shape"):
                shapes[p.name] = _bucketed(axes_of(p, value, override), value.shape)
        return shapes


def _is_on_device(value: Any) -> bool:
    leaves = jax.tree.leaves(value)
    return any(isinstance(x, (jax.Array, jax.ShapeDtypeStruct)) for x in leaves)


def _bucketed(words: Sequence[str], shape: Sequence[int]) -> tuple[int, ...]:
    """A shape with the axes that vary from call to call rounded up."""
    return tuple(bucket(n) if meaning(w).varies else n for w, n in zip(words, shape, strict=True))


WIDTH = 100


class ShownSignature(inspect.Signature):
    """A signature for ``help``: short annotations, one parameter a line where it is long.

    ``**unknown`` is left out: it only lets an unknown argument reach the error that names ours.
    """

    @classmethod
    def from_signature(cls, signature: inspect.Signature) -> ShownSignature:
        parameters = [
            p.replace(annotation=shown(p.annotation))
            for p in signature.parameters.values()
            if p.kind is not p.VAR_KEYWORD
        ]
        return cls(parameters, return_annotation=shown(signature.return_annotation))

    def __str__(self) -> str:
        line = super().__str__()
        if len(line) <= WIDTH:
            return line
        lines: list[str] = []
        for p in self.parameters.values():
            if p.kind is p.KEYWORD_ONLY and "*" not in lines:
                lines.append("*")
            lines.append(str(p))
        return "(\n    " + ",\n    ".join(lines) + f",\n) -> {self.return_annotation}"


def show_signature(function: Callable[..., Any]) -> None:
    """Let ``help`` show the function's signature in short words; its annotations stay."""
    if not hasattr(function, "__signature__"):
        vars(function)["__signature__"] = ShownSignature.from_signature(inspect.signature(function))
