"""A call taken apart: arrays, which are traced, and everything else, which is static."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import numpy as np

from ejkernel.ops import env
from ejkernel.ops.compat import Tracer
from ejkernel.ops.core.abstract import Binding, array_types
from ejkernel.ops.core.invocation import Invocation, distribution_info
from ejkernel.ops.core.parts import Parts
from ejkernel.ops.execution.freeze import freeze
from ejkernel.ops.platforms import Platform
from ejkernel.ops.utils.labels import stamped
from ejkernel.ops.utils.serialization import abstractify

if TYPE_CHECKING:
    from ejkernel.ops.core.kernel import Kernel, Resolved

KNOWN = 2**20
"""Elements of a numpy array of bools up to which a traced call takes its values for static."""

_CONCRETE, _TRACER, _NUMPY, _CONVERTIBLE, _ABSTRACT, _FLOAT, _VALUE, _OTHER = range(8)

_kinds: dict[type, int] = {
    float: _FLOAT,
    int: _VALUE,
    bool: _VALUE,
    str: _VALUE,
    type(None): _VALUE,
}


def _kind_of(cls: type) -> int:
    """How a leaf of this class enters a call; remembered per class."""
    if issubclass(cls, Tracer):
        kind = _TRACER
    elif issubclass(cls, jax.Array):
        kind = _CONCRETE
    elif issubclass(cls, (np.ndarray, np.generic)):
        kind = _NUMPY
    elif issubclass(cls, jax.ShapeDtypeStruct):
        kind = _ABSTRACT
    elif hasattr(cls, "__jax_array__"):
        kind = _CONVERTIBLE
    else:
        kind = _OTHER
    _kinds[cls] = kind
    return kind


class Flat(NamedTuple):
    """A flattened call.

    Attributes:
        parts: ``(args, kwargs)``, the arrays and the rest.
        statics: hashable of everything but the arrays.
        signature: hashable of the arrays' shapes, dtypes and shardings.
    """

    parts: Parts
    statics: Hashable
    signature: Hashable


_single = jax.sharding.SingleDeviceSharding


def flatten(
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    *,
    hashable: bool = True,
    static: Sequence[int] = (),
) -> Flat:
    """Take a call apart.

    A small mask in numpy is static where another array is traced: a kernel can tell from it what
    nobody sees, once, and the program holds the answer. An eager call has it among its arrays, as
    another mask must not mean another program. ``static``: the places of such masks.

    Raises:
        Unhashable: a static value that cannot be part of a key (unless ``hashable=False``).
        TypeError: an abstract array where a real one is needed.
    """
    leaves, treedef = jax.tree_util.tree_flatten((args, kwargs))
    positions: list[int] = []
    statics: list[Any] = []
    signature: list[Any] = []
    known: list[int] = []
    traced = False
    for i, leaf in enumerate(leaves):
        cls = type(leaf)
        kind = _kinds.get(cls)
        if kind is None:
            kind = _kind_of(cls)
        if kind == _CONVERTIBLE:
            leaf = leaves[i] = leaf.__jax_array__()
            cls = type(leaf)
            kind = _kinds.get(cls) or _kind_of(cls)
        if kind == _CONCRETE:
            positions.append(i)
            sharding = leaf.sharding
            signature.append(leaf.aval if type(sharding) is _single else (leaf.aval, sharding))
        elif kind == _VALUE:
            statics.append((cls, leaf))
        elif kind == _FLOAT:
            statics.append((cls, leaf.hex()))
        elif kind == _NUMPY:
            if leaf.dtype == np.bool_ and leaf.size <= KNOWN:
                if i in static:
                    statics.append((cls, leaf.shape, leaf.tobytes()))
                    continue
                known.append(i)
            positions.append(i)
            signature.append((leaf.shape, leaf.dtype))
        elif kind == _TRACER:
            traced = True
            positions.append(i)
            signature.append(leaf.aval)
        elif kind == _ABSTRACT:
            raise TypeError(
                f"a call needs arrays, got {leaf}: shapes alone serve choose_config, explain and "
                "autotune; use jax.eval_shape to evaluate a call abstractly"
            )
        else:
            statics.append(freeze(leaf) if hashable else None)
    if traced and known:
        return flatten(args, kwargs, hashable=hashable, static=known)
    return Flat(Parts(treedef, leaves, tuple(positions)), tuple(statics), tuple(signature))


@dataclass(frozen=True)
class Route:
    """Where and how a call runs, besides its arguments.

    Attributes:
        platform: forced platform, None = automatic.
        placement: mesh, in_specs and out_specs.
    """

    platform: Platform | None
    placement: tuple[Any, Any, Any]

    def invocation(
        self, kernel: Kernel[Any, Any], args: tuple[Any, ...], kwargs: dict[str, Any], cfg: Any
    ) -> Invocation:
        """The abstract invocation of a prepared call."""
        info: dict[str, Any] = {
            "prepared": True,
            "requested_platform": None if self.platform is None else self.platform.value,
        }
        backend = getattr(cfg, "backend", None)
        if isinstance(backend, str) and backend != "any":
            info["requested_backend"] = backend
        info |= distribution_info(*self.placement)
        return Invocation(kernel, abstractify(args), abstractify(kwargs), info=info)


class OtherOutputs(Exception):
    """A kernel returned something that is no array, which ``jax.jit`` cannot carry."""


def _no_array(leaf: Any) -> bool:
    known = (jax.Array, np.ndarray, np.generic, int, float, complex)
    return not (isinstance(leaf, known) or hasattr(leaf, "__jax_array__"))


@dataclass(frozen=True, eq=False, repr=False)  # jax.jit asks for the text of every callable
class Program:
    """A kernel with everything settled but the arrays; what the executor hands to ``jax.jit``.

    Attributes:
        kernel, parts: the call.
        cfg: its config.
        resolved: what runs, for one shard where there are several.
        route: where it runs.
        key, info: of its invocation, for stamps.
        compiled: raise OtherOutputs for outputs that ``jax.jit`` would refuse.
        bindings: of the calls under way that were bound for their shapes, by the types of their
            arrays; not of those over a mesh.
    """

    kernel: Kernel[Any, Any]
    parts: Parts
    cfg: Any
    resolved: Resolved
    route: Route
    key: str
    info: dict[str, Any]
    compiled: bool = False
    bindings: dict[Hashable, Binding] = field(default_factory=dict)

    def __post_init__(self) -> None:
        object.__setattr__(self, "__name__", self.kernel.name)  # JAX names the program by it

    def __call__(self, *arrays: Any) -> Any:
        kernel, route = self.kernel, self.route
        run: Any = kernel.runner(self.resolved, self.cfg)
        if env.ops_stamp() != "none":
            run = partial(self._stamped, run)
        binding = self.bindings.pop(array_types(arrays), None)
        if binding is not None:
            args, kwargs = binding(arrays)
            out = run(*args, **kwargs)
        else:
            args, kwargs = kernel.bind(*self.parts.around(arrays))
            placement = route.placement
            if placement != (None, None, None) or kernel.distributes(args, kwargs):
                out = kernel.distribute(args, kwargs, placement, lambda a, named: run(*a, **named))
            else:
                out = run(*args, **kwargs)
        if self.compiled and any(map(_no_array, jax.tree_util.tree_leaves(out))):
            raise OtherOutputs
        return out

    def _stamped(self, run: Any, /, *args: Any, **kwargs: Any) -> Any:
        """``run``, under a label that says which call this is."""
        kernel = self.kernel
        info = {**self.info, "key": self.key, "bound": True}
        inv = Invocation(kernel, abstractify(args), abstractify(kwargs), info=info)
        with stamped(kernel.name, kernel.version, self.key, self.cfg, env.ops_stamp(), inv):
            return run(*args, **kwargs)


def resolve(kernel: Kernel[Any, Any], inv: Invocation, cfg: Any) -> Resolved:
    """The implementation for a call with this config."""
    platform = inv.info.get("requested_platform")
    wanted = Platform(platform) if platform is not None else kernel.config_platform(cfg)
    return kernel.implementation(inv, wanted)
