"""`python -m bench fleet`: what a pool of many nodes costs its index, and whether announcements and leases keep up.

Prints a table and writes out/bench/fleet.json. One node is real (registration, announcer, resolver) beside a real
Valkey; the others are played: their leases are in the index, and a thread sends the commands of their heartbeats at the
rate of a pool of that size. All run on this machine, so the played nodes take processor time from the real one.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import shutil
import socket
import subprocess
import tempfile
import threading
import time
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import hiredis
import redis

from bench.nodes import end_with_parent
from kvpool.transport.circuit_breaker import CircuitBreaker
from kvpool_sidecar.index.base import NodeInfo
from kvpool_sidecar.index.record import Record, entry_name
from kvpool_sidecar.index.redis_index import RedisIndex
from kvpool_sidecar.index.redis_roster import RedisRoster
from kvpool_sidecar.index.redis_server import server_binary, server_environment
from kvpool_sidecar.index.registration import IndexRegistration
from kvpool_sidecar.index.resolver import BlockResolver
from kvpool_sidecar.resilience.bulkhead import Bulkhead
from kvpool_sidecar.storage.memory import MemoryStore

if TYPE_CHECKING:
    from collections.abc import Iterator

    from kvpool_sidecar.storage.base import Store

NODES = (100, 1_000, 5_000, 10_000)
LEASE_S, HEARTBEAT_S = 15.0, 5.0
BLOCKS_PER_S = 2_400
VISIBLE_S = 1.0
TICK_S = 0.02
COMMANDS, MAX_BURST = 15, 100  # of a heartbeat; heartbeats sent at the same time
LATE_S = 0.05
HOLDERS, ASKERS, PROMPT = 16, 200, 16
TARGETS = {"announce_visible_1s": 0.99, "lease_missing": 0.0, "roster_core_share": 0.05, "roster_mb_per_s": 5.0}
GATED = 5_000  # the number of nodes of the last two targets


class Blocks(MemoryStore):
    """A store that has every block it is asked for, and keeps none."""

    def contains(self, key: bytes) -> bool:
        return True


class Server:
    """A Valkey on loopback."""

    def __init__(self, directory: Path) -> None:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port: int = probe.getsockname()[1]
        options = ["--bind", "127.0.0.1", "--port", str(self.port), "--save", "", "--dir", str(directory)]
        self.process = subprocess.Popen(
            [server_binary(), *options],
            env=server_environment(),
            stdout=subprocess.DEVNULL,
            preexec_fn=end_with_parent,
        )
        self.client = redis.Redis(host="127.0.0.1", port=self.port, protocol=2)
        until = time.monotonic() + 20
        while True:
            with contextlib.suppress(redis.ConnectionError):
                self.client.ping()
                return
            if time.monotonic() > until:
                raise RuntimeError("the server does not answer")
            time.sleep(0.02)

    @property
    def url(self) -> str:
        return f"redis://127.0.0.1:{self.port}/0"

    def cost(self) -> tuple[float, int]:
        """Processor seconds and bytes in both directions until now."""
        info = self.client.info()
        return (
            float(info["used_cpu_user"] + info["used_cpu_sys"]),
            int(info["total_net_input_bytes"] + info["total_net_output_bytes"]),
        )

    def close(self) -> None:
        self.client.close()
        self.process.terminate()
        self.process.wait()


def info(number: int) -> NodeInfo:
    """A node with names and addresses as long as in a cluster."""
    return NodeInfo(f"gpu-node-{number:05d}.example", f"10.{number >> 16}.{number >> 8 & 255}.{number & 255}", 7421, 1)


def register(server: Server, nodes: int) -> None:
    """Register all nodes but one."""
    with server.client.pipeline(transaction=False) as pipe:
        for number in range(1, nodes):
            pipe.set(f"n:{number}", info(number).dumps(), px=3_600_000)
            pipe.set(f"N:{info(number).node}", number)
            pipe.set(f"s:{number}", b"")
            if number % 1000 == 0:
                pipe.execute()
        pipe.set("nodes", nodes - 2)
        pipe.execute()


class Heartbeats:
    """Sends the commands of the heartbeats of `nodes` nodes, as many a second as such a pool does."""

    def __init__(self, server: Server, nodes: int) -> None:
        self.sent = 0
        self._socket = socket.create_connection(("127.0.0.1", server.port))
        self._nodes = nodes
        self._packed = [heartbeat(n % nodes + 1, nodes) for n in range(max(nodes, 1000))]
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        reader, due, at = hiredis.Reader(), time.monotonic(), 0
        while not self._ended.wait(TICK_S):
            late = (time.monotonic() - due) * self._nodes / HEARTBEAT_S
            count = min(int(late), MAX_BURST)
            due = time.monotonic() if late > 10 * MAX_BURST else due + count * HEARTBEAT_S / self._nodes
            some = [self._packed[(at + n) % len(self._packed)] for n in range(count)]
            at += count
            self._socket.sendall(b"".join(some))
            waiting = count * COMMANDS
            while waiting:
                reader.feed(self._socket.recv(1 << 20))
                while reader.gets() is not False:
                    waiting -= 1
            self.sent += count

    def close(self) -> None:
        self._ended.set()
        self._thread.join()
        self._socket.close()


def heartbeat(number: int, nodes: int) -> bytes:
    """The commands of one heartbeat in a pool that does not change."""
    name = f"N:{info(number).node}".encode()
    probes = [b"n:%d" % random.randint(1, nodes) for _ in range(6)]
    commands: list[tuple[bytes, ...]] = [
        *((b"GET", key) for key in (b"n:%d" % number, name, b"nodes", b"epoch", b"n:version", b"nodes", *probes)),
        (b"PEXPIRE", b"n:%d" % number, b"3600000"),
        (b"PEXPIRE", name, b"2592000000"),
        (b"PEXPIRE", b"s:%d" % number, b"3600000"),
    ]
    return b"".join(hiredis.pack_command(cast("Any", command)) for command in commands)


@contextlib.contextmanager
def real_node(server: Server, nodes: int) -> Iterator[tuple[IndexRegistration, BlockResolver]]:
    """A node that registers as the last of `nodes`. It reads the roster at its first heartbeat."""
    index = RedisIndex(server.url, lease_s=LEASE_S)
    index._roster = RedisRoster(index._topology, LEASE_S, jitter=lambda: 0.0)
    guard = Bulkhead("index", 8, 64, CircuitBreaker(3, 1, time.monotonic))
    resolver = BlockResolver(index, guard, lambda: registration.number, lease_s=LEASE_S, lookup_s=10)
    registration = IndexRegistration(
        index, info(nodes), cast("Store", Blocks(1)), scanned=lambda: True, lease_s=LEASE_S, resolver=resolver
    )
    try:
        yield registration, resolver
    finally:
        registration.stop(5.0)
        guard.close()
        index.close()


def heartbeat_cost(server: Server, nodes: int, count: int) -> dict[str, float]:
    """Heartbeats of a pool that does not change, one after the other: what they cost the server, times their rate."""
    with real_node(server, nodes) as (registration, resolver):
        before = server.cost()
        registration._heartbeat()
        first = server.cost()
        known = resolver.live_peers + 1
        if known < nodes:
            raise RuntimeError(f"the roster has {known} of {nodes} nodes")
        registration._heartbeat()  # connections are open now
        cpu, sent = server.cost()
        began = time.perf_counter()
        for _ in range(count):
            registration._heartbeat()
        seconds = time.perf_counter() - began
        after = server.cost()
    each, moved = (after[0] - cpu) / count, (after[1] - sent) / count
    rate = nodes / HEARTBEAT_S
    return {
        "roster_core_share": round(each * rate, 4),
        "roster_mb_per_s": round(moved * rate / 1e6, 3),
        "heartbeat_server_us": round(each * 1e6, 1),
        "heartbeat_bytes": round(moved),
        "heartbeat_ms": round(seconds / count * 1e3, 2),
        "first_server_ms": round((first[0] - before[0]) * 1e3, 2),
        "first_kb": round((first[1] - before[1]) / 1e3, 1),
    }


def announcing(server: Server, nodes: int, seconds: float) -> dict[str, float]:
    """One node stores BLOCKS_PER_S; each block is looked for VISIBLE_S later, and the node's lease at the same time."""
    seen = missing = late = looks = lapsed = 0
    lowest = LEASE_S
    with real_node(server, nodes) as (registration, _), contextlib.ExitStack() as stack:
        registration.start()
        until = time.monotonic() + 60
        while not registration.status().connected:
            if time.monotonic() > until:
                raise RuntimeError("the node does not register")
            time.sleep(0.02)
        played = Heartbeats(server, nodes)
        stack.callback(played.close)
        lease = f"n:{registration.number}"
        stored: list[tuple[float, list[bytes]]] = []
        began, announced, checked = time.monotonic(), 0, 0
        while checked < len(stored) or time.monotonic() - began < seconds:
            now = time.monotonic()
            due = int(min(now - began, seconds) * BLOCKS_PER_S)
            if due > announced:
                keys = [os.urandom(32) for _ in range(due - announced)]
                for key in keys:
                    registration.announce(key, 2 << 20)
                stored.append((time.monotonic(), keys))
                announced = due
            while checked < len(stored) and now - stored[checked][0] >= VISIBLE_S:
                at, keys = stored[checked]
                checked += 1
                values = server.client.mget([lease, *map(entry_name, keys)])
                if time.monotonic() - at > VISIBLE_S + LATE_S:  # this check says nothing of the first second
                    late += len(keys)
                else:
                    seen += sum(value is not None for value in values[1:])
                    missing += sum(value is None for value in values[1:])
                left = server.client.pttl(lease) / 1000
                lowest, looks, lapsed = min(lowest, left), looks + 1, lapsed + (values[0] is None)
            time.sleep(TICK_S)
        rate = registration._announcer.rate
        beats = played.sent / (time.monotonic() - began)
    return {
        "announce_visible_1s": round(seen / max(1, seen + missing), 5),
        "lease_missing": round(lapsed / max(1, looks), 5),
        "lease_lowest_s": round(lowest, 2),
        "unchecked_share": round(late / max(1, seen + missing + late), 4),
        "pace_blocks_per_s": round(rate),
        "played_heartbeats_per_s": round(beats),
    }


