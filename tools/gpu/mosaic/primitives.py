"""Primitives of Mosaic GPU as the interpreter here has them: what JAX leaves out, and what orders.

A handler is called with a ``Kernel`` and the operands, and gives the results; None leaves the
equation to JAX.
"""

from __future__ import annotations

import inspect
import itertools
import threading
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from gpu.mosaic import standins
from gpu.mosaic.inside import callbacks, jaxprs, mosaic, pallas
from gpu.mosaic.watch import Host, Kernel, now, ordering

made = itertools.count()  # of semaphores and counters


# ---- wgmma -------------------------------------------------------------------------------------


def wgmma(k: Kernel, invals: list) -> list:
    eqn, none = k.eqn, jax.tree.structure([])
    acc, a, b, *leaves = invals
    names = ("acc_transforms_tree", "a_transforms_tree", "b_transforms_tree")
    trees = jax.tree_util.treedef_tuple(eqn.params[name] or none for name in names)
    transforms = [tuple(x) for x in jax.tree.unflatten(trees, leaves)]
    in_registers = not hasattr(eqn.invars[1].aval, "inner_aval")

    def multiply(host: Host, acc: Any, a: Any, b: Any) -> None:
        shared = host.shared
        clock = shared.incr_clock(host.thread)
        clock.inc(shared.get_next_tma_thread_id())
        values = []
        for ref, is_value in ((a, in_registers), (b, False)):
            if is_value:
                values.append(np.asarray(ref[0]))
                continue
            access, key = host.access(ref), host.key(ref)
            values.append(shared.get_buffer_content(key, access, None)[0])
            callbacks.get_races().check_read(
                host.thread, clock.async_smem_clock.copy(), key, access, source_info=host.info
            )
        into, access = host.key(acc), host.access(acc)
        old = shared.get_buffer_content(into, access, None)[0]
        new = old + np.matmul(*(x.astype(np.float32) for x in values))
        shared.store_buffer_content(into, access, new.astype(old.dtype), host.thread)
        host.products.append((clock, into))

    refs = [k.ref(i, x, t) for i, (x, t) in enumerate(zip((acc, a, b), transforms, strict=True))]
    k.on_host(multiply, (), *refs)
    return []


def wait_for_products(host: Host, left: int, site: str) -> None:
    if site == now().planted:
        return
    queue = host.products
    while len(queue) > left:
        clock, _ = queue.pop(0)
        with host.shared.lock:
            host.shared.clocks[host.thread].update(clock)


def accumulator_store(k: Kernel, invals: list) -> list:
    def write(host: Host, acc: Any, x: Any) -> None:
        key = host.key(acc)
        if any(into == key for _, into in host.products):
            now().problems.add(f"{k.site}: sums are written before the product is done")
        host.shared.store_buffer_content(key, host.access(acc), np.asarray(x), host.thread)

    k.on_host(write, (), (invals[0], ()), invals[1])
    return invals[1:]


def wgmma_wait(k: Kernel, invals: list) -> list:
    left, site = k.eqn.params["n"], k.site
    k.on_host(lambda host: wait_for_products(host, left, site), ())
    return []


def accumulator(k: Kernel, invals: list) -> list:
    left, site = k.eqn.params["wait_n"], k.site

    def read(host: Host, acc: Any) -> Any:
        if left is not None:
            wait_for_products(host, left, site)
        key = host.key(acc)
        if any(into == key for _, into in host.products):
            now().problems.add(f"{site}: sums are read before the product is done")
        return (host.shared.get_buffer_content(key, host.access(acc), None)[0],)

    return k.on_host(read, (k.eqn.outvars[0].aval,), (invals[0], ()))


# ---- waits and signals -------------------------------------------------------------------------


def barrier_wait(k: Kernel, invals: list) -> list:
    key = jaxprs._get_barrier_allocation_key_from_inval(
        invals[0], k.eqn.params["transforms_treedef"], invals[1:]
    )
    site = k.site

    def wait(host: Host, key: Any) -> None:
        with ordering(host.thread, site):
            callbacks._barrier_wait(host.token, host.position, host.thread, key, host.info)

    k.on_host(wait, (), key)
    return []


def wait_smem_to_gmem(k: Kernel, invals: list) -> list:
    left, reads, site = k.eqn.params["n"], k.eqn.params["wait_read_only"], k.site

    def wait(host: Host) -> None:
        with ordering(host.thread, site):
            host.shared.wait_smem_to_gmem(host.thread, left, reads)

    k.on_host(wait, ())
    return []


