"""Every reason that a condition of a KVCachePool or a KVCacheNode can have."""

from __future__ import annotations

from enum import StrEnum

__all__ = ["Reason"]


class Reason(StrEnum):
    """CamelCase words for programs; the messages beside them are for people."""

    # StorageReady
    ALL_NODES_READY = "AllNodesReady"
    NOT_CREATED = "NotCreated"
    NO_NODES = "NoNodes"
    NODES_NOT_READY = "NodesNotReady"
    PODS_REFUSED = "PodsRefused"
    DRIVES_FAILING = "DrivesFailing"
    SHARED_TIER_AWAY = "SharedTierAway"
    # IndexReady
    CONNECTED = "Connected"
    INDEX_NOT_RUNNING = "IndexNotRunning"
    NODES_NOT_CONNECTED = "NodesNotConnected"
    URL_NOT_USABLE = "UrlNotUsable"
    # TransportReady
    AS_ASKED = "AsAsked"
    NODES_DIFFER = "NodesDiffer"
    # InjectionReady
    INJECTING = "Injecting"
    DISABLED = "Disabled"
    WEBHOOK_DOWN = "WebhookDown"
    PODS_NOT_INJECTED = "PodsNotInjected"
    # SharedReuse
    SHARING = "Sharing"
    NO_ENGINES = "NoEngines"
    FINGERPRINTS_DIFFER = "FingerprintsDiffer"
    NO_REMOTE_TIER = "EngineHasNoRemoteTier"
    # UpgradeSafe
    KEEPS_CACHES = "KeepsCaches"
    FORMAT_UNKNOWN = "FormatUnknown"
    NOT_ANNOUNCED = "NotAnnounced"
    # Progressing
    UP_TO_DATE = "UpToDate"
    APPLYING = "Applying"
    ROLLING_OUT = "RollingOut"
    ROLL_STUCK = "RollStuck"
    PAUSED = "Paused"
    DELETING = "Deleting"
    DRY_RUN = "DryRun"
    # PreflightPassed
    NODES_PASSED = "NodesPassed"
    NODES_FAILED = "NodesFailed"
    NODES_SILENT = "NodesSilent"
    PREFLIGHT_RUNNING = "PreflightRunning"
    PREFLIGHT_SKIPPED = "PreflightSkipped"
    # Ready and DiskHealthy of a KVCacheNode
    NODE_GONE = "NodeGone"
    NO_SIDECAR = "NoSidecar"
    DRIVES_HEALTHY = "DrivesHealthy"
    # any
    SERVING = "Serving"
    NO_REPORTS = "NoReports"
    INVALID_SPEC = "InvalidSpec"
    REJECTED = "Rejected"
