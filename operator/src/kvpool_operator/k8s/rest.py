"""The Kubernetes API. The only module that imports `kubernetes`: its asynchronous client, behind
`cluster.ApiClient`."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
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
from kvpool_operator.k8s.client import KINDS, ApiClient, Manifest, ObjectRef, ref
from kvpool_operator.k8s.rate_limiter import RateLimiter

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Mapping

__all__ = ["FIELD_MANAGER", "RestClient", "open_api_client"]

FIELD_MANAGER: Final = "kvpool-operator"
CALL_S: Final = 10.0
PAGE: Final = 500
MOST_PAGES: Final = 200
MESSAGE_LENGTH: Final = 600
PER_SECOND: Final = 100.0
BURST: Final = 200
"""So many requests a second, and so many at once after a rest; those for the Lease do not wait for the others."""


@contextlib.asynccontextmanager
async def open_api_client(call_s: float = CALL_S) -> AsyncIterator[RestClient]:
    """A connection as the pod's service account, or outside a pod as KUBECONFIG says."""
    configuration = Configuration(client_session_kwargs={"trust_env": False})
    if os.environ.get("KUBERNETES_SERVICE_HOST"):
        load_incluster_config(client_configuration=configuration)
    else:
        await load_kube_config(client_configuration=configuration, persist_config=False)
    async with KubernetesClient(configuration) as client:
        yield RestClient(client, call_s)


class RestClient(ApiClient):
    """`ApiClient` over HTTPS. For one event loop."""

    def __init__(self, client: Any, call_s: float = CALL_S) -> None:
        self._client = client
        self._call_s = call_s
        self._pace = RateLimiter(PER_SECOND, BURST)

    async def get(self, target: ObjectRef) -> Manifest | None:
        try:
            return await self._call("GET", _path(target), str(target))
        except RejectedError as e:
            if e.status == 404:
                return None
            raise

    async def list(
        self, kind: str, *, namespace: str = "", labels: str = "", fields: str = "", fresh: bool = False
    ) -> list[Manifest]:
        k = KINDS[kind]
        query = {"limit": str(PAGE), "labelSelector": labels, "fieldSelector": fields}
        if not fresh:
            query["resourceVersion"] = "0"  # from the API server's cache, which is cheap for it
        found: list[Manifest] = []
        for _ in range(MOST_PAGES):
            page = await self._call("GET", k.path(namespace), f"{kind}s", query=query)
            # items of a list do not say what they are
            found += [{"apiVersion": k.api_version, "kind": k.name} | item for item in page.get("items") or []]
            token = (page.get("metadata") or {}).get("continue")
            if not token:
                return found
            query = {**query, "continue": token, "resourceVersion": ""}
        raise ApiUnavailableError(f"more than {PAGE * MOST_PAGES} {kind}s: narrow the selector")

    async def create(self, manifest: Manifest) -> Manifest:
        target = ref(manifest)
        path = KINDS[target.kind].path(target.namespace)
        return await self._call("POST", path, str(target), body=manifest, query={"fieldManager": FIELD_MANAGER})

    async def apply(self, manifest: Manifest, *, subresource: str = "") -> Manifest:
        target = ref(manifest)
        return await self._call(
            "PATCH",
            _path(target, subresource),
            str(target),
            body=manifest,
            query={"fieldManager": FIELD_MANAGER, "force": "true"},
            content_type="application/apply-patch+yaml",
        )

    async def patch(self, target: ObjectRef, patch: Manifest, *, subresource: str = "") -> Manifest:
        return await self._call(
            "PATCH",
            _path(target, subresource),
            str(target),
            body=patch,
            query={"fieldManager": FIELD_MANAGER},
            content_type="application/merge-patch+json",
        )

    async def delete(self, target: ObjectRef, *, uid: str = "", foreground: bool = False) -> None:
        options: Manifest = {"propagationPolicy": "Foreground" if foreground else "Background"}
        if uid:
            options["preconditions"] = {"uid": uid}
        try:
            await self._call("DELETE", _path(target), str(target), body=options)
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
            await self._call("POST", _path(target, "eviction"), f"eviction of {target}", body=eviction)
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
        what: str,
        *,
        body: Manifest | None = None,
        query: Mapping[str, str] | None = None,
        content_type: str = "application/json",
    ) -> Manifest:
        headers = {"Accept": "application/json", "Content-Type": content_type}
        if not what.startswith("Lease"):
            await self._pace.acquire()
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
            raise _error(method, what, e.status or 0, str(e.reason)) from None
        except (TimeoutError, aiohttp.ClientError, OSError) as e:
            raise ApiUnavailableError(f"{method} {what}: {type(e).__name__}") from None
        if not 200 <= response.status <= 299:
            raise _error(method, what, response.status, _message(data, secret=what.startswith("Secret ")))
        decoded: Manifest = json.loads(data) if data else {}
        return decoded


def _path(target: ObjectRef, subresource: str = "") -> str:
    return KINDS[target.kind].path(target.namespace, target.name, subresource)


def _message(data: bytes, *, secret: bool) -> str:
    """What the API server says; of a Secret only the reason, for a message may quote what was sent."""
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
    if status in (401, 408, 410, 429) or status >= 500 or status == 0:  # 410: a long list that is to be begun anew
        return ApiUnavailableError(text, status)
    return RejectedError(text, status)
