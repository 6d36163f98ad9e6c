"""What the cluster's nodes say, kept by a watch: whether each is to leave, and which pools that concerns.

Kubelets change their Node seldom (their heartbeat is a Lease), so a watch costs little where lists again and again
would cost much.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvpool_operator.nodes.drain import NodeDrainSignal, drain_signal

if TYPE_CHECKING:
    from collections.abc import Iterable

    from kvpool_operator.k8s.client import Manifest, NamespacedName

__all__ = ["NodeCache"]


class NodeCache:
    """For one event loop."""

    def __init__(self) -> None:
        self._nodes: dict[str, NodeDrainSignal] = {}
        self._pools: dict[NamespacedName, frozenset[str]] = {}

    def get(self, node: str) -> NodeDrainSignal | None:
        """None if nothing was told of it, or it is gone."""
        return self._nodes.get(node)

    def upsert(self, node: str, manifest: Manifest) -> NodeDrainSignal:
        """The node as it is now."""
        found = self._nodes[node] = drain_signal(manifest)
        return found

    def remove(self, node: str) -> None:
        """There is no such node any more."""
        self._nodes.pop(node, None)

    def set_pool_nodes(self, pool: NamespacedName, nodes: Iterable[str]) -> None:
        """The pool has sidecars on these nodes."""
        found = frozenset(nodes)
        if found:
            self._pools[pool] = found
        else:
            self._pools.pop(pool, None)

    def pools_on(self, node: str) -> list[NamespacedName]:
        """Pools that have a sidecar there."""
        return [pool for pool, nodes in self._pools.items() if node in nodes]
