"""Transfer of SGLang's pages between host pools and the pool, without a copy where the layout allows it."""

from __future__ import annotations

import logging
import threading
import time
from typing import TYPE_CHECKING, Any, NamedTuple

from kvpool.engines.sglang.pages import PageRequest, Pages
from kvpool.protocol.wire import Tier

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvpool.client import Client

__all__ = ["Bandwidth", "PageTransfer"]

_log = logging.getLogger("sglang.kvpool")  # under SGLang's own logger, so that the engine's log shows it

_MAX_SAMPLES = 1024


class Bandwidth(NamedTuple):
    """One batch: blocks moved and their bandwidth."""

    blocks: int
    gb_per_s: float


class PageTransfer:
    """Registered host pools by name (`pages`), and the transfers of their pages. Thread-safe."""

    def __init__(self) -> None:
        self.pages: dict[str, Pages] = {}
        self._lock = threading.Lock()
        self._loads: list[Bandwidth] = []
        self._stores: list[Bandwidth] = []

    def register(self, name: str, pages: Pages) -> None:
        """Add or replace a host pool."""
        self.pages = {**self.pages, name: pages}

    def take_bandwidths(self) -> tuple[list[Bandwidth], list[Bandwidth]]:
        """Return the loads and the stores since the last call."""
        with self._lock:
            loads, self._loads = self._loads, []
            stores, self._stores = self._stores, []
        return loads, stores

    def leading_pages(self, client: Client, keys: Sequence[str], *, counted: bool) -> int:
        """Return the number of leading pages of the KV that the pool has; `counted`: in the hit rate."""
        pages = self.pages.get("kv")
        if pages is None or pages.logical:
            return 0
        tiers, reason = client.find(pages.block_ids(client, keys))
        blocks = next((n for n, tier in enumerate(tiers) if tier == Tier.MISS), len(tiers))
        count = blocks // pages.blocks_per_page
        if counted:
            client.count_lookup(len(keys), count, reason)
        return count

    def present(self, client: Client, pools: Sequence[str], keys: Sequence[str]) -> list[list[bool]]:
        """Return, per host pool and page, whether the pool has all blocks of the page, by a single lookup."""
        known = [self.pages.get(name) for name in pools]
        block_ids = [block_id for pages in known if pages is not None for block_id in pages.block_ids(client, keys)]
        tiers = iter(client.find(block_ids, exhaustive=True).tiers)  # its tokens are counted with the KV's own pages
        out = []
        for pages in known:
            step = pages.blocks_per_page if pages is not None else 0
            each = [[next(tiers) != Tier.MISS for _ in range(step)] for _ in keys]
            out.append([bool(blocks) and all(blocks) for blocks in each])
        return out

    def transfer(self, client: Client | None, transfers: Any, *, is_load: bool) -> dict[Any, list[bool]]:
        """Move the pages of SGLang's PoolTransfer objects. One list of outcomes per host pool, as long as its keys."""
        requests = []
        results: dict[Any, list[bool]] = {}
        for transfer in transfers or ():
            keys = list(transfer.keys or ())
            results[transfer.name] = [False] * len(keys)
            pages = self.pages.get(str(transfer.name))
            if pages is not None and keys and transfer.host_indices is not None:
                requests.append((transfer.name, PageRequest(pages, keys, transfer.host_indices)))
        if client is None or not requests:
            return results
        moved = self.move(client, [request for _, request in requests], is_load=is_load)
        results.update({name: done for (name, _), done in zip(requests, moved, strict=True)})
        return results

    def move(self, client: Client, requests: list[PageRequest], *, is_load: bool) -> list[list[bool]]:
        """Move pages of several host pools, the zero-copy ones in one request. One list of outcomes per host pool."""
        outcomes: list[list[bool]] = [[False] * len(request.keys) for request in requests]
        block_ids: list[bytes] = []
        views: list[memoryview] = []
        zero_copy: list[tuple[int, int]] = []  # index into `requests`, and of its first block
        for n, request in enumerate(requests):
            if request.pages.logical:
                outcomes[n] = [True] * len(request.keys)
            elif request.pages.zero_copy:
                try:
                    pieces = request.pages.views(request.keys, request.indices)
                except Exception as e:  # affects one host pool: continue with the others
                    _log.error("kvpool: pages of a host pool were not transferred: %s", e)
                    continue
                zero_copy.append((n, len(block_ids)))
                block_ids += request.pages.block_ids(client, request.keys)
                views += pieces
            else:
                outcomes[n] = self._move_flat(client, request, is_load=is_load)
        if block_ids:
            done = self.blocks(client, block_ids, views, is_load=is_load)
            for n, start in zero_copy:
                step = requests[n].pages.blocks_per_page
                outcomes[n] = [all(done[start + i * step : start + (i + 1) * step]) for i in range(len(outcomes[n]))]
        return outcomes

    def _move_flat(self, client: Client, request: PageRequest, *, is_load: bool) -> list[bool]:
        pages, keys, indices = request
        deadline: list[float] = []  # one for all portions, set by the first

        def move(part: Sequence[str], buffers: list[memoryview]) -> list[bool]:
            if not deadline:
                size = len(keys) * len(buffers[0])
                seconds = (client.load_seconds if is_load else client.store_seconds)(size)
                deadline.append(time.monotonic() + seconds)
            return self.blocks(client, pages.flat_block_ids(client, part), buffers, deadline[0], is_load=is_load)

        return pages.load_flat(keys, indices, move) if is_load else pages.store_flat(keys, indices, move)

    def blocks(
        self,
        client: Client,
        block_ids: list[bytes],
        views: list[memoryview],
        deadline: float | None = None,
        *,
        is_load: bool,
    ) -> list[bool]:
        """Load or store blocks and record the bandwidth. One outcome per block."""
        started = time.monotonic()
        results: Sequence[Any] = (client.get_into if is_load else client.put_from)(block_ids, views, deadline)
        seconds = max(1e-9, time.monotonic() - started)
        moved = [result.bytes for result in results if result.bytes]
        with self._lock:
            samples = self._loads if is_load else self._stores
            if moved and len(samples) < _MAX_SAMPLES:
                samples.append(Bandwidth(len(moved), sum(moved) / seconds / 1e9))
        return [result.ok for result in results]
