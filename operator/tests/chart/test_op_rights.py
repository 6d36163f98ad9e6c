"""Every right that the chart gives, as reviewed: golden/rbac.yaml (`make golden` writes it; read the difference)."""

from __future__ import annotations

import os

import pytest
import yaml
from op_samples import ROOT
from test_op_chart import needs_helm, one, render

GOLDEN = ROOT / "operator" / "tests" / "golden" / "rbac.yaml"
PARTS = ("ClusterRole", "Role", "ClusterRoleBinding", "RoleBinding")


def rights():
    """Without names of charts and versions."""
    found = {}
    for o in render():
        if o["kind"] in PARTS:
            place = o["metadata"].get("namespace")
            name = f"{o['kind']} {place + '/' if place else ''}{o['metadata']['name']}"
            found[name] = {k: v for k, v in o.items() if k in ("rules", "roleRef", "subjects", "aggregationRule")}
    return found


@needs_helm
def test_rights_are_as_reviewed():
    text = yaml.safe_dump(rights(), sort_keys=True, width=110)
    if os.environ.get("KVPOOL_WRITE_GOLDEN"):
        GOLDEN.write_text(text)
    assert GOLDEN.read_text() == text, "rights changed: `make golden`, and read the difference"


@needs_helm
@pytest.mark.parametrize("account", ["kvpool-operator", "kvpool-webhook"])
def test_an_account_has_its_own_roles_and_no_other(account):
    bound = [o for o in render() if o["kind"].endswith("Binding") and account in str(o.get("subjects"))]
    assert {o["kind"] for o in bound} == {"ClusterRoleBinding", "RoleBinding"}
    for o in bound:
        assert o["roleRef"]["name"] == account
        (subject,) = o["subjects"]
        assert (subject["kind"], subject["namespace"]) == ("ServiceAccount", "kvpool-system")


@needs_helm
def test_the_default_accounts_get_nothing():
    for o in render():
        if o["kind"] in ("Deployment", "Pod"):
            spec = o["spec"] if o["kind"] == "Pod" else o["spec"]["template"]["spec"]
            assert spec.get("serviceAccountName") or spec["automountServiceAccountToken"] is False
    assert one(render(), "ServiceAccount", "kvpool-operator")


@needs_helm
def test_for_some_namespaces_the_operator_has_roles_there_and_reads_three_kinds_elsewhere():
    made = render('operator.namespaces=["team-a", "team-b"]')
    wide = one(made, "ClusterRole", "kvpool-operator")["rules"]
    kinds = {resource: rule["verbs"] for rule in wide for resource in rule["resources"]}
    assert kinds.keys() >= {"namespaces", "nodes", "mutatingwebhookconfigurations"}
    assert not {"secrets", "pods", "daemonsets", "kvcachepools"} & kinds.keys()
    usual = one(render(), "ClusterRole", "kvpool-operator")["rules"]
    for namespace in ("team-a", "team-b"):
        (role,) = [o for o in made if o["kind"] == "Role" and o["metadata"]["namespace"] == namespace]
        assert role["rules"] == [rule for rule in usual if rule not in wide]
        (binding,) = [o for o in made if o["kind"] == "RoleBinding" and o["metadata"]["namespace"] == namespace]
        assert binding["roleRef"]["name"] == role["metadata"]["name"]
        assert [s["name"] for s in binding["subjects"]] == ["kvpool-operator"]


@needs_helm
def test_the_policy_admits_the_images_that_the_chart_gives_the_operator():
    def images(*sets):
        policy = one(render(*sets), "ValidatingAdmissionPolicy", "kvpool-operator")
        (variable,) = [v for v in policy["spec"]["variables"] if v["name"] == "images"]
        return variable["expression"].partition(" + ")[0]

    assert images('sidecar.image.tag="7"') == '["kvpool-sidecar:7"]'
    assert images('operator.indexImage="valkey@sha256:aa"') == '["kvpool-sidecar:0.1.0","valkey@sha256:aa"]'
