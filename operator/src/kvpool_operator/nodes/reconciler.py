"""Reconciles a pool's KVCacheNodes, and has sidecars evacuate the blocks of a node that leaves.

Hundreds of nodes with many pools must not flood the API server, so writes are throttled (see `nodes.writer`) and the
API is read back only at the operator's start and every `READ_BACK_INTERVAL_S`.

A KVCacheNode outlives its node for as long as the index remembers the node (spec.index.nodeExpiry): the end of its
drain stays readable, and a node that returns under its name continues with it.
"""

from __future__ import annotations

import asyncio
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
from kvpool_operator.k8s.rate_limiter import TokenBucket
from kvpool_operator.nodes.drain import DrainSettings, drain_signal, next_state, on_node_removed
from kvpool_operator.nodes.status import RETAINED_FIELDS, lost_since, node_manifest, node_name, node_status, read_drain
from kvpool_operator.nodes.writer import NodeWriter
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

__all__ = ["NodeReconciler"]

log = logging.getLogger(__name__)

READ_BACK_INTERVAL_S: Final = 300.0
REQUEUE_S: Final = 2.0
MAX_CONCURRENT_NODES: Final = 8
COMMAND_RETRY_S: Final = 10.0
NOT_FOUND_TTL_S: Final = 30.0


@dataclass
class _NodeState:
    """What the reconciler remembers of one node of one pool."""

    drain: DrainStatus = field(default_factory=DrainStatus)
    retained: dict[str, Any] = field(default_factory=dict)
    """Conditions, and the last reported counters for when the sidecar does not answer."""
    absent_since: str = ""
    last_command: tuple[str, float] = ("", float("-inf"))


