"""`kvpool up` with real processes: one machine, and a second one that joins."""

from __future__ import annotations

import contextlib
import os
import re
import shlex
import signal
import socket
import subprocess
import sys

import pytest
from sc_nodes import wait_for

from kvpool import config
from kvpool.client import Client
from kvpool.errors import ConfigError
from kvpool.protocol import keys
from kvpool_sidecar.commands import up_text
from kvpool_sidecar.commands.up_files import size_of, use_secret

PATIENT = config.Deadlines(lookup_ms=10_000, load_min_ms=30_000, store_ms=30_000)
FINGERPRINT = keys.fingerprint({"test": "up"})


def free_ports() -> int:
    """The first of three free ports in a row."""
    for first in range(20_000 + os.getpid() % 20_000, 60_000, 3):
        with contextlib.ExitStack() as held:
            try:
                for port in range(first, first + 3):
                    held.enter_context(socket.socket()).bind(("127.0.0.1", port))
            except OSError:
                continue
            return first
    raise AssertionError("no three free ports in a row")


class Up:
    """One `kvpool up`, until `end`."""

    def __init__(self, path, address, *arguments, **flags) -> None:
        self.path = path
        self.log = path.with_name(f"{path.name}.out")
        command = [sys.executable, "-m", "kvpool_sidecar", "up", f"--path={path}", f"--address={address}", *arguments]
        command += ["--capacity=128Mi", f"--node={path.name}", *(f"--{k}={v}" for k, v in flags.items())]
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(command, stdout=log, stderr=log)

    def ready(self) -> str:
        def text() -> str:
            assert self.process.poll() is None, self.log.read_text()
            found = self.log.read_text()
            return found if "Ctrl-C ends it" in found else ""

        return wait_for(text, "ready", 90)

    def client(self) -> Client:
        made = Client(
            config.ClientConfig(socket=str(self.path / "node/kv.sock"), deadlines=PATIENT), fingerprint=FINGERPRINT
        )
        assert made.wait_connected(30)
        return made

    def children(self) -> list[int]:
        return [int(pid) for pid in _read(f"/proc/{self.process.pid}/task/{self.process.pid}/children").split()]

    def end(self, number: int = signal.SIGINT) -> int:
        self.process.send_signal(number)
        return self.process.wait(60)


def _read(path: str) -> str:
    with open(path) as file:
        return file.read()


@pytest.fixture
def ups():
    started: list[Up] = []

    def start(*arguments, **flags) -> Up:
        started.append(Up(*arguments, **flags))
        return started[-1]

    yield start
    for one in started:
        if one.process.poll() is None:
            one.process.kill()
            one.process.wait()


def test_blocks_outlive_the_end_and_nothing_else_does(ups, tmp_path):
    port = free_ports()
    block = keys.block_id(FINGERPRINT, b"one")
    one = ups(tmp_path / "m", "127.0.0.1", port=port)
    text = one.ready()
    with contextlib.closing(one.client()) as client:
        assert client.put_from([block], [b"x" * 65_536])[0].stored
    wait_for(lambda: "blocks 1 " in one.log.read_text(), "the figures show the block", 30)
    children = one.children()
    assert len(children) == 2
    assert one.end() == 0
    wait_for(lambda: not any(os.path.exists(f"/proc/{pid}") for pid in children), "no child is left")
    assert list((tmp_path / "m/node").glob("kv.sock*")) == []
    assert str(tmp_path / "m/node/kv.sock") in text

    again = ups(tmp_path / "m", "127.0.0.1", "--delete", port=port)
    again.ready()
    with contextlib.closing(again.client()) as client:
        buffer = bytearray(65_536)
        assert client.get_into([block], [buffer])[0].ok
        assert bytes(buffer) == b"x" * 65_536
    assert again.end(signal.SIGTERM) == 0
    assert not (tmp_path / "m").exists()


def test_a_machine_that_joins_reads_the_blocks_of_the_first(ups, tmp_path):
    port = free_ports()
    first = ups(tmp_path / "a", "127.0.0.1", port=port)
    first.ready()
    secret = tmp_path / "a/node/secret/pool-secret"
    second = ups(tmp_path / "b", "127.0.0.2", **{"port": port, "join": f"127.0.0.1:{port}", "secret-file": secret})
    second.ready()
    block = keys.block_id(FINGERPRINT, b"two")
    with contextlib.closing(first.client()) as client:
        assert client.put_from([block], [b"y" * 65_536])[0].stored
    with contextlib.closing(second.client()) as client:
        wait_for(lambda: client.get_into([block], [bytearray(65_536)])[0].ok, "loaded from the first machine", 60)
    assert second.end() == 0
    assert first.end() == 0


