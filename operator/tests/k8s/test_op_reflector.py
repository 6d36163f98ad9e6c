"""Reflectors against an API server that loses events: nothing that was deleted stays, and nothing is missed."""

from __future__ import annotations

import asyncio
import contextlib
import copy
from typing import TYPE_CHECKING, Any

import pytest

from kvpool_operator.errors import ApiUnavailableError
from kvpool_operator.k8s import reflector as module
from kvpool_operator.k8s.client import ListPage, ListWatcher, NamespacedName, WatchEvent
from kvpool_operator.k8s.reflector import Event, Reflector, Selection, Store

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, AsyncIterator, Callable

    from kvpool_operator.k8s.client import Manifest

SELECTION = Selection("ConfigMap", "app=x", index_label="pool")


def config(name: str, uid: str = "", version: int = 1, **labels: str) -> Manifest:
    metadata = {"namespace": "ns", "name": name, "uid": uid or f"uid-{name}", "resourceVersion": str(version)}
    return {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": {**metadata, "labels": labels, "managedFields": [{"manager": "x"}]},
    }


class Api(ListWatcher):
    """An etcd in memory: a history of events, of which a compaction forgets the older ones."""

    def __init__(self, page: int = 500) -> None:
        self.objects: dict[str, Manifest] = {}
        self.history: list[tuple[int, WatchEvent]] = []
        self.version = 0
        self.compacted = 0
        self.page = page
        self.deaf = False
        """Open streams deliver nothing; a new one is deaf, too."""
        self.expire_tokens = 0
        self.fail_watches = 0
        self.lists = 0
        self.pages = 0
        self.watched_from: list[str] = []
        self._changed = asyncio.Event()

    def put(self, name: str, uid: str = "", **labels: str) -> None:
        self.version += 1
        manifest = config(name, uid, self.version, **labels)
        self._record("MODIFIED" if name in self.objects else "ADDED", manifest)
        self.objects[name] = manifest

    def delete(self, name: str) -> None:
        self.version += 1
        manifest = self.objects.pop(name)
        manifest["metadata"]["resourceVersion"] = str(self.version)
        self._record("DELETED", manifest)

    def send(self, kind: str, /, **fields: Any) -> None:
        """A BOOKMARK or an ERROR to the open stream."""
        self.version += 1
        self._record(kind, fields or {"metadata": {"resourceVersion": str(self.version)}})

    def compact(self) -> None:
        self.compacted = self.version
        self.history.clear()

    def _record(self, kind: str, manifest: Manifest) -> None:
        self.history.append((self.version, WatchEvent(kind, copy.deepcopy(manifest))))
        self.wake()

    def wake(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()

    async def list_page(
        self, kind: str, *, namespace: str = "", labels: str = "", token: str = "", metadata_only: bool = False
    ) -> ListPage:
        assert (kind, labels, metadata_only) == ("ConfigMap", "app=x", False)
        self.lists += not token
        self.pages += 1
        if token and self.expire_tokens:
            self.expire_tokens -= 1
            raise ApiUnavailableError("the provided continue parameter is too old", 410)
        names = sorted(self.objects)
        start = int(token or 0)
        end = start + self.page
        items = [copy.deepcopy(self.objects[n]) for n in names[start:end]]
        return ListPage(items, str(self.version), str(end) if end < len(names) else "")

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
        self.watched_from.append(resource_version)
        if self.fail_watches:
            self.fail_watches -= 1
            raise ApiUnavailableError("ServerDisconnectedError")
        at = int(resource_version)
        if at < self.compacted:
            raise ApiUnavailableError("too old resource version", 410)
        while True:
            for version, event in list(self.history):
                if version > at and not self.deaf:
                    at = version
                    yield copy.deepcopy(event)
            try:
                async with asyncio.timeout(idle_timeout_s):
                    await self._changed.wait()
            except TimeoutError:
                return


class World:
    def __init__(self, api: Api, reflector: Reflector, events: list[Event]) -> None:
        self.api = api
        self.reflector = reflector
        self.events = events

    @property
    def names(self) -> list[str]:
        return [m["metadata"]["name"] for m in self.reflector.store.list()]

    def taken(self) -> list[tuple[str, str]]:
        out = [(e.type, ((e.new or e.old) or {})["metadata"]["name"]) for e in self.events]
        self.events.clear()
        return out


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(5):
        while not condition():  # noqa: ASYNC110
            await asyncio.sleep(0.002)


@contextlib.asynccontextmanager
async def reflecting(api: Api, idle_timeout_s: float = 30.0) -> AsyncIterator[World]:
    events: list[Event] = []
    reflector = Reflector(api, SELECTION, on_event=events.append, idle_timeout_s=idle_timeout_s)
    task = asyncio.create_task(reflector.run())
    try:
        await asyncio.wait_for(reflector.store.synced.wait(), 5)
        yield World(api, reflector, events)
        assert not task.done()
    finally:
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task


@pytest.fixture(autouse=True)
def _no_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MIN_PAUSE_S", 0.001)
    monkeypatch.setattr(module, "MAX_PAUSE_S", 0.002)


async def test_a_list_fills_the_store_and_the_watch_keeps_it():
    api = Api()
    api.put("a", pool="one")
    async with reflecting(api) as world:
        assert [(e.type, e.is_initial) for e in world.events] == [("ADDED", True)]
        assert world.names == ["a"]
        found = world.reflector.store.get("ns", "a")
        assert found is not None
        assert "managedFields" not in found["metadata"]
        world.taken()
        api.put("b", pool="two")
        api.put("a", pool="two")
        api.delete("b")
        await until(lambda: len(world.events) == 3)
        assert not any(e.is_initial for e in world.events)
        assert world.taken() == [("ADDED", "b"), ("MODIFIED", "a"), ("DELETED", "b")]
        assert world.names == ["a"]
        assert api.lists == 1


async def test_what_was_deleted_while_the_watch_was_deaf_goes_with_the_next_list():
    api = Api()
    for name in ("c2", "c3", "c4", "c5"):
        api.put(name)
    async with reflecting(api, idle_timeout_s=0.05) as world:
        world.taken()
        api.deaf = True
        api.delete("c2")
        api.delete("c3")
        api.delete("c4")
        api.put("c4", uid="another")
        api.put("c9")
        api.compact()
        await until(lambda: world.names == ["c4", "c5", "c9"])
        found = world.reflector.store.get("ns", "c4")
        assert found is not None
        assert found["metadata"]["uid"] == "another"
        assert sorted(world.taken()) == [
            ("ADDED", "c4"), ("ADDED", "c9"), ("DELETED", "c2"), ("DELETED", "c3"), ("DELETED", "c4"),
        ]  # fmt: skip
        assert api.lists == 2
        api.deaf = False
        api.put("c9")
        await until(lambda: world.taken() == [("MODIFIED", "c9")])


async def test_a_silent_stream_is_opened_again_and_continues_where_it_stopped():
    api = Api()
    api.put("a")
    async with reflecting(api, idle_timeout_s=0.05) as world:
        world.taken()
        api.deaf = True
        api.delete("a")
        api.put("b")
        await until(lambda: len(api.watched_from) > 2)
        assert world.names == ["a"], "nothing was delivered"
        api.deaf = False
        await until(lambda: world.names == ["b"])
        assert world.taken() == [("DELETED", "a"), ("ADDED", "b")]
        assert api.lists == 1, "no list is needed: the events are still there"


async def test_bookmarks_move_the_version_that_the_watch_continues_from():
    api = Api()
    api.put("a")
    async with reflecting(api, idle_timeout_s=0.05) as world:
        api.send("BOOKMARK")
        await until(lambda: "2" in api.watched_from)
        api.compact()
        await until(lambda: api.watched_from.count("2") > 1)
        assert api.lists == 1, "the bookmark is new enough"
        assert world.names == ["a"]


@pytest.mark.parametrize("code", [410, 500])
async def test_an_error_event_starts_over_with_a_list(code: int):
    api = Api()
    api.put("a")
    async with reflecting(api) as world:
        api.send("ERROR", kind="Status", code=code, message="too old resource version")
        await until(lambda: api.lists == 2)
        api.put("b")
        await until(lambda: world.names == ["a", "b"])


async def test_streams_that_fail_again_and_again_end_in_a_list():
    api = Api()
    api.put("a")
    api.fail_watches = 4
    async with reflecting(api) as world:
        api.put("b")
        await until(lambda: world.names == ["a", "b"])
        assert api.lists == 2


async def test_lists_are_chunked_and_begin_again_when_a_token_expires():
    api = Api(page=10)
    for n in range(35):
        api.put(f"c{n:02}")
    api.expire_tokens = 1
    async with reflecting(api) as world:
        assert len(world.names) == 35
        assert (api.lists, api.pages) == (2, 2 + 4)
        assert len(world.events) == 35, "the half list was not emitted"


async def test_a_token_that_always_expires_does_not_stop_the_reflector():
    api = Api(page=10)
    for n in range(15):
        api.put(f"c{n:02}")
    api.expire_tokens = module.MAX_LIST_ATTEMPTS + 1
    async with reflecting(api) as world:
        assert len(world.names) == 15


def test_a_recreated_object_is_a_deletion_and_an_addition():
    store = Store()
    store.upsert(config("a", uid="1"))
    assert [(e.type, (e.new or e.old or {})["metadata"]["uid"]) for e in store.upsert(config("a", uid="2"))] == [
        ("DELETED", "1"), ("ADDED", "2"),
    ]  # fmt: skip
    assert store.replace([config("a", uid="2")]) == [], "a list without news"
    assert len(store) == 1


def test_objects_are_found_by_namespace_and_label():
    store = Store("pool")
    other = config("b", pool="two")
    other["metadata"]["namespace"] = "other"
    for manifest in (config("a", pool="one", app="x"), config("c", pool="two"), other, config("d")):
        store.upsert(manifest)

    def names(*args: Any) -> list[str]:
        return [m["metadata"]["name"] for m in store.list(*args)]

    assert names() == ["a", "c", "d", "b"]
    assert names("ns", {"pool": "two"}) == ["c"]
    assert names("", {"pool": "two"}) == ["c", "b"]
    assert names("ns", {"pool": "one", "app": "y"}) == []
    store.upsert(config("a", pool="two", version=2))
    assert names("", {"pool": "one"}) == []
    assert names("ns", {"pool": "two"}) == ["a", "c"]
    store.delete(NamespacedName("ns", "a"))
    assert names("ns", {"pool": "two"}) == ["c"]
    assert store.delete(NamespacedName("ns", "a")) == []
