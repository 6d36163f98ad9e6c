"""One control plane, two played nodes and one real operator process for all tests of this folder."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import subprocess
import sys
import time
import urllib.request
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import pytest
import yaml
from api import APPLY, POOLS, Api, until
from kubelet import Kubelet, SidecarDouble
from plane import binaries, control_plane, free_port

if TYPE_CHECKING:
    from collections.abc import Iterator

ROOT = Path(__file__).resolve().parents[2]
SYSTEM = "kvpool-system"
NODES = ["node-a", "node-b"]
RELEASE = ("sidecar.nfs.enabled=true", 'sidecar.image.repository="kvpool/sidecar"', 'sidecar.image.tag="test"')
"""Values of the chart for the operator process of these tests."""


@pytest.fixture(scope="session")
def kubeconfig(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    found = binaries()
    if found is None:
        pytest.skip("no etcd and kube binaries: `e2e/airgap/binaries.sh etcd kube` builds them")
    with control_plane(found, tmp_path_factory.mktemp("plane")) as config:
        yield config


@pytest.fixture(scope="session")
def api(kubeconfig: Path) -> Api:
    api = Api(kubeconfig)
    for file in sorted((ROOT / "crds").glob("*.kvpool.dev.yaml")):
        crd = yaml.safe_load(file.read_text())
        path = f"/apis/apiextensions.k8s.io/v1/customresourcedefinitions/{crd['metadata']['name']}"
        api.call("PATCH", f"{path}?fieldManager=test", crd, APPLY)
        served = f"{POOLS}/{crd['spec']['names']['plural']}"
        until(f"{file.name} is served", lambda path=served: api.items(path) == [])
    namespace(api, SYSTEM)
    return api


def rendered(*sets: str) -> list[dict[str, Any]]:
    """What the chart makes. `sets`: for helm's --set-json."""
    helm = shutil.which("helm", path=f"{binaries()}{os.pathsep}{os.environ['PATH']}")
    if helm is None:
        pytest.skip("no helm: `e2e/airgap/binaries.sh helm` builds it")
    chart = [helm, "template", "kvpool", "charts/kvpool", "-n", SYSTEM, *(f for s in sets for f in ("--set-json", s))]
    text = subprocess.run(chart, check=True, capture_output=True, text=True, cwd=ROOT, timeout=60).stdout
    return [m for m in yaml.safe_load_all(text) if m]


def grant(api: Api, manifests: list[dict[str, Any]]) -> None:
    """Make or renew the accounts and roles among them."""
    rbac = "/apis/rbac.authorization.k8s.io/v1"
    places = {
        "ServiceAccount": f"/api/v1/namespaces/{SYSTEM}/serviceaccounts",
        "ClusterRole": f"{rbac}/clusterroles",
        "ClusterRoleBinding": f"{rbac}/clusterrolebindings",
        "Role": f"{rbac}/namespaces/{{}}/roles",
        "RoleBinding": f"{rbac}/namespaces/{{}}/rolebindings",
    }
    for manifest in manifests:
        if manifest["kind"] in places:
            place = places[manifest["kind"]].format(manifest["metadata"].get("namespace", ""))
            path = f"{place}/{manifest['metadata']['name']}"
            api.call("PATCH", f"{path}?fieldManager=helm&force=true", manifest, APPLY)


def admit(api: Api, manifests: list[dict[str, Any]]) -> None:
    """Make or renew the chart's ValidatingAdmissionPolicies, which hold in every test."""
    plurals = {
        "ValidatingAdmissionPolicy": "validatingadmissionpolicies",
        "ValidatingAdmissionPolicyBinding": "validatingadmissionpolicybindings",
    }
    for manifest in manifests:
        if manifest["kind"] in plurals:
            path = f"/apis/admissionregistration.k8s.io/v1/{plurals[manifest['kind']]}/{manifest['metadata']['name']}"
            api.call("PATCH", f"{path}?fieldManager=helm&force=true", manifest, APPLY)


def as_account(api: Api, kubeconfig: Path, name: str) -> Path:
    """A kubeconfig of a service account of the chart."""
    request = {"apiVersion": "authentication.k8s.io/v1", "kind": "TokenRequest", "spec": {"expirationSeconds": 7200}}
    token = api.call("POST", f"/api/v1/namespaces/{SYSTEM}/serviceaccounts/{name}/token", request)["status"]["token"]
    config = yaml.safe_load(kubeconfig.read_text())
    config["users"][0]["user"]["token"] = token
    path = kubeconfig.with_name(f"{name}.kubeconfig")
    path.write_text(yaml.safe_dump(config))
    return path


