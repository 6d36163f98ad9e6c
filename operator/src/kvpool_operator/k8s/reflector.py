"""Reflector: a local copy of one kind of objects, kept up to date by a list and a watch.

The method is that of client-go. A list replaces the store and emits the deletions that this implies, so an object that
was deleted while a watch delivered nothing does not stay. The watch continues from the last resourceVersion after a
closed or silent stream; HTTP 410, an ERROR event or repeated failures start over with a list.
"""

from __future__ import annotations

import asyncio
import logging
import random
from contextlib import aclosing
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, Literal, NamedTuple, Protocol

from kvpool_operator.errors import ApiUnavailableError, OperatorError
from kvpool_operator.k8s.client import NamespacedName

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from kvpool_operator.k8s.client import ListWatcher, Manifest, WatchEvent

__all__ = ["Event", "Lister", "NamespacedStores", "Reflector", "Selection", "Store", "without_managed_fields"]

log = logging.getLogger(__name__)

IDLE_TIMEOUT_S: Final = 70.0
MAX_LIST_ATTEMPTS: Final = 3
MAX_WATCH_FAILURES: Final = 3
MIN_PAUSE_S: Final = 0.5
MAX_PAUSE_S: Final = 30.0


class Lister(Protocol):
    """Read-only view of a store. The objects are shared: never change one."""

    def get(self, namespace: str, name: str) -> Manifest | None:
        """The object; None if there is none. `namespace` is empty for cluster-scoped kinds."""
        ...

    def list(self, namespace: str = "", labels: Mapping[str, str] | None = None) -> list[Manifest]:
        """Objects by namespace (empty: all) and labels, sorted by namespace and name."""
        ...


class Event(NamedTuple):
    """A change of the store. `is_initial`: the object was in the first list."""

    type: Literal["ADDED", "MODIFIED", "DELETED"]
    new: Manifest | None
    old: Manifest | None = None
    is_initial: bool = False


@dataclass(frozen=True)
class Selection:
    """Which objects a reflector keeps, and how much of each."""

    kind: str
    labels: str = ""
    """Label selector, as in a URL."""
    metadata_only: bool = False
    """Request PartialObjectMetadata: no spec and no status."""
    namespace: str = ""
    """Empty: all namespaces, or a cluster-scoped kind."""
    index_label: str = ""
    """Label by which `list` finds objects without a scan."""


def without_managed_fields(manifest: Manifest) -> Manifest:
    """The object without `managedFields`, which are as long as the rest and are never read."""
    metadata = {k: v for k, v in manifest["metadata"].items() if k != "managedFields"}
    return {**manifest, "metadata": metadata}


class Store:
    """Objects of one kind, indexed by one label. For one event loop."""

    def __init__(self, index_label: str = "") -> None:
        self._index_label = index_label
        self._objects: dict[NamespacedName, Manifest] = {}
        self._index: dict[str, set[NamespacedName]] = {}
        self.synced = asyncio.Event()
        """Set after the first complete list."""

    def __len__(self) -> int:
        return len(self._objects)

    def get(self, namespace: str, name: str) -> Manifest | None:
        """See `Lister.get`."""
        return self._objects.get(NamespacedName(namespace, name))

    def replace(self, manifests: list[Manifest]) -> list[Event]:
        """Swap the contents for a complete list; the events that lead from the former contents to it."""
        is_initial = not self.synced.is_set()
        listed = {_key(m) for m in manifests}
        events = [e for key in self._objects.keys() - listed for e in self.delete(key)]
        for manifest in manifests:
            old = self._objects.get(_key(manifest))
            if old is None or _version(old) != _version(manifest):
                events += (e._replace(is_initial=is_initial) for e in self.upsert(manifest))
        self.synced.set()
        return events

    def upsert(self, manifest: Manifest) -> list[Event]:
        """Add or replace one object. An object with another uid was deleted and recreated."""
        key = _key(manifest)
        old = self._objects.get(key)
        events: list[Event] = []
        if old is not None and old["metadata"].get("uid") != manifest["metadata"].get("uid"):
            events, old = self.delete(key), None
        elif old is not None:
            self._unindex(key, old)
        self._objects[key] = manifest
        label = _labels(manifest).get(self._index_label)
        if label is not None:
            self._index.setdefault(label, set()).add(key)
        return [*events, Event("ADDED" if old is None else "MODIFIED", manifest, old)]

    def delete(self, key: NamespacedName) -> list[Event]:
        """Remove one object."""
        old = self._objects.pop(key, None)
        if old is None:
            return []
        self._unindex(key, old)
        return [Event("DELETED", None, old)]

    def _unindex(self, key: NamespacedName, manifest: Manifest) -> None:
        label = _labels(manifest).get(self._index_label)
        if label is not None:
            keys = self._index.get(label, set())
            keys.discard(key)
            if not keys:
                self._index.pop(label, None)

    def list(self, namespace: str = "", labels: Mapping[str, str] | None = None) -> list[Manifest]:
        """See `Lister.list`."""
        wanted = dict(labels or {})
        indexed = wanted.get(self._index_label) if self._index_label else None
        keys = self._objects.keys() if indexed is None else self._index.get(indexed, set())
        return [
            self._objects[key]
            for key in sorted(keys)
            if namespace in ("", key.namespace) and wanted.items() <= _labels(self._objects[key]).items()
        ]


