"""Tile sizes that kernels choose: frozen, stored under the names of the config's fields."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Any, Self

from ejkernel.ops import BwdParams, FwdParams
from ejkernel.ops.params import config_field


class Steps:
    """Base of tiles whose fields are fields of the config; None follows from the shapes."""

    def apply_config(self, cfg: Any, problem: Any, target: Any) -> Self:
        """Returns these sizes, overridden by the fields that a config sets."""
        sizes = {f.name: config_field(cfg, f.name) for f in fields(self)}  # ty: ignore[invalid-argument-type]
        sizes = {name: int(size) for name, size in sizes.items() if size is not None}
        for name, size in sizes.items():
            if size < 1:
                raise ValueError(f"{name}: must be at least 1, got {size}")
        return replace(self, **sizes)  # ty: ignore[invalid-argument-type]

    @property
    def fields(self) -> Mapping[str, Any]:
        return {name: size for name, size in vars(self).items() if size is not None}


@dataclass(frozen=True)
class Blocks:
    """Lengths of the blocks of queries and keys in one pass."""

    q: int
    kv: int

    def override(self, params: Any) -> Blocks:
        """Returns these lengths, overridden by the parameters of a config."""
        return Blocks(
            int(config_field(params, "q_blocksize", self.q)),
            int(config_field(params, "kv_blocksize", self.kv)),
        )


@dataclass(frozen=True)
class Passes:
    """Blocks of the forward and the backward pass."""

    fwd: Blocks
    bwd: Blocks

    def apply_config(self, cfg: Any, problem: Any, target: Any) -> Passes:
        fwd, bwd = config_field(cfg, "fwd_params"), config_field(cfg, "bwd_params")
        return Passes(self.fwd.override(fwd), self.bwd.override(bwd))

    @property
    def fields(self) -> Mapping[str, Any]:
        return {
            "fwd_params": FwdParams(q_blocksize=self.fwd.q, kv_blocksize=self.fwd.kv),
            "bwd_params": BwdParams(q_blocksize=self.bwd.q, kv_blocksize=self.bwd.kv),
        }
