"""Fault 8: the webhook is down, does not answer, or is not trusted. Pods start without the pool, and that is told."""

from __future__ import annotations

import base64
import json
import time
from typing import TYPE_CHECKING, Any

import pytest
import system
from kubectl import get, kubectl, until
from loadpod import IMAGE

if TYPE_CHECKING:
    from collections.abc import Iterator

pytestmark = [pytest.mark.cluster, pytest.mark.full, pytest.mark.usefixtures("load_pool")]

CONFIGURATION = "mutatingwebhookconfigurations/kvpool-webhook"
TIMEOUT_S = 3  # webhook.timeoutSeconds of the chart
OVERHEAD_S = 4  # kubectl's start and the API server on a machine with two processors


@pytest.fixture(autouse=True)
def afterwards() -> Iterator[None]:
    yield
    kubectl("-n", "team-a", "delete", "pod", "-l", "app=opted-in", "--wait=true", "--timeout=60s")
    system.scale("kvpool-webhook", 2)


def make_pod(name: str) -> float:
    """A pod that opts in and would run without the pool, too; seconds that its creation took."""
    container = {
        "name": "engine",
        "image": IMAGE,
        "imagePullPolicy": "IfNotPresent",
        "command": ["sleep", "3600"],
        "securityContext": {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}},
    }
    safe = {"runAsNonRoot": True, "runAsUser": 12345, "seccompProfile": {"type": "RuntimeDefault"}}
    notes = {"kvpool.dev/pool": system.KEY, "kvpool.dev/engine": "none"}
    made = {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {
            "name": name,
            "namespace": "team-a",
            "labels": {"kvpool.dev/inject": "true", "app": "opted-in"},
            "annotations": notes,
        },
        "spec": {"containers": [container], "securityContext": safe, "terminationGracePeriodSeconds": 1},
    }
    started = time.monotonic()
    kubectl("create", "-f", "-", stdin=json.dumps(made))
    return time.monotonic() - started


def pod(name: str) -> dict[str, Any]:
    found: dict[str, Any] = get("pod", "-n", "team-a", name)
    return found


def is_injected(name: str) -> bool:
    return "kvpool.dev/injected" in (pod(name)["metadata"].get("annotations") or {})


def starts_without_the_pool(name: str) -> None:
    took = make_pod(name)
    assert not is_injected(name)
    assert took < TIMEOUT_S + OVERHEAD_S
    until("the pod runs", lambda: system.pod_ready(pod(name)), 60)
    print(f"{name}: made in {took:.1f} s")


def test_a_pod_that_is_made_while_no_webhook_runs_starts_and_is_named_in_the_status():
    system.scale("kvpool-webhook", 0)
    starts_without_the_pool("while-down")
    told = "InjectionReady tells that the webhook is down"
    until(told, lambda: injection()["status"] == "False" and "webhook" in injection()["message"], 60)
    system.scale("kvpool-webhook", 2)
    until("the pod is counted and named", lambda: "while-down" in injection()["message"], 60)
    assert system.pool()["status"]["pods"]["notInjected"] == 1
    make_pod("while-up")
    assert is_injected("while-up")


def test_a_webhook_that_hangs_costs_its_timeout_and_nothing_else():
    frozen = [(node, system.processes(node, "kvpool", "webhook")) for node in system.workers()]
    assert sum(len(found) for _, found in frozen) >= 2
    try:
        for node, found in frozen:
            if found:
                system.signal(node, "STOP", found)
        starts_without_the_pool("while-hung")
    finally:
        for node, found in frozen:
            if found:
                system.on_node(node, "kill", "-CONT", *map(str, found), check=False)
    until("both answer again", lambda: sum(map(system.pod_ready, system.pods(system.WEBHOOK))) == 2, 120)
    make_pod("after-hung")
    assert is_injected("after-hung")


def test_an_authority_that_is_not_the_webhooks_costs_injection_until_it_is_mended():
    right = get(CONFIGURATION)["webhooks"][0]["clientConfig"]["caBundle"]
    system.scale("kvpool-webhook", 2)
    other = get("configmap", "-n", "kube-system", "kube-root-ca.crt")["data"]["ca.crt"]
    wrong = base64.b64encode(other.encode()).decode()
    patch = [{"op": "replace", "path": "/webhooks/0/clientConfig/caBundle", "value": wrong}]
    kubectl("patch", CONFIGURATION, "--type=json", "-p", json.dumps(patch))
    starts_without_the_pool("while-untrusted")
    until(
        "the webhook put its own authority back",
        lambda: get(CONFIGURATION)["webhooks"][0]["clientConfig"]["caBundle"] == right,
        120,
    )

    made = iter(range(100))

    def next_is_injected() -> bool:  # the API server uses the new bundle within moments
        name = f"after-untrusted-{next(made)}"
        make_pod(name)
        return is_injected(name)

    until("pods are injected again", next_is_injected, 60, every=2)


def injection() -> dict[str, Any]:
    conditions = system.pool()["status"]["conditions"]
    found: dict[str, Any] = next(c for c in conditions if c["type"] == "InjectionReady")
    return found
