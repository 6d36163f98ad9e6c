"""Measures an eviction order against LRU on the same blocks, and says how far the order may be trusted.

A simulation of LRU in miniature runs beside the table: the same accesses, with the room that the table itself takes.
Blocks are sampled by a hash of their keys where there are many of them (Waldspurger, Saemundsson, Ahmad, Park, "Cache
modeling and optimization using miniature simulations", USENIX ATC 2017). LRU judges each block alone, so a sample of
blocks need not consist of whole prompts. Hits that the order had and LRU had not, less the reverse, are the balance.
While the balance is above a small debt in proportion to the accesses, the order decides alone; from there to twice the
debt it may choose among fewer and fewer of the blocks used least recently, in the end among one: LRU. So an order that
is worse than LRU costs a bounded share of hits. A gain of the past counts only up to a share, so that the order of a
workload that has changed is soon left. Deterministic. Pure.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import NamedTuple
from zlib import crc32

__all__ = ["GuardStatus", "RecencyGuard"]

_SAMPLED = 1 << 15  # blocks of the miniature, and of the table as far as it is sampled: about 9 MB
_MAX_SHIFT = 20
_DEBT = 0.001  # of the accesses
_LEAST_DEBT = 50.0  # accesses, so that one long prompt decides nothing
_CREDIT = 0.01  # of the accesses
_HALVE_AFTER = 1 << 20  # accesses
_DROPPED = 128  # keys that one access removes after the sample became smaller; the table's lock is held meanwhile


class GuardStatus(NamedTuple):
    """Figures of one table. `balance`: hits above LRU's, of `accesses`; both fade. `trust`: 0 (LRU) to 1."""

    trust: float
    balance: float
    accesses: float
    sampled: float


class RecencyGuard:
    """Not thread-safe. `most` bounds the blocks that it remembers."""

    def __init__(self, most: int = _SAMPLED) -> None:
        self._most = most
        self._shift = 0
        self._mask = 0
        self._held: dict[bytes, int] = {}  # sampled blocks of the table, and their bytes
        self._held_bytes = 0
        self._lru: OrderedDict[bytes, int] = OrderedDict()
        self._lru_bytes = 0
        self._dropping: list[bytes] = []  # keys of which half left the sample
        self._balance = 0.0
        self._accesses = 0.0

    @property
    def trust(self) -> float:
        """How far the order may be trusted: 1 entirely, 0 not at all."""
        debt = max(_LEAST_DEBT, _DEBT * self._accesses)
        return min(1.0, max(0.0, 2 + self._balance / debt))

    @property
    def status(self) -> GuardStatus:
        """Figures for reading."""
        return GuardStatus(self.trust, self._balance, self._accesses, 1 / (1 << self._shift))

    def candidates(self, count: int) -> int:
        """Return among how many of `count` sampled blocks, the least recently used of them, the order may choose."""
        trust = self.trust
        return count if trust == 1.0 else max(1, round(count**trust))

    def use(self, block_key: bytes) -> None:
        """Record a use of a block that the table has."""
        if self._mask and crc32(block_key) & self._mask:
            return
        size = self._held.get(block_key)
        if size is not None:
            self._access(block_key, size, hit=True)

    def store(self, block_key: bytes, size: int) -> None:
        """Record a store of a block that the table did not have. Nothing changes if it was put back by `restore`."""
        if (self._mask and crc32(block_key) & self._mask) or block_key in self._held:
            return
        self._access(block_key, size, hit=False)
        self._held[block_key] = size
        self._held_bytes += size
        if not self._dropping and (len(self._held) > self._most or len(self._lru) > self._most):
            self._sample_less()

    def restore(self, block_key: bytes, size: int) -> None:
        """Put back a victim that stays: its eviction and its return were no accesses."""
        if (self._mask and crc32(block_key) & self._mask) or block_key in self._held:
            return
        self._held[block_key] = size
        self._held_bytes += size

    def evict(self, block_key: bytes) -> None:
        """Record an eviction by the order: LRU has to make the same room."""
        self._held_bytes -= self._held.pop(block_key, 0)
        while self._lru_bytes > self._held_bytes:
            self._lru_bytes -= self._lru.popitem(last=False)[1]

    def discard(self, block_key: bytes) -> None:
        """Record a removal that no order decided."""
        self._held_bytes -= self._held.pop(block_key, 0)
        self._lru_bytes -= self._lru.pop(block_key, 0)

    def clear(self) -> None:
        """Forget the blocks; the balance stays."""
        self._held.clear()
        self._lru.clear()
        self._dropping.clear()
        self._held_bytes = self._lru_bytes = 0

    def _access(self, block_key: bytes, size: int, *, hit: bool) -> None:
        lru = self._lru
        if block_key in lru:
            lru.move_to_end(block_key)
            self._balance += hit - 1
        else:
            lru[block_key] = size
            self._lru_bytes += size
            self._balance += hit
        self._accesses += 1
        self._balance = min(self._balance, _CREDIT * self._accesses)
        if self._accesses >= _HALVE_AFTER:
            self._fade()
        if self._dropping:
            self._drop_unsampled()

    def _sample_less(self) -> None:
        self._shift += 1
        self._mask = (1 << self._shift) - 1
        self._dropping = [*self._held, *self._lru]
        self._fade()
        self._drop_unsampled()

    def _drop_unsampled(self) -> None:
        """Forget some of the blocks that left the sample."""
        mask = self._mask
        for key in self._dropping[-_DROPPED:]:
            if crc32(key) & mask:
                self.discard(key)
        del self._dropping[-_DROPPED:]

    def _fade(self) -> None:
        self._balance /= 2
        self._accesses /= 2
