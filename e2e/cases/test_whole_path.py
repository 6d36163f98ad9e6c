"""From `helm install` and `kubectl apply -f kvcachepool.yaml` to a session that migrates and finds its blocks.

The cases build on each other, in this order; each is a step a user would take or a fault that a cluster has.
"""

from __future__ import annotations

import json
import subprocess
import time
from typing import TYPE_CHECKING, Any

import engines
import pytest
import yaml
from kubectl import (
    ROOT,
    CommandError,
    Proxy,
    condition,
    get,
    helm_values,
    is_ready,
    items,
    kubectl,
    run,
    until,
)

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

pytestmark = [pytest.mark.cluster, pytest.mark.smoke]

SYSTEM = "kvpool-system"
EXAMPLE = ROOT / "examples" / "kvcachepool.yaml"
POOL = yaml.safe_load(EXAMPLE.read_text())
NAME = POOL["metadata"]["name"]
BLOCK = POOL["spec"].get("cache", {}).get("blockTokens", 256)
LOCAL_PATH = next(t["local"]["path"] for t in POOL["spec"]["tiers"] if "local" in t)
HTTP_PORT = 7422
MANIFESTS = ROOT / "e2e" / "manifests"


def workers() -> list[str]:
    nodes = [n["metadata"]["name"] for n in items("nodes") if "control-plane" not in n["metadata"]["name"]]
    assert len(nodes) >= 2
    return sorted(nodes)


NODE_A, NODE_B = ("", "")
PROXY: Proxy


@pytest.fixture(scope="module", autouse=True)
def the_cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    global NODE_A, NODE_B, PROXY
    NODE_A, NODE_B = workers()[:2]
    PROXY = Proxy(tmp_path_factory.mktemp("proxy"))
    yield
    PROXY.close()


def ask(engine: str, prompt: list[int], max_tokens: int = 48) -> engines.Turn:
    return engines.ask(PROXY, engine, prompt, max_tokens)


def why(engine: str) -> str:
    """For the message of a case that failed: an engine that did not load says here what kept it from it."""
    return "\n".join(engines.pool_counters(PROXY, engine))


def pool() -> dict[str, Any]:
    found: dict[str, Any] = get("kvp", NAME, "-n", SYSTEM)
    return found


def sidecar(node: str) -> dict[str, Any] | None:
    """The sidecar's pod on `node`, if there is one that is not on its way out."""
    pods = items("pods", "-n", SYSTEM, "-l", f"kvpool.dev/pool={NAME},app.kubernetes.io/component=sidecar")
    found = [p for p in pods if p["spec"].get("nodeName") == node and "deletionTimestamp" not in p["metadata"]]
    return found[0] if found else None


def sidecar_ready(node: str) -> bool:
    pod = sidecar(node)
    return pod is not None and all(
        c["status"] == "True" for c in pod["status"].get("conditions", []) if c["type"] == "Ready"
    )


def status(node: str) -> dict[str, Any]:
    """What the sidecar on `node` says of itself."""
    pod = sidecar(node)
    if pod is None:
        raise CommandError(f"no sidecar on {node}")
    found: dict[str, Any] = json.loads(PROXY.request(SYSTEM, pod["metadata"]["name"], HTTP_PORT, "/status", timeout=15))
    return found


def settled() -> bool:
    """The last change of the pool has reached every node, and none is replaced any more."""
    found = pool()
    generation = found["metadata"]["generation"]
    nodes = [status(node) for node in workers()]
    ready, progressing = condition(found, "Ready"), condition(found, "Progressing")
    return (
        is_ready(found)
        and ready["observedGeneration"] == progressing["observedGeneration"] == generation
        and progressing["status"] == "False"
        and found["status"]["nodes"]["updated"] == len(nodes)
        and all(s["ready"] and s["generation"] == generation for s in nodes)
    )


def full_blocks(tokens: int) -> int:
    return tokens // BLOCK * BLOCK


