"""The chart: values against their schema without helm, rendered objects with it."""

import json
from dataclasses import replace
from pathlib import Path

import jsonschema
import kubernetes_validate
import pytest
import yaml
from op_chart import CHART, KUBERNETES, ROOT, SCHEMA, VALUES, helm, needs_helm, one, pod_of, render
from op_samples import inputs

from kvpool_operator.api.annotations import LABEL_POOL
from kvpool_operator.api.fields import HTTP_PORT
from kvpool_operator.api.installation_limits import InstallationLimits
from kvpool_operator.desired.daemonset import sidecar_daemonset
from kvpool_operator.desired.inputs import InstallationConfig
from kvpool_operator.k8s.client import KINDS
from kvpool_operator.observe.observer import CLUSTER_SCOPED_KINDS, OWNED_KINDS
from kvpool_operator.settings import build_parser as operator_parser
from kvpool_operator.settings import read_settings as read_operator_settings
from kvpool_operator.webhook.settings import read_settings


def test_the_values_fit_their_schema():
    jsonschema.Draft7Validator.check_schema(SCHEMA)
    jsonschema.validate(VALUES, SCHEMA)


def _paths(value, schema, at=""):
    """Paths of values that the schema names one by one."""
    while "$ref" in schema or "allOf" in schema:
        (schema,) = schema.get("allOf", [schema])
        if "$ref" in schema:
            schema = SCHEMA["definitions"][schema["$ref"].rpartition("/")[2]]
    for name, inner in schema.get("properties", {}).items():
        yield f"{at}.{name}", name in (value or {})
        if isinstance(value, dict) and name in value:
            yield from _paths(value[name], inner, f"{at}.{name}")


def test_every_value_of_the_schema_has_a_default_to_look_at():
    assert [path for path, there in _paths(VALUES, SCHEMA) if not there] == []


@pytest.mark.parametrize(
    "change",
    [
        {"operater": {}},
        {"operator": {"replica": 3}},
        {"operator": {"replicas": 0}},
        {"operator": {"image": {"repository": "x", "tag": "a b"}}},
        {"webhook": {"failurePolicy": "ignore"}},
        {"webhook": {"timeoutSeconds": 30}},
        {"webhook": {"certificates": {"mode": "own"}}},
        {"sidecar": {"kubeletDir": "/var/../etc"}},
        {"crds": {"install": True}},
        {"operator": {"podDisruptionBudget": {"minAvailable": 1}}},
        {"priorityClass": {"create": True, "value": 2_000_000_000}},
        {"networkPolicy": {"enable": True}},
        {"monitoring": {"podMonitors": {"interval": "often"}}},
        {"monitoring": {"rules": {"runbookUrl": "javascript:0"}}},
        {"test": {"pool": "chat"}},
    ],
)
def test_a_wrong_value_is_refused(change):
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate({**VALUES, **change}, SCHEMA)


def test_the_charts_crds_are_those_of_the_repository():
    ours = {p.name: p.read_text() for p in (CHART / "files" / "crds").glob("*.yaml")}
    made = {p.name: p.read_text() for p in (ROOT / "crds").glob("*.kvpool.dev.yaml")}
    assert made
    assert ours == made, "run `make gen` and commit the result"


CHART_YAML = yaml.safe_load((CHART / "Chart.yaml").read_text())


def test_artifact_hub_is_told_of_every_crd_and_image_with_an_example():
    hub = {name.partition("/")[2]: text for name, text in CHART_YAML["annotations"].items()}
    reported = {(c["kind"], c["version"], c["name"]) for c in yaml.safe_load(hub["crds"])}
    made = [yaml.safe_load(p.read_text()) for p in (CHART / "files" / "crds").glob("*.yaml")]
    assert reported == {
        (c["spec"]["names"]["kind"], c["spec"]["versions"][0]["name"], c["metadata"]["name"]) for c in made
    }
    assert yaml.safe_load(hub["crdsExamples"])[0] == yaml.safe_load((ROOT / "examples" / "minimal.yaml").read_text())
    version = CHART_YAML["appVersion"]
    images = {f"{VALUES[part]['image']['repository']}:{version}" for part in ("operator", "sidecar")}
    assert {i["image"] for i in yaml.safe_load(hub["images"])} == images
    assert hub["license"] == "Apache-2.0"


def test_the_chart_has_the_operators_version():
    chart = CHART_YAML
    assert f'version = "{chart["appVersion"]}"' in (ROOT / "operator" / "pyproject.toml").read_text()


