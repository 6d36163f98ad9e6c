"""A certificate that somebody else keeps, such as cert-manager: two files that change now and then.

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
    """`tls.crt` and `tls.key` of a directory, as a Secret of type kubernetes.io/tls is mounted."""

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
        """Whether a certificate is served that has not run out."""
        return self._expires is not None and self._clock() < self._expires

    @property
    def expires(self) -> datetime | None:
        """End of the certificate's life."""
        return self._expires

    @property
    def authority_expires(self) -> datetime | None:
        """Not known here."""
        return None

    async def run(self) -> None:
        """Look again and again until cancelled. What cannot be used is passed by: the certificate before it stays."""
        while True:
            try:
                self.step()
            except (OSError, ValueError) as e:
                log.warning("%s holds no certificate that can be used (%s: %s)", self._folder, type(e).__name__, e)
            await asyncio.sleep(self._poll_s)

    def step(self) -> None:
        """Serve what the files hold now. OSError, ssl.SSLError or ValueError when that cannot be done."""
        certificate, key = _read(self._folder / CERTIFICATE), _read(self._folder / KEY)
        pem = certificate + b"\n" + key
        if pem == self._pem:
            return
        expires = x509.load_pem_x509_certificate(certificate).not_valid_after_utc
        # files that do not belong together, as between two writes, must not reach the context that serves
        load_pem(ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER), pem)
        load_pem(self._context, pem)
        self._pem, self._expires = pem, expires
        log.info("a new server certificate, valid until %s", expires.isoformat())


def _read(path: Path) -> bytes:
    with os.fdopen(os.open(path, os.O_RDONLY | os.O_CLOEXEC), "rb") as file:
        data = file.read(MOST_BYTES + 1)
    if len(data) > MOST_BYTES:
        raise ValueError(f"{path.name} has more than {MOST_BYTES} bytes")
    return data