@pytest.fixture(scope="session")
def rights(api: Api, kubeconfig: Path) -> Path:
    """A kubeconfig of the operator's service account, with the rights that the chart gives it and no others."""
    manifests = rendered(*RELEASE)
    grant(api, manifests)
    admit(api, manifests)
    return as_account(api, kubeconfig, "kvpool-operator")


@pytest.fixture(scope="session")
def kubelet(api: Api) -> Iterator[Kubelet]:
    with Kubelet(api, NODES) as kubelet:
        yield kubelet


@pytest.fixture
def sidecars(kubelet: Kubelet) -> Iterator[dict[str, SidecarDouble]]:
    with contextlib.ExitStack() as stack:
        yield {node: stack.enter_context(SidecarDouble(node)) for node in NODES}
    kubelet.down.clear()
    kubelet.failing.clear()


class Operator:
    """A real operator process."""

    def __init__(self, kubeconfig: Path, log: Path, identity: str, **settings: str) -> None:
        self.log = log
        self.admin_port, self.issuer_port = free_port(), free_port()
        self._env = {
            **{k: v for k, v in os.environ.items() if k in ("PATH", "HOME", "LANG")},
            "KUBECONFIG": str(kubeconfig),
            "KVPOOL_NAMESPACE": SYSTEM,
            "KVPOOL_SIDECAR_IMAGE": "kvpool/sidecar:test",
            "KVPOOL_IDENTITY": identity,
            "KVPOOL_ADMIN_PORT": str(self.admin_port),
            "KVPOOL_ISSUER_PORT": str(self.issuer_port),
            "KVPOOL_RESYNC_PERIOD": "1",
            "KVPOOL_LOG_LEVEL": "DEBUG",
            "KVPOOL_NETWORK_POLICIES": "true",
            "KVPOOL_NFS": "true",
            **{f"KVPOOL_{name.upper()}": value for name, value in settings.items()},
        }
        self._start()

    def _start(self) -> None:
        with self.log.open("ab") as out:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "kvpool_operator", "run"], env=self._env, stdout=out, stderr=out, cwd=ROOT
            )

    def ensure(self) -> None:
        """Start it again where a test has ended it."""
        if self.process.poll() is not None:
            self._start()

    def metric(self, name: str, label: str = "") -> float:
        """The sum of a metric over its labels, or over those rows that have `label`, such as state="injected"."""
        with urllib.request.urlopen(f"http://127.0.0.1:{self.admin_port}/metrics", timeout=10) as answer:
            lines = answer.read().decode().splitlines()
        return sum(float(line.rsplit(" ", 1)[1]) for line in lines if re.match(rf"{name}[ {{]", line) and label in line)

    def end(self) -> int:
        self.process.terminate()
        try:
            return self.process.wait(20)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self.process.poll() is None:
            self.end()


@pytest.fixture(scope="session")
def first_operator(
    api: Api, kubelet: Kubelet, rights: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Operator]:
    with Operator(rights, tmp_path_factory.mktemp("operator") / "log", "first") as operator:
        yield operator
    text = operator.log.read_text()
    assert "Traceback" not in text, text[-6000:]
    forbidden = [line for line in text.splitlines() if "HTTP 403" in line and "being terminated" not in line]
    assert not forbidden, "the chart's rights do not suffice"


@pytest.fixture
def operator(first_operator: Operator) -> Operator:
    """The one of all tests; it runs, also after a test that ended it."""
    first_operator.ensure()
    return first_operator


@pytest.fixture
def no_operator(first_operator: Operator) -> None:
    """For tests that bring operators of their own."""
    if first_operator.process.poll() is None:
        first_operator.end()


def namespace(api: Api, name: str, **labels: str) -> None:
    api.call("POST", "/api/v1/namespaces", {"metadata": {"name": name, "labels": labels}})


