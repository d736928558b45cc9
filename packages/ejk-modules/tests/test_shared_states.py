"""Recurrences, convolutions and means over a sequence that devices share, on eight CPUs.

Each call is compiled with its gradients for arrays of which every device has some of the tokens,
by plain ``jit``, by ``mesh=`` and on explicit axes, and compared with the float64 oracle.
"""

from __future__ import annotations

import re
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import ejkernel.modules as modules
from ejkernel.modules import InvalidArgument, explain
from ejkernel.modules._table import operation_class
from ejktest.drawn import normal
from ejktest.oracles import convolution, delta, linear, pooling
from ejktest.tolerance import check_close

pytestmark = pytest.mark.skipif(len(jax.devices()) < 8, reason="needs eight devices")

GATHERED = re.compile(r" (all-gather|all-to-all)(-start)?\(")
SENT = re.compile(r" collective-permute(?:-start)?\(")
PERMUTES = 5  # of four devices: three of states, two of what later devices need
B, S, H, HK, DK, DV, C = 2, 24, 4, 2, 8, 6, 8
STARTS = np.array([0, 2, 2, 15, 16, 23], np.int32)  # over 4 devices of 6: one spans three
WHOLE = ("initial_state", "cu_seqlens", "weight", "bias", "g_gamma")
slow = partial(pytest.param, marks=pytest.mark.slow)


@pytest.fixture(autouse=True)
def untuned(monkeypatch):
    monkeypatch.setenv("EJKERNEL_AUTOTUNE_POLICY", "heuristics")


def decays(*shape, seed):
    return -np.abs(normal(*shape, seed=seed)) / 3


def recurrence(b, sequences, tokens=S):
    return {
        "query": normal(b, tokens, H, DK),
        "key": normal(b, tokens, HK, DK, seed=1),
        "value": normal(b, tokens, HK, DV, seed=2),
        "initial_state": normal(sequences, H, DK, DV, seed=3),
    }


def call_of(name):
    """The operation, its arrays and options: packed where the name says so."""
    operation, *rest = name.split()
    packed, reverse = "packed" in rest, "reverse" in rest
    b, n = (1, len(STARTS) - 1) if packed else (B, B)
    # many tokens have room for the states of a device
    times = 4 if "long" in rest else 1
    s = S * times
    integers = {"cu_seqlens": STARTS * times} if packed else {}
    options = {"return_state": True, **({"reverse": True} if reverse else {})}
    if operation == "mean_pooling":
        shape = (S, C) if packed else (B, S, C)
        mask = np.random.default_rng(0).random(shape[:-1]) < 0.7
        options = {"chunk_size": 5} if "chunks" in rest else {}
        return operation, {"x": normal(*shape)}, {**integers, "attention_mask": mask}, options
    if operation == "causal_conv1d":
        width = 8 if "wide" in rest else 4  # 7 tokens before each, of two devices
        arrays = {"x": normal(b, S, C), "weight": normal(C, width, seed=1), "bias": normal(C)}
        arrays["initial_state"] = normal(n, C, width - 1, seed=3)
        return operation, arrays, integers, {"activation": "silu", "return_state": True}
    arrays = recurrence(b, n, s)
    if operation == "gated_delta_rule":
        arrays["query"] = arrays["query"][:, :, :HK]
        arrays["value"] = normal(b, s, H, DV, seed=2)
        arrays["beta"] = np.abs(normal(b, s, H, seed=4)) / 2
        arrays["g"] = decays(b, s, H, DK, seed=5) if packed else decays(b, s, H, seed=5)
        options["normalize_qk"] = True
    elif operation == "lightning_attention":
        options |= {"layer_idx": 1, "num_layers": 4}
    elif operation == "gla_attention":
        arrays |= {"g": decays(b, s, H, DK, seed=5)}
    else:
        arrays |= {"g": decays(b, s, H, seed=5), "g_gamma": decays(H, seed=6)}
        arrays |= {"gv": decays(b, s, H, DV, seed=7)}
    return operation, arrays, integers, options


def oracle(operation, arrays, integers, options, cotangents):
    """Outputs and gradients in float64."""
    options = {name: x for name, x in options.items() if name != "return_state"}
    if operation == "mean_pooling":
        out, dx = pooling.mean_pooling(**arrays, **integers, **options, dout=cotangents[0])
        return (out,), {"x": dx}
    do, dstate = cotangents
    if operation == "lightning_attention":
        layer, layers = options.pop("layer_idx"), options.pop("num_layers")
        gamma = -8 / H * (1 - layer / layers) * np.arange(H)
        arrays = {**arrays, "g_gamma": gamma}
    function = linear.linear_attention
    if operation == "causal_conv1d":
        function = convolution.causal_conv1d
    elif operation == "gated_delta_rule":
        function = delta.gated_delta_rule
    result = function(**arrays, **integers, **options, do=do, dstate=dstate)
    return (result[0], result[1]), result[2]


