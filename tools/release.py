"""Check and build one package for release: ``release.py ejk-ops``.

``build`` makes an sdist, and a wheel from it. What it does not check is checked here: that the
version and the top heading of the changelog agree, that every dependent in the workspace admits the
new version and the package admits its siblings' versions, that the wheel holds only its own part of
the namespace and can be imported. A dirty tree is refused, as is a tag of this version on another
commit; hatchling leaves out files that git ignores. After that, a version without a tag gets the
lines that tag the commit and push the tag; this program runs neither. A bill of materials and
checksums are written next to what was built. Packages are released one at a time; a breaking change
in one is refused until the ranges of its dependents say that they were adapted.

    release.py PACKAGE [--out DIR]     check, build and import, then print the tag to make
    release.py --all --check           the checks of versions for all six, without git or building
    release.py --all --ranges          of those, whether the packages admit each other
"""

from __future__ import annotations

import argparse
import re
import shutil
import subprocess
import sys
import tempfile
import tomllib
import zipfile
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from packaging.requirements import Requirement
from packaging.version import InvalidVersion, Version

from distribution_files import metadata_problems, write_side_files

ROOT = Path(__file__).resolve().parent.parent
HEADING = re.compile(r"^## +\[?([^\]\s]+)", re.MULTILINE)
RELATIVE_LINK = re.compile(r"\]\((?!https?://|#)[^)]*\)")
ASSIGNMENT = re.compile(r'^__version__ = "([^"]+)"$', re.MULTILINE)


class ReleaseError(Exception):
    """The package cannot be released as it stands."""


@dataclass(frozen=True)
class Package:
    """One member of the workspace, as its files describe it."""

    folder: Path
    name: str
    version_file: Path
    requirements: tuple[Requirement, ...]
    scripts: tuple[str, ...] = ()

    @property
    def version(self) -> str:
        match = ASSIGNMENT.search(self.version_file.read_text())
        if match is None:
            raise ReleaseError(f'{self.version_file} has no line __version__ = "..."')
        return match[1]

    @property
    def portion(self) -> str:
        """The folder of the wheel that belongs to this package, such as ``ejkernel/ops``."""
        return self.version_file.parent.relative_to(self.folder / "src").as_posix()

    @property
    def tag(self) -> str:
        return f"{self.name}-v{self.version}"


def read_package(folder: Path) -> Package:
    settings = tomllib.loads((folder / "pyproject.toml").read_text())
    project = settings["project"]
    stated = list(project.get("dependencies", ()))
    for extra in project.get("optional-dependencies", {}).values():
        stated += extra
    return Package(
        folder=folder,
        name=project["name"],
        version_file=folder / settings["tool"]["hatch"]["version"]["path"],
        requirements=tuple(map(Requirement, stated)),
        # modules of scripts that stand outside the namespace
        scripts=tuple(
            f"{target.partition(':')[0]}.py"
            for target in project.get("scripts", {}).values()
            if "." not in target.partition(":")[0]
        ),
    )


def read_workspace(root: Path) -> dict[str, Package]:
    members = map(read_package, sorted(p.parent for p in root.glob("packages/*/pyproject.toml")))
    return {member.name: member for member in members}


def version_problems(package: Package) -> list[str]:
    """Returns what is wrong with the version and the top heading of the changelog."""
    try:
        Version(package.version)
    except InvalidVersion:
        return [f"{package.name}: {package.version!r} is not a version"]
    changelog = package.folder / "CHANGELOG.md"
    heading = HEADING.search(changelog.read_text()) if changelog.is_file() else None
    if heading is None:
        return [f"{package.name}: CHANGELOG.md has no heading such as '## {package.version}'"]
    if heading[1] == package.version:
        return []
    return [
        f"{package.name}: the version is {package.version}, "
        f"the top heading of CHANGELOG.md is {heading[1]}"
    ]


def range_problems(package: Package, workspace: dict[str, Package]) -> list[str]:
    """Returns siblings whose range excludes this version, and siblings that this one excludes."""
    problems: list[str] = []
    for dependent in workspace.values():
        for need in dependent.requirements:
            target = workspace.get(need.name)
            if target is None or package.name not in (dependent.name, target.name):
                continue
            if not need.specifier.contains(target.version, prereleases=True):
                problems.append(
                    f"{dependent.name} {dependent.version} asks for "
                    f"{need.name}{need.specifier}, which excludes {target.version}: adapt it, then "
                    f"raise the range in packages/{dependent.folder.name}/pyproject.toml"
                )
    return problems


def readme_problems(package: Package) -> list[str]:
    """Returns links that lead nowhere on a package index."""
    links = RELATIVE_LINK.findall((package.folder / "README.md").read_text())
    return [f"{package.name}: README.md has the relative link {link[1:]}" for link in links]


def problems_of(
    packages: Iterable[Package], workspace: dict[str, Package], *, ranges_only: bool = False
) -> list[str]:
    """Returns everything that stands in the way of releasing these, each once."""
    problems: list[str] = []
    for package in packages:
        problems += range_problems(package, workspace)
        if not ranges_only:
            problems += version_problems(package) + readme_problems(package)
    return list(dict.fromkeys(problems))


