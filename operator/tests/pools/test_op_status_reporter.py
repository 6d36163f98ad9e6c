"""Statuses of a pool and of its tenants: what is written when, and what is remembered."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from op_samples import MemoryCluster, pool, pool_manifest
from op_status_samples import GOOD, observed, status

from kvpool_operator.k8s.client import NamespacedName, ObjectRef
from kvpool_operator.observe.snapshot import Sidecar
from kvpool_operator.pools.status_reporter import StatusReporter, finding_changes, phase_event
from kvpool_operator.tenants.resolver import ResolvedTenant

if TYPE_CHECKING:
    import pytest

NS = "kvpool-system"
KEY = NamespacedName(NS, "chat")
POOL = ObjectRef("KVCachePool", NS, "chat")


class World:
    """A pool in memory, and the versions that the reporter called its own writes."""

    def __init__(self) -> None:
        self.cluster = MemoryCluster()
        self.cluster.put(pool_manifest())
        self.clock = 0.0
        self.own: list[NamespacedName] = []
        self.reporter = StatusReporter(self.cluster, lambda: self.clock, lambda key, _: self.own.append(key))

    async def report(self, *, is_progress: bool = True, raw: Any = None, **kwargs: Any) -> list[str]:
        """Report a status; the write requests that it took."""
        self.cluster.calls.clear()
        snapshot = observed(raw=raw or self.cluster.objects[POOL], **kwargs)
        made = status(snapshot)
        await self.reporter.report_pool(pool().metadata, snapshot, made, is_progress=is_progress)
        return [verb for verb, _ in self.cluster.writes()]


async def test_a_first_status_is_written_with_an_event_and_an_equal_one_is_not():
    world = World()
    assert await world.report() == ["apply status", "create"]
    assert await world.report() == []
    assert await world.report(ready=1) == ["apply status", "create"]


async def test_a_write_is_an_own_write_only_if_nothing_else_changed():
    world = World()
    await world.report(is_progress=False)
    assert world.own == []
    await world.report(ready=1)
    assert world.own == [KEY]
    old = world.cluster.objects[POOL]
    await world.report(raw={**old, "metadata": {**old["metadata"], "labels": {"a": "b"}}})
    assert world.own == [KEY]


async def test_tenants_are_written_once_and_forgotten_when_they_are_gone():
    world = World()
    raws = [
        {"apiVersion": "kvpool.dev/v1alpha1", "kind": "KVCacheTenant", "metadata": {"name": name, "namespace": NS}}
        for name in ("a", "b")
    ]
    for raw in raws:
        world.cluster.put(raw)
    both = replace(observed(), tenants=tuple(ResolvedTenant(raw, None) for raw in raws))
    world.cluster.calls.clear()
    await world.reporter.report_tenants(pool(), both, "d", "s", "2026-11-20T10:00:00Z")
    assert [r.name for _, r in world.cluster.writes()] == ["a", "b"]
    one = replace(both, tenants=both.tenants[:1])
    await world.reporter.report_tenants(pool(), one, "d", "s", "2026-11-20T10:00:00Z")
    assert not world.reporter._tenants.is_recorded(ObjectRef("KVCacheTenant", NS, "b"))
    assert world.reporter._tenants.is_recorded(ObjectRef("KVCacheTenant", NS, "a"))
    world.reporter.forget(KEY)
    assert not world.reporter._tenants.is_recorded(ObjectRef("KVCacheTenant", NS, "a"))


def row(code: str, subject: str = "Node n", severity: str = "Error") -> dict[str, str]:
    return {"code": code, "severity": severity, "subject": subject, "summary": "it fails", "fix": "repair it"}


def test_findings_that_come_and_are_over_are_lines_with_their_code():
    one, other, note = row("KVP0601"), row("KVP0402", severity="Warning"), row("KVP0305", severity="Info")
    assert finding_changes({}, {"findings": [one, note]}) == ["Node n: it fails [KVP0601]"]
    assert finding_changes({"findings": [one]}, {"findings": [one, other]}) == ["Node n: it fails [KVP0402]"]
    assert finding_changes({"findings": [one, note]}, {}) == ["Node n: over [KVP0601]"]
    assert finding_changes({"findings": [one]}, {"findings": [one | {"summary": "changed"}]}) == []


async def test_a_new_finding_is_logged_with_the_pool_once(caplog: pytest.LogCaptureFixture):
    world = World()
    bad = tuple(Sidecar(f"node-{n}", True, "", replace(GOOD, failing_drives=("nvme",))) for n in range(2))
    await world.report(sidecars=bad)
    await world.report(sidecars=bad)
    lines = [r.getMessage() for r in caplog.records if "KVP0601" in r.getMessage()]
    assert len(lines) == 1
    assert lines[0].startswith("pool=kvpool-system/chat: KVCachePool kvpool-system/chat: ")


def test_the_event_about_a_phase_keeps_the_code_of_a_long_cause():
    ready = {"type": "Ready", "status": "False", "reason": "R", "message": f"{'a' * 900} [KVP0601]"}
    event = phase_event("Ready", {"phase": "Degraded", "conditions": [ready]})
    assert event is not None
    assert event.message.endswith("a [KVP0601]")
    assert len(event.message) < 600
    ready["message"] = "short [KVP0601]"
    event = phase_event("Ready", {"phase": "Degraded", "conditions": [ready]})
    assert event is not None
    assert event.message.endswith(": short [KVP0601]")
