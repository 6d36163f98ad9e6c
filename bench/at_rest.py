"""`python -m bench at_rest`: what encryption of the shared tier costs: MB/s and CPU seconds per GB by size of a block.

Blocks of random bytes pass from memory to memory, so the figures hold no file system. Prints a table and writes
out/bench/at_rest.json.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from pathlib import Path
from typing import TYPE_CHECKING

from kvpool.protocol import block
from kvpool.protocol.block import HEADER_BYTES, BlockHeader
from kvpool_sidecar.blocks.encryption import EncryptedBlock, encrypt

if TYPE_CHECKING:
    from collections.abc import Callable

ROOT = Path(__file__).resolve().parent.parent
MIB = 1 << 20
KEY = bytes(32)


def measured(size: int, seconds: float, work: Callable[[], None]) -> dict[str, float]:
    """MB/s and CPU seconds per GB of `work`, which handles `size` bytes."""
    work()
    begun, cpu, rounds = time.perf_counter(), time.process_time(), 0
    while time.perf_counter() - begun < seconds:
        work()
        rounds += 1
    total = size * rounds
    took, used = time.perf_counter() - begun, time.process_time() - cpu
    return {"mb_s": total / took / 1e6, "cpu_s_per_gb": used / (total / 1e9)}


def figures(size: int, seconds: float) -> dict[str, dict[str, float]]:
    """Of one block of `size` bytes: encrypted and decrypted."""
    source, sealed, again, plain = (os.memfd_create(name) for name in ("plain", "sealed", "again", "opened"))
    data = os.urandom(size)
    inner = BlockHeader(bytes(32), bytes(32), bytes(32), bytes(16), size, block.checksum(data), 1)
    os.pwrite(source, block.encode_header(inner) + data, 0)
    encrypt(KEY, source, inner, sealed)
    outer = block.decode_header(os.pread(sealed, HEADER_BYTES, 0), packed=True)

    def opened() -> None:
        encrypted = EncryptedBlock(sealed, outer, KEY)
        encrypted.header()
        encrypted.read(lambda piece, offset: (os.pwrite(plain, piece, offset), None)[1])

    try:
        return {
            "encrypt": measured(size, seconds, lambda: encrypt(KEY, source, inner, again)),
            "decrypt": measured(size, seconds, opened),
        }
    finally:
        for fd in (source, sealed, again, plain):
            os.close(fd)


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m bench at_rest", description=__doc__)
    parser.add_argument("--seconds", type=float, default=3.0)
    args = parser.parse_args(argv)
    result = {}
    print(f"{'block':>8} {'direction':>10} {'MB/s':>8} {'CPU s/GB':>9}")
    for size in (2 * MIB, 32 * MIB):
        result[f"{size // MIB} MiB"] = one = figures(size, args.seconds)
        for direction, found in one.items():
            print(f"{size // MIB:>4} MiB {direction:>10} {found['mb_s']:>8.0f} {found['cpu_s_per_gb']:>9.2f}")
    out = ROOT / "out" / "bench" / "at_rest.json"
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(json.dumps(result, indent=2) + "\n")
    return 0
