"""Diagnosis by a user who may not read all documents: the operator's findings instead of conclusions. Pure."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from kvpool_operator.api.findings.codes import Code
from kvpool_operator.api.findings.row import Severity
from kvpool_operator.diagnosis.finding import make, ranked

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from kvpool_cli.cluster.documents import Documents
    from kvpool_operator.diagnosis import PoolFinding

_NEEDED: Final = ("owned", "pool_pods", "engine_pods")
"""Queries without which the evaluation of a pool would take objects as absent."""


def missing_rights(documents: Documents, namespace: str, pool: str) -> tuple[str, ...]:
    """Return the rights that the evaluation of one pool lacks, as `verb resource`."""
    sidecars = {
        f"{namespace}/{pod['metadata']['name']}"
        for pod in documents.of("pool_pods")
        if (pod["metadata"].get("labels") or {}).get("kvpool.dev/pool") == pool
    }
    found = [right for key, right in documents.denied.items() if key in _NEEDED or key in sidecars]
    return tuple(dict.fromkeys(found))


def of_operator(
    live: Mapping[str, Any], own: Sequence[PoolFinding], pool: str, missing: Sequence[str]
) -> tuple[PoolFinding, ...]:
    """Return the findings that the operator wrote, `own` ones, and one about the missing rights."""
    found = {finding.key: finding for finding in (*_written(live), *own)}
    summary = f"you have no right to {'; '.join(missing)}"
    return ranked((*found.values(), make(Code.RIGHTS_MISSING, f"KVCachePool {pool}", summary)))


def _written(live: Mapping[str, Any]) -> list[PoolFinding]:
    """The findings of a status; codes of a later release are left out."""
    codes, severities = {code.value: code for code in Code}, {one.value: one for one in Severity}
    rows = [row for row in live.get("findings") or [] if row.get("code") in codes]
    return [
        make(
            codes[row["code"]],
            str(row.get("subject") or ""),
            str(row.get("summary") or ""),
            fix=str(row.get("fix") or ""),
            severity=severities.get(row.get("severity")),
        )
        for row in rows
    ]