def commit_smem(k: Kernel, invals: list) -> list:
    site = k.site

    def commit(host: Host) -> None:
        with ordering(host.thread, site):
            host.shared.commit_smem(host.thread)

    k.on_host(commit, ())
    return []


def get_global(k: Kernel, invals: list) -> list:
    return [jnp.int32(next(made))]


def _count(ref: Any, transforms: tuple) -> tuple:
    index = tuple(int(i) for t in transforms for i in t.indices)
    return int(ref), index


def semaphore_signal(k: Kernel, invals: list) -> list:
    ref, transforms, value, *_ = jax.tree.unflatten(k.eqn.params["args_tree"], invals)

    def signal(host: Host, ref: Any, transforms: Any, value: Any) -> None:
        clock = host.shared.incr_clock(host.thread)
        with now().changed:
            count = host.counts.setdefault(_count(ref, transforms), [0, None])
            count[0] += int(value)
            if count[1] is not None:
                clock.update(count[1])
            count[1] = clock
            now().changed.notify_all()

    k.on_host(signal, (), ref, transforms, value)
    return []


def semaphore_wait(k: Kernel, invals: list) -> list:
    ref, transforms, value, decrement = jax.tree.unflatten(k.eqn.params["args_tree"], invals)
    site = k.site

    def wait(host: Host, ref: Any, transforms: Any, value: Any, decrement: Any) -> None:
        at = _count(ref, transforms)
        with now().changed:
            while host.counts.setdefault(at, [0, None])[0] < int(value):
                now().changed.wait(0.2)
                host.shared.check_failed()
            count = host.counts[at]
            count[0] -= int(value) * bool(decrement)
            clock = count[1]
        with ordering(host.thread, site):
            if clock is not None:
                with host.shared.lock:
                    host.shared.clocks[host.thread].update(clock)

    k.on_host(wait, (), ref, transforms, value, decrement)
    return []


# ---- copies ------------------------------------------------------------------------------------


class Adding(callbacks.AsyncCopySmemToGmemTask):
    """A copy that adds to what is there."""

    def __call__(self, engine: int) -> None:
        shared = callbacks._get_shared_memory()
        self.pre_read(engine, shared)
        value = shared.get_buffer_content(self.src_allocation_key, self.src_access, None)[0]
        self.post_read(engine, shared)
        to = self.dst_allocation_key
        shape = tuple(shared.buffer_shape_and_dtype(to).shape)
        if inside := callbacks._clip_store_to_shape(self.dst_access, value, shape):
            access, value = inside
            old = shared.get_buffer_content(to, access, None)[0]
            shared.store_buffer_content(to, access, old + value, self.thread)
        self.post_write(engine, shared)


def copy_out(k: Kernel, invals: list) -> list | None:
    """Handles reductions by the copy engine; other copies are left to JAX."""
    params = k.eqn.params
    if params["reduction_op"] is None:
        return None
    if params["reduction_op"] != "add" or params["has_user_predicate"]:
        raise NotImplementedError(f"copy_smem_to_gmem: {params}")
    trees = params["src_transforms_treedef"], params["dst_transforms_treedef"]
    transforms = jax.tree.unflatten(jax.tree_util.treedef_tuple(trees), invals[2:])

    def copy(host: Host, source: Any, to: Any) -> None:
        task = Adding(
            host.position, host.thread, host.key(source), host.access(source), host.key(to),
            host.access(to), host.info, host.shared.incr_clock(host.thread),
        )  # fmt: skip
        host.shared.execute_async_task(task)

    k.on_host(copy, (), *(k.ref(i, invals[i], transforms[i]) for i in range(2)))
    return []


