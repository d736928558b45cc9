"""Claims of the documents about the code, checked against the code."""

import json
import pkgutil
import re
from pathlib import Path
from xml.etree import ElementTree

import numpy as np
import pytest

import dev
import patterns
import release
import speeds
import tables

ROOT = Path(release.__file__).resolve().parent.parent


def test_every_operation_has_a_row():
    from ejkernel import modules
    from ejkernel.modules import operations

    listed = {function for function, *_ in tables.operations()}
    assert listed == {m.name for m in pkgutil.iter_modules(operations.__path__)}
    assert all(callable(getattr(modules, name)) for name in listed)


@pytest.mark.parametrize(
    "path",
    [*(ROOT / page for page in tables.PAGES), *ROOT.glob("packages/*/README.md")],
    ids=lambda p: f"{p.parent.name}-{p.stem}",
)
def test_tables_say_what_is_registered(path):
    text = path.read_text()
    assert tables.render(text) == text, "out of date: run tools/tables.py --write"


def test_every_operation_runs_on_xla():
    assert all("xla" in platforms for platforms in tables.platforms().values()), tables.platforms()


def test_a_package_without_kernels_says_so(monkeypatch):
    monkeypatch.setattr(tables, "platforms", lambda: {"flash_attention": ["xla", "triton"]})
    assert "There are no kernels yet" in tables.kernels_of("pallas")
    assert tables.kernels_of("triton") == "Kernels:\n\n- `flash_attention`"


def test_hardware_is_what_was_run_and_compiled(monkeypatch):
    table = tables.operations_table()
    assert "memory linear in the lengths | run | run | compiled | compiled | compiled |" in table
    assert "with its weights returned | run | XLA | XLA | XLA | XLA |" in table
    monkeypatch.setattr(tables, "measured_on_hopper", set)
    assert tables.run_where("flash_attention", "flash_attention")[1] == "compiled"
    assert all({"sm_80", "sm_90", "gfx942"} <= c for c in tables.compiled_by_triton().values())


def _row(case, mode, ms, **speed_over):
    return {"case": case, "mode": mode, "contender": "ejkernel", "ms": ms, "tflops": 500.4,
            "speed_over": speed_over}  # fmt: skip


def test_speeds_are_those_of_the_record_and_name_its_peers(monkeypatch, tmp_path):
    path = tmp_path / "flash_attention.json"
    monkeypatch.setattr(speeds, "RECORD", path)
    limits = {"flops": {"bfloat16": 6.83e14}, "bytes_per_s": 4.28e12}
    record = {"device": "NVIDIA H200", "date": "2026-01-01", "limits": limits}
    rows = [
        _row("sweep-d64-s4096-full", "fwd", 1.0, cudnn=1.5, fa3=0.754),
        _row("sweep-d64-s4096-full", "fwd+bwd", 3.0, cudnn=1.25),
        _row("sweep-d64-s16384-causal", "fwd", 1.0, cudnn=1.75, fa3=0.9),
        _row("sweep-d64-s1024-causal", "fwd", 1.0, cudnn=0.5, fa3=0.6),
        _row("short-d128-s512-b32", "fwd", 1.0, cudnn=1.1, fa3=1.2),
        _row("sweep-d64-s8192-full", "fwd", None),
    ]
    path.write_text(json.dumps({**record, "rows": rows}))
    assert speeds.sentence() == (
        "1.50 to 1.75 times as fast as cuDNN through `jax.nn` (1.25 to 1.25 with gradients), and "
        "0.75 to 0.90 times as fast as FlashAttention-3 (- with gradients)"
    )
    both = [*rows, _row("short-d128-s512-b32", "fwd+bwd", 1.0, cudnn=1.3)]
    path.write_text(json.dumps({**record, "rows": both}))
    assert "with gradients), with 1k tokens and fewer 0.50 to 1.10 (1.30 to 1.30), and" in (
        speeds.sentence()
    )
    path.write_text(json.dumps({**record, "rows": rows}))
    table = speeds.comparison()
    assert "| 64, 4k | 1.50 / 1.25 |  | 0.75 / - |  |" in table
    assert "| 64, 16k |  | 1.75 / - |  | 0.90 / - |" in table and speeds.NOT_REPEATED in table
    assert "| d = 64, 4k | 500 (1.50x, 0.75x) |  | 500 (1.25x, -) |  |" in speeds.rates()
    assert (
        speeds.rates().splitlines()[-1].startswith("| d = 128, 512, 32 sequences |  | 500 (1.10x")
    )
    without = [_row("sweep-d64-s4096-full", "fwd", 1.0, cudnn=1.5)]
    path.write_text(json.dumps({**record, "rows": without}))
    assert "FlashAttention-3" not in speeds.sentence() + speeds.comparison() + speeds.rates()


