"""What a stolen token of the operator, and a writer in a pool's namespace, cannot do: asked of a real API server.

The chart's ValidatingAdmissionPolicies hold in every test of this folder, so the other tests show that the operator's
normal work passes them.
"""

from __future__ import annotations

import copy
import json
from typing import TYPE_CHECKING, Any

import pytest
from api import APPLY, MERGE, Api, ApiError, until
from conftest import RELEASE, SYSTEM, Pools, as_account, namespace, rendered

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

pytestmark = pytest.mark.cluster

Manifest = dict[str, Any]
DRY = "dryRun=All&fieldManager=kvpool-operator&force=true"
PLURALS = {
    "ConfigMap": "/api/v1/namespaces/{}/configmaps",
    "DaemonSet": "/apis/apps/v1/namespaces/{}/daemonsets",
    "NetworkPolicy": "/apis/networking.k8s.io/v1/namespaces/{}/networkpolicies",
    "PersistentVolume": "/api/v1/persistentvolumes",
    "Pod": "/api/v1/namespaces/{}/pods",
    "Secret": "/api/v1/namespaces/{}/secrets",
    "Service": "/api/v1/namespaces/{}/services",
    "ServiceAccount": "/api/v1/namespaces/{}/serviceaccounts",
}


@pytest.fixture
def stolen(rights: Path) -> Api:
    return Api(rights)


@pytest.fixture
def sidecars_of_chat(pools: Pools) -> Manifest:
    pools.apply("chat")
    pools.until_ready("chat")
    return pools.owned("chat")["daemonsets/chat-sidecar"]


def made(kind: str, name: str, **fields: Any) -> Manifest:
    labels = {"app.kubernetes.io/managed-by": "kvpool-operator", "kvpool.dev/pool": "chat"}
    metadata = {"name": name, "labels": labels, **fields.pop("metadata", {})}
    return {"kind": kind, "metadata": metadata, **fields}


def send(api: Api, manifest: Manifest, ns: str = SYSTEM, method: str = "POST", sub: str = "") -> None:
    path = PLURALS[manifest["kind"]].format(ns)
    path += "" if method == "POST" else f"/{manifest['metadata']['name']}{sub}"
    api.call(
        method,
        f"{path}?{DRY if method != 'POST' else 'dryRun=All'}",
        manifest,
        APPLY if method == "PATCH" else "application/json",
    )


def copied(daemonset: Manifest, change: Callable[[Manifest], None] = lambda _: None) -> Manifest:
    """A new DaemonSet like that of the sidecars, with a change of its pod."""
    metadata = {"name": "copy", "labels": daemonset["metadata"]["labels"]}
    template = copy.deepcopy(daemonset["spec"]["template"])
    template["metadata"].pop("creationTimestamp", None)
    change(template["spec"])
    spec = {"selector": daemonset["spec"]["selector"], "template": template}
    return {"apiVersion": "apps/v1", "kind": "DaemonSet", "metadata": metadata, "spec": spec}


def server(pod: Manifest) -> Manifest:
    found: Manifest = pod["containers"][0]
    return found


