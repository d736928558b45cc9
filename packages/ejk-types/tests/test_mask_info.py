"""MaskInfo itself: fields, validation, constructors, the pytree protocol."""

from __future__ import annotations

import copy
import inspect
import pickle

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractMesh
from jax.sharding import PartitionSpec as P

from ejkernel.types import InvalidArgument, MaskInfo, prepare_mask
from ejktest.masks import dense_of

IDS = np.array([[0, 0, 1, 1, -1, -1]], np.int32)


def assert_same_mask(a, b, q_len, kv_len):
    np.testing.assert_array_equal(dense_of(a, q_len, kv_len), dense_of(b, q_len, kv_len))


def test_defaults_and_shape():
    mask = MaskInfo()
    assert (mask.causal, mask.causal_offset, mask.sliding_window) == (False, 0, None)
    assert mask.batch_axis_name == ("dp", "fsdp") and mask.sequence_axis_name == "sp"
    assert (mask.qheads_axis_name, mask.kvheads_axis_name) == ("tp", "tp")
    assert mask.shape == (None, None, None, None) and mask.is_structural
    mask = MaskInfo(attention_mask=np.ones((2, 3, 4, 5), int), q_positions=np.zeros((1, 4), int))
    assert mask.shape == (2, 3, 4, 5)
    assert (mask.batch_size, mask.q_len, mask.kv_len) == (2, 4, 5)
    assert mask.attention_mask.dtype == bool and mask.q_positions.dtype == np.int32
    assert not mask.is_structural
    assert MaskInfo(sliding_window=3).sliding_window == (3, 3)


@pytest.mark.parametrize(
    ("name", "closest"),
    [
        ("window", ", closest: sliding_window; fields: attention_mask, q_segment_ids, "),
        ("is_causal", ", closest: causal; "),
        ("segment_ids", ", closest: q_segment_ids; "),
        ("zzz", "; fields: attention_mask, "),
    ],
)
def test_an_unknown_field_is_answered_with_the_closest(name, closest):
    for make, place in ((MaskInfo, "MaskInfo"), (MaskInfo().replace, "MaskInfo.replace")):
        with pytest.raises(TypeError, match=f"^{place}: unknown field '{name}'{closest}"):
            make(**{name: 4})


def test_fields_are_passed_by_name():
    with pytest.raises(TypeError, match=r"^MaskInfo: fields are given by name; fields: attention"):
        MaskInfo(np.ones((1, 1, 2, 2), bool))


def test_immutable_and_replace():
    mask = MaskInfo.from_segments(IDS)
    with pytest.raises(AttributeError):
        mask.causal = True
    with pytest.raises(AttributeError):
        del mask.causal
    new = mask.replace(causal=True, sliding_window=2)
    assert new.causal and new.sliding_window == (2, 2) and not mask.causal
    assert new.q_segment_ids is mask.q_segment_ids
    assert new.replace(sliding_window=None, causal=None).rule.trivial
    assert new.replace(q_segment_ids=None, kv_segment_ids=None).q_len is None
    with pytest.raises(TypeError, match="unknown field 'windows'"):
        mask.replace(windows=3)
    with pytest.raises(ValueError, match="kv_segment_ids"):
        mask.replace(kv_segment_ids=None)


