"""Runs operations of the operator, each in a thread, at most two at a time; the latest ones are kept for queries.

The operator assigns their ids. Starting a known id changes nothing, so a request that may have been lost is repeated.
Operations do not survive a restart: the operator starts an unknown operation again, and every kind is idempotent.
"""

from __future__ import annotations

import logging
import re
import threading
import time
from collections import OrderedDict
from typing import TYPE_CHECKING, Any

from kvpool.errors import BusyError, KVPoolError, ProtocolError, RefusedError
from kvpool_sidecar.admin.context import CancelledError, Context

if TYPE_CHECKING:
    from collections.abc import Mapping

    from kvpool_sidecar.admin.context import Runner
    from kvpool_sidecar.counters import Stats

__all__ = ["MAX_KEPT", "MAX_RUNNING", "Operations"]

log = logging.getLogger(__name__)

MAX_RUNNING = 2
MAX_KEPT = 64
MAX_PARAMS = 64
_ID = re.compile(r"[0-9a-zA-Z][0-9a-zA-Z.-]{0,95}")
_MESSAGE = 500
_STOP_S = 2.0


class _Operation:
    def __init__(self, kind: str, params: Mapping[str, object]) -> None:
        self.kind = kind
        self.params = dict(params)
        self.context = Context()
        self.state = "Running"
        self.message = ""
        self.thread: threading.Thread | None = None

    def report(self, name: str) -> dict[str, Any]:
        return {
            "id": name,
            "kind": self.kind,
            "state": self.state,
            "message": self.message,
            "progress": self.context.progress,
            "counts": self.context.counts,
        }


class Operations:
    """Thread-safe. `handlers` by kind; each is called in a thread of its own, with parameters and Context.

    A handler raises ProtocolError for invalid parameters, any KVPoolError or OSError when it fails, and may return
    counts for the operation's results.
    """

    def __init__(self, handlers: Mapping[str, Runner], stats: Stats) -> None:
        self._handlers = dict(handlers)
        self._stats = stats
        self._lock = threading.Lock()
        self._known: OrderedDict[str, _Operation] = OrderedDict()
        self._stopped = False

    @property
    def kinds(self) -> list[str]:
        """Kinds of operations that this sidecar supports."""
        return sorted(self._handlers)

    def start(self, name: object, kind: object, params: object) -> dict[str, Any]:
        """Start the operation `name` unless it is known, and return its state.

        ProtocolError for an invalid request, RefusedError if another operation has the id, BusyError at the limit.
        """
        if not isinstance(name, str) or not _ID.fullmatch(name):
            raise ProtocolError("id: 1 to 96 letters, digits, dots and hyphens")
        if not isinstance(kind, str) or kind not in self._handlers:
            raise ProtocolError(f"kind: this sidecar supports {', '.join(self.kinds)}")
        if not isinstance(params, dict) or len(params) > MAX_PARAMS:
            raise ProtocolError("params: expected an object")
        with self._lock:
            known = self._known.get(name)
            if known is not None:
                if (known.kind, known.params) != (kind, params):
                    raise RefusedError("another operation has this id")
                return known.report(name)
            running = sum(one.state == "Running" for one in self._known.values())
            if self._stopped or running >= MAX_RUNNING:
                raise BusyError(f"{running} operations are running")
            made = self._known[name] = _Operation(kind, params)
            finished = [n for n, one in self._known.items() if one.state != "Running"]
            for old in finished[: max(0, len(self._known) - MAX_KEPT)]:
                del self._known[old]
            made.thread = threading.Thread(
                target=self._run, args=(name, made), name=f"operation-{kind}"[:15], daemon=True
            )
            made.thread.start()
            return made.report(name)

    def get(self, name: str) -> dict[str, Any] | None:
        """Return the state of an operation; None if it is unknown."""
        with self._lock:
            known = self._known.get(name)
            return None if known is None else known.report(name)

    def cancel(self, name: str) -> dict[str, Any] | None:
        """Cancel an operation, which fails with the message `cancelled`; return its state, None if it is unknown."""
        with self._lock:
            known = self._known.get(name)
            if known is None:
                return None
            known.context.cancelled.set()
            return known.report(name)

    def stop(self) -> None:
        """Cancel all operations and wait two seconds at most."""
        with self._lock:
            self._stopped = True
            running = [one for one in self._known.values() if one.state == "Running"]
        for one in running:
            one.context.cancelled.set()
        until = time.monotonic() + _STOP_S
        for one in running:
            if one.thread is not None:
                one.thread.join(max(0.0, until - time.monotonic()))

    def status(self) -> list[dict[str, Any]]:
        """Return the running operations, without their parameters, for /status."""
        with self._lock:
            return [one.report(name) for name, one in self._known.items() if one.state == "Running"]

    def _run(self, name: str, operation: _Operation) -> None:
        context = operation.context
        log.info("operation %s (%s) started", name, operation.kind)
        state, message = "Failed", ""
        try:
            for label, n in (self._handlers[operation.kind](operation.params, context) or {}).items():
                context.count(label, n)
            context.check()
            state = "Succeeded"
        except CancelledError:
            message = "cancelled"
        except (KVPoolError, OSError) as e:
            message = "cancelled" if context.cancelled.is_set() else str(e)[:_MESSAGE]
        except Exception as e:
            log.exception("operation %s failed because of a defect", name)
            message = f"{type(e).__name__}: see the sidecar's log"
        with self._lock:
            operation.state, operation.message = state, message
        self._stats.add("operations", f"{operation.kind}-{state.lower()}")
        log.info("operation %s (%s): %s %s %s", name, operation.kind, state, message, context.counts)
