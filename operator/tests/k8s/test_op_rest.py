"""The client of the API server against a server that misbehaves in each of the ways that matter."""

from __future__ import annotations

import asyncio
import contextlib
import json
from typing import TYPE_CHECKING, Any

import pytest
from aiohttp import web
from kubernetes.aio.client import ApiClient, Configuration

from kvpool_operator.errors import (
    ApiUnavailableError,
    ConflictError,
    EvictionBlockedError,
    OperatorError,
    RejectedError,
)
from kvpool_operator.k8s.client import ObjectRef
from kvpool_operator.k8s.rest import RestClient

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable

CONFIG: dict[str, Any] = {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "c", "namespace": "n"}}
TARGET = ObjectRef("ConfigMap", "n", "c")


@contextlib.asynccontextmanager
async def serving(
    handler: Callable[[web.Request], Awaitable[web.StreamResponse]], call_s: float = 5
) -> AsyncIterator[RestClient]:
    app = web.Application()
    app.router.add_route("*", "/{path:.*}", handler)
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    try:
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        configuration = Configuration(host=f"http://127.0.0.1:{runner.addresses[0][1]}")
        async with ApiClient(configuration) as client:
            yield RestClient(client, call_s)
    finally:
        await runner.cleanup()


@pytest.mark.parametrize(
    ("status", "error"),
    [
        (400, RejectedError),
        (401, ApiUnavailableError),
        (403, RejectedError),
        (409, ConflictError),
        (410, ApiUnavailableError),
        (422, RejectedError),
        (429, ApiUnavailableError),
        (500, ApiUnavailableError),
        (504, ApiUnavailableError),
    ],
)
async def test_each_status_is_an_error_of_ours(status: int, error: type[OperatorError]):
    async def handler(_: web.Request) -> web.Response:
        return web.json_response({"kind": "Status", "message": "because", "reason": "Why"}, status=status)

    async with serving(handler) as cluster:
        with pytest.raises(error, match="because") as raised:
            await cluster.apply(CONFIG)
        assert f"HTTP {status}" in str(raised.value)


async def test_what_is_not_there_is_none_and_deleting_it_is_no_error():
    async def handler(_: web.Request) -> web.Response:
        return web.json_response({"message": "not found"}, status=404)

    async with serving(handler) as cluster:
        assert await cluster.get(TARGET) is None
        await cluster.delete(TARGET)
        with pytest.raises(RejectedError) as raised:
            await cluster.patch(TARGET, {})
        assert raised.value.status == 404


async def test_a_server_that_hangs_is_away():
    async def handler(_: web.Request) -> web.Response:
        await asyncio.sleep(30)
        return web.Response()

    async with serving(handler, call_s=0.2) as cluster:
        with pytest.raises(ApiUnavailableError, match="TimeoutError"):
            await cluster.get(TARGET)


async def test_a_server_that_hangs_up_is_away():
    async def handler(request: web.Request) -> web.Response:
        assert request.transport is not None
        request.transport.close()
        return web.Response()

    async with serving(handler) as cluster:
        with pytest.raises(ApiUnavailableError):
            await cluster.apply(CONFIG)


async def test_no_server_at_all():
    async with ApiClient(Configuration(host="http://127.0.0.1:1")) as client:
        with pytest.raises(ApiUnavailableError):
            await RestClient(client, 2).get(TARGET)


async def test_an_error_about_a_secret_repeats_nothing():
    async def handler(_: web.Request) -> web.Response:
        return web.json_response({"message": "invalid: hunter2", "reason": "Invalid"}, status=422)

    async with serving(handler) as cluster:
        with pytest.raises(RejectedError) as raised:
            await cluster.apply({**CONFIG, "kind": "Secret"})
        assert "hunter2" not in str(raised.value)
        assert "Invalid" in str(raised.value)


async def test_applying_says_who_and_forces():
    seen: dict[str, Any] = {}

    async def handler(request: web.Request) -> web.Response:
        seen.update(query=dict(request.query), path=request.path, type=request.content_type, method=request.method)
        seen["body"] = await request.json()
        return web.json_response(CONFIG)

    async with serving(handler) as cluster:
        await cluster.apply(CONFIG, subresource="status")
    assert seen["path"] == "/api/v1/namespaces/n/configmaps/c/status"
    assert seen["query"] == {"fieldManager": "kvpool-operator", "force": "true"}
    assert (seen["type"], seen["method"], seen["body"]) == ("application/apply-patch+yaml", "PATCH", CONFIG)


async def test_lists_are_read_to_their_end_and_say_what_their_items_are():
    asked: list[dict[str, str]] = []

    async def handler(request: web.Request) -> web.Response:
        asked.append(dict(request.query))
        first = "continue" not in request.query
        item = {"metadata": {"name": "a" if first else "b"}}
        return web.json_response({"items": [item], "metadata": {"continue": "more" if first else ""}})

    async with serving(handler) as cluster:
        found = await cluster.list("DaemonSet", namespace="n", labels="x=y")
        await cluster.list("Namespace", fresh=True)
    assert [o["metadata"]["name"] for o in found] == ["a", "b"]
    assert {(o["kind"], o["apiVersion"]) for o in found} == {("DaemonSet", "apps/v1")}
    assert asked[0] == {"limit": "500", "labelSelector": "x=y", "resourceVersion": "0"}
    assert asked[1] == {"limit": "500", "labelSelector": "x=y", "continue": "more"}
    assert asked[2] == {"limit": "500"}


