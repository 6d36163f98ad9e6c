"""The thread of each sidecar that takes part in housekeeping a shared tier: at each turn it says that it is there, and
sweeps if it holds the lease and it is time. The mount may hang at any call; then this thread hangs, and nothing else.
"""

from __future__ import annotations

import hashlib
import logging
import os
import threading
import time
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from kvpool.errors import KVPoolError
from kvpool_sidecar.sweep import folder
from kvpool_sidecar.sweep.folder import Tier, UnclaimedError
from kvpool_sidecar.sweep.lease import Lease
from kvpool_sidecar.sweep.ledger import Ledger, Stored, Summary, stored
from kvpool_sidecar.sweep.sweep import LeaseLostError, Pace, Sweep, SweepStoppedError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from kvpool_sidecar.stats import Stats
    from kvpool_sidecar.sweep.plan import Limits

__all__ = ["SharedSweeper", "Swept", "Timing"]

log = logging.getLogger(__name__)

_RETRY_S = 2.0
_MODEL_EVERY_S = 3600.0
_MOST_MODELS = 256


class Timing(NamedTuple):
    """`every_s`: between counts when nothing presses; `entries_per_s`: that a sweep looks at."""

    lease_s: float = 60.0
    every_s: float = 600.0
    entries_per_s: float = 2000.0

    @property
    def turn_s(self) -> float:
        return self.lease_s / 4


class Swept(Protocol):
    """The store whose directory is swept."""

    @property
    def stored(self) -> tuple[int, int]:
        """Bytes and blocks stored since the process started."""

    def tell_usage(self, used_bytes: int, blocks: int) -> None:
        """What lies there, this process' own included."""

    def tell_time(self, ahead_s: float) -> None:
        """How far the mount's clock is ahead of the monotonic one."""


