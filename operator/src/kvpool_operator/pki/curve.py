"""Curve25519 keys of ZeroMQ: public keys, and their text form Z85 (RFC 32)."""

from __future__ import annotations

from typing import Final

from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey

__all__ = ["curve_public_key", "z85"]

_DIGITS: Final = "0123456789abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ.-:+=^!/*?&<>()[]{}@%$#"


def curve_public_key(secret_key: bytes) -> bytes:
    """Return the public key of a secret key; both have 32 bytes."""
    public = X25519PrivateKey.from_private_bytes(secret_key).public_key()
    return public.public_bytes(serialization.Encoding.Raw, serialization.PublicFormat.Raw)


def z85(data: bytes) -> str:
    """Encode bytes, a multiple of 4, as text of five characters for each 4 bytes."""
    if len(data) % 4:
        raise ValueError("Z85 encodes multiples of 4 bytes")
    out = []
    for at in range(0, len(data), 4):
        number = int.from_bytes(data[at : at + 4], "big")
        out += [_DIGITS[number // 85**power % 85] for power in (4, 3, 2, 1, 0)]
    return "".join(out)