@pytest.mark.parametrize(
    ("fields", "error", "text"),
    [
        ({"attention_mask": np.ones((1, 1, 2, 2))}, InvalidArgument, "attention_mask.*float64"),
        ({"attention_mask": np.ones((2, 2), bool)}, InvalidArgument, r"attention_mask.*bool\[2, 2"),
        ({"attention_mask": True}, InvalidArgument, "attention_mask"),
        ({"q_segment_ids": IDS}, ValueError, "kv_segment_ids"),
        ({"kv_segment_ids": IDS}, ValueError, "q_segment_ids"),
        (
            {"q_segment_ids": IDS.astype(float), "kv_segment_ids": IDS},
            InvalidArgument,
            r"q_segment_ids: expected integer\[#batch, q_len\], got float64\[1, 6\]",
        ),
        ({"q_segment_ids": IDS[0], "kv_segment_ids": IDS[0]}, InvalidArgument, "q_segment_ids"),
        ({"q_positions": IDS > 0}, InvalidArgument, "q_positions.*bool"),
        ({"q_positions": [0, 1]}, InvalidArgument, "q_positions.*list"),
        (
            {"q_segment_ids": IDS, "kv_segment_ids": IDS, "q_positions": IDS[:, :4]},
            InvalidArgument,
            r"q_positions.*q_len 6.*int32\[1, 4\]",
        ),
        (
            {"q_positions": np.zeros((2, 4), int), "kv_positions": np.zeros((3, 4), int)},
            InvalidArgument,
            "kv_positions.*batch 2",
        ),
        ({"sliding_window": -1}, ValueError, "sliding_window.*at least 0.*-1"),
        ({"sliding_window": (1, -2)}, ValueError, "sliding_window.*-2"),
        ({"sliding_window": (1, 2, 3)}, InvalidArgument, "sliding_window"),
        ({"sliding_window": 1.5}, InvalidArgument, "sliding_window"),
        ({"chunk_size": 0}, ValueError, "chunk_size.*at least 1"),
        ({"causal": 1}, InvalidArgument, "causal.*bool"),
        ({"causal_offset": 0.5}, InvalidArgument, "causal_offset"),
        ({"causal_offset": jnp.int32(1)}, InvalidArgument, "causal_offset"),
        ({"causal_offset": 2**40}, ValueError, "causal_offset"),
        ({"batch_axis_name": 3}, InvalidArgument, "batch_axis_name"),
    ],
)
def test_bad_fields(fields, error, text):
    with pytest.raises(error, match=text):
        MaskInfo(**fields)


def test_pytree_accepts_any_leaf_and_keeps_static_data():
    mask = MaskInfo(attention_mask=np.ones((1, 1, 6, 6), bool), causal=True) & MaskInfo(
        q_segment_ids=IDS, kv_segment_ids=IDS, causal=True, causal_offset=2, sliding_window=3
    )
    assert len(mask.terms) == 2
    leaves, tree = jax.tree.flatten(mask)
    assert len(leaves) == 3
    marked = jax.tree.map(lambda _: object(), mask)
    assert marked.causal and jax.tree.structure(marked) == tree
    assert hash(tree) == hash(jax.tree.structure(copy.copy(mask)))
    assert tree != jax.tree.structure(mask.replace(causal=False))
    paths = [jax.tree_util.keystr(path) for path, _ in jax.tree_util.tree_leaves_with_path(mask)]
    assert paths == [".attention_mask", ".q_segment_ids", ".kv_segment_ids"]
    abstract = jax.eval_shape(lambda m: m, mask)
    assert abstract.q_len == 6 and abstract.shape == mask.shape
    for same in (pickle.loads(pickle.dumps(mask)), copy.deepcopy(mask)):
        assert jax.tree.structure(same) == tree
        assert_same_mask(same, mask, 6, 6)
    assert "causal=True" in repr(mask) and "int32[1, 6]" in repr(mask)


PICKLED = (
    b"cejkernel.types.fields\nunflatten\np0\n(cejkernel.types.mask_info\nMaskInfo\np1\n(I01\nI0\n"
    b"(I3\nI0\ntp2\nN(Vdp\np3\nVfsdp\np4\ntp5\nVtp\np6\ng6\nVsp\np7\nI00\ntp8\n(NNNNN(g0\n(g1\n(I00\n"
    b"I1\nNI2\ng5\ng6\ng6\ng7\nI00\ntp9\n(NNNNN(ttp10\ntp11\nRp12\ntp13\ntp14\ntp15\nRp16\n."
)
"""A mask that an earlier version pickled, when its modules lay elsewhere."""


def test_stored_names_of_a_mask_stay():
    mask = MaskInfo(causal=True, sliding_window=(3, 0)) & MaskInfo(chunk_size=2, causal_offset=1)
    assert pickle.loads(PICKLED) == mask
    # keys of stored configs and recorded calls name the class so
    assert f"{MaskInfo.__module__}.{MaskInfo.__qualname__}" == "ejkernel.types.mask_info.MaskInfo"


