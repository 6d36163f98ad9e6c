"""Fingerprint inputs of an SGLang engine, names of its pages, and views of its host memory."""

from __future__ import annotations

import hashlib
import random
from typing import TYPE_CHECKING, Any

import pytest
from cl_sglang import PAGE, Config, HostPool, Tensor, install

from kvpool.engines.common.host_memory import HostMemory, tensor_bytes
from kvpool.engines.sglang import fingerprint as sglang_fingerprint
from kvpool.engines.sglang.pages import Pages
from kvpool.protocol import keys

if TYPE_CHECKING:
    from collections.abc import Callable


NO_ARGUMENT: Callable[[str], Any] = lambda name: None  # noqa: E731


def key(n: int) -> str:
    return hashlib.sha256(b"%d" % n).hexdigest()


def test_two_engines_that_must_not_share() -> None:
    """Each of these differs from the first engine in one thing."""

    def fingerprint(config: Config | None = None, version: str = "0.5.23", pool: Any = None, **arguments: Any) -> bytes:
        known = {"model_path": "org/tiny", "dtype": "bfloat16", "kv_cache_dtype": "auto", **arguments}
        inputs = sglang_fingerprint.fingerprint_inputs(config or Config(), pool or HostPool(), version, known.get)
        return keys.fingerprint(inputs)

    def pool(**changes: Any) -> HostPool:
        made = HostPool(page_size=changes.pop("page_size", PAGE))
        made.__dict__.update(changes)
        return made

    base = fingerprint()
    assert fingerprint() == base
    assert fingerprint(Config(tp_rank=0, model_name="as it is served")) == base, "its name for users says nothing"
    pairs = {
        "version": fingerprint(version="0.5.24"),
        "model": fingerprint(model_path="org/tiny-2"),
        "revision": fingerprint(revision="v2"),
        "kv dtype": fingerprint(kv_cache_dtype="fp8_e5m2"),
        "scales of the kv": fingerprint(quantization_param_path="scales.json"),
        "quantization": fingerprint(quantization="fp8"),
        "overrides": fingerprint(json_model_override_args='{"rope_scaling": {}}'),
        "attention": fingerprint(attention_backend="flashinfer"),
        "adapters": fingerprint(lora_paths=["a=org/lora"]),
        "other adapters": fingerprint(lora_paths=["a=org/lora-2"]),
        "draft model": fingerprint(speculative_draft_model_path="org/draft"),
        "weights since the start": fingerprint(weight_version="step-2"),
        "tensor parallel": fingerprint(Config(tp_size=2)),
        "pipeline parallel": fingerprint(Config(pp_size=2)),
        "context parallel": fingerprint(Config(attn_cp_size=2)),
        "attention kind": fingerprint(Config(is_mla_model=True)),
        "layout": fingerprint(pool=pool(layout="page_first_direct")),
        "page size": fingerprint(pool=pool(page_size=8)),
        "pool dtype": fingerprint(pool=pool(dtype="float16")),
        "heads": fingerprint(pool=pool(head_num=4)),
        "head size": fingerprint(pool=pool(head_dim=64)),
        "layers": fingerprint(pool=pool(layer_num=3)),
        "stage": fingerprint(pool=pool(start_layer=2)),
        "format": fingerprint(pool=pool(storage_format_tag="other")),
        "made-up weights": fingerprint(load_format="dummy"),
        "made-up weights of another": fingerprint(load_format="dummy"),
    }
    all_of_them = [base, *pairs.values()]
    assert len(set(all_of_them)) == len(all_of_them), [name for name, f in pairs.items() if all_of_them.count(f) > 1]


def test_an_adapters_files_count(tmp_path: Any) -> None:
    (tmp_path / "adapter_config.json").write_text('{"r": 8}')
    lora = f"a={tmp_path}"

    def loras() -> Any:
        return sglang_fingerprint.fingerprint_inputs(Config(), HostPool(), "1", {"lora_paths": [lora]}.get)["loras"]

    before = loras()
    assert before == loras()
    (tmp_path / "adapter_config.json").write_text('{"r": 9}')
    assert before != loras()


def test_side_pools_of_another_shape_have_other_names() -> None:
    client = type("C", (), {"fingerprint": bytes(32)})()
    names = set()
    for name, size, pieces, config in (
        ("swa", PAGE, 2, Config()), ("swa", 8, 2, Config()), ("swa", PAGE, 1, Config()), ("mamba", PAGE, 2, Config()),
        ("swa", PAGE, 2, Config(tp_rank=1)),
    ):  # fmt: skip
        pool = HostPool(page_size=size, pieces=pieces)
        with pytest.MonkeyPatch.context() as patch:
            install(patch)
            found = Pages(name, pool, config).block_ids(client, [key(0)])
        assert len(found) == pieces
        names.update(found)
    assert len(names) == 2 + 2 + 1 + 2 + 2


def test_views_lie_inside_of_what_was_registered() -> None:
    tensors = [Tensor(1000), Tensor(500)]
    memory = HostMemory([*tensors, tensors[0]])
    assert memory.size == 1500
    rng = random.Random(3)
    for _ in range(2000):
        tensor = rng.choice(tensors)
        start, size = rng.randint(-10, tensor.numel() + 10), rng.randint(-5, tensor.numel() + 10)
        view = memory.view(tensor.data_ptr() + start, size)
        if start >= 0 and size > 0 and start + size <= tensor.numel():
            assert view is not None
            assert len(view) == size
            view[0] = 7
            assert tensor.bytes[start] == 7
        elif view is not None:  # the two may be neighbours
            other = tensors[1 - tensors.index(tensor)]
            assert other.data_ptr() <= tensor.data_ptr() + start < other.data_ptr() + other.numel()
    assert HostMemory([]).view(1, 1) is None
    elsewhere = Tensor(10)
    elsewhere.device.type = "cuda"
    for unusable in (elsewhere, Tensor(0)):
        with pytest.raises(ValueError, match="tensor"):
            tensor_bytes(unusable)
