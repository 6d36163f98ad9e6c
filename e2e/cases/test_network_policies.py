"""Who can connect to whom while `networkPolicy.enabled` is on, on a pod network that enforces it.

Each connection that must be refused is made before without the policies, and after them again: it fails for no other
reason. What the pool itself needs goes on meanwhile, over connections that are made anew.
"""

from __future__ import annotations

import json
import time
from typing import TYPE_CHECKING, Any

import loadpod
import pytest
import system
from kubectl import apply, items, kubectl, until

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from kubectl import Proxy

pytestmark = [pytest.mark.cluster, pytest.mark.full, pytest.mark.usefixtures("load_pool", "network")]

NAME = "fenced"
KEY = f"{system.SYSTEM}/{NAME}"
ELSEWHERE, MONITORING = "elsewhere", "scrapes"
SCRAPES = {"e2e.kvpool.dev/scrapes": "yes"}
LISTENS = 9000
BLOCKS = 32
PODS = ("sidecar", "index")
# the operator's and the webhook's metrics, a sidecar's peer port and its orders, the index: not for strangers
OF_THE_POOL = {"sidecar": (7421, 7423), "index": (6379,)}
PRIVATE = {"operator": (8080,), "webhook": (8081,), **OF_THE_POOL}
# reviews, health and questions of routers, health
PUBLIC = {"webhook": (9443,), "sidecar": (7422,), "index": (7424,)}
POLICIES = {"kvpool-operator", "kvpool-webhook", f"{system.POOL}-sidecar", f"{system.POOL}-index"}

CONNECT = """
import json, socket, sys, threading
found = {}
def connect(name, host, port):
    try:
        socket.create_connection((host, port), 3).close()
        found[name] = "open"
    except OSError as e:
        found[name] = type(e).__name__
threads = [threading.Thread(target=connect, args=target) for target in json.loads(sys.argv[1])]
for thread in threads: thread.start()
for thread in threads: thread.join()
print(json.dumps(found))
"""


def connections(namespace: str, pod: str, targets: dict[str, tuple[str, int]], *exec_args: str) -> dict[str, str]:
    """What became of a connection from the pod to each target: `open`, or the name of the error."""
    asked = json.dumps([[name, *where] for name, where in targets.items()])
    shown = kubectl("-n", namespace, "exec", pod, *exec_args, "--", "python3", "-c", CONNECT, asked)
    found: dict[str, str] = json.loads(shown)
    assert found.keys() == targets.keys()
    return found


def targets(ports: dict[str, tuple[int, ...]], pool: str = NAME) -> dict[str, tuple[str, int]]:
    """Name to address of the pods that run now, by part."""
    out = {}
    for part, numbers in ports.items():
        selector = f"app.kubernetes.io/component={part}" + (f",kvpool.dev/pool={pool}" if part in PODS else "")
        found = system.pods(selector)
        assert found
        for pod in found:
            for number in numbers:
                out[f"{part} {pod['metadata']['name']} {number}"] = (pod["status"]["podIP"], number)
    return out


def bystander(namespace: str, name: str, node: str) -> dict[str, Any]:
    """A pod that has nothing to do with the pool and listens on one port."""
    container = {
        "name": "bystander",
        "image": loadpod.IMAGE,
        "imagePullPolicy": "IfNotPresent",
        "command": ["python3", "-m", "http.server", str(LISTENS), "--directory", "/var/empty"],
        "readinessProbe": {"tcpSocket": {"port": LISTENS}, "periodSeconds": 1},
    }
    spec = {
        "nodeSelector": {"kubernetes.io/hostname": node},
        "terminationGracePeriodSeconds": 1,
        "automountServiceAccountToken": False,
        "containers": [container],
    }
    meta = {"name": name, "namespace": namespace, "labels": {"app": name}}
    return {"apiVersion": "v1", "kind": "Pod", "metadata": meta, "spec": spec}


