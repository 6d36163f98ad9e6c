"""Kinds `evacuate` and `remain`: this node is to leave, or stays after all (kvpool_sidecar.replication.drain_source).

`evacuate` {"bandwidth": bytes per second} returns at once; the node leaves until `remain`, which has no parameters. How
it goes shows in /status. With {"wait_s": seconds} the node is only moved off once: it ends when everything hot is
elsewhere, too, and fails when the time is over before; then, or when it is cancelled, the node stays.
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
_POLL_S = 0.2


class Evacuate:
    """See above. ProtocolError for parameters that make no sense, PoolUnavailableError when a wait was in vain."""

    def __init__(self, evacuator: DrainSource) -> None:
        self._evacuator = evacuator

    def __call__(self, params: Mapping[str, object], context: Context) -> Mapping[str, int]:
        rate, wait_s = _number(params, "bandwidth", _MAX_RATE), _number(params, "wait_s", _MAX_WAIT_S, default=0)
        if params.keys() - {"bandwidth", "wait_s"} or not rate:
            raise ProtocolError("evacuate: give bandwidth in bytes per second, and wait_s or not")
        if not wait_s:
            self._evacuator.start(rate)
            return {}
        self._evacuator.start(rate, OPERATION)
        try:
            self._wait(time.monotonic() + wait_s, context)
        finally:
            told = self._evacuator.status()
            context.count("blocks", told["moved_blocks"])
            context.count("bytes", told["moved_bytes"])
            self._evacuator.cancel(OPERATION)
        return {}

    def _wait(self, deadline: float, context: Context) -> None:
        while not self._evacuator.wait(_POLL_S):
            context.check()
            told = self._evacuator.status()
            context.progress(told["moved_blocks"], told["moved_blocks"] + told["remaining_blocks"], "blocks")
            if time.monotonic() > deadline:
                left = told["remaining_blocks"]
                raise PoolUnavailableError(f"{left} hot blocks are here alone: {told['problem'] or 'the time is over'}")


class Remain:
    """See above."""

    def __init__(self, evacuator: DrainSource) -> None:
        self._evacuator = evacuator

    def __call__(self, params: Mapping[str, object], _context: Context) -> None:
        if params:
            raise ProtocolError("remain: it has no parameters")
        self._evacuator.cancel(NODE)


def _number(params: Mapping[str, object], name: str, most: int, default: int | None = None) -> int:
    value = params.get(name, default)
    if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value <= most:
        raise ProtocolError(f"evacuate: {name} is a number from 0 to {most}")
    return value
