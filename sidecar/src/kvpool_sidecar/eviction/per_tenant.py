"""One policy per tenant: a tenant's own order decides which of its blocks are evicted.

When the node as a whole is full, the largest of the tenants with the lowest priority loses blocks. So a tenant that
writes much pays for itself, and no tenant changes the order of another. The number of tenants is that of the namespaces
served.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvpool_sidecar.eviction.policy import EvictionPolicy

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

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

    def configure(self, make: Callable[[bytes], EvictionPolicy], priority: Callable[[bytes], int]) -> None:
        """Set the rules for new policies; existing policies stay."""
        self._create, self._priority = make, priority

    def policies(self) -> dict[bytes, EvictionPolicy]:
        """Policies by tenant, for reading and limiting only."""
        return dict(self._policies)

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
            del self._entries[key]
            self._account(entry, -1)
        self._note(*(key for key, _ in taken))
        return taken

    def touch(self, block_key: bytes, now: float) -> bool:
        entry = self._entries.get(block_key)
        if entry is None:
            return False
        table = self._policies[entry.tenant]
        save = table.touch(block_key, now)
        saved = table.get(block_key)
        if saved is not None and saved is not entry:
            self._entries[block_key] = saved
        return save

    def observe_sequence(self, keys: Sequence[bytes], tenant: bytes = b"") -> None:
        self._policy_of(tenant).observe_sequence(keys, tenant)

    def hint(self, hint: SessionHint, keys: Sequence[bytes], tenant: bytes = b"") -> int:
        return self._policy_of(tenant).hint(hint, keys, tenant)

    def uses(self, block_key: bytes) -> int:
        entry = self._entries.get(block_key)
        return 0 if entry is None else self._policies[entry.tenant].uses(block_key)

    def _admit(self, block_key: bytes, entry: Entry) -> None:
        self._policy_of(entry.tenant).add(block_key, entry)

    def discard(self, block_key: bytes) -> bool:
        entry = self._entries.get(block_key)
        if entry is not None:
            self._policies[entry.tenant].discard(block_key)
        return super().discard(block_key)

    def load(self, entries: Sequence[tuple[bytes, Entry]]) -> None:
        self._entries = dict(entries)
        by_tenant: dict[bytes, list[tuple[bytes, Entry]]] = {}
        for key, entry in entries:
            self._account(entry, 1)
            by_tenant.setdefault(entry.tenant, []).append((key, entry))
        for tenant, some in by_tenant.items():
            self._policy_of(tenant).load(some)

    def sort_by_last_use(self) -> None:
        for table in self._policies.values():
            table.sort_by_last_use()

    def reinsert(self, block_key: bytes, entry: Entry) -> None:
        self._policy_of(entry.tenant).reinsert(block_key, entry)
        self._entries[block_key] = entry
        self._account(entry, 1)
        self._note(block_key)

    def _evict(self) -> bytes:
        return self._pop_one([tenant for tenant, table in self._policies.items() if len(table)], None)

    def _next_on(self, drive: int) -> bytes:
        return self._pop_one([one for one, table in self._policies.items() if table.on_drive(drive).blocks], drive)

    def _pop_one(self, tenants: list[bytes], drive: int | None) -> bytes:
        tenant = min(tenants, key=lambda one: (self._priority(one), -self._policies[one].total_bytes))
        (key, _), *_ = self._policies[tenant].pop_victims(0, 1, at_least=1, drive=drive)
        return key

    def _use(self, block_key: bytes) -> None:
        raise NotImplementedError  # `touch` delegates to the tenant's policy

    def _forget(self, block_key: bytes) -> None:
        """`discard` has already updated the tenant's policy."""

    def _reset(self) -> None:
        self._policies.clear()

    def _policy_of(self, tenant: bytes) -> EvictionPolicy:
        table = self._policies.get(tenant)
        if table is None:
            table = self._policies[tenant] = self._create(tenant)
        return table
