"""Bytes of KV cache, per group of layers, from the fields of a model's config.json. Pure.

A group is what engines cache alike: full attention (MHA, GQA, MQA), latent attention (MLA), layers with a sliding
window or attention chunks, and layers with a recurrent state (Mamba-2, Gated DeltaNet). A model type that is not in
`_READERS` is refused, because a guess would be wrong by a factor, not by a percent.

Formulas: 2 x layers x KV heads x head size x bytes (Shazeer 2019, Ainslie et al. 2023); MLA: layers x (kv_lora_rank +
qk_rope_head_dim) x bytes (DeepSeek-V2); states: the shapes that vLLM 0.33 allocates (mamba_utils.py).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from kvpool_cli.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

DTYPES = {"float32": 4, "float16": 2, "bfloat16": 2, "fp8": 1, "int8": 1}
"""Bytes of a number, by name; fp8 is any of its formats."""

_MAX_LAYERS = 4096
_MAX_SIZE = 2**24


@dataclass(frozen=True)
class CacheGroup:
    """Layers whose cache has one shape. Bytes are of all layers of the group and all tensor-parallel ranks together."""

    kind: Literal["full", "latent", "window", "chunk", "state"]
    layers: int
    bytes_per_token: int = 0
    window: int = 0
    """Tokens that a layer sees, for `window` and `chunk`."""
    state_bytes: int = 0
    """Bytes of one state, for `state`."""

    @property
    def grows(self) -> bool:
        """Whether a session needs more of it with every token."""
        return self.kind in ("full", "latent")


@dataclass(frozen=True)
class CacheLayout:
    """What one token, one block and one session of a model take."""

    groups: tuple[CacheGroup, ...]
    dtype: str

    @property
    def bytes_per_token(self) -> int:
        """Bytes of one token in every layer that keeps tokens: what engines store for new tokens."""
        return sum(group.bytes_per_token for group in self.groups)

    @property
    def bytes_per_token_growing(self) -> int:
        """Bytes by which a long session grows with a token: without windows, chunks and states."""
        return sum(group.bytes_per_token for group in self.groups if group.grows)

    @property
    def state_bytes(self) -> int:
        """Bytes of one recurrent state of all layers."""
        return sum(group.state_bytes for group in self.groups)

    def block_bytes(self, block_tokens: int) -> int:
        """Bytes of one block of tokens in every layer that keeps tokens."""
        return self.bytes_per_token * block_tokens

    def largest_object(self, block_tokens: int) -> int:
        """Bytes of the largest piece that is stored alone."""
        return max(layers * (per_token * block_tokens + state) for _, layers, per_token, state in self._pieces())

    @property
    def objects_per_block(self) -> int:
        """Pieces of a block of tokens that are stored alone, and indexed."""
        return sum(count for count, *_ in self._pieces())

    def _pieces(self) -> list[tuple[int, int, int, int]]:
        """Return, for each kind of layer: pieces, layers of a piece, bytes of a token and of the state in one layer.

        vLLM 0.33 makes pieces of equal numbers of layers: those of the rarest kind, or of the most frequent one if it
        has less than 1.5 times as many (kv_cache_utils.py).
        """
        kinds: dict[str, tuple[int, int, int]] = {}
        for group in self.groups:
            layers, per_token, state = kinds.get(group.kind, (0, 0, 0))
            # an indexer belongs to the same layers as the latents
            kinds[group.kind] = (
                max(layers, group.layers),
                per_token + group.bytes_per_token,
                state + group.state_bytes,
            )
        numbers = [layers for layers, *_ in kinds.values()]
        size = max(numbers) if max(numbers) < 1.5 * min(numbers) else min(numbers)
        return [
            (-(-layers // size), -(-layers // -(-layers // size)), per_token // layers, state // layers)
            for layers, per_token, state in kinds.values()
        ]

    def session_bytes(self, tokens: int) -> int:
        """Bytes that a session of `tokens` tokens needs at its end: all of what grows, windows, and one state."""
        total = self.state_bytes
        for group in self.groups:
            total += group.bytes_per_token * (tokens if group.grows else min(tokens, group.window))
        return total


def read_layout(config: Mapping[str, Any], dtype: str = "auto", tensor_parallel: int = 1) -> CacheLayout:
    """Return the layout for a config.json. Raises UsageError for a model type or a field that is not known.

    `dtype`: a key of DTYPES, or `auto`, the KV dtype that the config asks for, else the dtype of the model.
    """
    text = text_config(config)
    model_type = text.get("model_type") or config.get("model_type")
    reader = _READERS.get(str(model_type))
    if reader is None:
        raise UsageError(
            f"the attention of model type {model_type!r} is not known to this version, so its cache cannot be sized"
        )
    found = _Fields(text, kv_dtype(config) if dtype == "auto" else dtype, tensor_parallel)
    layout = CacheLayout(tuple(group for group in reader(found) if group.layers), found.dtype)
    if not layout.groups:
        raise UsageError(f"the config of model type {model_type!r} has no layer with a cache")
    return layout


def text_config(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the part of a config that describes the language model, for models that also see or hear."""
    for name in ("text_config", "llm_config", "language_config"):
        part = config.get(name)
        if isinstance(part, dict):
            return part
    return config


