"""Builds the HTTP servers: status, metrics, probes, prefix queries and the admin API."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvpool.protocol import keys
from kvpool_sidecar.admin.operations import Operations
from kvpool_sidecar.admin.registry import OperationDeps, operation_handlers
from kvpool_sidecar.admin.server import AdminServer
from kvpool_sidecar.events.prefix_api import PrefixApi, PrefixApiSettings
from kvpool_sidecar.observability.http import HealthServer
from kvpool_sidecar.observability.metrics import Metrics
from kvpool_sidecar.observability.sections import (
    CacheSection,
    ClientSection,
    CounterSection,
    IndexSection,
    NamedSection,
    NetworkSection,
    StorageSection,
)
from kvpool_sidecar.observability.status import StatusReport
from kvpool_sidecar.preflight.run import PreflightSettings
from kvpool_sidecar.serving.hint_api import HintApi

if TYPE_CHECKING:
    from collections.abc import Callable

    from kvpool_sidecar.app.client_parts import ClientParts
    from kvpool_sidecar.app.config_reload import ConfigReloader
    from kvpool_sidecar.app.context import AppContext, Component
    from kvpool_sidecar.app.network_parts import NetworkParts
    from kvpool_sidecar.app.storage_parts import StorageParts
    from kvpool_sidecar.observability.status import StatusSection

__all__ = ["HttpParts", "build_http"]


@dataclass(frozen=True)
class HttpParts:
    """HTTP servers. `admin` is None without an admin port."""

    health: HealthServer
    admin: AdminServer | None

    def components(self) -> list[Component]:
        """Return the parts to start, the probes last."""
        return [part for part in (self.admin, self.health) if part is not None]


def build_http(
    context: AppContext,
    storage: StorageParts,
    network: NetworkParts,
    clients: ClientParts,
    reloader: ConfigReloader,
    ready: Callable[[], bool],
) -> HttpParts:
    """Bind the HTTP ports. OSError if one is in use."""
    settings, config, cleanup = context.settings, context.config.current, context.cleanup
    sections = _sections(context, storage, network, clients, reloader)
    report = StatusReport(settings.node, context.config, context.stats, sections, ready)
    metrics = Metrics(report, per_tenant=settings.metrics_per_tenant)
    prefixes = _prefix_api(context, storage, network) if clients.publisher is not None else None
    health = HealthServer(settings.address, config.http_port, report, metrics, prefixes, _hint_api(context, clients))
    cleanup.callback(health.stop)
    deps = OperationDeps(
        config=config,
        secret=settings.secret,
        local=storage.local,
        shared=storage.shared,
        warm_up=network.warm_up,
        preflight=PreflightSettings(
            config, settings.node, settings.index_passwords, settings.index_files, settings.object_secret_dir
        ),
        drain=network.drain,
        reloader=reloader,
        hints=clients.hints,
    )
    operations = Operations(operation_handlers(deps), context.stats)
    cleanup.callback(operations.stop)
    admin = None
    if config.admin_port:
        identity = network.security.identity
        admin = AdminServer(settings.address, config.admin_port, identity, operations, context.stats)
        cleanup.callback(admin.stop)
    return HttpParts(health, admin)


def _sections(
    context: AppContext,
    storage: StorageParts,
    network: NetworkParts,
    clients: ClientParts,
    reloader: ConfigReloader,
) -> list[StatusSection]:
    index = network.index
    breakers = {}
    if context.config.current.index.url:
        breakers["index"] = index.bulkhead.breaker
    if storage.shared is not None:
        breakers["shared"] = storage.shared.bulkhead.breaker

    def login() -> str:
        return keys.index_login(context.settings.secret, network.passwords.accepted)

    sections: list[StatusSection] = [
        NamedSection("config", reloader),
        StorageSection(context.config, context.stats, storage.local, storage.shared, storage.write_back, storage.gc),
        NamedSection("landing", storage.landing),
        NamedSection("block_tables", clients.tables),
        IndexSection(context.config, storage.local, index.registration, index.resolver, login),
        ClientSection(clients.listeners, context.fingerprints, context.queues),
        CounterSection(context.stats),
        CacheSection(context.stats, context.lookups),
        NetworkSection(network.security, network.rdma, breakers, network.peer_server.congestion_control),
        NamedSection("reachability", index.resolver.reachability),
        NamedSection("drain", network.drain),
        NamedSection("warm_up", network.warm_up),
        NamedSection("hints", clients.hints),
    ]
    if clients.handoff is not None:
        sections.append(NamedSection("agent", clients.handoff))
    if clients.publisher is not None:
        sections.append(NamedSection("kv_events", clients.publisher))
    return sections


def _hint_api(context: AppContext, clients: ClientParts) -> HintApi:
    settings, config = context.settings, context.config

    def token() -> str:
        return keys.hints_token(settings.secret, config.current.uid, config.current.hints.token_revision)

    return HintApi(
        clients.hints,
        context.stats,
        secret=settings.secret,
        token=token,
        tenant_id=lambda namespace: config.tenancy.tenant_id(namespace),
    )


def _prefix_api(context: AppContext, storage: StorageParts, network: NetworkParts) -> PrefixApi:
    settings, config = context.settings, context.config

    def tenants_of(namespace: str) -> tuple[str, ...]:
        tenancy = config.tenancy
        return (tenancy.tenant_id(namespace), *tenancy.reads_from(namespace))

    token = keys.events_token(settings.secret, config.current.uid, config.current.events.token_revision)
    return PrefixApi(
        PrefixApiSettings(token, settings.secret, settings.node),
        storage.local,
        network.index.resolver,
        storage.shared,
        context.stats,
        tenants_of,
    )
