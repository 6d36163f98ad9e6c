"""As much of SGLang as its plug-in sees, for tests of the contract: base classes, a host pool, tensors.

The real ones are in client/tests_engine. What is here follows SGLang 0.5.23 (mem_cache/hicache_storage.py,
mem_cache/pool_host/mha.py and mamba.py).
"""

from __future__ import annotations

import abc
import ctypes
import enum
import importlib
import mmap
import sys
import types
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import pytest

PAGE, PIECE = 4, 512  # tokens per page, bytes per piece


class HiCacheStorage(abc.ABC):
    def register_mem_pool_host(self, mem_pool_host: Any) -> None:
        self.mem_pool_host = mem_pool_host

    def register_mem_host_pool_v2(self, host_pool: Any, host_pool_name: Any) -> None:
        self.__dict__.setdefault("registered_pools", {})[host_pool_name] = host_pool

    @abc.abstractmethod
    def get(self, key: Any, target_location: Any = None, target_sizes: Any = None) -> Any: ...

    @abc.abstractmethod
    def batch_get(self, keys: Any, target_locations: Any = None, target_sizes: Any = None) -> Any: ...

    @abc.abstractmethod
    def set(self, key: Any, value: Any = None, target_location: Any = None, target_sizes: Any = None) -> bool: ...

    @abc.abstractmethod
    def batch_set(
        self, keys: Any, values: Any = None, target_locations: Any = None, target_sizes: Any = None
    ) -> bool: ...

    @abc.abstractmethod
    def exists(self, key: Any) -> bool: ...

    def batch_exists(self, keys: Any, extra_info: Any = None) -> int:
        raise NotImplementedError

    def batch_get_v1(self, keys: Any, host_indices: Any, extra_info: Any = None) -> Any:
        raise NotImplementedError

    def batch_set_v1(self, keys: Any, host_indices: Any, extra_info: Any = None) -> Any:
        raise NotImplementedError

    def batch_exists_v2(self, keys: Any, pool_transfers: Any = None, extra_info: Any = None) -> Any:
        raise NotImplementedError

    def batch_get_v2(self, transfers: Any, extra_info: Any = None) -> Any:
        raise NotImplementedError

    def batch_set_v2(self, transfers: Any, extra_info: Any = None) -> Any:
        raise NotImplementedError

    def clear(self) -> None:
        raise NotImplementedError

    def get_stats(self) -> Any:
        raise NotImplementedError


class PoolHitPolicy(enum.Enum):
    ALL_PAGES = "all_pages"
    TRAILING_PAGES = "trailing_pages"


@dataclass
class PoolTransferResult:
    kv_hit_pages: int
    extra_pool_hit_pages: dict[str, int]
    restorable_prefix_pages: list[int] | None = None


@dataclass
class StorageMetrics:
    prefetch_pgs: list[int] = field(default_factory=list)
    backup_pgs: list[int] = field(default_factory=list)
    prefetch_bandwidth: list[float] = field(default_factory=list)
    backup_bandwidth: list[float] = field(default_factory=list)


@dataclass
class Config:
    tp_rank: int = 0
    tp_size: int = 1
    pp_rank: int = 0
    pp_size: int = 1
    attn_cp_rank: int = 0
    attn_cp_size: int = 1
    is_mla_model: bool = False
    model_name: str | None = "tiny"
    extra_config: dict[str, Any] | None = None
    should_split_heads: bool = False
    tp_lcm_size: int | None = None
    dcp_size: int = 1
    dcp_rank: int = 0

    @property
    def is_storage_writer(self) -> bool:
        return not self.is_mla_model or self.tp_rank == self.dcp_rank


@dataclass
class Transfer:
    name: str
    keys: list[str] | None = None
    host_indices: Any = None
    hit_policy: str = "all_pages"


class Tensor:
    """Bytes in host memory with the methods of a torch tensor that the plug-in calls."""

    def __init__(self, size: int = 0, *, part: tuple[Tensor, int, int] | None = None) -> None:
        self._map = mmap.mmap(-1, max(size, 1)) if part is None else part[0]._map
        self._start, self._size = (0, size) if part is None else part[1:]
        self.device = types.SimpleNamespace(type="cpu")

    @property
    def bytes(self) -> memoryview:
        return memoryview(self._map)[self._start : self._start + self._size]

    def data_ptr(self) -> int:
        return ctypes.addressof(ctypes.c_char.from_buffer(self._map)) + self._start

    def numel(self) -> int:
        return self._size

    def element_size(self) -> int:
        return 1

    def is_contiguous(self) -> bool:
        return True

    def contiguous(self) -> Tensor:
        return self


