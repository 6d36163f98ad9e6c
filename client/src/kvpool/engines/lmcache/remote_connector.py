"""The pool as remote storage of LMCache inside an engine (`LMCacheConnectorV1`). One chunk is one block of the pool.

    LMCACHE_PRE_CACHING_HASH_ALGORITHM=sha256_cbor
    LMCACHE_REMOTE_STORAGE_PLUGINS=kvpool
    LMCACHE_EXTRA_CONFIG='{"remote_storage_plugin.kvpool.module_path": "kvpool.engines.lmcache_remote",
      "remote_storage_plugin.kvpool.class_name": "PoolConnectorAdapter",
      "remote_storage_plugin.kvpool.tag": "team-one"}'

The plug-in's name is `kvpool`, or `kvpool.` and anything. Further keys `remote_storage_plugin.kvpool.NAME` are fields
of kvpool.config.ClientConfig (`socket`, `deadlines` ...), which win over the environment, and `tag`, a text: engines
with different tags share nothing. LMCache's keys here hold no salt of vLLM's, so requests of one engine share whatever
their salt is, unless they carry a tag of their own (`kv_transfer_params: {"lmcache.tag.NAME": VALUE}`), which is kept
apart. For several tenants behind one engine use LMCache's server (kvpool.engines.lmcache_mp).

Whole chunks only, as LMCache stores them by default; its serdes and its layerwise mode are refused with a message. No
sidecar, or any error, is a miss. The interfaces are LMCache's `ConnectorAdapter` and `RemoteConnector`
(lmcache/v1/storage_backend/connector/).
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import logging
import os
import threading
import time
from typing import TYPE_CHECKING, Any, TypeVar

from kvpool.client import Client
from kvpool.engines.common.self_test import SelfTest, is_trusted
from kvpool.engines.common.settings import client_config
from kvpool.engines.common.stores import UnstoredCounter, put_in_batches, queue_bytes
from kvpool.engines.common.without_pool import report_without_pool
from kvpool.engines.lmcache.fingerprint import (
    FingerprintNamespace,
    fingerprint_inputs,
    key_name,
    layout_of,
    layout_of_object,
)
from kvpool.engines.lmcache.interface import connector_problem
from kvpool.engines.lmcache.inventory import StoredInventory
from kvpool.engines.lmcache.rechecks import Rechecks
from kvpool.engines.tested_versions import is_tested
from kvpool.protocol.keys import block_id, fingerprint
from kvpool.protocol.wire import Tier
from kvpool.stats import Reason

try:
    import lmcache
    from lmcache.utils import CacheEngineKey
    from lmcache.v1.storage_backend.connector import ConnectorAdapter
    from lmcache.v1.storage_backend.connector.base_connector import RemoteConnector
except ImportError as e:
    raise ImportError(
        f"kvpool.engines.lmcache_remote needs the remote connectors of LMCache, which "
        f"cannot be imported here ({e}); run the engine without this plug-in"
    ) from e

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

__all__ = ["PoolConnector", "PoolConnectorAdapter"]

_log = logging.getLogger("lmcache.kvpool")  # under LMCache's own logger, so that the engine's log shows it

_SCHEME = "plugin://kvpool"
_NOT_SETTINGS = ("module_path", "class_name", "tag", "revision", "store_queue_bytes")
_MAX_DELETED = 65_536
T = TypeVar("T")


class PoolConnectorAdapter(ConnectorAdapter):  # type: ignore[misc]
    """Factory of the connector, created by LMCache from the plug-in's configuration."""

    def __init__(self) -> None:
        super().__init__(_SCHEME)

    def can_parse(self, url: str) -> bool:
        """Return True for `plugin://kvpool` and `plugin://kvpool.NAME`."""
        return url == _SCHEME or url.startswith(_SCHEME + ".")

    def create_connector(self, context: Any) -> PoolConnector:
        """Create the connector; if the pool cannot be used, one that always misses."""
        prefix = f"remote_storage_plugin.{context.plugin_name or 'kvpool'}."
        extra = context.config.extra_config or {}
        settings = {name[len(prefix) :]: value for name, value in extra.items() if name.startswith(prefix)}
        return PoolConnector(context.loop, context.local_cpu_backend, context.config, context.metadata, settings)