def differentiated(operation, options, **where):
    def run(arrays, integers, cotangents):
        call = partial(getattr(modules, operation), **integers, **options, **where)
        out, pull = jax.vjp(lambda arrays: call(**arrays), arrays)
        outputs = out if isinstance(out, tuple) else (out,)
        given = cotangents if isinstance(out, tuple) else cotangents[0]
        return outputs, pull(given)[0]

    return run


def tokens_over(axis, name, x, operation):
    if name in WHOLE:
        return P()
    first = operation == "mean_pooling" and name == "x" and x.ndim == 2
    return P(axis) if first or x.ndim == 1 else P(None, axis)


CASES = [
    slow("recurrent_attention"),
    "gla_attention packed reverse",
    "gated_delta_rule packed",
    "causal_conv1d packed",
    slow("causal_conv1d wide"),
    "mean_pooling packed chunks",
    slow("mean_pooling chunks"),
    "gla_attention long",
    slow("gated_delta_rule packed long"),
    slow("gated_delta_rule long"),
    slow("recurrent_attention long packed reverse"),
    slow("gated_delta_rule long reverse"),
    slow("lightning_attention long"),
    slow("recurrent_attention reverse"),
    slow("recurrent_attention packed"),
    slow("lightning_attention packed"),
    slow("gated_delta_rule"),
    slow("gated_delta_rule reverse"),
    slow("gated_delta_rule packed reverse"),
    slow("causal_conv1d packed wide"),
    slow("mean_pooling"),
    slow("mean_pooling packed"),
]


@pytest.mark.parametrize("name", CASES)
def test_devices_share_the_tokens_of_a_call(name):
    operation, arrays, integers, options = call_of(name)
    shapes = jax.eval_shape(partial(getattr(modules, operation), **options), **arrays, **integers)
    shapes = shapes if isinstance(shapes, tuple) else (shapes,)
    cotangents = tuple(normal(*x.shape, seed=9 + i) for i, x in enumerate(shapes))
    expected, of_arrays = oracle(operation, arrays, integers, options, cotangents)
    plain = differentiated(operation, options)
    mesh = jax.make_mesh((4, 2), ("sp", "tp"), axis_types=(AxisType.Auto,) * 2)

    def placed(values, mesh):
        return {
            name: jax.device_put(x, NamedSharding(mesh, tokens_over("sp", name, x, operation)))
            for name, x in values.items()
        }

    def check(found):
        outputs, gradients = found
        for x, y in zip(outputs, expected, strict=True):
            check_close(x, y, dtype="float32")
        for array, x in gradients.items():
            check_close(x, of_arrays[array], dtype="float32")

    sharded = placed(arrays, mesh), placed(integers, mesh)
    compiled = jax.jit(plain).lower(*sharded, cotangents).compile()
    assert not GATHERED.search(compiled.as_text())
    if "long" in name:  # states and transitions go both ways once: nothing is computed again
        assert len(SENT.findall(compiled.as_text())) == 2 * PERMUTES
    found = compiled(*sharded, cotangents)
    check(found)
    for array, x in found[1].items():
        assert x.sharding.is_equivalent_to(sharded[0][array].sharding, x.ndim), array
    if "long" in name:  # the other ways have no forward pass in a program of its own
        return
    given = arrays | integers
    names = (p.name for p in operation_class(operation).spec.boundary.array_parameters)
    specs = [tokens_over("sp", n, given[n], operation) if n in given else None for n in names]
    meshed = differentiated(operation, options, mesh=mesh, in_specs=specs)
    check(jax.jit(meshed)(arrays, integers, cotangents))
    explicit = jax.make_mesh((4, 2), ("sp", "tp"), axis_types=(AxisType.Explicit,) * 2)
    with jax.set_mesh(explicit):
        typed = placed(arrays, explicit), placed(integers, explicit)
        first = P() if operation == "mean_pooling" else P(None, "sp")
        specs = first, *(P() for _ in cotangents[1:])
        shardings = (NamedSharding(explicit, spec) for spec in specs)
        check(jax.jit(plain)(*typed, tuple(map(jax.device_put, cotangents, shardings))))


