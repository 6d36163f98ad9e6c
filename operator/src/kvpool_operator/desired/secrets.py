"""Secret with the random values of a pool. It has no owner reference, because the blocks can outlive the pool."""

from __future__ import annotations

import base64
import binascii
from typing import TYPE_CHECKING, Any

from kvpool.protocol.keys import events_curve_keys, events_token, hints_token
from kvpool_operator.desired import names
from kvpool_operator.desired.inputs import PoolSecret
from kvpool_operator.desired.labels import labels, metadata
from kvpool_operator.pki.curve import curve_public_key, z85
from kvpool_operator.pki.index_tls import INDEX_CA, INDEX_FILES, INDEX_SERVER_CERT, INDEX_SERVER_KEY
from kvpool_operator.pki.peer_ca import ISSUER_CA

if TYPE_CHECKING:
    from kvpool_operator.desired.inputs import Inputs, Manifest

__all__ = [
    "PEER_CERTIFICATES",
    "PEER_FILES",
    "events_secret",
    "hints_secret",
    "index_ca_files",
    "index_server_files",
    "password_files",
    "read_secret",
    "secret",
    "shared_key_files",
]

PEER_CERTIFICATES = ("peer-ca.crt", "peer-previous.crt", ISSUER_CA)
"""Names of the files of the pool's CA that sidecars read: no key."""
PEER_FILES = (*PEER_CERTIFICATES, "peer-ca.key", "peer-previous.key")
"""Names of all files of the pool's CA in the Secret. Keys of earlier builds stay until every sidecar was replaced."""
_KEYS = {
    "pool-id": "pool_id",
    "pool-secret": "pool_secret",
    "managed-index-password": "managed_index_password",
    "managed-index-revision": "managed_index_revision",
}
_PREVIOUS = "managed-index-previous"
INDEX_PASSWORD, INDEX_PREVIOUS = "index-password", "index-password-previous"
"""Names of the files that sidecars read."""
SHARED_KEYS = "shared-keys.json"
"""Name of the file with the keys of the encrypted shared tier."""


def read_secret(manifest: Manifest, fresh: PoolSecret) -> PoolSecret:
    """Return the values of an existing Secret; missing or invalid ones are taken from `fresh`."""
    data: dict[str, Any] = manifest.get("data") or {}
    values = {}
    for key, field in _KEYS.items():
        values[field] = _text(data.get(key))
    random: dict[str, Any] = {f: v or getattr(fresh, f) for f, v in values.items()}
    random["managed_index_previous"] = _text(data.get(_PREVIOUS))
    random["shared_keys"] = _text(data.get(SHARED_KEYS))
    return PoolSecret(**random, peer_files=_files(data, PEER_FILES), index_files=_files(data, INDEX_FILES))


def _files(data: dict[str, Any], wanted: tuple[str, ...]) -> dict[str, str]:
    return {name: text for name in wanted if (text := _text(data.get(name)))}


def _text(encoded: Any) -> str:
    """Return an empty string for a missing or invalid value."""
    try:
        return base64.b64decode(encoded, validate=True).decode("ascii")
    except (TypeError, ValueError, binascii.Error):
        return ""


def secret(inputs: Inputs) -> Manifest:
    """Secret `NAME-secret`; sidecars read `pool-secret`, the passwords of their index and the files for TLS.

    Passwords of a managed and of an external index have keys of their own: while a pool moves from one to the other,
    each sidecar finds that of the index it knows.
    """
    s = inputs.secret
    values = {
        "pool-id": s.pool_id,
        "pool-secret": s.pool_secret,
        "managed-index-password": s.managed_index_password,
        "managed-index-revision": s.managed_index_revision,
        _PREVIOUS: s.managed_index_previous,
        **({INDEX_PASSWORD: inputs.external.password} if inputs.external else {}),
        **({SHARED_KEYS: s.shared_keys} if s.shared_keys else {}),
        **inputs.index_files,
        **{name: s.peer_files.get(name, "") for name in PEER_FILES},
        **s.index_files,  # also after a change to another index, for the sidecars that still use this one
    }
    return {
        "apiVersion": "v1",
        "kind": "Secret",
        "metadata": {
            "name": names.secret(inputs.pool.metadata.name),
            "namespace": inputs.pool.metadata.namespace,
            "labels": labels(inputs.pool.metadata.name, "secret"),
        },
        "type": "Opaque",
        "data": {k: base64.b64encode(v.encode()).decode() for k, v in values.items()},
    }


def index_ca_files(inputs: Inputs) -> list[Manifest]:
    """Return volume items: the CA of an index with TLS, under the name that sidecars read."""
    return [{"key": INDEX_CA, "path": "index-ca.crt"}] if inputs.pool.spec.index.is_encrypted else []


def index_server_files(inputs: Inputs) -> list[Manifest]:
    """Return volume items: certificate and key of an index with TLS, under the names that it reads."""
    if not inputs.pool.spec.index.is_encrypted:
        return []
    return [
        {"key": INDEX_SERVER_CERT, "path": "index-server.crt"},
        {"key": INDEX_SERVER_KEY, "path": "index-server.key"},
    ]


def password_files(*, managed: bool) -> list[Manifest]:
    """Return volume items: the passwords of the index, under the names that sidecars and the managed index read."""
    if not managed:
        return [{"key": INDEX_PASSWORD, "path": INDEX_PASSWORD}]
    return [{"key": "managed-index-password", "path": INDEX_PASSWORD}, {"key": _PREVIOUS, "path": INDEX_PREVIOUS}]


def shared_key_files(inputs: Inputs) -> list[Manifest]:
    """Return volume items: the keys of an encrypted shared tier."""
    is_encrypted = any(tier.is_encrypted for tier in inputs.pool.spec.tiers)
    return [{"key": SHARED_KEYS, "path": SHARED_KEYS}] if is_encrypted else []


def events_secret(inputs: Inputs) -> Manifest | None:
    """Return Secret `NAME-events`: token and CURVE keys of routers, derived from the pool's secret one way."""
    events = inputs.pool.spec.events
    if not events.enabled:
        return None
    s = inputs.secret
    origin = (s.pool_secret.encode(), s.pool_id, events.token_revision)
    server_key, router_key = events_curve_keys(*origin)
    values = {
        "token": events_token(*origin),
        "curve-server-public-key": z85(curve_public_key(server_key)),
        "curve-public-key": z85(curve_public_key(router_key)),
        "curve-secret-key": z85(router_key),
    }
    return {
        "apiVersion": "v1",
        "kind": "Secret",
        "metadata": metadata(inputs.pool, names.events(inputs.pool.metadata.name), "secret"),
        "type": "Opaque",
        "data": {key: base64.b64encode(text.encode()).decode() for key, text in values.items()},
    }


def hints_secret(inputs: Inputs) -> Manifest | None:
    """Return Secret `NAME-hints`: the token of POST /hints, derived from the pool's secret one way."""
    hints = inputs.pool.spec.hints
    if not hints.enabled:
        return None
    token = hints_token(inputs.secret.pool_secret.encode(), inputs.secret.pool_id, hints.token_revision)
    return {
        "apiVersion": "v1",
        "kind": "Secret",
        "metadata": metadata(inputs.pool, names.hints(inputs.pool.metadata.name), "secret"),
        "type": "Opaque",
        "data": {"token": base64.b64encode(token.encode()).decode()},
    }
