"""Engine releases that the plug-ins were tested with: one table for the client and the operator.

A version alone does not decide whether an engine may use the pool: each plug-in probes the interface that it needs.
"""

from __future__ import annotations

import re
from typing import Final

__all__ = ["TESTED", "described", "is_tested", "is_tested_release"]

TESTED: Final[dict[str, tuple[tuple[tuple[int, ...], tuple[int, ...]], ...]]] = {
    "vllm": (((0, 30), (0, 34)),),
    "sglang": (((0, 5, 23), (0, 5, 24)),),
    "lmcache": (((0, 5, 6), (0, 6)),),
}
"""Ranges [first, end) of releases by engine."""
# a later packaging of a release, and a build of it for some accelerator, have the same interface
_RELEASE: Final = re.compile(r"v?(\d{1,4}(?:\.\d{1,4}){1,3})(?:\.post\d{1,6})?(?:\+[A-Za-z0-9.]{1,64})?\Z")


def is_tested(engine: str, version: str) -> bool:
    """Whether this version (PEP 440) is a tested release. Nightlies, release candidates and unknown forms are not."""
    found = _RELEASE.match(version)
    return found is not None and is_tested_release(engine, tuple(int(n) for n in found[1].split(".")))


def is_tested_release(engine: str, release: tuple[int, ...]) -> bool:
    """Whether a release, given as numbers, is in the table."""
    return any(first <= release < end for first, end in TESTED.get(engine, ()))


def described(engine: str) -> str:
    """Return the tested releases for a message: `0.32 and 0.33`, or `0.5.6 up to, not including, 0.6`."""
    return " and ".join(_described(*span) for span in TESTED.get(engine, ()))


def _described(first: tuple[int, ...], end: tuple[int, ...]) -> str:
    if len(first) == len(end) and first[:-1] == end[:-1]:
        names = [".".join(map(str, (*first[:-1], n))) for n in range(first[-1], end[-1])]
        return " and ".join([", ".join(names[:-1]), names[-1]] if len(names) > 1 else names)
    return f"{'.'.join(map(str, first))} up to, not including, {'.'.join(map(str, end))}"
