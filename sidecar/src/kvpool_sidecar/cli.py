"""`kvpool-sidecar`: one program for each container of the sidecar's pod, and for trying it on one machine.

Exit codes: 0 done, 1 failed while running, 2 wrong usage or configuration (the message says what to change).
"""

from __future__ import annotations

import argparse
import logging
import os
import socket
import sys
from dataclasses import replace
from typing import TYPE_CHECKING

from kvpool.errors import ConfigError, KVPoolError

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["main"]

_DESCRIPTION = """\
One node's part of a KVPool: keeps KV cache blocks on this node's drives and hands them to the engines of this node
and to the sidecars of other nodes."""

_EPILOG = """\
On Kubernetes the operator runs all of this. On one machine, without Kubernetes:

  kvpool-sidecar index --dir /tmp/index &
  kvpool-sidecar serve --config pool.json --secret-dir secret --node a --address 127.0.0.1 \\
      --socket /tmp/a.sock=default &

and point an engine at it with KVPOOL_CLIENT_CONFIG='{"socket": "/tmp/a.sock"}'. `secret` is a directory with the file
`pool-secret` (at least 16 random bytes) and, for an index with a password, `index-password`.
Every flag has an environment variable; a flag wins. `kvpool-sidecar COMMAND --help` tells more."""


def _env(name: str, default: str = "") -> str:
    return os.environ.get(name, default)


def _parser() -> argparse.ArgumentParser:
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser("kvpool-sidecar", description=_DESCRIPTION, epilog=_EPILOG, formatter_class=raw)
    parser.add_argument("--log-level", default=_env("KVPOOL_LOG_LEVEL", "INFO"), help="DEBUG, INFO, WARNING or ERROR")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")

    serve = commands.add_parser(
        "serve",
        help="keep blocks and serve them (the storage server; runs as an ordinary user)",
        description="Keep blocks on this node's drives and serve them to this node's pods and to peers.\n"
        "Ends within seconds of SIGTERM or SIGINT; what is stored stays.",
        formatter_class=raw,
    )
    _config_arguments(serve)
    serve.add_argument("--node", default=_env("KVPOOL_NODE", socket.gethostname()), help="name of this node")
    serve.add_argument(
        "--address",
        default=_env("KVPOOL_ADDRESS", "127.0.0.1"),
        help="this node's or pod's own numeric address: peers and probes find the sidecar here (default 127.0.0.1)",
    )
    serve.add_argument(
        "--handoff", default=_env("KVPOOL_HANDOFF"), help="socket where the rendezvous hands over the pods' sockets"
    )
    serve.add_argument(
        "--socket",
        action="append",
        default=[],
        metavar="PATH=TENANT",
        help="serve a fixed socket for one tenant, without a rendezvous; may be repeated",
    )
    serve.add_argument(
        "--tiers-ro",
        default=_env("KVPOOL_TIERS_RO", "/tiers=/tiers-ro"),
        metavar="FROM=TO",
        help="tiers below FROM are also mounted, read-only, below TO; readers' descriptors are opened there",
    )
    serve.add_argument("--peer-port", type=int, help="instead of peer.port of the configuration")
    serve.add_argument("--http-port", type=int, help="instead of http_port of the configuration")
    return parser


def _config_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--config",
        default=_env("KVPOOL_CONFIG", "/etc/kvpool/pool.json"),
        help="the pool's configuration (default /etc/kvpool/pool.json)",
    )
    parser.add_argument(
        "--secret-dir",
        default=_env("KVPOOL_SECRET_DIR", "/etc/kvpool-secret"),
        help="directory with the files pool-secret and index-password (default /etc/kvpool-secret)",
    )


def _serve(args: argparse.Namespace) -> int:
    from kvpool_sidecar import settings
    from kvpool_sidecar.server.app import serve

    config = settings.read_config(args.config)
    if args.peer_port is not None:
        config = replace(config, peer=replace(config.peer, port=args.peer_port))
    if args.http_port is not None:
        config = replace(config, http_port=args.http_port)
    here, separator, there = args.tiers_ro.partition("=")
    if args.tiers_ro and not (separator and here and there):
        raise ConfigError(f"--tiers-ro: FROM=TO is needed, not {args.tiers_ro!r}")
    password = settings.read_secret(args.secret_dir, settings.INDEX_PASSWORD, optional=True)
    return serve(
        settings.ServeSettings(
            config=config,
            secret=settings.read_secret(args.secret_dir, settings.POOL_SECRET),
            node=args.node,
            address=args.address,
            index_password=password.decode("ascii", "replace"),
            handoff=args.handoff,
            sockets=settings.fixed_sockets(args.socket),
            tiers_ro=(here.rstrip("/"), there.rstrip("/")),
        )
    )


_COMMANDS = {"serve": _serve}


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; its exit code."""
    args = _parser().parse_args(argv)
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
