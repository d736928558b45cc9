"""Types as a user's checker sees them; ``.ci/run`` asks three checkers, the suite the quick one."""

import shutil

import stubs
import user_types


def test_stubs_are_up_to_date(capsys):
    assert stubs.main([]) == 0, f"python tools/stubs.py --write\n{capsys.readouterr().out}"


def test_a_stale_stub_is_named_and_repaired(tmp_path, monkeypatch, capsys):
    shutil.copytree(stubs.OPERATIONS, tmp_path, dirs_exist_ok=True)
    (tmp_path / "flash_attention.pyi").unlink()
    monkeypatch.setattr(stubs, "OPERATIONS", tmp_path)
    assert stubs.main([]) == 1
    assert "flash_attention.pyi: out of date" in capsys.readouterr().out
    assert stubs.main(["--write"]) == 0 and stubs.main([]) == 0
    assert (tmp_path / "flash_attention.pyi").read_text().count("@overload") == 3


def test_a_users_code_has_types(tmp_path):
    assert user_types.complaints("ty", tmp_path) == ""


def test_wrong_code_is_rejected(tmp_path, monkeypatch):
    wrong = tmp_path / "wrong.py"
    wrong.write_text(
        "import jax.numpy as jnp\n"
        "from ejkernel.modules import flash_attention\n"
        "x = jnp.ones((1, 8, 2, 16))\n"
        "out, lse = flash_attention(x, x, x)\n"
        "number: int = flash_attention(x, x, x)\n"
        "flash_attention(x, x, x, causal=3.5)\n"
    )
    monkeypatch.setattr(user_types, "SCRIPTS", (str(wrong),))
    report = user_types.complaints("ty", tmp_path)
    assert "is not assignable to `int`" in report and "Found 2 diagnostics" in report
