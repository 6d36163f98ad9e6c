"""API server access of the webhook, through the operator's `ApiClient`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from kvpool_operator.api.v1alpha1 import KIND
from kvpool_operator.injection.pool_selection import NamespaceView
from kvpool_operator.k8s.client import ObjectRef

if TYPE_CHECKING:
    from kvpool_operator.k8s.client import ApiClient
    from kvpool_operator.webhook.settings import WebhookSettings

__all__ = ["WebhookApiClient"]


class WebhookApiClient:
    """Implementation of `PoolReader`, `TrustStore` and `HookStore`. Raises the errors of `kvpool_operator.errors`."""

    def __init__(self, cluster: ApiClient, settings: WebhookSettings) -> None:
        self._cluster = cluster
        self._secret = ObjectRef("Secret", settings.namespace, settings.ca_secret)
        self._configuration = ObjectRef("MutatingWebhookConfiguration", "", settings.configuration)
        self._selectors = ObjectRef("MutatingWebhookConfiguration", "", f"{settings.configuration}-selectors")

    async def list_pools(self) -> list[dict[str, Any]]:
        return await self._cluster.list(KIND)

    async def read_namespace(self, name: str) -> NamespaceView:
        metadata = (await self._cluster.get(ObjectRef("Namespace", "", name)) or {}).get("metadata") or {}
        return NamespaceView(metadata.get("labels") or {}, metadata.get("annotations") or {})

    async def read_secret(self) -> dict[str, Any] | None:
        return await self._cluster.get(self._secret)

    async def write_secret(self, data: dict[str, str | None], resource_version: str | None) -> None:
        if resource_version is not None:
            await self._cluster.patch(self._secret, {"metadata": {"resourceVersion": resource_version}, "data": data})
            return
        await self._cluster.create(
            {
                "apiVersion": "v1",
                "kind": "Secret",
                "metadata": {
                    "name": self._secret.name,
                    "namespace": self._secret.namespace,
                    "labels": {"app.kubernetes.io/name": "kvpool", "app.kubernetes.io/component": "webhook"},
                },
                "type": "Opaque",
                "data": {k: v for k, v in data.items() if v is not None},
            }
        )

    async def read_configuration(self) -> dict[str, Any] | None:
        return await self._cluster.get(self._configuration)

    async def write_webhooks(self, webhooks: list[dict[str, Any]], resource_version: str) -> None:
        await self._cluster.patch(
            self._configuration, {"metadata": {"resourceVersion": resource_version}, "webhooks": webhooks}
        )

    async def read_selector_configuration(self) -> dict[str, Any] | None:
        return await self._cluster.get(self._selectors)

    async def write_selector_webhooks(self, webhooks: list[dict[str, Any]], resource_version: str) -> None:
        await self._cluster.patch(
            self._selectors, {"metadata": {"resourceVersion": resource_version}, "webhooks": webhooks}
        )
