"""`make scale`: the real operator, a real control plane, 200 nodes that kwok plays, 500 pools, 5,000 pods.

Figures go to out/scale.json and to the terminal; exit code 1 where one is beyond its bound (docs/contribute/scale.md).
"""

from __future__ import annotations

import argparse
import contextlib
import http.client
import json
import os
import random
import shutil
import signal
import ssl
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import urllib.parse
import urllib.request
from collections import defaultdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
sys.path[:0] = [str(HERE), str(HERE.parent / "control_plane")]

import audit  # noqa: E402
import yaml  # noqa: E402
from api import APPLY, POOLS, Api, until  # noqa: E402
from conftest import as_account, grant, rendered  # noqa: E402
from plane import binaries, control_plane, free_port  # noqa: E402
from world import (  # noqa: E402
    POD_NETWORK,
    World,
    apply_pool,
    everywhere,
    make_engine,
    make_namespaces,
    make_nodes,
    ready,
    replace_engine,
)  # fmt: skip

if TYPE_CHECKING:
    from collections.abc import Iterator

SYSTEM = "kvpool-system"
BOUNDS = {"pass_p95_s": 5.0, "change_p95_s": 5.0, "rss_mib": 300.0, "requests_per_second": 120.0}


class Running:
    """Processes of this run; each ends with it."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._started: list[subprocess.Popen[bytes]] = []

    def start(self, name: str, *command: str, env: dict[str, str] | None = None) -> subprocess.Popen[bytes]:
        with (self._folder / f"{name}.log").open("ab") as log:
            process = subprocess.Popen(command, stdout=log, stderr=log, stdin=subprocess.DEVNULL, env=env, cwd=ROOT)
        self._started.append(process)
        return process

    def end(self) -> None:
        for process in reversed(self._started):
            process.terminate()
        for process in reversed(self._started):
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(15)
            process.kill()
            process.wait()


class Operator:
    """The operator's process, its memory, processor time and metrics."""

    def __init__(self, running: Running, kubeconfig: Path, life: int) -> None:
        self._port = free_port()
        env = {
            **{k: v for k, v in os.environ.items() if k in ("PATH", "HOME", "LANG")},
            "KUBECONFIG": str(kubeconfig),
            "KVPOOL_NAMESPACE": SYSTEM,
            "KVPOOL_SIDECAR_IMAGE": "kvpool/sidecar:scale",
            "KVPOOL_IDENTITY": f"operator-{life}",
            "KVPOOL_ADMIN_PORT": str(self._port),
            "KVPOOL_ISSUER_PORT": str(free_port()),
            "KVPOOL_LOG_LEVEL": "WARNING",
        }
        self.process = running.start(f"operator-{life}", sys.executable, "-m", "kvpool_operator", "run", env=env)

    def rss_mib(self, field: str = "VmRSS") -> float:
        """VmHWM: the most that it ever had."""
        for line in Path(f"/proc/{self.process.pid}/status").read_text().splitlines():
            if line.startswith(f"{field}:"):
                return round(int(line.split()[1]) / 1024, 1)
        raise RuntimeError(f"no {field}")

    def cpu_s(self) -> float:
        fields = Path(f"/proc/{self.process.pid}/stat").read_text().rsplit(")", 1)[1].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    def metrics(self) -> dict[str, float]:
        with urllib.request.urlopen(f"http://127.0.0.1:{self._port}/metrics", timeout=20) as answer:
            lines = answer.read().decode().splitlines()
        return {k: float(v) for k, _, v in (x.rpartition(" ") for x in lines if x and not x.startswith("#"))}


def quantile_of(before: dict[str, float], after: dict[str, float], q: float) -> float:
    """Of the passes between two readings of the histogram, by linear interpolation in its bucket."""
    name = 'kvpool_operator_reconcile_time_seconds_bucket{controller="kvcachepool"'
    buckets = []
    for key, value in after.items():
        if key.startswith(name):
            bound = key.split('le="')[1].split('"')[0]
            buckets.append((float("inf") if bound == "+Inf" else float(bound), value - before.get(key, 0.0)))
    buckets.sort()
    want, low, below = q * buckets[-1][1], 0.0, 0.0
    for bound, count in buckets:
        if count >= want:
            return low if bound == float("inf") else low + (bound - low) * (want - below) / max(count - below, 1e-9)
        low, below = bound, count
    return low


