"""Which of the policy's victims an eviction takes, where some of them are not copied to the shared tier yet."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvpool_sidecar.eviction import Entry
    from kvpool_sidecar.storage.local.node_table import NodeTable

__all__ = ["AT_A_TIME", "EVICT_BATCH", "pop_victims", "prefer_clean"]

EVICT_BATCH = 256
AT_A_TIME = 1  # victims taken while the lock is held; each may update a part of the reuse model
_CLEAN_VICTIM_ROUNDS = 3  # further batches searched for victims that need no copy first


def pop_victims(table: NodeTable, need: int, at_least: int, drive: int | None) -> list[tuple[bytes, Entry]]:
    """Remove a batch of victims from the table, a few at a time: lookups wait for its lock. See EvictionPolicy."""
    victims: list[tuple[bytes, Entry]] = []
    freed = 0
    while len(victims) < EVICT_BATCH and (freed < need or len(victims) < at_least):
        with table.lock:
            some = table.policy.pop_victims(need - freed, AT_A_TIME, at_least=at_least - len(victims), drive=drive)
        if not some:
            break
        victims += some
        freed += sum(entry.size for _, entry in some)
    return victims


def prefer_clean(
    table: NodeTable,
    victims: list[tuple[bytes, Entry]],
    need: int,
    at_least: int,
    *,
    may_wait: bool,
    drive: int | None,
) -> list[tuple[bytes, Entry]]:
    """Replace dirty victims by clean ones where possible; dirty blocks are copied next.

    `drive`: as of the victims. Unless `may_wait`, space has priority: a shortfall is taken from dirty blocks, whose
    copies are lost.
    """
    dirty = _dirty(table, [key for key, _ in victims])
    if not dirty:
        return victims
    clean = [(key, entry) for key, entry in victims if key not in dirty]
    spared = [(key, entry) for key, entry in victims if key in dirty]
    for _ in range(_CLEAN_VICTIM_ROUNDS):
        short = need - sum(entry.size for _, entry in clean)
        few = at_least - len(clean)
        if short <= 0 and few <= 0:
            break
        more = pop_victims(table, short, few, drive)
        dirty = _dirty(table, [key for key, _ in more])
        clean += [(key, entry) for key, entry in more if key not in dirty]
        spared += [(key, entry) for key, entry in more if key in dirty]
    freed = sum(entry.size for _, entry in clean)
    while not may_wait and spared and (freed < need or len(clean) < at_least):
        freed += spared[0][1].size
        clean.append(spared.pop(0))
    with table.lock:
        for key, entry in reversed(spared):
            table.policy.reinsert(key, entry)
    if spared and table.pending_copies is not None:
        table.pending_copies.expedite([key for key, _ in spared])
    return clean


def _dirty(table: NodeTable, keys: Sequence[bytes]) -> set[bytes]:
    return set() if table.pending_copies is None else table.pending_copies.dirty(keys)
