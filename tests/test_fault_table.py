"""docs/contribute/faults.md names tests: they must exist."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parent.parent
TABLE = (ROOT / "docs/contribute/faults.md").read_text()
NAMED = re.findall(r"`(test_\w+)(?:\[(\w+)\])?`", TABLE)
FOLDERS = ("client", "sidecar", "operator", "tests", "e2e")
HERE = set(range(1, 31))


def sources() -> dict[str, str]:
    files = [f for folder in FOLDERS for f in (ROOT / folder).rglob("*.py") if ".venv" not in f.parts]
    return {str(f): f.read_text() for f in files}


def test_every_test_that_the_table_of_faults_names_exists():
    text = "\n".join(sources().values())
    defined = set(re.findall(r"^\s*(?:async )?def (test_\w+)\(", text, re.MULTILINE))
    assert len(NAMED) > 50
    assert sorted({name for name, _ in NAMED} - defined) == []
    cases = {case for name, case in NAMED if case}
    assert sorted(case for case in cases if f"def {case}(" not in text) == []


def test_the_table_of_faults_has_each_fault_once_with_a_test():
    rows = re.findall(r"^\| (\d+) \|.*$", TABLE, re.MULTILINE)
    assert len(rows) == len(set(rows))
    assert {int(n) for n in rows} <= HERE
    for line in TABLE.splitlines():
        if re.match(r"\| \d+ \|", line):
            assert "`test_" in line, line
