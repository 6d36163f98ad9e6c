"""The webhook as the API server meets it: real TLS, real HTTP, a cluster in memory."""

import asyncio
import base64
import io
import json
import os
import socket
import ssl
import sys
from asyncio.subprocess import PIPE, STDOUT
from contextlib import AsyncExitStack
from dataclasses import replace
from pathlib import Path

import pytest
from aiohttp import ClientSession, TCPConnector

from kvpool_operator.errors import ConflictError
from kvpool_operator.k8s.client import ObjectRef, ref
from kvpool_operator.k8s.merge_patch import merge_patch
from kvpool_operator.pki.certificates import CertPolicy
from kvpool_operator.webhook.api_access import WebhookApiClient
from kvpool_operator.webhook.server import MAX_BODY, serve
from kvpool_operator.webhook.settings import WebhookSettings, read_settings

REVIEW = {
    "apiVersion": "admission.k8s.io/v1",
    "kind": "AdmissionReview",
    "request": {
        "uid": "7",
        "operation": "CREATE",
        "kind": {"group": "", "version": "v1", "kind": "Pod"},
        "namespace": "team-a",
        "object": {
            "metadata": {"labels": {"kvpool.dev/inject": "true"}, "annotations": {"kvpool.dev/pool": "chat"}},
            "spec": {"containers": [{"name": "engine", "image": "x", "command": ["vllm", "serve", "m"]}]},
        },
    },
}
POOL = {
    "metadata": {"namespace": "kvpool-system", "name": "chat"},
    "spec": {
        "tiers": [{"name": "nvme", "local": {"path": "/mnt/nvme/kv", "capacity": "1Gi"}}],
        "injection": {
            "allowedNamespaces": {"from": "Selector", "selector": {"matchLabels": {"kvpool.dev/pool-access": "chat"}}}
        },
    },
}


def free_port():
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


def settings():
    return WebhookSettings(
        address="127.0.0.1",
        port=free_port(),
        admin_port=free_port(),
        namespace="kvpool-system",
        service="kvpool-webhook",
        configuration="kvpool-webhook",
        ca_secret="kvpool-webhook-ca",
        certificate_dir="",
        policy=CertPolicy(),
        certificate_poll_s=60,
        sidecar_image="kvpool-sidecar:0.1.0",
        sidecar_pull_policy="IfNotPresent",
        drain_s=0,
        log_level="INFO",
    )


class Cluster:
    """The part of the API that the webhook asks, in memory."""

    def __init__(self):
        self.version = 1
        self.objects = {
            ObjectRef("Namespace", "", "team-a"): {"metadata": {"labels": {"kvpool.dev/pool-access": "chat"}}},
            ObjectRef("MutatingWebhookConfiguration", "", "kvpool-webhook"): {
                "metadata": {"resourceVersion": "1"},
                "webhooks": [{"name": "pods.kvpool.dev", "clientConfig": {"service": {"name": "kvpool-webhook"}}}],
            },
        }
        self.listed = asyncio.Event()
        self.listed.set()

    async def get(self, target):
        return self.objects.get(target)

    async def list(self, kind):
        assert kind == "KVCachePool"
        await self.listed.wait()
        return [POOL]

    async def create(self, manifest):
        if (target := ref(manifest)) in self.objects:
            raise ConflictError
        self.objects[target] = manifest
        self._touch(target)

    async def patch(self, target, patch):
        if patch["metadata"]["resourceVersion"] != self.objects[target]["metadata"]["resourceVersion"]:
            raise ConflictError
        self.objects[target] = merge_patch(self.objects[target], patch)
        self._touch(target)

    def _touch(self, target):
        self.version += 1
        self.objects[target]["metadata"]["resourceVersion"] = str(self.version)

    @property
    def trusted(self):
        (hook,) = self.objects[ObjectRef("MutatingWebhookConfiguration", "", "kvpool-webhook")]["webhooks"]
        return base64.b64decode(hook["clientConfig"]["caBundle"]).decode()


