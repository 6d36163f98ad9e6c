"""The commands around the server: what they make, what they refuse, how they end."""

from __future__ import annotations

import errno
import json
import os
import stat
import subprocess
import sys
from pathlib import Path

import pytest
from sc_nodes import MIB, Cluster, Node, wait_for
from sc_raw import Raw, block_id, payload

from kvpool import config
from kvpool.protocol import wire
from kvpool_sidecar.storage import layout as names

ROOT = pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files away")


def run(*arguments, **env):
    command = [sys.executable, "-m", "kvpool_sidecar", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, env={**os.environ, **env}, check=False)


@pytest.fixture
def pool(tmp_path):
    """A function: write pool.json, give its path."""

    def write(local: Path, shared: Path | None = None, uid: str = "pool-uid") -> Path:
        value = config.PoolConfig(
            pool="test",
            namespace="kvpool",
            uid=uid,
            local=(config.LocalTier("nvme", str(local), 64 * MIB),),
            shared=config.SharedTier("shared", str(shared)) if shared else None,
            index=config.IndexConfig(""),
        )
        path = tmp_path / "pool.json"
        path.write_text(config.dumps(value))
        return path

    return write


@pytest.mark.parametrize(
    "command",
    [[], ["serve"], ["agent"], ["init-node"], ["index-server"], ["install-client"], ["wipe"], ["preflight"]],
)
def test_help_says_what_a_command_is_for(command):
    done = run(*command, "--help")
    assert done.returncode == 0
    assert "usage: kvpool-sidecar" in done.stdout
    assert len(done.stdout) > 300


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ([], "required"),
        (["fly"], "invalid choice"),
        (["serve", "--config=/nowhere/pool.json"], "/nowhere/pool.json"),
        (["serve", "--config={broken}"], "not JSON"),
        (["serve", "--config={pool}", "--secret-dir=/nowhere"], "/nowhere/pool-secret"),
        (["serve", "--config={pool}", "--secret-dir={short}", "--socket={here}/s=t"], "shorter than 16"),
        (["serve", "--config={pool}", "--secret-dir={secret}"], "--socket PATH=TENANT"),
        (["serve", "--config={pool}", "--secret-dir={secret}", "--socket=x"], "expected PATH=TENANT"),
        (["serve", "--config={pool}", "--secret-dir={secret}", "--socket={here}/s=t", "--address=0.0.0.0"], "own"),
        (["serve", "--config={pool}", "--secret-dir={secret}", "--socket={here}/s=t", "--address=::"], "own"),
        (["serve", "--config={pool}", "--secret-dir={secret}", "--socket={here}/s=t", "--address=host"], "numeric"),
        (
            ["serve", "--config={pool}", "--secret-dir={secret}", "--socket={here}/s=t", "--read-only-mounts=x"],
            "expected FROM=TO",
        ),
        (["serve", "--log-level=loud"], "unrecognized"),
        (["--log-level=loud", "wipe"], "unknown log level"),
        (["agent"], "--node"),
        (["agent", "--node=n"], "--pods-file"),
        (["index-server", "--bind=0.0.0.0"], "give one address"),
        (["index-server", "--bind=example"], "numeric"),
        (["index-server", "--bind=192.0.2.1", "--secret-dir=/nowhere"], "password"),
        (["index-server", "--flush", "--dir=/nowhere"], "no index runs here"),
        (["install-client"], "required"),
        (["wipe", "--config=/nowhere"], "/nowhere"),
        (["init-node", "--config={broken}"], "not JSON"),
    ],
)
def test_wrong_usage_is_told_with_what_to_change(tmp_path, pool, arguments, says):
    (tmp_path / "broken").write_text("{")
    for folder, secret in (("short", "x"), ("secret", "x" * 32)):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "pool-secret").write_text(secret)
    values = {"here": tmp_path, "broken": tmp_path / "broken", "pool": pool(tmp_path / "nvme")}
    values |= {"short": tmp_path / "short", "secret": tmp_path / "secret"}
    done = run(*(a.format(**values) for a in arguments), KUBERNETES_SERVICE_HOST="")
    if "KUBERNETES" not in says:
        assert done.returncode == 2, done.stderr
    assert says in done.stderr
    assert "Traceback" not in done.stderr
    assert not (tmp_path / "nvme").exists()


