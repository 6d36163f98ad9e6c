"""Record of the blocks that this node has removed: why, and roughly when. Bounded memory; lost with the process.

A packed table of 131,072 entries of 8 bytes (1 MiB) in sets of four; a new entry replaces the oldest of its set. An
entry has 40 bits of the block's key, so a wrong match has a probability of four in 10^12. Times are in steps of 8 s.
"""

from __future__ import annotations

import threading
import time
from array import array
from typing import TYPE_CHECKING, Final, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

__all__ = ["REMOVAL_CAUSES", "Removal", "RemovedBlocks"]

REMOVAL_CAUSES: Final = ("capacity", "space", "quota", "expired", "purged", "quarantined", "memory")
"""Causes of kvpool_sidecar.blocks.events.BlocksRemoved that are recorded."""
_SETS: Final = 1 << 15
_WAYS: Final = 4
_STEP_S: Final = 8
_TIME_BITS: Final = 20  # 97 days
_CAUSE_BITS: Final = 4
_CODES: Final = {cause: code for code, cause in enumerate(REMOVAL_CAUSES, 1)}


class Removal(NamedTuple):
    """Why a block was removed, and how long ago in seconds."""

    cause: str
    age_s: int


class RemovedBlocks:
    """Thread-safe. `clock`: monotonic seconds."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._started = clock()
        self._lock = threading.Lock()
        self._entries = array("Q", bytes(8 * _SETS * _WAYS))

    def record(self, block_keys: Sequence[bytes], cause: str) -> None:
        """Record blocks that were removed; other causes than REMOVAL_CAUSES are ignored."""
        code = _CODES.get(cause)
        if code is None:
            return
        low = code << _TIME_BITS | self._now()
        with self._lock:
            for key in block_keys:
                start, tag = _place(key)
                entries = self._entries[start : start + _WAYS]
                way = next((n for n, e in enumerate(entries) if not e or e >> (_TIME_BITS + _CAUSE_BITS) == tag), -1)
                if way < 0:
                    way = min(range(_WAYS), key=lambda n: entries[n] & ((1 << _TIME_BITS) - 1))
                self._entries[start + way] = tag << (_TIME_BITS + _CAUSE_BITS) | low

    def find(self, block_key: bytes) -> Removal | None:
        """Return the block's last recorded removal; None without one."""
        start, tag = _place(block_key)
        with self._lock:
            entries = self._entries[start : start + _WAYS]
        for entry in entries:
            if entry and entry >> (_TIME_BITS + _CAUSE_BITS) == tag:
                code = entry >> _TIME_BITS & ((1 << _CAUSE_BITS) - 1)
                age = max(0, self._now() - (entry & ((1 << _TIME_BITS) - 1)))
                return Removal(REMOVAL_CAUSES[code - 1], age * _STEP_S)
        return None

    def _now(self) -> int:
        return min(int(self._clock() - self._started) // _STEP_S, (1 << _TIME_BITS) - 1)


def _place(block_key: bytes) -> tuple[int, int]:
    """Return the first entry of the key's set, and its tag of 40 bits. Keys are HMACs, so their bytes are uniform."""
    number = int.from_bytes(block_key[:8], "little")
    return number % _SETS * _WAYS, number >> 24
