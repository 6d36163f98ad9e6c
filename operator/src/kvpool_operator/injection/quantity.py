"""Kubernetes quantities as whole bytes (or units), rounded up."""

from __future__ import annotations

import re
from decimal import ROUND_CEILING, Decimal
from typing import Any, Final

__all__ = ["to_int"]

_FORM: Final = re.compile(
    r"\+?([0-9]{1,24}(?:\.[0-9]{0,24})?|\.[0-9]{1,24})(m|k|[KMGTPE]i|[MGTPE]|[eE][+-]?[0-9]{1,2})?\Z"
)
_BINARY: Final = {"Ki": 1, "Mi": 2, "Gi": 3, "Ti": 4, "Pi": 5, "Ei": 6}
_DECIMAL: Final = {"m": -1, "k": 1, "M": 2, "G": 3, "T": 4, "P": 5, "E": 6}


def to_int(quantity: Any) -> int:
    """`4Gi`, `500M`, `1.5Ti`, `1e9` or a number as an int. ValueError for anything else, and for what is below 0."""
    match = _FORM.match(str(quantity).strip())
    if match is None:
        raise ValueError(f"{str(quantity)[:40]!r} is not a quantity such as 4Gi")
    number, suffix = Decimal(match.group(1)), match.group(2) or ""
    if suffix in _BINARY:
        number *= 1024 ** _BINARY[suffix]
    elif suffix in _DECIMAL:
        number *= Decimal(1000) ** _DECIMAL[suffix]
    elif suffix:
        number *= Decimal(10) ** int(suffix[1:])
    return int(number.to_integral_value(ROUND_CEILING))
