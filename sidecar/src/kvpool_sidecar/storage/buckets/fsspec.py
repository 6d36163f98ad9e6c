"""A bucket at any fsspec URL: `s3://bucket/prefix`, `file:///directory`, `memory://name`.

Objects come and go in pieces of PIECE bytes. fsspec's own caches are off: what it remembers of a listing may be old.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
import secrets
import threading
from datetime import datetime
from typing import TYPE_CHECKING, Any

from kvpool.errors import ConfigError
from kvpool_sidecar.storage.buckets.base import PIECE, Bucket, ObjectInfo

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

__all__ = ["PACKAGES", "TOUCHES", "FsspecBucket", "split_url"]

PACKAGES = {"s3": "s3fs", "gs": "gcsfs", "abfs": "adlfs", "file": "", "memory": ""}
"""Allowed schemes, and the package that each requires besides fsspec."""

TOUCHES = ("s3", "file")
"""Protocols whose objects' times can be updated."""

_URL = re.compile(r"([a-z0-9]+)://([^\s?#@\\]*)")
_CALL_S = 10.0  # one request, or one piece of an object
_MPU_PIECE = 8 << 20
_MAX_TEXT = 300
_TMP = "tmp"


def split_url(url: str) -> tuple[str, str]:
    """Split off the scheme. ConfigError for an unknown scheme, or a URL with credentials or a query."""
    found = _URL.fullmatch(url)
    if found is None or ".." in found[2].split("/"):
        raise ConfigError("fsspec.url: scheme://bucket/prefix is needed, without user, password, query or '..'")
    if found[1] not in PACKAGES:
        raise ConfigError(f"fsspec.url: unknown scheme {found[1]!r}; known are {', '.join(PACKAGES)}")
    return found[1], found[2]


