"""Nothing is ever raised into an engine, whatever it passes: not with a sidecar, not without one, not after close."""

from __future__ import annotations

import array
import os
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvpool.client import Client
from kvpool.config import ClientConfig, Deadlines
from kvpool.protocol.wire import Tier
from kvpool.results import LoadResult, StoreResult

if TYPE_CHECKING:
    from collections.abc import Iterator

    from cl_fake_sidecar import FakeSidecar

ODD: list[Any] = [
    None, 0, -1, 1 << 70, 1.5, float("nan"), "text", b"", b"x" * 31, b"x" * 32, bytearray(100), [], {}, (), object(),
    [None], [b"x" * 32, None], memoryview(b"read only"), memoryview(bytearray(64))[::2], array.array("d", [1.0]),
    range(3),
]  # fmt: skip
NAMES: list[Any] = [
    [b"x" * 32],
    [b"y" * 32, b"z" * 32],
    [b"short"],
    [b"a" * 31, b"b" * 33],
    ["x" * 32],
    [],
    None,
    7,
    b"xy",
]


@pytest.fixture(scope="module", params=["a sidecar", "none", "closed"])
def client(request: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Client]:
    from cl_fake_sidecar import FakeSidecar

    directory = tmp_path_factory.mktemp("odd")
    sidecar: FakeSidecar | None = FakeSidecar(directory) if request.param == "a sidecar" else None
    if sidecar is not None:
        sidecar.start()
    deadlines = Deadlines(lookup_ms=50, load_min_ms=50, store_ms=50, breaker_failures=1000)
    one = Client(
        ClientConfig(socket=str(directory / "kv.sock"), connect_retry_ms=20, deadlines=deadlines), fingerprint=bytes(32)
    )
    if sidecar is not None:
        assert one.wait_connected(10)
    if request.param == "closed":
        one.close()
    yield one
    one.close()
    if sidecar is not None:
        sidecar.stop()


@settings(max_examples=150, deadline=None, suppress_health_check=list(HealthCheck))
@given(st.integers(0, len(NAMES) + len(ODD) - 1), st.integers(0, len(ODD) - 1), st.sampled_from([None, 0.0, -5, "x"]))
def test_wrong_arguments_are_misses(client: Client, which: int, odd: int, until: Any) -> None:
    names, buffers = [*NAMES, *ODD][which], ODD[odd]
    given = (buffers, [buffers], [buffers, buffers])
    count = len(names) if hasattr(names, "__len__") else 0
    tiers = client.lookup(names, until, exhaustive=bool(count % 2))
    assert len(tiers) == count
    assert all(isinstance(tier, Tier) for tier in tiers)
    for some in given:
        loads = client.get_into(names, some, until)
        assert len(loads) in (count, 0)
        # some of these are right by chance, and a block that was stored may be found
        assert all(isinstance(r, LoadResult) and r.ok is not bool(r.reason) for r in loads)
        stores = client.put_from(names, some, until)
        assert len(stores) in (count, 0)
        assert all(isinstance(r, StoreResult) for r in stores)


def test_the_rest_can_be_called_at_any_time(client: Client) -> None:
    for _ in range(2):
        client.report()
        assert set(client.stats()) >= {"hits", "misses"}
        assert client.connected in (True, False)
        assert client.reachable in (True, False)
        assert client.wait_connected(0) in (True, False)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can mount the file system read-only")
def test_a_client_on_a_read_only_file_system_without_a_network(tmp_path: Path) -> None:
    source = Path(__file__).parent.parent / "src"
    code = (
        "from kvpool.client import Client; from kvpool.config import ClientConfig\n"
        "c = Client(ClientConfig(socket='/nonexistent/kv.sock'), fingerprint=bytes(32))\n"
        "print(c.get_into([bytes(32)], [bytearray(10)])[0].reason, c.lookup([bytes(32)])); c.close()\n"
        "try: open('/new', 'w'); print('writable')\n"
        "except OSError as e: print(e.errno)"
    )
    script = 'mount --make-rprivate / && mount -o remount,ro,bind / && exec "$@"'
    python = f"import sys; sys.path.insert(0, {str(source)!r})\n{code}"
    done = subprocess.run(
        ["unshare", "-mn", "sh", "-c", script, "sh", sys.executable, "-B", "-c", python],
        capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    if "mount" in done.stderr:
        pytest.skip(f"mounting is not allowed here: {done.stderr.strip()}")
    assert done.stdout.split("\n")[:2] == ["no-sidecar [<Tier.MISS: 0>]", "30"], done.stderr
