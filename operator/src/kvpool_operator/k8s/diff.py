"""Drift detection: whether an object in the cluster matches its manifest. Pure.

An object is up to date if it contains everything in the manifest (no one edited it), and if it was last applied from
this manifest (fields that the manifest dropped must be removed). A comparison answers the first, because the builders
write values as the API server stores them; a hash in an annotation answers the second.
"""

from __future__ import annotations

import copy
import hashlib
import json
from typing import TYPE_CHECKING, Any, Final

from kvpool_operator.api.annotations import ANNOTATION_APPLIED_HASH

if TYPE_CHECKING:
    from kvpool_operator.k8s.client import Manifest

__all__ = ["ANNOTATION_APPLIED_HASH", "is_subset", "is_up_to_date", "with_applied_hash"]


_KEYS: Final = ("name", "mountPath", "containerPort", "key")
"""Merge keys of lists, as Kubernetes documents them for pods."""


def with_applied_hash(manifest: Manifest) -> Manifest:
    """The manifest with its own hash in an annotation, ready to apply."""
    text = json.dumps(manifest, sort_keys=True, separators=(",", ":"))
    out = copy.deepcopy(manifest)
    notes = out["metadata"].setdefault("annotations", {})
    notes[ANNOTATION_APPLIED_HASH] = hashlib.sha256(text.encode()).hexdigest()[:16]
    return out


def is_up_to_date(live: Manifest, manifest: Manifest) -> bool:
    """Whether no apply is needed."""
    return is_subset(live, with_applied_hash(manifest))


def is_subset(live: Any, wanted: Any) -> bool:
    """Whether `live` contains everything in `wanted`. Entries that others added to keyed lists do not matter."""
    if isinstance(wanted, dict):
        return isinstance(live, dict) and all(k in live and is_subset(live[k], v) for k, v in wanted.items())
    if isinstance(wanted, list):
        return isinstance(live, list) and _is_sublist(live, wanted)
    return bool(live == wanted) and isinstance(live, bool) == isinstance(wanted, bool)


def _is_sublist(live: list[Any], wanted: list[Any]) -> bool:
    key = next((k for k in _KEYS if wanted and _is_merge_key(k, wanted)), None)
    if key is None:
        return len(live) == len(wanted) and all(is_subset(a, b) for a, b in zip(live, wanted, strict=True))
    by_key = {item.get(key): item for item in live if isinstance(item, dict)}
    return all(w[key] in by_key and is_subset(by_key[w[key]], w) for w in wanted)


def _is_merge_key(key: str, items: list[Any]) -> bool:
    return all(isinstance(i, dict) and key in i for i in items) and len({str(i[key]) for i in items}) == len(items)
