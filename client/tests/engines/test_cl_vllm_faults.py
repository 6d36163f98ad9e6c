"""Resets, changes of weights, faults of vLLM's interface and of the client: the tier misses and never raises."""

from __future__ import annotations

import socket
import sys
import threading
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import cl_vllm_stub as stub
import pytest
from cl_vllm_host import NAMES, SIZE, SLOTS, Host, LookupResult, engine_module, until

from kvpool.protocol.wire import Op

if TYPE_CHECKING:
    from collections.abc import Iterator

    from cl_fake_sidecar import FakeSidecar


@pytest.fixture(autouse=True)
def vllm_is_there() -> Iterator[None]:
    with stub.installed():
        yield


@pytest.fixture
def host(fake: FakeSidecar) -> Iterator[Host]:
    host = Host(fake)
    assert until(lambda: host.tier.stats()["connected"])
    yield host
    host.tier.shutdown()


def engine_core(*tiers: Any) -> stub.EngineCore:
    core: stub.EngineCore = sys.modules["vllm.v1.engine.core"].EngineCore(*tiers)
    return core


@pytest.mark.parametrize(
    "act",
    [
        lambda core: core.sleep(1),
        lambda core: core.sleep(),
        lambda core: core.wake_up(),
        lambda core: core.wake_up(["weights", "kv_cache"]),
        lambda core: core.reset_prefix_cache(),
        lambda core: core.collective_rpc("add_lora"),
        lambda core: core._reset_caches(),
    ],
)
def test_a_reset_without_new_weights_ends_the_jobs_and_keeps_the_blocks(host: Host, act: Any) -> None:
    host.submit(NAMES[:5], stub.ReqContext("one"), load=False)
    before = host.tier.stats()["fingerprint"]
    act(engine_core(host.tier))
    host.tier.drain_jobs()
    assert not host.tier.has_pending_work()
    host.wait()
    assert host.tier.stats()["fingerprint"] == before
    assert host.look(NAMES[:5], stub.ReqContext("two")) == [LookupResult.HIT] * 5


@pytest.mark.parametrize(
    "act",
    [
        lambda core: core.sleep(2),
        lambda core: core.sleep(level=2),
        lambda core: core.wake_up(["weights"]),
        lambda core: core.wake_up(tags=["weights"]),
        lambda core: core.reset_prefix_cache(reset_connector=True),
        lambda core: core.reset_prefix_cache(False, True),
        lambda core: core.collective_rpc("reload_weights"),
        lambda core: core.collective_rpc("update_weights", args=({},)),
        lambda core: core.collective_rpc("a_method_of_the_users_worker"),
        lambda core: core.collective_rpc(method=print),
        lambda core: core.set_weight_version("2"),
    ],
)
def test_after_new_weights_nothing_of_before_is_found(host: Host, act: Any) -> None:
    host.submit(NAMES[:5], stub.ReqContext("one"), load=False)
    host.wait()
    act(engine_core(host.tier))
    assert not host.tier.has_pending_work()
    assert until(lambda: host.tier.stats()["connected"])
    assert host.look(NAMES[:5], stub.ReqContext("two")) == [LookupResult.MISS] * 5


def test_what_was_left_in_the_host_tier_does_not_outlive_the_reset_after_new_weights(host: Host) -> None:
    core = engine_core(host.tier)
    core.collective_rpc("update_weights")
    between = host.tier.stats()["fingerprint"]
    host.submit(NAMES[:5], stub.ReqContext("old weights"), load=False)
    core._reset_caches()
    assert host.tier.stats()["fingerprint"] != between
    host.wait()
    core._reset_caches()
    assert until(lambda: host.tier.stats()["connected"])
    assert host.look(NAMES[:5], stub.ReqContext("two")) == [LookupResult.MISS] * 5


def test_every_reset_counts_where_weights_cannot_be_watched_or_the_user_wants_it(fake: FakeSidecar) -> None:
    wanting = Host(fake, discard_after_reset=True)
    del sys.modules["vllm.v1.engine.core"].EngineCore
    blind = Host(fake)
    for host in (wanting, blind):
        before = host.tier.stats()["fingerprint"]
        host.tier.drain_jobs()
        assert host.tier.stats()["fingerprint"] != before
        host.tier.shutdown()


def test_a_load_that_ends_between_steps_is_reported_to_the_thread_that_polls(host: Host) -> None:
    """vLLM 0.33 polls off its scheduler's thread a tier that tolerates it."""
    assert host.tier.tolerates_off_thread_polling is True
    host.submit(NAMES[:5], stub.ReqContext("one"), load=False)
    host.wait()
    host.submit(NAMES[:5], stub.ReqContext("two"), load=True)
    found: list[Any] = []
    poller = threading.Thread(target=lambda: until(lambda: found.extend(host.tier.get_finished_jobs()) or found))
    poller.start()
    poller.join()
    assert [result.success for result in found] == [True]


@pytest.mark.parametrize("numbers", [[SLOTS], [-1], [10**9]])
@pytest.mark.parametrize("load", [False, True])
def test_a_chunk_outside_of_the_host_tier_fails_its_job(host: Host, numbers: list[int], load: bool) -> None:
    job = stub.TransferJob(77, NAMES[:1], numbers, stub.ReqContext("one"), load)
    (host.tier.submit_load if load else host.tier.submit_store)(job)
    assert [(r.job_id, r.success) for r in host.tier.get_finished_jobs()] == [(77, False)]