class PoolConnector(RemoteConnector):  # type: ignore[misc]
    """Called from LMCache's event loop and, where a method is no coroutine, from the engine's threads. Never raises."""

    def __init__(self, loop: Any, local_cpu_backend: Any, config: Any, metadata: Any, settings: dict[str, Any]) -> None:
        super().__init__(config, metadata)
        self._memory = local_cpu_backend
        self._config = client_config({name: v for name, v in settings.items() if name not in _NOT_SETTINGS})
        self._layout = layout_of(self.meta_shapes, self.meta_dtypes)
        self._deleted: StoredInventory[bytes] = StoredInventory(_MAX_DELETED)
        self._lock = threading.Lock()
        self._queued_bytes = 0
        self._queue_bytes = queue_bytes(_memory_bytes(config), settings.get("store_queue_bytes"))
        self._closing = False
        self.dropped = 0  # chunks that were not stored because too many bytes waited
        self._unstored = UnstoredCounter(_log)
        self._warned: set[str] = set()
        self._client: Client | None = None
        self._self_test = SelfTest()
        self._rechecks = Rechecks(int(getattr(metadata, "worker_id", 0) or 0))
        pool = concurrent.futures.ThreadPoolExecutor
        self._lookups = pool(1, "kvpool-lookup")
        self._loads = pool(max(1, self._config.connections - 2), "kvpool-load")
        self._stores = pool(1, "kvpool-store")
        if blocker := interface_problem() or _blocker(config):
            _log.error("kvpool: %s: the engine runs without the pool", blocker)
            report_without_pool(blocker, "lmcache")
            return
        try:
            self._client = self._connect(config, metadata, settings)
        except Exception:
            _log.exception("kvpool: the setup failed; this engine runs without the pool")
            report_without_pool("the setup failed; see the engine's log", "lmcache")

    # -- LMCache's interface ------------------------------------------------------------------------------------------

    async def exists(self, key: Any) -> bool:
        """Return whether the pool has this chunk, within a lookup's deadline."""
        return await self._in(self._lookups, lambda: self._leading_hits([key], counted=False) == 1, closed=False)

    def exists_sync(self, key: Any) -> bool:
        """Return whether the pool has this chunk; blocks the calling thread."""
        return self._leading_hits([key], counted=False) == 1

    def support_batched_contains(self) -> bool:
        """Return True: one message for all keys."""
        return True

    def batched_contains(self, keys: list[Any]) -> int:
        """Return the number of leading chunks that the pool has."""
        return self._leading_hits(keys)

    async def batched_async_contains(self, lookup_id: str, keys: list[Any], pin: bool = False) -> int:
        """Return the number of leading chunks that the pool has; `pin` is ignored."""
        return await self._in(self._lookups, lambda: self._leading_hits(keys), closed=0)

    async def get(self, key: Any) -> Any:
        """Load the chunk into memory of LMCache; None on a miss."""
        return (await self.batched_get([key]))[0]

    def support_batched_get(self) -> bool:
        """Return True: one message for all keys."""
        return True

    async def batched_get(self, keys: list[Any]) -> list[Any]:
        """Load chunks into memory of LMCache, each None on a miss. If the caller is cancelled it is released."""
        submitted = time.monotonic()
        return await self._in(self._loads, lambda: self._load(keys, submitted), [None] * len(keys), _release)

    async def batched_get_non_blocking(self, lookup_id: str, keys: list[Any]) -> list[Any]:
        """Load the chunks up to the first miss."""
        loaded = await self.batched_get(keys)
        end = next((i for i, memory in enumerate(loaded) if memory is None), len(loaded))
        _release(loaded[end:])
        return loaded[:end]

    async def put(self, key: Any, memory_obj: Any) -> None:
        """Store a chunk. LMCache releases it when this returns; a reference is held until the write has ended."""
        await self.batched_put([key], [memory_obj])

    def support_batched_put(self) -> bool:
        """Return True: one message for all keys."""
        return True

    async def batched_put(self, keys: list[Any], memory_objs: list[Any]) -> None:
        """Store chunks; dropped, and counted, while too many bytes wait."""
        size = sum(len(memoryview(o.byte_array).cast("B")) for o in memory_objs)
        with self._lock:
            room = self._queued_bytes < self._queue_bytes
            self._queued_bytes += size if room else 0
            self.dropped += 0 if room else len(keys)
        if not room:
            self._unstored.add(Reason.BUSY, len(keys))
            return
        for held in memory_objs:
            held.ref_count_up()

        def done(_: object) -> None:
            _release(memory_objs)
            with self._lock:
                self._queued_bytes -= size

        await self._in(self._stores, lambda: self._store(keys, memory_objs), None, always=done)

    def remove_sync(self, key: Any) -> bool:
        """Make the chunk a miss in this process until it is stored again. The pool evicts the bytes on its own."""
        if self._client is not None:
            self._deleted.delete([self._block_id(self._client, key)])
        return True

    async def close(self) -> None:
        """Cancel queued work and release everything."""
        self._closing = True
        if self._client is not None:
            self._client.close()
        for executor in (self._lookups, self._loads, self._stores):
            executor.shutdown(wait=False, cancel_futures=True)

    # -- internals ----------------------------------------------------------------------------------------------

    def stats(self) -> dict[str, Any]:
        """Return the client's counters, its connection state and the fingerprint, for display."""
        if (client := self._client) is None:
            return {"connected": False}
        counts = {**client.stats(), "not_stored": self._unstored.snapshot()}
        return {"connected": client.connected, "fingerprint": client.fingerprint.hex(), **counts}

    def _connect(self, config: Any, metadata: Any, settings: dict[str, Any]) -> Client:
        version = str(lmcache.__version__)
        space = FingerprintNamespace(str(metadata.model_name), int(metadata.world_size), 0, self._layout)
        inputs = fingerprint_inputs(
            space,
            version,
            revision=str(settings.get("revision", "")),
            tag=str(settings.get("tag", "")),
            mode="in-process",
            memory_format=str(self.meta_fmt),
            chunk_size=int(metadata.chunk_size),
            kv_dtype=str(metadata.kv_dtype),
            hash_algorithm=str(config.pre_caching_hash_algorithm),
            hash_seed=os.environ.get("PYTHONHASHSEED", ""),
        )
        digest = fingerprint(inputs)
        model = os.path.basename(space.model.rstrip("/"))
        _log.info("kvpool: model %s, fingerprint %s, socket %s", model, digest.hex()[:16], self._config.socket)
        tested, tokens = is_tested("lmcache", version), int(metadata.chunk_size)
        labels = {"engine": f"lmcache {version}", "model": model, "tested": tested}
        return Client(
            self._config, fingerprint=digest, labels=labels, fingerprint_inputs=inputs, tokens_per_block=tokens,
        )  # fmt: skip

    def _block_id(self, client: Client, key: Any) -> bytes:
        return block_id(client.fingerprint, *key_name(key, str(key.dtype)))

    def _leading_hits(self, keys: Sequence[Any], *, counted: bool = True) -> int:
        client = self._client
        if client is None or not keys:
            return 0
        try:
            if not is_trusted(self._self_test, client, "lmcache", str(lmcache.__version__)):
                return 0
            block_ids = [self._block_id(client, key) for key in keys]
            tiers, reason = client.find(self._deleted.leading_kept(block_ids))
            hits = next((i for i, tier in enumerate(tiers) if tier == Tier.MISS), len(tiers))
            if counted:
                self._rechecks.count(client, block_ids, hits, reason)
        except Exception:
            _log.exception("kvpool: lookup failed")
            return 0
        return hits

    def _load(self, keys: Sequence[Any], submitted: float) -> list[Any]:
        client = self._client
        loaded: list[Any] = [None] * len(keys)
        if client is None:
            return loaded
        held: list[Any] = []
        try:
            for _ in keys:
                # without busy_loop=False LMCache would wait indefinitely for memory
                memory = self._memory.allocate(self.meta_shapes, self.meta_dtypes, self.meta_fmt, busy_loop=False)
                if memory is None:
                    break
                held.append(memory)
            views = [memoryview(memory.byte_array).cast("B") for memory in held]
            block_ids = [self._block_id(client, key) for key in keys[: len(held)]]
            results = client.get_into(block_ids, views, submitted + client.load_seconds(sum(map(len, views))))
            for i, result in enumerate(results):
                if result.ok:
                    loaded[i], held[i] = held[i], None
        except Exception:
            _log.exception("kvpool: a load failed")
            _release(loaded)
            loaded = [None] * len(keys)
        _release(held)
        return loaded

    def _store(self, keys: Sequence[Any], objects: Sequence[Any]) -> None:
        client = self._client
        if client is None:
            return
        try:
            pairs = list(zip(keys, objects, strict=True))
            whole = [(key, o) for key, o in pairs if layout_of_object(o) == self._layout]
            if len(whole) < len(pairs):
                self._warn_once("part", "only full chunks are stored: remove save_unfull_chunk")
            block_ids = [self._block_id(client, key) for key, _ in whole]
            views = [memoryview(o.byte_array).cast("B") for _, o in whole]
            self._unstored.add(Reason.REFUSED, len(pairs) - len(whole))
            self._unstored.add_results(put_in_batches(client, block_ids, views, is_closed=lambda: self._closing))
            self._deleted.store((block_id, 0) for block_id in block_ids if self._deleted.is_deleted(block_id))
        except Exception:
            _log.exception("kvpool: a store failed")

    async def _in(
        self,
        executor: concurrent.futures.Executor,
        work: Callable[[], T],
        closed: T,
        unwanted: Callable[[T], None] | None = None,
        always: Callable[[object], None] | None = None,
    ) -> T:
        """Run `work` in a thread. Return `closed` if the connector is closed first.

        If the caller is cancelled, `unwanted` receives the outcome later; `always` is called in any case.
        """
        try:
            future = executor.submit(work)
        except RuntimeError:  # closed
            future = concurrent.futures.Future()
            future.set_result(closed)
        if always is not None:
            future.add_done_callback(always)
        try:
            return await asyncio.shield(asyncio.wrap_future(future))
        except asyncio.CancelledError:
            if future.cancelled():
                return closed
            if unwanted is not None and not future.cancel():
                future.add_done_callback(lambda f: unwanted(f.result()))
            raise

    def _warn_once(self, what: str, why: str) -> None:
        if what not in self._warned:
            self._warned.add(what)
            _log.warning("kvpool: %s", why)

    async def list(self) -> list[str]:
        """Return an empty list: the pool cannot list its blocks."""
        return []


def _release(held: Sequence[Any]) -> None:
    for memory in held:
        if memory is not None:
            with contextlib.suppress(Exception):
                memory.ref_count_down()


def _memory_bytes(config: Any) -> float:
    memory_gib = getattr(config, "max_local_cpu_size", 0)
    return memory_gib * 2**30 if isinstance(memory_gib, int | float) else 0


def _blocker(config: Any) -> str:
    if config.pre_caching_hash_algorithm == "builtin":
        return "LMCache hashes prompts with Python's built-in hash: set pre_caching_hash_algorithm to sha256_cbor"
    if config.use_layerwise:
        return "layerwise chunks of LMCache are not stored: remove use_layerwise"
    if config.remote_serde not in (None, "naive"):
        return "the output of an LMCache serde is not stored: remove remote_serde"
    return ""


def interface_problem() -> str:
    """Return why the LMCache that is installed cannot use this connector; empty if it can."""
    return connector_problem(RemoteConnector, PoolConnector, CacheEngineKey, str(lmcache.__version__))
