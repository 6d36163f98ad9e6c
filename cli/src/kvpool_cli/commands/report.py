"""`kvpool report`: a file about the pools of a cluster for a bug report, without secrets and without content."""

from __future__ import annotations

import io
import json
import platform
import tarfile
import time
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvpool_cli.cluster import source
from kvpool_cli.errors import OK, UsageError
from kvpool_cli.output import emit

if TYPE_CHECKING:
    import argparse

NAME = "report"
HELP = "write a file for a bug report: no secrets, no content of prompts"
DESCRIPTION = (
    "Write objects, statuses and findings to a tar file. It has names of namespaces, pods, nodes and models, "
    "and no Secrets, environment variables, command lines, or content of blocks."
)
CLUSTER = True


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the file."""
    parser.add_argument("--file", metavar="FILE", help="file to write (default: kvpool-report-TIME.tar.gz)")
    source.add_arguments(parser)


def run(args: argparse.Namespace) -> int:
    """Write the file, and print its name and parts."""
    from kvpool_cli.cluster.redact import redact
    from kvpool_cli.cluster.view import pool_keys, pool_state

    documents = redact(source.documents_of(args))
    findings = {
        key: [finding.dump() for finding in pool_state(documents, key).findings] for key in pool_keys(documents)
    }
    versions = {"kvpool": metadata.version("kvpool-cli"), "python": platform.python_version()}
    parts = {"documents.json": documents.dump(), "findings.json": findings, "versions.json": versions}
    path = Path(args.file or time.strftime("kvpool-report-%Y%m%d-%H%M%S.tar.gz", time.gmtime()))
    try:
        _write(path, parts)
    except OSError as e:
        raise UsageError(f"{path} cannot be written: {e}") from None
    data = {"file": str(path), "parts": list(parts), "pools": list(findings), "notes": documents.notes}
    emit(args, data, lambda _: f"wrote {path}: {', '.join(parts)}\nRead it before you send it.")
    return OK


def _write(path: Path, parts: dict[str, Any]) -> None:
    with tarfile.open(path, "x:gz") as archive:
        for name, data in parts.items():
            text = json.dumps(data, indent=1).encode()
            info = tarfile.TarInfo(f"kvpool-report/{name}")
            info.size, info.mtime, info.mode = len(text), int(time.time()), 0o600
            archive.addfile(info, io.BytesIO(text))