class Conversation:
    """A user's session: what was said so far, as tokens."""

    def __init__(self, offset: int) -> None:
        self.said = engines.text_tokens("A question about this text:\n" + engines.document(offset, 2400))
        self.more = engines.text_tokens("\nAnd what follows from it? " + engines.document(offset + 2400, 300))
        self.first: engines.Turn | None = None

    def open(self, engine: str) -> None:
        self.first = ask(engine, self.said)

    @property
    def second_prompt(self) -> list[int]:
        assert self.first is not None
        return self.said + self.first.tokens + self.more

    @property
    def shared_prefix(self) -> int:
        """Tokens that turn 1 left behind in full blocks; the last generated token's KV is never computed."""
        assert self.first is not None
        return full_blocks(len(self.said) + len(self.first.tokens) - 1)


MOVES, LOST, FLUSHED = Conversation(0), Conversation(4000), Conversation(8000)


def test_the_chart_installs():
    kubectl("apply", "-f", str(MANIFESTS / "namespaces.yaml"))
    install = ["helm", "upgrade", "--install", "kvpool", "charts/kvpool", "-n", SYSTEM, "--wait", "--timeout=3m"]
    run(*install, *helm_values(), timeout=200)
    until("the API server documents the new kind", lambda: "KVCachePool" in kubectl("explain", "kvp"), 60)
    assert "DESCRIPTION" in kubectl("explain", "kvp.spec.tiers")


def test_the_example_pool_becomes_ready():
    kubectl("apply", "-f", str(EXAMPLE))
    kubectl("-n", SYSTEM, "wait", f"kvp/{NAME}", "--for=condition=Ready", "--timeout=180s", timeout=200)
    made = pool()
    ready = condition(made, "Ready")
    assert ready["observedGeneration"] == made["metadata"]["generation"]
    assert made["status"]["nodes"]["ready"] == len(workers())


@pytest.mark.parametrize(
    "path", sorted((ROOT / "operator" / "tests" / "bad_pools").glob("*.yaml")), ids=lambda p: p.stem
)
def test_a_bad_pool_is_refused_with_a_sentence_that_helps(path: Path):
    case = yaml.safe_load(path.read_text())
    shown = kubectl("-n", SYSTEM, "apply", "--dry-run=server", "-f", "-", stdin=json.dumps(case["pool"]), check=False)
    assert case["message"] in shown
    assert "created (server dry run)" not in shown


def test_a_field_that_must_not_change_cannot_be_changed():
    patch = json.dumps([{"op": "replace", "path": "/spec/tiers/0/local/path", "value": "/mnt/elsewhere"}])
    shown = kubectl("-n", SYSTEM, "patch", "kvp", NAME, "--type=json", "-p", patch, "--dry-run=server", check=False)
    assert "cannot be changed" in shown


def test_the_engines_namespace_refuses_what_the_sidecar_needs():
    """The control for the next case: `restricted` is really enforced there."""
    host_path = {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": "forbidden", "namespace": "team-a"},
        "spec": {
            "containers": [{"name": "c", "image": engines.IMAGE}],
            "volumes": [{"name": "h", "hostPath": {"path": "/var/lib/kvpool"}}],
        },
    }
    shown = kubectl("apply", "--dry-run=server", "-f", "-", stdin=json.dumps(host_path), check=False)
    assert "restricted" in shown


def test_an_engine_starts_and_serves_while_its_nodes_sidecar_is_missing():
    kubectl("apply", "-f", str(MANIFESTS / "engine-volume.yaml"))
    kubectl("label", "node", NODE_A, "e2e.kvpool.dev/sidecar=yes", "--overwrite")
    only_node_a = {"nodes": {"selector": {"matchLabels": {"e2e.kvpool.dev/sidecar": "yes"}}}}
    # three nodes share this machine's cores
    patient = {"failOpen": {"lookupDeadline": "1s", "loadDeadline": "10s"}, "index": {"lookupTimeout": "1s"}}
    patch = json.dumps({"spec": only_node_a | patient})
    kubectl("-n", SYSTEM, "patch", "kvp", NAME, "--type=merge", "-p", patch)
    until("node B has no sidecar", lambda: sidecar(NODE_B) is None, 60)

    engines.start("engine-a", NODE_A, pool=f"{SYSTEM}/{NAME}")
    engines.start("engine-b", NODE_B, pool=f"{SYSTEM}/{NAME}", shell=True)
    engines.start("engine-plain", NODE_B, pool=None)
    engines.wait_serving("engine-b")
    answer = ask("engine-b", engines.text_tokens("Is anybody there?"), max_tokens=4)
    assert len(answer.tokens) == 4


