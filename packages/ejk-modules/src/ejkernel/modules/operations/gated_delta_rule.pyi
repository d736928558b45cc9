# Made from gated_delta_rule.py by tools/stubs.py --write.
from collections.abc import Mapping, Sequence
from typing import Any, Literal, overload

import jax
from jax.sharding import Mesh, PartitionSpec

from ejkernel.modules._configs import GatedDeltaRuleConfig
from ejkernel.modules._op import Operation
from ejkernel.ops import Platform
from ejkernel.types.calls.words import Array, F, I

@overload
def gated_delta_rule(
    query: F[Array, "batch seq kv_heads key_dim"],
    key: F[Array, "batch seq kv_heads key_dim"],
    value: F[Array, "batch seq heads v_dim"],
    g: F[Array, "batch seq heads"] | F[Array, "batch seq heads key_dim"] | None = None,
    beta: F[Array, "batch seq heads"] | None = None,
    initial_state: F[Array, "states heads key_dim v_dim"] | None = None,
    cu_seqlens: I[Array, " sequences_plus_1"] | None = None,
    *,
    softmax_scale: float | None = None,
    normalize_qk: bool = False,
    reverse: bool = False,
    return_state: Literal[False] = False,
    platform: str | Platform | None = None,
    cfg: GatedDeltaRuleConfig | Mapping[str, Any] | None = None,
    mesh: Mesh | None = None,
    in_specs: Sequence[PartitionSpec | None] | None = None,
    out_specs: PartitionSpec | Sequence[PartitionSpec] | None = None,
) -> jax.Array: ...
@overload
def gated_delta_rule(
    query: F[Array, "batch seq kv_heads key_dim"],
    key: F[Array, "batch seq kv_heads key_dim"],
    value: F[Array, "batch seq heads v_dim"],
    g: F[Array, "batch seq heads"] | F[Array, "batch seq heads key_dim"] | None = None,
    beta: F[Array, "batch seq heads"] | None = None,
    initial_state: F[Array, "states heads key_dim v_dim"] | None = None,
    cu_seqlens: I[Array, " sequences_plus_1"] | None = None,
    *,
    softmax_scale: float | None = None,
    normalize_qk: bool = False,
    reverse: bool = False,
    return_state: Literal[True],
    platform: str | Platform | None = None,
    cfg: GatedDeltaRuleConfig | Mapping[str, Any] | None = None,
    mesh: Mesh | None = None,
    in_specs: Sequence[PartitionSpec | None] | None = None,
    out_specs: PartitionSpec | Sequence[PartitionSpec] | None = None,
) -> tuple[jax.Array, jax.Array]: ...
@overload
def gated_delta_rule(
    query: F[Array, "batch seq kv_heads key_dim"],
    key: F[Array, "batch seq kv_heads key_dim"],
    value: F[Array, "batch seq heads v_dim"],
    g: F[Array, "batch seq heads"] | F[Array, "batch seq heads key_dim"] | None = None,
    beta: F[Array, "batch seq heads"] | None = None,
    initial_state: F[Array, "states heads key_dim v_dim"] | None = None,
    cu_seqlens: I[Array, " sequences_plus_1"] | None = None,
    *,
    softmax_scale: float | None = None,
    normalize_qk: bool = False,
    reverse: bool = False,
    return_state: bool,
    platform: str | Platform | None = None,
    cfg: GatedDeltaRuleConfig | Mapping[str, Any] | None = None,
    mesh: Mesh | None = None,
    in_specs: Sequence[PartitionSpec | None] | None = None,
    out_specs: PartitionSpec | Sequence[PartitionSpec] | None = None,
) -> jax.Array | tuple[jax.Array, jax.Array]: ...

class GatedDeltaRule(Operation[GatedDeltaRuleConfig]): ...
