"""What the demo and its engine processes say to each other: one JSON object per packet of a SOCK_SEQPACKET pair.

The demo asks, the engine answers each question once, in order. `Start` carries one descriptor, the engine's end of its
own pair. A packet is at most MAX_PACKET bytes; anything else than the messages below is a ProtocolError. This module is
imported by both sides and needs the standard library only.
"""

from __future__ import annotations

import json
import socket
from dataclasses import asdict, dataclass, field, fields
from typing import Any, TypeVar

__all__ = [
    "MAX_PACKET",
    "Channel",
    "Done",
    "Failed",
    "Generate",
    "Generated",
    "Idle",
    "ProtocolError",
    "Ready",
    "Start",
    "Started",
    "Stop",
]

MAX_PACKET = 160 * 1024  # below the kernel's default send buffer; a prompt of 8,192 tokens is 40 KiB of JSON
T = TypeVar("T")


class ProtocolError(Exception):
    """The other side sent something that is not a message."""


@dataclass(frozen=True)
class Start:
    """To the process that has imported vLLM: fork an engine. Comes with one descriptor. Answer: Started."""

    name: str
    log: str
    engine: dict[str, Any]  # arguments of vllm.LLM
    environment: dict[str, str]


@dataclass(frozen=True)
class Started:
    """The engine's process; it says Ready on its own channel when it can be asked."""

    pid: int


@dataclass(frozen=True)
class Ready:
    """From an engine: it serves. `seconds` it took to get there."""

    seconds: float


@dataclass(frozen=True)
class Generate:
    """Greedy tokens, exactly `max_tokens` of them. Answer: Generated."""

    prompt: list[int]
    max_tokens: int


@dataclass(frozen=True)
class Generated:
    """One answer. Times run from the moment the engine got the request."""

    ttft_ms: float
    total_ms: float
    tokens: list[int]
    cached: int  # tokens of the prompt that the engine did not compute, from wherever
    tiers: dict[str, int] = field(default_factory=dict)  # tokens that came from the pool, by tier


@dataclass(frozen=True)
class Idle:
    """Step the engine until nothing is under way, stores included. Answer: Done, or Failed after that time."""

    timeout_s: float


@dataclass(frozen=True)
class Stop:
    """Shut down. The answer is Done, then the process ends."""


@dataclass(frozen=True)
class Done:
    """It is done. `stats`: what the pool's plug-in counts, by name."""

    stats: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Failed:
    """It could not be done; the engine's log has more."""

    reason: str


_KINDS: dict[str, type[Any]] = {
    kind.__name__: kind for kind in (Start, Started, Ready, Generate, Generated, Idle, Stop, Done, Failed)
}
_CHECKS: dict[str, tuple[type[Any], ...]] = {
    "str": (str,),
    "int": (int,),
    "float": (int, float),
    "list[int]": (list,),
    "dict[str, int]": (dict,),
    "dict[str, str]": (dict,),
    "dict[str, Any]": (dict,),
}


def pack(message: object) -> bytes:
    """ValueError for a message that is too large."""
    data = json.dumps({"kind": type(message).__name__, **asdict(message)}).encode()  # type: ignore[call-overload]
    if len(data) > MAX_PACKET:
        raise ValueError(f"a message of {len(data)} bytes: {MAX_PACKET} is the limit")
    return data


def unpack(data: bytes) -> Any:
    """The message in a packet. ProtocolError says what is wrong with it."""
    try:
        body = json.loads(data)
        kind = _KINDS[body.pop("kind")]
    except (ValueError, KeyError, TypeError, AttributeError) as e:
        raise ProtocolError(f"not a message: {e!r}") from None
    known = {f.name: f for f in fields(kind)}
    for name, value in body.items():
        if name not in known:
            raise ProtocolError(f"{kind.__name__} has no {name}")
        declared = str(known[name].type)
        if not isinstance(value, _CHECKS[declared]) or isinstance(value, bool):
            raise ProtocolError(f"{kind.__name__}.{name} is no {declared}")
        if declared == "list[int]" and not all(type(x) is int for x in value):
            raise ProtocolError(f"{kind.__name__}.{name} is no {declared}")
    try:
        return kind(**body)
    except TypeError as e:
        raise ProtocolError(str(e)) from None


class Channel:
    """One end of a pair. Not thread-safe: one question at a time."""

    def __init__(self, end: socket.socket) -> None:
        self._socket = end

    @staticmethod
    def pair() -> tuple[Channel, socket.socket]:
        """This side's channel and the other side's end, which goes to another process."""
        mine, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        return Channel(mine), theirs

    def send(self, message: object, descriptor: int | None = None) -> None:
        """ConnectionError if the other side is gone."""
        if descriptor is None:
            self._socket.send(pack(message))
        else:
            socket.send_fds(self._socket, [pack(message)], [descriptor])

    def receive(self, timeout_s: float | None = None) -> Any:
        """The next message. TimeoutError; ConnectionError if the other side is gone."""
        self._socket.settimeout(timeout_s)
        data = self._socket.recv(MAX_PACKET + 1)
        self._socket.settimeout(None)
        if not data:
            raise ConnectionResetError("the other side is gone")
        return unpack(data)

    def receive_with_descriptor(self) -> tuple[Any, int | None]:
        """As `receive`, with the descriptor that came along, if one did."""
        data, descriptors, _, _ = socket.recv_fds(self._socket, MAX_PACKET + 1, 1)
        if not data:
            raise ConnectionResetError("the other side is gone")
        return unpack(data), (descriptors[0] if descriptors else None)

    def ask(self, message: object, expect: type[T], timeout_s: float) -> T:
        """Send and wait for the answer. RuntimeError with the other side's reason if it failed."""
        self.send(message)
        answer = self.receive(timeout_s)
        if isinstance(answer, Failed):
            raise RuntimeError(answer.reason)
        if not isinstance(answer, expect):
            raise ProtocolError(f"{type(answer).__name__} instead of {expect.__name__}")
        return answer

    def fileno(self) -> int:
        """Of the socket, for whoever must close or pass it."""
        return self._socket.fileno()

    def close(self) -> None:
        """The other side sees the end."""
        self._socket.close()
