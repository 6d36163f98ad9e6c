"""Determines which engine pods can share blocks, and which settings keep the others apart. Pure.

Blocks are shared within a namespace (a tenant), between engines with the same fingerprint. A pod may have several
fingerprints. Pods of one model without a common fingerprint share nothing; the digests of the fingerprint inputs then
show which fields differ.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from kvpool_operator.text import summarize

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from kvpool_operator.sidecars.status import Fingerprint, SidecarStatus

__all__ = [
    "PRIVATE_FIELDS",
    "PROMPT_FIELDS",
    "FingerprintGroup",
    "PromptGap",
    "ReuseGap",
    "differing_fields",
    "explain",
    "explain_prompts",
    "find_gaps",
    "find_prompt_gaps",
    "group_fingerprints",
]

_FOLLOWS: Final = frozenset({"block_bytes", "groups", "hf_config", "format"})
"""Fields that differ as a consequence of others: named last."""
PRIVATE_FIELDS: Final = frozenset({"private", "process", "reset"})
"""Fields of engines that never share, whatever the other fields are: named first."""
PROMPT_FIELDS: Final = frozenset({"prompt.tokenizer", "prompt.chat_template"})
"""Fields that are no part of the fingerprint: what turns prompts into tokens."""
_HASH_INPUTS: Final = frozenset({"hash_seed", "hash_algorithm", "version"})
"""Fields that change the hash probe."""
_FIELDS_NAMED: Final = 6
_PODS_NAMED: Final = 3


@dataclass(frozen=True)
class FingerprintGroup:
    """One fingerprint over all sidecars. Pods are named namespace/name."""

    digest: str
    engine: str
    model: str
    bytes: int
    fields: Mapping[str, str]
    connected: tuple[str, ...]
    others: tuple[str, ...]
    """Pods that were connected before."""
    in_use_by: int
    """Number of connected pods, including those whose name is unknown."""
    last_seen: int
    """Unix time when a pod was last connected; 0: never."""
    is_tested: bool = True
    """Whether the plug-in was tested with the version of these engines."""


@dataclass(frozen=True)
class ReuseGap:
    """Pods of one namespace and model that cannot all share blocks."""

    namespace: str
    model: str
    groups: tuple[tuple[str, ...], ...]
    """Digests; pods of one group share blocks, directly or through each other. The group with most pods is first."""


@dataclass(frozen=True)
class PromptGap:
    """Engines of one namespace and model that turn the same prompt into other tokens."""

    namespace: str
    model: str
    fields: tuple[str, ...]
    groups: tuple[tuple[str, ...], ...]
    """Pods as namespace/name; those of one group are alike. The largest group is first."""


def group_fingerprints(reports: Iterable[SidecarStatus], names: Mapping[str, str]) -> list[FingerprintGroup]:
    """Merge the reports of all sidecars; `names`: of pods by uid. Fingerprints in use first, then the largest."""
    reported: defaultdict[str, list[Fingerprint]] = defaultdict(list)
    for report in reports:
        for fingerprint in report.fingerprints:
            reported[fingerprint.digest].append(fingerprint)
    groups = [_merge(digest, same, names) for digest, same in reported.items()]
    return sorted(groups, key=lambda g: (not g.in_use_by, -g.bytes, g.digest))


def find_gaps(groups: Iterable[FingerprintGroup]) -> list[ReuseGap]:
    """Find pods of one namespace and model that cannot share. Engines that do not report their model are left out."""
    by_model: defaultdict[tuple[str, str], defaultdict[str, set[str]]] = defaultdict(lambda: defaultdict(set))
    for group in groups:
        for pod in group.connected:
            if group.model:
                by_model[pod.partition("/")[0], group.model][group.digest].add(pod)
    gaps = [ReuseGap(*at, groups=_groups(pods)) for at, pods in sorted(by_model.items())]
    return [gap for gap in gaps if len(gap.groups) > 1]


def find_prompt_gaps(reports: Iterable[SidecarStatus], names: Mapping[str, str]) -> list[PromptGap]:
    """Find pods of one namespace and model whose tokenizer or chat template differ. `names`: of pods by uid.

    A sidecar reports one set of fields for each fingerprint: two pods of one node and fingerprint look alike.
    """
    facts: defaultdict[tuple[str, str], dict[str, dict[str, str]]] = defaultdict(dict)
    for report in reports:
        for f in report.fingerprints:
            known = {name: f.fields[name] for name in PROMPT_FIELDS & f.fields.keys()}
            for pod in f.pods if f.model and known else ():
                if pod.connected and pod.uid in names:
                    full = names[pod.uid]
                    facts[full.partition("/")[0], f.model].setdefault(full, known)
    gaps = []
    for (namespace, model), pods in sorted(facts.items()):
        fields = sorted(n for n in PROMPT_FIELDS if len({known[n] for known in pods.values() if n in known}) > 1)
        alike: defaultdict[tuple[str, ...], list[str]] = defaultdict(list)
        for full, known in sorted(pods.items()):
            if all(name in known for name in fields):
                alike[tuple(known[name] for name in fields)].append(full)
        groups = tuple(sorted((tuple(group) for group in alike.values()), key=lambda g: (-len(g), g)))
        if fields and len(groups) > 1:
            gaps.append(PromptGap(namespace, model, tuple(fields), groups))
    return gaps


def explain_prompts(gap: PromptGap) -> str:
    """Message: which pods turn prompts into other tokens than which."""
    words = " and ".join(name.removeprefix("prompt.").replace("_", " ") for name in gap.fields)
    first, second = (summarize(group) for group in gap.groups[:2])
    return (
        f"{words} of {second} are not those of {first}"
        if len(gap.fields) > 1
        else (f"the {words} of {second} is not that of {first}")
    )


def explain(gap: ReuseGap, by_digest: Mapping[str, FingerprintGroup]) -> str:
    """Message: which pods cannot share blocks with which, and the fields that differ."""
    first, *rest = gap.groups
    parts = []
    for other in rest[:2]:
        names = _differing(first, other, by_digest)
        verb = "differs" if len(names) == 1 else "differ"
        why = f"{', '.join(names)} {verb}" if names else "their clients do not report what differs"
        parts.append(f"{_pods(other, gap, by_digest)} ({why})")
    more = f"; and {len(rest) - 2} more groups" if len(rest) > 2 else ""
    model = gap.model[:80]
    return f"{_pods(first, gap, by_digest)} cannot share blocks of {model} with {'; with '.join(parts)}{more}"


def differing_fields(gap: ReuseGap, by_digest: Mapping[str, FingerprintGroup]) -> list[str]:
    """Fields that keep the groups of a gap apart, causes before consequences; empty if clients do not report them."""
    first, *rest = gap.groups
    return list(dict.fromkeys(name for other in rest for name in _differing(first, other, by_digest)))


def _merge(digest: str, same: Sequence[Fingerprint], names: Mapping[str, str]) -> FingerprintGroup:
    connected = {p.uid for f in same for p in f.pods if p.connected}
    others = {p.uid for f in same for p in f.pods} - connected
    last = max(same, key=lambda f: max((p.seen for p in f.pods), default=0))
    return FingerprintGroup(
        digest=digest,
        engine=last.engine,
        model=last.model,
        bytes=sum(f.bytes for f in same),
        fields=next((f.fields for f in (last, *same) if f.fields), {}),
        connected=tuple(sorted(names[u] for u in connected if u in names)),
        others=tuple(sorted(names[u] for u in others if u in names)),
        in_use_by=sum(f.connected for f in same),
        last_seen=max((p.seen for f in same for p in f.pods), default=0),
        is_tested=all(f.is_tested for f in same),
    )


def _groups(pods: Mapping[str, set[str]]) -> tuple[tuple[str, ...], ...]:
    """Connected components of the graph of digests and pods."""
    left = dict(sorted(pods.items()))
    groups = []
    while left:
        digest, reached = left.popitem()
        group = [digest]
        while near := [d for d, those in left.items() if those & reached]:
            for d in near:
                reached = reached | left.pop(d)
            group += near
        groups.append((len(reached), tuple(sorted(group))))
    return tuple(group for _, group in sorted(groups, key=lambda g: (-g[0], g[1])))


def _differing(one: Sequence[str], other: Sequence[str], by_digest: Mapping[str, FingerprintGroup]) -> list[str]:
    """Fields that differ between the two most similar fingerprints."""
    best: list[str] = []
    for a in one:
        for b in other:
            mine, theirs = by_digest[a].fields, by_digest[b].fields
            if mine and theirs:
                names = [n for n in {*mine, *theirs} - PROMPT_FIELDS if mine.get(n) != theirs.get(n)]
                if _HASH_INPUTS & set(names) and "hash_probe" in names:
                    names.remove("hash_probe")
                if names and (not best or len(names) < len(best)):
                    best = sorted(names, key=lambda n: (n in _FOLLOWS, n not in PRIVATE_FIELDS, n))
    return best[:_FIELDS_NAMED]


def _pods(group: Sequence[str], gap: ReuseGap, by_digest: Mapping[str, FingerprintGroup]) -> str:
    inside = f"{gap.namespace}/"
    pods = sorted({p for d in group for p in by_digest[d].connected if p.startswith(inside)})
    more = f" and {len(pods) - _PODS_NAMED} more" if len(pods) > _PODS_NAMED else ""
    return ", ".join(pods[:_PODS_NAMED]) + more
