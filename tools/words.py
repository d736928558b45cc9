"""Checks names, docstrings and comments for words that tell a reader nothing.

    python tools/words.py            compare the findings of each part of the tree with its ceiling
    python tools/words.py PATH...    list the findings of files and folders

A part of the tree with more findings than its ceiling fails the check; ceilings only go down.
"""

from __future__ import annotations

import ast
import io
import re
import sys
import tokenize
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[1]
SOURCES = ("packages/*/src/**/*.py", "tools/**/*.py")
TEXTS = ("docs/**/*.md", "README.md", "CONTRIBUTING.md")
CEILINGS = {
    "docs": 0,
    "ejk-kernels-pallas": 1,
    "ejk-kernels-triton": 3,
    "ejk-kernels-xla": 0,
    "ejk-modules": 4,
    "ejk-ops": 2,
    "ejk-types": 1,
    "tools": 1,
}
"""The most findings in each part of the tree; 0 for a part without an entry."""

# names that fit any value, and what a name says instead
EMPTY_NAMES = {
    "said found what how which": "name the value: candidate, layout, reason",
    "given wanted asked": "operands, requested, or name the value",
    "known kept held own some each": "name the values: kept_pages, known_lengths",
    "rest more": "tail, remaining_pages, has_work",
    "of it one": "name the thing",
    "place there here": "offset, position, index, path",
    "whole": "full, or the thing",
}
# words of a private language, in names, and the words of the field
NAME_WORDS = {
    "anew": "again",
    "beside": "hybrid, extra, next to",
    "conjuncts": "terms",
    "cuts": "splits",
    "deal dealt": "schedule, assign",
    "facts": "params, metadata",
    "honour honouring": "apply",
    "hopeless": "pruned",
    "indifferent": "untuned_arguments",
    "likeness nearness": "similarity, distance",
    "localise": "to_shard",
    "quads": "vector4",
    "ruler": "position_source",
    "settle settled": "canonicalize, canonical",
    "stroke": "the suffix of a decayed value",
    "tickets": "tile_counter",
    "walk walks walked": "loop, range, iterate",
    "whoever": "caller",
    "widen": "convert",
}
# a function of a module is a verb and its object; a method may take the object from its class
BARE_VERBS = "run do go get make take give pull push look launch walk step find settle"
# phrases in comments, docstrings and Markdown
PHRASES = {
    r"anew": "again",
    r"be it": "whether",
    r"beside": "next to, in addition to",
    r"besides that": "also",
    r"(?:in|by) turns?": "alternately, one after another, interleaved",
    r"deals? out|dealt(?: out)?": "assign, schedule",
    r"(?:is|are|was|were) told": "receive",
    r"facts?": "static properties, parameters, metadata",
    r"honou?r(?:s|ed|ing)?": "apply, respect",
    r"namesake": "of the same name",
    r"no number": "NaN",
    r"numbers": "values, elements, indices",
    r"not to be had": "unavailable",
    r"of what": "name the thing",
    r"(?<!dot )(?<!inner )(?<!outer )(?<!matrix )products?(?! of (?:sizes|axes))": "matmul, dot",
    r"settle[sd]?": "canonicalize, resolve",
    r"so many": "the number of",
    r"strokes?": "the suffix",
    r"the card|a card": "the GPU",
    r"the formula": "the reference",
    r"those of": "name the thing",
    r"tickets?": "tile index, work counter",
    r"walk(?:s|ed|ing)?": "loop over, iterate",
    r"what is (?:added|asked|done|given|hidden|kept|left|read|stored|wanted)": "name the thing",
    r"who(?:so)?ever": "the caller, any program",
}
# a docstring begins with a verb or a noun; these begin a clause without a subject
NO_SUBJECT = "as how if in of that those what when where whether which who whose"

_EMPTY = {word: advice for words, advice in EMPTY_NAMES.items() for word in words.split()}
_WORDS = {word: advice for words, advice in NAME_WORDS.items() for word in words.split()}
_PHRASES = [(re.compile(rf"\b(?:{p})\b", re.IGNORECASE), say) for p, say in PHRASES.items()]
_NO_SUBJECT = re.compile(rf"(?:{NO_SUBJECT.replace(' ', '|')})\b", re.IGNORECASE)
_CODE = re.compile(r"``.*?``|`[^`]*`")
_HUMPS = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+|\d+")


class Finding(NamedTuple):
    """A word at a place of a file, and what says more."""

    line: int
    word: str
    advice: str


