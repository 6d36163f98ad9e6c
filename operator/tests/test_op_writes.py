"""Few modules write to the API: everybody else decides, and hands plans and statuses to them."""

from __future__ import annotations

import ast
from pathlib import Path

import kvpool_operator

PACKAGE = Path(kvpool_operator.__file__).parent
WRITES = {"create", "apply", "patch", "delete", "evict"}
CLIENTS = {"cluster", "api"}
"""Names of variables and attributes (`_cluster`, too) that hold an ApiClient."""
WRITERS = {
    "issuing/issuer.py",  # TokenReviews, which are questions
    "issuing/root_store.py",  # the root of the pools' CAs, once
    "k8s/leader_election.py",  # the Lease, and the fence around all writes
    "k8s/status_writer.py",
    "nodes/writer.py",
    "operations/reconciler.py",  # finalizers and deletion of finished operations
    "pools/apply.py",
    "webhook/api_access.py",  # the webhook's own certificate, in another process
}


def modules():
    for path in sorted(PACKAGE.rglob("*.py")):
        yield str(path.relative_to(PACKAGE)), ast.parse(path.read_text())


def name_of(node: ast.expr) -> str:
    return (node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else "").lstrip("_")


def test_only_writers_call_the_writing_methods_of_the_api_client():
    found = {
        name
        for name, tree in modules()
        for node in ast.walk(tree)
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and node.func.attr in WRITES
        and name_of(node.func.value) in CLIENTS
    }
    assert found == WRITERS


def test_an_api_client_is_called_by_one_of_its_names():
    """Otherwise the test above would overlook it."""
    odd = {
        f"{name}: {argument.arg}"
        for name, tree in modules()
        for argument in ast.walk(tree)
        if isinstance(argument, ast.arg)
        and argument.annotation is not None
        and "ApiClient" in ast.unparse(argument.annotation).split(" | ")
        and argument.arg not in CLIENTS
    }
    assert odd == set()
