"""Pods that have no label of KVPool: selected by their namespace or by a pool, and no other pod is sent anywhere."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
from api import MERGE, Api, until
from conftest import SYSTEM, Pools, as_account, rendered
from webhooks import HOOKS, INJECTED, Team, Webhooks, serve

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

pytestmark = pytest.mark.cluster

LABEL = "kvpool.dev/inject"
SELECTORS = f"{HOOKS}/kvpool-webhook-selectors"


@pytest.fixture
def team(api: Api) -> Team:
    return Team(api, "team-namespace", f"{SYSTEM}/chat")


@pytest.fixture
def webhooks(api: Api, team: Team, rights: Path, kubeconfig: Path, tmp_path: Path) -> Iterator[Webhooks]:
    yield from serve(api, rendered(), as_account(api, kubeconfig, "kvpool-webhook"), tmp_path, SYSTEM)
    for kind in ("labels", "annotations"):
        mark(api, team, kind, **{LABEL: None, "kvpool.dev/pool": None, "team": None})


def mark(api: Api, team: Team, kind: str, /, **values: Any) -> None:
    api.call("PATCH", f"/api/v1/namespaces/{team.name}", {"metadata": {kind: values}}, MERGE)


def made(team: Team, *command: str, dry: bool = True, name: str = "e", **labels: str) -> dict[str, Any]:
    container = {"name": "engine", "image": "registry.example/i", "command": list(command or ("vllm", "serve", "m"))}
    pod = {"metadata": {"name": name, "labels": labels}, "spec": {"containers": [container]}}
    found: dict[str, Any] = team.api.call("POST", f"{team.pods}?dryRun=All" if dry else team.pods, pod)
    return found


def notes_of(pod: dict[str, Any]) -> dict[str, str]:
    notes: dict[str, str] = pod["metadata"].get("annotations") or {}
    return notes


def is_injected(pod: dict[str, Any]) -> bool:
    return INJECTED in notes_of(pod)


def test_a_namespace_with_the_label_injects_its_engines_and_no_other_pod_waits(
    pools: Pools, webhooks: Webhooks, api: Api, team: Team
):
    pools.apply("chat")
    pools.apply("batch")
    team.until_injecting()
    assert not is_injected(made(team))
    mark(api, team, "labels", **{LABEL: "enabled"})
    mark(api, team, "annotations", **{"kvpool.dev/pool": f"{SYSTEM}/batch"})
    until("engines are injected", lambda: is_injected(made(team)))
    pod = made(team, dry=False, name="kept")
    assert pod["metadata"]["labels"] == {LABEL: "true"}
    assert notes_of(pod)["kvpool.dev/pool"] == f"{SYSTEM}/batch"
    assert notes_of(pod)["kvpool.dev/selected-by"] == "namespace"
    until("it is counted", lambda: pools.get("batch")["status"]["pods"]["injected"] == 1)
    assert not is_injected(made(team, **{LABEL: "disabled"}))
    assert not is_injected(made(team, **{LABEL: "false"}))
    # a webhook that accepts connections and never answers shows who waits for it
    webhooks.gate.set("slow")
    taken = webhooks.gate.taken
    assert not is_injected(made(team, "redis-server"))
    assert not is_injected(made(team, "vllm", "serve", "m", **{LABEL: "disabled"}))
    assert webhooks.gate.taken == taken
    assert not is_injected(made(team))
    assert webhooks.gate.taken > taken
    webhooks.gate.set("open")
    api.delete(f"{team.pods}/kept", gracePeriodSeconds=0)


def test_an_engine_that_its_namespace_selected_while_the_webhook_was_away_is_reported(
    pools: Pools, webhooks: Webhooks, api: Api, team: Team
):
    pools.apply("chat")
    mark(api, team, "labels", **{LABEL: "enabled"})
    until("engines are injected", lambda: is_injected(made(team)))
    webhooks.gate.set("shut")
    made(team, dry=False, name="missed")
    made(team, "redis-server", dry=False, name="other")
    webhooks.gate.set("open")
    pools.until_condition("chat", "InjectionReady", "PodsNotInjected", f"{team.name}/missed")
    assert pools.get("chat")["status"]["pods"]["notInjected"] == 1
    events = f"/api/v1/namespaces/{team.name}/events?fieldSelector=involvedObject.name%3Dmissed,reason%3DNotInjected"
    (event,) = until("it has an Event", lambda: api.items(events))
    assert "recreate it" in event["message"]
    for name in ("missed", "other"):
        api.delete(f"{team.pods}/{name}", gracePeriodSeconds=0)


def test_a_pool_selects_pods_of_the_namespaces_that_it_allows(pools: Pools, webhooks: Webhooks, api: Api, team: Team):
    teams = {"from": "Selector", "selector": {"matchLabels": {"team": "a"}}}
    chosen = {"matchExpressions": [{"key": "app", "operator": "Exists"}], "matchLabels": {"tier": "engine"}}
    pools.apply("chat", injection={"selector": chosen, "allowedNamespaces": teams})
    until("it is registered", lambda: len(api.get(SELECTORS)["webhooks"]) == 2)
    version = api.get(SELECTORS)["metadata"]["resourceVersion"]
    labels = {"app": "llm", "tier": "engine"}
    mark(api, team, "labels", team="a")
    until("pods are injected", lambda: is_injected(made(team, **labels)))
    pod = made(team, **labels)
    assert notes_of(pod)["kvpool.dev/pool"] == f"{SYSTEM}/chat"
    assert notes_of(pod)["kvpool.dev/selected-by"] == "pool"
    webhooks.gate.set("slow")
    taken = webhooks.gate.taken
    assert not is_injected(made(team, tier="engine"))
    assert webhooks.gate.taken == taken, "the API server itself matches the selector"
    webhooks.gate.set("open")
    # two pools that select a pod leave it alone, and it names both
    pools.apply("batch", injection={"selector": {"matchLabels": {"app": "llm"}}, "allowedNamespaces": teams})
    until("both are registered", lambda: len(api.get(SELECTORS)["webhooks"]) == 4)
    until("neither injects", lambda: not is_injected(made(team, **labels)))
    reason = until("it says so", lambda: notes_of(made(team, **labels)).get("kvpool.dev/skip-reason"))
    assert reason.startswith("pool-ambiguous: ")
    assert f"{SYSTEM}/batch, {SYSTEM}/chat" in reason
    mark(api, team, "labels", **{LABEL: "disabled"})
    until("the namespace is left alone", lambda: notes_of(made(team, **labels)) == {})
    mark(api, team, "labels", **{LABEL: None})
    pools.delete("batch")
    pools.until_gone("batch")
    until("it is injected again", lambda: is_injected(made(team, **labels)))
    until("one pool's are left", lambda: len(api.get(SELECTORS)["webhooks"]) == 2)
    first = api.get(SELECTORS)["metadata"]["resourceVersion"]
    assert first != version
    # what was written is what is read: nothing is written again for the same pools
    pools.apply("other")
    until("it is admitted", lambda: pools.get("other"))
    until("it is injected", lambda: is_injected(made(team, **labels)))
    assert api.get(SELECTORS)["metadata"]["resourceVersion"] == first