class NodeReconciler:
    """Of all pools. For one event loop."""

    def __init__(
        self,
        cluster: ApiClient,
        nodes: NodeCache,
        commands: SidecarAdminClient,
        *,
        bucket: TokenBucket | None = None,
        clock: Callable[[], float] = time.monotonic,
        now: Callable[[], datetime] = lambda: datetime.now(UTC),
    ) -> None:
        self._cluster = cluster
        self._nodes = nodes
        self._commands = commands
        self._clock = clock
        self._now = now
        self._writer = NodeWriter(cluster, bucket or TokenBucket(clock=clock), clock)
        self._states: dict[NamespacedName, dict[str, _NodeState]] = {}
        self._read_at: dict[NamespacedName, float] = {}
        self._uids: dict[NamespacedName, str] = {}
        self._not_found_at: dict[str, float] = {}

    def forget(self, namespace: str, name: str) -> None:
        """The pool no longer exists; its KVCacheNodes are garbage-collected with it."""
        key = NamespacedName(namespace, name)
        self._forget_states(key)
        self._read_at.pop(key, None)
        self._uids.pop(key, None)
        self._nodes.set_pool_nodes(key, ())

    async def reconcile(self, pool: KVCachePool, observed: Snapshot, secret: PoolSecret) -> float | None:
        """Reconcile all nodes of the pool. Seconds until the next reconcile is due while a drain is in progress.

        Raises RetryableError if the API server does not answer.
        """
        key = NamespacedName(pool.metadata.namespace, pool.metadata.name)
        await self._read_back(pool, key)
        states = self._states[key]
        sidecars = {s.node: s for s in observed.sidecars if s.node}
        self._nodes.set_pool_nodes(key, sidecars)
        await self._gather(
            self._reconcile_node(pool, secret, node, sidecars.get(node), states) for node in {*sidecars, *states}
        )
        draining = any(s.drain.state in ("Requested", "Evacuating") for s in states.values())
        return REQUEUE_S if draining else None

    async def _gather(self, jobs: Iterable[Any]) -> None:
        slots = asyncio.Semaphore(MAX_CONCURRENT_NODES)

        async def one(job: Any) -> None:
            async with slots:
                await job

        results = await asyncio.gather(*(one(job) for job in jobs), return_exceptions=True)
        for result in results:
            if isinstance(result, RejectedError):  # a status is no reason to stop the pool's reconcile
                log.warning("a KVCacheNode was rejected: %s", result)
            elif isinstance(result, BaseException):
                raise result

    async def _read_back(self, pool: KVCachePool, key: NamespacedName) -> None:
        """Read the KVCacheNodes: their statuses at the start, later only whether somebody deleted or edited one."""
        uid = pool.metadata.uid
        if self._uids.get(key) != uid:  # another pool of that name
            self._forget_states(key)
            self._uids[key] = uid
        first = key not in self._states
        if not first and self._clock() - self._read_at[key] < READ_BACK_INTERVAL_S:
            return
        listed = await self._cluster.list(
            NODE_KIND, namespace=key.namespace, labels=labels.pool_selector(key.name), fresh=True
        )
        live_nodes: dict[str, Manifest] = {}
        for live in listed:
            node = str((live.get("spec") or {}).get("node") or "")
            if live["metadata"]["name"] == node_name(key.name, node) and _owner(live) == uid:
                live_nodes[node] = live
        states = self._states.setdefault(key, {})
        for node in states.keys() - live_nodes.keys():
            self._writer.invalidate(key, node)
        for node, live in live_nodes.items():
            if node not in states:
                status = live.get("status") if isinstance(live.get("status"), dict) else {}
                states[node] = _restore(status or {})
                self._writer.record(key, node, status or {})
            elif not first and live.get("spec") != node_manifest(pool, node)["spec"]:
                self._writer.invalidate(key, node)
        self._read_at[key] = self._clock()

    async def _reconcile_node(
        self, pool: KVCachePool, secret: PoolSecret, node: str, sidecar: Sidecar | None, states: dict[str, _NodeState]
    ) -> None:
        signal = await self._drain_signal(node)
        state = states.get(node) or _NodeState()
        now = rfc3339(self._now())
        if sidecar is None and state.absent_since and self._is_expired(pool, state.absent_since):
            await self._writer.delete(NamespacedName(pool.metadata.namespace, pool.metadata.name), node)
            states.pop(node, None)
            self._not_found_at.pop(node, None)
            return
        command: Command | None = None
        if signal is None:
            drain = on_node_removed(state.drain, now)
        else:
            report = sidecar.report.drain if sidecar is not None and sidecar.report is not None else None
            drain, command = next_state(state.drain, signal.reason, _policy(pool), report, now)
        if drain.state != state.drain.state:
            log.info("pool=%s node=%s: drain %s %s", pool.key, node, drain.state, drain.reason)
        state.drain = drain
        states[node] = state
        status = node_status(pool, sidecar, gone=signal is None, drain=drain, old=state.retained, now=now)
        state.retained = {k: status[k] for k in RETAINED_FIELDS}
        state.absent_since = lost_since(status)
        await self._writer.write(pool, node, status)
        if command is not None and pool.spec.mode == "Enforce" and sidecar is not None:
            await self._send(pool, secret, sidecar, command, state)

    async def _drain_signal(self, node: str) -> NodeDrainSignal | None:
        """The node's drain signal; None if the node does not exist.

        Only the API decides that a node does not exist: the watch may not have delivered a new one yet.
        """
        signal = self._nodes.get(node)
        if signal is not None or self._clock() - self._not_found_at.get(node, float("-inf")) < NOT_FOUND_TTL_S:
            return signal
        live = await self._cluster.get(ObjectRef("Node", "", node))
        if live is not None:
            self._not_found_at.pop(node, None)
            return drain_signal(live)
        self._not_found_at[node] = self._clock()
        return None

    def _is_expired(self, pool: KVCachePool, since: str) -> bool:
        absent_s = (self._now() - datetime.fromisoformat(since)).total_seconds()
        return absent_s > to_ms(pool.spec.index.node_expiry) / 1000

    def _forget_states(self, key: NamespacedName) -> None:
        for node in self._states.pop(key, {}):
            self._writer.forget(key, node)

    async def _send(
        self, pool: KVCachePool, secret: PoolSecret, sidecar: Sidecar, command: Command, state: _NodeState
    ) -> None:
        """Send the command once, and again if the sidecar has not carried it out after `COMMAND_RETRY_S`."""
        previous, sent_at = state.last_command
        if not sidecar.address or (previous == command and self._clock() - sent_at < COMMAND_RETRY_S):
            return
        state.last_command = (command, self._clock())
        params = {"bandwidth": to_bytes(pool.spec.nodes.drain.bandwidth)} if command == "evacuate" else {}
        name = f"{command}-{int(self._now().timestamp())}"  # commands are idempotent
        try:
            await self._commands.start(secret, SidecarAddress(sidecar.node, sidecar.address), name, command, params)
        except OperatorError as e:  # the drain's state shows it, and the command is sent again
            log.warning("pool=%s node=%s: %s was not sent: %s", pool.key, sidecar.node, command, e)


def _policy(pool: KVCachePool) -> DrainSettings:
    drain = pool.spec.nodes.drain
    return DrainSettings(drain.policy == "Evacuate", to_ms(drain.timeout) / 1000)


def _restore(status: Manifest) -> _NodeState:
    """Continue from a status that a former leader wrote."""
    return _NodeState(
        drain=read_drain(status),
        retained={k: status[k] for k in RETAINED_FIELDS if k in status},
        absent_since=lost_since(status),
    )


def _owner(live: Manifest) -> str:
    owners = live["metadata"].get("ownerReferences") or [{}]
    return str(owners[0].get("uid") or "")
