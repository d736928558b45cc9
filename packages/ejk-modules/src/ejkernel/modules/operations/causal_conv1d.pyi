# Made from causal_conv1d.py by tools/stubs.py --write.
from collections.abc import Mapping, Sequence
from typing import Any, Literal, overload

import jax
from jax.sharding import Mesh, PartitionSpec

from ejkernel.modules._configs import CausalConv1DConfig
from ejkernel.modules._op import Operation
from ejkernel.ops import Platform
from ejkernel.types.calls.words import Array, F, I

@overload
def causal_conv1d(
    x: F[Array, "batch seq channels"],
    weight: F[Array, "channels width"],
    bias: F[Array, " channels"] | None = None,
    initial_state: F[Array, "states channels history"] | None = None,
    cu_seqlens: I[Array, " sequences_plus_1"] | None = None,
    *,
    activation: Literal["silu"] | None = None,
    return_state: Literal[False] = False,
    platform: str | Platform | None = None,
    cfg: CausalConv1DConfig | Mapping[str, Any] | None = None,
    mesh: Mesh | None = None,
    in_specs: Sequence[PartitionSpec | None] | None = None,
    out_specs: PartitionSpec | Sequence[PartitionSpec] | None = None,
) -> jax.Array: ...
@overload
def causal_conv1d(
    x: F[Array, "batch seq channels"],
    weight: F[Array, "channels width"],
    bias: F[Array, " channels"] | None = None,
    initial_state: F[Array, "states channels history"] | None = None,
    cu_seqlens: I[Array, " sequences_plus_1"] | None = None,
    *,
    activation: Literal["silu"] | None = None,
    return_state: Literal[True],
    platform: str | Platform | None = None,
    cfg: CausalConv1DConfig | Mapping[str, Any] | None = None,
    mesh: Mesh | None = None,
    in_specs: Sequence[PartitionSpec | None] | None = None,
    out_specs: PartitionSpec | Sequence[PartitionSpec] | None = None,
) -> tuple[jax.Array, jax.Array]: ...
@overload
def causal_conv1d(
    x: F[Array, "batch seq channels"],
    weight: F[Array, "channels width"],
    bias: F[Array, " channels"] | None = None,
    initial_state: F[Array, "states channels history"] | None = None,
    cu_seqlens: I[Array, " sequences_plus_1"] | None = None,
    *,
    activation: Literal["silu"] | None = None,
    return_state: bool,
    platform: str | Platform | None = None,
    cfg: CausalConv1DConfig | Mapping[str, Any] | None = None,
    mesh: Mesh | None = None,
    in_specs: Sequence[PartitionSpec | None] | None = None,
    out_specs: PartitionSpec | Sequence[PartitionSpec] | None = None,
) -> jax.Array | tuple[jax.Array, jax.Array]: ...

class CausalConv1D(Operation[CausalConv1DConfig]): ...
