"""The peers' libraries in a folder of their own in the cache; torch and vLLM are those of the engine's environment."""

from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PINS = ROOT / "requirements" / "bench-peers.txt"


def cache_root() -> Path:
    base = os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    return Path(os.environ.get("KVPOOL_CACHE") or f"{base}/kvpool").absolute()


def engine_is_there() -> bool:
    """Has somebody made the engine's environment, which takes 6 GB, already?"""
    return any((found / "ready").exists() for found in cache_root().glob("engine-*"))


def make() -> tuple[str, list[Path]]:
    """The Python and the folders for its path; made if they are missing. SystemExit if they cannot be."""
    made = subprocess.run([str(ROOT / "e2e" / "engine" / "make.sh")], stdout=subprocess.PIPE, text=True, check=False)
    if made.returncode != 0:
        raise SystemExit("bench: the engine's environment could not be made; `--systems kvpool` does without")
    engine = Path(made.stdout.strip())
    python = (engine / "interpreter").read_text().strip()
    digest = hashlib.sha256(PINS.read_bytes() + python.encode()).hexdigest()[:12]
    home = cache_root() / f"peers-{digest}"
    home.mkdir(parents=True, exist_ok=True)
    with (home / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (home / "ready").exists():
            print(f"bench: installing the peers' libraries (230 MB) in {home}", file=sys.stderr, flush=True)
            shutil.rmtree(home / "site-packages", ignore_errors=True)
            install = ["-m", "pip", "install", "-q", "--disable-pip-version-check", "--no-deps", "--require-hashes"]
            target = ["--target", str(home / "site-packages"), "-r", str(PINS)]
            if subprocess.run([sys.executable, *install, *target], check=False).returncode != 0:
                raise SystemExit("bench: the peers' libraries could not be installed; `--systems kvpool` does without")
            (home / "ready").touch()
    return python, [home / "site-packages", engine / "site-packages"]
