"""Agreement of the processes of one job: process 0 decides, the others take its config.

All processes of a job must compile the same program, so a choice that depends on files or on
timings is made once. Process 0 publishes it in the key-value store of JAX's coordination service
under the cache key; the others wait for it. The first decision for a key holds for the whole job.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable
from typing import Any

from ejkernel.ops import compat, env
from ejkernel.ops.config.choice import Choice
from ejkernel.ops.config.store import decode_config, encode_config, remember_class
from ejkernel.ops.core.invocation import BoundCall
from ejkernel.ops.errors import AutotuneError, NoConfigError
from ejkernel.ops.utils.serialization import short_hash

PREFIX = "ejkernel/config/"
LEAST_TIMEOUT_S = 300.0


def default_timeout_s() -> float:
    """Time for process 0 to compile and tune one key, with room for slow compilers."""
    return max(LEAST_TIMEOUT_S, 5 * env.autotune_budget_s())


class PeerGroup:
    """The processes of this job.

    Args:
        client: has ``key_value_set(key, value)`` and ``blocking_key_value_get(key, timeout_ms)``.
        process_id: number of this process; 0 decides.
        timeout_s: how long the others wait; None = derived from the tuning budget.
    """

    def __init__(self, client: Any, process_id: int, timeout_s: float | None = None):
        self.client = client
        self.process_id = process_id
        self.timeout_s = timeout_s
        self._agreed: dict[str, Choice] = {}
        self._lock = threading.Lock()
        self._latches: dict[str, threading.Lock] = {}

    def agree(self, call: BoundCall, about: Any, decide: Callable[[], Choice]) -> Choice:
        """The choice of process 0 for this call; only process 0 calls ``decide``.

        ``about``: JSON values that tell questions about one call apart.

        Raises:
            AutotuneError: no answer in time, an answer that cannot be read, or process 0 failed.
        """
        usable = call.kernel.usable_implementations(call)
        topic = PREFIX + short_hash([call.key, about, usable], 32)
        with self._lock:
            latch = self._latches.setdefault(topic, threading.Lock())
        with latch:
            choice = self._agreed.get(topic)
            if choice is None:
                leads = self.process_id == 0
                choice = self._lead(topic, call, decide) if leads else self._follow(topic, call)
                self._agreed[topic] = choice
        return choice

    def _lead(self, topic: str, call: BoundCall, decide: Callable[[], Choice]) -> Choice:
        try:
            choice = decide()
        except Exception as error:
            self._publish(topic, call, {"failed": f"{type(error).__name__}: {error}"})
            raise
        if choice.error is not None:
            message: dict[str, Any] = {"tier": "error", "text": str(choice.error)}
        else:
            message = {"tier": choice.tier}
            try:
                message["cfg"] = encode_config(choice.cfg)
            except (TypeError, ValueError) as error:
                if choice.tier != "heuristics":  # every process has the heuristics itself
                    failed = f"config {choice.cfg!r} cannot be sent to other processes: {error}"
                    self._publish(topic, call, {"failed": failed})
                    raise AutotuneError(f"key {call.key!r}: {failed}") from error
        self._publish(topic, call, message)
        return choice

    def _publish(self, topic: str, call: BoundCall, message: dict[str, Any]) -> None:
        try:
            self.client.key_value_set(topic, json.dumps(message))
        except Exception as error:
            raise AutotuneError(
                f"key {call.key!r}: process 0 could not publish its config: {error}"
            ) from error

    def _follow(self, topic: str, call: BoundCall) -> Choice:
        timeout = default_timeout_s() if self.timeout_s is None else self.timeout_s
        start = time.monotonic()
        try:
            text = self.client.blocking_key_value_get(topic, int(timeout * 1000))
            message = json.loads(text)
        except Exception as error:
            raise AutotuneError(
                f"process {self.process_id} got no config from process 0 for key {call.key!r} in "
                f"{time.monotonic() - start:.0f} s, of at most {timeout:.0f} s: {error}; does "
                "process 0 still run, and do all processes make the same calls?"
            ) from error
        if "failed" in message:
            raise AutotuneError(f"key {call.key!r}: process 0 failed: {message['failed']}")
        tier = message["tier"]
        if tier == "error":
            return Choice(None, tier, call.key, error=NoConfigError(message["text"]))
        if "cfg" not in message:
            return self._local_heuristics(call)
        return Choice(self._decode(message["cfg"], call), tier, call.key, ((tier, "process 0"),))

    def _local_heuristics(self, call: BoundCall) -> Choice:
        """Returns the heuristic choice, which every process computes alike."""
        cfg = call.kernel.heuristic_cfg(call)
        return Choice(cfg, "heuristics", call.key, (("heuristics", "as process 0"),))

    def _decode(self, plain: dict[str, Any], call: BoundCall) -> Any:
        kernel = call.kernel
        if plain.get("class") is None and plain["config"] is None:
            return None
        if kernel.config_cls is None and plain.get("class") is not None:
            for cfg in (*kernel.config_space(call),):  # classes that no module can name
                remember_class(type(cfg))
        try:
            return kernel.convert_config(decode_config(plain, kernel.config_cls), call)
        except (TypeError, ValueError, KeyError) as error:
            raise AutotuneError(
                f"key {call.key!r}: the config sent by process 0 cannot be read: {error}"
            ) from error


_groups: dict[int, PeerGroup] = {}
_groups_lock = threading.Lock()


def peers() -> PeerGroup | None:
    """The processes of this job, None when it has only one."""
    service = compat.coordination()
    if service is None:
        return None
    with _groups_lock:
        group = _groups.get(id(service.client))
        if group is None or group.client is not service.client:
            group = _groups[id(service.client)] = PeerGroup(service.client, service.process_id)
    return group
