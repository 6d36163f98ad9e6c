"""PoolTier against vLLM's contract, whatever its sidecar does: order, threads, cancellation, return values.

vLLM is a stub here (cl_vllm_stub); the real one is in client/tests_engine.
"""

from __future__ import annotations

import contextlib
import hashlib
import inspect
import os
import random
import socket
import sys
import threading
import time
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import cl_vllm_stub as stub
import pytest

from kvpool.protocol import block, keys
from kvpool.protocol.wire import Op

sys.modules.pop("kvpool.engines.vllm.tier", None)
with stub.installed():
    from kvpool.engines.vllm import tier as engine_module

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from cl_fake_sidecar import FakeSidecar

SIZE = 4096
SLOTS = 64
LookupResult = stub.LookupResult


@pytest.fixture(autouse=True)
def vllm_is_there() -> Iterator[None]:
    with stub.installed():
        yield


def until(condition: Any, seconds: float = 20.0) -> bool:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if condition():
            return True
        time.sleep(0.002)
    return False


def content(name: bytes) -> bytes:
    return hashlib.sha256(name).digest() * (SIZE // 32)


class Host:
    """The primary tier and the scheduler of vLLM, as far as a tier meets them: slots, jobs, steps."""

    def __init__(self, sidecar: FakeSidecar, groups: int = 1, **settings: Any) -> None:
        self.memory = bytearray(SLOTS * SIZE)
        self.view = memoryview(self.memory).cast("B", (SLOTS, SIZE))
        deadlines = {"lookup_ms": 300, "load_min_ms": 400, "breaker_failures": 1000, "store_ms": 1000}
        self.tier = engine_module.PoolTier(
            stub.spec(groups), self.view, "PoolTier", socket=sidecar.path, connect_retry_ms=20, deadlines=deadlines,
            **settings,
        )  # fmt: skip
        self.free = list(range(SLOTS))
        self.jobs: dict[int, stub.TransferJob] = {}
        self.done: dict[int, stub.JobResult] = {}
        self.events: list[stub.OffloadingEvent] = []
        self.number = 0

    def slot(self, number: int) -> memoryview:
        return memoryview(self.memory)[number * SIZE : (number + 1) * SIZE]

    def submit(self, names: list[bytes], request: stub.ReqContext, *, load: bool) -> int:
        self.number += 1
        slots = [self.free.pop() for _ in names]
        job = self.jobs[self.number] = stub.TransferJob(self.number, names, slots, request, load)
        if load:
            for number in slots:
                self.slot(number)[:] = bytes(SIZE)
            self.tier.submit_load(job)
        else:
            for number, name in zip(slots, names, strict=True):
                self.slot(number)[:] = content(name)
            self.tier.submit_store(job)
        return job.job_id

    def step(self) -> None:
        self.tier.on_schedule_end(None)
        for result in self.tier.get_finished_jobs():
            assert result.job_id not in self.done, "an outcome is told once"
            job = self.jobs.pop(result.job_id)
            self.done[result.job_id] = result
            good = job.keys if result.success else result.successful_keys or ()
            assert set(good) <= set(job.keys)
            for number, name in zip(job.chunk_ids, job.keys, strict=True):
                if job.is_promotion and name in good:
                    assert self.slot(number) == content(name), "what counts as loaded is what was stored"
                self.free.append(number)
        self.events += self.tier.take_events()
        self.tier.get_stats()

    def wait(self) -> None:
        assert until(lambda: self.step() or not self.jobs), self.jobs
        assert not self.tier.has_pending_work()

    def look(self, names: list[bytes], request: stub.ReqContext) -> list[stub.LookupResult]:
        """As the scheduler does: each step all of them, until none says RETRY."""
        found: list[stub.LookupResult] = []

        def settled() -> bool:
            found[:] = [self.tier.lookup(name, request) for name in names]
            self.step()
            return LookupResult.RETRY not in found

        assert until(settled), "a question does not stay open"
        return found


@pytest.fixture
def host(fake: FakeSidecar) -> Iterator[Host]:
    host = Host(fake)
    assert until(lambda: host.tier.stats()["connected"])
    yield host
    host.tier.shutdown()


NAMES = [stub.key(hashlib.sha256(bytes([i])).digest()) for i in range(40)]


def test_what_was_stored_is_found_loaded_and_told(host: Host) -> None:
    one, two = stub.ReqContext("one"), stub.ReqContext("two")
    job = host.submit(NAMES[:5], one, load=False)
    host.wait()
    assert host.done[job].success
    assert [e.keys for e in host.events] == [NAMES[:5]]
    assert host.events[0].locality is stub.Locality.REMOTE
    assert host.look(NAMES[:6], two) == [LookupResult.HIT] * 5 + [LookupResult.MISS]
    job = host.submit(NAMES[:5], two, load=True)
    host.wait()
    assert host.done[job].success
    assert host.done[job].transfer_bytes == 5 * SIZE


def test_a_prompt_that_another_engine_hands_over_is_not_asked_for(host: Host, fake: FakeSidecar) -> None:
    host.submit(NAMES[:4], stub.ReqContext("stores"), load=False)
    host.wait()
    asked = fake.requests.count(Op.LOOKUP)
    params: dict[str, Any] = {"do_remote_prefill": True, "remote_host": "10.0.0.1"}
    promised = stub.ReqContext("decodes", params)
    assert host.look(NAMES[:4], promised) == [LookupResult.MISS] * 4
    assert fake.requests.count(Op.LOOKUP) == asked
    params["do_remote_prefill"] = False  # as NixlConnector does once it has taken the promise, kept or not
    assert host.look(NAMES[:4], promised) == [LookupResult.HIT] * 4


def test_a_part_of_a_load_is_kept_and_the_rest_not_offered_again(host: Host, fake: FakeSidecar) -> None:
    request = stub.ReqContext("one")
    host.submit(NAMES[:6], request, load=False)
    host.wait()
    damaged = sorted(fake.directory.glob("?" * 64), key=lambda f: f.stat().st_mtime_ns)[2]
    data = bytearray(damaged.read_bytes())
    data[-1] ^= 1
    damaged.write_bytes(data)
    two = stub.ReqContext("two")
    assert host.look(NAMES[:6], two) == [LookupResult.HIT] * 6
    job = host.submit(NAMES[:6], two, load=True)
    host.wait()
    kept = host.done[job].successful_keys
    assert not host.done[job].success
    assert kept is not None
    assert 0 < len(kept) < 6
    again = host.look(NAMES[:6], two)
    assert [name for name, found in zip(NAMES, again, strict=False) if found is LookupResult.HIT] == list(kept)


def test_groups_of_a_hybrid_model_are_looked_up_one_by_one(fake: FakeSidecar) -> None:
    host = Host(fake, groups=2)
    assert until(lambda: host.tier.stats()["connected"])
    names = [stub.key(name[:-4], group) for name in NAMES[:4] for group in (0, 1)]
    host.submit(names[3:], stub.ReqContext("one"), load=False)
    host.wait()
    found = host.look(names, stub.ReqContext("two"))
    assert found == [LookupResult.MISS] * 3 + [LookupResult.HIT] * 5
    for part in (names[3:5], names[5:]):  # vLLM may ask in parts
        host.submit(part, stub.ReqContext("three"), load=True)
    host.wait()
    assert host.tier.stats()["requests"]["three"] == {"local": 3 * 16}  # the tokens of the group that loaded most
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


def misbehave(source: random.Random) -> Callable[..., bool]:
    """Sometimes late, silent, gone, or talking nonsense."""

    def fault(connection: socket.socket, head: Any, body: bytes) -> bool:
        what = source.random()
        if what < 0.7:
            return False
        if what < 0.8:
            time.sleep(source.uniform(0, 0.1))
            return False
        if what < 0.85:
            return True  # no answer at all
        with contextlib.suppress(OSError):
            if what < 0.93:
                connection.shutdown(socket.SHUT_RDWR)
            else:
                connection.send(source.randbytes(source.randrange(1, 200)))
        return True

    return fault


@pytest.mark.parametrize("seed", range(6))
def test_whatever_the_sidecar_does_and_in_whatever_order_vllm_asks(fake: FakeSidecar, seed: int) -> None:
    source = random.Random(seed)
    host = Host(fake)
    assert until(lambda: host.tier.stats()["connected"])
    host.submit(NAMES[:20], stub.ReqContext("before"), load=False)
    host.wait()
    fake.faults = {op: misbehave(source) for op in (Op.LOOKUP, Op.OPEN, Op.BEGIN, Op.COMMIT)}
    requests: dict[int, stub.ReqContext] = {}
    number = 0
    for _ in range(120):
        what = source.random()
        names = source.sample(NAMES, source.randrange(1, 8))
        if not requests or what < 0.2:
            number += 1
            requests[number] = stub.ReqContext(f"request {number}")
            host.tier.on_new_request(requests[number])
        request = source.choice(list(requests.values()))
        if what < 0.4 and len(host.free) > 8:
            host.submit(names, request, load=False)
        elif what < 0.6 and len(host.free) > 8:
            host.submit(names, request, load=True)  # found or not
        elif what < 0.85:
            for name in names:
                assert host.tier.lookup(name, request) in LookupResult
        elif what < 0.9:
            host.tier.on_request_finished(requests.pop(source.choice(list(requests))))  # jobs may be under way
        elif what < 0.92:
            host.tier.drain_jobs()
        elif what < 0.94:
            fake.stop()
            fake.start()
        host.step()
        time.sleep(0.002)
    host.wait()
    assert sorted(host.done) == list(range(1, host.number + 1))
    assert {r.success for r in host.done.values()} == {True, False}
    assert sorted(host.free) == list(range(SLOTS))
    host.look(NAMES[:5], stub.ReqContext("last"))
    host.tier.shutdown()
    assert not [t for t in threading.enumerate() if t.name.startswith("kvpool") and not t.daemon]


def test_metrics_and_outcomes_are_asked_for_by_threads_while_jobs_run(host: Host) -> None:
    """0.33 may ask for outcomes off its scheduler's thread; statistics are asked for by others in both."""
    stop = threading.Event()
    failures: list[BaseException] = []

    def ask() -> None:
        try:
            while not stop.is_set():
                host.tier.stats()
                host.tier.has_pending_work()
        except BaseException as e:
            failures.append(e)

    threads = [threading.Thread(target=ask) for _ in range(3)]
    for thread in threads:
        thread.start()
    for turn in range(20):
        host.submit(NAMES[turn : turn + 5], stub.ReqContext(f"r{turn}"), load=bool(turn % 2))
        assert until(lambda: host.step() or len(host.free) >= 5)
    host.wait()
    stop.set()
    for thread in threads:
        thread.join()
    assert not failures


def test_a_shutdown_in_the_middle_of_jobs_leaves_the_memory_to_its_owner(host: Host, fake: FakeSidecar) -> None:
    fake.faults = {Op.OPEN: lambda *_: True, Op.BEGIN: lambda *_: True}
    host.submit(NAMES[:5], stub.ReqContext("one"), load=False)
    host.submit(NAMES[:5], stub.ReqContext("one"), load=True)
    host.tier.shutdown()
    assert until(lambda: not host.tier.has_pending_work())
    assert len(os.listdir("/proc/self/fd")) < 500


# -- salts


def request_of(salt: str | None, number: int) -> stub.ReqContext:
    """The context of a request as vLLM's scheduler makes it: by the name in its module."""
    made = SimpleNamespace(request_id=f"request {number}", cache_salt=salt)
    context: stub.ReqContext = stub.scheduler()._create_req_context(made)
    assert context.req_id == made.request_id
    return context


def tags_in(fake: FakeSidecar) -> list[bytes]:
    headers = [f.read_bytes()[: block.HEADER_BYTES] for f in fake.directory.glob("?" * 64)]
    return sorted(block.decode_header(header).salt_tag for header in headers)


def tags(*salts: str) -> list[bytes]:
    return sorted(keys.salt_tag(SALT_KEY, keys.salt_digest(salt)) if salt else block.NO_SALT for salt in salts)


SALT_KEY = b"k" * 32


@pytest.fixture
def make(fake: FakeSidecar) -> Iterator[Callable[..., Host]]:
    """Tiers that are connected, once what the sidecar says of itself is settled."""
    hosts: list[Host] = []

    def start() -> Host:
        hosts.append(Host(fake))
        assert until(lambda: hosts[-1].tier.stats()["connected"])
        return hosts[-1]

    yield start
    for one in hosts:
        one.tier.shutdown()


def test_blocks_are_stored_with_the_tag_of_their_requests_salt(fake: FakeSidecar, make: Callable[..., Host]) -> None:
    fake.hello["salt_key"] = SALT_KEY
    host = make()
    for number, salt in enumerate(["red", None, "blue", ""]):
        host.submit(NAMES[2 * number : 2 * number + 2], request_of(salt, number), load=False)
    host.submit(NAMES[8:9], stub.ReqContext("made before us"), load=False)
    host.wait()
    assert all(result.success for result in host.done.values())
    assert tags_in(fake) == tags("red", "red", "blue", "blue", "", "", "", "", "")


def test_what_a_pool_does_not_ask_for_is_not_told(fake: FakeSidecar, make: Callable[..., Host]) -> None:
    host = make()
    host.submit(NAMES[:2], request_of("red", 1), load=False)
    host.wait()
    assert tags_in(fake) == tags("", "")


def test_the_schedulers_function_is_wrapped_once(make: Callable[..., Host]) -> None:
    make()
    wrapped = stub.scheduler()._create_req_context
    assert wrapped is not stub.create_req_context
    assert inspect.unwrap(wrapped) is stub.create_req_context
    make()
    assert stub.scheduler()._create_req_context is wrapped
    assert wrapped.__name__ == stub.create_req_context.__name__


@pytest.mark.parametrize("there", [False, True])
def test_a_vllm_that_does_not_tell_salts_stores_all_the_same_and_it_is_said_once(
    fake: FakeSidecar, make: Callable[..., Host], caplog: pytest.LogCaptureFixture, there: bool
) -> None:
    fake.hello["salt_key"] = SALT_KEY
    if there:  # a context that takes no state, and a request that has no salt
        stub.scheduler()._create_req_context = lambda _request: SimpleNamespace(req_id="r")
    else:
        del stub.scheduler()._create_req_context
    host = make()
    context = stub.ReqContext("r")
    if there:
        context = stub.scheduler()._create_req_context(SimpleNamespace())
        assert stub.scheduler()._create_req_context(SimpleNamespace(cache_salt="red")).req_id == "r"
    for number in range(2):
        host.submit(NAMES[number : number + 1], context, load=False)
    host.wait()
    assert all(result.success for result in host.done.values())
    assert tags_in(fake) == tags("", "")
    assert caplog.text.count("without their salts") == (0 if there else 1)
