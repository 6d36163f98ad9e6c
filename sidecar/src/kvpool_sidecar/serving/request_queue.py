"""Turns of clients' requests: one tenant's requests take a bounded share of the process's time, in turn with others'.

The interpreter runs one thread at a time: without turns, 32 connections of one pod take nearly all of it.
"""

from __future__ import annotations

import functools
import time
from typing import TYPE_CHECKING

from kvpool.errors import ProtocolError
from kvpool.protocol import wire
from kvpool_sidecar.resilience.turn import begin_turn
from kvpool_sidecar.serving.messages import split_deadline

if TYPE_CHECKING:
    from collections.abc import Hashable

    from kvpool_sidecar.resilience.fair_queue import RequestQueue

__all__ = ["RequestTurn", "request_cost"]

_LIMITS: dict[int, int] = {  # most blocks of a request; other operations are never rejected
    wire.Op.LOOKUP: wire.MAX_LOOKUP,
    wire.Op.OPEN: wire.MAX_BATCH,
    wire.Op.BEGIN: wire.MAX_BATCH,
}
_BASE = 64  # block ids whose lookup costs as much as any request
_FILE = 2  # the same for one file that is opened, created or checked
_FILES = (wire.Op.OPEN, wire.Op.BEGIN, wire.Op.COMMIT)
_QUEUE_SHARE = 0.5  # of a request's deadline may pass in the queue
_PATIENCE_S = 1.0  # of requests without a deadline
_MIN_PATIENCE_S = 0.005
_MIN_REJECT_S, _MAX_REJECT_S = 0.02, 0.1  # an immediate rejection would let a flood send the next request


def request_cost(op: int, items: int, size: int) -> int:
    """Return the cost of a request with `items` blocks and a body of `size` bytes, in block ids of a lookup."""
    return _BASE + (items * _FILE if op in _FILES else size // wire.BLOCK_ID_BYTES)


class RequestTurn:
    """Turns of one connection. Not thread-safe: one request at a time."""

    def __init__(self, queue: RequestQueue, tenant: Hashable) -> None:
        self._queue = queue
        self._tenant = tenant

    def begin(self, head: wire.Head, body: memoryview) -> bool:
        """Wait for the turn of a request, which `end_turn` ends. Return False to reject it.

        Rejected are lookups, loads and stores of a tenant that requests more than its share; all else waits for at most
        a second. ProtocolError for an impossible number of blocks.
        """
        limit = _LIMITS.get(head.op)
        if limit is not None and not 0 < head.items <= limit:
            raise ProtocolError(f"{head.items} blocks in one request")
        began = time.monotonic()
        timeout, patience = 0.0, _PATIENCE_S
        if head.op in (wire.Op.LOOKUP, wire.Op.OPEN):
            timeout, _ = split_deadline(body)
            patience = max(timeout * _QUEUE_SHARE, _MIN_PATIENCE_S)
        cost = request_cost(head.op, head.items, len(body))
        grant = self._queue.acquire(self._tenant, cost, began + patience)
        if grant is not None:
            begin_turn(functools.partial(self._queue.release, grant))
            return True
        time.sleep(max(0.0, began + min(max(timeout, _MIN_REJECT_S), _MAX_REJECT_S) - time.monotonic()))
        return limit is None
