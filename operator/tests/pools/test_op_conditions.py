"""Policy chains of a pool's conditions: one test for each check, and that the documented reasons are those used."""

from __future__ import annotations

import ast
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from op_samples import pool, pool_manifest
from op_status_samples import GOOD, observed

import kvpool_operator
from kvpool_operator.api.condition_types import (
    NODE_CONDITIONS,
    OPERATION_CONDITIONS,
    POOL_CONDITIONS,
    TENANT_CONDITIONS,
)
from kvpool_operator.api.conditions import Condition, Verdict, find, first_verdict, with_verdicts
from kvpool_operator.api.node import DrainStatus
from kvpool_operator.api.pool.status import NodesStatus
from kvpool_operator.api.reasons import REASONS, EventReason, Reason
from kvpool_operator.nodes.status import node_status
from kvpool_operator.observe.engine_connections import EngineConnections, SilentPod
from kvpool_operator.observe.engine_pods import EnginePod, EnginePods
from kvpool_operator.observe.fingerprints import FingerprintGroup
from kvpool_operator.observe.snapshot import Sidecar, Snapshot, Webhook
from kvpool_operator.pools.conditions import (
    CHAINS,
    ConditionInput,
    ReconcileOutcome,
    connectivity,
    engines,
    preflight,
    ready,
    rollout,
    storage,
)
from kvpool_operator.preflight.gate import PreflightResult
from kvpool_operator.preflight.results import Finding
from kvpool_operator.sidecars.status import PeerReport, UnreachablePeer

SOURCE = Path(kvpool_operator.__file__).parent
EMPTY = Snapshot(raw=pool_manifest())
ALL_READY = NodesStatus(desired=2, ready=2, updated=2)
FAILED = PreflightResult(
    "Held", is_open=False, nodes=2, passed=1, failed=1, findings=(Finding("Directory", "Fail", "full", node="a"),)
)
INJECTED = EnginePod("team", "engine", "uid-1", "injected")
UNREACHABLE = PeerReport(failed=1, unreachable=(UnreachablePeer("node-0", "timeout"),))
GROUPS = (
    FingerprintGroup("d1", "vllm", "llama", 1, {"kv_dtype": "1"}, ("team/a",), (), 1, 0),
    FingerprintGroup("d2", "vllm", "llama", 1, {"kv_dtype": "2"}, ("team/b",), (), 1, 0),
)


IN_VOLUMES = {
    "name": "nvme",
    "local": {"volumeClaimTemplate": {"spec": {"resources": {"requests": {"storage": "1Gi"}}}}},
}


def subject(
    snapshot: Snapshot | None = None,
    nodes: NodesStatus = ALL_READY,
    outcome: ReconcileOutcome | None = None,
    groups: tuple[FingerprintGroup, ...] = (),
    **spec: Any,
) -> ConditionInput:
    return ConditionInput(pool(**spec), snapshot or observed(), nodes, outcome or ReconcileOutcome(), groups)


def with_report(**kwargs: Any) -> Snapshot:
    return observed(sidecars=(Sidecar("node-0", True, "", GOOD), Sidecar("node-1", True, "", replace(GOOD, **kwargs))))


def no_redis() -> Snapshot:
    snapshot = observed()
    return replace(snapshot, objects={r: o for r, o in snapshot.objects.items() if r.kind != "StatefulSet"})


def outdated_daemonset() -> Snapshot:
    snapshot = observed()
    for manifest in snapshot.objects.values():
        if manifest["kind"] == "DaemonSet":
            manifest["metadata"]["generation"] = 2
    return snapshot


def deleted_pool() -> ConditionInput:
    i = subject(outcome=ReconcileOutcome(waiting="the wipe"))
    metadata = i.pool.metadata.model_copy(update={"deletion_timestamp": "2026-11-20T10:00:00Z"})
    return replace(i, pool=i.pool.model_copy(update={"metadata": metadata}))


def gate(state: str, **kwargs: Any) -> ReconcileOutcome:
    return ReconcileOutcome(preflight=PreflightResult(state, is_open=kwargs.pop("is_open", False), **kwargs))


STUCK = observed(sidecars=(Sidecar("node-0", True, "", GOOD, successor_problem="no such image"),), updated=1)
SOME_UPDATED = NodesStatus(desired=2, ready=2, updated=1)
UNREPORTED = observed(sidecars=(Sidecar("node-0", True), Sidecar("node-1", True)))