def test_an_address_that_is_taken_is_told(tmp_path):
    with Cluster(tmp_path, index=False) as cluster:
        first = cluster.node("a")
        second = Node(cluster, "b")
        second.arguments = [a.replace(second.address, first.address) for a in second.arguments]
        second.start()
        assert second.process.wait(20) == 1
        second.process = None
        assert "in use" in second.log.read_text()
        with first.connect() as raw:
            raw.lookup([block_id(1)])


def test_a_foreign_directory_is_refused_by_the_server(tmp_path):
    with Cluster(tmp_path, index=False) as cluster:
        node = Node(cluster, "a")
        node.nvme.mkdir(parents=True)
        (node.nvme / "precious").write_text("x")
        node.start()
        assert node.process.wait(20) == 2
        node.process = None
        assert "precious" in node.log.read_text()
        assert os.listdir(node.nvme) == ["precious"]


# -- prepare


@ROOT
def test_prepare_gives_the_directories_away_and_does_it_again_without_harm(tmp_path, pool):
    local, shared = tmp_path / "new" / "nvme", tmp_path / "shared"
    shared.mkdir()
    path = pool(local, shared)
    for _ in range(2):
        done = run("init-node", f"--config={path}", "--uid=65532", "--gid=65533")
        assert done.returncode == 0, done.stderr
        for directory in (local, shared):
            info = directory.stat()
            assert (info.st_uid, info.st_gid, stat.S_IMODE(info.st_mode)) == (65532, 65533, 0o700)


@ROOT
@pytest.mark.parametrize(
    "what", ["files", "another pool", "link", "empty of another user", "files of the server's user"]
)
def test_prepare_leaves_alone_what_is_somebody_elses(tmp_path, pool, what):
    local = tmp_path / "nvme"
    if what == "link":
        (tmp_path / "etc").mkdir()
        local.symlink_to(tmp_path / "etc")
    else:
        local.mkdir(mode=0o755)
    if what == "files":
        (local / "precious").write_text("x")
    elif what == "another pool":
        fd = os.open(local, os.O_RDONLY)
        names.claim_directory(fd, "another-pool", "")
        os.close(fd)
    elif what == "empty of another user":
        os.chown(local, 1000, 1000)
    elif what == "files of the server's user":
        (local / "data.db").write_text("x")
        os.chown(local, 65532, 65532)
    owner = local.stat().st_uid
    done = run("init-node", f"--config={pool(local)}")
    assert done.returncode == (1 if what == "link" else 2)
    assert local.stat().st_uid == owner
    assert stat.S_IMODE(local.stat().st_mode) == 0o755


_DROPPED = """
import ctypes, os, sys
libc = ctypes.CDLL(None, use_errno=True)
KEEP = 0  # CAP_CHOWN
for capability in range(64):
    if capability != KEEP:
        libc.prctl(24, capability, 0, 0, 0)  # PR_CAPBSET_DROP
header = (ctypes.c_uint32 * 2)(0x20080522, 0)
data = (ctypes.c_uint32 * 6)(1 << KEEP, 1 << KEEP, 0, 0, 0, 0)
assert libc.capset(header, data) == 0
os.execv(sys.executable, [sys.executable, "-m", "kvpool_sidecar", *sys.argv[1:]])
"""


@ROOT
def test_prepare_needs_no_capability_but_chown(tmp_path, pool):
    """As in the pod: user 0, everything dropped, CHOWN added. Twice: the second time the directory is not its own."""
    for folder in (tmp_path, *tmp_path.parents):
        if folder != Path("/"):
            folder.chmod(folder.stat().st_mode | 0o055)
    path = pool(tmp_path / "nvme")
    path.chmod(0o644)
    for _ in range(2):
        command = [sys.executable, "-c", _DROPPED, "init-node", f"--config={path}"]
        done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
        assert done.returncode == 0, done.stderr
        assert (tmp_path / "nvme").stat().st_uid == 65532


