"""The landing zone: bounded memory files that pods write; COMMIT seals one and writes it to the node's drive.

A pod never gets a writable descriptor of a drive. What it holds here is charged to it and to its tenant until the
memory is free again, also where it keeps a descriptor (kvpool_sidecar.storage.landing.ledger).
"""

from __future__ import annotations

import os
import threading
import time
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple

from kvpool.errors import TierFullError
from kvpool.protocol import block
from kvpool.protocol.block import HEADER_BYTES
from kvpool_sidecar.blocks import file as blockfile
from kvpool_sidecar.blocks.events import DriveIncident
from kvpool_sidecar.resilience.worker import PeriodicTask
from kvpool_sidecar.storage.base import TransactionTarget, WriteTransaction
from kvpool_sidecar.storage.landing import memfd
from kvpool_sidecar.storage.landing.ledger import Share, WriteLedger, Writer
from kvpool_sidecar.system.leases import is_open_elsewhere

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvpool.protocol.block import BlockHeader
    from kvpool_sidecar.storage.local.store import LocalStore

__all__ = ["LandingZone", "Wanted"]

_PAGE = 4096
_MAX_AGE_S = 60.0  # unfinished writes are aborted after this time
_GRACE_S = 0.5  # an unfinished write gives way to others after this time
_PAUSE_S = 0.05
_INTERVAL_S = 1.0
_MAX_TENANTS = 512  # in /status


class Wanted(NamedTuple):
    """A block that a pod wants to store."""

    block_key: bytes
    payload_len: int


class _Stuck(NamedTuple):
    """A file that its holder has sealed against being freed."""

    owner: Writer
    size: int
    fd: int