CASES: list[tuple[Any, ConditionInput, str, str, str]] = [
    # StorageReady
    (storage.not_created, subject(EMPTY), "False", "NotCreated", "being created"),
    (storage.not_created, subject(EMPTY, mode="DryRun"), "False", "DryRun", "no sidecars are created"),
    (storage.not_created, subject(EMPTY, outcome=ReconcileOutcome(preflight=FAILED)), "False", "NodesFailed", "full"),
    (storage.status_outdated, subject(outdated_daemonset()), "False", "NotCreated", "being created"),
    (storage.pods_rejected, subject(observed(rejection="quota")), "False", "PodCreationFailed", "quota"),
    (storage.no_matching_nodes, subject(nodes=NodesStatus()), "False", "NoMatchingNodes", "spec.nodes.selector"),
    (
        storage.nodes_not_ready,
        subject(observed(ready=1), NodesStatus(desired=2, ready=1)),
        "False",
        "NodesNotReady",
        "1 of 2 nodes serve; node-1: not ready yet",
    ),
    (storage.drive_errors, subject(with_report(failing_drives=("nvme",))), "False", "DriveErrors", "node-1: nvme"),
    (
        storage.shared_tier_unavailable,
        subject(with_report(shared_problem="hung")),
        "False",
        "SharedTierUnavailable",
        "node-1: hung",
    ),
    # IndexReady and TransportReady
    (
        connectivity.invalid_index_config,
        subject(observed(external_problem="Secret x is missing")),
        "False",
        "InvalidIndexConfig",
        "Secret x",
    ),
    (connectivity.index_not_running, subject(no_redis()), "False", "IndexNotRunning", "only their own"),
    (connectivity.index_status_unavailable, subject(UNREPORTED), "Unknown", "StatusUnavailable", "no sidecar"),
    (
        connectivity.nodes_not_connected,
        subject(with_report(index_connected=False)),
        "False",
        "NodesNotConnected",
        "1 of 2 nodes are connected",
    ),
    (connectivity.peer_status_unavailable, subject(UNREPORTED), "Unknown", "StatusUnavailable", "no sidecar"),
    (
        connectivity.peers_unreachable,
        subject(with_report(peers=UNREACHABLE)),
        "False",
        "PeersUnreachable",
        "node-1 from node-0 (timeout)",
    ),
    (
        connectivity.peers_not_verified,
        subject(with_report(peers=PeerReport(unverified=1))),
        "Unknown",
        "PeersNotVerified",
        "1 of 2",
    ),
    (connectivity.peers_not_verified, subject(with_report(peers=None)), "Unknown", "PeersNotVerified", "1 nodes run"),
    (connectivity.transport_status_unavailable, subject(UNREPORTED), "Unknown", "StatusUnavailable", "no sidecar"),
    (
        connectivity.protocol_mismatch,
        subject(with_report(transport_reason="no device"), transport={"protocol": "RDMA"}),
        "False",
        "ProtocolMismatch",
        "is RDMA, but nodes use TCP (no device)",
    ),
    # InjectionReady
    (engines.injection_disabled, subject(injection={"enabled": False}), "False", "Disabled", "start without the pool"),
    (
        engines.webhook_unavailable,
        subject(observed(webhook=Webhook("no replica is ready"))),
        "False",
        "WebhookUnavailable",
        "no replica is ready",
    ),
    (
        engines.node_agent_missing,
        subject(with_report(agent_connected=False)),
        "False",
        "NodeAgentMissing",
        "no node agent on node-1: pods that start there run without the pool",
    ),
    (
        engines.pods_not_injected,
        subject(observed(engines=EnginePods(not_injected=1, not_injected_names=("team/a",)))),
        "False",
        "PodsNotInjected",
        "recreate them: team/a",
    ),
    (
        engines.all_pods_skipped,
        subject(observed(engines=EnginePods(skipped=8, skip_reasons={"unsupported-engine": 8}))),
        "False",
        "AllPodsSkipped",
        "all 8 opted-in pods were skipped: unsupported-engine (8); their Events say why",
    ),
    # EnginesConnected
    (
        engines.engines_silent,
        subject(observed(connections=EngineConnections(1, (SilentPod(INJECTED, "no sidecar"),)))),
        "False",
        "EnginesSilent",
        "1 of 2 injected pods run without the pool: team/engine: no sidecar",
    ),
    (
        engines.engines_starting,
        subject(observed(engines=EnginePods(injected=1, pods=(INJECTED,)))),
        "Unknown",
        "EnginesStarting",
        "no engine is connected yet",
    ),
    # BlocksShareable
    (
        engines.engine_without_remote_tier,
        subject(observed(engines=EnginePods(alone=1, alone_names=("team/a",)))),
        "False",
        "EngineHasNoRemoteTier",
        "team/a run an engine without a remote tier",
    ),
    (engines.fingerprints_differ, subject(groups=GROUPS), "False", "FingerprintsDiffer", "kv_dtype differs"),
    (engines.engine_status_unavailable, subject(UNREPORTED), "Unknown", "StatusUnavailable", "no sidecar"),
    (engines.no_engines_connected, subject(), "Unknown", "NoEnginesConnected", "no engine"),
    # PreflightPassed
    (preflight.skipped, subject(), "Unknown", "PreflightSkipped", "Skip"),
    (preflight.not_started, subject(outcome=gate("Unknown")), "Unknown", "PreflightRunning", "have not started"),
    (preflight.running, subject(outcome=gate("Checking", nodes=2)), "Unknown", "PreflightRunning", "0 of 2"),
    (
        preflight.nodes_failed,
        subject(outcome=ReconcileOutcome(preflight=FAILED)),
        "False",
        "NodesFailed",
        "nothing is rolled out: 1 of 2 nodes passed; a: Directory: full",
    ),
    (
        preflight.nodes_unresponsive,
        subject(outcome=gate("Done", nodes=2, passed=1, is_open=True)),
        "Unknown",
        "NodesUnresponsive",
        "1 of 2 nodes passed, and 1 did not report",
    ),
    (preflight.no_matching_nodes, subject(outcome=gate("Done")), "Unknown", "NoMatchingNodes", "spec.nodes"),
    # Progressing
    (rollout.deleting, deleted_pool(), "True", "Deleting", "waiting for the wipe"),
    (rollout.paused, subject(mode="Paused"), "False", "Paused", "changes nothing"),
    (rollout.api_rejections, subject(outcome=ReconcileOutcome(rejections=("x",))), "False", "Rejected", "changes: x"),
    (rollout.dry_run, subject(mode="DryRun"), "False", "DryRun", "ConfigMap chat-plan"),
    (
        rollout.blocked_by_index_config,
        subject(observed(external_problem="Secret x is missing")),
        "False",
        "InvalidIndexConfig",
        "nothing is changed: Secret x",
    ),
    (rollout.applying, subject(outcome=ReconcileOutcome(applied=3)), "True", "Applying", "3 objects"),
    (rollout.applying, subject(outcome=ReconcileOutcome(waiting="the wipe")), "True", "Applying", "for the wipe"),
    (rollout.held_by_preflight, subject(outcome=ReconcileOutcome(preflight=FAILED)), "False", "NodesFailed", "full"),
    (rollout.rollout_stuck, subject(STUCK, SOME_UPDATED), "True", "RolloutStuck", "new sidecar: no such image"),
    (rollout.rolling_out, subject(observed(updated=1), SOME_UPDATED), "True", "RollingOut", "1 of 2 nodes run"),
    # RollingUpdateSafe
    (rollout.update_status_unavailable, subject(UNREPORTED), "Unknown", "StatusUnavailable", "no sidecar"),
    (rollout.nodes_not_ready, subject(observed(ready=1)), "False", "NodesNotReady", "node-1: not ready"),
    (rollout.format_unknown, subject(with_report(block_formats=(99,))), "False", "FormatUnknown", "node-1"),
    (rollout.index_unavailable, subject(no_redis()), "False", "IndexNotRunning", "the index is unavailable"),
    (rollout.index_not_synced, subject(with_report(scanned=False)), "False", "IndexNotSynced", "node-1"),
    (rollout.ephemeral_volumes, subject(tiers=[IN_VOLUMES]), "False", "EphemeralVolumes", "empty volume"),
    # Ready
    (ready.storage_not_ready, subject(EMPTY), "False", "NotCreated", "being created"),
    (ready.index_not_ready, subject(UNREPORTED), "False", "StatusUnavailable", "no sidecar"),
]


