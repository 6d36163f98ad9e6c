"""Client of the sidecars' /status: many sidecars concurrently, with a short timeout."""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
from typing import TYPE_CHECKING, Any, Final, Protocol

import aiohttp

from kvpool_operator.sidecars.status import SidecarStatus

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterable

__all__ = ["HttpStatusClient", "StatusClient", "open_status_client"]

TIMEOUT_S: Final = 2.0
MAX_CONCURRENT_REQUESTS: Final = 32
MAX_RESPONSE_BYTES: Final = 256 * 1024


class StatusClient(Protocol):
    """Statuses by address; an address that does not answer in time is left out."""

    async def get_all(self, addresses: Iterable[str], port: int) -> dict[str, SidecarStatus]: ...

    async def get_raw(self, addresses: Iterable[str], port: int) -> dict[str, Any]:
        """Statuses as parsed JSON, not validated."""
        ...


class HttpStatusClient(StatusClient):
    """HTTP with limits on time, response size and concurrent requests."""

    def __init__(self, session: aiohttp.ClientSession) -> None:
        self._session = session
        self._slots = asyncio.Semaphore(MAX_CONCURRENT_REQUESTS)

    async def get_all(self, addresses: Iterable[str], port: int) -> dict[str, SidecarStatus]:
        answers = await self.get_raw(addresses, port)
        now = time.time()
        return {a: SidecarStatus.parse(answer, now) for a, answer in answers.items()}

    async def get_raw(self, addresses: Iterable[str], port: int) -> dict[str, Any]:
        wanted = sorted(set(addresses))
        answers = await asyncio.gather(*(self._one(a, port) for a in wanted))
        return {a: answer for a, answer in zip(wanted, answers, strict=True) if answer is not None}

    async def _one(self, address: str, port: int) -> Any:
        host = f"[{address}]" if ":" in address else address
        try:
            async with (
                self._slots,
                asyncio.timeout(TIMEOUT_S),
                self._session.get(f"http://{host}:{port}/status", allow_redirects=False) as response,
            ):
                if response.status != 200:
                    return None
                body = bytearray()
                async for chunk in response.content.iter_chunked(64 * 1024):
                    body += chunk
                    if len(body) > MAX_RESPONSE_BYTES:
                        return None
                return json.loads(body)
        except (TimeoutError, aiohttp.ClientError, OSError, ValueError, RecursionError):
            return None


@contextlib.asynccontextmanager
async def open_status_client() -> AsyncIterator[HttpStatusClient]:
    """Open a status client and its connections."""
    async with aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=MAX_CONCURRENT_REQUESTS), trust_env=False
    ) as session:
        yield HttpStatusClient(session)
