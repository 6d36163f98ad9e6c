"""The events of a simulated pool: requests, loads, computing, stores, news in the index, failures."""

from __future__ import annotations

import heapq
import itertools
import random
from collections import defaultdict
from typing import TYPE_CHECKING, Any, NamedTuple

from kvpool.config import Deadlines, PeerConfig
from kvpool.protocol.wire import Tier
from kvpool_cli.planner.replay import TRACE_BLOCK
from kvpool_cli.simulator.node import ServiceQueue, SimulatedNode
from kvpool_cli.simulator.outcome import Outcome, SimulationCounts
from kvpool_cli.simulator.routers import make_router
from kvpool_cli.simulator.workload import reuse_bound
from kvpool_sidecar.index import replica_choice
from kvpool_sidecar.index.record import MAX_RECORDS

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from kvpool_cli.simulator.settings import PoolSettings
    from kvpool_cli.simulator.workload import SimulatedRequest

__all__ = ["PoolSimulator", "simulate"]

_LEASE_S = 15.0
_MAINTENANCE_S = 1.0  # half of the interval at which a sidecar checks its watermarks
_PROGRESS_EVERY = 256
_NONE: tuple[int, ...] = ()


class _Found(NamedTuple):
    """A block before the first miss. `source`: its index in the peers, or None."""

    key: bytes
    tier: Tier
    source: SimulatedNode | None


class _Job(NamedTuple):
    """A request on a node, in one of its lives. `prefix`: blocks that were loaded."""

    request: SimulatedRequest
    node: SimulatedNode
    life: int
    is_counted: bool
    prefix: int = 0


