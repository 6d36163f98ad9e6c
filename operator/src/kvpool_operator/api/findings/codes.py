"""Every code of a finding: severity, cause, effect, fix, and the condition reasons that it explains.

docs/reference/findings.md is generated from here. A code keeps its meaning; a retired one is not used again. Pure data.
"""

from __future__ import annotations

from enum import StrEnum
from typing import TYPE_CHECKING, Final, Self

from kvpool_operator.api.findings import engines, pools
from kvpool_operator.api.reasons import EventReason, Reason

if TYPE_CHECKING:
    from kvpool_operator.api.findings.row import Row, Severity

__all__ = ["DOCS_PAGE", "Code"]

DOCS_PAGE: Final = "docs/reference/findings.md"


class Code(StrEnum):
    """Stable code of a kind of finding."""

    severity: Severity
    heading: str
    cause: str
    effect: str
    fix: str
    reasons: tuple[Reason, ...]
    events: tuple[EventReason, ...]

    def __new__(cls, row: Row) -> Self:
        member = str.__new__(cls, row.code)
        member._value_ = row.code
        member.severity = row.severity
        member.heading = row.heading
        member.cause = row.cause
        member.effect = row.effect
        member.fix = row.fix
        member.reasons = tuple(r for r in row.reasons if isinstance(r, Reason))
        member.events = tuple(r for r in row.reasons if isinstance(r, EventReason))
        return member

    @property
    def anchor(self) -> str:
        """Page and anchor of the code in the documentation."""
        return f"{DOCS_PAGE}#{self.value.lower()}"

    # 01: selection and injection of engine pods
    LABEL_ON_WORKLOAD = engines.LABEL_ON_WORKLOAD
    POD_NOT_INJECTED = engines.POD_NOT_INJECTED
    POD_SKIPPED = engines.POD_SKIPPED
    POOL_NOT_FOUND = engines.POOL_NOT_FOUND
    WEBHOOK_UNAVAILABLE = engines.WEBHOOK_UNAVAILABLE
    NAMESPACE_NOT_ALLOWED = engines.NAMESPACE_NOT_ALLOWED
    INJECTION_DISABLED = engines.INJECTION_DISABLED
    PODS_REJECTED = engines.PODS_REJECTED
    CLIENT_IMAGE_UNAVAILABLE = engines.CLIENT_IMAGE_UNAVAILABLE
    INJECTION_LIMITED = engines.INJECTION_LIMITED
    CLIENT_OUTDATED = engines.CLIENT_OUTDATED
    NODE_AGENT_MISSING = engines.NODE_AGENT_MISSING
    # 02: whether engines share blocks
    HASHES_DIFFER = engines.HASHES_DIFFER
    FINGERPRINTS_DIFFER = engines.FINGERPRINTS_DIFFER
    CHUNKS_DIFFER = engines.CHUNKS_DIFFER
    ENGINE_SHARES_NOTHING = engines.ENGINE_SHARES_NOTHING
    NO_REMOTE_TIER = engines.NO_REMOTE_TIER
    PROMPTS_NEVER_FOUND = engines.PROMPTS_NEVER_FOUND
    STORED_UNDER_OTHER_FINGERPRINT = engines.STORED_UNDER_OTHER_FINGERPRINT
    # 03: connection of engines
    ENGINE_REFUSED = engines.ENGINE_REFUSED
    ENGINE_SILENT = engines.ENGINE_SILENT
    VERSIONS_DIFFER = engines.VERSIONS_DIFFER
    NO_SIDECAR_ON_NODE = engines.NO_SIDECAR_ON_NODE
    ENGINE_UNTESTED = engines.ENGINE_UNTESTED
    # 04: nodes and network
    NODE_UNREACHABLE = pools.NODE_UNREACHABLE
    PEERS_UNREACHABLE = pools.PEERS_UNREACHABLE
    NETWORK_POLICY_BLOCKS = pools.NETWORK_POLICY_BLOCKS
    CLOCKS_DIFFER = pools.CLOCKS_DIFFER
    TRANSPORT_DIFFERS = pools.TRANSPORT_DIFFERS
    # 05: what happens to blocks
    EVICTED_BEFORE_REUSE = pools.EVICTED_BEFORE_REUSE
    EXPIRED_BEFORE_REUSE = pools.EXPIRED_BEFORE_REUSE
    TENANT_OVER_QUOTA = pools.TENANT_OVER_QUOTA
    LOADS_SLOWER = pools.LOADS_SLOWER
    LOADS_FAIL = pools.LOADS_FAIL
    # 06: storage
    DRIVE_ERRORS = pools.DRIVE_ERRORS
    WRONG_MOUNT = pools.WRONG_MOUNT
    SHARED_TIER_UNAVAILABLE = pools.SHARED_TIER_UNAVAILABLE
    PREFLIGHT_FAILED = pools.PREFLIGHT_FAILED
    NODES_NOT_READY = pools.NODES_NOT_READY
    NO_MATCHING_NODES = pools.NO_MATCHING_NODES
    SIDECARS_REJECTED = pools.SIDECARS_REJECTED
    # 07: prefix index
    INDEX_NOT_RUNNING = pools.INDEX_NOT_RUNNING
    INDEX_NOT_CONNECTED = pools.INDEX_NOT_CONNECTED
    INDEX_FULL = pools.INDEX_FULL
    INVALID_INDEX_CONFIG = pools.INVALID_INDEX_CONFIG
    # 09: control plane
    INVALID_SPEC = pools.INVALID_SPEC
    REJECTED = pools.REJECTED
    ROLLOUT_STUCK = pools.ROLLOUT_STUCK
    OPERATOR_UNAVAILABLE = pools.OPERATOR_UNAVAILABLE
    TENANT_NOT_IN_EFFECT = pools.TENANT_NOT_IN_EFFECT
    RIGHTS_MISSING = pools.RIGHTS_MISSING
