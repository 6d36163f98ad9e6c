"""Keeps the webhook's certificates: the Secret of the authority, the caBundle, and this replica's leaf.

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
    """The two objects that are kept, and nothing else of the cluster."""

    async def read_secret(self) -> dict[str, Any] | None:
        """The authority's Secret as JSON, None when there is none."""
        ...

    async def write_secret(self, data: dict[str, str | None], resource_version: str | None) -> None:
        """Create it (None), or change it at that version; a value of None goes. ConflictError: another was first."""
        ...

    async def read_configuration(self) -> dict[str, Any] | None:
        """The MutatingWebhookConfiguration as JSON, None when there is none."""
        ...

    async def write_webhooks(self, webhooks: list[dict[str, Any]], resource_version: str) -> None:
        """Replace its list of webhooks at that version. ConflictError: another was first."""
        ...


@dataclass(frozen=True)
class DnsNames:
    """Whom the certificates speak for."""

    authority: str
    service_dns: tuple[str, ...]


class CertificateManager:
    """One per replica. `step` is the whole loop body; `run` repeats it."""

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
        """Whether the API server can reach us: a valid leaf of an authority that it was told of."""
        return self._trusted and self._leaf is not None and self._clock() < self._leaf.expires

    @property
    def expires(self) -> datetime | None:
        """End of the leaf's life."""
        return self._leaf.expires if self._leaf else None

    @property
    def authority_expires(self) -> datetime | None:
        """End of the newest authority's life."""
        return self._authority_expires

    async def run(self) -> None:
        """Poll until cancelled. After a failure the last leaf stays in use and the next try comes sooner."""
        while True:
            pause = self._poll_s
            try:
                await self.step()
            except Exception as e:
                log.warning("certificates could not be checked (%s: %s)", type(e).__name__, e)
                pause = min(5.0, self._poll_s)
            await asyncio.sleep(pause)

    async def step(self) -> None:
        """Authority, caBundle, leaf: in this order, so that nothing is served before it is trusted."""
        authorities = await self._authorities()
        self._authority_expires = authorities.current.expires
        now = self._clock()
        await self._publish(base64.b64encode(authorities.bundle(now)).decode())
        signer = authorities.signer(now, self._policy)
        if leaf_due(self._leaf, signer, now, self._policy):
            self._serve(signer, now)

    async def _authorities(self) -> TrustBundle:
        """What the Secret holds, after it was brought up to date."""
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
                continue  # another replica was first: use its authority
            log.info("a new certificate authority, valid until %s", wanted.current.expires.isoformat())
            return wanted
        raise ConflictError(f"the authority's Secret changed {_ATTEMPTS} times in a row")

    async def _publish(self, bundle: str) -> None:
        configuration = await self._store.read_configuration()
        if configuration is None:
            raise LookupError("the MutatingWebhookConfiguration does not exist: nothing calls this webhook")
        present: list[dict[str, Any]] = configuration.get("webhooks") or []
        wanted = [w | {"clientConfig": (w.get("clientConfig") or {}) | {"caBundle": bundle}} for w in present]
        if wanted != present:
            await self._store.write_webhooks(wanted, _version(configuration))
            log.info("caBundle written")
        self._trusted = True

    def _serve(self, signer: CertificateAuthority, now: datetime) -> None:
        leaf = issue_leaf(signer, self._names.service_dns, now, self._policy)
        load_pem(self._context, leaf.certificate_pem + leaf.key_pem)
        self._leaf = leaf
        log.info("a new server certificate, valid until %s", leaf.expires.isoformat())


def server_context() -> ssl.SSLContext:
    """TLS 1.3 for HTTP/1.1; the certificate is loaded later and replaced in place: new handshakes get the new one."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.set_alpn_protocols(["http/1.1"])
    return context


def load_pem(context: ssl.SSLContext, pem: bytes) -> None:
    """Serve a certificate with its key. OpenSSL reads files; an anonymous one in memory keeps the key off every disk.

    ssl.SSLError when they do not belong together.
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
            log.warning("the authority's Secret: %s is not base64", name)
    return data
