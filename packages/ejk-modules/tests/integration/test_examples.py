"""The programs in docs/examples do what they say."""

import re
import subprocess
import sys
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import ejkernel.modules as modules
from ejktest.examples import FOLDER, load_example


@pytest.fixture(scope="module")
def moe():
    return load_example("moe")


@pytest.fixture(scope="module")
def small(moe):
    return moe.init(jax.random.key(0), 8, 16, 8), jax.random.normal(jax.random.key(1), (40, 8))


def test_experts_equal_the_dense_form(moe, small):
    p, x = small
    out, balance = jax.jit(moe.layer)(p, x)
    np.testing.assert_allclose(out, moe.dense(p, x), atol=2e-6)
    assert balance >= 0.99

    def total(f):
        return jax.grad(lambda p, x: jnp.sum(jnp.sin(f(p, x))), (0, 1))

    ours = jax.jit(total(lambda p, x: moe.layer(p, x)[0]))(p, x)
    for a, b in zip(jax.tree.leaves(ours), jax.tree.leaves(total(moe.dense)(p, x)), strict=True):
        np.testing.assert_allclose(a, b, atol=1e-5)


def test_experts_spread_over_eight_devices(moe, small):
    p, x = small
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:8]), ("expert",))
    out = jax.jit(lambda p, x: moe.experts_on_devices(p, x, mesh, "expert"))(p, x)
    np.testing.assert_allclose(out, moe.dense(p, x), atol=2e-6)


def test_experts_and_tokens_over_devices(moe, small, capsys):
    p, x = small
    p = p._replace(router=p.router.at[:, 0].add(3 * x.mean(0)))  # uneven routes
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:4]), ("expert",))

    def total(layer):
        def run(p, x):
            out, *rest = layer(p, x)
            return jnp.sum(jnp.sin(out)), rest

        return jax.jit(jax.value_and_grad(run, (0, 1), has_aux=True))

    one = total(lambda p, x: (moe.dense(p, x),))
    many = total(lambda p, x: moe.experts_and_tokens_on_devices(p, x, mesh, "expert"))
    text = many.lower(p, x).compile().as_text()
    assert "all-to-all" in text and "all-gather" not in text
    (found, (rows,)), gradients = many(p, x)
    (expected, _), expected_gradients = one(p, x)
    np.testing.assert_allclose(found, expected, rtol=1e-5)
    assert rows.sum() == 2 * x.shape[0] and rows.shape == (4,)
    pairs = zip(jax.tree.leaves(gradients), jax.tree.leaves(expected_gradients), strict=True)
    for a, b in pairs:
        np.testing.assert_allclose(a, b, atol=1e-5)
    assert moe.spread(4, tokens=64).sum() == 128
    assert "balance" in capsys.readouterr().out


def test_experts_learn(moe, capsys):
    losses = moe.main(steps=80, tokens=128)
    assert np.mean(losses[-10:]) < 0.85 * np.mean(losses[:10])
    assert "balance" in capsys.readouterr().out


@pytest.fixture(scope="module")
def serve():
    return load_example("serve")


def attend_to_all(layer, q, k, v):
    return modules.flash_attention(q[None], k[None], v[None], causal=True)[0]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--pages", "0"], "given 0, expected at least 1"),
        (["--branches", "two"], "invalid whole number value: 'two'"),
        (["--requests", "2", "--pages", "1"], "at most 16 together"),
    ],
)
def test_a_server_that_cannot_serve_says_why(serve, capsys, arguments, said):
    with pytest.raises(SystemExit) as ended:
        serve.command(arguments)
    assert ended.value.code not in (0, None)
    code, errors = ended.value.code, capsys.readouterr().err
    assert said in f"{code} {errors}"
    if not errors:  # Python prints the sentence and ends with 1
        assert code.startswith("serve.py: prompt of") and "\n" not in code


def test_a_server_that_is_interrupted_says_so(serve, monkeypatch):
    def interrupt(self):
        raise KeyboardInterrupt

    monkeypatch.setattr(serve.Server, "run", interrupt)
    with pytest.raises(SystemExit, match="stopped before all requests were answered"):
        serve.command(["--requests", "1"])