def check_prose(first: int, text: str) -> Iterator[Finding]:
    """Yields phrases of a text that begins on line ``first``; code in backticks is left out."""
    for number, line in enumerate(text.splitlines(), first):
        line = _CODE.sub("", line)
        for pattern, advice in _PHRASES:
            for match in pattern.finditer(line):
                yield Finding(number, match[0].lower(), advice)


def check_name(line: int, name: str) -> Iterator[Finding]:
    """Yields the words of an identifier that do not describe its value."""
    bare = name.strip("_")
    if bare in _EMPTY:
        yield Finding(line, f"name {name}", _EMPTY[bare])
    for word in dict.fromkeys(w.lower() for w in _HUMPS.findall(name)):
        if word in _WORDS:
            yield Finding(line, f"name {name}", _WORDS[word])


def check_docstring(node: ast.AST) -> Iterator[Finding]:
    """Yields the findings of a docstring: its opening, and phrases."""
    docstring = ast.get_docstring(node, clean=False)  # ty: ignore[invalid-argument-type]
    if docstring is None:
        return
    line = node.body[0].lineno  # ty: ignore[missing-attribute]
    if _NO_SUBJECT.match(docstring.lstrip()):
        opening = docstring.split(None, 1)[0]
        word = f"docstring without a subject: {opening}"
        yield Finding(line, word, "begin with a verb or a noun")
    yield from check_prose(line, docstring)


def names_of(node: ast.AST) -> Iterator[str]:
    """Yields the names that a node of the syntax tree introduces."""
    match node:
        case ast.FunctionDef() | ast.AsyncFunctionDef() | ast.ClassDef():
            yield node.name
        case ast.arg():
            yield node.arg
        case ast.Name(id=name, ctx=ast.Store()) | ast.Attribute(attr=name, ctx=ast.Store()):
            yield name


def check_python(text: str) -> Iterator[Finding]:
    """Yields the findings of a Python source."""
    tree = ast.parse(text)
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            yield from check_docstring(node)
        for name in names_of(node):
            yield from check_name(node.lineno, name)  # ty: ignore[missing-attribute]
    for node in tree.body:
        if isinstance(node, ast.FunctionDef) and node.name.strip("_") in BARE_VERBS.split():
            yield Finding(node.lineno, f"def {node.name}", "a verb and its object")
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type == tokenize.COMMENT:
            yield from check_prose(token.start[0], token.string)


def check_markdown(text: str) -> Iterator[Finding]:
    """Yields the findings of a Markdown text outside its blocks of code."""
    inside = False
    for number, line in enumerate(text.splitlines(), 1):
        if line.lstrip().startswith("```"):
            inside = not inside
        elif not inside:
            yield from check_prose(number, line)


def check_file(path: Path) -> list[Finding]:
    """Returns the findings of a file by line."""
    check = check_markdown if path.suffix == ".md" else check_python
    return sorted(check(path.read_text(encoding="utf-8")))


def part_of(path: Path) -> str:
    """Returns the part of the tree that has one ceiling for its files: a package or a folder."""
    parts = path.relative_to(ROOT).parts
    return parts[1] if parts[0] == "packages" else parts[0]


def checked_files() -> Iterator[Path]:
    """Yields the files that have a ceiling; results of benchmarks have none."""
    for pattern in (*SOURCES, *TEXTS):
        yield from ROOT.glob(pattern)


def list_findings(paths: Iterable[Path]) -> None:
    """Prints the findings of files."""
    for path in sorted(paths):
        name = path.relative_to(ROOT) if path.is_relative_to(ROOT) else path
        for line, word, advice in check_file(path):
            print(f"{name}:{line}: {word} -> {advice}")


def check_tree() -> int:
    """Compares the number of findings of every part with its ceiling; returns an exit status."""
    files: dict[str, list[Path]] = {part: [] for part in CEILINGS}
    for path in checked_files():
        files.setdefault(part_of(path), []).append(path)
    failed = 0
    for part, paths in sorted(files.items()):
        count, ceiling = sum(len(check_file(path)) for path in paths), CEILINGS.get(part, 0)
        if count > ceiling:
            list_findings(paths)
            print(f"words: {part}: {count} findings, at most {ceiling}", file=sys.stderr)
            failed = 1
        elif count < ceiling:
            print(f"words: {part}: {count} findings; lower its ceiling in tools/words.py to that")
    return failed


def main(arguments: Sequence[str]) -> int:
    if not arguments:
        return check_tree()
    for path in (Path(argument).resolve() for argument in arguments):
        list_findings([p for p in checked_files() if p.is_relative_to(path)] or [path])
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
