"""What holds for every operation: it is the XLA implementation, under every transformation."""

import inspect

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import ejkernel.kernels.xla as xla
import ejkernel.modules as modules
from ejkernel.modules._table import OPERATIONS, exports, operation_class
from ejkernel.ops import kernel_registry
from ejkernel.types import MaskInfo
from ejktest.calls import CALLS, call
from ejktest.grids import without
from ejktest.transforms import loss_of

ALL = sorted(CALLS)


def leaves(x):
    return [np.asarray(leaf) for leaf in jax.tree_util.tree_leaves(x)]


def assert_same(a, b, tolerance=2e-5):
    for x, y in zip(leaves(a), leaves(b), strict=True):
        assert x.shape == y.shape and x.dtype == y.dtype
        np.testing.assert_allclose(x, y, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("operation", ALL)
def test_forward_is_the_xla_function(operation):
    c = call(operation)
    ours = getattr(modules, operation)(**c.arguments)
    theirs = jax.jit(lambda arrays: getattr(xla, operation)(**arrays, **c.static))
    assert_same(ours, theirs(c.arrays))
    assert all(np.isfinite(x).all() for x in leaves(ours)[:1])
    again = getattr(modules, operation)(**c.arguments)
    assert all((x == y).all() for x, y in zip(leaves(ours), leaves(again), strict=True))


@pytest.mark.parametrize("operation", ALL)
def test_a_class_in_place_of_the_function_names_the_function(operation):
    arguments = call(operation).arguments
    kernel, function = operation_class(operation), rf"ejkernel\.modules\.{operation}\("
    for args, named in ((tuple(arguments.values()), {}), ((), arguments)):
        with pytest.raises(TypeError, match=function):
            kernel(*args, **named)


# the kernel of ragged_page_attention_v3 is that of ragged_page_attention, and writes besides
@pytest.mark.parametrize("operation", without(ALL, "ragged_page_attention"))
def test_transformations_keep_results(operation):
    c = call(operation)
    function = getattr(modules, operation)

    def forward(arrays):
        return function(**{**c.arrays, **arrays}, **c.static)

    wanted = {name: np.asarray(c.arrays[name]) for name in c.gradients}
    plain = forward(wanted)
    shapes = jax.eval_shape(forward, c.arrays)
    assert [s.shape for s in jax.tree_util.tree_leaves(shapes)] == [x.shape for x in leaves(plain)]

    @jax.jit
    @jax.vmap
    def mapped(arrays):
        gradients = jax.grad(jax.checkpoint(lambda w: loss_of(forward(w))))
        return forward(arrays), gradients(arrays)

    two = {name: np.stack([x, x / 2]) for name, x in wanted.items()}
    outputs, gradients = jax.tree_util.tree_map(lambda x: np.asarray(x)[0], mapped(two))
    assert_same(outputs, plain)

    step, rng = 2e-3, np.random.default_rng(0)
    for name, g in gradients.items():
        assert g.dtype == wanted[name].dtype and np.isfinite(g).all()
        assert np.abs(g).max() > 0, f"{name} has a silent zero gradient"
        along = rng.standard_normal(g.shape).astype(np.float32)
        moved = (wanted[name] + np.float32(s) * along for s in (step, -step))
        ends = [float(loss_of(forward({name: jnp.asarray(x)}))) for x in moved]
        slope = (ends[0] - ends[1]) / (2 * step)
        assert slope == pytest.approx(float(np.vdot(g, along)), rel=0.02, abs=0.05), name


@pytest.mark.parametrize("operation", ALL)
def test_numpy_arrays_positionally(operation):
    c = call(operation)
    parameters = inspect.signature(getattr(modules, operation)).parameters.values()
    positional = [p for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD]
    arrays = {name: np.asarray(x) for name, x in c.arrays.items()}
    if "block_tables" in arrays:
        arrays["block_tables"] = np.clip(arrays["block_tables"], 0, 6)
    arguments = {**arrays, **c.static}
    args = []
    for p in positional:
        if p.name not in arguments and p.default is p.empty:
            break
        args.append(arguments.pop(p.name, p.default))
    assert_same(
        getattr(modules, operation)(*args, **arguments), getattr(modules, operation)(**c.arguments)
    )


def test_lengths_past_the_table_that_only_the_device_knows_are_clipped():
    arguments = call("page_attention").arguments
    capacity = arguments["block_tables"].shape[1] * arguments["key_cache"].shape[1]
    inside = {"block_tables": np.clip(np.asarray(arguments["block_tables"]), 0, 6)}
    full = jnp.full(2, capacity, jnp.int32)
    assert_same(
        modules.page_attention(**{**arguments, **inside, "context_lens": full + 5}),
        modules.page_attention(**{**arguments, **inside, "context_lens": full}),
    )


@pytest.mark.parametrize(
    ("operation", "counts", "rows"),
    [
        ("ragged_page_attention", "num_seqs", "context_lens"),
        ("ragged_page_attention_v3", "distribution", "kv_lens"),
    ],
)
def test_nothing_is_said_about_rows_whose_number_is_not_known(operation, counts, rows):
    c = call(operation)
    known = {name: np.asarray(c.arguments[name]) for name in (rows, "query_start_loc")}
    tables = np.array(c.arguments["block_tables"])
    lengths = known[rows].copy()
    arguments = {**c.arguments, **known, counts: jnp.asarray(c.arguments[counts])}
    expected = getattr(modules, operation)(**arguments)
    last = int(np.asarray(arguments[counts]).reshape(-1)[-1])
    tables.reshape(lengths.shape[0], -1)[last:] = -1
    lengths[last:] = 9
    arguments |= {"block_tables": tables, rows: lengths}
    assert_same(getattr(modules, operation)(**arguments), expected)


def test_a_count_of_blocks_is_clipped_to_its_bound():
    arguments = call("native_sparse_attention").arguments
    assert_same(
        modules.native_sparse_attention(**{**arguments, "block_counts": 3, "max_block_count": 1}),
        modules.native_sparse_attention(**{**arguments, "block_counts": 1}),
    )


@pytest.mark.parametrize("operation", sorted(OPERATIONS))
def test_kernel_class(operation):
    cls = operation_class(operation)
    function, kernel = getattr(modules, operation), getattr(modules, cls.__name__)
    assert cls is kernel and cls.function is function
    run = inspect.signature(cls().run).parameters
    expected = [
        name
        for name in inspect.signature(function).parameters
        if name not in ("platform", "mesh", "in_specs", "out_specs")
    ]
    assert list(run) == expected
    assert all(p.kind is not p.POSITIONAL_ONLY for p in run.values())
    assert cls().name in kernel_registry.list_algorithms()
    for registered in kernel_registry.list_implementations(cls().name):
        theirs = inspect.signature(registered.fn).parameters
        ours = [p for p in run.values() if p.name != "cfg"]
        assert [p.name for p in ours] == [n for n in theirs if n != "cfg"]
        for p in ours:
            q = theirs[p.name]
            assert p.kind is q.kind, p.name
            assert p.default is q.default or p.default == q.default, p.name


def test_kernel_classes_through_an_executor_and_by_run():
    c = call("flash_attention")
    executor = modules.create_default_executor(autotune=False)
    expected = modules.flash_attention(**c.arguments)
    q, k, v = (c.arrays[name] for name in ("query", "key", "value"))
    rest = {n: x for n, x in c.arguments.items() if n not in ("query", "key", "value")}
    assert_same(executor(modules.FlashAttention(), q, k, v, **rest), expected)
    assert_same(modules.FlashAttention().run(q, k, v, **rest), expected)
    assert_same(modules.FlashAttention()(q, k, v, **rest), expected)


def test_aliases_are_the_same_object():
    assert modules.flash_mla is modules.mla_attention
    assert modules.ragged_page_attention_v2 is modules.ragged_page_attention
    assert modules.RaggedPageAttentionv2 is modules.RaggedPageAttention
    assert modules.RaggedPageAttentionv2Config is modules.RaggedPageAttentionConfig


def test_exported_names_exist():
    for name in modules.__all__:
        assert getattr(modules, name) is not None
        assert name in dir(modules)
    with pytest.raises(AttributeError, match="nothing_such"):
        _ = modules.nothing_such
    for name in exports():
        value = getattr(modules, name)
        assert value.__doc__, name


@pytest.mark.parametrize("operation", sorted(OPERATIONS))
def test_docstrings_say_everything(operation):
    text = getattr(modules, operation).__doc__
    words = ("Args:", "Returns:", "Raises:", "ifferentiable", "Source:")
    for word in (*words, "InvalidArgument", "ValueError", "KernelNotSupported", "ConfigError"):
        assert word in text, word
    if "return_lse" in text:
        assert "float64 for float64 inputs" in " ".join(text.split())
    for name in inspect.signature(getattr(modules, operation)).parameters:
        assert name in text, name


def test_only_the_kernel_is_left_in_a_jaxpr():
    c = call("flash_attention")

    def names(function):
        jaxpr = jax.make_jaxpr(lambda arrays: function(**arrays, **c.static))(c.arrays)
        return [e.primitive.name for e in equations(jaxpr.jaxpr)]

    def equations(jaxpr):
        """Those of called functions in place of the call."""
        for e in jaxpr.eqns:
            yield from equations(e.params["jaxpr"].jaxpr) if e.primitive.name == "jit" else [e]

    ours, theirs = names(modules.flash_attention), names(xla.flash_attention)
    assert len(ours) <= len(theirs) + 2
    assert set(ours) <= set(theirs) | {"convert_element_type", "broadcast_in_dim"}


def test_packed_sequences_with_other_masks():
    c = call("flash_attention")
    q, k, v = (c.arrays[name][:1] for name in ("query", "key", "value"))
    cu = np.asarray([0, 5, 5, 10], np.int32)
    padding = jnp.arange(12)[None] != 3
    mask = MaskInfo.from_sliding_window((4, 4))

    def attend(q, k, v, padding, **options):
        return modules.flash_attention(
            q, k, v, attention_mask=padding, mask_info=mask, causal=True, **options
        )

    packed = attend(q, k, v, padding, cum_seqlens_q=cu)
    alone = [attend(*(x[:, s] for x in (q, k, v, padding))) for s in (slice(5), slice(5, 10))]
    np.testing.assert_allclose(packed[:, :10], jnp.concatenate(alone, 1), atol=1e-5)
    assert (packed[:, 10:] == 0).all()
    traced = jax.jit(lambda cu: attend(q, k, v, padding, cum_seqlens_q=cu))(jnp.asarray(cu))
    np.testing.assert_allclose(traced, packed, atol=1e-6)


def test_builders_are_called_only_when_they_are_needed():
    c = call("blocksparse_attention")
    asked = []

    def build(q_len, kv_len, heads):
        asked.append((q_len, kv_len, heads))
        return c.arrays["block_mask"]

    built = {**c.arguments, "block_mask": None, "mask_builder": build}
    assert_same(
        modules.blocksparse_attention(**built), modules.blocksparse_attention(**c.arguments)
    )
    assert asked == [(12, 12, 4)]

    c = call("scaled_dot_product_attention")
    bias = c.arrays["bias"]
    expected = modules.scaled_dot_product_attention(**c.arguments)
    without = {**c.arguments, "bias": None, "init_bias": lambda: bias}
    assert_same(modules.scaled_dot_product_attention(**without), expected)
    unused = {**c.arguments, "init_bias": lambda: pytest.fail("called")}
    assert_same(modules.scaled_dot_product_attention(**unused), expected)


@pytest.mark.parametrize("operation", sorted(OPERATIONS))
def test_xla_can_always(operation):
    assert modules.supports(operation, platform="xla") and modules.supports(operation)
    if operation in CALLS:
        c = call(operation)
        assert modules.supports(operation, **c.arguments)
        assert modules.supports(operation, **c.arguments, platform="xla")
