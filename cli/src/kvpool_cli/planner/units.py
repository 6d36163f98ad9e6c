"""Quantities that users write and read: tokens, bytes, durations, GPUs, drives."""

from __future__ import annotations

import re
from typing import NamedTuple

from kvpool_cli.errors import UsageError

_NUMBER = r"([0-9]{1,12}(?:\.[0-9]{1,6})?)"
_SCALES = {
    "": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12, "p": 10**15,
    "ki": 2**10, "mi": 2**20, "gi": 2**30, "ti": 2**40, "pi": 2**50,
}  # fmt: skip
_SECONDS = {"ms": 0.001, "": 1.0, "s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}


class Several(NamedTuple):
    """`8xH100` or `2x7.68TB`."""

    number: int
    what: str


def tokens(text: str) -> int:
    """Return the tokens of `20000`, `20k` (thousands) or `128Ki` (1,024 each)."""
    return _scaled(text, "tokens such as 20000, 20k or 128Ki", unit="")


def size(text: str) -> int:
    """Return the bytes of `500Gi`, `7.68TB` or `1e` free forms of Kubernetes quantities without exponents."""
    return _scaled(text, "bytes such as 500Gi or 7.68TB", unit="b?")


def seconds(text: str) -> float:
    """Return the seconds of `60`, `60s`, `30m`, `24h` or `7d`."""
    match = re.fullmatch(_NUMBER + r"(ms|s|m|h|d)?", text.strip().lower())
    if match is None:
        raise UsageError(f"{text!r} is not a duration such as 60s, 30m or 24h")
    return float(match.group(1)) * _SECONDS[match.group(2) or ""]


def several(text: str, example: str) -> Several:
    """Return count and kind of `8xH100`."""
    match = re.fullmatch(r"([1-9][0-9]{0,4})[x×](\S+)", text.strip())
    if match is None:
        raise UsageError(f"{text!r} is not a count and a kind such as {example}")
    return Several(int(match.group(1)), match.group(2))


def _scaled(text: str, what: str, unit: str) -> int:
    match = re.fullmatch(_NUMBER + rf"([kmgtp]i?)?{unit}", text.strip().lower())
    value = round(float(match.group(1)) * _SCALES[match.group(2) or ""]) if match else 0
    if value <= 0:
        raise UsageError(f"{text!r} is not a number of {what}")
    return value


def binary(count: float) -> str:
    """Format bytes in binary units: `32.0 MiB`."""
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        if count < 1024:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.{_digits(count)}f} {unit}"
        count /= 1024
    return f"{count:.{_digits(count)}f} PiB"


def decimal(count: float, unit: str = "B") -> str:
    """Format a count in decimal units: `17.0 TB`, `212 GB/s`."""
    for scale in ("", "k", "M", "G", "T"):
        if count < 1000:
            return f"{count:.{_digits(count)}f} {scale}{unit}"
        count /= 1000
    return f"{count:.{_digits(count)}f} P{unit}"


def _digits(count: float) -> int:
    return 0 if count >= 100 or count == int(count) else 1 if count >= 10 else 2
