"""The probe for large folios: information, never a reason to warn or to fail."""

from __future__ import annotations

import os

import pytest
from sc_nodes import MIB

from kvpool import config
from kvpool_sidecar.preflight import drive, folios
from kvpool_sidecar.preflight.finding import Level


@pytest.fixture
def folder(tmp_path):
    path = tmp_path / "tier"
    path.mkdir(mode=0o700)
    return path


@pytest.fixture
def scratch(folder):
    directory = os.open(folder, os.O_RDONLY)
    with drive.scratch_file(directory) as (file, _):
        yield file
    os.close(directory)


@pytest.mark.parametrize(
    ("gain", "words"), [(1.6, "1.6 times cheaper"), (1.0, "no large folios"), (0, "no large folios")]
)
def test_what_large_folios_save_is_information(folder, monkeypatch, gain, words):
    monkeypatch.setattr(folios, "measure", lambda _fd: folios.Folios(gain))
    tier = config.LocalTier("nvme", str(folder), MIB, reserve_free_percent=0)
    checks = drive.check_drive(tier, "uid", expected_mb_s=1, node_files=(), max_s=0.1)
    (found,) = (finding for finding in checks if finding.check == "LargeFolios")
    assert found.level is Level.OK
    assert words in found.message
    assert found.values["page_cache_gain"] == gain


def test_it_reads_the_same_file_from_both(scratch):
    assert folios.measure(scratch).gain > 0.3  # single pages are never much cheaper
    assert os.fstat(scratch).st_size == MIB


def test_files_that_cannot_be_mapped_are_in_no_large_folios(scratch, monkeypatch):
    monkeypatch.setattr(folios.page_cache, "fill", lambda *_: False)
    assert not folios.measure(scratch).are_large
