"""What stands behind an engine plug-in and needs no engine: lookups, jobs, settings, facts, digests, entry point."""

from __future__ import annotations

import importlib.metadata
import json
import os
import subprocess
import sys
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
from cl_fake_sidecar import FakeSidecar, block_id_of

from kvpool.client import Client
from kvpool.config import ClientConfig, Deadlines
from kvpool.engines.common import weights
from kvpool.engines.common.jobs import TransferJobs
from kvpool.engines.common.lookups import LookupTable
from kvpool.engines.common.settings import client_config
from kvpool.engines.vllm import fingerprint as vllm_fingerprint
from kvpool.engines.vllm import plugin as vllm_plugin
from kvpool.protocol import keys
from kvpool.protocol.wire import Op, Tier

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence


def until(condition: Any, seconds: float = 5.0) -> bool:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if condition():
            return True
        time.sleep(0.002)
    return False


class Pool:
    """Answers lookups; `gate` holds the answers back."""

    def __init__(self, *present: bytes) -> None:
        self.present = set(present)
        self.asked: list[list[bytes]] = []
        self.gate = threading.Event()
        self.gate.set()

    def __call__(self, names: Sequence[bytes], deadline: float) -> list[Tier]:
        self.asked.append(list(names))
        assert deadline > time.monotonic()
        self.gate.wait(5)
        return [Tier.PEER if n in self.present else Tier.MISS for n in names]


@pytest.fixture
def pool() -> Pool:
    return Pool(b"a", b"b")


@pytest.fixture
def table(pool: Pool) -> Iterator[LookupTable]:
    table = LookupTable(pool, lambda: 0.05)
    yield table
    pool.gate.set()
    table.close()


def test_one_question_per_request_and_step(pool: Pool, table: LookupTable) -> None:
    assert [table.lookup(k, "r1") for k in (b"a", b"b", b"c")] == [None] * 3
    assert table.lookup(b"a", "r2") is None
    assert pool.asked == []
    table.flush()
    assert until(lambda: table.lookup(b"a", "r2") is not None)
    assert sorted(pool.asked) == [[b"a"], [b"a", b"b", b"c"]]
    assert [table.lookup(k, "r1") for k in (b"a", b"b", b"c")] == [True, True, False]
    table.flush()
    time.sleep(0.02)
    assert len(pool.asked) == 2


def test_an_open_question_is_a_no_once_its_time_is_up_and_stays_one(pool: Pool, table: LookupTable) -> None:
    pool.gate.clear()
    assert table.lookup(b"a", "r") is None
    time.sleep(0.07)
    assert table.lookup(b"a", "r") is None  # not sent yet: the engine is in the middle of a step
    table.flush()
    began = time.monotonic()
    assert until(lambda: table.lookup(b"a", "r") is False)
    assert 0.04 < time.monotonic() - began < 0.2
    pool.gate.set()
    time.sleep(0.02)
    assert table.lookup(b"a", "r") is False
    assert table.deadline_misses == 1


def test_a_late_answer_counts_if_nobody_asked_meanwhile(pool: Pool, table: LookupTable) -> None:
    pool.gate.clear()
    table.lookup(b"a", "r")
    table.flush()
    time.sleep(0.1)  # the engine computes something else
    pool.gate.set()
    assert until(lambda: table._requests["r"][b"a"].tier is not None)
    assert table.lookup(b"a", "r") is True


def test_what_failed_to_load_is_never_offered_again_to_the_requests_that_live(pool: Pool, table: LookupTable) -> None:
    for request in ("r1", "r2"):
        table.lookup(b"a", request)
        table.lookup(b"b", request)
    table.flush()
    assert until(lambda: table.lookup(b"b", "r2") is True)
    table.mark_miss([b"a"])
    for _ in range(3):
        assert table.lookup(b"a", "r1") is False
        assert table.lookup(b"a", "r2") is False
        table.flush()
    assert table.lookup(b"b", "r1") is True
    table.finish("r1")
    assert table.lookup(b"a", "r3") is None  # a new request asks anew


def test_finished_requests_leave_nothing_behind(pool: Pool, table: LookupTable) -> None:
    pool.gate.clear()
    for n in range(50):
        table.lookup(b"a", f"r{n}")
        table.flush()
        table.finish(f"r{n}")
    pool.gate.set()
    assert until(lambda: len(pool.asked) == 50)
    assert table._requests == {}
    assert table._fresh == {}