def spreading(server: Server, askers: int) -> float:
    """Blocks that the busiest of HOLDERS serves, over the mean, when `askers` read a prompt that all of them have."""
    index = RedisIndex(server.url, lease_s=3600)
    guard = Bulkhead("index", 2, 8, CircuitBreaker(3, 60, time.monotonic))
    holders = [index.join(NodeInfo(f"holder-{n}", "10.0.0.1", 1000 + n, 7)) for n in range(HOLDERS)]
    keys = [os.urandom(32) for _ in range(PROMPT)]
    for number in holders:
        index.announce([(key, Record(number, 1 << 20, 7)) for key in keys])
    served: Counter[int] = Counter()
    for asker in range(30_000, 30_000 + askers):
        resolver = BlockResolver(index, guard, lambda asker=asker: asker, lease_s=3600, lookup_s=10)  # type: ignore[misc]
        served.update(found.number for found in resolver.locate(keys, 10) if found is not None)
    guard.close()
    index.close()
    if sum(served.values()) != askers * PROMPT:
        raise RuntimeError("a lookup found nothing")
    return round(max(served.values()) * HOLDERS / sum(served.values()), 3)


def run(directory: Path, sizes: tuple[int, ...], seconds: float, heartbeats: int) -> dict[str, Any]:
    """Measure each number of nodes on a server of its own."""
    rows: dict[int, dict[str, float]] = {}
    for nodes in sizes:
        with contextlib.closing(Server(directory)) as server:
            register(server, nodes)
            rows[nodes] = heartbeat_cost(server, nodes, heartbeats) | announcing(server, nodes, seconds)
    with contextlib.closing(Server(directory)) as server:
        spread = spreading(server, ASKERS)
    names = list(rows[sizes[0]])
    return {name: {str(n): row[name] for n, row in rows.items()} for name in names} | {"busiest_over_mean": spread}


