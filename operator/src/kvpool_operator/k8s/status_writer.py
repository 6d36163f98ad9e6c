"""Throttled writes of status subresources: transitions immediately, counters at most once per interval."""

from __future__ import annotations

import hashlib
import json
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from kvpool_operator.errors import RejectedError
from kvpool_operator.k8s.client import ObjectRef, ref

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from kvpool_operator.k8s.client import ApiClient, Manifest
    from kvpool_operator.k8s.rate_limiter import TokenBucket

__all__ = ["StatusParts", "StatusWriter", "without"]

COUNTERS_INTERVAL_S: Final = 30.0


def without(fields: Sequence[str]) -> Callable[[Manifest], Any]:
    """The stable part of a status as everything but `fields`."""
    return lambda status: {k: v for k, v in status.items() if k not in fields}


@dataclass(frozen=True)
class StatusParts:
    """Functions from a status to JSON values."""

    stable: Callable[[Manifest], Any]
    """The part whose change is a transition."""
    comparable: Callable[[Manifest], Any] = lambda status: status
    """The part whose change is worth a write."""


@dataclass
class _Record:
    """Digests of the status that the API holds; digests, because there may be thousands of objects."""

    digest: bytes = b""
    stable: bytes = b""
    written_at: float = float("-inf")


class StatusWriter:
    """Writes statuses of one kind by server-side apply. For one event loop.

    A status whose stable part differs from the recorded one is written immediately; any other difference of its
    comparable
    part at most every `interval_s` seconds.
    `bucket` bounds the writes of all objects together; transitions have priority.
    """

    def __init__(
        self,
        cluster: ApiClient,
        parts: StatusParts,
        *,
        interval_s: float = COUNTERS_INTERVAL_S,
        clock: Callable[[], float] = time.monotonic,
        bucket: TokenBucket | None = None,
    ) -> None:
        self._cluster = cluster
        self._parts = parts
        self._interval_s = interval_s
        self._clock = clock
        self._bucket = bucket
        self._records: dict[ObjectRef, _Record] = {}

    def record(self, target: ObjectRef, status: Manifest) -> None:
        """Remember `status` as the one that the API holds, from a read. An empty one counts as never written."""
        record = self._records.setdefault(target, _Record())
        try:
            record.digest, record.stable = self._digests(status) if status else (b"", b"")
        except (AttributeError, KeyError, TypeError):  # not written by this operator's schema
            record.digest, record.stable = b"unknown", b""

    def is_recorded(self, target: ObjectRef) -> bool:
        """Whether the API is known to hold a status of `target`."""
        return bool(self._records.get(target, _Record()).digest)

    def invalidate(self, target: ObjectRef) -> None:
        """The API holds another status than the recorded one: the next write is done."""
        if target in self._records:
            self._records[target].digest = b""

    def forget(self, target: ObjectRef) -> None:
        """The object no longer exists."""
        self._records.pop(target, None)

    async def write(self, manifest: Manifest, status: Manifest, *, create: bool = False) -> Manifest | None:
        """Write `status` if it is due; the object as the API returns it, or None if nothing was written.

        Of `manifest` only apiVersion, kind, namespace and name are used, unless the object must be created: with
        `create` it is applied first if no status of it is recorded. HTTP 404 counts as not written.
        """
        target = ref(manifest)
        record = self._records.setdefault(target, _Record())
        digest, stable = self._digests(status)
        if digest == record.digest:
            return None
        is_transition = not record.digest or stable != record.stable
        if not is_transition and self._clock() - record.written_at < self._interval_s:
            return None
        if self._bucket is not None and not self._bucket.try_acquire(priority=is_transition):
            return None
        try:
            if create and not record.digest:
                await self._cluster.apply(manifest)
            written = await self._cluster.apply(_status_manifest(manifest, status), subresource="status")
        except RejectedError as e:
            if e.status != 404:
                raise
            record.digest = b""
            return None
        record.digest, record.stable, record.written_at = digest, stable, self._clock()
        return written

    def _digests(self, status: Manifest) -> tuple[bytes, bytes]:
        comparable, stable = self._parts.comparable(status), self._parts.stable(status)
        return _digest(_without_empty_maps(comparable)), _digest(_without_empty_maps(stable))


def _status_manifest(manifest: Manifest, status: Manifest) -> Manifest:
    metadata = {k: manifest["metadata"][k] for k in ("name", "namespace") if k in manifest["metadata"]}
    return {
        "apiVersion": manifest["apiVersion"],
        "kind": manifest["kind"],
        "metadata": metadata,
        "status": _without_empty_maps(status),
    }


def _without_empty_maps(value: Any) -> Any:
    """Leave out maps without an entry.

    A map that had entries and is applied as {} becomes null at the API server, which then rejects the whole status
    (kubernetes/kubernetes#135841). A map that is left out is removed.
    """
    if not isinstance(value, dict):
        return value
    kept = {name: _without_empty_maps(part) for name, part in value.items()}
    return {name: part for name, part in kept.items() if part != {}}


def _digest(value: Any) -> bytes:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).digest()[:8]