def test_a_lookup_that_fails_is_a_no(caplog: pytest.LogCaptureFixture) -> None:
    table = LookupTable(lambda *_: 1 / 0, lambda: 5.0)  # type: ignore[arg-type,return-value]
    table.lookup(b"a", "r")
    table.flush()
    assert until(lambda: table.lookup(b"a", "r") is False)
    assert "lookup failed" in caplog.text
    table.close()


SIZE = 8192
FP = b"f" * 32


@pytest.fixture
def client(fake: FakeSidecar) -> Iterator[Client]:
    deadlines = Deadlines(load_min_ms=300, store_ms=1000, breaker_failures=100)
    client = Client(ClientConfig(socket=fake.path, connect_retry_ms=50, deadlines=deadlines), fingerprint=FP)
    assert client.wait_connected(5)
    yield client
    client.close()


@pytest.fixture
def jobs() -> Iterator[TransferJobs]:
    jobs = TransferJobs(2, 64)
    yield jobs
    jobs.drain(5)
    jobs.close()


def slots(n: int) -> list[memoryview]:
    memory = memoryview(bytearray(n * SIZE))
    return [memory[i * SIZE : (i + 1) * SIZE] for i in range(n)]


def test_jobs_store_and_load(client: Client, jobs: TransferJobs) -> None:
    names = [block_id_of(str(n)) for n in range(5)]
    here = slots(5)
    for n, slot in enumerate(here):
        slot[:] = bytes([n]) * SIZE
    jobs.submit_store(7, client, names, here)
    assert jobs.drain(5)
    (done,) = jobs.take_finished()
    assert (done.job, done.is_load, done.ok, done.bytes) == (7, False, (True,) * 5, 5 * SIZE)
    there = slots(6)
    jobs.submit_load(8, client, [*names, block_id_of("absent")], there)
    assert jobs.drain(5)
    (done,) = jobs.take_finished()
    assert (done.job, done.is_load, done.ok) == (8, True, (True,) * 5 + (False,))
    assert done.tiers[0] == Tier.LOCAL
    assert there[:5] == here
    assert jobs.pending == 0


def test_a_job_whose_sidecar_hangs_fails_at_its_deadline(fake: FakeSidecar, client: Client, jobs: TransferJobs) -> None:
    fake.faults = {Op.OPEN: lambda *_: True}
    began = time.monotonic()
    for n in range(3):
        jobs.submit_load(n, client, [block_id_of("x")], slots(1))
    assert time.monotonic() - began < 0.1  # never blocks the scheduler
    assert jobs.drain(5)
    assert time.monotonic() - began < 1.0
    assert [d.ok for d in jobs.take_finished()] == [(False,)] * 3


def test_stores_that_pile_up_are_dropped_at_once(fake: FakeSidecar, client: Client) -> None:
    jobs = TransferJobs(1, 4)
    hold = threading.Event()
    fake.faults = {Op.BEGIN: lambda *_: hold.wait(5) and False}
    names = [block_id_of(str(n)) for n in range(9)]
    jobs.submit_store(1, client, names[:4], slots(4))
    jobs.submit_store(2, client, names[4:], slots(5))
    assert [(d.job, any(d.ok)) for d in jobs.take_finished()] == [(2, False)]
    assert jobs.dropped == 5
    hold.set()
    assert jobs.drain(5)
    assert [(d.job, all(d.ok)) for d in jobs.take_finished()] == [(1, True)]
    jobs.submit_store(3, client, names[4:], slots(5))
    assert jobs.drain(5)
    assert all(jobs.take_finished()[0].ok)
    jobs.close()


def test_jobs_hold_no_memory_once_they_are_done(client: Client, jobs: TransferJobs) -> None:
    memory = memoryview(bytearray(4 * SIZE))
    names = [block_id_of(str(n)) for n in range(4)]
    views = [memory[n * SIZE : (n + 1) * SIZE] for n in range(4)]
    jobs.submit_store(1, client, names, views)
    jobs.submit_load(2, client, names, views)
    assert jobs.drain(5)
    jobs.take_finished()
    for view in views:
        view.release()

    def released() -> bool:
        try:
            memory.release()
        except BufferError:  # a thread is just letting go
            return False
        return True

    assert until(released)


def test_settings_of_the_user_win_over_the_environment() -> None:
    env = {"KVPOOL_CLIENT_CONFIG": json.dumps({"socket": "/a", "connections": 2, "deadlines": {"lookup_ms": 9}})}
    got = client_config({"socket": "/b", "deadlines": {"load_min_ms": 5}}, env)
    assert got == ClientConfig(socket="/b", connections=2, deadlines=Deadlines(lookup_ms=9, load_min_ms=5))
    assert client_config({}, {}) == ClientConfig()


