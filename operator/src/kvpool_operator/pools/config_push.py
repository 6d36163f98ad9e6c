"""Pushes a changed configuration to running sidecars: the kubelet takes a minute or two to update the mounted file.

The push is an optimization. A sidecar that is unreachable or busy, or that cannot apply the change while it runs, reads
the file later or is restarted.
"""

from __future__ import annotations

import asyncio
import logging
import time
from typing import TYPE_CHECKING, Final

from kvpool_operator.errors import OperatorError
from kvpool_operator.sidecars.operation import SidecarAddress

if TYPE_CHECKING:
    from collections.abc import Callable

    from kvpool_operator.desired.inputs import PoolSecret
    from kvpool_operator.observe.snapshot import Sidecar, Snapshot
    from kvpool_operator.sidecars.admin_client import SidecarAdminClient

__all__ = ["ConfigPusher"]

log = logging.getLogger(__name__)

RETRY_S: Final = 10.0
TIMEOUT_S: Final = 2.0
MAX_CHARACTERS: Final = 48 * 1024
"""Longer texts are left to the kubelet, because sidecars limit the size of requests."""


class ConfigPusher:
    """Pushes the configurations of all pools. For one event loop."""

    def __init__(self, admin_client: SidecarAdminClient, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._admin_client = admin_client
        self._clock = clock
        self._tried: dict[tuple[str, str], tuple[str, float]] = {}

    def forget(self, pool: str) -> None:
        """The pool (namespace/name) no longer exists."""
        self._tried = {key: tried for key, tried in self._tried.items() if key[0] != pool}

    async def push(self, pool: str, snapshot: Snapshot, secret: PoolSecret, text: str, digest: str) -> bool:
        """Push `text` (with `digest`) to sidecars that run another configuration; whether any of them applied it."""
        if len(text) > MAX_CHARACTERS:
            return False
        outdated = [s for s in snapshot.sidecars if self._needs_push(pool, s, digest)]
        return any(await asyncio.gather(*(self._push_one(pool, s, secret, text, digest) for s in outdated)))

    def _needs_push(self, pool: str, sidecar: Sidecar, digest: str) -> bool:
        """Whether the sidecar reports another configuration and no push was tried within `RETRY_S`."""
        if sidecar.report is None or not sidecar.address or sidecar.report.config in ("", digest):
            return False
        tried, at = self._tried.get((pool, sidecar.node), ("", 0.0))
        return tried != digest or self._clock() - at >= RETRY_S

    async def _push_one(self, pool: str, sidecar: Sidecar, secret: PoolSecret, text: str, digest: str) -> bool:
        now = self._clock()
        self._tried[pool, sidecar.node] = (digest, now)
        name = f"reload-{digest}-{time.time_ns() // 1_000_000}"
        try:
            async with asyncio.timeout(TIMEOUT_S):
                await self._admin_client.start(
                    secret, SidecarAddress(sidecar.node, sidecar.address), name, "reload", {"config": text}
                )
        except (OperatorError, TimeoutError) as e:
            log.info("pool=%s node=%s: configuration not pushed, the kubelet will update it: %s", pool, sidecar.node, e)
            return False
        return True