def test_jit_cache_is_shared_and_vmap_maps_arrays():
    traces = []

    @jax.jit
    def f(m):
        traces.append(m)
        return m.get_or_compute_attention_mask()

    f(MaskInfo.from_segments(IDS).apply_causal())
    f(MaskInfo.from_segments(IDS + 1).apply_causal())
    assert len(traces) == 1
    ids = np.random.default_rng(0).integers(-1, 2, (3, 1, 6))
    mapped = jax.vmap(lambda m: m.get_or_compute_attention_mask())(
        jax.tree.map(lambda *x: np.stack(x), *(MaskInfo.from_segments(i) for i in ids))
    )
    for i in range(3):
        want = dense_of(MaskInfo.from_segments(ids[i]), 6, 6)
        np.testing.assert_array_equal(mapped[i], want)


@pytest.mark.parametrize(
    "name",
    ["segments", "attention_mask", "cu_seqlens", "lengths", "causal", "sliding_window", "random"],
)
def test_constructors_name_the_axis_keywords(name):
    constructor = getattr(MaskInfo, f"from_{name}")
    found = inspect.signature(constructor).parameters
    known = inspect.signature(MaskInfo).parameters
    for axis in ("batch_axis_name", "qheads_axis_name", "kvheads_axis_name", "sequence_axis_name"):
        assert found[axis].kind is inspect.Parameter.KEYWORD_ONLY
        assert found[axis].default == known[axis].default
    assert "axes" not in found and "cls" not in found


def test_an_unknown_keyword_is_a_type_error():
    with pytest.raises(TypeError, match="axis_nam"):
        MaskInfo.from_causal(axis_nam="x")


def test_from_segments():
    mask = MaskInfo.from_segments(IDS.astype(np.int64))
    assert mask.q_segment_ids is mask.kv_segment_ids and mask.is_self_attention()
    assert mask.q_segment_ids.dtype == np.int32
    cross = MaskInfo.from_segments(IDS, IDS[:, :4], batch_axis_name="data")
    assert cross.kv_len == 4 and not cross.is_self_attention()
    assert cross.batch_axis_name == "data"
    padding = MaskInfo.from_segments(np.array([[1, 1, 0]]), is_attn_mask=True)
    assert padding.q_segment_ids.tolist() == [[0, 0, -1]]
    with pytest.raises(InvalidArgument, match="q_segment_ids"):
        MaskInfo.from_segments(None)
    with pytest.raises(TypeError):
        MaskInfo.from_segments(IDS, batch_axis="data")


def test_from_attention_mask():
    padding = np.array([[1, 1, 0]])
    mask = MaskInfo.from_attention_mask(padding)
    assert mask.is_structural and mask.kv_segment_ids.tolist() == [[0, 0, -1]]
    inverted = MaskInfo.from_attention_mask(1 - padding, mask_is_valid=False)
    assert inverted.q_segment_ids.tolist() == [[0, 0, -1]]
    dense = np.tril(np.ones((2, 3, 3), int)) * 7
    mask = MaskInfo.from_attention_mask(dense)
    assert mask.shape == (2, 1, 3, 3)
    np.testing.assert_array_equal(mask.attention_mask[:, 0], dense != 0)
    hidden = MaskInfo.from_attention_mask(jnp.asarray(dense)[:, None], mask_is_valid=False)
    np.testing.assert_array_equal(hidden.attention_mask, mask.attention_mask == 0)
    with pytest.raises(InvalidArgument, match="float32"):
        MaskInfo.from_attention_mask(jnp.ones((1, 3)))


