"""Properties of all Triton kernels: what they need, and what they are compiled for."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace
from typing import Any

from ejkernel.kernels.triton import compat
from ejkernel.kernels.triton.targets import Target, current_target, too_old_reason
from ejkernel.ops.call_kernel import CallKernel
from ejkernel.ops.params import config_field

DTYPES = ("float16", "bfloat16", "float32")
MAX_DIM = 256


class TritonKernel(CallKernel):
    """A kernel for GPUs, launched through the bridge."""

    def unavailable_reason(self) -> str | None:
        return compat.unavailable_reason() or too_old_reason(self.target())

    def target(self) -> Target:
        return current_target()


def unsupported_operands(
    dtypes: Mapping[str, str],
    dims: Mapping[str, int],
    among: Collection[str] = DTYPES,
    least: int = 0,
) -> str | None:
    """Returns why a kernel does not support these dtypes and head dims, None if it does."""
    for argument, dtype in dtypes.items():
        if dtype not in among:
            return f"{argument}: {dtype} is not supported, only {', '.join(among)}"
    for argument, dim in dims.items():
        if not least <= dim <= MAX_DIM or dim % 8:
            allowed = f"from {least} to {MAX_DIM}" if least else f"up to {MAX_DIM}"
            return f"{argument}: head dim {dim} is not a multiple of 8 {allowed}"
    return None


def override_tiles(tiles: Any, cfg: Any, names: Mapping[str, str]) -> Any:
    """Returns ``tiles`` overridden by a config; ``names``: tile fields to config fields."""
    values = {mine: config_field(cfg, theirs) for mine, theirs in names.items()}
    return replace(tiles, **{mine: int(x) for mine, x in values.items() if x is not None})
