"""Client of the sidecars' admin API: HTTPS with mutual TLS, certificates of the pool's CA on both sides.

The protocol is that of kvpool_sidecar.admin.server. The caller chooses the id of an operation. Starting is idempotent:
a caller that does not know whether an operation was started starts it again.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import ssl
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, Final, Protocol

import aiohttp

from kvpool.protocol.certificate_names import node_name, operator_name
from kvpool_operator.api.fields import ADMIN_PORT
from kvpool_operator.errors import SidecarRejectedError, SidecarUnavailableError
from kvpool_operator.pki.certificates import CertPolicy, issue_leaf, leaf_due
from kvpool_operator.pki.peer_ca import peer_authorities
from kvpool_operator.sidecars.operation import OperationProgress, SidecarAddress

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Mapping

    from kvpool_operator.desired.inputs import PoolSecret
    from kvpool_operator.pki.certificates import LeafCertificate

__all__ = ["HttpSidecarAdminClient", "OperationProgress", "SidecarAddress", "SidecarAdminClient", "open_admin_client"]

TIMEOUT_S: Final = 5.0
MAX_CONCURRENT_REQUESTS: Final = 32
MAX_RESPONSE_BYTES: Final = 64 * 1024
MAX_POOLS: Final = 512
_POLICY: Final = CertPolicy()


class SidecarAdminClient(Protocol):
    """One request per call. `pool` is the secret of the sidecar's pool.

    SidecarUnavailableError: no answer, or the sidecar is busy; the same call may work later. SidecarRejectedError: the
    sidecar does not know the kind of operation, or the parameters are invalid.
    """

    async def start(
        self, pool: PoolSecret, to: SidecarAddress, name: str, kind: str, params: Mapping[str, Any]
    ) -> OperationProgress:
        """Start the operation `name` unless it was started before; its progress."""
        ...

    async def poll(self, pool: PoolSecret, to: SidecarAddress, name: str) -> OperationProgress | None:
        """Progress of the operation; None if the sidecar does not know it, so that it must be started again."""
        ...

    async def cancel(self, pool: PoolSecret, to: SidecarAddress, name: str) -> None:
        """Cancel the operation. No effect if the sidecar does not know it."""
        ...


@dataclass(frozen=True)
class _Identity:
    files: Mapping[str, str]
    leaf: LeafCertificate
    context: ssl.SSLContext


class HttpSidecarAdminClient(SidecarAdminClient):
    """HTTPS with limits on time, response size and concurrent requests. For one event loop."""

    def __init__(
        self,
        session: aiohttp.ClientSession,
        *,
        port: int = ADMIN_PORT,
        timeout_s: float = TIMEOUT_S,
        now: Callable[[], datetime] = lambda: datetime.now(UTC),
    ) -> None:
        self._session = session
        self._port = port
        self._timeout_s = timeout_s
        self._now = now
        self._slots = asyncio.Semaphore(MAX_CONCURRENT_REQUESTS)
        self._identities: dict[str, _Identity] = {}

    async def start(
        self, pool: PoolSecret, to: SidecarAddress, name: str, kind: str, params: Mapping[str, Any]
    ) -> OperationProgress:
        status, answer = await self._call("POST", pool, to, "", {"id": name, "kind": kind, "params": dict(params)})
        if status != 200:
            raise _error(status, answer)
        return OperationProgress.parse(answer)

    async def poll(self, pool: PoolSecret, to: SidecarAddress, name: str) -> OperationProgress | None:
        status, answer = await self._call("GET", pool, to, f"/{name}")
        if status == 404:
            return None
        if status != 200:
            raise _error(status, answer)
        return OperationProgress.parse(answer)

    async def cancel(self, pool: PoolSecret, to: SidecarAddress, name: str) -> None:
        status, answer = await self._call("DELETE", pool, to, f"/{name}")
        if status not in (200, 404):
            raise _error(status, answer)

    async def _call(
        self, method: str, pool: PoolSecret, to: SidecarAddress, path: str, body: Any = None
    ) -> tuple[int, Any]:
        host = f"[{to.address}]" if ":" in to.address else to.address
        context = self._context(pool)
        try:
            async with (
                self._slots,
                asyncio.timeout(self._timeout_s),
                self._session.request(
                    method,
                    f"https://{host}:{self._port}/v1/operations{path}",
                    data=None if body is None else json.dumps(body).encode(),
                    ssl=context,
                    server_hostname=node_name(pool.pool_id, to.node),
                    allow_redirects=False,
                ) as response,
            ):
                data = bytearray()
                async for chunk in response.content.iter_chunked(MAX_RESPONSE_BYTES):
                    data += chunk
                    if len(data) > MAX_RESPONSE_BYTES:
                        raise SidecarUnavailableError("the response is too long")
                return response.status, json.loads(data)
        except TimeoutError:
            raise SidecarUnavailableError(f"no answer within {self._timeout_s:.0f} s") from None
        except (aiohttp.ClientError, OSError, ValueError, RecursionError) as e:
            raise SidecarUnavailableError(f"request failed: {type(e).__name__}") from None

    def _context(self, pool: PoolSecret) -> ssl.SSLContext:
        """TLS context with a certificate of the pool's CA, renewed in time and when the CA changes."""
        now = self._now()
        known = self._identities.get(pool.pool_id)
        authorities = peer_authorities({**pool.peer_files, **pool.peer_keys})
        if authorities is None:
            raise SidecarUnavailableError("the pool's Secret has no CA yet")
        signer = authorities.signer(now, _POLICY)
        if known is not None and known.files == pool.peer_files and not leaf_due(known.leaf, signer, now, _POLICY):
            return known.context
        leaf = issue_leaf(signer, (operator_name(pool.pool_id),), now, _POLICY, for_client=True)
        if len(self._identities) >= MAX_POOLS:
            self._identities.clear()
        made = _Identity(dict(pool.peer_files), leaf, _tls(leaf, authorities.bundle(now).decode()))
        self._identities[pool.pool_id] = made
        return made.context


def _tls(leaf: LeafCertificate, trusted: str) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.load_verify_locations(cadata=trusted)
    memory = os.memfd_create(
        "leaf", os.MFD_CLOEXEC
    )  # the library reads keys from files only; this file exists in memory only
    try:
        os.write(memory, leaf.certificate_pem + leaf.key_pem)
        context.load_cert_chain(f"/proc/self/fd/{memory}")
    finally:
        os.close(memory)
    return context


def _error(status: int, answer: Any) -> SidecarRejectedError | SidecarUnavailableError:
    said = str(answer.get("error") or "")[:300] if isinstance(answer, dict) else ""
    kind = SidecarUnavailableError if status == 429 or status >= 500 else SidecarRejectedError
    return kind(f"{said or 'no reason given'} (HTTP {status})")


@contextlib.asynccontextmanager
async def open_admin_client(port: int = ADMIN_PORT) -> AsyncIterator[HttpSidecarAdminClient]:
    """Open an admin client; it keeps no connection alive."""
    connector = aiohttp.TCPConnector(limit=MAX_CONCURRENT_REQUESTS, force_close=True)
    async with aiohttp.ClientSession(connector=connector, trust_env=False) as session:
        yield HttpSidecarAdminClient(session, port=port)
