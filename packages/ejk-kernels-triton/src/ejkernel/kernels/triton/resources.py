"""Resources of compiled code, as its assembler reports: registers, spills, shared memory.

On NVIDIA the PTX is assembled as JAX's launcher does: by the newest ptxas, for every architecture,
without options. Triton's own binaries, which are never launched here, are made otherwise.
"""

from __future__ import annotations

import functools
import os
import re
import subprocess
import tempfile
from dataclasses import asdict, dataclass

from ejkernel.kernels.triton.bridge import specialize
from ejkernel.kernels.triton.compiled import Source, compile_stages
from ejkernel.kernels.triton.launch import Launch
from ejkernel.kernels.triton.targets import Target


@dataclass(frozen=True)
class Resources:
    """Per thread: registers, spilled bytes (AMD: registers). Per program: shared bytes, warps."""

    registers: int
    spills: int
    shared: int
    num_warps: int
    products: int  # matrix instructions in the text: wgmma, mma, mfma
    serialized: bool = False  # the assembler makes every wgmma wait for the one before

    @property
    def row(self) -> dict[str, int]:
        """Fields that result tables record."""
        return {name: n for name, n in asdict(self).items() if name != "serialized"}

    def __str__(self) -> str:
        return (
            f"{self.registers} registers, {self.spills} spilled, {self.shared} B shared, "
            f"{self.num_warps} warps, {self.products} matrix instructions"
        )


def launch_source(launch: Launch, avals, target: Target) -> Source:
    """Returns the specialisation that ``launch`` needs for operands like ``avals``."""
    return specialize(launch.bind(target), avals, launch.result_types())


@functools.lru_cache(maxsize=16)
def assembly(source: Source, target: Target) -> tuple[str, dict]:
    """Returns the text that the chip's assembler reads, and the metadata.

    Kept for some sources, since what reads the text often measures it too.
    """
    last = "ptx" if target.platform == "cuda" else "amdgcn"
    outputs, metadata = compile_stages(source, target, last)
    return outputs[last], metadata


def measure(source: Source, target: Target) -> Resources:
    """Compile to a binary (no device needed) and read what it uses."""
    text, metadata = assembly(source, target)
    shared, warps = int(metadata["shared"]), int(metadata["num_warps"])
    if target.platform == "cuda":
        registers, spills, serialized = _assemble(text, target)
        products = text.count("wgmma.mma_async") or text.count("mma.sync")
        return Resources(registers, spills, shared, warps, products, serialized)
    count = {
        name: int(match[1]) if (match := re.search(rf"\.{name}:\s+(\d+)", text)) else 0
        for name in ("vgpr_count", "agpr_count", "vgpr_spill_count")
    }
    return Resources(
        count["vgpr_count"], count["vgpr_spill_count"], shared, warps, text.count("v_mfma")
    )


def _assemble(ptx: str, target: Target) -> tuple[int, int, bool]:
    from triton import knobs

    tool = getattr(knobs.nvidia, "ptxas_blackwell", knobs.nvidia.ptxas).path
    # asynchronous matrix products belong to one architecture and not to its successors
    name = f"{target.name}a" if int(target.arch) >= 90 else target.name
    with tempfile.NamedTemporaryFile("w", suffix=".ptx") as file:
        file.write(ptx)
        file.flush()
        command = [tool, "-v", f"--gpu-name={name}", file.name, "-o", os.devnull]
        report = subprocess.run(command, capture_output=True, text=True, check=True).stderr
    registers = re.search(r"Used (\d+) registers", report)
    spilled = re.search(r"(\d+) bytes spill stores, (\d+) bytes spill loads", report)
    if registers is None or spilled is None:
        raise RuntimeError(f"no resource usage in {report!r}")
    serialized = "wgmma.mma_async instructions are serialized" in report
    return int(registers[1]), max(int(spilled[1]), int(spilled[2])), serialized
