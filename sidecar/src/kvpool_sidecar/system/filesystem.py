"""Whether a tier has its file system to itself, or shares it with what the node needs to live.

In a pod, `/etc/hosts` is a file of the kubelet's own directory on the node: what is on the same device as that fills
the file system whose fullness puts the node under disk pressure. Outside of pods it is on the root file system.
"""

from __future__ import annotations

import contextlib
import os

from kvpool.errors import ConfigError

__all__ = ["NODE_FILES", "is_shared", "require"]

NODE_FILES = ("/", "/etc/hosts", "/var/lib/kubelet")


def is_shared(fd: int, node_files: tuple[str, ...] = NODE_FILES) -> bool:
    """Is the directory `fd` on a device on which the node, or this container, has files of its own?"""
    device = os.fstat(fd).st_dev
    for path in node_files:
        with contextlib.suppress(OSError):
            if os.stat(path).st_dev == device:
                return True
    return False


def require(name: str, path: str, *, shared: bool) -> None:
    """ConfigError, with what to do about it, if the tier must not share and does."""
    if shared:
        raise ConfigError(
            f"local tier {name} is on the node's own file system, and dedicatedFilesystem is Require: mount a drive "
            "there, or set it to Prefer or Ignore",
            where=path,
        )
