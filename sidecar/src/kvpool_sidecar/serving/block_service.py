"""Block operations of this node for its clients: locate, open, write, and verify reported blocks.

Statuses are those of the wire protocol; messages are encoded in kvpool_sidecar.serving.messages.
"""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING

from kvpool.errors import CorruptBlockError, RefusedError, TierFullError
from kvpool.protocol.wire import BeginStatus, CommitStatus
from kvpool_sidecar.blocks.file import Expect
from kvpool_sidecar.storage.base import CommitOutcome

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from kvpool_sidecar.counters import Stats
    from kvpool_sidecar.replication.lookup_events import LookupEvents
    from kvpool_sidecar.replication.verifier import BlockVerifier
    from kvpool_sidecar.serving.config_holder import ConfigHolder
    from kvpool_sidecar.serving.locator import BlockLocator, Located
    from kvpool_sidecar.serving.opener import BlockOpener
    from kvpool_sidecar.storage.base import WriteTransaction
    from kvpool_sidecar.tenancy.identity import Tenant

__all__ = ["BlockService"]

_COMMIT_STATUS = {CommitOutcome.STORED: CommitStatus.STORED, CommitOutcome.ALREADY_PRESENT: CommitStatus.HAVE}
_REJECTIONS: dict[type[Exception], str] = {CorruptBlockError: "corrupt", RefusedError: "still-writable"}


class BlockService:
    """Block operations shared by all client connections. Thread-safe.

    `on_written(key, payload_len)` is called for each block that a client has written.
    """

    def __init__(
        self,
        config: ConfigHolder,
        locator: BlockLocator,
        opener: BlockOpener,
        verifier: BlockVerifier,
        stats: Stats,
        on_written: Callable[[bytes, int], None],
        lookup_events: LookupEvents | None = None,
    ) -> None:
        self.config = config
        self.locator = locator
        self.opener = opener
        self.stats = stats
        self._local = opener.local
        self._verifier = verifier
        self._on_written = on_written
        self._lookup_events = lookup_events

    def on_lookup(self, tenant: Tenant, block_ids: Sequence[bytes], located: Located) -> None:
        """Publish the result of a lookup that was answered; its blocks are likely to be opened next. Does not block."""
        if self._lookup_events is not None:
            self._lookup_events.publish(tenant, block_ids, located.tiers, located.keys)

    def begin(
        self, tenant: Tenant, block_id: bytes, payload_len: int
    ) -> tuple[BeginStatus, bytes, WriteTransaction | None]:
        """Return status and key, and for WRITE a transaction for a block of `payload_len`."""
        key = tenant.block_key(block_id)
        if not 0 < payload_len <= self.config.current.cache.max_block_bytes:
            self.stats.add("refused", "too-large")
            return BeginStatus.REFUSED, key, None
        try:
            pending = self._local.begin(key, payload_len)
        except (TierFullError, OSError) as e:
            self.stats.add("refused", "full" if isinstance(e, TierFullError) else "io")
            return BeginStatus.REFUSED, key, None
        return (BeginStatus.HAVE, key, None) if pending is None else (BeginStatus.WRITE, key, pending)

    def commit(self, tenant: Tenant, block_id: bytes, pending: WriteTransaction, *, fill: bool) -> CommitStatus:
        """Publish a written block. Returns REJECTED, counted by reason, if the file is not valid."""
        try:
            outcome = pending.commit(Expect(block_id, tenant.tag), fill_checksum=fill)
        except (CorruptBlockError, RefusedError, OSError) as e:
            self.stats.add("rejected", _REJECTIONS.get(type(e), "io"))
            return CommitStatus.REJECTED
        if outcome is CommitOutcome.STORED:
            self.stats.add("stored", "blocks")
            self.stats.add("stored", "bytes", pending.payload_len)
            self._on_written(pending.block_key, pending.payload_len)
        return _COMMIT_STATUS[outcome]

    def abort(self, pending: WriteTransaction) -> None:
        """Discard an unfinished write."""
        pending.abort()

    def report_corrupt(self, tenants: Sequence[Tenant], block_ids: Sequence[bytes]) -> None:
        """Queue blocks that a client reported as corrupt for verification, for each tenant that may own them."""
        for tenant, block_id in itertools.product(tenants, block_ids):
            key = tenant.block_key(block_id)
            self.opener.resolver.invalidate(key)
            self._verifier.report(key)