class Arrivals:
    """Watches the pools' ConfigMaps: when each first showed which generation of its pool."""

    def __init__(self, kubeconfig: Path) -> None:
        config = yaml.safe_load(kubeconfig.read_text())
        self._server = urllib.parse.urlsplit(config["clusters"][0]["cluster"]["server"])
        self._token = config["users"][0]["user"]["token"]
        self._seen: defaultdict[tuple[str, str], dict[int, float]] = defaultdict(dict)
        self._stop = False
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        while not self._stop:
            with contextlib.suppress(OSError, http.client.HTTPException, ValueError):
                self._watch()

    def _watch(self) -> None:
        context = ssl.create_default_context()
        context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
        where = (self._server.hostname or "", self._server.port)
        connection = http.client.HTTPSConnection(*where, timeout=60, context=context)
        label = urllib.parse.quote("app.kubernetes.io/managed-by=kvpool-operator")
        path = f"/api/v1/configmaps?watch=1&resourceVersion=0&timeoutSeconds=600&labelSelector={label}"
        connection.request("GET", path, headers={"Authorization": f"Bearer {self._token}"})
        answer = connection.getresponse()
        while not self._stop and (line := answer.readline()):
            now = time.monotonic()
            found = json.loads(line)["object"]
            meta, text = found["metadata"], (found.get("data") or {}).get("pool.json")
            if text:
                shown = self._seen[meta["namespace"], meta["labels"]["kvpool.dev/pool"]]
                shown.setdefault(json.loads(text)["generation"], now)

    def when(self, place: tuple[str, str], generation: int) -> float | None:
        """When this change was applied, or a later one in its place; None: not yet."""
        return min((at for g, at in list(self._seen[place].items()) if g >= generation), default=None)

    def stop(self) -> None:
        self._stop = True


@contextlib.contextmanager
def cluster(folder: Path, running: Running) -> Iterator[tuple[Api, Path]]:
    """Control plane with a scheduler, kwok for the nodes, one answering process for all sidecars."""
    found = binaries()
    if found is None:
        raise SystemExit("no etcd and kube binaries: `e2e/airgap/binaries.sh etcd kube helm` builds them")
    built = subprocess.run([HERE / "kwok.sh"], check=True, capture_output=True, text=True).stdout.strip()
    policy, log = folder / "audit.yaml", folder / "audit.log"
    policy.write_text(audit.POLICY)
    flags = [f"--audit-policy-file={policy}", f"--audit-log-path={log}", "--audit-log-maxsize=2000",
             "--audit-log-mode=blocking"]  # fmt: skip
    with control_plane(found, folder / "plane", apiserver=flags, scheduler=True) as kubeconfig:
        try:
            api = Api(kubeconfig)
            running.start("sidecars", sys.executable, str(HERE / "sidecars.py"))
            running.start(
                "kwok", built, f"--kubeconfig={kubeconfig}", "--manage-all-nodes=true", f"--cidr={POD_NETWORK}",
                "--node-lease-duration-seconds=0", "-v=ERROR",
            )  # fmt: skip
            yield api, kubeconfig
        finally:
            running.end()


def install(api: Api, kubeconfig: Path) -> Path:
    """CRDs, namespace, the chart's rights; the operator's kubeconfig."""
    for file in sorted((ROOT / "crds").glob("*.kvpool.dev.yaml")):
        crd = yaml.safe_load(file.read_text())
        path = f"/apis/apiextensions.k8s.io/v1/customresourcedefinitions/{crd['metadata']['name']}"
        api.call("PATCH", f"{path}?fieldManager=test", crd, APPLY)
    until("the CRD is served", lambda: api.items(f"{POOLS}/kvcachepools") == [])
    api.call("POST", "/api/v1/namespaces", {"metadata": {"name": SYSTEM}})
    grant(api, rendered())
    return as_account(api, kubeconfig, "kvpool-operator")


