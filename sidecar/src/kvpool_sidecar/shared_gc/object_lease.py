"""Lease of shared GC in an object store. Objects are created, listed and deleted, never changed.

::

    <pool>/sweep/term-000000000007                         contains its owner
    <pool>/sweep/beat-<owner>-<number>-<bytes>-<blocks>    heartbeat of a sidecar, one per step: what it has stored
    <pool>/sweep/count-<number>-<finished>-<bytes>-<blocks>   of the holder: the usage

A term is created only if its number is free, where the store can enforce that (S3: If-None-Match), and read back. The
owner of the highest term holds the lease while its latest heartbeat is recent by the store's own clock, which the
listing shows next to the own heartbeat. Where the store cannot enforce it, two may hold the lease for one step; both
remove only excess blocks.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
import time
from typing import TYPE_CHECKING, NamedTuple

from kvpool_sidecar.shared_gc.usage import StoredUsage

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from kvpool_sidecar.storage.buckets.base import Bucket

__all__ = ["Count", "Heartbeat", "LeaseView", "ObjectLease"]

_TERM = re.compile(r"term-([0-9]{12})")
_BEAT = re.compile(r"beat-([0-9a-f]{16})-([0-9]{9})-([0-9]{1,18})-([0-9]{1,15})")
_COUNT = re.compile(r"count-([0-9]{12})-([0-9]{1,12})-([0-9]{1,18})-([0-9]{1,15})")
_OWNER_BYTES = 16
_FORGOTTEN_S = 3600.0
_MOST_OBJECTS = 20_000


class Heartbeat(NamedTuple):
    name: str
    number: int
    stored: StoredUsage
    at: float


class Count(NamedTuple):
    """`finished`: Unix seconds by the store's clock."""

    name: str
    number: int
    finished: float
    used: StoredUsage


class LeaseView(NamedTuple):
    """Result of a listing. `now` is the store's time."""

    now: float
    terms: list[int]
    beats: dict[str, Heartbeat]
    old: list[str]
    counted: Count | None


class ObjectLease:
    """Of one sidecar; `owner` is 16 hex digits. Not thread-safe."""

    def __init__(
        self,
        owner: str,
        lease_s: float,
        *,
        clock: Callable[[], float] = time.monotonic,
        trust_s: float = 5.0,
    ) -> None:
        self.term = 0
        self._owner = owner
        self._lease_s = lease_s
        self._clock = clock
        self._trust_s = min(trust_s, lease_s / 4)
        self._number = 0
        self._asked_at = float("-inf")

    def heartbeat(self, bucket: Bucket, folder: str, stored: StoredUsage) -> LeaseView:
        """Write a heartbeat, list the folder, and delete own stale objects. OSError."""
        self._number += 1
        name = f"beat-{self._owner}-{self._number:09d}-{stored.bytes}-{stored.blocks}"
        put(bucket, f"{folder}/{name}", b"\n")
        view = read_view(bucket, folder, name)
        _remove(bucket, folder, view.old)
        return view

    def hold(self, bucket: Bucket, folder: str, view: LeaseView) -> bool:
        """Renew the lease, or acquire it if it is free. OSError."""
        top = max(view.terms, default=0)
        self._asked_at = self._clock()
        if self.term and top == self.term:
            return True
        self.term = 0
        if top:
            beat = view.beats.get(_content(bucket, f"{folder}/term-{top:012d}"))
            if beat is not None and abs(view.now - beat.at) <= self._lease_s:
                return False
        name = f"{folder}/term-{top + 1:012d}"
        if not put(bucket, name, self._owner.encode()) or _content(bucket, name) != self._owner:
            return False
        if max(read_view(bucket, folder, "").terms, default=0) != top + 1:
            return False
        _remove(bucket, folder, (f"term-{term:012d}" for term in view.terms))
        self.term = top + 1
        return True

    def still_held(self, bucket: Bucket, folder: str) -> bool:
        """Check before each batch of deletions. False for good once another sidecar holds the lease. OSError."""
        if self.term and self._clock() - self._asked_at > self._trust_s:
            if max(read_view(bucket, folder, "").terms, default=0) != self.term:
                self.term = 0
            self._asked_at = self._clock()
        return self.term > 0

    def publish(self, bucket: Bucket, folder: str, view: LeaseView, finished: float, used: StoredUsage) -> None:
        """Publish the usage. OSError."""
        number = view.counted.number + 1 if view.counted is not None else 1
        put(bucket, f"{folder}/count-{number:012d}-{int(finished)}-{used.bytes}-{used.blocks}", b"\n")
        if view.counted is not None:
            _remove(bucket, folder, [view.counted.name])

    def release(self, bucket: Bucket, folder: str) -> None:
        """Delete the own heartbeat, which frees the term. OSError."""
        view = read_view(bucket, folder, "")
        own = view.beats.get(self._owner)
        self.term = 0
        _remove(bucket, folder, [own.name] if own is not None else [])


def put(bucket: Bucket, name: str, data: bytes) -> bool:
    """Create a small object. False if it exists."""
    fd = os.memfd_create("kvpool-note", os.MFD_CLOEXEC)
    try:
        os.write(fd, data)
        return bucket.put(name, fd, len(data))
    finally:
        os.close(fd)


def read_view(bucket: Bucket, folder: str, own: str) -> LeaseView:
    """List the folder. `own` names the object whose time is now; else the latest of all is."""
    now: float | None = None
    terms: list[int] = []
    beats: dict[str, Heartbeat] = {}
    counts: list[Count] = []
    old: list[str] = []
    latest = 0.0
    for seen, (name, _, at) in enumerate(bucket.list(folder)):
        if seen > _MOST_OBJECTS:
            raise OSError(errno.EFBIG, "too many notes in the folder `sweep`", bucket.url)
        if at is None:
            raise OSError(errno.ENOTSUP, "the store does not report when an object was stored", bucket.url)
        latest = max(latest, at)
        now = at if name == own else now
        if found := _TERM.fullmatch(name):
            terms.append(int(found[1]))
        elif found := _BEAT.fullmatch(name):
            beat = Heartbeat(name, int(found[2]), StoredUsage(int(found[3]), int(found[4])), at)
            known = beats.get(found[1])
            if known is not None:
                old.append(min(known, beat, key=lambda one: one.number).name)
            beats[found[1]] = beat if known is None else max(known, beat, key=lambda one: one.number)
        elif found := _COUNT.fullmatch(name):
            counts.append(Count(name, int(found[1]), float(found[2]), StoredUsage(int(found[3]), int(found[4]))))
    counts.sort(key=lambda count: count.number)
    old += [count.name for count in counts[:-1]]
    now = latest if now is None else now
    old += [beat.name for beat in beats.values() if now - beat.at > _FORGOTTEN_S]
    return LeaseView(now, terms, beats, old, counts[-1] if counts else None)


def _content(bucket: Bucket, name: str) -> str:
    """Return the owner of a term; empty if there is none."""
    fd = os.memfd_create("kvpool-note", os.MFD_CLOEXEC)
    try:
        bucket.get_to_fd(name, fd, _OWNER_BYTES)
        return os.pread(fd, _OWNER_BYTES, 0).decode("ascii", "replace")
    except FileNotFoundError:
        return ""
    finally:
        os.close(fd)


def _remove(bucket: Bucket, folder: str, names: Iterable[str]) -> None:
    for name in names:
        with contextlib.suppress(FileNotFoundError):
            bucket.delete(f"{folder}/{name}")
