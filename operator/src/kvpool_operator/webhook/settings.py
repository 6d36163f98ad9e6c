"""Settings of the webhook process. Every flag is also an environment variable."""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING

from kvpool_operator.pki.certificates import CertPolicy

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

__all__ = ["WebhookSettings", "build_parser", "read_settings"]


@dataclass(frozen=True)
class WebhookSettings:
    """Settings of the webhook process."""

    address: str
    port: int
    admin_port: int
    namespace: str
    service: str
    configuration: str
    ca_secret: str
    certificate_dir: str
    """Directory of externally managed certificates. Empty: the webhook runs its own CA."""
    policy: CertPolicy
    certificate_poll_s: float
    sidecar_image: str
    sidecar_pull_policy: str
    drain_s: float
    log_level: str

    @property
    def dns_name(self) -> str:
        """DNS name by which the API server calls the Service of the webhook."""
        return f"{self.service}.{self.namespace}.svc"


def build_parser(environ: Mapping[str, str]) -> argparse.ArgumentParser:
    """Return the parser of all flags. A flag takes its default from its KVPOOL_ variable in `environ`, if it is set."""
    parser = argparse.ArgumentParser(
        prog="kvpool-operator webhook", description="Admission webhook that injects opted-in pods."
    )

    def flag(name: str, help_text: str, default: str | None = None) -> None:
        variable = "KVPOOL_" + name.upper().replace("-", "_")
        value = environ.get(variable) or default
        parser.add_argument(
            f"--{name}", default=value, required=value is None, help=f"{help_text} ({variable}; default: {default})"
        )

    flag("address", "listen address, such as the pod IP address", "127.0.0.1")
    flag("https-port", "HTTPS port for the API server", "9443")
    flag("admin-port", "HTTP port for probes and metrics", "8081")
    flag("namespace", "namespace of this installation")
    flag("webhook-service", "name of the Service of the webhook", "kvpool-webhook")
    flag(
        "webhook-configuration", "name of the MutatingWebhookConfiguration whose caBundle is updated", "kvpool-webhook"
    )
    flag("ca-secret", "name of the Secret with the CA that the replicas share", "kvpool-webhook-ca")
    flag(
        "certificate-dir",
        "directory with tls.crt and tls.key that another component renews, such as cert-manager; empty: own CA",
        "",
    )
    flag("ca-life", "validity of the own CA in seconds; renewed after two thirds", "31536000")
    flag("certificate-life", "validity of an own certificate in seconds; renewed after two thirds", "604800")
    flag("ca-settle", "seconds that a new CA is trusted before it signs", "600")
    flag("certificate-poll", "seconds between two checks of the certificates", "60")
    flag("sidecar-image", "image of the init container that installs the client")
    flag("sidecar-pull-policy", "imagePullPolicy of the init container", "IfNotPresent")
    flag("drain", "seconds to keep serving after SIGTERM, while the Service removes this pod", "5")
    flag("log-level", "DEBUG, INFO, WARNING or ERROR", "INFO")
    return parser


def read_settings(argv: Sequence[str], environ: Mapping[str, str]) -> WebhookSettings:
    """Read flags, then the environment, then defaults. SystemExit if a required setting is missing."""
    a = build_parser(environ).parse_args(argv)
    return WebhookSettings(
        address=a.address,
        port=int(a.https_port),
        admin_port=int(a.admin_port),
        namespace=a.namespace,
        service=a.webhook_service,
        configuration=a.webhook_configuration,
        ca_secret=a.ca_secret,
        certificate_dir=a.certificate_dir,
        policy=CertPolicy(
            ca_life=timedelta(seconds=float(a.ca_life)),
            leaf_life=timedelta(seconds=float(a.certificate_life)),
            settle=timedelta(seconds=float(a.ca_settle)),
        ),
        certificate_poll_s=max(0.1, float(a.certificate_poll)),
        sidecar_image=a.sidecar_image,
        sidecar_pull_policy=a.sidecar_pull_policy,
        drain_s=float(a.drain),
        log_level=a.log_level,
    )
