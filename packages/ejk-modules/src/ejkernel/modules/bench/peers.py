"""Peers: JAX's own functions and plain forms that compute the same, as contenders.

Each is a function of the call's arrays, in their order, or the reason why it cannot take part.
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from ejkernel.modules.workloads.call import Call
from ejkernel.modules.workloads.families import AttentionShape, DecodeShape, DeltaShape, LinearShape

Peer = Callable[..., Any] | str
LOGITS_LIMIT = 2**30  # elements that a peer which holds every logit may need
STEPS_LIMIT = 8192
FA3_MODULES = ("dew_flash_attn", "flash_attn3_jax")  # builds of FlashAttention-3 for JAX


def peers_of(call: Call) -> dict[str, Peer]:
    """Returns the peers of a call by name; none for operations that nobody else offers."""
    finder = _FINDERS.get(call.operation)
    return {} if finder is None or call.shape is None else finder(call)


def _attention(call: Call) -> dict[str, Peer]:
    shape = call.shape
    assert isinstance(shape, AttentionShape)
    peers: dict[str, Peer] = {}
    if jax.default_backend() == "gpu":
        peers["cudnn"] = _jax_nn(shape, "cudnn")
        module = next((m for m in FA3_MODULES if importlib.util.find_spec(m)), None)
        if module is not None:
            peers["fa3"] = _flash_attention_3(shape, module)
    if shape.batch * shape.heads * shape.q_len * shape.keys <= LOGITS_LIMIT:
        peers["jax-xla"] = _jax_nn(shape, "xla")
    return peers


def _jax_nn(shape: AttentionShape, implementation: Any) -> Peer:
    unsupported = (shape.soft_cap, shape.sinks or None, shape.dropout or None)
    if any(x is not None for x in unsupported) or shape.documents > 1:
        return "jax.nn has no such option"
    if shape.dtype == "float8_e4m3fn":
        return "jax.nn takes no scales of operands"
    if shape.head_dim != shape.value_dim:
        return "jax.nn wants equal head dims"
    window = None if shape.window is None else (shape.window, 0 if shape.causal else shape.window)

    def attend(query, key, value, *bias):
        return jax.nn.dot_product_attention(
            query, key, value, *bias,
            is_causal=shape.causal, local_window_size=window, implementation=implementation,
        )  # fmt: skip

    return attend


def _flash_attention_3(shape: AttentionShape, module: str) -> Peer:
    """Returns FlashAttention-3 of an installed module; its backward may not repeat its bits."""
    unsupported = (shape.soft_cap, shape.sinks or None, shape.dropout or None, shape.bias or None)
    if any(x is not None for x in unsupported) or shape.documents > 1:
        return "flash_mha has no such option"
    if shape.dtype not in ("bfloat16", "float16") or max(shape.head_dim, shape.value_dim) > 256:
        return "flash_mha wants 16 bits and head dims up to 256"
    if shape.causal and shape.keys != shape.q_len:
        return "flash_mha aligns causal masks to the last key"
    options: dict[str, Any] = {"is_causal": shape.causal}
    if shape.window is not None:
        options["window_size"] = (shape.window, 0 if shape.causal else shape.window)

    def attend(query, key, value):
        return importlib.import_module(module).flash_mha(query, key, value, **options)

    return attend


def _blocksparse(call: Call) -> dict[str, Peer]:
    from ejkernel.modules import flash_attention

    skipped = ("q_block_size", "kv_block_size")
    options = {k: v for k, v in call.options.items() if k not in skipped}
    names = call.names

    def full(*arrays):
        arguments = dict(zip(names, arrays, strict=True))
        arguments.pop("block_mask")
        return flash_attention(**arguments, **options)

    return {"full": full}


def _page(call: Call) -> dict[str, Peer]:
    """Returns peers of paged decoding: rows of equal length without a table, read in place."""
    from ejkernel.modules import ragged_decode_attention

    shape = call.shape
    assert isinstance(shape, DecodeShape)
    if shape.cache_dtype != shape.dtype:
        return {}

    def rows(cache):
        return cache.reshape(shape.batch, -1, shape.kv_heads, shape.head_dim)

    def contiguous(q, k, v, lens, tables, *sinks):
        del tables
        start = jnp.zeros_like(lens)
        return ragged_decode_attention(q, rows(k), rows(v), start, lens, *sinks, **call.options)

    def dense(q, k, v, lens, tables):
        del tables
        return jax.nn.dot_product_attention(
            q[:, None], rows(k), rows(v), key_value_seq_lengths=lens
        )

    plain = not (shape.sinks or call.options)
    return {"contiguous": contiguous, "jax-xla": dense if plain else "jax.nn has no such option"}


def _gated(call: Call) -> dict[str, Peer]:
    """Returns the definition, one token after the other."""
    shape = call.shape
    assert isinstance(shape, LinearShape)
    if shape.length > STEPS_LIMIT:
        return {"recurrence": "too long to step through"}
    if shape.kv_heads not in (None, shape.heads):
        return {"recurrence": "written for equal heads"}

    def recurrence(q, k, v, g, state=None):
        scale = q.shape[-1] ** -0.5
        g = g[..., None] if g.ndim == 3 else g

        def add_token(state, x):
            q, k, v, g = x
            state = state * jnp.exp(g)[..., None] + k[..., None] * v[..., None, :]
            return state, scale * jnp.einsum("bhd,bhde->bhe", q, state)

        return _scan_tokens(add_token, (q, k, v, g), state)

    return {"recurrence": recurrence}


def _scan_tokens(step: Callable[..., Any], arrays: tuple[jax.Array, ...], state: Any) -> Any:
    """Returns the outputs of ``step``, and with a ``state`` the last one."""
    q, _, v, *_ = arrays
    first = jnp.zeros((*q.shape[::2], q.shape[3], v.shape[3])) if state is None else state
    last, o = jax.lax.scan(step, first, jax.tree.map(lambda a: jnp.moveaxis(a, 1, 0), arrays))
    o = jnp.moveaxis(o, 0, 1)
    return o if state is None else (o, last)


def _delta(call: Call) -> dict[str, Peer]:
    """Returns the definition, one token after the other."""
    shape = call.shape
    assert isinstance(shape, DeltaShape)
    if shape.length > STEPS_LIMIT:
        return {"recurrence": "too long to step through"}
    if shape.sequences is not None:
        return {"recurrence": "written for one sequence a row"}

    def recurrence(q, k, v, g, beta, state=None):
        q, k = (jnp.repeat(x, v.shape[2] // x.shape[2], 2) for x in (q * q.shape[-1] ** -0.5, k))
        g = g[..., None] if g.ndim == 3 else g

        def advance(state, x):
            q, k, v, g, beta = x
            state = state * jnp.exp(g)[..., None]
            error = v - jnp.einsum("bhd,bhde->bhe", k, state)
            state = state + k[..., None] * (beta[..., None] * error)[..., None, :]
            return state, jnp.einsum("bhd,bhde->bhe", q, state)

        return _scan_tokens(advance, (q, k, v, g, beta), state)

    return {"recurrence": recurrence}


def _grouped(call: Call) -> dict[str, Peer]:
    if "rhs_scale" in call.names:
        return {}
    return {"dense": lambda lhs, rhs, sizes: lhs @ rhs[0], "ragged_dot": jax.lax.ragged_dot}


def _pooling(call: Call) -> dict[str, Peer]:
    chunk = call.options.get("chunk_size")

    def mean(x):
        if chunk is None:
            return x.mean(1)
        b, s, c = x.shape
        return x.reshape(b, s // chunk, chunk, c).mean(2)

    return {"jax-xla": mean}


_FINDERS: dict[str, Callable[[Call], dict[str, Peer]]] = {
    "flash_attention": _attention,
    "scaled_dot_product_attention": _attention,
    "blocksparse_attention": _blocksparse,
    "page_attention": _page,
    "gla_attention": _gated,
    "recurrent_attention": _gated,
    "gated_delta_rule": _delta,
    "grouped_matmul": _grouped,
    "mean_pooling": _pooling,
}
