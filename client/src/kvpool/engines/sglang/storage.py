"""The pool as the storage of SGLang's hierarchical cache (HiCache).

SGLang copies pages between its device and host memory; `PoolHiCache` moves them between host memory and the pool.
Configuration of the engine:

    python -m sglang.launch_server ... --page-size 64 --enable-hierarchical-cache --hicache-mem-layout page_first \
      --hicache-storage-backend dynamic --hicache-storage-backend-extra-config '{"backend_name": "kvpool",
      "module_path": "kvpool.engines.sglang", "class_name": "PoolHiCache", "interface_v1": 1}'

Further keys of the extra configuration are fields of kvpool.config.ClientConfig (`socket`, `deadlines` ...) and win
over the environment; `keep_after_flush`: see `PoolHiCache`. Without a sidecar, or after any error, SGLang computes
as if there were no storage.

A page's key is SGLang's chain of SHA-256 over its tokens, begun with a digest of the request's `extra_key` and
`cache_salt` (mem_cache/utils.py): requests with another salt have other keys throughout.

An injected container is configured by KVPOOL_SGLANG_HICACHE instead (kvpool.engines.sglang.guard).

The interface is SGLang's `HiCacheStorage` (sglang/srt/mem_cache/hicache_storage.py), as kvpool.engines.sglang.interface
probes it. The code that needs no SGLang is in the other modules of this package and in kvpool.engines.common.
"""

from __future__ import annotations

import functools
import itertools
import logging
import weakref
from collections.abc import Sized
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Concatenate, ParamSpec, TypeVar

from kvpool.engines.common.host_memory import tensor_bytes
from kvpool.engines.common.settings import client_config
from kvpool.engines.common.without_pool import report_without_pool
from kvpool.engines.sglang import interface, server, weight_changes
from kvpool.engines.sglang.connection import PoolConnection
from kvpool.engines.sglang.fingerprint import fingerprint_inputs
from kvpool.engines.sglang.page_transfer import PageTransfer
from kvpool.engines.sglang.pages import PageRequest, Pages
from kvpool.engines.tested_versions import is_tested

try:
    import sglang
    from sglang.srt.mem_cache import hicache_storage
    from sglang.srt.mem_cache.hicache_storage import HiCacheStorage, PoolTransferResult
except ImportError as e:
    raise ImportError(
        f"kvpool.engines.sglang needs the HiCache storage of SGLang, which cannot be imported here ({e}); run "
        "the engine without --hicache-storage-backend dynamic"
    ) from e

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from kvpool.client import Client

__all__ = ["PoolHiCache", "interface_problem", "last_stats"]

_log = logging.getLogger("sglang.kvpool")  # under SGLang's own logger, so that the engine's log shows it

_SGLANGS_KEYS = frozenset({"backend_name", "module_path", "class_name", "interface_v1", "allocator"})
_RANKS = ("tp_rank", "pp_rank", "attn_cp_rank")  # all ranks of an engine ask for the same pages: the first counts
_ALL, _TRAILING = "all_pages", "trailing_pages"  # pages of a side pool that a prefix requires (PoolHitPolicy)
_POLICIES = {_ALL, _TRAILING, "block_groups"}  # the third never cuts a prefix; a fourth might
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


