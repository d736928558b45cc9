"""The examples that promise how the library is used, as they are written."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import ejkernel.modules
from ejkernel.ops import InvalidArgument, KernelNotSupported

eight_devices = pytest.mark.skipif(len(jax.devices()) < 8, reason="needs eight devices")


@pytest.fixture
def arrays():
    keys = jax.random.split(jax.random.key(0), 3)
    return [jax.random.normal(key, (2, 128, 8, 64)) for key in keys]


def close(a, b):
    np.testing.assert_allclose(np.asarray(a), np.asarray(b), rtol=2e-5, atol=2e-5)


def test_usage_example(tmp_path, monkeypatch):
    monkeypatch.setenv("EJKERNEL_CACHE_DIR", str(tmp_path))
    from ejkernel.modules import FlashAttention, create_default_executor

    # Initialize
    executor = create_default_executor()
    attention = FlashAttention()

    # Create inputs
    batch, seq_len, num_heads, head_dim = 2, 1024, 8, 64
    key = jax.random.PRNGKey(0)
    q = k = v = jax.random.normal(key, (batch, seq_len, num_heads, head_dim))

    # Execute attention with automatic optimization
    output = executor(
        attention, q, k, v,
        causal=True,
        dropout_prob=0.1,
        logits_soft_cap=30.0  # Gemma-2 style soft capping
    )  # fmt: skip

    assert output.shape == (2, 1024, 8, 64) and np.isfinite(output).all()
    again = executor(attention, q, k, v, causal=True, dropout_prob=0.1, logits_soft_cap=30.0)
    assert (output == again).all()


def test_type_system(arrays):
    from ejkernel.modules import flash_attention

    query, key, value = arrays[0], arrays[1][:, :64, :2], arrays[2][:, :64, :2]
    output = flash_attention(query=query, key=key, value=value)
    assert output.shape == (2, 128, 8, 64)
    for bad in (query[0], query[None]):
        with pytest.raises(InvalidArgument, match="query"):
            flash_attention(query=bad, key=key, value=value)


def test_basic_attention():
    from ejkernel.modules import flash_attention
    import jax.numpy as jnp  # isort: skip

    # Create query, key, value tensors
    q = jnp.ones((2, 128, 8, 64))  # (batch, seq_len, heads, head_dim)
    k = jnp.ones((2, 128, 8, 64))
    v = jnp.ones((2, 128, 8, 64))

    # Run flash attention
    output = flash_attention(q, k, v, causal=True)

    assert output.shape == (2, 128, 8, 64)
    close(output, jnp.ones_like(output))


@pytest.mark.parametrize("batch", [1, 2])
def test_with_masking(arrays, batch):
    from ejkernel.modules import flash_attention
    from ejkernel.types import MaskInfo

    q, k, v = (x[:batch, :6] for x in arrays)
    # Create mask from segment IDs
    segment_ids = jnp.array([[1, 1, 2, 2, -1, -1]])  # -1 = padding
    mask_info = MaskInfo.from_segments(segment_ids)

    # Use with attention
    output = flash_attention(q, k, v, mask_info=mask_info)

    assert (output[:, 4:] == 0).all() and (output[:, :4] != 0).all()
    close(output[:, 2:4], flash_attention(q[:, 2:4], k[:, 2:4], v[:, 2:4]))
    with pytest.raises(InvalidArgument, match="mask_info"):
        flash_attention(*arrays, mask_info=mask_info)


def test_packed_sequence_batching(arrays):
    from ejkernel.modules import flash_attention
    from ejkernel.types import MaskInfo

    q, k, v = (x[:, :10] for x in arrays)
    # Pack multiple sequences into one batch
    segment_ids = jnp.array([
        [1, 1, 1, 2, 2, 3, 3, 3, 3, -1]  # 3 sequences, 1 padding
    ])  # fmt: skip
    mask_info = MaskInfo.from_segments(segment_ids)

    # Each sequence only attends within itself
    output = flash_attention(q, k, v, mask_info=mask_info)

    for start, stop in ((0, 3), (3, 5), (5, 9)):
        alone = flash_attention(*(x[:, start:stop] for x in (q, k, v)))
        close(output[:, start:stop], alone)
    assert (output[:, 9] == 0).all()


@eight_devices
@pytest.mark.parametrize("shape", [(2, 4), (1, 8), (2, 1)])
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_distributed_execution(arrays, shape):
    from ejkernel.modules import flash_attention
    from jax.sharding import Mesh, PartitionSpec as P  # isort: skip

    q, k, v = arrays
    devices = np.array(jax.devices())[: shape[0] * shape[1]]
    mesh = Mesh(devices.reshape(*shape), axis_names=("dp", "tp"))

    with mesh:
        output = flash_attention(
            q, k, v,
            mesh=mesh,
            in_specs=(P('dp', None, 'tp', None),) * 3,
            out_specs=P('dp', None, 'tp', None),
        )  # fmt: skip

    close(output, flash_attention(q, k, v))
    assert len(output.sharding.device_set) == devices.size


def test_inference_with_kv_cache():
    from ejkernel.modules import page_attention

    draw = np.random.default_rng(0)
    query = jnp.asarray(draw.standard_normal((3, 1, 8, 64)), jnp.float32)
    key_cache, value_cache = (
        jnp.asarray(draw.standard_normal((9, 16, 2, 64)), jnp.float32) for _ in range(2)
    )
    context_lens = jnp.array([20, 1, 33])
    block_tables = jnp.array([[4, 0, -1], [7, -1, -1], [8, 2, 5]])
    output = page_attention(
        query,         # (batch, 1, heads, dim) - single token
        key_cache,     # (num_blocks, block_size, kv_heads, dim)
        value_cache,
        context_lens,  # (batch,) - current context length
        block_tables,  # (batch, max_blocks) - page table
    )  # fmt: skip

    assert output.shape == (3, 1, 8, 64)
    keys, values = (
        jnp.concatenate([cache[4], cache[0]])[None, :20] for cache in (key_cache, value_cache)
    )
    close(output[:1], ejkernel.modules.flash_attention(query[:1], keys, values))


@pytest.mark.parametrize("count", [8, 1])
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_long_sequence_training(arrays, count):
    from ejkernel.modules import ring_attention
    from jax.sharding import Mesh  # isort: skip

    if len(jax.devices()) < count:
        pytest.skip("needs eight devices")
    q, k, v = arrays
    # Distribute very long sequences across devices
    mesh = Mesh(jax.devices()[:count], axis_names=('sp',))  # fmt: skip

    with mesh:
        output = ring_attention(
            q, k, v,
            axis_name='sp',
            causal=True,
        )  # fmt: skip
        jitted = jax.jit(lambda q, k, v: ring_attention(q, k, v, axis_name="sp", causal=True))
        close(jitted(q, k, v), output)

    close(output, ejkernel.modules.flash_attention(q, k, v, causal=True))


def test_force_a_platform(arrays):
    from ejkernel.modules import flash_attention

    q, k, v = (x[:, :16] for x in arrays)
    output = flash_attention(q, k, v, platform="xla")  # Fallback
    close(output, flash_attention(q, k, v))
    kind = jax.devices()[0].platform
    for platform, homes in (("triton", ("gpu", "cuda", "rocm")), ("pallas", ("tpu",))):
        if kind in homes:
            close(flash_attention(q, k, v, platform=platform), output)
            continue
        with pytest.raises(KernelNotSupported, match=kind) as caught:
            flash_attention(q, k, v, platform=platform)
        assert caught.value.platform == platform


def test_an_interpreter_is_never_timed(arrays, monkeypatch):
    pytest.importorskip("ejkernel.kernels.triton")
    if jax.devices()[0].platform != "cpu":
        pytest.skip("only where GPU kernels are interpreted")
    monkeypatch.setenv("EJKERNEL_INTERPRET", "1")
    q, k, v = (x[:1, :16, :2, :16] for x in arrays)
    told = ejkernel.modules.explain("flash_attention", q, k, v, platform="triton")
    assert told.platform == "triton" and told.tier == "heuristics"
    out = ejkernel.modules.flash_attention(q, k, v, platform="triton", causal=True)
    close(out, ejkernel.modules.flash_attention(q, k, v, platform="xla", causal=True))


def test_environment_variables_act_on_the_next_call(arrays, monkeypatch):
    from ejkernel.modules import flash_attention
    from ejkernel.ops import clear_invocations, find_labels_in_lowered, get_invocations

    q, k, v = (x[:, :16] for x in arrays)
    flash_attention(q, k, v, causal=True)

    monkeypatch.setenv("EJKERNEL_OPS_STAMP", "hash")
    lowered = jax.jit(lambda q: flash_attention(q, k, v, causal=True)).lower(q)
    assert any(label.startswith("flash_attention.v1#") for label in find_labels_in_lowered(lowered))

    clear_invocations()
    monkeypatch.setenv("EJKERNEL_OPS_RECORD", "1")
    flash_attention(q[:, :8], k[:, :8], v[:, :8], causal=True)
    assert [inv.kernel.name for inv in get_invocations()] == ["flash_attention"]
    clear_invocations()

    for name in ("EJKERNEL_AUTOTUNE_POLICY", "EJKERNEL_OPS_STAMP", "EJKERNEL_OPS_RECORD"):
        with monkeypatch.context() as patch:
            patch.setenv(name, "perhaps")
            with pytest.raises(ValueError, match=name):
                flash_attention(q[:, :7], k[:, :7], v[:, :7])


def test_best_practice(arrays, tmp_path):
    # Recommended for most users
    from ejkernel.modules import flash_attention

    q, k, v = (x[:, :16] for x in arrays)
    with jax.profiler.trace(str(tmp_path)):
        output = flash_attention(q, k, v, causal=True)
    assert output.shape == q.shape
    assert any(path.is_file() for path in tmp_path.rglob("*"))
