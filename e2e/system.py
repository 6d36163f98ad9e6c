"""An installed KVPool with one pool that cases share: the chart, two namespaces of engines, and how to look at them."""

from __future__ import annotations

import json
import os
import subprocess
import time
from typing import TYPE_CHECKING, Any

from kubectl import Proxy, condition, get, helm_values, is_ready, items, kubectl, run, until

if TYPE_CHECKING:
    from collections.abc import Sequence

SYSTEM = "kvpool-system"
POOL = "load"
KEY = f"{SYSTEM}/{POOL}"
LOCAL = "/var/lib/kvpool/load"
HTTP_PORT = 7422
ACCESS = {"kvpool.dev/pool-access": "load"}
TEAMS = ("team-a", "team-b")
OPERATOR = "app.kubernetes.io/component=operator"
WEBHOOK = "app.kubernetes.io/component=webhook"


def install(*values: str) -> None:
    """The chart with the images of this run, and namespaces for engines that enforce `restricted`."""
    label(SYSTEM, {"pod-security.kubernetes.io/enforce": "privileged"})
    for team in TEAMS:
        label(team, {"pod-security.kubernetes.io/enforce": "restricted", **ACCESS})
    chart = ["helm", "upgrade", "--install", "kvpool", "charts/kvpool", "-n", SYSTEM, "--wait", "--timeout=3m"]
    run(*chart, *helm_values(), *values, timeout=200)


