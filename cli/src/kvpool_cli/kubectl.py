"""The cluster, read through the user's own kubectl: its credentials, contexts and proxies."""

from __future__ import annotations

import json
import subprocess
from typing import TYPE_CHECKING, Any, Self

from kvpool_cli.errors import ForbiddenError, NotFoundError, UnreachableError, UsageError

if TYPE_CHECKING:
    import argparse

TIMEOUT_S = 20.0
MAX_BYTES = 256 * 2**20


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options that select a cluster and a namespace."""
    group = parser.add_argument_group("cluster")
    group.add_argument("--context", metavar="NAME", help="context of the kubeconfig (default: the current one)")
    group.add_argument("--kubeconfig", metavar="FILE", help="kubeconfig file (default: as kubectl)")
    group.add_argument("-n", "--namespace", metavar="NAME", help="namespace (default: that of the context)")


class Kubectl:
    """Requests to one cluster. Stateless, and safe to share between threads."""

    def __init__(self, options: tuple[str, ...] = (), program: str = "kubectl") -> None:
        self._command = (program, *options)

    @classmethod
    def of(cls, args: argparse.Namespace) -> Self:
        """Return the cluster of `--context`, `--kubeconfig` and `-n`."""
        options = [("--context", args.context), ("--kubeconfig", args.kubeconfig), ("--namespace", args.namespace)]
        return cls(tuple(f"{name}={value}" for name, value in options if value))

    def get(
        self,
        kind: str,
        name: str = "",
        namespace: str = "",
        *,
        everywhere: bool = False,
        labels: str = "",
        fields: str = "",
    ) -> dict[str, Any]:
        """Return one object, or the List of all of a kind that selectors admit.

        Raises NotFoundError and UnreachableError.
        """
        command = ["get", kind, *([name] if name else []), "--output=json"]
        command += [f"--namespace={namespace}"] if namespace else []
        command += ["--all-namespaces"] if everywhere else []
        command += [f"--selector={labels}"] if labels else []
        command += [f"--field-selector={fields}"] if fields else []
        return self._object(self.run(*command), f"kubectl get {kind}")

    def raw(self, path: str) -> dict[str, Any]:
        """Return the JSON object of an API path, for example a Service's proxy."""
        return self._object(self.run("get", f"--raw={path}"), f"kubectl get --raw {path}")

    def create(self, manifest: dict[str, Any]) -> dict[str, Any]:
        """Create an object and return it. Raises UnreachableError."""
        text = json.dumps(manifest).encode()
        return self._object(self.run("create", "--filename=-", "--output=json", stdin=text), "kubectl create")

    def namespace(self) -> str:
        """Return the namespace of the options or of the context; `default` without one."""
        for option in self._command[1:]:
            if option.startswith("--namespace="):
                return option.partition("=")[2]
        found = self.run("config", "view", "--minify", "--output=jsonpath={..namespace}")
        return found.decode(errors="replace").strip() or "default"

    def run(self, *arguments: str, stdin: bytes | None = None) -> bytes:
        """Return what kubectl prints.

        Raises NotFoundError, ForbiddenError, UnreachableError, and UsageError without a kubectl.
        """
        command = [*self._command, f"--request-timeout={TIMEOUT_S:.0f}s", *arguments]
        try:
            done = self._execute(command, stdin)
        except FileNotFoundError as e:
            raise UsageError(
                f"{self._command[0]} is not on PATH: install it, or use a command that needs no cluster"
            ) from e
        except subprocess.TimeoutExpired as e:
            raise UnreachableError(f"the cluster did not answer in {2 * TIMEOUT_S:.0f} s") from e
        if done.returncode == 0:
            return done.stdout[: MAX_BYTES + 1]
        reason = done.stderr.decode(errors="replace").strip()
        last = reason.splitlines()[-1] if reason else f"kubectl ended with {done.returncode}"
        # kubectl has one exit status for everything: the code of the API's Status is only in its text
        if "(NotFound)" in last:
            raise NotFoundError(last)
        raise ForbiddenError(last) if "(Forbidden)" in last else UnreachableError(last)

    def _execute(self, command: list[str], stdin: bytes | None) -> subprocess.CompletedProcess[bytes]:
        return subprocess.run(command, capture_output=True, timeout=2 * TIMEOUT_S, check=False, input=stdin)  # noqa: S603

    @staticmethod
    def _object(text: bytes, what: str) -> dict[str, Any]:
        if len(text) > MAX_BYTES:
            raise UnreachableError(f"{what} answered with more than {MAX_BYTES // 2**20} MiB")
        try:
            found = json.loads(text)
        except ValueError as e:
            raise UnreachableError(f"{what} did not answer with JSON") from e
        if not isinstance(found, dict):
            raise UnreachableError(f"{what} did not answer with an object")
        return found


def pool_name(text: str, default_namespace: str = "") -> tuple[str, str]:
    """Return namespace and name of `NAME` or `NAMESPACE/NAME`; an empty namespace is that of the context."""
    namespace, mark, name = text.rpartition("/")
    if not name or (mark and not namespace) or "/" in namespace:
        raise UsageError(f"{text!r} is not NAME or NAMESPACE/NAME")
    return namespace or default_namespace, name
