"""Watch events of the operator's own kinds: pools, tenants and operations. The only module that imports kopf.

kopf logs in, lists, watches and reconnects. Its change handlers are not used: they keep state in annotations and can
miss a change. Its events do not include deletions that a list implies, but the resync lists these kinds anyway; all
other kinds come from `informers`.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any, Final, Protocol

import kopf

from kvpool_operator.api.operation import PLURAL as OPERATIONS
from kvpool_operator.api.tenant import TENANT_PLURAL
from kvpool_operator.api.v1alpha1 import GROUP, PLURAL, VERSION
from kvpool_operator.informers import PoolQueue
from kvpool_operator.k8s.client import NamespacedName

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Callable, Sequence

__all__ = ["EventSink", "run"]

WATCH_IDLE_TIMEOUT_S: Final = 70.0


class EventSink(PoolQueue, Protocol):
    """Receives watch events. Calls come from the event loop of the watches and must not block."""

    def observe_event(self, pool: NamespacedName, version: str) -> bool:
        """Record that the watch delivered this version of a pool. False: this operator wrote it, and knows it."""


async def run(
    sink: EventSink,
    enqueue_operation: Callable[[str, str], None],
    stop: asyncio.Event,
    ready: asyncio.Event,
    *,
    namespaces: Sequence[str] = (),
    idle_timeout_s: float = WATCH_IDLE_TIMEOUT_S,
) -> None:
    """Watch `namespaces` (empty: all) until `stop` is set or a signal ends the process.

    `enqueue_operation(namespace, operation)` is called from this event loop and must not block. API servers send a
    bookmark every minute, so a stream that delivered nothing for `idle_timeout_s` is dead and is opened again.
    """
    registry = kopf.OperatorRegistry()

    def login(settings: kopf.OperatorSettings, **kwargs: Any) -> kopf.ConnectionInfo | None:
        if os.environ.get("KUBERNETES_SERVICE_HOST"):
            return kopf.login_with_service_account(settings=settings, **kwargs)
        return kopf.login_with_kubeconfig(settings=settings, **kwargs)

    async def pool(
        namespace: str | None,
        name: str | None,
        meta: Any,
        status: Any,
        type: str | None,  # noqa: A002
        **_: Any,
    ) -> None:
        key = NamespacedName(namespace or "", name or "")
        if not sink.observe_event(key, str(meta.get("resourceVersion", ""))):
            return
        # a change while no operator was watching is in the foreground, too
        is_reconciled = type is None and status.get("observedGeneration") == meta.get("generation")
        (sink.enqueue_background if is_reconciled else sink.enqueue)(*key)

    async def operation(namespace: str | None, name: str | None, **_: Any) -> None:
        enqueue_operation(namespace or "", name or "")

    async def tenant(namespace: str | None, spec: Any, type: str | None, **_: Any) -> None:  # noqa: A002
        name = (spec.get("poolRef") or {}).get("name")
        if name:
            (sink.enqueue if type is not None else sink.enqueue_background)(namespace or "", str(name))

    kopf.on.login(registry=registry)(login)
    kopf.on.event(GROUP, VERSION, PLURAL, registry=registry)(pool)
    kopf.on.event(GROUP, VERSION, OPERATIONS, registry=registry)(operation)
    kopf.on.event(GROUP, VERSION, TENANT_PLURAL, registry=registry)(tenant)

    await kopf.operator(
        registry=registry,
        settings=_settings(idle_timeout_s),
        standalone=True,
        clusterwide=not namespaces,
        namespaces=namespaces,
        stop_flag=stop,
        ready_flag=ready,
    )


def _settings(idle_timeout_s: float) -> kopf.OperatorSettings:
    settings = kopf.OperatorSettings()
    settings.posting.enabled = False
    settings.scanning.disabled = True  # needs no right to list CRDs; the process waits for its own before this
    settings.watching.server_timeout = 300
    settings.watching.connect_timeout = 10
    settings.watching.inactivity_timeout = idle_timeout_s
    settings.networking.request_timeout = 20
    # kopf keeps a worker for each object for this long after its last event: a limit on the number of workers would
    # make the events of many pools wait for each other
    settings.queueing.worker_limit = None
    settings.queueing.idle_timeout = 1.0
    settings.process.ultimate_exiting_timeout = 10
    return settings
