"""An early check that no part of the ``ejkernel`` namespace is missing or hidden."""

from __future__ import annotations

import importlib.util
import sys

# import path -> distribution that brings it
PORTIONS = {"ejkernel.types": "ejk-types", "ejkernel.ops": "ejk-ops"}


def check() -> None:
    """Raise ImportError with an explanation unless the namespace is complete.

    ``ejkernel`` is shared by several distributions and has no ``__init__`` of its own. A regular
    package of that name in the same environment hides them, and an unfinished installation lacks
    some.
    """
    for name in ("ejkernel", "ejkernel.kernels"):
        owner = getattr(sys.modules.get(name), "__file__", None)
        if owner is not None:
            raise ImportError(
                f"{name} is a regular package here ({owner}), which hides parts of the namespace "
                "that ejk-types, ejk-ops, ejk-kernels-* and ejk-modules share. The distribution "
                "named ejkernel is another project, and uninstalling it alone takes files of ours "
                "along: `ejk doctor` prints the line that repairs this environment",
                name=name,
                path=owner,
            )
    missing = [dist for path, dist in PORTIONS.items() if not _exists(path)]
    if missing:
        places = ", ".join(getattr(sys.modules.get("ejkernel"), "__path__", []))
        raise ImportError(
            f"the ejkernel namespace is incomplete: {', '.join(missing)} not found in {places}. "
            f"Install with: python -m pip install {' '.join(missing)}. If it is installed "
            "already, files of it were removed: `ejk doctor` prints the line that repairs it"
        )


def _exists(path: str) -> bool:
    if sys.modules.get(path) is not None:
        return True
    try:
        spec = importlib.util.find_spec(path)
    except (ImportError, ValueError):
        return False
    return spec is not None and spec.origin is not None  # a folder without __init__.py has none
