"""Paths of block files below a tier's directory, and the file POOL_ID that identifies the owner.

::

    <tier>/POOL_ID                  JSON: pool UID, format, generation (random, new when the directory is new)
    <tier>/blocks/ab/cd/abcd...     64 lower-case hex digits, fanned out twice
    <tier>/quarantine/abcd...       bad blocks, a few
    <tier>/tmp/                     files on their way, where the file system cannot make unnamed ones
    <tier>/sweep/                   shared tiers only: lease and usage of shared GC
    (kvpool_sidecar.shared_gc.metadata)
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import secrets
from typing import NamedTuple

from kvpool.errors import ConfigError
from kvpool_sidecar.system import safe_open as safefs

__all__ = [
    "BLOCKS",
    "POOL_ID",
    "QUARANTINE",
    "SWEEP",
    "TMP",
    "PoolId",
    "block_path",
    "claim_directory",
    "foreign_entry",
    "open_read_only",
    "parse_block_key",
    "read_pool_id",
]

BLOCKS, QUARANTINE, TMP, SWEEP, POOL_ID = "blocks", "quarantine", "tmp", "sweep", "POOL_ID"
_FORMAT = 1
_NAME = re.compile(r"[0-9a-f]{64}")
_HARMLESS = {"lost+found"}  # of a freshly made ext4
_MAX_POOL_ID = 4096


class PoolId(NamedTuple):
    pool_uid: str
    generation: int


def block_path(block_key: bytes) -> str:
    """Path below `blocks`."""
    name = block_key.hex()
    return f"{name[:2]}/{name[2:4]}/{name}"


def parse_block_key(name: str, outer: str, inner: str) -> bytes | None:
    """The key of a file `blocks/<outer>/<inner>/<name>`; None if no block is called so there."""
    if _NAME.fullmatch(name) and name[:2] == outer and name[2:4] == inner:
        return bytes.fromhex(name)
    return None


def read_pool_id(dir_fd: int, where: str) -> PoolId | None:
    """Read the directory's owner; None without POOL_ID. ConfigError if POOL_ID is invalid."""
    try:
        fd = safefs.open_beneath(dir_fd, POOL_ID, os.O_RDONLY | os.O_NONBLOCK)
    except FileNotFoundError:
        return None
    try:
        data = os.read(fd, _MAX_POOL_ID)
    finally:
        os.close(fd)
    try:
        value = json.loads(data)
        if value["format"] != _FORMAT:
            raise ConfigError(f"format {value['format']} of this directory is not one this build reads", where=where)
        return PoolId(str(value["pool_uid"]), int(value["generation"]) & 0xFFFFFFFF)
    except (ValueError, KeyError, TypeError) as e:
        raise ConfigError(f"{POOL_ID} cannot be read ({type(e).__name__}): empty the directory", where=where) from None


def claim_directory(dir_fd: int, pool_uid: str, where: str) -> PoolId:
    """Make sure that the directory is of this pool, and is so from now on if it was empty.

    ConfigError if it belongs to another pool or holds foreign files. Safe for concurrent sidecars.
    """
    known = read_pool_id(dir_fd, where)
    if known is None:
        foreign = foreign_entry(dir_fd)
        known = read_pool_id(dir_fd, where)  # another sidecar may have been faster
        if known is None and foreign:
            raise ConfigError(
                f"the directory holds {foreign!r} and no {POOL_ID}, so it is not ours: give the pool its own",
                where=where,
            )
        if known is None:
            known = _write_pool_id(dir_fd, pool_uid, where)
    if known.pool_uid != pool_uid:
        raise ConfigError(f"the directory belongs to pool {known.pool_uid}, not to {pool_uid}", where=where)
    for folder in (BLOCKS, QUARANTINE, TMP):
        safefs.make_directories(dir_fd, folder)
    return known


def foreign_entry(dir_fd: int) -> str:
    """The first name in the directory that is not ours and not harmless; empty if there is none."""
    with os.scandir(dir_fd) as entries:
        return min(
            (e.name for e in entries if e.name not in _HARMLESS and not e.name.startswith(f".{POOL_ID}")), default=""
        )


def open_read_only(blocks: int, read_path: str, where: str) -> int:
    """The directory `blocks` as seen through the tier's second mount at `read_path`. ConfigError if it is another."""
    try:
        fd = os.open(f"{read_path}/{BLOCKS}", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except OSError as e:
        raise ConfigError(f"the read-only mount of {where}: {e.strerror}", where=read_path) from None
    here, there = os.fstat(blocks), os.fstat(fd)
    if (here.st_dev, here.st_ino) != (there.st_dev, there.st_ino):
        os.close(fd)
        raise ConfigError(f"not the same directory as {where}", where=read_path)
    return fd


def _write_pool_id(dir_fd: int, pool_uid: str, where: str) -> PoolId:
    text = json.dumps({"format": _FORMAT, "generation": secrets.randbits(32), "pool_uid": pool_uid}) + "\n"
    temporary = f".{POOL_ID}.{secrets.token_hex(8)}"
    fd = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600, dir_fd=dir_fd)
    try:
        os.write(fd, text.encode())
    finally:
        os.close(fd)
    try:
        os.link(temporary, POOL_ID, src_dir_fd=dir_fd, dst_dir_fd=dir_fd)
    except FileExistsError:
        pass
    except OSError:  # a file system without links: the last of several writers wins, all read the same afterwards
        os.rename(temporary, POOL_ID, src_dir_fd=dir_fd, dst_dir_fd=dir_fd)
    finally:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(temporary, dir_fd=dir_fd)
    found = read_pool_id(dir_fd, where)
    if found is None:
        raise ConfigError(f"{POOL_ID} vanished while it was written", where=where)
    return found
