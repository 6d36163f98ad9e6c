"""Prefetches the blocks that a lookup found into the page cache, before the engine loads them.

One thread for each local drive and one for the shared tier, each with a short queue. Blocks are read in the order of
the prompt, prompts take turns, and only blocks of the reply are read. Prefetching yields to readers: a block that is
being loaded is skipped, requests that waited too long are dropped, and the queue of a slow drive is emptied.

Blocks of a drive enter the page cache in large folios (kvpool.transport.page_cache). Where that is not possible, and
in the shared tier, the hint is posix_fadvise(2), WILLNEED. Linux cuts one hint down to the device's read-ahead window
or largest request (mm/readahead.c, force_page_cache_ra), so hints are issued in steps of that window: smaller ones cost
more per byte.
"""

from __future__ import annotations

import collections
import contextlib
import functools
import os
import threading
import time
from typing import TYPE_CHECKING

from kvpool.errors import KVPoolError
from kvpool.protocol.wire import Tier
from kvpool.transport import page_cache
from kvpool_sidecar.replication.prefetch_window import PrefetchWindow, ReadDecision
from kvpool_sidecar.resilience.worker import PeriodicTask

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from kvpool_sidecar.counters import Stats
    from kvpool_sidecar.storage.local.store import LocalStore
    from kvpool_sidecar.storage.shared.tier import SharedTier

__all__ = ["Prefetcher", "fill", "in_memory", "read_ahead"]

STEP_BYTES = 128 << 10
STRIDE_BYTES = 2 << 20  # read between two checks whether the block is still needed
_MAX_PROMPTS = 64  # waiting in one queue
_KEEP_S = 5.0
_RESUMED = b"resumed"  # in place of a tenant's tag: sessions of all tenants together have one tenant's share
_STALE_S = 2.0
_BUSY_S = 0.25  # a hint of 2 MiB that takes longer shows a busy drive
_WAIT_S = 0.02
_NOWAIT = getattr(os, "RWF_NOWAIT", 0)


def fill(fd: int, offset: int, size: int) -> None:
    """Read these bytes of a drive's file into the page cache, in large folios where possible."""
    if not page_cache.fill(fd, offset, size):
        read_ahead(fd, offset, size)


def read_ahead(fd: int, offset: int, size: int) -> None:
    """Let the kernel read these bytes of `fd` into the page cache; returns when the reads are queued."""
    step = _step(os.fstat(fd).st_dev)
    for at in range(offset, offset + size, step):
        os.posix_fadvise(fd, at, step, os.POSIX_FADV_WILLNEED)


@functools.lru_cache(maxsize=64)
def _step(device: int) -> int:
    """Return the bytes of one hint: the device's read-ahead window as the kernel reports it, within bounds."""
    name = f"{os.major(device)}:{os.minor(device)}"
    for path in (f"/sys/class/bdi/{name}/read_ahead_kb", f"/sys/dev/block/{name}/../queue/read_ahead_kb"):
        with contextlib.suppress(OSError, ValueError), open(path) as file:
            return max(STEP_BYTES, min(int(file.read()) << 10, STRIDE_BYTES))
    return STEP_BYTES


