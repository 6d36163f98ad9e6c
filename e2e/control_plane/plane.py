"""A real Kubernetes control plane as a few processes on the loopback interface: etcd, API server, controllers.

No node and no container runs here: tests make Node objects and play the kubelet. `python plane.py DIR` starts one
in the foreground (Ctrl-C ends it) and prints the KUBECONFIG to use.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import signal
import socket
import ssl
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

CACHE = Path(os.environ.get("KVPOOL_CACHE") or Path.home() / ".cache" / "kvpool")


def binaries() -> Path | None:
    """Folder with `etcd` and `kube`: $KVPOOL_CONTROL_PLANE_BIN, else what e2e/airgap/binaries.sh built."""
    given = os.environ.get("KVPOOL_CONTROL_PLANE_BIN")
    candidates = [Path(given)] if given else sorted((CACHE / "airgap").glob("bin-*"), reverse=True)
    return next((c for c in candidates if (c / "etcd").exists() and (c / "kube").exists()), None)


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port: int = s.getsockname()[1]
        return port


def _ready(url: str, token: str, process: subprocess.Popen[bytes], log: Path, timeout: float = 90) -> None:
    context = ssl.create_default_context()
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    request = urllib.request.Request(url, headers={"Authorization": f"Bearer {token}"})
    end = time.monotonic() + timeout
    while True:
        with (
            contextlib.suppress(OSError, urllib.error.URLError),
            urllib.request.urlopen(request, timeout=2, context=context) as answer,
        ):
            if answer.status == 200:
                return
        if process.poll() is not None or time.monotonic() > end:
            raise RuntimeError(f"the API server is not ready; its log ends with:\n{log.read_text()[-3000:]}")
        time.sleep(0.1)


@contextlib.contextmanager
def control_plane(
    bin_dir: Path, folder: Path, *, apiserver: Sequence[str] = (), scheduler: bool = False
) -> Iterator[Path]:
    """Start it in `folder` and give the kubeconfig of an administrator; end every process afterwards.

    `apiserver`: further flags. With a `scheduler` pods are bound to nodes, and controllers ask as often as they like.
    """
    folder.mkdir(parents=True, exist_ok=True)
    pki = folder / "pki"
    pki.mkdir(exist_ok=True)
    token = secrets.token_hex(16)
    (pki / "tokens.csv").write_text(f"{token},admin,admin,system:masters\n")
    subprocess.run(
        ["openssl", "genrsa", "-out", str(pki / "sa.key"), "2048"], check=True, capture_output=True, timeout=60
    )
    etcd, peer, api = free_port(), free_port(), free_port()
    kubeconfig = folder / "kubeconfig"
    kubeconfig.write_text(
        f"apiVersion: v1\nkind: Config\ncurrent-context: plane\n"
        f'clusters: [{{name: plane, cluster: {{server: "https://127.0.0.1:{api}", insecure-skip-tls-verify: true}}}}]\n'
        f"users: [{{name: admin, user: {{token: {token}}}}}]\n"
        f"contexts: [{{name: plane, context: {{cluster: plane, user: admin}}}}]\n"
    )
    started: list[subprocess.Popen[bytes]] = []

    def start(*args: str) -> subprocess.Popen[bytes]:
        with (folder / f"{args[1] if args[0].endswith('kube') else 'etcd'}.log").open("wb") as log:
            started.append(subprocess.Popen(args, stdout=log, stderr=log, stdin=subprocess.DEVNULL, cwd=folder))
        return started[-1]

    kube = str(bin_dir / "kube")
    try:
        start(
            str(bin_dir / "etcd"),
            f"--data-dir={folder / 'etcd'}",
            f"--listen-client-urls=http://127.0.0.1:{etcd}",
            f"--advertise-client-urls=http://127.0.0.1:{etcd}",
            f"--listen-peer-urls=http://127.0.0.1:{peer}",
            "--unsafe-no-fsync",
        )
        server = start(
            kube,
            "kube-apiserver",
            f"--etcd-servers=http://127.0.0.1:{etcd}",
            f"--secure-port={api}",
            "--bind-address=127.0.0.1",
            f"--cert-dir={pki}",
            "--service-account-issuer=https://kubernetes.default.svc",
            f"--service-account-key-file={pki / 'sa.key'}",
            f"--service-account-signing-key-file={pki / 'sa.key'}",
            f"--token-auth-file={pki / 'tokens.csv'}",
            "--authorization-mode=RBAC",
            "--service-cluster-ip-range=10.97.0.0/16",
            "--allow-privileged",
            # beta and off by default in this version; from 1.36 on it is always there
            "--feature-gates=MutatingAdmissionPolicy=true",
            "--runtime-config=admissionregistration.k8s.io/v1beta1=true",
            *apiserver,
        )
        _ready(f"https://127.0.0.1:{api}/readyz", token, server, folder / "kube-apiserver.log")
        unlimited = ["--kube-api-qps=500", "--kube-api-burst=1000"] if scheduler else []
        start(
            kube,
            "kube-controller-manager",
            f"--kubeconfig={kubeconfig}",
            f"--service-account-private-key-file={pki / 'sa.key'}",
            "--use-service-account-credentials",
            "--leader-elect=false",
            "--secure-port=0",
            "--controllers=*,-node-lifecycle-controller,-node-ipam-controller",
            *unlimited,
        )
        if scheduler:
            start(
                kube,
                "kube-scheduler",
                f"--kubeconfig={kubeconfig}",
                "--leader-elect=false",
                "--secure-port=0",
                *unlimited,
            )
        yield kubeconfig
    finally:
        for process in reversed(started):  # nothing in there is worth a graceful end
            process.kill()
            process.wait()


def main() -> int:
    found = binaries()
    if found is None:
        print("no etcd and kube binaries: run e2e/airgap/binaries.sh etcd kube", file=sys.stderr)
        return 2
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    with control_plane(found, Path(sys.argv[1])) as kubeconfig, contextlib.suppress(KeyboardInterrupt):
        print(f"export KUBECONFIG={kubeconfig}", flush=True)
        signal.pause()
    return 0


if __name__ == "__main__":
    sys.exit(main())
