"""Stores of this node's clients: BEGIN in the landing zone, COMMIT to a drive.

Statuses are those of the wire protocol; messages are encoded in kvpool_sidecar.serving.messages.
"""

from __future__ import annotations

import collections
import logging
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple

from kvpool.errors import CorruptBlockError, RefusedError, TierFullError
from kvpool.protocol.wire import BeginStatus, CommitStatus
from kvpool_sidecar.blocks.file import Expect
from kvpool_sidecar.resilience.worker import BackgroundWorker
from kvpool_sidecar.storage.base import CommitOutcome
from kvpool_sidecar.storage.landing.ledger import Writer
from kvpool_sidecar.storage.landing.zone import Wanted

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvpool_sidecar.counters import Stats
    from kvpool_sidecar.serving.admission import LocalAdmission
    from kvpool_sidecar.serving.config_holder import ConfigHolder
    from kvpool_sidecar.serving.pod import Pod
    from kvpool_sidecar.storage.base import WriteTransaction
    from kvpool_sidecar.storage.landing.zone import LandingZone
    from kvpool_sidecar.tenancy.identity import Tenant

__all__ = ["Begun", "StoreService"]

_COMMIT_STATUS = {CommitOutcome.STORED: CommitStatus.STORED, CommitOutcome.ALREADY_PRESENT: CommitStatus.HAVE}
_REJECTIONS: dict[type[Exception], str] = {
    CorruptBlockError: "corrupt",
    RefusedError: "still-writable",
    TierFullError: "full",
}

log = logging.getLogger(__name__)

_HELPERS = 4  # threads that help connections to write large batches to the drives
_MAX_QUEUED = 64
_LARGE_BATCH = 8 << 20  # bytes


class Begun(NamedTuple):
    """Answer to one block of a BEGIN request. `pending` is set for WRITE only."""

    status: BeginStatus
    key: bytes
    pending: WriteTransaction | None = None


class StoreService:
    """Stores of all client connections. Thread-safe.

    `on_written(key, payload_len)` is called for each block that a client has stored.
    """

    def __init__(
        self,
        config: ConfigHolder,
        landing: LandingZone,
        stats: Stats,
        on_written: Callable[[bytes, int], None],
        admission: LocalAdmission,
    ) -> None:
        self._admission = admission
        self.stats = stats
        self._config = config
        self._landing = landing
        self._on_written = on_written
        self._helpers = BackgroundWorker[Callable[[], None]](
            "store", lambda drain: drain(), max_queued=_MAX_QUEUED, threads=_HELPERS
        )

    def start(self) -> None:
        """Start the shared threads."""
        self._helpers.start()

    def stop(self) -> None:
        """End the shared threads."""
        self._helpers.stop()

    def begin(self, pod: Pod, blocks: Sequence[tuple[bytes, int]], deadline: float) -> list[Begun]:
        """Begin writing blocks of (id, payload bytes). Waits for room until `deadline` (monotonic seconds)."""
        largest = self._config.current.cache.max_block_bytes
        begun = [Begun(BeginStatus.REFUSED, pod.tenant.block_key(block_id)) for block_id, _ in blocks]
        fitting = [n for n, (_, size) in enumerate(blocks) if 0 < size <= largest]
        if len(fitting) < len(blocks):
            self.stats.add("refused", "too-large", len(blocks) - len(fitting))
        fitting = [n for n in fitting if self._admission.admits(begun[n].key, blocks[n][1])]
        owner = Writer(pod.tenant.tag, pod.identity.uid)
        found = self._landing.begin(owner, [Wanted(begun[n].key, blocks[n][1]) for n in fitting], deadline)
        for n, one in zip(fitting, found, strict=True):
            if one is None:
                begun[n] = Begun(BeginStatus.HAVE, begun[n].key)
            elif isinstance(one, Exception):
                self.stats.add("refused", "full" if isinstance(one, TierFullError) else "io")
            else:
                begun[n] = Begun(BeginStatus.WRITE, begun[n].key, one)
        return begun

    def commit_all(
        self, tenant: Tenant, writes: Sequence[tuple[bytes, WriteTransaction]], *, fill: bool
    ) -> list[CommitStatus]:
        """Commit written blocks of (id, transaction), a large batch with the help of the shared threads."""
        statuses = [CommitStatus.REJECTED] * len(writes)
        todo = collections.deque(enumerate(writes))
        left = threading.Semaphore(0)

        def drain() -> None:
            while todo:
                try:
                    n, (block_id, pending) = todo.popleft()
                except IndexError:
                    return
                try:
                    statuses[n] = self.commit(tenant, block_id, pending, fill=fill)
                except Exception:
                    log.exception("a block was not stored because of a defect")
                finally:
                    left.release()

        if sum(pending.payload_len for _, pending in writes) >= _LARGE_BATCH:
            for _ in range(min(_HELPERS, len(writes) - 1)):
                self._helpers.submit(drain)
        drain()
        for _ in writes:  # helpers may still write the last blocks
            left.acquire()
        return statuses

    def commit(self, tenant: Tenant, block_id: bytes, pending: WriteTransaction, *, fill: bool) -> CommitStatus:
        """Store a written block. Returns REJECTED, counted by reason, if the file is not valid or does not fit."""
        try:
            outcome = pending.commit(Expect(block_id, tenant.tag), fill_checksum=fill)
        except (CorruptBlockError, RefusedError, TierFullError, OSError) as e:
            self.stats.add("rejected", _REJECTIONS.get(type(e), "io"))
            return CommitStatus.REJECTED
        if outcome is CommitOutcome.STORED:
            self.stats.add("stored", "blocks")
            self.stats.add("stored", "bytes", pending.payload_len)
            self._on_written(pending.block_key, pending.payload_len)
        return _COMMIT_STATUS[outcome]
