from types import SimpleNamespace

import jax
import jax.numpy as jnp
import pytest

from ejkernel.ops import (
    ConfigCache,
    EjkernelWarning,
    FwdParams,
    extract_labels_from_hlo_text,
    find_labels_in_lowered,
    label,
    labels_to_configs,
)
from ejkernel.ops.utils import labels as labels_module
from ejkernel.ops.utils.labels import stamped

KEY = "my_kernel.v2@cpu:cpu:2cores#" + "0123456789abcdef" * 2


@label("my_attention")
def my_attention(q):
    """Doc."""
    with label("scores of layer 3/a"):
        s = q @ q.T
    return jnp.sin(s) @ q


def lowered(f):
    return jax.jit(f).lower(jnp.ones((4, 4)))


def test_labels_survive_lowering_and_compiling():
    program = lowered(my_attention)
    expected = {"my_attention", "scores of layer 3/a"}
    assert set(find_labels_in_lowered(program)) == expected
    compiled = program.compile()
    assert set(find_labels_in_lowered(compiled)) == expected
    assert set(extract_labels_from_hlo_text(compiled.as_text())) == expected
    assert extract_labels_from_hlo_text(program.as_text()) == []


def test_labels_survive_transformations():
    program = lowered(lambda q: jax.vmap(jax.grad(lambda r: my_attention(r).sum()))(q[None]))
    assert "my_attention" in find_labels_in_lowered(program)


def test_labels_come_once_in_order_of_appearance():
    text = (
        'x "a/ejkernel#two/b" y "ejkernel#one/ejkernel#two/c" loc("jit(f)/jvp(ejkernel#three)/d")'
    )
    assert extract_labels_from_hlo_text(text) == ["two", "one", "three"]


def test_a_label_changes_no_result_and_keeps_the_function():
    assert my_attention.__name__ == "my_attention" and my_attention.__doc__ == "Doc."
    q = jnp.arange(16.0).reshape(4, 4)
    assert (my_attention(q) == jnp.sin(q @ q.T) @ q).all()


def test_one_label_may_be_entered_again():
    block = label("block")
    with block:
        with block:
            pass

    @block
    def f(x):
        with block:
            return x * 2

    assert find_labels_in_lowered(lowered(f)) == ["block"]


def test_odd_names_come_back_as_they_were():
    for name in ("50% ü", 'a"b', "x@y", "a(b)", "a#b", "a b"):
        assert find_labels_in_lowered(lowered(label(name)(lambda x: x * 2))) == [name]


def test_illegal_arguments():
    with pytest.raises(ValueError, match="name"):
        label("")
    with pytest.raises(TypeError, match="lowered"):
        find_labels_in_lowered("text")


def stamps_of(cfg, mode, key=KEY):
    def f(x):
        with stamped("my_kernel", 2, key, cfg, mode):
            return x * 2

    return find_labels_in_lowered(lowered(f))


def test_stamps_have_the_requested_form():
    cfg = FwdParams(q_blocksize=64)
    assert stamps_of(cfg, "none") == []
    assert stamps_of(cfg, "hash") == ["my_kernel.v2#0123456789abcdef"]
    (stamp,) = stamps_of(cfg, "json")
    assert stamp.startswith("my_kernel.v2#%7B") and "@" not in stamp
    assert labels_to_configs([stamp, "my_attention"]) == {stamp: cfg, "my_attention": None}
    assert labels_to_configs(stamps_of(None, "json")) == {"my_kernel.v2#null": None}


def test_stamps_of_another_process(monkeypatch):
    cfg = FwdParams(q_blocksize=64)
    stamps = stamps_of(cfg, "hash") + stamps_of(cfg, "json")
    monkeypatch.setattr(labels_module, "_stamped", {})
    cache = ConfigCache()
    cache.put(KEY, cfg)
    cache.put(("other", "key"), FwdParams())
    executor = SimpleNamespace(selector=SimpleNamespace(cache=cache, persistent=None))
    assert labels_to_configs(stamps, executor=executor) == {
        stamps[0]: cfg,
        stamps[1]: cfg.to_dict(),
    }
    assert labels_to_configs(stamps[:1]) == {stamps[0]: None}
    assert labels_to_configs(["k.v1#%7Bbroken"]) == {"k.v1#%7Bbroken": None}


def test_a_config_without_json_form_is_not_stamped_and_warns_once():
    with pytest.warns(EjkernelWarning, match="my_kernel are not stamped") as caught:
        assert stamps_of(object(), "json") == stamps_of(object(), "json") == []
    assert len(caught) == 1