def test_tokens_and_heads_over_two_mesh_axes():
    """Decays by the index of all heads, and key heads fewer than devices."""
    operation, arrays, _, options = call_of("lightning_attention")
    arrays["key"], arrays["value"] = arrays["key"][:, :, :1], arrays["value"][:, :, :1]
    mesh = jax.make_mesh((4, 2), ("sp", "tp"), axis_types=(AxisType.Auto,) * 2)
    specs = P(None, "sp", "tp"), P(None, "sp"), P(None, "sp"), P(None, "tp")
    names = ("query", "key", "value", "initial_state")
    cotangents = normal(B, S, H, DV, seed=9), normal(B, H, DK, DV, seed=10)
    expected, of_arrays = oracle(operation, arrays, {}, options, cotangents)
    placed = {
        name: jax.device_put(arrays[name], NamedSharding(mesh, spec))
        for name, spec in zip(names, specs, strict=True)
    }
    plain = jax.jit(differentiated(operation, options))
    meshed = jax.jit(differentiated(operation, options, mesh=mesh, in_specs=specs))
    for outputs, gradients in (plain(placed, {}, cotangents), meshed(arrays, {}, cotangents)):
        for x, y in zip(outputs, expected, strict=True):
            check_close(x, y, dtype="float32")
        for name, x in gradients.items():
            check_close(x, of_arrays[name], dtype="float32")


def test_what_explain_says_of_states():
    mesh = jax.make_mesh((4,), ("sp",), axis_types=(AxisType.Auto,))
    tokens = NamedSharding(mesh, P(None, "sp"))

    def note(name):
        operation, arrays, _, options = call_of(name)
        arrays = {n: x if n in WHOLE else jax.device_put(x, tokens) for n, x in arrays.items()}
        return explain(operation, **arrays, **options).notes[:2]

    sharded = "sharded: seq over sp"
    size = B * H * DK * DV * 4 / 1024
    steps = "from device to device in each of a few steps"
    assert note("gla_attention") == (sharded, f"states over sp: {size:.3g} KiB {steps}")
    size += B * H * DK * DK * 4 / 1024
    assert note("gated_delta_rule") == (sharded, f"states over sp: {size:.3g} KiB {steps}")
    size = B * C * 3 * 4
    assert note("causal_conv1d") == (sharded, f"inputs over sp: {size} bytes from device to device")
    assert note("mean_pooling chunks") == (sharded, "sums over sp: all-reduce of 320 bytes")


def test_tokens_that_do_not_divide():
    _, arrays, _, options = call_of("gla_attention")
    mesh = jax.make_mesh((5,), ("sp",), axis_types=(AxisType.Auto,), devices=jax.devices()[:5])
    with pytest.raises(InvalidArgument, match="query: axis seq of size 24 is not divisible by"):
        modules.gla_attention(**arrays, **options, mesh=mesh, in_specs=(P(None, "sp"),))


def test_mesh_axes_in_another_order_than_the_mesh():
    """JAX sends between several mesh axes in the order of the mesh: the minor one is gathered."""
    operation, arrays, _, options = call_of("causal_conv1d")
    auto = jax.make_mesh((2, 2), ("a", "b"), axis_types=(AxisType.Auto,) * 2)
    spec = P(None, ("b", "a"))
    with pytest.raises(ValueError, match=r"axis seq is sharded over .*order of the mesh"):
        modules.causal_conv1d(**arrays, **options, mesh=auto, in_specs=(spec,))
    placed = {**arrays, "x": jax.device_put(arrays["x"], NamedSharding(auto, spec))}
    found = jax.jit(partial(modules.causal_conv1d, **options))(**placed)
    zeros = np.zeros((B, S, C)), np.zeros((B, C, 3))
    for x, y in zip(found, oracle(operation, arrays, {}, options, zeros)[0], strict=True):
        check_close(x, y, dtype="float32")


@pytest.mark.parametrize("name", ["causal_conv1d", slow("gla_attention")])
def test_second_gradients_of_a_shared_sequence(name):
    """The kernel of linear attention has a backward pass of its own, the convolution has not."""
    operation, arrays, _, options = call_of(name)
    mesh = jax.make_mesh((2, 4), ("dp", "sp"), axis_types=(AxisType.Auto,) * 2)
    specs = {n: P("dp", "sp") for n in arrays if n not in WHOLE} | {"initial_state": P("dp")}

    def loss(arrays):
        return sum(jnp.sin(x).sum() for x in getattr(modules, operation)(**arrays, **options))

    def sum_of_gradients(arrays):
        return sum(jnp.sin(x).sum() for x in jax.grad(loss)(arrays).values())

    second = jax.jit(jax.grad(sum_of_gradients))
    placed = {
        name: jax.device_put(x, NamedSharding(mesh, specs.get(name, P())))
        for name, x in arrays.items()
    }
    expected = second(arrays)
    for name, x in second(placed).items():
        np.testing.assert_allclose(x, expected[name], rtol=1e-4, atol=1e-4)
