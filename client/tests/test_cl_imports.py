"""The client runs in other people's processes: nothing but the standard library, every Python from 3.10, fast."""

from __future__ import annotations

import ast
import compileall
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

SOURCE = Path(__file__).parent.parent / "src"
FILES = sorted((SOURCE / "kvpool").rglob("*.py"))
EVERYWHERE = [
    "kvpool",
    "kvpool.break_even",
    "kvpool.client",
    "kvpool.config",
    "kvpool.engines",
    "kvpool.engines.common",
    "kvpool.engines.common.client_cache",
    "kvpool.engines.common.host_memory",
    "kvpool.engines.common.interface",
    "kvpool.engines.common.jobs",
    "kvpool.engines.common.lookups",
    "kvpool.engines.common.prompt_files",
    "kvpool.engines.common.self_test",
    "kvpool.engines.common.settings",
    "kvpool.engines.common.stores",
    "kvpool.engines.common.tasks",
    "kvpool.engines.common.weights",
    "kvpool.engines.common.without_pool",
    "kvpool.engines.lmcache",
    "kvpool.engines.lmcache.fingerprint",
    "kvpool.engines.lmcache.guard",
    "kvpool.engines.lmcache.interface",
    "kvpool.engines.lmcache.inventory",
    "kvpool.engines.lmcache.rechecks",
    "kvpool.engines.sglang",
    "kvpool.engines.sglang.connection",
    "kvpool.engines.sglang.fingerprint",
    "kvpool.engines.sglang.guard",
    "kvpool.engines.sglang.interface",
    "kvpool.engines.sglang.page_transfer",
    "kvpool.engines.sglang.pages",
    "kvpool.engines.sglang.server",
    "kvpool.engines.sglang.weight_changes",
    "kvpool.engines.sitecustomize",
    "kvpool.engines.startup",
    "kvpool.engines.tested_versions",
    "kvpool.engines.vllm",
    "kvpool.engines.vllm.cache_salt",
    "kvpool.engines.vllm.chunk_size",
    "kvpool.engines.vllm.config_inputs",
    "kvpool.engines.vllm.connector_config",
    "kvpool.engines.vllm.engine_blocks",
    "kvpool.engines.vllm.engine_client",
    "kvpool.engines.vllm.engine_setup",
    "kvpool.engines.vllm.fingerprint",
    "kvpool.engines.vllm.hash_probe",
    "kvpool.engines.vllm.hints",
    "kvpool.engines.vllm.interface",
    "kvpool.engines.vllm.plugin",
    "kvpool.engines.vllm.pool_lookups",
    "kvpool.engines.vllm.prefill_meter",
    "kvpool.engines.vllm.recorded_request",
    "kvpool.engines.vllm.request_params",
    "kvpool.engines.vllm.request_tokens",
    "kvpool.engines.vllm.self_test",
    "kvpool.engines.vllm.weight_changes",
    "kvpool.engines.vllm_plugin",
    "kvpool.engines.vllm_words",
    "kvpool.errors",
    "kvpool.events_config",
    "kvpool.hint_settings",
    "kvpool.protocol",
    "kvpool.protocol.block",
    "kvpool.protocol.block_table",
    "kvpool.protocol.certificate_names",
    "kvpool.protocol.fingerprint_fields",
    "kvpool.protocol.hint",
    "kvpool.protocol.index_url",
    "kvpool.protocol.json_fields",
    "kvpool.protocol.keys",
    "kvpool.protocol.miss_cause",
    "kvpool.protocol.peer_wire",
    "kvpool.protocol.router_blocks",
    "kvpool.protocol.wire",
    "kvpool.results",
    "kvpool.schema",
    "kvpool.session",
    "kvpool.stats",
    "kvpool.tracing",
    "kvpool.transport",
    "kvpool.transport.block_table",
    "kvpool.transport.block_writer",
    "kvpool.transport.circuit_breaker",
    "kvpool.transport.connection",
    "kvpool.transport.connection_pool",
    "kvpool.transport.deadline_margin",
    "kvpool.transport.descriptor_closer",
    "kvpool.transport.hot_blocks",
    "kvpool.transport.hot_copy",
    "kvpool.transport.load",
    "kvpool.transport.local_lookups",
    "kvpool.transport.page_cache",
    "kvpool.transport.pending",
    "kvpool.transport.piece_size",
    "kvpool.transport.responses",
    "kvpool.transport.slots",
    "kvpool.transport.store",
    "kvpool.transport.transfer",
    "kvpool.transport.use_reports",
    "kvpool.transport.worker_pool",
]
ENGINE_ONLY = [
    "kvpool.engines.lmcache.l2_adapter",
    "kvpool.engines.lmcache.remote_connector",
    "kvpool.engines.lmcache_mp",
    "kvpool.engines.lmcache_remote",
    "kvpool.engines.sglang.storage",
    "kvpool.engines.vllm.counters",
    "kvpool.engines.vllm.stored_events",
    "kvpool.engines.vllm.tier",
]
OPTIONAL = {"xxhash"}
# an engine's own, or of the extra otel: never at import
INSIDE_FUNCTIONS = {"opentelemetry", "vllm", "lmcache", "sglang", "torch", "huggingface_hub"}