# -- wipe


def test_wipe_removes_this_pools_blocks_and_nothing_else(tmp_path, pool):
    with Cluster(tmp_path, index=False, shared=True) as cluster:
        a = cluster.node("a")
        with a.connect() as raw:
            raw.put({block_id(n): payload(n) for n in range(5)})
        wait_for(lambda: a.status()["shared"]["copies"].get("copied") == 5, "copied")
        (a.nvme / "note").write_text("not ours")
        a.stop()
        path = a.home / "pool.json"
        done = run("wipe", f"--config={path}", "--tier=local")
        assert (done.returncode, done.stdout) == (0, "6 files deleted\n")
        assert os.listdir(a.nvme) == ["note"]
        assert len([f for f in cluster.shared.rglob("blocks/*/*/*") if f.is_file()]) == 5
        assert run("wipe", f"--config={path}").stdout == "6 files deleted\n"
        assert os.listdir(cluster.shared) == []
        assert run("wipe", f"--config={path}").stdout == "0 files deleted\n"


def test_wipe_leaves_another_pools_directory_alone(tmp_path, pool):
    fd_path = tmp_path / "nvme"
    fd_path.mkdir()
    fd = os.open(fd_path, os.O_RDONLY)
    names.claim_directory(fd, "another-pool", "")
    os.close(fd)
    before = sorted(os.listdir(fd_path))
    assert run("wipe", f"--config={pool(fd_path)}").stdout == "0 files deleted\n"
    assert sorted(os.listdir(fd_path)) == before


def test_wipe_follows_no_link(tmp_path, pool):
    local, precious = tmp_path / "nvme", tmp_path / "precious"
    local.mkdir()
    precious.mkdir()
    (precious / "file").write_text("x")
    fd = os.open(local, os.O_RDONLY)
    names.claim_directory(fd, "pool-uid", "")
    os.close(fd)
    (local / "blocks" / "ab").symlink_to(precious)
    (local / "tmp").rmdir()
    (local / "tmp").symlink_to(precious)
    assert run("wipe", f"--config={pool(local)}").returncode == 0
    assert os.listdir(local) == []
    assert (precious / "file").read_text() == "x"


def test_wipe_waits_for_a_sidecar_that_still_runs(tmp_path, monkeypatch):
    from kvpool.errors import RetryableError
    from kvpool_sidecar.commands import wipe as module

    monkeypatch.setattr(module, "_LOCK_WAIT_S", 0.2)
    with Cluster(tmp_path, index=False) as cluster:
        a = cluster.node("a")
        with pytest.raises(RetryableError, match="still serves"):
            module.wipe(a.pool)
        a.stop()
        assert module.wipe(a.pool) == 1


# -- install-client

WITHOUT_XXHASH = "import sys; sys.modules['xxhash'] = None; "


