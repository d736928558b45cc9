"""Reading the metadata of a built wheel, and writing checksums and a bill of materials next to it.

The bill of materials is CycloneDX 1.6: the package with the SHA-256 of its files, and every
requirement that the wheel declares, by name and range. It holds no time and no random number: a
repeated build writes the same file.
"""

from __future__ import annotations

import hashlib
import json
import uuid
import zipfile
from collections.abc import Sequence
from email import message_from_bytes
from email.message import Message
from pathlib import Path
from typing import Any

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

NEEDED_FIELDS = (
    "Name", "Version", "Summary", "License-Expression", "License-File", "Requires-Python",
    "Description-Content-Type",
)  # fmt: skip
MIN_DESCRIPTION = 200
"""Letters of a long description; a shorter one is a file that was not problems."""


def read_metadata(wheel: Path) -> Message:
    """Returns the METADATA of a wheel; its payload is the long description."""
    with zipfile.ZipFile(wheel) as archive:
        (name,) = (n for n in archive.namelist() if n.endswith(".dist-info/METADATA"))
        return message_from_bytes(archive.read(name))


def requirements(metadata: Message) -> list[Requirement]:
    return [Requirement(text) for text in metadata.get_all("Requires-Dist", [])]


def metadata_problems(wheel: Path) -> list[str]:
    """Returns what an index would refuse or show wrongly: fields that lack, a description that is
    empty or no Markdown, requirements by address."""
    metadata = read_metadata(wheel)
    problems = [
        f"{wheel.name}: METADATA lacks {name}" for name in NEEDED_FIELDS if not metadata[name]
    ]
    kind = metadata["Description-Content-Type"] or ""
    if kind and not kind.startswith("text/markdown"):
        problems.append(f"{wheel.name}: the long description is {kind}, expected text/markdown")
    letters = len(str(metadata.get_payload()).strip())
    if letters < MIN_DESCRIPTION:
        problems.append(f"{wheel.name}: the long description has {letters} letters")
    problems += [
        f"{wheel.name}: the requirement {need} is an address, which an index refuses"
        for need in requirements(metadata)
        if need.url
    ]
    return problems


def sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def checksums(files: Sequence[Path]) -> str:
    """Returns lines that ``sha256sum -c`` takes."""
    return "".join(f"{sha256(path)}  {path.name}\n" for path in sorted(files))


def bill_of_materials(wheel: Path, others: Sequence[Path] = ()) -> dict[str, Any]:
    """Returns the CycloneDX document of a wheel; ``others``: further files of the distribution."""
    metadata = read_metadata(wheel)
    name, version = metadata["Name"], metadata["Version"]
    package = f"pkg:pypi/{canonicalize_name(name)}@{version}"
    needs: dict[str, list[Requirement]] = {}
    for need in requirements(metadata):
        needs.setdefault(canonicalize_name(need.name), []).append(need)
    needs.pop(canonicalize_name(name), None)  # one extra that names another of the same package
    refs = [f"pkg:pypi/{need}" for need in sorted(needs)]
    return {
        "$schema": "http://cyclonedx.org/schema/bom-1.6.schema.json",
        "bomFormat": "CycloneDX",
        "specVersion": "1.6",
        "serialNumber": f"urn:uuid:{uuid.uuid5(uuid.NAMESPACE_URL, package + sha256(wheel))}",
        "version": 1,
        "metadata": {
            "component": {
                "type": "library",
                "bom-ref": package,
                "name": name,
                "version": version,
                "description": metadata["Summary"],
                "licenses": [{"expression": metadata["License-Expression"]}],
                "purl": package,
                "externalReferences": [_distribution(path) for path in (wheel, *sorted(others))],
            },
        },
        "components": [_component(need, needs[need]) for need in sorted(needs)],
        "dependencies": [{"ref": package, "dependsOn": refs}, *({"ref": ref} for ref in refs)],
    }


def _distribution(path: Path) -> dict[str, Any]:
    hashes = [{"alg": "SHA-256", "content": sha256(path)}]
    return {"type": "distribution", "url": path.name, "hashes": hashes}


def _component(name: str, needs: Sequence[Requirement]) -> dict[str, Any]:
    always = any(need.marker is None or "extra" not in str(need.marker) for need in needs)
    return {
        "type": "library",
        "bom-ref": f"pkg:pypi/{name}",
        "name": name,
        "scope": "required" if always else "optional",
        "purl": f"pkg:pypi/{name}",
        "properties": [{"name": "python:requirement", "value": str(need)} for need in needs],
    }


def write_side_files(sdist: Path, wheel: Path) -> list[Path]:
    """Writes the bill of materials and the checksums of all three files, next to the wheel."""
    stem = sdist.name.removesuffix(".tar.gz")
    bill, sums = wheel.parent / f"{stem}.cdx.json", wheel.parent / f"{stem}.sha256"
    bill.write_text(json.dumps(bill_of_materials(wheel, [sdist]), indent=2) + "\n")
    sums.write_text(checksums([sdist, wheel, bill]))
    return [bill, sums]
