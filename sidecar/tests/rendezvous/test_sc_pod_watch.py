"""The node agent lists and watches pods at the API server, and survives what it sends."""

from __future__ import annotations

import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
from sc_kubelet import pod
from sc_nodes import wait_for

from kvpool_sidecar.rendezvous import pod_watch as source_module
from kvpool_sidecar.rendezvous.pod_watch import KubePods
from kvpool_sidecar.rendezvous.pods import ENGINES, TargetPod, parse_pod


class FakeApi(ThreadingHTTPServer):
    """Lists and watches, as far as the agent asks. `down`: every request fails."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), FakeApiHandler)
        self.pods: dict[str, dict] = {}
        self.version = 1
        self.down = False
        self.events: list[dict] = []
        self.lists = 0
        self.changed = threading.Condition()
        self.queries: list[str] = []
        threading.Thread(target=self.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True).start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"

    def emit(self, kind: str, raw: dict) -> None:
        with self.changed:
            self.version += 1
            self.events.append({"type": kind, "object": raw})
            self.changed.notify_all()

    def handle_error(self, request, client_address):
        pass


class FakeApiHandler(BaseHTTPRequestHandler):
    def do_GET(self):
        api = self.server
        api.queries.append(self.path)
        if api.down:
            self.send_error(500)
            return
        self.send_response(200)
        self.end_headers()
        if "watch=1" not in self.path:
            api.lists += 1
            body = {"metadata": {"resourceVersion": str(len(api.events))}, "items": list(api.pods.values())}
            self.wfile.write(json.dumps(body).encode())
            return
        at = int(self.path.split("resourceVersion=")[1].split("&")[0])  # also what happened since the list
        while not api.down:
            with api.changed:
                while at >= len(api.events) and not api.down:
                    api.changed.wait(0.1)
                fresh, at = api.events[at:], len(api.events)
            for event in fresh:
                self.wfile.write(json.dumps(event).encode() + b"\n")
            self.wfile.flush()
            if any(event["type"] == "ERROR" for event in fresh):
                return

    def log_message(self, *_):
        pass


@pytest.fixture
def api():
    one = FakeApi()
    yield one
    one.down = True
    one.shutdown()
    one.server_close()


def names(source) -> list[str] | None:
    pods = source.pods()
    return None if pods is None else sorted(p.pod for p in pods.values())


def test_pods_are_listed_and_watched(api):
    api.pods["1"] = pod("one")
    source = KubePods("node-1", ENGINES, parse_pod, url=api.url)
    changes = []
    source.on_change = lambda: changes.append(1)
    assert source.pods() is None
    source.start()
    wait_for(lambda: names(source) == ["one"], "listed")
    assert "fieldSelector=spec.nodeName%3Dnode-1" in api.queries[0]
    assert "labelSelector=kvpool.dev%2Finject%3Dtrue" in api.queries[0]
    two = pod("two")
    api.emit("ADDED", two)
    wait_for(lambda: names(source) == ["one", "two"], "added")
    api.emit("BOOKMARK", {"metadata": {"resourceVersion": "5"}})
    api.emit("ADDED", pod("other", metadata={"annotations": {}}))
    api.emit("MODIFIED", pod("two", status={"phase": "Failed"}))
    wait_for(lambda: names(source) == ["one"], "ended")
    api.emit("MODIFIED", pod("two"))
    wait_for(lambda: names(source) == ["one", "two"], "back")
    api.emit("DELETED", two)
    wait_for(lambda: names(source) == ["one"], "deleted")
    assert len(changes) >= 5
    assert isinstance(next(iter(source.pods().values())), TargetPod)


def test_known_pods_stay_while_the_api_server_is_away_and_it_catches_up(api, monkeypatch):
    monkeypatch.setattr(source_module, "_BACKOFF_S", (0.05, 0.2))
    api.pods["1"] = pod("one")
    source = KubePods("n", ENGINES, parse_pod, url=api.url)
    source.start()
    wait_for(lambda: names(source) == ["one"], "listed")
    api.down = True
    asked = len(api.queries)
    wait_for(lambda: len(api.queries) >= asked + 3, "it tries again")
    assert names(source) == ["one"]
    api.pods = {"2": pod("two")}
    api.down = False
    wait_for(lambda: names(source) == ["two"], "caught up")


def test_a_watch_that_is_too_old_is_begun_anew(api):
    source = KubePods("n", ENGINES, parse_pod, url=api.url)
    source.start()
    wait_for(lambda: names(source) == [], "listed")
    api.pods["1"] = pod("one")
    api.emit("ERROR", {"kind": "Status", "code": 410})
    wait_for(lambda: names(source) == ["one"], "listed again")


def test_a_watch_that_is_silent_is_begun_anew(api, monkeypatch):
    monkeypatch.setattr(source_module, "_IDLE_TIMEOUT_S", 0.3)
    monkeypatch.setattr(source_module, "_BACKOFF_S", (0.05, 0.2))
    source = KubePods("n", ENGINES, parse_pod, url=api.url)
    source.start()
    wait_for(lambda: api.lists >= 3, "listed again and again")


def test_garbage_from_the_api_server_is_survived(api, monkeypatch):
    monkeypatch.setattr(source_module, "_BACKOFF_S", (0.05, 0.2))
    api.pods["1"] = pod("one")
    source = KubePods("n", ENGINES, parse_pod, url=api.url)
    source.start()
    wait_for(lambda: names(source) == ["one"], "listed")
    lists = api.lists
    api.emit("ADDED", [1, 2])
    api.emit("ADDED", {"metadata": {"uid": "x"}})
    api.pods["1"]["metadata"]["annotations"] = "none"
    api.emit("ERROR", {})
    wait_for(lambda: api.lists > lists and names(source) == [], "listed again")
