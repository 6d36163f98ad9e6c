"""Every reason of a condition and of an Event, with its meaning and the action that it calls for.

docs/reference/conditions.md is generated from here and from `condition_types`. Pure data.
"""

from __future__ import annotations

from enum import StrEnum
from typing import TYPE_CHECKING, Final, Self

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["REASONS", "EventReason", "Reason"]


class _Documented(StrEnum):
    """A word for programs, with its meaning and the action for people."""

    meaning: str
    action: str

    def __new__(cls, word: str, meaning: str, action: str = "") -> Self:
        member = str.__new__(cls, word)
        member._value_ = word
        member.meaning = meaning
        member.action = action
        return member


class Reason(_Documented):
    """Reasons of conditions."""

    # StorageReady
    ALL_NODES_READY = "AllNodesReady", "Every desired node has a sidecar that serves."
    NOT_CREATED = "NotCreated", "The operator is creating the sidecars' DaemonSet.", "Wait."
    NO_MATCHING_NODES = (
        "NoMatchingNodes",
        "No node matches `spec.nodes`.",
        "Correct `spec.nodes.selector` and `spec.nodes.tolerations`.",
    )
    NODES_NOT_READY = (
        "NodesNotReady",
        "A sidecar is not ready; the message names nodes and causes.",
        "Fix what the message names.",
    )
    POD_CREATION_FAILED = (
        "PodCreationFailed",
        "The API server rejects the sidecars' pods.",
        "Label the namespace for Pod Security, or raise the quota that the message names.",
    )
    DRIVE_ERRORS = (
        "DriveErrors",
        "A local tier returns I/O errors and is bypassed.",
        "Replace or repair the drive that the message names.",
    )
    SHARED_TIER_UNAVAILABLE = (
        "SharedTierUnavailable",
        "Nodes cannot use the shared tier; local and peer hits continue.",
        "Check the mount, the credentials, and the network of the shared tier.",
    )
    # IndexReady
    CONNECTED = "Connected", "Every sidecar that reports is connected to the prefix index."
    INDEX_NOT_RUNNING = (
        "IndexNotRunning",
        "The managed index has no ready replica; nodes find only local and shared blocks.",
        "Check the pod of the index.",
    )
    NODES_NOT_CONNECTED = (
        "NodesNotConnected",
        "Some sidecars cannot connect to the prefix index.",
        "Check the network from those nodes to the index.",
    )
    INVALID_INDEX_CONFIG = (
        "InvalidIndexConfig",
        "The external index cannot be used as configured; nothing is rolled out.",
        "Correct `spec.index.external` or the Secret that the message names.",
    )
    # TransportReady
    PROTOCOL_MATCHED = "ProtocolMatched", "Nodes use the requested transport."
    PROTOCOL_MISMATCH = (
        "ProtocolMismatch",
        "Nodes use another transport than `spec.transport.protocol` requests.",
        "Fix what the message names, or set `protocol: Auto`.",
    )
    # PeersReachable
    PEERS_VERIFIED = "PeersVerified", "Each node has read from each of its peers, or has none."
    PEERS_UNREACHABLE = (
        "PeersUnreachable",
        "Nodes cannot read from peers that are alive; the message names the pairs. Their blocks are recomputed there.",
        "Allow the peer port (7421) between the nodes of the pool: network policies, firewalls, routes, MTU.",
    )
    PEERS_NOT_VERIFIED = (
        "PeersNotVerified",
        "Not every node has probed each of its peers yet; a large pool takes minutes.",
        "Wait.",
    )
    # InjectionReady
    INJECTING = "Injecting", "The webhook injects new pods."
    DISABLED = "Disabled", "`spec.injection.enabled` is false.", "Enable it to inject new pods."
    WEBHOOK_UNAVAILABLE = (
        "WebhookUnavailable",
        "The webhook cannot be called; new pods start without the pool.",
        "Check the Deployment of the webhook and its certificate.",
    )
    NODE_AGENT_MISSING = (
        "NodeAgentMissing",
        "The node agent does not run on some nodes; pods that start there run without the pool.",
        "Install the DaemonSet `kvpool-agent` of the chart, or correct `agent.nodeSelector` and `agent.tolerations`.",
    )
    PODS_NOT_INJECTED = (
        "PodsNotInjected",
        "Opted-in pods started while the webhook was unavailable, or before their namespace or a pool selected them; "
        "they run without the pool.",
        "Recreate the pods, or set `spec.injection.watchdog: Restart`.",
    )
    ALL_PODS_SKIPPED = (
        "AllPodsSkipped",
        "Every opted-in pod was skipped: no pod uses the pool. `status.pods.skipReasons` counts the reasons.",
        "Read the Events of the pods; each has a sentence that says what to change.",
    )
    # EnginesConnected
    ENGINES_CONNECTED = "EnginesConnected", "Every injected pod that is Ready is connected."
    ENGINES_SILENT = (
        "EnginesSilent",
        "Injected pods are Ready for 2 minutes and not connected; the message names some, and why.",
        "Do what the message says; the log of the engine has lines with kvpool.",
    )
    ENGINES_STARTING = "EnginesStarting", "No engine is connected yet.", "Wait until the engines are Ready."
    NO_ENGINES_INJECTED = "NoEnginesInjected", "No injected pod with a client is running.", "Start an engine."
    # BlocksShareable
    FINGERPRINTS_MATCH = "FingerprintsMatch", "Engines of the same namespace and model share their blocks."
    NO_ENGINES_CONNECTED = "NoEnginesConnected", "No engine is connected.", "Start an engine with the opt-in label."
    FINGERPRINTS_DIFFER = (
        "FingerprintsDiffer",
        "Engines of the same namespace and model cannot share blocks; the message names the settings that differ.",
        "Run the engines with the same version and settings.",
    )
    NO_REMOTE_TIER = (
        "EngineHasNoRemoteTier",
        "An engine with Dynamo's KVBM keeps its blocks on its node.",
        "Run vLLM without KVBM to share blocks.",
    )
    # RollingUpdateSafe
    CACHE_PRESERVED = "CachePreserved", "A rolling update of the sidecars keeps all cached blocks."
    FORMAT_UNKNOWN = (
        "FormatUnknown",
        "Sidecars run a newer release whose blocks this release cannot read.",
        "Upgrade the operator again, or accept the misses.",
    )
    INDEX_NOT_SYNCED = (
        "IndexNotSynced",
        "Sidecars have not registered all their blocks in the prefix index yet.",
        "Wait before you roll out.",
    )
    EPHEMERAL_VOLUMES = "EphemeralVolumes", "Blocks are lost with a sidecar's pod.", "None, or add a shared tier."
    # Progressing
    UP_TO_DATE = "UpToDate", "The cluster matches the spec."
    APPLYING = "Applying", "The operator is applying changes."
    ROLLING_OUT = "RollingOut", "Nodes are being updated to the current spec."
    ROLLOUT_STUCK = (
        "RolloutStuck",
        "New sidecars cannot take over; the old ones continue to serve.",
        "Fix what the message names, or set `spec.nodes.update.surge: false`.",
    )
    PAUSED = "Paused", "`spec.mode` is Paused: the operator changes nothing.", "Set `spec.mode: Enforce` to resume."
    DELETING = "Deleting", "The pool is being deleted."
    DRY_RUN = "DryRun", "`spec.mode` is DryRun: the operator only reports what it would do."
    # PreflightPassed
    NODES_PASSED = "NodesPassed", "Every node passed its preflight checks."
    NODES_FAILED = (
        "NodesFailed",
        "Preflight checks failed on some nodes; the message names node, problem, and fix.",
        "Apply the fix that the message names.",
    )
    NODES_UNRESPONSIVE = (
        "NodesUnresponsive",
        "Some nodes did not report a preflight result.",
        "Check the preflight pods on those nodes.",
    )
    PREFLIGHT_RUNNING = "PreflightRunning", "Preflight checks are running or have not started.", "Wait."
    PREFLIGHT_SKIPPED = "PreflightSkipped", "`spec.preflight` is Skip."
    # Ready, DiskHealthy and IndexConnected of a KVCacheNode
    NODE_NOT_FOUND = "NodeNotFound", "The node no longer exists; this object is deleted later."
    SIDECAR_NOT_FOUND = "SidecarNotFound", "The node has no sidecar of this pool."
    DRIVES_HEALTHY = "DrivesHealthy", "No drive returns errors."
    # Accepted and Enforced of a KVCacheTenant
    ACCEPTED = "Accepted", "The whole spec is in effect."
    NAMESPACE_CONFLICT = (
        "NamespaceConflict",
        "An older KVCacheTenant already has some of the namespaces.",
        "Remove the namespaces from one of the two tenants.",
    )
    NAMESPACE_NOT_ALLOWED = (
        "NamespaceNotAllowed",
        "The pool does not admit some of the namespaces.",
        "Add the namespaces to the pool's `spec.injection.allowedNamespaces`.",
    )
    READER_NOT_FOUND = (
        "ReaderNotFound",
        "`sharing.readers` names a KVCacheTenant that does not exist in this pool.",
        "Correct the name.",
    )
    TOO_MANY_GRANTS = (
        "TooManyGrants",
        "More tenants grant read access to this one than it can read from.",
        "Remove grants.",
    )
    TOO_MANY_TENANTS = "TooManyTenants", "The pool has too many KVCacheTenants.", "Merge or delete tenants."
    POOL_NOT_FOUND = "PoolNotFound", "The KVCachePool does not exist in this namespace.", "Correct `spec.poolRef`."
    APPLIED = "Applied", "Every sidecar that reports applies this tenant's spec."
    # Complete of a KVCacheOperation: the phase
    PENDING = "Pending", "The operation has not started.", "See `status.message`."
    RUNNING = "Running", "Nodes are executing the operation."
    SUCCEEDED = "Succeeded", "Every node finished."
    FAILED = "Failed", "Some nodes did not finish; `status.failures` names them.", "See `status.failures`."
    CANCELLED = "Cancelled", "The operation or its pool was deleted."
    # several kinds
    SERVING = "Serving", "The sidecars serve and the index is available."
    STATUS_UNAVAILABLE = (
        "StatusUnavailable",
        "No sidecar has reported its status to the operator.",
        "Check the sidecars' pods and the network policy between operator and sidecars.",
    )
    INVALID_SPEC = (
        "InvalidSpec",
        "The spec is invalid; nothing is changed.",
        "Correct the field that the message names.",
    )
    REJECTED = "Rejected", "The API server rejected an object of the pool.", "Fix what the message names."