def test_from_cu_seqlens_uses_positions_inside_sequences():
    cu_q, cu_kv = np.array([0, 2, 2, 5]), np.array([0, 3, 4, 6])
    mask = MaskInfo.from_cu_seqlens(cu_q, cu_kv, max_q_len=7, max_kv_len=8).apply_causal()
    assert mask.q_segment_ids.tolist() == [[0, 0, 2, 2, 2, -1, -1]]
    assert mask.kv_segment_ids.tolist() == [[0, 0, 0, 1, 2, 2, -1, -1]]
    assert mask.q_positions.tolist() == [[0, 1, 0, 1, 2, -1, -1]]
    want = np.zeros((7, 8), bool)
    for start_q, stop_q, start_k, stop_k in ((0, 2, 0, 3), (2, 5, 4, 6)):
        for i in range(stop_q - start_q):
            for j in range(stop_k - start_k):
                want[start_q + i, start_k + j] = j <= i
    np.testing.assert_array_equal(mask.get_or_compute_attention_mask()[0, 0], want)
    traced = jax.jit(lambda a, b: MaskInfo.from_cu_seqlens(a, b, max_q_len=7, max_kv_len=8))(
        cu_q, cu_kv
    ).apply_causal()
    assert_same_mask(traced, mask, 7, 8)
    batched = MaskInfo.from_cu_seqlens(np.stack([cu_q, cu_kv]), max_q_len=6)
    assert batched.batch_size == 2 and batched.is_self_attention()
    assert batched.get_or_compute_positions()[1][0].tolist() == [0, 1, 0, 1, 2, 2**31 - 1]
    with pytest.raises(InvalidArgument, match=r"cu_seqlens_kv.*as many"):
        MaskInfo.from_cu_seqlens(cu_q, cu_kv[:2], max_q_len=5)
    empty = MaskInfo.from_cu_seqlens(np.array([0]), max_q_len=3)
    assert empty.q_segment_ids.tolist() == [[-1, -1, -1]]


def test_from_lengths():
    mask = MaskInfo.from_lengths(np.array([0, 2]), max_q_len=3)
    assert mask.q_segment_ids.tolist() == [[-1, -1, -1], [0, 0, -1]]
    assert mask.is_self_attention()
    mask = jax.jit(lambda q, k: MaskInfo.from_lengths(q, k, max_q_len=2, max_kv_len=4))(
        np.array([1, 2]), np.array([4, 0])
    )
    assert mask.q_lens.tolist() == [1, 2] and mask.kv_lens.tolist() == [4, 0]


def test_structural_constructors_fit_any_shape():
    causal = MaskInfo.from_causal(offset=2)
    assert_same_mask(causal, MaskInfo(causal=True, causal_offset=2), 3, 9)
    window = MaskInfo.from_sliding_window((1, 2), causal=True, offset=-1)
    assert (window.sliding_window, window.causal, window.causal_offset) == ((1, 2), True, -1)
    assert window.is_self_attention() and not jax.tree.leaves(window)
    dense = MaskInfo.from_causal().get_or_compute_attention_mask(q_len=2, kv_len=3)
    assert dense.tolist() == [[[[True, False, False], [True, True, False]]]]
    with pytest.raises(ValueError, match="window"):
        MaskInfo.from_sliding_window(-1)


@pytest.mark.parametrize(
    "member",
    ["bias", "q_attention_mask", "kv_lens", "q_position_ids", "cu_seqlens_q"],
)
def test_missing_length_is_a_clear_error(member):
    with pytest.raises(ValueError, match=r"q_len|kv_len"):
        getattr(MaskInfo.from_causal(), member)


def test_from_random():
    mask = MaskInfo.from_random(2, 30, 40, sparsity=0.25, seed=3)
    assert mask.shape == (2, 1, 30, 40)
    assert abs(mask.attention_mask.mean() - 0.75) < 0.05
    again = MaskInfo.from_random(2, 30, 40, sparsity=0.25, seed=3)
    np.testing.assert_array_equal(mask.attention_mask, again.attention_mask)
    assert MaskInfo.from_random(1, 4, sparsity=0.0).attention_mask.all()
    assert not MaskInfo.from_random(1, 4, sparsity=1.0).attention_mask.any()
    with pytest.raises(ValueError, match="sparsity"):
        MaskInfo.from_random(1, 4, sparsity=1.5)


def test_dynamic_init():
    mask = MaskInfo()
    assert MaskInfo.dynamic_init(mask_info=mask, input_ids=IDS) is mask
    assert MaskInfo.dynamic_init(attention_mask=IDS >= 0).kv_lens.tolist() == [4]
    assert MaskInfo.dynamic_init(input_ids=np.zeros((2, 3), int)).q_segment_ids.shape == (2, 3)
    assert MaskInfo.dynamic_init(inputs_embeds=np.zeros((2, 3, 4))).kv_lens.tolist() == [3, 3]
    with pytest.raises(ValueError, match="dynamic_init"):
        MaskInfo.dynamic_init()


