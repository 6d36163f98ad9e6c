"""`kvpool-sidecar`: the program of every container of the sidecar's pod, also usable on a single machine.

Exit codes: 0 success, 1 failure at run time, 2 wrong usage or configuration (the message names the fix).
"""

from __future__ import annotations

import importlib
import importlib.util
import logging
import os
import sys
import threading
from dataclasses import replace
from typing import TYPE_CHECKING

from kvpool.config import PoolConfig, loads
from kvpool.errors import ConfigError, KVPoolError
from kvpool_sidecar.arguments import parser

if TYPE_CHECKING:
    import argparse
    from collections.abc import Sequence

__all__ = ["kvpool", "main"]


def _serve(args: argparse.Namespace) -> int:
    from kvpool_sidecar import settings
    from kvpool_sidecar.app.app import serve

    def adapt(config: PoolConfig) -> PoolConfig:
        if args.peer_port is not None:
            config = replace(config, peer=replace(config.peer, port=args.peer_port))
        if args.http_port is not None:
            config = replace(config, http_port=args.http_port)
        return config if args.admin_port is None else replace(config, admin_port=args.admin_port)

    writable, separator, read_only = args.read_only_mounts.partition("=")
    if args.read_only_mounts and not (separator and writable and read_only):
        raise ConfigError(f"--read-only-mounts: expected FROM=TO, got {args.read_only_mounts!r}")

    def read() -> settings.ServeSettings:
        text = settings.read_text(args.config)
        settings.index_passwords(args.secret_dir)  # an unreadable file fails the start, not the first connection
        return settings.ServeSettings(
            config=adapt(loads(PoolConfig, text, where=args.config)),
            config_file=settings.ConfigFile(args.config, text, adapt),
            secret=settings.read_secret(args.secret_dir, settings.POOL_SECRET),
            node=args.node,
            address=args.address,
            secret_dir=args.secret_dir,
            issuer_url=args.issuer_url,
            issuer_token=args.issuer_token,
            index_files=settings.index_files(args.secret_dir),
            rendezvous_socket=args.rendezvous_socket,
            sockets=settings.fixed_sockets(args.socket),
            read_only_mounts=(writable.rstrip("/"), read_only.rstrip("/")),
            object_secret_dir=args.object_secret_dir,
            metrics_per_tenant=args.metrics_per_tenant,
            allow_takeover=args.allow_takeover,
        )

    return serve(read)


def _agent(args: argparse.Namespace) -> int:
    from kvpool_sidecar.rendezvous.agent import run
    from kvpool_sidecar.rendezvous.pod_watch import FilePods, KubePods
    from kvpool_sidecar.rendezvous.pods import ENGINES, SIDECARS, parse_pod, parse_sidecar

    if not args.node:
        raise ConfigError("--node is required (KVPOOL_NODE)")
    if args.pods_file:
        return run(args.pods_dir, FilePods(args.pods_file, parse_pod), FilePods(args.pods_file, parse_sidecar))
    if not os.environ.get("KUBERNETES_SERVICE_HOST"):
        raise ConfigError("KUBERNETES_SERVICE_HOST is not set, so there is no API server to watch: set --pods-file")
    pods = KubePods(args.node, ENGINES, parse_pod)
    return run(args.pods_dir, pods, KubePods(args.node, SIDECARS, parse_sidecar))


def _init_node(args: argparse.Namespace) -> int:
    from kvpool_sidecar.commands.init_node import ServerUser, init_node
    from kvpool_sidecar.settings import read_config

    init_node(read_config(args.config), ServerUser(args.uid, args.gid, args.migrate))
    return 0


