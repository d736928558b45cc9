"""Kernel, configuration and implementation-registry framework for JAX kernels.

Importing it starts no device and changes no setting.
"""

from ejkernel.ops._version import __version__
from ejkernel.ops.batch_invariance import batch_invariant
from ejkernel.ops.config.cache import ConfigCache, overlay_cache, policy_override
from ejkernel.ops.config.choice import AutotunePolicy, Choice, ConfigChooser
from ejkernel.ops.config.persistent import PersistentCache
from ejkernel.ops.config.selection import ConfigSelectorChain
from ejkernel.ops.core.invocation import Invocation, default_key_builder_with_sharding
from ejkernel.ops.core.kernel import Kernel, Support
from ejkernel.ops.core.keys import sharding_fingerprint
from ejkernel.ops.core.registered import RegisteredKernel
from ejkernel.ops.core.types import Cfg, Out
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
from ejkernel.ops.execution.batch import pmap_with_config, vmap_with_config
from ejkernel.ops.execution.executor import Executor, create_default_executor, get_default_executor
from ejkernel.ops.execution.explanation import Explanation
from ejkernel.ops.execution.stamps import labels_to_configs
from ejkernel.ops.execution.tuning import (
    Autotuner,
    AutotuneResult,
    Trial,
    Tuner,
    TuningInterrupted,
    autotune,
    autotune_recorded,
    benchmark,
    tune,
)
from ejkernel.ops.implementation import Implementation, KernelSpec, Resolved
from ejkernel.ops.interpret import interpret_mode
from ejkernel.ops.kernel_registry import KernelRegistry, kernel_registry
from ejkernel.ops.params import BwdParams, FwdParams, OpConfig, WarpgroupParams
from ejkernel.ops.platforms import Backend, Platform
from ejkernel.ops.recording import invocations_in_lowered, load_invocations, save_invocations
from ejkernel.ops.registry import clear_invocations, get_invocations, record_invocation
from ejkernel.ops.utils.allowed import allow_in_files
from ejkernel.ops.utils.device import (
    device_fingerprint,
    device_kind,
    get_device_platform,
    target_device,
)
from ejkernel.ops.utils.labels import extract_labels_from_hlo_text, find_labels_in_lowered, label
from ejkernel.ops.utils.serialization import (
    abstractify,
    from_json,
    short_hash,
    stable_json,
    to_json,
)

__all__ = [
    "AutotuneError",
    "AutotunePolicy",
    "AutotuneResult",
    "Autotuner",
    "Backend",
    "BwdParams",
    "Cfg",
    "Choice",
    "ConfigCache",
    "ConfigChooser",
    "ConfigError",
    "ConfigSelectorChain",
    "EjkernelWarning",
    "Executor",
    "Explanation",
    "FwdParams",
    "Implementation",
    "InvalidArgument",
    "Invocation",
    "Kernel",
    "KernelNotFound",
    "KernelNotSupported",
    "KernelRegistry",
    "KernelSpec",
    "KernelUnavailable",
    "NoConfigError",
    "OpConfig",
    "Out",
    "PersistentCache",
    "Platform",
    "RegisteredKernel",
    "Resolved",
    "Support",
    "Trial",
    "Tuner",
    "TuningInterrupted",
    "WarpgroupParams",
    "__version__",
    "abstractify",
    "allow_in_files",
    "autotune",
    "autotune_recorded",
    "batch_invariant",
    "benchmark",
    "clear_invocations",
    "create_default_executor",
    "default_key_builder_with_sharding",
    "device_fingerprint",
    "device_kind",
    "extract_labels_from_hlo_text",
    "find_labels_in_lowered",
    "from_json",
    "get_default_executor",
    "get_device_platform",
    "get_invocations",
    "interpret_mode",
    "invocations_in_lowered",
    "kernel_registry",
    "label",
    "labels_to_configs",
    "load_invocations",
    "overlay_cache",
    "pmap_with_config",
    "policy_override",
    "record_invocation",
    "save_invocations",
    "sharding_fingerprint",
    "short_hash",
    "stable_json",
    "target_device",
    "to_json",
    "tune",
    "vmap_with_config",
]