def interpreters() -> list[str]:
    """Every Python from 3.10 to 3.13 that can be found and started."""
    found = {}
    for minor in (10, 11, 12, 13):
        for candidate in (
            shutil.which(f"python3.{minor}"),
            *map(str, Path.home().glob(f".pyenv/versions/3.{minor}.*/bin/python")),
        ):
            if candidate is None:
                continue
            run = subprocess.run(
                [candidate, "-c", "import sys; print(sys.version_info[:2])"],
                capture_output=True,
                text=True,
                check=False,
            )
            if run.returncode == 0 and run.stdout.strip() == f"(3, {minor})":
                found[minor] = candidate
                break
    return [found[minor] for minor in sorted(found)]


def run(python: str, code: str, *path: str) -> str:
    env = {k: v for k, v in os.environ.items() if not k.startswith(("PYTHON", "KVPOOL"))}
    done = subprocess.run(
        [python, "-S", "-W", "error", "-c", code],
        env={**env, "PYTHONPATH": os.pathsep.join([str(SOURCE), *path]), "PYTHONDONTWRITEBYTECODE": "1"},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_list_of_modules_is_complete() -> None:
    names = {".".join(f.relative_to(SOURCE).with_suffix("").parts).removesuffix(".__init__") for f in FILES}
    assert names == set(EVERYWHERE) | set(ENGINE_ONLY)


@pytest.mark.parametrize("python", interpreters())
def test_imports_on_every_python_without_any_package(python: str) -> None:
    code = "import sys\n" + "\n".join(f"import {name}" for name in EVERYWHERE)
    code += "\ntops = {name.split('.')[0] for name in sys.modules}"
    code += "\nprint(sorted(tops - set(sys.stdlib_module_names) - {'kvpool', '__main__'}))"
    assert run(python, code).strip() in ("[]", "['__mp_main__']")


@pytest.mark.parametrize("python", interpreters())
def test_golden_keys_on_every_python(python: str) -> None:
    code = f"""
import json
from kvpool.protocol import keys
from pathlib import Path
v = json.loads(Path({str(Path(__file__).parent / "golden/keys.json")!r}).read_text())
h = bytes.fromhex
for x in v["fingerprint"]: assert keys.fingerprint(x["inputs"]).hex() == x["hex"]
for x in v["block_id"]: assert keys.block_id(h(x["fingerprint"]), h(x["block_hash"]), h(x["part"])).hex() == x["hex"]
for x in v["key"]: assert keys.block_key(h(x["pool_secret"]), x["tenant"], h(x["block_id"])).hex() == x["hex"]
print(sum(map(len, v.values())))
"""
    assert int(run(python, code)) > 10


@pytest.mark.parametrize("python", interpreters())
def test_a_client_without_xxhash_and_without_a_sidecar_misses(python: str) -> None:
    code = """
import json, time
from kvpool.protocol import block
from kvpool.client import Client
from kvpool.config import ClientConfig
client = Client(ClientConfig(socket="/nonexistent/kv.sock"), fingerprint=bytes(32))
began = time.monotonic()
result = client.get_into([bytes(32)], [bytearray(4096)])[0]
tier = int(client.lookup([bytes(32)])[0])
print(json.dumps([block.CAN_CHECKSUM, result.ok, result.reason, tier, time.monotonic() - began]))
client.close()
"""
    can, ok, reason, tier, seconds = json.loads(run(python, code))
    assert (can, ok, reason, tier) == (False, False, "no-sidecar", 0)
    assert seconds < 0.1


def test_syntax_of_the_oldest_python(tmp_path: Path) -> None:
    for file in FILES:
        ast.parse(file.read_text(), str(file), feature_version=(3, 10))
    shutil.copytree(SOURCE / "kvpool", tmp_path / "kvpool")
    assert compileall.compile_dir(str(tmp_path), quiet=2)


@pytest.mark.parametrize("file", FILES, ids=lambda f: f.stem)
def test_nothing_but_the_standard_library_is_imported(file: Path) -> None:
    allowed = set(sys.stdlib_module_names) | {"kvpool"}
    engine = ".".join(file.relative_to(SOURCE).with_suffix("").parts) in ENGINE_ONLY
    tree = ast.parse(file.read_text())
    inside = {n for f in ast.walk(tree) if isinstance(f, ast.FunctionDef) for n in ast.walk(f)}
    for node in ast.walk(tree):
        names = []
        if isinstance(node, ast.Import):
            names = [a.name for a in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "absolute imports only"
            names = [node.module or ""]
        for name in names:
            top = name.split(".")[0]
            lazily = top in INSIDE_FUNCTIONS and (node in inside or engine)
            assert top in allowed or top in OPTIONAL or lazily, f"{file.name} imports {name}"


def test_modules_that_are_newer_than_the_oldest_python_are_not_used() -> None:
    newer = {"tomllib", "compression", "annotationlib"}
    for file in FILES:
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.Import):
                assert not newer & {a.name.split(".")[0] for a in node.names}


def test_import_brings_few_modules() -> None:
    """What makes an import slow is what it imports: 104 of the standard library, where 3.11 starts with 23."""
    code = "import sys; before = len(sys.modules); import kvpool.client; print(len(sys.modules) - before)"
    assert int(run(sys.executable, code)) < 140


def test_vllm_is_not_needed_to_import_the_engines_package() -> None:
    code = "import sys, kvpool.engines, kvpool.engines.vllm_plugin as p; p.register(); print('vllm' in sys.modules)"
    assert run(sys.executable, code).strip() == "False"


def test_the_vllm_module_says_what_is_missing() -> None:
    code = """
try:
    from kvpool.engines.vllm import PoolTier
except ImportError as e:
    print(e)
"""
    assert "vLLM 0.30, 0.31, 0.32 and 0.33" in run(sys.executable, code)
