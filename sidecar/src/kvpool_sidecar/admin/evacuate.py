"""Operations `evacuate` and `remain`: start and cancel the drain of a node (kvpool_sidecar.replication.drain_source).

`evacuate` {"bandwidth": bytes per second} returns immediately; the drain continues until `remain`, which has no
parameters. /status shows its progress. With {"wait_s": seconds} the operation waits until every hot block has another
copy, and fails if the time is over before. Then, or when it is cancelled, the drain ends.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from kvpool.errors import PoolUnavailableError, ProtocolError
from kvpool_sidecar.replication.drain_source import NODE, OPERATION

if TYPE_CHECKING:
    from collections.abc import Mapping

    from kvpool_sidecar.admin.context import Context
    from kvpool_sidecar.replication.drain_source import DrainSource

__all__ = ["Evacuate", "Remain"]

_MAX_RATE = 1 << 40
_MAX_WAIT_S = 24 * 3600
_POLL_INTERVAL_S = 0.2


class Evacuate:
    """Operation `evacuate`. ProtocolError for invalid parameters, PoolUnavailableError if the wait times out."""

    def __init__(self, drain: DrainSource) -> None:
        self._drain = drain

    def __call__(self, params: Mapping[str, object], context: Context) -> Mapping[str, int]:
        rate, wait_s = _number(params, "bandwidth", _MAX_RATE), _number(params, "wait_s", _MAX_WAIT_S, default=0)
        if params.keys() - {"bandwidth", "wait_s"} or not rate:
            raise ProtocolError("evacuate: bandwidth in bytes per second is required, wait_s is optional")
        if not wait_s:
            self._drain.start(rate)
            return {}
        self._drain.start(rate, OPERATION)
        try:
            self._wait(time.monotonic() + wait_s, context)
        finally:
            status = self._drain.status()
            context.count("blocks", status["moved_blocks"])
            context.count("bytes", status["moved_bytes"])
            self._drain.cancel(OPERATION)
        return {}

    def _wait(self, deadline: float, context: Context) -> None:
        while not self._drain.wait(_POLL_INTERVAL_S):
            context.check()
            status = self._drain.status()
            context.set_progress(status["moved_blocks"], status["moved_blocks"] + status["remaining_blocks"], "blocks")
            if time.monotonic() > deadline:
                left = status["remaining_blocks"]
                raise PoolUnavailableError(
                    f"{left} hot blocks have no other copy: {status['problem'] or 'the time is over'}"
                )


class Remain:
    """Operation `remain`."""

    def __init__(self, drain: DrainSource) -> None:
        self._drain = drain

    def __call__(self, params: Mapping[str, object], _context: Context) -> None:
        if params:
            raise ProtocolError("remain: no parameters are allowed")
        self._drain.cancel(NODE)


def _number(params: Mapping[str, object], name: str, most: int, default: int | None = None) -> int:
    value = params.get(name, default)
    if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value <= most:
        raise ProtocolError(f"evacuate: {name} must be a number from 0 to {most}")
    return value