def test_shardings_ignore_axes_the_mesh_lacks():
    mesh = AbstractMesh((2, 2, 2), ("fsdp", "tp", "sp"))
    mask = MaskInfo(attention_mask=np.ones((2, 4, 6, 6), bool), q_positions=np.zeros((1, 6), int))
    got = mask.get_shardings(mesh=mesh)
    assert got.attention_mask == P("fsdp", "tp", None, None)
    assert got.q_positions == P(None, None)
    assert got.q_segment_ids is None and got.kv_positions is None
    got = mask.get_shardings(True, mesh=mesh)
    assert got.attention_mask == P("fsdp", "tp", "sp", None)
    assert got.q_positions == P(None, "sp")
    both = AbstractMesh((2, 2), ("dp", "fsdp"))
    assert mask.get_shardings(mesh=both).attention_mask == P(("dp", "fsdp"), None, None, None)
    none = MaskInfo.from_segments(np.repeat(IDS, 2, 0), batch_axis_name=None)
    assert none.get_shardings(mesh=both).q_segment_ids == P(None, None)
    assert mask.get_empty_sharding().attention_mask == P()
    assert mask.get_empty_sharding().q_segment_ids is None


def test_visualize_draws_the_mask(capsys):
    mask = MaskInfo.from_causal().apply_sliding_window((4, 0))
    text = mask.visualize(4, q_len=12, kv_len=12, charset="ascii", return_str=True)
    assert text.splitlines()[1:4] == ["+..", "++.", ".++"]
    assert mask.visualize(4, q_len=12, kv_len=12) is None
    assert "▒▒·" in capsys.readouterr().out
    packed = MaskInfo.from_segments(np.repeat([[0, 1]], 4, 1).reshape(1, 8))
    lines = packed.visualize(4, return_str=True).splitlines()
    assert lines[1:3] == ["█·", "·█"]
    with pytest.raises(ValueError, match="charset"):
        packed.visualize(charset="emoji")
    with pytest.raises(ValueError, match="batch"):
        MaskInfo.from_lengths(np.array([1, 2]), max_q_len=4).visualize(batch=2)


@pytest.mark.parametrize("wrong", [2**32, -(2**31) - 1, 2**63 - 1])
@pytest.mark.parametrize("name", ["q_segment_ids", "kv_positions"])
def test_indices_that_int32_does_not_hold_are_refused(name, wrong):
    given = {name: np.array([[0, wrong]], np.int64)}
    if name == "q_segment_ids":
        given["kv_segment_ids"] = np.zeros((1, 2), np.int64)
    with pytest.raises(ValueError, match=f"{name}: given {wrong}, expected values that fit int32"):
        MaskInfo(**given)
    with pytest.raises(ValueError, match="q_segment_ids: given 2147483648"):
        MaskInfo.from_segments(np.array([[2**31]], np.uint32))
    assert MaskInfo.from_segments(np.array([[2**31 - 1]], np.uint64)).q_len == 1


def test_wide_indices_of_jax_are_refused_where_they_are_concrete():
    with jax.enable_x64(True):
        ids, narrow = jnp.array([[0, 2**32]]), jnp.array([[0, 1]])
        assert ids.dtype == narrow.dtype == jnp.int64
        for make in (
            lambda ids: MaskInfo.from_segments(ids),
            lambda ids: MaskInfo(q_segment_ids=narrow, kv_segment_ids=ids),
            lambda ids: MaskInfo(kv_positions=ids),
            lambda ids: MaskInfo.from_cu_seqlens(ids, max_q_len=2),
            lambda ids: MaskInfo.from_lengths(ids[0], max_q_len=2),
            lambda ids: MaskInfo.from_segments(narrow).apply_token_type_ids(ids),
            lambda ids: MaskInfo.from_segments(narrow).apply_kv_lengths(ids[0, 1:]),
        ):
            with pytest.raises(ValueError, match=r"^\w+: given 4294967296, expected values"):
                make(ids)
            jax.jit(make)(ids)  # traced: only the low 32 bits are used
            make(narrow)
    with pytest.raises(ValueError, match="kv_lengths: given 4294967296"):
        MaskInfo.from_segments(IDS).apply_kv_lengths(2**32)


