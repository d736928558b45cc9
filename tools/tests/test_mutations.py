"""The faults of tools/mutations.py can be planted: what they replace is there, and their tests."""

import pytest

import mutations


@pytest.mark.parametrize("fault", mutations.FAULTS, ids=lambda fault: fault.name)
def test_a_fault_can_be_planted(fault):
    text = mutations.faulty(fault)
    compile(text, fault.file, "exec")
    assert all((mutations.ROOT / name).is_file() for name in fault.tests.split())