def phase(name: str, figures: dict[str, Any]) -> None:
    print(f"\n{name}", *(f"  {k:28} {v}" for k, v in figures.items()), sep="\n", flush=True)


class Meter:
    """Between two moments: passes, their p95, processor time. Requests follow from the audit log, at the end."""

    def __init__(self, operator: Operator) -> None:
        self._operator = operator
        self._before, self._cpu = operator.metrics(), operator.cpu_s()
        self._at, self.wall = time.monotonic(), time.time()

    def read(self) -> dict[str, Any]:
        after, seconds = self._operator.metrics(), time.monotonic() - self._at
        total = 'kvpool_operator_reconcile_time_seconds_count{controller="kvcachepool"}'
        return {
            "seconds": round(seconds, 1),
            "passes": int(after[total] - self._before[total]),
            "pass_p50_s": round(quantile_of(self._before, after, 0.5), 3),
            "pass_p95_s": round(quantile_of(self._before, after, 0.95), 3),
            "cpu_of_one_core": round((self._operator.cpu_s() - self._cpu) / seconds, 3),
            "rss_mib": self._operator.rss_mib(),
            "between": (self.wall, time.time()),
        }


def converge(api: Api, world: World, within: float) -> float:
    """Seconds until every pool is Ready."""
    started = time.monotonic()
    last = -1
    while (now := ready(api)) < world.pools:
        if time.monotonic() - started > within:
            raise SystemExit(f"{now} of {world.pools} pools are Ready after {within:.0f} s")
        if now != last:
            print(f"\r  {time.monotonic() - started:5.0f} s  {now} of {world.pools} pools Ready ", end="", flush=True)
            last = now
        time.sleep(2)
    print()
    return time.monotonic() - started


def changes(api: Api, world: World, arrivals: Arrivals, count: int, every: float, seed: int) -> list[float]:
    """Seconds from each change of a pool to its ConfigMap of the new generation; engine pods churn meanwhile."""
    rng = random.Random(seed)
    wanted: list[tuple[tuple[str, str], int, float]] = []
    for i in range(count):
        before = time.monotonic()
        number, other = rng.randrange(world.pools), rng.randrange(world.pools)
        generation = apply_pool(api, world, number, patience_s=1000 * seed + i)
        wanted.append((world.place(number), generation, before))
        replace_engine(api, world, other, life=1000 * seed + i)
        time.sleep(max(0.0, before + every - time.monotonic()))
    end = time.monotonic() + 120
    while late := [w for w in wanted if arrivals.when(*w[:2]) is None]:
        if time.monotonic() > end:
            raise SystemExit(f"changes that never arrived: {late[:5]}")
        time.sleep(0.1)
    return [at - before for *change, before in wanted if (at := arrivals.when(*change)) is not None]


def told(seconds: list[float]) -> dict[str, float]:
    ordered = sorted(seconds)
    p95 = ordered[min(len(ordered) - 1, int(0.95 * len(ordered)))]
    return {
        "changes": len(ordered),
        "change_p50_s": round(statistics.median(ordered), 3),
        "change_p95_s": round(p95, 3),
        "change_max_s": round(ordered[-1], 3),
    }


