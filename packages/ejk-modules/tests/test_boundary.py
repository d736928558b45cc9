# ruff: noqa: E501 (tables of messages, one line each)
"""Wrong arguments: one clear error that names the argument, what was given, what is allowed."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import ejkernel.kernels.xla as xla
import ejkernel.modules as modules
from ejkernel.ops import InvalidArgument
from ejkernel.types import InvalidArgument as InvalidCall
from ejkernel.types import MaskInfo
from ejktest.calls import call
from ejktest.drawn import array


def ones(*shape, dtype=jnp.float32):
    return array(np.ones(shape), dtype)


def ids(*shape):
    return array(np.zeros(shape), jnp.int32)


def raises(error, message, operation, **changes):
    c = call(operation)
    with pytest.raises(error, match=message) as caught:
        getattr(modules, operation)(**{**c.arguments, **changes})
    assert "\n" not in str(caught.value).split("\n---")[0].strip()
    return caught.value


FLASH = "flash_attention"
# query [2, 12, 4, 8], key [2, 12, 2, 8], value [2, 12, 2, 6]
WRONG = [
    (FLASH, "query", ones(12, 4, 8), r"query: expected float\|float8_e4m3fn\[batch, q_len, heads, head_dim\], given float32\[12, 4, 8\]"),
    (FLASH, "query", ids(2, 12, 4, 8), r"query: expected float\|float8_e4m3fn\[.*given int32"),
    (FLASH, "query", [1.0, 2.0], "query: expected float.*given list"),
    (FLASH, "query", np.zeros((2, 12, 4, 8), jax.dtypes.float0), r"query: expected float.*given float0\[2, 12, 4, 8\]"),
    (FLASH, "query", MaskInfo.from_causal(), "query: expected float.*given MaskInfo"),
    (FLASH, "attention_mask", MaskInfo.from_causal(), "attention_mask: expected.*given MaskInfo"),
    (FLASH, "key", ones(2, 12, 2, 7), "key: expected.*head_dim=8"),
    (FLASH, "key", ones(2, 13, 2, 8), "value: expected.*kv_len=13"),
    (FLASH, "value", ones(1, 12, 2, 6), "value: expected.*batch=2"),
    (FLASH, "bias", ones(1, 3, 12, 12), "bias: expected.*heads=4"),
    (FLASH, "bias", ones(1, 1, 12, 12).astype(bool), "bias: expected float.*bool"),
    (FLASH, "softmax_aux", ones(3, 2), "softmax_aux: expected.*heads=4"),
    (FLASH, "attention_mask", ones(2, 12), r"attention_mask: expected bool\|int"),
    (FLASH, "attention_mask", ids(2, 11), "attention_mask: expected.*kv_len=12"),
    (FLASH, "sliding_window", True, "sliding_window: expected int or tuple.*given bool True"),
    (FLASH, "softmax_scale", np.bool_(True), "softmax_scale: expected float or None, given bool True"),
    ("page_attention", "num_splits", True, "num_splits: expected int or None, given bool True"),
    ("ragged_page_attention_v3", "keys", ones(6, 2, 8).astype(jnp.float8_e5m2), "keys: expected floats of at least 16 bits, or kv_cache's float32, given float8_e5m2"),
    ("ragged_page_attention_v3", "values", ids(6, 2, 8).astype(jnp.int8), "values: expected floats of at least 16 bits, or kv_cache's float32, given int8"),
    (FLASH, "mask_info", "causal", "mask_info: expected MaskInfo or None, given str 'causal'"),
    (FLASH, "mask_info", MaskInfo.from_segments(ids(1, 6)), "mask_info.*q_len 12"),
    (FLASH, "mask_info", MaskInfo.from_segments(ids(3, 12)), "mask_info.*batch 2"),
    (FLASH, "cum_seqlens_q", jnp.arange(3), r"query: expected batch 1 with cum_seqlens_q"),
    (FLASH, "softmax_scale", ones(), r"softmax_scale: expected float or None, given float32\[\]"),
    (FLASH, "causal", 1, "causal: expected bool, given int 1"),
    (FLASH, "causal_offset", 1.5, "causal_offset: expected int, given float"),
    (FLASH, "sliding_window", [3, 4], "sliding_window: expected int or tuple"),
    (FLASH, "dropout_prob", ones(), "dropout_prob: expected float"),
    (FLASH, "logits_dtype", "int32", "logits_dtype: expected a floating-point dtype"),
    (FLASH, "score_mod", 3, "score_mod: expected Callable.*given int 3"),
    (FLASH, "score_mod", lambda s, b, h, q: s, r"score_mod: expected a function \(score, b, h, q, k\).*5 arguments"),
    (FLASH, "score_mod", lambda s, b, h, q, k: s[None], r"score_mod: expected.*returns float32\[1\]"),
    (FLASH, "score_mod", lambda s, b, h, q, k: q, r"score_mod: expected.*returns int32\[\]"),
    (FLASH, "mask_mod", lambda b, h, q, k: (q, k), r"mask_mod: expected.*returns tuple"),
    (FLASH, "mask_mod", lambda b, h, q, k: q - k, r"mask_mod: expected.*bool scalar.*int32\[\]"),
    (FLASH, "mask_info", MaskInfo.from_mask_mod(lambda b, h, q, k: q > k, 12, 11), "mask_info: expected a mask of kv 12"),
    ("attention", "softmax_dtype", jnp.int32, "softmax_dtype: expected a floating-point dtype"),
    ("attention", "init_bias", 3, "init_bias: expected"),
    ("page_attention", "query", ones(2, 2, 4, 8), r"query: expected float\[batch, 1, heads, head_dim\] or float\[batch, heads, head_dim\]"),
    ("page_attention", "key_cache", ones(7, 4, 3, 8), "value_cache: expected.*kv_heads=3"),
    ("page_attention", "value_cache", ones(7, 5, 2, 6), "value_cache: expected.*page_size=4"),
    ("page_attention", "context_lens", ones(2), r"context_lens: expected int\[batch\]"),
    ("page_attention", "block_tables", ids(3, 3), "block_tables: expected.*batch=2"),
    ("page_attention", "k_scale", ones(3), "k_scale: expected float"),
    ("page_attention", "softmax_aux", ones(5, 1), "softmax_aux: expected.*heads=4"),
    ("ragged_page_attention", "kv_pages", ones(7, 4, 3, 8), "kv_pages: expected an even axis 2"),
    ("ragged_page_attention", "kv_pages", ones(7, 4, 6, 8), "kv_pages: expected kv_heads that divide"),
    ("ragged_page_attention", "query_start_loc", ids(3), r"query_start_loc: expected int\[4\]"),
    ("ragged_page_attention", "num_seqs", ids(2), "num_seqs: expected int or int"),
    ("ragged_page_attention", "context_lens", ids(2), "block_tables: expected.*sequences=2"),
    ("ragged_page_attention_v3", "kv_cache", ones(7, 4, 5, 8), "kv_cache: expected .*4, 8.* 2 kv heads"),
    ("ragged_page_attention_v3", "kv_cache", ones(7, 4, 4, 1, 8), r"kv_cache: expected \[pages, page_size, 4, 1, 128\]"),
    ("ragged_page_attention_v3", "keys", ones(5, 2, 8), "keys: expected.*tokens=6"),
    ("ragged_page_attention_v3", "values", ones(6, 1, 8), "values: expected.*kv_heads=2"),
    ("ragged_page_attention_v3", "distribution", ids(2), r"distribution: expected int\[3\]"),
    ("ragged_page_attention_v3", "block_tables", ids(5), "block_tables: expected a flat table of 2"),
    ("ragged_page_attention_v3", "query_start_loc", ids(5), r"query_start_loc: expected int\[3\]"),
    ("ragged_decode_attention", "sequence_start", ids(3), "sequence_start: expected.*batch=2"),
    ("ragged_decode_attention", "sequence_end", ones(2), r"sequence_end: expected int\[batch\]"),
    ("blocksparse_attention", "block_mask", ones(2, 3).astype(bool), r"block_mask: expected bool\[.., 3, 3\]"),
    ("blocksparse_attention", "block_mask", ones(3, 3), r"block_mask: expected bool\["),
    ("native_sparse_attention", "g_cmp", ones(2, 12, 2), "g_cmp: expected.*heads=4"),
    ("native_sparse_attention", "block_indices", ids(2, 12, 4, 3), "block_indices: expected.*kv_heads=2"),
    ("native_sparse_attention", "block_counts", ids(2, 12), "block_counts: expected int or int"),
    ("native_sparse_attention", "key", ones(2, 11, 2, 8), "key: expected.*seq=12"),
    ("native_sparse_attention", "cu_seqlens", jnp.arange(3), "query: expected batch 1 with cu_seqlens"),
    ("recurrent_attention", "g", ones(2, 12, 4, 6), "g: expected.*key_dim=8"),
    ("recurrent_attention", "g", ids(2, 12, 4, 8), "g: expected float.*given int32"),
    ("recurrent_attention", "key", ones(2, 11, 2, 8), "key: expected.*seq=12"),
    ("recurrent_attention", "cu_seqlens", jnp.arange(3), "query: expected batch 1 with cu_seqlens"),
    ("recurrent_attention", "softmax_scale", ones(), "softmax_scale: expected float or None, given float32"),
    ("recurrent_attention", "gk", ones(2, 12, 2, 8), "gk: expected.*heads=4"),
    ("recurrent_attention", "gv", ones(2, 12, 4, 8), "gv: expected.*v_dim=6"),
    ("recurrent_attention", "g_gamma", ones(2), "g_gamma: expected.*heads=4"),
    ("recurrent_attention", "initial_state", ones(3, 4, 8, 6), "initial_state: expected.*one per batch row"),
    ("gated_delta_rule", "query", ones(2, 12, 4, 8), "key: expected.*kv_heads=4"),
    ("gated_delta_rule", "value", ones(2, 12, 3, 6), "g: expected.*heads=3"),
    ("gated_delta_rule", "g", ones(2, 12, 4, 6), "g: expected.*key_dim=8"),
    ("gated_delta_rule", "g", ones(2, 12, 2), "g: expected.*heads=4"),
    ("gated_delta_rule", "beta", ones(2, 12, 4, 1), r"beta: expected float\[batch, seq, heads\] or None"),
    ("gated_delta_rule", "initial_state", ones(3, 4, 8, 6), "initial_state: expected.*one per batch row"),
    ("gated_delta_rule", "cu_seqlens", jnp.arange(3), "query: expected batch 1 with cu_seqlens"),
    ("gated_delta_rule", "normalize_qk", 1, "normalize_qk: expected bool, given int 1"),
    ("causal_conv1d", "weight", ones(7, 4), "weight: expected.*channels=8"),
    ("causal_conv1d", "weight", ones(8, 9), "weight: expected.*width 2 to 8, given"),
    ("causal_conv1d", "bias", ones(4), "bias: expected.*channels=8"),
    ("causal_conv1d", "initial_state", ones(2, 8, 4), r"initial_state: expected float\[2, 8, 3\], the width - 1 tokens"),
    ("causal_conv1d", "cu_seqlens", jnp.arange(3), "x: expected batch 1 with cu_seqlens"),
    ("causal_conv1d", "activation", "gelu", r"activation: expected Literal\['silu'\] or None, given str 'gelu'"),
    ("gla_attention", "initial_state", ones(2, 4, 6, 8), "initial_state: expected.*key_dim=8"),
    ("gla_attention", "key", ones(2, 12, 3, 8), "value: expected.*kv_heads=3"),
    ("lightning_attention", "value", ones(2, 12, 1, 6), "value: expected.*kv_heads=2"),
    ("lightning_attention", "cu_seqlens", ones(3), "cu_seqlens: expected int"),
    ("mla_attention", "query", ones(2, 12, 4, 8), "query: expected last axis 12 = nope_dim"),
    ("mla_attention", "w_kc", ones(4, 2, 8), "w_kc: expected.*latent=5"),
    ("mla_attention", "w_vc", ones(5, 1, 6), "w_vc: expected.*kv_heads=2"),
    ("mla_attention", "b_k", ones(2, 11, 4), "b_k: expected.*kv_len=12"),
    ("mla_attention", "key_value", ones(2, 12), "key_value: expected"),
    ("mla_decode", "latent_cache", ones(7, 4, 11), "latent_cache: expected.*cache_dim=12"),
    ("mla_decode", "k_scale", ones(2), "k_scale: expected float"),
    ("mean_pooling", "x", ones(3), "x: expected"),
    ("mean_pooling", "x", ones(3, 4), r"x: expected float\[batch, seq, \*channels\]"),
    ("mean_pooling", "attention_mask", ids(2, 11), "attention_mask: expected"),
    ("mean_pooling", "x", ids(2, 12, 8), "x: expected float.*given int32"),
    ("mean_pooling", "attention_mask", ones(2, 12), r"attention_mask: expected bool\|int"),
    ("mean_pooling", "cu_seqlens", ones(3), r"cu_seqlens: expected int\[sequences_plus_1\]"),
    ("mean_pooling", "chunk_size", 2.0, "chunk_size: expected int or None, given float 2.0"),
    ("grouped_matmul", "lhs", ids(8, 5), "lhs: expected float.*given int32"),
    ("grouped_matmul", "group_sizes", ones(3), "group_sizes: expected int.*given float32"),
    ("grouped_matmul", "group_offset", 0.0, "group_offset: expected int.*given float 0.0"),
    ("grouped_matmul", "preferred_element_type", np.int32, "preferred_element_type: expected a floating"),
    ("grouped_matmul", "rhs", ones(3, 4, 6), "rhs: expected axis 1 equal to the inner axis 5"),
    ("grouped_matmul", "group_sizes", ids(4), "group_sizes: expected int.3., one per matrix"),
    ("grouped_matmul", "existing_out", ones(8, 5), r"existing_out: expected float\[8, 6\]"),
    ("grouped_matmul", "group_offset", ids(2), "group_offset: expected"),
    ("grouped_matmul", "transpose_rhs", ones(), r"transpose_rhs: expected bool, given float32\[\]"),
]  # fmt: skip


@pytest.mark.parametrize("operation", ["flash_attention", "page_attention", "grouped_matmul"])
def test_arrays_of_other_libraries_are_named(operation):
    class Tensor:
        dtype, ndim = "torch.float32", 4

        def __init__(self, x):
            self.shape = x.shape

        def __array__(self, *_args, **_more):
            raise AssertionError("another library's memory is not read")

    for name, x in call(operation).arrays.items():
        message = rf"{name}: expected .* given \w+.Tensor torch.float32\["
        raises(InvalidArgument, message, operation, **{name: Tensor(x)})


@pytest.mark.parametrize(("operation", "argument", "value", "message"), WRONG)
def test_wrong_arrays_and_classes(operation, argument, value, message):
    error = raises(InvalidArgument, message, operation, **{argument: value})
    assert isinstance(error, TypeError) and isinstance(error, ValueError)


@pytest.mark.parametrize(("operation", "argument", "value", "message"), WRONG)
def test_the_function_of_a_backend_says_the_same(operation, argument, value, message):
    with pytest.raises(InvalidCall, match=message):
        getattr(xla, operation)(**{**call(operation).arguments, argument: value})


LENS = np.asarray([5, 13], np.int32)
TABLE = np.asarray([[3, 1, -1], [0, 7, 2]], np.int32)
STARTS = np.asarray([0, 3, 2, 6], np.int32)
BAD = [
    (FLASH, dict(sliding_window=-1), "sliding_window: given -1, expected widths >= 0"),
    (FLASH, dict(sliding_window=(2, -3)), r"sliding_window: given \(2, -3\)"),
    (FLASH, dict(dropout_prob=1.0), "dropout_prob: given 1.0, expected 0 <= dropout_prob < 1"),
    (FLASH, dict(dropout_prob=-0.1), "dropout_prob"),
    (FLASH, dict(logits_soft_cap=0.0), "logits_soft_cap: given 0.0, expected a finite number > 0"),
    (FLASH, dict(softmax_scale=float("nan")), "softmax_scale: given nan"),
    (FLASH, dict(softmax_scale=1e39), r"softmax_scale: given 1e\+39, expected a finite number that float32 holds"),
    (FLASH, dict(logits_soft_cap=3e38), r"logits_soft_cap: given 3e\+38, expected a finite number > 0 that float32 holds"),
    (FLASH, dict(logits_soft_cap=1e-46), "logits_soft_cap: given 1e-46"),
    (FLASH, dict(cum_seqlens_k=jnp.arange(3)), "cum_seqlens_k: given without cum_seqlens_q"),
    (FLASH, dict(precision="exact"), "precision: given 'exact', expected default, high, highest"),
    (FLASH, dict(platform="cpu"), "auto, triton, pallas, xla, cuda"),
    ("attention", dict(deterministic=False, dropout_prob=0.5), "dropout_rng: given None"),
    ("page_attention", dict(num_splits=0), "num_splits: given 0, expected an integer >= 1"),
    ("page_attention", dict(context_lens=-LENS), r"context_lens\[0\]: given -5"),
    ("page_attention", dict(context_lens=LENS - 2, block_tables=TABLE), r"block_tables\[1, 1\]: given 7, expected a page from 0 to 6 \(key_cache float32\[7, 4, 2, 8\] is read as \[pages, page_size, kv_heads, head_dim\]\)"),
    ("page_attention", dict(context_lens=LENS), r"context_lens\[1\]: given 13, expected 0 to 12, 3 pages of 4 tokens \(key_cache "),
    ("mla_decode", dict(context_lens=LENS), r"context_lens\[1\]: given 13, expected 0 to 12, 3 pages of 4 tokens \(latent_cache "),
    ("ragged_page_attention", dict(num_seqs=2, context_lens=np.asarray([5, 13, 99])), r"context_lens\[1\]: given 13, expected 0 to 12"),
    ("ragged_page_attention_v3", dict(distribution=np.asarray([0, 0, 2]), kv_lens=LENS), r"kv_lens\[1\]: given 13, expected 0 to 12"),
    ("page_attention", dict(context_lens=LENS.astype(np.int64) + 2**33), "context_lens: given 8589934597, expected values that fit int32"),
    ("page_attention", dict(k_scale=float("nan")), "k_scale: given nan, expected finite numbers"),
    ("page_attention", dict(v_scale=np.asarray([1, np.inf], np.float32)), r"v_scale: given \[1.0, inf\]"),
    ("ragged_page_attention_v3", dict(k_scale=0), "k_scale: given 0, expected finite numbers other than 0"),
    ("ragged_page_attention", dict(num_seqs=4), "num_seqs: given 4, expected 0 to 3"),
    ("ragged_page_attention", dict(num_seqs=3, query_start_loc=STARTS), r"query_start_loc\[1:3\]: given \(3, 2\)"),
    ("ragged_page_attention", dict(num_seqs=1, query_start_loc=STARTS + 1), r"query_start_loc\[0\]: given 1"),
    ("ragged_page_attention", dict(num_seqs=1, query_start_loc=3 * STARTS), r"query_start_loc\[1\]: given 9"),
    ("ragged_page_attention_v3", dict(distribution=np.asarray([2, 1, 2])), "distribution: given"),
    ("ragged_page_attention_v3", dict(distribution=np.asarray([0, 0, 3])), "distribution: given"),
    (
        "ragged_page_attention_v3",
        dict(distribution=np.asarray([0, 0, 2]), query_start_loc=np.asarray([0, 1, 5]), kv_lens=np.asarray([5, 3])),
        r"kv_lens\[1\]: given 3, expected at least its 4",
    ),
    ("blocksparse_attention", dict(q_block_size=0), "q_block_size: given 0"),
    ("blocksparse_attention", dict(chunk_size=0), "chunk_size: given 0"),
    ("blocksparse_attention", dict(mask_builder=lambda *a: None), "mask_builder: given together"),
    ("native_sparse_attention", dict(block_counts=0), "block_counts: given 0"),
    ("native_sparse_attention", dict(block_counts=np.zeros((2, 12, 2), np.int8)), r"block_counts\[0, 0, 0\]: given 0"),
    ("native_sparse_attention", dict(block_size=0), "block_size: given 0"),
    ("native_sparse_attention", dict(max_block_count=0), "max_block_count: given 0"),
    ("native_sparse_attention", dict(sliding_window=None), "g_swa: given without sliding_window"),
    ("lightning_attention", dict(layer_idx=4), "layer_idx: given 4, expected 0 <= layer_idx"),
    ("lightning_attention", dict(num_layers=0), "num_layers: given 0"),
    ("mla_attention", dict(b_k=None, b_q=ones(2, 12, 4)), "b_q: given without b_k"),
    ("mla_decode", dict(latent_dim=13), "latent_dim: given 13, expected 1 to 12"),
    ("mean_pooling", dict(chunk_size=0), "chunk_size: given 0"),
    ("grouped_matmul", dict(group_sizes=np.asarray([3, -1, 4])), r"group_sizes\[1\]: given -1"),
    ("grouped_matmul", dict(group_offset=1), "group_offset: given 1, expected 0 to 0"),
    ("grouped_matmul", dict(group_offset=2**40), "group_offset: given 1099511627776, expected 0 to 0"),
]  # fmt: skip


@pytest.mark.parametrize(("operation", "changes", "message"), BAD)
def test_bad_values(operation, changes, message):
    error = raises(ValueError, message, operation, **changes)
    assert not isinstance(error, TypeError)


PACKED = [
    (FLASH, "cum_seqlens_q", ("query", "key", "value")),
    ("scaled_dot_product_attention", "cum_seqlens_q", ("query", "key", "value")),
    ("native_sparse_attention", "cu_seqlens", ()),
    ("recurrent_attention", "cu_seqlens", ()),
    ("gated_delta_rule", "cu_seqlens", ()),
    ("causal_conv1d", "cu_seqlens", ()),
    ("gla_attention", "cu_seqlens", ()),
    ("lightning_attention", "cu_seqlens", ()),
    ("mla_attention", "cu_seqlens", ()),
    ("mean_pooling", "cu_seqlens", ()),
]


@pytest.mark.parametrize(("operation", "name", "_"), PACKED)
def test_cumulative_lengths(operation, name, _):
    c = call(operation)
    one = {n: x if n in ("g_gamma", "bias", "softmax_aux", "w_kc", "w_vc", "weight") else x[:1] for n, x in c.arrays.items()}  # fmt: skip
    one.pop("initial_state", None)  # one a sequence
    if operation == "mean_pooling":
        one = {"x": c.arrays["x"][0]}
    for cu, message in (
        ([1, 5, 12], r"\[0\]: given 1, expected cumulative lengths that start at 0"),
        ([0, 7, 5], r"\[1:3\]: given \(7, 5\), expected cumulative lengths that never decrease"),
        ([0, 5, 13], r"\[-1\]: given 13, expected at most the 12 rows"),
    ):
        with pytest.raises(ValueError, match=name + message):
            getattr(modules, operation)(**{**one, **c.static, name: np.asarray(cu)})


PAGED = (
    "page_attention", "ragged_page_attention", "ragged_page_attention_v3", "ragged_decode_attention",
    "mla_decode",
)  # fmt: skip


@pytest.mark.parametrize("operation", PAGED)
def test_a_wrong_form_is_said_before_what_its_values_would_mean(operation):
    c = call(operation)
    known = {name: np.asarray(x) for name, x in c.arrays.items()}
    for name, x in c.arrays.items():
        if name in ("num_seqs", "softmax_aux"):  # that have more forms
            continue
        for wrong in (np.zeros((), x.dtype), np.asarray(x).tolist(), None):
            raises(InvalidArgument, f"^{name}: expected", operation, **{**known, name: wrong})
        if name != "kv_cache":  # whose packed form has an axis more
            raises(InvalidArgument, "expected", operation, **{**known, name: np.asarray(x)[None]})


@pytest.mark.parametrize("operation", ["page_attention", "grouped_matmul"])
def test_bytes_in_another_order_are_refused(operation):
    """A program that JAX has compiled reads them as if they were in this machine's."""
    c = call(operation)
    known = {name: np.asarray(x) for name, x in c.arrays.items()}
    getattr(modules, operation)(**known, **c.static)
    for name, x in known.items():
        foreign = x.astype(x.dtype.newbyteorder())
        message = rf"^{name}: expected bytes in this machine's order, given >{x.dtype.str[1:]}\["
        raises(InvalidArgument, message, operation, **{**known, name: foreign})
        first, *rest = {**known, name: foreign}.items()
        with pytest.raises(InvalidCall, match=message):
            getattr(xla, operation)(first[1], **dict(rest), **c.static)


