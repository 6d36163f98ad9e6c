"""Reading the locked lists in requirements/*.txt: name, version and digests of every part."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

__all__ = ["FOLDER", "Part", "read"]

FOLDER = Path(__file__).resolve().parents[1] / "requirements"
_PIN = re.compile(r"(?P<name>[A-Za-z0-9][A-Za-z0-9._-]*)(?:\[[^\]]*\])?==(?P<version>[^\s;\\]+)")
_DIGEST = re.compile(r"--hash=sha256:([0-9a-f]{64})")


@dataclass(frozen=True)
class Part:
    """One distribution of PyPI. `digests`: SHA-256 of each of its files that may be installed."""

    name: str
    version: str
    digests: tuple[str, ...]

    @property
    def purl(self) -> str:
        """The package URL (a name, not an address)."""
        return f"pkg:pypi/{self.name}@{self.version}"


def read(name: str) -> list[Part]:
    """The parts of requirements/NAME.txt, in order. ValueError where a line is not a pin with digests."""
    text = (FOLDER / f"{name}.txt").read_text()
    lines = (line.strip() for line in text.replace("\\\n", " ").splitlines())
    found = []
    for line in lines:
        if not line or line.startswith("#"):
            continue
        pin, digests = _PIN.match(line), _DIGEST.findall(line)
        if pin is None or not digests:
            raise ValueError(f"requirements/{name}.txt: not a pin with digests: {line[:80]}")
        canonical = re.sub(r"[-_.]+", "-", pin["name"]).lower()
        found.append(Part(canonical, pin["version"], tuple(digests)))
    return found
