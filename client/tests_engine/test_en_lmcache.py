"""The plug-ins inside the real LMCache 0.5.6: its storage manager in two processes, its server with a real vLLM.

Each pair (server, engine) is on a node of its own. The first pair is killed before the second is started, so all that
the second finds comes from the pool. An engine start takes about half a minute.
"""

from __future__ import annotations

import os
import signal
import subprocess
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import cl_lmcache_stub as stub
import pytest
from cl_nodes import Cluster, until
from en_lmcache import CHUNK, Server, Storage, connector
from en_overlay import overlay

from kvpool.protocol import keys
from kvpool.protocol.block import HEADER_BYTES, NO_SALT, BlockHeader, decode_header

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from en_engine import Engine

CHUNKS = 5  # of one prompt
PATIENT = {"deadlines": {"lookup_ms": 1000, "load_min_ms": 3000, "breaker_failures": 3, "breaker_cooldown_ms": 300}}


def prompt(seed: int, chunks: int = CHUNKS, more: int = 9) -> list[int]:
    return [3 + (seed * 7919 + i * i * 31 + i) % 500 for i in range(chunks * CHUNK + more)]


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """A pool that asks for tags of salts."""
    found = Cluster(tmp_path_factory.mktemp("cluster"), ("a", "b"), salt_tags=True)
    yield found
    found.close()


@pytest.fixture(scope="module")
def libraries(engine_home: Path) -> tuple[str, list[Path]]:
    return overlay("lmcache", engine_home)


# -- inside an engine: the storage manager -----------------------------------------------------------------------------


@pytest.fixture(scope="module")
def storages(
    cluster: Cluster, libraries: tuple[str, list[Path]], tiny_model: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[Storage, Storage]]:
    made = []
    for node in ("a", "b"):
        home = tmp_path_factory.mktemp(f"storage-{node}")
        made.append(Storage(home, *libraries, tiny_model, {"socket": cluster[node].socket, **PATIENT}))
    try:
        for storage in made:
            assert until(lambda s=storage: s.ask(stats=True)["connected"])
        yield made[0], made[1]
    finally:
        for storage in made:
            storage.stop()


def put(cluster: Cluster, storage: Storage, tokens: list[int], **more: Any) -> list[Path]:
    """The files of the chunks that were stored on node a, when the other node can find them."""
    before = set(cluster["a"].block_files())
    chunks = storage.ask(put=tokens, **more)["chunks"]
    assert until(lambda: len(set(cluster["a"].block_files()) - before) == chunks)
    assert until(lambda: cluster["a"].announced() >= len(before) + chunks)
    return sorted(set(cluster["a"].block_files()) - before, key=lambda f: f.stat().st_mtime_ns)


def test_what_one_storage_manager_puts_another_gets_from_its_node(
    cluster: Cluster, storages: tuple[Storage, Storage]
) -> None:
    a, b = storages
    put(cluster, a, prompt(1))
    assert b.ask(contains=prompt(1)) == {"each": [True] * CHUNKS, "prefix": CHUNKS}
    assert b.ask(contains=prompt(1)[:CHUNK] + prompt(2)) == {"each": [True] + [False] * CHUNKS, "prefix": 1}
    answer = b.ask(get=prompt(1))
    assert answer["got"] == answer["expected"]
    assert b.ask(stats=True)["hits"] == {"peer": CHUNKS}
    assert b.ask(stats=True)["fingerprint"] == a.ask(stats=True)["fingerprint"]


def test_a_prompt_of_200_chunks_that_are_put_one_by_one_is_stored_whole(
    cluster: Cluster, storages: tuple[Storage, Storage]
) -> None:
    a, b = storages
    put(cluster, a, prompt(10, chunks=200), single=True)  # three times what may be in flight at once
    assert a.ask(stats=True)["not_stored"] == {}
    assert b.ask(contains=prompt(10, chunks=200))["prefix"] == 200


