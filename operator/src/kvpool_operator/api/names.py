"""Field types of names in Kubernetes: objects, namespaces, labels, keys of a Secret."""

from __future__ import annotations

import re
from typing import Final

from kvpool_operator.api.rules import matching

__all__ = [
    "LabelKey",
    "LabelValue",
    "NamespaceName",
    "ObjectName",
    "PoolName",
    "Reader",
    "SecretDataKey",
    "check_label_keys",
]

_LABEL_NAME: Final = r"[A-Za-z0-9]([A-Za-z0-9_.-]{0,61}[A-Za-z0-9])?"
_SUBDOMAIN: Final = r"[a-z0-9]([-a-z0-9.]{0,251}[a-z0-9])?"
_LABEL_KEY: Final = rf"^({_SUBDOMAIN}/)?{_LABEL_NAME}$"
_LABEL_VALUE: Final = rf"^({_LABEL_NAME})?$"
LabelValue = matching(
    _LABEL_VALUE, 63, "give a label value of at most 63 letters, digits, hyphens, underscores and dots", min_length=0
)
LabelKey = matching(_LABEL_KEY, 316, "give a label key such as pool or node.example/pool")
ObjectName = matching(f"^{_SUBDOMAIN}$", 253, "give the name of an object, of lower-case letters, digits, - and .")
NamespaceName = matching(
    "^[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?$",
    63,
    "give the name of a namespace: lower-case letters, digits and hyphens",
)
SecretDataKey = matching(
    "^[A-Za-z0-9_-][A-Za-z0-9._-]{0,252}$", 253, "give a key of the Secret: letters, digits, - _ and ."
)
PoolName = matching(
    "^[a-z]([-a-z0-9]{0,38}[a-z0-9])?$", 40, "give the name of a KVCachePool in the namespace of this object"
)
Reader = matching(
    "^([*]|[a-z0-9]([-a-z0-9.]{0,251}[a-z0-9])?)$", 253, "give a reader as the name of a KVCacheTenant, or '*' alone"
)
_LABEL_KEYS_MESSAGE: Final = "give label keys such as pool or node.example/pool in matchLabels"


def check_label_keys(labels: dict[str, str]) -> dict[str, str]:
    """Validate in Python alone: keys of a map have no schema, and CEL over them exceeds the API server's budget."""
    if not all(len(key) <= 316 and re.fullmatch(_LABEL_KEY, key) for key in labels):
        raise ValueError(_LABEL_KEYS_MESSAGE)
    return labels
