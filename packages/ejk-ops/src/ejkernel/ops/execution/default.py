"""The executor that kernels and module functions use unless told otherwise."""

from __future__ import annotations

import os
import threading

from ejkernel.ops.config.cache import ConfigCache
from ejkernel.ops.config.persistent import PersistentCache
from ejkernel.ops.config.selection import ConfigSelectorChain
from ejkernel.ops.execution.executor import Executor

_default: Executor | None = None
_lock = threading.Lock()


def create_default_executor(
    *, persistent_path: str | os.PathLike[str] | None = None, autotune: bool | None = None
) -> Executor:
    """A new executor with a ConfigCache and a PersistentCache of its own.

    Args:
        persistent_path: directory of the persistent cache; None = ``$EJKERNEL_CACHE_DIR/configs``.
        autotune: whether to tune unknown calls; None = ``EJKERNEL_AUTOTUNE_POLICY``.
    """
    return Executor(
        ConfigSelectorChain(
            cache=ConfigCache(), persistent=PersistentCache(persistent_path), autotune=autotune
        )
    )


def get_default_executor() -> Executor:
    """The shared executor, built on first use."""
    global _default
    if _default is None:
        with _lock:
            if _default is None:
                _default = create_default_executor()
    return _default
