"""Operations of this sidecar: a thread for each that runs, at most two at a time, the last ones remembered.

They are known by ids that the operator gives. Starting one that is known changes nothing, so an order that may have got
lost is given again. Nothing survives a restart: whoever ordered an operation that nobody knows any more orders it
again, and every kind is made so that doing it twice does no harm.
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

__all__ = ["MAX_REMEMBERED", "MAX_RUNNING", "Operations"]

log = logging.getLogger(__name__)

MAX_RUNNING = 2
MAX_REMEMBERED = 64
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
            "progress": self.context.how_far,
            "counts": self.context.counts,
        }


class Operations:
    """Thread-safe. `kinds`: what can be ordered; each is called in a thread of its own, with parameters and Context.

    A kind raises ProtocolError for parameters that it does not understand, any KVPoolError or OSError when it fails,
    and may return counts for the operation's results.
    """

    def __init__(self, kinds: Mapping[str, Runner], stats: Stats) -> None:
        self._kinds = dict(kinds)
        self._stats = stats
        self._lock = threading.Lock()
        self._known: OrderedDict[str, _Operation] = OrderedDict()
        self._stopped = False

    @property
    def kinds(self) -> list[str]:
        """What can be ordered."""
        return sorted(self._kinds)

    def start(self, name: object, kind: object, params: object) -> dict[str, Any]:
        """The state of the operation `name`, which runs now if it was not known.

        ProtocolError for what makes no sense, RefusedError if that id means something else, BusyError if two run.
        """
        if not isinstance(name, str) or not _ID.fullmatch(name):
            raise ProtocolError("id: 1 to 96 letters, digits, dots and hyphens")
        if not isinstance(kind, str) or kind not in self._kinds:
            raise ProtocolError(f"kind: this sidecar knows {', '.join(self.kinds)}")
        if not isinstance(params, dict) or len(params) > MAX_PARAMS:
            raise ProtocolError("params: an object is needed")
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
            for old in finished[: max(0, len(self._known) - MAX_REMEMBERED)]:
                del self._known[old]
            made.thread = threading.Thread(
                target=self._run, args=(name, made), name=f"operation-{kind}"[:15], daemon=True
            )
            made.thread.start()
            return made.report(name)

    def get(self, name: str) -> dict[str, Any] | None:
        """Its state; None if it is not known."""
        with self._lock:
            known = self._known.get(name)
            return None if known is None else known.report(name)

    def cancel(self, name: str) -> dict[str, Any] | None:
        """Have it end soon, Failed with the message `cancelled`; its state now. None if it is not known."""
        with self._lock:
            known = self._known.get(name)
            if known is None:
                return None
            known.context.cancelled.set()
            return known.report(name)

    def stop(self) -> None:
        """Cancel all; waits two seconds at most."""
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
        """For /status: those that run, without their parameters."""
        with self._lock:
            return [one.report(name) for name, one in self._known.items() if one.state == "Running"]

    def _run(self, name: str, operation: _Operation) -> None:
        context = operation.context
        log.info("operation %s (%s) begins", name, operation.kind)
        state, message = "Failed", ""
        try:
            for label, n in (self._kinds[operation.kind](operation.params, context) or {}).items():
                context.count(label, n)
            context.check()
            state = "Succeeded"
        except CancelledError:
            message = "cancelled"
        except (KVPoolError, OSError) as e:
            message = "cancelled" if context.cancelled.is_set() else str(e)[:_MESSAGE]
        except Exception as e:
            log.exception("operation %s", name)
            message = f"{type(e).__name__}: see the sidecar's log"
        with self._lock:
            operation.state, operation.message = state, message
        self._stats.add("operations", f"{operation.kind}-{state.lower()}")
        log.info("operation %s (%s): %s %s %s", name, operation.kind, state, message, context.counts)