class FsspecBucket(Bucket):
    """See Bucket. `options` are storage options of fsspec; `hidden` are texts that no message may contain.

    ConfigError if the URL is wrong or the scheme's package is missing. Nothing is connected here.
    """

    def __init__(self, url: str, options: Mapping[str, Any] | None = None, *, hidden: tuple[str, ...] = ()) -> None:
        scheme, _ = split_url(url)
        import fsspec
        from fsspec.asyn import sync

        settings = {"use_listings_cache": False, "skip_instance_cache": True, **(options or {})}
        if scheme == "file":
            settings["auto_mkdir"] = True
        try:
            self._fs, root = fsspec.core.url_to_fs(url, **settings)
        except ImportError:
            raise ConfigError(
                f"fsspec.url: {scheme}:// needs the package {PACKAGES[scheme]}, which this installation does not have"
                + ("; build the sidecar's image with S3=1" if scheme == "s3" else "")
            ) from None
        except (ValueError, TypeError, KeyError, OSError) as e:
            raise ConfigError(f"fsspec.url: {_without(str(e), hidden)}") from None
        if hasattr(self._fs, "retries"):
            self._fs.retries = 1  # this class sets the deadline, and the circuit breaker retries
        self._sync = sync
        self._root = root.rstrip("/")
        self._scheme = scheme
        self._hidden = hidden
        self._lock = threading.Lock()
        self.url = url

    def size(self, name: str) -> int | None:
        try:
            info = self._call("info", self._path(name))
        except (FileNotFoundError, NotADirectoryError):
            return None
        size = info.get("size")
        return size if info.get("type") == "file" and isinstance(size, int) and size >= 0 else None

    def get_to_fd(self, name: str, fd: int, size: int) -> None:
        path = self._path(name)
        at = 0
        while at < size:
            end = min(at + PIECE, size)
            data = self._call("cat_file", path, start=at, end=end)
            if len(data) != end - at:
                raise OSError(errno.EIO, f"the object ended {end - at - len(data)} bytes early", self.url)
            _write(fd, data, at)
            at = end

    def get_prefix(self, name: str, fd: int, size: int) -> None:
        self.get_to_fd(name, fd, size)  # uses range requests

    def put(self, name: str, fd: int, size: int) -> bool:
        path = self._path(name)
        if self._scheme in ("file", "memory"):
            return self._put_by_rename(path, fd, size)
        with self._told():
            file = self._fs.open(path, "xb" if self._scheme == "s3" else "wb", block_size=_MPU_PIECE)
            try:
                for piece in _pieces(fd, size):
                    file.write(piece)
            except BaseException:
                file.closed = True  # closing would publish a partial object
                with contextlib.suppress(Exception):
                    file.discard()
                raise
            try:
                file.close()
            except FileExistsError:
                self._forget(file)
                return False
            except BaseException:
                self._forget(file)
                raise
        return True

    def copy(self, name: str, to: str) -> None:
        self._call("cp_file", self._path(name), self._path(to))

    def delete(self, name: str) -> bool:
        if self.size(name) is None:  # the response is the same for an absent object
            return False
        try:
            self._call("rm_file", self._path(name))
        except FileNotFoundError:
            return False
        return True

    def list(self, folder: str) -> Iterator[ObjectInfo]:
        for inner in self._list(folder):
            if isinstance(inner, ObjectInfo):
                yield inner
                continue
            for found in self._list(f"{folder}/{inner}"):
                if isinstance(found, ObjectInfo):
                    yield found._replace(name=f"{inner}/{found.name}")

    def touch(self, name: str) -> bool:
        if self._scheme not in TOUCHES:
            return False
        path = self._path(name)
        try:
            if self._scheme == "file":
                os.utime(path)  # fsspec would create an absent file
            else:  # a copy of an object onto itself must change something
                self._call("cp_file", path, path, MetadataDirective="REPLACE")
        except FileNotFoundError:
            return False
        return True

    def _list(self, folder: str) -> Iterator[ObjectInfo | str]:
        """Return the entries of a folder; for subfolders only the name."""
        try:
            found = self._call("ls", self._path(folder), detail=True)
        except (FileNotFoundError, NotADirectoryError):
            return
        for info in found:
            name, size = str(info["name"]).rstrip("/").rpartition("/")[2], info.get("size")
            if info.get("type") == "directory":
                yield name
            elif info.get("type") == "file" and isinstance(size, int):
                yield ObjectInfo(name, size, _stored_at(info))

    def close(self) -> None:
        client = getattr(self._fs, "_s3", None)
        if client is not None:
            with contextlib.suppress(Exception):
                self._sync(self._fs.loop, client.close, timeout=1.0)

    def _put_by_rename(self, path: str, fd: int, size: int) -> bool:
        temporary = f"{self._root}/{_TMP}-{secrets.token_hex(16)}"
        with self._told():
            try:
                with self._fs.open(temporary, "wb") as file:
                    for piece in _pieces(fd, size):
                        file.write(piece)
                if self._scheme == "file":
                    self._fs.makedirs(path.rpartition("/")[0], exist_ok=True)
                    self._fs.link(temporary, path)
                    return True
                with self._lock:
                    if self._fs.exists(path):
                        return False
                    self._fs.cp_file(temporary, path)
                    return True
            except FileExistsError:
                return False
            finally:
                with contextlib.suppress(FileNotFoundError):
                    self._fs.rm_file(temporary)

    def _forget(self, file: Any) -> None:
        """Delete the partial object of a file whose close failed."""
        file.closed = True
        with contextlib.suppress(Exception):
            file.discard()

    def _path(self, name: str) -> str:
        return f"{self._root}/{name}"

    def _call(self, method: str, *args: Any, **kw: Any) -> Any:
        """Call the file system; a call of an asynchronous one has a time limit."""
        with self._told():
            if getattr(self._fs, "async_impl", False):
                coroutine: Callable[..., Any] = getattr(self._fs, f"_{method}")
                return self._sync(self._fs.loop, coroutine, *args, timeout=_CALL_S, **kw)
            return getattr(self._fs, method)(*args, **kw)

    @contextlib.contextmanager
    def _told(self) -> Iterator[None]:
        """Convert any exception of a client library to an OSError without secrets."""
        try:
            yield
        except (FileNotFoundError, FileExistsError, NotADirectoryError):
            raise
        except Exception as e:
            text = _without(str(e) or type(e).__name__, self._hidden)
            number = (e.errno if isinstance(e, OSError) else None) or errno.EIO
            raise OSError(number, text, self.url) from None


def _stored_at(info: Mapping[str, Any]) -> float | None:
    """As each file system calls it."""
    for field in ("LastModified", "mtime", "updated", "last_modified", "created"):
        value = info.get(field)
        if isinstance(value, datetime):
            return value.timestamp()
        if isinstance(value, (int, float)):
            return float(value)
    return None


def _pieces(fd: int, size: int) -> Iterator[bytes]:
    at = 0
    while at < size:
        piece = os.pread(fd, min(PIECE, size - at), at)
        if not piece:
            raise OSError(errno.EIO, "the staged file is cut short")
        yield piece
        at += len(piece)


def _write(fd: int, data: bytes, at: int) -> None:
    left = memoryview(data)
    while left:
        done = os.pwrite(fd, left, at)
        left, at = left[done:], at + done


def _without(text: str, hidden: tuple[str, ...]) -> str:
    for secret in hidden:
        if secret:
            text = text.replace(secret, "***")
    return text[:_MAX_TEXT]
