"""Polls the status of a pool's sidecars, and retries nodes whose sidecar is in a handover."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Final

from kvpool_operator.api.fields import HTTP_PORT
from kvpool_operator.k8s import pods as podview
from kvpool_operator.observe.active_sidecar import in_handover

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvpool_operator.k8s.client import Manifest
    from kvpool_operator.sidecars.status import SidecarStatus
    from kvpool_operator.sidecars.status_client import StatusClient

__all__ = ["poll_sidecars"]

MAX_RETRIES: Final = 4
RETRY_INTERVAL_S: Final = 0.5


async def poll_sidecars(scraper: StatusClient, pods: Sequence[Manifest]) -> dict[str, SidecarStatus]:
    """Reports by address; sidecars that do not answer are left out. Nodes in a handover are polled again."""
    reports = await scraper.get_all([a for p in pods if (a := podview.address(p))], HTTP_PORT)
    for _ in range(MAX_RETRIES):
        changing = in_handover(pods, reports)
        if not changing:
            break
        await asyncio.sleep(RETRY_INTERVAL_S)
        retried = await scraper.get_all(changing, HTTP_PORT)
        reports = {a: r for a, r in reports.items() if a not in changing} | retried
    return reports