def test_any_integer_dtype_serves_as_an_index():
    c = call("page_attention")
    plain = modules.page_attention(**c.arguments)
    for dtype in (jnp.int8, jnp.uint8, jnp.int16, np.int64):
        lens = np.asarray(c.arrays["context_lens"]).astype(dtype)
        out = modules.page_attention(
            **{
                **c.arguments,
                "context_lens": lens,
                "block_tables": np.abs(c.arrays["block_tables"]).astype(dtype),
            }
        )
        assert (out == plain).all()
    modules.flash_attention(**{**call(FLASH).arguments, "precision": "BF16_BF16_F32"})


WIDE = 10**12


@pytest.mark.parametrize(
    ("operation", "large", "small"),
    [
        *((name, {"sliding_window": WIDE}, {"sliding_window": 100}) for name in (FLASH, "page_attention", "ragged_page_attention", "ragged_page_attention_v3", "ragged_decode_attention", "mla_decode")),
        ("page_attention", {"num_splits": WIDE}, {"num_splits": 12}),
        ("mla_decode", {"num_splits": WIDE}, {"num_splits": 12}),
        ("native_sparse_attention", {"block_size": WIDE}, {"block_size": 13}),
        ("mean_pooling", {"chunk_size": WIDE}, {"chunk_size": 12}),
    ],
)  # fmt: skip
def test_sizes_past_every_array_are_as_good_as_the_largest(operation, large, small):
    c = call(operation)
    run = getattr(modules, operation)
    outputs = [jax.tree.leaves(run(**{**c.arguments, **size})) for size in (large, small)]
    for a, b in zip(*outputs, strict=True):
        np.testing.assert_array_equal(a, b)


