"""Stamps read back: the configs that the calls of a program ran with."""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Iterable
from typing import Any
from urllib.parse import unquote

from ejkernel.ops.execution.executor import get_default_executor
from ejkernel.ops.kernel_registry import kernel_registry
from ejkernel.ops.utils.labels import DIGITS, key_digits, stamped_config
from ejkernel.ops.utils.serialization import from_plain

_STAMP = re.compile(r"(?P<kernel>[^#]+)\.v(?P<version>\d+)#(?P<content>.+)")
_HASH = re.compile(f"[0-9a-f]{{{DIGITS}}}")


def labels_to_configs(labels: Iterable[str], *, executor: Any = None) -> dict[str, Any]:
    """The configs that stamps stand for; None for labels that are no stamps or are not known.

    Json stamps decode themselves: to the config class if this process made the stamp or the
    kernel's implementations declare one, else to a dict. Hash stamps are looked up among the
    stamps of this process, then in the caches of ``executor`` (None = the default executor).
    """
    return {name: _config_of(name, executor) for name in labels}


def _config_of(name: str, executor: Any) -> Any:
    made, cfg = stamped_config(name)
    if made:
        return cfg
    match = _STAMP.fullmatch(name)
    if match is None:
        return None
    content = match["content"]
    if not _HASH.fullmatch(content):
        return _decode(unquote(match["kernel"]), content)
    head = f"{unquote(match['kernel'])}.v{match['version']}@"
    for cache in _caches(executor):
        for key in cache.keys():
            if isinstance(key, str) and key.startswith(head) and key_digits(key) == content:
                return cache.get(key)
    return None


def _decode(kernel: str, content: str) -> Any:
    try:
        plain = json.loads(unquote(content))
    except ValueError:
        return None
    implementations = kernel_registry.list_implementations(kernel)
    for cls in {i.config_cls for i in implementations if i.config_cls is not None}:
        with contextlib.suppress(ValueError, TypeError):
            return from_plain(plain, cls)
    return plain


def _caches(executor: Any) -> list[Any]:
    selector = getattr(get_default_executor() if executor is None else executor, "selector", None)
    caches = (getattr(selector, "cache", None), getattr(selector, "persistent", None))
    return [cache for cache in caches if cache is not None]
