"""Settings of the webhook's process: every flag is also an environment variable."""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING

from kvpool_operator.pki.certificates import CertPolicy

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

__all__ = ["WebhookSettings", "read_settings"]


@dataclass(frozen=True)
class WebhookSettings:
    """Where to listen, whom to speak for, what to bring into pods."""

    address: str
    port: int
    admin_port: int
    namespace: str
    service: str
    configuration: str
    ca_secret: str
    certificate_dir: str
    """Empty: an authority of our own."""
    policy: CertPolicy
    certificate_poll_s: float
    sidecar_image: str
    sidecar_pull_policy: str
    drain_s: float
    log_level: str

    @property
    def dns_name(self) -> str:
        """The name by which the API server calls a webhook's Service."""
        return f"{self.service}.{self.namespace}.svc"


def read_settings(argv: Sequence[str], environ: Mapping[str, str]) -> WebhookSettings:
    """Flags first, then the environment, then the default; SystemExit with a message when one is missing."""
    parser = argparse.ArgumentParser(
        prog="kvpool-operator webhook", description="Admission webhook that brings the pool into opted-in pods."
    )

    def flag(name: str, help_text: str, default: str | None = None) -> None:
        variable = "KVPOOL_" + name.upper().replace("-", "_")
        value = environ.get(variable) or default
        parser.add_argument(
            f"--{name}", default=value, required=value is None, help=f"{help_text} ({variable}; default: {default})"
        )

    flag("address", "address to listen on: the pod's own", "127.0.0.1")
    flag("https-port", "port for the API server (HTTPS)", "9443")
    flag("admin-port", "port for probes and metrics (HTTP)", "8081")
    flag("namespace", "namespace of this installation")
    flag("webhook-service", "Service by which the API server calls this webhook", "kvpool-webhook")
    flag("webhook-configuration", "the MutatingWebhookConfiguration whose caBundle is kept", "kvpool-webhook")
    flag("ca-secret", "Secret of the certificate authority, shared by the replicas", "kvpool-webhook-ca")
    flag("certificate-dir", "directory of a tls.crt and tls.key that somebody else keeps, such as cert-manager", "")
    flag("ca-life", "seconds that an authority of our own lives; a new one comes at two thirds", "31536000")
    flag("certificate-life", "seconds that a certificate of our own lives; a new one comes at two thirds", "604800")
    flag("ca-settle", "seconds that a new authority is trusted before it signs", "600")
    flag("certificate-poll", "seconds between two looks at the certificates", "60")
    flag("sidecar-image", "image of the init container that brings the client")
    flag("sidecar-pull-policy", "its imagePullPolicy", "IfNotPresent")
    flag("drain", "seconds to go on answering after SIGTERM, while the Service forgets this pod", "5")
    flag("log-level", "DEBUG, INFO, WARNING or ERROR", "INFO")
    a = parser.parse_args(argv)
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