@pytest.mark.parametrize("base", [2**31 - 7, 2 - 2**31])
@pytest.mark.parametrize(
    "rule",
    [
        {"causal": True, "causal_offset": 2},
        {"causal": True, "causal_offset": -2},
        {"sliding_window": (2, 1)},
        {"sliding_window": (0, 3), "causal_offset": 1},
        {"chunk_size": 4, "causal": True},
    ],
)
def test_positions_at_the_ends_of_int32(base, rule):
    near = np.arange(6, dtype=np.int64)[None]
    mask = MaskInfo(q_positions=near + base, kv_positions=near + base, **rule)
    # the same distances, and the same chunks, far from the ends
    far = near + base % (rule.get("chunk_size") or 1) + 64
    want = MaskInfo(q_positions=far, kv_positions=far, **rule)
    want = want.get_or_compute_attention_mask()
    np.testing.assert_array_equal(mask.get_or_compute_attention_mask(), want)
    sizes = {"q_len": 6, "kv_len": 6, "block_q": 6, "block_kv": 6}
    traced = jax.jit(lambda m: prepare_mask(m, **sizes).tile(0, 0))
    np.testing.assert_array_equal(traced(mask), want)
    kind = mask.block_summary(2, 2).kind
    for (i, j), block in np.ndenumerate(np.asarray(kind)[0, 0]):
        tile = want[0, 0, 2 * i : 2 * i + 2, 2 * j : 2 * j + 2]
        assert block != 0 or not tile.any()
        assert block != 2 or tile.all()


def test_equal_masks_are_equal():
    dense = np.tril(np.ones((1, 1, 6, 6), bool))

    def build(**changes):
        fields = {"q_segment_ids": IDS.copy(), "kv_segment_ids": jnp.asarray(IDS), "causal": True}
        return MaskInfo(**{**fields, **changes})

    assert build() == build() and hash(build()) == hash(build()) and len({build(), build()}) == 1
    assert build() & MaskInfo(chunk_size=2) == build(chunk_size=2)
    for other in (build(causal_offset=1), build(q_segment_ids=IDS + 1), build(attention_mask=dense),
                  build() & MaskInfo(sliding_window=1, causal_offset=3), "mask"):  # fmt: skip
        assert build() != other
    # what is not known is equal to itself alone
    assert jax.jit(lambda m: (m == m.replace(causal=True), m == build()))(build()) == (True, False)


def test_bias_and_padding_of_other_lengths():
    bias = MaskInfo(causal=True).create_bias(np.float16, q_len=2, kv_len=3)
    low = np.finfo(np.float16).min
    np.testing.assert_array_equal(bias, np.array([[[[0, low, low], [0, 0, low]]]], np.float16))
    padding = np.array([[1, 1, 0], [1, 0, 0]])
    mask = MaskInfo.from_attention_mask(padding, q_len=2)
    assert (mask.q_len, mask.kv_len, mask.is_structural) == (2, 3, True)
    np.testing.assert_array_equal(
        mask.get_or_compute_attention_mask(),
        np.broadcast_to(padding[:, None, None] != 0, (2, 1, 2, 3)),
    )
    assert MaskInfo.from_attention_mask(padding, q_len=3) == MaskInfo.from_attention_mask(padding)
    with pytest.raises(InvalidArgument, match="attention_mask: expected an array with q_len 4"):
        MaskInfo.from_attention_mask(np.ones((1, 2, 3), bool), q_len=4)


def test_arrays_of_other_libraries_are_named():
    foreign = type("Tensor", (), {"shape": (1, 6), "ndim": 2, "dtype": "torch.int64"})()
    with pytest.raises(InvalidArgument, match="q_segment_ids: expected integer"):
        MaskInfo.from_segments(foreign)
    with pytest.raises(InvalidArgument, match="attention_mask: expected bool or integer"):
        MaskInfo.from_attention_mask(foreign)
