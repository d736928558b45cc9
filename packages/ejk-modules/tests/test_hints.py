"""Hints: our names for arguments of other libraries, and a warning about caches without scales."""

import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import ejkernel.kernels.xla as xla
import ejkernel.modules as modules
from ejkernel.ops import EjkernelWarning
from ejkernel.ops.errors import reset_warnings
from ejkernel.types.calls.signature import NAMES_ELSEWHERE
from ejktest.calls import CALLS, call
from ejktest.variants import SPECS

HERE = [
    ("flash_attention", "is_causal", "causal"),
    ("flash_attention", "scale", "softmax_scale"),
    ("flash_attention", "sm_scale", "softmax_scale"),
    ("flash_attention", "mask", "attention_mask"),
    ("flash_attention", "segment_ids", "mask_info=MaskInfo.from_segments(segment_ids)"),
    ("flash_attention", "local_window_size", "sliding_window"),
    ("flash_attention", "window_size", "sliding_window"),
    ("flash_attention", "softcap", "logits_soft_cap"),
    ("flash_attention", "sinks", "softmax_aux"),
    ("ring_attention", "segment_ids", "q_segment_ids"),
    ("ring_attention", "mask", "mask_info=MaskInfo(attention_mask=mask)"),
    ("mean_pooling", "mask", "attention_mask"),
    ("ragged_page_attention_v3", "window_size", "sliding_window"),
]


@pytest.mark.parametrize(("operation", "foreign", "ours"), HERE)
def test_a_name_of_another_library_is_told_ours(operation, foreign, ours):
    text = f"{operation}() got an unexpected keyword argument {foreign!r}; here it is {ours}"
    arguments = {} if operation == "ring_attention" else call(operation).arguments
    required = dict.fromkeys(SPECS[operation].boundary.required, jnp.ones(()))
    for function in (getattr(modules, operation), getattr(xla, operation)):
        with pytest.raises(TypeError) as caught:
            function(**{**required, **arguments, foreign: 1})
        assert str(caught.value) == text


@pytest.mark.parametrize("operation", sorted(CALLS))
def test_a_name_without_ours_is_only_unknown(operation):
    names = SPECS[operation].boundary.names
    for foreign, ours in {**NAMES_ELSEWHERE, "window": ()}.items():
        told = any(name.partition("=")[0] in names for name in ours)
        with pytest.raises(TypeError) as caught:
            getattr(modules, operation)(**call(operation).arguments, **{foreign: 1})
        message = f"{operation}() got an unexpected keyword argument {foreign!r}"
        assert str(caught.value).startswith(message + ("; here it is " if told else ""))
        assert told or str(caught.value) == message


INT8 = [
    ("page_attention", ("key_cache",), "k_scale"),
    ("page_attention", ("value_cache",), "v_scale"),
    ("page_attention", ("key_cache", "value_cache"), "k_scale and v_scale"),
    ("ragged_page_attention", ("kv_pages",), "k_scale and v_scale"),
    ("ragged_page_attention_v3", ("kv_cache",), "k_scale and v_scale"),
    ("mla_decode", ("latent_cache",), "k_scale"),
]


@pytest.mark.parametrize(("operation", "caches", "scales"), INT8)
def test_an_int8_cache_without_scales_warns_once(operation, caches, scales):
    c = call(operation)
    arrays = c.arrays | {name: c.arrays[name].astype(jnp.int8) for name in caches}

    def trace(function, arrays, **options):  # dtypes decide, before anything is computed
        jax.eval_shape(lambda arrays: function(**arrays, **c.static, **options), arrays)

    reset_warnings()
    with pytest.warns(EjkernelWarning) as caught:
        for function in (getattr(modules, operation), getattr(xla, operation)):
            trace(function, arrays)
    (message,) = [str(w.message) for w in caught if w.category is EjkernelWarning]
    assert message.startswith(f"{operation}: an int8 cache without {scales} counts its integers")
    reset_warnings()
    with warnings.catch_warnings():
        warnings.simplefilter("error", EjkernelWarning)
        trace(getattr(modules, operation), arrays, **dict.fromkeys(scales.split(" and "), 0.5))
        trace(getattr(modules, operation), c.arrays)


def test_the_error_that_the_warning_states():
    rng = np.random.default_rng(0)
    length, page, heads, dim = 512, 16, 2, 64
    pages = length // page
    q = rng.standard_normal((1, 4 * heads, dim)).astype(np.float32)
    k, v = rng.standard_normal((2, pages, page, heads, dim)).astype(np.float32)
    table = [np.array([length]), np.arange(pages)[None]]
    exact = modules.page_attention(q, k, v, *table)

    def error(k_scale, v_scale):
        scales = {"k_scale": k_scale, "v_scale": v_scale}
        stored = (np.round(x / s).astype(np.int8) for x, s in ((k, k_scale), (v, v_scale)))
        difference = modules.page_attention(q, *stored, *table, **scales) - exact
        return float(jnp.sqrt(jnp.mean(difference**2) / jnp.mean(exact**2)))

    assert 0.35 < error(1.0, 1.0) < 0.5
    assert 0.01 < error(float(abs(k).max() / 127), float(abs(v).max() / 127)) < 0.02