@pytest.mark.parametrize(
    ("peers", "words"),
    [
        (PeerReport(verified=1), "2 nodes serve, and each has read from the others"),
        (UNREACHABLE, "some cannot read from others (see PeersReachable)"),
        (PeerReport(unverified=1), "reads between them are not verified"),
        (None, "reads between them are not verified"),
    ],
)
def test_ready_says_of_reads_between_nodes_only_what_was_verified(peers: PeerReport | None, words: str):
    verdict = first_verdict(ready.READY, subject(with_report(peers=peers)))
    assert (verdict.status, verdict.reason) == ("True", "Serving")
    assert verdict.message.endswith(words)


def test_a_message_about_many_pairs_is_bounded():
    many = PeerReport(failed=900, unreachable=tuple(UnreachablePeer(f"n{n:03}", "timeout") for n in range(64)))
    verdict = connectivity.peers_unreachable(subject(with_report(peers=many)))
    assert verdict is not None
    assert "and 892 more" in verdict.message
    assert len(verdict.message) < 600


@pytest.mark.parametrize(("check", "i", "status", "reason", "words"), CASES)
def test_a_check_applies_to_its_case_alone(check: Any, i: ConditionInput, status: str, reason: str, words: str):
    verdict = check(i)
    assert (verdict.status, verdict.reason) == (status, reason)
    assert words in verdict.message
    healthy = subject(groups=(GROUPS[0],), outcome=gate("Done", nodes=2, passed=2, is_open=True))
    assert check(healthy) is None


