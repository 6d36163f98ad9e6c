"""Sidecars are replaced one by one while engines go on asking; blocks and clients of another release beside them."""

from __future__ import annotations

import hashlib
import threading
import time
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest
from cl_nodes import Cluster, until

from kvpool import config
from kvpool.client import Client
from kvpool.protocol import block, keys
from kvpool.protocol.keys import block_id

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

FINGERPRINT = bytes(range(32))
SIZE = 20_000
BLOCKS = 24
_VERSION_AT = len(block.MAGIC)


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    found = Cluster(tmp_path, ("a", "b", "c"))
    yield found
    found.close()


def names(first: int, count: int) -> list[bytes]:
    return [block_id(FINGERPRINT, n.to_bytes(4, "big")) for n in range(first, first + count)]


def payload(name: bytes) -> bytes:
    return hashlib.shake_128(name).digest(SIZE)


def client_of(cluster: Cluster, node: str) -> Client:
    settings = config.ClientConfig(
        socket=cluster[node].socket,
        connect_retry_ms=50,
        deadlines=config.Deadlines(lookup_ms=2000, load_min_ms=10_000, breaker_cooldown_ms=100),
    )
    client = Client(settings, fingerprint=FINGERPRINT)
    assert client.wait_connected(30)
    return client


class Engine(threading.Thread):
    """Loads every block again and again; remembers what was had, and whatever an engine must never see."""

    def __init__(self, client: Client, wanted: list[bytes]) -> None:
        super().__init__(daemon=True)
        self._client = client
        self._wanted = wanted
        self.rounds: list[int] = []
        self.wrong: list[str] = []
        self.ended = threading.Event()

    def run(self) -> None:
        buffers = [bytearray(SIZE) for _ in self._wanted]
        while not self.ended.is_set():
            try:
                reported = self._client.get_into(self._wanted, buffers)
            except Exception as e:
                self.wrong.append(repr(e))
                return
            for name, result, buffer in zip(self._wanted, reported, buffers, strict=True):
                if result.ok and buffer != payload(name):
                    self.wrong.append(f"other bytes for {name.hex()[:8]}")
            self.rounds.append(sum(result.ok for result in reported))
            time.sleep(0.02)

    def has_all_again(self) -> bool:
        since = len(self.rounds)
        return until(lambda: self.wrong or len(self._wanted) in self.rounds[since:], 60) and not self.wrong


