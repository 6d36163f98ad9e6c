"""Requests through kubectl, with a program that answers as kubectl does."""

from __future__ import annotations

import argparse

import pytest

from kvpool_cli.errors import NotFoundError, UnreachableError, UsageError
from kvpool_cli.kubectl import Kubectl, pool_name


@pytest.fixture
def program(tmp_path):
    def make(script):
        path = tmp_path / "kubectl"
        path.write_text(f"#!/bin/sh\n{script}\n")
        path.chmod(0o755)
        return str(path)

    return make


def test_the_options_of_the_cluster_are_handed_to_kubectl(program, tmp_path):
    path = program(f'echo "$@" > {tmp_path}/asked; echo "{{}}"')
    args = argparse.Namespace(context="lab", kubeconfig=None, namespace="ai")
    Kubectl(Kubectl.of(args)._command[1:], path).get("kvcachepools", "chat", "other")
    asked = (tmp_path / "asked").read_text().split()
    assert {"--context=lab", "--namespace=ai", "get", "kvcachepools", "chat", "--namespace=other"} <= set(asked)
    assert asked.index("--namespace=ai") < asked.index("--namespace=other")


@pytest.mark.parametrize(
    ("script", "error", "sentence"),
    [
        ("echo 'Error from server (NotFound): no pool' >&2; exit 1", NotFoundError, "no pool"),
        ("echo 'Unable to connect to the server' >&2; exit 1", UnreachableError, "Unable to connect"),
        ("echo 'Error from server (Forbidden): no' >&2; exit 1", UnreachableError, "Forbidden"),
        ("echo nonsense", UnreachableError, "JSON"),
        ("echo []", UnreachableError, "object"),
    ],
)
def test_what_kubectl_answers_becomes_one_kind_of_error(program, script, error, sentence):
    with pytest.raises(error, match=sentence):
        Kubectl((), program(script)).get("kvcachepools")


def test_without_kubectl_the_user_is_asked_to_install_it(tmp_path):
    with pytest.raises(UsageError, match="not on PATH"):
        Kubectl((), str(tmp_path / "none")).get("kvcachepools")


@pytest.mark.parametrize(("text", "pool"), [("chat", ("here", "chat")), ("ai/chat", ("ai", "chat"))])
def test_a_pool_is_named_with_or_without_its_namespace(text, pool):
    assert pool_name(text, "here") == pool


@pytest.mark.parametrize("text", ["", "/", "a/", "/b", "a/b/c"])
def test_a_name_that_is_no_pool_is_refused(text):
    with pytest.raises(UsageError):
        pool_name(text)