EMPTY = [
    ("page_attention", {"key_cache": ones(7, 0, 2, 8), "value_cache": ones(7, 0, 2, 6)}),
    ("page_attention", {"value_cache": ones(7, 4, 2, 0)}),
    ("mla_decode", {"latent_cache": ones(7, 0, 12)}),
    ("ragged_page_attention", {"kv_pages": ones(7, 0, 4, 8)}),
    ("ragged_page_attention", {"queries": ones(6, 0, 8)}),
    ("ragged_page_attention_v3", {"kv_cache": ones(7, 0, 4, 8)}),
    ("ragged_page_attention_v3", {"queries": ones(6, 0, 8)}),
    ("ragged_decode_attention", {"value": ones(2, 12, 2, 0)}),
    ("mean_pooling", {"x": ones(2, 12, 0)}),
]


@pytest.mark.parametrize(("operation", "changes"), EMPTY)
def test_axes_of_length_zero(operation, changes):
    c = call(operation)
    arguments = {**c.arguments, **changes}

    def loss(floats):
        out = getattr(modules, operation)(**{**arguments, **floats})
        return jax.tree.leaves(out)[0].sum()

    value, grads = jax.value_and_grad(loss)({n: arguments[n] for n in c.gradients})
    assert value == 0
    assert all(not np.asarray(g).any() for g in grads.values())


