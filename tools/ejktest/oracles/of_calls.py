"""The oracle of a random call: its outputs and gradients in float64, from the formulas.

Results have the names that ``gpu.call_outcomes`` gives them: ``output 0``, ``dquery 0``.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import Any

import jax
import numpy as np

from ejktest.oracles import attention, paged, sparse
from ejktest.oracles.convolution import causal_conv1d
from ejktest.oracles.delta import gated_delta_rule
from ejktest.oracles.grouped import grouped_matmul
from ejktest.oracles.latent import Latent, expand, latent_gradients
from ejktest.oracles.linear import linear_attention, slopes
from ejktest.oracles.pooling import mean_pooling

Arrays = dict[str, np.ndarray]
Cotangent = Callable[[Any], np.ndarray]


def named(outputs: Any, gradients: Any = None) -> Arrays:
    """Returns outputs and gradients by the names of results."""
    results = {f"output {i}": np.asarray(x) for i, x in enumerate(outputs)}
    return results | {f"d{n} 0": np.asarray(x) for n, x in (gradients or {}).items()}


# ---- dense attention -----------------------------------------------------------------------------

RULES = ("causal", "causal_offset", "sliding_window", "attention_mask", "chunk_size",
         "cum_seqlens_q", "cum_seqlens_k")  # fmt: skip
POSITIONS = ("q_segment_ids", "kv_segment_ids", "q_positions", "kv_positions", "causal",
             "chunk_size")  # fmt: skip


def seen_keys(a: dict[str, Any], b: int, h: int, q: int, k: int) -> np.ndarray:
    """Returns which keys a row sees, bool ``[b, h or 1, q, k]``."""
    rules = {name: a[name] for name in RULES if a.get(name) is not None}
    if "cu_seqlens" in a:
        rules["cum_seqlens_q"] = a["cu_seqlens"]
    mask = a.get("mask_info")
    if mask is not None and "cum_seqlens_q" not in rules:  # rules of the call use its positions
        rules |= {"q_positions": mask.q_positions, "kv_positions": mask.kv_positions}
    see = attention.visible(b, q, k, **rules)
    if mask is not None:
        fields = {name: getattr(mask, name) for name in POSITIONS}
        see = see & attention.visible(b, q, k, **fields)
    if (blocks := a.get("block_mask")) is not None:
        i, j = np.arange(q)[:, None] // a["q_block_size"], np.arange(k) // a["kv_block_size"]
        see = see & blocks[(None,) * (4 - blocks.ndim)][:, :, i, j]
    if (modified := a.get("mask_mod")) is not None:
        see = see & modified(*np.ogrid[:b, :h, :q, :k])
    return see


def dense(operation: str, a: dict[str, Any], cotangent: Cotangent) -> Arrays:
    """Returns the results of attention on dense arrays."""
    if "score_mod" in a or "q_scale" in a:
        raise NotImplementedError("score_mod, or scales")
    latent = operation == "mla_attention"
    (b, q, h, _), k = a["query"].shape, a["key_value" if latent else "key"].shape[1]
    seed = a.get("dropout_seed", 0)
    if "dropout_rng" in a:
        seed = jax.random.bits(a["dropout_rng"], (), "uint32")
    drop = None
    if probability := a.get("dropout_prob"):
        drop = attention.dropout_factor(probability, int(seed), (b, h, q, k))
    options = {
        "bias": a.get("bias"),
        "sinks": a.get("softmax_aux"),
        "see": seen_keys(a, b, h, q, k),
        "scale": a.get("softmax_scale"),
        "cap": a.get("logits_soft_cap"),
        "drop": drop,
    }
    if latent:
        names = ("query", "key_value", "w_kc", "w_vc", "b_q", "b_k")
        operands = Latent(*(a.get(name) for name in names))
        case = expand(operands, **options)
    else:
        case = attention.Case(a["query"], a["key"], a["value"], **options)
    result = attention.attention(case)
    outputs = [result.o]
    if operation == "attention":
        outputs.append(result.weights)
    elif a.get("return_lse"):
        outputs.append(result.lse)
    if operation == "attention" or (latent and len(outputs) > 1):
        return named(outputs)  # the oracles have no gradients through other outputs
    cotangents = [cotangent(x) for x in outputs]
    if latent:
        gradients = latent_gradients(operands, cotangents[0], **options)
        return named(
            outputs,
            {n: g for n, g in zip(names, gradients, strict=True) if g is not None},
        )
    g = attention.gradients(case, *cotangents)
    every = {"query": g.dq, "key": g.dk, "value": g.dv, "bias": g.dbias, "softmax_aux": g.dsinks}
    return named(outputs, {n: x for n, x in every.items() if x is not None})


def native_sparse(_: str, a: dict[str, Any], __: Cotangent) -> Arrays:
    """Returns the output of native sparse attention, sequence by sequence."""
    q = a["query"]
    b, s = q.shape[:2]
    scale = q.shape[-1] ** -0.5
    ends = a.get("cu_seqlens")
    spans = [(i, 0, s) for i in range(b)] if ends is None else [(0, *x) for x in pairwise(ends)]
    counts, indices = a.get("block_counts", 16), a.get("block_indices")
    out = np.zeros((*q.shape[:3], a["value"].shape[-1]))
    with jax.enable_x64(True):
        for i, start, stop in spans:
            if start == stop:
                continue
            rows = i, slice(start, stop)
            length, size = int(stop - start), a["block_size"]
            padding = (0, max(size - length, 0))  # the oracle needs room for one block

            def part(name: str, rows: Any = rows, padding: tuple[int, int] = padding) -> Any:
                if a.get(name) is None:
                    return None
                x = a[name][rows]
                return np.pad(x, (padding, *[(0, 0)] * (x.ndim - 1)))

            def count(t: int, m: int, i: int = i, start: int = start) -> int:
                most = a.get("max_block_count") or 1 << 30
                return min(
                    int(counts if isinstance(counts, int) else counts[i, start + t, m]), most
                )

            sequence = sparse.sequence(
                part("query"), part("key"), part("value"),
                [part(name) for name in ("g_cmp", "g_slc", "g_swa")], size=size, count=count,
                scale=a.get("softmax_scale", scale), length=length, window=a.get("sliding_window"),
                indices=None if indices is None else indices[rows].tolist(),
            )  # fmt: skip
            out[rows] = np.asarray(sequence)[:length]
    return named([out])


# ---- caches --------------------------------------------------------------------------------------


POOLS = ("key_cache", "value_cache", "latent_cache", "kv_pages", "kv_cache")


def cached(operation: str, a: dict[str, Any], _: Cotangent) -> Arrays:
    """Returns the outputs of an operation over a cache, in which NaN is memory of no token."""
    if operation.endswith("v3") and not is_float(a["kv_cache"]):
        raise NotImplementedError("a cache of 8 bits that is written")
    caches = {name: a[name].astype(np.float64) for name in POOLS if name in a}
    a = {n: np.nan_to_num(x) if is_float(x) else x for n, x in (a | caches).items()}
    query = a["queries" if operation.startswith("ragged_page") else "query"]
    window = a.get("sliding_window")
    both = (window, window) if isinstance(window, int) else window
    options = {
        "scale": a.get("softmax_scale", query.shape[-1] ** -0.5),
        "cap": a.get("logits_soft_cap"),
        "aux": a.get("softmax_aux"),
        "left": None if both is None else both[0],
        "k_scale": a.get("k_scale"),
    }
    if operation != "mla_decode":
        options["v_scale"] = a.get("v_scale")
    if "tree_mask" in a:
        options |= {"tree_mask": a["tree_mask"], "positions": a.get("positions"), "window": both}
        del options["left"]
    with jax.enable_x64(True):
        outputs = list(map(np.asarray, CACHED[operation](a, options)))
    rows = query.shape[:-1]
    o, lse = outputs[0].reshape(*rows, -1), outputs[1].reshape(rows)
    return named([o, lse] if a.get("return_lse") else [o])


def is_float(x: Any) -> bool:
    return isinstance(x, np.ndarray) and x.dtype == np.float64


def rows_of(query: np.ndarray) -> np.ndarray:
    return query if query.ndim == 3 else query[:, 0]


def decode_pages(a: dict[str, Any], options: dict[str, Any]) -> Any:
    operands = rows_of(a["query"]), a["key_cache"], a["value_cache"]
    where = a["context_lens"], a["block_tables"]
    return paged.page_attention(*operands, *where, return_lse=True, **options)


def decode_latent(a: dict[str, Any], options: dict[str, Any]) -> Any:
    q = a["query"] if a["query"].ndim == 4 else a["query"][:, None]
    where = a["context_lens"], a["block_tables"], a["latent_dim"]
    return paged.mla_decode(q, a["latent_cache"], *where, **options)


def decode_contiguous(a: dict[str, Any], options: dict[str, Any]) -> Any:
    bounds = a["sequence_start"], a["sequence_end"]
    operands = rows_of(a["query"]), a["key"], a["value"]
    return paged.ragged_decode_attention(*operands, *bounds, return_lse=True, **options)


def attend_ragged(a: dict[str, Any], options: dict[str, Any]) -> Any:
    where = a["block_tables"], a["query_start_loc"]
    if "kv_pages" in a:
        pages, count = a["kv_pages"], int(a["num_seqs"][0])
        return paged.ragged_page_attention(
            a["queries"], pages, a["context_lens"], *where, count, return_lse=True, **options
        )
    pages = a["kv_cache"]
    if pages.ndim == 5 or "k_scale" in a or "v_scale" in a:
        raise NotImplementedError("a packed cache, or scales")
    count = int(a["distribution"][2])
    new = jax.numpy.asarray(a["keys"]), jax.numpy.asarray(a["values"])
    pages = paged.write_pages(jax.numpy.asarray(pages), *new, a["kv_lens"], *where, count)
    return paged.ragged_page_attention(
        a["queries"], pages, a["kv_lens"], *where, count, return_lse=True, **options
    )


CACHED: dict[str, Callable[[dict[str, Any], dict[str, Any]], Any]] = {
    "page_attention": decode_pages,
    "mla_decode": decode_latent,
    "ragged_decode_attention": decode_contiguous,
    "ragged_page_attention": attend_ragged,
    "ragged_page_attention_v3": attend_ragged,
}


# ---- states and the others -----------------------------------------------------------------------


def recurrent(operation: str, a: dict[str, Any], cotangent: Cotangent) -> Arrays:
    """Returns the results of an operation with a state."""
    a, returns_state = dict(a), a.get("return_state", False)
    a.pop("return_state", None)
    function: Callable[..., Any] = linear_attention
    if operation == "lightning_attention":
        index = a.pop("layer_idx"), a.pop("num_layers")
        a["g_gamma"] = slopes(a["query"].shape[2], *index)
    elif operation == "gated_delta_rule":
        function = gated_delta_rule
    elif operation == "causal_conv1d":
        function = causal_conv1d
    result = function(**a)
    outputs = [result.o, *[result.state] * returns_state]
    cotangents = dict(zip(("do", "dstate"), map(cotangent, outputs), strict=False))
    return named(outputs, function(**a, **cotangents).grads)


def pooled(_: str, a: dict[str, Any], cotangent: Cotangent) -> Arrays:
    """Returns the results of mean pooling."""
    out = mean_pooling(**a)
    return named([out], {"x": mean_pooling(**a, dout=cotangent(out))[1]})


def multiplied(_: str, a: dict[str, Any], cotangent: Cotangent) -> Arrays:
    """Returns the results of a grouped matmul."""
    out = grouped_matmul(**a).out
    result = grouped_matmul(**a, dout=cotangent(out))
    gradients = {"lhs": result.dlhs, "rhs": result.drhs, "existing_out": cotangent(out)}
    return named([out], gradients)


DENSE = ("flash_attention", "attention", "scaled_dot_product_attention", "blocksparse_attention",
         "mla_attention")  # fmt: skip
STATES = ("recurrent_attention", "gla_attention", "lightning_attention", "gated_delta_rule",
          "causal_conv1d")  # fmt: skip
ORACLES: dict[str, Callable[[str, dict[str, Any], Cotangent], Arrays]] = {
    **dict.fromkeys(DENSE, dense),
    **dict.fromkeys(STATES, recurrent),
    **dict.fromkeys(CACHED, cached),
    "native_sparse_attention": native_sparse,
    "mean_pooling": pooled,
    "grouped_matmul": multiplied,
}


def expected(operation: str, arguments: dict[str, Any], cotangent: Cotangent) -> Arrays:
    """Returns the results of a call whose floats are float64.

    Raises:
        NotImplementedError: the oracles have no such call.
    """
    if operation not in ORACLES:
        raise NotImplementedError(operation)
    return ORACLES[operation](operation, arguments, cotangent)
