"""Candidates of one tuning: compiled on sample inputs, checked against the reference."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ejkernel.ops.compat import settings
from ejkernel.ops.core.invocation import Invocation
from ejkernel.ops.core.keys import is_array
from ejkernel.ops.core.samples import random_array
from ejkernel.ops.execution.trials import GRADIENT_FACTOR, disagreement, unusable
from ejkernel.ops.platforms import parse_platform


@dataclasses.dataclass
class Candidate:
    """One compiled config.

    Attributes:
        cfg: the config.
        forward: runs the forward pass.
        both: runs the forward and the backward pass, None without gradients.
        split: whether the config has separate ``fwd_params`` and ``bwd_params``.
        fwd_ms, bwd_ms: time of the forward pass; what the backward pass adds to it.
    """

    cfg: Any
    forward: Callable[[], Any]
    both: Callable[[], Any] | None
    split: bool
    fwd_ms: float = 0.0
    bwd_ms: float | None = None


class Unsound(RuntimeError):
    """A candidate whose values are wrong."""

    def __str__(self) -> str:
        return f"wrong values: {super().__str__()}"


def _float_array(x: Any) -> bool:
    """Whether ``x`` has gradients: quantised eight-bit floats have none."""
    return is_array(x) and jnp.issubdtype(x.dtype, jnp.inexact) and np.dtype(x.dtype).itemsize > 1


def _is_split(cfg: Any) -> bool:
    names = {f.name for f in dataclasses.fields(cfg)} if dataclasses.is_dataclass(cfg) else set()
    return {"fwd_params", "bwd_params"} <= names


class Workbench:
    """Sample inputs of one call, the reference values, and the making of candidates.

    Args:
        inv: the bound call.
        configs: the candidates; the first one's implementation says whether there are gradients.
        validate_backward: True, False, or None = when there are gradients.
    """

    def __init__(self, inv: Invocation, configs: Sequence[Any], validate_backward: bool | None):
        self.inv = inv
        self.kernel = inv.kernel
        rng = np.random.default_rng(0)
        args, kwargs = self.kernel.sample_inputs(inv, rng)
        leaves, self.treedef = jax.tree_util.tree_flatten((tuple(args), dict(kwargs)))
        self.leaves = [jnp.asarray(x) if is_array(x) else x for x in leaves]
        self.positions = [i for i, x in enumerate(self.leaves) if is_array(x)]
        self.arrays = [self.leaves[i] for i in self.positions]
        self.differentiated = self._differentiated(args)
        self.cotangents: list[Any] = []
        self.backward = bool(self.differentiated) and self._wants_backward(
            configs, validate_backward
        )
        if self.backward:
            self.cotangents = self._make_cotangents(configs, rng)
            self.backward = bool(self.cotangents)
        self.reference: Any = None
        self.gradients: Any = None
        precision = str(inv.arguments.get("precision")).lower()
        everywhere = str(settings.jax_default_matmul_precision).lower()
        self.highest = "highest" in precision or everywhere in ("highest", "float32")

    def _differentiated(self, args: tuple[Any, ...]) -> list[int]:
        """Positions among ``arrays`` to differentiate: a custom_vjp must know positional ones."""
        count = len(self.arrays)
        if self.kernel.has_custom_vjp:
            count = sum(is_array(x) for x in jax.tree_util.tree_leaves(tuple(args)))
        return [i for i in range(count) if _float_array(self.arrays[i])]

    def _wants_backward(self, configs: Sequence[Any], wanted: bool | None) -> bool:
        if wanted is not None:
            return wanted
        for cfg in configs:
            try:
                return self._resolve(cfg).differentiable
            except (NotImplementedError, LookupError):
                continue
        return False

    def _resolve(self, cfg: Any) -> Any:
        wanted = parse_platform(self.inv.info.get("requested_platform"))
        return self.kernel.implementation(self.inv, wanted or self.kernel.config_platform(cfg))

    def _function(self, cfg: Any) -> Callable[..., Any]:
        resolved = self._resolve(cfg)

        def run(*arrays: Any) -> Any:
            leaves = list(self.leaves)
            for position, array in zip(self.positions, arrays, strict=True):
                leaves[position] = array
            args, kwargs = jax.tree_util.tree_unflatten(self.treedef, leaves)
            return self.kernel.call(resolved, args, kwargs, cfg)

        return run

    def _make_cotangents(self, configs: Sequence[Any], rng: np.random.Generator) -> list[Any]:
        """Random cotangents of the float outputs, from the first config that traces."""
        for cfg in configs:
            try:
                out = jax.eval_shape(self._function(cfg), *self.arrays)
            except Exception:
                continue
            floats = [x for x in jax.tree_util.tree_leaves(out) if _float_array(x)]
            return [jnp.asarray(random_array(x.shape, x.dtype, rng)) for x in floats]
        return []

    def compile(self, cfg: Any) -> Candidate:
        """Compile one config. Safe to call from several threads. Raises what the compiler does."""
        run = self._function(cfg)
        forward = jax.jit(run).lower(*self.arrays).compile()
        both = None
        if self.backward:
            both = jax.jit(self._with_gradients(run)).lower(self.arrays, self.cotangents).compile()
        return Candidate(
            cfg,
            lambda: forward(*self.arrays),
            None if both is None else lambda: both(self.arrays, self.cotangents),
            _is_split(cfg),
        )

    def _with_gradients(self, run: Callable[..., Any]) -> Callable[..., Any]:
        def both(arrays: list[Any], cotangents: list[Any]) -> Any:
            def floats_only(*floats: Any) -> Any:
                full = list(arrays)
                for position, value in zip(self.differentiated, floats, strict=True):
                    full[position] = value
                leaves = jax.tree_util.tree_leaves(run(*full))
                return [leaf for leaf in leaves if _float_array(leaf)]

            out, vjp = jax.vjp(floats_only, *(arrays[i] for i in self.differentiated))
            return out, vjp(cotangents)

        return both

    def check(self, candidate: Candidate) -> None:
        """Run a candidate once and compare; the first sound one becomes the reference.

        Raises:
            Unsound: NaN, or values beyond rounding.
        """
        value = jax.block_until_ready(candidate.forward())
        gradients = None
        if candidate.both is not None:
            gradients = jax.block_until_ready(candidate.both())[1]
        if self.reference is None:
            wrong = unusable(value) or unusable(gradients)
            if wrong is not None:
                raise Unsound(wrong)
            self.reference, self.gradients = value, gradients
            return
        wrong = disagreement(value, self.reference, highest=self.highest)
        if wrong is None and gradients is not None:
            wrong = disagreement(
                gradients,
                self.gradients,
                what="gradient",
                factor=GRADIENT_FACTOR,
                highest=self.highest,
            )
        if wrong is not None:
            raise Unsound(wrong)
