"""The other shipped launches compile for every chip, and spill no more registers than is known.

``aot_table.json`` holds what each uses under "others"; ``tools/gpu/aot_table.py`` writes it.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

pytest.importorskip("triton", reason="Triton is not installed")

from ejktest.triton_calls import CALLS, TARGETS, cases, launches, resources

HERE = Path(__file__).parent
TABLE = json.loads((HERE / "aot_table.json").read_text())["others"]
SPILLS = json.loads((HERE / "aot_spills.json").read_text())["others"]["bytes"]


@pytest.mark.slow
@pytest.mark.parametrize(("call", "chip"), cases())
def test_compiles(call: str, chip: str) -> None:
    for kernel, used in resources(call, chip).items():
        print(f"{call} @ {chip} {kernel}: {used}")
        assert used.spills <= SPILLS.get(f"{call} @ {chip} {kernel}", 0), kernel
        assert used.shared <= TARGETS[chip].shared_limit, kernel


def test_table_names_what_ships() -> None:
    assert list(TABLE) == [f"{call} @ {chip}" for call, chip in cases()]
    assert all(TABLE.values())


@pytest.mark.parametrize("call", CALLS)
def test_every_call_is_launched_on_every_chip(call: str) -> None:
    for chip in ("sm_80", "sm_90", "gfx942"):
        assert launches(call, chip), chip


def test_spills_are_those_known() -> None:
    found = {
        f"{name} {kernel}": used["spills"]
        for name, row in TABLE.items()
        for kernel, used in row.items()
        if used["spills"]
    }
    assert found == SPILLS