@pytest.mark.parametrize("draft", [0, 3])
def test_a_server_answers_as_the_model_does_in_one_program(serve, caplog, draft):
    size = serve.Size(layers=2, heads=2, kv_heads=1, head_dim=8, length=64)
    params = serve.init(size, jax.random.key(0))
    room = serve.Room(rows=16, sequences=3, pages=9, page=8)
    server = serve.Server(params, size, room, draft)
    rng, made, waited, fill = np.random.default_rng(0), [], 0, []
    serve.step.clear_cache()

    def run(requests: int) -> None:
        nonlocal waited
        for _ in range(requests):
            made.append(server.submit(rng.bytes(rng.integers(1, 40)), int(rng.integers(1, 24))))
        while server.waiting or server.running:
            before = len(server.waiting)
            server.run()
            waited += len(server.waiting) > before
            fill.append(server.fill)

    run(1)
    with jax.log_compiles():
        run(6)
    assert not [r for r in caplog.records if "Compiling" in r.getMessage()]
    assert serve.step._cache_size() == 1
    # pages ran out, a request waited and was read again; all pages came back
    assert waited and max(fill) == 1 and server.fill == 0 and len(set(server.free)) == room.pages
    assert 0 < server.accepted < server.drafted if draft else server.drafted == 0

    logits_of = jax.jit(partial(serve.transform, attend=attend_to_all, size=size))
    for request in made:
        tokens = np.zeros(size.length, np.int32)
        tokens[: request.end] = request.tokens
        logits = np.asarray(logits_of(params, tokens, np.arange(size.length)))
        answer = slice(request.end - request.answer - 1, request.end - 1)
        chosen = logits[answer, :][np.arange(request.answer), request.tokens[-request.answer :]]
        np.testing.assert_allclose(chosen, logits[answer].max(-1), atol=1e-5)

    for prompt, answer in ((b"x" * 60, 6), (b"", 6), (b"x", 0), (b"x", -1)):
        with pytest.raises(ValueError, match=f"prompt of {len(prompt)} and answer of {answer}"):
            server.submit(prompt, answer)
    assert not server.waiting
    with pytest.raises(ValueError, match="8 rows, expected at least one for each of 9 sequences"):
        serve.Room(rows=8, sequences=9)


def test_a_server_that_guesses_in_branches_answers_as_without(serve, capsys):
    plain = [request.tokens for request in serve.main(requests=12)]
    capsys.readouterr()
    trees = [request.tokens for request in serve.main(requests=12, draft=4, branches=3)]
    assert trees == plain
    said = re.search(r"(\d+) of \d+ tokens accepted, (\d+) of them", capsys.readouterr().out)
    assert int(said[1]) > int(said[2]) > 0  # of a branch that is not the first, too


def test_the_server_is_one_file(tmp_path):
    copy = tmp_path / "server.py"
    copy.write_text((FOLDER / "serve.py").read_text())
    command = [sys.executable, str(copy), "--requests", "3", "--pages", "48", "--draft", "2"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path)
    assert "compiled programs: 1" in done.stdout


def test_a_server_keeps_its_cache_in_place(serve):
    size = serve.Size(layers=1, heads=2, kv_heads=1, head_dim=8, length=64)
    room = serve.Room(pages=4096)
    cache = serve.empty_cache(size, room)
    n, i32 = room.sequences, "int32"
    shapes = [(room.rows,), (room.rows,), (n,), (n, 4), (n + 1,), (3,)]
    arrays = [jax.ShapeDtypeStruct(shape, i32) for shape in shapes]
    params = serve.init(size, jax.random.key(0))
    memory = serve.step.lower(params, cache, *arrays, size).compile().memory_analysis()
    held = cache[0].nbytes
    assert memory.alias_size_in_bytes >= held and memory.temp_size_in_bytes < held


def test_hybrid_learns_and_decodes_as_it_was_trained(capsys):
    """Token by token with the states: the logits of all tokens at once, past the window."""
    hybrid = load_example("hybrid")
    params, history = hybrid.main(steps=30, batch=4, length=48)
    assert np.mean(history[-5:]) < 0.8 * np.mean(history[:3])
    assert "The assert statement " in capsys.readouterr().out
    prompt = jnp.asarray(hybrid.text()[:80].reshape(2, 40))
    texts, logits, _ = hybrid.generate(params, hybrid.empty(2), prompt, 8, jax.random.key(1))
    np.testing.assert_array_equal(texts[:, :40], prompt)
    want = jax.jit(hybrid.forward)(params, texts[:, :-1])
    np.testing.assert_allclose(logits, want, atol=2e-4)


def test_a_shared_prefix_equals_a_prefix_in_every_table():
    example = load_example("shared_prefix")
    example.PART = 96  # several parts, and a rest
    query, prefix, caches, lengths, tables = example.make(5, 208, 40)
    out = example.attend(query, prefix, caches, lengths, tables)
    for i, length in enumerate(np.asarray(lengths)):
        own = (x[tables[i]].reshape(-1, *x.shape[2:])[:length] for x in caches)
        k, v = (
            np.repeat(np.concatenate(pair).astype(np.float64), 2, axis=1)
            for pair in zip(prefix, own, strict=True)
        )
        x = np.einsum("hd,khd->hk", np.asarray(query[i], np.float64), k) * query.shape[2] ** -0.5
        p = np.exp(x - x.max(1, keepdims=True))
        expected = np.einsum("hk,khd->hd", p / p.sum(1, keepdims=True), v)
        np.testing.assert_allclose(out[i], expected, atol=1e-5)
    assert example.main(4, 64, 32) < 1e-5
