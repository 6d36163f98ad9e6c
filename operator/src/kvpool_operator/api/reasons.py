"""Every reason that a condition of a KVCachePool or a KVCacheNode can have."""

from __future__ import annotations

from enum import StrEnum

__all__ = ["Reason"]


class Reason(StrEnum):
    """CamelCase words for programs; the messages beside them are for people."""

    # StorageReady
    ALL_NODES_READY = "AllNodesReady"
    NOT_CREATED = "NotCreated"
    NO_MATCHING_NODES = "NoMatchingNodes"
    NODES_NOT_READY = "NodesNotReady"
    POD_CREATION_FAILED = "PodCreationFailed"
    DRIVE_ERRORS = "DriveErrors"
    SHARED_TIER_UNAVAILABLE = "SharedTierUnavailable"
    # IndexReady
    CONNECTED = "Connected"
    INDEX_NOT_RUNNING = "IndexNotRunning"
    NODES_NOT_CONNECTED = "NodesNotConnected"
    INVALID_INDEX_CONFIG = "InvalidIndexConfig"
    # TransportReady
    PROTOCOL_MATCHED = "ProtocolMatched"
    PROTOCOL_MISMATCH = "ProtocolMismatch"
    # InjectionReady
    INJECTING = "Injecting"
    DISABLED = "Disabled"
    WEBHOOK_UNAVAILABLE = "WebhookUnavailable"
    PODS_NOT_INJECTED = "PodsNotInjected"
    # BlocksShareable
    FINGERPRINTS_MATCH = "FingerprintsMatch"
    NO_ENGINES_CONNECTED = "NoEnginesConnected"
    FINGERPRINTS_DIFFER = "FingerprintsDiffer"
    NO_REMOTE_TIER = "EngineHasNoRemoteTier"
    # RollingUpdateSafe
    CACHE_PRESERVED = "CachePreserved"
    FORMAT_UNKNOWN = "FormatUnknown"
    INDEX_NOT_SYNCED = "IndexNotSynced"
    # Progressing
    UP_TO_DATE = "UpToDate"
    APPLYING = "Applying"
    ROLLING_OUT = "RollingOut"
    ROLLOUT_STUCK = "RolloutStuck"
    PAUSED = "Paused"
    DELETING = "Deleting"
    DRY_RUN = "DryRun"
    # PreflightPassed
    NODES_PASSED = "NodesPassed"
    NODES_FAILED = "NodesFailed"
    NODES_UNRESPONSIVE = "NodesUnresponsive"
    PREFLIGHT_RUNNING = "PreflightRunning"
    PREFLIGHT_SKIPPED = "PreflightSkipped"
    # Ready and DiskHealthy of a KVCacheNode
    NODE_NOT_FOUND = "NodeNotFound"
    SIDECAR_NOT_FOUND = "SidecarNotFound"
    DRIVES_HEALTHY = "DrivesHealthy"
    # any
    SERVING = "Serving"
    STATUS_UNAVAILABLE = "StatusUnavailable"
    INVALID_SPEC = "InvalidSpec"
    REJECTED = "Rejected"
