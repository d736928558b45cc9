"""Sphinx extension: the reference, made of the docstrings of all public names.

``.. api:: MODULE`` with names as its content shows the entries of these names,
``.. api-index:: MODULE`` a table of all names of a module. A public name without an entry is a
warning, and so fails the build.
"""

from __future__ import annotations

import importlib
import inspect
import re
from collections.abc import Callable, Iterator
from typing import Any, Generic, get_origin

from docutils import nodes
from sphinx.application import Sphinx
from sphinx.ext.napoleon import GoogleDocstring
from sphinx.pycode import ModuleAnalyzer
from sphinx.util import logging
from sphinx.util.docutils import SphinxDirective

from ejkernel.modules._op import Operation
from ejkernel.types.calls.words import Shown, shown

PACKAGES = {
    "ejkernel.types": "ejk-types",
    "ejkernel.ops": "ejk-ops",
    "ejkernel.kernels.xla": "ejk-kernels-xla",
    "ejkernel.kernels.triton": "ejk-kernels-triton",
    "ejkernel.kernels.pallas": "ejk-kernels-pallas",
    "ejkernel.modules": "ejk-modules",
}
DEVICES = {"gpu": "On GPUs", "tpu": "On TPUs", "any": "Everywhere"}
_CLASS = re.compile(r"<class '(?:\w+\.)*(\w+)'>")
_SOURCE = re.compile(r"What it takes and returns, and its source: see the operation \w+\.\s*$")
_PARAMETER = re.compile(r":param (?P<name>[^:]+): ?(``(?P<shape>\[[^`]*\])``[;.,])?(?P<text>.*)")
logger = logging.getLogger(__name__)


def public_names(module: str) -> list[str]:
    """Returns the names that a package exports."""
    return list(importlib.import_module(module).__all__)


def missing_entries(documented: set[str], modules: Iterator[str] | None = None) -> list[str]:
    """Returns public names, with their modules, that have no entry."""
    return [
        f"{module}.{name}"
        for module in (modules or PACKAGES)
        for name in public_names(module)
        if f"{module}.{name}" not in documented
    ]


def describe_types(function: Callable[..., Any]) -> dict[str, str]:
    """Returns parameter name -> its type in short words, ``return`` among them."""
    try:
        signature = inspect.signature(function, eval_str=True)
    except (NameError, TypeError, ValueError):
        try:
            signature = inspect.signature(function)
        except (TypeError, ValueError):
            return {}
    annotations = {p.name: p.annotation for p in signature.parameters.values()}
    annotations["return"] = signature.return_annotation
    if inspect.isclass(function):
        annotations = {**inspect.get_annotations(function), **annotations}
    return {
        name: str(a) if isinstance(a, Shown | str) else str(shown(a))
        for name, a in annotations.items()
        if a not in (inspect.Parameter.empty, Any, "Any")
    }


def add_types(lines: list[str], types: dict[str, str]) -> list[str]:
    """Returns field lists of a docstring with the type of each described parameter.

    A shape at the start of a description is left out where the type shows it.
    """
    typed = []
    for line in split_attributes(lines):
        match = _PARAMETER.match(line)
        if match and (name := match["name"].strip("\\* ")) in types:
            typed.append(f":type {match['name']}: ``{types[name]}``")
            if match["shape"] and match["shape"] in types[name]:
                line = f":param {match['name']}: {match['text'].strip()}"
        elif line.startswith(":ivar ") and (name := line[6:].partition(":")[0]) in types:
            typed.append(f":vartype {name}: ``{types[name]}``")
        typed.append(line)
    return typed


def split_attributes(lines: list[str]) -> list[str]:
    """Returns a field for each attribute, where napoleon makes one of ``a, b: description``."""
    fields: list[list[str]] = []
    for line in lines:
        if fields and line.startswith(" "):
            fields[-1].append(line)
        else:
            fields.append([line])
    split = []
    for first, *others in fields:
        head, _, text = first.removeprefix(":ivar ").partition(":")
        if first.startswith(":ivar ") and "," in head:
            for name in head.split(","):
                split += [f":ivar {name.strip()}:{text}", *others]
        else:
            split += [first, *others]
    return split