class EventReason(_Documented):
    """Reasons of Events."""

    # about a KVCachePool
    PHASE_CHANGED = "PhaseChanged", "The pool's `status.phase` changed; the message has the old and the new phase."
    CLEANUP_TIMED_OUT = (
        "CleanupTimedOut",
        "`spec.cleanupTimeout` passed before a deleted pool was cleaned up.",
        "Remove what the message names by hand.",
    )
    WIPE_SKIPPED = (
        "WipeSkipped",
        "The blocks of a deleted pool stay on its nodes.",
        "Remove the tiers' directories by hand.",
    )
    # about a Pod
    NOT_INJECTED = (
        "NotInjected",
        "The pod runs without the pool: the webhook was unavailable, or nothing selected it when it was created.",
        "Recreate the pod.",
    )
    INJECTION_SKIPPED = (
        "InjectionSkipped",
        "The webhook did not inject the pod; the message has the sentence. Also about the pod's controller.",
        "Do what the message says, and recreate the pod.",
    )
    ENGINE_WITHOUT_POOL = (
        "EngineWithoutPool",
        "The pod was injected, and its engine runs without the pool. Also about the pod's controller.",
        "Do what the message says; the log of the engine has lines with kvpool.",
    )
    POOL_NOT_FOUND = (
        "PoolNotFound",
        "The pod opted in to a KVCachePool that does not exist. Also about the pod's controller.",
        "Correct the annotation `kvpool.dev/pool`, or create the pool.",
    )
    INJECTION_LIMITED = "InjectionLimited", "The injected pod gets less than the pool's settings.", "Read the message."
    CLIENT_IMAGE_UNAVAILABLE = (
        "ClientImageUnavailable",
        "The image of the client cannot be pulled, so the engine of the pod does not start.",
        "Make the image available to the pod's namespace, or exclude the pod by `kvpool.dev/inject: disabled`.",
    )
    INJECTION_OUTDATED = (
        "InjectionOutdated",
        "The pod runs an older client or configuration of the pool; it works.",
        "Recreate the pod to update it.",
    )
    EVICTED_FOR_INJECTION = (
        "EvictedForInjection",
        "The operator evicted the pod so that its owner recreates it with the pool.",
    )