class Caller:
    """What the API server does: the bundle of the configuration, the Service's name."""

    def __init__(self, where, cluster):
        self.where, self.cluster = where, cluster

    async def __aenter__(self):
        self.session = ClientSession()
        return self

    async def __aexit__(self, *_):
        await self.session.close()

    async def admin(self, path):
        async with self.session.get(f"http://127.0.0.1:{self.where.admin_port}{path}") as r:
            return r.status, await r.text()

    async def ready(self):
        for _ in range(2000):
            status, _text = await self.admin("/readyz")
            if status == 200:
                return
            await asyncio.sleep(0.005)
        raise AssertionError(await self.admin("/readyz"))

    async def post(self, body, path="/inject"):
        tls = TCPConnector(ssl=ssl.create_default_context(cadata=self.cluster.trusted))
        url = f"https://127.0.0.1:{self.where.port}{path}"
        async with (
            ClientSession(connector=tls) as session,
            session.post(url, data=body, server_hostname=self.where.dns_name) as r,
        ):
            return r.status, await r.text()


@pytest.fixture
async def running():
    where, cluster = settings(), Cluster()
    store = WebhookApiClient(cluster, where)
    async with serve(where, store, store, store) as server, Caller(where, cluster) as caller:
        await caller.ready()
        yield server, caller


async def test_a_pod_goes_in_and_a_patch_comes_out(running):
    _, caller = running
    status, text = await caller.post(json.dumps(REVIEW))
    assert status == 200
    response = json.loads(text)["response"]
    assert response["allowed"] is True
    paths = {o["path"] for o in json.loads(base64.b64decode(response["patch"]))}
    assert "/spec/initContainers" in paths


@pytest.mark.parametrize("body", [b"", b"{", b"[]", b"null", b"\xff\xfe", b"[" * 100_000, b'{"request": {"uid": 1}}'])
async def test_nonsense_is_answered_and_forgotten(running, body):
    _, caller = running
    status, _ = await caller.post(body)
    assert status == 400
    assert (await caller.post(json.dumps(REVIEW)))[0] == 200


HELM_TEST = Path(__file__).resolve().parents[3] / "charts" / "kvpool" / "files" / "tests" / "webhook.py"


async def helm_test(url, namespace, pool):
    """The script of `helm test`, as its pod runs it: the text is an argument. Status, and all that it printed."""
    env = os.environ | {"TEST_URL": url, "TEST_NAMESPACE": namespace, "TEST_POOL": pool}
    script = await asyncio.create_subprocess_exec(
        sys.executable, "-c", HELM_TEST.read_text(), env=env, stdout=PIPE, stderr=STDOUT
    )
    reported, _ = await script.communicate()
    return script.returncode, reported.decode()


@pytest.mark.parametrize(
    ("namespace", "pool", "status", "words"),
    [
        ("team-a", "kvpool-system/chat", 0, "would be injected with pool kvpool-system/chat"),
        ("team-a", "kvpool-system/gone", 1, "would not be injected: kvpool: not injected: pool-not-found"),
        ("team-b", "kvpool-system/chat", 1, "namespace-not-allowed"),
        ("team-a", "", 0, "was asked and said: kvpool: not injected: pool-not-found"),
    ],
)
async def test_the_script_of_helm_test_prints_what_would_be_done_with_a_pod(running, namespace, pool, status, words):
    _, caller = running
    done, reported = await helm_test(f"https://127.0.0.1:{caller.where.port}/inject", namespace, pool)
    assert (done, words in reported) == (status, True), reported


async def test_the_script_of_helm_test_says_that_nothing_answered(running):
    _, caller = running
    for port, path in ((free_port(), "inject"), (caller.where.port, "elsewhere")):
        done, reported = await helm_test(f"https://127.0.0.1:{port}/{path}", "team-a", "")
        assert (done, "gave no answer" in reported) == (1, True), reported