@pytest.mark.parametrize(
    ("overrides", "text", "socket"),
    [
        ({}, "{not json", "/run/kvpool/kv.sock"),
        ({}, '{"connections": "many"}', "/run/kvpool/kv.sock"),
        ({"connections": "many"}, '{"socket": "/a"}', "/a"),
        ({"unknown": 1}, '{"socket": "/a"}', "/a"),
        ({"deadlines": [1]}, '{"socket": "/a"}', "/a"),
        ({"socket": object()}, '{"socket": "/a"}', "/a"),
    ],
)
def test_settings_that_cannot_be_used_are_logged_and_left_out(
    overrides: dict[str, Any], text: str, socket: str, caplog: pytest.LogCaptureFixture
) -> None:
    assert client_config(overrides, {"KVPOOL_CLIENT_CONFIG": text}).socket == socket
    assert "ignored" in caplog.text


def offloading_config(**changes: Any) -> SimpleNamespace:
    values: dict[str, Any] = {
        "groups": (SimpleNamespace(tokens_per_block=32, layer_names=("model.layers.0", "model.layers.1"), group_id=0),),
        "model": SimpleNamespace(name="org/model", dtype="bfloat16"),
        "cache": SimpleNamespace(tokens_per_hash=32, blocks_per_chunk=8),
        "parallel": SimpleNamespace(rank=0, world_size=1, tp_size=1, pp_size=1, pcp_size=1, dcp_size=1),
        "kv_cache_layout": "LBHNC",
        "canonical_layout": False,
        "replicated_layout": False,
    }
    return SimpleNamespace(**{**values, **changes})


@dataclass
class HfConfig:
    values: dict[str, Any] = field(default_factory=lambda: {"hidden_size": 8, "_name_or_path": "/here"})

    def to_dict(self) -> dict[str, Any]:
        return dict(self.values)


def engine_config(**changes: Any) -> SimpleNamespace:
    model = {"revision": None, "dtype": "bfloat16", "quantization": None, "seed": 0, "hf_config": HfConfig()}
    cache = {"prefix_caching_hash_algo": "sha256_cbor"}
    load = {"load_format": "auto"}
    for part in (model, cache, load):
        part.update({k: v for k, v in changes.items() if k in part})
    return SimpleNamespace(
        model_config=SimpleNamespace(**model),
        cache_config=SimpleNamespace(**cache),
        load_config=SimpleNamespace(**load),
    )


def fingerprint(config: Any = None, engine: Any = None, size: int = 4096, version: str = "0.33.0") -> bytes:
    inputs = vllm_fingerprint.fingerprint_inputs(
        config or offloading_config(), size, version, engine or engine_config(), "cuda"
    )
    return keys.fingerprint(inputs)


PARALLEL = {"rank": 0, "world_size": 1, "tp_size": 1, "pp_size": 1, "pcp_size": 1, "dcp_size": 1}


@pytest.mark.parametrize(
    "other",
    [
        lambda: fingerprint(size=8192),
        lambda: fingerprint(version="0.33.1"),
        lambda: fingerprint(offloading_config(kv_cache_layout="LBNHC")),
        lambda: fingerprint(offloading_config(canonical_layout=True)),
        lambda: fingerprint(offloading_config(model=SimpleNamespace(name="org/model", dtype="fp8"))),
        lambda: fingerprint(offloading_config(model=SimpleNamespace(name="org/other", dtype="bfloat16"))),
        lambda: fingerprint(offloading_config(cache=SimpleNamespace(tokens_per_hash=16, blocks_per_chunk=8))),
        lambda: fingerprint(offloading_config(cache=SimpleNamespace(tokens_per_hash=32, blocks_per_chunk=4))),
        lambda: fingerprint(offloading_config(parallel=SimpleNamespace(**{**PARALLEL, "tp_size": 2}))),
        lambda: fingerprint(offloading_config(parallel=SimpleNamespace(**{**PARALLEL, "pp_size": 2}))),
        lambda: fingerprint(
            offloading_config(groups=(SimpleNamespace(tokens_per_block=32, layer_names=("a",), group_id=0),))
        ),
        lambda: fingerprint(engine=engine_config(prefix_caching_hash_algo="xxhash")),
        lambda: fingerprint(engine=engine_config(revision="abc")),
        lambda: fingerprint(engine=engine_config(quantization="awq")),
        lambda: fingerprint(engine=engine_config(hf_config=HfConfig({"hidden_size": 8, "rope_scaling": "yarn"}))),
        lambda: fingerprint(engine=engine_config(load_format="dummy")),
    ],
)
def test_whatever_changes_the_bytes_changes_the_fingerprint(other: Any) -> None:
    assert fingerprint() == fingerprint()
    assert other() != fingerprint()


