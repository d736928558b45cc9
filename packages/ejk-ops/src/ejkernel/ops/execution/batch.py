"""One config for a whole batch: over a mapped axis, over the devices of this process."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, PartitionSpec

from ejkernel.ops.core.flat_tree import FlatTree
from ejkernel.ops.core.invocation import AnyKernel
from ejkernel.ops.core.route import EXECUTOR_KEYWORDS
from ejkernel.ops.execution.executor import Executor, get_default_executor
from ejkernel.ops.execution.freeze import Unhashable, freeze
from ejkernel.ops.utils.serialization import abstractify

PROGRAMS_LIMIT = 64


class _Mapped:
    """A call whose array leaves are split into mapped and shared ones."""

    def __init__(self, in_axes: Any, args: tuple[Any, ...], kwargs: dict[str, Any]):
        axes = _axes_of_args(in_axes, args)
        self.options = {k: kwargs[k] for k in EXECUTOR_KEYWORDS if k in kwargs}
        kwargs = {k: v for k, v in kwargs.items() if k not in EXECUTOR_KEYWORDS}
        keyword_axes = jax.tree_util.tree_map(lambda _: 0, kwargs)
        self.tree = FlatTree.flatten((args, kwargs))
        self.arrays = self.tree.arrays
        leaf_axes = self.tree.treedef.flatten_up_to((axes, keyword_axes))
        self.axes = [leaf_axes[i] for i in self.tree.positions]
        for array, axis in zip(self.arrays, self.axes, strict=True):
            if axis is not None and not -array.ndim <= axis < array.ndim:
                raise ValueError(f"in_axes asks for axis {axis} of an array of shape {array.shape}")
        if all(axis is None for axis in self.axes):
            raise ValueError(f"in_axes={in_axes!r} maps no array argument")

    def element(self) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Returns the call of one element, abstract."""
        return self.tree.with_arrays(
            [_without_axis(x, axis) for x, axis in zip(self.arrays, self.axes, strict=True)]
        )

    def size(self) -> int:
        """Length of the mapped axis."""
        pairs = zip(self.arrays, self.axes, strict=True)
        sizes = {x.shape[axis] for x, axis in pairs if axis is not None}
        if len(sizes) != 1:
            raise ValueError(f"mapped axes have different sizes {sorted(sizes)}")
        return sizes.pop()


def _axes_of_args(in_axes: Any, args: tuple[Any, ...]) -> tuple[Any, ...]:
    """``in_axes`` as one axis per leaf of every positional argument."""
    if in_axes is None or isinstance(in_axes, int):
        in_axes = (in_axes,) * len(args)
    if not isinstance(in_axes, (tuple, list)) or len(in_axes) != len(args):
        raise ValueError(
            f"in_axes={in_axes!r}: expected an int, None, or one entry per positional argument "
            f"({len(args)} given)"
        )
    is_none = lambda x: x is None  # noqa: E731
    return tuple(
        jax.tree_util.tree_map(
            lambda axis, part: jax.tree_util.tree_map(lambda _: axis, part),
            axes,
            arg,
            is_leaf=is_none,
        )
        for axes, arg in zip(in_axes, args, strict=True)
    )


def _without_axis(x: Any, axis: int | None) -> Any:
    abstract = abstractify(x)
    if axis is None:
        return abstract
    shape = list(abstract.shape)
    del shape[axis]
    return jax.ShapeDtypeStruct(tuple(shape), abstract.dtype)


def _executor(executor: Executor | None) -> Executor:
    return get_default_executor() if executor is None else executor


def _one_config(run: Executor, kernel: AnyKernel, call: _Mapped, cfg: Any) -> dict[str, Any]:
    """Executor options for every element: the given config, else one chosen for one element."""
    options = dict(call.options)
    if cfg is None:
        cfg = options.pop("cfg", None)
    if cfg is None:
        args, kwargs = call.element()
        cfg = run.choose_config(kernel, *args, **options, **kwargs)
    return {**options, "cfg": cfg}


