"""Engine version from the image tag, and the versions that the client supports.

A plug-in rejects an unsupported version, and the engine runs without the pool. But an engine does not start with
unknown
flags or modules, so a version in the tag is checked first.
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
"""Supported version ranges [first, end) by engine, as declared by the plug-ins in kvpool.engines."""
_NAMES: Final = {
    "vllm": re.compile(r"(?:.*[-_./])?vllm(?:-openai)?\Z"),
    "sglang": re.compile(r"(?:.*[-_./])?sglang\Z"),
    "lmcache": re.compile(r"(?:.*/)?lmcache/standalone\Z"),
}
_TAG: Final = re.compile(r"v?(\d{1,4}(?:\.\d{1,4}){1,3})(?![.\d])")


def version_of_image(engine: str, image: str) -> tuple[int, ...] | None:
    """Return the version of an image with the engine's name and a version tag, otherwise None."""
    name, _, tag = image.partition("@")[0].rpartition("/")[2].partition(":")
    path = image.partition("@")[0].rpartition("/")[0]
    found = _TAG.match(tag)
    if found is None or engine not in _NAMES or not _NAMES[engine].match(f"{path}/{name}"):
        return None
    return tuple(int(n) for n in found[1].split("."))


def is_known(engine: str, version: tuple[int, ...] | None) -> bool:
    """Whether the client supports the version. An unknown version counts as supported."""
    return version is None or any(first <= version < end for first, end in KNOWN.get(engine, ()))
