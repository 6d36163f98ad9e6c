"""Sessions and their blocks, bounded by tenant; hints that are off, too many, or unknown; reading ahead."""

from __future__ import annotations

from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest

from kvpool.config import HintsConfig
from kvpool.protocol.hint import Hint, HintKind
from kvpool.protocol.wire import Tier
from kvpool_sidecar.counters import Stats
from kvpool_sidecar.peers import hint as peer_hint
from kvpool_sidecar.peers.migration import ReceiveResult
from kvpool_sidecar.replication.resume import SessionReader
from kvpool_sidecar.replication.session_hints import HintOutcome, SessionHints
from kvpool_sidecar.replication.session_map import SessionMap
from kvpool_sidecar.tenancy.identity import Tenant
from kvpool_testing.blocks import key

if TYPE_CHECKING:
    from kvpool_sidecar.eviction.session_marks import SessionHint

ONE, OTHER = b"1" * 16, b"2" * 16
TEAM = Tenant(b"a secret of this test, long enough", "team")


class Drives:
    """Stands for LocalStore: has the first blocks of a prompt, and remembers hints."""

    def __init__(self, here: set[bytes] | None = None) -> None:
        self.said: list[tuple[SessionHint, list[bytes], bytes]] = []
        self.here = here or set()
        self.drives: tuple[Any, ...] = ()

    def hint(self, hint: SessionHint, keys: list[bytes], tenant: bytes) -> int:
        self.said.append((hint, list(keys), tenant))
        return len(keys)

    def contains(self, block_key: bytes) -> bool:
        return block_key in self.here

    def usage(self) -> SimpleNamespace:
        return SimpleNamespace(capacity_bytes=1 << 30)


def hints(local: Drives, config: HintsConfig | None = None, **kw: Any) -> SessionHints:
    return SessionHints(lambda: config or HintsConfig(), local, Stats(), **kw)


def test_a_session_is_known_by_its_latest_prompt():
    sessions = SessionMap()
    sessions.record(b"team", ONE, [key(1), key(2)])
    sessions.record(b"team", ONE, [key(1), key(3), key(4)])
    assert sessions.find(b"team", ONE) == [key(1), key(3), key(4)]
    assert sessions.find(b"other", ONE) == sessions.find(b"team", OTHER) == []
    assert (len(sessions), sessions.blocks) == (1, 3)
    sessions.forget(b"team", ONE)
    assert (len(sessions), sessions.blocks) == (0, 0)


def test_the_tenant_with_the_most_blocks_forgets_first():
    sessions = SessionMap(sessions=100, blocks=40, all_blocks=50)
    sessions.record(b"quiet", ONE, [key(1)] * 5)
    for n in range(60):
        sessions.record(b"loud", bytes([n]) * 16, [key(n)] * 4)
        sessions.record(bytes([n % 20]) * 4, ONE, [key(n)])
        assert sessions.blocks <= 50
    assert sessions.find(b"quiet", ONE)
    assert not sessions.find(b"loud", bytes(16))


def test_one_tenant_has_a_limited_number_of_sessions():
    sessions = SessionMap(sessions=4)
    for n in range(9):
        sessions.record(b"loud", bytes([n]) * 16, [key(n)])
        sessions.find(b"loud", bytes(16))  # named again and again, so it stays
    assert len(sessions) == 4
    assert sessions.find(b"loud", bytes(16))


def test_a_pool_without_hints_takes_none():
    local = Drives()
    service = hints(local, HintsConfig(enabled=False))
    assert not service.submit(TEAM, Hint(HintKind.ENDED, ONE, 0, (key(1),)))
    assert service.apply(TEAM, Hint(HintKind.ENDED, ONE, 0, (key(1),))).outcome is HintOutcome.OFF
    assert not local.said


def test_block_keys_are_those_of_the_callers_tenant_and_times_are_cut():
    local = Drives()
    service = hints(local, HintsConfig(max_keep_s=60))
    assert service.apply(TEAM, Hint(HintKind.KEEP, ONE, 9999, (key(1), key(2)))).outcome is HintOutcome.ACCEPTED
    (said, its, tenant), *_ = local.said
    assert (said.seconds, its, tenant) == (60, [TEAM.block_key(key(1)), TEAM.block_key(key(2))], TEAM.tag)