def vmap_with_config(
    kernel: AnyKernel, in_axes: Any = 0, *, executor: Executor | None = None, cfg: Any = None
) -> Callable[..., Any]:
    """``jax.vmap`` of a kernel with one config, chosen for the shapes of one element.

    Args:
        kernel: the kernel.
        in_axes: as for ``jax.vmap``: an int, or per positional argument an int, None or a pytree
            of them. Arrays passed by keyword are mapped over axis 0. Values that are no arrays
            are shared.
        executor: None = the default executor.
        cfg: config to use; None = the executor chooses.

    Returns:
        A callable; the mapped axis comes first in its outputs.
    """

    def mapped(*args: Any, **kwargs: Any) -> Any:
        run = _executor(executor)
        call = _Mapped(in_axes, args, kwargs)
        call.size()
        options = _one_config(run, kernel, call, cfg)

        def run_element(*arrays: Any) -> Any:
            a, k = call.tree.with_arrays(arrays)
            return run(kernel, *a, **options, **k)

        return jax.vmap(run_element, in_axes=tuple(call.axes))(*call.arrays)

    return mapped


def pmap_with_config(
    kernel: AnyKernel,
    axis_name: str = "devices",
    *,
    in_axes: Any = 0,
    executor: Executor | None = None,
    cfg: Any = None,
) -> Callable[..., Any]:
    """Run a kernel on several devices of this process, one element of the mapped axis on each.

    Args:
        kernel: the kernel; its ``run`` may use collectives over ``axis_name``.
        axis_name: name of the mapped axis.
        in_axes: as for ``vmap_with_config``.
        executor: None = the default executor.
        cfg: config of every device; None = the executor chooses for the shapes of one element.

    Returns:
        A callable. The mapped axis must have ``jax.local_device_count()`` elements or a divisor of
        it; it comes first in the outputs, which lie spread over the devices.
    """
    programs: dict[Any, Callable[..., Any]] = {}

    def mapped(*args: Any, **kwargs: Any) -> Any:
        run = _executor(executor)
        call = _Mapped(in_axes, args, kwargs)
        size, count = call.size(), jax.local_device_count()
        if size == 0 or count % size:
            raise ValueError(
                f"the mapped axis has {size} elements: expected the number of local devices, "
                f"{count}, or a divisor of it"
            )
        options = _one_config(run, kernel, call, cfg)

        def program() -> Callable[..., Any]:
            return _spread(run, kernel, call, options, axis_name, size)

        try:
            shell = call.tree.without_arrays()
            key = (shell.treedef, shell.positions, tuple(call.axes), size)
            key = (*key, freeze(shell.leaves), freeze(options))
            if key not in programs:
                if len(programs) >= PROGRAMS_LIMIT:
                    programs.clear()
                programs[key] = program()
            fn = programs[key]
        except Unhashable:
            fn = program()
        return fn(*call.arrays)

    return mapped


def _spread(
    run: Executor,
    kernel: AnyKernel,
    call: _Mapped,
    options: dict[str, Any],
    axis_name: str,
    size: int,
) -> Callable[..., Any]:
    """The compiled function that runs element ``i`` on local device ``i``."""
    mesh = Mesh(np.asarray(jax.local_devices()[:size]), (axis_name,))
    axes = tuple(call.axes)
    shell = call.tree.without_arrays()

    def element(*arrays: Any) -> Any:
        local = [
            x if axis is None else jax.lax.squeeze(x, (0,))
            for x, axis in zip(arrays, axes, strict=True)
        ]
        a, k = shell.with_arrays(local)
        out = run(kernel, *a, **options, **k)
        return jax.tree_util.tree_map(lambda x: jnp.asarray(x)[None], out)

    specs = tuple(PartitionSpec() if a is None else PartitionSpec(axis_name) for a in axes)
    over_devices = jax.shard_map(
        element, mesh=mesh, in_specs=specs, out_specs=PartitionSpec(axis_name), check_vma=False
    )

    def spread(*arrays: Any) -> Any:
        moved = [
            x if axis is None else jnp.moveaxis(x, axis, 0)
            for x, axis in zip(arrays, axes, strict=True)
        ]
        return over_devices(*moved)

    return jax.jit(spread)
