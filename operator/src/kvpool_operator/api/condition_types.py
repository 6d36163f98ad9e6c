"""Condition types of each kind with their meaning: `kubectl explain` and the reference pages print them."""

from __future__ import annotations

from typing import Final

__all__ = ["NODE_CONDITIONS", "OPERATION_CONDITIONS", "POOL_CONDITIONS", "TENANT_CONDITIONS"]

POOL_CONDITIONS: Final = {
    "Ready": "the sidecars serve and the index is available; wait for this condition",
    "StorageReady": "the sidecars of all nodes serve, and drives and shared tier return no errors",
    "IndexReady": "the index runs and the nodes are connected to it",
    "InjectionReady": "the webhook is available and selected pods are injected",
    "EnginesConnected": "every injected pod that is Ready is connected to the sidecar of its node",
    "TransportReady": "the nodes use the protocol that spec.transport requests",
    "PeersReachable": "each node has read over the data path from each of its peers",
    "BlocksShareable": "connected engines of one model have equal fingerprints and share blocks",
    "PreflightPassed": "the preflight checks of the nodes passed",
    "Progressing": "the operator is applying or rolling out a change",
    "RollingUpdateSafe": "replacing the sidecars now preserves the cached blocks",
}
NODE_CONDITIONS: Final = {
    "Ready": "the node's sidecar serves",
    "DiskHealthy": "no local tier of the node returns errors",
    "IndexConnected": "the node is connected to the index, so that other nodes find its blocks",
}
OPERATION_CONDITIONS: Final = {
    "Complete": "the operation has ended; the reason is its phase",
}
TENANT_CONDITIONS: Final = {
    "Accepted": "everything that the spec requests is possible; the message names what is not",
    "Enforced": "all nodes apply the spec",
}
