"""Small parts: engine pods, the user's own index, sidecars' reports, the queue, selectors, settings."""

from __future__ import annotations

import asyncio
import base64
from typing import Any

import pytest
from aiohttp import web
from hypothesis import given
from hypothesis import strategies as st

from kvpool_operator.api.v1alpha1 import ExternalIndex, LabelSelector
from kvpool_operator.cli import main
from kvpool_operator.desired.inputs import ExternalIndexUrl
from kvpool_operator.k8s.pods import node, problem, selector_text
from kvpool_operator.observe.engine_pods import count
from kvpool_operator.observe.external_index import ExternalIndexLookup, read_external, secret_names
from kvpool_operator.runtime.workqueue import Backoff, WorkQueue
from kvpool_operator.settings import read_settings
from kvpool_operator.sidecars.status import ConnectedPod, Fingerprint, SidecarStatus
from kvpool_operator.sidecars.status_client import MAX_RESPONSE_BYTES, open_status_client

# -- engine pods ------------------------------------------------------------------------------------------------------


def engine(name: str, namespace: str = "team", image: str = "", phase: str = "Running", **notes: str) -> dict[str, Any]:
    annotations = {f"kvpool.dev/{k.replace('_', '-')}": v for k, v in notes.items()}
    inits = [{"name": "kvpool-client", "image": image}] if image else []
    return {
        "metadata": {"name": name, "namespace": namespace, "annotations": annotations},
        "spec": {"initContainers": inits},
        "status": {"phase": phase},
    }


def test_engine_pods_by_state():
    pods = [
        engine("a", pool="sys/chat", injected="x", image="new"),
        engine("b", pool="sys/chat", injected="x", image="old"),
        engine("c", pool="chat", skip_reason="ConnectorPresent: ..."),
        engine("d", pool="chat"),
        engine("e", namespace="sys"),
        engine("f", pool="sys/other", injected="x"),
        engine("g"),
        engine("h", pool="sys/chat", phase="Succeeded"),
        {"metadata": {"deletionTimestamp": "now", "annotations": {"kvpool.dev/pool": "sys/chat"}}},
        {"metadata": {}},
    ]
    found = count(pods, "sys", "chat", "new", {})
    assert (found.selected, found.injected, found.outdated, found.skipped, found.not_injected) == (5, 2, 1, 1, 2)
    assert found.not_injected_names == ("sys/e", "team/d")


# -- the user's own index ---------------------------------------------------------------------------------------------


def secret(**data: bytes) -> dict[str, Any]:
    return {"data": {k: base64.b64encode(v).decode() for k, v in data.items()}}


def external(**more: Any) -> ExternalIndex:
    return ExternalIndex.model_validate({"urlSecretRef": {"name": "s"}, **more})


@pytest.mark.parametrize(
    ("url", "expected"),
    [
        (b"redis://h", ExternalIndexUrl("redis://h:6379/0", "", "")),
        (b"redis://:pw@h:1/2\n", ExternalIndexUrl("redis://h:1/2", "", "pw")),
        (b"rediss://u:p%3A%2F@[fd00::1]:7/1?x=y#z", ExternalIndexUrl("rediss://[fd00::1]:7/1", "u", "p:/")),
        (b"redis+sentinel://:pw@a:1,b/main/2", ExternalIndexUrl("redis+sentinel://a:1,b:26379/main/2", "", "pw")),
        (b"rediss+cluster://a,b:7", ExternalIndexUrl("rediss+cluster://a:6379,b:7", "", "")),
    ],
)
def test_a_url_is_taken_apart(url: bytes, expected: ExternalIndexUrl):
    found = read_external(external(), {"s": secret(url=url)})
    assert found == ExternalIndexLookup(expected)
    assert found.url is not None
    assert found.url.password == expected.password


@pytest.mark.parametrize(
    "manifest",
    [
        None,
        {},
        secret(other=b"x"),
        secret(url=b"\xff\xfe"),
        secret(url=b"http://hunter2@h"),
        secret(url=b"redis://h:hunter2/0"),
        secret(url=b"redis:///0"),
        secret(url=b"unix:///hunter2"),
        secret(url=b"redis+sentinel://hunter2"),
        secret(url=b"redis://" + b"hunter2" * 1000),
        {"data": {"url": "hunter2%%%"}},
    ],
)
def test_a_url_that_cannot_be_used_is_explained_without_repeating_it(manifest: Any):
    found = read_external(external(), {"s": manifest})
    assert found.url is None
    assert "Secret s" in found.problem
    assert "hunter2" not in found.problem


PEM = b"-----BEGIN CERTIFICATE-----\nhunter2\n-----END CERTIFICATE-----\n"
PARTS = {
    "usernameSecretRef": {"name": "login"},
    "passwordSecretRef": {"name": "login"},
    "caSecretRef": {"name": "authority"},
    "clientCertificateSecretRef": {"name": "pair"},
}
SECRETS = {
    "s": secret(url=b"rediss://me:old@h"),
    "login": secret(username=b"kvpool", password=b"pw\n"),
    "authority": secret(**{"ca.crt": PEM}),
    "pair": secret(**{"tls.crt": PEM, "tls.key": PEM}),
}