def show_signature(function: Callable[..., Any]) -> str:
    """Returns names and defaults of parameters; types stand in their descriptions."""
    signature = inspect.signature(function)
    parameters = [
        p.replace(annotation=inspect.Parameter.empty)
        for p in signature.parameters.values()
        if p.name != "unknown"
    ]
    return _CLASS.sub(r"\1", str(inspect.Signature(parameters)))


def _indent(lines: list[str]) -> list[str]:
    return ["", *(f"   {line}" if line else "" for line in lines), ""]


class Entry:
    """One public name of a module, as reStructuredText."""

    def __init__(self, app: Sphinx, module: str, name: str) -> None:
        self.app, self.module, self.name = app, module, name
        self.value = getattr(importlib.import_module(module), name)

    def lines(self) -> list[str]:
        if self.name == "__version__":
            return self._data("The version of this package.")
        if (other := self._home()) is not None:
            return self._alias(other)
        if inspect.isclass(self.value):
            members = ", ".join(self._members())
            options = [f"   :members: {members}"] if members else []
            if any(map(_is_shown, self.value.__bases__)):
                options.append("   :show-inheritance:")
            return [f".. autoclass:: {self.name}", *options, ""]
        if ".kernels." in self.module:
            return self._kernel()
        if callable(self.value):
            return [f".. autofunction:: {self.name}", ""]
        docs = ModuleAnalyzer.for_module(self.value.__module__).find_attr_docs()
        return self._data(" ".join(docs["", self.name]))

    def _data(self, text: str) -> list[str]:
        return [f".. py:data:: {self.name}", *_indent([text])]

    def _home(self) -> str | None:
        """Returns the entry of the same object under its own name, where that is another one."""
        defined = getattr(self.value, "__module__", "")
        original = getattr(self.value, "__name__", self.name)
        for module in PACKAGES:
            if defined.startswith(f"{module}.") and original in public_names(module):
                home = f"{module}.{original}"
                return None if home == f"{self.module}.{self.name}" else home
        return None

    def _alias(self, home: str) -> list[str]:
        is_class = inspect.isclass(self.value)
        kind, role = ("class", "class") if is_class else ("function", "func")
        return [f".. py:{kind}:: {self.name}", *_indent([f"Another name of :{role}:`{home}`."])]

    def _members(self) -> list[str]:
        """Returns documented methods and properties, inherited ones of classes without entries."""
        if issubclass(self.value, Operation):
            return []  # what they are is written with the function
        names: dict[str, None] = {}
        for base in self.value.__mro__:
            is_ours = base.__module__.startswith("ejkernel.")
            has_entry = base is not self.value and base.__name__ in public_names(self.module)
            if not is_ours or has_entry:
                continue
            if base.__module__.startswith("ejkernel.ops") and self.module != "ejkernel.ops":
                continue
            for name, member in vars(base).items():
                is_method = inspect.isfunction(member) or isinstance(
                    member, property | classmethod | staticmethod
                )
                if name[0] != "_" and is_method and inspect.getdoc(getattr(base, name)):
                    names[name] = None
        return list(names)

    def _kernel(self) -> list[str]:
        """An entry of a kernel package, whose functions are objects made from descriptions."""
        if self.name == "register":
            text = inspect.getdoc(self.value) or ""
            return [f".. py:function:: {self.name}(registry)", *_indent([text])]
        package = importlib.import_module(self.module).PACKAGE
        entries = [entry for entry in package.entries if entry.public == self.name]
        kernels = [(entry.backend, package.load(entry)) for entry in entries]
        body = []
        for backend, kernel in kernels:
            if len(kernels) > 1:
                body += [f"**{DEVICES[backend]}.**", ""]
            text = _SOURCE.sub("", inspect.getdoc(kernel) or "")
            body += [*str(GoogleDocstring(text, self.app.config, self.app)).splitlines(), ""]
        body.append(
            f"It takes the arguments of :func:`ejkernel.modules.{self.name}` without ``platform``, "
            "``mesh`` and specs, and returns the same."
        )
        signature = "(*args, cfg=None, **kwargs)"
        return [f".. py:function:: {self.name}{signature}", *_indent(body)]


