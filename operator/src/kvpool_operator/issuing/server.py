"""HTTPS server of the issuer. Bounded: bodies, tokens, time, concurrent requests, and requests per second."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import ssl
import time
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any, Final

from aiohttp import web

from kvpool_operator.errors import LeafRefusedError, OperatorError
from kvpool_operator.issuing.leaf_request import MAX_CSR_BYTES
from kvpool_operator.pki.authority_root import ISSUER_NAME
from kvpool_operator.pki.certificates import CertPolicy, issue_leaf, leaf_due

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable

    from kvpool_operator.issuing.issuer import LeafIssuer
    from kvpool_operator.pki.authority_root import AuthorityRoot
    from kvpool_operator.pki.certificates import LeafCertificate
    from kvpool_operator.runtime.metrics import OperatorMetrics

__all__ = ["IssuingServer", "serve_issuer"]

log = logging.getLogger(__name__)

MAX_BODY: Final = 2 * MAX_CSR_BYTES
MAX_TOKEN: Final = 4096
MAX_CONCURRENT: Final = 16
PER_SECOND: Final = 20
"""Requests per second of a replica that reach the API server; the others are asked to come back."""
TIMEOUT_S: Final = 10.0
_POLICY: Final = CertPolicy(leaf_life=timedelta(days=7))
_CHECK_S: Final = 3600.0


class IssuingServer:
    """Routes and limits for `LeafIssuer`. For one event loop."""

    def __init__(
        self, issuer: LeafIssuer, metrics: OperatorMetrics, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._issuer = issuer
        self._metrics = metrics
        self._clock = clock
        self._slots = asyncio.Semaphore(MAX_CONCURRENT)
        self._window_start, self._in_window = 0.0, 0

    def app(self) -> web.Application:
        """POST /v1/leaf: {"csr": PEM} with a bearer token; answers {"certificate": PEM} or {"error": sentence}."""
        app = web.Application(client_max_size=MAX_BODY)
        app.router.add_post("/v1/leaf", self._leaf)
        return app

    async def _leaf(self, request: web.Request) -> web.Response:
        kind, _, token = request.headers.get("Authorization", "").partition(" ")
        if kind != "Bearer" or not token or len(token) > MAX_TOKEN:
            return self._refuse("refused", 401, "present the token of the sidecar's pod")
        if self._slots.locked() or not self._is_admitted():
            return self._refuse("busy", 429, "too many requests; retry later")
        try:
            async with self._slots, asyncio.timeout(TIMEOUT_S):
                csr = json.loads(await request.read())["csr"].encode("ascii")
                certificate = await self._issuer.issue(token, csr)
        except LeafRefusedError as e:
            log.warning("a leaf certificate was refused: %s", e)
            return self._refuse("refused", 403, str(e))
        except (OperatorError, TimeoutError) as e:
            log.warning("a leaf certificate cannot be issued now: %s", e)
            return self._refuse("unavailable", 503, "the API server does not answer; retry later")
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
            return self._refuse("refused", 400, "send a JSON object with csr, in PEM")
        self._metrics.leaves.labels("issued").inc()
        return web.json_response({"certificate": certificate.decode()})

    def _refuse(self, outcome: str, status: int, sentence: str) -> web.Response:
        self._metrics.leaves.labels(outcome).inc()
        return web.json_response({"error": sentence}, status=status)

    def _is_admitted(self) -> bool:
        now = self._clock()
        if now - self._window_start >= 1.0:
            self._window_start, self._in_window = now, 0
        self._in_window += 1
        return self._in_window <= PER_SECOND


@contextlib.asynccontextmanager
async def serve_issuer(address: str, port: int, root: AuthorityRoot, server: IssuingServer) -> AsyncIterator[int]:
    """Serve until the context exits; yields the port. The server's own certificate is renewed in time."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    leaf = _load_leaf(context, root, None)
    runner = web.AppRunner(server.app(), access_log=None, keepalive_timeout=5, shutdown_timeout=5)
    await runner.setup()
    renewal = asyncio.create_task(_renew(context, root, leaf), name="issuer certificate")
    try:
        site = web.TCPSite(runner, address, port, ssl_context=context, backlog=256)
        await site.start()
        yield _bound_port(runner)
    finally:
        renewal.cancel()
        await runner.cleanup()


async def _renew(context: ssl.SSLContext, root: AuthorityRoot, leaf: LeafCertificate) -> None:
    while True:
        await asyncio.sleep(_CHECK_S)
        leaf = _load_leaf(context, root, leaf)


def _load_leaf(context: ssl.SSLContext, root: AuthorityRoot, leaf: LeafCertificate | None) -> LeafCertificate:
    """Load another certificate into the context if one is due; later handshakes present it."""
    now = datetime.now(UTC)
    if leaf is not None and not leaf_due(leaf, leaf.issuer, now, _POLICY):
        return leaf
    made = issue_leaf(root.issuer_authority(), (ISSUER_NAME,), now, _POLICY)
    memory = os.memfd_create("leaf", os.MFD_CLOEXEC)  # the library reads keys from files only; this one is on no disk
    try:
        os.write(memory, made.certificate_pem + made.key_pem)
        context.load_cert_chain(f"/proc/self/fd/{memory}")
    finally:
        os.close(memory)
    return made


def _bound_port(runner: web.AppRunner) -> int:
    addresses: list[Any] = runner.addresses
    return int(addresses[0][1])
