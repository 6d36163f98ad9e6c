"""docs/reference/metrics.md lists every metric, and of no other."""

from __future__ import annotations

import re
from pathlib import Path

from metrics_reference import PAGE, label_values, page, tables

from kvpool_sidecar.observability import metrics as sidecar

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
            assert "tenant" not in labels or "only if per-tenant metrics are enabled" in text


_UNITS = {
    *("bytes", "seconds", "blocks", "tokens", "files", "batches", "queries", "requests", "operations", "failures"),
    *("errors", "events", "misses", "copies", "updates", "fallbacks", "reports", "replays", "published", "lost"),
    *("rejected", "refused", "probes", "lookups", "hints"),
}


def test_each_sidecar_counter_has_one_unit():
    """The name ends with the unit, and no label value stands for another one."""
    values = {name: set() for name, *_ in label_values()}
    for name, _, value, _ in label_values():
        values[name].add(value)
    for name, kind, _, _ in sidecar.reference():
        if kind == "counter":
            assert name.removesuffix("_total").rpartition("_")[2] in _UNITS, name
        assert not any("bytes" in value or "seconds" in value for value in values.get(name, ())), name


def test_every_sidecar_label_is_documented_with_its_values():
    documented = {(name, label) for name, label, _, _ in label_values()}
    for name, _, label, _ in sidecar.reference():
        assert not label or label == "tenant" or (name, label) in documented, name
    assert all(text.endswith(".") for *_, text in label_values())


def test_pages_speak_of_metrics_that_there_are():
    known = {name for table in tables().values() for name, *_ in table}
    known |= {name.removesuffix("_total") for name in known}
    for path in (ROOT / "docs").rglob("*.md"):
        for name in re.findall(
            r"`(kvpool_(?:sidecar|client|events|operator|webhook|pool)_[a-z_]+[a-z])\b", path.read_text()
        ):
            assert name in known, f"{path.name}: {name}"