def test_what_can_be_explained_and_cut():
    with pytest.raises(TypeError, match="operation: given 3, expected a name"):
        modules.explain(3)
    with pytest.raises(InvalidArgument, match="x: expected an array, given list"):
        modules.zigzag_shard([1, 2], 1)


def test_an_explanation_is_printed_unless_told_otherwise(capsys):
    q = ones(1, 4, 2, 8)
    shown = modules.explain("flash_attention", q, q, q)
    assert str(shown) in capsys.readouterr().out
    assert modules.explain("flash_attention", q, q, q, print=False).key == shown.key
    assert not capsys.readouterr().out


def test_missing_unknown_and_repeated_arguments():
    kernel, q = modules.FlashAttention(), ones(1, 4, 2, 8)
    with pytest.raises(TypeError, match="missing the argument 'value'"):
        kernel(q, q)
    with pytest.raises(TypeError, match="unexpected keyword argument 'scale'"):
        kernel(q, q, q, scale=1.0)
    with pytest.raises(TypeError, match="multiple values for argument 'key'"):
        kernel(q, q, q, key=q)
    with pytest.raises(TypeError, match="7 positional arguments, given 8"):
        kernel(*[q] * 8)


def test_errors_come_at_trace_time():
    with pytest.raises(InvalidArgument, match="key: expected"):
        jax.eval_shape(
            modules.flash_attention,
            *(jax.ShapeDtypeStruct(s, jnp.float32) for s in [(1, 4, 2, 8), (1, 4, 2, 7), (1, 4, 2, 8)]),
        )  # fmt: skip


