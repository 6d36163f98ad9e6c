"""What the operator may do, what its pods need, and where secrets go: asked of a real API server."""

from __future__ import annotations

import base64
import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from api import MERGE, Api, ApiError, until
from conftest import ROOT, SYSTEM, Operator, Pools, as_account, namespace, rendered

pytestmark = pytest.mark.cluster

GOLDEN = yaml.safe_load((ROOT / "operator" / "tests" / "golden" / "rbac.yaml").read_text())
REVIEW = "/apis/authorization.k8s.io/v1/selfsubjectrulesreviews"
CANARY = "c4n4ry-7f3b-of-the-index"
Right = tuple[str, str, str, str]
"""Group, resource, name (or empty), verb."""


def rights_of(rules: list[dict[str, Any]]) -> set[Right]:
    return {
        (group, resource, name, verb)
        for rule in rules
        for group in rule.get("apiGroups", [])
        for resource in rule.get("resources", [])
        for name in rule.get("resourceNames") or [""]
        for verb in rule["verbs"]
    }


def asked(api: Api, ns: str) -> set[Right]:
    """Like `kubectl auth can-i --list`, as the user of `api`."""
    review = {"apiVersion": "authorization.k8s.io/v1", "kind": "SelfSubjectRulesReview", "spec": {"namespace": ns}}
    status = api.call("POST", REVIEW, review)["status"]
    assert not status["incomplete"], status
    return rights_of(status["resourceRules"])


@pytest.mark.parametrize("account", ["kvpool-operator", "kvpool-webhook"])
def test_an_account_has_the_reviewed_rights_and_no_others(api: Api, rights: Path, kubeconfig: Path, account: str):
    everybody = {
        ("authorization.k8s.io", "selfsubjectaccessreviews", "", "create"),
        ("authorization.k8s.io", "selfsubjectrulesreviews", "", "create"),
        ("authentication.k8s.io", "selfsubjectreviews", "", "create"),
    }
    wide = rights_of(GOLDEN[f"ClusterRole {account}"]["rules"])
    if account == "kvpool-operator":  # of RELEASE, which has NFS
        wide |= {("", "persistentvolumes", "", v) for v in ("get", "list", "watch", "create", "patch", "delete")}
    within = rights_of(GOLDEN[f"Role {SYSTEM}/{account}"]["rules"])
    user = Api(as_account(api, kubeconfig, account))
    assert asked(user, "default") == wide | everybody
    assert asked(user, SYSTEM) == wide | within | everybody
    assert not {right for right in wide | within if "*" in right}
    with pytest.raises(ApiError, match="forbidden"):
        user.items("/api/v1/secrets")


def dry_run(api: Api, ns: str, template: dict[str, Any]) -> dict[str, Any]:
    metadata = {"generateName": "tried-", "labels": template["metadata"].get("labels", {})}
    spec = template["spec"] | {"serviceAccountName": "default"}  # the accounts are in other namespaces
    pod = {"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": spec}
    made: dict[str, Any] = api.call("POST", f"/api/v1/namespaces/{ns}/pods?dryRun=All&fieldValidation=Strict", pod)
    return made


@pytest.fixture(scope="module")
def restricted(api: Api) -> str:
    name = "restricted"
    namespace(api, name, **{"pod-security.kubernetes.io/enforce": "restricted"})
    until("the account is there", lambda: api.get(f"/api/v1/namespaces/{name}/serviceaccounts/default"))
    return name


def test_every_pod_of_the_chart_is_admitted_where_pod_security_is_restricted(api: Api, restricted: str):
    tried = []
    for manifest in rendered():
        if manifest["kind"] in ("Deployment", "Pod"):
            template = manifest if manifest["kind"] == "Pod" else manifest["spec"]["template"]
            dry_run(api, restricted, template)
            tried.append(manifest["metadata"]["name"])
    assert sorted(tried) == ["kvpool-operator", "kvpool-test-pool", "kvpool-test-webhook", "kvpool-webhook"]


