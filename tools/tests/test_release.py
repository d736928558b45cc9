import shutil
import zipfile
from pathlib import Path

import pytest

import release

ROOT = Path(release.__file__).resolve().parent.parent


@pytest.fixture
def workspace(tmp_path):
    """A copy of what the checks read: the six packages without their code."""
    for folder in (p.parent for p in ROOT.glob("packages/*/pyproject.toml")):
        copy = tmp_path / "packages" / folder.name
        copy.mkdir(parents=True)
        for name in ("pyproject.toml", "CHANGELOG.md", "README.md", "LICENSE"):
            shutil.copy(folder / name, copy / name)
        package = release.read_package(folder)
        source = package.version_file.parent
        target = copy / source.relative_to(folder)
        target.mkdir(parents=True)
        for name in ("__init__.py", "_version.py", "py.typed"):
            shutil.copy(source / name, target / name)
    return tmp_path


def bump(root: Path, name: str, version: str) -> None:
    package = release.read_package(root / "packages" / name)
    package.version_file.write_text(f'__version__ = "{version}"\n')
    changelog = package.folder / "CHANGELOG.md"
    title, _, rest = changelog.read_text().partition("\n\n")
    changelog.write_text(f"{title}\n\n## {version}\n\nA change.\n\n{rest}")


def test_the_workspace_can_be_released_as_it_stands():
    members = release.read_workspace(ROOT)
    assert set(members) == {
        "ejk-types",
        "ejk-ops",
        "ejk-kernels-xla",
        "ejk-kernels-triton",
        "ejk-kernels-pallas",
        "ejk-modules",
    }
    for package in members.values():
        release.check(package, members)


def test_every_package_carries_the_licence():
    text = (ROOT / "LICENSE").read_bytes()
    for package in release.read_workspace(ROOT).values():
        assert (package.folder / "LICENSE").read_bytes() == text


def test_a_compatible_bump_needs_no_other_package(workspace):
    bump(workspace, "ejk-types", "0.1.1")
    members = release.read_workspace(workspace)
    for package in members.values():
        release.check(package, members)


def test_a_breaking_bump_refuses_every_stale_dependent(workspace):
    bump(workspace, "ejk-ops", "0.2.0")
    members = release.read_workspace(workspace)
    problems = release.range_problems(members["ejk-ops"], members)
    assert {line.split()[0] for line in problems} == {
        "ejk-kernels-xla",
        "ejk-kernels-triton",
        "ejk-kernels-pallas",
        "ejk-modules",
    }
    assert all("ejk-ops~=0.1.0, which excludes 0.2.0" in line for line in problems)
    with pytest.raises(release.ReleaseError, match=r"excludes 0\.2\.0"):
        release.check(members["ejk-modules"], members)
    release.check(members["ejk-types"], members)


def test_adapted_dependents_make_the_breaking_release_possible(workspace):
    bump(workspace, "ejk-ops", "0.2.0")
    for settings in workspace.glob("packages/*/pyproject.toml"):
        settings.write_text(settings.read_text().replace("ejk-ops~=0.1.0", "ejk-ops~=0.2.0"))
    members = release.read_workspace(workspace)
    for package in members.values():
        release.check(package, members)


@pytest.mark.parametrize(
    ("changelog", "message"),
    [
        ("# Changelog\n\n## 0.1.1\n\n## 0.1.0\n", "top heading of CHANGELOG.md is 0.1.1"),
        ("# Changelog\n\n## Unreleased\n", "top heading of CHANGELOG.md is Unreleased"),
        ("# Changelog\n", "has no heading"),
    ],
)
def test_version_and_changelog_must_agree(workspace, changelog, message):
    (workspace / "packages/ejk-types/CHANGELOG.md").write_text(changelog)
    members = release.read_workspace(workspace)
    with pytest.raises(release.ReleaseError, match=message):
        release.check(members["ejk-types"], members)


def test_unreadable_versions_are_named(workspace):
    package = release.read_package(workspace / "packages/ejk-types")
    package.version_file.write_text('__version__ = "one"\n')
    assert release.version_problems(package) == ["ejk-types: 'one' is not a version"]
    package.version_file.write_text("version = 1\n")
    with pytest.raises(release.ReleaseError, match="no line __version__"):
        release.version_problems(package)


def test_build_holds_only_its_part_of_the_namespace(workspace, tmp_path):
    package = release.read_package(workspace / "packages/ejk-kernels-pallas")
    assert package.portion == "ejkernel/kernels/pallas"
    assert package.tag == f"ejk-kernels-pallas-v{package.version}"
    sdist, wheel = release.build_checked(package, tmp_path / "dist")
    assert sdist.is_file()
    with zipfile.ZipFile(wheel) as archive:
        outside = [n for n in archive.namelist() if not n.startswith("ejkernel/kernels/pallas/")]
    assert all(".dist-info/" in name for name in outside)


def test_a_namespace_init_in_a_wheel_is_refused(workspace, tmp_path):
    package = release.read_package(workspace / "packages/ejk-kernels-pallas")
    (package.folder / "src/ejkernel/__init__.py").write_text("")
    (package.version_file.parent / "py.typed").unlink()
    with pytest.raises(release.ReleaseError) as refused:
        release.build_checked(package, tmp_path / "dist")
    assert "holds ejkernel/__init__.py, outside ejkernel/kernels/pallas/" in str(refused.value)
    assert "lacks ejkernel/kernels/pallas/py.typed" in str(refused.value)


def test_command_line(workspace, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(release, "ROOT", workspace)
    assert release.main(["ejk-types", "--out", str(tmp_path / "dist")]) == 0
    assert capsys.readouterr().out.splitlines()[-1].startswith("git tag ejk-types-v")
    bump(workspace, "ejk-types", "0.2.0")
    assert release.main(["--all", "--check"]) == 1
    assert "refused: ejk-kernels-pallas 0.1.0 asks for ejk-types~=0.1.0" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        release.main(["ejk-type"])
    assert "name one or more of ejk-kernels-pallas" in capsys.readouterr().err
