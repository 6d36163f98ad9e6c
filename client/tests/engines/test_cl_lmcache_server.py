"""The plug-ins for LMCache against its contract: return values, order, threads, cancellation, faults of the sidecar.

LMCache is a stub here (cl_lmcache_stub); the real one is in client/tests_engine/test_en_lmcache.py.
"""

from __future__ import annotations

import json
import random
import threading
import time
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import cl_lmcache_stub as stub
import pytest
from cl_lmcache import PATIENT, SIZE, Server, filled, key, until

from kvpool.protocol import block
from kvpool.protocol.keys import salt_digest, salt_tag
from kvpool.protocol.wire import Op

with stub.installed():
    from kvpool.engines.lmcache import l2_adapter as lmcache_mp

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from cl_fake_sidecar import FakeSidecar


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
    assert [waker.reported for waker in a._wakers] == [1, 1, 1]


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


def test_a_release_that_is_not_tested_uses_the_pool_after_its_self_test(
    make: Callable[..., Server], fake: FakeSidecar, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lmcache_mp.lmcache, "__version__", "0.6.0")
    server = make()
    assert server.store([key(1)], [filled(1)]) == SIZE
    blocks = len(list(fake.directory.iterdir()))
    assert until(lambda: server.lookup(key(1)) == [True])
    assert server.lookup(key(1)) == [True]
    assert len(list(fake.directory.iterdir())) == blocks + 1  # of the self-test
    assert fake.hellos[-1].is_tested is False


def test_a_failed_self_test_gives_no_hit(make: Callable[..., Server], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lmcache_mp.lmcache, "__version__", "0.6.0")
    reported: list[str] = []
    report = lambda problem, engine: reported.append(problem)  # noqa: E731
    monkeypatch.setattr("kvpool.engines.common.self_test.report_without_pool", report)
    server = make()
    server.store([key(1)], [filled(1)])
    (client,) = server.adapter._clients.all()
    load = client.get_into

    def other_bytes(block_ids: Any, buffers: Any, deadline: Any = None) -> Any:
        results = load(block_ids, buffers, deadline)
        buffers[0][0] ^= 1
        return results

    monkeypatch.setattr(client, "get_into", other_bytes)
    assert until(lambda: server.lookup(key(1)) == [True] or reported)
    assert server.lookup(key(1)) == [False]
    assert set(reported) == {"the self-test read other bytes than it stored"}


def test_another_interface_runs_without_the_pool(
    make: Callable[..., Server], fake: FakeSidecar, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lmcache_mp.L2AdapterInterface, "submit_load_task", lambda self, hashes, places: 0)
    server = make()
    assert server.store([key(1)], [filled(1)]) == -1
    assert server.lookup(key(1)) == [False]
    status = server.adapter.report_status()
    assert not status["is_healthy"]
    assert (
        status["reason"]
        == "LMCache 0.5.6 has another interface: L2AdapterInterface.submit_load_task has other parameters"
    )
    assert fake.hellos == []


def test_a_load_after_a_delete_is_a_miss(make: Callable[..., Server]) -> None:
    server = make()
    keys = [key(1), key(2)]
    server.store(keys, [filled(1), filled(2)])
    server.adapter.delete([key(1)])
    objects = [stub.Memory(SIZE), stub.Memory(SIZE)]
    assert server.load(keys, objects) == [False, True]
    assert server.store([key(1)], [filled(1)]) == 0  # the pool has the bytes still
    assert server.load(keys, objects) == [True, True]


def test_an_object_without_shapes_is_refused_alone(
    make: Callable[..., Server], caplog: pytest.LogCaptureFixture
) -> None:
    class Shapeless(stub.Memory):
        def get_shapes(self) -> Any:
            raise AssertionError("no shapes")

    server = make()
    assert server.store([key(1), key(2)], [Shapeless(SIZE), filled(2)]) == -1
    assert server.lookup(key(1), key(2)) == [False, True]
    assert server.load([key(1), key(2)], [Shapeless(SIZE), stub.Memory(SIZE)]) == [False, True]
    assert "Traceback" not in caplog.text


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


def test_stores_beyond_the_queue_fail_at_once_hold_no_memory_and_are_counted(
    make: Callable[..., Server], fake: FakeSidecar, caplog: pytest.LogCaptureFixture
) -> None:
    server = make(store_queue_bytes=4 * SIZE)
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
    assert a.report_status()["not_stored"] == {"busy": 1}
    assert "1 chunks were not stored: busy 1" in caplog.text


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
