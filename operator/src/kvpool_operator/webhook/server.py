"""Webhook process: HTTPS for the API server, HTTP for probes and metrics, both on the pod IP address."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import signal
import sys
import time
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Final

from aiohttp import web
from prometheus_client import generate_latest

from kvpool_operator.k8s.rest import open_api_client
from kvpool_operator.webhook.api_access import WebhookApiClient
from kvpool_operator.webhook.file_certificates import FileCertificates
from kvpool_operator.webhook.metrics import WebhookMetrics
from kvpool_operator.webhook.pool_cache import PoolCache, PoolReader
from kvpool_operator.webhook.review import InjectorConfig, review_pod
from kvpool_operator.webhook.selector_hooks import HookStore, SelectorHooks
from kvpool_operator.webhook.self_signed import CertificateManager, DnsNames, TrustStore, server_context
from kvpool_operator.webhook.settings import read_settings

if TYPE_CHECKING:
    import ssl
    from collections.abc import AsyncIterator, Sequence

    from kvpool_operator.webhook.settings import WebhookSettings

__all__ = ["WebhookServer", "main", "serve"]

log = logging.getLogger(__name__)

MAX_BODY: Final = 8 * 2**20
"""Maximum bytes of one review. An API object has at most 3 MiB, and a review contains it at most twice."""
DECIDE_S: Final = 1.5
"""Time limit of a decision, below the 3 s of the API server (timeoutSeconds): a skip with a reason beats a timeout."""
BODY_S: Final = 2.0
"""Time limit for reading the body of a request."""


class WebhookServer:
    """HTTP routes, limits and metrics for `review.review_pod`."""

    def __init__(
        self, pools: PoolCache, certs: CertificateManager | FileCertificates, installation: InjectorConfig
    ) -> None:
        self.draining = False
        """Set before the shutdown: /readyz fails while requests are still served."""
        self._pools = pools
        self._certs = certs
        self._installation = installation
        self.metrics = WebhookMetrics()

    def admission_app(self) -> web.Application:
        """HTTPS: /inject."""
        app = web.Application(client_max_size=MAX_BODY)
        app.router.add_post("/inject", self._inject)
        app.router.add_get("/readyz", self._readyz)
        return app

    def admin_app(self) -> web.Application:
        """Plain HTTP: /healthz, /readyz, /metrics."""
        app = web.Application()
        app.router.add_get("/healthz", self._healthz)
        app.router.add_get("/readyz", self._readyz)
        app.router.add_get("/metrics", self._metrics)
        return app

    async def _inject(self, request: web.Request) -> web.Response:
        started = time.perf_counter()
        try:
            async with asyncio.timeout(BODY_S):
                body = await request.read()
            reply = await review_pod(json.loads(body), self._pools.resolve, self._installation, timeout_s=DECIDE_S)
        except TimeoutError:
            self.metrics.reviews.labels("bad-request").inc()
            raise web.HTTPRequestTimeout from None
        except (ValueError, RecursionError) as e:
            # the request is invalid: the API server applies the failurePolicy
            self.metrics.reviews.labels("bad-request").inc()
            raise web.HTTPBadRequest(text=f"not an AdmissionReview: {type(e).__name__}") from None
        self.metrics.reviews.labels(reply.outcome).inc()
        self.metrics.seconds.observe(time.perf_counter() - started)
        return web.json_response(reply.review)

    async def _healthz(self, _: web.Request) -> web.Response:
        return web.Response(text="ok\n")

    async def _readyz(self, _: web.Request) -> web.Response:
        missing = [
            name
            for name, is_ready in (
                ("certificate", self._certs.ready),
                ("pools", self._pools.synced),
                ("shutdown", not self.draining),
            )
            if not is_ready
        ]
        if missing:
            return web.Response(status=503, text=f"waiting for: {', '.join(missing)}\n")
        return web.Response(text="ok\n")

    async def _metrics(self, _: web.Request) -> web.Response:
        m = self.metrics
        m.pools.set(len(self._pools))
        m.view_age.set(self._pools.age_s)
        m.certificate_expires.set(self._certs.expires.timestamp() if self._certs.expires else 0)
        if self._certs.authority_expires is not None:
            m.authority_expires.set(self._certs.authority_expires.timestamp())
        return web.Response(body=generate_latest(m.registry), headers={"Content-Type": "text/plain; version=0.0.4"})


@asynccontextmanager
async def serve(
    settings: WebhookSettings, reader: PoolReader, store: TrustStore, hooks: HookStore
) -> AsyncIterator[WebhookServer]:
    """Serve, with tasks that refresh pools and certificates, until the context exits."""
    context = server_context()
    pools = PoolCache(reader)
    certs = _certificates(settings, store, context)
    server = WebhookServer(pools, certs, InjectorConfig(settings.sidecar_image, settings.sidecar_pull_policy))
    async with AsyncExitStack() as stack:
        tasks = [
            asyncio.create_task(certs.run(), name="certs"),
            asyncio.create_task(pools.run(), name="pools"),
            asyncio.create_task(SelectorHooks(hooks, pools).run(), name="selectors"),
        ]
        stack.push_async_callback(_cancel, tasks)
        for app, port, tls in (
            (server.admission_app(), settings.port, context),
            (server.admin_app(), settings.admin_port, None),
        ):
            runner = web.AppRunner(app, access_log=None, keepalive_timeout=75, shutdown_timeout=5)
            await runner.setup()
            stack.push_async_callback(runner.cleanup)
            await web.TCPSite(runner, settings.address, port, ssl_context=tls, backlog=512).start()
        yield server


def _certificates(
    settings: WebhookSettings, store: TrustStore, context: ssl.SSLContext
) -> CertificateManager | FileCertificates:
    if settings.certificate_dir:
        return FileCertificates(Path(settings.certificate_dir), context, poll_s=min(10.0, settings.certificate_poll_s))
    names = DnsNames(f"kvpool-webhook-ca.{settings.namespace}", (settings.dns_name,))
    return CertificateManager(store, context, names, policy=settings.policy, poll_s=settings.certificate_poll_s)


async def _cancel(tasks: list[asyncio.Task[None]]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


async def _run(settings: WebhookSettings) -> None:
    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    async with AsyncExitStack() as stack:
        cluster = WebhookApiClient(await stack.enter_async_context(open_api_client()), settings)
        server = await stack.enter_async_context(serve(settings, cluster, cluster, cluster))
        log.info("listening on %s, ports %d and %d", settings.address, settings.port, settings.admin_port)
        await stop.wait()
        server.draining = True
        await asyncio.sleep(settings.drain_s)


def main(argv: Sequence[str] | None = None) -> int:
    """`kvpool-operator webhook`: runs until SIGTERM or SIGINT."""
    settings = read_settings(sys.argv[1:] if argv is None else argv, os.environ)
    logging.basicConfig(level=settings.log_level, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    asyncio.run(_run(settings))
    return 0
