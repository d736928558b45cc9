"""The calls that short_decode supports, and its configuration."""

import jax.numpy as jnp


def supports(inv):
    """None, or why this call is not supported."""
    a = inv.arguments
    if a["query"].ndim != 3:
        return "query: takes [batch, heads, head_dim] only"
    for name in ("softmax_aux", "sliding_window", "logits_soft_cap"):
        if a[name] is not None:
            return f"{name}: not implemented"
    if a["key"].shape[1] > 1024:
        return f"key: caches of at most 1024 tokens, got {a['key'].shape[1]}"
    if any(a[name].dtype == jnp.float64 for name in ("query", "key", "value")):
        return "query: accumulates in float32 only"
    return None


def heuristic(inv):
    """Fields of the operation's config."""
    return {}  # nothing to tune; a tiled kernel says e.g. {"fwd_params": {"blocksize_keys": 128}}
