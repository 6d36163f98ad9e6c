"""One policy per tenant: a tenant's own order decides which of its blocks are evicted.

When the node as a whole is full, the largest of the tenants with the lowest priority loses blocks. So a tenant that
writes much pays for itself, and no tenant changes the order of another. The number of tenants is that of the namespaces
served.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvpool_sidecar.eviction.packed_table import KeyTable
from kvpool_sidecar.eviction.policy import EvictionPolicy

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from kvpool_sidecar.eviction.policy import Entry
    from kvpool_sidecar.eviction.session_marks import SessionHint

__all__ = ["PerTenant"]


class PerTenant(EvictionPolicy):
    """`make` creates a tenant's policy; tenants with the lowest `priority` lose blocks first.

    `Entry.tenant`, from the block's header, attributes a block.
    """

    def __init__(
        self, make: Callable[[bytes], EvictionPolicy], priority: Callable[[bytes], int] = lambda _tenant: 0
    ) -> None:
        super().__init__()
        self._create = make
        self._priority = priority
        self._policies: dict[bytes, EvictionPolicy] = {}
        self._by_number: list[EvictionPolicy] = []
        self._numbers: dict[bytes, int] = {}
        self._index = KeyTable()
        self._owner = self._index.column("owner", "I")  # number of the policy that has the block

    def configure(self, make: Callable[[bytes], EvictionPolicy], priority: Callable[[bytes], int]) -> None:
        """Set the rules for new policies; existing policies stay."""
        self._create, self._priority = make, priority

    def policies(self) -> dict[bytes, EvictionPolicy]:
        """Policies by tenant, for reading and limiting only."""
        return dict(self._policies)

    def __len__(self) -> int:
        return len(self._index)

    def __contains__(self, block_key: bytes) -> bool:
        return self._index.find(block_key) != 0

    def __iter__(self) -> Iterator[bytes]:
        for table in self._policies.values():
            yield from table

    def bytes_of(self, tenant: bytes) -> int:
        """Bytes that the tenant's blocks take."""
        table = self._policies.get(tenant)
        return 0 if table is None else table.total_bytes

    @property
    def pinned_bytes(self) -> int:
        return sum(table.pinned_bytes for table in self._policies.values())

    def tenants(self) -> dict[bytes, int]:
        """Bytes of each tenant that has blocks."""
        return {tenant: table.total_bytes for tenant, table in self._policies.items() if len(table)}

    def pop_victims_of(
        self, tenant: bytes, need_bytes: int, max_count: int, *, drive: int | None = None
    ) -> list[tuple[bytes, Entry]]:
        """Like `pop_victims`, of one tenant's blocks."""
        table = self._policies.get(tenant)
        taken = [] if table is None or need_bytes <= 0 else table.pop_victims(need_bytes, max_count, drive=drive)
        for key, entry in taken:
            self._remove_key(key)
            self._account(entry, -1)
        self._note(*(key for key, _ in taken))
        return taken

    def get(self, block_key: bytes) -> Entry | None:
        table = self._table_of(block_key)
        return None if table is None else table.get(block_key)

    def drive_of(self, block_key: bytes) -> int:
        table = self._table_of(block_key)
        return -1 if table is None else table.drive_of(block_key)

    def add(self, block_key: bytes, entry: Entry) -> None:
        self.discard(block_key)
        self._put(block_key, entry).add(block_key, entry)

    def _put(self, block_key: bytes, entry: Entry) -> EvictionPolicy:
        table = self._policy_of(entry.tenant)
        self._owner[self._index.insert(block_key)] = self._numbers[entry.tenant]
        self._account(entry, 1)
        self._note(block_key)
        return table

    @property
    def slots(self) -> int:
        return self._index.slots

    @property
    def bytes_per_slot(self) -> int:
        return self._index.bytes_per_slot + max((table.bytes_per_slot for table in self._policies.values()), default=0)

    def entries_in(self, slots: Iterable[int]) -> list[tuple[bytes, Entry]]:
        keys = [self._index.key(slot) for slot in slots if self._index.has(slot)]
        return [(key, entry) for key in keys if (entry := self.get(key)) is not None]

    def last_uses_in(self, slots: Iterable[int]) -> list[tuple[float, int]]:
        places = [slot for slot in slots if self._index.has(slot)]
        entries = [(self.get(self._index.key(slot)), slot) for slot in places]
        return [(entry.persisted_at, slot) for entry, slot in entries if entry is not None]

    def touch(self, block_key: bytes, now: float) -> bool:
        table = self._table_of(block_key)
        return table is not None and table.touch(block_key, now)

    def observe_sequence(self, keys: Sequence[bytes], tenant: bytes = b"") -> None:
        self._policy_of(tenant).observe_sequence(keys, tenant)

    def hint(self, hint: SessionHint, keys: Sequence[bytes], tenant: bytes = b"") -> int:
        return self._policy_of(tenant).hint(hint, keys, tenant)

    def uses(self, block_key: bytes) -> int:
        table = self._table_of(block_key)
        return 0 if table is None else table.uses(block_key)

    def discard(self, block_key: bytes) -> bool:
        table = self._table_of(block_key)
        entry = None if table is None else table.get(block_key)
        if table is None or entry is None:
            return False
        table.discard(block_key)
        self._remove_key(block_key)
        self._account(entry, -1)
        self._note(block_key)
        return True

    def sort_by_last_use(self) -> None:
        for table in self._policies.values():
            table.sort_by_last_use()

    def reinsert(self, block_key: bytes, entry: Entry) -> None:
        self._put(block_key, entry).reinsert(block_key, entry)

    def _pop(self, drive: int | None) -> tuple[bytes, Entry]:
        tenants = [
            one
            for one, table in self._policies.items()
            if (len(table) if drive is None else table.on_drive(drive).blocks)
        ]
        tenant = min(tenants, key=lambda one: (self._priority(one), -self._policies[one].total_bytes))
        ((key, entry),) = self._policies[tenant].pop_victims(0, 1, at_least=1, drive=drive)
        self._remove_key(key)
        self._account(entry, -1)
        return key, entry

    def _table_of(self, block_key: bytes) -> EvictionPolicy | None:
        slot = self._index.find(block_key)
        return self._by_number[self._owner[slot]] if slot else None

    def _remove_key(self, block_key: bytes) -> None:
        slot = self._index.find(block_key)
        self._index.remove(slot)
        self._index.release(slot)

    def _admit(self, block_key: bytes, slot: int) -> None:
        raise NotImplementedError  # the tenants' policies have the blocks

    def _use(self, block_key: bytes, slot: int) -> None:
        raise NotImplementedError

    def _forget(self, block_key: bytes, slot: int) -> None:
        raise NotImplementedError

    def _evict(self) -> int:
        raise NotImplementedError

    def _reset(self) -> None:
        raise NotImplementedError

    def _policy_of(self, tenant: bytes) -> EvictionPolicy:
        table = self._policies.get(tenant)
        if table is None:
            table = self._policies[tenant] = self._create(tenant)
            self._numbers[tenant] = len(self._by_number)
            self._by_number.append(table)
        return table
