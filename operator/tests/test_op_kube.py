"""The client of the API server against a server that misbehaves in each of the ways that matter."""

from __future__ import annotations

import asyncio
import contextlib
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
