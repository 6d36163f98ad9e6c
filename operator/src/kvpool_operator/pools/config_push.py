"""Brings a changed configuration to running sidecars at once: the kubelet takes a minute or two to exchange its file.

It is a courtesy. A sidecar that is not reached, or is busy, or cannot take it as it runs, finds the file, or is
restarted: nothing depends on what happens here.
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
"""A longer text is left to the kubelet: sidecars bound what they are sent."""


class ConfigPusher:
    """For all pools; for one event loop."""

    def __init__(self, commands: SidecarAdminClient, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._commands = commands
        self._clock = clock
        self._tried: dict[tuple[str, str], tuple[str, float]] = {}

    def forget(self, pool: str) -> None:
        """The pool (namespace/name) is gone."""
        self._tried = {key: tried for key, tried in self._tried.items() if key[0] != pool}

    async def push(self, pool: str, observed: Snapshot, secret: PoolSecret, text: str, digest: str) -> bool:
        """Give `text`, whose digest is `digest`, to those who run another. Whether any of them took it."""
        if len(text) > MAX_CHARACTERS:
            return False
        behind = [s for s in observed.sidecars if self.needs_push(pool, s, digest)]
        told = await asyncio.gather(*(self._one(pool, s, secret, text, digest) for s in behind))
        return any(told)

    def needs_push(self, pool: str, sidecar: Sidecar, digest: str) -> bool:
        """It tells which one it runs, it is another, and it was not asked a moment ago."""
        if sidecar.report is None or not sidecar.address or sidecar.report.config in ("", digest):
            return False
        tried, at = self._tried.get((pool, sidecar.node), ("", 0.0))
        return tried != digest or self._clock() - at >= RETRY_S

    async def _one(self, pool: str, sidecar: Sidecar, secret: PoolSecret, text: str, digest: str) -> bool:
        now = self._clock()
        self._tried[pool, sidecar.node] = (digest, now)
        name = f"reload-{digest}-{time.time_ns() // 1_000_000}"
        try:
            async with asyncio.timeout(TIMEOUT_S):
                await self._commands.start(
                    secret, SidecarAddress(sidecar.node, sidecar.address), name, "reload", {"config": text}
                )
        except (OperatorError, TimeoutError) as e:
            log.info("pool=%s node=%s: the kubelet will bring the configuration: %s", pool, sidecar.node, e)
            return False
        return True
