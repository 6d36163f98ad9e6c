"""Webhooks that the API server calls for the pods that pools select."""

import copy
from types import SimpleNamespace

import pytest

from kvpool_operator.errors import ConflictError
from kvpool_operator.webhook.selector_hooks import MAX_HOOKS, RECHECK_S, SelectorHooks, selector_hooks

EXCLUDED = {"key": "kubernetes.io/metadata.name", "operator": "NotIn", "values": ["kube-system"]}
OUT = {"key": "kvpool.dev/inject", "operator": "NotIn", "values": ["disabled", "false"]}
TEMPLATE = {
    "name": "pods.kvpool.dev",
    "failurePolicy": "Fail",
    "timeoutSeconds": 3,
    "objectSelector": {"matchLabels": {"kvpool.dev/inject": "true"}},
    "namespaceSelector": {"matchExpressions": [EXCLUDED]},
    "clientConfig": {"caBundle": "YQ==", "service": {"name": "kvpool-webhook"}},
}


def a_pool(name="chat", selector=None, allowed_from="Same", **other):
    return SimpleNamespace(
        namespace="kvpool-system",
        name=name,
        enabled=True,
        pod_selector={"matchLabels": {"app": "llm"}, "matchExpressions": []} if selector is None else selector,
        allowed_from=allowed_from,
        allowed_selector={"matchLabels": {"team": "a"}, "matchExpressions": []},
        **other,
    )


def test_a_selector_is_matched_by_the_api_server_and_never_stops_a_pod():
    (hook,) = selector_hooks(TEMPLATE, [a_pool()])
    assert hook["name"] == "own.chat.kvpool-system.pods.kvpool.dev"
    assert hook["failurePolicy"] == "Ignore"
    assert hook["clientConfig"] == TEMPLATE["clientConfig"]
    assert hook["timeoutSeconds"] == 3
    assert hook["objectSelector"] == {
        "matchExpressions": [{"key": "app", "operator": "In", "values": ["llm"]}, OUT],
    }
    own = {"key": "kubernetes.io/metadata.name", "operator": "In", "values": ["kvpool-system"]}
    assert hook["namespaceSelector"] == {"matchExpressions": [EXCLUDED, OUT, own]}


def test_the_namespaces_that_a_pool_allows_have_a_webhook_next_to_its_own():
    allowed, own = selector_hooks(TEMPLATE, [a_pool(allowed_from="Selector")])
    assert [allowed["name"].split(".")[0], own["name"].split(".")[0]] == ["allowed", "own"]
    assert allowed["namespaceSelector"]["matchExpressions"][2:] == [
        {"key": "team", "operator": "In", "values": ["a"]},
        {"key": "kubernetes.io/metadata.name", "operator": "NotIn", "values": ["kvpool-system"]},
    ]


def test_an_expression_is_as_the_api_server_stores_it():
    selector = {"matchLabels": {}, "matchExpressions": [{"key": "app", "operator": "Exists", "values": []}]}
    (hook,) = selector_hooks(TEMPLATE, [a_pool(selector=selector)])
    assert hook["objectSelector"]["matchExpressions"][0] == {"key": "app", "operator": "Exists"}


def test_the_number_of_webhooks_is_bounded(caplog):
    assert len(selector_hooks(TEMPLATE, [a_pool(f"p{i:04}") for i in range(MAX_HOOKS + 5)])) == MAX_HOOKS
    assert "the first 200 are registered" in caplog.text


class Store:
    def __init__(self):
        self.template = copy.deepcopy(TEMPLATE)
        self.selectors = {"metadata": {"resourceVersion": "1"}}
        self.reads = self.writes = 0
        self.conflicts = False

    async def read_configuration(self):
        return {"webhooks": [{"name": "namespaces.kvpool.dev"}, self.template]}

    async def read_selector_configuration(self):
        self.reads += 1
        return self.selectors

    async def write_selector_webhooks(self, webhooks, resource_version):
        if self.conflicts:
            raise ConflictError
        assert resource_version == self.selectors["metadata"]["resourceVersion"]
        self.writes += 1
        self.selectors = {"metadata": {"resourceVersion": str(self.writes + 1)}, "webhooks": webhooks}


class World:
    def __init__(self, *pools):
        self.store, self.now = Store(), 1000.0
        self.pools = SimpleNamespace(pools=list(pools), synced=True)
        self.hooks = SelectorHooks(self.store, self.pools, clock=lambda: self.now)

    @property
    def names(self):
        return [hook["name"].split(".")[1] for hook in self.store.selectors.get("webhooks", [])]


async def test_webhooks_follow_the_pools_and_are_written_once():
    world = World(a_pool(), a_pool("plain", selector=None))
    world.pools.pools[1].pod_selector = None
    for _ in range(3):
        await world.hooks.step()
    assert (world.names, world.store.reads, world.store.writes) == (["chat"], 1, 1)
    world.pools.pools.append(a_pool("batch"))
    await world.hooks.step()
    assert world.names == ["batch", "chat"]
    world.pools.pools.clear()
    await world.hooks.step()
    assert world.names == []


async def test_what_another_removed_and_a_new_authority_are_written_again_in_time():
    world = World(a_pool())
    await world.hooks.step()
    world.store.selectors.pop("webhooks")
    world.store.template["clientConfig"]["caBundle"] = "Yg=="
    world.now += RECHECK_S
    await world.hooks.step()
    (hook,) = world.store.selectors["webhooks"]
    assert hook["clientConfig"]["caBundle"] == "Yg=="


async def test_a_replica_that_was_not_first_writes_after_reading_again():
    world = World(a_pool())
    world.store.conflicts = True
    with pytest.raises(ConflictError):
        await world.hooks.step()
    world.store.conflicts = False
    await world.hooks.step()
    assert world.names == ["chat"]


async def test_nothing_is_written_before_the_pools_are_known_or_the_webhook_is_trusted(caplog):
    world = World(a_pool())
    world.pools.synced = False
    await world.hooks.step()
    world.pools.synced = True
    del world.store.template["clientConfig"]["caBundle"]
    await world.hooks.step()
    assert world.store.writes == 0
    assert "not completely installed" in caplog.text
    world.store.template["clientConfig"]["caBundle"] = "YQ=="
    await world.hooks.step()
    assert world.names == ["chat"]