def test_login_and_certificates_may_be_in_secrets_of_their_own():
    wanted = external(**PARTS)
    assert secret_names(wanted) == set(SECRETS)
    found = read_external(wanted, SECRETS).url
    assert found is not None
    assert (found.url, found.username, found.password) == ("rediss://h:6379/0", "kvpool", "pw")
    assert found.files == dict.fromkeys(("index-ca.crt", "index-client.crt", "index-client.key"), PEM.decode())
    assert "hunter2" not in repr(found)


@pytest.mark.parametrize(
    ("name", "manifest", "reported"),
    [
        ("login", secret(username=b"kvpool"), "key password"),
        ("authority", None, "Secret authority does not exist"),
        ("authority", secret(**{"ca.crt": b"hunter2"}), "should hold PEM"),
        ("pair", secret(**{"tls.crt": PEM}), "tls.key"),
        ("s", secret(url=b"redis://h"), "rediss"),
    ],
)
def test_a_part_that_is_missing_is_named(name: str, manifest: Any, reported: str):
    found = read_external(external(**PARTS), SECRETS | {name: manifest})
    assert found.url is None
    assert reported in found.problem
    assert "hunter2" not in found.problem


# -- reports ----------------------------------------------------------------------------------------------------------


KEYS = st.sampled_from(["index", "shared", "drives", "fingerprints", "hits", "ready", "used_bytes", "digest"])
ANSWERS = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(KEYS, inner, max_size=5),
    max_leaves=20,
)


@given(ANSWERS)
def test_any_answer_makes_a_report(raw: Any):
    report = SidecarStatus.parse(raw)
    assert report.used_bytes >= 0
    assert all(isinstance(v, int) for v in report.hits.values())


def test_a_report_reads_what_sidecars_say():
    raw = {
        "ready": True,
        "used_bytes": 7,
        "index": {"connected": True, "announced": 3},
        "shared": {"configured": True, "available": False, "problem": "hung"},
        "drives": {"nvme": "failing", "b": "ok"},
        "transport": "TCP",
        "fingerprints": [{"digest": "d", "engine": "e", "model": "m", "bytes": 5}, "x"] * 20,
    }
    report = SidecarStatus.parse(raw)
    assert (report.ready, report.used_bytes, report.index_connected, report.index_announced) == (True, 7, True, 3)
    assert (report.shared_problem, report.failing_drives, report.transport) == ("hung", ("nvme",), "TCP")
    assert len(report.fingerprints) == 5
    assert report.fingerprints[0] == Fingerprint("d", "e", "m", 5)


def test_a_report_reads_which_pods_use_which_kind():
    kind = {
        "digest": "d" * 999,
        "fields": {"kv_dtype": "0badcafe", "x": 1, **{f"f{i}": "0badcafe" for i in range(99)}},
        "connected": 3,
        "pods": [{"uid": "u", "connected": True, "seen": 7}, {"uid": 5}, "x", {"uid": "v", "connected": 1}] * 20,
    }
    (found,) = SidecarStatus.parse({"fingerprints": [kind]}).fingerprints
    assert (len(found.digest), len(found.fields), found.connected) == (64, 47, 3)
    assert found.pods[:2] == (ConnectedPod("u", True, 7), ConnectedPod("v", False, 0))
    assert len(found.pods) == 8


async def test_scraping_is_bounded_in_time_and_size():
    async def ok(_: web.Request) -> web.Response:
        return web.json_response({"ready": True, "blocks": 5})

    async def huge(_: web.Request) -> web.Response:
        return web.Response(body=b'"' + b"x" * MAX_RESPONSE_BYTES + b'"')

    async def never(_: web.Request) -> web.Response:
        await asyncio.sleep(60)
        return web.Response()

    async def away(_: web.Request) -> web.Response:
        raise web.HTTPFound("http://127.0.0.1:1/")

    runners = []
    handlers = {"127.0.0.1": ok, "127.0.0.2": huge, "127.0.0.3": never, "127.0.0.4": away}
    port = 0
    for address, handler in handlers.items():
        app = web.Application()
        app.router.add_get("/status", handler)
        runner = web.AppRunner(app, shutdown_timeout=0.1)
        await runner.setup()
        site = web.TCPSite(runner, address, port)
        await site.start()
        port = port or runner.addresses[0][1]
        runners.append(runner)
    try:
        async with open_status_client() as scraper, asyncio.timeout(5):
            found = await scraper.get_all([*handlers, "127.0.0.5"], port)
    finally:
        for runner in runners:
            await runner.cleanup()
    assert set(found) == {"127.0.0.1"}
    assert found["127.0.0.1"].blocks == 5


# -- the queue --------------------------------------------------------------------------------------------------------

A, B = ("ns", "a"), ("ns", "b")


