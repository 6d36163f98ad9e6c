"""Known vulnerabilities of what the images install: `python -m supply.audit PIP_AUDIT` asks PyPI's advisories.

Ends with 1 for one that supply/accepted.toml does not name. Where nobody answers, or does not know a part, that is
said, and nothing fails: a check of the code must not depend on a network. An answer is good for a day, silence for an
hour.
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

from supply.requirements import FOLDER
from supply.sbom import IMAGES

__all__ = ["Verdict", "judge", "main", "read_accepted"]

ACCEPTED = Path(__file__).with_name("accepted.toml")
LISTS = sorted({name for made_of in IMAGES.values() for name in (*made_of["lists"], *made_of["optional"])})
TIMEOUT_S = 120
CALL_S = 10

Verdict = tuple[list[str], list[str], int]
"""What must be dealt with, and what was accepted, in sentences; how many parts the source knows nothing of."""
SILENCE_S = 3600


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


def main(argv: list[str]) -> int:
    """Judge every list; 1 if something must be dealt with."""
    if len(argv) != 1:
        print("usage: python -m supply.audit PIP_AUDIT", file=sys.stderr)
        return 2
    cache = os.environ.get("KVPOOL_CACHE") or Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "kvpool"
    accepted = read_accepted(ACCEPTED.read_text(), datetime.datetime.now(datetime.UTC).date())
    kept = Path(cache) / "audit"
    kept.mkdir(parents=True, exist_ok=True)
    silent = kept / "silent"
    every: list[str] = []
    for name in LISTS:
        is_silent = silent.exists() and 0 <= time.time() - silent.stat().st_mtime < SILENCE_S
        report = None if is_silent else _ask(argv[0], name, kept)
        if report is None:
            if not is_silent:
                silent.touch()
            print("audit: the source of advisories does not answer, so NOTHING IS KNOWN about vulnerabilities")
            break
        silent.unlink(missing_ok=True)
        bad, known, unknown = judge(report, accepted)
        for sentence in known:
            print(f"audit: accepted: {sentence}")
        every += [f"requirements/{name}.txt: {sentence}" for sentence in bad]
        parts = len(report["dependencies"])
        print(f"audit: requirements/{name}.txt: {parts} parts, {len(bad)} findings, {unknown} unknown")
    for sentence in every:
        print(f"audit: {sentence}", file=sys.stderr)
    return 1 if every else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
