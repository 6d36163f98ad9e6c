"""Webhook certificate that another component renews, such as cert-manager: two files that change.

The caBundle of the webhook configuration is that somebody's, too; nothing of the cluster is written here.
"""

from __future__ import annotations

import asyncio
import logging
import os
import ssl
from typing import TYPE_CHECKING, Final

from cryptography import x509

from kvpool_operator.pki.certificates import utc_now
from kvpool_operator.webhook.self_signed import load_pem

if TYPE_CHECKING:
    from collections.abc import Callable
    from datetime import datetime
    from pathlib import Path

__all__ = ["FileCertificates"]

log = logging.getLogger(__name__)

CERTIFICATE: Final = "tls.crt"
KEY: Final = "tls.key"
MOST_BYTES: Final = 64 * 1024


class FileCertificates:
    """Certificate from tls.crt and tls.key of a directory, the mount of a Secret of type kubernetes.io/tls."""

    def __init__(
        self,
        folder: Path,
        context: ssl.SSLContext,
        *,
        clock: Callable[[], datetime] = utc_now,
        poll_s: float = 10.0,
    ) -> None:
        self._folder = folder
        self._context = context
        self._clock = clock
        self._poll_s = poll_s
        self._pem = b""
        self._expires: datetime | None = None

    @property
    def ready(self) -> bool:
        """Whether a valid certificate is served."""
        return self._expires is not None and self._clock() < self._expires

    @property
    def expires(self) -> datetime | None:
        """Expiry of the certificate."""
        return self._expires

    @property
    def authority_expires(self) -> datetime | None:
        """Unknown: another component manages the CA."""
        return None

    async def run(self) -> None:
        """Poll until cancelled. An invalid certificate is ignored, and the previous one stays in use."""
        while True:
            try:
                self.step()
            except (OSError, ValueError) as e:
                log.warning(
                    "%s contains no valid certificate (%s: %s); the previous one stays in use",
                    self._folder,
                    type(e).__name__,
                    e,
                )
            await asyncio.sleep(self._poll_s)

    def step(self) -> None:
        """Load the files if they have changed. OSError, ssl.SSLError or ValueError if they are invalid."""
        certificate, key = _read(self._folder / CERTIFICATE), _read(self._folder / KEY)
        pem = certificate + b"\n" + key
        if pem == self._pem:
            return
        expires = x509.load_pem_x509_certificate(certificate).not_valid_after_utc
        # test the files in a separate context: during an update certificate and key can mismatch
        load_pem(ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER), pem)
        load_pem(self._context, pem)
        self._pem, self._expires = pem, expires
        log.info("loaded a server certificate, valid until %s", expires.isoformat())


def _read(path: Path) -> bytes:
    with os.fdopen(os.open(path, os.O_RDONLY | os.O_CLOEXEC), "rb") as file:
        data = file.read(MOST_BYTES + 1)
    if len(data) > MOST_BYTES:
        raise ValueError(f"{path.name} has more than {MOST_BYTES} bytes")
    return data
