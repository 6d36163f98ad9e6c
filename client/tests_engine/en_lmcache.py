"""Real LMCache processes: its server with our adapter, and its storage manager with our connector."""

from __future__ import annotations

import json
import os
import secrets
import subprocess
import time
import urllib.request
from pathlib import Path
from typing import Any

import xxhash
from cl_nodes import end_with_parent, free_port
from en_engine import ROOT

START_S = 120
CHUNK = 64  # tokens


def environment(home: Path, folders: list[Path], **env: str) -> dict[str, str]:
    """The client and its checksum come first on the path."""
    extra = home / "path"
    extra.mkdir(parents=True, exist_ok=True)
    if not (extra / "xxhash").exists():
        (extra / "xxhash").symlink_to(Path(xxhash.__file__).parent)
    return plain_environment(home, [ROOT / "client/src", extra, *folders], **env)


def plain_environment(home: Path, folders: list[Path], **env: str) -> dict[str, str]:
    """With these folders on the path, and nothing of this process's own settings."""
    return {
        **{k: v for k, v in os.environ.items() if not k.startswith(("KVPOOL", "LMCACHE"))},
        "PYTHONPATH": os.pathsep.join(map(str, folders)),
        "PYTHONHASHSEED": "0",
        "PYTHONWARNINGS": "ignore",
        "LMCACHE_TRACK_USAGE": "false",
        "LMCACHE_DISABLE_BANNER": "1",
        "HF_HUB_OFFLINE": "1",
        "NUMBA_CACHE_DIR": str(home / "numba"),
        **env,
    }


def connector(port: int) -> str:
    """The configuration with which an engine finds LMCache's server."""
    extra = {"lmcache.mp.host": "tcp://127.0.0.1", "lmcache.mp.port": port, "lmcache.mp.save_decode_cache": True}
    return json.dumps(
        {
            "kv_connector": "LMCacheMPConnector",
            "kv_role": "kv_both",
            "kv_connector_module_path": "lmcache.integration.vllm.lmcache_mp_connector",
            "kv_connector_extra_config": extra,
        }
    )


class Server:
    """`lmcache server`, with the pool as its L2. `client`: of an injected pod, which gives the server the pool."""

    def __init__(
        self, home: Path, python: str, folders: list[Path], params: dict[str, Any], client: Path | None = None
    ) -> None:
        self.port, self.http = free_port(), free_port()
        self.log = home / "server.log"
        adapter = {
            "type": "plugin",
            "module_path": "kvpool.engines.lmcache_mp",
            "class_name": "PoolL2Adapter",
            "shared": True,
            "adapter_params": params,
        }
        if client is None:
            env, flags = environment(home, folders), ["--l2-adapter", json.dumps(adapter)]
        else:
            settings = {"KVPOOL_LMCACHE_L2": "{}", "KVPOOL_CLIENT_CONFIG": json.dumps(params)}
            env, flags = plain_environment(home, [client, *folders], **settings), []
        command = [
            *(python, "-m", "lmcache.cli.main", "server", "--host", "127.0.0.1", "--port", str(self.port)),
            *("--http-host", "127.0.0.1", "--http-port", str(self.http), "--chunk-size", str(CHUNK)),
            *("--l1-size-gb", "0.25", "--no-l1-use-lazy", "--supported-transfer-mode", "auto"),
            *("--shm-name", f"kvpool_test_{secrets.token_hex(4)}", "--eviction-policy", "LRU"),
            *("--disable-observability", *flags),
        ]
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(command, env=env, stdout=log, stderr=log, preexec_fn=end_with_parent)

    def wait_ready(self) -> None:
        deadline = time.monotonic() + START_S
        while time.monotonic() < deadline and self.process.poll() is None:
            try:
                self.get("/healthcheck")
            except OSError:
                time.sleep(0.2)
            else:
                return
        raise RuntimeError(f"LMCache's server is not ready: {self.log.read_text(errors='replace')[-3000:]}")

    def get(self, path: str) -> dict[str, Any]:
        return self._ask("GET", path, None)

    def forget(self) -> None:
        """Empty LMCache's own memory: what is wanted again comes from the pool."""
        answer = self._ask("POST", "/cache/clear", {"tier": "l1"})
        assert answer["status"] == "ok", answer

    def delete(self, keys: list[dict[str, Any]]) -> dict[str, Any]:
        """Delete objects, named as the list of them names them, everywhere."""
        return self._ask("DELETE", "/cache/objects", {"keys": keys, "tier": "all"})

    def _ask(self, method: str, path: str, body: Any) -> dict[str, Any]:
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(f"http://127.0.0.1:{self.http}{path}", data, method=method)
        request.add_header("Content-Type", "application/json")
        with urllib.request.urlopen(request, timeout=10) as answer:
            return json.loads(answer.read())

    def adapter(self) -> dict[str, Any]:
        """What the adapter says of itself in the server's status."""
        (status,) = self.get("/status")["storage_manager"]["l2_adapters"]
        return status

    def stop(self, *, kill: bool = False) -> None:
        if self.process.poll() is None:
            self.process.kill() if kill else self.process.terminate()
            try:
                self.process.wait(30)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait()


class Storage:
    """`lmcache_process.py`: LMCache's storage manager as it is inside an engine, driven line by line."""

    def __init__(self, home: Path, python: str, folders: list[Path], model: Path, settings: dict[str, Any]) -> None:
        extra = {
            "remote_storage_plugin.kvpool.module_path": "kvpool.engines.lmcache_remote",
            "remote_storage_plugin.kvpool.class_name": "PoolConnectorAdapter",
            **{f"remote_storage_plugin.kvpool.{name}": value for name, value in settings.items()},
        }
        env = environment(
            home,
            folders,
            LMCACHE_CHUNK_SIZE=str(CHUNK),
            LMCACHE_LOCAL_CPU="False",
            LMCACHE_MAX_LOCAL_CPU_SIZE="0.1",
            LMCACHE_PRE_CACHING_HASH_ALGORITHM="sha256_cbor",
            LMCACHE_REMOTE_STORAGE_PLUGINS="kvpool",
            LMCACHE_EXTRA_CONFIG=json.dumps(extra),
        )
        self.log = home / "storage.log"
        self._log = self.log.open("wb")
        self.process = subprocess.Popen(
            [python, str(Path(__file__).parent / "lmcache_process.py"), str(model)],
            env=env,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            text=True,
            preexec_fn=end_with_parent,
        )

    def ask(self, **command: Any) -> Any:
        """One command; its end is awaited for as long as the test may take."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(json.dumps(command) + "\n")
        self.process.stdin.flush()
        for line in self.process.stdout:
            if line.startswith("@@"):
                return json.loads(line[2:])
            self._log.write(line.encode())
        raise RuntimeError(f"LMCache does not answer: {self.log.read_text(errors='replace')[-3000:]}")

    def stop(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.close()
        self.process.stdout.close()
        self._log.close()
