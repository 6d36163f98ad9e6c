"""Values of the SGLang server that hosts the storage backend: resolved arguments, connection limits, cache resets."""

from __future__ import annotations

import logging
import operator
import threading
from typing import TYPE_CHECKING, Any

from kvpool.engines.common.prompt_files import prompt_digests

if TYPE_CHECKING:
    from collections.abc import Callable

    from kvpool.engines.sglang.page_transfer import Bandwidth

__all__ = ["ResetDetector", "connections_per_rank", "prompt_inputs", "server_argument", "storage_metrics"]

_log = logging.getLogger("sglang.kvpool")  # under SGLang's own logger, so that the engine's log shows it

_MARKERS = ("_slots", "mem_state")  # attributes that a host pool replaces when it is cleared
_CONNECTIONS_PER_POD = 32  # limit of the sidecar (kvpool_sidecar.serving.pod)


class ResetDetector:
    """Detects that SGLang flushed its cache or changed its weights. Thread-safe but for `watch`.

    A flush counts if it may have followed a change of weights: always, unless `sees_weights()`, because then
    `after_change` reports each change of weights.
    """

    def __init__(self, *, ignore_flushes: bool, sees_weights: Callable[[], bool] = lambda: False) -> None:
        self._ignore_flushes = ignore_flushes
        self._sees_weights = sees_weights
        self._lock = threading.Lock()
        self._markers: dict[str, tuple[Any, Any]] = {}  # name -> host pool, its marker
        self._weight_version: Any = None
        self._evidence = ""  # of other weights, not acted on yet
        self._is_flush_due = False  # SGLang may hold, and store, pages of earlier weights until it flushes them

    def watch(self, name: str, pool: Any) -> None:
        """Watch a host pool for flushes from now on."""
        self._markers = {**self._markers, name: (pool, _marker(pool))}

    def rearm(self) -> None:
        """Take the current state as the one to compare with."""
        with self._lock:
            if self._is_flushed():
                self._is_flush_due = False
            self._mark()
            self._weight_version = server_argument("weight_version")
            self._evidence = ""

    def before_change(self) -> list[Any]:
        """Return the state of the host pools, before a call that may change weights."""
        return [_marker(pool) for pool, _ in self._markers.values()]

    def after_change(self, before: list[Any] | None, reason: str) -> None:
        """Note that weights may have changed. `before`: what `before_change` returned, None if it is not known."""
        with self._lock:
            self._is_flush_due = before is None or not any(map(operator.is_not, before, self.before_change()))
            self._mark()
            self._evidence = reason

    def blind(self) -> str:
        """Return why a change of the weights would not be seen; empty if it would."""
        if server_argument("model_path") is not None and server_argument("weight_version") is None:
            return "SGLang does not show the version of its weights"
        pools = [pool for pool, marker in self._markers.values() if marker is None]
        if not self._ignore_flushes and any(getattr(pool, "kv_buffer", None) is not None for pool in pools):
            return "flushes of SGLang's host pools cannot be seen"
        return ""

    def change(self) -> str:
        """Return what changed since the last `rearm`, as a sentence for the log; empty if nothing did."""
        if self._evidence:
            return self._evidence
        if server_argument("weight_version") != self._weight_version:
            return "the engine's weights were changed"
        counts = self._is_flush_due or not (self._ignore_flushes or self._sees_weights())
        return "the engine's cache was flushed" if counts and self._is_flushed() else ""

    def _mark(self) -> None:
        self._markers = {name: (pool, _marker(pool)) for name, (pool, _) in self._markers.items()}

    def _is_flushed(self) -> bool:
        return any(marker is not None and _marker(pool) is not marker for pool, marker in self._markers.values())


def _marker(pool: Any) -> Any:
    """Return an object that the host pool replaces whenever it is cleared; None if it has none."""
    for name in _MARKERS:
        marker = getattr(pool, name, None)
        if marker is not None:
            return marker
    return None


def server_argument(name: str) -> Any:
    """Return a server argument as resolved by SGLang; None if there is no server or no such argument."""
    try:
        from sglang.srt.runtime_context import get_context

        context = get_context()
    except Exception:
        return None
    for is_leaf in (True, False):
        try:
            value = context.config_leaf(name) if is_leaf else getattr(context.server_args, name)
        except Exception as e:  # not published under this name: SGLang raises several kinds
            _log.debug("kvpool: server argument %s is unknown: %s", name, e)
            continue
        if value is not None:
            return value
    return None


def connections_per_rank(configured: int, config: Any) -> int:
    """Limit the connections of one rank so that all ranks of a pod stay within the pod's limit."""
    tensor = max(int(config.tp_size or 1), int(server_argument("tp_size") or 1))
    replicas = 1 if server_argument("enable_dp_attention") else int(server_argument("dp_size") or 1)
    return max(1, min(configured, _CONNECTIONS_PER_POD // (tensor * int(config.pp_size or 1) * replicas)))


def prompt_inputs() -> dict[str, str]:
    """Return digests of the server's tokenizer and chat template; a name is absent if nothing is known."""
    tokenizer = str(server_argument("tokenizer_path") or server_argument("model_path") or "")
    return prompt_digests(tokenizer, server_argument("revision"), str(server_argument("chat_template") or ""))


def storage_metrics(loads: list[Bandwidth], stores: list[Bandwidth]) -> Any:
    """Return SGLang's StorageMetrics of these batches."""
    from sglang.srt.observability.metrics_collector import StorageMetrics

    return StorageMetrics(
        prefetch_pgs=[batch.blocks for batch in loads],
        prefetch_bandwidth=[batch.gb_per_s for batch in loads],
        backup_pgs=[batch.blocks for batch in stores],
        backup_bandwidth=[batch.gb_per_s for batch in stores],
    )
