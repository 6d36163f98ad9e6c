"""The start-up module of an injected container: what it does to any Python process, and when its hooks run."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

import kvpool

SOURCES = Path(kvpool.__file__).parent
SETTINGS = {"KVPOOL_SGLANG_HICACHE": "{}", "KVPOOL_LMCACHE_L2": "{}"}


@pytest.fixture
def injected(tmp_path: Path) -> Path:
    """The injected directory: the client and its start-up module."""
    home = tmp_path / "client"
    shutil.copytree(SOURCES, home / "kvpool", ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(SOURCES / "engines/sitecustomize.py", home)
    return home


def write(path: Path, text: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(textwrap.dedent(text))
    return path.parent


def run(code: str, *path: Path, **env: str) -> subprocess.CompletedProcess[str]:
    settings = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, path)), **env}
    command = [sys.executable, "-c", textwrap.dedent(code)]
    return subprocess.run(command, env=settings, capture_output=True, text=True, timeout=60, check=False)


def test_without_a_variable_nothing_is_imported(injected: Path) -> None:
    code = (
        "import sys; print([n for n in sys.modules if 'kvpool' in n and '__editable__' not in n], len(sys.meta_path))"
    )
    bare = run(code)
    done = run(code, injected)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == bare.stdout
    assert done.stdout.startswith("[]")


@pytest.mark.parametrize("env", [{}, SETTINGS])
def test_the_hidden_start_up_module_runs(injected: Path, tmp_path: Path, env: dict[str, str]) -> None:
    other = write(tmp_path / "image/sitecustomize.py", "import sys\nsys.hidden = __file__\n")
    code = "import sys, sitecustomize; print(sys.hidden, sitecustomize.__file__, sys.path[1])"
    done = run(code, injected, other, **env)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.split() == [f"{other}/sitecustomize.py"] * 2 + [str(injected)]


def test_a_start_up_module_that_looks_for_the_next_one_too_ends(injected: Path, tmp_path: Path) -> None:
    """As tracing agents do it: each removes its directory from the path and imports the name again."""
    agent = write(
        tmp_path / "agent/sitecustomize.py",
        """
        import os, sys
        sys.ran = getattr(sys, "ran", []) + ["agent"]
        here = os.path.dirname(os.path.abspath(__file__))
        kept = sys.path[:]
        sys.path[:] = [p for p in sys.path if p != here]
        this = sys.modules.pop("sitecustomize")
        try:
            import sitecustomize
        except ImportError:
            sys.modules["sitecustomize"] = this
        finally:
            sys.path[:] = kept
        """,
    )
    image = write(tmp_path / "image/sitecustomize.py", "import sys\nsys.ran = getattr(sys, 'ran', []) + ['image']\n")
    for path in ((injected, agent, image), (agent, injected, image)):
        done = run("import sys; print(sys.ran)", *path)
        assert (done.stdout.strip(), done.stderr) == ("['agent', 'image']", "")


def test_an_error_of_the_hidden_start_up_module_is_reported_as_without_us(injected: Path, tmp_path: Path) -> None:
    other = write(tmp_path / "image/sitecustomize.py", "import missing_module_of_the_image\n")
    done = run("print('runs')", injected, other)
    alone = run("print('runs')", other)
    assert (done.returncode, done.stdout) == (alone.returncode, alone.stdout) == (0, "runs\n")
    assert ("missing_module_of_the_image" in done.stderr) == ("missing_module_of_the_image" in alone.stderr)


def test_the_start_up_module_is_valid_in_every_python(injected: Path) -> None:
    import ast

    for version in ((3, 0), (3, 6)):
        ast.parse((injected / "sitecustomize.py").read_text(), feature_version=version)
    text = (injected / "sitecustomize.py").read_text()
    assert 'f"' not in text
    assert "->" not in "".join(line for line in text.splitlines() if "# type:" not in line)


def test_an_older_python_starts_without_the_client(injected: Path) -> None:
    code = f"""
        import runpy, sys
        sys.version_info = (3, 8, 0)
        before = len(sys.meta_path)
        runpy.run_path({str(injected / "sitecustomize.py")!r}, run_name="sitecustomize")
        print(len(sys.meta_path) - before, "kvpool.engines.startup" in sys.modules)
    """
    done = run(code, **SETTINGS)
    assert (done.returncode, done.stdout, done.stderr) == (0, "0 False\n", "")


def test_a_client_that_is_damaged_starts_the_process(injected: Path) -> None:
    (injected / "kvpool/engines/startup.py").write_text("raise RuntimeError('damaged')\n")
    done = run("print('runs')", injected, **SETTINGS)
    assert (done.returncode, done.stdout) == (0, "runs\n")
    assert done.stderr == "kvpool: the import hook was not installed: RuntimeError('damaged')\n"


def engine(tmp_path: Path, hook: str = "", body: str = "value = 1") -> Path:
    """An engine's package with the module that SGLang's hook waits for."""
    for package in ("sglang", "sglang/srt"):
        write(tmp_path / f"engine/{package}/__init__.py", "")
    write(tmp_path / "engine/sglang/srt/server_args.py", body)
    return tmp_path / "engine"


def test_the_hook_gets_the_module_after_its_execution_and_once(injected: Path, tmp_path: Path) -> None:
    (injected / "kvpool/engines/sglang/guard.py").write_text(
        "def guard(module, text):\n    module.seen = getattr(module, 'seen', ()) + ((module.value, text),)\n"
    )
    code = """
        import importlib, json, sglang.srt.server_args as m
        importlib.import_module("sglang.srt.server_args")
        print(json.dumps([m.seen, type(m.__loader__).__name__, type(m.__spec__.loader).__name__]))
    """
    done = run(code, injected, engine(tmp_path), KVPOOL_SGLANG_HICACHE='{"page_size": 1}')
    assert (done.returncode, done.stderr) == (0, "")
    assert json.loads(done.stdout) == [[[1, '{"page_size": 1}']], "SourceFileLoader", "SourceFileLoader"]


def test_a_hook_that_fails_leaves_the_import_as_it_was(injected: Path, tmp_path: Path) -> None:
    (injected / "kvpool/engines/sglang/guard.py").write_text(
        "def guard(module, text):\n    raise KeyError('planted')\n"
    )
    done = run("import sglang.srt.server_args as m; print(m.value)", injected, engine(tmp_path), **SETTINGS)
    assert (done.returncode, done.stdout) == (0, "1\n")


def test_an_error_of_the_engines_module_is_raised(injected: Path, tmp_path: Path) -> None:
    home = engine(tmp_path, body="raise ValueError('of the engine')")
    done = run("import sglang.srt.server_args", injected, home, **SETTINGS)
    assert done.returncode == 1
    assert done.stderr.rstrip().endswith("ValueError: of the engine")


def test_an_empty_variable_installs_nothing(injected: Path) -> None:
    code = "import sys; print(len(sys.meta_path))"
    assert run(code, injected, KVPOOL_SGLANG_HICACHE="").stdout == run(code).stdout
    assert run(code, injected, **SETTINGS).stdout != run(code).stdout


def test_the_module_can_be_run_as_a_program(injected: Path, tmp_path: Path) -> None:
    home = engine(tmp_path, body="print(__name__)")
    settings = {**os.environ, "PYTHONPATH": f"{injected}{os.pathsep}{home}", **SETTINGS}
    command = [sys.executable, "-m", "sglang.srt.server_args"]
    done = subprocess.run(command, env=settings, capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stdout) == (0, "__main__\n")
