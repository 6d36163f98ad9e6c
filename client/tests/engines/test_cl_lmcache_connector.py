"""The LMCache remote connector inside an engine, against LMCache's contract (cl_lmcache_stub)."""

from __future__ import annotations

import asyncio
import concurrent.futures
import random
import sys
import threading
import time
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import cl_lmcache_stub as stub
import pytest
from cl_lmcache import PATIENT, SIZE, filled, until

from kvpool.protocol.wire import Op

with stub.installed():
    from kvpool.engines.lmcache import remote_connector as lmcache_remote

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from cl_fake_sidecar import FakeSidecar


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


def test_a_release_that_is_not_tested_uses_the_pool_after_its_self_test(
    engine: Callable[..., Engine], fake: FakeSidecar, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lmcache_remote.lmcache, "__version__", "0.4.0")
    one = engine()
    put(one, [chunk(1)])
    stored = one.connector.stats()["stores"]["stored"]
    assert until(lambda: one.connector.exists_sync(chunk(1)))
    assert one.connector.stats()["stores"]["stored"] == stored + 1
    assert fake.hellos[-1].is_tested is False


def test_another_interface_is_refused(engine: Callable[..., Engine], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lmcache_remote.RemoteConnector, "batched_contains", lambda self, names: 0)
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


def test_stores_beyond_the_limit_are_dropped_and_counted(engine: Callable[..., Engine], fake: FakeSidecar) -> None:
    one = engine(settings={"store_queue_bytes": 2 * SIZE})
    gate = threading.Event()
    fake.faults[Op.BEGIN] = lambda *_: gate.wait(20) and False
    held = [filled(n) for n in range(3)]
    first = one.start(one.connector.batched_put([chunk(0), chunk(1)], held[:2]))
    assert until(lambda: held[0].references == 2)
    one.run(one.connector.put(chunk(2), held[2]))
    assert held[2].references == 1
    assert one.connector.dropped == 1
    assert one.connector.stats()["not_stored"] == {"busy": 1}
    gate.set()
    first.result(20)
    assert until(lambda: one.connector._queued_bytes == 0)


def test_a_closed_connector_answers_without_the_pool(engine: Callable[..., Engine]) -> None:
    one = engine()
    put(one, [chunk(1)])
    one.run(one.connector.close())
    assert one.run(one.connector.get(chunk(1))) is None
    assert one.run(one.connector.exists(chunk(1))) is False
    assert one.connector.batched_contains([chunk(1)]) == 0
    put(one, [chunk(2)])
    assert one.connector._queued_bytes == 0
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
    assert one.connector._queued_bytes == 0


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
    assert until(lambda: one.connector._queued_bytes == 0)


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
        with pytest.raises(ImportError, match="of LMCache, which cannot be imported"):
            __import__(f"kvpool.engines.{name}")


# -- the parts ---------------------------------------------------------------------------------------------------------