def test_a_flood_of_hints_is_limited_and_ends():
    now = [0.0]
    local = Drives()
    service = hints(local, clock=lambda: now[0])
    said = [service.apply(TEAM, Hint(HintKind.ENDED, ONE, 0, (key(1),))).outcome for _ in range(300)]
    assert said.count(HintOutcome.LIMITED) == 100
    other = Tenant(b"a secret of this test, long enough", "other")
    assert service.apply(other, Hint(HintKind.ENDED, ONE, 0, (key(1),))).outcome is HintOutcome.ACCEPTED
    now[0] = 1.0
    said = [service.apply(TEAM, Hint(HintKind.ENDED, ONE, 0, (key(1),))).outcome for _ in range(300)]
    assert said.count(HintOutcome.ACCEPTED) == 100


def test_a_peers_hint_is_applied_to_the_session_that_it_names_and_to_no_other():
    local = Drives()
    service = hints(local)
    service.apply(TEAM, Hint(HintKind.TURN, ONE, 0, (key(1), key(2))))
    sent = Requests()
    assert peer_hint.request_hint(sent, Hint(HintKind.ENDED, ONE, 7), 0.0) == 0
    assert service.from_peer(sent.keys[0], 0) == peer_hint.pack_blocks(2)
    assert local.said[-1][0].kind is HintKind.ENDED
    peer_hint.request_hint(sent, Hint(HintKind.ENDED, OTHER), 0.0)
    assert service.from_peer(sent.keys[1], 0) == peer_hint.pack_blocks(0)
    peer_hint.request_hint(sent, Hint(HintKind.RESUME, ONE), 0.0)
    assert service.from_peer(sent.keys[2], 0) == peer_hint.pack_blocks(0)
    assert service.from_peer(ONE + b"\x63" + bytes(15), 0) == peer_hint.pack_blocks(0)


class Requests:
    """A connection to a peer that answers 0."""

    def __init__(self) -> None:
        self.keys: list[bytes] = []

    def send_request(self, _op: int, keys: list[bytes]) -> None:
        self.keys += keys

    def response_body(self, _limit: int, _deadline: float) -> bytes:
        return peer_hint.pack_blocks(0)


@pytest.mark.parametrize("missing", [None, 3])
def test_a_session_that_resumes_here_is_copied_up_to_the_first_block_that_is_nowhere(missing):
    prompt = [key(n) for n in range(6)]
    local, shared = Drives({prompt[0]}), {prompt[1]}
    copied: list[bytes] = []
    queued: list[tuple[list[bytes], bytes, float]] = []

    def receive(block_key: bytes, _flags: int) -> bytes:
        result = ReceiveResult.ABSENT if missing is not None and block_key == prompt[missing] else ReceiveResult.STORED
        copied.append(block_key)
        return bytes([result])

    tier = SimpleNamespace(available=True, contains_many=lambda keys, _s: [k in shared for k in keys])
    prefetcher = SimpleNamespace(enqueue_resumed=lambda keys, tiers, _at, keep_s: queued.append((keys, tiers, keep_s)))
    reader = SessionReader(local, tier, prefetcher, receive, Stats())
    reader._read(TEAM.tag, prompt, 3600.0)
    assert queued == [(prompt[:2], bytes([Tier.LOCAL, Tier.SHARED]), 60.0)]
    assert copied == prompt[2 : 6 if missing is None else missing + 1]


def test_a_pause_of_unknown_length_is_expected_to_last_as_long_as_the_tenants_others():
    now = [0.0]
    local = Drives()
    service = hints(local, clock=lambda: now[0])

    def said(session: bytes, seconds: int) -> SessionHint:
        service.apply(TEAM, Hint(HintKind.KEEP, session, seconds, (key(1),)))
        return local.said[-1][0]

    assert said(ONE, 0).kind is HintKind.TURN
    for _ in range(8):
        now[0] += 30
        said(ONE, 0)
    first = said(OTHER, 0)
    assert (first.kind, first.seconds) == (HintKind.KEEP, 30.0)
    assert said(OTHER, 7).seconds == 7


def test_an_end_that_comes_with_another_prompt_holds_for_the_sessions_known_blocks():
    local = Drives()
    service = hints(local)
    service.apply(TEAM, Hint(HintKind.TURN, ONE, 0, (key(1), key(2))))
    service.apply(TEAM, Hint(HintKind.ENDED, ONE, 0, (key(9),)))
    assert local.said[-1][1] == [TEAM.block_key(key(n)) for n in (1, 2, 9)]