def test_tags_of_requests_are_apart(cluster: Cluster, storages: tuple[Storage, Storage]) -> None:
    a, b = storages
    put(cluster, a, prompt(3), tags={"user": "one"})
    assert b.ask(contains=prompt(3), tags={"user": "two"})["prefix"] == 0
    assert b.ask(contains=prompt(3))["prefix"] == 0
    assert b.ask(contains=prompt(3), tags={"user": "one"})["prefix"] == CHUNKS


def test_a_truncated_chunk_is_a_miss(cluster: Cluster, storages: tuple[Storage, Storage]) -> None:
    a, b = storages
    files = put(cluster, a, prompt(4))
    os.chmod(files[0], 0o600)
    os.truncate(files[0], files[0].stat().st_size // 2)
    answer = b.ask(get=prompt(4))
    assert answer["got"].count(None) >= 1
    assert all(got in (None, right) for got, right in zip(answer["got"], answer["expected"], strict=True))


def test_a_removed_chunk_is_not_found_until_it_is_put_again(
    cluster: Cluster, storages: tuple[Storage, Storage]
) -> None:
    a, _ = storages
    put(cluster, a, prompt(5, chunks=1))
    assert a.ask(contains=prompt(5, chunks=1))["prefix"] == 1
    assert a.ask(remove=prompt(5, chunks=1))["removed"] == [True]
    assert a.ask(contains=prompt(5, chunks=1))["prefix"] == 0


def test_a_storage_manager_goes_on_without_its_sidecar(cluster: Cluster, storages: tuple[Storage, Storage]) -> None:
    a, b = storages
    put(cluster, a, prompt(6))
    cluster["b"].stop(kill=True)
    assert b.ask(contains=prompt(6)) == {"each": [False] * CHUNKS, "prefix": 0}
    assert b.ask(get=prompt(6))["got"] == [None] * CHUNKS
    cluster["b"].start()
    cluster["b"].wait_ready()
    assert until(lambda: b.ask(contains=prompt(6))["prefix"] == CHUNKS)
    answer = b.ask(get=prompt(6))
    assert answer["got"] == answer["expected"]


# -- the server, with an engine ----------------------------------------------------------------------------------------


class Pair(NamedTuple):
    server: Server
    engine: Engine


class First(NamedTuple):
    """What the first pair answered before it was killed, by prompt and salt."""

    answers: dict[tuple[int, str], dict[str, Any]]
    files: dict[tuple[int, str], list[Path]]
    status: dict[str, Any]
    usage: dict[str, Any]
    told: list[int]  # a prompt and what was generated
    next_turn: list[int]


@pytest.fixture(scope="module")
def start_pair(
    cluster: Cluster,
    libraries: tuple[str, list[Path]],
    start_engine: Callable[..., Engine],
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[Callable[[str], Pair]]:
    servers = []

    def start(node: str) -> Pair:
        home = tmp_path_factory.mktemp(f"server-{node}")
        server = Server(home, *libraries, {"socket": cluster[node].socket, **PATIENT})
        servers.append(server)
        server.wait_ready()
        engine = start_engine(
            connector(server.port),
            EXTRA_PYTHONPATH=os.pathsep.join(map(str, [libraries[1][0], Path(__file__).parent / "on_path"])),
            VLLM_ENABLE_V1_MULTIPROCESSING="1",  # LMCache and vLLM's CPU worker do not go together in one process
            LMCACHE_TRACK_USAGE="false",
            PYTHONHASHSEED="0",
        )
        return Pair(server, engine)

    yield start
    for server in servers:
        server.stop()


@pytest.fixture(scope="module")
def first(cluster: Cluster, start_pair: Callable[[str], Pair]) -> First:
    pair = start_pair("a")
    answers, files = {}, {}
    for seed, salt in [(1, ""), (2, ""), (3, "one"), (4, ""), (5, ""), (6, "")]:
        before = set(cluster["a"].block_files())
        answers[seed, salt] = pair.engine.generate(prompt(seed), salt=salt)
        assert until(lambda: len(set(cluster["a"].block_files()) - before) >= CHUNKS)  # noqa: B023
        assert until(lambda: cluster["a"].announced() >= len(cluster["a"].block_files()))
        files[seed, salt] = sorted(set(cluster["a"].block_files()) - before, key=lambda f: f.stat().st_mtime_ns)
    before = set(cluster["a"].block_files())
    turn = pair.engine.generate(prompt(7), max_tokens=CHUNK + 8)
    assert until(lambda: len(set(cluster["a"].block_files()) - before) > CHUNKS)
    assert until(lambda: cluster["a"].announced() >= len(cluster["a"].block_files()))
    told = prompt(7) + turn["tokens"]
    status = pair.server.adapter()
    usage = pair.server.get("/quota/one")
    next_turn = pair.engine.generate([*told, *prompt(8, chunks=0)])["tokens"]
    pair.engine.process.kill()
    pair.engine.process.wait(30)
    assert pair.engine.process.stdin is not None
    pair.engine.process.stdin.close()
    pair.server.stop(kill=True)
    return First(answers, files, status, usage, told, next_turn)


@pytest.fixture(scope="module")
def second(first: First, start_pair: Callable[[str], Pair]) -> Pair:
    return start_pair("b")


def test_a_new_pair_is_served_from_the_pool_with_the_same_tokens(first: First, second: Pair) -> None:
    assert first.answers[1, ""]["cached"] == 0
    answer = second.engine.generate(prompt(1))
    assert answer["tokens"] == first.answers[1, ""]["tokens"]
    assert answer["cached"] == CHUNKS * CHUNK
    status = second.server.adapter()
    assert status["is_healthy"]
    assert list(status["fingerprints"]) == list(first.status["fingerprints"])
    (counts,) = status["fingerprints"].values()
    assert counts["hits"] == {"peer": CHUNKS}
    assert first.status["stored_object_count"] == 7 * CHUNKS + 1


def test_what_was_generated_migrates_too(first: First, second: Pair) -> None:
    answer = second.engine.generate([*first.told, *prompt(8, chunks=0)])
    assert answer["cached"] == (CHUNKS + 1) * CHUNK
    assert answer["tokens"] == first.next_turn


def test_salts_are_isolated(first: First, second: Pair) -> None:
    assert second.engine.generate(prompt(3), salt="two")["cached"] == 0
    assert second.engine.generate(prompt(3))["cached"] == 0
    answer = second.engine.generate(prompt(3), salt="one")
    assert answer["cached"] == CHUNKS * CHUNK
    assert answer["tokens"] == first.answers[3, "one"]["tokens"]


def test_a_chunk_in_the_pool_tells_its_salt_by_a_tag(cluster: Cluster, first: First) -> None:
    headers = {asked: [header_of(file) for file in files] for asked, files in first.files.items()}
    secret = (cluster.secret / "pool-secret").read_text().encode()
    salt_key = keys.salt_key(secret, headers[1, ""][0].tenant_tag)
    salted = {header.salt_tag for header in headers.pop((3, "one"))}
    assert salted == {keys.salt_tag(salt_key, keys.salt_digest("one"))}
    assert {header.salt_tag for others in headers.values() for header in others} == {NO_SALT}


def header_of(file: Path) -> BlockHeader:
    with file.open("rb") as data:
        return decode_header(data.read(HEADER_BYTES))


def test_usage_is_told_by_salt(first: First) -> None:
    payload = first.files[3, "one"][0].stat().st_size - HEADER_BYTES
    assert first.usage["current_usage_gb"] * 2**30 == pytest.approx(CHUNKS * payload)


def test_a_truncated_block_is_recomputed(cluster: Cluster, first: First, second: Pair) -> None:
    for file in first.files[4, ""][2:4]:
        file.chmod(0o600)
        os.truncate(file, file.stat().st_size // 2)
    answer = second.engine.generate(prompt(4))
    assert answer["tokens"] == first.answers[4, ""]["tokens"]
    assert answer["cached"] < CHUNKS * CHUNK


def test_a_sidecar_that_dies_never_changes_an_answer(cluster: Cluster, first: First, second: Pair) -> None:
    cluster["b"].stop(kill=True)
    answer = second.engine.generate(prompt(5))
    assert answer["tokens"] == first.answers[5, ""]["tokens"]
    assert answer["cached"] == 0
    assert until(lambda: not second.server.adapter()["is_healthy"])
    cluster["b"].start()
    cluster["b"].wait_ready()
    assert until(lambda: second.server.adapter()["is_healthy"])
    answer = second.engine.generate(prompt(6))
    assert answer["tokens"] == first.answers[6, ""]["tokens"]
    assert answer["cached"] == CHUNKS * CHUNK


def test_a_sidecar_that_stands_still_delays_an_answer_and_never_changes_it(
    cluster: Cluster, first: First, second: Pair
) -> None:
    assert until(lambda: second.server.adapter()["is_healthy"])
    second.engine.ask(reset=True)
    second.server.forget()
    cluster["b"].signal(signal.SIGSTOP)
    try:
        answer = second.engine.generate(prompt(1))  # LMCache would wait for ever: the deadline is the plug-in's
        assert answer["tokens"] == first.answers[1, ""]["tokens"]
        assert answer["cached"] == 0
    finally:
        cluster["b"].signal(signal.SIGCONT)
    assert until(lambda: second.server.adapter()["is_healthy"])


def test_a_sidecar_that_dies_under_load_never_changes_an_answer(cluster: Cluster, first: First, second: Pair) -> None:
    hits = 0
    for n, (seed, salt) in enumerate([*first.answers] * 2):
        second.engine.ask(reset=True)
        second.server.forget()
        killer = threading.Timer(0.004 * n, cluster["b"].stop, kwargs={"kill": True})
        if n % 2:
            killer.start()
        answer = second.engine.generate(prompt(seed), salt=salt)
        assert answer["tokens"] == first.answers[seed, salt]["tokens"]
        hits += answer["cached"] > 0
        if n % 2:
            killer.join()
            cluster["b"].start()
            cluster["b"].wait_ready()
            assert until(lambda: second.server.adapter()["is_healthy"])
    assert hits >= 5  # at least when it was left alone


def test_what_is_deleted_by_the_servers_api_is_computed_again(cluster: Cluster, first: First, second: Pair) -> None:
    assert until(lambda: second.server.adapter()["is_healthy"])
    second.engine.ask(reset=True)
    second.server.forget()
    asked = second.engine.generate(prompt(9))  # new: this server stores it
    assert until(lambda: len(second.server.get("/cache/objects?page_size=1000")["entries"]) >= CHUNKS)
    entries = second.server.get("/cache/objects?page_size=1000")["entries"][-CHUNKS:]
    answer = second.server.delete([entry["key"] for entry in entries])
    assert answer["ok"], answer
    second.engine.ask(reset=True)
    again = second.engine.generate(prompt(9))
    assert again["cached"] == 0
    assert again["tokens"] == asked["tokens"]


def test_the_stub_of_the_contract_tests_promises_what_lmcache_asks_for(libraries: tuple[str, list[Path]]) -> None:
    """The abstract methods of both interfaces, read in a process that has LMCache."""
    code = (
        "from lmcache.v1.distributed.l2_adapters.base import L2AdapterInterface as a\n"
        "from lmcache.v1.storage_backend.connector.base_connector import RemoteConnector as r\n"
        "print('@@', *sorted(a.__abstractmethods__), '|', *sorted(r.__abstractmethods__))"
    )
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, libraries[1])), "LMCACHE_TRACK_USAGE": "false"}
    done = subprocess.run([libraries[0], "-c", code], env=env, capture_output=True, text=True, check=True, timeout=120)
    (line,) = [line for line in done.stdout.splitlines() if line.startswith("@@")]
    server, inside = line[3:].split("|")
    assert server.split() == sorted(stub.L2AdapterInterface.__abstractmethods__)
    assert inside.split() == sorted(stub.RemoteConnector.__abstractmethods__)