def test_the_place_of_a_model_does_not_matter_but_its_files_do(tmp_path: Path) -> None:
    prints = []
    for place, content in (("a", b"1"), ("b", b"1"), ("c", b"2")):
        (tmp_path / place).mkdir()
        (tmp_path / place / "config.json").write_text("{}")
        (tmp_path / place / "model.safetensors").write_bytes(safetensors({"w": content * 100}))
        hf = HfConfig({"hidden_size": 8, "_name_or_path": str(tmp_path / place)})
        model = SimpleNamespace(name=str(tmp_path / place), dtype="bfloat16")
        prints.append(fingerprint(offloading_config(model=model), engine_config(hf_config=hf)))
    assert prints[0] == prints[1] != prints[2]


def test_a_hash_seed_is_part_of_the_facts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONHASHSEED", "0")
    zero = fingerprint()
    monkeypatch.setenv("PYTHONHASHSEED", "1")
    assert fingerprint() != zero


def test_facts_without_the_engines_configuration_are_a_name_space_of_their_own() -> None:
    inputs = vllm_fingerprint.fingerprint_inputs(offloading_config(), 4096, "0.33.0")
    assert inputs["engine_config"] == "unknown"
    assert keys.fingerprint(inputs) != fingerprint()


def test_the_engines_configuration_is_found_in_a_caller() -> None:
    def connector(vllm_config: Any) -> Any:
        return tier()

    def tier() -> Any:
        return vllm_fingerprint.find_engine_config()

    config = engine_config()
    assert connector(config) is config
    assert connector("something else") is None


def safetensors(tensors: dict[str, bytes]) -> bytes:
    header, data = {}, b""
    for name, content in tensors.items():
        header[name] = {"dtype": "U8", "shape": [len(content)], "data_offsets": [len(data), len(data) + len(content)]}
        data += content
    text = json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + data


def model_dir(path: Path, **files: bytes) -> Path:
    path.mkdir()
    (path / "config.json").write_text('{"a": 1}')
    for name, content in files.items():
        (path / name.replace("__", ".")).write_bytes(content)
    return path


def test_weights_digest_sees_every_tensor_and_the_configuration(tmp_path: Path) -> None:
    big = {f"layer.{i}": bytes([i]) * 300_000 for i in range(10)}
    base = weights.digest(model_dir(tmp_path / "base", model__safetensors=safetensors(big)))
    assert len(base) == 32
    assert weights.digest(model_dir(tmp_path / "same", model__safetensors=safetensors(big))) == base
    for i in range(10):
        changed = safetensors({**big, f"layer.{i}": bytes([i + 100]) * 300_000})
        assert weights.digest(model_dir(tmp_path / f"changed{i}", model__safetensors=changed)) != base
    other = model_dir(tmp_path / "config", model__safetensors=safetensors(big))
    (other / "config.json").write_text('{"a": 2}')
    assert weights.digest(other) != base
    tokenizer = model_dir(tmp_path / "tok", model__safetensors=safetensors(big), tokenizer__json=b"{}")
    assert weights.digest(tokenizer) == base


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"x",
        bytes(2_000_000),
        b"\xff" * 2_000_000,
        (100).to_bytes(8, "little") + b"{" * 2_000_000,
        (8).to_bytes(8, "little") + b'{"a": 1}' + bytes(2_000_000),
    ],
)
def test_files_that_are_not_what_they_are_called_still_have_a_digest(tmp_path: Path, content: bytes) -> None:
    assert weights.digest(model_dir(tmp_path / "m", model__safetensors=content))


def test_a_directory_without_a_model_has_none(tmp_path: Path) -> None:
    assert weights.digest(tmp_path) == ""
    with pytest.raises(OSError, match="nowhere"):
        weights.digest(tmp_path / "nowhere")


@dataclass
class EngineArgs:
    kv_transfer_config: Any = None
    prefix_caching_hash_algo: str = "sha256"
    kv_offloading_size: float | None = None
    calls: int = 0

    def create_engine_config(self, value: int = 1) -> tuple[Any, str, int]:
        self.calls += 1
        return self.kv_transfer_config, self.prefix_caching_hash_algo, value


