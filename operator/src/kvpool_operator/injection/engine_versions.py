"""Engine version from the image tag, and whether the client was tested with it.

The table is the client's: kvpool.engines.tested_versions. An engine does not start with unknown flags or modules, so a
version in the tag is checked first.
"""

from __future__ import annotations

import re
from typing import Final

from kvpool.engines.tested_versions import is_tested_release

__all__ = ["is_known", "version_of_image"]

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
    return version is None or is_tested_release(engine, version)
