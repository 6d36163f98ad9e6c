"""One directory on one drive of this node: its files, its table of what is there, its share of the capacity."""

from __future__ import annotations

import contextlib
import errno
import heapq
import logging
import os
import stat
import threading
import time
from collections import Counter
from typing import TYPE_CHECKING, Protocol

from kvpool.errors import ConfigError, CorruptBlockError, TierFullError
from kvpool.protocol import block
from kvpool.protocol.block import HEADER_BYTES
from kvpool_sidecar import eviction as evict
from kvpool_sidecar.blocks import file as blockfile
from kvpool_sidecar.blocks.events import (
    BlockEvents,
    BlockReplicated,
    BlocksEvicted,
    BlocksRemoved,
    BlockStored,
    BlockUnreplicated,
    DriveIncident,
)
from kvpool_sidecar.eviction import Entry, EvictionConfig, PerTenant, decode_uses, encode_mtime_ns
from kvpool_sidecar.storage import layout as names
from kvpool_sidecar.storage.base import Block, Store, TenantUsage, TransactionTarget, Usage, WriteTransaction
from kvpool_sidecar.storage.local.directory import TierDirectory
from kvpool_sidecar.storage.local.health import DriveHealth
from kvpool_sidecar.storage.scan import prune, purge, remove_orphan, scan
from kvpool_sidecar.system import filesystem
from kvpool_sidecar.system import safe_open as safefs
from kvpool_sidecar.tenancy import limits as quota

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from kvpool.protocol.block import BlockHeader

__all__ = ["MAX_BLOCKS", "Drive", "PendingCopies"]

log = logging.getLogger(__name__)

MAX_BLOCKS = 1 << 20  # bounds the table's memory: about 300 bytes each
_MAX_PENDING = 1024
_KEPT_IN_QUARANTINE = 8
_EVICT_BATCH = 256
_PAGE = 4096
_MODE = 0o400
_SHARED_MODE = _MODE | stat.S_ISVTX
_LOOK_FURTHER = 3  # times, for blocks that can go at once
_SCAN_WAIT_S = 0.2
_PENDING_MAX_AGE_S = 60.0
_OVERGROWN = 1 << 20  # covers what file systems allocate ahead
_DRIVE_ERRORS = {errno.EIO, errno.EROFS, errno.ENXIO, errno.ENODEV, errno.EUCLEAN}
_NOT_A_BLOCK = {errno.ENOTDIR, errno.ELOOP}


class PendingCopies(Protocol):
    """Blocks whose copy to the shared tier is pending (kvpool_sidecar.replication.write_back)."""

    def dirty(self, keys: Sequence[bytes]) -> set[bytes]:
        """Return which of these blocks should be copied, if possible, before they are evicted."""

    def expedite(self, keys: Sequence[bytes]) -> None:
        """Copy these blocks next: they are evicted once they are copied."""


