"""`python -m bench compression`: how far real KV shrinks, and what that costs.

A real vLLM on the CPU runs the demo's model (random weights) over the texts of this repository and stores its KV, bf16
and fp8 (e4m3), through a sidecar. Each stored block is then compressed and decompressed by the pool's own codecs.
Prints a table and writes out/bench/compression.json.

Needs the engine's environment (about 6 GB; e2e/engine/make.sh makes it) and keeps two processors busy for two minutes.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import shutil
import subprocess
import tempfile
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import xxhash

from bench.nodes import end_with_parent
from bench.prefetch import Node
from kvpool.protocol import block
from kvpool.protocol.block import HEADER_BYTES
from kvpool_sidecar.blocks import compression as codec

ROOT = Path(__file__).resolve().parent.parent
ENGINE_S = 400
NAMES = {block.CODEC_ZSTD: "Zstd", block.CODEC_LZ4: "LZ4"}


def engine_home() -> Path:
    made = subprocess.run(
        ["bash", str(ROOT / "e2e/engine/make.sh")], stdout=subprocess.PIPE, text=True, check=True, timeout=1800
    )
    return Path(made.stdout.strip().splitlines()[-1])


def connector(socket: Path) -> str:
    tier = {"type": "PoolTier", "module_path": "kvpool.engines.vllm", "socket": str(socket)}
    extra = {
        "spec_name": "CpuTieringSpec", "spec_module_path": "kvpool_cpu_worker", "cpu_bytes_to_use": 256 << 20,
        "block_size": 256, "offload_prompt_only": False, "secondary_tiers": [tier],
    }  # fmt: skip
    return json.dumps(
        {"kv_connector": "OffloadingConnector", "kv_role": "kv_both", "kv_load_failure_policy": "recompute",
         "kv_connector_extra_config": extra}
    )  # fmt: skip


def run_engine(home: Path, directory: Path, arguments: list[str]) -> str:
    """What it printed last; RuntimeError if it failed."""
    extra = directory / "path"
    extra.mkdir(exist_ok=True)
    with contextlib.suppress(FileExistsError):
        (extra / "xxhash").symlink_to(Path(xxhash.__file__).parent)
    path = [ROOT / "client/src", extra, home / "testing", home / "site-packages"]
    env = {
        **{k: v for k, v in os.environ.items() if not k.startswith("KVPOOL")},
        "PYTHONPATH": os.pathsep.join(map(str, path)), "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_CACHE_ROOT": str(home / "vllm-cache"), "VLLM_NO_USAGE_STATS": "1", "HF_HUB_OFFLINE": "1",
        "DO_NOT_TRACK": "1", "PYTHONWARNINGS": "ignore", "VLLM_LOGGING_LEVEL": "ERROR",
    }  # fmt: skip
    done = subprocess.run(
        [(home / "interpreter").read_text().strip(), str(ROOT / "bench/kv_of_engine.py"), *arguments],
        env=env, capture_output=True, text=True, timeout=ENGINE_S, preexec_fn=end_with_parent, check=False,
    )  # fmt: skip
    if done.returncode:
        raise RuntimeError(done.stderr.strip().splitlines()[-1] if done.stderr.strip() else str(done.returncode))
    return done.stdout.strip().splitlines()[-1]


def text(size: int) -> bytes:
    files = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *ROOT.glob("client/src/kvpool/*.py")])
    return b"".join(file.read_bytes() for file in files)[:size]


def store_kv(home: Path, directory: Path, kv_dtype: str) -> Path:
    """Where the block files are."""
    node = Node(directory / kv_dtype, 0)
    try:
        file = directory / "text"
        file.write_bytes(text(64 << 10))
        run_engine(
            home, directory, [str(home / "model"), connector(directory / kv_dtype / "kv.sock"), str(file), kv_dtype]
        )
        deadline = time.monotonic() + 30
        while not (stored := node.status()["stored"].get("blocks", 0)) and time.monotonic() < deadline:
            time.sleep(0.1)
        if not stored:
            raise RuntimeError("the engine stored nothing")
    finally:
        node.close()
    return node.nvme / "blocks"


def measure(name: str, blocks: list[Path], rounds: int) -> list[dict[str, object]]:
    raw = [file.read_bytes()[HEADER_BYTES:] for file in blocks]
    total = sum(map(len, raw))
    rows: list[dict[str, object]] = []
    for which, codec_name in NAMES.items():
        stored, pack_s, unpack_s = 0, [], []
        for number in range(rounds):
            sizes, packing, unpacking = _once(which, raw)
            pack_s.append(packing / total * 1e9)
            unpack_s.append(unpacking / total * 1e9)
            stored = sum(sizes) if number == 0 else stored
        planes = sum(_planes(which, payload) for payload in raw) if name == "bf16" else None
        rows.append(
            {
                "kv": name, "codec": codec_name, "blocks": len(raw), "block_bytes": len(raw[0]),
                "ratio": round(total / stored, 3), "saved": round(1 - stored / total, 3),
                "compress_cpu_s_per_gb": round(min(pack_s), 2), "decompress_cpu_s_per_gb": round(min(unpack_s), 2),
                "ratio_of_byte_planes": round(total / planes, 3) if planes else None,
            }
        )  # fmt: skip
    return rows


def _once(which: int, raw: list[bytes]) -> tuple[list[int], float, float]:
    sizes: list[int] = []
    packing = unpacking = 0.0
    for payload in raw:
        source, target = os.memfd_create("raw"), os.memfd_create("packed")
        try:
            os.pwrite(source, payload, HEADER_BYTES)
            began = time.process_time()
            stored = codec.compress(which, source, len(payload), target, 2 * len(payload))
            packing += time.process_time() - began
            assert stored is not None
            sizes.append(stored)
            head = block.BlockHeader(
                bytes(32), bytes(32), bytes(32), bytes(16), len(payload), block.checksum(payload), 0
            )  # fmt: skip
            began = time.process_time()
            codec.decompress(target, replace(head, codec=which, stored_len=stored), lambda _piece, _offset: None)
            unpacking += time.process_time() - began
        finally:
            os.close(source)
            os.close(target)
    return sizes, packing, unpacking


def _planes(which: int, payload: bytes) -> int:
    """Stored length if all low bytes came first, then all high ones (signs, exponents); no codec of ours does that."""
    split = np.frombuffer(payload, np.uint8).reshape(-1, 2).T.tobytes()
    return _once(which, [split])[0][0]


def table(rows: list[dict[str, object]]) -> str:
    lines = ["KV     codec  ratio  saved  compress, CPU s/GB  decompress, CPU s/GB  ratio by byte planes"]
    for r in rows:
        planes = r["ratio_of_byte_planes"] or ""
        lines.append(
            f"{r['kv']!s:5s}  {r['codec']!s:5s}  {r['ratio']!s:>5s}  {float(str(r['saved'])):5.0%}  "
            f"{r['compress_cpu_s_per_gb']!s:>18s}  {r['decompress_cpu_s_per_gb']!s:>20s}  {planes!s:>20s}"
        )
    return "\n".join(lines)


def main(argv: list[str]) -> int:
    """Run, print, write the JSON. 0."""
    parser = argparse.ArgumentParser(prog="python -m bench compression", description=__doc__)
    parser.add_argument("--rounds", type=int, default=3, help="compressions per block")
    parser.add_argument("--dir", type=Path, default=Path("out/bench"), help="directory for blocks and results")
    options = parser.parse_args(argv)
    options.dir.mkdir(parents=True, exist_ok=True)
    directory = Path(tempfile.mkdtemp(prefix="run-", dir=options.dir)).resolve()
    try:
        home = engine_home()
        bf16 = store_kv(home, directory, "auto")
        fp8 = store_kv(home, directory, "fp8_e4m3")
        noise = directory / "noise"
        noise.write_bytes(bytes(HEADER_BYTES) + random.Random(0).randbytes(4 << 20))
        rows = []
        for name, files in (("bf16", _files(bf16)), ("fp8", _files(fp8)), ("noise", [noise])):
            rows += measure(name, files, options.rounds)
    finally:
        shutil.rmtree(directory, ignore_errors=True)
    print(table(rows))
    result = options.dir / "compression.json"
    result.write_text(json.dumps(rows, indent=1) + "\n")
    print(f"\nwritten: {result}")
    return 0


def _files(directory: Path) -> list[Path]:
    return sorted(f for f in directory.rglob("*") if len(f.name) == 64)
