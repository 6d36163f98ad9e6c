"""Two engines of one system behind a proxy that sends requests to them in turn."""

from __future__ import annotations

from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from bench.foreign.proxy import RoundRobin
from bench.sessions import counters
from bench.sessions.engines import Engine, Home, Room
from bench.sessions.systems import NODES, SYSTEMS

if TYPE_CHECKING:
    from pathlib import Path

__all__ = ["Pair"]


class Pair:
    """Until `close`. `url` is the proxy's base; `home.env()` starts programs of the engine's environment."""

    def __init__(self, system: str, home: Home, room: Room, work: Path) -> None:
        self.engines: list[Engine] = []
        self._proxy: RoundRobin | None = None
        tag = f"kvbench{work.name[-6:]}"
        self._system = SYSTEMS[system](home, room, work / system, tag)
        try:
            for node in NODES:
                log = work / f"{system}-{node}.log"
                self.engines.append(Engine(home, f"{system}-{node}", log, room, self._system.wiring(node)))
            for engine in self.engines:
                engine.wait_ready()
            self._proxy = RoundRobin([f"http://{urlsplit(engine.server.base_url).netloc}" for engine in self.engines])
            self.url = self._proxy.url
        except BaseException:
            self.close()
            raise

    def tokens_from(self) -> dict[str, int]:
        """Prompt tokens of both engines since their start, by where their KV came from (bench.sessions.counters)."""
        return counters.tokens_from(counters.read(engine.server.metrics() for engine in self.engines))

    def close(self) -> None:
        """End all that was started, in order."""
        if self._proxy is not None:
            self._proxy.close()
        for engine in self.engines:
            engine.ask_to_end()
        for engine in self.engines:
            engine.end()
        self._system.close()
