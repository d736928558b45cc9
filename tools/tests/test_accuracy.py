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
    return json.loads((accuracy.RECORDS / "cpu.json").read_text())["errors"]


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


@pytest.mark.parametrize("path", sorted(accuracy.RECORDS.glob("*.json")), ids=lambda p: p.stem)
def test_every_operation_has_errors_of_its_dtype(path):
    """A rounding of the dtype apart from sums; no call failed."""
    limits = {"float32": 1e-5, "bfloat16": 2e-2, "float16": 2e-3}
    if path.stem != "cpu":  # TF32 has the bits of float16, and operands may be cut off to it
        limits["float32"] = 4e-3
    by_platform = json.loads(path.read_text())["errors"]
    for platform, cells in by_platform.items():
        for cell, errors in cells.items():
            dtype = cell.split()[1]
            assert errors is None or max(errors) < limits[dtype], (platform, cell, errors)
    names = {function for function, *_ in tables.operations()}
    assert set(accuracy.FORMS) <= names
    if path.stem == "cpu":  # time on a GPU may end before the last operation
        assert all(f"{name} float32" in by_platform["xla"] for name in accuracy.FORMS)


def test_the_table_has_a_column_for_each_backend_of_each_device(record, monkeypatch, tmp_path):
    monkeypatch.setattr(accuracy, "RECORDS", tmp_path)
    versions = {"jax": "0.11.2"}
    cpu = {"device": "cpu", "date": "2026-01-01", "versions": versions, "errors": record}
    (tmp_path / "cpu.json").write_text(json.dumps(cpu))
    of_gpu = {name: {"flash_attention float16": [2.5e-4, 0.0]} for name in accuracy.PLATFORMS}
    gpu = {"device": "NVIDIA H200", "date": "2026-01-02", "versions": versions, "errors": of_gpu}
    (tmp_path / "nvidia-h200.json").write_text(json.dumps(gpu))
    head, _, _, _, row, *_, last = tables.accuracy_table().splitlines()
    assert head.count("|") == 3 + len(record) + 4
    names = ("XLA", "Triton", "Pallas for Hopper", "cuDNN")
    assert head.endswith("".join(f" {name}, NVIDIA H200 |" for name in names))
    assert row.startswith("| `flash_attention` | float16 |") and row.endswith(
        "| 2.5e\N{NON-BREAKING HYPHEN}4, 0 |"
    )
    assert last == "Recorded: CPU, 2026-01-01, JAX 0.11.2; NVIDIA H200, 2026-01-02, JAX 0.11.2."


def test_what_fails_and_what_has_no_time_is_said_and_not_kept(monkeypatch, tmp_path, capsys):
    path = tmp_path / "record.json"
    command = ["mean_pooling", "--dtype", "float32", "--platform", "xla", "--out", str(path)]
    assert accuracy.main([*command, "--seconds", "0"]) == 1
    assert "no time left: mean_pooling float32" in capsys.readouterr().err
    assert not path.exists()
    assert accuracy.main(command) == 0
    text = path.read_text()
    assert list(json.loads(text)["errors"]["xla"]) == ["mean_pooling float32"]

    def fail(*_):
        raise RuntimeError("a lost context")

    monkeypatch.setattr(accuracy, "errors", fail)
    assert accuracy.main(command) == 1
    assert "a lost context" in capsys.readouterr().err and path.read_text() == text