@pytest.fixture
def engine_args(monkeypatch: pytest.MonkeyPatch) -> type[EngineArgs]:
    """A stand-in for vLLM's class of that name; the real one is used in client/tests_engine."""
    fake_vllm = SimpleNamespace(KVTransferConfig=lambda **kw: SimpleNamespace(**kw))
    monkeypatch.setitem(sys.modules, "vllm", SimpleNamespace(config=fake_vllm))  # type: ignore[arg-type]
    monkeypatch.setitem(sys.modules, "vllm.config", fake_vllm)  # type: ignore[arg-type]
    cls = type("EngineArgs", (EngineArgs,), {})
    vllm_plugin.wrap(cls)
    vllm_plugin.wrap(cls)  # vLLM may call the plug-in again
    return cls


TEXT = '{"kv_connector": "OffloadingConnector", "kv_role": "kv_both"}'


def test_the_plugin_fills_in_the_connector(engine_args: type[EngineArgs], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(vllm_plugin.CONNECTOR_ENV, TEXT)
    args = engine_args()
    config, algorithm, value = args.create_engine_config(value=5)
    assert (config.kv_connector, algorithm, value, args.calls) == ("OffloadingConnector", "sha256_cbor", 5, 1)


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({"kv_transfer_config": "mine"}, ("mine", "sha256", 1)),
        ({"kv_offloading_size": 4.0}, (None, "sha256", 1)),
    ],
)
def test_settings_of_the_user_win_over_the_plugin(
    engine_args: type[EngineArgs], monkeypatch: pytest.MonkeyPatch, given: dict[str, Any], expected: Any
) -> None:
    monkeypatch.setenv(vllm_plugin.CONNECTOR_ENV, TEXT)
    assert engine_args(**given).create_engine_config() == expected


def test_a_hash_that_the_user_chose_stays(engine_args: type[EngineArgs], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(vllm_plugin.CONNECTOR_ENV, TEXT)
    assert engine_args(prefix_caching_hash_algo="xxhash").create_engine_config()[1] == "xxhash"


TIER = '{"kv_connector": "O", "kv_connector_extra_config": {"secondary_tiers": [{"module_path": "kvpool.engines.of"}]}}'


@pytest.mark.parametrize(
    ("version", "expected"), [((0, 33, 0), "O"), ((0, 31, 2), None), ((0, 34), None), ("no such module", None)]
)
def test_a_vllm_that_the_tier_does_not_know_runs_without_the_pool(
    engine_args: type[EngineArgs], monkeypatch: pytest.MonkeyPatch, version: Any, expected: str | None
) -> None:
    monkeypatch.setenv(vllm_plugin.CONNECTOR_ENV, TIER)
    if isinstance(version, tuple):
        tier = SimpleNamespace(KNOWN_VERSIONS=((0, 32), (0, 33)))
        monkeypatch.setitem(sys.modules, "kvpool.engines.of", tier)  # type: ignore[arg-type]
        sys.modules["vllm"].__version_tuple__ = version  # type: ignore[attr-defined]
        sys.modules["vllm"].__version__ = ".".join(map(str, version))
    config, _, calls = engine_args().create_engine_config()
    assert (getattr(config, "kv_connector", None), calls) == (expected, 1)


@pytest.mark.parametrize("text", ["", "{", "[]", "5"])
def test_a_broken_connector_text_changes_nothing(
    engine_args: type[EngineArgs], monkeypatch: pytest.MonkeyPatch, text: str
) -> None:
    monkeypatch.setenv(vllm_plugin.CONNECTOR_ENV, text)
    assert engine_args().create_engine_config() == (None, "sha256", 1)


def test_the_entry_point_is_found_in_a_plain_directory(tmp_path: Path) -> None:
    source = Path(vllm_plugin.__file__).parent.parent.parent
    (tmp_path / "kvpool").symlink_to(source)
    info = importlib.metadata.distribution("kvpool")
    target = tmp_path / f"kvpool-{info.version}.dist-info"
    target.mkdir()
    for name in ("METADATA", "entry_points.txt"):
        (target / name).write_text(info.read_text(name) or "")
    code = """
from importlib.metadata import entry_points
(point,) = entry_points(group="vllm.general_plugins")
point.load()()
print(point.name, point.value)
"""
    env = {k: v for k, v in os.environ.items() if not k.startswith("KVPOOL")}
    env["PYTHONPATH"] = str(tmp_path)
    done = subprocess.run(
        [sys.executable, "-S", "-c", code], env=env, capture_output=True, text=True, timeout=30, check=True
    )
    assert done.stdout.split() == ["kvpool", "kvpool.engines.vllm_plugin:register"]
