"""`python -m bench.soak [--minutes=N]`: writes out/soak.json; exit code 1 if anything that was promised broke.

Three sidecars with a drive each, a shared directory, a real Redis and four client processes of two tenants, with the
reference mix: 92 % reads, 8 % writes, 33 MB blocks, 160 requests at once with bursts to 800. Faults come one after the
other from a schedule that the printed seed decides. Checked: the invariants I1 to I7 (docs/contribute/faults.md) and
memory.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

from bench.soak.faults import FAULTS, Fault, schedule
from bench.soak.pool import MIB, NODES, Child, Pool
from bench.soak.verdict import growing, latency, outcomes
from kvpool import config
from kvpool.protocol import keys
from kvpool_testing.residue import exceeded, residue, stray_files

_DEADLINES = {"lookup_ms": 200, "load_min_ms": 1000, "store_ms": 5000}
_PLACES = (("a", "team-a"), ("a", "team-b"), ("b", "team-a"), ("c", "team-b"))
_BLOCKS_A_NODE = 24
_UNIVERSE = 90  # of each tenant: about four times what a node holds
_BURST_EVERY_S, _BURST_S = 45.0, 10.0
_RSS_LIMIT_MIB, _RSS_SLOPE_MIB_MIN = 48.0, 6.0
_MORE_DESCRIPTORS, _MORE_THREADS = 40, 30  # spare peer links; the guards' threads with a connection each
_SETTLE_S = 90.0
_CLONE_NEWNS, _MS_REC, _MS_PRIVATE = 0x20000, 0x4000, 0x40000


class Soak:
    """One run."""

    def __init__(self, args: argparse.Namespace, directory: Path) -> None:
        self.args = args
        self.directory = directory
        self.seconds = args.minutes * 60
        self.block_bytes = int(args.block_mb * 1_000_000) // 4096 * 4096
        capacity = _BLOCKS_A_NODE * (self.block_bytes + MIB)
        deadlines = config.Deadlines(**_DEADLINES)
        self.pool = Pool(directory, capacity, deadlines)
        self.full = _file_system_of_its_own(self.pool.nodes["c"].nvme, capacity + 64 * MIB)
        self.broken: list[str] = []
        self.faults: Counter[str] = Counter()
        self.kills = 0
        self.rss: dict[str, list[tuple[float, int]]] = {}
        self.lives: dict[str, dict[str, Any]] = {}  # the last word of each life of each client
        self.fingerprint = keys.fingerprint({"model": "soak", "block": self.block_bytes})
        self.clients = {f"{node}-{tenant}": self._client(node, tenant) for node, tenant in _PLACES}
        self.started = time.monotonic()
        self.fresh: dict[str, Any] = {}

    def _client(self, node: str, tenant: str) -> Child:
        name = f"{node}-{tenant}"
        asked = {
            "tenant": tenant,
            "socket": self.pool.nodes[node].sockets[tenant],
            "fingerprint": self.fingerprint.hex(),
            "block_bytes": self.block_bytes,
            "universe": _UNIVERSE,
            "prompt": 80,
            "seed": self.args.seed,
            "deadlines": _DEADLINES,
            "name": name,
            "commands": str(self.directory / "commands.json"),
            "results": str(self.directory / f"client-{name}.json"),
        }
        command = [sys.executable, "-m", "bench.soak.client", json.dumps(asked)]
        return Child(command, self.directory / f"client-{name}.log")

    def run(self) -> None:
        self._command(0)
        self.pool.start()
        self.fresh = {name: residue(node.pid) for name, node in self.pool.nodes.items()}
        for client in self.clients.values():
            client.start()
        self.started = time.monotonic()
        plan = schedule(self.args.seed, self.seconds, NODES, tuple(self.clients))
        enospc = "ENOSPC on a file system of its own" if self.full else "no ENOSPC: not root"
        print(
            f"soak: seed {self.args.seed}, {len(plan)} faults in {self.args.minutes:g} minutes, blocks of "
            f"{self.block_bytes / 1e6:.1f} MB, {self.args.depth} requests at once, {self.args.burst} in bursts; "
            f"{enospc}",
            flush=True,
        )
        for fault in plan:
            if not self._go_on_until(self.started + fault.at_s):
                return
            self._inject(fault)
        self._go_on_until(self.started + self.seconds)

    def _inject(self, fault: Fault) -> None:
        self.faults[fault.name] += 1
        self.kills += fault.name == "sidecar_killed"
        with FAULTS[fault.name](self.pool, self.clients, fault):
            self._go_on_until(time.monotonic() + fault.hold_s, fault)

    def _go_on_until(self, until: float, fault: Fault | None = None) -> bool:
        """Look around each second; False once something is broken."""
        while not self.broken:
            self._command(self._depth())
            self._look(fault)
            left = until - time.monotonic()
            if left <= 0:
                return True
            time.sleep(min(1.0, left))
        return False

    def _depth(self) -> int:
        now = time.monotonic() - self.started
        depth: int = self.args.burst if now % _BURST_EVERY_S > _BURST_EVERY_S - _BURST_S else self.args.depth
        return depth

    def _command(self, depth: int, *, stop: bool = False) -> None:
        path = self.directory / "commands.json"
        fresh = path.with_suffix(".new")
        fresh.write_text(json.dumps({"depth": depth // len(_PLACES), "stop": stop}))
        fresh.replace(path)

    def _look(self, fault: Fault | None) -> None:
        now = time.monotonic() - self.started
        for name, client in self.clients.items():
            if not client.running and (fault is None or fault.target != name):
                self.broken.append(f"I4: client {name} ended: {client.log.read_text()[-500:]}")
            self._hear(name)
        for name, node in self.pool.nodes.items():
            if not node.running:
                if fault is None or not fault.name.startswith("sidecar"):
                    self.broken.append(f"I4: sidecar {name} ended: {node.log.read_text()[-500:]}")
                continue
            with contextlib.suppress(OSError):
                held = residue(node.pid)
                self.rss.setdefault(f"sidecar {name}/{node.starts}", []).append((now, held.rss_bytes))
                if held.children:
                    self.broken.append(f"I7: sidecar {name} has {held.children} children")
            if fault is None:
                with contextlib.suppress(OSError):
                    self.broken += [f"I5: {name}: {what}" for what in exceeded(node.status())]
        done = sum(life["counts"].get("load", 0) for life in self.lives.values())
        late = max((x.get("worst_over_deadline_ms", 0.0) for life in self.lives.values()
                    for x in life["latency"].values()), default=0.0)  # fmt: skip
        print(f"\r{now:6.0f} s  {sum(self.faults.values()):4} faults  {done:8} loads  worst {late:+8.1f} ms over  "
              f"{fault.name + ' ' + fault.target if fault else '':32}", end="", flush=True)  # fmt: skip

    def _hear(self, name: str) -> None:
        with contextlib.suppress(OSError, ValueError):
            report = json.loads((self.directory / f"client-{name}.json").read_text())
            life = f"{name}/{report['pid']}"
            if life not in self.lives or report["counts"] != self.lives[life]["counts"]:
                now = time.monotonic() - self.started
                self.rss.setdefault(f"client {life}", []).append((now, report["residue"]["rss_bytes"]))
            self.lives[life] = report
            self.broken += [f"{i}: {life}: {what}" for i, what in report["broken"] if not self.broken]

    def finish(self) -> None:
        """Stop the traffic, wait for quiet, look at what is left."""
        print("\nsoak: ending, and looking at what is left", flush=True)
        held = {name: self.lives[life] for life in self.lives for name in [life.partition("/")[0]]}
        self._command(0, stop=True)
        for name, client in self.clients.items():
            process = client.process
            if process is not None:
                try:
                    process.wait(90)
                except subprocess.TimeoutExpired:
                    self.broken.append(f"I2: client {name} does not end: a call has not returned")
                    continue
            self._hear(name)
            if not any(life["stopped"] for at, life in self.lives.items() if at.startswith(name + "/")):
                self.broken.append(f"I2: a call of client {name} has not returned")
        deadline = time.monotonic() + _SETTLE_S
        while (why := self.pool.unsettled()) and time.monotonic() < deadline:
            time.sleep(0.5)
        self.broken += [f"I7: after {_SETTLE_S:.0f} s of quiet: {reason}" for reason in why]
        if not held:
            self.broken.append("I4: no client has said anything")
        self._leaks()
        self._restart()

    def _leaks(self) -> None:
        for name, node in self.pool.nodes.items():
            now, was = residue(node.pid), self.fresh[name]
            if now.descriptors > was.descriptors + _MORE_DESCRIPTORS or now.deleted_files:
                self.broken.append(f"I7: sidecar {name} holds {now}; fresh it held {was}")
            if now.threads > was.threads + _MORE_THREADS:
                self.broken.append(f"I7: sidecar {name} has {now.threads} threads; fresh it had {was.threads}")
            strays = stray_files(node.nvme)
            self.broken += [f"I7: {len(strays)} strays on {name}: {strays[:3]}"] if strays else []
        strays = stray_files(self.pool.shared)
        unfinished = [
            s for s in strays if s.startswith("tmp/")
        ]  # copies of killed sidecars, two at once; go in an hour
        if len(unfinished) < len(strays) or len(unfinished) > 2 * self.kills:
            self.broken.append(f"I7: strays on the shared tier: {strays[:5]}")
        for name, samples in self.rss.items():
            if samples[-1][0] - samples[0][0] > 60:
                per_minute, grows = growing(samples, limit_mib=_RSS_LIMIT_MIB, limit_mib_min=_RSS_SLOPE_MIB_MIN)
                if grows:
                    self.broken.append(f"I7: memory of {name} grows by {per_minute} MiB a minute")

    def _restart(self) -> None:
        """What a node knew is what a fresh start finds on its drive."""
        same = ("blocks", "capacity_bytes", "drives", "scanned", "ready", "clients", "pods")
        for name, node in self.pool.nodes.items():
            before = node.status()
            if (code := node.end()) != 0:
                self.broken.append(f"I7: sidecar {name} ended with {code} when it was asked to end")
            node.start()
            node.wait_ready()
            deadline = time.monotonic() + 30
            while not (after := node.status())["scanned"] and time.monotonic() < deadline:
                time.sleep(0.1)
            differ = {k: (before[k], after[k]) for k in same if before[k] != after[k]}
            if differ:
                self.broken.append(f"I7: {name} before and after a fresh start: {differ}")

    def report(self) -> dict[str, Any]:
        lives = list(self.lives.values())
        counts: Counter[str] = Counter()
        for life in lives:
            counts.update(life["counts"])
        memory = {
            name: {
                "mib": round(samples[-1][1] / MIB, 1),
                "seconds": round(samples[-1][0] - samples[0][0]),
                "mib_a_minute": growing(samples, limit_mib=_RSS_LIMIT_MIB, limit_mib_min=_RSS_SLOPE_MIB_MIN)[0],
            }
            for name, samples in self.rss.items()
            if samples[-1][0] - samples[0][0] > 60
        }
        return {
            "seed": self.args.seed,
            "seconds": round(time.monotonic() - self.started, 1),
            "block_bytes": self.block_bytes,
            "depth": self.args.depth,
            "burst": self.args.burst,
            "deadlines": _DEADLINES,
            "allowance_ms": lives[0]["allowance_ms"] if lives else None,
            "worst_stall_ms": max((life["worst_stall_ms"] for life in lives), default=None),
            "faults": dict(sorted(self.faults.items())),
            "enospc": self.full,
            **outcomes(counts),
            "latency": latency([life["latency"] for life in lives]),
            "memory": memory,
            "broken": self.broken,
        }


def _file_system_of_its_own(path: Path, size: int) -> bool:
    """A small tmpfs at `path`, in a mount name space that ends with this process. False unless root."""
    if os.geteuid() != 0:
        return False
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.unshare(_CLONE_NEWNS) != 0 or libc.mount(None, b"/", None, _MS_REC | _MS_PRIVATE, None) != 0:
        return False
    options = f"size={size},mode=0700"
    done = subprocess.run(["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(path)], check=False, capture_output=True)
    return done.returncode == 0


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser("make soak", description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--minutes", type=float, default=5.0, help="how long (default 5)")
    parser.add_argument("--seed", type=int, default=None, help="of the faults and of the traffic (default: a new one)")
    parser.add_argument("--block-mb", type=float, default=33.0, help="size of a block in MB (default 33)")
    parser.add_argument("--depth", type=int, default=160, help="requests at once (default 160)")
    parser.add_argument("--burst", type=int, default=800, help="requests at once in bursts (default 800)")
    parser.add_argument("--directory", default=None, help="where the pool's files go (default: a temporary directory)")
    parser.add_argument("--out", default="out/soak.json", help="result (default out/soak.json)")
    args = parser.parse_args(argv)
    args.seed = random.SystemRandom().randrange(1 << 31) if args.seed is None else args.seed
    directory = Path(tempfile.mkdtemp(prefix="kvpool-soak-", dir=args.directory))
    need = int(args.block_mb * 1e6 * _BLOCKS_A_NODE * 5 * 1.2)
    if shutil.disk_usage(directory).free < need:
        print(f"soak: {need / 1e9:.1f} GB are needed in {directory}: smaller blocks (--block-mb) or --directory")
        directory.rmdir()
        return 2
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    code, soak = 1, None
    try:
        soak = Soak(args, directory)
        with contextlib.suppress(KeyboardInterrupt):
            soak.run()
            if not soak.broken:
                soak.finish()
        code = _tell(soak, Path(args.out))
    finally:
        if soak is not None:
            for child in soak.clients.values():
                child.end(signal.SIGKILL)
            soak.pool.close()
            subprocess.run(["umount", str(soak.pool.nodes["c"].nvme)], check=False, capture_output=True)
        if code:
            print(f"soak: logs are in {directory}")
            for tier in ("a/nvme", "b/nvme", "c/nvme", "shared"):
                shutil.rmtree(directory / tier, ignore_errors=True)
        else:
            shutil.rmtree(directory, ignore_errors=True)
    return code


def _tell(soak: Soak, out: Path) -> int:
    report = soak.report()
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(json.dumps(report, indent=2) + "\n")
    print()
    for key in (
        "faults",
        "reads",
        "writes",
        "lookups",
        "hits",
        "misses",
        "stores",
        "latency",
        "worst_stall_ms",
        "memory",
    ):
        print(f"{key:>15}  {json.dumps(report[key])}")
    for line in report["broken"]:
        print(f"BROKEN  {line}")
    whole = not report["broken"] and report["seconds"] >= soak.seconds and sum(report["hits"].values()) > 0
    if not report["broken"] and not whole:
        print("soak: ended early, or nothing was ever found")
    print(f"soak: seed {report['seed']}, {'all that was promised held' if whole else 'FAILED'}; {out}")
    return 0 if whole else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
