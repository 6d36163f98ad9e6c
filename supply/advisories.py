"""Advisories from a file, for places where no index answers: records of OSV's schema (https://ossf.github.io/osv-schema/).

    {"updated": "2026-11-22", "advisories": [{"id": ..., "affected": [{"package": ..., "ranges": ...}]}]}

`updated` is the day of the last comparison of the file with its sources. A package is named as OSV does: `ecosystem`
PyPI and `name`, or `purl` without a version. The latter also names programs inside distributions, such as
pkg:generic/valkey, of which Python's advisories know nothing. `make audit ADVISORIES=FILE` reads it.
"""

from __future__ import annotations

import datetime
import json
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from packaging.version import InvalidVersion, Version

if TYPE_CHECKING:
    from collections.abc import Iterable

    from supply.requirements import Part

__all__ = ["AdvisoryFile", "Program", "parse", "report"]

_RANGES = ("ECOSYSTEM", "SEMVER")


@dataclass(frozen=True)
class Program:
    """A program inside a distribution: its name, version and package URL with the version."""

    name: str
    version: str
    purl: str


@dataclass(frozen=True)
class AdvisoryFile:
    """Records of OSV, and the day on which they were complete."""

    updated: datetime.date
    records: tuple[dict[str, Any], ...]


def parse(text: str) -> AdvisoryFile:
    """Read the file's text. ValueError if it is not as described."""
    found = json.loads(text)
    if not isinstance(found, dict) or not isinstance(found.get("advisories"), list):
        raise ValueError("the file of advisories needs `updated` and a list `advisories`")
    records = found["advisories"]
    for record in records:
        if not isinstance(record, dict) or not record.get("id") or not isinstance(record.get("affected"), list):
            raise ValueError("each advisory needs `id` and a list `affected`")
    return AdvisoryFile(datetime.date.fromisoformat(str(found.get("updated", ""))), tuple(records))


def report(file: AdvisoryFile, parts: Iterable[Part | Program]) -> dict[str, Any]:
    """What the file knows about the parts, in the form of pip-audit's JSON."""
    return {"dependencies": [_judged(part, file.records) for part in parts]}


def _judged(part: Part | Program, records: Iterable[dict[str, Any]]) -> dict[str, Any]:
    vulns = []
    for record in records:
        affected = [a for a in record["affected"] if _is_about(a.get("package") or {}, part)]
        if not record.get("withdrawn") and any(_is_affected(a, part.version) for a in affected):
            fixed = sorted({e["fixed"] for a in affected for e in _events(a) if "fixed" in e}, key=_key)
            vulns.append({"id": record["id"], "aliases": record.get("aliases") or [], "fix_versions": fixed})
    return {"name": part.name, "version": part.version, "vulns": vulns}


def _is_about(package: dict[str, Any], part: Part | Program) -> bool:
    if package.get("purl"):
        return str(package["purl"]).partition("@")[0] == part.purl.partition("@")[0]
    name = re.sub(r"[-_.]+", "-", str(package.get("name", ""))).lower()
    return package.get("ecosystem") == "PyPI" and part.purl.startswith(f"pkg:pypi/{name}@")


def _is_affected(affected: dict[str, Any], version: str) -> bool:
    if version in (affected.get("versions") or []):
        return True
    return any(_is_in(r.get("events") or [], _key(version)) for r in _ranges(affected))


def _is_in(events: list[dict[str, str]], version: Version) -> bool:
    """OSV's rule: in order of their versions, `introduced` begins a range, `fixed` and `last_affected` end it."""
    inside = False
    for kind, at in sorted(((k, _key(v)) for e in events for k, v in e.items() if k != "limit"), key=lambda e: e[1]):
        if kind == "introduced" and version >= at:
            inside = True
        elif (kind == "fixed" and version >= at) or (kind == "last_affected" and version > at):
            inside = False
    return inside


def _ranges(affected: dict[str, Any]) -> list[dict[str, Any]]:
    return [r for r in affected.get("ranges") or [] if r.get("type") in _RANGES]


def _events(affected: dict[str, Any]) -> list[dict[str, str]]:
    return [event for r in _ranges(affected) for event in r.get("events") or []]


def _key(version: str) -> Version:
    try:
        return Version(version)
    except InvalidVersion:
        raise ValueError(f"the file of advisories has a version that cannot be compared: {version!r}") from None
