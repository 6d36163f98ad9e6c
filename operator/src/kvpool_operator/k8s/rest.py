"""`ApiClient` and `ListWatcher` on the asynchronous client of `kubernetes`, which only this module imports."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import random
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import aiohttp
from kubernetes.aio.client import ApiClient as KubernetesClient
from kubernetes.aio.client import ApiException, Configuration
from kubernetes.aio.config import load_incluster_config, load_kube_config

from kvpool_operator.errors import (
    ApiUnavailableError,
    ConflictError,
    EvictionBlockedError,
    OperatorError,
    RejectedError,
)
from kvpool_operator.k8s.client import KINDS, ApiClient, ListPage, ListWatcher, Manifest, ObjectRef, WatchEvent, ref
from kvpool_operator.k8s.rate_limiter import RateLimiter

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, AsyncIterator, Mapping, Sequence

    from kvpool_operator.k8s.client import ResourceKind

__all__ = ["FIELD_MANAGER", "RestClient", "open_api_client"]

log = logging.getLogger(__name__)

FIELD_MANAGER: Final = "kvpool-operator"
CALL_S: Final = 10.0
PAGE_SIZE: Final = 500
MAX_PAGES: Final = 200
MESSAGE_LENGTH: Final = 600
PER_SECOND: Final = 100.0
BURST: Final = 200
"""Requests per second in the long run, and in one burst after a pause. Requests for the Lease are not limited."""
WATCH_S: Final = 240
"""The API server closes a watch after one to two times this."""


@contextlib.asynccontextmanager
async def open_api_client(call_s: float = CALL_S, namespaces: Sequence[str] = ()) -> AsyncIterator[RestClient]:
    """Connect as the pod's service account, or outside a pod by KUBECONFIG. `namespaces`: see `RestClient`."""
    configuration = Configuration(client_session_kwargs={"trust_env": False})
    if os.environ.get("KUBERNETES_SERVICE_HOST"):
        load_incluster_config(client_configuration=configuration)
    else:
        await load_kube_config(client_configuration=configuration, persist_config=False)
    async with KubernetesClient(configuration) as client:
        yield RestClient(client, call_s, namespaces)