class PoolSimulator:
    """One run. Not thread-safe. The same requests and settings give the same result."""

    def __init__(
        self,
        settings: PoolSettings,
        requests: Sequence[SimulatedRequest],
        on_progress: Callable[[int, int], None] = lambda _done, _all: None,
    ) -> None:
        self.counts = SimulationCounts()
        self._settings = settings
        self._requests = requests
        self._on_progress = on_progress
        self._now = 0.0
        self._events: list[tuple[float, int, Callable[..., None], tuple[Any, ...]]] = []
        self._order = itertools.count()
        self._index: dict[bytes, list[int]] = {}
        self._shared: set[bytes] = set()
        self._shared_queue = ServiceQueue(settings.shared) if settings.shared else None
        self._nodes = [
            SimulatedNode(n, settings, lambda: self._now, self._on_removed) for n in range(1, settings.nodes + 1)
        ]
        self._alive = list(self._nodes)
        rng = random.Random(settings.seed)  # noqa: S311 - reproducible, not secret
        self._router = make_router(settings.router, rng, self._holders, TRACE_BLOCK)
        self._deadlines = Deadlines()
        self._connect_s = PeerConfig(1).connect_timeout_ms / 1000

    def run(self) -> Outcome:
        """Play all requests."""
        for outage in self._settings.outages:
            node = self._nodes[outage.node - 1]
            self._at(outage.at, self._fail, node, outage.seconds)
        counted_from = int(len(self._requests) * self._settings.warm_up)
        for n, request in enumerate(self._requests):
            if n % _PROGRESS_EVERY == 0:
                self._on_progress(n, len(self._requests))
            self._advance(request.at)
            self._now = max(self._now, request.at)
            self._arrive(request, n >= counted_from)
        self._advance(float("inf"))
        bound = reuse_bound(list(self._requests), TRACE_BLOCK, counted_from)
        span = self._requests[-1].at - self._requests[0].at if self._requests else 0.0
        by_node = tuple((node.requests, node.served_bytes, node.engine.busy) for node in self._nodes)
        written = sum(node.written_bytes for node in self._nodes)
        evicted = sum(node.evicted for node in self._nodes)
        return Outcome(self._settings, self.counts, bound, by_node, written, evicted, span)

    def _at(self, when: float, action: Callable[..., None], *arguments: object) -> None:
        heapq.heappush(self._events, (when, next(self._order), action, arguments))

    def _advance(self, until: float) -> None:
        while self._events and self._events[0][0] <= until:
            self._now, _, action, arguments = heapq.heappop(self._events)
            action(*arguments)

    def _arrive(self, request: SimulatedRequest, is_counted: bool) -> None:
        if not self._alive:
            self.counts.refused += is_counted
            return
        node = self._router.choose(request, self._alive, self._now)
        found, waited = self._look_up(node, request.keys)
        loaded, ready = self._load(node, found, is_counted)
        job = _Job(request, node, node.life, is_counted, loaded)
        self._at(ready + waited, self._compute, job)

    def _look_up(self, node: SimulatedNode, keys: Sequence[bytes]) -> tuple[list[_Found], float]:
        """Return the blocks before the first miss, and the seconds that failed peers cost."""
        node.observe(keys)
        found: list[_Found] = []
        waited = 0.0
        for key in keys:
            peer = None if key in node else self._replica(node, key)
            if peer is not None and not peer.alive:
                peer.avoided_by.add(node.number)
                waited, peer = self._connect_s, None
            if key in node:
                found.append(_Found(key, Tier.LOCAL, node))
            elif peer is not None and key in peer:
                found.append(_Found(key, Tier.PEER, peer))
            elif key in self._shared:
                found.append(_Found(key, Tier.SHARED, None))
            else:
                break
        tiers = [one.tier for one in found]
        node.break_even.hold_back(tiers, exhaustive=False)
        return found[: tiers.index(Tier.MISS) if Tier.MISS in tiers else len(found)], waited

    def _replica(self, node: SimulatedNode, key: bytes) -> SimulatedNode | None:
        """Return the peer to read from: the choice of the sidecar's location cache."""
        others = [
            number
            for number in self._index.get(key, _NONE)
            if number != node.number and (peer := self._nodes[number - 1]).listed and node.number not in peer.avoided_by
        ]
        if not others:
            return None
        lane = replica_choice.lane_of(key)
        return self._nodes[min(others, key=lambda n: replica_choice.score(node.number, n, lane)) - 1]

    def _load(self, node: SimulatedNode, found: Sequence[_Found], is_counted: bool) -> tuple[int, float]:
        """Read blocks; return how many came before the first late one, and when the last of these came."""
        size = self._settings.block_bytes
        deadline = self._now + max(
            self._deadlines.load_min_ms / 1000,
            3 * len(found) * size / (self._deadlines.load_expected_mb_s * 1e6),
        )
        ends = [self._read(node, one) for one in found]
        loaded = next((n for n, end in enumerate(ends) if end > deadline), len(ends))
        path = self.counts.path
        seconds: dict[Tier, tuple[int, float]] = defaultdict(lambda: (0, 0.0))
        for n, (one, end) in enumerate(zip(found, ends, strict=True)):
            count, last = seconds[one.tier]
            seconds[one.tier] = count + 1, max(last, min(end, deadline) - self._now)
            if is_counted and n < loaded:
                name = one.tier.name.lower()
                setattr(path, name, getattr(path, name) + size)
        if is_counted:
            self.counts.late_bytes += (len(ends) - loaded) * size
        for tier, (count, last) in seconds.items():
            node.break_even.loaded(tier, count * TRACE_BLOCK, last)
        is_late = loaded < len(ends)
        return loaded, deadline if is_late else max(ends, default=self._now)

    def _read(self, node: SimulatedNode, one: _Found) -> float:
        """Return when a block is there. Devices work at the same time: it takes as long as the slowest."""
        size = self._settings.block_bytes
        if one.source is None:
            assert self._shared_queue is not None  # noqa: S101 - nothing is in a shared tier that is not there
            return max(self._shared_queue.serve(self._now, size), node.receive.serve(self._now, size))
        drive = one.source.open(one.key)
        read = self._now if drive is None else drive.reads.serve(self._now, size)
        if one.source is node:
            return read
        one.source.served_bytes += size
        return max(read, one.source.send.serve(self._now, size), node.receive.serve(self._now, size))

    def _is_over(self, job: _Job) -> bool:
        """Begin a request again elsewhere if its node failed meanwhile."""
        if job.node.alive and job.node.life == job.life:
            return False
        self.counts.interrupted += job.is_counted
        self._arrive(job.request, job.is_counted)
        return True

    def _compute(self, job: _Job) -> None:
        if self._is_over(job):
            return
        tokens = max(0, job.request.tokens - job.prefix * TRACE_BLOCK)
        self._at(job.node.engine.serve(self._now, tokens), self._finish, job, tokens)

    def _finish(self, job: _Job, tokens: int) -> None:
        if self._is_over(job):
            return
        node, keys = job.node, job.request.keys
        node.requests += 1
        node.break_even.computed(tokens, tokens / node.engine.rate)
        missing = [key for key in keys[job.prefix :] if key not in node]
        if job.is_counted:
            counts = self.counts
            counts.requests += 1
            counts.tokens += job.request.tokens
            counts.found_tokens += job.request.tokens - tokens
            counts.computed_tokens += tokens
            counts.path.computed += (len(keys) - job.prefix) * self._settings.block_bytes
            counts.first_tokens.append(self._now - job.request.at)
        if missing:
            drives = [node.target(key) for key in missing]
            end = max(drive.writes.serve(self._now, self._settings.block_bytes) for drive in drives)
            self._at(end, self._store, node, node.life, missing, drives)

    def _store(self, node: SimulatedNode, life: int, keys: Sequence[bytes], drives: Sequence[Any]) -> None:
        if life != node.life:
            return
        stored = [key for key, drive in zip(keys, drives, strict=True) if node.store(key, drive)]
        self._at(self._now + self._settings.index_delay, self._announce, node.number, stored)
        if self._shared_queue is not None:
            copies = [key for key in stored if key not in self._shared]
            size = len(copies) * self._settings.block_bytes
            self._at(self._shared_queue.serve(self._now, size), self._shared.update, copies)
        if node.is_over_watermark and not node.is_maintenance_due:
            node.is_maintenance_due = True
            self._at(self._now + _MAINTENANCE_S, self._maintain, node)

    def _maintain(self, node: SimulatedNode) -> None:
        node.is_maintenance_due = False
        node.eviction.maintain()

    def _on_removed(self, node: SimulatedNode, keys: Sequence[bytes]) -> None:
        node.evicted += len(keys)
        self._at(self._now + self._settings.index_delay, self._withdraw, node.number, list(keys))

    def _announce(self, number: int, keys: Sequence[bytes]) -> None:
        for key in keys:
            holders = self._index.setdefault(key, [])
            if number not in holders:
                holders.append(number)
                del holders[:-MAX_RECORDS]

    def _withdraw(self, number: int, keys: Sequence[bytes]) -> None:
        for key in keys:
            holders = self._index.get(key)
            if holders is not None and number in holders:
                holders.remove(number)
                if not holders:
                    del self._index[key]

    def _holders(self, key: bytes) -> Sequence[int]:
        return self._index.get(key, _NONE)

    def _fail(self, node: SimulatedNode, seconds: float) -> None:
        if not node.alive:
            return
        node.alive = False
        node.life += 1
        self._alive = [one for one in self._nodes if one.alive]
        self._at(self._now + _LEASE_S, self._expire, node, node.life)
        if seconds != float("inf"):
            self._at(self._now + seconds, self._return, node)

    def _expire(self, node: SimulatedNode, life: int) -> None:
        if node.life == life and not node.alive:
            node.listed = False

    def _return(self, node: SimulatedNode) -> None:
        node.alive = node.listed = True
        node.avoided_by.clear()
        queues = (node.engine, node.receive, node.send, *(q for d in node.drives for q in (d.reads, d.writes)))
        for queue in queues:
            queue.free_at = self._now
        self._alive = [one for one in self._nodes if one.alive]


def simulate(
    settings: PoolSettings,
    requests: Sequence[SimulatedRequest],
    on_progress: Callable[[int, int], None] = lambda _done, _all: None,
) -> Outcome:
    """Run one simulation. `on_progress(played, requests)` is called now and then."""
    return PoolSimulator(settings, requests, on_progress).run()
