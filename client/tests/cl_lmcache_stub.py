"""As much of LMCache 0.5.6 as its plug-ins touch, for a machine that has none. `installed` lets imports find it.

A contract, not a copy: the stub says what is promised and asserts what LMCache relies on. The real thing is in
client/tests_engine/test_en_lmcache.py.
"""

from __future__ import annotations

import os
import threading
from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from cl_stubs import stubs

if TYPE_CHECKING:
    import contextlib

    pass


class Bitmap:
    def __init__(self, size: int) -> None:
        self.size, self.bits = size, set()

    def set(self, place: int) -> None:
        assert 0 <= place < self.size
        self.bits.add(place)

    def found(self) -> list[bool]:
        return [i in self.bits for i in range(self.size)]


@dataclass(frozen=True)
class ObjectKey:
    chunk_hash: bytes
    model_name: str = "models/tiny"
    kv_rank: int = 1 << 24
    object_group_id: int = 0
    cache_salt: str = ""

    def to_encoded_object_key(self) -> str:
        return f"{self.chunk_hash.hex()}/{self.cache_salt}"


@dataclass
class Layout:
    shapes: list[Any]
    dtypes: list[Any]


def store_result(success: bool, size: int) -> StoreResult:
    assert isinstance(success, bool)
    assert size >= 0
    return StoreResult(size if success else -1)


class StoreResult(int):
    """Bytes, or -1 for a failure."""


class Notifier:
    """An eventfd that counts how often it was told."""

    def __init__(self) -> None:
        self.fd = os.eventfd(0, os.EFD_NONBLOCK)
        self.reported = 0

    def fileno(self) -> int:
        return self.fd

    def notify(self) -> None:
        self.reported += 1
        os.eventfd_write(self.fd, 1)

    def close(self) -> None:
        if self.fd >= 0:
            os.close(self.fd)
        self.fd = -1


class L2AdapterInterface(ABC):
    def __init__(self, max_capacity_bytes: int = 0) -> None:
        self.capacity = max_capacity_bytes
        self.used: dict[Any, int] = {}
        self.accessed: list[Any] = []
        self.listener_fails = False

    def _notify_keys_stored(self, keys: list[Any], sizes: list[int]) -> None:
        self.used.update(zip(keys, sizes, strict=True))
        assert not self.listener_fails

    def _notify_keys_deleted(self, keys: list[Any], sizes: list[int]) -> None:
        for key, size in zip(keys, sizes, strict=True):
            assert self.used.pop(key) == size  # LMCache warns of an underflow
        assert not self.listener_fails

    def _notify_keys_accessed(self, keys: list[Any]) -> None:
        self.accessed += keys
        assert not self.listener_fails

    @abstractmethod
    def get_store_event_fd(self) -> int: ...
    @abstractmethod
    def get_lookup_and_lock_event_fd(self) -> int: ...
    @abstractmethod
    def get_load_event_fd(self) -> int: ...
    @abstractmethod
    def submit_store_task(self, keys: list[Any], objects: list[Any]) -> int: ...
    @abstractmethod
    def pop_completed_store_tasks(self) -> dict[int, Any]: ...
    @abstractmethod
    def submit_lookup_and_lock_task(self, keys: list[Any], group_layout_descs: dict[int, Any]) -> int: ...
    @abstractmethod
    def query_lookup_and_lock_result(self, task_id: int) -> Any: ...
    @abstractmethod
    def submit_unlock(self, keys: list[Any]) -> None: ...
    @abstractmethod
    def submit_load_task(self, keys: list[Any], objects: list[Any]) -> int: ...
    @abstractmethod
    def query_load_result(self, task_id: int) -> Any: ...
    @abstractmethod
    def close(self) -> None: ...

    def delete(self, keys: list[Any]) -> None:
        raise NotImplementedError

    def list_l2_keys(self, model_name: str | None = None, page_size: int = 500, cursor: str | None = None) -> Any:
        raise NotImplementedError

    def report_status(self) -> dict[str, Any]:
        raise NotImplementedError


@dataclass
class CacheEngineKey:
    chunk_hash: int
    model_name: str = "models/tiny"
    world_size: int = 1
    worker_id: int = 0
    dtype: str = "bfloat16"
    tags: tuple[tuple[str, Any], ...] | None = None


