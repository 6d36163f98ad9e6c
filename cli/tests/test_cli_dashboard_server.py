"""`kvpool dashboard` over HTTP: who gets an answer, what is in it when the cluster fails, and how it ends."""

from __future__ import annotations

import http.client
import json
import os
import signal
import socket
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

import pytest
from cli_dashboard import Dashboard, FakeCluster

from kvpool_cli.dashboard.server import DashboardServer
from kvpool_cli.main import main

if TYPE_CHECKING:
    from collections.abc import Iterator


@pytest.fixture
def cluster(tmp_path: Path) -> FakeCluster:
    return FakeCluster(tmp_path)


@pytest.fixture
def dashboard(cluster: FakeCluster) -> Iterator[Any]:
    """Start dashboards of the cluster; each is ended with the test."""
    started: list[Dashboard] = []

    def start(*arguments: str) -> Dashboard:
        started.append(Dashboard(cluster.directory, *arguments))
        return started[-1]

    yield start
    for one in started:
        one.end()


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The address of a dashboard that the tests of access share."""
    running = Dashboard(FakeCluster(tmp_path_factory.mktemp("cluster")).directory)
    yield running.url
    running.end()


def ask(url: str, path: str = "", method: str = "GET", **headers: str) -> tuple[int, dict[str, str], bytes]:
    """Return status, headers and body."""
    parts = urlsplit(url)
    connection = http.client.HTTPConnection(parts.hostname or "", parts.port, timeout=30)
    connection.putrequest(method, path or parts.path, skip_host="Host" in headers)
    for name, value in headers.items():
        connection.putheader(name.replace("_", "-"), value)
    connection.endheaders()
    answer = connection.getresponse()
    found = answer.status, dict(answer.getheaders()), answer.read()
    connection.close()
    return found


def state_when(url: str, condition: Any) -> dict[str, Any]:
    """Poll the data until it satisfies the condition."""
    deadline = time.monotonic() + 60
    while True:
        found = json.loads(ask(url, urlsplit(url).path + "state")[2])
        if condition(found):
            return dict(found)
        assert time.monotonic() < deadline, found
        time.sleep(0.1)


def test_the_page_and_its_data_are_served_to_who_has_the_token(url: str):
    status, headers, body = ask(url)
    assert (status, headers["Content-Type"]) == (200, "text/html; charset=utf-8")
    assert b"<main" in body
    assert headers["Cache-Control"] == "no-store"
    assert "default-src 'none'" in headers["Content-Security-Policy"]
    assert "Access-Control-Allow-Origin" not in headers
    found = state_when(url, lambda state: state["model"])
    assert found["problem"] == ""
    assert found["model"]["pools"][0]["pool"] == "kvpool-system/chat"


def test_it_listens_on_loopback_only(url: str):
    assert urlsplit(url).hostname == "127.0.0.1"
    with pytest.raises(OSError, match="refused"):
        socket.create_connection(("127.0.0.2", urlsplit(url).port), timeout=5)


def test_each_start_has_another_token():
    with DashboardServer(0, dict) as one, DashboardServer(0, dict) as two:
        tokens = {urlsplit(server.url).path for server in (one, two)}
    assert len(tokens) == 2
    assert all(len(token) > 40 for token in tokens)


@pytest.mark.parametrize("path", ["/", "/state", "/x/", "//", "/%2e%2e/", "/" + "a" * 5000])
def test_without_the_token_nothing_is_found(url: str, path: str):
    status, _, body = ask(url, path)
    assert status == 404
    assert body == b"not found\n"


@pytest.mark.parametrize("host", ["evil.example", "evil.example:{port}", "127.0.0.1", "127.0.0.1:1", ""])
def test_another_host_is_refused_even_with_the_token(url: str, host: str):
    assert ask(url, Host=host.format(port=urlsplit(url).port))[0] == 421
    assert ask(url, Host=f"localhost:{urlsplit(url).port}")[0] == 200


def test_a_script_of_another_site_is_refused(url: str):
    assert ask(url, Sec_Fetch_Site="cross-site", Sec_Fetch_Mode="cors")[0] == 421
    assert ask(url, Sec_Fetch_Site="same-origin", Sec_Fetch_Mode="cors")[0] == 200


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "OPTIONS", "HEAD", "BREW"])
def test_only_get_is_answered(url: str, method: str):
    status, headers, _ = ask(url, method=method)
    assert (status, headers["Allow"]) == (405, "GET")


def test_a_browser_is_given_an_address_that_works_once():
    with DashboardServer(0, dict) as server:
        ticket = server.ticket_url.removeprefix(server.origin)
        assert server.url not in server.ticket_url
        assert [server.resource(ticket), server.resource(ticket)] == ["ticket", ""]


def test_a_cluster_that_fails_leaves_the_last_figures_and_their_age(cluster: Any, dashboard: Any):
    url = dashboard().url
    state_when(url, lambda state: state["model"])
    cluster.set_flag("down")
    found = state_when(url, lambda state: state["problem"])
    assert "i/o timeout" in found["problem"]
    assert found["model"]["pools"][0]["phase"] == "Ready"
    cluster.set_flag("down", False)
    assert state_when(url, lambda state: not state["problem"])["ageSeconds"] < 60


def test_a_cluster_that_never_answered_is_a_problem_without_figures(cluster: Any, dashboard: Any):
    cluster.set_flag("down")
    found = state_when(dashboard().url, lambda state: state["problem"])
    assert found["model"] is None


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_the_end_leaves_no_process_even_when_the_cluster_hangs(cluster: Any, dashboard: Any, number: int):
    cluster.set_flag("hang")
    running = dashboard()
    group = running.process.pid
    deadline = time.monotonic() + 60
    while len(processes_of(group)) < 2:
        assert time.monotonic() < deadline
        time.sleep(0.05)
    code, err = running.end(number)
    assert (code, err) == (0, "")
    while processes_of(group):
        assert time.monotonic() < deadline
        time.sleep(0.05)


def processes_of(group: int) -> list[int]:
    """Processes of a process group that run."""
    found = []
    for name in filter(str.isdigit, os.listdir("/proc")):
        try:
            fields = Path(f"/proc/{name}/stat").read_text().rpartition(")")[2].split()
        except OSError:
            continue
        if int(fields[2]) == group and fields[0] != "Z":
            found.append(int(name))
    return found


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [(["--port", "70000"], "--port"), (["--interval", "0.1"], "--interval"), (["--docs-url", "javascript:1"], "http")],
)
def test_wrong_arguments_end_with_2(capsys: pytest.CaptureFixture[str], arguments: list[str], sentence: str):
    assert main(["dashboard", "--no-browser", *arguments]) == 2
    assert sentence in capsys.readouterr().err


def test_a_port_in_use_ends_with_2(capsys: pytest.CaptureFixture[str]):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        assert main(["dashboard", "--no-browser", "--port", str(taken.getsockname()[1])]) == 2
    assert "cannot be opened" in capsys.readouterr().err