async def test_a_body_above_the_limit_is_refused(running):
    _, caller = running
    status, _ = await caller.post(io.BytesIO(b" " * (MAX_BODY + 1)))
    assert status == 413


async def test_only_one_path_is_served_over_tls(running):
    _, caller = running
    assert (await caller.post("{}", "/"))[0] == 404
    assert (await caller.post("{}", "/metrics"))[0] == 404


async def test_metrics_count_outcomes(running):
    _, caller = running
    await caller.post(json.dumps(REVIEW))
    await caller.post("{")
    _, text = await caller.admin("/metrics")
    assert 'kvpool_webhook_reviews_total{outcome="injected"} 1.0' in text
    assert 'kvpool_webhook_reviews_total{outcome="bad-request"} 1.0' in text
    assert "kvpool_webhook_pools 1.0" in text
    for what in ("certificate", "authority"):
        expires = next(line for line in text.splitlines() if line.startswith(f"kvpool_webhook_{what}_expiry"))
        assert float(expires.split()[1]) > 1.7e9


async def test_a_namespace_that_the_pool_does_not_admit_is_told(running):
    _, caller = running
    review = {**REVIEW, "request": {**REVIEW["request"], "namespace": "team-b"}}
    _, text = await caller.post(json.dumps(review))
    assert "namespace-not-allowed" in json.loads(text)["response"]["warnings"][0]


async def test_replicas_that_start_together_end_up_with_one_authority():
    cluster = Cluster()
    places = [settings(), settings()]
    async with AsyncExitStack() as stack:
        callers = []
        for where in places:
            store = WebhookApiClient(cluster, where)
            await stack.enter_async_context(serve(where, store, store, store))
            callers.append(await stack.enter_async_context(Caller(where, cluster)))
        for caller in callers:
            await caller.ready()
            assert (await caller.post(json.dumps(REVIEW)))[0] == 200
    assert cluster.trusted.count("BEGIN CERTIFICATE") == 1


async def test_not_ready_before_the_pools_were_read():
    where, cluster = settings(), Cluster()
    cluster.listed.clear()
    store = WebhookApiClient(cluster, where)
    async with serve(where, store, store, store), Caller(where, cluster) as caller:
        assert (await caller.admin("/healthz"))[0] == 200
        status, text = await caller.admin("/readyz")
        assert status == 503
        assert "pools" in text
        cluster.listed.set()
        await caller.ready()


async def test_an_ending_process_takes_itself_out_of_the_service(running):
    server, caller = running
    server.draining = True
    assert (await caller.admin("/readyz"))[0] == 503
    assert (await caller.post(json.dumps(REVIEW)))[0] == 200


def test_settings_come_from_flags_then_environment_then_defaults():
    env = {"KVPOOL_NAMESPACE": "n", "KVPOOL_SIDECAR_IMAGE": "i", "KVPOOL_HTTPS_PORT": "1"}
    read = read_settings(["--https-port", "2", "--drain", "0.5"], env)
    assert (read.namespace, read.sidecar_image, read.port, read.admin_port, read.drain_s) == ("n", "i", 2, 8081, 0.5)
    assert read.dns_name == "kvpool-webhook.n.svc"
    assert read.policy == CertPolicy()
    short = read_settings(["--ca-life", "9", "--certificate-life", "4", "--ca-settle", "1.5"], env).policy
    assert (short.ca_life.seconds, short.leaf_life.seconds, short.settle.total_seconds()) == (9, 4, 1.5)
    assert replace(read, namespace="m").dns_name == "kvpool-webhook.m.svc"


def test_nothing_listens_beyond_loopback_unless_told():
    assert read_settings(["--namespace", "n", "--sidecar-image", "i"], {}).address == "127.0.0.1"


def test_a_missing_setting_is_named(capsys):
    with pytest.raises(SystemExit):
        read_settings([], {"KVPOOL_NAMESPACE": "n"})
    assert "--sidecar-image" in capsys.readouterr().err
