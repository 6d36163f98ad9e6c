"""Log lines name a finding by its code: each code exists, and has an anchor on the page of findings."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from kvpool_operator.api.findings.codes import DOCS_PAGE, Code

ROOT = Path(__file__).resolve().parents[1]
CODE = re.compile(r"KVP\d{4}")
LOGGED = {
    "sidecar/src/kvpool_sidecar/index/announcer.py": Code.INDEX_FULL,
    "sidecar/src/kvpool_sidecar/index/peer_reachability.py": Code.PEERS_UNREACHABLE,
    "sidecar/src/kvpool_sidecar/index/registration.py": Code.INDEX_NOT_CONNECTED,
    "sidecar/src/kvpool_sidecar/peers/rdma/factory.py": Code.TRANSPORT_DIFFERS,
    "sidecar/src/kvpool_sidecar/storage/local/drive.py": Code.WRONG_MOUNT,
    "sidecar/src/kvpool_sidecar/storage/local/health.py": Code.DRIVE_ERRORS,
}
"""Modules of the sidecar that log the cause of a finding."""


@pytest.mark.parametrize("place", LOGGED)
def test_the_line_about_a_cause_has_its_code(place: str):
    assert set(CODE.findall((ROOT / place).read_text())) == {LOGGED[place].value}


def test_no_other_module_of_sidecar_or_client_names_a_code():
    found = {
        path.relative_to(ROOT).as_posix()
        for part in ("sidecar/src", "client/src")
        for path in (ROOT / part).rglob("*.py")
        if CODE.search(path.read_text())
    }
    assert found == set(LOGGED)


def test_each_code_has_an_anchor():
    text = (ROOT / DOCS_PAGE).read_text()
    assert [code.value for code in Code if f"\n### {code.value}\n" not in text] == []