class RestClient(ApiClient, ListWatcher):
    """`ApiClient` over HTTPS. For one event loop."""

    def __init__(self, client: Any, call_s: float = CALL_S, namespaces: Sequence[str] = ()) -> None:
        """`namespaces`: those that a list of all namespaces covers; empty: really all, which needs a ClusterRole."""
        self._namespaces = tuple(namespaces)
        self._client = client
        self._call_s = call_s
        self._limiter = RateLimiter(PER_SECOND, BURST)

    async def get(self, target: ObjectRef) -> Manifest | None:
        try:
            return await self._call("GET", _path(target), _subject(target))
        except RejectedError as e:
            if e.status == 404:
                return None
            raise

    async def list(
        self, kind: str, *, namespace: str = "", labels: str = "", fields: str = "", fresh: bool = False
    ) -> list[Manifest]:
        manifests: list[Manifest] = []
        if self._namespaces and not namespace and KINDS[kind].namespaced:
            for each in self._namespaces:
                manifests += await self.list(kind, namespace=each, labels=labels, fields=fields, fresh=fresh)
            return manifests
        token = ""
        for _ in range(MAX_PAGES):
            page = await self._page(
                kind, namespace=namespace, labels=labels, fields=fields, token=token, cached=not fresh
            )
            manifests += page.items
            token = page.token
            if not token:
                return manifests
        raise ApiUnavailableError(f"more than {PAGE_SIZE * MAX_PAGES} {kind}s: narrow the selector")

    async def list_page(
        self, kind: str, *, namespace: str = "", labels: str = "", token: str = "", metadata_only: bool = False
    ) -> ListPage:
        return await self._page(kind, namespace=namespace, labels=labels, token=token, metadata_only=metadata_only)

    async def _page(
        self,
        kind: str,
        *,
        namespace: str = "",
        labels: str = "",
        fields: str = "",
        token: str = "",
        cached: bool = False,
        metadata_only: bool = False,
    ) -> ListPage:
        k = KINDS[kind]
        query = {"limit": str(PAGE_SIZE), "labelSelector": labels, "fieldSelector": fields, "continue": token}
        if cached and not token:
            query["resourceVersion"] = "0"  # from the API server's watch cache, which is cheap for it
        page = await self._call(
            "GET", k.path(namespace), _Subject(kind, f"{kind}s"), query=query, accept=_accept(metadata_only, "List")
        )
        meta = page.get("metadata") or {}
        return ListPage(
            [_typed(item, k) for item in page.get("items") or []],
            str(meta.get("resourceVersion") or ""),
            str(meta.get("continue") or ""),
        )

    async def watch(
        self,
        kind: str,
        *,
        namespace: str = "",
        labels: str = "",
        resource_version: str,
        metadata_only: bool = False,
        idle_timeout_s: float,
    ) -> AsyncGenerator[WatchEvent]:
        k = KINDS[kind]
        query = {
            "watch": "true",
            "allowWatchBookmarks": "true",
            "resourceVersion": resource_version,
            "labelSelector": labels,
            "timeoutSeconds": str(WATCH_S + random.randrange(WATCH_S)),  # noqa: S311  spreads the reconnects
        }
        what = f"watch of {kind}s"
        await self._limiter.acquire()
        try:
            request = await self._client.param_serialize(
                "GET",
                k.path(namespace),
                query_params=[(name, value) for name, value in query.items() if value],
                header_params={"Accept": _accept(metadata_only, "")},
                auth_settings=["BearerToken"],
            )
            timeout = aiohttp.ClientTimeout(total=None, sock_connect=self._call_s, sock_read=idle_timeout_s)
            response = (await self._client.call_api(*request, _request_timeout=timeout)).response
        except ApiException as e:
            raise _error("GET", what, e.status or 0, str(e.reason)) from None
        except (TimeoutError, aiohttp.ClientError, OSError) as e:
            raise ApiUnavailableError(f"{what}: {type(e).__name__}") from None
        try:
            if response.status != 200:
                raise _error("GET", what, response.status, _message(await response.read(), secret=False))
            async for line in _lines(response.content):
                event = json.loads(line)
                yield WatchEvent(
                    str(event["type"]), _typed(event["object"], k) if event["type"] != "ERROR" else event["object"]
                )
        except TimeoutError:
            log.info("%s: no event for %.0f s; it is opened again", what, idle_timeout_s)
        except (aiohttp.ClientError, OSError, ValueError, KeyError, TypeError) as e:
            raise ApiUnavailableError(f"{what}: {type(e).__name__}") from None
        finally:
            response.close()

    async def create(self, manifest: Manifest) -> Manifest:
        target = ref(manifest)
        path = KINDS[target.kind].path(target.namespace)
        return await self._call("POST", path, _subject(target), body=manifest, query={"fieldManager": FIELD_MANAGER})

    async def apply(self, manifest: Manifest, *, subresource: str = "") -> Manifest:
        target = ref(manifest)
        return await self._call(
            "PATCH",
            _path(target, subresource),
            _subject(target),
            body=manifest,
            query={"fieldManager": FIELD_MANAGER, "force": "true"},
            content_type="application/apply-patch+yaml",
        )

    async def patch(self, target: ObjectRef, patch: Manifest, *, subresource: str = "") -> Manifest:
        return await self._call(
            "PATCH",
            _path(target, subresource),
            _subject(target),
            body=patch,
            query={"fieldManager": FIELD_MANAGER},
            content_type="application/merge-patch+json",
        )

    async def delete(self, target: ObjectRef, *, uid: str = "", foreground: bool = False) -> None:
        options: Manifest = {"propagationPolicy": "Foreground" if foreground else "Background"}
        if uid:
            options["preconditions"] = {"uid": uid}
        try:
            await self._call("DELETE", _path(target), _subject(target), body=options)
        except RejectedError as e:
            if e.status != 404:
                raise

    async def evict(self, target: ObjectRef, *, uid: str) -> None:
        eviction = {
            "apiVersion": "policy/v1",
            "kind": "Eviction",
            "metadata": {"name": target.name, "namespace": target.namespace},
            "deleteOptions": {"preconditions": {"uid": uid}},
        }
        try:
            await self._call(
                "POST", _path(target, "eviction"), _Subject(target.kind, f"eviction of {target}"), body=eviction
            )
        except ApiUnavailableError as e:
            if e.status == 429:
                raise EvictionBlockedError(str(e)) from None
            raise
        except RejectedError as e:
            if e.status == 404:
                raise ConflictError(f"{target} is gone") from None
            raise

    async def _call(
        self,
        method: str,
        path: str,
        subject: _Subject,
        *,
        body: Manifest | None = None,
        query: Mapping[str, str] | None = None,
        content_type: str = "application/json",
        accept: str = "application/json",
    ) -> Manifest:
        headers = {"Accept": accept, "Content-Type": content_type}
        if subject.kind != "Lease":
            await self._limiter.acquire()
        try:
            async with asyncio.timeout(self._call_s):
                request = await self._client.param_serialize(
                    method,
                    path,
                    query_params=[(k, v) for k, v in (query or {}).items() if v],
                    header_params=headers,
                    body=body,
                    auth_settings=["BearerToken"],
                )
                response = await self._client.call_api(*request, _request_timeout=self._call_s)
                data = await response.read()
        except ApiException as e:
            raise _error(method, subject.text, e.status or 0, str(e.reason)) from None
        except (TimeoutError, aiohttp.ClientError, OSError) as e:
            raise ApiUnavailableError(f"{method} {subject.text}: {type(e).__name__}") from None
        if not 200 <= response.status <= 299:
            raise _error(
                method, subject.text, response.status, _message(data, secret=subject.kind in ("Secret", "TokenReview"))
            )
        decoded: Manifest = json.loads(data) if data else {}
        return decoded


