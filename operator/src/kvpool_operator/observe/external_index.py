"""Reads the settings of an external index from Secrets, without exposing their values. Pure."""

from __future__ import annotations

import base64
import binascii
from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvpool.errors import ConfigError
from kvpool.protocol import index_url
from kvpool_operator.desired.inputs import ExternalIndexUrl

if TYPE_CHECKING:
    from collections.abc import Mapping

    from kvpool_operator.api.v1alpha1 import ExternalIndex
    from kvpool_operator.k8s.client import Manifest

__all__ = ["ExternalIndexLookup", "read_external", "secret_names"]

_PEM = "-----BEGIN "


def secret_names(external: ExternalIndex) -> set[str]:
    """Names of the Secrets that the index refers to."""
    refs = (
        external.url_secret_ref,
        external.username_secret_ref,
        external.password_secret_ref,
        external.ca_secret_ref,
        external.client_certificate_secret_ref,
    )
    return {ref.name for ref in refs if ref is not None}


@dataclass(frozen=True)
class ExternalIndexLookup:
    """The external index of a pool, or why its configuration is unusable. Both are empty for a managed index."""

    url: ExternalIndexUrl | None = None
    problem: str = ""
    """Never contains a value of a Secret."""


def read_external(external: ExternalIndex, secrets: Mapping[str, Manifest | None]) -> ExternalIndexLookup:
    """Read the URL, the credentials and the certificates of the index from its Secrets."""
    try:
        return ExternalIndexLookup(_read(external, secrets))
    except _ProblemError as e:
        return ExternalIndexLookup(problem=str(e))


class _ProblemError(Exception):
    """The configuration is unusable; the message is for the user."""


def _read(external: ExternalIndex, secrets: Mapping[str, Manifest | None]) -> ExternalIndexUrl:
    source = external.url_secret_ref
    text = _value(secrets, source.name, source.key, index_url.FORMS)
    try:
        url = index_url.parse(text)
    except ConfigError:
        url = index_url.IndexUrl("unix", tls=False, endpoints=())
    if url.kind == "unix":
        raise _ProblemError(f"key {source.key} of Secret {source.name} should hold {index_url.FORMS}")
    username, password = url.username, url.password
    if (ref := external.username_secret_ref) is not None:
        username = _value(secrets, ref.name, ref.key, "the name of the user")
    if (pref := external.password_secret_ref) is not None:
        password = _value(secrets, pref.name, pref.key, "the password")
    files = {}
    if (ca := external.ca_secret_ref) is not None:
        files["index-ca.crt"] = _pem(secrets, ca.name, ca.key)
    if (pair := external.client_certificate_secret_ref) is not None:
        files["index-client.crt"] = _pem(secrets, pair.name, "tls.crt")
        files["index-client.key"] = _pem(secrets, pair.name, "tls.key")
    if files and not url.tls:
        raise _ProblemError(
            f"certificates are given, but the URL in key {source.key} of Secret {source.name} is not one for TLS: "
            "begin it with rediss"
        )
    return ExternalIndexUrl(url.public, username, password, files)


def _pem(secrets: Mapping[str, Manifest | None], name: str, key: str) -> str:
    text = _value(secrets, name, key, "PEM")
    if not text.startswith(_PEM):
        raise _ProblemError(f"key {key} of Secret {name} should hold PEM, which begins with {_PEM.strip()}")
    return text + "\n"


def _value(secrets: Mapping[str, Manifest | None], name: str, key: str, form: str) -> str:
    secret = secrets.get(name)
    if secret is None:
        raise _ProblemError(f"Secret {name} does not exist: create it with the key {key} holding {form}")
    try:
        return base64.b64decode((secret.get("data") or {})[key], validate=True).decode().strip()
    except KeyError:
        raise _ProblemError(f"Secret {name} has no key {key}: add it, holding {form}") from None
    except (ValueError, TypeError, binascii.Error):
        raise _ProblemError(f"key {key} of Secret {name} is not text: it should hold {form}") from None