def test_sidecars_are_replaced_one_by_one_and_no_request_fails(cluster: Cluster):
    """What is cached stays: nothing is stored again, and every engine has every block again after each step."""
    clients = {name: client_of(cluster, name) for name in "abc"}
    wanted = names(0, BLOCKS)
    for n, client in enumerate(clients.values()):
        own = wanted[n::3]
        assert all(r.stored for r in client.put_from(own, [payload(name) for name in own]))
    assert until(lambda: all(node.announced() == BLOCKS // 3 for node in cluster.nodes.values()))
    files = {name: sorted(f.name for f in node.block_files()) for name, node in cluster.nodes.items()}
    engines = [Engine(client, wanted) for client in clients.values()]
    for engine in engines:
        engine.start()
    try:
        for node in cluster.nodes.values():
            assert all(engine.has_all_again() for engine in engines), [engine.wrong for engine in engines]
            node.stop()
            node.start()
            node.wait_ready()
        assert all(engine.has_all_again() for engine in engines), [engine.wrong for engine in engines]
    finally:
        for engine in engines:
            engine.ended.set()
        for engine in engines:
            engine.join(30)
        for client in clients.values():
            client.close()
    assert not any(engine.wrong for engine in engines)
    assert {name: sorted(f.name for f in node.block_files()) for name, node in cluster.nodes.items()} == files


def test_blocks_of_a_release_that_is_newer_are_misses_and_those_of_the_last_one_are_read(tmp_path: Path):
    """N reads N-1: version 1 beside version 2. And N-1 meets N: a version that it does not know is never read."""
    cluster = Cluster(tmp_path, events=True)
    try:
        node = cluster["a"]
        client = client_of(cluster, "a")
        first, second, third = names(0, 3)
        assert client.put_from([first], [payload(first)])[0].stored
        named = [block.EngineBlock(n.to_bytes(4, "big")) for n in (1, 2)]
        stored = client.put_from([second, third], [payload(second), payload(third)], engine_blocks=named)
        assert all(result.stored for result in stored)
        files = {f.read_bytes()[: block.HEADER_BYTES]: f for f in node.block_files()}
        versions = {block.decode_header(header).block_id: header[_VERSION_AT] for header in files}
        assert versions == {first: 1, second: 2, third: 2}
        node.stop()
        newer = next(f for header, f in files.items() if block.decode_header(header).block_id == third)
        _make_newer(newer)
        node.start()
        node.wait_ready()
        assert client.wait_connected(30)
        buffers = [bytearray(SIZE) for _ in range(3)]
        reported = client.get_into([first, second, third], buffers)
        assert [result.ok for result in reported] == [True, True, False]
        assert [bytes(b) for b in buffers[:2]] == [payload(first), payload(second)]
        # it is read, found to be of no known version and taken away, so that it can be stored again
        assert until(lambda: newer not in node.block_files())
        assert until(lambda: client.put_from([third], [payload(third)])[0].stored)
        client.close()
    finally:
        cluster.close()


def test_tags_of_salts_are_written_where_the_pool_asks_for_them_alone(tmp_path: Path):
    cluster = Cluster(tmp_path, salt_tags=True)
    try:
        node, client = cluster["a"], client_of(cluster, "a")
        assert client.wants_salts
        red, blue, plain, other = names(0, 4)
        stored = client.put_from([red, blue, plain], [payload(n) for n in (red, blue, plain)], salts=["r", "b", None])
        stored += client.put_from([other], [payload(other)], salts=["r", "too many"])
        assert all(result.stored for result in stored)
        headers = [block.decode_header(f.read_bytes()[: block.HEADER_BYTES]) for f in node.block_files()]
        tags = {header.block_id: header.salt_tag for header in headers}
        assert tags[plain] == tags[other] == block.NO_SALT
        secret = (cluster.secret / "pool-secret").read_text().encode()
        salt_key = keys.salt_key(secret, headers[0].tenant_tag)
        wanted = [keys.salt_tag(salt_key, keys.salt_digest(salt)) for salt in "rb"]
        assert [tags[red], tags[blue]] == wanted
        # the same sidecar, as a pool that does not ask: blocks of before are read, new ones have no tag
        node.stop()
        (node.home / "pool.json").write_text(config.dumps(replace(node.pool, salt_tags=False)))
        node.start()
        node.wait_ready()
        assert client.wait_connected(30)
        assert until(lambda: not client.wants_salts)
        (late,) = names(9, 1)
        assert until(lambda: client.put_from([late], [payload(late)], salts=["r"])[0].stored)
        buffers = [bytearray(SIZE) for _ in range(3)]
        assert all(result.ok for result in client.get_into([red, plain, late], buffers))
        assert [bytes(buffer) for buffer in buffers] == [payload(red), payload(plain), payload(late)]
        versions = {}
        for file in node.block_files():
            header = file.read_bytes()[: block.HEADER_BYTES]
            versions[block.decode_header(header).block_id] = header[_VERSION_AT]
        assert versions == {red: 3, blue: 3, plain: 1, other: 1, late: 1}
        client.close()
    finally:
        cluster.close()


def _make_newer(file: Path) -> None:
    """The same block as a release would write it that counts one version further: whole in every other respect."""
    data = bytearray(file.read_bytes())
    data[_VERSION_AT : _VERSION_AT + 2] = (len(block.FORMAT_VERSIONS) + 1).to_bytes(2, "little")
    # a reader that does not know the version takes the fields of version 1 for all there are
    data[168 : block.HEADER_BYTES - 16] = bytes(block.HEADER_BYTES - 16 - 168)
    data[block.HEADER_BYTES - 16 : block.HEADER_BYTES] = hashlib.blake2b(data[:168], digest_size=16).digest()
    with pytest.raises(block.CorruptBlockError, match="not a block of format"):
        block.decode_header(bytes(data[: block.HEADER_BYTES]))
    mode = file.stat().st_mode
    file.chmod(0o600)
    file.write_bytes(data)
    file.chmod(mode)
