"""Whether the expressions of the alerts and dashboards are PromQL (run by the audit's tools, which have a parser)."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import promql_parser
import yaml

if TYPE_CHECKING:
    from collections.abc import Iterator

FILES = Path(__file__).resolve().parent / "kvpool" / "files"


def expressions() -> Iterator[tuple[str, str]]:
    """Where from, and the expression, with a time in place of what Grafana puts in."""
    for group in yaml.safe_load((FILES / "alerts.yaml").read_text())["groups"]:
        for rule in group["rules"]:
            yield rule.get("alert") or rule["record"], rule["expr"]
    for path in sorted((FILES / "dashboards").glob("*.json")):
        for panel in json.loads(path.read_text())["panels"]:
            for target in panel.get("targets", []):
                yield f"{path.name}: {panel['title']}", target["expr"].replace("$__rate_interval", "5m")


wrong = seen = 0
for where, expression in expressions():
    seen += 1
    try:
        promql_parser.parse(expression)
    except ValueError as e:
        wrong += 1
        print(f"{where}: {e}: {expression}", file=sys.stderr)
print(f"{seen} expressions, {wrong} that are no PromQL")
sys.exit(1 if wrong or not seen else 0)
