"""The pool as the storage of SGLang's hierarchical cache (HiCache).

SGLang copies pages between its device and host memory; `PoolHiCache` moves them between host memory and the pool.
Configuration of the engine:

    python -m sglang.launch_server ... --page-size 64 --enable-hierarchical-cache --hicache-mem-layout page_first \
      --hicache-storage-backend dynamic --hicache-storage-backend-extra-config '{"backend_name": "kvpool",
      "module_path": "kvpool.engines.sglang", "class_name": "PoolHiCache", "interface_v1": 1}'

Further keys of the extra configuration are fields of kvpool.config.ClientConfig (`socket`, `deadlines` ...) and win
over the environment; `keep_after_flush` is ours, see `PoolHiCache`. No sidecar, or anything going wrong: SGLang
computes, as if there were no storage.

A page's key is SGLang's chain of SHA-256 over its tokens, begun with a digest of the request's `extra_key` and
`cache_salt` (mem_cache/utils.py): requests with another salt have other keys throughout.

The interface is SGLang's `HiCacheStorage` (sglang/srt/mem_cache/hicache_storage.py), see KNOWN_VERSIONS. What needs no
SGLang is in kvpool.engines.sglang.pages, sglang_facts and host_memory.
"""

from __future__ import annotations

import functools
import itertools
import logging
import os
import threading
import time
import weakref
from collections.abc import Sized
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Concatenate, NamedTuple, ParamSpec, TypeVar

from kvpool.client import Client
from kvpool.engines.common.host_memory import tensor_bytes
from kvpool.engines.common.settings import client_config
from kvpool.engines.sglang.fingerprint import fingerprint_inputs
from kvpool.engines.sglang.pages import PageRequest, Pages
from kvpool.protocol import keys as protocol_keys
from kvpool.protocol.wire import Tier

KNOWN_VERSIONS = ((0, 5, 23),)

try:
    import sglang
    from sglang.srt.mem_cache.hicache_storage import HiCacheStorage, PoolTransferResult
except ImportError as e:
    raise ImportError(
        f"kvpool.engines.sglang needs the HiCache storage of SGLang 0.5.23, which cannot be imported here ({e}); run "
        "the engine without --hicache-storage-backend dynamic"
    ) from e

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

__all__ = ["KNOWN_VERSIONS", "PoolHiCache", "last_stats"]

_log = logging.getLogger("sglang.kvpool")  # under SGLang's own logger, so that the engine's log shows it

_SGLANGS_KEYS = frozenset({"backend_name", "module_path", "class_name", "interface_v1", "allocator"})
_MARKS = ("_slots", "mem_state")  # what a host pool makes anew when it is cleared
_ALL, _TRAILING = "all_pages", "trailing_pages"  # what of a side pool a prefix needs (PoolHitPolicy)
_MAX_SPEEDS = 1024
_PODS_CONNECTIONS = 32  # what a sidecar lets a pod have (kvpool_sidecar.serving.pod)
P = ParamSpec("P")
T = TypeVar("T")


def _never_raises(
    miss: Callable[..., T],
) -> Callable[[Callable[Concatenate[Any, P], T]], Callable[Concatenate[Any, P], T]]:
    """Whatever happens, nothing is raised: `miss(*arguments)` instead."""

    def decorate(method: Callable[Concatenate[Any, P], T]) -> Callable[Concatenate[Any, P], T]:
        @functools.wraps(method)
        def call(self: Any, /, *args: P.args, **kwargs: P.kwargs) -> T:
            try:
                return method(self, *args, **kwargs)
            except Exception:
                _log.exception("kvpool: %s failed; it counts as a miss", method.__name__)
                return miss(*args, **kwargs)

        return call

    return decorate


def _none_of(keys: Any = (), *_: Any, **__: Any) -> list[bool]:
    return [False] * (len(keys) if isinstance(keys, Sized) else 0)


def _nothing_of(keys: Any = (), *_: Any, **__: Any) -> list[Any]:
    return [None] * (len(keys) if isinstance(keys, Sized) else 0)


def _none_of_each(transfers: Any = (), *_: Any, **__: Any) -> dict[Any, list[bool]]:
    known = transfers if isinstance(transfers, (list, tuple)) else ()
    return {t.name: _none_of(t.keys or ()) for t in known if hasattr(t, "name") and hasattr(t, "keys")}


class _Speed(NamedTuple):
    blocks: int
    gb_per_s: float


