"""A client image that cannot be pulled: the namespace's next pods start without the pool, for an hour."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

import pytest

from kvpool_operator.api.pool.status import MAX_IMAGE_PROBLEMS
from kvpool_operator.injection.client_image import blocked_namespaces, image_problems
from kvpool_operator.injection.pool_selection import NamespaceView
from kvpool_operator.injection.skip import SkipReason
from kvpool_operator.times import rfc3339
from kvpool_operator.webhook.pool_cache import PoolCache
from kvpool_operator.webhook.review import InjectorConfig, review_pod

IMAGE = "registry.example/kvpool-sidecar:0.1.0"
NOW, SOON, LATER, NEXT = "2026-11-22T10:00:00Z", "2026-11-22T10:00:30Z", "2026-11-22T10:59:00Z", "2026-11-22T11:00:01Z"


def status_with(*waiting: tuple[str, str], now: str = NOW, previous: Any = None) -> dict[str, Any]:
    rows = image_problems(previous or {}, waiting, now)
    return {"pods": {"clientImageProblems": [row.model_dump(by_alias=True) for row in rows]}}


def test_a_namespace_is_blocked_for_an_hour_after_the_last_pod_that_waited():
    status = status_with(("team", IMAGE))
    assert blocked_namespaces(status, IMAGE, LATER) == {"team"}
    assert blocked_namespaces(status, IMAGE, NEXT) == frozenset()
    still = status_with(("team", IMAGE), now=LATER, previous=status)
    assert blocked_namespaces(still, IMAGE, NEXT) == {"team"}


def test_another_image_or_namespace_is_not_blocked():
    status = status_with(("team", IMAGE))
    assert blocked_namespaces(status, IMAGE + "-fixed", NOW) == frozenset()
    assert blocked_namespaces(status, IMAGE, NOW) == {"team"}


def test_the_status_is_not_written_again_within_a_minute():
    status = status_with(("team", IMAGE))
    assert status_with(("team", IMAGE), now=SOON, previous=status) == status
    assert status_with(("team", IMAGE), now=LATER, previous=status) != status


def test_the_newest_namespaces_are_kept_and_old_ones_forgotten():
    many = [(f"team-{n:02}", IMAGE) for n in range(MAX_IMAGE_PROBLEMS)]
    status = status_with(("new", IMAGE), now=SOON, previous=status_with(*many))
    assert len(status["pods"]["clientImageProblems"]) == MAX_IMAGE_PROBLEMS
    assert "new" in blocked_namespaces(status, IMAGE, SOON)
    assert status_with(now=NEXT, previous=status_with(*many)) == {"pods": {"clientImageProblems": []}}


@pytest.mark.parametrize("pods", [None, [], {}, {"clientImageProblems": 5}, {"clientImageProblems": ["x", {}]}])
def test_a_status_of_another_shape_blocks_nothing(pods: Any):
    assert blocked_namespaces({"pods": pods}, IMAGE, NOW) == frozenset()


class Cluster:
    def __init__(self, status: dict[str, Any]) -> None:
        self.status = status

    async def list_pools(self) -> list[dict[str, Any]]:
        tiers = [{"name": "nvme", "local": {"path": "/mnt/nvme/kv", "capacity": "1Gi"}}]
        spec = {"tiers": tiers, "injection": {"allowedNamespaces": {"from": "All"}}}
        return [{"metadata": {"namespace": "kvpool-system", "name": "chat"}, "spec": spec, "status": self.status}]

    async def read_namespace(self, name: str) -> NamespaceView:
        return NamespaceView()


async def outcome_in(namespace: str, status: dict[str, Any], image: str = IMAGE) -> Any:
    pod = {
        "metadata": {
            "name": "e",
            "labels": {"kvpool.dev/inject": "true"},
            "annotations": {"kvpool.dev/pool": "kvpool-system/chat"},
        },
        "spec": {"containers": [{"name": "engine", "image": "x", "command": ["vllm", "serve", "m"]}]},
    }
    kind = {"group": "", "version": "v1", "kind": "Pod"}
    request = {"uid": "7", "operation": "CREATE", "kind": kind, "namespace": namespace, "object": pod}
    resolve = PoolCache(Cluster(status)).resolve
    return await review_pod({"request": request}, resolve, InjectorConfig(image), timeout_s=5.0)


async def test_the_next_pod_of_the_namespace_is_admitted_without_the_init_container():
    status = status_with(("team", IMAGE), now=rfc3339(datetime.now(UTC)))
    result = await outcome_in("team", status)
    assert result.outcome == SkipReason.CLIENT_IMAGE_UNAVAILABLE
    (warning,) = result.review["response"]["warnings"]
    assert IMAGE in warning
    assert (await outcome_in("other", status)).outcome == "injected"
    assert (await outcome_in("team", status, IMAGE + "-fixed")).outcome == "injected"
    assert (await outcome_in("team", status_with(("team", IMAGE), now="2020-01-01T00:00:00Z"))).outcome == "injected"
