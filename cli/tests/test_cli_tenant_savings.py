"""`kvpool savings --per-tenant`: tokens of all nodes by tenant and model, with names instead of tags."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from cli_documents import documents
from op_diagnosis_world import World

from kvpool_cli import main as entry
from kvpool_cli.commands.tenant_tokens import tokens_by_tenant
from kvpool_cli.planner.pool_status import ModelTokens

if TYPE_CHECKING:
    from pathlib import Path

    import pytest

TENANT = {
    "apiVersion": "kvpool.dev/v1alpha1",
    "kind": "KVCacheTenant",
    "metadata": {"name": "research", "namespace": "kvpool-system"},
    "spec": {"poolRef": {"name": "chat"}, "members": {"namespaces": ["team-a"]}},
    "status": {"tag": "ab12"},
}


def row(tenant: str, asked: int, found: int, model: str = "llama") -> dict[str, Any]:
    return {"tenant": tenant, "model": model, "tokensAsked": asked, "tokensFound": found}


def savings(world: World, tmp_path: Path, *more: str) -> int:
    path = tmp_path / "documents.json"
    path.write_text(json.dumps(documents(world).dump()))
    return entry.main(["savings", "chat", "--per-tenant", "--from", str(path), "--prefill-rate", "1000", *more])


def test_tokens_of_all_nodes_are_summed_by_tenant(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    world = World(tenants=[TENANT])
    world.statuses["node-0"]["cache"]["tenants"] = [row("ab12", 5000, 3000), row("77", 100, 50)]
    world.statuses["node-1"]["cache"]["tenants"] = [row("ab12", 1000, 1000), row("ab12", 10, 5, "qwen")]
    assert savings(world, tmp_path, "-o", "json") == 0
    data = json.loads(capsys.readouterr().out)
    assert [(r["tenant"], r["model"], r["tokens_asked"], r["tokens_found"]) for r in data["models"]] == [
        ("research", "llama", 6000, 4000),
        ("77", "llama", 100, 50),
        ("research", "qwen", 10, 5),
    ]
    assert data["models"][0]["engine_seconds"] == 4.0
    assert data["total"]["tokens_found"] == 4055
    assert savings(world, tmp_path) == 0
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert lines[0][:4] == ["POOL", "TENANT", "MODEL", "FOUND"]
    assert lines[1][:4] == ["kvpool-system/chat", "research", "llama", "4,000"]


def test_sidecars_without_the_setting_are_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    assert savings(World(), tmp_path) == 1
    assert "sidecar.metrics.perTenant" in capsys.readouterr().err


def test_tenants_that_requested_nothing_are_no_failure(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    world = World()
    world.statuses["node-0"]["cache"]["tenants"] = []
    assert savings(world, tmp_path) == 0
    assert "No engine requested tokens" in capsys.readouterr().out


def test_odd_rows_count_as_nothing():
    rows = [{"tenant": 5, "tokensAsked": "many"}, {"model": "other", "tokensAsked": True, "tokensFound": -3}]
    assert tokens_by_tenant(rows, {}) == ()
    assert tokens_by_tenant([*rows, {"model": "m", "tokensAsked": 2}], {}) == (ModelTokens("m", 2, 0, "other"),)