@pytest.fixture(scope="module")
def bystanders(load_pool: str) -> Iterator[dict[str, str]]:
    """Pods on both nodes in a namespace that no pool knows, and one where metrics are read; name to address."""
    node_a, node_b = system.workers()[:2]
    system.label(ELSEWHERE, {})
    system.label(MONITORING, SCRAPES)
    made = [(ELSEWHERE, "stranger-a", node_a), (ELSEWHERE, "stranger-b", node_b), (MONITORING, "scraper", node_a)]
    for namespace, name, node in made:
        kubectl("-n", namespace, "delete", "pod", name, "--ignore-not-found", "--wait=true", "--timeout=60s")
        apply(json.dumps(bystander(namespace, name, node)))

    def addresses() -> dict[str, str]:
        found = [p for namespace in (ELSEWHERE, MONITORING) for p in items("pods", "-n", namespace)]
        return {p["metadata"]["name"]: p["status"]["podIP"] for p in found if system.pod_ready(p)}

    until("they listen", lambda: len(addresses()) == len(made), 90)
    yield addresses()
    kubectl("delete", "ns", ELSEWHERE, MONITORING, "--wait=true", "--timeout=90s")


@pytest.fixture(scope="module")
def network(bystanders: dict[str, str]) -> None:
    """A network that enforces policies, both ways and also between pods of one node; found out, not believed."""
    where = {name: (ip, LISTENS) for name, ip in bystanders.items()}

    def says(pod: str, closed: set[str]) -> Callable[[], bool]:
        namespace = ELSEWHERE if pod.startswith("stranger") else MONITORING
        return lambda: {n for n, told in connections(namespace, pod, where).items() if told != "open"} == closed

    every = {"stranger-a", "stranger-b", "scraper"}
    until("everybody is reached", says("stranger-b", set()), 60)
    # who cannot be reached when nobody may come to, or go from, stranger-a: from whose point of view
    for direction, views in (
        ("Ingress", {"scraper": {"stranger-a"}, "stranger-b": {"stranger-a"}, "stranger-a": set()}),
        ("Egress", {"scraper": set(), "stranger-a": every - {"stranger-a"}}),
    ):
        policy = {
            "apiVersion": "networking.k8s.io/v1",
            "kind": "NetworkPolicy",
            "metadata": {"name": "probe", "namespace": ELSEWHERE},
            "spec": {"podSelector": {"matchLabels": {"app": "stranger-a"}}, "policyTypes": [direction]},
        }
        apply(json.dumps(policy))
        started = time.monotonic()
        try:
            for view, closed in views.items():
                until(f"{direction} of stranger-a is enforced as {view} sees it", says(view, closed), 40)
        except AssertionError:
            if system.network_enforces_policies():
                raise  # ours enforces
            pytest.skip(f"this cluster's pod network does not enforce a NetworkPolicy's {direction}")
        finally:
            kubectl("-n", ELSEWHERE, "delete", "networkpolicy", "probe", "--wait=true")
        print(f"{direction}: enforced and seen from {len(views)} pods within {time.monotonic() - started:.1f} s")
        until("and it ends", says("stranger-a", set()), 40)
        until("from all sides", says("scraper", set()), 40)


@pytest.fixture(scope="module")
def fenced(network: None) -> Iterator[None]:
    """A pool without a shared tier, made without policies: a block of the other node can come from that node alone."""
    tiers = [{"name": "nvme", "local": {"path": f"/var/lib/kvpool/{NAME}", "capacity": "512Mi"}}]
    system.apply_pool(NAME, tiers=tiers, deletionPolicy="Delete")
    yield
    system.install()
    system.delete_pool(NAME)


def policies() -> set[str]:
    return {p["metadata"]["name"] for p in items("networkpolicies", "-n", system.SYSTEM)}


