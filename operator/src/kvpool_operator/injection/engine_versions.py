"""Release of an engine from its image tag.

A release decides nothing where the plug-in inside the engine can decide. The tag serves for a warning, and for leaving
alone releases that precede the interface: those have no plug-in system that could report why the pool is not used.
"""

from __future__ import annotations

import re
from typing import Final

from kvpool.engines.tested_versions import described, is_tested_release

__all__ = ["precedes_interface", "untested", "version_of_image"]

_NAMES: Final = {
    "vllm": re.compile(r"(?:.*[-/])?vllm-openai(?:-[a-z0-9]+)*\Z"),
    "sglang": re.compile(r"(?:.*/)?sglang\Z"),
    "lmcache": re.compile(r"(?:.*/)?lmcache/(?:standalone|vllm-openai)\Z"),
}
_OTHER_NUMBERS: Final = {
    "vllm": re.compile(r"(?:.*/)?lmcache/|nvcr\.io/nvidia/"),
    "sglang": re.compile(r"nvcr\.io/nvidia/"),
}
"""Images whose tag is the release of something else."""
_TAG: Final = re.compile(r"v?(\d{1,4}(?:\.\d{1,4}){1,3})(?:\.?post\d{1,6})?(?=[-_+]|\Z)")
_FIRST: Final = {"vllm": (0, 24), "sglang": (0, 5)}
"""First release that may have the interface: vLLM 0.23 rejects tiers of other packages, SGLang 0.4 storages."""
_TITLES: Final = {"vllm": "vLLM", "sglang": "SGLang", "lmcache": "LMCache"}


def version_of_image(engine: str, image: str) -> tuple[int, ...] | None:
    """Return the release of an image with the engine's name and a version tag, otherwise None.

    `.postN` is the release itself. Nightlies and candidates are no release.
    """
    reference = image.partition("@")[0]
    path, slash, last = reference.rpartition("/")
    name, _, tag = last.partition(":")
    found = _TAG.match(tag)
    repository = f"{path}{slash}{name}"
    if found is None or engine not in _NAMES or not _NAMES[engine].match(repository):
        return None
    if engine in _OTHER_NUMBERS and _OTHER_NUMBERS[engine].match(repository):
        return None
    return tuple(int(n) for n in found[1].split("."))


def precedes_interface(engine: str, version: tuple[int, ...] | None) -> str:
    """Return a clause if no engine of this release can use the pool, otherwise an empty string."""
    first = _FIRST.get(engine)
    if version is None or first is None or version >= first:
        return ""
    return (
        f"runs {_TITLES[engine]} {_dotted(version)} by its image tag, which has no interface for the pool; "
        f"tested releases are {described(engine)}"
    )


def untested(engine: str, version: tuple[int, ...] | None) -> str:
    """Return a warning for a release that is not in the table of tested releases, otherwise an empty string."""
    if version is None or engine not in _TITLES or is_tested_release(engine, version):
        return ""
    return (
        f"runs {_TITLES[engine]} {_dotted(version)}, which is not a tested release ({described(engine)}); if it "
        "lacks the interface, the engine runs without the pool, and an Event on the pod has the reason"
    )


def _dotted(version: tuple[int, ...]) -> str:
    return ".".join(map(str, version))
