"""Settings of `kvpool-operator run`: every flag is also an environment variable (KVPOOL_ and its name)."""

from __future__ import annotations

import argparse
import socket
from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvpool_operator.api.installation_limits import DEFAULT_ALLOWED_PATHS, InstallationLimits
from kvpool_operator.desired.inputs import InstallationConfig

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

__all__ = ["OperatorSettings", "build_parser", "read_settings"]


@dataclass(frozen=True)
class OperatorSettings:
    """Identity, addresses, images and limits of this process."""

    namespace: str
    namespaces: tuple[str, ...]
    """Those whose pools are reconciled; empty: all."""
    identity: str
    address: str
    admin_port: int
    issuer_port: int
    authority_secret: str
    leader_election_id: str
    lease_s: float
    webhook: str
    injection: str
    env: InstallationConfig
    max_concurrent_reconciles: int
    resync_period_s: float
    watch_idle_timeout_s: float
    log_level: str


def build_parser(environ: Mapping[str, str]) -> argparse.ArgumentParser:
    """Return the parser of all flags. A flag takes its default from its KVPOOL_ variable in `environ`, if it is set."""
    parser = argparse.ArgumentParser(
        prog="kvpool-operator run",
        description="Reconciles every KVCachePool, KVCacheTenant and KVCacheOperation of the cluster.",
    )

    def flag(name: str, help_text: str, default: str | None = None) -> None:
        variable = "KVPOOL_" + name.upper().replace("-", "_")
        value = environ.get(variable) or default
        parser.add_argument(
            f"--{name}", default=value, required=value is None, help=f"{help_text} ({variable}; default: {default})"
        )

    flag("namespace", "namespace of this installation, which holds the leader election Lease")
    flag("namespaces", "comma-separated namespaces whose pools are reconciled; empty: all", "")
    flag("identity", "identity of this replica in the Lease: the pod's name", socket.gethostname())
    flag("address", "address to serve probes and metrics on: the pod's IP", "127.0.0.1")
    flag("admin-port", "HTTP port of probes and metrics", "8080")
    flag("issuer-port", "HTTPS port where sidecars request their certificates", "9444")
    flag("issuer-service", "name of the Service of that port in this namespace", "kvpool-issuer")
    flag("authority-secret", "name of the Secret with the root of the pools' CAs, which is created", "kvpool-authority")
    flag("leader-election-id", "name of the Lease that only the leading replica holds", "kvpool-operator")
    flag("lease-duration", "seconds after which another replica may take over a Lease that was not renewed", "15")
    flag("webhook", "name of the webhook's MutatingWebhookConfiguration and Deployment", "kvpool-webhook")
    flag("injection", "what injects pods: Webhook, or Policy (a MutatingAdmissionPolicy)", "Webhook")
    flag("sidecar-image", "image of every container that the operator creates for a pool")
    flag("index-image", "image with valkey-server for managed indexes; empty: the server of the sidecar image", "")
    flag("sidecar-pull-policy", "imagePullPolicy of that image", "IfNotPresent")
    flag("image-pull-secrets", "comma-separated names of Secrets in the pools' namespaces", "")
    flag(
        "allowed-paths",
        "comma-separated directories of nodes below which pools may have tiers",
        ",".join(DEFAULT_ALLOWED_PATHS),
    )
    flag("nfs", "true: pools may have NFS tiers, for which the operator creates PersistentVolumes", "false")
    flag("network-policies", "true: create NetworkPolicies for every pool", "false")
    flag("metrics-per-tenant", "true: sidecars export metrics per tenant", "false")
    flag(
        "max-concurrent-reconciles",
        "number of pools that are reconciled at the same time; at most a third of them in the background",
        "6",
    )
    flag("resync-period", "seconds between two reconciles of a pool without any event", "10")
    flag(
        "watch-idle-timeout",
        "reconnect a watch that received nothing for this many seconds; bookmarks arrive every 60 s",
        "70",
    )
    flag("log-level", "DEBUG, INFO, WARNING or ERROR", "INFO")
    return parser


def read_settings(argv: Sequence[str], environ: Mapping[str, str]) -> OperatorSettings:
    """Read flags, then the environment, then defaults; SystemExit with a message if a value is missing."""
    a = build_parser(environ).parse_args(argv)
    return OperatorSettings(
        namespace=a.namespace,
        namespaces=tuple(sorted({s.strip() for s in a.namespaces.split(",")} - {""})),
        identity=a.identity,
        address=a.address,
        admin_port=int(a.admin_port),
        issuer_port=int(a.issuer_port),
        authority_secret=a.authority_secret,
        leader_election_id=a.leader_election_id,
        lease_s=max(3.0, float(a.lease_duration)),
        webhook=a.webhook,
        injection=a.injection,
        env=InstallationConfig(
            sidecar_image=a.sidecar_image,
            index_image=a.index_image or "",
            image_pull_policy=a.sidecar_pull_policy,
            image_pull_secrets=tuple(s.strip() for s in (a.image_pull_secrets or "").split(",") if s.strip()),
            network_policies=a.network_policies == "true",
            issuer_url=f"https://{a.issuer_service}.{a.namespace}.svc:{int(a.issuer_port)}",
            metrics_per_tenant=a.metrics_per_tenant == "true",
            limits=InstallationLimits(
                tuple(s.strip().rstrip("/") for s in a.allowed_paths.split(",") if s.strip()),
                frozenset({environ.get("KUBERNETES_SERVICE_HOST", "").lower()} - {""}),
                nfs=a.nfs == "true",
            ),
        ),
        max_concurrent_reconciles=max(1, int(a.max_concurrent_reconciles)),
        resync_period_s=max(1.0, float(a.resync_period)),
        watch_idle_timeout_s=max(1.0, float(a.watch_idle_timeout)),
        log_level=a.log_level,
    )
