"""docs/reference/metrics.md tells of every metric, and of no other."""

from __future__ import annotations

import re
from pathlib import Path

from metrics_reference import PAGE, page, tables

ROOT = Path(__file__).resolve().parents[1]


def test_the_page_is_fresh():
    assert PAGE.read_text() == page(), "run `make gen` and commit the result"


def test_names_and_units_are_those_of_prometheus():
    for table in tables().values():
        for name, kind, labels, text in table:
            assert re.fullmatch(r"kvpool_[a-z][a-z0-9_]*", name)
            assert name.endswith("_total") == (kind == "counter"), name
            assert not re.search(r"_(ms|us|micro\w*|milli\w*|minutes|hours|kib|mib|kb|mb|percent)(_|$)", name)
            assert text.endswith("."), name
            assert kind != "histogram" or name.endswith("_seconds")
            assert "tenant" not in labels or "asked for" in text


def test_pages_speak_of_metrics_that_there_are():
    known = {name for table in tables().values() for name, *_ in table}
    known |= {name.removesuffix("_total") for name in known}
    for path in (ROOT / "docs").rglob("*.md"):
        for name in re.findall(
            r"`(kvpool_(?:sidecar|client|events|operator|webhook|pool)_[a-z_]+[a-z])\b", path.read_text()
        ):
            assert name in known, f"{path.name}: {name}"
