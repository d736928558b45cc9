"""Candidates of one tuning: compiled on sample inputs, checked against the reference."""

from __future__ import annotations

import dataclasses
import functools
import math
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ejkernel.ops.compat import settings
from ejkernel.ops.core.flat_tree import FlatTree, replace_at
from ejkernel.ops.core.invocation import BoundCall, bind_by_name
from ejkernel.ops.core.keys import has_gradient, is_array
from ejkernel.ops.core.samples import DRAWN, random_array, sample_generator
from ejkernel.ops.execution.program import resolve
from ejkernel.ops.execution.timing import Timed
from ejkernel.ops.execution.trials import GRADIENT_FACTOR, Trial, disagreement, unusable

# A shorter first run is not used to drop a candidate: loading code dominates it.
LEAST_SLOW_S = 1.0


@dataclasses.dataclass(frozen=True)
class Ready:
    """A compiled program with its arguments.

    Attributes:
        compiled: a ``jax.stages.Compiled``.
        arguments: its arguments.
        cfg: the config it was compiled for.
        phase: "fwd" or "fwd+bwd".
    """

    compiled: Any
    arguments: tuple[Any, ...]
    cfg: Any
    phase: str

    def __call__(self) -> Any:
        return self.compiled(*self.arguments)


@dataclasses.dataclass
class Candidate:
    """One compiled config.

    Attributes:
        cfg: the config.
        forward: runs the forward pass; shared by configs that differ in ``bwd_params`` alone.
        both: runs the forward and the backward pass, None without gradients.
        split: whether the config has separate ``fwd_params`` and ``bwd_params``.
        fwd_ms: time of the forward pass.
        total_ms: time of both passes; of the forward pass where there is no other.
        spread: of the samples that ``total_ms`` is the median of.
    """

    cfg: Any
    forward: Ready
    both: Ready | None
    split: bool
    fwd_ms: float = 0.0
    total_ms: float = 0.0
    spread: float = 0.0

    @property
    def bwd_ms(self) -> float | None:
        """Milliseconds that the backward pass adds, None without one."""
        return None if self.both is None else max(self.total_ms - self.fwd_ms, 0.0)

    def store_times(self, fwd_ms: float, total: Timed) -> None:
        """Stores measured times; both passes take no less than one of them."""
        self.fwd_ms, self.spread = fwd_ms, total.spread
        self.total_ms = total.ms if self.both is None else max(total.ms, fwd_ms)

    @property
    def trial(self) -> Trial:
        """The record of the trial, once it is measured."""
        return Trial(self.cfg, self.total_ms, None, self.fwd_ms, self.bwd_ms, round(self.spread, 4))


class TooSlow(RuntimeError):
    """A candidate not worth timing."""


