"""Which engine pods share blocks, and by what the others differ. Pure.

Blocks are shared within a namespace (a tenant), between engines of one fingerprint. A pod may have several of them;
pods of one model that have none in common share nothing, and then the digests of the facts behind the fingerprints
name the fields that differ.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from kvpool_operator.sidecars.status import Fingerprint, SidecarStatus

__all__ = ["FingerprintGroup", "ReuseGap", "explain", "find_gaps", "group_fingerprints"]

_FOLLOWS: Final = frozenset({"block_bytes", "groups", "hf_config", "format"})
"""Fields that differ because others do: named last."""
_OWN: Final = frozenset({"private", "process", "reset"})
"""Fields of engines that share with nobody, whatever the others are: named first."""
_FIELDS_NAMED: Final = 6
_PODS_NAMED: Final = 3


@dataclass(frozen=True)
class FingerprintGroup:
    """One fingerprint over all sidecars. Pods are names (namespace/name)."""

    digest: str
    engine: str
    model: str
    bytes: int
    fields: Mapping[str, str]
    connected: tuple[str, ...]
    others: tuple[str, ...]
    """Pods that were connected before."""
    in_use_by: int
    """Number of pods that are connected, also of those whose name is not known."""
    last_seen: int
    """Seconds since 1970 when one was last connected; 0 for never."""


@dataclass(frozen=True)
class ReuseGap:
    """Pods of one namespace and model that do not all share."""

    namespace: str
    model: str
    groups: tuple[tuple[str, ...], ...]
    """Digests; pods of one group share, directly or through one another. The group with most pods first."""


def group_fingerprints(reports: Iterable[SidecarStatus], names: Mapping[str, str]) -> list[FingerprintGroup]:
    """What the sidecars tell, put together; `names` of pods by uid. Those in use first, then the largest."""
    told: defaultdict[str, list[Fingerprint]] = defaultdict(list)
    for report in reports:
        for fingerprint in report.fingerprints:
            told[fingerprint.digest].append(fingerprint)
    found = [_merge(digest, same, names) for digest, same in told.items()]
    return sorted(found, key=lambda k: (not k.in_use_by, -k.bytes, k.digest))


def find_gaps(found: Iterable[FingerprintGroup]) -> list[ReuseGap]:
    """Where pods that should share do not. Engines that do not name their model are not judged."""
    by_model: defaultdict[tuple[str, str], defaultdict[str, set[str]]] = defaultdict(lambda: defaultdict(set))
    for kind in found:
        for pod in kind.connected:
            if kind.model:
                by_model[pod.partition("/")[0], kind.model][kind.digest].add(pod)
    answers = [ReuseGap(*at, groups=_groups(pods)) for at, pods in sorted(by_model.items())]
    return [split for split in answers if len(split.groups) > 1]


def explain(split: ReuseGap, by_digest: Mapping[str, FingerprintGroup]) -> str:
    """Who shares nothing with whom, and because of what."""
    first, *rest = split.groups
    parts = []
    for other in rest[:2]:
        names = _differing(first, other, by_digest)
        verb = "differs" if len(names) == 1 else "differ"
        why = f"{', '.join(names)} {verb}" if names else "their clients do not tell by what they differ"
        parts.append(f"{_pods(other, split, by_digest)} ({why})")
    more = f"; and {len(rest) - 2} more groups" if len(rest) > 2 else ""
    model = split.model[:80]
    return f"{_pods(first, split, by_digest)} share no block of {model} with {'; with '.join(parts)}{more}"


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
    )


def _groups(pods: Mapping[str, set[str]]) -> tuple[tuple[str, ...], ...]:
    """Connected parts of the graph of digests and pods."""
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
    """Fields by which the two nearest fingerprints of both differ."""
    best: list[str] = []
    for a in one:
        for b in other:
            mine, theirs = by_digest[a].fields, by_digest[b].fields
            if mine and theirs:
                names = [n for n in {*mine, *theirs} if mine.get(n) != theirs.get(n)]
                if names and (not best or len(names) < len(best)):
                    best = sorted(names, key=lambda n: (n in _FOLLOWS, n not in _OWN, n))
    return best[:_FIELDS_NAMED]


def _pods(group: Sequence[str], split: ReuseGap, by_digest: Mapping[str, FingerprintGroup]) -> str:
    inside = f"{split.namespace}/"
    pods = sorted({p for d in group for p in by_digest[d].connected if p.startswith(inside)})
    more = f" and {len(pods) - _PODS_NAMED} more" if len(pods) > _PODS_NAMED else ""
    return ", ".join(pods[:_PODS_NAMED]) + more