def test_each_check_of_each_chain_has_a_case():
    named = {check for check, *_ in CASES}
    for chain in CHAINS.values():
        assert set(chain[:-1]) <= named, [c.__name__ for c in chain[:-1] if c not in named]
        assert len(set(chain)) == len(chain)


def test_the_last_check_of_a_chain_always_decides():
    for i in (subject(), *(case[1] for case in CASES)):
        assert all(chain[-1](i) is not None for chain in CHAINS.values())
    with pytest.raises(AssertionError, match="must return a verdict"):
        first_verdict((lambda _: None,), None)


def test_the_conditions_of_a_node_are_documented():
    for sidecar in (None, Sidecar("a", False), Sidecar("a", True), Sidecar("a", True, "", GOOD)):
        for gone in (False, True):
            made = node_status(pool(), sidecar, gone=gone, drain=DrainStatus(), old={}, now="2026-11-20T10:00:00Z")
            for condition in made["conditions"]:
                assert condition["reason"] in REASONS["KVCacheNode"][condition["type"]]


def test_a_chain_yields_documented_reasons_alone():
    assert list(CHAINS) == list(POOL_CONDITIONS)
    for _, i, *_ in CASES:
        for kind, chain in CHAINS.items():
            assert first_verdict(chain, i).reason in REASONS["KVCachePool"][kind]


def test_every_condition_type_and_reason_is_documented():
    documented = {
        "KVCachePool": POOL_CONDITIONS,
        "KVCacheNode": NODE_CONDITIONS,
        "KVCacheTenant": TENANT_CONDITIONS,
        "KVCacheOperation": OPERATION_CONDITIONS,
    }
    assert {kind: list(types) for kind, types in REASONS.items()} == {k: list(t) for k, t in documented.items()}
    assert {r for types in REASONS.values() for reasons in types.values() for r in reasons} == set(Reason)
    for reason in (*Reason, *EventReason):
        assert reason.meaning.endswith("."), reason
        assert reason.value.isalnum()
        assert reason.value[0].isupper()


def test_every_reason_is_used():
    used = {
        node.attr
        for path in SOURCE.rglob("*.py")
        if path.name != "reasons.py"
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id.endswith("Reason")
    }
    by_phase = {r.name for r in REASONS["KVCacheOperation"]["Complete"]}
    assert {r.name for r in (*Reason, *EventReason)} - used - by_phase == set()


def test_verdicts_update_conditions_and_drop_what_is_none():
    verdict = Verdict.true(Reason.SERVING, "m" * 5000)
    old = [None, "x", {"type": 7}, Condition(type="Other", status="True", reason="Serving").dump()]
    made = with_verdicts(old, {"Ready": verdict}, 3, "2026-11-20T10:00:00Z")
    assert [c["type"] for c in made] == ["Other", "Ready"]
    entry = find(made, "Ready")
    assert entry is not None
    assert (entry["status"], entry["reason"], entry["observedGeneration"]) == ("True", "Serving", 3)
    assert len(entry["message"]) == 1024
    assert with_verdicts("text", {}, 3, "now") == []
