"""A small client of the API server for the tests: JSON in, JSON out, by URL path."""

from __future__ import annotations

import contextlib
import json
import ssl
import time
import urllib.error
import urllib.request
from typing import TYPE_CHECKING, Any

import yaml

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

APPLY, MERGE, JSON = "application/apply-patch+yaml", "application/merge-patch+json", "application/json"
POOLS = "/apis/kvpool.dev/v1alpha1"


class ApiError(Exception):
    def __init__(self, status: int, message: str) -> None:
        super().__init__(f"{status}: {message}")
        self.status = status


class Api:
    """As the user of a kubeconfig that `plane.py` wrote."""

    def __init__(self, kubeconfig: Path) -> None:
        config = yaml.safe_load(kubeconfig.read_text())
        self._server = config["clusters"][0]["cluster"]["server"]
        self._token = config["users"][0]["user"]["token"]
        self._context = ssl.create_default_context()
        self._context.check_hostname, self._context.verify_mode = False, ssl.CERT_NONE

    def call(self, method: str, path: str, body: Any = None, kind: str = JSON) -> Any:
        request = urllib.request.Request(self._server + path, method=method)
        request.add_header("Authorization", f"Bearer {self._token}")
        if body is not None:
            request.data = json.dumps(body).encode()
            request.add_header("Content-Type", kind)
        try:
            with urllib.request.urlopen(request, timeout=20, context=self._context) as answer:
                return json.load(answer)
        except urllib.error.HTTPError as e:
            with e:
                text = e.read().decode(errors="replace")
            with contextlib.suppress(ValueError):
                text = json.loads(text).get("message", text)
            raise ApiError(e.code, text) from None

    def get(self, path: str) -> Any:
        """None when there is none."""
        try:
            return self.call("GET", path)
        except ApiError as e:
            if e.status == 404:
                return None
            raise

    def items(self, path: str) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = self.call("GET", path)["items"]
        return found

    def delete(self, path: str, **options: Any) -> None:
        try:
            self.call("DELETE", path, options or None)
        except ApiError as e:
            if e.status != 404:
                raise


def until(what: str, probe: Callable[[], Any], timeout: float = 30, every: float = 0.1) -> Any:
    """Call `probe` until it answers something true."""
    end = time.monotonic() + timeout
    last: Any = None
    while True:
        try:
            last = probe()
            if last:
                return last
        except (ApiError, OSError, KeyError, TypeError, IndexError) as e:
            last = repr(e)
        if time.monotonic() > end:
            raise AssertionError(f"not within {timeout:.0f} s: {what}; last: {str(last)[:3000]}")
        time.sleep(every)