def test_injection_left_nothing_to_the_user_and_nothing_privileged():
    for name in ("engine-a", "engine-b"):
        pod = get("pod", "-n", "team-a", name)
        assert pod["metadata"]["annotations"]["kvpool.dev/injected"]
        assert any(v["name"] == "kvpool" and "emptyDir" in v for v in pod["spec"]["volumes"])
        assert not any("hostPath" in v for v in pod["spec"]["volumes"])
        assert any(c["name"] == "kvpool-client" for c in pod["spec"]["initContainers"])
    plain = get("pod", "-n", "team-a", "engine-plain")
    assert "initContainers" not in plain["spec"]
    shell = get("pod", "-n", "team-a", "engine-b")["spec"]["containers"][0]
    assert "kv-transfer-config" not in " ".join(shell["command"])


def test_the_engine_connects_within_five_seconds_of_the_sidecars_return():
    kubectl("label", "node", NODE_B, "e2e.kvpool.dev/sidecar=yes", "--overwrite")
    until("node B's sidecar is ready", lambda: sidecar_ready(NODE_B), 90, every=0.2)
    back = time.monotonic()
    until("engine B is connected", lambda: status(NODE_B)["clients"] >= 1, 15, every=0.2)
    assert time.monotonic() - back <= 5
    everywhere = [{"op": "remove", "path": "/spec/nodes/selector"}]
    kubectl("-n", SYSTEM, "patch", "kvp", NAME, "--type=json", "-p", json.dumps(everywhere))
    until("every node runs the pool's last generation", settled, 120)


def test_turn_one_is_stored_by_the_node_that_computed_it():
    engines.wait_serving("engine-a")
    engines.wait_serving("engine-plain")
    until("engine A is connected", lambda: status(NODE_A)["clients"] >= 1, 15)
    for conversation in (MOVES, LOST, FLUSHED):
        conversation.open("engine-a")
    expected = sum(c.shared_prefix for c in (MOVES, LOST, FLUSHED)) // BLOCK
    until("node A holds every block of turn 1", lambda: status(NODE_A)["blocks"] >= expected, 30)


def test_turn_two_on_the_other_node_computes_only_what_is_new():
    until("node A announced its blocks", lambda: (s := status(NODE_A))["index"]["announced"] >= s["blocks"] > 0, 60)
    until("node B knows that node A is alive", lambda: status(NODE_B)["index"]["peers"] >= 1, 30)
    before = status(NODE_B)
    second = ask("engine-b", MOVES.second_prompt)
    assert second.cached == MOVES.shared_prefix > 2000, why("engine-b")
    expected = MOVES.shared_prefix // BLOCK
    until(
        "every block came from node A", lambda: status(NODE_B)["hits"]["peer"] - before["hits"]["peer"] == expected, 30
    )
    assert status(NODE_B)["bytes"]["peer"] > before["bytes"]["peer"]

    stayed = ask("engine-plain", MOVES.said)
    assert MOVES.first is not None
    assert stayed.tokens == MOVES.first.tokens
    assert ask("engine-plain", MOVES.second_prompt).tokens == second.tokens