def table(result: dict[str, Any]) -> str:
    sizes = list(result["lease_missing"])
    lines = [f"{'nodes':24s}" + "".join(f"{int(n):>10,d}" for n in sizes)]
    lines += [
        f"{name:24s}" + "".join(f"{values[n]:>10}" for n in sizes)
        for name, values in result.items()
        if isinstance(values, dict)
    ]
    return "\n".join([*lines, f"busiest of {HOLDERS} holders, {ASKERS} askers: {result['busiest_over_mean']} x mean"])


def short_of(result: dict[str, Any]) -> list[str]:
    """List the targets that were missed."""
    found = [
        f"{name} at {n} nodes: {value}"
        for name, target in TARGETS.items()
        for n, value in result[name].items()
        if (value < target if name == "announce_visible_1s" else value > target)
        and (int(n) <= GATED or not name.startswith("roster"))
    ]
    spread = result["busiest_over_mean"]
    return [*found, *([f"busiest holder: {spread} x mean > 1.5"] if spread > 1.5 else [])]


def main(argv: list[str]) -> int:
    """Run and print. Return 1 if a target is missed and `--gate` was given."""
    parser = argparse.ArgumentParser(prog="python -m bench fleet", description=__doc__)
    parser.add_argument("--nodes", type=int, nargs="+", default=list(NODES), help="sizes of the pool")
    parser.add_argument("--seconds", type=float, default=30.0, help="seconds of storing for each size")
    parser.add_argument("--heartbeats", type=int, default=500, help="heartbeats that are measured for each size")
    parser.add_argument("--dir", type=Path, default=Path("out/bench"), help="directory for results")
    parser.add_argument("--gate", action="store_true", help="exit 1 if a target is missed")
    options = parser.parse_args(argv)
    options.dir.mkdir(parents=True, exist_ok=True)
    directory = Path(tempfile.mkdtemp(prefix="fleet-", dir=options.dir)).resolve()
    load, began = os.getloadavg()[0], time.monotonic()
    try:
        result = run(directory, tuple(options.nodes), options.seconds, options.heartbeats)
    finally:
        shutil.rmtree(directory, ignore_errors=True)
    print(f"{os.cpu_count()} processors, load before the run {load:.1f}; {round(time.monotonic() - began)} s\n")
    print(table(result))
    file = options.dir / "fleet.json"
    file.write_text(json.dumps(result, indent=1) + "\n")
    print(f"\nwritten: {file}")
    short = short_of(result)
    for text in short:
        print(f"target missed: {text}")
    return 1 if short and options.gate else 0
