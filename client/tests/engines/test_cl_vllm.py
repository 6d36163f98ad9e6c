"""PoolTier against vLLM's contract, whatever its sidecar does: order, threads, cancellation, return values.

vLLM is a stub here (cl_vllm_stub); the real one is in client/tests_engine.
"""

from __future__ import annotations

import contextlib
import inspect
import os
import random
import socket
import threading
import time
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import cl_vllm_stub as stub
import pytest
from cl_vllm_host import NAMES, SIZE, SLOTS, Host, LookupResult, until

from kvpool.protocol import block, keys
from kvpool.protocol.wire import Op

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

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


def test_stores_are_dropped_when_a_quarter_of_the_host_memory_waits(fake: FakeSidecar) -> None:
    host = Host(fake, max_inflight_stores=2)
    assert until(lambda: host.tier.stats()["connected"])
    request = stub.ReqContext("long")
    fake.delay_s = 0.5
    jobs = [host.submit(NAMES[n : n + 2], request, load=False) for n in range(0, SLOTS // 4, 2)]
    assert host.tier.stats()["dropped_stores"] == 0
    more = [host.submit(NAMES[n : n + 2], request, load=False) for n in range(SLOTS // 4, 28, 2)]
    assert host.tier.stats()["dropped_stores"] > 0
    fake.delay_s = 0.0
    host.wait()
    assert all(host.done[job].success for job in jobs)
    assert not all(host.done[job].success for job in more)
    host.tier.shutdown()


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
