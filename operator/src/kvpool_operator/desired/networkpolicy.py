"""NetworkPolicies of a pool's pods. Allowed clients still have to authenticate."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from kvpool_operator.api.fields import HTTP_PORT, INDEX_PORT
from kvpool_operator.desired import names
from kvpool_operator.desired.labels import metadata, selector
from kvpool_operator.desired.services import PROBE_PORT

if TYPE_CHECKING:
    from kvpool_operator.api.v1alpha1 import KVCachePool
    from kvpool_operator.desired.inputs import InstallationConfig, Manifest

__all__ = ["network_policies", "preflight_policy"]

_OPERATOR: Manifest = {
    "namespaceSelector": {},
    "podSelector": {"matchLabels": {"app.kubernetes.io/name": "kvpool", "app.kubernetes.io/component": "operator"}},
}


def network_policies(pool: KVCachePool, env: InstallationConfig) -> list[Manifest]:
    """Return the policies; empty if the installation disables them."""
    if not env.network_policies:
        return []
    made = [_policy(pool, names.sidecar(pool.metadata.name), "sidecar", _to_sidecars(pool))]
    if pool.spec.index.external is None:
        made.append(_policy(pool, names.index(pool.metadata.name), "index", _to_index(pool)))
    return made


def preflight_policy(pool: KVCachePool, env: InstallationConfig) -> Manifest | None:
    """Return the policy of the preflight pods: probes and the operator. None if the installation disables policies."""
    if not env.network_policies:
        return None
    name = names.preflight(pool.metadata.name)
    return _policy(pool, name, "preflight", [{"ports": [_tcp(HTTP_PORT)]}])


def _to_sidecars(pool: KVCachePool) -> list[Manifest]:
    rules: list[Manifest] = [
        # blocks, and whatever RDMA's connections are made over
        {"from": [_pods(pool, "sidecar"), _OPERATOR]},
        # probes, the operator, metrics, queries of routers with their token
        {"ports": [_tcp(HTTP_PORT)]},
    ]
    events = pool.spec.events
    if events.enabled and events.from_:  # a rule with an empty `from` would admit everybody
        peers = [peer.model_dump(by_alias=True, exclude_defaults=True) for peer in events.from_]
        rules.append({"from": peers, "ports": [_tcp(events.port), _tcp(events.replay_port)]})
    return rules


def _to_index(pool: KVCachePool) -> list[Manifest]:
    return [
        {"from": [_pods(pool, "sidecar"), _pods(pool, "index"), _OPERATOR], "ports": [_tcp(INDEX_PORT)]},
        {"ports": [_tcp(PROBE_PORT)]},
    ]


def _pods(pool: KVCachePool, component: str) -> Manifest:
    return {"podSelector": {"matchLabels": selector(pool, component)}}


def _tcp(port: int) -> Manifest:
    return {"port": port, "protocol": "TCP"}


def _policy(pool: KVCachePool, name: str, component: str, ingress: list[Any]) -> Manifest:
    return {
        "apiVersion": "networking.k8s.io/v1",
        "kind": "NetworkPolicy",
        "metadata": metadata(pool, name, component),
        "spec": {
            "podSelector": {"matchLabels": selector(pool, component)},
            "policyTypes": ["Ingress"],
            "ingress": ingress,
        },
    }
