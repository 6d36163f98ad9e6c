"""Whether an object in the cluster is as it should be. Pure.

Two questions: does it still say everything that the manifest says (somebody may have edited it), and was it last
applied from this very manifest (what the manifest does not say any more must go). The second is answered by a digest
in an annotation; the first by comparison, which works because the builders write values the way the API server stores
them.
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
"""What tells the entries of a list apart, by the merge keys that Kubernetes documents for pods."""


def with_applied_hash(manifest: Manifest) -> Manifest:
    """The manifest with the digest of itself; what is applied."""
    text = json.dumps(manifest, sort_keys=True, separators=(",", ":"))
    out = copy.deepcopy(manifest)
    notes = out["metadata"].setdefault("annotations", {})
    notes[ANNOTATION_APPLIED_HASH] = hashlib.sha256(text.encode()).hexdigest()[:16]
    return out


def is_up_to_date(live: Manifest, manifest: Manifest) -> bool:
    """Whether nothing need be applied."""
    return is_subset(live, with_applied_hash(manifest))


def is_subset(live: Any, wanted: Any) -> bool:
    """Whether `live` says at least what `wanted` says. Entries that others added to lists with keys do not matter."""
    if isinstance(wanted, dict):
        return isinstance(live, dict) and all(k in live and is_subset(live[k], v) for k, v in wanted.items())
    if isinstance(wanted, list):
        return isinstance(live, list) and _covers_list(live, wanted)
    return bool(live == wanted) and isinstance(live, bool) == isinstance(wanted, bool)


def _covers_list(live: list[Any], wanted: list[Any]) -> bool:
    key = next((k for k in _KEYS if wanted and _tells_apart(k, wanted)), None)
    if key is None:
        return len(live) == len(wanted) and all(is_subset(a, b) for a, b in zip(live, wanted, strict=True))
    by_key = {item.get(key): item for item in live if isinstance(item, dict)}
    return all(w[key] in by_key and is_subset(by_key[w[key]], w) for w in wanted)


def _tells_apart(key: str, items: list[Any]) -> bool:
    return all(isinstance(i, dict) and key in i for i in items) and len({str(i[key]) for i in items}) == len(items)
