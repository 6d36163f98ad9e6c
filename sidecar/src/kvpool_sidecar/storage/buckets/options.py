"""Storage options from a Secret's files, named as in fsspec or as in AWS.

Each call reads the files again, so a rotated Secret is used without a restart. Values never leave as text.
"""

from __future__ import annotations

import copy
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from kvpool.errors import ConfigError
from kvpool_sidecar.storage.buckets.fsspec import FsspecBucket, split_url
from kvpool_sidecar.storage.buckets.rotating import RotatingBucket
from kvpool_sidecar.storage.buckets.s3 import S3Bucket

if TYPE_CHECKING:
    from kvpool.config import FsspecTier
    from kvpool_sidecar.storage.buckets.base import Bucket

__all__ = ["Options", "open_bucket", "read_options"]

_MAX_FILE = 64 << 10
_MAX_FILES = 32
_SHORTEST_HIDDEN = 6
_AWS = {
    "AWS_ACCESS_KEY_ID": "key",
    "AWS_SECRET_ACCESS_KEY": "secret",
    "AWS_SESSION_TOKEN": "token",
    "AWS_ENDPOINT_URL": "endpoint_url",
    "AWS_ENDPOINT_URL_S3": "endpoint_url",
    "AWS_REGION": "region",
    "AWS_DEFAULT_REGION": "region",
    "AWS_CA_BUNDLE": "ca",
}
_KNOWN = {
    "s3": {"key", "secret", "token", "endpoint_url", "region", "ca"},
    "gs": {"token", "project"},
    "abfs": {
        "account_name",
        "account_key",
        "sas_token",
        "connection_string",
        "tenant_id",
        "client_id",
        "client_secret",
    },
}
_PATHS = {("s3", "ca"), ("gs", "token")}  # the option is the name of a file
_CONNECT_S, _READ_S, _CONNECTIONS = 3, 5, 32


class Options(NamedTuple):
    """`storage` goes to fsspec; `hidden` are the values that no message may contain."""

    storage: dict[str, Any]
    hidden: tuple[str, ...]


def read_options(tier: FsspecTier, directory: str) -> Options:
    """Options of `tier` merged with the files of `directory`; empty `directory`: no Secret.

    ConfigError names a file that means nothing here, or is too large, never what it says.
    """
    scheme, _ = split_url(tier.url)
    given: dict[str, str] = {}
    hidden: list[str] = []
    for path in _files(directory):
        option = _AWS.get(path.name, path.name) if scheme == "s3" else path.name
        if option not in _KNOWN.get(scheme, set()):
            raise ConfigError(f"the Secret's key {path.name[:64]!r} means nothing for {scheme}://", where=tier.name)
        text = _text(path)
        given[option] = str(path) if (scheme, option) in _PATHS else text
        if len(text) >= _SHORTEST_HIDDEN and option not in ("endpoint_url", "region"):
            hidden.append(text)
    if scheme != "s3":
        return Options(dict(given), tuple(hidden))
    endpoint = given.pop("endpoint_url", "") or tier.endpoint
    region = given.pop("region", "") or tier.region
    client: dict[str, Any] = {"region_name": region} if region else {}
    if ca := given.pop("ca", ""):
        client["verify"] = ca
    storage: dict[str, Any] = {
        **given,
        "client_kwargs": client,
        "config_kwargs": {
            "connect_timeout": _CONNECT_S,
            "read_timeout": _READ_S,
            "max_pool_connections": _CONNECTIONS,
            "retries": {"total_max_attempts": 1},
        },
    }
    if endpoint:
        storage["endpoint_url"] = endpoint
    return Options(storage, tuple(hidden))


def _files(directory: str) -> list[Path]:
    """The Secret's keys; Kubernetes' own entries begin with two dots."""
    if not directory or not os.path.isdir(directory):
        return []
    found = sorted(p for p in Path(directory).iterdir() if not p.name.startswith("..") and p.is_file())
    if len(found) > _MAX_FILES:
        raise ConfigError(f"more than {_MAX_FILES} keys in the Secret", where=directory)
    return found


def _text(path: Path) -> str:
    with path.open("rb") as file:
        data = file.read(_MAX_FILE + 1)
    if len(data) > _MAX_FILE:
        raise ConfigError(f"larger than {_MAX_FILE} bytes", where=str(path))
    try:
        return data.decode().strip()
    except UnicodeDecodeError:
        raise ConfigError("not text", where=str(path)) from None


def open_bucket(tier: FsspecTier, directory: str) -> Bucket:
    """Open the bucket of a tier, which follows a rotated Secret. ConfigError if it cannot be used as configured."""
    return RotatingBucket(
        tier.url,
        lambda: read_options(tier, directory),
        lambda options: _bucket(tier.url, options),
    )


def _bucket(url: str, options: Options) -> Bucket:
    """Choose the bucket class; without an endpoint and a region only s3fs can locate the bucket."""
    storage = copy.deepcopy(options.storage)  # client libraries modify it
    if url.startswith("s3://") and (storage.get("endpoint_url") or storage["client_kwargs"].get("region_name")):
        return S3Bucket(url, storage, hidden=options.hidden)
    return FsspecBucket(url, storage, hidden=options.hidden)
