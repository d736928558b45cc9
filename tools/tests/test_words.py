"""The check of names, docstrings and comments."""

from __future__ import annotations

import pytest

import words

SOURCE = '''"""Splits of a sequence."""

def run(given):  # whoever calls it
    """What is left of ``those of`` the pages."""
    step = tile_walk = given
    return step
'''


def findings(text):
    return [(line, word) for line, word, _ in sorted(words.check_python(text))]


def test_findings_of_a_source():
    assert findings(SOURCE) == [
        (3, "def run"),
        (3, "name given"),
        (3, "whoever"),
        (4, "docstring without a subject: What"),
        (4, "what is left"),
        (5, "name tile_walk"),
    ]


@pytest.mark.parametrize(
    "source",
    [
        "class Scheduler:\n    def run(self): ...",  # the class gives the object
        "kept_pages = given_lengths = 1",  # a participle in front of its noun
        'def load():\n    """Returns the dot product of ``what is left``, code included."""',
        "x = 'whoever'",  # text for users has its own rules
    ],
)
def test_no_findings(source):
    assert not findings(source)


def test_code_in_markdown_is_left_out():
    text = "Walk over pages\n```\nwalk\n```\n`walk` beside it\n"
    assert [line for line, *_ in words.check_markdown(text)] == [1, 5]


@pytest.mark.parametrize(("ceiling", "status"), [(1, 1), (2, 0), (3, 0)])
def test_a_part_may_have_as_many_findings_as_its_ceiling(
    ceiling, status, tmp_path, monkeypatch, capsys
):
    path = tmp_path / "packages" / "ejk-ops" / "src" / "module.py"
    path.parent.mkdir(parents=True)
    path.write_text("given = 1  # walked\n")
    monkeypatch.setattr(words, "ROOT", tmp_path)
    monkeypatch.setattr(words, "CEILINGS", {"ejk-ops": ceiling})
    assert words.main([]) == status
    out, err = capsys.readouterr()
    assert ("module.py:1: name given" in out) == bool(status)
    assert ("2 findings, at most 1" in err) == bool(status)
    assert ("lower its ceiling" in out) == (ceiling == 3)


def test_a_new_part_has_no_findings(tmp_path, monkeypatch):
    (tmp_path / "tools").mkdir()
    (tmp_path / "tools" / "new.py").write_text("rest = 1")
    monkeypatch.setattr(words, "ROOT", tmp_path)
    monkeypatch.setattr(words, "CEILINGS", {})
    assert words.main([]) == 1


@pytest.mark.parametrize("argument", ["tools", "tools/module.py"])
def test_findings_of_a_path_are_listed(argument, tmp_path, monkeypatch, capsys):
    (tmp_path / "tools").mkdir()
    (tmp_path / "tools" / "module.py").write_text("rest = 1")
    (tmp_path / "tools" / "results.md").write_text("whoever")
    monkeypatch.setattr(words, "ROOT", tmp_path)
    assert words.main([str(tmp_path / argument)]) == 0
    out = capsys.readouterr().out
    assert "module.py:1: name rest" in out and "results.md" not in out
