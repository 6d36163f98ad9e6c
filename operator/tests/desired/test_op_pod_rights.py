"""What each container of a pool's pods may do on its node: this table, docs/reference/security.md, and nothing else."""

from __future__ import annotations

from typing import Any

import pytest
from op_samples import ROOT
from test_op_desired import CASES

from kvpool_operator.desired.users import FIRST_USER, LAST_USER, USER

ROOTS = {"prepare-node": ("CHOWN",)}
"""Containers that run as root, and all that they may do as such."""
ORDINARY = {"server", "preflight", "wipe", "done", "index"}
HOST_PATHS = {"sidecar", "preflight", "wipe"}
"""Components that see directories of the node."""
PAGE = (ROOT / "docs" / "reference" / "security.md").read_text()


def pods() -> list[tuple[str, dict[str, Any]]]:
    """Component and pod of everything that a pool becomes."""
    found = []
    for manifests in CASES.values():
        for m in manifests:
            template = m["spec"].get("template") if "spec" in m else None
            if template:
                found.append((template["metadata"]["labels"]["app.kubernetes.io/component"], template["spec"]))
    return found


def containers(pod: dict[str, Any]) -> list[dict[str, Any]]:
    return [*pod.get("initContainers", []), *pod["containers"]]


def test_no_container_may_do_more_than_the_table_says():
    seen = set()
    for _, pod in pods():
        for c in containers(pod):
            seen.add(c["name"])
            security = c["securityContext"]
            is_root = c["name"] in ROOTS
            assert security["capabilities"] == {"drop": ["ALL"]} | (
                {"add": list(ROOTS[c["name"]])} if is_root and ROOTS[c["name"]] else {}
            )
            assert (security["runAsUser"] == 0, security["runAsNonRoot"]) == (is_root, not is_root)
            assert is_root or security["runAsUser"] == USER or FIRST_USER <= security["runAsUser"] <= LAST_USER
            assert security["allowPrivilegeEscalation"] is False
            assert security["readOnlyRootFilesystem"] is True
            assert "privileged" not in security
    assert seen == ROOTS.keys() | ORDINARY


def test_no_pod_shares_anything_of_its_node_but_directories():
    for component, pod in pods():
        assert not {"hostNetwork", "hostPID", "hostIPC"} & pod.keys()
        assert pod["automountServiceAccountToken"] is False
        assert pod["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
        paths = [v for v in pod["volumes"] if "hostPath" in v]
        assert bool(paths) == (component in HOST_PATHS), component


def test_no_pod_of_a_pool_sees_the_kubelets_directory_or_a_token_of_the_api():
    for component, pod in pods():
        assert pod["automountServiceAccountToken"] is False
        for volume in pod["volumes"]:
            path = volume.get("hostPath", {}).get("path", "/tier")
            assert not path.startswith("/var/lib/kubelet"), component
            for source in volume.get("projected", {}).get("sources", []):
                audience = source.get("serviceAccountToken", {}).get("audience", "none")
                assert audience, f"{component}: a token without an audience is one for the API server"


def test_root_is_in_init_containers_alone():
    """Who may exec into a sidecar is never root there."""
    for component, pod in pods():
        assert {c["name"] for c in pod["containers"]}.isdisjoint(ROOTS), component


def test_no_secret_is_in_an_argument_or_variable():
    for _, pod in pods():
        for c in containers(pod):
            assert not [e for e in c.get("env", []) if "secretKeyRef" in str(e)]
            assert "their-password" not in str(c)


@pytest.mark.parametrize("name", sorted(ROOTS.keys() | ORDINARY - {"done", "index"}))
def test_the_page_speaks_of_each(name: str):
    assert f"`{name}`" in PAGE
