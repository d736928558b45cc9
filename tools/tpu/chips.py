"""TPUs by name, and compilation for them on a machine that has none."""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

TOPOLOGIES = {
    "v4": "v4:2x2x1",
    "v5e": "v5e:2x2",
    "v5p": "v5p:2x2x1",
    "v6e": "v6e:2x2",
    "tpu7x": "tpu7x:2x2x1",
}
# What llo.py reads; text of all hundred passes would take three times as long as compilation.
PASSES = "final_bundles|per-bundle-utilization|post-delay-converter"


def prepare_environment(dump: Path | None = None) -> None:
    """Before JAX is imported: CPU stays the default, libtpu looks for no machine around it.

    With ``dump`` the compiler writes there the final code of every kernel.
    """
    os.environ.update(
        JAX_PLATFORMS="cpu",
        TPU_SKIP_MDS_QUERY="1",
        TPU_ACCELERATOR_TYPE="v5litepod-4",
        TPU_WORKER_HOSTNAMES="localhost",
        ALLOW_MULTIPLE_LIBTPU_LOAD="1",
        TPU_LOG_DIR="disabled",
    )
    if dump is not None:
        flags = (f"dump_to={dump}", "dump_llo_text=true", f"dump_llo_pass_label_regex={PASSES}")
        os.environ["LIBTPU_INIT_ARGS"] = " ".join(f"--xla_jf_{flag}" for flag in flags)


def devices(chip: str) -> Any:
    """The TPUs of the smallest machine with this chip."""
    from jax.experimental import topologies

    name = TOPOLOGIES[chip]
    return topologies.get_topology_desc(platform="tpu", topology_name=name).devices


def device(chip: str) -> Any:
    return devices(chip)[0]


def targeting(device: Any) -> Any:
    """Context in which ``device`` is the device that calls are traced for."""
    from ejktest.device import described

    return described(device.device_kind, "tpu", device.num_cores)


def compile_for(
    device: Any, function: Callable[..., Any], *shapes: Any, donate: tuple[int, ...] = ()
) -> Any:
    """The compiled program of ``function`` for arrays like ``shapes``; it may write into the
    operands ``donate``."""
    import jax
    from jax.sharding import SingleDeviceSharding

    placed = partial(jax.ShapeDtypeStruct, sharding=SingleDeviceSharding(device))
    structs = jax.tree.map(lambda x: placed(x.shape, x.dtype), shapes)
    with targeting(device):
        jitted = jax.jit(function, donate_argnums=donate)
        return jitted.trace(*structs).lower(lowering_platforms=("tpu",)).compile()
