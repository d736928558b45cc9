"""The ejk script next to the other project that is called ejkernel, in a separate environment.

The other project is a stand-in: a distribution of that name with a regular package at the place of
ours. Wheels are unpacked in the order in which pip would write them.
"""

import base64
import hashlib
import json
import subprocess
import sys
import sysconfig
import venv
from pathlib import Path

import pytest

SOURCE = Path(__file__).resolve().parent.parent / "src" / "ejk_command.py"

OURS = {
    "ejk_types-0.1.0": {"ejkernel/types/__init__.py": "ours = True\n"},
    "ejk_modules-0.1.0": {
        "ejk_command.py": SOURCE.read_text(),
        "ejkernel/modules/__init__.py": "ours = True\n",
        "ejkernel/modules/cli/__init__.py": "def command():\n    print('ours')\n    return 0\n",
    },
}
STRANGER = {
    "ejkernel-9.9": {
        "ejkernel/__init__.py": "",
        "ejkernel/types/__init__.py": "ours = False\n",
        "ejkernel/modules/__init__.py": "ours = False\n",
    }
}


@pytest.fixture
def site(tmp_path):
    """The folder for packages of a new environment without pip."""
    venv.create(tmp_path / "env", with_pip=False, symlinks=True)
    return Path(sysconfig.get_path("purelib", vars={"base": str(tmp_path / "env")}))


def install(site, distributions):
    for name, files in distributions.items():
        info = f"{name}.dist-info"
        title, version = name.split("-")
        metadata = f"Metadata-Version: 2.1\nName: {title.replace('_', '-')}\nVersion: {version}\n"
        origin = json.dumps({"url": f"file:///clone/packages/{title}", "dir_info": {}})
        inside = {**files, f"{info}/METADATA": metadata, f"{info}/direct_url.json": origin}
        record = []
        for path, text in inside.items():
            digest = hashlib.sha256(text.encode()).digest()
            code = base64.urlsafe_b64encode(digest).decode().rstrip("=")
            record.append(f"{path},sha256={code},{len(text)}\n")
            (site / path).parent.mkdir(parents=True, exist_ok=True)
            (site / path).write_text(text)
        (site / info / "RECORD").write_text("".join(record) + f"{info}/RECORD,,\n")


def uninstall(site, distributions):
    for name, files in distributions.items():
        for path in [*files, *(f"{name}.dist-info/{f}" for f in ("METADATA", "RECORD"))]:
            (site / path).unlink(missing_ok=True)
        (site / f"{name}.dist-info/direct_url.json").unlink()
        (site / f"{name}.dist-info").rmdir()


def ejk(site, *words):
    python = site.parents[2] / "bin" / "python"
    code = "import sys; from ejk_command import main; sys.exit(main())"
    done = subprocess.run([python, "-I", "-c", code, *words], capture_output=True, text=True)
    return done.returncode, done.stdout, done.stderr


@pytest.mark.skipif(sys.platform == "win32", reason="layout of environments")
@pytest.mark.parametrize("order", ["ours first", "theirs first"])
def test_doctor_names_the_mixture_and_its_repair(site, order):
    for group in (OURS, STRANGER) if order == "ours first" else (STRANGER, OURS):
        install(site, group)
    status, out, _ = ejk(site, "doctor")
    assert status == 1
    assert "the distribution ejkernel 9.9 is another project" in out
    assert "ejkernel/__init__.py is not ours" in out
    overwritten = "ejk-types: ejkernel/types/__init__.py overwritten" in out
    assert overwritten == (order == "ours first")
    line = out.splitlines()[-1].strip()
    assert "uninstall -y ejkernel ejk-types ejk-modules" in line
    assert line.endswith("install --no-deps /clone/packages/ejk_types /clone/packages/ejk_modules")
    status, out, error = ejk(site, "explain", "flash_attention")
    assert status == 1 and "This repairs it:" in error and not out
    report = json.loads(ejk(site, "doctor", "--json")[1])
    assert report["usable"] is False and report["checks"][0]["status"] == "fail"


def test_every_command_names_what_uninstalling_the_other_took_along(site):
    install(site, OURS)
    install(site, STRANGER)
    uninstall(site, STRANGER)
    status, out, _ = ejk(site, "doctor")
    assert status == 1 and "ejk-types: ejkernel/types/__init__.py missing" in out
    assert ejk(site, "explain", "flash_attention") == (1, "", out)  # a command that fails: stderr
    error = json.loads(ejk(site, "--json", "explain", "flash_attention")[1])["error"]
    assert "ejkernel/types/__init__.py missing" in error


def test_a_sound_installation_is_handed_over_to(site):
    install(site, OURS)
    assert ejk(site, "doctor") == (0, "ours\n", "")
    assert ejk(site, "explain") == (0, "ours\n", "")
