"""Alerts and dashboards speak of metrics that there are, and every alert has a page that says what to do."""

from __future__ import annotations

import importlib.util
import json
import re
from pathlib import Path

import pytest
import yaml

from kvpool_operator import errors
from kvpool_operator.api.condition_types import POOL_CONDITIONS
from kvpool_operator.api.reasons import Reason

ROOT = Path(__file__).resolve().parents[3]
CHART = ROOT / "charts" / "kvpool"
RUNBOOKS = ROOT / "docs" / "operate" / "runbooks"
GROUPS = yaml.safe_load((CHART / "files" / "alerts.yaml").read_text())["groups"]
RULES = [rule for group in GROUPS for rule in group["rules"]]
ALERTS = [rule for rule in RULES if "alert" in rule]
DASHBOARDS = sorted((CHART / "files" / "dashboards").glob("*.json"))
FROM_TARGETS = {"namespace", "pool", "node", "pod"}
_NAME = r"kvpool[a-zA-Z_:0-9]+"


def load(path: Path):
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


REFERENCE = load(ROOT / "tests" / "metrics_reference.py")
LABELS = REFERENCE.labels_of() | {rule["record"]: set() for rule in RULES if "record" in rule}


def expressions():
    """Where from, and the expression in PromQL."""
    for rule in RULES:
        yield rule.get("alert") or rule["record"], rule["expr"]
    for path in DASHBOARDS:
        board = json.loads(path.read_text())
        for panel in board["panels"]:
            for target in panel.get("targets", []):
                yield f"{path.name}: {panel['title']}", target["expr"]
        for variable in board["templating"]["list"]:
            if variable["type"] == "query":
                yield f"{path.name}: ${variable['name']}", variable["query"]["query"]


def wrong_words(expression: str) -> list[str]:
    """Metrics that no one has, and labels that no metric of the expression has."""
    names = re.findall(rf"\b{_NAME}", expression)
    wrong = [name for name in names if name not in LABELS]
    known = FROM_TARGETS.union(*(LABELS.get(name, set()) for name in names))
    used = [found for _, inner in re.findall(rf"({_NAME})\{{(.*?)\}}", expression) for found in _labels(inner)]
    used += [label for inner in re.findall(r"\bby \(([^)]*)\)", expression) for label in inner.split(", ")]
    return wrong + sorted(set(used) - known)


def _labels(matchers: str) -> list[str]:
    return re.findall(r"([a-z_]+)\s*(?:=~|!~|!=|=)", matchers)


@pytest.mark.parametrize(("where", "expression"), list(expressions()), ids=lambda v: v[:40].replace(" ", "_"))
def test_every_metric_and_label_exists(where: str, expression: str):
    assert re.search(rf"\b{_NAME}", expression), where
    assert wrong_words(expression) == []


def test_a_metric_or_a_label_that_is_not_there_is_noticed():
    assert wrong_words("rate(kvpool_sidecar_wonders_total[5m])") == ["kvpool_sidecar_wonders_total"]
    assert wrong_words('kvpool_pool_pods{stat="missed"}') == ["stat"]
    assert wrong_words("sum by (resaon) (kvpool_client_misses_total)") == ["resaon"]


def test_expressions_are_whole():
    for where, expression in expressions():
        assert all(expression.count(a) == expression.count(b) for a, b in ("()", "{}", "[]")), where


@pytest.mark.parametrize("alert", ALERTS, ids=lambda a: a["alert"])
def test_an_alert_says_what_is_wrong_and_has_a_runbook_that_names_it(alert):
    assert set(alert) <= {"alert", "expr", "for", "labels", "annotations"}
    assert alert["labels"]["severity"] in ("warning", "critical")
    notes = alert["annotations"]
    assert set(notes) == {"summary", "description", "runbook"}
    text = (RUNBOOKS / f"{notes['runbook']}.md").read_text()
    assert alert["alert"] in text.split("\n")[2]
    labels = set(re.findall(r"\$labels\.([a-z_]+)", notes["summary"] + notes["description"]))
    assert labels <= FROM_TARGETS.union(*(LABELS.get(n, set()) for n in re.findall(_NAME, alert["expr"])))


def test_no_runbook_without_an_alert():
    assert {p.stem for p in RUNBOOKS.glob("*.md")} == {a["annotations"]["runbook"] for a in ALERTS}


@pytest.mark.parametrize("path", sorted(RUNBOOKS.glob("*.md")), ids=lambda p: p.stem)
def test_a_runbook_speaks_of_things_that_there_are(path: Path):
    text = path.read_text()
    assert set(re.findall(r"kvpool_[a-z_]+", text)) - LABELS.keys() == set()
    words = set(re.findall(r"`([A-Z][a-z]+(?:[A-Z][a-z]+)*)`", text))
    reasons = {e.reason for e in vars(errors).values() if isinstance(e, type) and issubclass(e, errors.OperatorError)}
    policies = {"WriteThroughSelective", "SecondUse", "Budget", "Bug"}
    assert words - {r.value for r in Reason} - set(POOL_CONDITIONS) - reasons - policies == set()
    for link in re.findall(r"\]\(([^)]+)\)", text):
        assert (path.parent / link.partition("#")[0]).exists(), link


def test_the_dashboards_are_those_that_were_written_in_short():
    made = load(ROOT / "charts" / "dashboards.py").files()
    assert {p.name: p.read_text() for p in DASHBOARDS} == made, "run `make gen` and commit the result"


def test_a_dashboards_panels_do_not_overlap():
    for path in DASHBOARDS:
        taken = set()
        for panel in json.loads(path.read_text())["panels"]:
            at = panel["gridPos"]
            cells = {(at["x"] + x, at["y"] + y) for x in range(at["w"]) for y in range(at["h"])}
            assert not cells & taken, panel["title"]
            assert max(x for x, _ in cells) < 24
            taken |= cells
