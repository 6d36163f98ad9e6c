"""Codes about nodes, blocks, storage, the index and the control plane. Pure data."""

from __future__ import annotations

from typing import Final

from kvpool_operator.api.findings.row import Row, Severity
from kvpool_operator.api.reasons import Reason

# 04: nodes and network
NODE_UNREACHABLE: Final = Row(
    "KVP0401",
    Severity.ERROR,
    "A node does not answer",
    "The node is not Ready, or its sidecar does not answer the operator.",
    "Blocks of the node are not found, and its engines run without the pool.",
    "Check the node, the sidecar's pod, and network policies between operator and sidecars.",
    (Reason.STATUS_UNAVAILABLE,),
)
PEERS_UNREACHABLE: Final = Row(
    "KVP0402",
    Severity.ERROR,
    "Nodes cannot read from each other",
    "A node cannot connect to a peer that is alive: network policy, firewall, route or MTU.",
    "Blocks of that peer are recomputed.",
    "Allow the peer port (TCP 7421) between the nodes of the pool.",
    (Reason.PEERS_UNREACHABLE,),
)
NETWORK_POLICY_BLOCKS: Final = Row(
    "KVP0403",
    Severity.ERROR,
    "A NetworkPolicy blocks the pool",
    "NetworkPolicies select the pool's pods, and none admits the port.",
    "Nodes do not read each other's blocks, or do not find them.",
    "Add a NetworkPolicy that admits the port between the pool's pods: `networkPolicy.enabled` of the chart.",
    (Reason.PEERS_UNREACHABLE, Reason.NODES_NOT_CONNECTED, Reason.STATUS_UNAVAILABLE),
)
CLOCKS_DIFFER: Final = Row(
    "KVP0404",
    Severity.WARNING,
    "The clock of a node is wrong",
    "The node's clock differs from the others by more than a minute.",
    "Certificates between nodes are refused above 5 minutes; blocks expire early or late.",
    "Synchronize the clock of the node by NTP.",
)
TRANSPORT_DIFFERS: Final = Row(
    "KVP0405",
    Severity.WARNING,
    "Nodes use another transport",
    "Nodes cannot use the protocol of `spec.transport.protocol`.",
    "Reads between nodes are slower than planned.",
    "Fix what the message names, or set `protocol: Auto`.",
    (Reason.PROTOCOL_MISMATCH,),
)
# 05: what happens to blocks
EVICTED_BEFORE_REUSE: Final = Row(
    "KVP0501",
    Severity.WARNING,
    "Blocks are evicted before they are used again",
    "The working set exceeds the local tiers.",
    "Prompts are recomputed that the pool had.",
    "Raise the capacity of the local tiers, add nodes or a shared tier, or pin prefixes.",
)
EXPIRED_BEFORE_REUSE: Final = Row(
    "KVP0502",
    Severity.WARNING,
    "Blocks expire before they are used again",
    "`spec.cache.ttl` is shorter than the pause between turns.",
    "Prompts are recomputed that the pool had.",
    "Raise `spec.cache.ttl`, or that of the KVCacheTenant.",
)
TENANT_OVER_QUOTA: Final = Row(
    "KVP0503",
    Severity.WARNING,
    "A tenant is over its quota",
    "The tenant stores more than its quota, so its own blocks are evicted.",
    "The tenant's prompts are recomputed that the pool had.",
    "Raise the quota of the KVCacheTenant or `spec.tenancy.defaultQuota`, or separate the tenant.",
)
LOADS_SLOWER: Final = Row(
    "KVP0504",
    Severity.WARNING,
    "Loading is slower than computing",
    "The engine computes the tokens faster than the tier delivers them.",
    "Hits make the first token later, or are left out.",
    "Use faster drives or network, or larger blocks; compare preflight's measurements.",
)
LOADS_FAIL: Final = Row(
    "KVP0505",
    Severity.WARNING,
    "Loads miss their deadline",
    "Nodes are overloaded, or their drives are too slow for `spec.failOpen`.",
    "Blocks that were found are recomputed.",
    "Check the load of the drives and the processor; raise `spec.failOpen.loadDeadline`.",
)
# 06: storage
DRIVE_ERRORS: Final = Row(
    "KVP0601",
    Severity.ERROR,
    "A drive returns errors",
    "A local tier returns I/O errors and is bypassed.",
    "The blocks on the drive are recomputed, and the node stores less.",
    "Replace or repair the drive.",
    (Reason.DRIVE_ERRORS,),
)
WRONG_MOUNT: Final = Row(
    "KVP0602",
    Severity.ERROR,
    "A directory is not on the expected file system",
    "A tier's directory is on the node's own file system, in memory, not mounted, or not shared by the nodes.",
    "The node's system disk fills, or nodes do not see each other's blocks.",
    "Mount the drive or the share at the tier's path on the node, and repeat the preflight checks.",
    (Reason.NODES_FAILED,),
)
SHARED_TIER_UNAVAILABLE: Final = Row(
    "KVP0603",
    Severity.ERROR,
    "The shared tier is unavailable",
    "Nodes cannot read or write the shared tier.",
    "Local and peer hits continue; blocks of the shared tier are recomputed.",
    "Check the mount, the credentials and the network of the shared tier.",
    (Reason.SHARED_TIER_UNAVAILABLE,),
)
PREFLIGHT_FAILED: Final = Row(
    "KVP0604",
    Severity.ERROR,
    "A node failed its preflight checks",
    "A check of the node failed; the message names it.",
    "The node's sidecar does not start, or works with a limitation.",
    "Apply the advice of the message.",
    (Reason.NODES_FAILED, Reason.NODES_UNRESPONSIVE),
)
NODES_NOT_READY: Final = Row(
    "KVP0605",
    Severity.ERROR,
    "A sidecar is not ready",
    "The pod of the sidecar does not start, or fails.",
    "Engines on the node run without the pool.",
    "Fix what the message names; `kubectl describe pod` of the sidecar has more.",
    (Reason.NODES_NOT_READY,),
)
NO_MATCHING_NODES: Final = Row(
    "KVP0606",
    Severity.ERROR,
    "No node matches the pool",
    "`spec.nodes` matches no node.",
    "The pool has no sidecars.",
    "Correct `spec.nodes.selector` and `spec.nodes.tolerations`.",
    (Reason.NO_MATCHING_NODES,),
)
SIDECARS_REJECTED: Final = Row(
    "KVP0607",
    Severity.ERROR,
    "The API server rejects the sidecars",
    "Pod Security, a LimitRange or a ResourceQuota of the pool's namespace rejects the sidecars' pods.",
    "Nodes have no sidecar.",
    "Label the namespace for Pod Security `privileged`, or raise the limit that the message names.",
    (Reason.POD_CREATION_FAILED,),
)
# 07: prefix index
INDEX_NOT_RUNNING: Final = Row(
    "KVP0701",
    Severity.ERROR,
    "The index does not run",
    "The managed index has no ready replica.",
    "Nodes find only their own and shared blocks.",
    "Check the pod of the index.",
    (Reason.INDEX_NOT_RUNNING,),
)
INDEX_NOT_CONNECTED: Final = Row(
    "KVP0702",
    Severity.ERROR,
    "A node is not connected to the index",
    "A sidecar cannot connect to the prefix index.",
    "The node finds only its own and shared blocks, and others do not find its blocks.",
    "Check the network from the node to the index, and network policies.",
    (Reason.NODES_NOT_CONNECTED,),
)
INDEX_FULL: Final = Row(
    "KVP0703",
    Severity.WARNING,
    "The index is full",
    "The memory of the index does not hold an entry for each block.",
    "Blocks that are not registered are found on their own node only.",
    "Raise `spec.index.managed.maxMemory`, or the memory of the external index.",
)
INVALID_INDEX_CONFIG: Final = Row(
    "KVP0704",
    Severity.ERROR,
    "The external index cannot be used",
    "The URL or a Secret of `spec.index.external` is unusable.",
    "Nothing is rolled out.",
    "Correct `spec.index.external`, or the Secret that the message names.",
    (Reason.INVALID_INDEX_CONFIG,),
)
# 09: control plane
INVALID_SPEC: Final = Row(
    "KVP0901",
    Severity.ERROR,
    "The spec is invalid",
    "A field of the spec is invalid.",
    "Nothing is changed until it is valid.",
    "Correct the field that the message names.",
    (Reason.INVALID_SPEC,),
)
REJECTED: Final = Row(
    "KVP0902",
    Severity.ERROR,
    "The API server rejected an object of the pool",
    "An object exists already, or a policy or missing right forbids it.",
    "The pool is not brought to its desired state.",
    "Fix what the message names.",
    (Reason.REJECTED,),
)
ROLLOUT_STUCK: Final = Row(
    "KVP0903",
    Severity.WARNING,
    "A rollout does not end",
    "New sidecars cannot take over from the old ones.",
    "The old sidecars continue to serve the earlier spec.",
    "Fix what the message names, or set `spec.nodes.update.surge: false`.",
    (Reason.ROLLOUT_STUCK,),
)
OPERATOR_UNAVAILABLE: Final = Row(
    "KVP0904",
    Severity.ERROR,
    "The operator does not run",
    "No replica of the operator is available, or the status of the pool is older than its spec.",
    "Changes are not applied, and the status is out of date.",
    "Check the Deployment `kvpool-operator`.",
)
TENANT_NOT_IN_EFFECT: Final = Row(
    "KVP0905",
    Severity.WARNING,
    "A part of a KVCacheTenant is not in effect",
    "The tenant claims a namespace of another tenant, or names a reader that does not exist.",
    "The namespace has other blocks and another quota than intended.",
    "Correct the KVCacheTenant as the message says.",
)
RIGHTS_MISSING: Final = Row(
    "KVP0906",
    Severity.INFO,
    "The command lacks a right",
    "Your account may not make a request that the diagnosis needs; the message names the right.",
    "The command shows the findings that the operator wrote to the status of the pool.",
    "Have your account bound to a ClusterRole with the right, such as that of `examples/diagnosis-rights.yaml`.",
)
