"""Known vulnerabilities of what the images install: `python -m supply.audit PIP_AUDIT` asks PyPI's advisories.

Ends with 1 for one that supply/accepted.toml does not name. A file of advisories (supply.advisories, $ADVISORIES) is
read beside PyPI, and in its place where no list answers. Silence is reported and fails nothing at first: a check of the
code must not depend on a network. After $AUDIT_MAX_DAYS (30) without knowledge about a list, it fails. These days count
from the last answer, or from the list's last change if there never was one. An answer is good for a day, silence for an
hour. PIP_AUDIT empty: the tool cannot be had.
"""

from __future__ import annotations

import datetime
import hashlib
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import tomllib

from supply import advisories
from supply.requirements import FOLDER, read
from supply.sbom import IMAGES, INSIDE

__all__ = ["Verdict", "days_unknown", "judge", "main", "read_accepted"]

ACCEPTED = Path(__file__).with_name("accepted.toml")
LISTS = sorted({name for made_of in IMAGES.values() for name in (*made_of["lists"], *made_of["optional"])})
TIMEOUT_S = 120
CALL_S = 10

Verdict = tuple[list[str], list[str], int]
"""What must be dealt with, and what was accepted, in sentences; how many parts the source knows nothing of."""
SILENCE_S = 3600
MAX_DAYS = 30
_DAY_S = 86400


def read_accepted(text: str, today: datetime.date) -> dict[str, str]:
    """Identifier of an advisory: distribution, of the entries that still count. ValueError for an incomplete entry."""
    found = {}
    for advisory, entry in tomllib.loads(text).items():
        if set(entry) != {"part", "reason", "until"} or not str(entry["reason"]).strip():
            raise ValueError(f"{ACCEPTED.name}: {advisory} needs part, reason and until")
        if not isinstance(entry["until"], datetime.date):
            raise ValueError(f"{ACCEPTED.name}: {advisory}: until is a date")
        if entry["until"] >= today:
            found[advisory] = str(entry["part"])
    return found


def judge(report: dict[str, Any], accepted: dict[str, str]) -> Verdict:
    """`report` is pip-audit's JSON."""
    bad, known, unknown = [], [], 0
    for part in report["dependencies"]:
        unknown += "skip_reason" in part
        for one in part.get("vulns", []):
            names = {one["id"], *one.get("aliases", [])}
            mended = ", ".join(one.get("fix_versions") or []) or "no version yet"
            sentence = f"{part['name']} {part['version']}: {one['id']} (mended in {mended})"
            (known if any(accepted.get(name) == part["name"] for name in names) else bad).append(sentence)
    return bad, known, unknown


def _ask(pip_audit: str, name: str, kept: Path) -> dict[str, Any] | None:
    """pip-audit's report on one list; None where its source does not answer."""
    text = (FOLDER / f"{name}.txt").read_bytes()
    day = datetime.datetime.now(datetime.UTC).date().isoformat()
    cached = kept / f"{name}-{hashlib.sha256(text).hexdigest()[:16]}-{day}.json"
    if cached.exists():
        found: dict[str, Any] = json.loads(cached.read_text())
        return found
    command = [pip_audit, "-r", str(FOLDER / f"{name}.txt"), "--disable-pip", "--require-hashes"]
    command += ["--format=json", "--progress-spinner=off", f"--timeout={CALL_S}", f"--cache-dir={kept / 'http'}"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S, check=False)
        found = json.loads(done.stdout)
    except (subprocess.TimeoutExpired, ValueError):
        return None
    if all("skip_reason" in part for part in found["dependencies"]):
        return None  # a mirror that has the distributions, but no advisories
    for old in kept.glob(f"{name}-*.json"):
        old.unlink()
    cached.write_text(done.stdout)
    return found


def days_unknown(name: str, kept: Path, file: advisories.AdvisoryFile | None, now: float) -> float:
    """Days for which nothing is known about a list: since the last answer of PyPI, or the file's day, or its change."""
    known = [_changed(name)]
    answered = kept / f"{name}-answered"
    if answered.exists():
        known.append(answered.stat().st_mtime)
    if file is not None:
        known.append(datetime.datetime.combine(file.updated, datetime.time(), datetime.UTC).timestamp())
    return max(0.0, (now - max(known)) / _DAY_S)


def _changed(name: str) -> float:
    """Time of the list's last change: its last commit, or without git that of the file."""
    path = FOLDER / f"{name}.txt"
    command = ["git", "-C", str(FOLDER), "log", "-1", "--format=%ct", "--", path.name]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return path.stat().st_mtime
    return float(done.stdout) if done.returncode == 0 and done.stdout.strip() else path.stat().st_mtime


def _from_file(name: str, file: advisories.AdvisoryFile) -> dict[str, Any]:
    """What the file knows about a list, and about the programs inside its parts."""
    parts = read(name)
    programs = [advisories.Program(*INSIDE[part.name][:3]) for part in parts if part.name in INSIDE]
    return advisories.report(file, [*parts, *programs])


def _answer(pip_audit: str, name: str, kept: Path) -> dict[str, Any] | None:
    """PyPI's answer, unless it was silent within the last hour."""
    silent = kept / "silent"
    if not pip_audit or (silent.exists() and 0 <= time.time() - silent.stat().st_mtime < SILENCE_S):
        return None
    report = _ask(pip_audit, name, kept)
    if report is None:
        silent.touch()
        return None
    silent.unlink(missing_ok=True)
    (kept / f"{name}-answered").touch()
    return report


def main(argv: list[str]) -> int:
    """Judge every list; 1 if something must be dealt with, or if nothing is known for too long."""
    if len(argv) != 1:
        print("usage: python -m supply.audit PIP_AUDIT", file=sys.stderr)
        return 2
    cache = os.environ.get("KVPOOL_CACHE") or Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "kvpool"
    max_days = float(os.environ.get("AUDIT_MAX_DAYS") or MAX_DAYS)
    accepted = read_accepted(ACCEPTED.read_text(), datetime.datetime.now(datetime.UTC).date())
    offline = os.environ.get("ADVISORIES", "")
    file = advisories.parse(Path(offline).read_text()) if offline else None
    kept = Path(cache) / "audit"
    kept.mkdir(parents=True, exist_ok=True)
    problems: list[str] = []
    for name in LISTS:
        answer = _answer(argv[0], name, kept)
        reports = [r for r in (answer, _from_file(name, file) if file is not None else None) if r is not None]
        for report in reports:
            bad, known, unknown = judge(report, accepted)
            for sentence in known:
                print(f"audit: accepted: {sentence}")
            problems += [f"requirements/{name}.txt: {sentence}" for sentence in bad]
            parts = len(report["dependencies"])
            print(f"audit: requirements/{name}.txt: {parts} parts, {len(bad)} findings, {unknown} unknown")
        if answer is not None:
            continue
        days = days_unknown(name, kept, file, time.time())
        if not reports:
            print(f"audit: requirements/{name}.txt: no source answers: NOTHING IS KNOWN about vulnerabilities")
        if days > max_days:
            problems.append(
                f"requirements/{name}.txt: nothing was known for {days:.0f} days (at most {max_days:.0f}): "
                "run it where PyPI's advisories answer, or give ADVISORIES=FILE with a recent file"
            )
    for sentence in dict.fromkeys(problems):
        print(f"audit: {sentence}", file=sys.stderr)
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
