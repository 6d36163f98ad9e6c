"""Every file of examples/ is applied: pools become Ready, engine pods come out of the real webhook with their pool."""

from __future__ import annotations

import os
import subprocess
import sys
import urllib.error
import urllib.request
from typing import TYPE_CHECKING, Any

import pytest
import yaml
from api import APPLY, MERGE, Api, until
from conftest import NODES, ROOT, SYSTEM, Pools, as_account, rendered
from plane import free_port

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

pytestmark = pytest.mark.cluster

EXAMPLES = ROOT / "examples"
HOOKS = "/apis/admissionregistration.k8s.io/v1/mutatingwebhookconfigurations"
CRDS = "/apis/apiextensions.k8s.io/v1/customresourcedefinitions"
ENGINES = {
    "vllm": "vllm",
    "vllm-lmcache": "lmcache",
    "sglang": "sglang",
    "dynamo-kvbm": "dynamo",
    "dynamo-vllm": "vllm",
    "prefill": "vllm",
    "decode": "vllm",
    "qwen": "vllm",
    "stack-qwen-deployment-vllm": "vllm",
}
"""What the webhook takes each of them for."""


RIGHTS = ("ClusterRole", "ClusterRoleBinding", "Role", "RoleBinding")


def documents(name: str) -> list[dict[str, Any]]:
    return [m for m in yaml.safe_load_all((EXAMPLES / name).read_text()) if m]


def names_with(*kinds: str) -> list[str]:
    found = sorted(p.name for p in EXAMPLES.glob("*.yaml"))
    return [n for n in found if any(m["kind"] in kinds for m in documents(n))]


def path_of(manifest: dict[str, Any]) -> str:
    kind, meta = manifest["kind"], manifest["metadata"]
    group = manifest["apiVersion"]
    root = f"/api/{group}" if "/" not in group else f"/apis/{group}"
    is_namespaced = kind not in ("Namespace", "ClusterRole", "ClusterRoleBinding")
    within = f"/namespaces/{meta.get('namespace', SYSTEM)}" if is_namespaced else ""
    return f"{root}{within}/{kind.lower()}s/{meta['name']}"


def apply(api: Api, manifest: dict[str, Any]) -> dict[str, Any]:
    url = f"{path_of(manifest)}?fieldManager=user&fieldValidation=Strict"
    made: dict[str, Any] = api.call("PATCH", url, manifest, APPLY)
    return made


