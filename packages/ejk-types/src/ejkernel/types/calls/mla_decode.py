"""The call of mla_decode."""

from collections.abc import Mapping
from typing import Any

import jax.numpy as jnp

from ejkernel.types.calls import arguments
from ejkernel.types.calls.decode import DecodeCall
from ejkernel.types.calls.paged import PagedCall
from ejkernel.types.calls.spec import Arguments
from ejkernel.types.calls.words import Array, B, Cache, F, I, invalid, out_of_range
from ejkernel.types.serving.layout import KVLayout
from ejkernel.types.serving.operands import broadcast_operands, in_order, tree_operands
from ejkernel.types.serving.problem import LatentProblem
from ejkernel.types.serving.tree import NewRows, prepare_tree


class MLADecode(DecodeCall, PagedCall):
    """Multi-head latent attention for decoding, in latent space."""

    name = "mla_decode"
    normal_samples = True
    untuned_arguments = DecodeCall.untuned_arguments | arguments.TREE

    @staticmethod
    def signature(
        query: F[Array, "batch heads cache_dim"] | F[Array, "batch q_len heads cache_dim"],
        latent_cache: Cache[Array, "pages page_size cache_dim"],
        context_lens: I[Array, " batch"],
        block_tables: I[Array, "batch max_blocks"],
        *,
        latent_dim: int = 512,
        softmax_scale: float | None = None,
        logits_soft_cap: float | None = None,
        sliding_window: int | tuple[int, int] | None = None,
        softmax_aux: F[Array, "heads sinks"] | F[Array, " sinks"] | None = None,
        k_scale: float | F[Array, ""] | None = None,
        num_splits: int | None = None,
        tree_mask: B[Array, "batch q_len q_len"] | None = None,
        positions: I[Array, "batch q_len"] | None = None,
        return_lse: bool = False,
    ) -> None: ...

    @classmethod
    def output_axes(cls, a: Arguments) -> tuple[str, ...]:
        rows = "batch heads" if a["query"].ndim == 3 else "batch q_len heads"
        return cls.select_outputs(a, (rows + " latent_dim", rows))

    @classmethod
    def check_values(cls, a: Arguments) -> None:
        super().check_values(a)
        cls.check_tables(a)

    @classmethod
    def canonicalize(cls, a: Arguments) -> None:
        """The value part lies inside a cache row."""
        super().canonicalize(a)
        dim, limit = a["latent_dim"], a["latent_cache"].shape[-1]
        if not 1 <= dim <= limit:
            raise out_of_range("latent_dim", f"1 to {limit}, the last axis of latent_cache", dim)
        cls._canonicalize_tree(a)

    @classmethod
    def _canonicalize_tree(cls, a: Arguments) -> None:
        """Joins a window with the mask of the new tokens, by their positions."""
        query, mask, positions = a["query"], a["tree_mask"], a["positions"]
        tokens = 1 if query.ndim == 3 else query.shape[1]
        for name in ("tree_mask", "positions"):
            if a[name] is not None and a[name].shape[1] != tokens:
                raise invalid(name, f"a row for each of {tokens} query rows", a[name])
        if tokens < 2 and (positions is None or a["sliding_window"] is None):
            mask = positions = None  # a row by itself sees all tokens
        if (mask is None and positions is None) or not query.shape[0]:
            a["tree_mask"] = a["positions"] = None
            return
        b, columns = query.shape[0], jnp.arange(tokens, dtype=jnp.int32)
        capacity = cls._table_columns(a) * a["latent_cache"].shape[1]
        before = jnp.clip(a["context_lens"], 0, capacity) - tokens
        rows = NewRows(
            jnp.repeat(jnp.arange(b, dtype=jnp.int32) * tokens, tokens),
            jnp.repeat(before, tokens),
            jnp.tile(columns, b),
        )
        if mask is None:
            mask = jnp.broadcast_to(columns[None] <= columns[:, None], (b, tokens, tokens))
        flat = mask.reshape(-1, tokens), None if positions is None else positions.reshape(-1)
        mask, positions = prepare_tree(*flat, a["sliding_window"], rows)
        assert mask is not None  # one is given
        a["tree_mask"] = mask.reshape(b, tokens, tokens)
        a["positions"] = None if positions is None else positions.reshape(b, tokens)

    @classmethod
    def visible_keys(cls, a: Arguments) -> tuple[Any, Any]:
        query, lengths = a["query"], a["context_lens"]
        tokens = 1 if query.ndim == 3 else query.shape[1]
        capacity = a["block_tables"].shape[1] * a["latent_cache"].shape[1]
        row = jnp.arange(lengths.shape[0] * tokens, dtype=jnp.int32)
        sequence = row // tokens
        visible = jnp.clip(lengths, 0, capacity)[sequence] - tokens + row % tokens + 1
        return sequence, visible

    @classmethod
    def with_rows(cls, a: Arguments, tables: Any, lengths: Any) -> Arguments:
        query = a["query"]
        rows = query.reshape(-1, *query.shape[-2:])
        return {**a, "query": rows, "block_tables": tables, "context_lens": lengths}

    @classmethod
    def problem(cls, a: Mapping[str, Any]) -> LatentProblem:
        query, cache = a["query"], a["latent_cache"]
        return LatentProblem.from_arguments(
            a,
            query,
            cache,
            cache,
            kv_heads=1,
            value_dim=a["latent_dim"],
            max_pages=a["block_tables"].shape[1],
            tokens=1 if query.ndim == 3 else query.shape[1],
            layout=KVLayout.latent(query.shape[-1]),
        )

    @classmethod
    def stage_operands(cls, arrays: Mapping[str, Any], problem: LatentProblem) -> dict[str, Any]:
        """Returns the operands of the first stage."""
        p = problem
        operands = {
            "q": arrays["query"].reshape(p.batch, p.tokens * p.heads, p.dim),
            "k": arrays["latent_cache"],
            "lens": arrays["context_lens"],
            "tables": arrays["block_tables"],
            **tree_operands(arrays),
        } | broadcast_operands(arrays)
        if "k_scale" in operands:  # the scale of a row, so of keys and of values
            operands["v_scale"] = operands["k_scale"]
        return in_order(operands)

    @classmethod
    def empty_outputs(cls, a: Mapping[str, Any], problem: Any) -> tuple[Any, ...] | None:
        """Zero, with an lse of minus infinity, where an axis has no entries."""
        query, cache = a["query"], a["latent_cache"]
        if 0 not in (*query.shape, *cache.shape[:2], a["block_tables"].shape[1]):
            return None
        return cls._nothing_seen(query, a["latent_dim"])
