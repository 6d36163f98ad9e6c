"""A bucket that speaks S3: botocore signs, this package transfers. Listing and copying use s3fs.

A client library hands an object over as one Python object, copied several times; here it goes from the socket into
the file. Requests are signed by AWS's version 4 with an unsigned payload: what is read is verified by its checksum.
"""

from __future__ import annotations

import errno
import re
import ssl
import time
from typing import TYPE_CHECKING, Any
from urllib.parse import quote, urlsplit

from kvpool.errors import ConfigError
from kvpool_sidecar.storage.buckets.fsspec import FsspecBucket, split_url
from kvpool_sidecar.storage.buckets.http import HttpPool, HttpResponse

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["S3Bucket"]

_CODE = re.compile(rb"<Code>([A-Za-z0-9]{1,64})</Code>")
_UNSIGNED = "UNSIGNED-PAYLOAD"
_CALL_S = 10.0
_SLOWEST = 2 << 20  # bytes per second; slower transfers are aborted


class S3Bucket(FsspecBucket):
    """See Bucket. `options` are those of s3fs; `endpoint_url` or a region must be among them. ConfigError as there."""

    def __init__(self, url: str, options: Mapping[str, Any], *, hidden: tuple[str, ...] = ()) -> None:
        super().__init__(url, options, hidden=hidden)
        import botocore.auth
        import botocore.awsrequest
        import botocore.credentials
        import botocore.session

        bucket, _, prefix = split_url(url)[1].strip("/").partition("/")
        client = options.get("client_kwargs", {})
        self._region = client.get("region_name") or "us-east-1"
        self._base, self._host, self._port, is_tls = _endpoint(options.get("endpoint_url", ""), bucket, self._region)
        self._prefix = f"{prefix}/" if prefix else ""
        self._request = botocore.awsrequest.AWSRequest
        if options.get("key"):
            self._credentials: Any = botocore.credentials.Credentials(
                options["key"], options.get("secret", ""), options.get("token")
            )
        else:
            self._credentials = botocore.session.get_session().get_credentials()

        class Auth(botocore.auth.S3SigV4Auth):  # type: ignore[misc]
            def payload(self, _request: Any) -> str:
                return _UNSIGNED

        self._auth = Auth
        config = options.get("config_kwargs", {})
        self._connections = HttpPool(
            self._host,
            self._port,
            ssl.create_default_context(cafile=client.get("verify")) if is_tls else None,
            connect_s=config.get("connect_timeout", 3),
            silence_s=config.get("read_timeout", 5),
        )
        self._exclusive = True

    def size(self, name: str) -> int | None:
        answer = self._ask("HEAD", name)
        if answer.status == 404:
            return None
        if answer.status != 200 or answer.length < 0:
            raise self._error(answer)
        return answer.length

    def get_to_fd(self, name: str, fd: int, size: int) -> None:
        answer = self._ask("GET", name, receive=(fd, size))
        if answer.status == 404 and _code(answer) == "NoSuchKey":
            raise FileNotFoundError(errno.ENOENT, "no such object", self.url)
        if answer.status != 200:
            raise self._error(answer)

    def get_prefix(self, name: str, fd: int, size: int) -> None:
        answer = self._ask("GET", name, {"Range": f"bytes=0-{size - 1}"}, receive=(fd, size))
        if answer.status == 404 and _code(answer) == "NoSuchKey":
            raise FileNotFoundError(errno.ENOENT, "no such object", self.url)
        if answer.status not in (200, 206):
            raise self._error(answer)

    def put(self, name: str, fd: int, size: int) -> bool:
        more = {"If-None-Match": "*"} if self._exclusive else {}
        answer = self._ask("PUT", name, {"Content-Length": str(size), **more}, send=(fd, size))
        if answer.status == 501 and self._exclusive:
            self._exclusive = False  # no conditional writes: concurrent writers write the same bytes
            return self.put(name, fd, size)
        if answer.status in (409, 412):
            return False
        if answer.status != 200:
            raise self._error(answer)
        return True

    def delete(self, name: str) -> bool:
        if self.size(name) is None:  # the response is the same for an absent object
            return False
        answer = self._ask("DELETE", name)
        if answer.status not in (200, 204):
            raise self._error(answer)
        return True

    def close(self) -> None:
        self._connections.close()
        super().close()

    def _ask(
        self,
        method: str,
        name: str,
        headers: Mapping[str, str] | None = None,
        *,
        send: tuple[int, int] | None = None,
        receive: tuple[int, int] | None = None,
    ) -> HttpResponse:
        if self._credentials is None:  # the Secret may be created later
            raise PermissionError(
                errno.EACCES, "no credentials: is there a Secret, and does secretRef name it", self.url
            )
        moved = (send or receive or (0, 0))[1]
        with self._told():
            path = f"{self._base}/{quote(self._prefix + name, safe='/-_.~')}"
            request = self._request(method, path, headers=dict(headers or {}))
            self._auth(self._credentials.get_frozen_credentials(), "s3", self._region).add_auth(request)
            target = urlsplit(path)
            fields = {"Host": target.netloc, **dict(request.headers.items())}
            return self._connections.request(
                method, target.path, fields, time.monotonic() + _CALL_S + moved / _SLOWEST, send=send, receive=receive
            )

    def _error(self, answer: HttpResponse) -> OSError:
        code = _code(answer) or "no reason given"
        number = errno.EACCES if answer.status in (401, 403) else errno.EIO
        return OSError(number, f"the object store answered {answer.status}: {code}", self.url)


def _endpoint(endpoint: str, bucket: str, region: str) -> tuple[str, str, int, bool]:
    """URL of the bucket, host, port, whether by TLS. AWS wants the bucket in the host's name where it can be there."""
    if not endpoint:
        host = f"s3.{region}.amazonaws.com"
        if "." in bucket:
            return f"https://{host}/{bucket}", host, 443, True
        return f"https://{bucket}.{host}", f"{bucket}.{host}", 443, True
    parts = urlsplit(endpoint)
    if parts.scheme not in ("http", "https") or not parts.hostname or "@" in parts.netloc:
        raise ConfigError("the endpoint must be http(s)://host:port, without user and password")
    is_tls = parts.scheme == "https"
    usual = 443 if is_tls else 80
    port = parts.port or usual
    host = f"[{parts.hostname}]" if ":" in parts.hostname else parts.hostname
    shown = host if port == usual else f"{host}:{port}"  # as it is signed
    return f"{parts.scheme}://{shown}{parts.path.rstrip('/')}/{bucket}", parts.hostname, port, is_tls


def _code(answer: HttpResponse) -> str:
    found = _CODE.search(answer.text)
    return found[1].decode() if found else ""
