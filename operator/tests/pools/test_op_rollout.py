"""RollingUpdateSafe, and how sidecars are replaced."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from op_samples import inputs, pool
from op_status_samples import GOOD, message, observed, reported, status

from kvpool.protocol import block
from kvpool_operator.api.conditions import first_verdict
from kvpool_operator.api.pool.status import NodesStatus
from kvpool_operator.desired import build
from kvpool_operator.observe.snapshot import Sidecar
from kvpool_operator.pools.conditions import ConditionInput, ReconcileOutcome
from kvpool_operator.pools.conditions.rollout import BLOCK_FORMATS, ROLLING_UPDATE_SAFE
from kvpool_operator.sidecars.status import SidecarStatus


def test_the_operator_knows_what_the_sidecars_of_its_release_read():
    assert BLOCK_FORMATS == block.FORMAT_VERSIONS


def seen(*reports: SidecarStatus | None, ready: bool = True) -> tuple[Sidecar, ...]:
    return tuple(Sidecar(f"node-{i}", ready, "", r) for i, r in enumerate(reports))


@pytest.mark.parametrize(
    ("sidecars", "desired", "index", "expected", "words"),
    [
        (seen(GOOD, GOOD), 2, True, ("True", "CachePreserved"), "1 at a time"),
        (seen(), 2, True, ("Unknown", "StatusUnavailable"), ""),
        (seen(GOOD, None), 2, True, ("False", "NodesNotReady"), "node-1"),
        (seen(GOOD), 2, True, ("False", "NodesNotReady"), "1 nodes"),
        (seen(GOOD, GOOD, ready=False), 2, True, ("False", "NodesNotReady"), "node-0; node-1"),
        (seen(GOOD, replace(GOOD, block_formats=(1, 2, 3, 4, 5))), 2, True, ("False", "FormatUnknown"), "node-1"),
        (seen(GOOD, replace(GOOD, block_formats=(1,))), 2, True, ("True", "CachePreserved"), ""),
        (seen(GOOD, GOOD), 2, False, ("False", "IndexNotRunning"), ""),
        (seen(GOOD, replace(GOOD, scanned=False)), 2, True, ("False", "IndexNotSynced"), "node-1"),
        (seen(GOOD, replace(GOOD, blocks=1000, index_announced=10)), 2, True, ("False", "IndexNotSynced"), "node-1"),
        (seen(GOOD, replace(GOOD, blocks=1000, index_announced=900)), 2, True, ("True", "CachePreserved"), ""),
    ],
)
def test_a_roll_is_safe_while_it_would_keep_what_is_cached(
    sidecars: tuple[Sidecar, ...], desired: int, index: bool, expected: tuple[str, str], words: str
):
    snapshot = observed(sidecars=sidecars, external_problem="" if index else "Secret x is missing")
    subject = ConditionInput(pool(), snapshot, NodesStatus(desired=desired), ReconcileOutcome())
    verdict = first_verdict(ROLLING_UPDATE_SAFE, subject)
    assert (verdict.status, verdict.reason) == expected
    assert words in verdict.message


def test_it_is_a_condition_whose_sentence_stays_while_numbers_change():
    made = status(observed())
    assert reported(made, "RollingUpdateSafe") == ("True", "CachePreserved")
    more = tuple(Sidecar(f"node-{i}", True, "", replace(GOOD, blocks=33, index_announced=33)) for i in range(2))
    assert message(status(observed(sidecars=more)), "RollingUpdateSafe") == message(made, "RollingUpdateSafe")
    behind = (Sidecar("node-0", True, "", GOOD), Sidecar("node-1", True, "", replace(GOOD, blocks=5000)))
    assert reported(status(observed(sidecars=behind)), "RollingUpdateSafe") == ("False", "IndexNotSynced")


def test_what_a_sidecar_tells_of_it_is_read_and_nothing_odd_is_believed():
    read = SidecarStatus.parse({"scanned": False, "block_formats": [1, 2, "3", True], "index": {"login": "ab" * 99}})
    assert (read.scanned, read.block_formats, len(read.index_login)) == (False, (1, 2), 64)
    assert SidecarStatus.parse({"block_formats": 5}).block_formats == ()
    assert SidecarStatus.parse({}).scanned


@pytest.mark.parametrize(
    ("update", "expected"),
    [
        ({}, (1, 20)),
        ({"maxUnavailable": 3, "minReadySeconds": 0}, (3, 0)),
        ({"maxUnavailable": "10%", "minReadySeconds": 2}, ("10%", 2)),
    ],
)
def test_sidecars_are_replaced_as_the_spec_says(update: dict[str, Any], expected: tuple[int | str, int]):
    spec = next(m for m in build(inputs(nodes={"update": update})) if m["kind"] == "DaemonSet")["spec"]
    rolling = spec["updateStrategy"]["rollingUpdate"]
    assert (rolling["maxSurge"], spec.get("minReadySeconds", 0)) == expected
