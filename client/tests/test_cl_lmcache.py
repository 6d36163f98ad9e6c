"""The plug-ins for LMCache against its contract: return values, order, threads, cancellation, faults of the sidecar.

LMCache is a stub here (cl_lmcache_stub); the real one is in client/tests_engine/test_en_lmcache.py.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import itertools
import json
import random
import select
import sys
import threading
import time
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import cl_lmcache_stub as stub
import pytest

from kvpool.engines.common.client_cache import ClientCache
from kvpool.engines.common.tasks import Tasks
from kvpool.engines.lmcache import fingerprint as lmcache_fingerprint
from kvpool.engines.lmcache.inventory import StoredInventory
from kvpool.protocol import block
from kvpool.protocol.keys import salt_digest, salt_tag
from kvpool.protocol.wire import Op

with stub.installed():
    from kvpool.engines.lmcache import l2_adapter as lmcache_mp
    from kvpool.engines.lmcache import remote_connector as lmcache_remote

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from cl_fake_sidecar import FakeSidecar

SIZE = 4096
PATIENT = {"lookup_ms": 2000, "load_min_ms": 3000, "breaker_failures": 1000}
GROUPS = {n: stub.Layout([(2, 2, SIZE // 16, 2)], ["bfloat16"]) for n in range(3)}


def until(condition: Any, seconds: float = 10.0) -> bool:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if condition():
            return True
        time.sleep(0.002)
    return False


def key(n: int, **more: Any) -> stub.ObjectKey:
    return stub.ObjectKey(n.to_bytes(32, "big"), **more)


def filled(n: int, size: int = SIZE, **more: Any) -> stub.Memory:
    memory = stub.Memory(size, **more)
    memory.data[:] = (n + 1).to_bytes(8, "big") * (size // 8)
    return memory


class Server:
    """Does with an adapter what LMCache's controllers do: submits, polls the descriptor, fetches each outcome once."""

    def __init__(self, adapter: Any) -> None:
        self.adapter = adapter
        self.stored: dict[int, Any] = {}
        self.lock = threading.Lock()

    def wait(self, descriptor: int, fetch: Callable[[], Any], seconds: float = 15.0) -> Any:
        poller = select.poll()
        poller.register(descriptor, select.POLLIN)
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            poller.poll(50)  # several threads wait here: another one's signal may be ours
            outcome = fetch()
            if outcome is not None:
                return outcome
        raise AssertionError("no outcome")

    def store(self, keys: list[Any], objects: list[Any]) -> int:
        task = self.adapter.submit_store_task(keys, objects)

        def fetch() -> Any:
            with self.lock:
                for number, result in self.adapter.pop_completed_store_tasks().items():
                    assert number not in self.stored
                    self.stored[number] = result
                return self.stored.get(task)

        return self.wait(self.adapter.get_store_event_fd(), fetch)

    def lookup(self, *keys: Any, groups: Any = GROUPS) -> list[bool]:
        task = self.adapter.submit_lookup_and_lock_task(list(keys), groups)
        found = self.wait(
            self.adapter.get_lookup_and_lock_event_fd(), lambda: self.adapter.query_lookup_and_lock_result(task)
        )
        assert self.adapter.query_lookup_and_lock_result(task) is None
        assert found.size == len(keys)
        return found.found()

    def load(self, keys: list[Any], objects: list[Any]) -> list[bool]:
        task = self.adapter.submit_load_task(keys, objects)
        found = self.wait(self.adapter.get_load_event_fd(), lambda: self.adapter.query_load_result(task))
        assert self.adapter.query_load_result(task) is None
        assert found.size == len(keys)
        self.adapter.submit_unlock(keys)
        return found.found()


@pytest.fixture
def make(fake: FakeSidecar) -> Iterator[Callable[..., Server]]:
    adapters = []

    def start(**params: Any) -> Server:
        adapter = lmcache_mp.PoolL2Adapter({"socket": fake.path, "deadlines": PATIENT, **params}, l1_memory_desc=None)
        adapters.append(adapter)
        return Server(adapter)

    yield start
    for adapter in adapters:
        adapter.close()


# -- the server's adapter ----------------------------------------------------------------------------------------------


def test_what_one_server_stores_another_finds_and_loads(make: Callable[..., Server]) -> None:
    one, two = make(), make()
    keys = [key(n) for n in range(5)]
    assert one.store(keys, [filled(n) for n in range(5)]) == 5 * SIZE
    assert one.adapter.used == dict.fromkeys(keys, SIZE)
    assert one.store(keys[:2], [filled(0), filled(1)]) == 0  # it has them: nothing was written
    assert two.lookup(key(9), *keys) == [False] + [True] * 5
    objects = [stub.Memory(SIZE) for _ in range(6)]
    assert two.load([*keys, key(9)], objects) == [True] * 5 + [False]
    assert [o.data for o in objects[:5]] == [filled(n).data for n in range(5)]
    assert two.adapter.accessed == keys


