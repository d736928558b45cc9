"""Copies and pickles: modules that hold our objects can be copied and sent to other processes."""

from __future__ import annotations

import copy
import inspect
import pickle
import threading

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ejkernel import ops
from ejkernel.ops import (
    AutotunePolicy,
    Autotuner,
    AutotuneResult,
    Choice,
    ConfigCache,
    ConfigSelectorChain,
    Executor,
    Explanation,
    FwdParams,
    Implementation,
    Invocation,
    Kernel,
    KernelRegistry,
    PersistentCache,
    RegisteredKernel,
    Resolved,
    Support,
    Trial,
    Tuner,
    kernel_registry,
    label,
)
from ejkernel.ops.config.failures import FailureCache

COPIES = {"deepcopy": copy.deepcopy, "pickle": lambda x: pickle.loads(pickle.dumps(x))}


class Registered(RegisteredKernel):
    algorithm = "double"

    def run(self, x, *, cfg):
        raise NotImplementedError


class Double(Kernel):
    def run(self, x, *, cfg):
        return 2 * x

    def bind(self, args, kwargs):
        return (jnp.asarray(args[0]) * 1,), kwargs


def double(x, *, cfg=None):
    return 2 * x


def private_registry():
    registry = KernelRegistry()
    registry.register("double", "xla", "any")(double)
    registry.register_lazy("double", "triton", "gpu", 100, target="no.such.module:double")
    return registry


def invocation(length=3):
    return Invocation(Double(), (jax.ShapeDtypeStruct((length,), "float32"),), {}, {"by": "hand"})


EXAMPLES = {
    Autotuner: lambda: Autotuner(device_lock=threading.Lock()),
    AutotunePolicy: AutotunePolicy,
    AutotuneResult: lambda: AutotuneResult("key", FwdParams(), (), 0),
    Choice: lambda: Choice(FwdParams(), "memory", "key"),
    ConfigCache: ConfigCache,
    ConfigSelectorChain: ConfigSelectorChain,
    Executor: Executor,
    Explanation: lambda: Executor().explanation(Double(), np.ones(3, np.float32)),
    Implementation: lambda: private_registry().list_implementations("double")[0],
    Invocation: lambda: invocation().bound,
    Kernel: Double,
    KernelRegistry: private_registry,
    PersistentCache: PersistentCache,
    RegisteredKernel: lambda: Registered(registry=private_registry()),
    Resolved: lambda: Double().implementation(invocation(), None),
    Support: lambda: Double().supports(np.ones(3)),
    Trial: lambda: Trial(FwdParams(), 1.0, None),
    Tuner: Tuner,
    label: lambda: label("mine"),
}


PLAIN = (BaseException, ops.OpConfig, FwdParams, ops.BwdParams, ops.Platform, ops.Backend)
CLASSES = [
    cls
    for cls in (getattr(ops, name) for name in ops.__all__)
    if inspect.isclass(cls)
    and not issubclass(cls, PLAIN)  # hold values alone
    and not getattr(cls, "_is_protocol", False)
]


@pytest.mark.parametrize("how", COPIES)
@pytest.mark.parametrize("cls", CLASSES)
def test_every_public_class(cls, how):
    original = EXAMPLES[cls]()
    made = COPIES[how](original)
    assert type(made) is type(original) and made is not original
    assert repr(made).partition(" at 0x")[0] == repr(original).partition(" at 0x")[0]


@pytest.fixture(params=COPIES)
def copied(request):
    return COPIES[request.param]


def test_a_copied_executor_has_the_configs(copied):
    chain = ConfigSelectorChain(cache=ConfigCache(), persistent=PersistentCache(), autotune=False)
    executor, x = Executor(chain), np.ones(3, np.float32)
    executor(Double(), x)
    chain.cache.put("key", FwdParams(num_warps=4))
    chain.persistent.put("key", FwdParams(num_warps=8))
    other = copied(executor)
    assert not other._programs._programs
    np.testing.assert_array_equal(other(Double(), x), 2 * x)
    assert other.selector.cache.get("key") == FwdParams(num_warps=4)
    assert other.selector.persistent.get("key") == FwdParams(num_warps=8)
    assert other.selector.failures._configs is other.selector.persistent
    assert other.selector.state != chain.state


def test_a_copied_cache_is_independent(copied):
    cache = ConfigCache()
    cache.put("key", FwdParams())
    with cache.tuning("key"):
        other = copied(cache)
    other.put("other", FwdParams())
    assert cache.keys() == ["key"] and other.keys() == ["key", "other"]
    assert cache.state[0] != other.state[0] and other._lock is not cache._lock
    shallow = copy.copy(cache)
    shallow.clear()
    assert cache.keys() == ["key"]


def test_failures_are_copied(copied):
    failures = FailureCache()
    failures.remember("key", FwdParams(), "too large")
    assert copied(failures).reason("key", FwdParams()) == "too large"


def test_an_object_that_another_thread_changes_can_be_copied(copied):
    cache, stop = ConfigCache(), threading.Event()

    def change():
        number = 0
        while not stop.is_set():
            cache.put(number % 5000, FwdParams())
            number += 1

    thread = threading.Thread(target=change)
    thread.start()
    try:
        for _ in range(20):
            assert len(copied(cache)) <= 5000
    finally:
        stop.set()
        thread.join()


def test_copies_of_the_shared_registry_are_the_shared_registry(copied):
    assert copied(kernel_registry) is copy.copy(kernel_registry) is kernel_registry
    kernel = copied(Registered())
    assert kernel.registry is kernel_registry


def test_a_private_registry_is_copied_with_what_is_registered(copied):
    registry = private_registry()
    other = copied(registry)
    other.register("triple", "xla", "any")(lambda x, *, cfg=None: 3 * x)
    assert registry.list_algorithms() == ["double"]
    assert other.get("double") is double and other.version == registry.version + 1
    lazy, plain = other.list_implementations("double")
    assert not lazy.loaded and "no.such.module" in repr(lazy.function)
    assert lazy.on_load.__self__ is other and plain.fn is double
    x = np.ones(3, np.float32)
    np.testing.assert_array_equal(Executor()(Registered(registry=other), x), 2 * x)


def test_an_invocation_keeps_its_fields_and_its_key(copied):
    inv = invocation().bound
    assert inv.arguments and inv.info["key"]  # derived already
    other = copied(inv)
    assert other.key == inv.key and other.metadata == {"by": "hand"}
    assert dict(other.info) == dict(inv.info) and other.binding is None
    assert other.arguments == inv.arguments and other.remember("asked", list) == []
    with pytest.raises(TypeError):
        other.info["key"] = ""


def test_the_gate_of_a_tuner_is_replaced(copied):
    device_lock = threading.Lock()
    with device_lock:
        other = copied(Autotuner(device_lock=device_lock))
        assert other.device_lock.acquire(blocking=False)
