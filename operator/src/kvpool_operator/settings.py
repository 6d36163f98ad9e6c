"""Settings of the operator's process: every flag is also an environment variable."""

from __future__ import annotations

import argparse
import socket
from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvpool_operator.desired.inputs import InstallationConfig

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

__all__ = ["OperatorSettings", "read_settings"]


@dataclass(frozen=True)
class OperatorSettings:
    """Who this process is, what it brings, and what it listens on."""

    namespace: str
    identity: str
    address: str
    admin_port: int
    lease: str
    lease_s: float
    webhook: str
    injection: str
    env: InstallationConfig
    workers: int
    refresh_s: float
    silence_s: float
    log_level: str


def read_settings(argv: Sequence[str], environ: Mapping[str, str]) -> OperatorSettings:
    """Flags first, then the environment, then the default; SystemExit with a message when one is missing."""
    parser = argparse.ArgumentParser(
        prog="kvpool-operator run", description="Keeps every KVCachePool of the cluster as its spec says."
    )

    def flag(name: str, help_text: str, default: str | None = None) -> None:
        variable = "KVPOOL_" + name.upper().replace("-", "_")
        value = environ.get(variable) or default
        parser.add_argument(
            f"--{name}", default=value, required=value is None, help=f"{help_text} ({variable}; default: {default})"
        )

    flag("namespace", "namespace of this installation, where the Lease is")
    flag("identity", "name of this process in the Lease: the pod's name", socket.gethostname())
    flag("address", "address for probes and metrics: the pod's own", "127.0.0.1")
    flag("admin-port", "port for probes and metrics (HTTP)", "8080")
    flag("lease", "name of the Lease that one replica holds", "kvpool-operator")
    flag("lease-duration", "seconds after which a Lease that is not renewed may be taken over", "15")
    flag("webhook", "name of the webhook's MutatingWebhookConfiguration and Deployment", "kvpool-webhook")
    flag("injection", "who injects: Webhook, or Policy (a MutatingAdmissionPolicy)", "Webhook")
    flag("sidecar-image", "image of everything that a pool runs")
    flag("sidecar-pull-policy", "its imagePullPolicy", "IfNotPresent")
    flag("image-pull-secrets", "names of Secrets in the pools' namespaces, with commas between them", "")
    flag("kubelet-dir", "the kubelet's directory on every node", "/var/lib/kubelet")
    flag("rendezvous-role", "ClusterRole that sidecars are bound to", "kvpool-sidecar-rendezvous")
    flag("network-policies", "true: NetworkPolicies for every pool", "false")
    flag("metrics-per-tenant", "true: sidecars export metrics per tenant", "false")
    flag("workers", "pools that are worked on at once; a third of them at most where nobody waits", "6")
    flag("refresh", "seconds between two looks at a pool when nothing happens", "10")
    flag("watch-silence", "seconds without a word after which a watch is opened again; bookmarks come every 60", "70")
    flag("log-level", "DEBUG, INFO, WARNING or ERROR", "INFO")
    a = parser.parse_args(argv)
    return OperatorSettings(
        namespace=a.namespace,
        identity=a.identity,
        address=a.address,
        admin_port=int(a.admin_port),
        lease=a.lease,
        lease_s=max(3.0, float(a.lease_duration)),
        webhook=a.webhook,
        injection=a.injection,
        env=InstallationConfig(
            sidecar_image=a.sidecar_image,
            image_pull_policy=a.sidecar_pull_policy,
            image_pull_secrets=tuple(s.strip() for s in (a.image_pull_secrets or "").split(",") if s.strip()),
            kubelet_dir=a.kubelet_dir.rstrip("/"),
            rendezvous_role=a.rendezvous_role,
            network_policies=a.network_policies == "true",
            metrics_per_tenant=a.metrics_per_tenant == "true",
        ),
        workers=max(1, int(a.workers)),
        refresh_s=max(1.0, float(a.refresh)),
        silence_s=max(1.0, float(a.watch_silence)),
        log_level=a.log_level,
    )
