"""A cluster as a kubectl that answers from files, and the dashboard as users start it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from typing import TYPE_CHECKING

from cli_documents import documents

from kvpool_cli.cluster.documents import QUERIES

if TYPE_CHECKING:
    from pathlib import Path

    from kvpool_cli.cluster.documents import Documents

KUBECTL = """#!/bin/sh
cd {here} || exit 1
[ -e hang ] && exec sleep 600
[ -e down ] && {{ echo 'Unable to connect to the server: dial tcp 192.0.2.1:6443: i/o timeout' >&2; exit 1; }}
case "$*" in
{arms}
esac
echo 'error trying to reach service' >&2
exit 1
"""


class FakeCluster:
    """Files that the kubectl of this directory answers from."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.write(documents())

    def write(self, found: Documents) -> None:
        """Replace what the cluster has."""
        answers = {
            f"*'get {q.kinds} --output'*'{f'--selector={q.labels}' if q.labels else ''}'*": {"items": found.of(q.name)}
            for q in sorted(QUERIES, key=lambda q: not q.labels)
        }
        for key, answer in found.statuses.items():
            namespace, _, pod = key.partition("/")
            answers[f"*'/api/v1/namespaces/{namespace}/pods/{pod}:7422/proxy/status'*"] = answer["status"]
        arms = []
        for number, (pattern, answer) in enumerate(answers.items()):
            self._replace(f"answer-{number}", json.dumps(answer))
            arms.append(f"{pattern}) exec cat answer-{number} ;;")
        self._replace("kubectl", KUBECTL.format(here=self.directory, arms="\n".join(arms)))

    def set_flag(self, name: str, is_set: bool = True) -> None:
        """Let kubectl fail (`down`) or never answer (`hang`)."""
        path = self.directory / name
        path.touch() if is_set else path.unlink()

    def _replace(self, name: str, text: str) -> None:
        new = self.directory / f"{name}.new"
        new.write_text(text)
        new.chmod(0o755)
        new.replace(self.directory / name)


class Dashboard:
    """A running `kvpool dashboard`."""

    def __init__(self, directory: Path, *arguments: str) -> None:
        environment = {**os.environ, "PATH": f"{directory}:{os.environ['PATH']}"}
        command = [sys.executable, "-m", "kvpool_cli", "dashboard", "--no-browser", "--interval=2", "-o", "json"]
        self.process = subprocess.Popen(
            [*command, *arguments],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        assert self.process.stdout is not None
        self.url = ""
        for line in self.process.stdout:
            if '"url"' in line:
                self.url = json.loads("{" + line + "}")["url"]
                break

    def end(self, number: int = signal.SIGINT) -> tuple[int, str]:
        """Send a signal to the command alone; return its exit code and what it wrote to stderr."""
        if self.process.poll() is None:
            self.process.send_signal(number)
        _, err = self.process.communicate(timeout=60)
        return self.process.returncode, err