def in_memory(fd: int, size: int) -> bool:
    """Return whether first, middle and last byte are in the page cache; False if the file system cannot report it."""
    if not _NOWAIT:
        return False
    probe = bytearray(1)
    try:
        return page_cache.ends_in_memory(fd, size) and all(
            os.preadv(fd, [probe], at, _NOWAIT) == 1 for at in (0, size // 2, size - 1)
        )
    except OSError:  # EAGAIN: not cached; EOPNOTSUPP: unknown
        return False


class _Prompt:
    """Remaining blocks of one lookup on one drive."""

    def __init__(self, tenant: bytes, keys: Sequence[bytes], asked_at: float, keep_s: float = _KEEP_S) -> None:
        self.tenant = tenant
        self.keys = collections.deque(keys)
        self.asked_at = asked_at
        self.keep_s = keep_s


class _DriveQueue:
    """One drive: `open_block(key)` is a descriptor or -1, `read` reads its bytes ahead. `ready` guards everything."""

    def __init__(self, name: str, open_block: Callable[[bytes], int], read: Callable[[int, int, int], None]) -> None:
        self.name = name
        self.open_block = open_block
        self.read = read
        self.prompts: collections.deque[_Prompt] = collections.deque()
        self.ready = threading.Condition()


class Prefetcher:
    """Thread-safe. `limit_bytes` bounds the bytes prefetched and not yet opened, over all drives and tenants."""

    def __init__(
        self,
        local: LocalStore,
        shared: SharedTier | None,
        limit_bytes: int,
        stats: Stats,
        *,
        read: Callable[[int, int, int], None] = fill,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._local = local
        self._stats = stats
        self._clock = clock
        self._lock = threading.Lock()
        self._window = PrefetchWindow(limit_bytes, _KEEP_S)
        self._stopping = threading.Event()
        self._drive_queues = {root.name: _DriveQueue(root.name, root.peek_fd, read) for root in local.drives}
        self._shared_queue = (
            None if shared is None else _DriveQueue("shared", lambda key: _open_shared(shared, key), read_ahead)
        )
        self._queues = [*self._drive_queues.values(), *([self._shared_queue] if self._shared_queue else [])]
        self._tasks = [
            PeriodicTask(f"prefetch-{queue.name}", functools.partial(self._serve, queue), 0.0) for queue in self._queues
        ]

    def start(self) -> None:
        for task in self._tasks:
            task.start()

    def stop(self) -> None:
        """Stop prefetching. A thread may remain blocked in a shared tier that hangs."""
        self._stopping.set()
        for queue in self._queues:
            with queue.ready:
                queue.ready.notify_all()
        for task in self._tasks:
            task.stop(0.0)

    @property
    def held_bytes(self) -> int:
        """Bytes prefetched and not yet opened."""
        with self._lock:
            return self._window.held_bytes

    def enqueue(self, tenant: bytes, keys: Sequence[bytes], tiers: bytes, asked_at: float) -> None:
        """Queue blocks that the engine will load next, in this order, with their tiers. A LookupListener."""
        self._enqueue(tenant, keys, tiers, asked_at, _KEEP_S)

    def enqueue_resumed(self, keys: Sequence[bytes], tiers: bytes, asked_at: float, keep_s: float) -> None:
        """Queue blocks that a session hint named. They may wait `keep_s` for their load, and take half of the limit."""
        self._enqueue(_RESUMED, keys, tiers, asked_at, keep_s)

    def _enqueue(self, tenant: bytes, keys: Sequence[bytes], tiers: bytes, asked_at: float, keep_s: float) -> None:
        by_queue: dict[str, tuple[_DriveQueue, list[bytes]]] = {}
        for key, tier in zip(keys, tiers, strict=True):
            queue = self._queue_of(key, tier)
            if queue is not None:
                by_queue.setdefault(queue.name, (queue, []))[1].append(key)
        for queue, there in by_queue.values():
            with queue.ready:
                if len(queue.prompts) >= _MAX_PROMPTS:
                    self._stats.add("prefetch", "dropped", len(there))
                    continue
                queue.prompts.append(_Prompt(tenant, there, asked_at, keep_s))
                queue.ready.notify()

    def consumed(self, keys: Sequence[bytes]) -> None:
        """Record blocks that are being loaded now; they are not prefetched any more."""
        now = self._clock()
        with self._lock:
            used = sum(self._window.consume(key, now) for key in keys)
        if used:
            self._stats.add("prefetch", "used", used)

    def _queue_of(self, key: bytes, tier: int) -> _DriveQueue | None:
        if tier == Tier.SHARED:
            return self._shared_queue
        root = self._local.drive_of(key) if tier == Tier.LOCAL else None
        return None if root is None else self._drive_queues[root.name]

    def _serve(self, queue: _DriveQueue) -> None:
        """Prefetch the next block, or wait."""
        with queue.ready:
            while not queue.prompts and not self._stopping.is_set():
                queue.ready.wait()
            if self._stopping.is_set():
                return
            prompt = queue.prompts.popleft()
        if self._clock() - prompt.asked_at > _STALE_S:
            self._stats.add("prefetch", "late", len(prompt.keys))
            return
        waits = not self._read_next(queue, prompt)
        if prompt.keys:
            with queue.ready:
                queue.prompts.append(prompt)  # prompts take turns
        if waits:
            self._stopping.wait(_WAIT_S)

    def _read_next(self, queue: _DriveQueue, prompt: _Prompt) -> bool:
        """Prefetch the prompt's next block or skip it; False if there is no space for it now."""
        key = prompt.keys[0]
        with self._lock:
            wanted = self._window.is_wanted(key, prompt.asked_at, self._clock())
        if not wanted:
            prompt.keys.popleft()
            return True
        fd = queue.open_block(key)
        try:
            if fd < 0:
                prompt.keys.clear()  # blocks after a missing one cannot be used
                return True
            size = os.fstat(fd).st_size
            with self._lock:
                now = self._clock()
                if unused := self._window.expire(now):
                    self._stats.add("prefetch", "unused", unused)
                verdict = self._window.reserve(prompt.tenant, key, size, prompt.asked_at, now, prompt.keep_s)
            if verdict == ReadDecision.WAIT:
                return False
            prompt.keys.popleft()
            if verdict == ReadDecision.READ:
                self._read_block(queue, prompt, key, fd, size)
        finally:
            if fd >= 0:
                os.close(fd)
        return True

    def _read_block(self, queue: _DriveQueue, prompt: _Prompt, key: bytes, fd: int, size: int) -> None:
        if in_memory(fd, size):
            with self._lock:
                self._window.mark_cached(key, self._clock())
            self._stats.add("prefetch", "cached")
            return
        for at in range(0, size, STRIDE_BYTES):
            if self._stopping.is_set() or self._is_consumed(key, prompt.asked_at):
                break
            began = self._clock()
            queue.read(fd, at, min(STRIDE_BYTES, size - at))
            self._stats.add("prefetch", "bytes", min(STRIDE_BYTES, size - at))
            if self._clock() - began > _BUSY_S:
                self._yield_to_readers(queue, prompt)
                break
        self._stats.add("prefetch", "blocks")

    def _is_consumed(self, key: bytes, asked_at: float) -> bool:
        with self._lock:
            return self._window.is_consumed(key, asked_at)

    def _yield_to_readers(self, queue: _DriveQueue, prompt: _Prompt) -> None:
        """Empty the queue of a drive that is busy with readers."""
        with queue.ready:
            dropped = sum(len(p.keys) for p in queue.prompts) + len(prompt.keys)
            queue.prompts.clear()
            prompt.keys.clear()
        self._stats.add("prefetch", "busy", dropped)


def _open_shared(shared: SharedTier, key: bytes) -> int:
    """Open without the bulkhead: this thread may hang with the mount, and no reader waits for it."""
    if not shared.available:
        return -1
    with contextlib.suppress(KVPoolError, OSError):
        found = shared.store.open(key)
        return -1 if found is None else found.fd
    return -1
