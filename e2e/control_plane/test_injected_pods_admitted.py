"""A pod that a namespace admits is admitted with the pool in it, too: LimitRange, ResourceQuota, Pod Security, QoS."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
from api import Api, ApiError, until
from conftest import SYSTEM, Pools, as_account, rendered
from webhooks import INJECTED, Team, Webhooks, engine, serve

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

pytestmark = pytest.mark.cluster

SAME = {"cpu": "2", "memory": "4Gi"}
GUARANTEED = {"requests": SAME, "limits": SAME}
BURSTABLE = {"requests": {"cpu": "1", "memory": "1Gi"}, "limits": {"cpu": "4", "memory": "4Gi"}}
MIN = {"type": "Container", "min": {"cpu": "1", "memory": "1Gi"}}
MAX = {"type": "Container", "max": {"cpu": "4", "memory": "4Gi"}}
RATIO = {"type": "Container", "maxLimitRequestRatio": {"cpu": "4", "memory": "4"}}
DEFAULTS = {
    "type": "Container",
    "default": {"cpu": "3", "memory": "3Gi"},
    "defaultRequest": {"cpu": "2", "memory": "2Gi"},
    "min": {"cpu": "1", "memory": "1Gi"},
}
OF_PODS = {"type": "Pod", "min": {"cpu": "1"}, "max": {"cpu": "4", "memory": "4Gi"}}
QUOTA = {"requests.cpu": "2", "requests.memory": "4Gi", "limits.cpu": "4", "limits.memory": "4Gi", "pods": "1"}


@pytest.fixture(scope="module")
def team(api: Api) -> Team:
    return Team(api, "team-limits", f"{SYSTEM}/chat")


@pytest.fixture(scope="module")
def webhooks(
    api: Api, team: Team, rights: Path, kubeconfig: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Webhooks]:
    account = as_account(api, kubeconfig, "kvpool-webhook")
    yield from serve(api, rendered(), account, tmp_path_factory.mktemp("webhooks"), SYSTEM)


@pytest.fixture
def ready(pools: Pools, webhooks: Webhooks, team: Team) -> None:
    pools.apply("chat")
    team.until_injecting()


@pytest.fixture
def limits(api: Api, team: Team) -> Iterator[Any]:
    """Make a LimitRange or a ResourceQuota of the namespace."""
    made = []

    def make(plural: str, spec: dict[str, Any]) -> None:
        path = f"/api/v1/namespaces/{team.name}/{plural}"
        api.call("POST", path, {"metadata": {"name": "limits"}, "spec": spec})
        made.append(f"{path}/limits")
        if plural == "resourcequotas":
            until("the quota is known", lambda: "hard" in api.get(made[-1])["status"])

    yield make
    for path in made:
        api.delete(path)


def pod_with(team: Team, *, injected: bool, **spec: Any) -> dict[str, Any]:
    pod = engine("e", f"{SYSTEM}/chat")
    pod["metadata"]["labels"] = {"kvpool.dev/inject": "true"} if injected else {}
    pod["spec"]["containers"][0] |= spec.pop("container", {})
    pod["spec"] |= spec
    made: dict[str, Any] = team.api.call("POST", f"{team.pods}?dryRun=All", pod)
    assert (INJECTED in made["metadata"]["annotations"]) is injected
    return made


@pytest.mark.parametrize("rule", [MIN, MAX, RATIO, DEFAULTS, OF_PODS], ids=["min", "max", "ratio", "default", "pod"])
def test_a_limit_range_that_admits_a_pod_admits_it_with_the_pool(
    ready: None, team: Team, limits: Any, rule: dict[str, Any]
):
    limits("limitranges", {"limits": [rule]})
    until_in_use(team)
    admitted = 0
    for resources in (GUARANTEED, BURSTABLE, {"limits": SAME}, {}):
        spec = {"container": {"resources": resources}}
        plain = admitted_or_none(team, injected=False, **spec)
        pod = admitted_or_none(team, injected=True, **spec)
        assert (pod is None) == (plain is None), resources
        if pod is not None and plain is not None:
            admitted += 1
            assert pod["status"]["qosClass"] == plain["status"]["qosClass"]
            assert pod["spec"]["containers"][0].get("resources") == plain["spec"]["containers"][0].get("resources")
    assert admitted >= 2


def admitted_or_none(team: Team, *, injected: bool, **spec: Any) -> dict[str, Any] | None:
    try:
        return pod_with(team, injected=injected, **spec)
    except ApiError as refused:
        if refused.status != 403:
            raise
        return None


def until_in_use(team: Team) -> None:
    """API servers read a LimitRange with some delay: until a pod that all of these refuse is refused."""
    tiny = {"requests": {"cpu": "1m", "memory": "1Mi"}, "limits": {"cpu": "100", "memory": "1Ti"}}
    until(
        "the limits are in use", lambda: admitted_or_none(team, injected=False, container={"resources": tiny}) is None
    )


def test_a_quota_that_has_room_for_a_pod_has_room_for_it_with_the_pool(ready: None, team: Team, limits: Any):
    limits("resourcequotas", {"hard": QUOTA})
    for resources in (GUARANTEED, BURSTABLE):
        pod_with(team, injected=False, container={"resources": resources})
        pod_with(team, injected=True, container={"resources": resources})
    with pytest.raises(ApiError, match="must specify"):
        pod_with(team, injected=False)


def test_a_guaranteed_pod_stays_one_under_the_restricted_standard_with_two_engines_and_a_limit_of_the_pod(
    ready: None, api: Api, team: Team
):
    enforce = {"metadata": {"labels": {"pod-security.kubernetes.io/enforce": "restricted"}}}
    api.call("PATCH", f"/api/v1/namespaces/{team.name}", enforce, "application/merge-patch+json")
    security = {
        "allowPrivilegeEscalation": False,
        "runAsNonRoot": True,
        "capabilities": {"drop": ["ALL"]},
        "seccompProfile": {"type": "RuntimeDefault"},
    }
    container = {"resources": GUARANTEED, "securityContext": security}
    first = engine("e", "")["spec"]["containers"][0]
    sidecar = first | container | {"name": "second", "restartPolicy": "Always"}
    spec = {"container": container, "initContainers": [sidecar]}
    try:
        assert pod_with(team, injected=False, **spec)["status"]["qosClass"] == "Guaranteed"
        pod = pod_with(team, injected=True, **spec)
    finally:
        nothing = {"metadata": {"labels": {"pod-security.kubernetes.io/enforce": None}}}
        api.call("PATCH", f"/api/v1/namespaces/{team.name}", nothing, "application/merge-patch+json")
    assert pod["status"]["qosClass"] == "Guaranteed"
    assert [c["name"] for c in pod["spec"]["initContainers"]] == ["kvpool-client", "second"]
    assert pod["spec"]["initContainers"][0]["resources"]["limits"] == {"cpu": "1999m", "memory": "4Gi"}
    of_pod = {"resources": {"limits": {"cpu": "8", "memory": "12Gi"}}}
    assert pod_with(team, injected=True, **of_pod)["spec"]["resources"]["limits"]["memory"] == "12Gi"