class HostPool:
    """Pages of two pieces, each piece of all pages in a tensor of its own; with guards around that no one may touch."""

    layout, dtype, layer_num, head_num, head_dim = "page_first", "bfloat16", 2, 2, 32

    def __init__(self, pages: int = 64, *, page_size: int = PAGE, pieces: int = 2) -> None:
        self.page_size = page_size
        self._whole = [Tensor((pages + 2) * PIECE) for _ in range(pieces)]
        for tensor in self._whole:
            tensor.bytes[:] = b"\xee" * len(tensor.bytes)
        self.kv_buffer = [Tensor(part=(t, PIECE, pages * PIECE)) for t in self._whole]
        self.pages = pages
        self.clear()

    def clear(self) -> None:
        self.mem_state = object()

    def get_hybrid_pool_buffer(self) -> list[Tensor]:
        return self.kv_buffer

    def get_page_buffer_meta(self, indices: Any) -> tuple[list[int], list[int]]:
        starts = [int(i) for i in indices][:: self.page_size]
        places = [t.data_ptr() + s // self.page_size * PIECE for s in starts for t in self.kv_buffer]
        return places, [PIECE] * len(places)

    def get_dummy_flat_data_page(self) -> Tensor:
        return Tensor(PIECE * len(self.kv_buffer))

    def get_data_page(self, index: int, flat: bool = True) -> Tensor:
        page = self.get_dummy_flat_data_page()
        page.bytes[:] = self.content(index // self.page_size)
        return page

    def set_from_flat_data_page(self, index: int, page: Tensor) -> None:
        self.fill(index // self.page_size, bytes(page.bytes))

    def content(self, page: int) -> bytes:
        return b"".join(bytes(t.bytes[page * PIECE : (page + 1) * PIECE]) for t in self.kv_buffer)

    def fill(self, page: int, data: bytes) -> None:
        for n, tensor in enumerate(self.kv_buffer):
            tensor.bytes[page * PIECE : (page + 1) * PIECE] = data[n * PIECE : (n + 1) * PIECE]

    def guards_hold(self) -> bool:
        ends = [bytes(t.bytes[:PIECE]) + bytes(t.bytes[-PIECE:]) for t in self._whole]
        return all(end == b"\xee" * (2 * PIECE) for end in ends)

    def places(self, *pages: int) -> list[int]:
        """Token places of pages, as SGLang gives them."""
        return [page * self.page_size + n for page in pages for n in range(self.page_size)]


def install(monkeypatch: pytest.MonkeyPatch, version: str = "0.5.23", storage: dict[str, Any] | None = None) -> Any:
    """Import the plug-in against these doubles; they are gone when the test ends. `storage`: other names of
    hicache_storage."""
    parts = {
        "sglang": {"__version__": version},
        "sglang.srt": {},
        "sglang.srt.mem_cache": {},
        "sglang.srt.mem_cache.hicache_storage": {
            "HiCacheStorage": HiCacheStorage,
            "HiCacheStorageConfig": Config,
            "PoolHitPolicy": PoolHitPolicy,
            "PoolTransfer": Transfer,
            "PoolTransferResult": PoolTransferResult,
            **(storage or {}),
        },
        "sglang.srt.observability": {},
        "sglang.srt.observability.metrics_collector": {"StorageMetrics": StorageMetrics},
        "torch": {"arange": lambda n: list(range(n))},
    }
    for name, attributes in parts.items():
        module = types.ModuleType(name)
        module.__dict__.update(attributes)
        module.__path__ = []  # type: ignore[attr-defined]
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.delitem(sys.modules, "kvpool.engines.sglang.storage", raising=False)
    found = importlib.import_module("kvpool.engines.sglang.storage")
    monkeypatch.delitem(sys.modules, "kvpool.engines.sglang.storage")
    return found