def test_the_documents_cite_the_record():
    for page, slot in (
        ("README.md", "figures flash_speeds"),
        ("docs/measured.md", "table flash_comparison"),
        ("docs/kernels/flash_attention_hopper.md", "table flash_rates"),
    ):
        assert f"<!-- {slot} -->" in (ROOT / page).read_text()
        assert page in tables.PAGES


@pytest.mark.parametrize("document", ["README.md", "CONTRIBUTING.md", "docs/architecture.md"])
def test_commands_and_paths_in_the_documents_exist(document):
    text = (ROOT / document).read_text()
    for command in re.findall(r"tools/dev\.py ([a-z]+)", text):
        assert command in (*dev.COMMANDS, "help"), command
    for path in re.findall(r"`((?:tools|packages|docs)/[\w./-]+)`", text):
        assert (ROOT / path).exists(), path
    for path in re.findall(r"\]\(([^)#:]+)\)", text):
        assert ((ROOT / document).parent / path).exists(), path


@pytest.mark.parametrize(
    "folder", sorted(p.parent for p in ROOT.glob("packages/*/pyproject.toml")), ids=lambda p: p.name
)
def test_every_package_warns_of_the_other_project(folder):
    text = " ".join((folder / "README.md").read_text().split())
    assert "The distribution named `ejkernel` is another project" in text
    assert "do not install it next to these" in text


def test_the_files_of_an_operation_are_those_that_the_page_lists():
    """The files that docs/writing-a-kernel.md lists for mean_pooling are all that name it."""
    text = (ROOT / "docs/writing-a-kernel.md").read_text()
    rows = re.findall(r"^\| `([\w./-]+)` \|.*\| (\d+) \|$", text, re.MULTILINE)
    listed = {path: int(lines) for path, lines in rows}
    for path, lines in listed.items():
        have = len((ROOT / path).read_text().splitlines())
        complete = "pooling" in path and "README" not in path
        assert abs(have - lines) <= 0.15 * lines + 2 if complete else have >= lines, (path, have)
    packages = ("types", "kernels-xla", "kernels-triton", "modules")
    naming = {
        str(path.relative_to(ROOT))
        for package in packages
        for path in (ROOT / f"packages/ejk-{package}/src").rglob("*.py")
        if re.search(r"mean_pooling|MeanPooling", path.read_text())
        and not {"workloads", "bench"} & set(path.parts)
    }
    assert naming <= listed.keys(), sorted(naming - listed.keys())


def test_the_package_on_the_page_is_the_one_that_is_tested():
    """docs/writing-a-kernel.md shows every file of docs/examples/short_decode as it is."""
    text = (ROOT / "docs/writing-a-kernel.md").read_text()
    blocks = re.findall(r"^```(?:python|toml)\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    folder = ROOT / "docs/examples/short_decode"
    files = [f for e in ("py", "toml") for f in folder.rglob(f"*.{e}")]
    assert len(files) == 5
    for file in files:
        title = f"**{file.name}.**".replace("__init__", r"\_\_init\_\_")
        assert file.read_text() in blocks and title in text, file
        assert f"  {file.name}" in text, f"{file} is not in the list of files"


def test_a_picture_shows_the_tiles_that_a_pattern_leaves():
    """Three tiles of a triangle of two blocks' side, its diagonal masked."""
    triangle = np.ones((2, 2), bool)
    assert patterns.visits(triangle, True, 1).tolist() == [[1, 0], [2, 1]]


def test_pictures_are_drawn_of_records_only(monkeypatch, tmp_path):
    record = tmp_path / "density.json"
    monkeypatch.setattr(patterns, "RECORD", record)
    (drawn,) = patterns.write_pictures(tmp_path)
    texts = set(ElementTree.parse(drawn).getroot().itertext())
    assert {"one column: 8%", "all, causal: 54%", *patterns.COLOURS} <= texts
    rows = [{"platform": "triton", "mode": "fwd", "seen": d, "ms": 10 * d} for d in (1.0, 0.1)]
    dense = [{"platform": "triton", "mode": "fwd", "ms": 5.0}]
    record.write_text(json.dumps({"device": "a GPU", "rows": rows, "dense": dense}))
    assert patterns.times_by_density() == {("triton", "fwd"): [(0.1, 0.2), (1.0, 2.0)]}
    _, times = patterns.write_pictures(tmp_path)
    assert "Triton, forward" in set(ElementTree.parse(times).getroot().itertext())
