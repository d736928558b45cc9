"""A change that costs a TPU kernel more than 5%, or a copy around it, is a fault."""

from __future__ import annotations

import json

import pytest

from tpu import table

KEPT = {
    "tiles": "512x512",
    "bundles": 1000,
    "per_pass": 10.0,
    "slots": dict.fromkeys(table.SLOTS, 1.0),
    "spills": 3,
    "vmem_mib": 4.0,
    "opening": 200,
    "cycles": 32.0,
    "moved": 1.02,
    "intensity": 4.0,
    "outside_mib": 0.0,
}
ROW = KEPT | {"part": "decode", "kernel": "paged", "who": "ejkernel"}
BALANCE = 240.0
PARTS = ("decode", "decode 8 bits", "ragged")


@pytest.fixture(autouse=True)
def stored_table(tmp_path, monkeypatch):
    """A table of one kernel."""
    path = tmp_path / "costs.json"
    path.write_text(json.dumps({"costs": {}, "versions": ""}))
    monkeypatch.setattr(table, "COSTS", path)
    metadata = {"chip": {"vmem_mib": 128, "balance": BALANCE}, "versions": "jax 1, libtpu 2"}
    table.store("v5e", [ROW], metadata)
    return path


def test_the_same_counts_are_no_fault():
    assert table.compare("v5e", [ROW], ["decode"], PARTS) == []
    assert table.excess("v5e", [ROW], BALANCE) == []


@pytest.mark.parametrize(
    "change",
    [
        {"bundles": 1060},
        {"vmem_mib": 4.4},
        {"opening": 230},
        {"moved": 1.09},
        {"outside_mib": 0.5},  # nothing before: the rule of 5% would see nothing
        {"tiles": "512x1024", "per_pass": 10.6},
        {"kernel": "another"},
    ],
)
def test_worse_is_a_fault(change):
    assert table.compare("v5e", [ROW | change], ["decode"], PARTS)


def test_a_kernel_that_is_gone_is_a_fault():
    assert table.compare("v5e", [], ["decode"], PARTS) and not table.compare(
        "v5e", [], ["ragged"], PARTS
    )


def test_kernels_of_another_part_need_not_be_counted():
    metadata = {"chip": {"vmem_mib": 128, "balance": BALANCE}, "versions": ""}
    table.store("v5e", [ROW | {"part": "decode 8 bits", "kernel": "int8"}], metadata)
    assert table.compare("v5e", [ROW], ["decode"], PARTS) == []


def test_other_tiles_count_by_work():
    assert (
        table.compare("v5e", [ROW | {"tiles": "1024x512", "bundles": 1900}], ["decode"], PARTS)
        == []
    )


def test_bytes_count_where_memory_may_limit():
    moved = ROW | {"moved": 1.2}
    assert table.excess("v5e", [moved], BALANCE)
    assert not table.excess("v5e", [moved | {"intensity": 300.0}], BALANCE)


def test_something_around_a_kernel_needs_a_reason():
    assert table.compare_outside("v5e", [ROW | {"part": "grouped", "outside_mib": 1.0}])
    assert not table.compare_outside("v5e", [ROW | {"part": "linear", "outside_mib": 1.0}])


def test_of_jax_the_better_tiles_are_kept():
    theirs = [
        ROW | {"who": "jax", "tiles": tiles, "per_pass": count}
        for tiles, count in (("8 pages", 12.0), ("16 pages", 11.0), ("32 pages", 13.0))
    ]
    metadata = {"chip": {"vmem_mib": 128, "balance": BALANCE}, "versions": ""}
    table.store("v5e", [ROW, *theirs], metadata)
    assert table.load()["costs"]["v5e"]["decode paged"]["jax"] == {"jax": [11.0, "16 pages"]}
