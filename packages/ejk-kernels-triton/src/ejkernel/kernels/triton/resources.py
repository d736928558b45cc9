"""What compiled code uses of the chip, read from the binary: registers, spills, shared memory."""

from __future__ import annotations

import re
import subprocess
import tempfile
from dataclasses import dataclass

from ejkernel.kernels.triton.bridge import Plan, describe
from ejkernel.kernels.triton.compiled import Source, stages
from ejkernel.kernels.triton.targets import Target


@dataclass(frozen=True)
class Resources:
    """Per thread: registers, spilled bytes (AMD: registers). Per program: shared bytes, warps."""

    registers: int
    spills: int
    shared: int
    num_warps: int
    products: int  # matrix instructions in the text: wgmma, mma, mfma

    def __str__(self) -> str:
        return (
            f"{self.registers} registers, {self.spills} spilled, {self.shared} B shared, "
            f"{self.num_warps} warps, {self.products} matrix instructions"
        )


def plan_source(plan: Plan, avals, target: Target) -> Source:
    """The specialisation that ``plan`` needs for operands like ``avals``."""
    return describe(plan.launch(target), avals, plan.outputs())


def measure(source: Source, target: Target) -> Resources:
    """Compile to a binary (no device needed) and read it."""
    outputs, metadata = stages(source, target)
    shared, warps = int(metadata["shared"]), int(metadata["num_warps"])
    if target.platform == "cuda":
        registers, spills = _cubin(outputs["cubin"])
        text = outputs["ptx"]
        products = text.count("wgmma.mma_async") or text.count("mma.sync")
        return Resources(registers, spills, shared, warps, products)
    text = outputs["amdgcn"]
    count = {
        name: int(found[1]) if (found := re.search(rf"\.{name}:\s+(\d+)", text)) else 0
        for name in ("vgpr_count", "agpr_count", "vgpr_spill_count")
    }
    return Resources(
        count["vgpr_count"], count["vgpr_spill_count"], shared, warps, text.count("v_mfma")
    )


def _cubin(binary: bytes) -> tuple[int, int]:
    from triton import knobs

    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(binary)
        file.flush()
        tool = knobs.nvidia.cuobjdump.path
        listing = subprocess.run(
            [tool, "-res-usage", file.name], capture_output=True, text=True, check=True
        ).stdout
    found = re.search(r"REG:(\d+) STACK:(\d+) SHARED:\d+ LOCAL:(\d+)", listing)
    if found is None:
        raise RuntimeError(f"no resource usage in {listing!r}")
    return int(found[1]), int(found[2]) + int(found[3])
