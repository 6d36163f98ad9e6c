"""Kubernetes quantities: bytes such as `500Gi`, CPUs such as `500m`."""

from __future__ import annotations

import re
from decimal import ROUND_CEILING, Decimal
from typing import Final

__all__ = ["exact_bytes", "format_bytes", "to_bytes", "to_milli"]

_FORM: Final = re.compile(
    r"([+-]?(?:[0-9]{1,24}(?:\.[0-9]{0,24})?|\.[0-9]{1,24}))([KMGTPE]i|[numkMGTPE]|[eE][+-]?[0-9]{1,2})?"
)
_BINARY: Final = {"Ki": 1, "Mi": 2, "Gi": 3, "Ti": 4, "Pi": 5, "Ei": 6}
_DECIMAL: Final = {"n": -3, "u": -2, "m": -1, "k": 1, "M": 2, "G": 3, "T": 4, "P": 5, "E": 6}


def to_bytes(quantity: int | str) -> int:
    """Parse `500Gi`, `1.5Ti`, `100G`, `1e9` or a number, rounded up to whole bytes.

    ValueError for anything else, and for negative quantities.
    """
    return int(_parse(quantity).to_integral_value(ROUND_CEILING))


def to_milli(quantity: int | str) -> int:
    """Parse a quantity such as `500m` or `2` CPUs into thousandths, rounded up. ValueError as for `to_bytes`."""
    return int((_parse(quantity) * 1000).to_integral_value(ROUND_CEILING))


def _parse(quantity: int | str) -> Decimal:
    match = None if isinstance(quantity, bool) else _FORM.fullmatch(str(quantity))
    if match is None:
        raise ValueError("not a quantity of bytes such as 500Gi")
    number, unit = Decimal(match.group(1)), match.group(2) or ""
    if unit in _BINARY:
        number *= 1024 ** _BINARY[unit]
    elif unit in _DECIMAL:
        number *= Decimal(1000) ** _DECIMAL[unit]
    elif unit:
        number *= Decimal(10) ** int(unit[1:])
    if number < 0:
        raise ValueError("a quantity of bytes cannot be negative")
    return number


def format_bytes(n: int) -> str:
    """Format bytes as the shortest binary quantity within half a percent: 0, `512Mi`, `1.5Gi`. Never "0" for n > 0."""
    value, unit = float(max(n, 0)), ""
    for name in ("Ki", "Mi", "Gi", "Ti", "Pi"):
        if value < 1024:
            break
        value, unit = value / 1024, name
    digits = 0 if value >= 100 or not unit else 1 if value >= 10 else 2
    text = f"{value:.{digits}f}"
    return (text.rstrip("0").rstrip(".") if "." in text else text) + unit


def exact_bytes(n: int) -> str:
    """Format bytes in the canonical form of the API server: with the largest binary unit that divides them."""
    for power in range(5, 0, -1):
        if n and n % 1024**power == 0:
            return f"{n // 1024**power}{('Ki', 'Mi', 'Gi', 'Ti', 'Pi')[power - 1]}"
    return str(n)
