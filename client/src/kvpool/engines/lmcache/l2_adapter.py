"""The pool as L2 storage of LMCache's server (`lmcache server`), which serves the engines of a node.

LMCache copies blocks between the engines and its own memory (L1); `PoolL2Adapter` moves them between that memory and
the pool, without a copy in Python. One object of LMCache is one block of the pool. Configuration of the server:

    lmcache server --supported-transfer-mode auto --l2-prefetch-policy retain --l2-adapter
      '{"type": "plugin", "module_path": "kvpool.engines.lmcache_mp", "class_name": "PoolL2Adapter", "shared": true,
        "adapter_params": {"socket": "/run/kvpool/kv.sock"}}'

`adapter_params` are fields of kvpool.config.ClientConfig (`socket`, `deadlines` ...), which win over the environment,
and

    tag                 text: servers with different tags share nothing
    revision            of the model, where its files are not on this node
    max_capacity_bytes  LMCache evicts above this size; 0, the default: only the pool evicts
    store_queue_bytes   that wait to be stored, by default half of LMCache's memory; more are not stored, and counted

Without a sidecar, or after any error, lookups miss and the engines compute. The interface is LMCache's
`L2AdapterInterface` (lmcache/v1/distributed/l2_adapters/base.py). The code that needs no LMCache is in the other
modules of this package and in kvpool.engines.common.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import os
import time
from typing import TYPE_CHECKING, Any

from kvpool.client import Client
from kvpool.engines.common.client_cache import ClientCache
from kvpool.engines.common.self_test import SelfTests, is_trusted
from kvpool.engines.common.settings import client_config
from kvpool.engines.common.stores import UnstoredCounter, put_in_batches, queue_bytes
from kvpool.engines.common.tasks import Tasks
from kvpool.engines.common.without_pool import report_without_pool
from kvpool.engines.lmcache.fingerprint import (
    FingerprintNamespace,
    chunk_name,
    fingerprint_inputs,
    layout_of,
    layout_of_object,
    leading_chunks,
    salt_of,
    split,
)
from kvpool.engines.lmcache.interface import adapter_problem
from kvpool.engines.lmcache.inventory import StoredInventory
from kvpool.engines.tested_versions import is_tested
from kvpool.protocol.keys import block_id, fingerprint
from kvpool.protocol.wire import Tier
from kvpool.stats import ABSENT_REASONS, Reason

try:
    import lmcache
    from lmcache.lmcache_native import Bitmap
    from lmcache.v1.distributed.api import KeyEntry, KeyListPage, ObjectKey
    from lmcache.v1.distributed.internal_api import L2StoreResult
    from lmcache.v1.distributed.l2_adapters.base import L2AdapterInterface
    from lmcache.v1.platform import create_event_notifier
except ImportError as e:
    raise ImportError(
        f"kvpool.engines.lmcache_mp needs the L2 adapters of LMCache, which cannot be "
        f"imported here ({e}); run the server without this adapter"
    ) from e

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence


__all__ = ["PoolL2Adapter", "interface_problem"]

_log = logging.getLogger("lmcache.kvpool")  # under LMCache's own logger, so that the server's log shows it

_MAX_NAMESPACES = 16  # models, parallel sizes and layouts that one server serves
_MAX_NAMES = 262_144  # chunks whose sizes are known, for usage
_MAX_PENDING = 256  # pending lookups, and pending loads
_CLOSE_S = 15.0  # running transfers use LMCache's memory until they end; all have deadlines
_SETTINGS = ("tag", "revision", "max_capacity_bytes", "store_queue_bytes")


class PoolL2Adapter(L2AdapterInterface):  # type: ignore[misc]
    """L2 adapter, created by LMCache's server. Thread-safe; no method blocks or raises into the server."""

    def __init__(self, params: Any, l1_memory_desc: Any = None) -> None:
        params = dict(params) if isinstance(params, dict) else {}
        mine = {name: params.pop(name) for name in _SETTINGS if name in params}
        capacity = mine.get("max_capacity_bytes", 0)
        super().__init__(max_capacity_bytes=capacity if isinstance(capacity, int) and capacity > 0 else 0)
        self._tag = str(mine.get("tag", ""))
        self._revision = str(mine.get("revision", ""))
        self._config = client_config(params)
        self._wakers = [create_event_notifier() for _ in range(3)]
        store, lookup, load = (waker.notify for waker in self._wakers)
        numbers = itertools.count(1)
        c = self._config
        room = queue_bytes(getattr(l1_memory_desc, "size", 0), mine.get("store_queue_bytes"))
        self._stores: Tasks[Any] = Tasks("kvpool-store", 1, room, store, numbers)
        self._unstored = UnstoredCounter(_log)
        self._lookups: Tasks[Any] = Tasks("kvpool-lookup", 2, _MAX_PENDING, lookup, numbers)
        self._loads: Tasks[Any] = Tasks("kvpool-load", max(1, c.connections - 2), _MAX_PENDING, load, numbers)
        self._clients: ClientCache[FingerprintNamespace] = ClientCache(self._connect, _MAX_NAMESPACES)
        self._inventory: StoredInventory[Any] = StoredInventory(_MAX_NAMES)
        self._refused: set[str] = set()
        self._self_tests = SelfTests()
        self._disabled = interface_problem()
        if self._disabled:
            _log.error("kvpool: %s: the server runs without the pool", self._disabled)
            report_without_pool(self._disabled, "lmcache")

    # -- LMCache's interface ------------------------------------------------------------------------------------------

    def get_store_event_fd(self) -> int:
        """Return a descriptor that is readable when a store has ended."""
        return int(self._wakers[0].fileno())

    def get_lookup_and_lock_event_fd(self) -> int:
        """Return a descriptor that is readable when a lookup has ended."""
        return int(self._wakers[1].fileno())

    def get_load_event_fd(self) -> int:
        """Return a descriptor that is readable when a load has ended."""
        return int(self._wakers[2].fileno())

    def submit_store_task(self, keys: list[Any], objects: list[Any]) -> int:
        """Store objects in the background. Fails immediately while the store queue is full, and is counted."""
        keys, objects = list(keys), list(objects)
        dropped = self._stores.dropped
        weight = max(1, sum(map(_size, objects)))
        task = self._stores.submit(lambda: self._store(keys, objects), L2StoreResult(False, 0), weight, len(keys))
        if self._stores.dropped > dropped:
            self._unstored.add(Reason.BUSY, len(keys))
        return task

    def pop_completed_store_tasks(self) -> dict[int, Any]:
        """Return outcomes of stores since the last call."""
        return self._stores.take_all()

    def submit_lookup_and_lock_task(self, keys: list[Any], group_layout_descs: dict[int, Any]) -> int:
        """Look up keys in the background, at most for a lookup's deadline. Nothing is locked."""
        keys = list(keys)
        submitted = time.monotonic()
        return self._lookups.submit(lambda: self._look_up(keys, group_layout_descs, submitted), Bitmap(len(keys)))

    def query_lookup_and_lock_result(self, task_id: int) -> Any:
        """Return a bitmap of the hits, once; None while the lookup is pending."""
        return self._lookups.take(task_id)

    def submit_unlock(self, keys: list[Any]) -> None:
        """Do nothing: a block that is evicted between lookup and load is a miss, or is still read completely."""

    def submit_load_task(self, keys: list[Any], objects: list[Any]) -> int:
        """Load objects in the background. The deadline counts from now, whatever is queued before it."""
        keys, objects = list(keys), list(objects)
        submitted = time.monotonic()
        return self._loads.submit(lambda: self._load(keys, objects, submitted), Bitmap(len(keys)))

    def query_load_result(self, task_id: int) -> Any:
        """A bitmap of what was loaded, once; None while the load is under way."""
        return self._loads.take(task_id)

    def delete(self, keys: list[Any]) -> None:
        """Make keys misses on this server until they are stored again. The pool evicts the bytes on its own."""
        self._notify_sizes(self._notify_keys_deleted, self._inventory.delete(keys))

    def list_l2_keys(self, model_name: str | None = None, page_size: int = 500, cursor: str | None = None) -> Any:
        """List what this server has stored, as far as it is recorded. ValueError for an invalid cursor."""
        if page_size <= 0 or not (cursor or "0").isdecimal():
            raise ValueError("page_size must be above 0, and the cursor one that this method returned")
        start = int(cursor or 0)
        pairs, more = self._inventory.page(start, page_size)
        entries = tuple(
            KeyEntry(key.to_encoded_object_key(), size) for key, size in pairs if model_name in (None, key.model_name)
        )
        return KeyListPage(entries, str(start + page_size) if more else None)

    def report_status(self) -> dict[str, Any]:
        """Return the health (healthy while the sidecar is reachable) and details for display."""
        clients = self._clients.all()
        reachable = all(c.connected for c in clients) if clients else os.path.exists(self._config.socket)
        return {
            "is_healthy": reachable and not self._disabled,
            "type": type(self).__name__,
            "reason": self._disabled or ("" if reachable else f"no sidecar at {self._config.socket}"),
            "socket": self._config.socket,
            "fingerprints": {c.fingerprint.hex(): c.stats() for c in clients},
            "stored_object_count": len(self._inventory),
            "not_stored": self._unstored.snapshot(),
            "pending": {"stores": self._stores.pending, "lookups": self._lookups.pending, "loads": self._loads.pending},
            "dropped": {"stores": self._stores.dropped, "lookups": self._lookups.dropped, "loads": self._loads.dropped},
        }

    def close(self) -> None:
        """Wait for transfers that use LMCache's memory, then release everything. Safe to call twice."""
        until = time.monotonic() + _CLOSE_S
        done = [t.close(max(0.0, until - time.monotonic())) for t in (self._lookups, self._loads, self._stores)]
        if not all(done):
            _log.error("kvpool: a transfer did not end within %.0f s", _CLOSE_S)
        self._clients.close()
        for waker in self._wakers:
            with contextlib.suppress(OSError):
                waker.close()

    # -- internals ----------------------------------------------------------------------------------------------

    def _connect(self, space: FingerprintNamespace) -> Client:
        inputs = fingerprint_inputs(space, str(lmcache.__version__), revision=self._revision, tag=self._tag, mode="mp")
        digest = fingerprint(inputs)
        model = os.path.basename(space.model.rstrip("/"))
        _log.info("kvpool: model %s, fingerprint %s, socket %s", model, digest.hex()[:16], self._config.socket)
        _log.debug("kvpool: fingerprint inputs %s", inputs)
        engine = f"lmcache {lmcache.__version__}"
        labels = {"engine": engine, "model": model, "tested": is_tested("lmcache", str(lmcache.__version__))}
        return Client(self._config, fingerprint=digest, labels=labels, fingerprint_inputs=inputs)

    def _parts(
        self, keys: Sequence[Any], layouts: Any, deadline: float, skip: Callable[[Any], bool] = lambda _: False
    ) -> list[tuple[Client, list[int], list[bytes]]]:
        """Return, per client, the positions of its keys and their block ids; keys without either are left out."""
        parts = []
        for space, places in split(keys, layouts).items():
            named = [(i, chunk_name(keys[i])) for i in places if not skip(keys[i])]
            usable = [(i, name) for i, name in named if name is not None]
            if len(usable) < len(named):
                self._refuse("hash", "LMCache hashes prompts with Python's built-in hash: use --hash-algorithm blake3")
            client = self._clients.get(space, deadline) if usable and not self._disabled else None
            if client is not None:
                block_ids = [block_id(client.fingerprint, *name) for _, name in usable]
                parts.append((client, [i for i, _ in usable], block_ids))
        return parts

    def _layouts(self, objects: Sequence[Any]) -> list[str]:
        layouts = [layout_of_object(o) for o in objects]
        if not all(layouts):
            self._refuse(
                "serde", "objects without the shapes of KV are not stored: remove `serde` from the configuration"
            )
        return layouts

    def _look_up(self, keys: Sequence[Any], groups: dict[int, Any], submitted: float) -> Any:
        layouts = {int(n): layout_of(d.shapes, d.dtypes) for n, d in groups.items()}
        hits, found = Bitmap(len(keys)), set[int]()
        counting, reason = None, Reason.NONE
        patience = self._config.deadlines.lookup_ms / 1000
        for client, places, block_ids in self._parts(keys, layouts, submitted + patience, self._inventory.is_deleted):
            if not is_trusted(self._self_tests, client, "lmcache", str(lmcache.__version__)):
                continue
            result = client.find(block_ids, submitted + client.lookup_seconds, exhaustive=True)
            for place, tier in zip(places, result.tiers, strict=True):
                if tier != Tier.MISS:
                    hits.set(place)
                    found.add(place)
            counting, reason = counting or client, reason or result.reason
        if counting is not None:
            counting.count_lookup(*leading_chunks(keys, found), reason)
        return hits

    def _load(self, keys: Sequence[Any], objects: Sequence[Any], submitted: float) -> Any:
        loaded = Bitmap(len(keys))
        here, lost = [], []
        views = [memoryview(o.byte_array).cast("B") for o in objects]
        size = sum(map(len, views))
        patience = self._config.deadlines.lookup_ms / 1000
        parts = self._parts(keys, self._layouts(objects), submitted + patience, self._inventory.is_deleted)
        for client, places, block_ids in parts:
            results = client.get_into(block_ids, [views[i] for i in places], submitted + client.load_seconds(size))
            for place, result in zip(places, results, strict=True):
                if result.ok:
                    loaded.set(place)
                    here.append(keys[place])
                elif result.reason in ABSENT_REASONS:
                    lost.append(keys[place])
        self._notify_sizes(self._notify_keys_deleted, self._inventory.lost(lost))
        if here:
            self._call_listener(lambda: self._notify_keys_accessed(here))
        return loaded

    def _store(self, keys: Sequence[Any], objects: Sequence[Any]) -> Any:
        views = [memoryview(o.byte_array).cast("B") for o in objects]
        stored, size = [], 0
        patience = self._config.deadlines.store_ms / 1000  # stores are asynchronous
        until = time.monotonic() + patience
        parts = self._parts(keys, self._layouts(objects), until)
        self._unstored.add(Reason.REFUSED, len(keys) - sum(len(places) for _, places, _ in parts))
        for client, places, block_ids in parts:
            salts = [salt_of(keys[i]) for i in places]
            buffers = [views[i] for i in places]
            results = put_in_batches(client, block_ids, buffers, salts, lambda: self._stores.is_closed)
            self._unstored.add_results(results)
            stored += [(keys[i], len(views[i])) for i, r in zip(places, results, strict=True) if r.ok]
            size += sum(r.bytes for r in results)
        new, gone = self._inventory.store(stored)
        self._notify_sizes(self._notify_keys_stored, new)
        self._notify_sizes(self._notify_keys_deleted, gone)
        return L2StoreResult(len(stored) == len(keys), size)

    def _notify_sizes(self, notify: Callable[[list[Any], list[int]], None], pairs: Sequence[tuple[Any, int]]) -> None:
        if pairs:
            self._call_listener(lambda: notify([key for key, _ in pairs], [size for _, size in pairs]))

    def _call_listener(self, notify: Callable[[], None]) -> None:
        try:
            notify()
        except Exception:
            _log.exception("kvpool: a listener of LMCache failed")

    def _refuse(self, what: str, why: str) -> None:
        if what not in self._refused:
            self._refused.add(what)
            _log.error("kvpool: %s", why)
            report_without_pool(why, "lmcache")


def _size(memory: Any) -> int:
    try:
        return int(memory.get_size())
    except Exception:  # a memory object of another release: the number of objects is bounded then
        return 1 << 20


def interface_problem() -> str:
    """Return why the LMCache that is installed cannot use this adapter; empty if it can."""
    return adapter_problem(L2AdapterInterface, PoolL2Adapter, ObjectKey, str(getattr(lmcache, "__version__", "")))