class LandingZone(TransactionTarget):
    """Unfinished writes of all pods. Thread-safe.

    `limit`: places (one descriptor each) and bytes of memory. Committed blocks go to `local`.
    """

    def __init__(self, local: LocalStore, limit: Share, *, max_age_s: float = _MAX_AGE_S) -> None:
        self._local = local
        self._max_age_s = max_age_s
        self._changed = threading.Condition()  # guards what follows
        self._ledger = WriteLedger(limit)
        self._writes: dict[Writer, dict[WriteTransaction, None]] = {}  # oldest first
        self._owners: dict[WriteTransaction, Writer] = {}
        self._filled: set[WriteTransaction] = set()  # the sidecar computed the checksum
        self._stuck: list[_Stuck] = []
        self._sealing: dict[Writer, threading.Lock] = {}
        self._small_folios = 0
        self._task = PeriodicTask("landing", self.maintain, _INTERVAL_S, run_at_once=False)

    def start(self) -> None:
        """Start the maintenance."""
        self._task.start()

    def stop(self) -> None:
        """End the maintenance and all unfinished writes."""
        self._task.stop()
        for write in self._all():
            write.abort()
        with self._changed:
            stuck, self._stuck = self._stuck, []
        for one in stuck:
            os.close(one.fd)

    def begin(
        self, owner: Writer, wanted: Sequence[Wanted], deadline: float
    ) -> list[WriteTransaction | TierFullError | OSError | None]:
        """Begin a batch: for each block a transaction, None if it is present, or the error that refuses it.

        Waits for room in the zone until `deadline` (monotonic seconds). Reserves no space of a drive.
        """
        if self._local.holds_too_much(owner.tenant):
            return [TierFullError("the tenant keeps removed blocks open", block_key=w.block_key.hex()) for w in wanted]
        found: list[WriteTransaction | TierFullError | OSError | None] = []
        missing = []
        for n, one in enumerate(wanted):
            is_present = self._local.contains(one.block_key)
            found.append(None if is_present else self._refusal(one))
            if not is_present and found[n] is None:
                missing.append(n)
        accepted = self._reserve(owner, [_size(wanted[n]) for n in missing], deadline)
        for number, n in enumerate(missing):
            if number < accepted:
                found[n] = self._create(owner, wanted[n])
            else:
                found[n] = TierFullError("too much is being written", block_key=wanted[n].block_key.hex())
        return found

    def maintain(self) -> None:
        """Abort abandoned writes, and end the charge of stuck files that their holders have closed."""
        now = time.monotonic()
        for write in self._all():
            if now - write.created_at > self._max_age_s:
                self._give_up(write)
        with self._changed:
            stuck = list(self._stuck)
        for one in stuck:
            if not is_open_elsewhere(one.fd):
                with self._changed:
                    self._stuck.remove(one)
                    self._release(one.owner, one.size)
                os.close(one.fd)

    def status(self) -> dict[str, Any]:
        """For /status; `tenants` by tag, those with most bytes first. `held`: of removed blocks on the drives."""
        held = self._local.held_bytes()
        with self._changed:
            ledger = self._ledger
            shares = ledger.tenants()
            stuck = sum(one.size for one in self._stuck)
            small_folios = self._small_folios
        tenants = {
            tag: {**shares.get(tag, Share())._asdict(), "held_bytes": held.get(tag, 0)} for tag in {**shares, **held}
        }
        largest = sorted(tenants.items(), key=lambda item: item[1]["bytes"] + item[1]["held_bytes"], reverse=True)
        return {
            "limit_bytes": ledger.limit.bytes,
            "limit_places": ledger.limit.places,
            "bytes": sum(share.bytes for share in shares.values()),
            "places": sum(share.places for share in shares.values()),
            "stuck_bytes": stuck,
            "held_bytes": sum(held.values()),
            "small_folios": small_folios,
            "tenants": {tag.hex(): fields for tag, fields in largest[:_MAX_TENANTS]},
        }

    def seal(self, transaction: WriteTransaction) -> None:
        with self._changed:
            lock = self._sealing.setdefault(self._owners[transaction], threading.Lock())
        with lock:  # a pod that pins its pages makes its own connections wait, no others
            memfd.seal(transaction.reader, transaction.file_bytes)

    def fill_checksum(self, transaction: WriteTransaction, header: BlockHeader) -> BlockHeader:
        """Return the header with the checksum. `publish` writes it: the memory file cannot be changed any more."""
        with self._changed:
            self._filled.add(transaction)
        return replace(header, payload_sum=blockfile.payload_checksum(transaction.reader, header.payload_len))

    def publish(self, transaction: WriteTransaction, header: BlockHeader) -> bool:
        """Write the block to its drive. TierFullError if there is no space."""
        start = block.encode_header(header) if transaction in self._filled else b""

        def write(target: int) -> None:
            memfd.copy_to(target, transaction.reader, transaction.file_bytes, start)

        return self._local.import_block(transaction.block_key, transaction.payload_len, header, write)

    def release(self, transaction: WriteTransaction) -> None:
        size = transaction.reserved
        fd, transaction.reader = transaction.reader, -1
        is_free = memfd.reclaim(fd)
        with self._changed:
            owner = self._owners.pop(transaction)
            self._filled.discard(transaction)
            writes = self._writes.get(owner, {})
            writes.pop(transaction, None)
            if not writes:
                self._writes.pop(owner, None)
                self._sealing.pop(owner, None)
            if not is_free:
                self._stuck.append(_Stuck(owner, size, fd))
                return
            self._release(owner, size)
        os.close(fd)

    def _refusal(self, wanted: Wanted) -> TierFullError | OSError | None:
        try:
            self._local.require_room(*wanted)
        except (TierFullError, OSError) as e:
            return e
        return None

    def _reserve(self, owner: Writer, sizes: Sequence[int], deadline: float) -> int:
        """Charge as many of `sizes` as there is room for until `deadline`; return how many."""
        with self._changed:
            sizes = sizes[: self._ledger.count_alone(sizes)]
        while True:
            with self._changed:
                now = time.monotonic()
                count = self._ledger.count(owner, sizes)
                if count == len(sizes) or now >= deadline:
                    for size in sizes[:count]:
                        self._ledger.charge(owner, size)
                    return count
                victim = self._victim(owner, sizes[count], now)
                if victim is None:
                    self._changed.wait(min(deadline - now, _PAUSE_S))
            if victim is not None and not self._give_up(victim):
                time.sleep(_PAUSE_S)  # it is being committed

    def _victim(self, owner: Writer, size: int, now: float) -> WriteTransaction | None:
        """Return the oldest write of the first pod that gives way. The lock is held."""
        for pod in self._ledger.yielding(owner, size):
            for write in self._writes.get(pod, ()):
                if now - write.created_at >= _GRACE_S:
                    return write
                break
        return None

    def _create(self, owner: Writer, wanted: Wanted) -> WriteTransaction | OSError:
        """Create the memory file of a charged write."""
        reader = -1
        try:
            reader, has_large_folios = memfd.create(HEADER_BYTES + wanted.payload_len)
            writer = memfd.open_for_pod(reader)
        except OSError as e:
            if reader >= 0:
                os.close(reader)
            with self._changed:
                self._release(owner, _size(wanted))
            return e
        write = WriteTransaction(self, *wanted, writer, reader, reserved=_size(wanted))
        with self._changed:
            self._owners[write] = owner
            self._writes.setdefault(owner, {})[write] = None
            self._small_folios += write.file_bytes >= memfd.HUGE_BYTES and not has_large_folios
        return write

    def _give_up(self, write: WriteTransaction) -> bool:
        if not write.abort():
            return False
        self._local.events.emit(DriveIncident("writers_given_up", 1))
        return True

    def _release(self, owner: Writer, size: int) -> None:
        self._ledger.release(owner, size)
        self._changed.notify_all()

    def _all(self) -> list[WriteTransaction]:
        with self._changed:
            return [write for writes in self._writes.values() for write in writes]


def _size(wanted: Wanted) -> int:
    return -(-(HEADER_BYTES + wanted.payload_len) // _PAGE) * _PAGE
