"""Devices of other machines: JAX's abstract devices by short names."""

from __future__ import annotations

import contextlib

# short name -> (JAX platform, JAX's name of the device)
DEVICES = {
    "h200": ("gpu", "NVIDIA H200"),
    "h100": ("gpu", "NVIDIA H100 80GB HBM3"),
    "b200": ("gpu", "NVIDIA B200"),
    "a100": ("gpu", "NVIDIA A100-SXM4-80GB"),
    "l4": ("gpu", "NVIDIA L4"),
    "mi300x": ("gpu", "AMD Instinct MI300X"),
    "v4": ("tpu", "TPU v4"),
    "v5e": ("tpu", "TPU v5 lite"),
    "v5p": ("tpu", "TPU v5p"),
    "v6e": ("tpu", "TPU v6 lite"),
}


def device(name: str | None) -> contextlib.AbstractContextManager[object]:
    """Returns a context in which this device is the target. None = the one that is here.

    Args:
        name: one of ``DEVICES``, or ``platform:device name`` such as "gpu:NVIDIA H100 PCIe".

    Raises:
        UnknownName: neither.
    """
    if name is None:
        return contextlib.nullcontext()
    import jax

    from ejkernel.modules.workloads.find import UnknownName

    platform, _, product = name.partition(":")
    if not product:
        entry = DEVICES.get(name.lower())
        if entry is None:
            raise UnknownName("device", name, [*DEVICES, "gpu:PRODUCT", "tpu:PRODUCT"])
        platform, product = entry
    described = jax.sharding.AbstractDevice(device_kind=product, num_cores=None, platform=platform)
    mesh = jax.sharding.AbstractMesh((), (), abstract_device=described)
    return jax.sharding.use_abstract_mesh(mesh)
