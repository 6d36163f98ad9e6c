"""Blocks, their files, and waiting for copies: for the tests of faults of several nodes."""

from __future__ import annotations

import os

from sc_nodes import wait_for
from sc_raw import block_id, payload


def blocks(first: int, count: int, size: int = 64 * 1024) -> dict[bytes, bytes]:
    return {block_id(n): payload(n, size) for n in range(first, first + count)}


def files_of(node, raw, names, below="blocks"):
    """The files of some blocks, by block id."""
    keys = {}
    for name, entry in zip(names, raw.open(names), strict=True):
        os.close(entry.fd)
        keys[name] = entry.key.hex()
    found = {f.name: f for f in node.files(below)}
    return {name: found[key] for name, key in keys.items()}


def close(entries) -> None:
    for entry in entries:
        if entry.fd >= 0:
            os.close(entry.fd)


def change(path, offset: int, byte: int | None = None) -> None:
    path.chmod(0o600)
    with path.open("r+b") as file:
        file.seek(offset)
        old = file.read(1)
        file.seek(offset)
        file.write(bytes([old[0] ^ 0xFF if byte is None else byte]))


_numbers = iter(range(0, 10_000_000, 1000))


def fresh() -> int:
    """A number whose blocks no other test uses."""
    return next(_numbers)


def wait_copied(node) -> None:
    def copied() -> bool:
        status = node.status()
        return sum(status["shared"]["copies"].values()) >= status["stored"].get("blocks", 0)

    wait_for(copied, f"{node.name} has copied all it stored")
