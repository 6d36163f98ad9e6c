"""Which change of the cluster enqueues which pools, and what is kept of each object."""

from __future__ import annotations

import asyncio
import contextlib
from typing import TYPE_CHECKING, Any

from kvpool_operator.informers import Informers, slim_pool_pod
from kvpool_operator.k8s.client import ListPage, ListWatcher, NamespacedName, WatchEvent
from kvpool_operator.nodes.drain import drain_signal
from kvpool_operator.nodes.node_cache import slim_node
from kvpool_operator.observe.engine_pods import count, slim_engine_pod
from kvpool_operator.observe.observer import OWNED_KINDS

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, AsyncIterator

    from kvpool_operator.k8s.client import Manifest

OURS = {"app.kubernetes.io/managed-by": "kvpool-operator", "kvpool.dev/pool": "chat"}
CHAT = ("ns", "chat")


def an_object(name: str, namespace: str = "", version: str = "1", **fields: Any) -> Manifest:
    metadata = {"name": name, "uid": f"uid-{name}", "resourceVersion": version, **fields.pop("metadata", {})}
    return {"metadata": metadata | ({"namespace": namespace} if namespace else {}), **fields}


class Source(ListWatcher):
    """Lists what it is given, and then delivers what is sent."""

    def __init__(self, listed: dict[str, list[Manifest]]) -> None:
        self.listed = listed
        self.selections: list[tuple[str, str, bool]] = []
        self.namespaces: set[tuple[str, str]] = set()
        self.streams: dict[str, asyncio.Queue[WatchEvent]] = {}

    async def list_page(
        self, kind: str, *, namespace: str = "", labels: str = "", token: str = "", metadata_only: bool = False
    ) -> ListPage:
        self.selections.append((kind, labels, metadata_only))
        self.namespaces.add((kind, namespace))
        found = self.listed.get(kind, [])
        return ListPage([m for m in found if namespace in ("", m["metadata"].get("namespace", ""))], "1", "")

    async def watch(
        self,
        kind: str,
        *,
        namespace: str = "",
        labels: str = "",
        resource_version: str,
        metadata_only: bool = False,
        idle_timeout_s: float,
    ) -> AsyncGenerator[WatchEvent]:
        stream = self.streams.setdefault(f"{kind} {labels}".strip(), asyncio.Queue())
        while True:
            yield await stream.get()

    async def send(self, stream: str, kind: str, manifest: Manifest) -> None:
        while stream not in self.streams:  # noqa: ASYNC110
            await asyncio.sleep(0)
        self.streams[stream].put_nowait(WatchEvent(kind, manifest))
        for _ in range(20):
            await asyncio.sleep(0)


