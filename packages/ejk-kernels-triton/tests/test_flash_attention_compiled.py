"""The shipped launches of flash attention compile for three chips, without spilling registers.

``aot_table.json`` holds what each of them uses; ``tools/gpu/aot_table.py`` writes it again.
"""

from __future__ import annotations

import dataclasses
import json
from importlib.metadata import version
from pathlib import Path

import pytest

pytest.importorskip("triton", reason="Triton is not installed")

from ejktest.triton_configs import SAMPLE, TARGETS, cases, launches, resources

TABLE = json.loads((Path(__file__).parent / "aot_table.json").read_text())


def recorded(call: str, chip: str) -> dict[str, dict[str, int]]:
    return TABLE["rows"].get(f"{call} @ {chip}", {})


def check(call: str, chip: str) -> dict:
    """No spills, within the shared memory, and the products are matrix instructions."""
    used = resources(call, chip)
    for kernel, r in used.items():
        print(f"{call} @ {chip} {kernel}: {r}")
        assert r.spills == 0, f"{kernel}: {r}"
        assert r.shared <= TARGETS[chip].shared_limit, f"{kernel}: {r}"
        assert r.products > 0 or "highest" in call, f"{kernel}: {r}"
    return used


def marked(chosen):
    """A launch recorded with spills is expected to fail until its tile is replaced."""
    params = []
    for call, chip in chosen:
        spilled = [kernel for kernel, r in recorded(call, chip).items() if r["spills"]]
        marks = pytest.mark.xfail(reason=f"spills in {', '.join(spilled)}") if spilled else ()
        params.append(pytest.param(call, chip, marks=marks))
    return params


@pytest.mark.parametrize(("call", "chip"), marked(SAMPLE))
def test_sample(call: str, chip: str) -> None:
    check(call, chip)


@pytest.mark.slow
@pytest.mark.parametrize(("call", "chip"), marked(cases()))
def test_all_and_as_recorded(call: str, chip: str) -> None:
    used = check(call, chip)
    if TABLE["triton"] == version("triton"):
        assert {k: dataclasses.asdict(r) for k, r in used.items()} == recorded(call, chip)


def test_table_names_what_ships() -> None:
    assert list(TABLE["rows"]) == [f"{call} @ {chip}" for call, chip in cases()]
    for name, row in TABLE["rows"].items():
        assert {"forward", "dq", "dkv"} <= set(row), name


def test_launches_are_those_of_a_user() -> None:
    """Tiles follow the chip; Hopper reads through TMA where the head dims allow it."""
    hopper, pointers = launches("d96", "sm_90"), launches("d96", "sm_90 pointers")
    assert {plan.tensor_maps for plan, _, _ in hopper.values()} == {True}
    assert {plan.tensor_maps for plan, _, _ in pointers.values()} == {False}
    assert {"forward", "dq", "dkv", "dbias"} <= set(launches("bias", "sm_80"))
