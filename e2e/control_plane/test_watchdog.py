"""Pods of a Deployment that were made without the pool: made again one after the other, as far as a budget allows."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
from api import APPLY, Api, until
from conftest import SYSTEM, Operator, Pools, as_account, grant, rendered
from webhooks import INJECTED, Team, Webhooks, engine, serve

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

pytestmark = pytest.mark.cluster

TEAM = "team-watchdog"
DEPLOYMENT = f"/apis/apps/v1/namespaces/{TEAM}/deployments/engines"
BUDGET = f"/apis/policy/v1/namespaces/{TEAM}/poddisruptionbudgets/engines"
PODS = f"/api/v1/namespaces/{TEAM}/pods?labelSelector=app%3Dengines"


@pytest.fixture
def team(api: Api) -> Team:
    return Team(api, TEAM, f"{SYSTEM}/chat")


@pytest.fixture
def webhooks(api: Api, team: Team, rights: Path, kubeconfig: Path, tmp_path: Path) -> Iterator[Webhooks]:
    yield from serve(api, rendered(), as_account(api, kubeconfig, "kvpool-webhook"), tmp_path, SYSTEM)


@pytest.fixture
def engines(api: Api, webhooks: Webhooks) -> Iterator[None]:
    """Three replicas that were made while the webhook was away."""
    webhooks.gate.set("shut")
    template = engine("e", f"{SYSTEM}/chat")
    template["metadata"] = {k: v for k, v in template["metadata"].items() if k != "name"}
    template["metadata"]["labels"]["app"] = "engines"
    spec = {"replicas": 3, "selector": {"matchLabels": {"app": "engines"}}, "template": template}
    deployment = {"apiVersion": "apps/v1", "kind": "Deployment", "metadata": {"name": "engines"}, "spec": spec}
    api.call("PATCH", f"{DEPLOYMENT}?fieldManager=user", deployment, APPLY)
    until("they run", lambda: api.get(DEPLOYMENT)["status"].get("readyReplicas") == 3)
    webhooks.gate.set("open")
    yield
    api.delete(BUDGET)
    api.delete(DEPLOYMENT, propagationPolicy="Foreground")
    until("they are gone", lambda: api.items(PODS) == [])


def injected(api: Api) -> list[bool]:
    return [
        INJECTED in p["metadata"]["annotations"] for p in api.items(PODS) if "deletionTimestamp" not in p["metadata"]
    ]


def test_pods_that_were_missed_are_made_again_one_after_the_other(
    pools: Pools, api: Api, team: Team, engines: None, operator: Operator
):
    pools.apply("chat")
    pools.until_condition("chat", "InjectionReady", "PodsNotInjected", "3 opted-in pods")
    team.until_injecting()
    before = {p["metadata"]["uid"] for p in api.items(PODS)}
    pools.until_condition("chat", "InjectionReady", "PodsNotInjected", "recreate them")
    assert {p["metadata"]["uid"] for p in api.items(PODS)} == before, "nothing is evicted unless it is asked for"

    pools.apply("chat", injection={"watchdog": "Restart", "restartEvery": "10s"})
    reported = "allow it by the chart's value operator.restartPods"
    pools.until_condition("chat", "InjectionReady", "PodsNotInjected", reported)
    assert {p["metadata"]["uid"] for p in api.items(PODS)} == before
    budget = {"apiVersion": "policy/v1", "kind": "PodDisruptionBudget", "metadata": {"name": "engines"}}
    budget["spec"] = {"minAvailable": 3, "selector": {"matchLabels": {"app": "engines"}}}
    api.call("PATCH", f"{BUDGET}?fieldManager=user", budget, APPLY)
    until("the budget is known", lambda: api.get(BUDGET)["status"]["expectedPods"] == 3)
    grant(api, rendered("operator.restartPods=true"))
    try:
        pools.until_condition("chat", "InjectionReady", "PodsNotInjected", "PodDisruptionBudget keeps")
        assert {p["metadata"]["uid"] for p in api.items(PODS)} == before
        api.delete(BUDGET)

        least = [3]

        def all_injected() -> Any:
            found: dict[str, Any] = api.get(DEPLOYMENT)["status"]
            least.append(found.get("readyReplicas", 0))
            return injected(api) == [True] * 3 and found.get("readyReplicas") == 3

        until("all have the pool in them", all_injected, timeout=90)
        assert min(least) >= 2, "one at a time"
        pools.until_condition("chat", "InjectionReady", "Injecting", "3 pods were injected")
        assert operator.metric("kvpool_operator_pod_restarts_total") >= 3
        until("the metric has them", lambda: operator.metric("kvpool_pool_pods", 'state="injected"') == 3)

        # a change of what they are told makes them outdated, and they are made again, too
        young = {p["metadata"]["uid"] for p in api.items(PODS)}
        pools.apply("chat", injection={"watchdog": "Report", "vllm": {"hostMemory": "1Gi"}})
        words = "3 of them have an older client or configuration"
        pools.until_condition("chat", "InjectionReady", "Injecting", words)
        assert pools.get("chat")["status"]["pods"]["outdated"] == 3
        assert {p["metadata"]["uid"] for p in api.items(PODS)} == young
    finally:
        grant(api, rendered("sidecar.nfs.enabled=true"))