_STORAGE: Final = (
    Reason.ALL_NODES_READY,
    Reason.NOT_CREATED,
    Reason.POD_CREATION_FAILED,
    Reason.NO_MATCHING_NODES,
    Reason.NODES_NOT_READY,
    Reason.DRIVE_ERRORS,
    Reason.SHARED_TIER_UNAVAILABLE,
    Reason.DRY_RUN,
    Reason.PREFLIGHT_RUNNING,
    Reason.NODES_FAILED,
    Reason.NODES_UNRESPONSIVE,
)
_INDEX: Final = (
    Reason.CONNECTED,
    Reason.INVALID_INDEX_CONFIG,
    Reason.INDEX_NOT_RUNNING,
    Reason.STATUS_UNAVAILABLE,
    Reason.NODES_NOT_CONNECTED,
)
_NOT_PASSED: Final = (Reason.NODES_FAILED, Reason.NODES_UNRESPONSIVE, Reason.NO_MATCHING_NODES)
REASONS: Final[Mapping[str, Mapping[str, tuple[Reason, ...]]]] = {
    "KVCachePool": {
        "Ready": (Reason.SERVING, Reason.INVALID_SPEC, Reason.REJECTED, *_STORAGE[1:], *_INDEX[1:]),
        "StorageReady": _STORAGE,
        "IndexReady": _INDEX,
        "InjectionReady": (
            Reason.INJECTING,
            Reason.DISABLED,
            Reason.WEBHOOK_UNAVAILABLE,
            Reason.NODE_AGENT_MISSING,
            Reason.PODS_NOT_INJECTED,
            Reason.ALL_PODS_SKIPPED,
        ),
        "EnginesConnected": (
            Reason.ENGINES_CONNECTED,
            Reason.ENGINES_SILENT,
            Reason.ENGINES_STARTING,
            Reason.NO_ENGINES_INJECTED,
        ),
        "TransportReady": (Reason.PROTOCOL_MATCHED, Reason.PROTOCOL_MISMATCH, Reason.STATUS_UNAVAILABLE),
        "PeersReachable": (
            Reason.PEERS_VERIFIED,
            Reason.PEERS_UNREACHABLE,
            Reason.PEERS_NOT_VERIFIED,
            Reason.STATUS_UNAVAILABLE,
        ),
        "BlocksShareable": (
            Reason.FINGERPRINTS_MATCH,
            Reason.FINGERPRINTS_DIFFER,
            Reason.NO_REMOTE_TIER,
            Reason.NO_ENGINES_CONNECTED,
            Reason.STATUS_UNAVAILABLE,
        ),
        "PreflightPassed": (Reason.NODES_PASSED, *_NOT_PASSED, Reason.PREFLIGHT_RUNNING, Reason.PREFLIGHT_SKIPPED),
        "Progressing": (
            Reason.UP_TO_DATE,
            Reason.APPLYING,
            Reason.ROLLING_OUT,
            Reason.ROLLOUT_STUCK,
            Reason.PAUSED,
            Reason.DRY_RUN,
            Reason.DELETING,
            Reason.REJECTED,
            Reason.INVALID_INDEX_CONFIG,
            Reason.INVALID_SPEC,
            *_NOT_PASSED,
        ),
        "RollingUpdateSafe": (
            Reason.CACHE_PRESERVED,
            Reason.NODES_NOT_READY,
            Reason.FORMAT_UNKNOWN,
            Reason.INDEX_NOT_RUNNING,
            Reason.INDEX_NOT_SYNCED,
            Reason.EPHEMERAL_VOLUMES,
            Reason.STATUS_UNAVAILABLE,
        ),
    },
    "KVCacheNode": {
        "Ready": (
            Reason.SERVING,
            Reason.NODES_NOT_READY,
            Reason.SIDECAR_NOT_FOUND,
            Reason.NODE_NOT_FOUND,
            Reason.STATUS_UNAVAILABLE,
        ),
        "DiskHealthy": (Reason.DRIVES_HEALTHY, Reason.DRIVE_ERRORS, Reason.STATUS_UNAVAILABLE),
        "IndexConnected": (Reason.CONNECTED, Reason.NODES_NOT_CONNECTED, Reason.STATUS_UNAVAILABLE),
    },
    "KVCacheTenant": {
        "Accepted": (
            Reason.ACCEPTED,
            Reason.NAMESPACE_CONFLICT,
            Reason.NAMESPACE_NOT_ALLOWED,
            Reason.READER_NOT_FOUND,
            Reason.TOO_MANY_GRANTS,
            Reason.TOO_MANY_TENANTS,
            Reason.INVALID_SPEC,
            Reason.POOL_NOT_FOUND,
        ),
        "Enforced": (
            Reason.APPLIED,
            Reason.ROLLING_OUT,
            Reason.PAUSED,
            Reason.STATUS_UNAVAILABLE,
            Reason.INVALID_SPEC,
            Reason.TOO_MANY_TENANTS,
            Reason.POOL_NOT_FOUND,
        ),
    },
    "KVCacheOperation": {
        "Complete": (Reason.SUCCEEDED, Reason.FAILED, Reason.CANCELLED, Reason.RUNNING, Reason.PENDING),
    },
}
"""Reasons of each condition type of each kind, the reason of the healthy state first."""