CHANGES: dict[str, tuple[Callable[[Manifest], Any], str]] = {
    "another image": (lambda pod: server(pod).update(image="busybox"), "only the image of sidecar.image"),
    "an init container of another image": (
        lambda pod: pod["initContainers"].append(pod["initContainers"][0] | {"name": "x", "image": "busybox"}),
        "only the image",
    ),
    "the node's processes": (lambda pod: pod.update(hostPID=True), "do not share namespaces"),
    "the node's network": (lambda pod: pod.update(hostNetwork=True), "do not share namespaces"),
    "a foreign account": (lambda pod: pod.update(serviceAccountName="kvpool-operator"), "accounts of their pool"),
    "a token": (lambda pod: pod.update(automountServiceAccountToken=True), "without a token"),
    "a projected token": (
        lambda pod: pod["volumes"].append(
            {"name": "t", "projected": {"sources": [{"serviceAccountToken": {"path": "token"}}]}}
        ),
        "not the API server",
    ),
    "the root of the node": (
        lambda pod: pod["volumes"].append({"name": "r", "hostPath": {"path": "/"}}),
        "sidecar.allowedPaths",
    ),
    "the kubelet's directory": (
        lambda pod: pod["volumes"].append({"name": "r", "hostPath": {"path": "/var/lib/kubelet/pods"}}),
        "sidecar.allowedPaths",
    ),
    "privilege": (
        lambda pod: server(pod)["securityContext"].update(privileged=True, allowPrivilegeEscalation=True),
        "no privileges",
    ),
    "root": (lambda pod: server(pod)["securityContext"].update(runAsUser=0, runAsNonRoot=False), "no privileges"),
    "capabilities": (
        lambda pod: pod["initContainers"][0]["securityContext"]["capabilities"].update(add=["SYS_ADMIN"]),
        "no privileges",
    ),
}


def test_the_operators_own_daemonset_would_pass(stolen: Api, sidecars_of_chat: Manifest):
    send(stolen, copied(sidecars_of_chat))


@pytest.mark.parametrize("what", CHANGES)
def test_a_stolen_token_makes_no_daemonset_with(stolen: Api, sidecars_of_chat: Manifest, what: str):
    change, reason = CHANGES[what]
    with pytest.raises(ApiError, match=reason):
        send(stolen, copied(sidecars_of_chat, change))
    applied = copied(sidecars_of_chat, change)
    applied["metadata"]["name"] = "chat-sidecar"
    with pytest.raises(ApiError, match=reason):
        send(stolen, applied, method="PATCH")


def test_a_stolen_token_makes_nothing_in_system_namespaces(stolen: Api, sidecars_of_chat: Manifest):
    for manifest in (copied(sidecars_of_chat), made("ConfigMap", "x"), made("Secret", "x", data={})):
        with pytest.raises(ApiError, match="nothing in system namespaces"):
            send(stolen, manifest, "kube-system")


SPECIMENS: list[tuple[Manifest, str]] = [
    (made("ConfigMap", "x") | {"metadata": {"name": "x"}}, "only objects with the label"),
    (
        made(
            "Secret",
            "x",
            metadata={"annotations": {"kubernetes.io/service-account.name": "default"}},
            type="kubernetes.io/service-account-token",
        ),
        "Opaque",
    ),
    (made("ServiceAccount", "admin"), "accounts of pools"),
    (
        made("ServiceAccount", "chat-sidecar", metadata={"annotations": {"eks.amazonaws.com/role-arn": "x"}}),
        "annotations of others",
    ),
    (
        made("Service", "x", spec={"ports": [{"port": 80}], "externalIPs": ["10.0.0.1"]}),
        "inside the cluster",
    ),
    (made("Service", "x", spec={"ports": [{"port": 80}], "type": "LoadBalancer"}), "inside the cluster"),
    (made("NetworkPolicy", "x", spec={"podSelector": {}, "policyTypes": ["Ingress"]}), "pods of pools"),
    (
        made(
            "PersistentVolume",
            "x",
            spec={"capacity": {"storage": "1Gi"}, "accessModes": ["ReadWriteMany"], "hostPath": {"path": "/"}},
        ),
        "NFS exports only",
    ),
]


@pytest.mark.parametrize(("manifest", "reason"), SPECIMENS, ids=[f"{m['kind']} {r}" for m, r in SPECIMENS])
def test_a_stolen_token_makes_no(stolen: Api, manifest: Manifest, reason: str):
    with pytest.raises(ApiError, match=reason):
        send(stolen, manifest)


