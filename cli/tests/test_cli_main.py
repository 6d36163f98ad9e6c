"""The program around the commands: exit codes, output formats, colors, interruption, completion."""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import types

import pytest
import yaml

from kvpool_cli import main as entry
from kvpool_cli import parser as parsers
from kvpool_cli.commands import completion
from kvpool_cli.errors import CliError, UnreachableError, UsageError
from kvpool_cli.output import Style, table

RUN = [sys.executable, "-m", "kvpool_cli"]


def command(run, **names):
    return types.SimpleNamespace(NAME="try", HELP="a command", add_arguments=lambda parser: None, run=run, **names)


@pytest.fixture
def with_command(monkeypatch):
    def install(run):
        made = parsers.build_parser("kvpool", (command(run),))
        monkeypatch.setattr(entry, "build_parser", lambda prog: made)

    return install


def test_the_version_is_printed_as_text_json_and_yaml():
    texts = {
        o: subprocess.run([*RUN, "version", "-o", o], check=True, capture_output=True).stdout for o in ("json", "yaml")
    }
    assert json.loads(texts["json"]) == yaml.safe_load(texts["yaml"])
    assert subprocess.run([*RUN, "version"], check=True, capture_output=True).stdout.startswith(b"kvpool  0.")


@pytest.mark.parametrize(
    ("error", "status"),
    [(CliError("a"), 1), (UsageError("b"), 2), (UnreachableError("c"), 3), (KeyboardInterrupt(), 130)],
)
def test_each_kind_of_error_has_its_exit_code_and_no_traceback(with_command, capsys, error, status):
    def run(args):
        raise error

    with_command(run)
    assert entry.main(["try"]) == status
    printed = capsys.readouterr()
    assert printed.out == ""
    assert "Traceback" not in printed.err
    assert str(error) in printed.err


def test_the_verdict_of_a_command_is_the_exit_code(with_command):
    with_command(lambda args: 1)
    assert entry.main(["try"]) == 1


def test_wrong_usage_ends_with_2():
    done = subprocess.run([*RUN, "no-such-command"], capture_output=True, check=False)
    assert done.returncode == 2
    assert b"invalid choice" in done.stderr


def test_a_reader_that_leaves_ends_the_program_without_a_traceback(tmp_path):
    read, write = os.pipe()
    os.close(read)
    with os.fdopen(write, "wb") as closed:
        done = subprocess.run([*RUN, "completion", "fish"], stdout=closed, stderr=subprocess.PIPE, check=False)
    assert done.returncode == 141
    assert done.stderr == b""


def test_ctrl_c_during_a_request_to_the_cluster_ends_with_130(tmp_path):
    (tmp_path / "kubectl").write_text("#!/bin/sh\necho started\nexec sleep 60\n")
    (tmp_path / "kubectl").chmod(0o755)
    text = (
        "import sys; from types import SimpleNamespace as N; from kvpool_cli import main, parser\n"
        "from kvpool_cli.kubectl import Kubectl\n"
        "def run(args): print('ready', flush=True); Kubectl().get('kvp'); return 0\n"
        "made = parser.build_parser('k', (N(NAME='try', HELP='', add_arguments=lambda p: None, run=run),))\n"
        "main.build_parser = lambda prog: made\n"
        "sys.exit(main.main(['try']))"
    )
    environment = {**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}"}
    process = subprocess.Popen(
        [sys.executable, "-c", text], env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    assert process.stdout is not None
    assert process.stdout.readline() == b"ready\n"
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=60)
    assert (process.returncode, b"Traceback" in err) == (130, False)


@pytest.mark.parametrize(
    ("choice", "terminal", "environment", "colored"),
    [
        ("auto", True, {}, True),
        ("auto", False, {}, False),
        ("auto", True, {"NO_COLOR": "1"}, False),
        ("auto", True, {"TERM": "dumb"}, False),
        ("always", False, {}, True),
        ("never", True, {}, False),
    ],
)
def test_colors_are_for_terminals(monkeypatch, choice, terminal, environment, colored):
    for name in ("NO_COLOR", "TERM"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    stream = types.SimpleNamespace(isatty=lambda: terminal)
    style = Style.of(argparse.Namespace(color=choice), stream)
    assert (style.paint("x", "red") != "x") is colored


def test_a_table_aligns_columns_to_the_left_and_to_the_right():
    assert table([["a", "1"], ["bcd", "22"]], head=["N", "S"], right=[1]) == "N     S\na     1\nbcd  22"


def test_kubectl_calls_the_program_by_its_own_name(monkeypatch):
    monkeypatch.setattr(sys, "argv", ["/usr/bin/kubectl-kvpool"])
    assert entry.program() == "kubectl kvpool"


def test_completion_knows_commands_options_and_choices():
    found = {entry.path: entry for entry in completion.words(parsers.build_parser())}
    assert "version" in found[()].words
    assert found["version",].choices["--output"] == ["table", "json", "yaml"]


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("kvpool versi", {"version"}),
        ("kvpool version --output j", {"json"}),
        ("kvpool version --col", {"--color"}),
        ("kvpool completion b", {"bash"}),
    ],
)
def test_bash_completes(line, expected):
    script = subprocess.run([*RUN, "completion", "bash"], check=True, capture_output=True, text=True).stdout
    words = line.split()
    ask = f"COMP_WORDS=({line}); COMP_CWORD={len(words) - 1}; _kvpool; printf '%s\\n' \"${{COMPREPLY[@]}}\""
    done = subprocess.run(["bash", "-c", script + ask], check=True, capture_output=True, text=True)
    assert set(done.stdout.split()) == expected
