"""SGLang's storage half as a process of its own, driven line by line."""

from __future__ import annotations

import json
import os
import queue
import shutil
import subprocess
import sysconfig
import threading
from pathlib import Path
from typing import Any

import xxhash
from cl_nodes import end_with_parent
from en_overlay import ROOT, overlay

START_S, ANSWER_S = 400, 200  # the first start compiles SGLang's hash, once per machine
PATIENT = {"deadlines": {"lookup_ms": 1000, "load_min_ms": 5000, "breaker_failures": 3, "breaker_cooldown_ms": 300}}
PAGE = 64  # tokens, see sglang_process.py


def missing_tools(python: str) -> str:
    """What SGLang's hash cannot be compiled without, "" if all is there."""
    probe = "import sysconfig; print(sysconfig.get_path('include'))"
    found = subprocess.run([python, "-c", probe], stdout=subprocess.PIPE, text=True, check=True, timeout=60)
    triplet = sysconfig.get_config_var("MULTIARCH") or ""
    needs = {
        "g++": shutil.which("g++") is not None,
        "python3-dev": (Path(found.stdout.strip()) / "Python.h").exists(),
        "libssl-dev": any(Path("/usr/include", sub, "openssl/sha.h").exists() for sub in ("", triplet)),
    }
    return " ".join(name for name, there in needs.items() if not there)


class SGLang:
    """`sglang_process.py` in the engine's own Python. Every call has a time limit."""

    def __init__(self, engine: Path, log: Path, **env: str) -> None:
        python, folders = overlay("sglang", engine)
        if missing := missing_tools(python):
            raise RuntimeError(f"SGLang compiles its hash when it is first used: apt-get install {missing}")
        own = log.with_suffix(".path")
        own.mkdir()
        (own / "xxhash").symlink_to(Path(xxhash.__file__).parent)  # as an injected pod gets it
        tools = engine / "site-packages" / "bin"  # ninja
        settings = {
            "PYTHONPATH": os.pathsep.join(map(str, [ROOT / "client/src", own, *folders])),
            "PATH": f"{tools}{os.pathsep}{os.environ['PATH']}",
            "TORCH_EXTENSIONS_DIR": str(folders[0].parent / "extensions"),
            "PYTHONWARNINGS": "ignore",
            "HF_HUB_OFFLINE": "1",
            **env,
        }
        self.log = log
        self._log = log.open("wb")
        self.process = subprocess.Popen(
            [python, str(Path(__file__).parent / "sglang_process.py")],
            env={**{k: v for k, v in os.environ.items() if not k.startswith("KVPOOL")}, **settings},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            text=True,
            preexec_fn=end_with_parent,
        )
        self._answers: queue.SimpleQueue[dict[str, Any] | None] = queue.SimpleQueue()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def wait_ready(self) -> None:
        self._next(START_S)

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            if line.startswith("@@"):
                self._answers.put(json.loads(line[2:]))
        self._answers.put(None)

    def _next(self, seconds: float) -> dict[str, Any]:
        try:
            answer = self._answers.get(timeout=seconds)
        except queue.Empty:
            answer = None
        if answer is None or "error" in answer:
            self._log.flush()
            raise RuntimeError(f"SGLang: {answer}: {self.log.read_text(errors='replace')[-3000:]}")
        return answer

    def ask(self, on: str, **command: Any) -> dict[str, Any]:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps({"on": on, **command}) + "\n")
        self.process.stdin.flush()
        return self._next(ANSWER_S)

    def make(self, on: str, kind: str, socket: str, **options: Any) -> str:
        self.ask(on, make=kind, socket=socket, **{**PATIENT, **options})
        return on

    def close(self) -> None:
        if self.process.poll() is None:
            try:
                assert self.process.stdin is not None
                self.process.stdin.write('{"quit": true}\n')
                self.process.stdin.close()
                self.process.wait(60)
            except (OSError, subprocess.TimeoutExpired):
                self.process.kill()
                self.process.wait()
        self._reader.join(5)
        assert self.process.stdout is not None
        self.process.stdout.close()
        self._log.close()
