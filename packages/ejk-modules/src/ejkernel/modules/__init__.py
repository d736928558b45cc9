"""One call per attention operation in JAX: the user's side of ejkernel.

Every operation is a function, a Kernel class for executors, and a Config dataclass. Rules that
hold for all of them:

* Arrays are ``[batch, seq, heads, head_dim]``; query head i reads key head
  ``i // (heads // kv_heads)``. Matmuls and softmax accumulate in float32 or better; the output
  has the query's dtype, each gradient that of its input.
* Masks, windows, segments and lengths are ANDed; a row that sees no key gives exactly 0.
* ``platform``, ``cfg`` and ``mesh`` never change a result beyond rounding.
* All work under jit, grad, vmap, checkpoint, scan and shard_map. A wrong argument is an
  ``InvalidArgument`` (a TypeError and a ValueError) that names it.

Operations are imported on first use; the stub next to this file names them for type checkers.
"""

from typing import Any

from ejkernel.modules import _namespace
from ejkernel.modules._version import __version__

_namespace.check()

from ejkernel.modules._table import exports, load  # noqa: E402

_ERRORS = (
    "AutotuneError",
    "ConfigError",
    "EjkernelWarning",
    "InvalidArgument",
    "KernelNotFound",
    "KernelNotSupported",
    "NoConfigError",
)
_EXECUTOR = ("check_call", "create_default_executor", "explain", "get_default_executor", "supports")

_ADAPTERS = ("equinox_attention", "flax_attention")

WHERE: dict[str, tuple[str, str]] = {
    **exports(),
    **{name: ("ejkernel.modules.adapters", name) for name in _ADAPTERS},
    "merge_attention": ("ejkernel.modules.merge", "merge_attention"),
    "AttentionPlan": ("ejkernel.types.serving.plan", "AttentionPlan"),
    "plan_ragged_attention": ("ejkernel.modules.plan", "plan_ragged_attention"),
    "quantize_attention": ("ejkernel.modules.quantize", "quantize_attention"),
    "ssd_attention": ("ejkernel.modules.ssd", "ssd_attention"),
    **{name: ("ejkernel.ops", name) for name in _ERRORS},
    **{name: ("ejkernel.modules._executor", name) for name in _EXECUTOR},
}

__all__ = ["__version__", *sorted(WHERE)]


def __getattr__(name: str) -> Any:
    where = WHERE.get(name)
    if where is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = load(*where)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