def test_blocks_are_found_after_the_pod_and_its_nodes_sidecar_are_gone():
    pod = sidecar(NODE_A)
    assert pod is not None
    engines.delete("engine-a")
    kubectl("-n", SYSTEM, "delete", "pod", pod["metadata"]["name"], "--wait=true", "--timeout=60s")
    second = ask("engine-b", LOST.second_prompt)
    assert second.cached == LOST.shared_prefix, why("engine-b")
    expected = (MOVES.shared_prefix + LOST.shared_prefix) // BLOCK
    until("node B counted every load", lambda: sum(status(NODE_B)["hits"].values()) == expected, 30)
    until("node A's sidecar is back", lambda: sidecar_ready(NODE_A), 90)
    until("its blocks are still there", lambda: status(NODE_A)["blocks"] >= LOST.shared_prefix // BLOCK, 30)


def test_a_flushed_index_comes_back_from_the_nodes():
    until("node A announced its blocks", lambda: (s := status(NODE_A))["index"]["announced"] >= s["blocks"] > 0, 60)
    epoch = status(NODE_A)["index"]["epoch"]
    kubectl("-n", SYSTEM, "exec", f"{NAME}-index-0", "--", "kvpool-sidecar", "index-server", "--flush")

    def announced_again() -> bool:
        s = status(NODE_A)
        return s["index"]["epoch"] != epoch and s["index"]["announced"] >= s["blocks"] > 0

    until("the nodes announced their blocks to the empty index", announced_again, 60)
    until("node B knows that node A is alive", lambda: status(NODE_B)["index"]["peers"] >= 1, 30)
    before = status(NODE_B)["hits"]["peer"]
    second = ask("engine-b", FLUSHED.second_prompt)
    assert second.cached == FLUSHED.shared_prefix, why("engine-b")
    until(
        "node B found them on node A",
        lambda: status(NODE_B)["hits"]["peer"] - before == FLUSHED.shared_prefix // BLOCK,
        30,
    )


def test_the_status_answers_what_a_platform_engineer_asks():
    def told() -> bool:
        s = pool()["status"]
        return is_ready(pool()) and s["pods"]["injected"] >= 1 and s["capacity"]["used"] != "0"

    until("the pool's status shows use and pods", told, 60)
    shown = kubectl("get", "kvp", "-n", SYSTEM)
    assert NAME in shown


def node_data(node: str, path: str) -> str:
    """What lies under `path` on the node itself; kind's nodes are containers."""
    found = subprocess.run(
        ["docker", "exec", node, "find", path, "-type", "f"], capture_output=True, text=True, check=False
    )
    return found.stdout


def owned(name: str) -> list[str]:
    kinds = "daemonsets,statefulsets,services,configmaps,secrets,serviceaccounts,roles,rolebindings,pods"
    here = items(kinds, "-n", SYSTEM, "-l", f"kvpool.dev/pool={name}")
    wide = items("clusterroles,clusterrolebindings,persistentvolumes", "-l", f"kvpool.dev/pool={name}")
    return [f"{o['kind']}/{o['metadata']['name']}" for o in here + wide]


def test_a_deleted_pool_leaves_what_retain_says():
    assert pool()["spec"]["deletionPolicy"] == "Retain"
    engines.delete("engine-b")
    engines.delete("engine-plain")
    kubectl("-n", SYSTEM, "delete", "kvp", NAME, "--wait=true", "--timeout=120s", timeout=150)
    until("everything the operator made is gone", lambda: owned(NAME) in ([], [f"Secret/{NAME}-secret"]), 60)
    assert node_data(NODE_A, LOCAL_PATH) != ""


def test_a_deleted_pool_takes_its_data_along_where_the_policy_says_so():
    scratch = {
        "apiVersion": POOL["apiVersion"],
        "kind": POOL["kind"],
        "metadata": {"name": "scratch", "namespace": SYSTEM},
        "spec": {
            "tiers": [{"name": "nvme", "local": {"path": "/var/lib/kvpool/scratch", "capacity": "256Mi"}}],
            "deletionPolicy": "Delete",
        },
    }
    kubectl("apply", "-f", "-", stdin=json.dumps(scratch))
    kubectl("-n", SYSTEM, "wait", "kvp/scratch", "--for=condition=Ready", "--timeout=120s", timeout=150)
    assert node_data(NODE_A, "/var/lib/kvpool/scratch") != ""
    kubectl("-n", SYSTEM, "delete", "kvp", "scratch", "--wait=true", "--timeout=120s", timeout=150)
    until("everything the operator made is gone", lambda: owned("scratch") == [], 60)
    for node in (NODE_A, NODE_B):
        assert node_data(node, "/var/lib/kvpool/scratch") == ""


def test_the_chart_goes_without_a_trace():
    run("helm", "uninstall", "kvpool", "-n", SYSTEM, "--wait", "--timeout=2m", timeout=150)
    with pytest.raises(CommandError):
        kubectl("get", "mutatingwebhookconfigurations", "kvpool-webhook")
    assert items("deployments", "-n", SYSTEM) == []
