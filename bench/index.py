"""`python -m bench index`: lookups in the prefix index beside the plainest questions to the same Redis, in one run.

Prints a table and writes out/bench/index.json and index.png. Two servers take turns: one with 10,000 entries, one with
`--entries`. Against each: one MGET of the same keys (for 80 blocks) and 16 probes and a window (for 1,250), both with
redis-py, beside what a sidecar does for a lookup (`kvpool`: BlockResolver.reach, threads and deadline and all, nothing
remembered) and the index alone (`kvpool-index`). Redis runs on loopback: a real network adds a round trip to each.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shutil
import socket
import statistics
import subprocess
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import hiredis
import numpy as np
import redis

from bench.nodes import end_with_parent
from kvpool.transport.circuit_breaker import CircuitBreaker
from kvpool_sidecar.index.base import NodeInfo
from kvpool_sidecar.index.record import Record, pack
from kvpool_sidecar.index.redis_index import RedisIndex
from kvpool_sidecar.index.redis_server import server_binary, server_environment
from kvpool_sidecar.index.resolver import BlockResolver
from kvpool_sidecar.resilience.bulkhead import Bulkhead

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

SMALL = 10_000
TARGETS = {"80 of a chain": 1.5, "1250 of a chain": 2.0, "entries": 1.3, "bytes": 110}
PEER = NodeInfo("peer", "127.0.0.2", 7421, 22)
KEY = 16
CHUNK = 100_000
SHORT, LONG, PROBES = 80, 1250, 16
PROMPTS = 300


@dataclass(frozen=True)
class Row:
    """One measurement. `ratio_to_limit`: median over the rounds, each compared with the limit in the same round."""

    what: str
    hit: str
    entries: int
    system: str
    p50_us: float
    p99_us: float
    server_us: float
    ratio_to_limit: float


class Server:
    """A Redis with so many entries, and prompts of which all blocks are there."""

    def __init__(self, directory: Path, entries: int) -> None:
        self.entries = 0
        self.port = _free_port()
        options = ["--bind", "127.0.0.1", "--port", str(self.port), "--save", "", "--dir", str(directory)]
        self.process = subprocess.Popen(
            [server_binary(), *options],
            env=server_environment(),
            stdout=subprocess.DEVNULL,
            preexec_fn=end_with_parent,
        )
        self.client = redis.Redis(host="127.0.0.1", port=self.port, protocol=2)
        _wait(self.client)
        self.index = RedisIndex(f"redis://127.0.0.1:{self.port}/0", lease_s=3600)
        self.number = self.index.join(PEER)
        self._empty = self.client.info("memory")["used_memory"]
        self._sample: list[np.ndarray] = []
        self.memory: list[dict[str, float]] = []
        for mark in sorted({min(SMALL, entries), min(1_000_000, entries), entries}):
            self._fill(mark)
            info = self.client.info("memory")
            self.memory.append(
                {
                    "entries": mark,
                    "bytes_per_entry": round((info["used_memory"] - self._empty) / mark, 1),
                    "rss_per_entry": round(info["used_memory_rss"] / mark, 1),
                    "allocator": info["mem_allocator"],
                }
            )
        rows = np.concatenate(self._sample)
        picked = np.random.default_rng(7).permutation(len(rows))[: PROMPTS * LONG]
        # all prompts of a small server share its few blocks, in another order each
        picked = np.resize(picked, PROMPTS * LONG)
        self.prompts = [
            [rows[i].tobytes() + bytes(KEY) for i in picked[p * LONG : (p + 1) * LONG]] for p in range(PROMPTS)
        ]

    def _fill(self, entries: int) -> None:
        """As a node announces, but with the commands laid out in memory beforehand."""
        record = pack(Record(self.number, 33_554_432, PEER.generation))
        head, middle = b"*3\r\n$6\r\nAPPEND\r\n$17\r\nb", b"\r\n$12\r\n" + record + b"\r\n"
        random = np.random.default_rng(entries)
        with socket.create_connection(("127.0.0.1", self.port)) as sock:
            while self.entries < entries:
                count = min(CHUNK, entries - self.entries)
                keys = random.integers(0, 256, (count, KEY), dtype=np.uint8)
                lines = np.empty((count, len(head) + KEY + len(middle)), dtype=np.uint8)
                lines[:, : len(head)] = np.frombuffer(head, dtype=np.uint8)
                lines[:, len(head) : len(head) + KEY] = keys
                lines[:, len(head) + KEY :] = np.frombuffer(middle, dtype=np.uint8)
                for part in np.array_split(lines, max(1, count // 2000)):
                    sock.sendall(part.tobytes())
                    due = len(part) * len(b":12\r\n")
                    while due:
                        due -= len(sock.recv(due))
                self._sample.append(keys[: max(1, PROMPTS * LONG * count // entries)])
                self.entries += count

    def cpu_us(self) -> float:
        """Processor time of the server's main thread and all others, in microseconds."""
        info = self.client.info("cpu")
        return float((info["used_cpu_user"] + info["used_cpu_sys"]) * 1e6)

    def close(self) -> None:
        self.index.close()
        self.client.close()
        self.process.terminate()
        self.process.wait()


