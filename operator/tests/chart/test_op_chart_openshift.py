"""The chart's SecurityContextConstraints admit the pods that KVPool makes, compared as OpenShift does."""

import copy

import pytest
from op_chart import needs_helm, one, pod_of, render
from op_samples import inputs

from kvpool_operator.desired import build
from kvpool_operator.desired.preflight import build_preflight
from kvpool_operator.desired.wipe import build_cleanup

pytestmark = needs_helm
KIND = "SecurityContextConstraints"
# fields that the API requires, but for strategies (security.openshift.io/v1)
REQUIRED = {
    "allowHostDirVolumePlugin", "allowHostIPC", "allowHostNetwork", "allowHostPID", "allowHostPorts",
    "allowPrivilegedContainer", "allowedCapabilities", "defaultAddCapabilities", "priority", "readOnlyRootFilesystem",
    "requiredDropCapabilities", "volumes",
}  # fmt: skip
HOST = {"hostIPC": "allowHostIPC", "hostNetwork": "allowHostNetwork", "hostPID": "allowHostPID"}


def refusals(scc, pod):
    """Why the constraints refuse a pod."""
    kinds = {next(key for key in volume if key != "name") for volume in pod.get("volumes", [])}
    yield from (f"volume {kind}" for kind in sorted(kinds - set(scc["volumes"])))
    yield from (field for field, allowed in HOST.items() if pod.get(field) and not scc[allowed])
    outer = pod.get("securityContext", {})
    for container in [*pod.get("initContainers", []), *pod["containers"]]:
        context = {**outer, **container.get("securityContext", {})}
        capabilities = context.get("capabilities", {})
        added = set(capabilities.get("add", [])) - set(scc["allowedCapabilities"])
        yield from (f"capability {name}" for name in sorted(added))
        if context.get("privileged") or context.get("allowPrivilegeEscalation", True):
            yield "privileges"
        if not context.get("readOnlyRootFilesystem"):
            yield "a root file system that can be written"
        wanted = scc["runAsUser"]
        if wanted["type"] == "MustRunAs" and context.get("runAsUser", wanted["uid"]) != wanted["uid"]:
            yield f"user {context['runAsUser']}"
        if context.get("seccompProfile", {}).get("type", "RuntimeDefault") != "RuntimeDefault":
            yield "a seccomp profile"


def constraints(name):
    return one(render("openshift.enabled=true"), KIND, name)


def pool_pods():
    """Name and pod of each workload of a pool."""
    made = [*build(inputs()), *build_preflight(inputs()), *build_cleanup(inputs())]
    found = {o["metadata"]["name"]: pod_of(o) for o in made if o["kind"] in ("DaemonSet", "StatefulSet")}
    assert {"chat-sidecar", "chat-index", "chat-preflight", "chat-wipe"} <= set(found)
    return found


def test_every_pod_of_a_pool_is_admitted():
    scc = constraints("kvpool-pools")
    refused = {name: list(refusals(scc, pod)) for name, pod in pool_pods().items()}
    assert {name: found for name, found in refused.items() if found} == {}


def test_the_node_agent_is_admitted():
    agent = pod_of(one(render("openshift.enabled=true"), "DaemonSet", "kvpool-agent"))
    assert list(refusals(constraints("kvpool-agent"), agent)) == []


def test_operator_and_webhook_ask_for_no_user_or_host_so_restricted_admits_them():
    deployments = [o for o in render("openshift.enabled=true") if o["kind"] == "Deployment"]
    assert len(deployments) == 2
    for pod in map(pod_of, deployments):
        contexts = [pod.get("securityContext", {}), *(c.get("securityContext", {}) for c in pod["containers"])]
        assert not [c for c in contexts if {"runAsUser", "runAsGroup", "fsGroup", "seLinuxOptions"} & set(c)]
        assert not [v for v in pod.get("volumes", []) if "hostPath" in v]


@pytest.mark.parametrize(
    ("field", "value", "said"),
    [
        ("hostNetwork", True, "hostNetwork"),
        ("hostPID", True, "hostPID"),
        ("volumes", [{"name": "x", "iscsi": {}}], "volume iscsi"),
        ("securityContext", {"privileged": True}, "privileges"),
        ("securityContext", {"capabilities": {"add": ["SYS_ADMIN"]}}, "capability SYS_ADMIN"),
        ("securityContext", {"readOnlyRootFilesystem": False}, "a root file system that can be written"),
    ],
)
def test_a_pod_that_wants_more_is_refused(field, value, said):
    pod = copy.deepcopy(pool_pods()["chat-sidecar"])
    if field == "securityContext":
        pod["containers"][0]["securityContext"] |= value
    else:
        pod[field] = value
    assert said in set(refusals(constraints("kvpool-pools"), pod))


def test_only_the_agent_and_the_namespaces_of_pools_may_use_them():
    objects = render("openshift.enabled=true", 'openshift.poolNamespaces=["kv-a","kv-b"]')
    agent, pools = one(objects, KIND, "kvpool-agent"), one(objects, KIND, "kvpool-pools")
    assert (agent["users"], agent["groups"]) == (["system:serviceaccount:kvpool-system:kvpool-agent"], [])
    assert pools["users"] == []
    assert pools["groups"] == ["system:serviceaccounts:kv-a", "system:serviceaccounts:kv-b"]
    assert constraints("kvpool-pools")["groups"] == ["system:serviceaccounts:kvpool-system"]


@pytest.mark.parametrize("name", ["kvpool-agent", "kvpool-pools"])
def test_all_fields_are_set_and_nothing_of_the_host_but_its_folders(name):
    scc = constraints(name)
    assert set(scc) >= REQUIRED
    granted = {field for field in scc if field.startswith("allow") and scc[field] is True}
    assert granted == {"allowHostDirVolumePlugin"}
    assert scc["requiredDropCapabilities"] == ["ALL"]


def test_elsewhere_they_are_not_installed():
    assert [o for o in render() if o["kind"] == KIND] == []