class Pools:
    """Records what is enqueued."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, ...]] = []

    def enqueue(self, namespace: str, name: str) -> None:
        self.calls.append(("now", namespace, name))

    def enqueue_debounced(self, namespace: str, name: str) -> None:
        self.calls.append(("debounced", namespace, name))

    def enqueue_background(self, namespace: str, name: str) -> None:
        self.calls.append(("background", namespace, name))

    def enqueue_all(self) -> None:
        self.calls.append(("all",))

    def taken(self) -> list[tuple[str, ...]]:
        calls, self.calls = self.calls, []
        return calls


@contextlib.asynccontextmanager
async def informing(
    listed: dict[str, list[Manifest]], **options: Any
) -> AsyncIterator[tuple[Source, Informers, Pools]]:
    source, pools = Source(listed), Pools()
    informers = Informers(source, idle_timeout_s=60, **options)
    task = asyncio.create_task(informers.run(pools))
    try:
        await asyncio.wait_for(informers.wait_synced(), 5)
        yield source, informers, pools
        assert not task.done()
    finally:
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task


async def test_every_kind_is_selected_by_label_where_there_is_one():
    async with informing({}) as (source, _, _):
        selections = {(kind, labels) for kind, labels, _ in source.selections}
        assert {(k, "app.kubernetes.io/managed-by=kvpool-operator") for k in OWNED_KINDS} <= selections
        assert ("Pod", "kvpool.dev/inject=true") in selections
        assert ("Namespace", "", True) in source.selections
        assert len(selections) == len(OWNED_KINDS) + 4


async def test_only_the_given_namespaces_are_watched():
    config = [an_object("chat-config", ns, metadata={"labels": OURS}) for ns in ("a", "b", "c")]
    nodes = [an_object("node-1")]
    async with informing({"ConfigMap": config, "Node": nodes}, namespaces=("a", "b")) as (source, informers, _):
        kinds = {kind for kind, namespace in source.namespaces if namespace == ""}
        assert kinds == {"Namespace", "Node", "PersistentVolume"}
        assert {ns for kind, ns in source.namespaces if kind not in kinds} == {"a", "b"}
        owned = informers.listers.owned["ConfigMap"]
        assert [m["metadata"]["namespace"] for m in owned.list("", {"kvpool.dev/pool": "chat"})] == ["a", "b"]
        assert len(owned.list("b")) == 1
        assert owned.list("c") == []
        assert owned.get("a", "chat-config") == config[0]
        assert owned.get("c", "chat-config") is None


async def test_without_nfs_no_volume_is_watched():
    async with informing({}, nfs=False) as (source, informers, _):
        assert "PersistentVolume" not in {kind for kind, *_ in source.selections}
        assert "PersistentVolume" not in informers.listers.owned


async def test_owned_objects_enqueue_their_pool():
    config = an_object("chat-config", "ns", metadata={"labels": OURS})
    wide = {"labels": {**OURS, "kvpool.dev/pool-namespace": "ns"}}
    stream = "{} app.kubernetes.io/managed-by=kvpool-operator"
    async with informing({"ConfigMap": [config]}) as (source, informers, pools):
        assert pools.taken() == [("background", *CHAT)]
        assert informers.listers.owned["ConfigMap"].list("ns", {"kvpool.dev/pool": "chat"}) == [config]
        await source.send(stream.format("ConfigMap"), "DELETED", config)
        await source.send(stream.format("PersistentVolume"), "ADDED", an_object("v", metadata=wide))
        assert pools.taken() == [("debounced", *CHAT)] * 2
        await source.send(stream.format("Service"), "ADDED", an_object("odd", "ns"))
        assert pools.taken() == []


async def test_a_namespace_matters_when_its_labels_or_its_life_change():
    def labeled(version: str, **metadata: Any) -> Manifest:
        return an_object("a", version=version, metadata=metadata)

    async with informing({"Namespace": [labeled("1", labels={"x": "1"})]}) as (source, _, pools):
        assert pools.taken() == []
        for event, manifest, expected in (
            ("MODIFIED", labeled("2", labels={"x": "1"}, annotations={"y": "1"}), []),
            ("MODIFIED", labeled("3", labels={"x": "2"}), [("all",)]),
            ("MODIFIED", labeled("4", labels={"x": "2"}, deletionTimestamp="2026-11-20T10:00:00Z"), [("all",)]),
            ("MODIFIED", labeled("5", labels={"x": "3"}, deletionTimestamp="2026-11-20T10:00:00Z"), []),
            ("DELETED", labeled("6", labels={"x": "3"}), [("all",)]),
            ("ADDED", labeled("7"), [("all",)]),
        ):
            await source.send("Namespace", event, manifest)
            assert pools.taken() == expected, manifest


async def test_a_node_matters_to_its_pools_when_it_begins_or_ceases_to_leave():
    def node(version: str, *, cordoned: bool = False) -> Manifest:
        return an_object("n", version=version, spec={"unschedulable": cordoned, "podCIDR": "10.0.0.0/24"})

    async with informing({"Node": [node("1")]}) as (source, informers, pools):
        informers.nodes.set_pool_nodes(NamespacedName(*CHAT), ["n"])
        await source.send("Node", "MODIFIED", node("2"))
        assert pools.taken() == []
        await source.send("Node", "MODIFIED", node("3", cordoned=True))
        assert pools.taken() == [("now", *CHAT)]
        signal = informers.nodes.get("n")
        assert signal is not None
        assert signal.reason == "it is cordoned"
        await source.send("Node", "DELETED", node("4"))
        assert pools.taken() == [("now", *CHAT)]
        assert informers.nodes.get("n") is None


async def test_pods_enqueue_nothing():
    pod = an_object("p", "ns", metadata={"labels": {"kvpool.dev/pool": "chat"}}, spec={"nodeName": "n"})
    async with informing({"Pod": [pod]}) as (source, informers, pools):
        await source.send("Pod kvpool.dev/inject=true", "ADDED", an_object("q", "ns"))
        assert pools.taken() == []
        assert [p["metadata"]["name"] for p in informers.listers.engine_pods.list()] == ["p", "q"]


def test_what_is_kept_of_an_object_is_enough():
    node = an_object("n", spec={"taints": [{"key": "karpenter.sh/disrupted"}]}, status={"images": ["x"] * 50})
    assert drain_signal(slim_node(node)) == drain_signal(node)
    assert "status" not in slim_node(node)
    annotations = {"kvpool.dev/injected": "ns/chat", "kvpool.dev/pool": "ns/chat", "other": "x"}
    pod = an_object(
        "p",
        "ns",
        metadata={
            "annotations": annotations,
            "ownerReferences": [{"controller": True, "kind": "ReplicaSet", "name": "r", "uid": "u"}],
        },
        spec={"containers": [{"name": "c"}], "initContainers": [{"name": "kvpool-client", "image": "old"}]},
        status={"phase": "Running", "conditions": [{"type": "Ready", "status": "True"}, {"type": "Initialized"}]},
    )
    full, slim = (count([p], "ns", "chat", "new", {}) for p in (pod, slim_engine_pod(pod)))
    assert slim == full
    assert full.injected == 1
    assert "other" not in slim_engine_pod(pod)["metadata"]["annotations"]
    server = {"name": "server", "securityContext": {"runAsUser": 2_000_000_001}}
    spec = {"nodeName": "n", "volumes": [], "containers": [server | {"env": []}]}
    kept = slim_pool_pod(an_object("p", "ns", spec=spec))
    assert kept["spec"] == {"nodeName": "n", "volumes": [], "containers": [server]}
