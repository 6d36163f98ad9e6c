"""What every case on a cluster shares: names, and a dump of everything of ours when something fails."""

from __future__ import annotations

import os
import shutil
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import loadpod
import pytest
import system
from kubectl import Proxy, items, kubectl

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Iterator

OUT = Path(__file__).resolve().parent.parent / "out" / "e2e"
NAMESPACES = ("kvpool-system", "team-a", "team-b")


def pytest_sessionstart() -> None:
    missing = [tool for tool in ("kubectl", "helm") if shutil.which(tool) is None]
    if missing or "KUBECONFIG" not in os.environ:
        raise pytest.UsageError(f"run these by `make e2e` (missing: {', '.join([*missing, 'KUBECONFIG'])})")
    shutil.rmtree(OUT, ignore_errors=True)
    OUT.mkdir(parents=True)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The whole path first: it begins with a cluster that has nothing of ours. What may break nodes comes last."""
    items.sort(key=lambda i: ("test_whole_path" not in i.nodeid, i.get_closest_marker("disruptive") is not None))


@pytest.fixture(scope="session")
def proxy(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Proxy]:
    made = Proxy(tmp_path_factory.mktemp("proxy"))
    yield made
    made.close()


@pytest.fixture(scope="session")
def installed() -> None:
    """The chart. It stays: the next case, or whoever keeps the cluster, uses it."""
    system.install()


@pytest.fixture(scope="session")
def load_pool() -> str:
    """A pool for load pods, Ready; its namespace/name."""
    started = time.monotonic()
    system.install()  # where it is installed already this changes nothing
    if system.pool() is None:  # the directory may be that of the whole path's pool, whose blocks were retained
        system.on_node(system.workers()[0], "find", "/mnt/kvpool-shared", "-mindepth", "1", "-delete")
    took = system.apply_pool()
    print(f"helm install to Ready: {time.monotonic() - started:.0f} s, of which the pool took {took:.0f} s")
    return system.KEY


@pytest.fixture
def load_pod(proxy: Proxy, load_pool: str) -> Iterator[Callable[..., loadpod.LoadPod]]:
    """Starts load pods; at the end each is held against the invariants and goes."""
    started: list[loadpod.LoadPod] = []

    def start(name: str, node: str, namespace: str = "team-a", tenant: str = "") -> loadpod.LoadPod:
        started.append(loadpod.start(proxy, name, namespace=namespace, node=node, pool=load_pool, tenant=tenant))
        return started[-1]

    yield start
    try:
        for pod in started:
            pod.check()
    finally:
        for pod in started:
            pod.delete()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, Any, Any]:
    report = yield
    if report.failed and not getattr(item.session, "kvpool_dumped", False):
        item.session.kvpool_dumped = True  # type: ignore[attr-defined]
        dump()
    return report


def dump() -> None:
    """Events, descriptions and logs of everything of ours into out/e2e/."""

    def save(name: str, *args: str) -> None:
        (OUT / name).write_text(kubectl(*args, check=False, timeout=60))

    save("nodes.txt", "describe", "nodes")
    save("pools.yaml", "get", "kvp", "-A", "-o", "yaml")
    save("webhook.yaml", "get", "mutatingwebhookconfigurations", "-o", "yaml")
    for ns in NAMESPACES:
        save(f"{ns}.all.txt", "-n", ns, "get", "all,configmaps,pvc,leases", "-o", "wide")
        save(f"{ns}.events.txt", "-n", ns, "get", "events", "--sort-by=.lastTimestamp")
        save(f"{ns}.pods.txt", "-n", ns, "describe", "pods")
        for pod in items("pods", "-n", ns):
            name = pod["metadata"]["name"]
            save(f"{ns}.{name}.log", "-n", ns, "logs", name, "--all-containers", "--prefix", "--tail=2000")
            save(
                f"{ns}.{name}.previous.log", "-n", ns, "logs", name, "--all-containers", "--prefix", "-p", "--tail=500"
            )
            pod_url = f"/api/v1/namespaces/{ns}/pods/{name}"
            if "-sidecar-" in name:
                save(f"{ns}.{name}.status.txt", "get", "--raw", f"{pod_url}:7422/proxy/status")
            if name.startswith("engine-"):
                save(f"{ns}.{name}.metrics.txt", "get", "--raw", f"{pod_url}:8000/proxy/metrics")
    print(f"\neverything of ours is in {OUT}; what sidecars and engines say of the pool:")
    for file in sorted([*OUT.glob("*.status.txt"), *OUT.glob("*-sidecar-*.log"), *OUT.glob("*.metrics.txt")]):
        lines = [line for line in file.read_text().splitlines() if "kvpool" in line or "node" in line]
        print(f"== {file.name}", *(line[:2500] for line in lines[-12:]), sep="\n")