class Once:
    """Values by key, each made by the first thread that asks; the others wait for it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._futures: dict[Any, Future[Any]] = {}

    def get(self, key: Any, make: Callable[[], Any]) -> Any:
        with self._lock:
            future = self._futures.get(key)
            mine = future is None
            if future is None:
                future = self._futures[key] = Future()
        if mine:
            try:
                future.set_result(make())
            except BaseException as error:
                future.set_exception(error)
        return future.result()


class InvalidValues(RuntimeError):
    """A candidate whose values are wrong."""

    def __str__(self) -> str:
        return f"wrong values: {super().__str__()}"


def _random(shape: tuple[int, ...], dtype: Any, rng: np.random.Generator) -> jax.Array:
    """Returns ``random_array``; repetitions are made on the device, where they are cheap."""
    size = math.prod(shape)
    if size <= DRAWN:
        return jnp.asarray(random_array(shape, dtype, rng))
    return _repeated(random_array((DRAWN,), dtype, rng), shape)


@functools.partial(jax.jit, static_argnums=1)
def _repeated(drawn: Any, shape: tuple[int, ...]) -> jax.Array:
    size = math.prod(shape)
    rows = jnp.broadcast_to(drawn, (-(-size // drawn.size), drawn.size))
    return rows.reshape(-1)[:size].reshape(shape)


def _is_split(cfg: Any) -> bool:
    names = {f.name for f in dataclasses.fields(cfg)} if dataclasses.is_dataclass(cfg) else set()
    return {"fwd_params", "bwd_params"} <= names


class Workbench:
    """Sample inputs of one call, the reference values, and the making of candidates.

    Args:
        call: the call.
        configs: the candidates; the first one's implementation says whether there are gradients.
        validate_backward: True, False, or None = when there are gradients and the kernel is one
            that is trained, of a call without constant arguments.
        inputs: bound ``(args, kwargs)`` with concrete arrays; None = ``kernel.sample_inputs``.
    """

    def __init__(
        self,
        call: BoundCall,
        configs: Sequence[Any],
        validate_backward: bool | None,
        inputs: tuple[tuple[Any, ...], dict[str, Any]] | None = None,
    ):
        self.call = call
        self.kernel = call.kernel
        rng = sample_generator()
        args, kwargs = self.kernel.sample_inputs(call, rng) if inputs is None else inputs
        self.tree = FlatTree.flatten((tuple(args), dict(kwargs)))
        self.arrays = [jnp.asarray(x) for x in self.tree.arrays]
        self.constants = tuple(self.kernel.constant_arguments(call))
        self.differentiated = self._differentiated(args, kwargs)
        self.cotangents: list[Any] = []
        self.backward = bool(self.differentiated) and self._wants_backward(
            configs, validate_backward
        )
        if self.backward:
            self.cotangents = self._make_cotangents(configs, rng)
            self.backward = bool(self.cotangents)
        self.reference: Any = None
        self.gradients: Any = None
        self._forwards = Once()
        self._checked: dict[int, str | None] = {}
        self._reference_s: float | None = None
        precision = str(call.arguments.get("precision")).lower()
        everywhere = str(settings.jax_default_matmul_precision).lower()
        self.highest = "highest" in precision or everywhere in ("highest", "float32")

    def _differentiated(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> list[int]:
        """Positions among ``arrays`` to differentiate: a custom_vjp must know positional ones."""
        by_name = bind_by_name(self.kernel, args, kwargs)
        constants = jax.tree_util.tree_leaves([by_name[name] for name in self.constants])
        count = len(self.arrays)
        if self.kernel.has_custom_vjp:
            count = sum(is_array(x) for x in jax.tree_util.tree_leaves(tuple(args)))
        return [
            i
            for i, x in enumerate(self.tree.arrays[:count])
            if has_gradient(self.arrays[i]) and not any(x is y for y in constants)
        ]

    def _wants_backward(self, configs: Sequence[Any], requested: bool | None) -> bool:
        if requested is not None:
            return requested
        if not self.kernel.trained or self.constants:  # frozen arguments: calls that serve
            return False
        for cfg in configs:
            try:
                return self._resolve(cfg).differentiable
            except (NotImplementedError, LookupError):
                continue
        return False

    def _resolve(self, cfg: Any) -> Any:
        return resolve(self.kernel, self.call, cfg)

    def _function(self, cfg: Any) -> Callable[..., Any]:
        runner = self.kernel.runner(self._resolve(cfg), cfg)

        def run(*arrays: Any) -> Any:
            args, kwargs = self.tree.with_arrays(arrays)
            return runner(*args, **kwargs)

        return run

    def _make_cotangents(self, configs: Sequence[Any], rng: np.random.Generator) -> list[Any]:
        """Random cotangents of the float outputs, from the first config that traces."""
        for cfg in configs:
            try:
                out = jax.eval_shape(self._function(cfg), *self.arrays)
            except Exception:
                continue
            floats = [x for x in jax.tree_util.tree_leaves(out) if has_gradient(x)]
            return [_random(x.shape, x.dtype, rng) for x in floats]
        return []

    def compile(self, cfg: Any) -> Candidate:
        """Compile one config. Safe to call from several threads. Raises the compiler's errors."""
        run = self._function(cfg)
        forward = self._forwards.get(self._forward_key(cfg), lambda: self._compile_forward(cfg))
        both = None
        if self.backward:
            arguments = (self.arrays, self.cotangents)
            compiled = jax.jit(self._with_gradients(run)).lower(*arguments).compile()
            both = Ready(compiled, arguments, cfg, "fwd+bwd")
        return Candidate(cfg, forward, both, _is_split(cfg))

    def _compile_forward(self, cfg: Any) -> Ready:
        compiled = jax.jit(self._function(cfg)).lower(*self.arrays).compile()
        return Ready(compiled, tuple(self.arrays), cfg, "fwd")

    def _forward_key(self, cfg: Any) -> Any:
        """Equal for configs whose forward pass is the same program."""
        return dataclasses.replace(cfg, bwd_params=None) if _is_split(cfg) else object()

    def _with_gradients(self, run: Callable[..., Any]) -> Callable[..., Any]:
        def both(arrays: list[Any], cotangents: list[Any]) -> Any:
            def floats_only(*floats: Any) -> Any:
                inputs = replace_at(arrays, self.differentiated, floats)
                leaves = jax.tree_util.tree_leaves(run(*inputs))
                return [leaf for leaf in leaves if has_gradient(leaf)]

            out, vjp = jax.vjp(floats_only, *(arrays[i] for i in self.differentiated))
            return out, vjp(cotangents)

        return both

    def check(self, candidate: Candidate) -> None:
        """Run a candidate once and compare; the first valid one becomes the reference.

        Raises:
            InvalidValues: NaN, or values beyond rounding.
            TooSlow: its first run was so much slower that timing it would tell nothing.
        """
        started = time.monotonic()
        wrong = self._check_forward(candidate.forward)
        if wrong is not None:
            raise InvalidValues(wrong)
        if self._reference_s is None:
            jax.block_until_ready((candidate.both or candidate.forward)())
            self._reference_s = time.monotonic() - started
        elif (seconds := time.monotonic() - started) > max(LEAST_SLOW_S, 4 * self._reference_s):
            raise TooSlow(
                f"not timed: one forward pass took {seconds:.1f} s, both passes of the reference "
                f"config {self._reference_s:.2f} s"
            )
        if candidate.both is None:
            return
        gradients = jax.block_until_ready(candidate.both())[1]
        wrong = self._find_fault(
            gradients, self.gradients, label="gradient", factor=GRADIENT_FACTOR
        )
        if wrong is not None:
            raise InvalidValues(wrong)
        self.gradients = gradients if self.gradients is None else self.gradients

    def _check_forward(self, forward: Ready) -> str | None:
        """Returns the fault in the values of a forward pass, or None; each is run once."""
        if id(forward) not in self._checked:
            value = jax.block_until_ready(forward())
            wrong = self._checked[id(forward)] = self._find_fault(value, self.reference)
            if wrong is None and self.reference is None:
                self.reference = value
        return self._checked[id(forward)]

    def _find_fault(self, value: Any, reference: Any, **options: Any) -> str | None:
        """Returns the fault in values; without a ``reference`` they may become one."""
        if reference is None:
            return unusable(value)
        return disagreement(value, reference, highest=self.highest, **options)
