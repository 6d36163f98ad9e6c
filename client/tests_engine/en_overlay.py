"""Further engine libraries in folders of their own in the cache, put before the engine's environment on the path.

`overlay("sglang")` installs requirements/sglang.txt, without what it depends on: torch, numpy and the rest are those of
the engine's environment, which is made first if it is missing.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def cache_root() -> Path:
    base = os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    return Path(os.environ.get("KVPOOL_CACHE") or f"{base}/kvpool").absolute()


def overlay(name: str, engine: Path | None = None, *, is_source_only: bool = False) -> tuple[str, list[Path]]:
    """The Python, and the folders for its path; made if they are missing. CalledProcessError if they cannot be.

    `is_source_only`: leave out compiled libraries, which take most of the space.
    """
    if engine is None:
        script = ROOT / "e2e" / "engine" / "make.sh"
        made = subprocess.run(["bash", str(script)], stdout=subprocess.PIPE, text=True, check=True, timeout=1800)
        engine = Path(made.stdout.strip().splitlines()[-1])
    python = (engine / "interpreter").read_text().strip()
    pins = ROOT / "requirements" / f"{name}.txt"
    digest = hashlib.sha256(pins.read_bytes() + python.encode()).hexdigest()[:12]
    home = cache_root() / f"overlay-{name}-{digest}"
    home.mkdir(parents=True, exist_ok=True)
    with (home / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # two at a time wait for each other
        if not (home / "ready").exists():
            print(f"overlay: installing {pins.name} in {home}", file=sys.stderr, flush=True)
            shutil.rmtree(home / "site-packages", ignore_errors=True)
            install = ["-m", "pip", "install", "-q", "--disable-pip-version-check", "--no-deps", "--require-hashes"]
            minor = subprocess.run(
                [python, "-c", "import sys; print('%d.%d' % sys.version_info[:2])"],
                stdout=subprocess.PIPE, text=True, check=True, timeout=60,
            ).stdout.strip()  # fmt: skip
            target = ["--target", str(home / "site-packages"), "--python-version", minor, "--only-binary", ":all:"]
            subprocess.run([sys.executable, *install, *target, "-r", str(pins)], check=True, timeout=900)
            for library in (home / "site-packages").rglob("*.so*") if is_source_only else ():
                library.unlink()
            (home / "ready").touch()
    return python, [home / "site-packages", engine / "site-packages"]


def source_tests(name: str, engine: Path) -> Path:
    """The folder that holds `tests` of a source distribution, requirements/NAME-source.txt; unpacked once.

    pip unpacks it and then fails to build it, for which the tools are not here: only its tests are kept.
    """
    python = (engine / "interpreter").read_text().strip()
    pins = ROOT / "requirements" / f"{name}-source.txt"
    home = cache_root() / f"source-{name}-{hashlib.sha256(pins.read_bytes()).hexdigest()[:12]}"
    home.mkdir(parents=True, exist_ok=True)
    with (home / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (home / "ready").exists():
            shutil.rmtree(home / "unpacked", ignore_errors=True)
            (home / "unpacked").mkdir()
            options = ["--no-deps", "--require-hashes", "--no-binary", ":all:", "--no-build-isolation", "--no-clean"]
            pip = [python, "-m", "pip", "download", "-q", "--disable-pip-version-check", *options]
            done = subprocess.run(
                [*pip, "-d", str(home / "unpacked"), "-r", str(pins)],
                env={**os.environ, "TMPDIR": str(home / "unpacked")}, stderr=subprocess.PIPE, text=True, check=False,
                timeout=900,
            )  # fmt: skip
            found = [folder for folder in (home / "unpacked").glob(f"*/{name}_*/tests") if folder.is_dir()]
            if len(found) != 1:
                raise RuntimeError(f"{pins.name} was not unpacked: {done.stderr[-2000:]}")
            shutil.rmtree(home / "tests", ignore_errors=True)
            found[0].rename(home / "tests")
            shutil.rmtree(home / "unpacked")
            (home / "ready").touch()
    return home