def test_the_index_is_restricted_and_a_sidecar_needs_what_its_page_says(pools: Pools, api: Api, restricted: str):
    pools.apply("chat")
    pools.until_ready("chat")
    owned = pools.owned("chat")
    dry_run(api, restricted, owned["statefulsets/chat-index"]["spec"]["template"])
    with pytest.raises(ApiError) as refused:
        dry_run(api, restricted, owned["daemonsets/chat-sidecar"]["spec"]["template"])
    reported = str(refused.value)
    page = (ROOT / "docs" / "reference" / "security.md").read_text()
    reasons = re.findall(r"(?:^|, )(\w[^,(]*) \(", reported.partition('"restricted:latest": ')[2])
    assert len(reasons) > 2, reported
    for reason in reasons:
        assert f"`{reason}`" in page, (
            f"docs/reference/security.md does not say why a sidecar needs {reason}: {reported}"
        )
    parts = set(re.findall(r'container "([a-z-]+)"', reported)) | set(re.findall(r'containers? "([a-z-]+)"', reported))
    assert "server" not in parts, "what talks to engines and peers needs no right"


def secrets_of(api: Api) -> dict[str, set[str]]:
    """What must not be seen elsewhere, by where it is kept: whole values, and the lines of keys."""
    found: dict[str, set[str]] = {}
    for secret in api.items("/api/v1/secrets"):
        for name, value in (secret.get("data") or {}).items():
            if name.endswith(".crt") or name in ("pool-id", "url"):
                continue  # certificates and names are public; of the URL the password counts
            text = base64.b64decode(value).decode("utf-8", "replace")
            lines = {line for line in text.splitlines() if len(line) >= 16 and "-----" not in line}
            found[f"{secret['metadata']['namespace']}/{secret['metadata']['name']}/{name}"] = lines | {value} - {""}
    return {where: values for where, values in found.items() if values}


def everything(api: Api) -> str:
    """Every object of the cluster but Secrets."""
    texts = []
    for group, resources in resource_lists(api):
        for resource in resources:
            if "list" in resource["verbs"] and resource["name"] != "secrets" and "/" not in resource["name"]:
                texts.append(json.dumps(api.items(f"{group}/{resource['name']}")))
    return "\n".join(texts)


def resource_lists(api: Api) -> list[tuple[str, list[dict[str, Any]]]]:
    groups = ["/api/v1"]
    groups += [f"/apis/{g['preferredVersion']['groupVersion']}" for g in api.call("GET", "/apis")["groups"]]
    return [(group, api.call("GET", group)["resources"]) for group in groups]


def test_secrets_are_in_secrets_and_nowhere_else(pools: Pools, api: Api, operator: Operator):
    url = base64.b64encode(f"redis://me:{CANARY}@redis.example:6380/3".encode()).decode()
    api.call("POST", f"/api/v1/namespaces/{SYSTEM}/secrets", {"metadata": {"name": "theirs"}, "data": {"url": url}})
    try:
        pools.apply("chat", events={"enabled": True})
        pools.until_ready("chat")
        external = {"external": {"urlSecretRef": {"name": "theirs"}}}
        pools.apply("chat", events={"enabled": True}, index=external)
        pools.until_ready("chat")
        # a password that cannot be used is told of, but not told
        broken = base64.b64encode(f"redis://me:{CANARY}@redis.example:notaport/3".encode()).decode()
        api.call("PATCH", f"/api/v1/namespaces/{SYSTEM}/secrets/theirs", {"data": {"url": broken}}, MERGE)
        pools.until_condition("chat", "Ready", "InvalidIndexConfig")
        found = secrets_of(api)
        assert {where.rpartition("/")[2] for where in found} >= {"pool-secret", "managed-index-password", "token"}
        log, objects = operator.log.read_text(), everything(api)
        files = [Path(f"/proc/{operator.process.pid}/{name}") for name in ("cmdline", "environ")]
        process = "".join(file.read_text(errors="replace") for file in files)
        assert "DEBUG" in log, "the log is to be looked at in full"
        assert '"kvcachepools.kvpool.dev"' in objects
        for place, text in (("log", log), ("objects", objects), ("process", process)):
            assert CANARY not in text, place
            for where, values in found.items():
                assert not [v for v in values if v in text], f"{where} is in {place}"
    finally:
        api.delete(f"/api/v1/namespaces/{SYSTEM}/secrets/theirs")


def test_with_network_policies_a_pool_is_closed(api: Api):
    """The API server takes them; who enforces them is the pod network, of which there is none here."""
    for manifest in rendered("networkPolicy.enabled=true", "priorityClass.create=true"):
        if manifest["kind"] == "NetworkPolicy":
            path = f"/apis/networking.k8s.io/v1/namespaces/{SYSTEM}/networkpolicies"
            api.call("POST", f"{path}?dryRun=All&fieldValidation=Strict", manifest)
        if manifest["kind"] == "PriorityClass":
            api.call("POST", "/apis/scheduling.k8s.io/v1/priorityclasses?dryRun=All&fieldValidation=Strict", manifest)
