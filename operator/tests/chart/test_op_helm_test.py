"""The pods of `helm test`, the install notes, and the read access of users."""

import os
import subprocess
import sys

import kubernetes_validate
import pytest
import yaml
from op_chart import CHART, KUBERNETES, needs_helm, one, render

from kvpool_operator.api.v1alpha1 import KVCachePool
from kvpool_operator.injection.annotations import opted_in, parse_annotations
from kvpool_operator.injection.mutator import InjectionSettings, inject


@needs_helm
def test_the_test_pods_are_restricted_and_have_no_rights():
    pods = [o for o in render('test.pool="kvpool-system/chat"') if o["kind"] == "Pod"]
    assert {p["metadata"]["name"] for p in pods} == {"kvpool-test-webhook", "kvpool-test-pool"}
    for pod in pods:
        assert pod["metadata"]["annotations"]["helm.sh/hook"] == "test"
        # helm deletes on success before --logs, or a user, can read
        assert pod["metadata"]["annotations"]["helm.sh/hook-delete-policy"] == "before-hook-creation"
        assert pod["spec"]["automountServiceAccountToken"] is False
        assert pod["spec"]["securityContext"]["runAsNonRoot"] is True
        (container,) = pod["spec"]["containers"]
        assert container["securityContext"]["capabilities"] == {"drop": ["ALL"]}


@needs_helm
def test_the_webhooks_test_pod_runs_the_script_that_is_tested():
    pod = one(render('test.pool="kvpool-system/chat"', 'test.namespace="team-a"'), "Pod", "kvpool-test-webhook")
    (container,) = pod["spec"]["containers"]
    assert container["args"] == [(CHART / "files" / "tests" / "webhook.py").read_text()]
    assert {e["name"]: e["value"] for e in container["env"]} == {
        "TEST_URL": "https://kvpool-webhook.kvpool-system.svc/inject",
        "TEST_NAMESPACE": "team-a",
        "TEST_POOL": "kvpool-system/chat",
    }


@needs_helm
def test_the_test_pod_is_one_that_the_webhook_injects():
    pod = one(render('test.pool="kvpool-system/chat"'), "Pod", "kvpool-test-pool")
    wishes = parse_annotations(pod)
    assert (wishes.pool_namespace, wishes.pool_name, wishes.engine) == ("kvpool-system", "chat", "none")
    assert opted_in(pod)
    assert pod["metadata"]["namespace"] == "default"
    injected = inject(pod, wishes, InjectionSettings("kvpool-system/chat", 256, 4 << 30, "{}", "kvpool-sidecar:1")).pod
    kubernetes_validate.validate(injected, KUBERNETES[-1], strict=True)
    env = {e["name"]: e.get("value") for e in injected["spec"]["containers"][0]["env"]}
    assert env["PYTHONPATH"]
    assert injected["spec"]["containers"][0]["args"] == [(CHART / "files" / "tests" / "pool.py").read_text()]


@pytest.mark.parametrize(
    ("notes", "pool", "code", "words"),
    [
        ("", "kvpool-system/chat", 1, "was not asked"),
        ("", "", 1, "was not asked"),
        ('kvpool.dev/skip-reason="pool-not-found: no pool"', "", 0, "said: pool-not-found: no pool"),
        ('kvpool.dev/skip-reason="namespace-not-allowed: x"', "a/b", 1, "not injected: namespace-not-allowed"),
    ],
)
def test_the_test_says_what_is_wrong(tmp_path, notes, pool, code, words):
    path = tmp_path / "annotations"
    path.write_text(f'a="b"\n{notes}\n')
    env = {**os.environ, "TEST_ANNOTATIONS": str(path), "TEST_POOL": pool}
    script = [sys.executable, str(CHART / "files" / "tests" / "pool.py")]
    done = subprocess.run(script, env=env, capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, words in done.stdout + done.stderr) == (code, True), done


def test_the_notes_name_the_next_commands():
    notes = (CHART / "templates" / "NOTES.txt").read_text()
    manifest = (
        notes.partition("<<'EOF'\n")[2].partition("EOF\n")[0].replace("{{ .Release.Namespace }}", "kvpool-system")
    )
    assert KVCachePool.parse(yaml.safe_load(manifest)).key == "kvpool-system/chat"
    assert "pod-security.kubernetes.io/enforce=privileged" in notes
    assert "--for=condition=Ready" in notes
    assert '"kvpool.dev/inject": "true"' in notes


@needs_helm
def test_who_may_view_a_namespace_may_view_every_kind_of_ours_and_change_none():
    (rule,) = one(render(), "ClusterRole", "kvpool-view")["rules"]
    kinds_of_ours = {o["spec"]["names"]["plural"] for o in render() if o["kind"] == "CustomResourceDefinition"}
    assert {r for r in rule["resources"] if "/" not in r} == kinds_of_ours
    assert {r.removesuffix("/status") for r in rule["resources"]} == kinds_of_ours
    assert rule["verbs"] == ["get", "list", "watch"]
