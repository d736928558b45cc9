"""The table of errors: a few of its cells measured again, and what a record may hold."""

import json

import pytest

import accuracy
import tables

CELLS = {
    "xla": ("flash_attention bfloat16", "page_attention float32", "mean_pooling bfloat16"),
    "triton": ("mean_pooling bfloat16",),
    "pallas": ("mean_pooling float32",),
}
FACTOR = 4.0
"""Between two machines: kernels for a CPU add in the order that its vectors suggest."""


@pytest.fixture(scope="module")
def record():
    return json.loads((accuracy.RECORDS / "cpu.json").read_text())


@pytest.mark.parametrize(
    ("platform", "cell"), [(platform, cell) for platform, cells in CELLS.items() for cell in cells]
)
def test_a_cell_is_measured_again(record, platform, cell):
    if platform == "triton":
        pytest.importorskip("triton")
    operation, dtype = cell.split()
    with accuracy.interpreters():
        measured = accuracy.errors(operation, dtype, platform)
    recorded = record[platform][cell]
    assert len(measured) == len(recorded)
    for now, then in zip(measured, recorded, strict=True):
        assert then / FACTOR <= now <= then * FACTOR, (cell, measured, recorded)


def test_every_operation_has_errors_of_its_dtype(record):
    """A rounding of the dtype apart from sums; no call failed."""
    limits = {"float32": 1e-5, "bfloat16": 2e-2, "float16": 2e-3}
    for platform, cells in record.items():
        for cell, errors in cells.items():
            dtype = cell.split()[1]
            assert errors is None or max(errors) < limits[dtype], (platform, cell, errors)
    names = {function for function, *_ in tables.operations()}
    assert set(accuracy.FORMS) <= names
    assert all(f"{name} float32" in record["xla"] for name in accuracy.FORMS)


def test_the_table_has_a_column_for_each_backend(record):
    lines = tables.accuracy_table().splitlines()
    assert lines[0].count("|") == 3 + len(record)
    assert "none has been recorded" not in lines[0]