def test_a_result_that_cannot_be_accounted_for_has_failed(host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host.tier._tokens, "add", lambda *_: [][0])
    host.submit(NAMES[:2], stub.ReqContext("one"), load=False)
    host.wait()
    job = host.submit(NAMES[:2], stub.ReqContext("two"), load=True)
    host.wait()
    assert not host.done[job].success


@pytest.mark.parametrize("job", [SimpleNamespace(job_id=5), SimpleNamespace(job_id=5, keys=None)])
def test_a_job_of_an_unknown_form_fails(host: Host, job: Any) -> None:
    host.tier.submit_store(job)
    host.tier.submit_load(job)
    assert [r.success for r in host.tier.get_finished_jobs()] == [False, False]


def test_no_method_raises_into_the_engine_whatever_it_is_given(host: Host) -> None:
    assert host.tier.lookup(None, None) is LookupResult.MISS
    for call in (host.tier.on_request_finished, host.tier.on_schedule_end, host.tier.weights_may_change):
        call(None)


@pytest.fixture
def said(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Sentences that would be reported to the sidecar."""
    reported: list[str] = []
    for module in (engine_module, sys.modules["kvpool.engines.vllm.engine_client"]):
        monkeypatch.setattr(module, "report_without_pool", lambda problem, _engine: reported.append(problem))
    return reported


def runs_without_the_pool(host: Host) -> None:
    request = stub.ReqContext("one")
    host.tier.on_new_request(request)
    assert host.look(NAMES[:3], request) == [LookupResult.MISS] * 3
    for load in (False, True):
        job = host.submit(NAMES[:3], request, load=load)
        assert until(lambda: host.step() or not host.jobs)
        assert not host.done[job].success
    host.tier.drain_jobs()
    host.tier.take_events()
    host.tier.on_request_finished(request)
    assert not host.tier.has_pending_work()
    host.tier.shutdown()


def test_a_tier_that_cannot_be_built_misses(
    fake: FakeSidecar, monkeypatch: pytest.MonkeyPatch, said: list[str]
) -> None:
    monkeypatch.setattr(stub, "spec", lambda *_: SimpleNamespace(config=None))
    runs_without_the_pool(Host(fake))
    assert "AttributeError" in said[0]


def test_a_base_class_that_cannot_be_built_misses(
    fake: FakeSidecar, monkeypatch: pytest.MonkeyPatch, said: list[str]
) -> None:
    monkeypatch.setattr(stub.SecondaryTierManager, "__init__", lambda *_: [][0])
    runs_without_the_pool(Host(fake))
    assert "IndexError" in said[0]


def test_a_region_of_another_form_is_not_touched(
    fake: FakeSidecar, monkeypatch: pytest.MonkeyPatch, said: list[str]
) -> None:
    view = memoryview(bytearray(SLOTS * SIZE)).cast("B", (SLOTS, SIZE)).toreadonly()
    tier = engine_module.PoolTier(stub.spec(), view, "PoolTier", socket=fake.path)
    assert "writable table of chunks" in said[0]
    assert tier.lookup(NAMES[0], stub.ReqContext("one")) is LookupResult.MISS
    tier.shutdown()


def test_an_untested_version_gives_hits_after_its_self_test(fake: FakeSidecar, said: list[str]) -> None:
    waiting = threading.Event()
    fake.faults = {Op.BEGIN: lambda *_: not waiting.wait(20)}
    sys.modules["vllm"].__version__ = "0.99.0"  # type: ignore[attr-defined]
    host = Host(fake)
    assert until(lambda: host.tier.stats()["connected"])
    assert fake.hellos[-1].is_tested is False
    assert not host.tier._engine.is_ready
    assert host.tier.lookup(NAMES[0], stub.ReqContext("early")) is LookupResult.MISS
    waiting.set()
    assert until(lambda: host.tier._engine.is_ready)
    host.submit(NAMES[:3], stub.ReqContext("one"), load=False)
    host.wait()
    assert host.look(NAMES[:3], stub.ReqContext("two")) == [LookupResult.HIT] * 3
    assert said == []
    host.tier.shutdown()


def test_a_failed_self_test_turns_the_pool_off_and_is_reported(
    fake: FakeSidecar, monkeypatch: pytest.MonkeyPatch, said: list[str]
) -> None:
    monkeypatch.setattr("kvpool.engines.common.self_test.SelfTest._test", lambda *_: [][0])
    monkeypatch.setattr(sys.modules["vllm"], "__version__", "0.99.0")
    host = Host(fake)
    assert until(lambda: said)
    assert "self-test failed" in said[0]
    runs_without_the_pool(host)


def test_a_pool_that_takes_no_blocks_does_not_fail_the_self_test(
    fake: FakeSidecar, monkeypatch: pytest.MonkeyPatch, said: list[str]
) -> None:
    fake.faults = {Op.BEGIN: lambda connection, *_: connection.shutdown(socket.SHUT_RDWR) or True}
    monkeypatch.setattr(sys.modules["vllm"], "__version__", "0.99.0")
    host = Host(fake)
    assert until(lambda: host.tier._engine._self_test.is_passed)
    assert said == []
    host.tier.shutdown()


def test_a_strict_engine_refuses_an_untested_version(
    fake: FakeSidecar, monkeypatch: pytest.MonkeyPatch, said: list[str]
) -> None:
    monkeypatch.setenv("KVPOOL_ENGINE_STRICT", "1")
    monkeypatch.setattr(sys.modules["vllm"], "__version__", "0.33.1rc1.dev3")
    runs_without_the_pool(Host(fake))
    assert "0.33.1rc1.dev3" in said[0]