def model_dtype(config: Mapping[str, Any]) -> str:
    """Return the dtype of the model's activations; bfloat16 if the config does not name one."""
    text = text_config(config)
    names = [text.get("dtype"), text.get("torch_dtype"), config.get("dtype"), config.get("torch_dtype")]
    name = next((str(name).removeprefix("torch.") for name in names if name), "bfloat16")
    if name not in DTYPES:
        raise UsageError(f"the dtype {name!r} of the model is not known: give --kv-dtype")
    return name


def kv_dtype(config: Mapping[str, Any]) -> str:
    """Return the dtype of the KV cache that engines choose for a config with `kv_cache_dtype: auto`."""
    quantization = config.get("quantization_config") or text_config(config).get("quantization_config")
    scheme = quantization.get("kv_cache_scheme") if isinstance(quantization, dict) else None
    if not scheme:
        return model_dtype(config)
    if (isinstance(scheme, dict) and scheme.get("num_bits") == 8) or str(scheme).lower() == "fp8":
        return "fp8"
    raise UsageError(f"the KV cache scheme {scheme!r} of quantization_config is not known: give --kv-dtype")


class _Fields:
    """Checked access to a config: whole numbers within bounds, and the sizes that several readers need."""

    def __init__(self, text: Mapping[str, Any], dtype: str, tensor_parallel: int) -> None:
        if dtype not in DTYPES:
            raise UsageError(f"{dtype!r} is not a dtype of KV caches: one of {', '.join(DTYPES)}")
        self.text, self.dtype, self.tensor_parallel = text, dtype, tensor_parallel
        self.size = DTYPES[dtype]
        self.layers = self.number("num_hidden_layers", most=_MAX_LAYERS)

    def number(self, name: str, default: int | None = None, most: int = _MAX_SIZE) -> int:
        value = self.text.get(name)
        value = default if value is None else value
        if not isinstance(value, int) or isinstance(value, bool) or not 0 < value <= most:
            raise UsageError(f"the config's {name} is {value!r}: it must be a whole number from 1 to {most}")
        return value

    def head_size(self) -> int:
        return self.number("head_dim", self.number("hidden_size") // self.number("num_attention_heads"))

    def per_layer(self, heads: int | None = None, head_size: int | None = None) -> int:
        """Return bytes of a token's keys and values in one layer. A rank has at least one head, a copy if need be."""
        heads = self.number("num_key_value_heads", self.number("num_attention_heads")) if heads is None else heads
        size = self.head_size() if head_size is None else head_size
        return 2 * max(heads, self.tensor_parallel) * size * self.size

    def latent(self) -> int:
        """Return bytes of a token in one MLA layer. Ranks hold the same bytes, which the pool stores once."""
        return (self.number("kv_lora_rank") + self.number("qk_rope_head_dim")) * self.size

    def kinds(self, default: Callable[[int], str]) -> list[str]:
        """Return `layer_types`, or what `default` says of layer 1, 2, ..."""
        given = self.text.get("layer_types")
        if given is None:
            return [default(n) for n in range(1, self.layers + 1)]
        if not isinstance(given, list) or len(given) != self.layers:
            raise UsageError(f"the config's layer_types must name the kind of each of the {self.layers} layers")
        return [str(kind) for kind in given]

    def refuse(self, *names: str) -> None:
        """Refuse a config with a field that changes the cache in a way that this reader does not compute."""
        for name in names:
            if self.text.get(name):
                raise UsageError(f"the config's {name} changes the cache in a way that is not known to this version")


def _full(c: _Fields) -> list[CacheGroup]:
    c.refuse("layer_types", "sliding_window", "attention_chunk_size", "kv_lora_rank", "compress_ratios")
    return [CacheGroup("full", c.layers, c.layers * c.per_layer())]


def _qwen(c: _Fields) -> list[CacheGroup]:
    """Qwen and MiMo: `sliding_window` counts only with `use_sliding_window`, from layer `max_window_layers` on."""
    c.refuse("kv_lora_rank", "compress_ratios")
    if not c.text.get("use_sliding_window"):
        return [CacheGroup("full", c.layers, c.layers * c.per_layer())]
    first = c.number("max_window_layers", c.layers)
    return _windows(c, ["full_attention" if n <= first else "sliding_attention" for n in range(1, c.layers + 1)])


def _mistral(c: _Fields) -> list[CacheGroup]:
    if "sliding_window" not in c.text:
        raise UsageError(
            "the config has no sliding_window, which is null or the window of every layer in this model type"
        )
    if not c.text["sliding_window"]:
        return _full(c)
    return _windows(c, ["sliding_attention"] * c.layers)


def _windows(c: _Fields, kinds: list[str]) -> list[CacheGroup]:
    known = {"full_attention", "sliding_attention", "chunked_attention"}
    if set(kinds) - known:
        raise UsageError(f"the layer type {min(set(kinds) - known)!r} is not known to this version")
    full, sliding, chunked = (kinds.count(f"{kind}_attention") for kind in ("full", "sliding", "chunked"))
    groups = [CacheGroup("full", full, full * c.per_layer())]
    if sliding:
        groups.append(CacheGroup("window", sliding, sliding * c.per_layer(), c.number("sliding_window")))
    if chunked:
        groups.append(CacheGroup("chunk", chunked, chunked * c.per_layer(), c.number("attention_chunk_size", 8192)))
    return groups


def _every(full_at: int, other: str) -> Callable[[_Fields], list[CacheGroup]]:
    """Return a reader for models whose layers `full_at`, 2 `full_at`, ... have full attention."""

    def read(c: _Fields) -> list[CacheGroup]:
        every = c.number("sliding_window_pattern", full_at)
        return _windows(c, c.kinds(lambda n: other if n % every else "full_attention"))

    return read


def _llama4(c: _Fields) -> list[CacheGroup]:
    every = c.number("no_rope_layer_interval", 4)
    return _windows(c, c.kinds(lambda n: "chunked_attention" if n % every else "full_attention"))


def _gemma4(c: _Fields) -> list[CacheGroup]:
    """Full attention has other heads than windows; keys and values are both stored, equal weights or not."""
    c.refuse("num_kv_shared_layers")
    kinds = c.kinds(lambda n: "sliding_attention" if n % 6 else "full_attention")
    sliding, full = kinds.count("sliding_attention"), kinds.count("full_attention")
    heads = c.number("num_global_key_value_heads", c.number("num_key_value_heads"))
    return [
        CacheGroup("full", full, full * c.per_layer(heads, c.number("global_head_dim", c.head_size()))),
        CacheGroup("window", sliding, sliding * c.per_layer(), c.number("sliding_window")),
    ]


def _latent(c: _Fields) -> list[CacheGroup]:
    c.refuse("index_topk", "compress_ratios", "linear_attn_config", "sliding_window")
    return [CacheGroup("latent", c.layers, c.layers * c.latent())]


def _sparse_latent(c: _Fields) -> list[CacheGroup]:
    """MLA with a lightning indexer, whose keys are FP8 with a 4-byte scale for each 128 numbers, in every layer."""
    c.refuse("indexer_types", "index_topk_freq", "index_topk_pattern", "compress_ratios", "sliding_window")
    # vLLM's fp8_ds_mla: FP8 latents with 4 scales of 4 bytes, and rotary keys of 2 bytes
    packed = c.number("kv_lora_rank") + 16 + 2 * c.number("qk_rope_head_dim")
    each = packed if c.size == 1 else c.latent()
    size = c.number("index_head_dim")
    indexer = size + size // 128 * 4
    return [
        CacheGroup("latent", c.layers, c.layers * each),
        CacheGroup("latent", c.layers, c.layers * indexer),
    ]


def _delta_net(c: _Fields) -> list[CacheGroup]:
    """Qwen3-Next and Qwen3.5: Gated DeltaNet layers, and full attention in every fourth."""
    every = c.number("full_attention_interval", 4)
    kinds = c.kinds(lambda n: "linear_attention" if n % every else "full_attention")
    if set(kinds) - {"full_attention", "linear_attention"}:
        raise UsageError("the config's layer_types has a kind that is not known to this version")
    full, linear = kinds.count("full_attention"), kinds.count("linear_attention")
    keys = c.number("linear_num_key_heads") * c.number("linear_key_head_dim")
    values = c.number("linear_num_value_heads") * c.number("linear_value_head_dim")
    convolution = (2 * keys + values) * (c.number("linear_conv_kernel_dim") - 1) * DTYPES[model_dtype(c.text)]
    state = values * c.number("linear_key_head_dim") * _state_size(c)
    return [
        CacheGroup("full", full, full * c.per_layer()),
        CacheGroup("state", linear, state_bytes=linear * (convolution + state)),
    ]


def _nemotron_h(c: _Fields) -> list[CacheGroup]:
    """Mamba-2 layers (M) and attention (*) among layers without a cache."""
    pattern = c.text.get("hybrid_override_pattern")
    if not isinstance(pattern, str) or len(pattern) != c.layers or set(pattern) - set("M*-E"):
        raise UsageError("the config's hybrid_override_pattern must have M, *, - or E for each layer")
    full, mamba = pattern.count("*"), pattern.count("M")
    inner = c.number("mamba_num_heads") * c.number("mamba_head_dim")
    width = inner + 2 * c.number("n_groups") * c.number("ssm_state_size")
    convolution = width * (c.number("conv_kernel") - 1) * DTYPES[model_dtype(c.text)]
    state = inner * c.number("ssm_state_size") * _state_size(c)
    return [
        CacheGroup("full", full, full * c.per_layer()),
        CacheGroup("state", mamba, state_bytes=mamba * (convolution + state)),
    ]


def _state_size(c: _Fields) -> int:
    name = c.text.get("mamba_ssm_dtype") or c.text.get("mamba_ssm_cache_dtype") or model_dtype(c.text)
    if name not in DTYPES:
        raise UsageError(f"the dtype {name!r} of the recurrent state is not known to this version")
    return DTYPES[str(name)]


_READERS: dict[str, Callable[[_Fields], list[CacheGroup]]] = {
    **dict.fromkeys(("llama", "mixtral", "glm4_moe", "minimax_m2"), _full),
    **dict.fromkeys(("qwen2", "qwen2_moe", "qwen3", "qwen3_moe", "qwen3_vl_text", "qwen3_vl_moe_text", "mimo"), _qwen),
    "mistral": _mistral,
    "gpt_oss": _every(2, "sliding_attention"),
    "gemma2": _every(2, "sliding_attention"),
    "gemma3_text": _every(6, "sliding_attention"),
    "gemma4_text": _gemma4,
    "cohere2": _every(4, "sliding_attention"),
    "llama4_text": _llama4,
    **dict.fromkeys(("deepseek_v2", "deepseek_v3", "kimi_k2", "glm4_moe_lite"), _latent),
    **dict.fromkeys(("deepseek_v32", "glm_moe_dsa"), _sparse_latent),
    **dict.fromkeys(("qwen3_next", "qwen3_5_text", "qwen3_5_moe_text"), _delta_net),
    "nemotron_h": _nemotron_h,
}
"""By `model_type`."""

MODEL_TYPES = tuple(sorted(_READERS))
