"""An API server takes every object of the chart, to the last field: also those for cert-manager and Prometheus."""

from __future__ import annotations

import copy
import json
from typing import TYPE_CHECKING, Any

import foreign
import pytest
from api import APPLY, Api, ApiError, until
from conftest import SYSTEM, rendered

if TYPE_CHECKING:
    from pathlib import Path

EVERYTHING = {
    "monitoring": {
        "podMonitors": {"enabled": True, "labels": {"release": "prometheus"}},
        "rules": {"enabled": True, "labels": {"release": "prometheus"}, "runbookUrl": "https://runbooks.example/"},
        "dashboards": {"enabled": True},
    },
    "networkPolicy": {"enabled": True, "metricsFrom": {"team": "monitoring"}},
    "priorityClass": {"create": True},
    "webhook": {"certificates": {"mode": "CertManager"}},
    "test": {"pool": f"{SYSTEM}/chat"},
}
OTHERS = {"Certificate", "Issuer", "PodMonitor", "PrometheusRule"}


@pytest.fixture(scope="module")
def with_others(api: Api, tmp_path_factory: pytest.TempPathFactory) -> Api:
    """The API server knows others' kinds as well."""
    empty: Path = tmp_path_factory.mktemp("no-module")
    for module in (foreign.CERT_MANAGER, foreign.PROMETHEUS_OPERATOR):
        for crd in foreign.crds(module, empty):
            name = crd["metadata"]["name"]
            path = f"/apis/apiextensions.k8s.io/v1/customresourcedefinitions/{name}"
            api.call("PATCH", f"{path}?fieldManager=test&force=true", crd, APPLY)
            served = (
                f"/apis/{crd['spec']['group']}/{crd['spec']['versions'][0]['name']}/{crd['spec']['names']['plural']}"
            )
            until(f"{name} is served", lambda served=served: api.items(served) == [])  # type: ignore[misc]
    return api


def path_of(api: Api, manifest: dict[str, Any]) -> str:
    """Where the API keeps such an object, as it says itself."""
    version = manifest["apiVersion"]
    root = f"/apis/{version}" if "/" in version else f"/api/{version}"
    kinds = {r["kind"]: r for r in api.call("GET", root)["resources"] if "/" not in r["name"]}
    kind = kinds[manifest["kind"]]
    namespace = manifest["metadata"].get("namespace", SYSTEM)
    within = f"/namespaces/{namespace}" if kind["namespaced"] else ""
    return f"{root}{within}/{kind['name']}/{manifest['metadata']['name']}"


def refusal(api: Api, manifest: dict[str, Any]) -> str:
    """What the API server says against it; it is not kept, and a field that is not known counts."""
    try:
        path = f"{path_of(api, manifest)}?fieldManager=helm&force=true&dryRun=All&fieldValidation=Strict"
        api.call("PATCH", path, manifest, APPLY)
    except ApiError as e:
        return f"{manifest['kind']} {manifest['metadata']['name']}: {e}"
    return ""


@pytest.mark.parametrize("values", [{}, EVERYTHING], ids=["defaults", "everything"])
def test_the_api_server_takes_every_object_of_the_chart(with_others: Api, values: dict[str, Any]):
    made = rendered(*(f"{key}={json.dumps(value)}" for key, value in values.items()))
    assert [why for m in made if (why := refusal(with_others, m))] == []
    assert ({m["kind"] for m in made} & OTHERS) == (OTHERS if values else set())


@pytest.mark.parametrize("kind", sorted(OTHERS))
def test_a_wrong_field_of_anothers_kind_would_be_refused(with_others: Api, kind: str):
    made = rendered(*(f"{key}={json.dumps(value)}" for key, value in EVERYTHING.items()))
    manifest = copy.deepcopy(next(m for m in made if m["kind"] == kind))
    manifest["spec"]["notAField"] = 1
    assert "notAField" in refusal(with_others, manifest)
