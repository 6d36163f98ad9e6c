"""In the guest: two sidecars, a real index, a shared tier over NFS over RDMA, and reads over soft-RoCE.

Node a stores, node b reads over RDMA: UCX is allowed no other transport. Then node a goes and node b reads the blocks
from the shared tier. Each node has a mount of its own, so what one sees of the other's doings goes through NFS: that is
where the lease of the sweep is tried as well. At the end the NFS server stops.
Lines that begin with RDMA: are for the person who runs it.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

from kvpool import config
from kvpool.client import Client
from kvpool.protocol.keys import block_id, fingerprint

ADDRESS = os.environ["ADDRESS"]
HOME = Path("/tmp/kvpool")
MIB = 1 << 20
SIZE, COUNT = 2 * MIB, 12
PATIENT = config.Deadlines(lookup_ms=20_000, load_min_ms=60_000, store_ms=60_000)  # everything is emulated here
IN_TIME_S, EMULATED_S = 5, 3
IN_TIME = config.Deadlines(lookup_ms=IN_TIME_S * 1000, load_min_ms=IN_TIME_S * 1000, store_ms=IN_TIME_S * 1000)
FINGERPRINT = fingerprint({"e2e": "rdma"})
MOUNTS = {"a": "/mnt/shared", "b": "/mnt/other"}
LEASE_S = 20
PORTS = {"a": (7421, 7422), "b": (7431, 7432)}


def say(text: str) -> None:
    print(f"RDMA: {text}", flush=True)


def until(what: str, condition, seconds: float = 90):
    deadline = time.monotonic() + seconds
    while True:
        with contextlib.suppress(OSError):
            if value := condition():
                return value
        if time.monotonic() > deadline:
            raise AssertionError(f"not within {seconds} s: {what}")
        time.sleep(0.2)


def start(*arguments: str) -> subprocess.Popen[bytes]:
    log = (HOME / f"{arguments[0]}.log").open("ab")
    return subprocess.Popen([sys.executable, "-m", "kvpool_sidecar", *arguments], stdout=log, stderr=log)


def node(name: str) -> subprocess.Popen[bytes]:
    peer, http = PORTS[name]
    made = config.PoolConfig(
        pool="rdma",
        namespace="e2e",
        uid="pool-uid",
        local=(config.LocalTier("nvme", f"/srv/{name}", 256 * MIB, reserve_free_percent=0),),
        shared=config.SharedTier("shared", f"{MOUNTS[name]}/pool", sweep_lease_s=LEASE_S, sweep_every_s=5),
        cache=config.CacheConfig(idle_ttl_s=3600),
        index=config.IndexConfig("redis://127.0.0.1:6379/0", username="kvpool", lookup_timeout_ms=5000, lease_s=20),
        peer=config.PeerConfig(port=peer, connect_timeout_ms=10_000, protocol="RDMA", rdma_bytes=64 * MIB),
        deadlines=PATIENT,
        http_port=http,
    )
    (HOME / f"{name}.json").write_text(config.dumps(made))
    return start(
        "serve", f"--config={HOME / name}.json", f"--secret-dir={HOME / 'secret'}", f"--node={name}",
        f"--address={ADDRESS}", f"--socket={HOME / name}.sock=tenant",
    )  # fmt: skip


def status(name: str) -> dict:
    with urllib.request.urlopen(f"http://{ADDRESS}:{PORTS[name][1]}/status", timeout=20) as answer:
        return json.load(answer)


def client(name: str, deadlines: config.Deadlines = PATIENT) -> Client:
    made = Client(config.ClientConfig(socket=str(HOME / f"{name}.sock"), deadlines=deadlines), fingerprint=FINGERPRINT)
    assert made.wait_connected(60)
    return made


def payload(n: int) -> bytes:
    return n.to_bytes(4, "little") * (SIZE // 4)


def read_all(reader: Client, names: list[bytes]) -> list[str]:
    buffers = [bytearray(SIZE) for _ in names]
    began = time.monotonic()
    results = reader.get_into(names, buffers)
    assert all(r.ok for r in results), [r for r in results if not r.ok][:3]
    assert buffers == [payload(n) for n in range(len(names))]
    tiers = sorted({r.tier.name for r in results})
    took = time.monotonic() - began
    say(f"{len(names)} x {SIZE // MIB} MiB with equal bytes from {tiers} in {took:.1f} emulated seconds")
    return tiers


def serves(name: str) -> None:
    until(f"{name} serves", lambda: (s := status(name))["ready"] and s["index"]["connected"])
    s = status(name)
    say(f"node {name}: transport {s['transport']} {s['transport_reason']}")
    assert s["transport"] == "RDMA"


def sweep(name: str) -> dict:
    return status(name)["shared"]["sweep"]


def leave_behind(names: list[bytes], file: str) -> None:
    """Blocks that nobody used for a day, and what a writer left, as the server has them."""
    pool = Path("/srv/kv/pool")
    (pool / "tmp" / file).write_bytes(b"half a block")
    old = time.time() - 86_400
    newest = sorted(pool.glob("blocks/*/*/*"), key=lambda f: f.stat().st_mtime)[-len(names) :]
    for path in (pool / "tmp" / file, *newest):
        os.utime(path, (old, old))


def sweeps(writer: Client, a: subprocess.Popen[bytes]) -> None:
    """Node a sweeps; it is stopped, and the other takes over; it comes back, and notices."""
    assert sweep("a")["holder"]
    assert not sweep("b")["holder"]
    before = status("a")["shared"]["copies"]["copied"]
    extra = [block_id(FINGERPRINT, f"extra {n}".encode()) for n in range(4)]
    for n, name in enumerate(extra):
        assert writer.put_from([name], [payload(n)])[0].stored
    until("copied", lambda: status("a")["shared"]["copies"]["copied"] == before + len(extra))
    leave_behind(extra, "ab" * 16)
    until("swept", lambda: sweep("a")["removed"] == {"idle": len(extra), "temporary": 1})
    say(f"swept on NFS: {sweep('a')['removed']}; {sweep('a')['blocks']} blocks are left")
    assert sweep("b")["removed"] == {}
    a.send_signal(signal.SIGSTOP)
    began = time.monotonic()
    until("the other one takes over", lambda: sweep("b")["holder"])
    say(f"node a was stopped; b took over after {time.monotonic() - began:.0f} s, term {sweep('b')['term']}")
    a.send_signal(signal.SIGCONT)
    until("the first one notices", lambda: not sweep("a")["holder"])
    assert sweep("b")["holder"]
    terms = sorted(path.name for path in Path("/srv/kv/pool/sweep").glob("term-*"))
    assert terms == [f"term-{sweep('b')['term']:012d}"], terms


def loses_its_nfs_server(names: list[bytes]) -> None:
    """Blocks that are only on the shared tier miss in time; local blocks are served."""
    asker = client("b", IN_TIME)
    mine = block_id(FINGERPRINT, b"of node b")
    assert asker.put_from([mine], [payload(7)])[0].stored
    until("its own block", lambda: asker.get_into([mine], [bytearray(SIZE)])[0].ok)
    subprocess.run(["rpc.nfsd", "0"], check=True, timeout=30)
    worst = 0.0
    for name in names[: COUNT // 2]:
        began = time.monotonic()
        assert not asker.get_into([name], [bytearray(SIZE)])[0].ok
        worst = max(worst, time.monotonic() - began)
        assert asker.get_into([mine], [bytearray(SIZE)])[0].ok, "a local block while the NFS server is away"
    say(f"the NFS server stopped: {COUNT // 2} loads missed, the slowest after {worst:.1f} s of {IN_TIME_S}")
    assert worst <= IN_TIME_S + EMULATED_S


def main() -> None:
    (HOME / "secret").mkdir(parents=True)
    (HOME / "secret" / "pool-secret").write_bytes(os.urandom(32))
    (HOME / "secret" / "index-password").write_text("index password")
    for place in ("/srv/a", "/srv/b", "/mnt/shared/pool"):
        Path(place).mkdir(mode=0o700)
    start(
        "index-server", "--bind=127.0.0.1", "--port=6379", f"--dir={HOME / 'index'}", f"--secret-dir={HOME / 'secret'}"
    )
    names = [block_id(FINGERPRINT, f"block {n}".encode()) for n in range(COUNT)]
    a = node("a")
    serves("a")
    writer = client("a")
    for n, name in enumerate(names):
        (result,) = writer.put_from([name], [payload(n)])
        assert result.stored, result
    until("announced", lambda: status("a")["index"]["announced"] == COUNT)
    until("copied to the shared tier", lambda: status("a")["shared"]["copies"].get("copied") == COUNT)
    until("a holds the lease", lambda: sweep("a")["holder"])
    node("b")
    serves("b")
    reader = client("b")
    assert read_all(reader, names) == ["PEER"]
    moved = status("b")["rdma"]
    say(f"node b over RDMA: {moved}")
    assert moved == {"blocks": COUNT}
    sweeps(writer, a)
    unread = [block_id(FINGERPRINT, f"unread {n}".encode()) for n in range(COUNT)]
    copied = status("a")["shared"]["copies"]["copied"]
    for n, name in enumerate(unread):
        assert writer.put_from([name], [payload(n)])[0].stored
    until("copied, too", lambda: status("a")["shared"]["copies"]["copied"] == copied + COUNT)
    a.send_signal(signal.SIGKILL)
    a.wait(20)
    assert set(read_all(reader, names)) <= {"SHARED", "LOCAL"}
    loses_its_nfs_server(unread)
    say("the whole path: passed")


if __name__ == "__main__":
    try:
        main()
    except BaseException:
        for log in sorted(HOME.glob("*.log")):
            print(f"-- {log.name}", log.read_text()[-4000:], sep="\n", flush=True)
        raise
    os._exit(0)  # the sidecars end with the machine
