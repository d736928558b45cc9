import re
import shutil
import subprocess
import tarfile
import tomllib
import zipfile
from pathlib import Path

import pytest

import dev
import not_installable
import release

ROOT = Path(release.__file__).resolve().parent.parent


@pytest.fixture
def workspace(tmp_path):
    """A copy of the files that the checks read: the six packages without their code."""
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
    title, _, others = changelog.read_text().partition("\n\n")
    changelog.write_text(f"{title}\n\n## {version}\n\nA change.\n\n{others}")


def test_the_workspace_can_be_released_as_it_stands():
    members = release.read_workspace(ROOT)
    assert set(members) == {f"ejk-{name}" for name in dev.PACKAGES}
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
    assert {line.split()[0] for line in problems} == set(members) - {"ejk-types", "ejk-ops"}
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


def test_stray_files_are_not_shipped(workspace, tmp_path):
    """Every package lists the same endings, so one build shows what all of them ship."""
    settings = [tomllib.loads(p.read_text()) for p in workspace.glob("packages/*/pyproject.toml")]
    targets = [s["tool"]["hatch"]["build"]["targets"] for s in settings]
    assert len(targets) == 6 and all(target == targets[0] for target in targets)

    package = release.read_package(workspace / "packages/ejk-ops")
    shipped = {"tables/gpu.json", "inner/a.html", "inner/a.pyi"}
    stray = {".env", "notes.txt", "key.pem", "a.py~", "inner/id_rsa", "inner/secrets.json"}
    tests = {"test_a.py", "expected.json"}
    portion = "src/ejkernel/ops"
    made = {f"{portion}/{name}" for name in shipped | stray}
    for name in made | {f"tests/{name}" for name in tests} | {"tests/.env", ".env"}:
        (package.folder / name).parent.mkdir(parents=True, exist_ok=True)
        (package.folder / name).write_text("")

    sdist, wheel = release.build_checked(package, tmp_path / "dist")
    with zipfile.ZipFile(wheel) as archive:
        in_wheel = {f"src/{name}" for name in archive.namelist()}
    with tarfile.open(sdist) as source:
        in_sdist = {name.partition("/")[2] for name in source.getnames()}
    for names in (in_wheel, in_sdist):
        assert names & made == {f"{portion}/{name}" for name in shipped}
    assert {n for n in in_sdist if n.startswith("tests/")} == {f"tests/{name}" for name in tests}
    assert ".env" not in in_sdist


def test_a_namespace_init_in_a_wheel_is_refused(workspace, tmp_path):
    package = release.read_package(workspace / "packages/ejk-kernels-pallas")
    (package.folder / "src/ejkernel/__init__.py").write_text("")
    (package.version_file.parent / "py.typed").unlink()
    with pytest.raises(release.ReleaseError) as refused:
        release.build_checked(package, tmp_path / "dist")
    assert "holds ejkernel/__init__.py, outside ejkernel/kernels/pallas/" in str(refused.value)
    assert "lacks ejkernel/kernels/pallas/py.typed" in str(refused.value)


def test_command_line(workspace, monkeypatch, capsys):
    monkeypatch.setattr(release, "ROOT", workspace)
    assert release.main(["--all", "--check"]) == 0
    assert "ejk-types 0.1.0: version, changelog and ranges agree" in capsys.readouterr().out
    with pytest.raises(SystemExit):
        release.main(["ejk-type"])
    assert "name one or more of ejk-kernels-pallas" in capsys.readouterr().err


@pytest.mark.parametrize("options", [["--all", "--check"], ["--all", "--ranges"], ["ejk-ops"]])
def test_an_incompatible_bump_lists_every_dependent(workspace, monkeypatch, capsys, options):
    monkeypatch.setattr(release, "ROOT", workspace)
    bump(workspace, "ejk-ops", "0.2.0")
    assert release.main(options) == 1
    error = capsys.readouterr().err
    for name in ("ejk-kernels-xla", "ejk-kernels-triton", "ejk-kernels-pallas", "ejk-modules"):
        assert f"{name} 0.1.0 asks for ejk-ops~=0.1.0" in error
        assert f"raise the range in packages/{name}/pyproject.toml" in error


def test_links_that_lead_nowhere_on_an_index_are_refused(workspace):
    members = release.read_workspace(workspace)
    readme = workspace / "packages/ejk-types/README.md"
    readme.write_text("[a](https://example.org) [b](#use) [c](../../docs/masks.md)\n")
    assert release.readme_problems(members["ejk-types"]) == [
        "ejk-types: README.md has the relative link (../../docs/masks.md)"
    ]


