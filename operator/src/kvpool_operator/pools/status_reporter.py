"""Reports a pool to its users: statuses of the pool and of its tenants, and Events about phase changes."""

from __future__ import annotations

import logging
import re
from typing import TYPE_CHECKING, Final

from kvpool_operator.api.conditions import find
from kvpool_operator.api.findings.row import Severity
from kvpool_operator.api.reasons import EventReason
from kvpool_operator.api.tenant import TENANT_KIND
from kvpool_operator.api.v1alpha1 import API_VERSION, KIND
from kvpool_operator.k8s.client import NamespacedName, ObjectRef
from kvpool_operator.k8s.status_writer import StatusParts, StatusWriter, without
from kvpool_operator.pools.apply import emit_pool_event
from kvpool_operator.pools.plan import EmitEvent
from kvpool_operator.pools.status import stable_part
from kvpool_operator.tenants.resolver import orphan_status, tenant_status

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from kvpool_operator.api.v1alpha1 import KVCachePool, Metadata
    from kvpool_operator.k8s.client import ApiClient, Manifest
    from kvpool_operator.observe.snapshot import Snapshot

__all__ = ["StatusReporter"]

log = logging.getLogger(__name__)

_TROUBLED_PHASES: Final = frozenset({"Degraded", "Failed"})
_MAX_CAUSE: Final = 500
_CODE: Final = re.compile(r" \[KVP\d{4}\]$")


class StatusReporter:
    """Writes changed conditions immediately and counters at most every 30 s. For all pools and one event loop."""

    def __init__(
        self,
        cluster: ApiClient,
        clock: Callable[[], float],
        record_own_write: Callable[[NamespacedName, str], None],
    ) -> None:
        """`record_own_write(pool, version)`: this version of a pool differs from the one before by its status only."""
        self._cluster = cluster
        self._record_own_write = record_own_write
        self._pools = StatusWriter(cluster, StatusParts(stable_part), clock=clock)
        self._tenants = StatusWriter(cluster, StatusParts(without(("used",))), clock=clock)
        self._tenants_of: dict[NamespacedName, set[ObjectRef]] = {}

    def forget(self, pool: NamespacedName) -> None:
        """The pool no longer exists."""
        self._pools.forget(ObjectRef(KIND, pool.namespace, pool.name))
        self._forget_tenants(pool, except_for=set())

    async def report_pool(self, meta: Metadata, snapshot: Snapshot, status: Manifest, *, is_progress: bool) -> None:
        """Write the pool's status if it is due, and emit an Event if the phase changed.

        `is_progress`: this reconcile changed objects, or the pool is Ready; then the write needs no further reconcile.
        """
        manifest = {
            "apiVersion": API_VERSION,
            "kind": KIND,
            "metadata": {"name": meta.name, "namespace": meta.namespace},
        }
        self._pools.record(ObjectRef(KIND, meta.namespace, meta.name), snapshot.status)
        written = await self._pools.write(manifest, status)
        if written is None:
            return
        if is_progress and _differs_by_status_only(written, snapshot.raw):
            version = str(written["metadata"].get("resourceVersion", ""))
            self._record_own_write(NamespacedName(meta.namespace, meta.name), version)
        for line in finding_changes(snapshot.status, status):
            log.warning("pool=%s/%s: %s", meta.namespace, meta.name, line)
        event = phase_event(str(snapshot.status.get("phase") or ""), status)
        if event is not None:
            await emit_pool_event(event, meta, self._cluster)

    async def report_tenants(
        self, pool: KVCachePool, snapshot: Snapshot, config_digest: str, pool_secret: str, now: str
    ) -> None:
        """Write the status of each KVCacheTenant of the pool if it is due."""
        reports = [s.report for s in snapshot.sidecars if s.report is not None]
        key = NamespacedName(pool.metadata.namespace, pool.metadata.name)
        self._forget_tenants(key, except_for={_tenant_ref(one.raw) for one in snapshot.tenants})
        for one in snapshot.tenants:
            await self._write_tenant(one.raw, tenant_status(one, pool.spec, reports, config_digest, pool_secret, now))

    async def report_orphans(self, tenants: Sequence[Manifest], pool: str, now: str) -> None:
        """Write the status of KVCacheTenants whose pool does not exist."""
        for raw in tenants:
            await self._write_tenant(raw, orphan_status(raw, pool, now))

    async def _write_tenant(self, raw: Manifest, status: Manifest) -> None:
        self._tenants.record(_tenant_ref(raw), raw.get("status") or {})
        await self._tenants.write({"apiVersion": API_VERSION, "kind": TENANT_KIND, "metadata": raw["metadata"]}, status)

    def _forget_tenants(self, pool: NamespacedName, *, except_for: set[ObjectRef]) -> None:
        for target in self._tenants_of.pop(pool, set()) - except_for:
            self._tenants.forget(target)
        if except_for:
            self._tenants_of[pool] = except_for


def phase_event(previous: str, status: Manifest) -> EmitEvent | None:
    """The Event about a changed phase: Normal, or Warning if the pool became Degraded or Failed. Pure."""
    phase = str(status.get("phase") or "")
    if phase == previous:
        return None
    ready = find(status.get("conditions") or [], "Ready") or {}
    cause = _shortened(str(ready.get("message") or ""))
    change = f"phase changed from {previous} to {phase}" if previous else f"phase is {phase}"
    return EmitEvent(
        EventReason.PHASE_CHANGED, f"{change}: {cause}" if cause else change, warning=phase in _TROUBLED_PHASES
    )


def finding_changes(previous: Manifest, status: Manifest) -> list[str]:
    """Return a line for each finding above Info that is new, and for each one that is over. Pure."""
    before, now = _findings(previous), _findings(status)
    new = [f"{row['subject']}: {row['summary']} [{row['code']}]" for key, row in now.items() if key not in before]
    over = [f"{row['subject']}: over [{row['code']}]" for key, row in before.items() if key not in now]
    return new + over


def _findings(status: Manifest) -> dict[tuple[str, str], Manifest]:
    rows = status.get("findings") or []
    return {(row["code"], row["subject"]): row for row in rows if row["severity"] != Severity.INFO}


def _shortened(cause: str) -> str:
    """The first characters of a condition's message, with its code."""
    code = _CODE.search(cause)
    end = code.group() if code is not None else ""
    return cause if len(cause) <= _MAX_CAUSE else cause[: _MAX_CAUSE - len(end)] + end


def _tenant_ref(raw: Manifest) -> ObjectRef:
    return ObjectRef(TENANT_KIND, raw["metadata"]["namespace"], raw["metadata"]["name"])


def _differs_by_status_only(written: Manifest, read: Manifest) -> bool:
    """Whether nothing but the status changed since the pool was read, as far as a reconcile depends on it.

    A reconcile depends on `spec`, on the metadata below, and on the result of the preflight checks.
    """
    fields = ("uid", "generation", "labels", "annotations", "finalizers", "ownerReferences", "deletionTimestamp")
    preflights = [(m.get("status") or {}).get("preflight") for m in (written, read)]
    same_metadata = all(written["metadata"].get(k) == read["metadata"].get(k) for k in fields)
    return same_metadata and written.get("spec") == read.get("spec") and preflights[0] == preflights[1]
