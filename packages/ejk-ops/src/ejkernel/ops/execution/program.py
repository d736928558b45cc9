"""A call taken apart: arrays, which are traced, and everything else, which is static."""

from __future__ import annotations

import contextlib
from collections.abc import Generator, Hashable, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import jax
import numpy as np

from ejkernel.ops import env
from ejkernel.ops.batch_invariance import batch_invariance
from ejkernel.ops.compat import Tracer
from ejkernel.ops.config.choice import config_from_file
from ejkernel.ops.core.binding import Binding, array_types
from ejkernel.ops.core.distribution import LocalCall
from ejkernel.ops.core.flat_tree import FlatTree
from ejkernel.ops.core.invocation import AnyKernel, BoundCall
from ejkernel.ops.core.route import Route
from ejkernel.ops.execution.freeze import freeze
from ejkernel.ops.implementation import Resolved
from ejkernel.ops.utils.labels import stamped
from ejkernel.ops.utils.serialization import abstractify

STATIC_MASK_LIMIT = 2**20
"""Elements of a numpy array of bools up to which its values are static in a traced call."""

_CONCRETE, _TRACER, _NUMPY, _CONVERTIBLE, _ABSTRACT, _FLOAT, _VALUE, _OTHER = range(8)

_kinds: dict[type, int] = {
    float: _FLOAT,
    int: _VALUE,
    bool: _VALUE,
    str: _VALUE,
    type(None): _VALUE,
}


def _kind_of(cls: type) -> int:
    """Returns how a leaf of this class enters a call; remembered per class."""
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


class FlatCall(NamedTuple):
    """A flattened call.

    Attributes:
        tree: ``(args, kwargs)``, the arrays and the rest.
        statics: hashable of everything but the arrays.
        signature: hashable of the arrays' shapes, dtypes and shardings.
    """

    tree: FlatTree
    statics: Hashable
    signature: Hashable


_single = jax.sharding.SingleDeviceSharding


def flatten(
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    *,
    hashable: bool = True,
    static: Sequence[int] = (),
) -> FlatCall:
    """Take a call apart.

    A small mask in numpy is static where another array is traced: a kernel can find the keys that
    no query sees once, and the program holds the result. An eager call has it among its arrays, as
    another mask must not mean another program. ``static``: the places of such masks.

    Raises:
        Unhashable: a static value that cannot be part of a key (unless ``hashable=False``).
        TypeError: an abstract array where a real one is needed.
    """
    leaves, treedef = jax.tree_util.tree_flatten((args, kwargs))
    positions: list[int] = []
    statics: list[Any] = []
    signature: list[Any] = []
    masks: list[int] = []
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
            if leaf.dtype == np.bool_ and leaf.size <= STATIC_MASK_LIMIT:
                if i in static:
                    statics.append((cls, leaf.shape, leaf.tobytes()))
                    continue
                masks.append(i)
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
    if traced and masks:
        return flatten(args, kwargs, hashable=hashable, static=masks)
    return FlatCall(
        FlatTree(treedef, tuple(leaves), tuple(positions)), tuple(statics), tuple(signature)
    )


class OtherOutputs(Exception):
    """A kernel returned something that is no array, which ``jax.jit`` cannot carry."""


def _no_array(leaf: Any) -> bool:
    arrays = (jax.Array, np.ndarray, np.generic, int, float, complex)
    return not (isinstance(leaf, arrays) or hasattr(leaf, "__jax_array__"))


@dataclass(frozen=True, eq=False, repr=False)  # jax.jit asks for the text of every callable
class Program:
    """A kernel with everything fixed but the arrays; the executor passes it to ``jax.jit``.

    Attributes:
        kernel, tree: the call.
        cfg: its config.
        resolved: the implementation that runs, for one shard where there are several.
        route: where it runs.
        key: of the call, for stamps.
        stamped_call: the call, None where calls are not stamped: it differs within a key.
        compiled: raise OtherOutputs for outputs that ``jax.jit`` would refuse.
        from_file: whether ``cfg`` may come from a file.
    """

    kernel: AnyKernel
    tree: FlatTree
    cfg: Any
    resolved: Resolved
    route: Route
    key: str
    stamped_call: BoundCall | None = None
    compiled: bool = False
    from_file: bool = False

    def __post_init__(self) -> None:
        object.__setattr__(self, "__name__", self.kernel.name)  # JAX names the program by it

    def __call__(self, *arrays: Any) -> Any:
        kernel, route = self.kernel, self.route
        # as when its config was chosen, also where JAX traces it again later
        token = batch_invariance.set(route.batch_invariant)
        try:
            run: Any = kernel.runner(self.resolved, self.cfg)
            if self.stamped_call is not None:
                run = partial(self._run_stamped, self.stamped_call, run)
            binding = _offered_binding(self, arrays)
            with config_from_file(self.from_file):
                if binding is not None:
                    args, kwargs = binding(arrays)
                    out = run(*args, **kwargs)
                else:
                    args, kwargs = kernel.bind(*self.tree.with_arrays(arrays))
                    if route.distributed or kernel.distributes(args, kwargs):
                        out = kernel.distribute(args, kwargs, route.placement, _of_shard(run))
                    else:
                        out = run(*args, **kwargs)
        finally:
            batch_invariance.reset(token)
        if self.compiled and any(map(_no_array, jax.tree_util.tree_leaves(out))):
            raise OtherOutputs
        return out

    def _run_stamped(self, call: BoundCall, run: Any, /, *args: Any, **kwargs: Any) -> Any:
        """Runs under a label that says which call this is."""
        kernel, mode = self.kernel, env.ops_stamp()
        arguments = {"args": abstractify(args), "kwargs": abstractify(kwargs)}
        call = replace(call, **arguments, binding=None, resolved=self.resolved)
        with stamped(kernel.name, kernel.version, self.key, self.cfg, mode, call):
            return run(*args, **kwargs)


def _of_shard(run: Any) -> LocalCall:
    # which axes devices share, binding has found before the implementation was chosen
    return lambda args, kwargs, sequence_axes=(): run(*args, **kwargs)


_offered: ContextVar[tuple[Program, Binding] | None] = ContextVar("ejkernel_binding", default=None)


@contextlib.contextmanager
def offer_binding(program: Any, binding: Binding | None) -> Generator[None]:
    """Lets ``program`` bind as ``binding`` does where it is traced inside, for the same arrays.

    A trace later on may be under other settings of JAX, so it binds for itself.
    """
    token = _offered.set(None if binding is None else (program, binding))
    try:
        yield
    finally:
        _offered.reset(token)


def _offered_binding(program: Program, arrays: tuple[Any, ...]) -> Binding | None:
    """Returns the binding that is offered to the program, where it is one of these arrays."""
    offered = _offered.get()
    if offered is None or offered[0] is not program:
        return None
    binding = offered[1]
    same = binding.positions == program.tree.positions and binding.types == array_types(arrays)
    return binding if same else None


def resolve(kernel: AnyKernel, call: BoundCall, cfg: Any) -> Resolved:
    """The implementation for a call with this config."""
    return kernel.implementation(call, call.route.platform or kernel.config_platform(cfg))
