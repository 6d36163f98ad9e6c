"""Keeps a pool's KVCacheNodes, and tells sidecars to move their blocks when their node is to leave.

Writes are few, so that hundreds of nodes with many pools do not flood the API server: numbers that grow are written
once in half a minute and node at most, and only while the operator as a whole writes less than a fixed rate; what flips
(a condition, a drain's state) goes first. What was written last is remembered, as digests, so nothing is read back but
at the operator's start and from time to time.

A node that is gone keeps its KVCacheNode as long as the index remembers it (spec.index.nodeExpiry): its drain's end
stays readable, and a node that comes back under its name goes on with it.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import logging
import time
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, Final

from kvpool_operator.api.duration import to_ms
from kvpool_operator.api.node import NODE_KIND, DrainStatus
from kvpool_operator.api.quantity import to_bytes
from kvpool_operator.desired import labels
from kvpool_operator.errors import OperatorError, RejectedError
from kvpool_operator.k8s.client import NamespacedName, ObjectRef
from kvpool_operator.nodes.drain import DrainPolicy, next_state, on_node_removed
from kvpool_operator.nodes.status import (
    RETAINED_FIELDS,
    comparable_status,
    lost_since,
    node_manifest,
    node_name,
    node_status,
    read_drain,
    stable_part,
)
from kvpool_operator.nodes.writer import write_node
from kvpool_operator.sidecars.admin_client import SidecarAddress
from kvpool_operator.times import rfc3339

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from kvpool_operator.api.v1alpha1 import KVCachePool
    from kvpool_operator.desired.inputs import PoolSecret
    from kvpool_operator.k8s.client import ApiClient, Manifest
    from kvpool_operator.nodes.drain import Command, NodeDrainSignal
    from kvpool_operator.nodes.node_cache import NodeCache
    from kvpool_operator.observe.snapshot import Sidecar, Snapshot
    from kvpool_operator.sidecars.admin_client import SidecarAdminClient

__all__ = ["NodeReconciler", "TokenBucket"]

log = logging.getLogger(__name__)

COUNTS_INTERVAL_S: Final = 30.0
READ_BACK_INTERVAL_S: Final = 300.0
REQUEUE_S: Final = 2.0
MAX_CONCURRENT_NODES: Final = 8
RATE_PER_S: Final = 20.0
BURST: Final = 100.0
COMMAND_RETRY_S: Final = 10.0
NOT_FOUND_TTL_S: Final = 30.0


class TokenBucket:
    """A bucket of writes: so many per second in the long run, a burst now and then."""

    def __init__(
        self, rate_per_s: float = RATE_PER_S, burst: float = BURST, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._rate = rate_per_s
        self._burst = burst
        self._clock = clock
        self._left = burst
        self._at = clock()

    def take(self, *, urgent: bool) -> bool:
        """One write. What is not urgent leaves half of the bucket to what is."""
        now = self._clock()
        self._left = min(self._burst, self._left + (now - self._at) * self._rate)
        self._at = now
        if self._left < (1 if urgent else self._burst / 2 + 1):
            return False
        self._left -= 1
        return True


@dataclass
class _LastWritten:
    """What was written last of one node: digests, not the text, for there may be very many."""

    digest: bytes = b""
    stable_digest: bytes = b""
    at: float = float("-inf")
    drain: DrainStatus = field(default_factory=DrainStatus)
    kept: dict[str, Any] = field(default_factory=dict)  # conditions, and numbers for when nothing is told
    lost: str = ""
    last_command: tuple[str, float] = ("", float("-inf"))


class NodeReconciler:
    """For all pools; for one event loop."""

    def __init__(
        self,
        cluster: ApiClient,
        book: NodeCache,
        commands: SidecarAdminClient,
        *,
        budget: TokenBucket | None = None,
        clock: Callable[[], float] = time.monotonic,
        now: Callable[[], datetime] = lambda: datetime.now(UTC),
    ) -> None:
        self._cluster = cluster
        self._book = book
        self._commands = commands
        self._clock = clock
        self._now = now
        self._budget = budget or TokenBucket(clock=clock)
        self._known: dict[NamespacedName, dict[str, _LastWritten]] = {}  # pool: node: what was written
        self._read_at: dict[NamespacedName, float] = {}
        self._uids: dict[NamespacedName, str] = {}
        self._absent: dict[str, float] = {}  # node: when it was not there

    def forget(self, namespace: str, name: str) -> None:
        """The pool is gone; its KVCacheNodes go with it."""
        key = NamespacedName(namespace, name)
        self._known.pop(key, None)
        self._read_at.pop(key, None)
        self._uids.pop(key, None)
        self._book.set_pool_nodes(key, ())

    async def reconcile(self, pool: KVCachePool, observed: Snapshot, secret: PoolSecret) -> float | None:
        """One look at the pool's nodes. In how many seconds the next one is due, if a drain is under way.

        Raises RetryableError where the API server does not answer.
        """
        key = NamespacedName(pool.metadata.namespace, pool.metadata.name)
        await self._read_back(pool, key)
        known = self._known[key]
        sidecars = {s.node: s for s in observed.sidecars if s.node}
        self._book.set_pool_nodes(key, sidecars)
        await self._gather(self._one(pool, secret, node, sidecars.get(node), known) for node in {*sidecars, *known})
        active = [k.drain.state for k in known.values() if k.drain.state in ("Requested", "Evacuating")]
        return REQUEUE_S if active else None

    async def _gather(self, jobs: Iterable[Any]) -> None:
        slots = asyncio.Semaphore(MAX_CONCURRENT_NODES)

        async def one(job: Any) -> None:
            async with slots:
                await job

        results = await asyncio.gather(*(one(job) for job in jobs), return_exceptions=True)
        for result in results:
            if isinstance(result, RejectedError):  # a report is not worth a pool's standstill
                log.warning("a KVCacheNode: %s", result)
            elif isinstance(result, BaseException):
                raise result

    async def _read_back(self, pool: KVCachePool, key: NamespacedName) -> None:
        """What is there: at first all that is known, later only whether somebody removed one or added one."""
        uid = pool.metadata.uid
        if self._uids.get(key) != uid:  # another pool of that name
            self._known.pop(key, None)
            self._uids[key] = uid
        first = key not in self._known
        if not first and self._clock() - self._read_at[key] < READ_BACK_INTERVAL_S:
            return
        found = await self._cluster.list(
            NODE_KIND, namespace=key.namespace, labels=labels.pool_selector(key.name), fresh=True
        )
        there: dict[str, Manifest] = {}
        for live in found:
            node = str((live.get("spec") or {}).get("node") or "")
            if live["metadata"]["name"] == node_name(key.name, node) and _owner(live) == uid:
                there[node] = live
        known = self._known.setdefault(key, {})
        for node in [n for n in known if n not in there]:
            known[node].digest = b""  # it is made anew
        for node, live in there.items():
            if node not in known:
                known[node] = _read(live)
            elif not first and not _is_as_wanted(live, node_manifest(pool, node)):
                known[node].digest = b""
        self._read_at[key] = self._clock()

    async def _one(
        self, pool: KVCachePool, secret: PoolSecret, node: str, sidecar: Sidecar | None, known: dict[str, _LastWritten]
    ) -> None:
        facts = await self._facts(node)
        mine = known.get(node) or _LastWritten()
        now = rfc3339(self._now())
        if sidecar is None and mine.lost and self._is_forgotten(pool, mine.lost):
            await self._cluster.delete(
                ObjectRef(NODE_KIND, pool.metadata.namespace, node_name(pool.metadata.name, node))
            )
            known.pop(node, None)
            self._absent.pop(node, None)
            return
        command: Command | None = None
        if facts is None:
            drain = on_node_removed(mine.drain, now)
        else:
            report = sidecar.report.drain if sidecar is not None and sidecar.report is not None else None
            drain, command = next_state(mine.drain, facts.leaving, _policy(pool), report, now)
        if drain.state != mine.drain.state:
            log.info("pool=%s node=%s: drain %s %s", pool.key, node, drain.state, drain.reason)
        mine.drain = drain
        known[node] = mine
        status = node_status(pool, sidecar, gone=facts is None, drain=drain, old=mine.kept, now=now)
        mine.kept = {k: status[k] for k in RETAINED_FIELDS}
        mine.lost = lost_since(status)
        await self._write(pool, node, status, mine)
        if command is not None and pool.spec.mode == "Enforce" and sidecar is not None:
            await self._tell(pool, secret, sidecar, command, mine)

    async def _facts(self, node: str) -> NodeDrainSignal | None:
        """None: there is no such node. Asked for only where the watch has not told yet."""
        known = self._book.get(node)
        if known is not None or self._clock() - self._absent.get(node, float("-inf")) < NOT_FOUND_TTL_S:
            return known
        live = await self._cluster.get(ObjectRef("Node", "", node))
        if live is not None:
            self._absent.pop(node, None)
            return self._book.upsert(node, live)
        self._absent[node] = self._clock()
        return None

    def _is_forgotten(self, pool: KVCachePool, since: str) -> bool:
        lost_s = (self._now() - datetime.fromisoformat(since)).total_seconds()
        return lost_s > to_ms(pool.spec.index.node_expiry) / 1000

    async def _write(self, pool: KVCachePool, node: str, status: Manifest, mine: _LastWritten) -> None:
        whole, quiet = _digest(comparable_status(status)), _digest(stable_part(status))
        if whole == mine.digest:
            return
        new = not mine.digest
        urgent = new or quiet != mine.stable_digest
        if not urgent and self._clock() - mine.at < COUNTS_INTERVAL_S:
            return
        if not self._budget.take(urgent=urgent):
            return
        try:
            await write_node(node_manifest(pool, node), status, self._cluster, new=new)
        except RejectedError as e:
            if e.status != 404:
                raise
            mine.digest = b""  # somebody removed it: it is made anew at the next look
            return
        mine.digest, mine.stable_digest, mine.at = whole, quiet, self._clock()

    async def _tell(
        self, pool: KVCachePool, secret: PoolSecret, sidecar: Sidecar, command: Command, mine: _LastWritten
    ) -> None:
        """Tell the sidecar once; again when it has not done so after a while."""
        if not sidecar.address or (
            mine.last_command[0] == command and self._clock() - mine.last_command[1] < COMMAND_RETRY_S
        ):
            return
        mine.last_command = (command, self._clock())
        params = {"bandwidth": to_bytes(pool.spec.nodes.drain.bandwidth)} if command == "evacuate" else {}
        name = f"{command}-{int(self._now().timestamp())}"  # doing it once more does no harm
        try:
            await self._commands.start(secret, SidecarAddress(sidecar.node, sidecar.address), name, command, params)
        except OperatorError as e:  # the drain's state says so, and it is told again
            log.warning("pool=%s node=%s: %s: %s", pool.key, sidecar.node, command, e)


def _policy(pool: KVCachePool) -> DrainPolicy:
    drain = pool.spec.nodes.drain
    return DrainPolicy(drain.policy == "Evacuate", to_ms(drain.timeout) / 1000)


def _read(live: Manifest) -> _LastWritten:
    """What an operator before this one wrote."""
    status = live.get("status") if isinstance(live.get("status"), dict) else {}
    assert status is not None  # noqa: S101
    try:
        whole, quiet = _digest(comparable_status(status)), _digest(stable_part(status))
    except (AttributeError, KeyError, TypeError):  # of another make: written anew
        whole, quiet = b"read", b""
    return _LastWritten(
        digest=whole,
        stable_digest=quiet,
        drain=read_drain(status),
        kept={k: status[k] for k in RETAINED_FIELDS if k in status},
        lost=lost_since(status),
    )


def _owner(live: Manifest) -> str:
    owners = live["metadata"].get("ownerReferences") or [{}]
    return str(owners[0].get("uid") or "")


def _is_as_wanted(live: Manifest, wanted: Manifest) -> bool:
    return bool(live.get("spec") == wanted["spec"])


def _digest(value: Any) -> bytes:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).digest()[:8]