class NamespacedStores:
    """`Lister` over the stores of several namespaces."""

    def __init__(self, stores: Mapping[str, Store]) -> None:
        self._stores = dict(sorted(stores.items()))

    def get(self, namespace: str, name: str) -> Manifest | None:
        """See `Lister.get`."""
        store = self._stores.get(namespace)
        return None if store is None else store.get(namespace, name)

    def list(self, namespace: str = "", labels: Mapping[str, str] | None = None) -> list[Manifest]:
        """See `Lister.list`."""
        chosen = [store for name, store in self._stores.items() if namespace in ("", name)]
        return [manifest for store in chosen for manifest in store.list(namespace, labels)]


class Reflector:
    """Keeps `store` up to date while `run` runs. For one event loop; `on_event` must not block."""

    def __init__(
        self,
        source: ListWatcher,
        selection: Selection,
        *,
        project: Callable[[Manifest], Manifest] = without_managed_fields,
        on_event: Callable[[Event], None] = lambda _: None,
        idle_timeout_s: float = IDLE_TIMEOUT_S,
    ) -> None:
        """`project` drops fields that no reader uses. API servers send a bookmark every minute, so a
        stream that delivered nothing for `idle_timeout_s` is dead and is opened again."""
        self._source = source
        self._selection = selection
        self._project = project
        self._on_event = on_event
        self._idle_timeout_s = idle_timeout_s
        self._version = ""
        self.store = Store(selection.index_label)

    async def run(self) -> None:
        """List and watch until cancelled. Errors of the API are logged and retried with backoff."""
        failures = 0
        while True:
            started = asyncio.get_running_loop().time()
            try:
                if not self._version:
                    await self._list()
                await self._watch()
                failures = 0
            except OperatorError as e:
                failures += 1
                is_expired = isinstance(e, ApiUnavailableError) and e.status == 410
                if is_expired or failures % MAX_WATCH_FAILURES == 0:  # not after each failure: a list is expensive
                    self._version = ""
                log.warning("%ss cannot be watched: %s", self._selection.kind, e)
            pause = min(MAX_PAUSE_S, MIN_PAUSE_S * 2.0**failures) * random.uniform(0.5, 1.0)  # noqa: S311  no secret
            ran_s = asyncio.get_running_loop().time() - started
            await asyncio.sleep(pause if failures else max(0.0, pause - ran_s))

    async def _list(self) -> None:
        """Replace the store by a complete list; begin again if its continue token expires."""
        for attempt in range(MAX_LIST_ATTEMPTS):
            manifests: list[Manifest] = []
            token = ""
            try:
                while True:
                    page = await self._source.list_page(
                        self._selection.kind,
                        namespace=self._selection.namespace,
                        labels=self._selection.labels,
                        token=token,
                        metadata_only=self._selection.metadata_only,
                    )
                    manifests += (self._project(m) for m in page.items)
                    token = page.token
                    if not token:
                        break
            except ApiUnavailableError as e:
                if e.status != 410 or attempt == MAX_LIST_ATTEMPTS - 1:
                    raise
                continue
            self._version = page.resource_version
            self._emit(self.store.replace(manifests))
            return

    async def _watch(self) -> None:
        """Apply the events of one stream; returns when it ends or falls silent."""
        events = self._source.watch(
            self._selection.kind,
            namespace=self._selection.namespace,
            labels=self._selection.labels,
            resource_version=self._version,
            metadata_only=self._selection.metadata_only,
            idle_timeout_s=self._idle_timeout_s,
        )
        async with aclosing(events):
            async for event in events:
                self._apply(event)

    def _apply(self, event: WatchEvent) -> None:
        if event.type == "ERROR":
            self._version = ""
            code, message = event.object.get("code"), event.object.get("message")
            raise ApiUnavailableError(f"the watch ended: {message}", code if isinstance(code, int) else 0)
        self._version = str(event.object["metadata"]["resourceVersion"])
        if event.type in ("ADDED", "MODIFIED"):
            self._emit(self.store.upsert(self._project(event.object)))
        elif event.type == "DELETED":
            self._emit(self.store.delete(_key(event.object)))

    def _emit(self, events: list[Event]) -> None:
        for event in events:
            self._on_event(event)


def _key(manifest: Manifest) -> NamespacedName:
    metadata = manifest["metadata"]
    return NamespacedName(metadata.get("namespace", ""), metadata["name"])


def _version(manifest: Manifest) -> tuple[Any, Any]:
    return manifest["metadata"].get("uid"), manifest["metadata"].get("resourceVersion")


def _labels(manifest: Manifest) -> Mapping[str, str]:
    return manifest["metadata"].get("labels") or {}