class Drive(Store, TransactionTarget):
    """See Store. `path` must belong to this user and to nobody else; it is made if it is missing.

    ConfigError if the directory cannot be used (kvpool_sidecar.storage.local.directory). `scan` must run once.
    """

    def __init__(
        self,
        name: str,
        path: str,
        limits: quota.CapacityLimits,
        *,
        pool_uid: str,
        read_path: str | None = None,
        events: BlockEvents | None = None,
        use_tmpfile: bool = True,
        policy: str = "PrefixAware",
        order: EvictionConfig | None = None,
        dedicated: str = "Ignore",
        node_files: tuple[str, ...] = filesystem.NODE_FILES,
        clock: Callable[[], float] | None = None,
        pending_max_age_s: float = _PENDING_MAX_AGE_S,
        read_headers: bool = False,
    ) -> None:
        self.name = name
        self._limits = limits
        self._events = events or BlockEvents()
        self.pending_copies: PendingCopies | None = None
        self._pending_max_age_s = pending_max_age_s
        self._lock = threading.Lock()

        self._order = order or EvictionConfig(policy)
        self._table = evict.create(self._order, limits)
        self._rebuild = False
        self.due = threading.Event()  # there is something to do for `maintain`
        self._always_reads_headers = read_headers
        self._clock = clock
        self._settled_at = float("-inf")
        self._expire_at = 0.0
        self._over_quota: Counter[bytes] = Counter()
        self._started_at, self._started = time.time(), time.monotonic()
        self._pending: set[WriteTransaction] = set()
        self._pending_bytes = 0
        self._quarantine_bytes = 0
        self._scanned = threading.Event()
        self._closed = False
        self._dir = TierDirectory(name, path, pool_uid, read_path=read_path, use_tmpfile=use_tmpfile)
        self.health = DriveHealth(name, self._dir.probe)
        self.generation = self._dir.pool_id.generation
        self.shares_filesystem = filesystem.is_shared(self._dir.blocks, node_files)
        if self.shares_filesystem and dedicated != "Ignore":
            try:
                filesystem.require(name, path, shared=dedicated == "Require")
            except ConfigError:
                self._dir.close()
                raise
            log.warning("tier %s is on the node's own file system: reserveFree is all that keeps it from filling", name)

    @property
    def scanned(self) -> bool:
        return self._scanned.is_set()

    def reconfigure(self, limits: quota.CapacityLimits, order: EvictionConfig) -> None:
        """Other limits, another order. Returns at once; `maintain` does what follows from it, and is due now."""
        with self._lock:
            self._rebuild |= evict.requires_rebuild(order, limits, self._order, self._limits)
            self._limits, self._order = limits, order
            self._settled_at, self._expire_at = time.monotonic(), 0.0
            if not self._rebuild:
                evict.reconfigure(self._table, order, limits)
        self.due.set()

    @property
    def settled(self) -> bool:
        """False while the table is still that of before the last `reconfigure`."""
        return not self._rebuild

    # -- reading

    def contains(self, key: bytes) -> bool:
        with self._lock:
            known = key in self._table
        if known or self.scanned:
            return known and not self.health.fenced
        try:
            os.stat(names.block_path(key), dir_fd=self._dir.blocks, follow_symlinks=False)
        except OSError:
            return False
        return True

    def open(self, key: bytes) -> Block | None:
        return self.open_many((key,))[0]

    def open_many(self, keys: Sequence[bytes]) -> list[Block | None]:
        if self.health.fenced:
            return [None] * len(keys)
        with self._lock:  # after the scan what is not in the table is not there: no need to ask the drive
            unknown = {key for key in keys if key not in self._table} if self.scanned else frozenset[bytes]()
        if len(unknown) == len(keys):
            return [None] * len(keys)
        with self.health:
            files = [(-1, 0) if key in unknown else self._open_file(key) for key in keys]
            now = self._wall()
            found: list[Block | None] = []
            cut_short: list[tuple[bytes, int]] = []
            due: list[tuple[bytes, int]] = []
            with self._lock:
                for key, (fd, payload_len) in zip(keys, files, strict=True):
                    if fd < 0:
                        found.append(None)
                        continue
                    known = self._table.get(key)
                    if known is not None and known.payload_len != payload_len:
                        cut_short.append((key, fd))
                        found.append(None)
                        continue
                    if self._table.touch(key, now):
                        due.append((key, self._table.uses(key)))
                    found.append(Block(fd, payload_len))
            for key, fd in cut_short:
                os.close(fd)
                self.quarantine(key)  # blocks never change: this one was cut short, or something put in its place
            for key, uses in due:
                when = encode_mtime_ns(now, uses)
                with contextlib.suppress(OSError):
                    os.utime(names.block_path(key), ns=(when, when), dir_fd=self._dir.blocks, follow_symlinks=False)
        return found

    def _open_file(self, key: bytes) -> tuple[int, int]:
        """A descriptor of the block's file and its payload's length; -1 if there is none."""
        try:
            fd = safefs.open_beneath(self._dir.read_blocks, names.block_path(key), os.O_RDONLY | os.O_NONBLOCK)
        except OSError as e:
            self._note(e)
            if e.errno == errno.ENOENT:
                self._vanished(key)
            elif e.errno in _NOT_A_BLOCK:
                self._forget(key)
            return -1, 0
        info = os.fstat(fd)
        if not stat.S_ISREG(info.st_mode) or info.st_size <= HEADER_BYTES:
            os.close(fd)
            self._forget(key)
            return -1, 0
        if not self.scanned:
            self._found(key, info)
        return fd, info.st_size - HEADER_BYTES

    def peek_fd(self, key: bytes) -> int:
        """A descriptor of the block's file, or -1. Unlike `open` this does not mark the block as used."""
        if self.health.fenced:
            return -1
        try:
            return safefs.open_beneath(self._dir.blocks, names.block_path(key), os.O_RDONLY | os.O_NONBLOCK)
        except OSError:
            return -1

    def peek(self, key: bytes) -> Block | None:
        fd = self.peek_fd(key)
        return None if fd < 0 else Block(fd, max(0, os.fstat(fd).st_size - HEADER_BYTES))

    def payload_len(self, key: bytes) -> int:
        """As the table knows it; 0 if the block is not here."""
        with self._lock:
            entry = self._table.get(key)
        return 0 if entry is None or self.health.fenced else entry.payload_len

    def headroom_bytes(self) -> int:
        """Bytes that fit below the low watermark and beside the file system's reserve; 0 or less: none."""
        if self.health.fenced or not self.scanned:
            return 0
        info = os.fstatvfs(self._dir.blocks)
        with self._lock:
            used = self._used_bytes() + self._pending_bytes
        return quota.headroom(used, info.f_bavail * info.f_frsize, info.f_blocks * info.f_frsize, self._limits)

    def used_since(self, idle_s: float) -> list[tuple[bytes, int, float]]:
        """Key, payload length and idle seconds of the blocks that were used within the last `idle_s`."""
        now = self._wall()
        with self._lock:
            found = self._table.used_since(now - idle_s)
        return [(key, payload_len, max(0.0, now - when)) for key, payload_len, when in found]

    def coldest_idle_s(self) -> float:
        """Seconds for which the coldest tenth of the blocks has not been used; 0: nothing is here."""
        now = self._wall()
        with self._lock:
            uses = self._table.last_uses()
        return max(0.0, now - heapq.nsmallest(len(uses) // 10 + 1, uses)[-1]) if uses else 0.0

    @property
    def pinned_bytes(self) -> int:
        """Bytes of blocks that go last, because they are used so often."""
        with self._lock:
            return self._table.pinned_bytes

    def usage(self) -> Usage:
        with self._lock:
            return Usage(self._limits.capacity, self._used_bytes(), len(self._table))

    def tenants(self) -> dict[bytes, TenantUsage]:
        """By tag, where it matters whose a block is; else nothing."""
        with self._lock:
            tables = self._table.policies() if isinstance(self._table, PerTenant) else {}
            return {
                tag: TenantUsage(table.total_bytes, len(table), self._over_quota[tag]) for tag, table in tables.items()
            }

    def keys(self) -> Iterator[tuple[bytes, int]]:
        with self._lock:
            snapshot = list(self._table)
        for key in snapshot:
            with self._lock:
                entry = self._table.get(key)
            if entry is not None:
                yield key, entry.payload_len

    def observe_sequence(self, keys: Sequence[bytes], tenant: bytes) -> None:
        """A prompt's blocks in order, as far as this drive is their place."""
        with self._lock:
            self._table.observe_sequence(keys, tenant)

    def mark_shared(self, key: bytes) -> None:
        """The file says so itself, by its sticky bit, which means nothing else for a file."""
        fd = self.peek_fd(key)
        if fd < 0:
            return
        try:
            os.fchmod(fd, _SHARED_MODE)
        except OSError as e:
            self._note(e)  # it is copied once more after a restart
        finally:
            os.close(fd)
        self._events.emit(BlockReplicated(key))

    # -- removing

    def delete(self, key: bytes) -> bool:
        with self._lock:
            known = self._table.discard(key)
        return self._unlink(key) or known

    def purge(self, keys: Sequence[bytes]) -> int:
        gone = [key for key in keys if self.delete(key)]
        if gone:
            self._events.emit(DriveIncident("purged", len(gone)))
            self._events.emit(BlocksRemoved(gone))
        return len(gone)

    def purge_quarantine(self, doomed: Callable[[BlockHeader | None], bool]) -> int:
        removed = purge(self._dir.quarantined, doomed)
        self._prune_quarantine()
        return removed

    def quarantine(self, key: bytes) -> bool:
        name = key.hex()
        with self._lock:
            self._table.discard(key)
        try:
            os.rename(names.block_path(key), name, src_dir_fd=self._dir.blocks, dst_dir_fd=self._dir.quarantined)
        except FileNotFoundError:
            return False
        except OSError as e:
            self._note(e)
            self._unlink(key)
        else:
            self._prune_quarantine()
        log.warning("block %s of tier %s is corrupt: quarantined", name[:16], self.name)
        self._events.emit(DriveIncident("quarantined", 1))
        self._events.emit(BlocksRemoved([key]))
        return True

    def _unlink(self, key: bytes) -> bool:
        try:
            os.unlink(names.block_path(key), dir_fd=self._dir.blocks)
        except OSError as e:
            self._note(e)
            return False
        return True

    def _vanished(self, key: bytes) -> None:
        """There was no file. A writer may have linked it since: its entry comes after its file, so look again."""
        with self._lock:
            if key not in self._table:
                return
            with contextlib.suppress(OSError):
                os.stat(names.block_path(key), dir_fd=self._dir.blocks, follow_symlinks=False)
                return
            self._table.discard(key)
        self._events.emit(BlocksRemoved([key]))

    def _forget(self, key: bytes) -> None:
        """What is there is no block: a link, a directory or an empty file in its place."""
        with self._lock:
            known = self._table.discard(key)
        if self._unlink(key):
            self._events.emit(DriveIncident("junk", 1))
        if known:
            self._events.emit(BlocksRemoved([key]))

    # -- writing

    def begin_write(self, key: bytes, payload_len: int) -> WriteTransaction:
        if not self._scanned.wait(_SCAN_WAIT_S):
            raise TierFullError("the drive is still being scanned", where=self.name)
        if self.health.fenced:
            raise TierFullError("the drive is fenced: it returned errors or did not answer", where=self.name)
        total = HEADER_BYTES + payload_len
        need = -(-total // _PAGE) * _PAGE
        try:
            with self.health:
                self._make_room(need)
                pending = self._new_pending(key, payload_len, need)
        except OSError as e:
            self._note(e)
            if e.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
                raise TierFullError("no space left", key=key.hex(), where=self.name) from None
            raise
        with self._lock:
            self._pending.add(pending)
        return pending

    def _new_pending(self, key: bytes, payload_len: int, need: int) -> WriteTransaction:
        fds: list[int] = []
        name = ""
        try:
            fd, name = self._dir.create_temporary()
            fds.append(fd)
            os.posix_fallocate(fd, 0, HEADER_BYTES + payload_len)
            fds.append(os.open(f"/proc/self/fd/{fd}", os.O_RDONLY | os.O_CLOEXEC))
        except OSError:
            for opened in fds:
                os.close(opened)
            if name:
                os.unlink(name, dir_fd=self._dir.tmp)
            with self._lock:
                self._pending_bytes -= need
            raise
        return WriteTransaction(self, key, payload_len, fds[0], fds[1], reserved=need, name=name)

    def seal(self, pending: WriteTransaction) -> None:
        blockfile.acquire_read_lease(pending.reader)

    def fill_checksum(self, pending: WriteTransaction, header: BlockHeader) -> BlockHeader:
        blockfile.release_read_lease(pending.reader)  # our own writing would break the lease
        done = super().fill_checksum(pending, header)
        blockfile.acquire_read_lease(pending.reader)
        return done

    def publish(self, pending: WriteTransaction, header: BlockHeader) -> bool:
        with self.health:
            try:
                os.fchmod(pending.reader, _MODE)
                if not self._dir.link(pending.reader, pending.name, names.block_path(pending.key)):
                    return False
            except OSError as e:
                self._note(e)
                raise
            info = os.fstat(pending.reader)
        with self._lock:
            self._table.add(pending.key, _entry(info, header))
        self._events.emit(BlockStored(pending.key, header))
        self._keep_to_quota(header.tenant_tag)
        return True

    def release(self, pending: WriteTransaction) -> None:
        with self._lock:
            if pending in self._pending:
                self._pending.discard(pending)
                self._pending_bytes -= pending.reserved
        if pending.name:
            with contextlib.suppress(OSError):
                os.unlink(pending.name, dir_fd=self._dir.tmp)
        super().release(pending)

    # -- space

    def _make_room(self, need: int) -> None:
        """Promise `need` bytes, evicting once for the quota and once for the file system. TierFullError if in vain."""
        with self._lock:
            used = self._used_bytes()
            over = quota.bytes_over_capacity(used, self._pending_bytes, need, self._limits)
            if over > used or need + self._pending_bytes > quota.pending_limit(self._limits.capacity):
                raise TierFullError("too much is being written for this capacity", where=self.name)
            if len(self._pending) >= _MAX_PENDING:
                raise TierFullError("too many blocks are being written", where=self.name)
        self._evict(over)
        if short := self._shortage(need):
            self._evict(short, "space")
            if self._shortage(need):
                raise TierFullError("the file system has no space to spare", where=self.name)
        with self._lock:
            if quota.bytes_over_capacity(self._used_bytes(), self._pending_bytes, need, self._limits):
                raise TierFullError("over capacity", where=self.name)
            self._pending_bytes += need

    def maintain(self) -> None:
        """Bring the tier down to its low watermark, leave the file system its reserve, give up forgotten writers."""
        self.due.clear()
        now = time.monotonic()
        with self._lock:
            late = [p for p in self._pending if now - p.created_at > self._pending_max_age_s or _overgrown(p)]
        for pending in late:
            if pending.abort():
                self._events.emit(DriveIncident("writers_given_up", 1))
        if not self.scanned:
            return
        if self._rebuild:
            self._rebuild_table()
        self._expire(now)
        self._keep_quotas()
        self._evict(self._shortage(0), "space")
        for _ in range(MAX_BLOCKS // _EVICT_BATCH):
            with self._lock:
                over = quota.bytes_over_watermark(self._used_bytes(), self._pending_bytes, self._limits)
                too_many = len(self._table) - self._limits.max_blocks
            if self._closed or not self._evict(over, at_least=too_many, may_wait=True):
                return

    def _used_bytes(self) -> int:
        return self._table.total_bytes + self._quarantine_bytes

    def _shortage(self, need: int) -> int:
        info = os.fstatvfs(self._dir.blocks)
        return quota.fs_shortfall(info.f_bavail * info.f_frsize, info.f_blocks * info.f_frsize, need, self._limits)

    def _evict(self, need: int, cause: str = "capacity", *, at_least: int = 0, may_wait: bool = False) -> int:
        """One batch, in the policy's order; how many blocks went. `may_wait`: for copies of those that have none."""
        if need <= 0 and at_least <= 0:
            return 0
        with self._lock:
            victims = self._table.pop_victims(need, _EVICT_BATCH, at_least=at_least)
        if dirty := self._dirty([key for key, _ in victims]):
            victims = self._spare(victims, dirty, need, at_least, may_wait=may_wait)
        return self._remove_all(victims, cause)

    def _spare(
        self, victims: list[tuple[bytes, Entry]], dirty: set[bytes], need: int, at_least: int, *, may_wait: bool
    ) -> list[tuple[bytes, Entry]]:
        """Victims that the shared tier has, for those it does not have; these are copied now.

        Unless `may_wait`, room comes first: what is missing is taken from those that will be lost then.
        """
        clean = [(key, entry) for key, entry in victims if key not in dirty]
        spared = [(key, entry) for key, entry in victims if key in dirty]
        for _ in range(_LOOK_FURTHER):
            short = need - sum(entry.size for _, entry in clean)
            few = at_least - len(clean)
            if short <= 0 and few <= 0:
                break
            with self._lock:
                more = self._table.pop_victims(short, _EVICT_BATCH, at_least=few)
            dirty = self._dirty([key for key, _ in more])
            clean += [(key, entry) for key, entry in more if key not in dirty]
            spared += [(key, entry) for key, entry in more if key in dirty]
        freed = sum(entry.size for _, entry in clean)
        while not may_wait and spared and (freed < need or len(clean) < at_least):
            freed += spared[0][1].size
            clean.append(spared.pop(0))
        with self._lock:
            for key, entry in reversed(spared):
                self._table.reinsert(key, entry)
        if spared and self.pending_copies is not None:
            self.pending_copies.expedite([key for key, _ in spared])
        return clean

    def _dirty(self, keys: Sequence[bytes]) -> set[bytes]:
        return set() if self.pending_copies is None else self.pending_copies.dirty(keys)

    def _keep_to_quota(self, tenant: bytes) -> int:
        """A tenant over its quota loses blocks of its own, before anybody else makes room for them. One batch."""
        with self._lock:
            room = self._limits.of(tenant).bytes
            if not isinstance(self._table, PerTenant) or not room:
                return 0
            victims = self._table.pop_victims_of(tenant, self._table.bytes_of(tenant) - room, _EVICT_BATCH)
        if removed := self._remove_all(victims, "quota"):
            self._events.emit(DriveIncident("over_quota", removed))
            with self._lock:
                self._over_quota[tenant] += removed
        return removed

    def _keep_quotas(self) -> None:
        """A quota may have become smaller since the tenant's last store."""
        for tenant in self.tenants():
            while not self._closed and self._keep_to_quota(tenant):
                pass

    def _expire(self, now: float) -> None:
        """Remove what was idle for too long or is too old. `now` is monotonic."""
        limits = self._limits
        every = (limits.of(b""), *limits.tenants.values())
        shortest = min((t for one in every for t in (one.idle_s, one.max_age_s) if t), default=0.0)
        if not shortest or now < self._expire_at:
            return
        self._expire_at = now + min(60.0, shortest / 10)
        wall = self._wall()
        with self._lock:
            late = evict.expired(self._table, limits, wall, now - self._settled_at)
        for start in range(0, len(late), _EVICT_BATCH):
            with self._lock:
                some = [(k, e) for k in late[start : start + _EVICT_BATCH] if (e := self._table.get(k)) is not None]
                for key, _ in some:
                    self._table.discard(key)
            self._events.emit(DriveIncident("expired", self._remove_all(some, "expired")))

    def _rebuild_table(self) -> None:
        """Another table with the same blocks, in the order of their last uses, as after a restart.

        It is made beside the one in use; what comes and goes meanwhile is noted there and made good at the end.
        """
        with self._lock:
            order, limits, self._rebuild = self._order, self._limits, False
            old = self._table
            old.journal = {}
            keys = list(old)
        found: list[tuple[bytes, Entry]] = []
        for start in range(0, len(keys), _EVICT_BATCH):
            with self._lock:
                some = [
                    (k, e, old.uses(k)) for k in keys[start : start + _EVICT_BATCH] if (e := old.get(k)) is not None
                ]
            found += [(k, self._attributed(k, e)._replace(uses=uses)) for k, e, uses in some]
            if self._closed:
                return
        found.sort(key=lambda item: item[1].persisted_at)
        table = evict.create(order, limits)
        for key, entry in found:
            table.add(key, entry)
        with self._lock:
            changed, old.journal = old.journal, None
            for key in changed:
                was, now = table.get(key), old.get(key)
                table.discard(key)
                if now is not None:
                    table.add(
                        key, now if was is None or now.tenant else now._replace(tenant=was.tenant, created=was.created)
                    )
            self._table = table
            if not self._rebuild:
                evict.reconfigure(table, self._order, self._limits)
        log.info("tier %s: %d blocks in the order of %s from now on", self.name, len(table), order.policy)

    def _attributed(self, key: bytes, entry: Entry) -> Entry:
        """With what the block says of itself, if that is not known yet and matters."""
        if entry.tenant or not self._reads_headers or (header := self._header_of(key)) is None:
            return entry
        return entry._replace(tenant=header.tenant_tag, created=min(header.created_ms / 1000, entry.persisted_at))

    @property
    def _reads_headers(self) -> bool:
        return self._always_reads_headers or self._limits.by_tenant or self._limits.by_age

    def _wall(self) -> float:
        """Unix seconds that go on evenly, whatever is done to the node's clock while this process runs."""
        return self._clock() if self._clock is not None else self._started_at + time.monotonic() - self._started

    def _remove_all(self, victims: list[tuple[bytes, Entry]], cause: str) -> int:
        """Remove their files; how many went. `cause`: see Events.evicted."""
        gone: list[bytes] = []
        for key, entry in victims:
            try:
                with self.health:
                    os.unlink(names.block_path(key), dir_fd=self._dir.blocks)
            except FileNotFoundError:
                pass
            except OSError as e:
                self._note(e)
                with self._lock:
                    self._table.reinsert(key, entry)
                continue
            gone.append(key)
        if gone:
            self._events.emit(DriveIncident("evicted", len(gone)))
            self._events.emit(BlocksEvicted(cause, len(gone)))
            self._events.emit(BlocksRemoved(gone))
        return len(gone)

    # -- start and end

    def scan(self) -> None:
        """Learn what is there; remove what is no block. Reads are served meanwhile, writes wait."""
        started = time.monotonic()
        for name in os.listdir(self._dir.tmp):
            if remove_orphan(self._dir.tmp, name):
                self._events.emit(DriveIncident("junk", 1))
        self._prune_quarantine()
        scan(self._dir.blocks, self._found, lambda: self._events.emit(DriveIncident("junk", 1)), lambda: self._closed)
        with self._lock:
            self._table.sort_by_last_use()
        self._scanned.set()
        usage = self.usage()
        seconds = time.monotonic() - started
        log.info("tier %s: %d blocks, %d bytes, scanned in %.2f s", self.name, usage.blocks, usage.used_bytes, seconds)

    def _found(self, key: bytes, info: os.stat_result) -> None:
        header = self._header_of(key) if self._reads_headers else None
        with self._lock:
            is_new = key not in self._table
            if is_new:
                self._table.add(key, _entry(info, header))
        if is_new and header is not None:
            self._events.emit(BlockStored(key, header))
        if is_new and not info.st_mode & stat.S_ISVTX:
            self._events.emit(BlockUnreplicated(key, info.st_size - HEADER_BYTES))
        elif is_new:
            self._events.emit(BlockReplicated(key))

    def _header_of(self, key: bytes) -> BlockHeader | None:
        """What a block of before this start says of itself; None if it cannot be read, which its reader will notice."""
        try:
            fd = safefs.open_beneath(self._dir.blocks, names.block_path(key), os.O_RDONLY | os.O_NONBLOCK)
        except OSError:
            return None
        try:
            return block.decode_header(os.pread(fd, HEADER_BYTES, 0))
        except (CorruptBlockError, OSError):
            return None
        finally:
            os.close(fd)

    def _prune_quarantine(self) -> None:
        kept = prune(self._dir.quarantined, _KEPT_IN_QUARANTINE)
        with self._lock:
            self._quarantine_bytes = kept

    def close(self) -> None:
        self._closed = True
        with self._lock:
            pending = list(self._pending)
        for p in pending:
            p.abort()
        self._dir.close()

    def _note(self, error: OSError) -> None:
        """Count an error of the drive itself: some of them in a short time fence it."""
        if error.errno not in _DRIVE_ERRORS:
            return
        self._events.emit(DriveIncident("io_error", 1))
        log.warning("tier %s: %s", self.name, error.strerror)
        self.health.record_error(error)


def _entry(info: os.stat_result, header: BlockHeader | None = None) -> Entry:
    tenant = header.tenant_tag if header is not None else b""
    size = max(info.st_blocks * 512, _PAGE)
    created = min(header.created_ms / 1000, info.st_mtime) if header is not None else 0.0
    return Entry(size, info.st_size - HEADER_BYTES, info.st_mtime, decode_uses(info.st_mtime_ns), tenant, created)


def _overgrown(pending: WriteTransaction) -> bool:
    """Has the writer made the file larger than it may be?"""
    try:
        return os.fstat(pending.reader).st_blocks * 512 > pending.reserved + _OVERGROWN
    except OSError:
        return False
