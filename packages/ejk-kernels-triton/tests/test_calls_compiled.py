"""The shipped launches compile for every chip, and spill no more registers than is known.

``aot_table.json`` holds what each of them uses; ``tools/gpu/aot_table.py`` writes it again.
``aot_spills.json`` names the few launches that may spill, how many bytes, and of flash attention
what was measured with and without: any other spill fails.
"""

from __future__ import annotations

import json
from importlib.metadata import version
from pathlib import Path

import pytest

pytest.importorskip("triton", reason="Triton is not installed")

from ejktest.triton_calls import FLASH, OTHERS, SAMPLE, TARGETS, cases, launches, resources

HERE = Path(__file__).parent
TABLE = json.loads((HERE / "aot_table.json").read_text())
SPILLS = json.loads((HERE / "aot_spills.json").read_text())
KEPT = SPILLS["kept"]
ALLOWED = {launch: kept["bytes"] for launch, kept in KEPT.items()}
ALLOWED |= SPILLS["unmeasured"]["bytes"] | SPILLS["others"]["bytes"]


def check(call: str, chip: str) -> dict:
    """No spills but the recorded ones, within the shared memory, matmuls by matrix instructions."""
    used = resources(call, chip)
    for kernel, r in used.items():
        print(f"{call} @ {chip} {kernel}: {r}")
        assert r.spills <= ALLOWED.get(f"{call} @ {chip} {kernel}", 0), f"{kernel}: {r}"
        assert r.shared <= TARGETS[chip].shared_limit, f"{kernel}: {r}"
        attends = call in FLASH and kernel.split()[0] not in ("lists", "order")
        assert r.products > 0 or not attends or "highest" in call, f"{kernel}: {r}"
    return used


@pytest.mark.parametrize(("call", "chip"), SAMPLE)
def test_sampled_calls_compile(call: str, chip: str) -> None:
    check(call, chip)


@pytest.mark.slow
@pytest.mark.parametrize(("call", "chip"), cases())
def test_all_and_as_recorded(call: str, chip: str) -> None:
    used = check(call, chip)
    if TABLE["triton"] == version("triton") and call in FLASH:
        assert {k: r.row for k, r in used.items()} == TABLE["rows"][f"{call} @ {chip}"]


def test_table_names_what_ships() -> None:
    assert list(TABLE["rows"]) == [f"{call} @ {chip}" for call, chip in cases()]
    for name, row in TABLE["rows"].items():
        assert row, name
        assert name.split(" @ ")[0] not in FLASH or {"forward", "dq", "dkv"} <= set(row), name


def test_spills_are_those_known() -> None:
    """And what is kept still spills, and was faster than what does not."""
    spilled = {
        f"{name} {kernel}": used["spills"]
        for name, row in TABLE["rows"].items()
        for kernel, used in row.items()
        if used["spills"]
    }
    assert spilled == ALLOWED
    assert all(kept["with"] > kept["without"] for kept in KEPT.values())


@pytest.mark.parametrize("call", ["d128", "segments"])
def test_two_programs_share_a_multiprocessor(call: str) -> None:
    """Hopper has 228 KiB and gives a program 1 KiB more than it asks for."""
    used = TABLE["rows"][f"{call} @ sm_90"]["forward"]["shared"]
    assert 2 * (used + 2**10) <= 228 * 2**10


@pytest.mark.parametrize("call", OTHERS)
def test_every_call_is_launched_on_every_chip(call: str) -> None:
    for chip in ("sm_80", "sm_90", "gfx942"):
        assert launches(call, chip), chip


def test_launches_are_those_of_a_user() -> None:
    """Tiles follow the chip; Hopper reads through TMA where the head dims allow it."""
    hopper, pointers = launches("d96", "sm_90"), launches("d96", "sm_90 pointers")
    assert {plan.tensor_maps for plan, _ in hopper.values()} == {True}
    assert {plan.tensor_maps for plan, _ in pointers.values()} == {False}
    assert {"forward", "dq", "dkv", "dbias"} <= set(launches("bias", "sm_80"))
