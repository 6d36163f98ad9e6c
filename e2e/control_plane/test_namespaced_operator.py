"""An operator for some namespaces: Roles there instead of a ClusterRole, and nothing is seen or done elsewhere."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import pytest
from api import Api, ApiError, until
from conftest import RELEASE, SYSTEM, Operator, Pools, grant, namespace, rendered

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from kubelet import SidecarDouble

pytestmark = pytest.mark.cluster

HERE = "only-here"
ROLES = "/apis/rbac.authorization.k8s.io/v1/namespaces/{}/{}/kvpool-operator-pools"


@pytest.fixture
def limited(api: Api, rights: Path, no_operator: None, tmp_path: Path) -> Iterator[Operator]:
    """Limited by its roles and its settings, as the chart does with operator.namespaces."""
    if api.get(f"/api/v1/namespaces/{HERE}") is None:
        namespace(api, HERE)
    values = (*RELEASE, f'operator.namespaces=["{HERE}"]')
    grant(api, rendered(*values))
    (deployment,) = [
        m for m in rendered(*values) if m["metadata"]["name"] == "kvpool-operator" and m["kind"] == "Deployment"
    ]
    env = {e["name"]: e.get("value") for e in deployment["spec"]["template"]["spec"]["containers"][0]["env"]}
    assert env["KVPOOL_NAMESPACES"] == HERE
    try:
        with Operator(rights, tmp_path / "log", "limited", namespaces=HERE) as operator:
            yield operator
        assert "HTTP 403" not in (tmp_path / "log").read_text()
    finally:
        for kind in ("roles", "rolebindings"):
            api.delete(ROLES.format(HERE, kind))
        grant(api, rendered(*RELEASE))


def test_it_serves_its_namespaces_and_no_others(
    api: Api, rights: Path, limited: Operator, sidecars: dict[str, SidecarDouble]
):
    pools = Pools(api)
    pools.apply("elsewhere")
    pools.apply("chat", HERE)
    try:
        pools.until_ready("chat", HERE)
        pools.apply("chat", HERE, cleanupTimeout="30s", deletionPolicy="Retain")
        until("a change is seen", lambda: pools.until_ready("chat", HERE))
        time.sleep(2)
        assert "status" not in pools.get("elsewhere")
        assert pools.owned("elsewhere") == {}
        stolen = Api(rights)
        for path in (
            "/api/v1/namespaces/kube-system/secrets/x",
            f"/api/v1/namespaces/{SYSTEM}/secrets/x",
            "/api/v1/pods",
        ):
            with pytest.raises(ApiError, match="forbidden"):
                stolen.call("GET", path)
        with pytest.raises(ApiError, match="forbidden"):
            stolen.call("POST", "/apis/apps/v1/namespaces/default/daemonsets?dryRun=All", {"metadata": {"name": "x"}})
        pools.delete("chat", HERE)
        pools.until_gone("chat", HERE)
    finally:
        api.delete(pools.path("elsewhere"))
    assert limited.process.poll() is None