def test_children_end_when_it_is_killed(ups, tmp_path):
    one = ups(tmp_path / "m", "127.0.0.1", port=free_ports())
    one.ready()
    children = one.children()
    one.end(signal.SIGKILL)
    wait_for(lambda: not any(os.path.exists(f"/proc/{pid}") for pid in children), "no child is left")


def test_a_part_that_ends_is_named_with_its_log(ups, tmp_path):
    one = ups(tmp_path / "m", "127.0.0.1", port=free_ports())
    one.ready()
    os.kill(one.children()[-1], signal.SIGKILL)
    assert one.process.wait(60) == 1
    assert re.search("the (index|sidecar) ended with status -9; the end of .*log", one.log.read_text())


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--address=0.0.0.0"], "nothing listens on all"),
        (["--address=localhost"], "not a numeric address"),
        (["--join=127.0.0.1:1"], "--join needs --secret-file"),
        (["--join=127.0.0.1", "--secret-file=x"], "is not HOST:PORT"),
        (["--capacity=much"], "is not a size"),
        (["--capacity=1Mi"], "below the minimum"),
        (["--port=80"], "not between 1024"),
    ],
)
def test_a_wrong_option_is_refused_in_one_sentence(tmp_path, arguments, said):
    command = [sys.executable, "-m", "kvpool_sidecar", "up", f"--path={tmp_path / 'm'}", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 2
    assert said in done.stderr
    assert not (tmp_path / "m").exists()


def test_a_port_that_is_taken_is_named(tmp_path):
    port = free_ports()
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", port + 1))
        taken.listen()
        command = [sys.executable, "-m", "kvpool_sidecar", "up", f"--path={tmp_path / 'm'}", f"--port={port}"]
        done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 2
    assert f"127.0.0.1:{port + 1}" in done.stderr
    assert "choose another --port" in done.stderr


def test_another_secret_than_that_of_the_blocks_is_refused(tmp_path):
    use_secret(tmp_path, "")
    other = tmp_path / "other"
    other.write_text("ab" * 32)
    with pytest.raises(ConfigError, match="another secret"):
        use_secret(tmp_path, str(other))
    other.write_text("no secret")
    with pytest.raises(ConfigError, match="no pool secret"):
        use_secret(tmp_path, str(other))


def test_the_same_secret_gives_the_same_password_on_each_machine(tmp_path):
    places = [tmp_path / name for name in "ab"]
    for place in places:
        place.mkdir()
    use_secret(places[0], "")
    use_secret(places[1], str(places[0] / "pool-secret"))
    first, second = ((place / "index-password").read_text() for place in places)
    assert first == second
    assert first != (places[0] / "pool-secret").read_text()
    assert (places[0] / "pool-secret").stat().st_mode & 0o777 == 0o600


@pytest.mark.parametrize(
    ("text", "size"), [("64Mi", 64 << 20), ("1G", 10**9), ("67108864", 64 << 20), ("2Ti", 2 << 40)]
)
def test_sizes_are_those_of_kubernetes(text, size):
    assert size_of(text) == size


def test_the_engines_lines_can_be_pasted():
    text = up_text.engine_commands("/tmp/a dir/kv.sock", "/tmp/a dir/client", 8 << 30, 256)
    lines = [line.strip() for line in text.splitlines() if line.startswith("  ")]
    assert [shlex.split(line)[-2:] for line in lines[1:]] == [
        ["serve", "MODEL"], ["--model-path", "MODEL"], ["--eviction-policy", "LRU"]
    ]  # fmt: skip
    exported = dict(word.partition("=")[::2] for word in shlex.split(lines[0])[1:])
    assert exported["KVPOOL_CLIENT_CONFIG"] == '{"socket": "/tmp/a dir/kv.sock"}'
    assert exported["PYTHONHASHSEED"] == "0"


@pytest.mark.parametrize(
    ("asked", "found", "rate"), [(0, 0, "(-)"), (1000, 0, "(0.0 %)"), (1000, 500, "(50.0 %)"), (7, 7, "(100.0 %)")]
)
def test_the_hit_rate_with_nothing_half_and_all(asked, found, rate):
    line = up_text.figures({"cache": {"tokensAsked": asked, "tokensFound": found}, "blocks": 2, "used_bytes": 3 << 30})
    assert f"tokens found {found} of {asked} in 1 h {rate}" in line
    assert "blocks 2 (3Gi of 0)" in line


def test_figures_change_on_a_line_of_their_own_without_a_terminal(ups, tmp_path):
    one = ups(tmp_path / "m", "127.0.0.1", port=free_ports())
    one.ready()
    wait_for(lambda: "tokens found 0 of 0 in 1 h (-)" in one.log.read_text(), "figures", 30)
    assert one.log.read_bytes().count(b"\x1b") == 0
    assert one.end() == 0
