"""The order of threads of an interpreted kernel, and memory as one of them sees it."""

from __future__ import annotations

import contextlib
import threading
from dataclasses import dataclass, field
from typing import Any

import jax
import numpy as np

from gpu.mosaic.inside import callbacks, indexing, io_callback, jaxprs, memory, sources


@dataclass
class Watch:
    """Findings of one run.

    Attributes:
        planted: the site whose order is taken away.
        sites: places in the sources that order something, and what they are.
        races: pairs of places whose accesses, by two threads, are in no known order.
        same_thread: pairs of one thread: past a proxy, or before a copy or a wgmma is done.
        problems: accumulators that were touched before their wgmma was done.
    """

    planted: str | None = None
    sites: dict[str, str] = field(default_factory=dict)
    changed: threading.Condition = field(default_factory=threading.Condition)
    races: set[str] = field(default_factory=set)
    same_thread: set[str] = field(default_factory=set)
    problems: set[str] = field(default_factory=set)


watch = Watch()


def begin(planted: str | None) -> Watch:
    """Another run."""
    global watch
    watch = Watch(planted)
    return watch


def now() -> Watch:
    return watch


def place_of(info: Any) -> str:
    """Returns where an equation comes from: folder, file, line, function."""
    text = sources.summarize(info) if info is not None else "outside"
    path, _, function = text.partition(" ")
    return " ".join(["/".join(path.split("/")[-2:]), function.replace(".<locals>", "")])


class Races:
    """Accesses of each buffer that a later one may meet; takes the place of JAX's record.

    A write of the copy engine must know of writes past its own proxy, of reads it need not: what a
    thread read is in its registers when it says so.
    """

    def __init__(self, num_cores: int = 0) -> None:
        self.lock = threading.Lock()
        self.seen: dict[Any, list] = {}
        self.unions: dict[Any, tuple] = {}  # of a buffer in a union: that, and its group there

    def tag_ref_union_member(self, key: Any, union: Any, group: int) -> None:
        self.unions[key] = union, group

    def check_read(self, thread: Any, clock: Any, key: Any, rnge: Any, source_info: Any = None):
        self._check(thread, False, clock, clock, key, rnge.range, source_info)

    def check_write(self, thread: Any, clock: Any, key: Any, rnge: Any, source_info: Any = None):
        both = isinstance(clock, memory.GpuClockBundle)
        writes, reads = (clock.async_smem_clock, clock.generic_clock) if both else (clock, clock)
        self._check(thread, True, writes, reads, key, rnge.range, source_info)

    def _check(
        self, thread: Any, writes: bool, clock: Any, of_reads: Any, key: Any, part: Any, info: Any
    ) -> None:
        key, group = self.unions.get(key, (key, 0))
        with self.lock:
            records = []
            for other in self.seen.get(key, ()):
                who, wrote, times, its_group, its_part, its_info = other
                met = group != its_group or overlap(part, its_part)
                if (writes or wrote) and met:
                    if not (times <= (clock if wrote else of_reads).clock).all():
                        pair = (
                            f"{'written' if w else 'read'} at {place_of(i)}"
                            for w, i in ((wrote, its_info), (writes, info))
                        )
                        problems = now().same_thread if who == thread else now().races
                        problems.add(" and ".join(pair))
                    elif writes and group == its_group and within(its_part, part):
                        continue  # an access in no order with it is in none with this one, either
                records.append(other)
            records.append((thread, writes, clock.clock.copy(), group, part, info))
            self.seen[key] = records


def _ends(a: tuple, b: tuple) -> list[tuple[int, int, int, int]]:
    """First and end of either along each axis of a buffer."""
    ends = ([(x, x + 1) if isinstance(x, int) else (x.start, x.stop) for x in r] for r in (a, b))
    return [(*x, *y) for x, y in zip(*ends, strict=True)]


def overlap(a: tuple, b: tuple) -> bool:
    return all(start < b_end and b_start < end for start, end, b_start, b_end in _ends(a, b))


def within(a: tuple, b: tuple) -> bool:
    return all(b_start <= start and end <= b_end for start, end, b_start, b_end in _ends(a, b))