def copy_in(k: Kernel, invals: list) -> list | None:
    """Copies of which each program of a cluster brings a share to all."""
    params = k.eqn.params
    if not params["collective_axes"]:
        return None
    (name,) = params["collective_axes"]
    mesh = k.interpreter.mesh
    axis, size = mesh.cluster_names.index(name), dict(mesh.shape)[name]
    trees = [params[f"{x}_transforms_treedef"] for x in ("src", "dst", "barrier")]
    leaves = list(invals[3:])
    source, to = (
        (ref, jax.tree.unflatten(tree, [leaves.pop(0) for _ in range(tree.num_leaves)]))
        for ref, tree in zip(invals[:2], trees, strict=False)
    )
    barrier = jaxprs._get_barrier_allocation_key_from_inval(invals[2], trees[2], leaves)

    def copy(host: Host, source: Any, to: Any, barrier: Any) -> None:
        coords = list(host.position.block_coords)
        mine, rows = coords[axis], host.shape(to)[0] // size
        part = (slice(mine * rows, (mine + 1) * rows),)
        clock = host.shared.incr_clock(host.thread)
        clock.inc(host.shared.get_next_tma_thread_id())
        races, key = callbacks.get_races(), host.key(source)
        read = host.access(source)
        value = host.shared.get_buffer_content(key, read, None)[0]
        races.check_read(host.thread, clock.generic_clock.copy(), key, read, host.info)
        value = callbacks._pad_to_requested(value, read.shape, value.dtype, 0)[part]
        for coords[axis] in range(size):
            block = int(np.ravel_multi_index(coords, mesh.cluster))
            key, bar = (replace(host.key((x, ())), block_id=block) for x in (to[0], barrier))
            while not (key in host.shared.mem and bar in host.shared.mem):
                host.shared.check_failed()
                threading.Event().wait(0.005)
            access = _part(host.access(to), part[0])
            host.shared.store_buffer_content(key, access, value, host.thread)
            races.check_write(host.thread, clock.copy(), key, access, host.info)
            with now().changed:  # the last program's copy completes the phase
                clocks = host.counts.setdefault((tuple(bar), "copies"), [])
                clocks.append(clock.copy())
                is_complete = len(clocks) == size
                if is_complete:
                    del host.counts[tuple(bar), "copies"]
            if is_complete:
                for other in clocks[1:]:
                    clocks[0].update(other)
                host.shared.get_barrier(bar).arrive(host.thread, clocks[0])

    k.on_host(copy, (), source, to, barrier)
    return []


def _part(access: Any, rows: slice) -> Any:
    """Returns these rows of an access."""
    parts, first = list(access.range), True
    for i, x in enumerate(parts):
        if isinstance(x, slice) and first:
            parts[i], first = slice(x.start + rows.start, x.start + rows.stop, 1), False
    return replace(access, range=tuple(parts))


# ---- instructions of the compiler's own ----------------------------------------------------------


def inline(k: Kernel, invals: list) -> list:
    """Handles a piece of the compiler's own instructions by the function that emits it."""
    params = k.eqn.params
    function = params["mgpu_fn"]
    names = inspect.getclosurevars(function).nonlocals
    if "function" in names:
        function = names["function"]
        names = inspect.getclosurevars(function).nonlocals
    name = f"{function.__module__.rpartition('.')[2]}.{function.__qualname__.partition('.')[0]}"
    if name not in standins.ALL:
        raise NotImplementedError(
            f"{name}: no stand-in for these instructions, see gpu/mosaic/standins.py"
        )
    count = params["pytree_args"].num_leaves
    transforms = params["pytree_ref_transforms"].unflatten(invals[count:])
    values = [invals[i] if t is None else k.ref(i, invals[i], t) for i, t in enumerate(transforms)]
    out = standins.ALL[name](k, SimpleNamespace(**names), *values)
    return [] if out is None else list(out) if isinstance(out, (tuple, list)) else [out]


HANDLERS = {
    mosaic.wgmma_ref_p: wgmma,
    mosaic.wgmma_wait_p: wgmma_wait,
    mosaic.wgmma_accumulator_deref_p: accumulator,
    mosaic.wgmma_accumulator_store_p: accumulator_store,
    mosaic.barrier_wait_p: barrier_wait,
    mosaic.wait_smem_to_gmem_p: wait_smem_to_gmem,
    mosaic.commit_smem_p: commit_smem,
    mosaic.copy_smem_to_gmem_p: copy_out,
    mosaic.copy_gmem_to_smem_p: copy_in,
    mosaic.inline_mgpu_p: inline,
    mosaic.semaphore_signal_p: semaphore_signal,
    mosaic.semaphore_wait_p: semaphore_wait,
    pallas.get_global_p: get_global,
}
ORDERS = (
    mosaic.wgmma_wait_p, mosaic.wgmma_accumulator_deref_p, mosaic.barrier_wait_p,
    mosaic.wait_smem_to_gmem_p, mosaic.commit_smem_p, mosaic.semaphore_wait_p,
)  # fmt: skip
