"""When blocks were removed that lookups miss, and the commands against a kubectl that answers."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest
from cli_documents import documents
from cli_kubectl import install

from kvpool_cli import main as entry
from kvpool_cli.cluster.removals import AGES, parse
from kvpool_sidecar.serving.miss_causes import AGES as BOUNDS

if TYPE_CHECKING:
    from pathlib import Path

NAME = "kvpool_sidecar_removed_miss_lookups_total"
METRICS = f"""# HELP {NAME} Lookups
{NAME}{{age="older"}} 0.0
{NAME}{{age="ten-minutes"}} 30.0
{NAME}{{age="minute"}} 1.5e+01
{NAME}{{age="unheard-of"}} 7.0
kvpool_sidecar_other_total{{age="day"}} 9.0
"""


def test_counts_above_zero_are_read_the_latest_first():
    assert list(parse(METRICS).items()) == [("minute", 15), ("ten-minutes", 30)]
    assert parse("nonsense\n") == {}


def test_each_age_of_the_sidecars_has_words():
    assert list(AGES) == [*BOUNDS, "older"]


def test_why_shows_when_missed_blocks_had_been_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    install(tmp_path, documents(), METRICS)
    monkeypatch.setenv("PATH", str(tmp_path))
    entry.main(["why", "team-a/x"])
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert ["less", "than", "a", "minute", "15", "33", "%"] in lines
    assert ["1", "to", "10", "minutes", "30", "67", "%"] in lines
    entry.main(["why", "team-a/x", "-o", "json"])
    assert json.loads(capsys.readouterr().out)["removedLookups"] == {"minute": 15, "ten-minutes": 30}


@pytest.mark.parametrize("metrics", ["", "nonsense"])
def test_why_without_such_lookups_has_no_table(
    metrics: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
):
    install(tmp_path, documents(), metrics)
    monkeypatch.setenv("PATH", str(tmp_path))
    entry.main(["why", "team-a/x"])
    text = capsys.readouterr().out
    assert "connected to the sidecar on node-0" in text
    assert "REMOVED BEFORE" not in text


def test_a_cluster_that_refuses_the_proxy_has_no_silent_node(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
):
    install(tmp_path, documents(), proxy=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert entry.main(["doctor", "chat"]) == 0
    text = capsys.readouterr().out
    assert "KVP0401" not in text
    assert "you have no right to get pods/proxy in namespace kvpool-system" in text
    assert entry.main(["why", "team-a/x"]) == 0
    assert "REMOVED BEFORE" not in capsys.readouterr().out
