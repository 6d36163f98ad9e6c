"""`kvpool dashboard`: the status of pools in a browser."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
import time
from typing import TYPE_CHECKING, Any

from kvpool_cli.cluster import source
from kvpool_cli.errors import OK, UsageError
from kvpool_cli.output import emit

if TYPE_CHECKING:
    import argparse
    from collections.abc import Callable, Iterator

    from kvpool_cli.kubectl import Kubectl

NAME = "dashboard"
HELP = "show pools in a browser, served on loopback until Ctrl-C"
DESCRIPTION = """Serve a status page on 127.0.0.1 and open it in a browser. It shows what `status` shows, and reads the
cluster again while the page is open. Ctrl-C ends it."""
CLUSTER = True
FORMATS = ("table", "json")
_MIN_INTERVAL_S = 2.0
_END_S = 5.0
_POLL_S = 0.2


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the pool, the port, and the browser."""
    parser.add_argument("pool", nargs="?", default="", metavar="POOL", help="NAME or NAMESPACE/NAME (default: all)")
    parser.add_argument("--port", type=int, default=0, metavar="N", help="port on 127.0.0.1 (default: a free one)")
    parser.add_argument("--no-browser", action="store_true", help="print the address, open no browser")
    parser.add_argument(
        "--interval", type=float, default=5.0, metavar="SECONDS", help="pause between reads of the cluster (default: 5)"
    )
    parser.add_argument(
        "--docs-url", default=os.environ.get("KVPOOL_DOCS_URL", ""), metavar="URL",
        help="address of a documentation site to which findings link (KVPOOL_DOCS_URL)",
    )  # fmt: skip
    source.add_arguments(parser)


def run(args: argparse.Namespace) -> int:
    """Serve until Ctrl-C or SIGTERM."""
    from kvpool_cli.dashboard.refresher import Refresher, StoppableKubectl
    from kvpool_cli.dashboard.server import DashboardServer
    from kvpool_cli.dashboard.view_model import view_model

    if not 0 <= args.port <= 65535:
        raise UsageError(f"--port {args.port} is not 0 to 65535")
    if not args.interval >= _MIN_INTERVAL_S:
        raise UsageError(f"--interval {args.interval} is not {_MIN_INTERVAL_S:.0f} or more")
    if args.docs_url and not args.docs_url.startswith(("https://", "http://")):
        raise UsageError(f"--docs-url {args.docs_url} is not an http or https address")
    kubectl = StoppableKubectl.of(args)
    refresher = Refresher(_reader(args, kubectl), args.interval)

    def state() -> dict[str, Any]:
        document, age_s, problem = refresher.state()
        model = None if document is None else view_model(document, args.docs_url)
        return {"model": model, "ageSeconds": round(age_s, 1), "problem": problem, "intervalSeconds": args.interval}

    with DashboardServer(args.port, state) as server, _end_signals() as ended:
        serving = threading.Thread(target=server.serve_forever, args=(_POLL_S,), name="server", daemon=True)
        serving.start()
        refresher.start()
        try:
            _announce(args, server)
            while not ended:
                time.sleep(_POLL_S)
        finally:
            server.shutdown()
            kubectl.stop()
            refresher.stop(_END_S)
    return OK


def _reader(args: argparse.Namespace, kubectl: Kubectl) -> Callable[[], dict[str, Any]]:
    from pathlib import Path

    from kvpool_cli.cluster.documents import load, read
    from kvpool_cli.cluster.summary import summarize
    from kvpool_cli.cluster.view import choose, pool_state

    def document() -> dict[str, Any]:
        found = load(Path(args.source)) if args.source else read(kubectl)
        keys = choose(found, args.pool, args.namespace or "")
        return {"pools": [summarize(pool_state(found, key)) for key in keys], "notes": found.notes}

    return document


def _announce(args: argparse.Namespace, server: Any) -> None:
    emit(args, {"url": server.url}, lambda style: f"{style.paint(server.url, 'bold')}\nCtrl-C ends the dashboard.")
    sys.stdout.flush()
    if not args.no_browser:
        import webbrowser

        webbrowser.open(server.ticket_url)


@contextlib.contextmanager
def _end_signals() -> Iterator[list[int]]:
    """Collect SIGINT and SIGTERM: an exception of a handler is lost if it interrupts a callback of the interpreter."""
    received: list[int] = []
    numbers = (signal.SIGINT, signal.SIGTERM)
    previous = [signal.signal(number, lambda number, _: received.append(number)) for number in numbers]
    try:
        yield received
    finally:
        for number, handler in zip(numbers, previous, strict=True):
            signal.signal(number, handler)