def label(namespace: str, labels: dict[str, str]) -> None:
    made = {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": namespace, "labels": labels}}
    kubectl("apply", "--server-side", "--force-conflicts", "--field-manager=cases", "-f", "-", stdin=json.dumps(made))


# e2e/run.sh sets it where the sidecar's image has an index server with TLS
INDEX: dict[str, Any] = {"managed": {"encryption": "Always"}} if os.environ.get("KVPOOL_INDEX_TLS") else {}


def spec(name: str = POOL, **more: Any) -> dict[str, Any]:
    """A pool for load pods: drives and the shared directory, with deadlines for nodes that share two processors."""
    return {
        "tiers": [
            {"name": "nvme", "local": {"path": f"/var/lib/kvpool/{name}", "capacity": "512Mi"}},
            {"name": "shared", "shared": {"hostPath": {"path": "/mnt/kvpool-shared"}, "capacity": "2Gi"}},
        ],
        "injection": {"allowedNamespaces": {"from": "Selector", "selector": {"matchLabels": ACCESS}}},
        "failOpen": {"lookupDeadline": "1s", "loadDeadline": "5s"},
        "index": {"lookupTimeout": "500ms", **INDEX},
        **more,
    }


def apply_pool(name: str = POOL, *, namespace: str = SYSTEM, wait: float = 180, **more: Any) -> float:
    """Apply it as a user would; seconds until it is Ready for this spec."""
    made = {
        "apiVersion": "kvpool.dev/v1alpha1",
        "kind": "KVCachePool",
        "metadata": {"name": name, "namespace": namespace},
        "spec": spec(name, **more),
    }
    started = time.monotonic()
    kubectl("apply", "-f", "-", stdin=json.dumps(made))
    if wait:
        until(f"pool {name} is Ready", lambda: settled(name, namespace), wait)
    return time.monotonic() - started


def change(name: str = POOL, *, cleanup: str) -> None:
    """A change of the spec that restarts nothing: the sidecars are told of it, and need not know."""
    patch = json.dumps({"spec": {"cleanupTimeout": cleanup}})
    kubectl("-n", SYSTEM, "patch", "kvp", name, "--type=merge", "-p", patch)


def run_operation(operation: str, name: str = POOL, **action: Any) -> None:
    """Run one KVCacheOperation on the pool; return when it succeeded."""
    made = {
        "apiVersion": "kvpool.dev/v1alpha1",
        "kind": "KVCacheOperation",
        "metadata": {"name": operation, "namespace": SYSTEM},
        "spec": {"poolRef": {"name": name}, **action},
    }
    kubectl("apply", "-f", "-", stdin=json.dumps(made))
    until(
        f"{operation} succeeded",
        lambda: get("kvcacheoperation", operation, "-n", SYSTEM)["status"]["phase"] == "Succeeded",
        120,
    )
    kubectl("-n", SYSTEM, "delete", "kvcacheoperation", operation)


def delete_pool(name: str = POOL, namespace: str = SYSTEM) -> None:
    kubectl("-n", namespace, "delete", "kvp", name, "--ignore-not-found", "--wait=true", "--timeout=150s", timeout=170)


def pool(name: str = POOL, namespace: str = SYSTEM) -> dict[str, Any]:
    found: dict[str, Any] = get("kvp", name, "-n", namespace)
    return found


def settled(name: str = POOL, namespace: str = SYSTEM) -> bool:
    """Ready, and the status speaks of the present spec."""
    found = pool(name, namespace)
    ready = condition(found, "Ready")
    progressing = condition(found, "Progressing")
    generation = found["metadata"]["generation"]
    is_told = ready.get("observedGeneration") == progressing.get("observedGeneration") == generation
    return is_ready(found) and is_told and progressing["status"] == "False"


def workers() -> list[str]:
    nodes = [n["metadata"]["name"] for n in items("nodes") if "control-plane" not in n["metadata"]["name"]]
    assert len(nodes) >= 2
    return sorted(nodes)


def pods(selector: str, namespace: str = SYSTEM) -> list[dict[str, Any]]:
    """Those that are not on their way out."""
    return [p for p in items("pods", "-n", namespace, "-l", selector) if "deletionTimestamp" not in p["metadata"]]


def sidecar(node: str, name: str = POOL) -> dict[str, Any]:
    """The sidecar's pod on a node; of two during a roll the one that is Ready, the newer one if both are.

    IndexError (not yet, to `until`) if there is none.
    """
    found = pods(f"kvpool.dev/pool={name},app.kubernetes.io/component=sidecar")
    here = [p for p in found if p["spec"].get("nodeName") == node]
    return sorted(here, key=lambda p: (pod_ready(p), p["metadata"]["creationTimestamp"]))[-1]


def pod_ready(pod: dict[str, Any]) -> bool:
    return any(c["type"] == "Ready" and c["status"] == "True" for c in pod["status"].get("conditions") or [])


def status(proxy: Proxy, node: str, name: str = POOL) -> dict[str, Any]:
    """What the sidecar on `node` says of itself."""
    pod = sidecar(node, name)["metadata"]["name"]
    told: dict[str, Any] = json.loads(proxy.request(SYSTEM, pod, HTTP_PORT, "/status", timeout=15))
    return told


def scale(deployment: str, replicas: int) -> None:
    """And wait until so many are there and ready."""
    kubectl("-n", SYSTEM, "scale", f"deployment/{deployment}", f"--replicas={replicas}")
    component = deployment.removeprefix("kvpool-")

    def there() -> bool:
        found = items("pods", "-n", SYSTEM, "-l", f"app.kubernetes.io/component={component}")
        return len(found) == replicas and all(pod_ready(p) for p in found)

    until(f"{deployment} has {replicas} pods", there, 90)


def on_node(node: str, *command: str, check: bool = True) -> str:
    """Run a command on a node itself; kind's nodes are containers."""
    done = subprocess.run(["docker", "exec", node, *command], capture_output=True, text=True, check=False, timeout=60)
    assert not check or done.returncode == 0, f"{node}: {' '.join(command)}: {done.stderr[-2000:]}"
    return done.stdout


def network_enforces_policies() -> bool:
    """Whether the nodes are those of this repository, whose pod network enforces NetworkPolicies."""
    inspect = ["docker", "inspect", "-f", "{{.Config.Image}}", workers()[0]]
    done = subprocess.run(inspect, check=True, capture_output=True, text=True, timeout=30)
    return done.stdout.strip().startswith("kvpool-local/")


def processes(node: str, *words: str) -> list[int]:
    """Numbers of the processes on a node whose command line holds all the words."""
    script = 'for d in /proc/[0-9]*; do printf "%s " "${d#/proc/}"; tr "\\0" " " <"$d/cmdline" 2>/dev/null; echo; done'
    found = []
    for line in on_node(node, "sh", "-c", script).splitlines():
        number, _, command = line.partition(" ")
        if all(w in command for w in words) and "for d in" not in command:
            found.append(int(number))
    return found


def main_process(node: str, uid: str, *words: str) -> int:
    """The process with those words in the pod with that uid (in the names of cgroups dashes may be underscores)."""
    for number in processes(node, *words):
        told = on_node(node, "cat", f"/proc/{number}/cgroup", check=False)
        if uid in told or uid.replace("-", "_") in told:
            return number
    raise AssertionError(f"no process {' '.join(words)} of pod {uid} on {node}")


def signal(node: str, name: str, numbers: Sequence[int]) -> None:
    on_node(node, "kill", f"-{name}", *map(str, numbers))


def events(name: str, namespace: str = SYSTEM) -> list[dict[str, Any]]:
    return [e for e in items("events", "-n", namespace) if e["involvedObject"]["name"] == name]


def owned(name: str, namespace: str = SYSTEM) -> list[str]:
    """What the operator made for a pool and is still there."""
    kinds = "daemonsets,statefulsets,services,configmaps,secrets,serviceaccounts,pods"
    here = items(kinds, "-n", namespace, "-l", f"kvpool.dev/pool={name}")
    wide = items("persistentvolumes", "-l", f"kvpool.dev/pool={name},kvpool.dev/pool-namespace={namespace}")
    return [f"{o['kind']}/{o['metadata']['name']}" for o in here + wide]