def _wait(client: redis.Redis) -> None:
    until = time.monotonic() + 10
    while True:
        with contextlib.suppress(redis.ConnectionError):
            client.ping()
            return
        if time.monotonic() > until:
            raise RuntimeError("redis-server does not answer")
        time.sleep(0.02)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def prompts(server: Server, length: int, hit: str) -> list[list[bytes]]:
    """All of the blocks there, half of them, or none."""
    present = {"all": length, "half": length // 2, "none": 0}[hit]
    return [p[:present] + [os.urandom(32) for _ in range(length - present)] for p in server.prompts]


# -- contenders: each takes a prompt and returns how many of its leading blocks are there


def one_mget(server: Server) -> Callable[[Sequence[bytes]], int]:
    """The limit for 80 blocks."""

    def ask(keys: Sequence[bytes]) -> int:
        return _leading(server.client.mget([b"b" + key[:16] for key in keys]))

    return ask


def raw_mget(server: Server) -> Callable[[Sequence[bytes]], int]:
    """The same without any library but the parser."""
    sock = socket.create_connection(("127.0.0.1", server.port))
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    reader = hiredis.Reader()

    def ask(keys: Sequence[bytes]) -> int:
        command: Any = (b"MGET", *(b"b" + key[:16] for key in keys))
        sock.sendall(hiredis.pack_command(command))
        while (reply := reader.gets()) is False:
            reader.feed(sock.recv(65536))
        return _leading(reply)

    return ask


def sixteen_probes(server: Server) -> Callable[[Sequence[bytes]], int]:
    """The limit for 1,250 blocks: 16 probes, then the blocks between the last found and the first not found."""

    def ask(keys: Sequence[bytes]) -> int:
        places = [i * (len(keys) - 1) // (PROBES - 1) for i in range(PROBES)]
        there = _leading(server.client.mget([b"b" + keys[i][:16] for i in places]))
        if there in (0, PROBES):
            return len(keys) if there else 0
        low, high = places[there - 1], places[there]
        return low + 1 + _leading(server.client.mget([b"b" + keys[i][:16] for i in range(low + 1, high)]))

    return ask


def index_alone(server: Server) -> Callable[[Sequence[bytes]], int]:
    def ask(keys: Sequence[bytes]) -> int:
        return _leading([records or None for records in server.index.locate(keys)])

    return ask


def whole_lookup(server: Server) -> Callable[[Sequence[bytes]], int]:
    guard = Bulkhead("index", 8, 64, CircuitBreaker(3, 1, time.monotonic))
    directory = BlockResolver(server.index, guard, lambda: 0, lease_s=3600, lookup_s=10)
    directory.refresh()

    def ask(keys: Sequence[bytes]) -> int:
        first_missing = directory.longest_prefix(keys, 10).find(0)
        return first_missing if first_missing >= 0 else len(keys)

    # cached answers would not be queried again
    ask.forget = directory._cache.clear  # type: ignore[attr-defined]
    return ask


def _leading(values: Sequence[object]) -> int:
    return next((n for n, value in enumerate(values) if value is None), len(values))


# -- measuring


def compare(
    what: str, length: int, hit: str, systems: Mapping[str, Callable[[Server], Callable[..., Any]]],
    servers: Sequence[Server], rounds: int, each: int,
) -> tuple[list[Row], dict[tuple[int, str], list[float]]]:  # fmt: skip
    """All systems against all servers take turns; the first system is the limit of its server."""
    sets = [prompts(server, length, hit) for server in servers]
    ready = [(s, name, make(server)) for s, server in enumerate(servers) for name, make in systems.items()]
    expected = {"all": length, "half": length // 2, "none": 0}[hit]
    for s, name, ask in ready:
        if (got := ask(sets[s][0])) != expected:
            raise RuntimeError(f"{name} says {got} of {length} blocks are there, not {expected}")
    times: dict[tuple[int, str], list[float]] = {(s, name): [] for s, name, _ in ready}
    medians: dict[tuple[int, str], list[float]] = {(s, name): [] for s, name, _ in ready}
    cpu: dict[tuple[int, str], float] = dict.fromkeys(times, 0.0)
    for number in range(rounds):
        for s, name, ask in ready if number % 2 == 0 else reversed(ready):
            some = [sets[s][(number * each + n) % PROMPTS] for n in range(each)]
            before = servers[s].cpu_us()
            took = []
            for keys in some:
                getattr(ask, "forget", int)()
                began = time.perf_counter()
                ask(keys)
                took.append((time.perf_counter() - began) * 1e6)
            cpu[s, name] += servers[s].cpu_us() - before
            times[s, name] += took
            medians[s, name].append(statistics.median(took))
    limit = next(iter(systems))
    rows = []
    for s, name, _ in ready:
        ratios = [a / b for a, b in zip(medians[s, name], medians[s, limit], strict=True)]
        ordered = sorted(times[s, name])
        rows.append(
            Row(
                what, hit, servers[s].entries, name,
                p50_us=round(statistics.median(ordered), 1),
                p99_us=round(ordered[int(len(ordered) * 0.99)], 1),
                server_us=round(cpu[s, name] / (rounds * each), 1),
                ratio_to_limit=round(statistics.median(ratios), 3),
            )
        )  # fmt: skip
    return rows, {(servers[s].entries, name): m for (s, name), m in medians.items()}


def writing(server: Server, batches: int) -> dict[str, float]:
    """What announcing, withdrawing and sweeping cost the server, per block, in microseconds of its processor."""
    keys = [[os.urandom(32) for _ in range(256)] for _ in range(batches)]
    count = 256 * batches
    costs = {}
    record = Record(server.number, 1, PEER.generation)
    works: dict[str, Callable[[list[bytes]], None]] = {
        "announce": lambda some: server.index.announce([(key, record) for key in some]),
        "announce again": lambda some: server.index.announce([(key, record) for key in some]),
        "withdraw": lambda some: server.index.withdraw(server.number, some),
    }
    for name, work in works.items():
        before, began = server.cpu_us(), time.perf_counter()
        for some in keys:
            work(some)
        costs[f"{name} server_us"] = round((server.cpu_us() - before) / count, 2)
        costs[f"{name} per_s"] = round(count / (time.perf_counter() - began))
    looked = 0

    def pace(n: int) -> bool:
        nonlocal looked
        looked += n
        return looked < 200_000

    before = server.cpu_us()
    server.index.expire(server.number, pace)
    costs["sweep server_us"] = round((server.cpu_us() - before) / looked, 2)
    return costs


def run(directory: Path, entries: int, rounds: int) -> dict[str, object]:
    with contextlib.ExitStack() as stack:
        servers = []
        for count in dict.fromkeys((SMALL, entries)):
            servers.append(Server(directory, count))
            stack.callback(servers[-1].close)
        rows: list[Row] = []
        growth: dict[str, float] = {}
        short = {"mget": one_mget, "mget-raw": raw_mget, "kvpool-index": index_alone, "kvpool": whole_lookup}
        long = {"probes": sixteen_probes, "mget": one_mget, "kvpool": whole_lookup}
        for what, length, systems in (("80 of a chain", SHORT, short), ("1250 of a chain", LONG, long)):
            for hit in ("all", "half", "none"):
                some, medians = compare(what, length, hit, systems, servers, rounds, 20 if length == SHORT else 10)
                rows += some
                if len(servers) > 1:
                    big, little = medians[entries, "kvpool"], medians[SMALL, "kvpool"]
                    ratio = statistics.median(a / b for a, b in zip(big, little, strict=True))
                    growth[f"{what}, {hit}"] = round(ratio, 3)
        return {
            "rows": [asdict(row) for row in rows],
            "memory": servers[-1].memory,
            "time_against_small": growth,
            "writing": writing(servers[-1], 80),
        }


def table(result: dict[str, Any]) -> str:
    lines = [
        "lookup           hits   entries     system            p50 us    p99 us  server us  of limit  target",
        "---------------  -----  ----------  ------------  ---------  --------  ---------  --------  ------",
    ]
    for r in result["rows"]:
        asked = TARGETS[r["what"]] if r["system"] == "kvpool" else None
        lines.append(
            f"{r['what']:15s}  {r['hit']:5s}  {r['entries']:10,d}  {r['system']:12s}  {r['p50_us']:9.1f}  "
            f"{r['p99_us']:8.1f}  {r['server_us']:9.1f}  {r['ratio_to_limit']:8.2f}  {asked or '':>5}"
        )
    lines.append("\nmemory of the server, bytes per entry (asked: 110)")
    lines += [
        f"  {m['entries']:10,d} entries: {m['bytes_per_entry']:6.1f} used, {m['rss_per_entry']:6.1f} resident"
        f" ({m['allocator']})"
        for m in result["memory"]
    ]
    if result["time_against_small"]:
        lines.append(f"\ntime of a lookup against the one with {SMALL:,d} entries (asked: 1.3)")
        lines += [f"  {what:22s} {ratio:5.2f}" for what, ratio in result["time_against_small"].items()]
    lines.append("\nwriting: " + ", ".join(f"{k} {v:,}" for k, v in result["writing"].items()))
    return "\n".join(lines)


def short_of(result: dict[str, Any]) -> list[str]:
    """List the targets that were missed."""
    found = [
        f"{r['what']}, {r['hit']} there, {r['entries']:,d} entries: {r['ratio_to_limit']:.2f} > {TARGETS[r['what']]}"
        for r in result["rows"]
        if r["system"] == "kvpool" and r["ratio_to_limit"] > TARGETS[r["what"]]
    ]
    found += [f"{w}: {x:.2f} > 1.3 x small" for w, x in result["time_against_small"].items() if x > TARGETS["entries"]]
    big = [m for m in result["memory"] if m["entries"] >= 1_000_000]
    found += [f"{m['bytes_per_entry']} bytes an entry" for m in big if m["bytes_per_entry"] > TARGETS["bytes"]]
    return found


def picture(result: dict[str, Any], path: Path) -> None:
    import matplotlib as mpl

    mpl.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(1, 2, figsize=(12, 4.5))
    for axis, what in zip(axes, ("80 of a chain", "1250 of a chain"), strict=True):
        rows = [r for r in result["rows"] if r["what"] == what]
        labels = list(dict.fromkeys((r["hit"], r["entries"]) for r in rows))
        systems = list(dict.fromkeys(r["system"] for r in rows))
        for n, system in enumerate(systems):
            heights = [
                next(r["p50_us"] for r in rows if (r["hit"], r["entries"], r["system"]) == (*label, system))
                for label in labels
            ]
            axis.bar(
                [i + n * 0.8 / len(systems) for i in range(len(labels))], heights, 0.8 / len(systems), label=system
            )
        axis.set_xticks([i + 0.4 for i in range(len(labels))], [f"{hit}\n{entries:,d}" for hit, entries in labels])
        axis.set_title(f"lookup: {what}")
        axis.set_ylabel("microseconds, median")
        axis.set_xlabel("blocks that are there; entries in the index")
        axis.legend()
    figure.tight_layout()
    figure.savefig(path, dpi=110)
    plt.close(figure)


def main(argv: list[str]) -> int:
    """Run and print. Return 1 if a target is missed and `--gate` was given."""
    parser = argparse.ArgumentParser(prog="python -m bench index", description=__doc__)
    parser.add_argument(
        "--entries", type=int, default=1_000_000, help="entries of the large index; 10000000 need 1.3 GB"
    )
    parser.add_argument("--rounds", type=int, default=20, help="measurement rounds; all systems run in each round")
    parser.add_argument("--dir", type=Path, default=Path("out/bench"), help="directory for results")
    parser.add_argument("--gate", action="store_true", help="exit 1 if a target is missed")
    options = parser.parse_args(argv)
    options.dir.mkdir(parents=True, exist_ok=True)
    directory = Path(tempfile.mkdtemp(prefix="index-", dir=options.dir)).resolve()
    load, began = os.getloadavg()[0], time.monotonic()
    try:
        result = run(directory, options.entries, options.rounds)
    finally:
        shutil.rmtree(directory, ignore_errors=True)
    seconds = round(time.monotonic() - began)
    print(f"{os.cpu_count()} processors, load before the run {load:.1f}; {options.rounds} rounds; {seconds} s\n")
    print(table(result))
    file = options.dir / "index.json"
    file.write_text(json.dumps(result, indent=1) + "\n")
    picture(result, file.with_suffix(".png"))
    print(f"\nwritten: {file}, {file.with_suffix('.png')}")
    short = short_of(result)
    for text in short:
        print(f"target missed: {text}")
    return 1 if short and options.gate else 0
