"""Plays a plan against servers: every question at its time, each user one at a time."""

from __future__ import annotations

import http.client
import threading
import time
from typing import TYPE_CHECKING, Protocol

from bench.sessions.figures import Asked

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from bench.sessions.plan import Turn
    from bench.sessions.request import Reply, Server
    from bench.sessions.text import Session

__all__ = ["Answers", "Ask", "ask_chat", "ask_tokens", "play", "timed"]

Answers = dict[tuple[int, int], "tuple[int, ...] | str"]  # by user and round


class Ask(Protocol):
    """Puts the next question of a session to a server."""

    def __call__(self, server: Server, session: Session, answers: list[tuple[int, ...] | str], /) -> Reply: ...


def ask_tokens(max_tokens: int) -> Ask:
    """By /completions: prompts are tokens."""
    return lambda server, session, answers: server.complete(
        session.tokens([a for a in answers if isinstance(a, tuple)]), max_tokens
    )


def ask_chat(max_tokens: int) -> Ask:
    """By /chat/completions: prompts are messages."""
    return lambda server, session, answers: server.chat(session.messages([str(a) for a in answers]), max_tokens)


def timed(turn: Turn, late: float, ask: Callable[[], Reply]) -> Asked:
    """One question; what goes wrong becomes the turn's error."""
    launched = time.time()
    try:
        reply = ask()
    except (OSError, http.client.HTTPException, ValueError, KeyError, TypeError) as e:
        return Asked(turn, launched, time.time(), late, 0.0, 0, None, 0, "", error=f"{type(e).__name__}: {e}"[:300])
    return Asked(
        turn, launched, launched + reply.seconds, late, reply.ttft, reply.prompt_tokens, reply.cached_tokens,
        reply.answer_tokens, reply.answer,
    )  # fmt: skip


def play(
    turns: Sequence[Turn],
    sessions: Sequence[Session],
    servers: Sequence[Server],
    ask: Ask,
    *,
    history: Mapping[tuple[int, int], tuple[int, ...] | str] | None = None,
    limit_s: float = 600.0,
    on_turn: Callable[[Asked], None] = lambda _: None,
) -> list[Asked]:
    """All turns, each as it went. What was not asked before `limit_s` had passed is an error, and so is a question
    after one that failed.

    Prompts hold the answers given before: this run's own, or those of `history`, with which every system gets the
    same prompts and every turn is a comparison of its own.
    """
    began = time.monotonic()
    stop = threading.Event()
    lock = threading.Lock()
    done: list[Asked] = []

    def one(mine: Sequence[Turn]) -> None:
        given: list[tuple[int, ...] | str] = []
        broken = ""
        for turn in mine:
            while not stop.is_set() and (wait := began + turn.at - time.monotonic()) > 0:
                stop.wait(wait)
            if broken or stop.is_set() or time.monotonic() - began > limit_s:
                now = time.time()
                reason = broken or "not asked: out of time"
                asked = Asked(turn, now, now, 0.0, 0.0, 0, None, 0, "", error=reason)
            else:
                late = max(0.0, time.monotonic() - began - turn.at)
                session = sessions[turn.user]
                asked = timed(turn, late, lambda turn=turn, s=session: ask(servers[turn.node], s, given))  # type: ignore[misc]
            if asked.error:
                broken = broken or f"after round {turn.round + 1} failed: {asked.error}"
            else:
                given.append((history or {}).get((turn.user, turn.round), asked.answer))
            with lock:
                done.append(asked)
                on_turn(asked)

    users = sorted({turn.user for turn in turns})
    threads = [
        threading.Thread(target=one, args=([t for t in turns if t.user == user],), daemon=True) for user in users
    ]
    for thread in threads:
        thread.start()
    try:
        for thread in threads:
            while thread.is_alive():
                thread.join(0.2)  # short, so that Ctrl-C is heard
    except BaseException:
        stop.set()
        raise
    return sorted(done, key=lambda a: (a.turn.at, a.turn.user))