class PoolHiCache(HiCacheStorage):  # type: ignore[misc]
    """HiCache storage backend, created by SGLang once per rank. Thread-safe; no method raises into the engine.

    After a change of weights the same tokens give other bytes, so from then on this engine shares no pages with others
    until it restarts. Where calls that change weights cannot be watched, a flush of the cache has that effect too,
    unless `keep_after_flush` is true in the extra configuration (for deployments that flush for other reasons only).
    """

    def __init__(self, storage_config: Any, kwargs: Any = None) -> None:
        self._config = storage_config
        self._flat_only = False
        self._transfer = PageTransfer()
        self._connection: PoolConnection | None = None
        try:
            if not (reason := interface_problem()):
                self._configure()
        except Exception as e:  # SGLang's scheduler would end
            _log.exception("kvpool: the storage could not be created")
            reason = f"the storage could not be created: {type(e).__name__}"
        if reason:
            self._stand_aside(reason)
        _backends.add(self)

    def _configure(self) -> None:
        extra = dict(getattr(self._config, "extra_config", None) or {})
        self._resets = server.ResetDetector(
            ignore_flushes=bool(extra.pop("keep_after_flush", False)), sees_weights=weight_changes.is_watching
        )
        if blind := weight_changes.watch(self._resets, server.server_argument):
            _log.info("kvpool: flushes of the cache count as changes of the weights (%s)", blind)
        self._flat_only = not extra.get("interface_v1")
        settings = client_config({k: v for k, v in extra.items() if k not in _SGLANGS_KEYS})
        connections = server.connections_per_rank(settings.connections, self._config)
        settings = replace(settings, connections=connections)
        version = str(sglang.__version__)
        self._connection = PoolConnection(settings, self._resets, version, lambda: self._transfer.pages["kv"].sample())

    def _stand_aside(self, reason: str) -> None:
        self._connection = None
        _log.error("kvpool: %s: the engine runs without the pool", reason)
        report_without_pool(reason, "sglang")

    # -- set-up -----------------------------------------------------------------------------------------------------

    def register_mem_pool_host(self, mem_pool_host: Any) -> None:
        """Register the host pool of the KV itself and connect."""
        super().register_mem_pool_host(mem_pool_host)
        if self._connection is None:
            return
        try:
            inputs = fingerprint_inputs(self._config, mem_pool_host, sglang.__version__, server.server_argument)
            self._resets.rearm()
            self._register("kv", mem_pool_host)
            if not is_tested("sglang", str(sglang.__version__)) and (reason := self._resets.blind()):
                self._stand_aside(reason)
                return
            model = str(server.server_argument("model_path") or self._config.model_name or "")
            self._connection.connect(inputs, model, self._transfer.pages["kv"].page_size, server.prompt_inputs())
        except Exception:
            _log.exception("kvpool: the setup failed")
            self._stand_aside("the setup failed; see the engine's log")

    @_never_raises(lambda *_: None)
    def register_mem_host_pool_v2(self, host_pool: Any, host_pool_name: Any) -> None:
        """Register another host pool of a hybrid model."""
        super().register_mem_host_pool_v2(host_pool, host_pool_name)
        name = str(host_pool_name)
        if self._connection is not None and not (name == "kv" and "kv" in self._transfer.pages):
            self._register(name, host_pool)

    # -- whole pages, without a copy --------------------------------------------------------------------------------

    @_never_raises(lambda *_, **__: 0)
    def batch_exists(self, keys: list[str], extra_info: Any = None) -> int:
        """Return the number of leading pages that the pool has; 0 if it does not answer in time."""
        client = self._verified()
        is_first_rank = not any(getattr(self._config, name, 0) for name in _RANKS)
        return self._transfer.leading_pages(client, keys, counted=is_first_rank) if client is not None and keys else 0

    @_never_raises(lambda *_, **__: False)
    def exists(self, key: str) -> bool:
        """Return whether the pool has this page."""
        return self.batch_exists([key]) == 1

    @_never_raises(_none_of)
    def batch_get_v1(self, keys: list[str], host_indices: Any, extra_info: Any = None) -> list[bool]:
        """Load pages into the host pool; a page that is False holds garbage."""
        client = self._current()
        if client is None:
            return [False] * len(keys)
        return self._move_kv(client, keys, host_indices, is_load=True)

    @_never_raises(_none_of)
    def batch_set_v1(self, keys: list[str], host_indices: Any, extra_info: Any = None) -> list[bool]:
        """Store pages of the host pool. If ranks hold replicas of the same KV, one of them writes."""
        if not getattr(self._config, "is_storage_writer", True):
            return [True] * len(keys)
        client = self._current()
        if client is None:
            return [False] * len(keys)
        return self._move_kv(client, keys, host_indices, is_load=False)

    # -- hybrid models ----------------------------------------------------------------------------------------------

    @_never_raises(lambda *_, **__: PoolTransferResult(0, {}, []))
    def batch_exists_v2(self, keys: list[str], pool_transfers: Any = None, extra_info: Any = None) -> Any:
        """Return the longest prefix that can be restored from KV and side pools, and all restorable lengths.

        A side pool that requires all pages cuts the prefix at its first gap; one that requires the last pages only (a
        sliding window, a recurrent state) allows each length that ends in that many of its pages.
        """
        client = self._verified()
        kv = self._transfer.pages.get("kv")
        policies = {_policy(t) for t in pool_transfers or ()}
        required = [t for t in pool_transfers or () if _policy(t) in (_ALL, _TRAILING)]
        if client is None or kv is None or policies - _POLICIES or (kv.logical and not required):
            return PoolTransferResult(0, {}, [])
        count = len(keys) if kv.logical else self.batch_exists(keys, extra_info)
        if not count:
            return PoolTransferResult(0, {}, [])
        hits: dict[Any, int] = {"kv": count}
        allowed = set(range(1, count + 1))
        present = self._transfer.present(client, [str(t.name) for t in required], keys[:count])
        for transfer, found in zip(required, present, strict=True):
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
        """Load pages into several host pools; one list per pool, as long as its keys."""
        return self._transfer.transfer(self._current(), transfers, is_load=True)

    @_never_raises(_none_of_each)
    def batch_set_v2(self, transfers: Any, extra_info: Any = None) -> dict[Any, list[bool]]:
        """Store pages of several host pools. SGLang calls only ranks whose share of a pool is to be written."""
        return self._transfer.transfer(self._current(), transfers, is_load=False)

    # -- pages as flat tensors, which SGLang copies -----------------------------------------------------------------

    @_never_raises(lambda *_, **__: None)
    def get(self, key: str, target_location: Any = None, target_sizes: Any = None) -> Any:
        """Load one page as a flat tensor, into `target_location` if given; None if the pool does not have it."""
        return self.batch_get([key], [target_location])[0]

    @_never_raises(_nothing_of)
    def batch_get(self, keys: list[str], target_locations: Any = None, target_sizes: Any = None) -> list[Any]:
        """Load pages as flat tensors, each None if the pool does not have it."""
        client = self._current()
        if client is None:
            return [None] * len(keys)
        pages = self._transfer.pages["kv"]
        targets = list(target_locations) if target_locations is not None else [None] * len(keys)
        targets = [pages.empty_page() if target is None else target for target in targets]
        if len(targets) != len(keys):
            return [None] * len(keys)
        done = self._transfer.blocks(
            client, pages.flat_block_ids(client, keys), [tensor_bytes(target) for target in targets], is_load=True
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
        tensors = [value.contiguous() for value in values]
        block_ids = self._transfer.pages["kv"].flat_block_ids(client, keys)
        return all(self._transfer.blocks(client, block_ids, [tensor_bytes(value) for value in tensors], is_load=False))

    # -- remaining interface of SGLang -----------------------------------------------------------------------------

    @_never_raises(lambda *_: None)
    def clear(self) -> None:
        """Stop using the stored pages: from now on this engine has a namespace of its own.

        Pages are shared with other engines, so none are deleted; unused ones are evicted.
        """
        if self._connection is not None:
            self._connection.renew("the engine's storage was cleared")

    @_never_raises(lambda *_: None)
    def get_stats(self) -> Any:
        """Return blocks and GB/s of each batch since the last call, for SGLang's metrics."""
        return server.storage_metrics(*self._transfer.take_bandwidths())

    @_never_raises(lambda *_: None)
    def close(self) -> None:
        """Disconnect; later calls miss. Safe to call twice."""
        if self._connection is not None:
            self._connection.close()

    # -- internals ----------------------------------------------------------------------------------------------

    def stats(self) -> dict[str, Any]:
        """Return the fingerprint and its inputs, and the client's counters, for display."""
        client = self._client
        return {
            "connected": client is not None and client.connected,
            "fingerprint": client.fingerprint.hex() if client is not None else "",
            "fingerprint_inputs": self._connection.inputs if self._connection is not None else {},
            "zero_copy": {name: pages.zero_copy for name, pages in self._transfer.pages.items()},
            "client": client.stats() if client is not None else {},
        }

    def _move_kv(self, client: Client, keys: list[str], host_indices: Any, *, is_load: bool) -> list[bool]:
        request = PageRequest(self._transfer.pages["kv"], keys, host_indices)
        return self._transfer.move(client, [request], is_load=is_load)[0]

    def _register(self, name: str, pool: Any) -> None:
        flat_only = self._flat_only and name == "kv"
        self._transfer.register(name, Pages(name, pool, self._config, flat_only=flat_only))
        self._resets.watch(name, pool)

    @property
    def _client(self) -> Client | None:
        return self._connection.client if self._connection is not None else None

    def _current(self) -> Client | None:
        return self._connection.current() if self._connection is not None else None

    def _verified(self) -> Client | None:
        return self._connection.verified() if self._connection is not None else None


def _leading(found: Iterable[bool]) -> int:
    """Count the leading true values."""
    return sum(1 for _ in itertools.takewhile(bool, found))


def _policy(transfer: Any) -> str:
    return str(getattr(transfer.hit_policy, "value", transfer.hit_policy))


def interface_problem() -> str:
    """Return why the SGLang that is installed cannot use this storage; empty if it can."""
    return interface.problem(hicache_storage, PoolHiCache, str(getattr(sglang, "__version__", "")))


_backends: weakref.WeakSet[PoolHiCache] = weakref.WeakSet()


def last_stats() -> list[dict[str, Any]]:
    """Return `PoolHiCache.stats()` of every backend in this process."""
    return [backend.stats() for backend in _backends]
