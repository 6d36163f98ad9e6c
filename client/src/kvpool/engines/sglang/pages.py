"""Mapping of the pages of one SGLang host pool to blocks: block ids of a page, and the memory of each block.

A page that lies in host memory in a few pieces (the page-first layouts: keys and values of all layers) is one block per
piece, moved without a copy. A page in many pieces (layer-first) is one block, through a buffer and the host pool's own
functions for flat pages. Imports nothing of SGLang.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any, NamedTuple

from kvpool.engines.common.host_memory import HostMemory, tensor_bytes
from kvpool.engines.sglang.fingerprint import digest, pool_inputs, rank_part
from kvpool.protocol import keys as protocol_keys

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from kvpool.client import Client

__all__ = ["PageRequest", "Pages"]

_log = logging.getLogger("kvpool")

_MAX_PIECES = 8  # of a page that is moved piece by piece
_STAGING_BYTES = 64 << 20
_BUFFERS = ("kv_buffer", "k_buffer", "v_buffer", "index_k_buffer", "index_k_scale_buffer")


class PageRequest(NamedTuple):
    """Pages of one host pool: `indices` has `page_size` token places per key."""

    pages: Pages
    keys: list[str]
    indices: Any


class Pages:
    """One registered host pool. Thread-safe, as long as no two threads move the same page.

    `logical`: the pool holds no bytes of its own (the anchor of some hybrid models): every page of it is there.
    `flat_only`: pages are always one block, as `HiCacheStorage.batch_get` without zero copy wants them.
    """

    def __init__(self, name: str, pool: Any, config: Any, *, flat_only: bool = False) -> None:
        self.name = name
        self.pool = pool
        self.page_size = max(1, int(getattr(pool, "page_size", 1) or 1))
        self.logical = name == "kv" and getattr(pool, "kv_buffer", None) is None
        pool_digest = digest(pool_inputs(pool))
        self._prefix = f"{name}-{pool_digest}-{rank_part(config, name, pool)}"
        self._flat_part = f"{self._prefix}-flat".encode()
        self._memory = HostMemory(())
        self._sizes: tuple[int, ...] = ()
        if not self.logical and not flat_only:
            self._find_pieces()
        self._parts = [f"{self._prefix}-{i}/{len(self._sizes)}".encode() for i in range(len(self._sizes))]
        self._flat_bytes = 0

    @property
    def zero_copy(self) -> bool:
        """True if bytes move directly between the host pool and the pool's files."""
        return bool(self._sizes)

    @property
    def blocks_per_page(self) -> int:
        return len(self._sizes) or 1

    def block_ids(self, client: Client, keys: Sequence[str]) -> list[bytes]:
        """Return the ids of all blocks of the pages, page after page."""
        parts = self._parts or [self._flat_part]
        return [protocol_keys.block_id(client.fingerprint, key.encode(), part) for key in keys for part in parts]

    def flat_block_ids(self, client: Client, keys: Sequence[str]) -> list[bytes]:
        """Return the ids of the pages as flat tensors, one each."""
        return [protocol_keys.block_id(client.fingerprint, key.encode(), self._flat_part) for key in keys]

    def views(self, keys: Sequence[str], indices: Any) -> list[memoryview]:
        """Return the memory of all blocks of the pages, in the order of `block_ids`. ValueError for any mismatch."""
        self._require(len(indices) == len(keys) * self.page_size, "another number of token places than of pages")
        places, sizes = self.pool.get_page_buffer_meta(indices)
        count = len(keys) * len(self._sizes)
        self._require(len(places) == count and len(sizes) == count, "another number of pieces than expected")
        views = []
        for n, (place, size) in enumerate(zip(places, sizes, strict=True)):
            self._require(size == self._sizes[n % len(self._sizes)], "a piece of another size")
            view = self._memory.view(int(place), int(size))
            if view is None:
                raise ValueError(f"{self.name}: a piece outside of the registered memory")
            views.append(view)
        return views

    def load_flat(
        self, keys: Sequence[str], indices: Any, load: Callable[[Sequence[str], list[memoryview]], list[bool]]
    ) -> list[bool]:
        """Load whole pages with `load(keys, buffers)` and copy the loaded ones into the host pool."""
        done: list[bool] = []
        for part, starts in self._portions(keys, indices):
            pages = [self.pool.get_dummy_flat_data_page() for _ in part]
            well = load(part, [tensor_bytes(page) for page in pages])
            for ok, start, page in zip(well, starts, pages, strict=True):
                if ok:
                    self.pool.set_from_flat_data_page(start, page)
            done += well
        return done

    def store_flat(
        self, keys: Sequence[str], indices: Any, store: Callable[[Sequence[str], list[memoryview]], list[bool]]
    ) -> list[bool]:
        """Store whole pages with `store(keys, buffers)`."""
        done: list[bool] = []
        for part, starts in self._portions(keys, indices):
            pages = [self.pool.get_data_page(start, flat=True).contiguous() for start in starts]
            done += store(part, [tensor_bytes(page) for page in pages])
        return done

    def empty_page(self) -> Any:
        """Create a flat tensor of one page."""
        return self.pool.get_dummy_flat_data_page()

    def sample(self) -> memoryview:
        """Return the memory of the first piece of the first page; a copy of the page where pages are copied."""
        if self.zero_copy:
            return self.views([""], _first_page(self.page_size))[0]
        return tensor_bytes(self.pool.get_data_page(0, flat=True).contiguous())

    def _portions(self, keys: Sequence[str], indices: Any) -> Iterator[tuple[Sequence[str], list[int]]]:
        self._require(len(indices) == len(keys) * self.page_size, "another number of token places than of pages")
        starts = [int(indices[n * self.page_size]) for n in range(len(keys))]
        self._flat_bytes = self._flat_bytes or len(tensor_bytes(self.empty_page()))
        step = max(1, _STAGING_BYTES // self._flat_bytes)
        for n in range(0, len(keys), step):
            yield keys[n : n + step], starts[n : n + step]

    def _find_pieces(self) -> None:
        try:
            places, sizes = self.pool.get_page_buffer_meta(_first_page(self.page_size))
            memory = HostMemory(_tensors(self.pool))
            self._require(0 < len(places) == len(sizes) <= _MAX_PIECES, f"{len(places)} pieces per page")
            for place, size in zip(places, sizes, strict=True):
                self._require(memory.view(int(place), int(size)) is not None, "a page outside of its tensors")
        except Exception as e:
            _log.warning("kvpool: pages of host pool %r are copied (no zero-copy): %s", self.name, e)
            return
        self._sizes, self._memory = tuple(int(size) for size in sizes), memory

    def _require(self, fits: bool, otherwise: str) -> None:
        if not fits:
            raise ValueError(f"{self.name}: {otherwise}")


def _tensors(pool: Any) -> list[Any]:
    """Return the tensors that hold a host pool's pages."""
    shown = getattr(pool, "get_hybrid_pool_buffer", None)
    tensors = list(shown()) if shown is not None else []
    for name in _BUFFERS:
        value = getattr(pool, name, None)
        tensors += list(value) if isinstance(value, (list, tuple)) else [value]
    return [tensor for tensor in tensors if hasattr(tensor, "data_ptr") and tensor.numel()]


def _first_page(size: int) -> Any:
    import torch

    return torch.arange(size)