def test_a_stolen_token_changes_and_deletes_nothing_of_others(api: Api, stolen: Api):
    secret = {"metadata": {"name": "theirs"}, "stringData": {"a": "b"}}
    path = f"/api/v1/namespaces/{SYSTEM}/secrets/theirs"
    api.call("POST", path.rpartition("/")[0], secret)
    try:
        with pytest.raises(ApiError, match="only objects with the label"):
            stolen.call("DELETE", f"{path}?dryRun=All")
        label = {"metadata": {"labels": {"app.kubernetes.io/managed-by": "kvpool-operator"}}}
        with pytest.raises(ApiError, match="only objects with the label"):
            stolen.call("PATCH", f"{path}?dryRun=All", label, MERGE)
    finally:
        api.delete(path)


def test_a_stolen_token_grants_nothing(stolen: Api):
    subjects = [{"kind": "ServiceAccount", "name": "default", "namespace": SYSTEM}]
    for role in ("cluster-admin", "kvpool-agent", "kvpool-operator"):
        reference = {"apiGroup": "rbac.authorization.k8s.io", "kind": "ClusterRole", "name": role}
        for path in ("clusterrolebindings", f"namespaces/{SYSTEM}/rolebindings"):
            with pytest.raises(ApiError, match="forbidden"):
                stolen.call(
                    "POST",
                    f"/apis/rbac.authorization.k8s.io/v1/{path}",
                    {"metadata": {"name": "x"}, "roleRef": reference, "subjects": subjects},
                )
    with pytest.raises(ApiError, match="forbidden"):
        stolen.call("DELETE", "/apis/rbac.authorization.k8s.io/v1/clusterrolebindings/system:kube-dns")


def test_without_nfs_there_is_no_right_on_volumes(stolen: Api):
    for rules in (r["rules"] for r in rendered() if r["kind"] in ("Role", "ClusterRole")):
        assert "persistentvolumes" not in json.dumps(rules)
    assert "persistentvolumes" in json.dumps([r for r in rendered(*RELEASE) if r["kind"] == "ClusterRole"])
    assert stolen.items("/api/v1/persistentvolumes") is not None


# -- sidecars and namespaces of pools


def sidecar_pod(api: Api, daemonset: Manifest) -> Manifest:
    def found() -> Any:
        selector = "kvpool.dev%2Fpool%3Dchat,app.kubernetes.io%2Fcomponent%3Dsidecar"
        return api.items(f"/api/v1/namespaces/{SYSTEM}/pods?labelSelector={selector}")

    pod: Manifest = until("a sidecar's pod is there", found)[0]
    assert pod["metadata"]["labels"]["kvpool.dev/sockets"] == "agent", daemonset["metadata"]["name"]
    return pod


def test_no_pod_poses_as_a_sidecar(api: Api, sidecars_of_chat: Manifest):
    """Even an administrator's: the label is the DaemonSet controller's to give."""
    real = sidecar_pod(api, sidecars_of_chat)
    posing = {
        "kind": "Pod",
        "metadata": {
            "name": "posing",
            "labels": real["metadata"]["labels"],
            "ownerReferences": real["metadata"]["ownerReferences"],
        },
        "spec": {"containers": [{"name": "server", "image": "busybox"}]},
    }
    with pytest.raises(ApiError, match="only the DaemonSet controller creates"):
        send(api, posing)
    with pytest.raises(ApiError, match="those of the operator"):
        send(api, copied(sidecars_of_chat, lambda pod: server(pod).update(image="busybox")))


def test_a_sidecar_is_not_changed(api: Api, sidecars_of_chat: Manifest):
    name = sidecar_pod(api, sidecars_of_chat)["metadata"]["name"]
    path = f"/api/v1/namespaces/{SYSTEM}/pods/{name}"
    image = {"spec": {"containers": [{"name": "server", "image": "busybox"}]}}
    strategic = "application/strategic-merge-patch+json"
    with pytest.raises(ApiError, match="cannot be changed"):
        api.call("PATCH", f"{path}?dryRun=All", image, strategic)
    debug = {"spec": {"ephemeralContainers": [{"name": "d", "image": "busybox"}]}}
    with pytest.raises(ApiError, match="cannot be changed"):
        api.call("PATCH", f"{path}/ephemeralcontainers?dryRun=All", debug, strategic)
    api.call("PATCH", f"{path}?dryRun=All", {"metadata": {"annotations": {"note": "x"}}}, MERGE)
    daemonset = f"/apis/apps/v1/namespaces/{SYSTEM}/daemonsets/chat-sidecar"
    api.call("PATCH", f"{daemonset}?dryRun=All", {"metadata": {"annotations": {"note": "x"}}}, MERGE)
    root = {"spec": {"template": {"spec": {"hostPID": True}}}}
    with pytest.raises(ApiError, match="those of the operator"):
        api.call("PATCH", f"{daemonset}?dryRun=All", root, strategic)


