"""Findings about injected engines: those without a connection, and those that share no blocks. Pure."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from kvpool_operator.api.findings.codes import Code
from kvpool_operator.api.findings.row import Severity
from kvpool_operator.diagnosis.finding import make
from kvpool_operator.observe.fingerprints import (
    PRIVATE_FIELDS,
    differing_fields,
    explain,
    explain_prompts,
    find_gaps,
    find_prompt_gaps,
)
from kvpool_operator.text import summarize

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from kvpool_operator.diagnosis.finding import PoolFinding
    from kvpool_operator.diagnosis.observed import Observed
    from kvpool_operator.observe.engine_connections import SilentPod

__all__ = ["engines_apart", "prompts_apart", "silent_engines", "untested_engines"]

_MAX_SILENT: Final = 16
_HASH_FIELDS: Final = frozenset({"hash_seed", "hash_algorithm", "hash_probe"})
_HASH_FIXES: Final = {
    "hash_algorithm": "give the engines the same --prefix-caching-hash-algo, and restart them",
    "hash_probe": "set one PYTHONHASHSEED on the engines, or --prefix-caching-hash-algo sha256_cbor: "
    "without a fixed seed each process hashes differently",
}
_PROMPT_FIXES: Final = {
    "prompt.tokenizer": "give the engines the same files of the tokenizer, and restart them",
    "prompt.chat_template": "give the engines the same chat template, and restart them",
}
_CHUNK_FIELDS: Final = frozenset({"blocks_per_chunk", "block_tokens", "chunk_size", "chunk_tokens", "tokens"})


def silent_engines(i: Observed) -> Iterator[PoolFinding]:
    """Injected pods that are Ready and not connected."""
    reports = dict(i.reports)
    for one in i.snapshot.connections.silent[:_MAX_SILENT]:
        report = reports.get(one.pod.node)
        if one.refused:
            code = Code.ENGINE_REFUSED
        elif report is not None and report.refused.get("protocol"):
            code = Code.VERSIONS_DIFFER
        elif all(sidecar.node != one.pod.node for sidecar in i.snapshot.sidecars):
            code = Code.NO_SIDECAR_ON_NODE
        else:
            code = Code.ENGINE_SILENT
        yield _silent(code, one)


def _silent(code: Code, one: SilentPod) -> PoolFinding:
    fix = ""
    if code is Code.ENGINE_SILENT:
        fix = f"kubectl -n {one.pod.namespace} logs {one.pod.name} --all-containers | grep -i kvpool"
    return make(code, f"Pod {one.pod.full_name}", one.why, fix=fix)


def engines_apart(i: Observed) -> Iterator[PoolFinding]:
    """Engines of one namespace and model that cannot share blocks, by the fields that keep them apart."""
    by_digest = {group.digest: group for group in i.groups}
    for gap in find_gaps(i.groups):
        fields = differing_fields(gap, by_digest)
        yield make(_code_of(fields), f"Model {gap.namespace}/{gap.model}", explain(gap, by_digest), fix=_fix_of(fields))


def prompts_apart(i: Observed) -> Iterator[PoolFinding]:
    """Engines of one namespace and model with another tokenizer or chat template: prompts get other hashes."""
    for gap in find_prompt_gaps((report for _, report in i.reports), i.snapshot.engines.names):
        subject = f"Model {gap.namespace}/{gap.model}"
        fix = _PROMPT_FIXES[gap.fields[-1]]
        yield make(Code.HASHES_DIFFER, subject, explain_prompts(gap), fix=fix, severity=Severity.WARNING)


def _code_of(fields: Sequence[str]) -> Code:
    names = set(fields)
    if names & PRIVATE_FIELDS:
        return Code.ENGINE_SHARES_NOTHING
    if names & _HASH_FIELDS:
        return Code.HASHES_DIFFER
    if names & _CHUNK_FIELDS:
        return Code.CHUNKS_DIFFER
    return Code.FINGERPRINTS_DIFFER


def _fix_of(fields: Sequence[str]) -> str:
    fix = next((_HASH_FIXES[name] for name in fields if name in _HASH_FIXES), "")
    if fix and _code_of(fields) is Code.HASHES_DIFFER:
        return fix
    if _code_of(fields) is not Code.FINGERPRINTS_DIFFER or not fields:
        return ""
    return f"give the engines the same {summarize(fields)}, and restart them"


def untested_engines(i: Observed) -> Iterator[PoolFinding]:
    """Versions of connected engines that the release was not tested with."""
    for engine in sorted({group.engine for group in i.groups if group.in_use_by and not group.is_tested}):
        yield make(Code.ENGINE_UNTESTED, i.subject, f"the release was not tested with {engine}")
