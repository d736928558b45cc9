"""Dropout seeds: integers of any size, typed PRNG keys, and the warning where there is none."""

import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh

import ejkernel.kernels.xla as xla
import ejkernel.modules as modules
from ejkernel.ops import EjkernelWarning, InvalidArgument
from ejkernel.ops.errors import reset_warnings
from ejktest.calls import call

FLASH = "flash_attention"
SEEDED = ("flash_attention", "blocksparse_attention", "mla_attention")
DROP = {"dropout_prob": 0.5}


def attend(operation, seed, **changes):
    arguments = {**call(operation).arguments, **DROP, "dropout_seed": seed, **changes}
    return jax.tree.leaves(getattr(modules, operation)(**arguments))[0]


@pytest.mark.filterwarnings("ignore::ejkernel.ops.EjkernelWarning")  # None is a seed
def test_seeds_are_taken_modulo_two_to_the_32():
    c = call(FLASH)
    outputs = [
        modules.flash_attention(**{**c.arguments, "dropout_prob": 0.5, "dropout_seed": seed})[0]
        for seed in (
            7,
            7 + 2**32,
            7 + 2**64,
            7 - 2**32,
            np.uint32(7),
            jnp.int32(7),
            np.asarray(7),
            None,
            0,
        )
    ]
    *same, none, zero = outputs
    for out in same:
        assert (out == same[0]).all()
    assert (none == zero).all() and not (same[0] == zero).all()


@pytest.mark.parametrize("operation", SEEDED)
def test_a_key_is_as_good_as_its_bits(operation):
    key = jax.random.key(5)
    bits = jax.random.bits(key, (), "uint32")
    same = attend(operation, key)
    np.testing.assert_array_equal(same, attend(operation, bits))
    assert not (same == attend(operation, jax.random.fold_in(key, 1))).all()


def test_keys_under_transformations():
    c = call(FLASH)
    keys = jax.random.split(jax.random.key(5, impl="rbg"), 3)
    bits = jax.vmap(lambda key: jax.random.bits(key, (), "uint32"))(keys)
    mapped = jax.vmap(lambda seed: attend(FLASH, seed))
    np.testing.assert_array_equal(mapped(keys), mapped(bits))

    def loss(query, seed):
        return jnp.sum(attend(FLASH, seed, query=query))

    gradient = jax.jit(jax.grad(loss))
    q = c.arrays["query"]
    np.testing.assert_array_equal(gradient(q, keys[0]), gradient(q, bits[0]))


def test_a_key_on_a_mesh_and_in_a_ring():
    x = jnp.asarray(np.random.default_rng(0).standard_normal((2, 8, 2, 8)), jnp.float32)
    key = jax.random.key(5)
    want = modules.flash_attention(x, x, x, **DROP, dropout_seed=key)
    devices = np.array(jax.devices()[:2])
    batch = jax.sharding.PartitionSpec("dp")
    sharded = modules.flash_attention(
        x, x, x, **DROP, dropout_seed=key, mesh=Mesh(devices, ("dp",)), in_specs=(batch,) * 3
    )
    np.testing.assert_allclose(sharded, want, atol=1e-6)
    ring = dict(axis_name="sp", mesh=Mesh(devices, ("sp",)))
    around = modules.ring_attention(x, x, x, **DROP, dropout_seed=key, **ring)
    np.testing.assert_allclose(around, want, atol=1e-6)
    weights = dict(dropout_rng=key, deterministic=False)
    plain, _ = modules.attention(x, x, x, **DROP, **weights)
    np.testing.assert_allclose(plain, want, atol=1e-6)


@pytest.mark.parametrize("seed", [jax.random.key(0)[None], jax.random.PRNGKey(0), 1.5])
def test_other_keys_are_refused(seed):
    legal = r"dropout_seed: expected int or int\[\] or key\[\] or None, given"
    with pytest.raises(InvalidArgument, match=legal):
        attend(FLASH, seed)


@pytest.mark.parametrize("function", [modules.flash_attention, xla.flash_attention])
def test_dropout_without_a_seed_warns_once(function):
    reset_warnings()
    arguments = {**call(FLASH).arguments, **DROP}
    with pytest.warns(EjkernelWarning) as caught:
        function(**arguments)
        function(**arguments | {"dropout_prob": 0.25})
    (message,) = [str(w.message) for w in caught if w.category is EjkernelWarning]
    assert message.startswith("flash_attention: dropout_prob without dropout_seed drops the same ")
    assert "dropout_seed=jax.random.fold_in(key, step)" in message
    reset_warnings()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for seeded in ({"dropout_seed": 0}, {"dropout_seed": jax.random.key(0)}):
            function(**arguments, **seeded)
        function(**arguments | {"dropout_prob": 0.0})
