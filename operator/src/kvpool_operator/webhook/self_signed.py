"""Manages the webhook's self-signed certificates: the Secret of the authority, the caBundle, and this replica's leaf.

All replicas run this. The Secret is written under its resourceVersion, so one of them wins and the others read what it
wrote. Exactly one MutatingWebhookConfiguration, by name, is patched, and of it nothing but `caBundle`.
"""

from __future__ import annotations

import asyncio
import base64
import binascii
import logging
import os
import ssl
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, Protocol

from kvpool_operator.errors import ConflictError
from kvpool_operator.pki.certificates import (
    CertificateAuthority,
    CertPolicy,
    LeafCertificate,
    TrustBundle,
    issue_leaf,
    leaf_due,
    next_authorities,
    utc_now,
)

if TYPE_CHECKING:
    from collections.abc import Callable
    from datetime import datetime

__all__ = ["CertificateManager", "DnsNames", "TrustStore", "load_pem", "server_context"]

log = logging.getLogger(__name__)

_ATTEMPTS: Final = 4


class TrustStore(Protocol):
    """Access to the two objects that the manager maintains."""

    async def read_secret(self) -> dict[str, Any] | None:
        """Return the CA's Secret as JSON, or None."""
        ...

    async def write_secret(self, data: dict[str, str | None], resource_version: str | None) -> None:
        """Create the Secret (None), or patch that version; None deletes a key. ConflictError: another replica was
        first."""
        ...

    async def read_configuration(self) -> dict[str, Any] | None:
        """Return the MutatingWebhookConfiguration as JSON, or None."""
        ...

    async def write_webhooks(self, webhooks: list[dict[str, Any]], resource_version: str) -> None:
        """Replace the list of webhooks of that version. ConflictError: another replica was first."""
        ...


@dataclass(frozen=True)
class DnsNames:
    """Subject names of the certificates."""

    authority: str
    service_dns: tuple[str, ...]


class CertificateManager:
    """Certificates of one replica. `step` is the body of the loop; `run` repeats it."""

    def __init__(
        self,
        store: TrustStore,
        context: ssl.SSLContext,
        names: DnsNames,
        *,
        policy: CertPolicy | None = None,
        clock: Callable[[], datetime] = utc_now,
        poll_s: float = 60.0,
    ) -> None:
        self._store = store
        self._context = context
        self._names = names
        self._policy = policy or CertPolicy()
        self._clock = clock
        self._poll_s = poll_s
        self._leaf: LeafCertificate | None = None
        self._authority_expires: datetime | None = None
        self._trusted = False

    @property
    def ready(self) -> bool:
        """Whether the API server can connect: the leaf is valid and its CA is in the caBundle."""
        return self._trusted and self._leaf is not None and self._clock() < self._leaf.expires

    @property
    def expires(self) -> datetime | None:
        """Expiry of the leaf."""
        return self._leaf.expires if self._leaf else None

    @property
    def authority_expires(self) -> datetime | None:
        """Expiry of the newest CA."""
        return self._authority_expires

    async def run(self) -> None:
        """Poll until cancelled. After a failure the last leaf stays in use, and the retry comes sooner."""
        while True:
            pause = self._poll_s
            try:
                await self.step()
            except Exception as e:
                log.warning("cannot check the certificates (%s: %s); the current ones stay in use", type(e).__name__, e)
                pause = min(5.0, self._poll_s)
            await asyncio.sleep(pause)

    async def step(self) -> None:
        """Update CA, caBundle and leaf, in this order, so that only trusted certificates are served."""
        authorities = await self._authorities()
        self._authority_expires = authorities.current.expires
        now = self._clock()
        await self._publish(base64.b64encode(authorities.bundle(now)).decode())
        signer = authorities.signer(now, self._policy)
        if leaf_due(self._leaf, signer, now, self._policy):
            self._serve(signer, now)

    async def _authorities(self) -> TrustBundle:
        """Return the CAs of the Secret, after updating it."""
        for _ in range(_ATTEMPTS):
            secret = await self._store.read_secret()
            stored = TrustBundle.from_secret(_decoded(secret))
            wanted = next_authorities(
                stored, self._names.authority, self._names.service_dns, self._clock(), self._policy
            )
            if wanted is stored:
                return wanted
            data: dict[str, str | None] = dict.fromkeys((secret or {}).get("data") or {})
            data |= {k: base64.b64encode(v).decode() for k, v in wanted.to_secret().items()}
            try:
                await self._store.write_secret(data, _version(secret) if secret else None)
            except ConflictError:
                continue  # another replica was first: use its CA
            log.info("created a certificate authority, valid until %s", wanted.current.expires.isoformat())
            return wanted
        raise ConflictError(f"the Secret of the CA changed {_ATTEMPTS} times in a row")

    async def _publish(self, bundle: str) -> None:
        configuration = await self._store.read_configuration()
        if configuration is None:
            raise LookupError(
                "the MutatingWebhookConfiguration does not exist, so the API server does not call this webhook"
            )
        present: list[dict[str, Any]] = configuration.get("webhooks") or []
        wanted = [w | {"clientConfig": (w.get("clientConfig") or {}) | {"caBundle": bundle}} for w in present]
        if wanted != present:
            await self._store.write_webhooks(wanted, _version(configuration))
            log.info("updated the caBundle")
        self._trusted = True

    def _serve(self, signer: CertificateAuthority, now: datetime) -> None:
        leaf = issue_leaf(signer, self._names.service_dns, now, self._policy)
        load_pem(self._context, leaf.certificate_pem + leaf.key_pem)
        self._leaf = leaf
        log.info("issued a server certificate, valid until %s", leaf.expires.isoformat())


def server_context() -> ssl.SSLContext:
    """Return a context for TLS 1.3 and HTTP/1.1. Its certificate is replaced in place, for new handshakes."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.set_alpn_protocols(["http/1.1"])
    return context


def load_pem(context: ssl.SSLContext, pem: bytes) -> None:
    """Load a certificate with its key. OpenSSL reads files, so an anonymous memory file keeps the key off the disk.

    ssl.SSLError if they do not match.
    """
    fd = os.memfd_create("kvpool-webhook-leaf", os.MFD_CLOEXEC)
    try:
        with os.fdopen(os.dup(fd), "wb") as file:
            file.write(pem)
        context.load_cert_chain(f"/proc/self/fd/{fd}")
    finally:
        os.close(fd)


def _version(manifest: dict[str, Any]) -> str:
    return str((manifest.get("metadata") or {}).get("resourceVersion") or "")


def _decoded(secret: dict[str, Any] | None) -> dict[str, bytes]:
    data: dict[str, bytes] = {}
    for name, value in ((secret or {}).get("data") or {}).items():
        try:
            data[name] = base64.b64decode(value, validate=True)
        except (binascii.Error, ValueError, TypeError):
            log.warning("the Secret of the CA: %s is not base64", name)
    return data