def test_typecheck_can_be_switched_off(monkeypatch):
    c = call(FLASH)
    monkeypatch.setenv("EJKERNEL_TYPECHECK", "0")
    with pytest.raises(ValueError, match="sliding_window"):
        modules.flash_attention(**{**c.arguments, "sliding_window": -1})
    modules.flash_attention(**{**c.arguments, "return_lse": 1})
    monkeypatch.setenv("EJKERNEL_TYPECHECK", "maybe")
    with pytest.raises(ValueError, match="EJKERNEL_TYPECHECK"):
        modules.flash_attention(**c.arguments)


@pytest.mark.parametrize(
    ("operation", "name"),
    [
        ("page_attention", "k_scale"),
        ("ragged_page_attention", "v_scale"),
        ("ragged_page_attention_v3", "q_scale"),
        ("mla_decode", "k_scale"),
    ],
)
def test_scales_of_other_shapes_are_refused_without_the_check_of_types(
    monkeypatch, operation, name
):
    monkeypatch.setenv("EJKERNEL_TYPECHECK", "0")
    function = getattr(modules, operation)
    with pytest.raises(InvalidArgument, match=name + r": expected float\[\]"):
        function(**{**call(operation).arguments, name: jnp.ones(7)})


def test_scalars_of_numpy_are_numbers():
    c = call(FLASH)
    numbers = {"softmax_scale": 0.5, "causal": True, "sliding_window": (2, 3)}
    plain = modules.flash_attention(**{**c.arguments, **numbers})
    numpy = {
        "softmax_scale": np.float32(0.5),
        "causal": np.bool_(True),
        "causal_offset": np.int64(0),
        "sliding_window": (np.int64(2), np.int32(3)),
    }
    same = modules.flash_attention(**{**c.arguments, **numpy})
    assert (plain[0] == same[0]).all()