@pytest.fixture(scope="module")
def webhook(api: Api, rights: Path, kubeconfig: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """A real process, called by the API server under the name of its Service."""
    chart = rendered()
    configuration = next(m for m in chart if m["kind"] == "MutatingWebhookConfiguration")
    (service,) = [m for m in chart if m["kind"] == "Service" and m["metadata"]["name"] == "kvpool-webhook"]
    port, admin_port = free_port(), free_port()
    service["spec"] = {"type": "ExternalName", "externalName": "127.0.0.1"}
    for hook in configuration["webhooks"]:
        hook["clientConfig"]["service"]["port"] = port
    applied = [path_of(service | {"metadata": service["metadata"] | {"namespace": SYSTEM}})]
    applied.append(f"{HOOKS}/{configuration['metadata']['name']}")
    for path, manifest in zip(applied, (service, configuration), strict=True):
        api.call("PATCH", f"{path}?fieldManager=helm&force=true", manifest, APPLY)
    env = {
        **{k: v for k, v in os.environ.items() if k in ("PATH", "HOME", "LANG")},
        "KUBECONFIG": str(as_account(api, kubeconfig, "kvpool-webhook")),
        "KVPOOL_NAMESPACE": SYSTEM,
        "KVPOOL_SIDECAR_IMAGE": "kvpool/sidecar:test",
        "KVPOOL_HTTPS_PORT": str(port),
        "KVPOOL_ADMIN_PORT": str(admin_port),
        "KVPOOL_ISSUER_PORT": str(free_port()),
        "KVPOOL_DRAIN": "0",
    }
    log = tmp_path_factory.mktemp("webhook") / "log"
    with log.open("wb") as out:
        process = subprocess.Popen(
            [sys.executable, "-m", "kvpool_operator", "webhook"], env=env, stdout=out, stderr=out, cwd=ROOT
        )

    def ready() -> bool:
        assert process.poll() is None, log.read_text()[-3000:]
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{admin_port}/readyz", timeout=5) as answer:
                return bool(answer.status == 200)
        except urllib.error.URLError:
            return False

    try:
        until("the webhook is ready", ready)
        yield
    finally:
        process.terminate()
        process.wait(20)
        for path in applied:
            api.delete(path)
        api.delete(f"/api/v1/namespaces/{SYSTEM}/secrets/kvpool-webhook-ca")


@pytest.fixture(scope="module")
def labels(api: Api) -> Iterator[None]:
    """Nodes have what the examples' selectors ask for."""
    wanted: dict[str, str] = {}
    for name in names_with("KVCachePool"):
        for pool in documents(name):
            wanted |= pool["spec"].get("nodes", {}).get("selector", {}).get("matchLabels", {}) if "spec" in pool else {}
    for node in NODES:
        api.call("PATCH", f"/api/v1/nodes/{node}", {"metadata": {"labels": wanted}}, MERGE)
    yield
    for node in NODES:
        api.call("PATCH", f"/api/v1/nodes/{node}", {"metadata": {"labels": dict.fromkeys(wanted)}}, MERGE)


def test_every_example_is_in_the_index_and_is_applied_here():
    listed = (EXAMPLES / "README.md").read_text()
    known = {
        "Deployment",
        "InferenceService",
        "KVCachePool",
        "KVCacheOperation",
        "KVCacheTenant",
        "Namespace",
        "Secret",
        *RIGHTS,
    }
    for name in names_with(*known) + [p.name for p in EXAMPLES.glob("*.yaml")]:
        assert f"]({name})" in listed, name
        assert {m["kind"] for m in documents(name)} <= known, name


@pytest.mark.parametrize("name", names_with("KVCachePool"))
def test_the_pools_of_an_example_are_accepted_and_become_ready(pools: Pools, labels: None, name: str):
    manifests = documents(name)
    for manifest in manifests:
        if manifest["kind"] not in ("KVCacheOperation", "KVCacheTenant"):
            apply(pools.api, manifest)
    for manifest in manifests:
        if manifest["kind"] == "KVCachePool":
            pool = manifest["metadata"]["name"]
            ready = pools.until_ready(pool)
            assert ready["status"]["preflight"]["passed"] == len(NODES)
            owned = pools.owned(pool)
            assert f"daemonsets/{pool}-sidecar" in owned
            tiers = [t for t in manifest["spec"]["tiers"] if "nfs" in t.get("shared", {})]
            assert all(f"persistentvolumeclaims/{pool}-tier-{t['name']}" in owned for t in tiers)
    for manifest in manifests:
        if manifest["kind"] == "Secret":
            pools.api.delete(path_of(manifest))


def test_what_else_an_example_asks_of_a_pool_is_accepted(api: Api):
    for name in names_with("KVCacheOperation", "KVCacheTenant"):
        for manifest in documents(name):
            if manifest["kind"] in ("KVCacheOperation", "KVCacheTenant"):
                url = f"{path_of(manifest)}?fieldManager=user&fieldValidation=Strict&dryRun=All"
                assert api.call("PATCH", url, manifest, APPLY)["metadata"]["name"] == manifest["metadata"]["name"]


def test_the_rights_of_an_example_are_accepted(api: Api):
    for name in names_with(*RIGHTS):
        for manifest in documents(name):
            url = f"{path_of(manifest)}?fieldManager=user&fieldValidation=Strict&dryRun=All"
            assert api.call("PATCH", url, manifest, APPLY)["metadata"]["name"] == manifest["metadata"]["name"]


@pytest.fixture
def team(pools: Pools, webhook: None) -> Api:
    """The namespace and the pool that the engines' examples ask for, and a webhook that the API server has noticed."""
    api = pools.api
    (namespace,) = [m for m in documents("vllm.yaml") if m["kind"] == "Namespace"]
    apply(api, namespace)
    until("the account is there", lambda: api.get("/api/v1/namespaces/team-a/serviceaccounts/default"))
    (pool,) = documents("kvcachepool.yaml")
    apply(api, pool)
    (engine,) = [m for m in documents("vllm.yaml") if m["kind"] == "Deployment"]
    template = engine["spec"]["template"]
    probe = {"spec": template["spec"], "metadata": template["metadata"] | {"name": "probe"}}

    def injects() -> bool:
        made = api.call("POST", "/api/v1/namespaces/team-a/pods?dryRun=All", probe)
        return "kvpool.dev/injected" in made["metadata"]["annotations"]

    until("new pods are injected", injects)
    return api


def as_kserve_makes_it(service: dict[str, Any]) -> dict[str, Any]:
    """A double of KServe's controller: a Deployment with the predictor's labels, annotations and containers."""
    predictor, meta = service["spec"]["predictor"], service["metadata"]
    mine = {"app": f"isvc.{meta['name']}-predictor"}
    own = {**mine, "serving.kserve.io/inferenceservice": meta["name"]}
    return {
        "apiVersion": "apps/v1",
        "kind": "Deployment",
        "metadata": {"name": meta["name"], "namespace": meta["namespace"]},
        "spec": {
            "replicas": predictor.get("minReplicas", 1),
            "selector": {"matchLabels": mine},
            "template": {
                "metadata": {
                    "labels": own | predictor.get("labels", {}),
                    "annotations": predictor.get("annotations", {}),
                },
                "spec": {"containers": predictor["containers"]},
            },
        },
    }


@pytest.fixture(scope="module")
def kserve(api: Api) -> Iterator[None]:
    """KServe's kind, with any fields."""
    anything = {"openAPIV3Schema": {"type": "object", "x-kubernetes-preserve-unknown-fields": True}}
    crd = {
        "apiVersion": "apiextensions.k8s.io/v1",
        "kind": "CustomResourceDefinition",
        "metadata": {"name": "inferenceservices.serving.kserve.io"},
        "spec": {
            "group": "serving.kserve.io",
            "scope": "Namespaced",
            "names": {"kind": "InferenceService", "plural": "inferenceservices", "singular": "inferenceservice"},
            "versions": [{"name": "v1beta1", "served": True, "storage": True, "schema": anything}],
        },
    }
    path = f"{CRDS}/{crd['metadata']['name']}"
    api.call("PATCH", f"{path}?fieldManager=test", crd, APPLY)
    until("it is served", lambda: api.items("/apis/serving.kserve.io/v1beta1/inferenceservices") == [])
    yield
    api.delete(path)


@pytest.mark.parametrize("name", names_with("Deployment", "InferenceService"))
def test_the_engines_of_an_example_get_the_pool(team: Api, kserve: None, name: str):
    made = []
    for manifest in documents(name):
        if manifest["kind"] not in ("Deployment", "InferenceService"):
            continue
        apply(team, manifest)
        deployment = manifest if manifest["kind"] == "Deployment" else as_kserve_makes_it(manifest)
        if deployment is not manifest:
            apply(team, deployment)
            made.append(path_of(manifest))
        made.append(path_of(deployment))
        wanted = deployment["spec"].get("replicas", 1)
        selector = ",".join(f"{k}%3D{v}" for k, v in deployment["spec"]["selector"]["matchLabels"].items())
        pods = f"/api/v1/namespaces/team-a/pods?labelSelector={selector.replace('/', '%2F')}"
        found = until("its pods", lambda pods=pods, wanted=wanted: (p := team.items(pods)) and len(p) == wanted and p)
        for pod in found:
            notes = pod["metadata"]["annotations"]
            assert notes.get("kvpool.dev/injected"), notes.get("kvpool.dev/skip-reason")
            assert notes["kvpool.dev/injected-engine"] == ENGINES[deployment["metadata"]["name"]]
            assert notes["kvpool.dev/pool"] == f"{SYSTEM}/chat"
            has_client = any(c["name"] == "kvpool-client" for c in pod["spec"].get("initContainers", []))
            assert has_client is (notes["kvpool.dev/injected-engine"] != "dynamo")
    for path in made:
        team.delete(path, propagationPolicy="Foreground")
    until("their pods are gone", lambda: team.items("/api/v1/namespaces/team-a/pods") == [], timeout=60)
