"""`make bench BENCH=data`: its limit is the true one and says when it is not, and a ratio counts all of the work."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

sys.path.insert(0, str(Path(__file__).parent.parent))

from bench import folios
from bench.data import asked_of
from bench.measure import Contender, Row, compare, table

if TYPE_CHECKING:
    from collections.abc import Iterator

_MIB = 1 << 20
_SIZE = 8 * _MIB
_WORK_S = 0.004
_CHILD = """
import sys, threading, time
def work():
    began = time.thread_time()
    while time.thread_time() - began < 0.004: pass
for _ in sys.stdin.buffer:
    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    print(flush=True)
"""


@pytest.fixture
def cold(tmp_path: Path) -> Iterator[int]:
    """A file of which nothing is in the page cache, on a file system that can have large folios."""
    (tmp_path / "blocks").mkdir()
    (copy,) = folios.copy_large([_written(tmp_path / "file")], tmp_path / "copies")
    if folios.large_share_of([copy]) is None:
        pytest.skip("the kernel shows folios to root only")
    if folios.large_share_of([copy]) == 0:
        pytest.skip("no large folios here")
    fd = os.open(copy, os.O_RDONLY)
    folios.drop(fd)
    yield fd
    os.close(fd)


def _written(file: Path) -> Path:
    file.write_bytes(os.urandom(_MIB) * (_SIZE // _MIB))
    return file


def test_nothing_in_the_page_cache_is_no_share_in_large_folios(cold: int):
    assert folios.large_share(cold, _SIZE) == 0


def test_half_of_a_file_in_large_folios_is_half(cold: int):
    folios.fill_large(cold, _SIZE // 2)
    assert folios.large_share(cold, _SIZE) == pytest.approx(0.5, abs=0.05)


def test_all_of_a_file_in_large_folios_is_all(cold: int):
    folios.fill_large(cold, _SIZE)
    assert folios.large_share(cold, _SIZE) == pytest.approx(1, abs=0.02)


def test_a_file_that_was_read_page_by_page_is_not_taken_for_one_in_large_folios(cold: int):
    os.posix_fadvise(cold, 0, 0, os.POSIX_FADV_RANDOM)
    for at in range(0, _SIZE, 4096):
        os.pread(cold, 4096, at)
    assert folios.large_share(cold, _SIZE) == 0


def test_a_file_that_nobody_has_read_does_not_count(cold: int, tmp_path: Path):
    unread = _written(tmp_path / "unread")
    fd = os.open(unread, os.O_RDONLY)
    folios.drop(fd)
    os.close(fd)
    folios.fill_large(cold, _SIZE)
    assert folios.large_share_of([tmp_path / "copies" / "0", unread]) == pytest.approx(1, abs=0.02)
    assert folios.large_share_of([unread]) == 0


def test_a_folio_ends_where_the_next_begins_and_where_frames_are_not_neighbors():
    head, tail = 1 << 15, 1 << 16
    assert folios.folio_pages([(8, head), (9, tail), (10, head), (11, tail), (30, tail), (31, 0)]) == [2, 2, 1, 1]
    assert folios.folio_pages([]) == []


def test_the_limit_reads_the_bytes_of_the_pools_files_from_files_of_its_own(tmp_path: Path):
    files = [_written(tmp_path / name) for name in ("one", "two")]
    copies = folios.copy_large(files, tmp_path / "copies")
    assert [copy.read_bytes() for copy in copies] == [file.read_bytes() for file in files]
    assert not set(copies) & set(files)
    if folios.large_share_of(copies) is not None:
        assert all(folios.large_share_of([file]) == 0 for file in files)  # the pool brings them in itself


def test_the_processor_ratio_of_nothing_half_and_all_of_the_limits_work():
    with _worker() as (ask, pid):
        rows = compare(
            "local-read", _MIB, 1, 1, 3, 8,
            [
                Contender("limit", lambda _: lambda _n: _work(2 * _WORK_S)),
                Contender("nothing", lambda _: lambda _n: None),
                Contender("half", lambda _: lambda _n: _work(_WORK_S)),
                Contender("half elsewhere", lambda _: lambda _n: ask(1), [pid]),
                Contender("all, half elsewhere", lambda _: lambda _n: (_work(_WORK_S), ask(1))[1], [pid]),
                Contender("all elsewhere", lambda _: lambda _n: ask(2), [pid]),
            ],
        )  # fmt: skip
    ratios = {row.system: row.cpu_ratio for row in rows}
    assert ratios["limit"] == 1
    assert ratios["nothing"] < 0.05
    assert ratios["half"] == pytest.approx(0.5, abs=0.1)
    assert ratios["half elsewhere"] == pytest.approx(0.5, abs=0.2)
    assert ratios["all, half elsewhere"] == pytest.approx(1, abs=0.2)
    assert ratios["all elsewhere"] == pytest.approx(1, abs=0.3)


def test_every_row_has_both_ratios_and_the_table_shows_what_they_are_of():
    row = Row("local-read", 2 * _MIB, 1, 64, "kvpool", 1, 1, 1, 1, 0.5, 1, 2.25, 0.97)
    assert {"ratio_to_limit": 0.5, "cpu_ratio": 2.25, "large_folios": 0.97}.items() <= row.as_json().items()
    head, _, line = table([row], asked_of).splitlines()
    cells = dict(zip(head.replace("of limit", "of-limit").split()[-4:], line.split()[-4:], strict=True))
    assert cells == {"cpu/limit": "2.25", "of-limit": "0.50", "target": f"{asked_of(row):.2f}", "folios": "97%"}


def _work(seconds: float) -> None:
    began = time.thread_time()
    while time.thread_time() - began < seconds:
        pass


@contextlib.contextmanager
def _worker():
    """A process whose threads work and end: `ask(n)` waits for n pieces of work."""
    process = subprocess.Popen([sys.executable, "-c", _CHILD], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert process.stdin is not None
    assert process.stdout is not None

    def ask(times: int) -> None:
        for _ in range(times):
            process.stdin.write(b"\n")
            process.stdin.flush()
            process.stdout.readline()

    with process:
        yield ask, process.pid
        process.stdin.close()