async def test_a_key_is_in_the_queue_once():
    queue = WorkQueue()
    for _ in range(5):
        queue.add(A)
    queue.add(B)
    assert {await queue.get(), await queue.get()} == {A, B}
    assert len(queue) == 0


async def test_the_earlier_time_wins():
    queue = WorkQueue()
    queue.add(A, 60)
    queue.add(A, 0)
    queue.add(A, 30)
    async with asyncio.timeout(1):
        assert await queue.get() == A


async def test_a_key_that_is_worked_on_comes_back_afterwards():
    queue = WorkQueue()
    queue.add(A)
    assert await queue.get() == A
    queue.add(A)
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.05):
            await queue.get()
    queue.done(A)
    async with asyncio.timeout(1):
        assert await queue.get() == A


async def test_a_waiting_worker_is_woken():
    queue = WorkQueue()
    queue.add(B, 60)
    worker = asyncio.create_task(queue.get())
    await asyncio.sleep(0)
    queue.add(A, 0.02)
    async with asyncio.timeout(1):
        assert await worker == A


def test_pauses_grow_to_a_bound_and_start_anew():
    backoff = Backoff()
    pauses = [backoff.failed(A) for _ in range(12)]
    assert 0.3 < pauses[0] < 0.7
    assert max(pauses) <= 72
    assert pauses[-1] > 40
    backoff.succeeded(A)
    assert backoff.failed(A) < 0.7


# -- reading pods -----------------------------------------------------------------------------------------------------


def test_a_pods_node_is_known_before_it_is_scheduled():
    term = {"matchFields": [{"key": "metadata.name", "operator": "In", "values": ["node-7"]}]}
    affinity = {"nodeAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": {"nodeSelectorTerms": [term]}}}
    assert node({"spec": {"affinity": affinity}}) == "node-7"
    assert node({"spec": {"nodeName": "node-1", "affinity": affinity}}) == "node-1"
    assert node({"spec": {}}) == ""


@pytest.mark.parametrize(
    ("status", "words"),
    [
        ({"conditions": [{"type": "Ready", "status": "True"}]}, ""),
        (
            {
                "containerStatuses": [
                    {"name": "c", "state": {"waiting": {"reason": "ImagePullBackOff", "message": "no"}}}
                ]
            },
            "container c: ImagePullBackOff: no",
        ),
        (
            {
                "initContainerStatuses": [
                    {
                        "name": "prepare-node",
                        "state": {"waiting": {"reason": "CrashLoopBackOff"}},
                        "lastState": {"terminated": {"exitCode": 2, "message": "a\nread-only file system\n"}},
                    }
                ]
            },
            "container prepare-node failed: read-only file system",
        ),
        ({"initContainerStatuses": [{"name": "i", "state": {"terminated": {"exitCode": 0}}}]}, ""),
        ({"containerStatuses": [{"name": "c", "state": {"waiting": {"reason": "ContainerCreating"}}}]}, ""),
        ({"conditions": [{"type": "PodScheduled", "status": "False", "message": "no room"}]}, "cannot be scheduled"),
        ({}, ""),
    ],
)
def test_a_pods_problem_in_one_line(status: dict[str, Any], words: str):
    found = problem({"status": status})
    assert words in (found.message if found is not None else "")
    assert (found is not None) == bool(words)


def test_selectors_as_text():
    selector = LabelSelector.model_validate(
        {
            "matchLabels": {"a": "b"},
            "matchExpressions": [
                {"key": "k", "operator": "In", "values": ["x", "y"]},
                {"key": "n", "operator": "NotIn", "values": ["z"]},
                {"key": "e", "operator": "Exists"},
                {"key": "d", "operator": "DoesNotExist"},
            ],
        }
    )
    assert selector_text(selector) == "a=b,k in (x,y),n notin (z),e,!d"


# -- settings and command line ----------------------------------------------------------------------------------------


def test_settings_come_from_flags_before_the_environment():
    environ = {"KVPOOL_NAMESPACE": "a", "KVPOOL_SIDECAR_IMAGE": "i", "KVPOOL_IMAGE_PULL_SECRETS": "x, y"}
    settings = read_settings(["--namespace", "b"], environ)
    assert (settings.namespace, settings.env.sidecar_image, settings.env.image_pull_secrets) == ("b", "i", ("x", "y"))
    assert settings.address == "127.0.0.1"  # never all addresses unless told so


def test_a_missing_setting_is_named(capsys: pytest.CaptureFixture[str]):
    with pytest.raises(SystemExit):
        read_settings([], {"KVPOOL_NAMESPACE": "a"})
    assert "--sidecar-image" in capsys.readouterr().err


def test_the_command_line_explains_itself(capsys: pytest.CaptureFixture[str]):
    assert main(["--help"]) == 0
    assert "webhook" in capsys.readouterr().out
    assert main(["--version"]) == 0
    assert capsys.readouterr().out.startswith("kvpool-operator ")
    assert main(["nonsense"]) == 2
    assert "usage" in capsys.readouterr().err
