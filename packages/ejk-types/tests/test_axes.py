"""The words of axes: one table, and no word besides."""

import importlib
import pkgutil

import jax.numpy as jnp
import pytest

from ejkernel.types import MaskInfo, calls
from ejkernel.types.calls.axes import AXES, Kind, bare, mask_axes, meaning
from ejkernel.types.calls.spec import Call
from ejkernel.types.calls.words import Array, F


def every_call():
    for module in pkgutil.iter_modules(calls.__path__):
        importlib.import_module(f"{calls.__name__}.{module.name}")
    return [getattr(calls, name) for name in calls.__all__]


def test_a_word_nobody_explained_is_refused_where_the_call_is_defined():
    def signature(query: F[Array, "batch qlen heads"]) -> None: ...

    with pytest.raises(TypeError, match=r"new_attention, query: axis word 'qlen' is unknown"):
        type("New", (Call,), {"name": "new_attention", "signature": staticmethod(signature)})


@pytest.mark.parametrize("output", ["batch qlen heads", "=value"])
def test_outputs_are_written_in_the_same_words(output):
    def signature(query: F[Array, "batch q_len heads"]) -> None: ...

    said = {"name": "new_attention", "signature": staticmethod(signature), "outputs": (output,)}
    with pytest.raises(TypeError, match=r"new_attention, output 0: .*(qlen|value)"):
        type("New", (Call,), said)


def test_the_table_has_the_words_in_use_and_no_others():
    used = set()
    for call in every_call():
        forms = [axes for p in call.boundary.parameters for _, axes in p.forms]
        used |= {word.lstrip("#*") for axes in (*forms, *call.outputs) for word in axes.split()}
    rank_4 = jnp.ones((1, 1, 2, 2), bool)
    used |= set(mask_axes(rank_4)) | {"chunks", "latent_dim"}  # outputs that depend on the call
    named = {word for word in used if word.isidentifier() and word != "_"}
    assert named == set(AXES)


def test_what_a_word_means():
    assert meaning("#batch").kind is Kind.BATCH and meaning("#batch").varies
    assert meaning("sequences_plus_1").varies and not meaning("sequences_plus_1").in_order
    assert meaning("q_len").in_order and meaning("kv_total").varies
    assert meaning("channels_3") is meaning("*channels") and not meaning("channels_3").varies
    assert bare("#batch") == "batch" and bare("channels_3") == "channels"
    assert bare("sequences_plus_1") == "sequences_plus_1"
    assert [w for w in AXES if meaning(w).free] == [
        "batch", "heads", "kv_heads", "combined_kv_heads", "packed_kv_heads", "rows", "groups",
        "columns", "channels",
    ]  # fmt: skip
    assert meaning("combined_kv_heads").entries_per_head == 2
    assert not any(meaning(word).varies for word in ("_", "1", "heads", "head_dim", "page_size"))
    with pytest.raises(ValueError, match=r"axis word 'queries' is unknown, known are: .*q_len"):
        meaning("queries")


def test_axes_of_masks_are_said_in_the_same_words():
    ids = jnp.zeros((2, 8), jnp.int32)
    mask = MaskInfo(q_segment_ids=ids, kv_segment_ids=ids).materialize_segment_ids(per_head=True)
    assert mask_axes(mask.q_segment_ids) == ("batch", "heads", "q_len")
    assert mask_axes(ids) == ("batch", "q_len")


def test_a_flag_that_asks_for_more_is_known_as_such():
    """Else a kernel's second output would be returned where nobody asked for it."""
    for call in every_call():
        flags = [name for name in call.boundary.names if name.startswith("return_")]
        assert [call.extra_outputs_flag] == (flags or [""]), call.name
