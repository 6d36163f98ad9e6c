"""Fault 27: what the parts may do, as the cluster itself sees it: Pod Security, rights, read-only files, secrets.

Who can connect to whom is in test_network_policies.py.
"""

from __future__ import annotations

import base64
import json
from typing import TYPE_CHECKING, Any

import pytest
import system
from kubectl import get, items, kubectl

if TYPE_CHECKING:
    from collections.abc import Callable

    import loadpod

pytestmark = [pytest.mark.cluster, pytest.mark.full, pytest.mark.usefixtures("load_pool")]

OPERATOR = f"system:serviceaccount:{system.SYSTEM}:kvpool-operator"
WEBHOOK = f"system:serviceaccount:{system.SYSTEM}:kvpool-webhook"
SIDECAR = f"system:serviceaccount:{system.SYSTEM}:{system.POOL}-sidecar"
INDEX = f"system:serviceaccount:{system.SYSTEM}:{system.POOL}-index"
FORBIDDEN = [
    (who, *what)
    for who in (OPERATOR, WEBHOOK, SIDECAR, INDEX)
    for what in (
        ("list", "secrets"),
        ("watch", "secrets"),
        ("create", "pods/exec"),
        ("create", "pods/portforward"),
        ("get", "nodes/proxy"),
        ("create", "serviceaccounts/token"),
        ("escalate", "clusterroles.rbac.authorization.k8s.io"),
        ("create", "clusterroles.rbac.authorization.k8s.io"),
        ("impersonate", "users"),
        ("patch", "validatingwebhookconfigurations.admissionregistration.k8s.io"),
        ("delete", "customresourcedefinitions.apiextensions.k8s.io"),
        ("delete", "namespaces"),
    )
] + [
    (WEBHOOK, "get", "secrets"),
    (SIDECAR, "get", "secrets"),
    (INDEX, "get", "secrets"),
    (WEBHOOK, "patch", "kvcachepools.kvpool.dev"),
    (SIDECAR, "get", "kvcachepools.kvpool.dev"),
    (OPERATOR, "patch", "mutatingwebhookconfigurations.admissionregistration.k8s.io"),
]


def may(who: str, verb: str, what: str) -> bool:
    """In all namespaces, as the API server answers."""
    kind, _, part = what.partition("/")  # after a slash kubectl takes the name of an object
    asked = ["auth", "can-i", verb, kind, f"--as={who}", "-A", *([f"--subresource={part}"] if part else [])]
    shown = kubectl(*asked, check=False)
    answer = shown.split()[-1:]
    assert answer in (["yes"], ["no"]), shown
    return answer == ["yes"]


def test_no_account_of_ours_may_do_what_it_has_no_need_of():
    allowed = [case for case in FORBIDDEN if may(*case)]
    assert allowed == []
    # the control: the questions are understood
    assert may(OPERATOR, "get", "secrets")
    assert may(OPERATOR, "patch", "kvcachepools.kvpool.dev/status")


def test_no_account_has_a_right_over_everything():
    for who in (OPERATOR, WEBHOOK, SIDECAR, INDEX):
        listed = kubectl("auth", "can-i", "--list", f"--as={who}", "-n", "default")
        rules = [line.split() for line in listed.splitlines()[1:] if line.strip()]
        assert not [r for r in rules if r[0].startswith("*")], f"{who}:\n{listed}"
        assert not [line for line in listed.splitlines() if "[*]" in line and "[/" not in line], f"{who}:\n{listed}"


def test_only_the_sidecars_and_the_node_agent_need_more_than_the_restricted_standard():
    """The API server itself says which pods of the namespace would be refused."""
    enforce = "pod-security.kubernetes.io/enforce=restricted"
    shown = kubectl("label", "--dry-run=server", "--overwrite", "ns", system.SYSTEM, enforce, check=False)
    refused = [line for line in shown.splitlines() if "Warning:" in line and ":" in line.split("Warning:")[1]]
    assert any("-sidecar-" in line for line in refused), "the control: sidecars need hostPath, so one must be named"
    assert any("kvpool-agent-" in line for line in refused), "the control: the node agent runs as root"
    expected = ("-sidecar-", "kvpool-agent-", "existing pods")
    others = [line for line in refused if not any(part in line for part in expected)]
    assert others == []


def test_what_runs_under_the_standard_cannot_write_where_it_lies():
    for pod in [*system.pods(system.OPERATOR), *system.pods(system.WEBHOOK), *system.pods("kvpool.dev/pool")]:
        for container in [*pod["spec"]["containers"], *pod["spec"].get("initContainers", [])]:
            context = container["securityContext"]
            assert context["readOnlyRootFilesystem"] is True, container["name"]
            assert context["allowPrivilegeEscalation"] is False, container["name"]
    for selector, name in ((system.OPERATOR, "operator"), (system.WEBHOOK, "webhook")):
        pod = system.pods(selector)[0]["metadata"]["name"]
        tried = kubectl(
            "-n", system.SYSTEM, "exec", pod, "-c", name, "--",
            "python3", "-c", "open('/written', 'w')", check=False,
        )  # fmt: skip
        assert "Read-only file system" in tried, tried


def test_no_secret_of_the_pool_is_in_a_log_a_status_an_argument_or_a_configmap(
    load_pod: Callable[..., loadpod.LoadPod],
):
    pod = load_pod("talks", system.workers()[0])
    assert pod.put(7000, 4)["ok"] == 4
    canaries = _secrets()
    assert len(canaries) >= 2
    places: dict[str, str] = {"status": json.dumps(system.pool())}
    for found in items("pods,configmaps,daemonsets,statefulsets,events", "-n", system.SYSTEM):
        places[f"{found['kind']}/{found['metadata']['name']}"] = json.dumps(found)
    for p in items("pods", "-n", system.SYSTEM):
        name = p["metadata"]["name"]
        places[f"log of {name}"] = kubectl("-n", system.SYSTEM, "logs", name, "--all-containers", "--tail=20000")
    places["engine pod"] = json.dumps(get("pod", "-n", "team-a", "talks"))
    leaks = [(where, key) for where, text in places.items() for key, value in canaries.items() if value in text]
    assert leaks == []
    assert any(places[w] for w in places if w.startswith("log of"))


def _secrets() -> dict[str, str]:
    """Each value of the pool's Secrets as it is and in base64; certificates are public."""
    out: dict[str, Any] = {}
    for secret in items("secrets", "-n", system.SYSTEM, "-l", f"kvpool.dev/pool={system.POOL}"):
        for key, value in secret["data"].items():
            plain = base64.b64decode(value)
            if key == "pool-id" or key.endswith(".crt") or len(plain) < 16:
                continue
            out[f"{key} in base64"] = value
            if plain.isascii():
                out[key] = plain.decode().strip()
            else:
                out[f"{key} in hex"] = plain.hex()
    return out