def _index_server(args: argparse.Namespace) -> int:
    from kvpool_sidecar.commands.index_server import prepare_index_server, run_index_server, supervise_index_server
    from kvpool_sidecar.index.redis_server import ServerOptions, ServerTls, flush_index
    from kvpool_sidecar.settings import index_passwords, index_server_files

    if args.flush:
        flush_index(args.dir)
        return 0
    tls = ServerTls(*index_server_files(args.secret_dir)) if args.tls else None
    options = ServerOptions(args.bind, args.port, args.max_memory, args.persist, tls)

    def passwords() -> tuple[bytes, ...]:
        return index_passwords(args.secret_dir)

    if args.stage == "prepare":
        prepare_index_server(args.dir, options, passwords)
        return 0
    if args.stage == "supervise":
        supervise_index_server(args.dir, options, passwords, args.http_port)
        return 0
    run_index_server(args.dir, options, passwords, args.http_port)
    return 1


def _install_client(args: argparse.Namespace) -> int:
    from kvpool_sidecar.commands.install_client import install_client

    written = install_client(args.directory, args.extras)
    print(f"{args.directory}: {'installed' if written else 'already up to date'}")
    return 0


def _up(args: argparse.Namespace) -> int:
    from kvpool_sidecar.commands.up import UpOptions, up

    up(
        UpOptions(
            path=args.path,
            capacity=args.capacity,
            node=args.node,
            address=args.address,
            first_port=args.port,
            join=args.join,
            secret_file=args.secret_file,
            host_memory=args.engine_memory,
            delete=args.delete,
        )
    )
    return 0


def _wipe(args: argparse.Namespace) -> int:
    from kvpool_sidecar.commands.wipe import wipe
    from kvpool_sidecar.settings import read_config

    config = read_config(args.config)
    local, shared = args.tier != "shared", args.tier != "local"
    removed = wipe(config, local=local, shared=shared, object_secret_dir=args.object_secret_dir)
    print(f"{removed} files deleted")
    return 0


def _preflight(args: argparse.Namespace) -> int:
    from kvpool_sidecar import settings
    from kvpool_sidecar.preflight.report import format_report
    from kvpool_sidecar.preflight.run import PreflightSettings, run
    from kvpool_sidecar.preflight.serve import serve_preflight

    config = settings.read_config(args.config)
    passwords = tuple(p.decode("ascii", "replace") for p in settings.index_passwords(args.secret_dir))
    checks = PreflightSettings(
        config=config,
        node=args.node,
        index_passwords=lambda: passwords,
        index_files=settings.index_files(args.secret_dir),
        object_secret_dir=args.object_secret_dir,
    )
    if args.serve:
        address = settings.own_address(args.address)
        code = serve_preflight(checks, address, config.http_port if args.http_port is None else args.http_port)
    else:
        report = run(checks)
        print(format_report(report, as_json=args.json))
        code = 0 if report.passed else 1
    if threading.active_count() > 1:  # a check that hangs in the kernel must not block the exit
        sys.stdout.flush()
        logging.shutdown()
        os._exit(code)
    return code


_COMMANDS = {
    "up": _up,
    "serve": _serve,
    "agent": _agent,
    "init-node": _init_node,
    "index-server": _index_server,
    "install-client": _install_client,
    "wipe": _wipe,
    "preflight": _preflight,
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code."""
    args = parser().parse_args(argv)
    level = logging.getLevelNamesMapping().get(args.log_level.upper())
    if level is None:
        print(f"kvpool-sidecar: unknown log level {args.log_level!r}", file=sys.stderr)
        return 2
    logging.basicConfig(level=level, stream=sys.stderr, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    try:
        return _COMMANDS[args.command](args)
    except ConfigError as e:
        print(f"kvpool-sidecar {args.command}: {e}", file=sys.stderr)
        return 2
    except (KVPoolError, OSError) as e:
        print(f"kvpool-sidecar {args.command}: {e}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130


def kvpool() -> int:
    """`kvpool`: the command `up`; every other one belongs to the distribution kvpool-cli, if that is installed."""
    argv = sys.argv[1:]
    if argv[:1] != ["up"] and importlib.util.find_spec("kvpool_cli") is not None:
        code: int = importlib.import_module("kvpool_cli.main").main()
        return code
    if argv[:1] != ["up"]:
        print("kvpool: here is only `kvpool up`; install kvpool-cli for the other commands", file=sys.stderr)
        return 0 if argv[:1] in (["-h"], ["--help"]) else 2
    return main(argv)