@needs_helm
def test_the_chart_passes_lint():
    done = helm("lint", "--strict", str(CHART))
    assert done.returncode == 0, done.stdout + done.stderr


@needs_helm
@pytest.mark.parametrize(
    "sets",
    [
        (),
        ("webhook.enabled=false", "crds.enabled=false", "rbac.aggregate=false"),
        (
            'global={"imageRegistry": "registry.example/team/", "imagePullSecrets": ["pull"]}',
            'operator.tolerations=[{"operator": "Exists"}]',
            'operator.nodeSelector={"a": "b"}',
            'operator.affinity={"nodeAffinity": {}}',
            'operator.priorityClassName="system-cluster-critical"',
            'operator.podLabels={"x": "1"}',
            'webhook.podAnnotations={"y": "2"}',
            'webhook.namespaceSelector=[{"key": "pool", "operator": "Exists"}]',
        ),
        (
            "networkPolicy.enabled=true",
            'networkPolicy.metricsFrom={"kubernetes.io/metadata.name": "monitoring"}',
            "priorityClass.create=true",
            "monitoring.dashboards.enabled=true",
            'monitoring.dashboards.annotations={"k8s-sidecar-target-directory": "KVPool"}',
            'test={"pool": "kvpool-system/chat", "namespace": "team-a"}',
        ),
    ],
)
def test_rendered_objects_are_what_kubernetes_takes(sets):
    for made in render(*sets):
        for version in KUBERNETES:
            kubernetes_validate.validate(made, version, strict=True)


@needs_helm
def test_unknown_values_are_refused_by_helm_too():
    done = helm("template", "kvpool", str(CHART), "--set", "webhook.replcas=3")
    assert done.returncode != 0
    assert "replcas" in done.stderr


@needs_helm
def test_the_webhook_is_called_by_the_name_its_certificate_has():
    objects = render(namespace="elsewhere")
    hook, other = one(objects, "MutatingWebhookConfiguration", "kvpool-webhook")["webhooks"]
    assert other["clientConfig"] == hook["clientConfig"]
    service = hook["clientConfig"]["service"]
    (container,) = pod_of(one(objects, "Deployment", "kvpool-webhook"))["containers"]
    env = {e["name"]: e.get("value", "elsewhere") for e in container["env"]}
    settings = read_settings([], env)
    assert f"{service['name']}.{service['namespace']}.svc" == settings.dns_name
    assert service["path"] == "/inject"
    assert container["args"] == ["webhook"]
    ports = {p["name"]: p["containerPort"] for p in container["ports"]}
    assert ports == {"https": settings.port, "admin": settings.admin_port}
    role = one(objects, "Role", "kvpool-webhook")
    assert role["rules"][1]["resourceNames"] == [settings.ca_secret]
    cluster_role = one(objects, "ClusterRole", "kvpool-webhook")
    assert cluster_role["rules"][2]["resourceNames"] == [settings.configuration]


@needs_helm
def test_the_operators_settings_are_those_that_it_reads():
    objects = render('sidecar.imagePullSecrets=["a", "b"]', namespace="elsewhere")
    (container,) = pod_of(one(objects, "Deployment", "kvpool-operator"))["containers"]
    assert container["args"] == ["run"]
    env = {e["name"]: e.get("value", "given") for e in container["env"]}
    settings = read_operator_settings([], env)
    limits = InstallationLimits(nfs=False)
    wanted = InstallationConfig("kvpool-sidecar:0.1.0", image_pull_secrets=("a", "b"), limits=limits)
    assert replace(settings.env, issuer_url=wanted.issuer_url) == wanted
    assert settings.address == settings.identity == settings.namespace == "given"
    ports = {"admin": settings.admin_port, "issuer": settings.issuer_port}
    assert {p["name"]: p["containerPort"] for p in container["ports"]} == ports
    (port,) = one(objects, "Service", "kvpool-issuer")["spec"]["ports"]
    assert settings.env.issuer_url == f"https://kvpool-issuer.given.svc:{port['port']}"
    role = one(objects, "Role", "kvpool-operator")
    assert role["rules"][1]["resourceNames"] == [settings.leader_election_id]
    assert role["rules"][2]["resourceNames"] == [settings.webhook]
    known = operator_parser.__code__.co_consts
    flags = {"KVPOOL_" + c.upper().replace("-", "_") for c in known if isinstance(c, str)}
    assert set(env) <= flags, "a variable that nobody reads"


