"""Block operations of this node for its clients: locate, open, and verify reported blocks.

Stores are in kvpool_sidecar.serving.store_service. Statuses are those of the wire protocol; messages are encoded in
kvpool_sidecar.serving.messages.
"""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING

from kvpool.protocol.wire import Tier
from kvpool_sidecar.replication.lookup_events import MAX_BLOCKS

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvpool_sidecar.counters import Stats
    from kvpool_sidecar.replication.lookup_events import LookupEvents
    from kvpool_sidecar.replication.verifier import BlockVerifier
    from kvpool_sidecar.serving.config_holder import ConfigHolder
    from kvpool_sidecar.serving.locator import BlockLocator, Located
    from kvpool_sidecar.serving.miss_causes import MissCauses
    from kvpool_sidecar.serving.opener import BlockOpener
    from kvpool_sidecar.tenancy.identity import Tenant

__all__ = ["BlockService"]


class BlockService:
    """Block operations shared by all client connections. Thread-safe."""

    def __init__(
        self,
        config: ConfigHolder,
        locator: BlockLocator,
        opener: BlockOpener,
        verifier: BlockVerifier,
        stats: Stats,
        causes: MissCauses,
        lookup_events: LookupEvents | None = None,
    ) -> None:
        self.config = config
        self.locator = locator
        self.opener = opener
        self.stats = stats
        self.causes = causes
        self._verifier = verifier
        self._lookup_events = lookup_events

    def on_lookup(self, tenant: Tenant, block_ids: Sequence[bytes], located: Located) -> None:
        """Publish the result of a lookup that was answered; its blocks are likely to be opened next. Does not block."""
        if self._lookup_events is not None:
            self._lookup_events.publish(tenant, block_ids, located.tiers, located.keys)

    def on_local_lookup(self, tenant: Tenant, block_ids: Sequence[bytes]) -> None:
        """Publish a lookup that a client answered from its block table, up to the first block that is not here."""
        if self._lookup_events is None:
            return
        keys = [tenant.block_key(block_id) for block_id in block_ids[:MAX_BLOCKS]]
        here = list(itertools.takewhile(self.locator.is_local, keys))
        tiers = (bytes([Tier.LOCAL]) * len(here)).ljust(len(keys), b"\0")
        self._lookup_events.publish(tenant, block_ids, tiers, keys)

    def report_corrupt(self, tenants: Sequence[Tenant], block_ids: Sequence[bytes]) -> None:
        """Queue blocks that a client reported as corrupt for verification, for each tenant that may own them."""
        for tenant, block_id in itertools.product(tenants, block_ids):
            key = tenant.block_key(block_id)
            self.opener.resolver.invalidate(key)
            self._verifier.report(key)