POWERS: dict[str, Manifest] = {
    "hostPath": {"volumes": [{"name": "root", "hostPath": {"path": "/"}}]},
    "hostPID": {"hostPID": True},
    "hostNetwork": {"hostNetwork": True},
    "privileged": {"containers": [{"name": "c", "image": "i", "securityContext": {"privileged": True}}]},
    "capability": {
        "containers": [{"name": "c", "image": "i", "securityContext": {"capabilities": {"add": ["SYS_ADMIN"]}}}]
    },
    "init container": {
        "initContainers": [{"name": "i", "image": "i", "securityContext": {"privileged": True}}],
    },
}


@pytest.fixture(scope="module")
def team(api: Api) -> str:
    name = "team-with-pools"
    namespace(api, name, **{"pod-security.kubernetes.io/enforce": "privileged", "kvpool.dev/pods": "restricted"})
    until("the account is there", lambda: api.get(f"/api/v1/namespaces/{name}/serviceaccounts/default"))
    return name


@pytest.mark.parametrize("power", POWERS)
def test_who_may_write_in_a_pools_namespace_does_not_own_its_nodes(api: Api, team: str, power: str):
    usual = {"containers": [{"name": "c", "image": "i"}]}
    pod = {"kind": "Pod", "metadata": {"name": "theirs"}, "spec": usual}
    send(api, pod, team)
    with pytest.raises(ApiError, match="KVPool operator only"):
        send(api, pod | {"spec": usual | POWERS[power]}, team)
    labels = {"a": "b"}
    template = {"metadata": {"labels": labels}, "spec": usual | POWERS[power]}
    daemonset = {
        "kind": "DaemonSet",
        "metadata": {"name": "theirs"},
        "spec": {"selector": {"matchLabels": labels}, "template": template},
    }
    with pytest.raises(ApiError, match="KVPool operator only"):
        send(api, daemonset, team)
    send(api, pod | {"spec": usual | POWERS[power]})  # elsewhere the namespace's own level decides


def test_a_pool_in_such_a_namespace_becomes_ready_and_goes(pools: Pools, api: Api, team: str):
    pools.apply("theirs", team, deletionPolicy="Delete", cleanupTimeout="20s")
    pools.until_ready("theirs", team)
    pods = api.items(f"/api/v1/namespaces/{team}/pods?labelSelector=app.kubernetes.io%2Fcomponent%3Dsidecar")
    assert {p["metadata"]["ownerReferences"][0]["kind"] for p in pods} == {"DaemonSet"}
    pools.delete("theirs", team)
    pools.until_gone("theirs", team, 60)


def test_the_agents_account_reads_pods_and_nothing_else(api: Api, rights: Path, kubeconfig: Path):
    agent = Api(as_account(api, kubeconfig, "kvpool-agent"))
    assert agent.items("/api/v1/pods") is not None
    for path in (f"/api/v1/namespaces/{SYSTEM}/secrets", "/api/v1/nodes", "/api/v1/namespaces"):
        with pytest.raises(ApiError, match="forbidden"):
            agent.items(path)
    with pytest.raises(ApiError, match="forbidden"):
        agent.call("POST", f"/api/v1/namespaces/{SYSTEM}/pods?dryRun=All", {"metadata": {"name": "x"}})