class Api(SphinxDirective):
    """``.. api:: MODULE`` with public names as its content."""

    required_arguments = 1
    has_content = True

    def run(self) -> list[nodes.Node]:
        module = self.arguments[0]
        lines = [f".. py:currentmodule:: {module}", ""]
        for name in " ".join(self.content).split():
            lines += Entry(self.env.app, module, name).lines()
        return self.parse_text_to_nodes("\n".join(lines))


class ApiIndex(SphinxDirective):
    """``.. api-index:: MODULE``: every public name and the first sentence of its docstring."""

    required_arguments = 1

    def run(self) -> list[nodes.Node]:
        module = self.arguments[0]
        lines = [f".. py:currentmodule:: {module}", ""]
        lines += [".. list-table::", "   :widths: auto", "   :header-rows: 1", ""]
        lines += ["   * - name", "     - what it is"]
        package = importlib.import_module(module)
        for name in sorted(set(public_names(module)) - {"__version__"}, key=_functions_first):
            text = first_sentence(inspect.getdoc(getattr(package, name)) or "")
            lines += [f"   * - :py:obj:`{name} <{module}.{name}>`", f"     - {text}"]
        return self.parse_text_to_nodes("\n".join(lines))


def _functions_first(name: str) -> tuple[bool, str]:
    return name[0].isupper(), name


def first_sentence(text: str) -> str:
    """Returns the first sentence of a docstring on one line."""
    paragraph = " ".join(text.partition("\n\n")[0].split())
    head, stop, _ = paragraph.partition(". ")
    return (head + stop.strip()).rstrip(":")


def process_docstring(
    app: Sphinx, kind: str, name: str, value: Any, options: Any, lines: list[str]
) -> None:
    """Adds the types of parameters, after napoleon has made field lists of them."""
    if kind in ("function", "method", "class"):
        lines[:] = add_types(lines, describe_types(value))


def process_signature(
    app: Sphinx, kind: str, name: str, value: Any, options: Any, signature: str, returns: str
) -> tuple[str, str | None] | None:
    """Shows names and defaults only, and classes among the defaults by their names."""
    if kind == "function" and callable(value):
        return show_signature(value), None
    return (_CLASS.sub(r"\1", signature), returns) if signature else None


def process_bases(app: Sphinx, name: str, value: Any, options: Any, bases: list[type]) -> None:
    """Leaves out bases that are no public names."""
    bases[:] = [get_origin(base) or base for base in bases if _is_shown(base)]


def _is_shown(base: Any) -> bool:
    origin, module = get_origin(base) or base, getattr(base, "__module__", "")
    names = (name for package in PACKAGES for name in public_names(package))
    if origin in (object, Generic):
        return False
    return not module.startswith("ejkernel.") or base.__name__ in names


def check_entries(app: Sphinx, env: Any) -> None:
    """Warns of public names without an entry."""
    documented = set(env.domains["py"].objects)
    for name in missing_entries(documented):
        logger.warning("%s has no entry in the reference", name)


def setup(app: Sphinx) -> dict[str, Any]:
    app.add_directive("api", Api)
    app.add_directive("api-index", ApiIndex)
    app.connect("autodoc-process-docstring", process_docstring, priority=900)
    app.connect("autodoc-process-signature", process_signature)
    app.connect("autodoc-process-bases", process_bases)
    app.connect("env-check-consistency", check_entries)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
