"""A prefill and a decode engine: real vLLM, real NIXL between them, and the pool beside it as the injector writes it.

On the CPU, over loopback. The engines start once; each test has prompts of its own.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest
from cl_nodes import free_port
from en_engine import Engine, connector
from en_overlay import overlay
from test_en_vllm import BLOCK, PATIENT, prompt, until

from kvpool.engines.vllm.connector_config import combine

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from cl_nodes import Cluster

REMOTE = {"do_remote_decode": True, "do_remote_prefill": False}
BLOCKS = 9
SENT = "vllm:nixl_bytes_transferred"


@pytest.fixture(scope="module")
def nixl(engine_home: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """vLLM imports `nixl`, a package that only chooses between CUDA's versions; here is the one that there is."""
    _, (installed, _) = overlay("rdma", engine_home)
    folder = tmp_path_factory.mktemp("nixl")
    for name in ("nixl_cu12", "nixl_cu12.libs"):
        (folder / name).symlink_to(installed / name)
    (folder / "nixl").mkdir()
    (folder / "nixl" / "__init__.py").touch()
    for name in ("_api", "_bindings"):
        (folder / "nixl" / f"{name}.py").write_text(f"from nixl_cu12.{name} import *\n")
    return folder


@pytest.fixture(scope="module")
def pair(cluster: Cluster, start_engine: Callable[..., Engine], nixl: Path) -> tuple[Engine, Engine]:
    """The prefill engine on node a, the decode engine on node b."""

    def start(node: str, role: str) -> Engine:
        theirs = {"kv_connector": "NixlConnector", "kv_role": role, "kv_buffer_device": "cpu"}
        both = combine(json.loads(connector(cluster[node].socket, **PATIENT)), theirs).config
        env = {"UCX_TLS": "tcp,self,cma", "UCX_NET_DEVICES": "lo", "VLLM_NIXL_SIDE_CHANNEL_HOST": "127.0.0.1"}
        port = str(free_port())
        return start_engine(json.dumps(both), EXTRA_PYTHONPATH=str(nixl), VLLM_NIXL_SIDE_CHANNEL_PORT=port, **env)

    return start("a", "kv_producer"), start("b", "kv_consumer")


@pytest.fixture(scope="module")
def reference(pair: tuple[Engine, Engine], start_engine: Callable[..., Engine]) -> Engine:
    """The same engine without any connector; it starts beside the others."""
    return start_engine("")


def from_pool(engine: Engine) -> int:
    return sum(engine.stats()["tokens"].values())


def handed_over(engine: Engine) -> float:
    """Bytes that NIXL has brought to this engine."""
    engine.settle()
    found = engine.ask(metrics=SENT)["metrics"]
    return sum(value for name, _, value in found if name == f"{SENT}_sum")


def stored(cluster: Cluster, node: str, engine: Engine, seed: int, **options: Any) -> dict[str, Any]:
    """Have `engine` compute a prompt, and wait until its blocks are on its node and in the index."""
    before = len(cluster[node].block_files()), cluster[node].announced()
    answer = engine.generate(prompt(seed), max_tokens=1, **options)
    engine.settle()
    assert until(lambda: len(cluster[node].block_files()) >= before[0] + BLOCKS, 30)
    assert until(lambda: cluster[node].announced() >= before[1] + BLOCKS, 30)
    return answer


def test_a_decode_pod_takes_the_prefill_that_was_made_for_it_though_the_pool_has_it_too(
    cluster: Cluster, pair: tuple[Engine, Engine], reference: Engine
) -> None:
    prefill, decode = pair
    before, brought = from_pool(decode), handed_over(decode)
    told = stored(cluster, "a", prefill, 1, transfer=REMOTE)["transfer"]
    assert told["do_remote_prefill"]
    answer = decode.generate(prompt(1), transfer=told)
    assert answer["tokens"] == reference.generate(prompt(1))["tokens"]
    assert handed_over(decode) > brought
    assert from_pool(decode) == before, "the decode engine asked the pool for what it had been promised"


def test_a_decode_pod_that_nobody_prefills_for_is_served_by_the_pool(
    cluster: Cluster, pair: tuple[Engine, Engine], reference: Engine
) -> None:
    prefill, decode = pair
    stored(cluster, "a", prefill, 2)
    before, brought = from_pool(decode), handed_over(decode)
    answer = decode.generate(prompt(2))
    assert answer["tokens"] == reference.generate(prompt(2))["tokens"]
    assert from_pool(decode) == before + BLOCKS * BLOCK
    assert handed_over(decode) == brought


def test_a_prefill_pod_is_served_by_the_pool_and_hands_over_all_of_it(
    cluster: Cluster, pair: tuple[Engine, Engine], reference: Engine
) -> None:
    prefill, decode = pair
    stored(cluster, "b", decode, 3)
    assert decode.ask(reset_all=True)["reset"]  # from here on it shares nothing: what it gets is what was handed over
    before, brought = from_pool(prefill), handed_over(decode)
    told = prefill.generate(prompt(3), max_tokens=1, transfer=REMOTE)["transfer"]
    assert from_pool(prefill) == before + BLOCKS * BLOCK
    answer = decode.generate(prompt(3), transfer=told)
    assert answer["tokens"] == reference.generate(prompt(3))["tokens"]
    assert handed_over(decode) > brought