def installed(tmp_path, code: str) -> str:
    """Run code in an interpreter that sees the installed client and nothing else."""
    done = subprocess.run(
        [sys.executable, "-S", "-c", code],
        env={"PYTHONPATH": str(tmp_path / "client"), "PATH": os.environ["PATH"], "PYTHONDONTWRITEBYTECODE": "1"},
        capture_output=True,
        text=True,
        cwd="/",
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_installed_client_imports_by_itself_and_its_entry_point_is_found(tmp_path):
    assert run("install-client", tmp_path / "client").returncode == 0
    code = (
        "import importlib.metadata as m, kvpool.client, kvpool.protocol.block;"
        "print(kvpool.client.__file__, [e.value for e in m.entry_points(group='vllm.general_plugins')],"
        "kvpool.protocol.block.CAN_CHECKSUM)"
    )
    where = tmp_path / "client"
    assert installed(tmp_path, code) == f"{where}/kvpool/client.py ['kvpool.engines.vllm_plugin:register'] True\n"
    assert installed(tmp_path, WITHOUT_XXHASH + "import kvpool.protocol.block as b; print(b.CAN_CHECKSUM)") == "False\n"


def test_the_installed_client_configures_an_engine_when_python_starts(tmp_path):
    assert run("install-client", tmp_path / "client").returncode == 0
    code = "import sys; print([type(finder).__module__ for finder in sys.meta_path][0])"
    env = {**os.environ, "PYTHONPATH": str(tmp_path / "client"), "KVPOOL_SGLANG_HICACHE": "{}"}
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout == "kvpool.engines.startup\n"


def test_everybody_can_read_the_installed_client_whatever_the_umask(tmp_path):
    before = os.umask(0o077)
    try:
        assert run("install-client", tmp_path / "client").returncode == 0
    finally:
        os.umask(before)
    for path in [tmp_path / "client", *(tmp_path / "client").rglob("*")]:
        wanted = 0o755 if path.is_dir() else 0o644
        assert stat.S_IMODE(path.stat().st_mode) == wanted, path


def test_installing_again_changes_nothing_and_a_new_version_replaces_all(tmp_path):
    target = tmp_path / "client"
    assert "installed" in run("install-client", target).stdout
    inode = target.stat().st_ino
    assert "up to date" in run("install-client", target).stdout
    assert target.stat().st_ino == inode
    (target / ".kvpool-client").write_text("of an older version")
    (target / "kvpool" / "leftover.py").write_text("x")
    assert "installed" in run("install-client", target).stdout
    assert not (target / "kvpool" / "leftover.py").exists()
    assert os.listdir(tmp_path) == ["client"]


def test_nothing_of_the_place_it_was_installed_from_comes_along(tmp_path):
    run("install-client", tmp_path / "client")
    here = str(Path(__file__).resolve().parents[3])
    for path in (tmp_path / "client").rglob("*"):
        if path.is_file() and path.suffix != ".so":
            assert here not in path.read_text(), path
    assert not list((tmp_path / "client").rglob("*.pyc"))


def test_xxhash_for_several_pythons_comes_from_unpacked_wheels(tmp_path):
    extras = tmp_path / "extras"
    for version in ("310", "311", "312", "313"):
        package = extras / f"cp{version}" / "xxhash"
        package.mkdir(parents=True)
        (package / "__init__.py").write_text("# xxhash\n")
        (package / f"_xxhash.cpython-{version}-x86_64-linux-gnu.so").write_bytes(version.encode())
    assert run("install-client", tmp_path / "client", KVPOOL_CLIENT_EXTRAS=str(extras)).returncode == 0
    found = sorted(p.name for p in (tmp_path / "client" / "xxhash").iterdir())
    assert found == ["__init__.py", *(f"_xxhash.cpython-{v}-x86_64-linux-gnu.so" for v in (310, 311, 312, 313))]


def test_a_place_that_cannot_be_written_is_told(tmp_path):
    (tmp_path / "file").write_text("x")
    done = run("install-client", tmp_path / "file" / "client")
    assert done.returncode == 1
    assert "Traceback" not in done.stderr


# -- the read-only mount

_MOUNTED = """
set -e
mount --make-rprivate /
mkdir -p {ro}/nvme
mount --bind {rw}/nvme {ro}/nvme
mount -o remount,ro,bind {ro}/nvme
exec "$@"
"""


@ROOT
def test_what_readers_get_cannot_be_made_writable_even_by_root_where_the_second_mount_is_there(tmp_path):
    with Cluster(tmp_path, index=False) as cluster:
        (tmp_path / "a").mkdir()
        rw, ro = tmp_path / "a", tmp_path / "ro"
        (rw / "nvme").mkdir(mode=0o700)
        (tmp_path / "mount.sh").write_text(_MOUNTED.format(rw=rw, ro=ro))
        os.rename(tmp_path / "a", tmp_path / "a.made")
        node = Node(
            cluster,
            "a",
            arguments=[f"--read-only-mounts={rw}={ro}"],
            prefix=("unshare", "-m", "sh", str(tmp_path / "mount.sh")),
        )
        os.rename(tmp_path / "a.made" / "nvme", node.nvme)
        cluster.nodes.append(node)
        node.start()
        node.ready()
        assert "not mounted read-only" not in node.log.read_text()
        with node.connect() as raw:
            raw.put({block_id(1): payload(1)})
            (entry,) = raw.open([block_id(1)])
            for flags in (os.O_RDWR, os.O_WRONLY):
                with pytest.raises(OSError, match="Read-only") as e:
                    os.open(f"/proc/self/fd/{entry.fd}", flags)
                assert e.value.errno == errno.EROFS
            with pytest.raises(OSError, match="Read-only"):
                os.fchmod(entry.fd, 0o600)
            assert raw.read(entry)[4096:] == payload(1)


def test_a_second_mount_of_another_directory_is_refused(tmp_path):
    with Cluster(tmp_path, index=False) as cluster:
        (tmp_path / "ro" / "nvme" / "blocks").mkdir(parents=True)
        node = Node(cluster, "a", arguments=[f"--read-only-mounts={tmp_path / 'a'}={tmp_path / 'ro'}"])
        node.start()
        assert node.process.wait(20) == 2
        node.process = None
        assert "not the same directory" in node.log.read_text()


# -- what it says of itself


def test_status_metrics_and_health_say_what_happened_and_name_no_tenant(tmp_path):
    with Cluster(tmp_path, index=False, shared=True) as cluster:
        a = cluster.node("a", tenants=("a-very-secret-tenant",), generation=7)
        assert a.get("/healthz") == b"ok\n"
        with a.connect("a-very-secret-tenant") as raw:
            raw.put({block_id(n): payload(n) for n in range(3)})
            raw.get([block_id(0), block_id(1), block_id(9)])
            raw.ask(wire.Op.REPORT, wire.pack_json({"hits": {"local": 2}, "bytes": {"local": 9}, "misses": {"x": 1}}))
            wait_for(lambda: a.status()["shared"]["copies"].get("copied") == 3, "copied")
            status = a.status()
        assert (
            status
            | {
                "node": "a",
                "generation": 7,
                "ready": True,
                "blocks": 3,
                "clients": 1,
                "pods": 1,
                "hits": {"local": 2, "peer": 0, "shared": 0},
                "bytes": {"local": 9, "peer": 0, "shared": 0},
                "misses": {"x": 1},
                "served": {"local": 2, "miss": 1},
                "stored": {"blocks": 3, "bytes": 3 * 65536},
                "transport": "TCP",
            }
            == status
        )
        assert status["capacity_bytes"] == 512 * MIB
        assert 3 * 65536 < status["used_bytes"] < 4 * 65536 + 3 * 8192
        assert [(f["engine"], f["model"], f["bytes"]) for f in status["fingerprints"]] == [("test", "model", 3 * 65536)]
        metrics = a.get("/metrics").decode()
        for line in (
            "kvpool_sidecar_blocks 3.0",
            "kvpool_sidecar_ready 1.0",
            "kvpool_sidecar_stored_blocks_total 3.0",
            'kvpool_client_hit_blocks_total{tier="local"} 2.0',
            'kvpool_client_misses_total{reason="x"} 1.0',
            'kvpool_sidecar_opened_blocks_total{tier="miss"} 1.0',
            'kvpool_sidecar_requests_total{op="open"} 1.0',
        ):
            assert line in metrics
        from prometheus_client.parser import text_string_to_metric_families

        assert len(list(text_string_to_metric_families(metrics))) > 20
        for text in (metrics, json.dumps(status)):
            assert "secret-tenant" not in text
        with pytest.raises(OSError, match="404"):
            a.get("/env")
        a.stop()
        assert "a secret of this test" not in a.log.read_text()


def test_silent_http_connections_are_bounded_and_probes_go_on(tmp_path):
    import socket

    with Cluster(tmp_path, index=False) as cluster:
        a = cluster.node("a")
        held = [socket.create_connection((a.address, a.pool.http_port), timeout=5) for _ in range(12)]
        assert a.get("/healthz") == b"ok\n"
        for sock in held:
            sock.close()


def test_a_socket_of_one_machine_is_its_owners_alone(tmp_path):
    with Cluster(tmp_path, index=False) as cluster:
        a = cluster.node("a")
        assert stat.S_IMODE(a.sockets["team-a"].stat().st_mode) == 0o600
        Raw(a.sockets["team-a"]).close()
