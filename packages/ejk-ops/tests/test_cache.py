import asyncio
import threading
import time
from types import SimpleNamespace

import pytest

from ejkernel.ops import ConfigCache, interpret_mode, overlay_cache, policy_override
from ejkernel.ops.config.cache import autotune_override, find_overlay, overlays, selection_state


def test_put_get_and_friends():
    cache = ConfigCache()
    assert cache.get("k") is None and cache.get("k", 3) == 3 and "k" not in cache
    cache.put("k", "cfg")
    cache.put(("any", 1), {"unhashable": []})
    assert cache.get("k") == "cfg" and "k" in cache and len(cache) == 2
    assert cache.keys() == ["k", ("any", 1)]
    cache.clear()
    assert len(cache) == 0 and cache.keys() == []


def test_version_counts_changes():
    a, b = ConfigCache(), ConfigCache()
    states = {a.state, b.state}
    a.put("k", 1)
    states.add(a.state)
    a.put("k", 2)
    states.add(a.state)
    a.clear()
    states.add(a.state)
    assert len(states) == 5 and a.version == 3 and b.version == 0


def test_from_results():
    results = [SimpleNamespace(key="a", best=1), SimpleNamespace(key="b", best=None)]
    cache = ConfigCache.from_results(results)
    assert cache.keys() == ["a"] and cache.get("a") == 1


def test_threads_that_ask_for_a_key_being_tuned_wait():
    cache, tuned, found = ConfigCache(), [], []

    def ask(key):
        with cache.tuning(key):
            if cache.get(key) is None:
                time.sleep(0.02)
                tuned.append(key)
                cache.put(key, f"best of {key}")
        found.append(cache.get(key))

    threads = [threading.Thread(target=ask, args=(key,)) for key in "abab" * 4]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert sorted(tuned) == ["a", "b"] and len(found) == 16 and None not in found
    assert cache._latches == {}


def test_other_keys_do_not_wait_and_a_thread_may_enter_again():
    cache, entered = ConfigCache(), threading.Event()

    def other():
        with cache.tuning("b"):
            entered.set()

    with cache.tuning("a"), cache.tuning("a"):
        thread = threading.Thread(target=other)
        thread.start()
        assert entered.wait(5)
        thread.join()


def test_a_failed_tuning_lets_the_next_thread_try():
    cache = ConfigCache()
    with pytest.raises(RuntimeError), cache.tuning("k"):
        raise RuntimeError
    with cache.tuning("k"):
        pass
    assert cache._latches == {}


def test_overlays_innermost_first_each_by_key_then_by_name():
    outer = ConfigCache()
    outer.put("key", "outer by key")
    assert find_overlay("key", "kernel") is None
    with overlay_cache(outer):
        assert find_overlay("key", "kernel") == "outer by key"
        with overlay_cache({"kernel": "inner by name"}):
            assert find_overlay("key", "kernel") == "inner by name"
            assert len(overlays()) == 2
            with overlay_cache({"key": "key", "kernel": "name"}):
                assert find_overlay("key", "kernel") == "key"
        assert find_overlay("other", "kernel") is None
    assert overlays() == ()


def test_policy_override_nests():
    assert autotune_override() is None
    with policy_override(autotune=False):
        with policy_override(True):
            assert autotune_override() is True
        assert autotune_override() is False
    with pytest.raises(TypeError, match="autotune"):
        policy_override("no").__enter__()  # ty: ignore
    with pytest.raises(TypeError, match="cache"):
        overlay_cache(3).__enter__()  # ty: ignore


def test_overrides_end_with_their_block_also_after_an_error():
    with pytest.raises(RuntimeError):
        with overlay_cache({}), policy_override(True), interpret_mode():
            raise RuntimeError
    assert selection_state() == (None, None, None, ())


def test_overrides_hold_for_one_thread_and_one_task():
    seen = []
    with overlay_cache({"k": 1}), policy_override(False):
        thread = threading.Thread(target=lambda: seen.append(selection_state()))
        thread.start()
        thread.join()
    assert seen == [(None, None, None, ())]

    async def one(value):
        with overlay_cache({"k": value}):
            await asyncio.sleep(0.01)
            return find_overlay("k", "")

    async def both():
        return await asyncio.gather(one(1), one(2))

    assert asyncio.run(both()) == [1, 2]


def test_selection_state_follows_everything_that_may_change_a_choice():
    cache, mapping = ConfigCache(), {}
    states = [selection_state()]
    with overlay_cache(cache):
        states.append(selection_state())
        assert selection_state() == states[-1]
        cache.put("k", 1)
        states.append(selection_state())
    with overlay_cache(mapping):
        states.append(selection_state())
        mapping["k"] = [1]
        states.append(selection_state())
        mapping["k"] = [1]
        states.append(selection_state())
        assert selection_state() == states[-1]
    with policy_override(True):
        states.append(selection_state())
    with interpret_mode():
        states.append(selection_state())
    assert len(set(states)) == len(states)
    assert selection_state() == states[0]
