"""Nodes as the drain logic needs them: whether each leaves, and which pools have a sidecar there.

Kubelets change their Node seldom (their heartbeat is a Lease), so a watch costs less than repeated lists.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvpool_operator.nodes.drain import NodeDrainSignal, drain_signal

if TYPE_CHECKING:
    from collections.abc import Iterable

    from kvpool_operator.k8s.client import Manifest, NamespacedName
    from kvpool_operator.k8s.reflector import Lister

__all__ = ["NodeCache", "slim_node"]


def slim_node(node: Manifest) -> Manifest:
    """The part of a Node that the drain logic reads."""
    metadata, spec = node["metadata"], node.get("spec") or {}
    return {
        "metadata": {k: metadata[k] for k in ("name", "uid", "resourceVersion") if k in metadata},
        "spec": {k: spec[k] for k in ("taints", "unschedulable") if k in spec},
    }


class NodeCache:
    """Drain signals from the watched nodes, and the nodes of each pool. For one event loop."""

    def __init__(self, nodes: Lister) -> None:
        self._nodes = nodes
        self._pools: dict[NamespacedName, frozenset[str]] = {}

    def get(self, node: str) -> NodeDrainSignal | None:
        """The node's signal; None if the watch has no such node."""
        manifest = self._nodes.get("", node)
        return drain_signal(manifest) if manifest is not None else None

    def set_pool_nodes(self, pool: NamespacedName, nodes: Iterable[str]) -> None:
        """The pool has sidecars on exactly these nodes."""
        served = frozenset(nodes)
        if served:
            self._pools[pool] = served
        else:
            self._pools.pop(pool, None)

    def pools_on(self, node: str) -> list[NamespacedName]:
        """Pools that have a sidecar on the node."""
        return [pool for pool, nodes in self._pools.items() if node in nodes]