class Pools:
    """What a user does with pools."""

    def __init__(self, api: Api, issuer_url: str = "") -> None:
        self.api = api
        self.issuer_url = issuer_url

    def path(self, name: str, ns: str = SYSTEM) -> str:
        return f"{POOLS}/namespaces/{ns}/kvcachepools/{name}"

    def apply(self, name: str, ns: str = SYSTEM, **spec: Any) -> dict[str, Any]:
        tiers = [{"name": "nvme", "local": {"path": f"/var/lib/kvpool/{name}", "capacity": "1Gi"}}]
        manifest = {
            "apiVersion": "kvpool.dev/v1alpha1",
            "kind": "KVCachePool",
            "metadata": {"name": name, "namespace": ns},
            "spec": {"tiers": tiers, "preflight": "Skip", **spec},
        }
        made: dict[str, Any] = self.api.call("PATCH", f"{self.path(name, ns)}?fieldManager=user", manifest, APPLY)
        return made

    def get(self, name: str, ns: str = SYSTEM) -> Any:
        return self.api.get(self.path(name, ns))

    def condition(self, name: str, kind: str, ns: str = SYSTEM) -> dict[str, Any]:
        pool = self.get(name, ns)
        found = [c for c in pool["status"]["conditions"] if c["type"] == kind]
        if found[0]["observedGeneration"] != pool["metadata"]["generation"]:
            raise KeyError(f"{kind} does not speak of the present spec yet")
        return found[0]

    def until_condition(self, name: str, kind: str, reason: str, words: str = "", ns: str = SYSTEM) -> None:
        """Wait until the condition has that reason and its message those words."""
        end = time.monotonic() + 30
        while True:
            with contextlib.suppress(KeyError):
                found = self.condition(name, kind, ns)
                if found["reason"] == reason and words in found["message"]:
                    return
            assert time.monotonic() < end, (
                f"{kind} is not {reason} ({words}): {json.dumps(self.get(name, ns)['status'])}"
            )
            time.sleep(0.1)

    def until_ready(self, name: str, ns: str = SYSTEM) -> dict[str, Any]:
        def ready() -> Any:
            pool = self.get(name, ns)
            status = pool["status"]
            good = {c["type"]: c["status"] for c in status["conditions"]}["Ready"] == "True"
            return good and status["observedGeneration"] == pool["metadata"]["generation"] and pool

        found: dict[str, Any] = until(f"pool {name} is Ready", ready)
        return found

    def delete(self, name: str, ns: str = SYSTEM, **options: Any) -> None:
        self.api.delete(self.path(name, ns), **options)

    def until_gone(self, name: str, ns: str = SYSTEM, timeout: float = 30) -> None:
        until(f"pool {name} is gone", lambda: self.get(name, ns) is None, timeout)

    def owned(self, name: str, ns: str = SYSTEM) -> dict[str, dict[str, Any]]:
        """Everything with the pool's label: Kind/name -> object."""
        found = {}
        for group, kinds in (
            ("/api/v1", ("configmaps", "secrets", "services", "serviceaccounts", "persistentvolumeclaims", "pods")),
            ("/apis/apps/v1", ("daemonsets", "statefulsets")),
            ("/apis/networking.k8s.io/v1", ("networkpolicies",)),
        ):
            for kind in kinds:
                for o in self.api.items(f"{group}/namespaces/{ns}/{kind}?labelSelector=kvpool.dev%2Fpool%3D{name}"):
                    found[f"{kind}/{o['metadata']['name']}"] = o
        for path in ("/apis/rbac.authorization.k8s.io/v1/clusterrolebindings", "/api/v1/persistentvolumes"):
            for o in self.api.items(f"{path}?labelSelector=kvpool.dev%2Fpool%3D{name}"):
                found[f"{path.rsplit('/', 1)[1]}/{o['metadata']['name']}"] = o
        return found

    def events(self, name: str, ns: str = SYSTEM) -> list[dict[str, Any]]:
        return [e for e in self.api.items(f"/api/v1/namespaces/{ns}/events") if e["involvedObject"]["name"] == name]


@pytest.fixture
def pools(operator: Operator, sidecars: dict[str, SidecarDouble], api: Api) -> Iterator[Pools]:
    yield Pools(api, f"https://127.0.0.1:{operator.issuer_port}")
    operator.ensure()
    remove_all_pools(api)


def remove_all_pools(api: Api) -> None:
    """An operator must run."""
    for pool in api.items(f"{POOLS}/kvcachepools"):
        path = f"{POOLS}/namespaces/{pool['metadata']['namespace']}/kvcachepools/{pool['metadata']['name']}"
        api.call("PATCH", path, {"spec": {"deletionPolicy": "Retain"}}, "application/merge-patch+json")
        api.delete(path)
    until("every pool is gone", lambda: api.items(f"{POOLS}/kvcachepools") == [])
    for pod in api.items("/api/v1/pods?labelSelector=kvpool.dev%2Finject%3Dtrue"):  # they count for a pool of that name
        meta = pod["metadata"]
        api.delete(f"/api/v1/namespaces/{meta['namespace']}/pods/{meta['name']}", gracePeriodSeconds=0)
