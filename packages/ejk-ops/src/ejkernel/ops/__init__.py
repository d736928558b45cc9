"""Kernel, configuration and implementation-registry framework for JAX kernels.

Importing it starts no device and changes no setting.
"""

from ejkernel.ops._version import __version__
from ejkernel.ops.config.cache import ConfigCache, overlay_cache, policy_override
from ejkernel.ops.config.persistent import PersistentCache
from ejkernel.ops.errors import (
    AutotuneError,
    ConfigError,
    EjkernelWarning,
    InvalidArgument,
    KernelNotFound,
    KernelNotSupported,
    KernelUnavailable,
    NoConfigError,
)
from ejkernel.ops.implementation import Implementation, KernelSpec
from ejkernel.ops.interpret import interpret_mode
from ejkernel.ops.kernel_registry import KernelRegistry, kernel_registry
from ejkernel.ops.params import BwdParams, FwdParams, OpConfig
from ejkernel.ops.platforms import Backend, Platform
from ejkernel.ops.utils.device import (
    device_fingerprint,
    device_kind,
    get_device_platform,
    target_device,
)
from ejkernel.ops.utils.labels import (
    extract_labels_from_hlo_text,
    find_labels_in_lowered,
    label,
    labels_to_configs,
)
from ejkernel.ops.utils.serialization import (
    abstractify,
    from_json,
    short_hash,
    stable_json,
    to_json,
)
from ejkernel.ops.utils.sharding import sharding_fingerprint

__all__ = [
    "AutotuneError",
    "Backend",
    "BwdParams",
    "ConfigCache",
    "ConfigError",
    "EjkernelWarning",
    "FwdParams",
    "Implementation",
    "InvalidArgument",
    "KernelNotFound",
    "KernelNotSupported",
    "KernelRegistry",
    "KernelSpec",
    "KernelUnavailable",
    "NoConfigError",
    "OpConfig",
    "PersistentCache",
    "Platform",
    "__version__",
    "abstractify",
    "device_fingerprint",
    "device_kind",
    "extract_labels_from_hlo_text",
    "find_labels_in_lowered",
    "from_json",
    "get_device_platform",
    "interpret_mode",
    "kernel_registry",
    "label",
    "labels_to_configs",
    "overlay_cache",
    "policy_override",
    "sharding_fingerprint",
    "short_hash",
    "stable_json",
    "target_device",
    "to_json",
]