@dataclass(frozen=True)
class _Subject:
    """What a request is about: the kind decides on limits and redaction, the text is for messages."""

    kind: str
    text: str


def _subject(target: ObjectRef) -> _Subject:
    return _Subject(target.kind, str(target))


def _accept(metadata_only: bool, suffix: str) -> str:
    partial = f"application/json;as=PartialObjectMetadata{suffix};g=meta.k8s.io;v=v1,"
    return f"{partial if metadata_only else ''}application/json"


def _typed(item: Manifest, kind: ResourceKind) -> Manifest:
    """Items of a list have no kind, and those of a metadata list have another one."""
    return {**item, "apiVersion": kind.api_version, "kind": kind.name}


async def _lines(content: aiohttp.StreamReader) -> AsyncIterator[bytes]:
    """Lines of any length: `readline` refuses the long ones."""
    rest = bytearray()
    async for chunk in content.iter_any():
        rest += chunk
        if b"\n" not in chunk:
            continue
        *lines, tail = bytes(rest).split(b"\n")
        rest = bytearray(tail)
        for line in lines:
            if line.strip():
                yield line


def _path(target: ObjectRef, subresource: str = "") -> str:
    return KINDS[target.kind].path(target.namespace, target.name, subresource)


def _message(data: bytes, *, secret: bool) -> str:
    """The API server's message; of a Secret only the reason, because a message may quote the request."""
    try:
        status = json.loads(data)
        text = str(status.get("reason" if secret else "message") or "")
    except (ValueError, AttributeError):
        text = ""
    return text[:MESSAGE_LENGTH]


def _error(method: str, what: str, status: int, message: str) -> OperatorError:
    text = f"{method} {what}: {message or 'no message'} (HTTP {status})"
    if status == 409:
        return ConflictError(text)
    if status in (401, 408, 410, 429) or status >= 500 or status == 0:  # 410: a list or watch that must start over
        return ApiUnavailableError(text, status)
    return RejectedError(text, status)