def refuse(problems: list[str]) -> None:
    """Raises ReleaseError if there are any."""
    if problems:
        raise ReleaseError("\n".join(problems))


def check(package: Package, workspace: dict[str, Package]) -> None:
    refuse(problems_of([package], workspace))


def build(package: Package, out: Path) -> list[Path]:
    """Builds an sdist and a wheel from that sdist with the hatchling of this environment."""
    command = [sys.executable, "-m", "build", "--no-isolation", "-o", str(out), str(package.folder)]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise ReleaseError(f"{package.name}: the build failed\n{done.stdout}{done.stderr}")
    stem = f"{package.name.replace('-', '_')}-{package.version}"
    return [out / f"{stem}.tar.gz", out / f"{stem}-py3-none-any.whl"]


def wheel_problems(package: Package, wheel: Path) -> list[str]:
    """Returns files outside the package's part of the namespace, and missing files."""
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
    info = f"{package.name.replace('-', '_')}-{package.version}.dist-info/"
    portion = package.portion + "/"
    outside = [n for n in names if not n.startswith((portion, info)) and n not in package.scripts]
    needed = [portion + "__init__.py", portion + "py.typed", f"{info}licenses/LICENSE"]
    missing = [name for name in (*needed, *package.scripts) if name not in names]
    return [
        *(f"{wheel.name} holds {name}, outside {portion}" for name in outside),
        *(f"{wheel.name} lacks {name}" for name in missing),
    ]


IMPORT = """
import importlib, sys
sys.path.insert(0, sys.argv[1])
module = importlib.import_module(sys.argv[2])
assert module.__file__.startswith(sys.argv[1]), f"imported {module.__file__}"
assert module.__version__ == sys.argv[3], f"its version is {module.__version__}"
"""


def import_problems(package: Package, wheel: Path) -> list[str]:
    """Returns what importing the wheel says, next to the siblings of this environment."""
    name = package.portion.replace("/", ".")
    folder = wheel.parent / "unpacked"
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(folder)
    command = [sys.executable, "-c", IMPORT, str(folder), name, package.version]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True)
    return [f"{wheel.name}: import {name} fails\n{done.stderr}"] if done.returncode else []


def build_checked(package: Package, out: Path) -> list[Path]:
    sdist, wheel = build(package, out)
    refuse(wheel_problems(package, wheel) + metadata_problems(wheel))
    return [sdist, wheel]


def release(package: Package, out: Path) -> list[Path]:
    """Builds into ``out`` what passes every check: sdist, wheel, bill of materials, checksums."""
    with tempfile.TemporaryDirectory(prefix="ejkernel-release-") as scratch:
        built = build_checked(package, Path(scratch))
        refuse(import_problems(package, built[1]))
        built += write_side_files(*built)
        out.mkdir(parents=True, exist_ok=True)
        return [Path(shutil.copy(path, out)) for path in built]


def git(*words: str) -> str:
    done = subprocess.run(["git", *words], cwd=ROOT, capture_output=True, text=True)
    if done.returncode:
        raise ReleaseError(f"git {' '.join(words)}: {done.stderr.strip()}")
    return done.stdout.strip()


def commit_to_build(package: Package) -> tuple[str, bool]:
    """Returns HEAD, and whether the version's tag names it already.

    Raises:
        ReleaseError: something is not committed, or the tag names another commit.
    """
    changed = git("status", "--porcelain", "--untracked-files=all")
    if changed:
        raise ReleaseError(f"the tree has changes that are in no commit:\n{changed}")
    head = git("rev-parse", "HEAD")
    if not git("tag", "--list", package.tag):
        return head, False
    tagged = git("rev-parse", f"{package.tag}^{{commit}}")
    if tagged == head:
        return head, True
    raise ReleaseError(
        f"{package.tag} names {tagged[:12]}, HEAD is {head[:12]}: check the tag out, or raise the "
        "version"
    )


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("package", nargs="*", help="distribution names, such as ejk-ops")
    parser.add_argument("--all", action="store_true", help="every package of the workspace")
    parser.add_argument("--check", action="store_true", help="check only, build nothing")
    parser.add_argument("--ranges", action="store_true", help="check ranges only, build nothing")
    parser.add_argument("--out", type=Path, default=ROOT / "dist", help="folder for the builds")
    options = parser.parse_args(argv)
    workspace = read_workspace(ROOT)
    names = list(workspace) if options.all else options.package
    unknown = [name for name in names if name not in workspace]
    if unknown or not names:
        parser.error(f"name one or more of {', '.join(workspace)}")
    packages = [workspace[name] for name in names]
    try:
        refuse(problems_of(packages, workspace, ranges_only=options.ranges))
        for package in packages if not options.ranges else ():
            if options.check:
                print(f"{package.name} {package.version}: version, changelog and ranges agree")
                continue
            commit, is_tagged = commit_to_build(package)
            for path in release(package, options.out):
                print(path)
            if not is_tagged:
                print(f"{package.name} {package.version} has no tag. To release what was built:")
                print(f"git tag {package.tag} {commit}")
                print(f"git push origin {package.tag}")
    except ReleaseError as error:
        print(f"refused: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
