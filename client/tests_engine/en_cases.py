"""A program that answers each line of JSON by a line that starts with `@@`, in the engine's own Python."""

from __future__ import annotations

import json
import subprocess
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pathlib import Path


class Cases:
    """The program `command`; what it prints besides goes to `log`."""

    def __init__(self, command: list[str], env: dict[str, str], log: Path) -> None:
        self._log = log.open("wb")
        self._process = subprocess.Popen(
            command, env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._log, text=True
        )

    def ask(self, **case: Any) -> dict[str, Any]:
        """One case; its end is awaited for as long as the test may take."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps(case) + "\n")
        self._process.stdin.flush()
        for line in self._process.stdout:
            if line.startswith("@@"):
                answer: dict[str, Any] = json.loads(line[2:])
                return answer
        raise RuntimeError("the process ended")

    def close(self) -> None:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.close()
        self._process.wait(60)
        self._process.stdout.close()
        self._log.close()