@pytest.fixture(scope="module")
def guarded(fenced: None) -> None:
    """The policies are on. Sidecars and index start anew: a connection that was there before would go on."""
    metrics = f"networkPolicy.metricsFrom={json.dumps(SCRAPES)}"
    system.install("--set", "networkPolicy.enabled=true", "--set-json", metrics)
    until("all policies are made", lambda: policies() >= POLICIES | {f"{NAME}-sidecar", f"{NAME}-index"}, 90)
    before = _uids()
    kubectl("-n", system.SYSTEM, "delete", "pod", "-l", f"kvpool.dev/pool={NAME}", "--wait=true", "--timeout=90s")
    until("they are back", lambda: len(_uids()) == len(before) and not before & _uids(), 120)
    until(f"pool {NAME} is Ready", lambda: system.settled(NAME), 120)


def _uids() -> set[str]:
    return {p["metadata"]["uid"] for p in system.pods(f"kvpool.dev/pool={NAME}") if system.pod_ready(p)}


def everything_open(namespace: str, pod: str) -> Callable[[], bool]:
    return lambda: set(connections(namespace, pod, targets(PRIVATE) | targets(PUBLIC)).values()) == {"open"}


def everybody_connects() -> None:
    for namespace, pod in ((ELSEWHERE, "stranger-a"), (ELSEWHERE, "stranger-b"), (MONITORING, "scraper")):
        until(f"{pod} connects to everything", everything_open(namespace, pod), 60)
    found = connections(system.SYSTEM, load_sidecar(), targets(OF_THE_POOL), "-c", "server")
    assert set(found.values()) == {"open"}, found


def load_sidecar() -> str:
    name: str = system.sidecar(system.workers()[0])["metadata"]["name"]
    return name


def test_without_the_policies_anybody_can_connect(fenced: None):
    assert policies() == set()
    everybody_connects()


def test_with_them_blocks_come_from_the_other_node_and_the_operator_knows(guarded: None, proxy: Proxy):
    node_a, node_b = system.workers()[:2]
    first = loadpod.fresh()
    a = loadpod.start(proxy, "guarded-a", namespace="team-a", node=node_a, pool=KEY)  # which is injected to get there
    b = loadpod.start(proxy, "guarded-b", namespace="team-a", node=node_b, pool=KEY)
    try:
        assert a.put(first, BLOCKS)["ok"] == BLOCKS
        until("all come from the other node", lambda: b.get(first, BLOCKS)["outcome"].get("peer", 0) == BLOCKS, 60)
        until("the operator saw how much is stored", lambda: system.pool(NAME)["status"]["capacity"]["used"] != "0", 60)
        until("and which pods use it", lambda: system.pool(NAME)["status"]["pods"]["injected"] == 2, 60)
        system.change(NAME, cleanup="47s")
        until("a change reaches the nodes", lambda: system.settled(NAME), 60)
        a.check()
        b.check()
    finally:
        a.delete()
        b.delete()


def test_with_them_strangers_connect_to_nothing_that_is_private(guarded: None):
    for name in ("stranger-a", "stranger-b"):
        private = targets(PRIVATE)
        until(
            f"{name} is kept out",
            lambda name=name, private=private: "open" not in connections(ELSEWHERE, name, private).values(),
            40,
        )
        print(name, connections(ELSEWHERE, name, private))
        assert set(connections(ELSEWHERE, name, targets(PUBLIC)).values()) == {"open"}


def test_with_them_metrics_are_read_by_whom_the_values_name_and_nothing_else_is(guarded: None):
    metrics = targets({"operator": (8080,), "webhook": (8081,)})
    found = connections(MONITORING, "scraper", targets(PRIVATE))
    assert {name for name, told in found.items() if told == "open"} == {*metrics}


def test_with_them_a_sidecar_of_another_pool_is_a_stranger(guarded: None):
    private = connections(system.SYSTEM, load_sidecar(), targets(OF_THE_POOL), "-c", "server")
    assert "open" not in private.values(), private
    own = targets(OF_THE_POOL, pool=system.POOL)
    assert set(connections(system.SYSTEM, load_sidecar(), own, "-c", "server").values()) == {"open"}


def test_when_they_are_off_again_anybody_can_connect_as_before(guarded: None):
    system.install()
    until("all policies are gone", lambda: policies() == set(), 90)
    everybody_connects()