class PoolHiCache(HiCacheStorage):  # type: ignore[misc]
    """Made by SGLang, one per rank. Methods may be called from several threads; none raises into the engine.

    When SGLang flushes its cache we are not told why; after new weights the same tokens give other bytes. So from then
    on this engine shares no pages with others until it is started anew, unless `keep_after_flush` is true in the extra
    configuration, for those who flush for other reasons only. Another `weight_version` always has that effect.
    """

    def __init__(self, storage_config: Any, kwargs: Any = None) -> None:
        self._config = storage_config
        extra = dict(getattr(storage_config, "extra_config", None) or {})
        self._keep_after_flush = bool(extra.pop("keep_after_flush", False))
        self._flat_only = not extra.get("interface_v1")
        settings = client_config({k: v for k, v in extra.items() if k not in _SGLANGS_KEYS})
        self._settings = replace(settings, connections=_connections(settings.connections, storage_config))
        self._lock = threading.Lock()
        self._client: Client | None = None
        self._inputs: dict[str, Any] = {}
        self._pages: dict[str, Pages] = {}
        self._marks: dict[str, Any] = {}
        self._weights: Any = None  # their version, if somebody gave them one
        self._loads: list[_Speed] = []
        self._stores: list[_Speed] = []
        self._closed = False
        self._supported = _supported()
        _backends.add(self)

    # -- set-up -----------------------------------------------------------------------------------------------------

    def register_mem_pool_host(self, mem_pool_host: Any) -> None:
        """The host pool of the KV itself. From here on the pool is used."""
        super().register_mem_pool_host(mem_pool_host)
        if not self._supported:
            return
        try:
            self._inputs = fingerprint_inputs(self._config, mem_pool_host, sglang.__version__, _argument)
            self._weights = _argument("weight_version")
            self._register("kv", mem_pool_host)
            self._connect()
        except Exception:
            _log.exception("kvpool: the pool is off for this engine")

    @_never_raises(lambda *_: None)
    def register_mem_host_pool_v2(self, host_pool: Any, host_pool_name: Any) -> None:
        """One more host pool of a hybrid model."""
        super().register_mem_host_pool_v2(host_pool, host_pool_name)
        name = str(host_pool_name)
        if self._supported and not (name == "kv" and "kv" in self._pages):
            self._register(name, host_pool)

    # -- whole pages, without a copy --------------------------------------------------------------------------------

    @_never_raises(lambda *_, **__: 0)
    def batch_exists(self, keys: list[str], extra_info: Any = None) -> int:
        """How many pages from the first on the pool has; 0 if it does not say so in time."""
        client = self._current()
        pages = self._pages.get("kv")
        if client is None or pages is None or pages.logical or not keys:
            return 0
        tiers = client.lookup(pages.block_ids(client, keys))
        return _leading(tier != Tier.MISS for tier in tiers) // pages.blocks_per_page

    @_never_raises(lambda *_, **__: False)
    def exists(self, key: str) -> bool:
        """Is this page there?"""
        return self.batch_exists([key]) == 1

    @_never_raises(_none_of)
    def batch_get_v1(self, keys: list[str], host_indices: Any, extra_info: Any = None) -> list[bool]:
        """Fill pages of the host pool; a page that is False holds garbage."""
        client = self._current()
        if client is None:
            return [False] * len(keys)
        return self._load(client, [PageRequest(self._pages["kv"], keys, host_indices)])[0]

    @_never_raises(_none_of)
    def batch_set_v1(self, keys: list[str], host_indices: Any, extra_info: Any = None) -> list[bool]:
        """Store pages of the host pool. Where ranks hold copies of the same KV, one of them writes."""
        if not getattr(self._config, "is_storage_writer", True):
            return [True] * len(keys)
        client = self._current()
        if client is None:
            return [False] * len(keys)
        return self._store(client, [PageRequest(self._pages["kv"], keys, host_indices)])[0]

    # -- hybrid models ----------------------------------------------------------------------------------------------

    @_never_raises(lambda *_, **__: PoolTransferResult(0, {}, []))
    def batch_exists_v2(self, keys: list[str], pool_transfers: Any = None, extra_info: Any = None) -> Any:
        """How long a prefix can be restored, KV and side pools together, and which lengths can.

        A pool that needs all pages cuts the prefix at its first gap; one that needs the last pages only (a sliding
        window, a recurrent state) allows each length that ends in so many pages of it.
        """
        client = self._current()
        kv = self._pages.get("kv")
        asked = [t for t in pool_transfers or () if _policy(t) in (_ALL, _TRAILING)]  # others never cut a prefix
        if client is None or kv is None or (kv.logical and not asked):
            return PoolTransferResult(0, {}, [])
        count = len(keys) if kv.logical else self.batch_exists(keys, extra_info)
        if not count:
            return PoolTransferResult(0, {}, [])
        hits: dict[Any, int] = {"kv": count}
        allowed = set(range(1, count + 1))
        there = self._present(client, [str(t.name) for t in asked], keys[:count])
        for transfer, found in zip(asked, there, strict=True):
            if _policy(transfer) == _ALL:
                fits = set(range(1, _leading(found) + 1))
            else:
                window = max(1, len(transfer.keys or ()))
                fits = {n for n in range(1, count + 1) if all(found[max(0, n - window) : n])}
            if fits:
                hits[transfer.name] = max(fits)
            allowed &= fits
        restorable = sorted(allowed)
        return PoolTransferResult(restorable[-1] if restorable else 0, hits, restorable)

    @_never_raises(_none_of_each)
    def batch_get_v2(self, transfers: Any, extra_info: Any = None) -> dict[Any, list[bool]]:
        """Fill pages of several host pools; one list per pool, as long as its keys."""
        return self._transfer(transfers, self._load)

    @_never_raises(_none_of_each)
    def batch_set_v2(self, transfers: Any, extra_info: Any = None) -> dict[Any, list[bool]]:
        """Store pages of several host pools. SGLang asks only ranks whose share of a pool is to be written."""
        return self._transfer(transfers, self._store)

    # -- pages as flat tensors, which SGLang copies -----------------------------------------------------------------

    @_never_raises(lambda *_, **__: None)
    def get(self, key: str, target_location: Any = None, target_sizes: Any = None) -> Any:
        """One page as a flat tensor, `target_location` if that is one; None if the pool does not have it."""
        return self.batch_get([key], [target_location])[0]

    @_never_raises(_nothing_of)
    def batch_get(self, keys: list[str], target_locations: Any = None, target_sizes: Any = None) -> list[Any]:
        """Pages as flat tensors, each None if the pool does not have it."""
        client = self._current()
        if client is None:
            return [None] * len(keys)
        pages = self._pages["kv"]
        targets = list(target_locations) if target_locations is not None else [None] * len(keys)
        targets = [pages.empty_page() if target is None else target for target in targets]
        if len(targets) != len(keys):
            return [None] * len(keys)
        done = self._blocks(
            client, pages.flat_idents(client, keys), [tensor_bytes(target) for target in targets], is_load=True
        )
        return [target if ok else None for target, ok in zip(targets, done, strict=True)]

    @_never_raises(lambda *_, **__: False)
    def set(self, key: str, value: Any = None, target_location: Any = None, target_sizes: Any = None) -> bool:
        """Store one page from a flat tensor; True if the pool has it now."""
        return self.batch_set([key], [value])

    @_never_raises(lambda *_, **__: False)
    def batch_set(
        self, keys: list[str], values: Any = None, target_locations: Any = None, target_sizes: Any = None
    ) -> bool:
        """Store pages from flat tensors; True if the pool has all of them now."""
        if not getattr(self._config, "is_storage_writer", True):
            return True
        client = self._current()
        if client is None or values is None or len(values) != len(keys):
            return False
        held = [value.contiguous() for value in values]
        block_ids = self._pages["kv"].flat_idents(client, keys)
        return all(self._blocks(client, block_ids, [tensor_bytes(value) for value in held], is_load=False))

    # -- the rest of SGLang's interface -----------------------------------------------------------------------------

    @_never_raises(lambda *_: None)
    def clear(self) -> None:
        """SGLang's user wants nothing of what is stored: from here on this engine has pages of its own.

        Other engines' pages are not this engine's to delete; what is not used any more is evicted.
        """
        with self._lock:
            self._renew("the engine's storage was cleared")

    @_never_raises(lambda *_: None)
    def get_stats(self) -> Any:
        """Blocks and GB/s of each batch since the last call, for SGLang's metrics."""
        from sglang.srt.observability.metrics_collector import StorageMetrics

        with self._lock:
            loads, self._loads = self._loads, []
            stores, self._stores = self._stores, []
        return StorageMetrics(
            prefetch_pgs=[speed.blocks for speed in loads],
            prefetch_bandwidth=[speed.gb_per_s for speed in loads],
            backup_pgs=[speed.blocks for speed in stores],
            backup_bandwidth=[speed.gb_per_s for speed in stores],
        )

    @_never_raises(lambda *_: None)
    def close(self) -> None:
        """Let go of the sidecar; what is asked afterwards misses. Safe to call twice."""
        with self._lock:
            self._closed = True
            client, self._client = self._client, None
        if client is not None:
            client.close()

    # -- our own ----------------------------------------------------------------------------------------------------

    def stats(self) -> dict[str, Any]:
        """For people: the fingerprint and the facts behind it, and the client's counters."""
        client = self._client
        return {
            "connected": client is not None and client.connected,
            "fingerprint": client.fingerprint.hex() if client is not None else "",
            "fingerprint_inputs": self._inputs,
            "zero_copy": {name: pages.zero_copy for name, pages in self._pages.items()},
            "client": client.stats() if client is not None else {},
        }

    def _register(self, name: str, pool: Any) -> None:
        self._pages = {**self._pages, name: Pages(name, pool, self._config, flat_only=self._flat_only and name == "kv")}
        self._marks = {**self._marks, name: _mark(pool)}

    def _connect(self) -> None:
        fingerprint = protocol_keys.fingerprint(self._inputs)
        model = os.path.basename(str(_argument("model_path") or self._config.model_name or "").rstrip("/"))
        _log.info("kvpool: model %s, fingerprint %s, socket %s", model, fingerprint.hex()[:16], self._settings.socket)
        _log.debug("kvpool: fingerprint inputs %s", self._inputs)
        old, self._client = self._client, None
        if old is not None:
            old.close()
        labels = {"engine": f"sglang {sglang.__version__}", "model": model}
        self._client = Client(self._settings, fingerprint=fingerprint, labels=labels, fingerprint_inputs=self._inputs)

    def _current(self) -> Client | None:
        """The client, after a look whether SGLang has flushed its cache or changed its weights since the last call."""
        if self._changed():
            with self._lock:
                if why := self._changed():
                    self._marks = {name: _mark(pages.pool) for name, pages in self._pages.items()}
                    self._weights = _argument("weight_version")
                    self._renew(why)
        return self._client

    def _changed(self) -> str:
        if _argument("weight_version") != self._weights:
            return "the engine's weights were changed"
        if self._keep_after_flush:
            return ""
        flushed = any(mark is not None and _mark(self._pages[n].pool) is not mark for n, mark in self._marks.items())
        return "the engine's cache was flushed" if flushed else ""

    def _renew(self, why: str) -> None:
        old, self._client = self._client, None
        if old is None or self._closed:
            return
        old.close()
        _log.warning("kvpool: %s; from now on it shares no pages with others", why)
        self._inputs = {**self._inputs, "reset": os.urandom(16).hex()}
        self._connect()

    def _present(self, client: Client, pools: Sequence[str], keys: Sequence[str]) -> list[list[bool]]:
        """Per pool and page: does the pool have all of its blocks? One question for all."""
        known = [self._pages.get(name) for name in pools]
        block_ids = [block_id for pages in known if pages is not None for block_id in pages.block_ids(client, keys)]
        tiers = iter(client.lookup(block_ids, exhaustive=True))
        out = []
        for pages in known:
            step = pages.blocks_per_page if pages is not None else 0
            each = [[next(tiers) != Tier.MISS for _ in range(step)] for _ in keys]
            out.append([bool(blocks) and all(blocks) for blocks in each])
        return out

    def _transfer(
        self, transfers: Any, move: Callable[[Client, list[PageRequest]], list[list[bool]]]
    ) -> dict[Any, list[bool]]:
        client = self._current()
        wanted = []
        results: dict[Any, list[bool]] = {}
        for transfer in transfers or ():
            keys = list(transfer.keys or ())
            results[transfer.name] = [False] * len(keys)
            pages = self._pages.get(str(transfer.name))
            if pages is not None and keys and transfer.host_indices is not None:
                wanted.append((transfer.name, PageRequest(pages, keys, transfer.host_indices)))
        if client is None or not wanted:
            return results
        moved = move(client, [w for _, w in wanted])
        results.update({name: done for (name, _), done in zip(wanted, moved, strict=True)})
        return results

    def _load(self, client: Client, wanted: list[PageRequest]) -> list[list[bool]]:
        return self._move(client, wanted, is_load=True)

    def _store(self, client: Client, wanted: list[PageRequest]) -> list[list[bool]]:
        return self._move(client, wanted, is_load=False)

    def _move(self, client: Client, wanted: list[PageRequest], *, is_load: bool) -> list[list[bool]]:
        """Pages of several host pools, those without a copy in one request. One list of outcomes per pool."""
        outcomes: list[list[bool]] = [[False] * len(w.keys) for w in wanted]
        block_ids: list[bytes] = []
        views: list[memoryview] = []
        direct: list[tuple[int, int]] = []  # which of `wanted`, and where its blocks begin
        for n, w in enumerate(wanted):
            if w.pages.logical:
                outcomes[n] = [True] * len(w.keys)
            elif w.pages.zero_copy:
                try:
                    pieces = w.pages.views(w.keys, w.indices)
                except Exception as e:  # of one pool: the others go on
                    _log.error("kvpool: pages are not moved: %s", e)
                    continue
                direct.append((n, len(block_ids)))
                block_ids += w.pages.block_ids(client, w.keys)
                views += pieces
            else:
                outcomes[n] = self._move_flat(client, w, is_load=is_load)
        if block_ids:
            done = self._blocks(client, block_ids, views, is_load=is_load)
            for n, start in direct:
                step = wanted[n].pages.blocks_per_page
                outcomes[n] = [all(done[start + i * step : start + (i + 1) * step]) for i in range(len(outcomes[n]))]
        return outcomes

    def _move_flat(self, client: Client, wanted: PageRequest, *, is_load: bool) -> list[bool]:
        pages, keys, indices = wanted
        deadline: list[float] = []  # one for all portions, from the first on

        def move(part: Sequence[str], buffers: list[memoryview]) -> list[bool]:
            if not deadline:
                size = len(keys) * len(buffers[0])
                seconds = client.load_seconds(size) if is_load else client.store_seconds
                deadline.append(time.monotonic() + seconds)
            return self._blocks(client, pages.flat_idents(client, part), buffers, deadline[0], is_load=is_load)

        return pages.load_flat(keys, indices, move) if is_load else pages.store_flat(keys, indices, move)

    def _blocks(
        self,
        client: Client,
        block_ids: list[bytes],
        views: list[memoryview],
        deadline: float | None = None,
        *,
        is_load: bool,
    ) -> list[bool]:
        started = time.monotonic()
        results: Sequence[Any] = (client.get_into if is_load else client.put_from)(block_ids, views, deadline)
        seconds = max(1e-9, time.monotonic() - started)
        moved = [result.bytes for result in results if result.bytes]
        with self._lock:
            speeds = self._loads if is_load else self._stores
            if moved and len(speeds) < _MAX_SPEEDS:
                speeds.append(_Speed(len(moved), sum(moved) / seconds / 1e9))
        return [result.ok for result in results]