def copied_in(self: Any, engine: int, shared: Any) -> None:
    """The write of a copy to shared callbacks."""
    self.clock.inc(engine)
    callbacks.get_races().check_write(
        self.thread, self.clock.copy(), self.dst_allocation_key, self.dst_access, self.source_info
    )


@contextlib.contextmanager
def ordering(thread: Any, site: str):
    """Lets the thread learn an order inside, unless the site's order is taken away."""
    clocks, lock = (
        callbacks._get_shared_memory().clocks,
        callbacks._get_shared_memory().lock,
    )
    with lock:
        before = clocks[thread].copy()
    yield
    if site == now().planted:
        with lock:
            clocks[thread] = before


class Kernel:
    """One equation for its handler: the thread, the position, and how to run on the host."""

    def __init__(self, interpreter: Any, eqn: Any, token: Any, orders: bool) -> None:
        self.interpreter, self.eqn, self.token = interpreter, eqn, token
        self.warpgroup = interpreter.mesh_location.thread_id
        self.site = place_of(eqn.source_info)
        if orders:
            now().sites[self.site] = eqn.primitive.name

    def ref(self, operand: int, key: Any, transforms: tuple = ()) -> tuple:
        """(key, transforms) of an operand, of the member that is meant where it is a union."""
        return jaxprs.resolve_ref(self.eqn.invars[operand].aval, key, tuple(transforms))

    def on_host(self, run: Any, results: tuple, *operands: Any) -> list:
        """Calls ``run(Host, *operands)`` in the order of the thread's other accesses."""

        def called(token: Any, position: Any, thread: Any, *operands: Any) -> Any:
            host = Host(token, position, thread, self.eqn.source_info)
            outputs = run(host, *operands)
            kinds = zip(outputs or (), results, strict=True)
            return token, *(np.asarray(x, kind.dtype).reshape(kind.shape) for x, kind in kinds)

        where = self.interpreter.mesh_location, self.interpreter.thread
        kinds = callbacks.TOKEN_SHAPE_DTYPE, *results
        checked = callbacks.fail_on_exception(called)
        self.token, *values = io_callback(checked, kinds, self.token, *where, *operands)
        return values


@dataclass
class Host:
    """The memory as one thread sees it, on the host; references are (key, transforms)."""

    token: Any
    position: Any
    thread: Any
    info: Any

    @property
    def shared(self) -> Any:
        return callbacks._get_shared_memory()

    @property
    def products(self) -> list:
        """Clocks and accumulators of this thread's wgmmas, oldest first, until waited for."""
        return vars(self.shared).setdefault("products", {}).setdefault(self.thread, [])

    @property
    def counts(self) -> dict:
        """Values and clocks of a launch's semaphores and counters."""
        return vars(self.shared).setdefault("counts", {})

    def _located(self, ref: Any, index: tuple | None) -> tuple[Any, tuple]:
        key, transforms = ref
        transforms = tuple(callbacks._remove_noop_transforms(transforms))
        if index is not None:
            full = self.shared.access(self.key(ref), jax.tree.map(int, transforms)).shape
            index = indexing.NDIndexer.from_indices_shape(index, full)
            transforms = (*transforms, index)
        return key, transforms

    def key(self, ref: Any) -> Any:
        return callbacks.HostAllocationKey.from_array(ref[0])

    def access(self, ref: Any) -> Any:
        transforms = jax.tree.map(int, callbacks._remove_noop_transforms(ref[1]))
        return self.shared.access(self.key(ref), transforms)

    def shape(self, ref: Any) -> tuple[int, ...]:
        return self.access(ref).shape

    def get(self, ref: Any, index: tuple | None = None) -> np.ndarray:
        where = self._located(ref, index)
        _, value = callbacks._get(
            self.token, self.position, self.thread, *where, source_info=self.info
        )
        return value

    def put(self, ref: Any, value: Any, index: tuple | None = None) -> None:
        where = self._located(ref, index)
        value = np.asarray(value, self.shared.buffer_shape_and_dtype(self.key(ref)).dtype)
        operands = self.token, self.position, self.thread, *where, value, None
        callbacks._swap(*operands, source_info=self.info)

    def take(self, counter: Any) -> int:
        """One more of a counter, which orders nothing; what it was."""
        with now().changed:
            count = self.counts.setdefault((int(counter[0]), ()), [0, None])
            count[0] += 1
            return count[0] - 1
