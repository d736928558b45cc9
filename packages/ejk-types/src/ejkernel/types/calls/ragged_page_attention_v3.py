"""The call of ragged_page_attention_v3."""

from collections.abc import Callable, Mapping
from typing import Any

import jax.numpy as jnp
import numpy as np

from ejkernel.types.arrays import quantise, quantised_values
from ejkernel.types.calls import values
from ejkernel.types.calls.paged import RaggedCall
from ejkernel.types.calls.spec import Arguments
from ejkernel.types.calls.words import Array, B, Cache, F, I, invalid, out_of_range
from ejkernel.types.serving.operands import broadcast_operands, in_order, tree_operands
from ejkernel.types.serving.plan import AttentionPlan
from ejkernel.types.serving.problem import RaggedProblem
from ejkernel.types.serving.write import read_rows, write_rows, write_slots


class RaggedPageAttentionv3(RaggedCall):
    """Cache update and mixed prefill/decode attention in one call."""

    name = "ragged_page_attention_v3"
    outputs = ("tokens heads head_dim", "tokens heads", "=kv_cache")
    divisors = ("q_scale", "k_scale", "v_scale")
    normal_samples = True
    whole_groups = True  # every device writes the keys it holds

    @staticmethod
    def signature(
        queries: F[Array, "tokens heads head_dim"],
        keys: F[Array, "tokens kv_heads head_dim"] | Cache[Array, "tokens kv_heads head_dim"],
        values: F[Array, "tokens kv_heads head_dim"] | Cache[Array, "tokens kv_heads head_dim"],
        kv_cache: Cache[Array, "pages page_size combined_kv_heads head_dim"]
        | Cache[Array, "pages page_size packed_kv_heads packing padded_head_dim"],
        kv_lens: I[Array, " sequences"],
        block_tables: I[Array, "sequences max_blocks"] | I[Array, " table_entries"],
        query_start_loc: I[Array, " sequences_plus_1"],
        distribution: I[Array, "3"],
        softmax_aux: F[Array, "heads sinks"] | F[Array, " sinks"] | None = None,
        *,
        softmax_scale: float | None = None,
        sliding_window: int | tuple[int, int] | None = None,
        logits_soft_cap: float | None = None,
        q_scale: float | F[Array, ""] | None = None,
        k_scale: float | F[Array, ""] | F[Array, " kv_heads"] | None = None,
        v_scale: float | F[Array, ""] | F[Array, " kv_heads"] | None = None,
        tree_mask: B[Array, "tokens max_new"] | None = None,
        positions: I[Array, " tokens"] | None = None,
        return_lse: bool = False,
        plan: AttentionPlan | None = None,
    ) -> None: ...

    @classmethod
    def check_values(cls, a: Arguments) -> None:
        """Checks ``distribution``: ends of the decode, prefill and all sequences, in order."""
        ends = values.concrete_value(a["distribution"])
        if ends is None or ends.shape != (3,):
            return
        limit = a["kv_lens"].shape[0]
        i, j, m = (int(x) for x in ends)
        if not 0 <= i <= j <= m <= limit:
            raise out_of_range("distribution", f"0 <= i <= j <= m <= {limit} sequences", (i, j, m))
        # rows past the valid ones may hold anything
        cls.check_sequences(a, m)
        cls.check_tables(a, m)

    @classmethod
    def check_contents(cls, a: Arguments) -> None:
        """Decoding sequences have one row each, and no two rows are written to one place."""
        super().check_contents(a)
        decoding, _, valid = map(int, a["distribution"])
        starts, lens = a["query_start_loc"][: valid + 1].astype(np.int64), a["kv_lens"]
        counts = np.diff(starts)
        other = np.flatnonzero(counts[:decoding] != 1)
        if other.size:
            r = int(other[0])
            raise ValueError(
                f"distribution[0]: given {decoding}, so that sequence {r} has one row, expected at "
                f"most {r}: query_start_loc gives it {int(counts[r])} rows"
            )
        page_size, table = a["kv_cache"].shape[1], a["block_tables"].reshape(len(lens), -1)
        owners = np.repeat(np.arange(valid), counts)
        tokens = np.arange(len(owners)) - starts[owners] + lens[owners] - counts[owners]
        pages = table[owners, tokens // page_size].astype(np.int64)
        places = pages * page_size + tokens % page_size
        order = np.argsort(places, kind="stable")
        twice = np.flatnonzero(np.diff(places[order]) == 0)
        if twice.size:
            first, second = order[twice[0] : twice[0] + 2]
            page, row = map(int, divmod(places[first], page_size))
            pair = " and ".join(
                f"token {int(tokens[i])} of sequence {int(owners[i])}" for i in (first, second)
            )
            raise ValueError(
                f"block_tables: given page {page} to write {pair} to its row {row}, expected pages "
                "of its own wherever a sequence writes"
            )

    @classmethod
    def canonicalize(cls, a: Arguments) -> None:
        """The cache is plain (rank 4) or packed (rank 5)."""
        super().canonicalize(a)
        cache, (_, heads, dim) = a["kv_cache"], a["keys"].shape
        legal: tuple[int, ...] = (2 * heads, dim)
        if cache.ndim != 4:
            packing = 32 // (np.dtype(cache.dtype).itemsize * 8)
            if packing < 1:
                raise invalid("kv_cache", "a packed cache of at most 32 bits per value", cache)
            legal = (-(-2 * heads // packing), packing, -(-dim // 128) * 128)
        if cache.shape[2:] != legal:
            shape = ", ".join(map(str, legal))
            raise invalid("kv_cache", f"[pages, page_size, {shape}] for {heads} kv heads", cache)
        for name in ("keys", "values"):
            small = np.dtype(a[name].dtype).itemsize < 2
            if small and a[name].dtype != cache.dtype:
                either = f"floats of at least 16 bits, or kv_cache's {cache.dtype}"
                raise invalid(name, either, a[name])
        table, n = a["block_tables"], a["kv_lens"].shape[0]
        if table.ndim == 1 and n and table.shape[0] % n:
            raise invalid("block_tables", f"a flat table of {n} equal rows", table)
        cls.canonicalize_tree(a)

    @classmethod
    def _valid_sequences(cls, a: Arguments) -> Any:
        return a["distribution"][2]

    @classmethod
    def count_all(cls, a: Arguments) -> None:
        a["distribution"] = jnp.full(3, a["kv_lens"].shape[0], jnp.int32)

    @classmethod
    def with_rows(cls, a: Arguments, tables: Any, lengths: Any) -> Arguments:
        """Returns the call that reads; what it writes is what the cache holds there.

        A device that has not the page of a row has no place for its key.
        """
        cache, (tokens, heads, dim) = a["kv_cache"], a["keys"].shape
        rows = super().with_rows(a, tables, lengths)
        starts = rows["query_start_loc"]
        slots = write_slots(lengths, tables, starts, tokens, tokens, cache.shape[1])
        keys, new_values = read_rows(cache, *slots, heads, dim)
        ends = jnp.full(3, tokens, jnp.int32)
        return {**rows, "keys": keys, "values": new_values, "distribution": ends}

    @classmethod
    def attend_to_shard(cls, a: Arguments, shard: Any, run: Callable[[Arguments], Any]) -> Any:
        """Writes the new tokens whose pages this device has, then attends."""
        cache, n = a["kv_cache"], a["kv_lens"].shape[0]
        tables = a["block_tables"].reshape(n, -1)
        arrays = a["kv_lens"], tables, a["query_start_loc"], a["distribution"][2]
        page, offset = write_slots(*arrays, a["queries"].shape[0], cache.shape[1])
        page = jnp.where(page >= 0, page - shard.offset("pages"), -1)
        new = (
            x if x.dtype == cache.dtype else quantise(x, a[scale], cache.dtype)
            for x, scale in ((a["keys"], "k_scale"), (a["values"], "v_scale"))
        )
        written = write_rows(cache, *new, page, offset)
        return super().attend_to_shard({**a, "kv_cache": written}, shard, run)

    @classmethod
    def problem(cls, a: Mapping[str, Any]) -> RaggedProblem:
        keys, lengths = a["keys"], a["kv_lens"]
        written = tuple(np.dtype(a[name].dtype).name for name in ("keys", "values"))
        return RaggedProblem.from_arguments(a, a["kv_cache"], lengths, keys.shape[1], written)

    @classmethod
    def stage_operands(cls, arrays: Mapping[str, Any], problem: RaggedProblem) -> dict[str, Any]:
        """Returns the operands of the first stage."""
        p = problem.paged
        operands = {
            "q": arrays["queries"],
            "k": arrays["kv_cache"],
            "lens": arrays["kv_lens"],
            "tables": arrays["block_tables"].reshape(p.batch, p.max_pages),
            "starts": arrays["query_start_loc"],
            "valid": arrays["distribution"],
            "keys": arrays["keys"],
            "values": arrays["values"],
            **cls.plan_operands(arrays),
            **tree_operands(arrays),
        } | broadcast_operands(arrays)
        if "q_scale" in arrays:
            q, scale = operands["q"], arrays["q_scale"].astype(jnp.float32)
            # the dot product with a query quantised like the cache is exact in its own dtype
            operands["q"] = quantised_values(q, scale, operands["k"].dtype)
            k_scale = operands.get("k_scale", jnp.ones((1, 1)))
            operands["logit_scale"] = k_scale.astype(jnp.float32) * scale
        return in_order(operands)

    @classmethod
    def stage_outputs(cls, problem: RaggedProblem) -> tuple[str, ...]:
        return (*super().stage_outputs(problem), "k")

    @classmethod
    def select_outputs(cls, a: Mapping[str, Any], outputs: tuple[Any, ...]) -> tuple[Any, ...]:
        """Returns the output, the lse if the call requests it, and the cache."""
        return outputs if a["return_lse"] else (outputs[0], outputs[-1])

    @classmethod
    def empty_outputs(cls, a: Mapping[str, Any], problem: Any) -> tuple[Any, ...] | None:
        outputs = super().empty_outputs(a, problem)
        return outputs and (*outputs, a["kv_cache"])

    @classmethod
    def samples(cls, a: Mapping[str, Any], rng: np.random.Generator) -> dict[str, Any]:
        """Returns samples that use all rows of the table."""
        ends = np.array([0, 0, a["kv_lens"].shape[0]], np.int32)
        return super().samples(a, rng) | {"distribution": ends}
