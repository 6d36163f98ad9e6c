"""Session hints of vLLM's requests: every place where they come from, and nothing that breaks a request."""

from __future__ import annotations

import threading
from types import SimpleNamespace
from typing import Any

import pytest
from cl_vllm_stub import ReqContext
from hypothesis import given
from hypothesis import strategies as st

from kvpool.engines.common.jobs import TransferJobs
from kvpool.engines.vllm.hints import RequestHints, SessionHintSender, parse_request
from kvpool.protocol.hint import MAX_SECONDS, HintKind

ANY = st.recursive(
    st.none() | st.booleans() | st.floats() | st.integers() | st.text(max_size=9),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=9), inner, max_size=3),
    max_leaves=12,
)


def request(kvpool: Any = None, **more: Any) -> ReqContext:
    return ReqContext("r-1", {"kvpool": kvpool, **more})


def said(context: Any) -> list[tuple[str, int]]:
    found = parse_request(context)
    return [] if found is None else [(one.kind.label, one.seconds) for one in [*found.at_start, *found.at_end]]


def action(name: str, version: str = "1", **payload: Any) -> dict[str, Any]:
    return {"action_id": "1", "action_type": name, "action_version": version, "payload": payload}


@pytest.mark.parametrize(
    ("kvpool", "expected"),
    [
        ({"session": "s"}, [("turn", 0)]),
        ({"session": "s", "after": "continue"}, [("turn", 0)]),
        ({"session": "s", "after": "continue", "resume_in": 30}, [("keep", 30)]),
        ({"session": "s", "after": "tool"}, [("keep", 0)]),
        ({"session": "s", "after": "tool", "resume_in": 12.9}, [("keep", 12)]),
        ({"session": "s", "after": "ended", "resume_in": 30}, [("ended", 0)]),
        ({"session": "s", "ttl": 300}, [("ttl", 300)]),
        ({"session": "s", "ttl": 1e300}, [("ttl", MAX_SECONDS)]),
        ({"session": "s", "after": "tool", "ttl": 300, "unknown": 1}, [("keep", 0), ("ttl", 300)]),
        ({"session": "s", "after": ["ended"], "resume_in": "soon", "ttl": -1}, [("turn", 0)]),
        ({"session": "s", "ttl": True, "resume_in": float("nan")}, [("turn", 0)]),
        ({"session": ""}, []),
        ({"session": "s" * 257}, []),
        ({"session": 7, "after": "ended"}, []),
        ({"after": "ended"}, []),
        ("ended", []),
    ],
)
def test_kv_transfer_params_say_what_follows_the_request(kvpool, expected):
    assert said(request(kvpool)) == expected


def test_the_actions_of_an_envelope_are_read_as_an_object_and_as_json():
    actions = [
        action("kv.fetch", "1.0", session="other"),
        action("kvpool.retain", session="s", seconds=60),
        action("kvpool.prefetch@1", "", session="s", seconds=5),
        action("kvpool.release", "2", session="s"),
        action("kvpool.release", session="another session"),
    ]
    expected = [("resume", 5), ("keep", 60)]
    as_object = ReqContext("r-1")
    as_object.kv_hints = SimpleNamespace(actions=[SimpleNamespace(**one) for one in actions])
    assert said(as_object) == expected
    assert said(request(kv_hint={"protocol_version": "1", "message_id": "m", "actions": actions})) == expected


def test_the_requests_own_words_come_before_an_orchestrators():
    envelope = {"actions": [action("kvpool.release", session="theirs")]}
    assert parse_request(request({"session": "mine"}, kv_hint=envelope)).session == "mine"
    assert parse_request(request({"session": 5}, kv_hint=envelope)).session == "theirs"


@given(ANY, ANY)
def test_nothing_that_a_request_holds_raises(one, other):
    context = ReqContext("r-1", {"kvpool": one, "kv_hint": other})
    context.kv_hints = other
    parse_request(context)
    context.kv_transfer_params = one
    parse_request(context)


class Client:
    """Records hints."""

    fingerprint = bytes(32)

    def __init__(self, *, wants_hints: bool = True) -> None:
        self.wants_hints = wants_hints
        self.said: list[tuple[Any, ...]] = []

    def hint(self, *said: Any) -> bool:
        self.said.append(said)
        return True


def sent(context: Any, client: Client) -> list[tuple[Any, ...]]:
    jobs = TransferJobs(1, 8)
    sender = SessionHintSender(lambda: client, lambda _fp, keys: [b"id:" + key for key in keys], jobs)
    try:
        sender.request_started(context)
        sender.request_finished(context)
        done = threading.Event()
        jobs.after_stores(done.set)
        assert done.wait(30)
    finally:
        jobs.close()
    return client.said


def test_a_hint_names_the_prompts_blocks_in_order_after_the_request():
    context = request({"session": "s", "after": "ended"})
    context._offload_key_positions = {b"b": 512, b"a": 256, b"c": 700}
    assert sent(context, Client()) == [(HintKind.ENDED, "s", 0, [b"id:a", b"id:b", b"id:c"])]
    assert context.get_state(RequestHints).session == "s"


def test_a_request_without_blocks_names_its_session_only():
    assert sent(request({"session": "s", "after": "ended"}), Client()) == [(HintKind.ENDED, "s", 0, [])]


def test_a_pool_that_takes_no_hints_is_sent_none():
    assert sent(request({"session": "s", "after": "ended"}), Client(wants_hints=False)) == []


def test_a_request_without_a_session_sends_nothing():
    assert sent(request(None), Client()) == []
    assert sent(ReqContext("r-1"), Client()) == []
