import warnings

import numpy as np
import pytest

from ejkernel.ops import (
    AutotuneError,
    ConfigError,
    EjkernelWarning,
    Executor,
    InvalidArgument,
    Kernel,
    KernelNotFound,
    KernelNotSupported,
    KernelUnavailable,
    NoConfigError,
    batch_invariant,
    env,
    interpret_mode,
)
from ejkernel.ops.batch_invariance import is_batch_invariant
from ejkernel.ops.errors import warn_once
from ejkernel.ops.interpret import interpreting


@pytest.mark.parametrize(
    ("error", "bases"),
    [
        (InvalidArgument, (TypeError, ValueError)),
        (KernelNotSupported, (NotImplementedError,)),
        (KernelNotFound, (LookupError,)),
        (KernelUnavailable, (KernelNotSupported, KernelNotFound)),
        (ConfigError, (ValueError,)),
        (NoConfigError, (LookupError,)),
        (AutotuneError, (RuntimeError,)),
        (EjkernelWarning, (UserWarning,)),
    ],
)
def test_errors_can_be_caught_by_their_bases(error, bases):
    for base in bases:
        assert issubclass(error, base)


def test_not_supported_says_what_why_and_where_instead():
    error = KernelNotSupported(
        algorithm="flash_attention",
        platform="triton",
        argument="bias",
        reason="no gradient of a dense bias",
        nearest="xla",
    )
    for word in ("flash_attention", "'triton'", "no gradient of a dense bias", "'xla'"):
        assert word in str(error)
    assert (error.algorithm, error.platform, error.argument) == (
        "flash_attention",
        "triton",
        "bias",
    )
    assert (error.reason, error.nearest) == ("no gradient of a dense bias", "xla")


def test_warnings_come_once_per_cause():
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for cause in ("a", "a", "b", "a"):
            warn_once(cause, f"about {cause}")
    assert [str(w.message) for w in caught] == ["about a", "about b"]
    assert all(w.category is EjkernelWarning for w in caught)


READERS = {
    env.AUTOTUNE_POLICY: env.autotune_policy,
    env.AUTOTUNE_BUDGET_S: env.autotune_budget_s,
    env.INTERPRET: env.interpret,
    env.LOG_AUTOTUNE: env.log_autotune,
    env.OPS_RECORD: env.ops_record,
    env.OPS_STAMP: env.ops_stamp,
    env.TRITON_SMEM_LIMIT: env.triton_smem_limit,
    env.TYPECHECK: env.typecheck,
}


def test_variables_have_defaults():
    assert {name: read() for name, read in READERS.items()} == {
        env.AUTOTUNE_POLICY: "autotune",
        env.AUTOTUNE_BUDGET_S: 60.0,
        env.INTERPRET: False,
        env.LOG_AUTOTUNE: False,
        env.OPS_RECORD: False,
        env.OPS_STAMP: "none",
        env.TRITON_SMEM_LIMIT: None,
        env.TYPECHECK: True,
    }


@pytest.mark.parametrize(
    ("name", "value", "meaning"),
    [
        (env.AUTOTUNE_POLICY, "heuristics", "heuristics"),
        (env.AUTOTUNE_POLICY, "Autotune", "autotune"),
        (env.AUTOTUNE_BUDGET_S, "2.5", 2.5),
        (env.AUTOTUNE_BUDGET_S, "0", 0.0),
        (env.OPS_STAMP, "hash", "hash"),
        (env.OPS_STAMP, "JSON", "json"),
        (env.TRITON_SMEM_LIMIT, "65536", 65536),
        *[(env.INTERPRET, word, True) for word in ("1", "true", "YES", "On")],
        *[(env.TYPECHECK, word, False) for word in ("0", "False", "no", "OFF", "")],
    ],
)
def test_a_variable_set_after_import_takes_effect(monkeypatch, name, value, meaning):
    monkeypatch.setenv(name, value)
    assert READERS[name]() == meaning


@pytest.mark.parametrize("name", sorted(READERS))
def test_unknown_values_are_errors_naming_the_variable(monkeypatch, name):
    monkeypatch.setenv(name, "perhaps")
    with pytest.raises(ValueError, match=f"{name}='perhaps'"):
        READERS[name]()


@pytest.mark.parametrize("name", sorted(READERS))
def test_an_unknown_value_stops_the_next_call_whether_it_needs_it_or_not(monkeypatch, name):
    class Double(Kernel):
        def run(self, x, *, cfg):
            return x * 2

    executor, x = Executor(), np.ones(3, np.float32)
    executor(Double(), x)
    monkeypatch.setenv(name, "perhaps")
    for call in (executor, executor.explain):
        with pytest.raises(ValueError, match=name):
            call(Double(), x)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        (env.AUTOTUNE_BUDGET_S, "-1"),
        (env.AUTOTUNE_BUDGET_S, "nan"),
        (env.AUTOTUNE_BUDGET_S, "inf"),
        (env.TRITON_SMEM_LIMIT, "0"),
        (env.TRITON_SMEM_LIMIT, "1.5"),
        (env.INTERPRET, "2"),
    ],
)
def test_values_out_of_range(monkeypatch, name, value):
    monkeypatch.setenv(name, value)
    with pytest.raises(ValueError, match=name):
        READERS[name]()


def test_cache_dir(monkeypatch, tmp_path):
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv(env.CACHE_DIR)
    assert env.cache_dir() == tmp_path / ".cache" / "ejkernel"
    monkeypatch.setenv(env.CACHE_DIR, "~/elsewhere")
    assert env.cache_dir() == tmp_path / "elsewhere"


def test_env_state_follows_every_variable(monkeypatch):
    seen = {env.env_state()}
    for name in env.VARIABLES:
        monkeypatch.setenv(name, "1")
        seen.add(env.env_state())
    assert len(seen) == len(env.VARIABLES) + 1


def test_interpret_mode_nests_and_overrides_the_variable(monkeypatch):
    assert not interpreting()
    with interpret_mode():
        assert interpreting()
        with interpret_mode(False):
            assert not interpreting()
        assert interpreting()
    monkeypatch.setenv(env.INTERPRET, "1")
    assert interpreting()
    with interpret_mode(False):
        assert not interpreting()


def test_batch_invariant_nests_and_overrides_the_variable(monkeypatch):
    assert not is_batch_invariant()
    with batch_invariant():
        assert is_batch_invariant()
        with batch_invariant(False):
            assert not is_batch_invariant()
    monkeypatch.setenv("EJKERNEL_BATCH_INVARIANT", "1")
    assert is_batch_invariant()
    with batch_invariant(False):
        assert not is_batch_invariant()
    monkeypatch.setenv("EJKERNEL_BATCH_INVARIANT", "maybe")
    with pytest.raises(ValueError, match="EJKERNEL_BATCH_INVARIANT"):
        is_batch_invariant()