@pytest.fixture
def repository(workspace, monkeypatch):
    """The workspace as a git repository; ejk-ops can be imported."""
    for name in ("GIT_DIR", "GIT_WORK_TREE", "GIT_INDEX_FILE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(release, "ROOT", workspace)
    source = workspace / "packages/ejk-ops/src/ejkernel/ops/__init__.py"
    source.write_text("from ejkernel.ops._version import __version__\n")
    git("init", "-q")
    git("config", "user.name", "tester")
    git("config", "user.email", "tester@example.org")
    commit("first")
    return workspace


def git(*words):
    subprocess.run(["git", *words], cwd=release.ROOT, check=True, capture_output=True)


def commit(message):
    git("add", "-A")
    git("commit", "-qm", message)


def refused(capsys, *options):
    assert release.main(list(options)) == 1
    return capsys.readouterr().err


def test_a_release_is_the_commit_and_nothing_else(repository, tmp_path, capsys):
    out = tmp_path / "elsewhere"
    stray = repository / "packages/ejk-ops/src/ejkernel/ops/notes.py"
    stray.write_text("not for the world")
    assert "ejkernel/ops/notes.py" in refused(capsys, "ejk-ops", "--out", str(out))
    ignored = ("notes.py", "elsewhere/", ".gitignore")
    (repository / ".gitignore").write_text("\n".join(ignored))  # now git is silent
    assert release.main(["ejk-ops", "--out", str(out)]) == 0
    head = release.git("rev-parse", "HEAD")
    wheel = out / "ejk_ops-0.1.0-py3-none-any.whl"
    sdist = out / "ejk_ops-0.1.0.tar.gz"
    built = [sdist, wheel, out / "ejk_ops-0.1.0.cdx.json", out / "ejk_ops-0.1.0.sha256"]
    assert capsys.readouterr().out.splitlines() == [
        *map(str, built), "ejk-ops 0.1.0 has no tag. To release what was built:",
        f"git tag ejk-ops-v0.1.0 {head}", "git push origin ejk-ops-v0.1.0",
    ]  # fmt: skip
    assert release.git("tag") == ""
    with zipfile.ZipFile(wheel) as archive:
        assert not any("notes" in name for name in archive.namelist())
    git("tag", "ejk-ops-v0.1.0", head)
    assert release.main(["ejk-ops", "--out", str(out)]) == 0
    assert capsys.readouterr().out.splitlines() == list(map(str, built))

    stray.unlink()
    (repository / "new.txt").write_text("")
    commit("second")
    assert "names " + head[:12] in refused(capsys, "ejk-ops")


def test_a_wheel_that_cannot_be_imported_gets_no_tag(repository, tmp_path, capsys):
    source = repository / "packages/ejk-ops/src/ejkernel/ops/__init__.py"
    source.write_text(source.read_text() + "import ejkernel.ops.forgotten\n")
    commit("broken")
    out = tmp_path / "elsewhere"
    assert release.main(["ejk-ops", "--out", str(out)]) == 1
    told = capsys.readouterr()
    assert "import ejkernel.ops fails" in told.err and "ejkernel.ops.forgotten" in told.err
    assert told.out == "" and "git tag" not in told.err and not out.exists()


def test_the_root_says_what_to_install():
    system = tomllib.loads((ROOT / "pyproject.toml").read_text())["build-system"]
    assert system["build-backend"] == not_installable.__name__
    for hook in ("prepare_metadata_for_build_wheel", "build_wheel", "build_editable"):
        with pytest.raises(SystemExit) as refused:
            getattr(not_installable, hook)("wheels")
    named = {Path(name).name for name in re.findall(r"\./packages/\S+", str(refused.value))}
    members = release.read_workspace(ROOT)
    needed = {need.name for need in members["ejk-modules"].requirements if need.name in members}
    assert named == needed - {"ejk-kernels-triton", "ejk-modules"} | {"ejk-modules"}


@pytest.mark.parametrize("package", dev.PACKAGES)
def test_changelogs_have_one_style(package):
    """A title, a version with a sentence, one bullet a change; entries end as sentences do."""
    text = (ROOT / f"packages/ejk-{package}/CHANGELOG.md").read_text()
    title, _, versions = text.partition("\n\n")
    assert title == f"# Changelog of ejk-{package}"
    for version in versions.split("## ")[1:]:
        number, sentence, bullets = version.split("\n\n", 2)
        assert re.fullmatch(r"\d+\.\d+\.\d+", number) and sentence.endswith(".")
        entries = re.split(r"\n(?=- )", bullets.strip())
        wrong = [e for e in entries if not re.fullmatch(r"- [^\n]+(\n  [^ \n][^\n]*)*[.:)]", e)]
        assert not wrong, wrong
        assert max(map(len, bullets.splitlines())) <= 130
