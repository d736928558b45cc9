"""Properties of this machine and this installation, without starting a device."""

from __future__ import annotations

import os
import re
from pathlib import Path

import ejk_command

# distribution of JAX's device support -> the kind of device it serves
PLUGINS = {
    "jax-cuda12-plugin": "gpu",
    "jax-cuda13-plugin": "gpu",
    "jax-rocm7-plugin": "gpu",
    "jax-rocm60-plugin": "gpu",
    "libtpu": "tpu",
}

JAX_RANGE = ((0, 10), (0, 13))
PYTHON_RANGE = ((3, 11), (3, 14))


def version(distribution: str) -> str | None:
    """Returns the installed version, None when it is not installed."""
    metadata = ejk_command.installed(distribution)
    return None if metadata is None else metadata.version


def numbers(text: str | None) -> tuple[int, ...]:
    """Returns the leading components of a version: "0.11.2.dev1" -> (0, 11, 2)."""
    match = re.match(r"\d+(\.\d+)*", text or "")
    return tuple(map(int, match[0].split("."))) if match else ()


def hardware() -> dict[str, str]:
    """Returns accelerators that the operating system shows, by kind, with how they were seen."""
    evidence: dict[str, str] = {}
    driver = Path("/proc/driver/nvidia/version")
    if driver.exists() or Path("/dev/nvidiactl").exists():
        evidence["nvidia"] = _nvidia_driver(driver)
    if Path("/dev/kfd").exists():
        evidence["amd"] = "/dev/kfd"
    tpus = [*Path("/dev").glob("accel*")] or (
        [*Path("/dev/vfio").glob("[0-9]*")] if "TPU_ACCELERATOR_TYPE" in os.environ else []
    )
    if tpus:
        evidence["tpu"] = str(tpus[0])
    return evidence


def _nvidia_driver(path: Path) -> str:
    try:
        match = re.search(r"(\d+\.\d+(\.\d+)?)\s", path.read_text().split("Module", 1)[1])
        return f"driver {match[1]}" if match else "driver of unknown version"
    except (OSError, IndexError):
        return "/dev/nvidiactl"


def memory_gib() -> float | None:
    """Returns the memory of this machine."""
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    except (ValueError, OSError):
        return None
