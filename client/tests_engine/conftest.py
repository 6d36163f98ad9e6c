"""A real engine, real sidecars. Run by `make test-engines`, which makes the engine's environment first."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import TYPE_CHECKING, Any

import en_model
import pytest

from en_engine import GPU_PYTHON, ROOT, Engine  # isort: skip - it makes the next one importable
from cl_nodes import Cluster

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator


@pytest.fixture(scope="session")
def engine_home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The engine's environment; made on first use (about 6 GB, outside of this clone). With a GPU: room for caches."""
    if GPU_PYTHON:
        return tmp_path_factory.mktemp("engine")
    script = ROOT / "e2e/engine/make.sh"
    made = subprocess.run(["bash", str(script)], stdout=subprocess.PIPE, text=True, check=True, timeout=1800)
    return Path(made.stdout.strip().splitlines()[-1])


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of two layers and 2 MB whose answers depend on every block of their context."""
    return en_model.write(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="module")
def start_engine(
    engine_home: Path, tiny_model: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Callable[..., Engine]]:
    engines: list[Engine] = []
    logs = tmp_path_factory.mktemp("engines")

    def start(text: str, options: dict[str, Any] | None = None, model: Path | None = tiny_model, **env: str) -> Engine:
        engine = Engine(engine_home, model, logs / f"{len(engines)}.log", text, options, **env)
        engines.append(engine)
        return engine

    yield start
    for engine in engines:
        engine.quit()
    for engine in engines:
        engine.close()


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    cluster = Cluster(tmp_path_factory.mktemp("cluster"), ("a", "b"))
    yield cluster
    cluster.close()
