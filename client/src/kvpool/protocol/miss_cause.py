"""Causes of misses on the wire. Pure."""

from __future__ import annotations

import enum

__all__ = ["MissCause"]


class MissCause(enum.IntEnum):
    """Why a block was not found, in replies to LOOKUP and OPEN. `label` is the value of kvpool.stats.Reason."""

    ABSENT = 0  # the sidecar gives no cause
    BUSY = 1  # not checked: the node's admission queue is full
    NEVER_STORED = 2
    EVICTED_CAPACITY = 3
    EVICTED_SPACE = 4
    EVICTED_QUOTA = 5
    EXPIRED = 6
    PURGED = 7
    QUARANTINED = 8
    FINGERPRINT_DIFFERS = 9
    GRANT_UNUSED = 10
    PEER_UNREACHABLE = 11
    DEADLINE = 12
    SLOWER_THAN_COMPUTE = 13
    INDEX_UNAVAILABLE = 14

    @property
    def label(self) -> str:
        """Lower case with hyphens."""
        return self.name.lower().replace("_", "-")
