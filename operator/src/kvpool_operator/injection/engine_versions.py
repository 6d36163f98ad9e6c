"""Which version of its engine an image's tag tells, and whether the client knows it. Pure.

A plug-in refuses a version that it does not know, and the engine runs without the pool; but flags or modules that an
engine does not know keep it from starting at all. So where the tag tells, it is looked at first.
"""

from __future__ import annotations

import re
from typing import Final

__all__ = ["KNOWN", "is_known", "version_of_image"]

KNOWN: Final[dict[str, tuple[tuple[tuple[int, ...], tuple[int, ...]], ...]]] = {
    "vllm": (((0, 32), (0, 34)),),
    "sglang": (((0, 5, 23), (0, 5, 24)),),
    "lmcache": (((0, 5, 6), (0, 6)),),
}
"""By engine: from, and up to but not including. What the plug-ins in kvpool.engines say of themselves."""
_NAMES: Final = {
    "vllm": re.compile(r"(?:.*[-_./])?vllm(?:-openai)?\Z"),
    "sglang": re.compile(r"(?:.*[-_./])?sglang\Z"),
    "lmcache": re.compile(r"(?:.*/)?lmcache/standalone\Z"),
}
_TAG: Final = re.compile(r"v?(\d{1,4}(?:\.\d{1,4}){1,3})(?![.\d])")


def version_of_image(engine: str, image: str) -> tuple[int, ...] | None:
    """Of an image that is named after the engine and tagged with its version; None where it does not tell."""
    name, _, tag = image.partition("@")[0].rpartition("/")[2].partition(":")
    path = image.partition("@")[0].rpartition("/")[0]
    found = _TAG.match(tag)
    if found is None or engine not in _NAMES or not _NAMES[engine].match(f"{path}/{name}"):
        return None
    return tuple(int(n) for n in found[1].split("."))


def is_known(engine: str, version: tuple[int, ...] | None) -> bool:
    """Whether the client has a plug-in for it. What is not told may be."""
    return version is None or any(first <= version < end for first, end in KNOWN.get(engine, ()))