def measure(args: argparse.Namespace, folder: Path) -> dict[str, Any]:
    world, running = World(args.pools, args.nodes, args.per_pool), Running(folder)
    out: dict[str, Any] = {"world": {"pools": world.pools, "nodes": world.nodes, "pods": world.pods}}
    with cluster(folder, running) as (api, kubeconfig):
        rights = install(api, kubeconfig)
        make_namespaces(api, world)
        make_nodes(api, world)
        operator = Operator(running, rights, 1)
        until("the operator leads", lambda: _leads(operator), 60, every=0.5)
        arrivals = Arrivals(kubeconfig)

        print(f"scale: {world.pools} pools on {world.nodes} nodes, {world.pods} pods", flush=True)
        meter = Meter(operator)
        everywhere(lambda n: apply_pool(api, world, n), range(world.pools))
        everywhere(lambda n: make_engine(api, world, n), range(world.pools))
        took = converge(api, world, args.patience)
        out["made"] = {"all_ready_s": round(took, 1), **meter.read()}
        phase("all pools made at once", out["made"])

        time.sleep(args.settle)
        meter = Meter(operator)
        time.sleep(args.quiet)
        out["quiet"] = meter.read()
        phase("nothing happens", out["quiet"])

        meter = Meter(operator)
        out["changing"] = told(changes(api, world, arrivals, args.changes, args.every, seed=1)) | meter.read()
        phase("pools change, engine pods come and go", out["changing"])

        peak = operator.rss_mib("VmHWM")
        operator.process.kill()  # nothing is handed over: the Lease must run out
        operator.process.wait()
        operator = Operator(running, rights, 2)
        until("the second operator leads", lambda: _leads(operator), 90, every=0.5)
        meter = Meter(operator)
        out["restarted"] = told(changes(api, world, arrivals, args.changes // 2, args.every, seed=2)) | meter.read()
        phase("the operator was killed and a new one leads", out["restarted"])
        out["peak_rss_mib"] = max(peak, operator.rss_mib("VmHWM"))
    found = list(audit.requests(folder / "audit.log"))
    for name in ("made", "quiet", "changing", "restarted"):
        out[name]["api"] = audit.rates(found, *out[name].pop("between"))
        phase(f"requests to the API server: {name}", out[name]["api"])
    return out


def _leads(operator: Operator) -> bool:
    if operator.process.poll() is not None:
        raise SystemExit("the operator ended; its log is in the run's folder")
    with contextlib.suppress(OSError):
        return operator.metrics().get("kvpool_operator_leader") == 1.0
    return False


def verdict(out: dict[str, Any]) -> list[str]:
    """What is beyond its bound."""
    phases = [out[n] for n in ("made", "quiet", "changing", "restarted")]
    worst = {
        "pass_p95_s": max(p["pass_p95_s"] for p in phases),
        "change_p95_s": max(p["change_p95_s"] for p in phases if "change_p95_s" in p),
        "rss_mib": out["peak_rss_mib"],
        "requests_per_second": max(p["api"]["busiest_10_s_per_second"] for p in phases),
    }
    out["worst"], out["bounds"] = worst, BOUNDS
    phase("worst", {k: f"{v} (bound {BOUNDS[k]:g})" for k, v in worst.items()})
    return [k for k, v in worst.items() if v > BOUNDS[k]]


def main() -> int:
    parser = argparse.ArgumentParser(prog="make scale")
    parser.add_argument("--pools", type=int, default=500)
    parser.add_argument("--nodes", type=int, default=200)
    parser.add_argument("--per-pool", type=int, default=8, help="nodes of each pool")
    parser.add_argument("--changes", type=int, default=120, help="changes of pools, one after the other")
    parser.add_argument("--every", type=float, default=0.5, help="seconds between two changes")
    parser.add_argument("--settle", type=float, default=30.0, help="seconds of rest after all pools are Ready")
    parser.add_argument("--quiet", type=float, default=60.0, help="seconds that are measured while nothing happens")
    parser.add_argument("--patience", type=float, default=900.0, help="longest time until all pools are Ready")
    args = parser.parse_args()
    if not 0 < args.pools <= 1000 or not 0 < args.nodes <= 1000 or not 0 < args.per_pool <= args.nodes:
        parser.error("1 to 1000 pools, 1 to 1000 nodes, and no more nodes to a pool than there are")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # so that what was started ends, too
    folder = Path(tempfile.mkdtemp(prefix="kvpool-scale-"))
    kept = ROOT / "out"
    kept.mkdir(exist_ok=True)
    try:
        out = measure(args, folder)
        beyond = verdict(out)
        (kept / "scale.json").write_text(json.dumps(out, indent=2) + "\n")
        print(f"\n{'beyond the bound: ' + ', '.join(beyond) if beyond else 'all within their bounds'}; out/scale.json")
        return 1 if beyond else 0
    finally:
        logs = kept / "scale-logs"
        shutil.rmtree(logs, ignore_errors=True)
        logs.mkdir()
        for log in [*folder.glob("*.log"), *(folder / "plane").glob("*.log")]:
            if log.name != "audit.log":
                shutil.copy(log, logs)
        shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    sys.exit(main())
