"""A real Prometheus scrapes a healthy pool: every panel of the dashboards has data, and no alert is pending."""

from __future__ import annotations

import contextlib
import json
import shutil
import subprocess
import threading
import time
import urllib.parse
import urllib.request
from pathlib import Path
from typing import Any

import pytest
import yaml
from prometheus_client import start_http_server
from sc_nodes import HTTP_PORT, Cluster, fresh_address, wait_for
from sc_raw import block_id, payload

from kvpool.client import Client
from kvpool.config import ClientConfig
from kvpool.protocol import wire
from kvpool_operator.runtime.metrics import OperatorMetrics
from kvpool_operator.webhook.metrics import WebhookMetrics

FILES = Path(__file__).resolve().parents[3] / "charts" / "kvpool" / "files"
FINGERPRINT = bytes(range(32))
HEALTHY = {
    "conditions": [{"type": kind, "status": "True"} for kind in ("Ready", "InjectionReady", "SharedReuse")],
    "nodes": {"desired": 2, "ready": 2, "updated": 2},
    "pods": {"selected": 2, "injected": 2, "skipped": 0, "connected": 2, "silent": 0, "outdated": 0},
}
pytestmark = pytest.mark.skipif(
    not shutil.which("prometheus"),
    reason="no prometheus on PATH: charts/prometheus.sh fetches it, make chart-check does",
)


class Prometheus:
    """A server on loopback that scrapes every second; `targets` is address and labels by job."""

    def __init__(self, directory: Path, targets: dict[str, list[tuple[str, dict[str, str]]]]) -> None:
        self.address = f"{fresh_address()}:19090"
        jobs = [
            {
                "job_name": job,
                "honor_labels": True,
                "static_configs": [{"targets": [target], "labels": labels} for target, labels in found],
            }
            for job, found in targets.items()
        ]
        path = directory / "prometheus.yml"
        path.write_text(
            yaml.safe_dump(
                {
                    "global": {"scrape_interval": "1s", "evaluation_interval": "1s"},
                    "rule_files": [str(FILES / "alerts.yaml")],
                    "scrape_configs": jobs,
                }
            )
        )
        self._log = (directory / "prometheus.log").open("wb")
        self._process = subprocess.Popen(
            [
                "prometheus",
                f"--config.file={path}",
                f"--storage.tsdb.path={directory / 'tsdb'}",
                f"--web.listen-address={self.address}",
            ],
            stdout=self._log,
            stderr=self._log,
        )

    def get(self, path: str, **query: str):
        url = f"http://{self.address}/api/v1/{path}?{urllib.parse.urlencode(query)}"
        with urllib.request.urlopen(url, timeout=10) as response:
            return json.load(response)["data"]

    def is_up(self) -> bool:
        with contextlib.suppress(OSError):
            up = self.get("query", query="up")["result"]
            return bool(up) and all(sample["value"][1] == "1" for sample in up)
        return False

    def values(self, expression: str) -> list[float]:
        """Return the numbers that an instant query has now."""
        found = [float(sample["value"][1]) for sample in self.get("query", query=expression)["result"]]
        return [value for value in found if value == value]

    def rules(self) -> list[dict[str, Any]]:
        return [rule for group in self.get("rules")["groups"] for rule in group["rules"]]

    def close(self) -> None:
        self._process.terminate()
        self._process.wait(20)
        self._log.close()


class Traffic:
    """Engines of two nodes that store, and load from their own node, the other node and the shared tier."""

    def __init__(self, a, b) -> None:
        self._clients = [Client(ClientConfig(socket=str(n.sockets["team-a"])), fingerprint=FINGERPRINT) for n in (a, b)]
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        writer, reader = self._clients
        wait_for(lambda: writer.connected and reader.connected, "both clients are connected")
        buffers, n = [bytearray(64 * 1024) for _ in range(4)], 0
        while not self._end.wait(0.05):
            ids = [block_id(n + i) for i in range(4)]
            writer.put_from(ids, [payload(n + i) for i in range(4)], time.monotonic() + 10)
            writer.get_into(ids, buffers, time.monotonic() + 10)
            there = [wire.Tier.MISS]
            until = time.monotonic() + 5
            while wire.Tier.MISS in there and time.monotonic() < until and not self._end.wait(0.02):
                there = reader.lookup(ids, time.monotonic() + 1)
            if wire.Tier.MISS not in there:
                reader.get_into(ids, buffers, time.monotonic() + 10)
                reader.count_tokens({"peer": 64})
            writer.report()
            reader.report()
            n += 4

    def close(self) -> None:
        self._end.set()
        self._thread.join()
        for client in self._clients:
            client.close()


