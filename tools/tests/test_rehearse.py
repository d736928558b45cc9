"""Tests of the files next to a release's wheels, the local index and the order of a rehearsal."""

import json
import re
import urllib.request
import zipfile
from types import SimpleNamespace
from urllib.error import HTTPError

import pytest
from packaging.requirements import Requirement

import distribution_files
import local_index
import rehearse
import release

METADATA = """\
Metadata-Version: 2.4
Name: a-kernel
Version: 1.2.3
Summary: A kernel.
License-Expression: Apache-2.0
License-File: LICENSE
Requires-Python: >=3.11
Description-Content-Type: text/markdown
Requires-Dist: jax<0.13,>=0.10
Requires-Dist: numpy>=1.26
Requires-Dist: rich>=13; extra == 'cli'
Requires-Dist: jax[cuda12]<0.13; extra == 'cuda'
Requires-Dist: a-kernel[cli]; extra == 'all'

"""


@pytest.fixture
def built(tmp_path):
    """The sdist and the wheel of a package, as far as they are read."""
    sdist, wheel = tmp_path / "a_kernel-1.2.3.tar.gz", tmp_path / "a_kernel-1.2.3-py3-none-any.whl"
    sdist.write_bytes(b"source")
    write_wheel(wheel, METADATA + "What it is for. " * 30)
    return sdist, wheel


def write_wheel(path, metadata):
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("a_kernel-1.2.3.dist-info/METADATA", metadata)


def test_the_bill_of_materials_is_cyclonedx(built):
    """Required fields, patterns and unique references of the CycloneDX 1.6 schema."""
    bill_file, sums = distribution_files.write_side_files(*built)
    bill = json.loads(bill_file.read_text())
    assert (bill["bomFormat"], bill["specVersion"], bill["version"]) == ("CycloneDX", "1.6", 1)
    assert re.fullmatch(r"urn:uuid:[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}", bill["serialNumber"])
    package = bill["metadata"]["component"]
    components = [package, *bill["components"]]
    for component in components:
        assert component["type"] == "library" and component["name"]
        assert re.fullmatch(r"pkg:pypi/[a-z0-9-]+(@1\.2\.3)?", component["purl"])
        assert component.get("scope", "required") in ("required", "optional")
    refs = [component["bom-ref"] for component in components]
    assert len(set(refs)) == len(refs)
    assert [d["ref"] for d in bill["dependencies"]] == refs
    assert bill["dependencies"][0]["dependsOn"] == refs[1:]
    assert package["licenses"] == [{"expression": "Apache-2.0"}]
    for file, path in zip(package["externalReferences"], reversed(built), strict=True):
        assert (file["type"], file["url"]) == ("distribution", path.name)
        (digest,) = file["hashes"]
        assert digest == {"alg": "SHA-256", "content": distribution_files.sha256(path)}
        assert re.fullmatch(r"[0-9a-f]{64}", digest["content"])
    scopes = {c["name"]: c["scope"] for c in bill["components"]}
    assert scopes == {"jax": "required", "numpy": "required", "rich": "optional"}
    jax = next(c for c in bill["components"] if c["name"] == "jax")
    assert [p["value"] for p in jax["properties"]] == [
        "jax<0.13,>=0.10", 'jax[cuda12]<0.13; extra == "cuda"',
    ]  # fmt: skip
    lines = [line.split("  ") for line in sums.read_text().splitlines()]
    assert {name for _, name in lines} == {bill_file.name, *(path.name for path in built)}
    assert all(distribution_files.sha256(sums.parent / name) == digest for digest, name in lines)
    before = bill_file.read_bytes()
    assert distribution_files.write_side_files(*built)[0].read_bytes() == before


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("License-Expression: Apache-2.0\n", "", "METADATA lacks License-Expression"),
        ("text/markdown", "text/plain", "the long description is text/plain"),
        ("What it is for. ", "", "the long description has 0 letters"),
        ("numpy>=1.26", "numpy @ https://example.org/numpy.whl", "is an address"),
    ],
)
def test_metadata_that_an_index_shows_wrongly(built, old, new, message):
    assert distribution_files.metadata_problems(built[1]) == []
    write_wheel(built[1], (METADATA + "What it is for. " * 30).replace(old, new))
    (problem,) = distribution_files.metadata_problems(built[1])
    assert message in problem


def test_the_index_serves_what_is_in_the_folder(built):
    sdist, wheel = built
    (wheel.parent / "a_kernel-1.2.3.sha256").write_text("")
    with local_index.serve(wheel.parent) as address:
        assert address.startswith("http://127.0.0.1:")

        def get(where):
            with urllib.request.urlopen(urllib.request.Request(where), timeout=30) as answer:
                return answer.read()

        assert b'<a href="/simple/a-kernel/">a-kernel</a>' in get(address)
        page = get(f"{address}a-kernel/").decode()
        links = dict(re.findall(r'<a href="([^"]+)">([^<]+)</a>', page))
        assert set(links.values()) == {sdist.name, wheel.name}
        for link, name in links.items():
            file, _, digest = link.partition("#sha256=")
            assert digest == distribution_files.sha256(wheel.parent / name)
            assert (
                get(address.removesuffix("/simple/") + file) == (wheel.parent / name).read_bytes()
            )
        for wrong in ("simple/numpy/", "files/a_kernel-1.2.3.sha256", "files/../x"):
            with pytest.raises(HTTPError, match="404"):
                get(address.removesuffix("simple/") + wrong)


def test_packages_are_uploaded_after_what_they_require():
    workspace = release.read_workspace(release.ROOT)
    order = [package.name for package in rehearse.in_order(workspace)]
    assert set(order) == set(workspace) == set(rehearse.CALLS)
    for package in workspace.values():
        needed = {need.name for need in package.requirements} & set(workspace) - {package.name}
        assert all(order.index(name) < order.index(package.name) for name in needed)
    circle = {
        name: SimpleNamespace(name=name, requirements=(Requirement(other),))
        for name, other in (("a", "b"), ("b", "a"))
    }
    with pytest.raises(release.ReleaseError, match="circle"):
        rehearse.in_order(circle)


@pytest.mark.parametrize(
    ("version", "compatible", "breaking"),
    [("0.1.0", "0.1.1", "0.2.0"), ("1.4.9", "1.4.10", "2.0.0")],
)
def test_the_next_versions(version, compatible, breaking):
    assert rehearse.next_versions(version) == (compatible, breaking)


def test_installing_brings_requirements_and_no_extras():
    needs = {
        "a": [Requirement("b~=1.0"), Requirement("jax>=0.10"), Requirement("c; extra == 'x'")],
        "b": [Requirement("d; sys_platform == 'nowhere'")],
        "c": [],
        "d": [],
    }
    assert rehearse.needed_by("a", needs) == {"a", "b"}
