"""Every alert has unit tests for promtool: one in which it fires, one in which the same metrics keep it silent."""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).resolve().parents[3]
RULES = [
    rule
    for group in yaml.safe_load((ROOT / "charts/kvpool/files/alerts.yaml").read_text())["groups"]
    for rule in group["rules"]
]
FILES = sorted((ROOT / "charts" / "alert_tests").glob("*.yaml"))
TESTS = [test for path in FILES for test in yaml.safe_load(path.read_text())["tests"]]
RECORDED = {rule["record"]: rule["expr"] for rule in RULES if "record" in rule}


def metrics(expression: str) -> set[str]:
    """Return the metrics behind an expression, also those of the recording rules that it reads."""
    found: set[str] = set()
    for name in re.findall(r"\bkvpool[a-z_:0-9]+", expression):
        found |= metrics(RECORDED[name]) if name in RECORDED else {name}
    return found


def outcomes(alert: str, of: set[str]) -> Counter[str]:
    """Count the tests with series of these metrics in which the alert fires, and in which it never does."""
    found: Counter[str] = Counter()
    for test in TESTS:
        expected = [one["exp_alerts"] for one in test["alert_rule_test"] if one["alertname"] == alert]
        series = {re.split(r"[{\s]", one["series"])[0] for one in test["input_series"]}
        if expected and series & of:
            found["fires" if any(expected) else "silent"] += 1
    return found


@pytest.mark.parametrize("rule", [rule for rule in RULES if "alert" in rule], ids=lambda rule: rule["alert"])
def test_an_alert_is_tested_firing_and_silent(rule):
    found = outcomes(rule["alert"], metrics(rule["expr"]))
    assert found["fires"], f"no test in charts/alert_tests in which {rule['alert']} fires"
    assert found["silent"], f"no test in charts/alert_tests in which {rule['alert']} stays silent"


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_a_file_reads_the_charts_rules_and_every_test_has_samples(path: Path):
    content = yaml.safe_load(path.read_text())
    assert content["rule_files"] == ["../kvpool/files/alerts.yaml"]
    names = {rule["alert"] for rule in RULES if "alert" in rule}
    for test in content["tests"]:
        assert test["interval"], "promtool reads no interval as 0"
        assert {one["alertname"] for one in test["alert_rule_test"]} <= names


def test_an_alert_without_a_test_is_noticed():
    assert outcomes("KVPoolUntested", {"kvpool_pool_condition"}) == {}
    assert metrics("kvpool:hit_ratio:rate15m > 0") >= {"kvpool_client_lookup_hit_tokens_total"}