class Memory:
    """A memory object whose references are counted."""

    def __init__(self, size: int, shape: tuple[int, ...] | None = None, dtype: str = "bfloat16") -> None:
        self.data = bytearray(size)
        self.shape, self.dtype = shape or (2, 2, size // 16, 2), dtype
        self.references = 1
        self.lock = threading.Lock()

    @property
    def byte_array(self) -> memoryview:
        return memoryview(self.data)

    def get_size(self) -> int:
        return len(self.data)

    def get_shapes(self) -> list[tuple[int, ...]]:
        return [self.shape]

    def get_dtypes(self) -> list[str]:
        return [self.dtype]

    def ref_count_up(self) -> None:
        with self.lock:
            self.references += 1

    def ref_count_down(self) -> None:
        with self.lock:
            assert self.references > 0
            self.references -= 1


@dataclass
class LocalMemory:
    """LMCache's host memory: `room` objects at a time."""

    size: int
    room: int = 1000
    given: list[Memory] = field(default_factory=list)

    def allocate(self, shapes: Any, dtypes: Any, fmt: Any, eviction: bool = True, busy_loop: bool = True) -> Any:
        assert not busy_loop, "LMCache waits without end"
        if sum(1 for m in self.given if m.references) >= self.room:
            return None
        self.given.append(Memory(self.size))
        return self.given[-1]


@dataclass
class Config:
    extra_config: dict[str, Any] = field(default_factory=dict)
    pre_caching_hash_algorithm: str = "sha256_cbor"
    use_layerwise: bool = False
    remote_serde: str | None = "naive"


@dataclass
class Metadata:
    model_name: str = "models/tiny"
    world_size: int = 1
    chunk_size: int = 256
    kv_dtype: str = "bfloat16"
    size: int = 4096


class RemoteConnector(ABC):
    def __init__(self, config: Config, metadata: Metadata) -> None:
        self.meta_shapes = [(2, 2, metadata.size // 16, 2)]
        self.meta_dtypes = [metadata.kv_dtype]
        self.meta_fmt = "KV_2LTD"

    @abstractmethod
    async def exists(self, key: Any) -> bool: ...
    @abstractmethod
    def exists_sync(self, key: Any) -> bool: ...
    @abstractmethod
    async def get(self, key: Any) -> Any: ...
    @abstractmethod
    async def put(self, key: Any, memory_obj: Any) -> None: ...
    @abstractmethod
    async def list(self) -> list[str]: ...
    @abstractmethod
    async def close(self) -> None: ...

    def support_batched_get(self) -> bool:
        return False

    async def batched_get(self, keys: list[Any]) -> list[Any]:
        raise NotImplementedError

    def support_batched_contains(self) -> bool:
        return False

    def batched_contains(self, keys: list[Any]) -> int:
        raise NotImplementedError

    async def batched_async_contains(self, lookup_id: str, keys: list[Any], pin: bool = False) -> int:
        raise NotImplementedError


class ConnectorAdapter(ABC):
    def __init__(self, schema: str = "") -> None:
        self.schema = schema

    @abstractmethod
    def create_connector(self, context: Any) -> Any: ...


_MODULES: dict[str, dict[str, Any]] = {
    "lmcache": {"__version__": "0.5.6"},
    "lmcache.lmcache_native": {"Bitmap": Bitmap},
    "lmcache.utils": {"CacheEngineKey": CacheEngineKey},
    "lmcache.v1": {},
    "lmcache.v1.platform": {"create_event_notifier": Notifier},
    "lmcache.v1.distributed": {},
    "lmcache.v1.distributed.api": {
        "KeyEntry": lambda key, size: (key, size),
        "KeyListPage": lambda entries, token: (entries, token),
        "ObjectKey": ObjectKey,
    },
    "lmcache.v1.distributed.internal_api": {"L2StoreResult": store_result},
    "lmcache.v1.distributed.l2_adapters": {},
    "lmcache.v1.distributed.l2_adapters.base": {"L2AdapterInterface": L2AdapterInterface},
    "lmcache.v1.storage_backend": {},
    "lmcache.v1.storage_backend.connector": {"ConnectorAdapter": ConnectorAdapter},
    "lmcache.v1.storage_backend.connector.base_connector": {"RemoteConnector": RemoteConnector},
}


def installed() -> contextlib.AbstractContextManager[None]:
    """Inside, `import lmcache` gives the stub."""
    return stubs(_MODULES)
