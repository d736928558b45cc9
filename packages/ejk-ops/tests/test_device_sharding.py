import os
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import (
    AbstractMesh,
    AxisType,
    NamedSharding,
    PartitionSpec,
    use_abstract_mesh,
)

from ejkernel.ops import (
    device_fingerprint,
    device_kind,
    get_device_platform,
    sharding_fingerprint,
    target_device,
)
from ejkernel.ops.platforms import Platform
from ejkernel.ops.utils.buckets import bucket, bucket_shape
from ejktest.device import described


def test_cpu_has_a_kind_and_a_fingerprint():
    cpu = jax.devices("cpu")[0]
    assert device_kind(cpu) == device_kind("cpu") == "cpu"
    assert get_device_platform(cpu) == "xla"
    assert device_fingerprint(cpu) == f"cpu:cpu:{os.cpu_count()}cores"
    assert target_device(cpu).present and target_device(cpu).device is cpu


@pytest.mark.parametrize(
    ("name", "platform", "kind", "native", "fingerprint"),
    [
        ("NVIDIA H200", "gpu", "gpu", "triton", "gpu:nvidia-h200:9.0"),
        ("NVIDIA A100-SXM4-80GB", "gpu", "gpu", "triton", "gpu:nvidia-a100-sxm4-80gb:8.0"),
        ("NVIDIA L4", "cuda", "gpu", "triton", "gpu:nvidia-l4:8.9"),
        ("AMD Instinct MI300X", "rocm", "gpu", "triton", "gpu:amd-instinct-mi300x:gfx942"),
        ("TPU v5 lite", "tpu", "tpu", "pallas", "tpu:tpu-v5-lite:1cores"),
        ("TPU v5", "tpu", "tpu", "pallas", "tpu:tpu-v5:1cores"),
    ],
)
def test_described_devices(name, platform, kind, native, fingerprint):
    with described(name, platform, 1 if kind == "tpu" else None):
        assert device_kind() == kind
        assert get_device_platform() == native
        assert device_fingerprint() == fingerprint
        target = target_device()
        assert not target.present and target.native_platform is Platform(native)
        assert target.is_nvidia == name.startswith("NVIDIA")
        assert target.is_amd == name.startswith("AMD")


def test_compute_capability():
    with described("NVIDIA H200", "gpu"):
        assert target_device().compute_capability == (9, 0)
    with described("AMD Instinct MI300X", "gpu"):
        assert target_device().compute_capability is None
    assert target_device("cpu").compute_capability is None


def test_order_of_resolution():
    cpu = jax.local_devices(backend="cpu")[0]
    with jax.default_device(cpu):
        assert target_device().device is cpu
        with described("NVIDIA H200", "gpu"):
            assert device_kind() == "gpu"
        with jax.set_mesh(jax.make_mesh((1,), ("x",), devices=[cpu])):
            # an ambient mesh of real devices is a device that is here
            assert device_fingerprint() == device_fingerprint(cpu) and target_device().present
    with jax.default_device("cpu"):
        assert device_kind() == "cpu"


def test_target_is_seen_inside_jit():
    seen = []

    def f(x):
        seen.append(device_kind())
        return x

    with described("NVIDIA H200", "gpu"):
        jax.eval_shape(f, jnp.ones(3))
    jax.jit(f)(jnp.ones(3))
    assert seen == ["gpu", device_kind()]


def test_illegal_device():
    with pytest.raises(TypeError, match="device must be"):
        device_kind(3)
    with pytest.raises(RuntimeError):
        device_kind("nonsense")


def mesh_of(**axes):
    types = (AxisType.Auto,) * len(axes)
    return AbstractMesh(tuple(axes.values()), tuple(axes), types)


def test_sharding_fingerprint_of_abstract_arrays():
    mesh = mesh_of(x=2, y=4, z=1)

    def fingerprint(*spec):
        sharding = NamedSharding(mesh, PartitionSpec(*spec))
        return sharding_fingerprint(jax.ShapeDtypeStruct((8, 8, 8), jnp.float32, sharding=sharding))

    assert fingerprint("x") == "mesh(x=2,y=4,z=1)spec(x)"
    assert fingerprint("x", None, None) == fingerprint("x")
    assert fingerprint(None, ("x", "y")) == "mesh(x=2,y=4,z=1)spec(-,x+y)"
    assert fingerprint() is fingerprint(None) is fingerprint("z") is None
    assert len({fingerprint("x"), fingerprint("y"), fingerprint(None, "x"), None}) == 4


def test_unsharded_arrays_have_none():
    assert sharding_fingerprint(np.ones(3)) is None
    assert sharding_fingerprint(jnp.ones(3)) is None
    assert sharding_fingerprint(jax.ShapeDtypeStruct((3,), jnp.float32)) is None
    assert sharding_fingerprint(3) is None


def test_tracers_of_an_explicit_mesh():
    seen = []

    def f(x):
        seen.append(sharding_fingerprint(x))
        return x

    mesh = AbstractMesh((2,), ("x",), (AxisType.Explicit,))
    sharding = NamedSharding(mesh, PartitionSpec("x"))
    struct = jax.ShapeDtypeStruct((4, 2), jnp.float32, sharding=sharding)
    with use_abstract_mesh(mesh):
        jax.eval_shape(f, struct)
    assert seen == ["mesh(x=2)spec(x)"] == [sharding_fingerprint(struct)]


SHARDED = """
import jax, jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec
from ejkernel.ops import sharding_fingerprint, abstractify, device_fingerprint
mesh = jax.make_mesh((4,), ("x",))
for spec in (PartitionSpec("x"), PartitionSpec()):
    a = jax.device_put(jnp.ones((8, 2)), NamedSharding(mesh, spec))
    print(sharding_fingerprint(a), sharding_fingerprint(abstractify(a)))
print(device_fingerprint())
"""


def test_real_arrays_over_several_devices():
    env = os.environ | {
        "XLA_FLAGS": "--xla_force_host_platform_device_count=4",
        "JAX_PLATFORMS": "cpu",
    }
    run = subprocess.run(
        [sys.executable, "-c", SHARDED], capture_output=True, text=True, timeout=120, env=env
    )
    expected = "mesh(x=4)spec(x)"
    here = device_fingerprint("cpu")
    assert run.stdout.split("\n")[:3] == [f"{expected} {expected}", "None None", here], run.stderr


def test_buckets_are_powers_of_two():
    assert [bucket(n) for n in (0, 1, 16, 17, 100, 128, 129, 4096)] == [
        *(16, 16, 16, 32, 128, 128, 256, 4096)
    ]
    assert bucket_shape((3, 100, 8, 64), (0, 1)) == (16, 128, 8, 64)
    assert bucket_shape((100, 100), (-1,)) == (100, 128)
    assert bucket_shape((), ()) == ()