class SharedSweeper:
    """`models()` gives fingerprints and names of models that engines named here; `removed(key)` is told of each block.

    While `available()` is False nothing is tried.
    """

    def __init__(
        self,
        path: str,
        pool_uid: str,
        limits: Limits,
        store: Swept,
        stats: Stats,
        *,
        node: str = "",
        timing: Timing = Timing(),  # noqa: B008 - never changed
        grace_s: float = 0.0,
        available: Callable[[], bool] = lambda: True,
        models: Callable[[], Iterable[tuple[bytes, str]]] = tuple,
        removed: Callable[[bytes], None] = lambda _key: None,
    ) -> None:
        self._path = path
        self._pool_uid = pool_uid
        self._limits = limits
        self._store = store
        self._stats = stats
        self._node = node
        self._timing = timing
        self._grace_s = grace_s
        self._available = available
        self._models = models
        self._removed = removed
        self._owner = os.urandom(8).hex()
        self._lease = Lease(timing.lease_s)
        self._ledger = Ledger()
        self._summary = Summary()
        self._ahead_s = 0.0
        self._renewed_at = 0.0
        self._not_before = 0.0
        self._noted: dict[bytes, float] = {}
        self._sweeping = False
        self._problem = ""
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="shared-sweep", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self, timeout_s: float = 2.0) -> None:
        """Give the lease back, in the middle of a sweep if need be."""
        self._stop.set()
        if self._thread.is_alive():
            self._thread.join(timeout_s)

    def status(self) -> dict[str, Any]:
        """For /status: JSON values; tenants by the tag of their blocks."""
        summary = self._summary
        return {
            "holder": self._lease.held,
            "term": self._lease.term if self._lease.held else 0,
            "sweeping": self._sweeping,
            "problem": self._problem,
            "swept_by": summary.node,
            "last_seconds": round(summary.seconds, 3),
            "last_s_ago": round(max(0.0, self._now() - summary.finished), 1) if summary.finished else None,
            "capacity_bytes": self._limits.capacity,
            "used_bytes": summary.used.bytes,
            "blocks": summary.used.blocks,
            "tenants": summary.tenants,
            "touched": self._stats.whole("touches").get("touched", 0),
            "removed": self._stats.whole("swept"),
            "removed_bytes": self._stats.whole("swept_bytes"),
        }

    def turn(self) -> None:
        """One turn, as the thread takes it. OSError, KVPoolError."""
        with Tier(self._path, self._pool_uid) as tier:
            told = self._say(tier)
            self._note_models(tier)
            was_held = self._lease.held
            held = self._lease.hold(tier.sweep, self._now())
            self._renewed_at = time.monotonic()
            self._problem = ""
            if not held:
                if was_held:
                    log.info("another sidecar sweeps the shared tier now")
                self._take_over(Summary.from_json(folder.read_note(tier.sweep, folder.SUMMARY)))
                return
            if not was_held:
                log.info("this sidecar sweeps the shared tier from now on (term %d)", self._lease.term)
                self._take_over(Summary.from_json(folder.read_note(tier.sweep, folder.SUMMARY)))
                self._ledger.rebase(self._summary.used, self._summary.marks)
            self._ledger.update(told)
            if self._is_due():
                self._sweep(tier, told)
            self._publish(tier)

    def give_up(self) -> None:
        """Leave: the next sidecar need not wait for the lease to run out. OSError, KVPoolError."""
        with Tier(self._path, self._pool_uid) as tier:
            self._lease.release(tier.sweep)
            folder.remove_note(tier.sweep, f"node-{self._owner}")

    def _run(self) -> None:
        while not self._stop.is_set():
            done = self._available() and self._attempt(self.turn)
            self._stop.wait(self._timing.turn_s if done else min(_RETRY_S, self._timing.turn_s))
        if self._available():
            self._attempt(self.give_up)

    def _attempt(self, work: Callable[[], None]) -> bool:
        try:
            work()
            return True
        except UnclaimedError:
            self._problem = ""
        except (KVPoolError, OSError) as e:
            if str(e) != self._problem:
                log.warning("housekeeping of the shared tier: %s", e)
            self._problem = str(e)
        except Exception as e:
            log.exception("housekeeping of the shared tier")
            self._problem = type(e).__name__
        return False

    def _now(self) -> float:
        """The mount's time."""
        return time.monotonic() + self._ahead_s

    def _say(self, tier: Tier) -> dict[str, Stored]:
        """Tell the others what was stored here, learn the time, and hear what they tell."""
        name = f"node-{self._owner}"
        now = folder.write_note(tier.sweep, name, {"stored": self._store.stored, "node": self._node})
        self._ahead_s = now - time.monotonic()
        self._store.tell_time(self._ahead_s)
        told: dict[str, Stored] = {}
        for name, owner, _ in folder.notes(tier.sweep, folder.NODE):
            try:
                told[owner] = stored(folder.read_note(tier.sweep, name).get("stored"))
            except (TypeError, ValueError):
                continue
        return told

    def _note_models(self, tier: Tier) -> None:
        now = time.monotonic()
        for fingerprint, model in self._models():
            if now - self._noted.get(fingerprint, float("-inf")) < _MODEL_EVERY_S or len(self._noted) >= _MOST_MODELS:
                continue
            name = f"model-{fingerprint.hex()}"
            if not folder.touch_note(tier.sweep, name):
                if sum(1 for _ in folder.notes(tier.sweep, folder.MODEL)) >= folder.MAX_NOTES:
                    return
                folder.write_note(tier.sweep, name, {"model": hashlib.sha256(model.encode()).hexdigest()})
            self._noted[fingerprint] = now

    def _take_over(self, summary: Summary) -> None:
        """Believe what the holder tells, and add what was stored here since."""
        self._summary = summary
        own, seen = Stored(*self._store.stored), summary.marks.get(self._owner, Stored())
        self._store.tell_usage(
            summary.used.bytes + max(0, own.bytes - seen.bytes), summary.used.blocks + max(0, own.blocks - seen.blocks)
        )

    def _is_due(self) -> bool:
        if time.monotonic() < self._not_before:
            return False
        since = self._now() - self._summary.finished
        if since < 0 or since >= max(self._timing.every_s, 2 * self._summary.seconds):
            return True
        return bool(self._limits.capacity) and self._ledger.used().bytes > self._limits.high

    def _sweep(self, tier: Tier, marks: dict[str, Stored]) -> None:
        started, self._sweeping = time.monotonic(), True
        sweep = Sweep(
            tier,
            self._limits,
            now=self._now,
            may=lambda: self._lease.still_held(tier.sweep),
            pace=Pace(self._timing.entries_per_s, lambda seconds: self._keep(tier, seconds)),
            gone=self._gone,
            expected=self._summary.used.blocks,
            grace_s=self._grace_s,
        )

        def coming() -> int:
            self._ledger.update(self._say(tier))
            return self._ledger.since(marks)

        try:
            done = sweep.run(coming)
        except LeaseLostError:
            log.warning("another sidecar has taken over the lease: sweep given up")
            return
        except SweepStoppedError:
            return
        finally:
            self._sweeping = False
        seconds = time.monotonic() - started
        self._not_before = time.monotonic() + min(seconds, self._timing.every_s)
        if done.removed_blocks:
            log.info(
                "swept the shared tier in %.1f s: %d blocks, %d bytes went; %d blocks, %d bytes are left",
                *(seconds, done.removed_blocks, done.removed_bytes, done.blocks, done.used),
            )
        self._ledger.rebase(Stored(done.used, done.blocks), marks)
        self._summary = Summary(
            finished=self._now(),
            seconds=seconds,
            tenants={tenant.hex(): size for tenant, size in done.tenants.items() if tenant},
        )

    def _keep(self, tier: Tier, seconds: float) -> bool:
        """Wait; keep the lease meanwhile. LeaseLostError."""
        if self._stop.wait(seconds) if seconds > 0 else self._stop.is_set():
            return True
        if time.monotonic() - self._renewed_at > self._timing.turn_s:
            if not self._lease.still_held(tier.sweep):
                raise LeaseLostError
            self._renewed_at = time.monotonic()
            self._ledger.update(self._say(tier))
            self._publish(tier)
        return False

    def _gone(self, reason: str, size: int, key: bytes | None) -> None:
        self._stats.add("swept", reason)
        self._stats.add("swept_bytes", reason, size)
        if key is not None:
            self._ledger.take(size)
            self._removed(key)

    def _publish(self, tier: Tier) -> None:
        if not self._lease.still_held(tier.sweep):
            return
        self._summary = self._summary._replace(used=self._ledger.used(), marks=self._ledger.latest, node=self._node)
        folder.write_note(tier.sweep, folder.SUMMARY, self._summary.to_json())
        self._store.tell_usage(*self._summary.used)