@needs_helm
@pytest.mark.parametrize("name", ["kvpool-operator", "kvpool-webhook"])
def test_our_pods_are_restricted(name):
    pod = pod_of(one(render(), "Deployment", name))
    assert pod["securityContext"]["runAsNonRoot"] is True
    assert pod["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
    for container in pod["containers"]:
        security = container["securityContext"]
        assert security["allowPrivilegeEscalation"] is False
        assert security["capabilities"] == {"drop": ["ALL"]}
        assert security["readOnlyRootFilesystem"] is True
        assert container["resources"]["limits"]["memory"]
    assert pod["enableServiceLinks"] is False
    assert "hostNetwork" not in pod
    assert "volumes" not in pod


@needs_helm
def test_the_agent_is_root_without_any_capability_and_sees_the_kubelets_pods_alone():
    objects = render('sidecar.kubeletDir="/data/kubelet"', 'sidecar.image.tag="7"')
    daemonset = one(objects, "DaemonSet", "kvpool-agent")
    pod = pod_of(daemonset)
    (container,) = pod["containers"]
    assert container["image"] == "kvpool-sidecar:7"
    assert container["command"] == ["kvpool-sidecar", "agent"]
    assert container["securityContext"] == {
        "allowPrivilegeEscalation": False,
        "capabilities": {"drop": ["ALL"]},
        "readOnlyRootFilesystem": True,
        "runAsUser": 0,
        "runAsGroup": 0,
        "runAsNonRoot": False,
    }
    assert pod["volumes"] == [{"name": "pods", "hostPath": {"path": "/data/kubelet/pods", "type": "Directory"}}]
    assert pod["tolerations"] == [{"operator": "Exists"}]
    assert not {"hostNetwork", "hostPID", "hostIPC"} & pod.keys()
    assert pod["serviceAccountName"] == "kvpool-agent"
    assert daemonset["metadata"]["namespace"] == "kvpool-system"
    assert "DaemonSet" not in {o["kind"] for o in render("agent.enabled=false")}


@needs_helm
def test_rights_are_no_wider_than_needed():
    objects = render()
    for role in [o for o in objects if o["kind"] in ("ClusterRole", "Role")]:
        for rule in role["rules"]:
            reported = json.dumps(rule)
            assert "*" not in reported, role["metadata"]["name"]
            assert not {"escalate", "impersonate", "deletecollection"} & set(rule["verbs"])
            assert not {"pods/exec", "nodes/proxy", "serviceaccounts/token"} & set(rule["resources"])
            if "secrets" in rule["resources"]:
                assert not {"list", "watch"} & set(rule["verbs"]), "secrets are read by name"
            if "persistentvolumes" in rule["resources"]:
                assert role["metadata"]["name"] == "kvpool-operator"
            assert rule["apiGroups"] != ["rbac.authorization.k8s.io"] or role["metadata"]["name"] == "kvpool-view"
            assert "bind" not in rule["verbs"]
    operator = one(objects, "ClusterRole", "kvpool-operator")
    pods = next(r for r in operator["rules"] if "pods" in r["resources"])
    assert pods["verbs"] == ["list", "watch"]
    agent = one(objects, "ClusterRole", "kvpool-agent")
    assert agent["rules"] == [{"apiGroups": [""], "resources": ["pods"], "verbs": ["list", "watch"]}]


@needs_helm
def test_pods_are_evicted_only_where_the_chart_allows_it():
    def evicts(*sets):
        rules = one(render(*sets), "ClusterRole", "kvpool-operator")["rules"]
        return [r["verbs"] for r in rules if "pods/eviction" in r["resources"]]

    assert evicts() == []
    assert evicts("operator.restartPods=true") == [["create"]]


@needs_helm
def test_the_operator_may_keep_every_kind_that_it_owns():
    rules = one(render("sidecar.nfs.enabled=true"), "ClusterRole", "kvpool-operator")["rules"]
    for kind in (KINDS[k] for k in OWNED_KINDS + CLUSTER_SCOPED_KINDS):
        group = kind.api_version.rpartition("/")[0]
        rule = next(r for r in rules if group in r["apiGroups"] and kind.plural in r["resources"])
        assert {"get", "list", "create", "patch", "delete"} <= set(rule["verbs"]), kind.name


@needs_helm
def test_cert_manager_keeps_the_certificates_where_it_is_asked_to():
    objects = render('webhook.certificates.mode="CertManager"', namespace="elsewhere")
    made = {(o["kind"], o["metadata"]["name"]): o for o in objects}
    leaf = made["Certificate", "kvpool-webhook"]["spec"]
    assert leaf["dnsNames"] == ["kvpool-webhook.elsewhere.svc"]
    assert leaf["issuerRef"] == {"name": "kvpool-webhook-ca", "kind": "Issuer", "group": "cert-manager.io"}
    authority = made["Certificate", "kvpool-webhook-ca"]["spec"]
    assert authority["isCA"] is True
    assert made["Issuer", "kvpool-webhook-ca"]["spec"]["ca"]["secretName"] == authority["secretName"]
    assert authority["issuerRef"]["name"] == "kvpool-webhook-self"
    hooks = made["MutatingWebhookConfiguration", "kvpool-webhook"]
    assert hooks["metadata"]["annotations"] == {"cert-manager.io/inject-ca-from": "elsewhere/kvpool-webhook"}
    pod = pod_of(made["Deployment", "kvpool-webhook"])
    (container,) = pod["containers"]
    env = {e["name"]: e.get("value", "elsewhere") for e in container["env"]}
    (mount,) = container["volumeMounts"]
    assert read_settings([], env).certificate_dir == mount["mountPath"]
    assert pod["volumes"] == [{"name": mount["name"], "secret": {"secretName": leaf["secretName"]}}]
    # it then neither reads a key from the API nor writes the chart's configuration
    assert ("Secret", "kvpool-webhook-ca") not in made
    assert ("Role", "kvpool-webhook") not in made
    rights = {r for rule in made["ClusterRole", "kvpool-webhook"]["rules"] for r in rule["resources"]}
    assert rights == {"kvcachepools", "namespaces", "mutatingwebhookconfigurations"}
    written = [rule for rule in made["ClusterRole", "kvpool-webhook"]["rules"] if "patch" in rule["verbs"]]
    assert [rule["resourceNames"] for rule in written] == [["kvpool-webhook-selectors"]]


@needs_helm
def test_an_issuer_of_ones_own():
    mine = {"mode": "CertManager", "issuerRef": {"name": "corp", "kind": "ClusterIssuer", "group": "cert-manager.io"}}
    objects = render(f"webhook.certificates={json.dumps(mine)}")
    (leaf,) = [o for o in objects if o["kind"] == "Certificate"]
    assert leaf["spec"]["issuerRef"] == mine["issuerRef"]
    assert not [o for o in objects if o["kind"] == "Issuer"]


@needs_helm
def test_the_api_server_injects_where_it_is_asked_to():
    objects = render("webhook.enabled=false", 'policy={"enabled": true, "poolNamespaces": ["a", "b"]}')
    policy = one(objects, "MutatingAdmissionPolicy", "kvpool-injection")
    assert policy["apiVersion"] == "admissionregistration.k8s.io/v1"
    assert policy["spec"]["failurePolicy"] == "Ignore", "a cache must not stop pods"
    constraints = policy["spec"]["matchConstraints"]
    assert constraints["objectSelector"] == {"matchLabels": {"kvpool.dev/inject": "true"}}
    assert "kvpool-system" in constraints["namespaceSelector"]["matchExpressions"][0]["values"]
    bindings = [o["spec"] for o in objects if o["kind"] == "MutatingAdmissionPolicyBinding"]
    assert [b["paramRef"]["namespace"] for b in bindings] == ["a", "b"]
    assert {b["policyName"] for b in bindings} == {"kvpool-injection"}
    (container,) = pod_of(one(objects, "Deployment", "kvpool-operator"))["containers"]
    env = {e["name"]: e.get("value", "given") for e in container["env"]}
    assert read_operator_settings([], env).injection == "Policy"
    (container,) = pod_of(one(render(), "Deployment", "kvpool-operator"))["containers"]
    assert "KVPOOL_INJECTION" not in {e["name"] for e in container["env"]}


@needs_helm
def test_only_one_of_webhook_and_policy_injects():
    done = helm("template", "kvpool", str(CHART), "--set", "policy.enabled=true")
    assert done.returncode != 0
    assert "set webhook.enabled to false" in done.stderr


@needs_helm
def test_a_crd_is_kept_unless_told_otherwise():
    crd = one(render(), "CustomResourceDefinition", "kvcachepools.kvpool.dev")
    assert crd["metadata"]["annotations"]["helm.sh/resource-policy"] == "keep"
    plain = yaml.safe_load((ROOT / "crds" / "kvcachepools.kvpool.dev.yaml").read_text())
    assert crd["spec"] == plain["spec"]
    crd = one(render("crds.keep=false"), "CustomResourceDefinition", "kvcachepools.kvpool.dev")
    assert "annotations" not in crd["metadata"]
    assert not [o for o in render("crds.enabled=false") if o["kind"] == "CustomResourceDefinition"]


@needs_helm
def test_without_the_webhook_nothing_of_it_is_made():
    assert "kvpool-webhook" not in {o["metadata"]["name"] for o in render("webhook.enabled=false")}


@needs_helm
def test_images_follow_their_values():
    digest = "@sha256:" + "0" * 64
    objects = render(
        'global.imageRegistry="registry.example/team"',
        f'operator.image={{"repository": "op", "tag": "{digest}", "pullPolicy": "Always"}}',
        'sidecar.image.tag="7"',
    )
    for name in ("kvpool-operator", "kvpool-webhook"):
        (container,) = pod_of(one(objects, "Deployment", name))["containers"]
        assert container["image"] == f"registry.example/team/op{digest}"
        assert container["imagePullPolicy"] == "Always"
        env = {e["name"]: e.get("value") for e in container["env"]}
        assert env["KVPOOL_SIDECAR_IMAGE"] == "registry.example/team/kvpool-sidecar:7"


# -- what is there only when it is asked for


def kinds(objects):
    return {o["kind"] for o in objects}


@needs_helm
def test_nothing_that_a_cluster_may_not_know_is_made_unless_asked_for():
    usual = {"ServiceAccount", "ClusterRole", "ClusterRoleBinding", "Role", "RoleBinding", "Deployment", "Service"}
    usual |= {"DaemonSet", "ValidatingAdmissionPolicy", "ValidatingAdmissionPolicyBinding"}
    usual |= {"Secret", "PodDisruptionBudget", "MutatingWebhookConfiguration", "CustomResourceDefinition", "Pod"}
    assert kinds(render()) == usual


@needs_helm
def test_both_deployments_keep_a_replica_while_nodes_are_drained():
    objects = render('operator.podDisruptionBudget.maxUnavailable="50%"')
    for name, most in (("kvpool-operator", "50%"), ("kvpool-webhook", 1)):
        budget = one(objects, "PodDisruptionBudget", name)["spec"]
        assert budget["maxUnavailable"] == most
        pods = one(objects, "Deployment", name)["spec"]["template"]["metadata"]["labels"]
        assert budget["selector"]["matchLabels"].items() <= pods.items()


@needs_helm
def test_network_policies_let_in_who_has_to_and_nobody_else():
    assert "NetworkPolicy" not in kinds(render("networkPolicy.metricsFrom={}"))
    objects = render("networkPolicy.enabled=true", 'networkPolicy.metricsFrom={"team": "sre"}')
    for name, open_ports in (("kvpool-operator", []), ("kvpool-webhook", ["https"])):
        policy = one(objects, "NetworkPolicy", name)["spec"]
        pod = one(objects, "Deployment", name)["spec"]["template"]
        assert policy["podSelector"]["matchLabels"].items() <= pod["metadata"]["labels"].items()
        assert policy["policyTypes"] == ["Ingress"]
        ports = {p["name"] for p in pod["spec"]["containers"][0]["ports"]}
        assert {p["port"] for rule in policy["ingress"] for p in rule["ports"]} == ports
        assert [p["port"] for rule in policy["ingress"] if "from" not in rule for p in rule["ports"]] == open_ports
        metrics, *issuer = [rule for rule in policy["ingress"] if "from" in rule]
        assert [p["port"] for rule in issuer for p in rule["ports"]] == (["issuer"] if "operator" in name else [])
        assert metrics["from"] == [{"namespaceSelector": {"matchLabels": {"team": "sre"}}}]
    env = {
        e["name"]: e.get("value") for e in pod_of(one(objects, "Deployment", "kvpool-operator"))["containers"][0]["env"]
    }
    assert read_operator_settings(
        [], env | dict.fromkeys(("KVPOOL_ADDRESS", "KVPOOL_NAMESPACE"), "x")
    ).env.network_policies


@needs_helm
def test_tenants_are_in_metrics_only_when_asked_for():
    for asked in ("false", "true"):
        (container,) = pod_of(one(render(f"sidecar.metrics.perTenant={asked}"), "Deployment", "kvpool-operator"))[
            "containers"
        ]
        env = {e["name"]: e.get("value", "x") for e in container["env"]}
        assert read_operator_settings([], env).env.metrics_per_tenant is (asked == "true")


@needs_helm
def test_a_priority_class_is_used_where_it_is_made():
    objects = render("priorityClass.create=true", 'webhook.priorityClassName="system-cluster-critical"')
    made = one(objects, "PriorityClass", "kvpool")
    assert (made["value"], made["preemptionPolicy"], made["globalDefault"]) == (1000000, "Never", False)
    assert pod_of(one(objects, "Deployment", "kvpool-operator"))["priorityClassName"] == "kvpool"
    assert pod_of(one(objects, "Deployment", "kvpool-webhook"))["priorityClassName"] == "system-cluster-critical"
    assert "priorityClassName" not in pod_of(one(render(), "Deployment", "kvpool-operator"))


@needs_helm
def test_monitors_find_the_pods_and_their_ports():
    objects = render("monitoring.podMonitors.enabled=true", 'monitoring.podMonitors.labels={"release": "prometheus"}')
    for component in ("operator", "webhook"):
        monitor = one(objects, "PodMonitor", f"kvpool-{component}")
        pod = one(objects, "Deployment", f"kvpool-{component}")["spec"]["template"]
        assert monitor["metadata"]["labels"]["release"] == "prometheus"
        assert monitor["spec"]["selector"]["matchLabels"].items() <= pod["metadata"]["labels"].items()
        (endpoint,) = monitor["spec"]["podMetricsEndpoints"]
        assert endpoint["port"] in {p["name"] for p in pod["spec"]["containers"][0]["ports"]}
    sidecars = one(objects, "PodMonitor", "kvpool-sidecars")["spec"]
    daemonset = sidecar_daemonset(inputs())
    template = daemonset["spec"]["template"]
    assert sidecars["selector"]["matchLabels"].items() <= template["metadata"]["labels"].items()
    (endpoint,) = sidecars["podMetricsEndpoints"]
    (port,) = [p for c in template["spec"]["containers"] for p in c.get("ports", []) if p["name"] == endpoint["port"]]
    assert port["containerPort"] == HTTP_PORT
    sources = [r["sourceLabels"][0] for r in endpoint["relabelings"]]
    assert sources == ["__meta_kubernetes_pod_label_kvpool_dev_pool", "__meta_kubernetes_pod_node_name"]
    assert LABEL_POOL.translate(str.maketrans("./", "__")) in sources[0]
    assert "kvpool-webhook" not in {
        o["metadata"]["name"] for o in render("monitoring.podMonitors.enabled=true", "webhook.enabled=false")
    }


@needs_helm
def test_rules_carry_the_address_of_their_runbook():
    def urls(*sets):
        rules = one(render("monitoring.rules.enabled=true", *sets), "PrometheusRule", "kvpool")["spec"]["groups"]
        found = [rule["annotations"] for group in rules for rule in group["rules"] if "alert" in rule]
        assert all(set(notes) == {"summary", "description", "runbook_url"} for notes in found)
        return {notes["runbook_url"] for notes in found}

    pages = {str(p.relative_to(ROOT)) for p in (ROOT / "docs" / "operate" / "runbooks").glob("*.md")}
    assert urls() == pages
    there = urls('monitoring.rules.runbookUrl="https://runbooks.example/kvpool/"')
    assert there == {f"https://runbooks.example/kvpool/{Path(p).name}" for p in pages}


@needs_helm
def test_rules_reach_prometheus_as_they_were_written():
    groups = one(render("monitoring.rules.enabled=true"), "PrometheusRule", "kvpool")["spec"]["groups"]
    written = yaml.safe_load((CHART / "files" / "alerts.yaml").read_text())["groups"]
    assert [[rule["expr"] for rule in g["rules"]] for g in groups] == [[r["expr"] for r in g["rules"]] for g in written]
    assert "{{ $labels.pool }}" in json.dumps(groups)


@needs_helm
def test_dashboards_are_config_maps_that_grafana_finds():
    made = [o for o in render("monitoring.dashboards.enabled=true") if o["kind"] == "ConfigMap"]
    files = {p.name: p.read_text() for p in (CHART / "files" / "dashboards").glob("*.json")}
    assert {name.removeprefix("kvpool-"): text for o in made for name, text in o["data"].items()} == files
    assert all(o["metadata"]["labels"]["grafana_dashboard"] == "1" for o in made)
