"""The managed index with a server of another image: prepared by an init container, supervised by another container."""

from __future__ import annotations

import contextlib
import http.client
import subprocess

import pytest
import redis
from sc_nodes import INDEX_PORT, Process, fresh_address, wait_for
from sc_redis import plain

from kvpool_sidecar.index import redis_server as embedded

PROBES = 17425


class DividedIndex:
    """As the pod of the operator: `prepare` ends, then server and supervisor run side by side."""

    def __init__(self, directory, *flags: str) -> None:
        self.address = fresh_address()
        self.data, self.secret = directory / "data", directory / "secret"
        self.secret.mkdir()
        self.put("first")
        common = [
            "index-server", f"--bind={self.address}", f"--port={INDEX_PORT}", f"--dir={self.data}",
            f"--secret-dir={self.secret}", *flags,
        ]  # fmt: skip
        self.prepare = Process(directory / "prepare", [*common, "--stage=prepare"])
        self.supervisor = Process(directory / "log", [*common, "--stage=supervise", f"--http-port={PROBES}"])
        self.server: subprocess.Popen[bytes] | None = None

    def put(self, password: str, previous: str = "") -> None:
        (self.secret / "index-password-previous").write_text(previous)
        (self.secret / "index-password").write_text(password)

    def start_server(self) -> None:
        self.server = subprocess.Popen([embedded.server_binary(), str(self.data / embedded.CONFIG_FILE)])

    def stop_server(self) -> None:
        if self.server is not None:
            self.server.terminate()
            self.server.wait(20)
            self.server = None

    def probe(self, path: str) -> int:
        with contextlib.closing(http.client.HTTPConnection(self.address, PROBES, timeout=10)) as connection:
            try:
                connection.request("GET", path)
                return connection.getresponse().status
            except OSError:
                return 0

    def admits(self, password: str) -> bool:
        with contextlib.closing(plain(self.address, INDEX_PORT, username="kvpool", password=password)) as client:
            try:
                return client.ping()
            except redis.AuthenticationError:
                return False


@pytest.fixture(params=[(), ("--persist",)])
def index(tmp_path, request):
    made = DividedIndex(tmp_path, *request.param)
    try:
        assert made.prepare.start().process.wait(30) == 0
        made.start_server()
        made.supervisor.start()
        wait_for(lambda: made.probe("/readyz") == 200, "it serves")
        yield made
    finally:
        made.supervisor.kill()
        made.stop_server()


def test_passwords_are_rotated_and_limits_hold(index):
    assert index.admits("first")
    index.put("second", "first")
    wait_for(lambda: index.admits("second"), "the new one is good")
    assert index.admits("first")
    index.put("second")
    wait_for(lambda: not index.admits("first"), "the old one is revoked")
    admin = (index.data / "admin-password").read_text()
    with contextlib.closing(plain(index.address, INDEX_PORT, username="admin", password=admin)) as client:
        assert client.config_get("maxmemory-policy")["maxmemory-policy"] == "noeviction"
        assert "normal 16777216 8388608 10" in client.config_get("client-output-buffer-limit").popitem()[1]
        assert client.config_get("save")["save"] in ("", "300 1")


def test_probes_report_a_server_that_ended_and_one_that_is_back_with_the_current_password(index):
    index.stop_server()
    wait_for(lambda: index.probe("/healthz") == 503, "it is gone")
    index.put("second")
    index.start_server()  # the kubelet restarts the container, not the init container
    wait_for(lambda: index.probe("/readyz") == 200, "it serves again")
    wait_for(lambda: index.admits("second"), "with the current password")
    wait_for(lambda: not index.admits("first"), "and no other")


def test_the_supervisor_ends_with_its_container(index):
    assert index.supervisor.stop(timeout=20) == 0
