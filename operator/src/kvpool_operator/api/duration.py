"""Durations such as `20ms` and `1m30s`."""

from __future__ import annotations

import re
from typing import Final

__all__ = ["FORM", "to_ms"]

FORM: Final = r"^([0-9]{1,6}(ms|s|m|h)){1,4}$"

_MS: Final = {"ms": 1, "s": 1000, "m": 60_000, "h": 3_600_000}


def to_ms(text: str) -> int:
    """Parse a duration to whole milliseconds. ValueError for anything else."""
    if not re.fullmatch(FORM, text, re.ASCII):
        raise ValueError("not a duration such as 20ms")
    return sum(int(n) * _MS[unit] for n, unit in re.findall(r"([0-9]+)(ms|s|m|h)", text))
