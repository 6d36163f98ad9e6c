"""Sources of this node's pods: the API server by list and watch, or a file.

The last known state stays valid while the source is unavailable, so pods keep their sockets.
"""

from __future__ import annotations

import abc
import json
import logging
import os
import random
import ssl
import threading
import time
import urllib.error
import urllib.parse
import urllib.request
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from typing import TypeAlias

    Parser: TypeAlias = "Callable[[Any], tuple[str, T | None]]"
    """Returns the uid of a pod object, and the pod unless it is none of ours."""

__all__ = ["FilePods", "KubePods", "PodWatcher"]

log = logging.getLogger(__name__)

T = TypeVar("T")

SERVICE_ACCOUNT = "/var/run/secrets/kubernetes.io/serviceaccount"
_MAX_LIST = 64 << 20
_MAX_EVENT = 4 << 20
_LIST_TIMEOUT_S = 10.0
_WATCH_S = 240  # then list again (resync)
_IDLE_TIMEOUT_S = 90.0  # bookmarks arrive about every minute; a watch that is idle for longer is dead
_BACKOFF_S = (0.2, 10.0)


class PodWatcher(abc.ABC, Generic[T]):
    """Pods as `T`. `pods()` is the last known state; `on_change` is called, from any thread, when it changes."""

    def __init__(self) -> None:
        self.on_change: Callable[[], None] = lambda: None

    @abc.abstractmethod
    def start(self) -> None:
        """Start to watch."""

    @abc.abstractmethod
    def pods(self) -> dict[str, T] | None:
        """Return the pods by uid; None before the first list."""


class FilePods(PodWatcher[T]):
    """Reads a JSON list of pod objects from a file whenever it changes, for a node without an API server."""

    def __init__(self, path: str, parse: Parser[T]) -> None:
        super().__init__()
        self._path = Path(path)
        self._parse = parse
        self._stamp: tuple[int, int] | None = None
        self._known: dict[str, T] | None = None

    def start(self) -> None:
        """Do nothing: `pods` reads the file."""

    def pods(self) -> dict[str, T] | None:
        try:
            info = self._path.stat()
            stamp = (info.st_mtime_ns, info.st_ino)
            if stamp != self._stamp:
                parsed = [self._parse(raw) for raw in json.loads(self._path.read_text())]
                self._known = {uid: pod for uid, pod in parsed if pod is not None}
                self._stamp = stamp
        except (OSError, ValueError, TypeError) as e:
            log.warning("cannot read %s, the last known pods stay: %s", self._path, e)
        return self._known


class KubePods(PodWatcher[T]):
    """Lists and watches the pods of a node that match a label selector, with the service account of this pod."""

    def __init__(
        self, node: str, selector: str, parse: Parser[T], *, url: str = "", account: str = SERVICE_ACCOUNT
    ) -> None:
        super().__init__()
        self._parse = parse
        self._account = account
        self._jitter = random.Random()  # noqa: S311 - private, so that the global generator is not advanced
        self._lock = threading.Lock()
        self._known: dict[str, T] | None = None
        if not url:
            host, port = os.environ["KUBERNETES_SERVICE_HOST"], os.environ["KUBERNETES_SERVICE_PORT"]
            url = f"https://[{host}]:{port}" if ":" in host else f"https://{host}:{port}"
        query = {"fieldSelector": f"spec.nodeName={node}", "labelSelector": selector}
        self._url = f"{url}/api/v1/pods?{urllib.parse.urlencode(query)}"

    def start(self) -> None:
        threading.Thread(target=self._run, name="pods", daemon=True).start()

    def pods(self) -> dict[str, T] | None:
        with self._lock:
            return None if self._known is None else dict(self._known)

    def _run(self) -> None:
        wait = _BACKOFF_S[0]
        while True:
            began = time.monotonic()
            try:
                self._watch(self._list())
                wait = _BACKOFF_S[0]
            except Exception as e:
                log.warning(
                    "cannot watch pods at the API server, known pods stay served; retrying: %s: %s", type(e).__name__, e
                )
                if time.monotonic() - began > _BACKOFF_S[1]:
                    wait = _BACKOFF_S[0]  # it worked for a while
                time.sleep(wait * self._jitter.uniform(0.7, 1.3))
                wait = min(wait * 2, _BACKOFF_S[1])

    def _list(self) -> str:
        with self._get("", _LIST_TIMEOUT_S) as response:
            body = response.read(_MAX_LIST + 1)
        if len(body) > _MAX_LIST:
            raise ValueError("the list of pods exceeds 64 MiB")
        listed = json.loads(body)
        parsed = [self._parse(raw) for raw in listed["items"]]
        with self._lock:
            self._known = {uid: pod for uid, pod in parsed if pod is not None}
        self.on_change()
        return str(listed["metadata"]["resourceVersion"])

    def _watch(self, version: str) -> None:
        """Apply changes until the server ends the watch, at the latest after _WATCH_S."""
        query = {
            "watch": "1",
            "allowWatchBookmarks": "true",
            "resourceVersion": version,
            "timeoutSeconds": str(_WATCH_S),
        }
        for event in self._events("&" + urllib.parse.urlencode(query)):
            kind = event.get("type")
            if kind == "ERROR":
                return  # usually 410 Gone: list again
            if kind not in ("ADDED", "MODIFIED", "DELETED"):
                continue
            uid, pod = self._parse(event.get("object"))
            with self._lock:
                known = self._known if self._known is not None else {}
                if kind == "DELETED" or pod is None:
                    changed = known.pop(uid, None) is not None
                else:
                    changed = known.get(uid) != pod
                    known[uid] = pod
            if changed:
                self.on_change()

    def _events(self, query: str) -> Iterator[dict[str, Any]]:
        with self._get(query, _IDLE_TIMEOUT_S) as response:
            while line := response.readline(_MAX_EVENT + 1):
                if len(line) > _MAX_EVENT:
                    raise ValueError("a watch event exceeds 4 MiB")
                event = json.loads(line)
                if isinstance(event, dict):
                    yield event

    def _get(self, query: str, timeout_s: float) -> Any:
        request = urllib.request.Request(self._url + query)  # noqa: S310 - the API server's own address
        context = None
        if self._url.startswith("https:"):
            context = ssl.create_default_context(cafile=f"{self._account}/ca.crt")
            # read for each request, because the kubelet renews it
            request.add_header("Authorization", f"Bearer {Path(self._account, 'token').read_text().strip()}")
        return _opener(context).open(request, timeout=timeout_s)


def _opener(context: ssl.SSLContext | None) -> urllib.request.OpenerDirector:
    """Return an opener without proxies from the environment and without redirects, which would leak the token."""
    return urllib.request.build_opener(
        urllib.request.ProxyHandler({}), urllib.request.HTTPSHandler(context=context), _NoRedirects()
    )


class _NoRedirects(urllib.request.HTTPRedirectHandler):
    def redirect_request(self, *_args: Any, **_kw: Any) -> None:
        return None