async def test_a_delete_is_of_the_object_that_was_seen():
    seen: list[Any] = []

    async def handler(request: web.Request) -> web.Response:
        seen.append(await request.json())
        return web.json_response({})

    async with serving(handler) as cluster:
        await cluster.delete(TARGET, uid="u", foreground=True)
    assert seen == [{"propagationPolicy": "Foreground", "preconditions": {"uid": "u"}}]


@pytest.mark.parametrize(
    ("status", "error"), [(429, EvictionBlockedError), (409, ConflictError), (404, ConflictError), (403, RejectedError)]
)
async def test_an_eviction_is_of_the_pod_that_was_seen_and_may_be_held_back(status: int, error: type[OperatorError]):
    asked = []

    async def answer(request: web.Request) -> web.Response:
        asked.append((request.method, request.path, await request.json()))
        return web.json_response({"message": "no"}, status=status if len(asked) > 1 else 201)

    async with serving(answer) as cluster:
        await cluster.evict(ObjectRef("Pod", "team", "e"), uid="u")
        with pytest.raises(error):
            await cluster.evict(ObjectRef("Pod", "team", "e"), uid="u")
    method, path, body = asked[0]
    assert (method, path) == ("POST", "/api/v1/namespaces/team/pods/e/eviction")
    assert body["kind"] == "Eviction"
    assert body["deleteOptions"] == {"preconditions": {"uid": "u"}}


async def test_a_watch_delivers_events_of_any_size_and_ends_with_the_stream():
    asked: dict[str, str] = {}
    big = {"type": "ADDED", "object": {"metadata": {"name": "c", "annotations": {"a": "x" * 300_000}}}}
    bookmark = {"type": "BOOKMARK", "object": {"metadata": {"resourceVersion": "9"}}}

    async def answer(request: web.Request) -> web.StreamResponse:
        asked.update(request.query, accept=request.headers["Accept"])
        response = web.StreamResponse()
        await response.prepare(request)
        text = b"".join(json.dumps(e).encode() + b"\n" for e in (big, bookmark))
        for start in range(0, len(text), 70_001):
            await response.write(text[start : start + 70_001])
        return response

    async with serving(answer) as client:
        stream = client.watch("ConfigMap", labels="a=b", resource_version="7", metadata_only=True, idle_timeout_s=5)
        events = [event async for event in stream]
    assert [e.type for e in events] == ["ADDED", "BOOKMARK"]
    assert events[0].object["kind"] == "ConfigMap"
    assert len(events[0].object["metadata"]["annotations"]["a"]) == 300_000
    assert (asked["watch"], asked["resourceVersion"], asked["labelSelector"]) == ("true", "7", "a=b")
    assert asked["allowWatchBookmarks"] == "true"
    assert asked["accept"].startswith("application/json;as=PartialObjectMetadata;g=meta.k8s.io;v=v1")


async def test_a_silent_watch_ends():
    async def answer(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse()
        await response.prepare(request)
        await asyncio.sleep(30)
        return response

    async with serving(answer) as client:
        async with asyncio.timeout(5):
            assert [e async for e in client.watch("Node", resource_version="1", idle_timeout_s=0.2)] == []


@pytest.mark.parametrize("text", ["no json", '{"type": "ADDED"}', "[]"])
async def test_a_watch_of_nonsense_is_an_error_that_may_pass(text: str):
    async with serving(answering(200, text + "\n")) as client:
        with pytest.raises(ApiUnavailableError):
            [e async for e in client.watch("Node", resource_version="1", idle_timeout_s=5)]


async def test_an_expired_version_is_told_apart():
    async with serving(answering(410, '{"message": "too old resource version"}')) as client:
        with pytest.raises(ApiUnavailableError) as watched:
            [e async for e in client.watch("Node", resource_version="1", idle_timeout_s=5)]
        with pytest.raises(ApiUnavailableError) as listed:
            await client.list_page("Node", token="old")
    assert (watched.value.status, listed.value.status) == (410, 410)


async def test_metadata_alone_is_requested_and_typed():
    async def answer(request: web.Request) -> web.Response:
        assert request.headers["Accept"].startswith("application/json;as=PartialObjectMetadataList;g=meta.k8s.io;v=v1")
        assert "resourceVersion" not in request.query
        item = {"kind": "PartialObjectMetadata", "apiVersion": "meta.k8s.io/v1", "metadata": {"name": "n"}}
        return web.json_response({"metadata": {"resourceVersion": "5", "continue": "next"}, "items": [item]})

    async with serving(answer) as client:
        page = await client.list_page("Namespace", metadata_only=True)
    assert (page.resource_version, page.token) == ("5", "next")
    assert (page.items[0]["kind"], page.items[0]["apiVersion"]) == ("Namespace", "v1")


def answering(status: int, text: str) -> Callable[[web.Request], Awaitable[web.StreamResponse]]:
    async def answer(_: web.Request) -> web.StreamResponse:
        return web.Response(status=status, text=text, content_type="application/json")

    return answer