def test_each_kind_of_task_has_a_descriptor_of_its_own_that_is_signalled(make: Callable[..., Server]) -> None:
    server = make()
    a = server.adapter
    descriptors = [a.get_store_event_fd(), a.get_lookup_and_lock_event_fd(), a.get_load_event_fd()]
    assert len(set(descriptors)) == 3
    server.store([key(1)], [filled(1)])
    server.lookup(key(1))
    server.load([key(1)], [stub.Memory(SIZE)])
    assert [waker.told for waker in a._wakers] == [1, 1, 1]


def test_an_empty_task_has_an_outcome_too(make: Callable[..., Server]) -> None:
    server = make()
    assert server.store([], []) == 0
    assert server.lookup() == []
    assert server.load([], []) == []


@pytest.mark.parametrize(
    "change",
    [
        {"cache_salt": "other"},
        {"cache_salt": ""},
        {"model_name": "models/other"},
        {"kv_rank": 2 << 24},
        {"kv_rank": 1 << 24 | 1},
        {"object_group_id": 1},
    ],
    ids=str,
)
def test_keys_that_differ_in_anything_are_different_blocks(make: Callable[..., Server], change: dict[str, Any]) -> None:
    server = make()
    assert server.store([key(1, cache_salt="one")], [filled(1)]) == SIZE
    assert server.lookup(key(1, cache_salt="one")) == [True]
    assert server.lookup(key(1, **{"cache_salt": "one", **change})) == [False]


def test_a_chunk_has_the_tag_of_its_salt_where_the_pool_asks_for_it(
    make: Callable[..., Server], fake: FakeSidecar
) -> None:
    fake.hello["salt_key"] = b"k" * 32
    server = make()
    salts = ["red", "", "blue"]
    assert server.store([key(n, cache_salt=salt) for n, salt in enumerate(salts)], [filled(n) for n in range(3)]) > 0
    headers = [block.decode_header(f.read_bytes()[: block.HEADER_BYTES]) for f in fake.directory.glob("?" * 64)]
    tags = {salt: salt_tag(b"k" * 32, salt_digest(salt)) for salt in salts}
    assert {header.salt_tag for header in headers} == {tags["red"], tags["blue"], block.NO_SALT}
    assert len(headers) == 3


