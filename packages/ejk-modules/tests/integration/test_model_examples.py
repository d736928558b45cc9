"""The programs in docs/examples that train a model of a framework."""

import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ejktest.examples import is_png, load_example

pytestmark = pytest.mark.promotes  # the models do, as their frameworks have it


def test_a_gpt_learns_and_decodes_by_its_cache(tmp_path, capsys):
    pytest.importorskip("flax")
    gpt = load_example("gpt_flax")
    size = gpt.Size(layers=2, heads=2, head_dim=8, length=64)
    picture = tmp_path / "gpt.png"
    model, history = gpt.main(40, 4, "The for ", str(picture), size)
    assert np.mean(history[-5:]) < 0.8 * np.mean(history[:3])
    said = capsys.readouterr().out
    assert said.count("'The for ") == 3 and "flash_attention/xla/any, heuristics" in said
    assert is_png(picture)

    graph, state = gpt.nnx.split(model)
    prompt = jnp.asarray(np.random.default_rng(0).integers(0, 256, (3, 5)), jnp.int32)
    texts, logits, _ = gpt.sample(graph, state, model.empty_cache(3), prompt, 30, jax.random.key(0))
    assert texts.shape == (3, 35) and len(np.unique(texts[:, 5:], axis=0)) == 3
    np.testing.assert_array_equal(texts[:, :5], prompt)
    full = model(texts[:, :-1], jnp.zeros((3, 34), jnp.int32), jnp.arange(34)[None])
    np.testing.assert_allclose(logits, full, atol=2e-5)


def test_a_gpt_keeps_packed_documents_apart():
    pytest.importorskip("flax")
    gpt = load_example("gpt_flax")
    pieces = gpt.documents(64)
    assert all(32 <= len(piece) <= 64 for piece in pieces)
    tokens, ids, positions = gpt.pack(pieces, 160)
    assert (ids >= 0).sum() == sum(map(len, pieces))
    row = int(np.argmax(ids.max(1)))
    model = gpt.GPT(gpt.Size(layers=1, heads=2, head_dim=8, length=160), gpt.nnx.Rngs(0))
    packed = model(*(x[row : row + 1] for x in (tokens, ids, positions)))
    assert ids[row].max() > 0
    for i in range(2):
        (at,) = np.nonzero(ids[row] == i)
        assert tokens[row, at].astype(np.uint8).tobytes() in pieces
        alone = model(tokens[row, at][None], np.zeros((1, len(at)), np.int32), np.arange(len(at)))
        np.testing.assert_allclose(packed[0, at], alone[0], atol=1e-5)


def test_a_vision_transformer_equals_equinox_itself(monkeypatch):
    eqx = pytest.importorskip("equinox")
    vit = load_example("vit_equinox")
    monkeypatch.setattr(vit, "LAYERS", 2)
    model = vit.ViT(4, jax.random.key(0))
    images = jax.random.uniform(jax.random.key(1), (5, 8, 8), minval=-1)

    def outputs(attend):
        def total(model):
            out = vit.logits_of(model, images, attend)
            return jnp.sum(jnp.sin(out)), out

        return eqx.filter_jit(eqx.filter_value_and_grad(total, has_aux=True))(model)

    ours, theirs = map(jax.tree.leaves, map(outputs, (vit.attend, vit.attend_as_equinox)))
    for a, b in zip(ours, theirs, strict=True):
        np.testing.assert_allclose(a, b, atol=1e-5)

    moved = vit.shift(np.asarray(images), np.random.default_rng(0))
    for image, other in zip(np.asarray(images), moved, strict=True):
        wide = np.pad(image, 1, constant_values=-1)
        shifts = [wide[i : i + 8, j : j + 8] for i in range(3) for j in range(3)]
        assert any((shift == other).all() for shift in shifts)

    monkeypatch.setitem(sys.modules, "sklearn.datasets", None)
    with pytest.raises(SystemExit, match=r"needs scikit-learn: pip install scikit-learn"):
        vit.digits()


def test_a_vision_transformer_reads_digits(tmp_path, monkeypatch, capsys):
    pytest.importorskip("equinox")
    pytest.importorskip("sklearn", reason="the digits ship with scikit-learn")
    vit = load_example("vit_equinox")
    monkeypatch.setattr(vit, "LAYERS", 1)
    images, _, test_images, test_classes = vit.digits()
    assert images.shape == (1438, 8, 8) and abs(images).max() == 1
    picture = tmp_path / "vit.png"
    model, accuracy = vit.main(80, 64, 4, str(picture))
    said = np.argmax(vit.logits_of(model, test_images), 1)
    assert accuracy == np.mean(said == test_classes) > 0.5  # one of ten by chance
    assert f"accuracy: {np.sum(said == test_classes)} of 359" in capsys.readouterr().out
    assert is_png(picture)
