"""Decides which pods are served and as which tenant, and applies configuration changes to them."""

from __future__ import annotations

import logging
import threading
import weakref
from typing import TYPE_CHECKING

from kvpool.errors import RefusedError
from kvpool_sidecar.serving.pod import Pod
from kvpool_sidecar.tenancy.identity import Tenant, is_allowed

if TYPE_CHECKING:
    import socket
    from collections.abc import Callable

    from kvpool.config import PoolConfig
    from kvpool_sidecar.events.feed import EventFeed
    from kvpool_sidecar.serving.config_holder import ConfigHolder
    from kvpool_sidecar.serving.listener import PodListeners
    from kvpool_sidecar.storage.local.store import LocalStore
    from kvpool_sidecar.tenancy.identity import Identity

__all__ = ["FIXED_PREFIX", "PodRegistry"]

log = logging.getLogger(__name__)

FIXED_PREFIX = "fixed-"  # uid of a socket given by --socket, which no node agent knows
_POD_SHARE = 4  # the unfinished writes of one pod may take a quarter of the capacity


class PodRegistry:
    """Admits pods with the tenancy of the current configuration. Thread-safe.

    `on_left(tag)` is called after pods that run on have left a tenant, or lost or got grants.
    """

    def __init__(
        self,
        config: ConfigHolder,
        secret: bytes,
        listeners: PodListeners,
        local: LocalStore,
        feed: EventFeed | None,
        on_left: Callable[[bytes], None],
    ) -> None:
        self._on_left = on_left
        self._config = config
        self._secret = secret
        self._listeners = listeners
        self._local = local
        self._feed = feed
        self._lock = threading.Lock()  # over decisions that depend on the configuration
        self._granted: weakref.WeakValueDictionary[str, Tenant] = weakref.WeakValueDictionary()

    def admit(self, identity: Identity, listener: socket.socket) -> None:
        """Serve a pod on its listening socket. RefusedError if the pool does not serve its namespace."""
        with self._lock:
            if not is_allowed(identity, self._config.current.allowed_namespaces):
                raise RefusedError(f"the pool does not serve namespace {identity.namespace}")
            self._listeners.add(self._pod(identity), listener)
        log.info("serving pod %s/%s", identity.namespace, identity.pod)

    def add_streams(self, uid: str, listener: socket.socket) -> None:
        """Serve streams of peers' blocks to a pod on this listening socket. RefusedError if it is not served."""
        self._listeners.add_streams(uid, listener)

    def remove(self, uid: str) -> None:
        """Stop serving a pod that has ended."""
        self._listeners.remove(uid)

    def retain(self, uids: set[str]) -> None:
        """Stop serving all pods but `uids` and those of fixed sockets."""
        for uid in self._listeners.uids() - uids:
            if not uid.startswith(FIXED_PREFIX):
                self._listeners.remove(uid)

    def register_tenants(self) -> None:
        """Give the event feed the names of all configured tenants; routers identify tenants by name."""
        if self._feed is None:
            return
        config, tenancy = self._config.current, self._config.tenancy
        namespaces = [*config.allowed_namespaces, *(n for tenant in config.tenants for n in tenant.namespaces)]
        for namespace in namespaces:
            if namespace != "*":
                tenant = Tenant(self._secret, tenancy.tenant_id(namespace))
                self._feed.tenant(tenant.tag, tenancy.display_name(namespace))

    def apply_config(self, _previous: PoolConfig) -> None:
        """Stop serving pods that are no longer allowed; reconnect pods whose tenant or grants have changed."""
        allowed = self._config.current.allowed_namespaces
        with self._lock:
            for pod in self._listeners.pods():
                identity = pod.identity
                if not is_allowed(identity, allowed):
                    self._listeners.replace(identity.uid, None)
                elif not self._is_current(pod):
                    self._listeners.replace(identity.uid, self._pod(identity))
                else:
                    continue
                self._on_left(pod.tenant.tag)

    def apply_limits(self, _previous: PoolConfig) -> None:
        """Set the pods' write limits from the current capacity, and register the configured tenants."""
        for pod in self._listeners.pods():
            pod.set_limit(self._write_limit())
        self.register_tenants()

    def _pod(self, identity: Identity) -> Pod:
        tenancy = self._config.tenancy
        tenant = Tenant(self._secret, tenancy.tenant_id(identity.namespace))
        if self._feed is not None:
            self._feed.tenant(tenant.tag, tenancy.display_name(identity.namespace))
        readable = tuple(map(self._granted_tenant, tenancy.reads_from(identity.namespace)))
        return Pod(identity, tenant, self._write_limit(), readable)

    def _write_limit(self) -> int:
        return self._local.usage().capacity_bytes // _POD_SHARE

    def _granted_tenant(self, name: str) -> Tenant:
        """Return one object per granted tenant; its readers share the block keys that it caches."""
        tenant = self._granted.get(name)
        if tenant is None:
            tenant = self._granted[name] = Tenant(self._secret, name)
        return tenant

    def _is_current(self, pod: Pod) -> bool:
        """Return whether the pod has the tenant and the grants of the current configuration."""
        tenancy, namespace = self._config.tenancy, pod.identity.namespace
        granted = tuple(tenant.name for tenant in pod.readable)
        return pod.tenant.name == tenancy.tenant_id(namespace) and granted == tenancy.reads_from(namespace)