@pytest.mark.parametrize(
    "layout",
    [
        stub.Layout([(2, 2, SIZE // 16, 2)], ["float16"]),
        stub.Layout([(2, SIZE // 16, 2, 2)], ["bfloat16"]),
        stub.Layout([(2, 2, SIZE // 16, 2)] * 2, ["bfloat16"] * 2),
    ],
    ids=str,
)
def test_engines_of_another_dtype_or_shape_share_nothing(make: Callable[..., Server], layout: stub.Layout) -> None:
    server = make()
    assert server.store([key(1)], [filled(1)]) == SIZE
    assert server.lookup(key(1), groups={0: layout}) == [False]
    other = SimpleNamespace(
        get_shapes=lambda: layout.shapes, get_dtypes=lambda: layout.dtypes, byte_array=bytearray(SIZE)
    )
    assert server.load([key(1)], [other]) == [False]
    assert not any(other.byte_array)


@pytest.mark.parametrize("name", ["tag", "revision"])
def test_servers_of_another_tag_or_revision_share_nothing(make: Callable[..., Server], name: str) -> None:
    assert make(**{name: "one"}).store([key(1)], [filled(1)]) == SIZE
    assert make(**{name: "one"}).lookup(key(1)) == [True]
    assert make(**{name: "two"}).lookup(key(1)) == [False]
    assert make().lookup(key(1)) == [False]


def test_models_of_one_name_and_other_weights_share_nothing(make: Callable[..., Server], tmp_path: Any) -> None:
    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text('{"hidden_size": 1}')
    (model / "model.safetensors").write_bytes(b"one" * 100)
    assert make().store([key(1, model_name=str(model))], [filled(1)]) == SIZE
    assert make().lookup(key(1, model_name=str(model))) == [True]
    (model / "model.safetensors").write_bytes(b"two" * 100)
    assert make().lookup(key(1, model_name=str(model))) == [False]


def test_the_pool_is_told_what_an_engine_is_and_what_differs(make: Callable[..., Server], fake: FakeSidecar) -> None:
    server = make()
    server.store([key(1)], [filled(1)])
    server.store([key(1)], [filled(1, dtype="float16")])
    by_fingerprint = {hello.fingerprint: hello for hello in fake.hellos}
    one, two = by_fingerprint.values()
    assert (one.engine, one.model) == ("lmcache 0.5.6", "tiny")
    assert [name for name in one.fields if one.fields[name] != two.fields.get(name)] == ["layout"]
    assert {fingerprint.hex() for fingerprint in by_fingerprint} == set(server.adapter.report_status()["fingerprints"])


def test_settings_come_from_the_environment_unless_they_are_in_the_servers(
    fake: FakeSidecar, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KVPOOL_CLIENT_CONFIG", json.dumps({"socket": fake.path, "deadlines": PATIENT}))
    adapter = lmcache_mp.PoolL2Adapter({})
    assert Server(adapter).store([key(1)], [filled(1)]) == SIZE
    adapter.close()
    adapter = lmcache_mp.PoolL2Adapter({"socket": "/nowhere"})
    assert "/nowhere" in adapter.report_status()["reason"]
    adapter.close()


def test_a_version_that_is_not_known_runs_without_the_pool(
    make: Callable[..., Server], fake: FakeSidecar, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(lmcache_mp.lmcache, "__version__", "0.6.0")
    server = make()
    assert server.store([key(1)], [filled(1)]) == -1
    assert server.lookup(key(1)) == [False]
    assert not server.adapter.report_status()["is_healthy"]
    assert "0.5.6" in caplog.text
    assert fake.hellos == []


@pytest.mark.parametrize("version", ["0.5.5", "0.4.9", "0.6.0", "1.0.0", "unknown", ""])
def test_versions_that_are_not_known(version: str) -> None:
    assert not lmcache_fingerprint.supported(version)


@pytest.mark.parametrize("version", ["0.5.6", "0.5.7", "0.5.10.dev3"])
def test_versions_that_are_known(version: str) -> None:
    assert lmcache_fingerprint.supported(version)


def test_pythons_own_hash_and_bytes_of_a_serde_are_refused(
    make: Callable[..., Server], caplog: pytest.LogCaptureFixture
) -> None:
    server = make()
    short = stub.ObjectKey(b"8 bytes!")
    assert server.store([short, key(1)], [filled(0), filled(1)]) == -1
    assert server.lookup(short, key(1)) == [False, True]
    assert server.store([key(2)], [filled(2, shape=(SIZE,), dtype="uint8")]) == -1
    assert server.lookup(key(2), groups={0: stub.Layout([(SIZE,)], ["uint8"])}) == [False]
    assert "--hash-algorithm" in caplog.text
    assert "serde" in caplog.text


def test_a_truncated_or_damaged_block_is_a_miss(make: Callable[..., Server], fake: FakeSidecar) -> None:
    server = make()
    keys = [key(n) for n in range(4)]
    for n in range(4):
        server.store([keys[n]], [filled(n)])
    files = sorted(fake.directory.iterdir(), key=lambda f: f.stat().st_mtime_ns)
    data = files[1].read_bytes()
    files[1].write_bytes(data[: len(data) // 2])
    files[2].write_bytes(data[:-8] + b"\x00" * 8)
    objects = [stub.Memory(SIZE) for _ in keys]
    assert server.load(keys, objects) == [True, False, False, True]
    assert objects[3].data == filled(3).data


def test_a_block_of_another_length_is_a_miss(make: Callable[..., Server]) -> None:
    server = make()
    server.store([key(1)], [filled(1)])
    shorter = filled(0, SIZE - 8, shape=(2, 2, SIZE // 16, 2))
    assert server.load([key(1)], [shorter]) == [False]


def test_what_the_pool_lost_is_not_counted_any_more(make: Callable[..., Server], fake: FakeSidecar) -> None:
    server = make()
    server.store([key(1), key(2)], [filled(1), filled(2)])
    for file in fake.directory.iterdir():
        file.unlink()
    assert server.load([key(1)], [stub.Memory(SIZE)]) == [False]
    assert server.adapter.used == {key(2): SIZE}


def test_what_was_deleted_is_found_again_after_it_is_stored_again(make: Callable[..., Server]) -> None:
    server = make()
    server.store([key(1), key(2)], [filled(1), filled(2)])
    server.adapter.delete([key(1), key(7)])
    assert server.adapter.used == {key(2): SIZE}
    assert server.lookup(key(1), key(2)) == [False, True]
    server.adapter.delete([key(1)])
    server.store([key(1)], [filled(1)])
    assert server.lookup(key(1), key(2)) == [True, True]
    assert server.adapter.used == {key(1): SIZE, key(2): SIZE}


def test_the_list_of_what_was_stored_has_pages(make: Callable[..., Server]) -> None:
    server = make()
    server.store([key(n) for n in range(5)], [filled(n) for n in range(5)])
    seen, cursor = [], None
    for _ in range(3):
        entries, cursor = server.adapter.list_l2_keys(page_size=2, cursor=cursor)
        seen += [name for name, size in entries if size == SIZE]
    assert seen == [key(n).to_encoded_object_key() for n in range(5)]
    assert cursor is None
    assert server.adapter.list_l2_keys("models/other") == ((), None)
    with pytest.raises(ValueError, match="cursor"):
        server.adapter.list_l2_keys(cursor="../etc")


def test_a_listener_that_fails_takes_no_outcome_away(make: Callable[..., Server]) -> None:
    server = make()
    server.adapter.listener_fails = True
    assert server.store([key(1)], [filled(1)]) == SIZE
    assert server.load([key(1)], [stub.Memory(SIZE)]) == [True]
    server.adapter.delete([key(1)])


def test_without_a_sidecar_everything_misses_at_once_and_works_when_it_comes(
    make: Callable[..., Server], fake: FakeSidecar
) -> None:
    fake.stop()
    server = make(connect_retry_ms=20, deadlines={**PATIENT, "lookup_ms": 50})
    assert server.lookup(key(1)) == [False]
    assert server.store([key(1)], [filled(1)]) == -1
    assert server.load([key(1)], [stub.Memory(SIZE)]) == [False]
    status = server.adapter.report_status()
    assert not status["is_healthy"]
    assert fake.path in status["reason"]
    json.dumps(status)
    fake.start()
    assert until(lambda: server.store([key(1)], [filled(1)]) == SIZE)
    assert until(lambda: server.lookup(key(1)) == [True])
    assert until(lambda: server.adapter.report_status()["is_healthy"])


def test_a_sidecar_that_does_not_answer_costs_a_lookup_its_deadline(
    make: Callable[..., Server], fake: FakeSidecar
) -> None:
    server = make(deadlines={**PATIENT, "lookup_ms": 300})
    server.store([key(1)], [filled(1)])
    gate = threading.Event()
    fake.faults[Op.LOOKUP] = lambda *_: gate.wait(20)
    began = time.monotonic()
    assert server.lookup(key(1)) == [False]
    assert time.monotonic() - began < 5
    gate.set()


def test_stores_beyond_the_queue_fail_at_once_and_hold_no_memory(
    make: Callable[..., Server], fake: FakeSidecar
) -> None:
    server = make(max_inflight_stores=4)
    server.store([key(0)], [filled(0)])
    gate = threading.Event()
    fake.faults[Op.BEGIN] = lambda *_: gate.wait(20) and False
    a = server.adapter
    first = a.submit_store_task([key(n) for n in range(1, 5)], [filled(n) for n in range(1, 5)])
    refused = a.submit_store_task([key(9)], [filled(9)])
    assert a.pop_completed_store_tasks() == {refused: -1}
    gate.set()
    done: dict[int, Any] = {}
    assert until(lambda: done.update(a.pop_completed_store_tasks()) or first in done)
    assert done == {first: 4 * SIZE}
    assert a.report_status()["dropped"]["stores"] == 1


def test_close_waits_for_what_touches_lmcaches_memory(make: Callable[..., Server], fake: FakeSidecar) -> None:
    server = make()
    server.store([key(1)], [filled(1)])
    entered, gate = threading.Event(), threading.Event()

    def hold(*_: Any) -> bool:
        entered.set()
        gate.wait(20)
        return False

    fake.faults[Op.OPEN] = hold
    memory = stub.Memory(SIZE)
    server.adapter.submit_load_task([key(1)], [memory])
    assert entered.wait(10)
    closer = threading.Thread(target=server.adapter.close)
    closer.start()
    time.sleep(0.05)
    assert closer.is_alive()
    gate.set()
    closer.join(10)
    assert not closer.is_alive()
    before = bytes(memory.data)
    server.adapter.close()
    number = server.adapter.submit_load_task([key(1)], [memory])  # a late caller gets an answer, not an exception
    assert server.adapter.query_load_result(number).found() == [False]
    assert bytes(memory.data) == before


@pytest.mark.parametrize("params", [None, 5, {"socket": 7}, {"deadlines": "soon"}, {"max_capacity_bytes": "much"}])
def test_settings_that_cannot_be_used_never_stop_the_server(params: Any) -> None:
    adapter = lmcache_mp.PoolL2Adapter(params)
    assert adapter.capacity == 0
    assert Server(adapter).lookup(key(1)) == [False]
    adapter.close()


@pytest.mark.parametrize(
    ("keys", "objects"),
    [([object()], [filled(1)]), ([key(1)], []), ([key(1)], [object()]), ([key(1)], [filled(1), filled(2)])],
    ids=["no key", "no object", "no memory", "too many"],
)
def test_arguments_that_make_no_sense_have_an_outcome(make: Callable[..., Server], keys: Any, objects: Any) -> None:
    server = make()
    assert server.store(keys, objects) in (-1, SIZE)
    assert server.load(keys, objects) in ([False], [True])
    assert server.lookup(*keys, groups={0: object()}) == [False] * len(keys)


def test_threads_and_faults_never_give_a_wrong_byte_or_lose_an_outcome(
    make: Callable[..., Server], fake: FakeSidecar
) -> None:
    dice = random.Random(5)
    server = make(
        connect_retry_ms=5,
        max_inflight_stores=12,
        deadlines={
            "lookup_ms": 1000,
            "load_min_ms": 2000,
            "store_ms": 2000,
            "breaker_failures": 4,
            "breaker_cooldown_ms": 5,
        },
    )

    def trouble(connection: Any, head: Any, body: Any) -> bool:
        what = dice.random()
        if what < 0.04:
            connection.shutdown(2)
        elif what < 0.08:
            connection.send(b"\x00" * 40)
        elif what < 0.12:
            time.sleep(0.05)
            return False
        else:
            return False
        return True

    for op in (Op.LOOKUP, Op.OPEN, Op.BEGIN, Op.COMMIT):
        fake.faults[op] = trouble
    hits, problems = [0], []

    def drive(seed: int) -> None:
        mine = random.Random(seed)
        try:
            for _ in range(50):
                numbers = mine.sample(range(25), mine.randint(1, 6))
                salts = [mine.choice(["", "a"]) for _ in numbers]
                keys = [key(n, cache_salt=s) for n, s in zip(numbers, salts, strict=True)]
                tokens = [n + 1000 * len(s) for n, s in zip(numbers, salts, strict=True)]
                what = mine.randint(0, 3)
                if what == 0:
                    server.store(keys, [filled(n) for n in tokens])
                elif what == 1:
                    server.lookup(*keys)
                elif what == 2:
                    objects = [stub.Memory(SIZE) for _ in keys]
                    for n, memory, ok in zip(tokens, objects, server.load(keys, objects), strict=True):
                        hits[0] += ok
                        assert not ok or memory.data == filled(n).data
                else:
                    server.adapter.delete(keys[:1])
                    server.adapter.report_status()
        except BaseException as e:
            problems.append(e)

    threads = [threading.Thread(target=drive, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert problems == []
    assert hits[0] > 0  # the faults left something to check
    fake.faults.clear()
    keys = [key(n) for n in range(100, 104)]
    assert until(lambda: server.store(keys, [filled(n) for n in range(100, 104)]) >= 0)
    assert until(lambda: server.load(keys, [stub.Memory(SIZE) for _ in keys]) == [True] * 4)
    assert until(lambda: set(server.adapter.report_status()["pending"].values()) == {0})


# -- the connector inside an engine ------------------------------------------------------------------------------------


class Engine:
    """A connector in an event loop of its own, as in LMCache, and the memory that it was given."""

    def __init__(self, fake: FakeSidecar, **changes: Any) -> None:
        settings = {
            "remote_storage_plugin.kvpool.socket": fake.path,
            "remote_storage_plugin.kvpool.deadlines": PATIENT,
            **{f"remote_storage_plugin.kvpool.{k}": v for k, v in changes.pop("settings", {}).items()},
        }
        room = changes.pop("room", 1000)
        metadata = stub.Metadata(**changes.pop("metadata", {}))
        self.memory = stub.LocalMemory(SIZE, room)
        self.loop = asyncio.new_event_loop()
        threading.Thread(target=self.loop.run_forever, daemon=True).start()
        config = stub.Config(settings, **changes)
        context = SimpleNamespace(
            loop=self.loop, local_cpu_backend=self.memory, config=config, metadata=metadata, plugin_name="kvpool"
        )
        self.connector = lmcache_remote.PoolConnectorAdapter().create_connector(context)
        if self.connector._client is not None and fake.path and fake._listener is not None:
            assert self.connector._client.wait_connected(10)

    def start(self, coroutine: Any) -> Any:
        return asyncio.run_coroutine_threadsafe(coroutine, self.loop)

    def run(self, coroutine: Any) -> Any:
        return self.start(coroutine).result(20)

    def balanced(self) -> bool:
        return all(memory.references == 0 for memory in self.memory.given)

    def close(self) -> None:
        self.run(self.connector.close())
        self.loop.call_soon_threadsafe(self.loop.stop)
        assert until(lambda: not self.loop.is_running())
        self.loop.close()


@pytest.fixture
def engine(fake: FakeSidecar) -> Iterator[Callable[..., Engine]]:
    engines = []

    def start(**changes: Any) -> Engine:
        engines.append(Engine(fake, **changes))
        return engines[-1]

    yield start
    for one in engines:
        one.close()


def chunk(n: int, **more: Any) -> stub.CacheEngineKey:
    return stub.CacheEngineKey(n + 1, **more)


def put(one: Engine, keys: list[Any], **more: Any) -> None:
    """As RemoteBackend does: it holds a reference until the call is over."""
    held = [filled(k.chunk_hash, **more) for k in keys]
    one.run(one.connector.batched_put(keys, held))
    for memory in held:
        memory.ref_count_down()
    assert until(lambda: all(memory.references == 0 for memory in held))


def test_what_one_engine_puts_another_gets(engine: Callable[..., Engine]) -> None:
    a, b = engine(), engine()
    keys = [chunk(n) for n in range(4)]
    put(a, keys)
    c = b.connector
    assert c.batched_contains([*keys, chunk(9)]) == 4
    assert c.batched_contains([chunk(9), *keys]) == 0
    assert b.run(c.batched_async_contains("request", keys)) == 4
    assert b.run(c.exists(keys[0]))
    assert c.exists_sync(keys[0])
    assert not c.exists_sync(chunk(9))
    got = b.run(c.batched_get([keys[0], chunk(9), keys[1]]))
    assert [m and m.data for m in got] == [filled(1).data, None, filled(2).data]
    prefix = b.run(c.batched_get_non_blocking("request", [keys[0], chunk(9), keys[1]]))
    assert [m.data for m in prefix] == [filled(1).data]
    assert b.run(c.get(keys[3])).data == filled(4).data
    assert sum(m.references for m in b.memory.given) == 4  # what the engine was given, and nothing else
    assert b.run(c.list()) == []


@pytest.mark.parametrize(
    "change",
    [
        {"model_name": "models/other"},
        {"world_size": 2},
        {"worker_id": 1},
        {"dtype": "float16"},
        {"tags": (("user", "b"),)},
        {"tags": None},
        {"tags": (("user", "a"), ("x", "y"))},
        {"tags": (("user", "a@x%y"),)},
    ],
    ids=str,
)
def test_chunks_of_other_workers_models_and_tags_are_apart(engine: Callable[..., Engine], change: Any) -> None:
    one = engine()
    put(one, [chunk(1, tags=(("user", "a"),))])
    assert one.connector.exists_sync(chunk(1, tags=(("user", "a"),)))
    assert not one.connector.exists_sync(chunk(1, **{"tags": (("user", "a"),), **change}))


def test_a_tag_cannot_be_written_so_that_it_looks_like_two(engine: Callable[..., Engine]) -> None:
    one = engine()
    put(one, [chunk(1, tags=(("user", "a"), ("x", "y")))])
    assert not one.connector.exists_sync(chunk(1, tags=(("user", "a@x%y"),)))


@pytest.mark.parametrize(
    "change",
    [
        {"settings": {"tag": "two"}},
        {"settings": {"revision": "two"}},
        {"metadata": {"kv_dtype": "float16"}},
        {"metadata": {"chunk_size": 128}},
        {"metadata": {"world_size": 2}},
        {"metadata": {"model_name": "models/other"}},
        {"pre_caching_hash_algorithm": "sha256"},
    ],
    ids=str,
)
def test_engines_that_must_not_share_do_not(engine: Callable[..., Engine], change: Any) -> None:
    put(engine(), [chunk(1)])
    assert engine().connector.exists_sync(chunk(1))
    assert not engine(**change).connector.exists_sync(chunk(1))


def test_another_seed_of_the_hashes_shares_nothing(
    engine: Callable[..., Engine], monkeypatch: pytest.MonkeyPatch
) -> None:
    put(engine(), [chunk(1)])
    monkeypatch.setenv("PYTHONHASHSEED", "7")
    assert not engine().connector.exists_sync(chunk(1))


@pytest.mark.parametrize(
    ("change", "word"),
    [
        ({"pre_caching_hash_algorithm": "builtin"}, "sha256_cbor"),
        ({"use_layerwise": True}, "use_layerwise"),
        ({"remote_serde": "cachegen"}, "remote_serde"),
    ],
)
def test_what_cannot_be_shared_safely_is_refused_with_a_reason(
    engine: Callable[..., Engine], fake: FakeSidecar, change: Any, word: str, caplog: pytest.LogCaptureFixture
) -> None:
    one = engine(**change)
    put(one, [chunk(1)])
    assert one.run(one.connector.get(chunk(1))) is None
    assert not one.connector.exists_sync(chunk(1))
    assert one.connector.remove_sync(chunk(1))
    assert one.connector.stats() == {"connected": False}
    assert word in caplog.text
    assert fake.hellos == []


def test_an_unknown_version_is_refused(engine: Callable[..., Engine], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lmcache_remote.lmcache, "__version__", "0.4.0")
    assert engine().connector._client is None


def test_only_whole_chunks_are_stored(engine: Callable[..., Engine], caplog: pytest.LogCaptureFixture) -> None:
    one = engine()
    put(one, [chunk(1)], size=SIZE // 2)
    assert not one.connector.exists_sync(chunk(1))
    assert "save_unfull_chunk" in caplog.text


def test_memory_that_is_not_there_is_a_miss_and_nobody_waits_for_it(engine: Callable[..., Engine]) -> None:
    one = engine(room=2)
    keys = [chunk(n) for n in range(4)]
    put(one, keys)
    got = one.run(one.connector.batched_get(keys))
    assert [m is not None for m in got] == [True, True, False, False]


def test_what_was_removed_is_found_again_after_it_is_put_again(engine: Callable[..., Engine]) -> None:
    one = engine()
    put(one, [chunk(1), chunk(2)])
    assert one.connector.remove_sync(chunk(1))
    assert one.connector.batched_contains([chunk(1), chunk(2)]) == 0
    put(one, [chunk(1)])
    assert one.connector.batched_contains([chunk(1), chunk(2)]) == 2


def test_a_load_that_is_given_up_gives_its_memory_back(engine: Callable[..., Engine], fake: FakeSidecar) -> None:
    one = engine()
    put(one, [chunk(1)])
    entered, gate = threading.Event(), threading.Event()

    def hold(*_: Any) -> bool:
        entered.set()
        gate.wait(20)
        return False

    fake.faults[Op.OPEN] = hold
    future = one.start(one.connector.batched_get([chunk(1)]))
    assert entered.wait(10)
    future.cancel()
    assert not one.balanced()  # it is being written to: LMCache must not have it yet
    gate.set()
    assert until(one.balanced)


def test_a_store_that_is_given_up_holds_its_memory_until_it_has_ended(
    engine: Callable[..., Engine], fake: FakeSidecar
) -> None:
    one = engine()
    entered, gate = threading.Event(), threading.Event()

    def hold(*_: Any) -> bool:
        entered.set()
        gate.wait(20)
        return False

    fake.faults[Op.BEGIN] = hold
    memory = filled(1)
    future = one.start(one.connector.put(chunk(1), memory))
    assert entered.wait(10)
    future.cancel()
    memory.ref_count_down()  # LMCache's own
    assert memory.references == 1
    gate.set()
    assert until(lambda: memory.references == 0)


def test_stores_beyond_the_limit_are_dropped(engine: Callable[..., Engine], fake: FakeSidecar) -> None:
    one = engine(settings={"max_inflight_stores": 2})
    gate = threading.Event()
    fake.faults[Op.BEGIN] = lambda *_: gate.wait(20) and False
    held = [filled(n) for n in range(3)]
    first = one.start(one.connector.batched_put([chunk(0), chunk(1)], held[:2]))
    assert until(lambda: held[0].references == 2)
    one.run(one.connector.put(chunk(2), held[2]))
    assert held[2].references == 1
    assert one.connector.dropped == 1
    gate.set()
    first.result(20)
    assert until(lambda: one.connector._putting == 0)


def test_a_closed_connector_answers_without_the_pool(engine: Callable[..., Engine]) -> None:
    one = engine()
    put(one, [chunk(1)])
    one.run(one.connector.close())
    assert one.run(one.connector.get(chunk(1))) is None
    assert one.run(one.connector.exists(chunk(1))) is False
    assert one.connector.batched_contains([chunk(1)]) == 0
    put(one, [chunk(2)])
    assert one.connector._putting == 0
    assert one.balanced()


def test_what_waits_when_the_connector_is_closed_ends_without_an_exception(
    engine: Callable[..., Engine], fake: FakeSidecar
) -> None:
    one = engine()
    entered, gate = threading.Event(), threading.Event()

    def hold(*_: Any) -> bool:
        entered.set()
        gate.wait(20)
        return False

    fake.faults[Op.BEGIN] = hold
    held = [filled(0), filled(1)]
    first = one.start(one.connector.put(chunk(0), held[0]))
    assert entered.wait(10)
    second = one.start(one.connector.put(chunk(1), held[1]))
    assert until(lambda: held[1].references == 2)
    one.run(one.connector.close())
    assert second.result(20) is None
    gate.set()
    assert first.result(20) is None
    assert until(lambda: [memory.references for memory in held] == [1, 1])
    assert one.connector._putting == 0


def test_nonsense_is_a_miss(engine: Callable[..., Engine]) -> None:
    one = engine()
    assert one.connector.exists_sync(object()) is False
    assert one.run(one.connector.batched_get([object()])) == [None]
    memory = filled(1)
    one.run(one.connector.put(object(), memory))
    assert until(lambda: memory.references == 1)
    assert one.connector.batched_contains([]) == 0
    assert one.run(one.connector.batched_get([])) == []
    assert one.balanced()


def test_cancelling_at_any_time_loses_no_memory_and_no_byte(engine: Callable[..., Engine], fake: FakeSidecar) -> None:
    dice = random.Random(3)
    one = engine(settings={"connect_retry_ms": 5, "deadlines": {"load_min_ms": 2000, "store_ms": 2000}})

    def slow(connection: Any, head: Any, body: Any) -> bool:
        time.sleep(dice.choice([0, 0, 0.002, 0.005]))
        if dice.random() < 0.02:
            connection.shutdown(2)
            return True
        return False

    for op in (Op.LOOKUP, Op.OPEN, Op.BEGIN):
        fake.faults[op] = slow
    put_held, hits = [], 0
    for _ in range(150):
        keys = [chunk(n) for n in dice.sample(range(20), dice.randint(1, 4))]
        if dice.random() < 0.5:
            held = [filled(k.chunk_hash) for k in keys]
            put_held += held
            future = one.start(one.connector.batched_put(keys, held))
        else:
            held = []
            future = one.start(one.connector.batched_get(keys))
        if dice.random() < 0.4:
            time.sleep(dice.choice([0, 0.001, 0.004]))
            future.cancel()
        try:
            got = future.result(20)
        except concurrent.futures.CancelledError:
            got = None
        for memory in held:
            memory.ref_count_down()
        for k, memory in zip(keys, got or (), strict=False):
            if memory is not None:
                assert memory.data == filled(k.chunk_hash).data
                memory.ref_count_down()
                hits += 1
    assert hits > 0
    assert until(lambda: one.balanced() and all(m.references == 0 for m in put_held))
    assert until(lambda: one.connector._putting == 0)


def test_the_adapter_takes_its_own_urls_only() -> None:
    takes = lmcache_remote.PoolConnectorAdapter().can_parse
    assert takes("plugin://kvpool")
    assert takes("plugin://kvpool.second")
    assert not takes("plugin://kvpoolx")
    assert not takes("plugin://fs")
    assert not takes("redis://kvpool")


def test_several_instances_have_settings_of_their_own(fake: FakeSidecar) -> None:
    extra = {
        "remote_storage_plugin.kvpool.a.socket": fake.path,
        "remote_storage_plugin.kvpool.a.tag": "a",
        "remote_storage_plugin.kvpool.socket": "/nowhere",
    }
    context = SimpleNamespace(
        loop=None, local_cpu_backend=None, config=stub.Config(extra), metadata=stub.Metadata(), plugin_name="kvpool.a"
    )
    connector = lmcache_remote.PoolConnectorAdapter().create_connector(context)
    assert connector._config.socket == fake.path
    asyncio.run(connector.close())


def test_without_lmcache_the_message_says_what_is_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, module in (("lmcache_mp", "l2_adapter"), ("lmcache_remote", "remote_connector")):
        monkeypatch.delitem(sys.modules, f"kvpool.engines.lmcache.{module}", raising=False)
        monkeypatch.delitem(sys.modules, f"kvpool.engines.{name}", raising=False)
        monkeypatch.setitem(sys.modules, "lmcache", None)
        with pytest.raises(ImportError, match=r"LMCache 0\.5\.6"):
            __import__(f"kvpool.engines.{name}")


# -- the parts ---------------------------------------------------------------------------------------------------------


def test_a_task_that_raises_has_an_outcome_and_wakes() -> None:
    woken = threading.Event()
    tasks: Tasks[str] = Tasks("t", 1, 10, woken.set, itertools.count(1))
    number = tasks.submit(lambda: str(1 // 0), "failed")
    assert woken.wait(10)
    assert tasks.take(number) == "failed"
    assert tasks.take(number) is None
    assert tasks.close(10)


def test_a_waker_that_is_gone_disturbs_nobody() -> None:
    def wake() -> None:
        raise OSError(9, "bad file descriptor")

    tasks: Tasks[str] = Tasks("t", 1, 10, wake, itertools.count(1))
    number = tasks.submit(lambda: "done", "failed")
    assert until(lambda: tasks.take(number) == "done")
    assert tasks.close(10)


def test_a_ledger_forgets_its_oldest_names() -> None:
    ledger: StoredInventory[int] = StoredInventory(3)
    assert ledger.store([(1, 10), (2, 20), (3, 30)]) == ([(1, 10), (2, 20), (3, 30)], [])
    assert ledger.store([(1, 10)]) == ([], [])  # used again: now 2 is the oldest
    assert ledger.store([(4, 40)]) == ([(4, 40)], [(2, 20)])
    assert ledger.delete([1, 9]) == [(1, 10)]
    assert ledger.is_deleted(9)
    ledger.delete([5, 6])
    assert not ledger.is_deleted(1)
    assert ledger.lost([3, 3, 8]) == [(3, 30)]
    assert ledger.page(0, 5) == ([(4, 40)], False)


def test_more_at_once_than_a_ledger_holds_is_counted_once() -> None:
    ledger: StoredInventory[int] = StoredInventory(2)
    new, gone = ledger.store([(n, 1) for n in range(5)])
    assert new == [(3, 1), (4, 1)]
    assert gone == []


def test_clients_are_made_once_up_to_a_limit_and_not_waited_for_past_the_deadline(
    caplog: pytest.LogCaptureFixture,
) -> None:
    gate = threading.Event()
    made: list[int] = []

    def make_client(n: int) -> Any:
        made.append(n)
        gate.wait(10)
        if n == 2:
            raise OSError("no files")
        return SimpleNamespace(wait_connected=lambda seconds: True, close=lambda: None)

    clients: ClientCache[int] = ClientCache(make_client, 2)
    assert clients.get(1, time.monotonic() + 0.02) is None
    gate.set()
    one = clients.get(1, time.monotonic() + 10)
    assert one is not None
    assert clients.get(2, time.monotonic() + 10) is None
    assert clients.get(3, time.monotonic() + 10) is None  # beyond the limit
    assert clients.get(1, 0.0) is one
    assert made == [1, 2]
    assert clients.all() == [one]
    clients.close()