def control_plane() -> tuple[OperatorMetrics, WebhookMetrics]:
    """Metrics of an operator and a webhook that work."""
    operator, webhook = OperatorMetrics(), WebhookMetrics()
    operator.leader.set(1)
    operator.pools.set(1)
    operator.last_list.set_to_current_time()
    operator.status.set_status(("ai", "chat"), HEALTHY)
    operator.workqueue_depth.labels("kvcachepool").set(0)
    webhook.pools.set(1)
    webhook.certificate_expires.set(time.time() + 86400 * 30)
    return operator, webhook


def work(operator: OperatorMetrics, webhook: WebhookMetrics) -> None:
    operator.reconciles.labels("kvcachepool", "ok").inc()
    operator.reconcile_time.labels("kvcachepool").observe(0.1)
    webhook.reviews.labels("injected").inc()
    webhook.seconds.observe(0.01)


def panels() -> list[tuple[str, str]]:
    """Where from, and the query with what Grafana inserts."""
    found = []
    for path in sorted((FILES / "dashboards").glob("*.json")):
        for panel in json.loads(path.read_text())["panels"]:
            for target in panel.get("targets", []):
                expr = target["expr"].replace("$__rate_interval", "20s")
                expr = expr.replace("$namespace", ".*").replace("$pool", ".*")
                assert "$" not in expr, expr
                found.append((f"{path.name}: {panel['title']} {target['refId']}", expr))
    return found


def test_every_panel_of_a_healthy_pool_has_data_and_no_alert_is_pending(tmp_path):
    with contextlib.ExitStack() as stack:
        cluster = stack.enter_context(Cluster(tmp_path, shared=True))
        nodes = [cluster.node("a"), cluster.node("b")]
        operator, webhook = control_plane()
        served = []
        for metrics in (operator, webhook):
            server, thread = start_http_server(0, "127.0.0.1", metrics.registry)
            stack.callback(thread.join)
            stack.callback(server.server_close)
            stack.callback(server.shutdown)
            served.append(f"127.0.0.1:{server.server_port}")
        sidecars = [
            (f"{n.address}:{HTTP_PORT}", {"namespace": "ai", "pool": "chat", "node": n.name, "pod": f"chat-{n.name}"})
            for n in nodes
        ]
        home = tmp_path / "prometheus"
        home.mkdir()
        prometheus = Prometheus(
            home,
            {
                "sidecars": sidecars,
                "operator": [(served[0], {"pod": "operator-1"})],
                "webhook": [(served[1], {"pod": "webhook-1"})],
            },
        )
        stack.callback(prometheus.close)
        wait_for(prometheus.is_up, "Prometheus scrapes every target", timeout=60)
        stack.callback(Traffic(*nodes).close)
        empty = dict(panels())
        assert len(empty) >= 30

        def all_have_data() -> bool:
            work(operator, webhook)
            for where in [where for where, expr in empty.items() if prometheus.values(expr)]:
                del empty[where]
            return not empty

        with contextlib.suppress(AssertionError):
            wait_for(all_have_data, "data", timeout=60)
        assert empty == {}, "panels without data"
        for label in ("namespace", "pool"):
            assert prometheus.get(f"label/{label}/values", **{"match[]": "kvpool_pool_condition"})
        assert {rule["name"]: rule["health"] for rule in prometheus.rules() if rule["health"] != "ok"} == {}
        active: list[str] = []

        def none_is_pending() -> bool:
            active[:] = [rule["name"] for rule in prometheus.rules() if rule.get("state", "inactive") != "inactive"]
            return not active

        # a scrape between a store and its announcement may find one of six blocks missing in the index
        with contextlib.suppress(AssertionError):
            wait_for(none_is_pending, "no alert is pending")
        assert active == []