def _leading(found: Iterable[bool]) -> int:
    """How many are true before the first that is not."""
    return sum(1 for _ in itertools.takewhile(bool, found))


def _policy(transfer: Any) -> str:
    return str(getattr(transfer.hit_policy, "value", transfer.hit_policy))


def _mark(pool: Any) -> Any:
    """An object that the host pool replaces whenever it is cleared, None if it has none."""
    for name in _MARKS:
        found = getattr(pool, name, None)
        if found is not None:
            return found
    return None


def _argument(name: str) -> Any:
    """One of the server's arguments as SGLang has resolved it, None if there is no server or no such argument."""
    try:
        from sglang.srt.runtime_context import get_context

        context = get_context()
    except Exception:
        return None
    for read in (context.config_leaf, lambda name: getattr(context.server_args, name)):
        try:
            value = read(name)
        except Exception as e:  # not published, or not under this name: SGLang raises several kinds
            _log.debug("kvpool: %s is not known: %s", name, e)
            continue
        if value is not None:
            return value
    return None


def _connections(wish: int, config: Any) -> int:
    """Of one rank, so that all ranks of a pod together keep to what a pod may have."""
    tensor = max(int(config.tp_size or 1), int(_argument("tp_size") or 1))
    replicas = 1 if _argument("enable_dp_attention") else int(_argument("dp_size") or 1)
    return max(1, min(wish, _PODS_CONNECTIONS // (tensor * int(config.pp_size or 1) * replicas)))


def _supported() -> bool:
    text = str(getattr(sglang, "__version__", ""))
    found = tuple(int(part) for part in text.split("+")[0].split(".")[:3] if part.isdigit())
    if found in KNOWN_VERSIONS:
        return True
    known = ", ".join(".".join(map(str, version)) for version in KNOWN_VERSIONS)
    _log.error(
        "kvpool: this client knows the storage interface of SGLang %s, not of %s: the engine runs without the pool. "
        "Use a KVPool that knows this SGLang.",
        known,
        text or "an unknown version",
    )
    return False


_backends: weakref.WeakSet[PoolHiCache] = weakref.WeakSet()


def last_stats() -> list[dict[str, Any]]:
    """`PoolHiCache.stats()` of every backend that lives in this process."""
    return [backend.stats() for backend in _backends]
