"""A model's architecture, from the `config.json` of its Hugging Face folder."""

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

MAX_UNROLLED = 64
ALPHA = 32.0
Family = Literal["qwen3", "qwen3_moe", "llama"]

INDEX, SINGLE = "model.safetensors.index.json", "model.safetensors"
"""Names of a model's weight files: the index of several files, and a single file."""

FAMILIES: Mapping[str, Family] = {
    "Qwen3ForCausalLM": "qwen3",
    "Qwen3MoeForCausalLM": "qwen3_moe",
    "LlamaForCausalLM": "llama",
}


class ModelError(ValueError):
    """The model cannot be used, for the reason in the message."""


@dataclass(frozen=True, slots=True)
class RopeScaling:
    """RoPE scaling of Llama 3: stretches long wavelengths by `factor`, keeps short ones, and blends in between."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_position: int


@dataclass(frozen=True, slots=True)
class MoeConfig:
    """The mixture of experts that replaces the MLP in each layer."""

    n_experts: int
    n_active: int  # per token
    intermediate_size: int  # per expert
    normalizes_weights: bool  # the active experts' weights sum to 1


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """The architecture of a decoder, e.g. Qwen3-0.6B: 28 layers, 16 heads of size 128, 8 key-value heads."""

    family: Family
    vocab_size: int
    hidden_size: int
    n_layers: int
    n_heads: int
    n_kv_heads: int
    head_size: int
    intermediate_size: int
    rms_norm_eps: float
    rope_theta: float
    rope_scaling: RopeScaling | None
    max_positions: int
    ties_embeddings: bool
    eos_ids: tuple[int, ...]
    moe: MoeConfig | None = None

    @property
    def has_qk_norm(self) -> bool:
        """True if queries and keys are normalized per head."""
        return self.family != "llama"

    @property
    def blocks(self) -> tuple[int, ...]:
        """Number of layers in each scanned array.

        Blocks of one layer sample more than twice as fast with 28 layers, because a scan copies each layer's weights,
        but program size grows with the number of blocks.
        """
        return (1,) * self.n_layers if self.n_layers <= MAX_UNROLLED else (self.n_layers,)

    @property
    def n_groups(self) -> int:
        """Number of query heads per key-value head."""
        return self.n_heads // self.n_kv_heads

    def cache_bytes(self, itemsize: int) -> int:
        """Return the KV cache size per token in bytes, for numbers of `itemsize` bytes."""
        return 2 * self.n_layers * self.n_kv_heads * self.head_size * itemsize


@dataclass(frozen=True, slots=True)
class AdapterConfig:
    """Settings of an adapter, with the client's defaults."""

    rank: int = 32
    seed: int | None = None
    train_attn: bool = True
    train_mlp: bool = True
    train_unembed: bool = True
    alpha: float = ALPHA

    @property
    def scale(self) -> float:
        """Factor on the product A B."""
        return self.alpha / self.rank

    def expert_rank(self, n_experts: int) -> int:
        """Return the rank per expert, at least 1: all experts together have the rank of one MLP."""
        return max(1, self.rank // n_experts)


def read_config(folder: Path) -> ModelConfig:
    """Read a model folder's configuration.

    Raises:
        ModelError: there is no `config.json`, or the model or one of its features is not supported.
    """
    file = folder / "config.json"
    if not file.is_file():
        raise ModelError(f"{folder} has no config.json; use the folder of a Hugging Face model")
    try:
        settings = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ModelError(f"{file} is not valid JSON: {error}") from error
    generation = folder / "generation_config.json"
    return config_of(settings, json.loads(generation.read_text(encoding="utf-8")) if generation.is_file() else {})


def config_of(settings: Mapping[str, Any], generation: Mapping[str, Any] | None = None) -> ModelConfig:
    """Parse a `config.json`, with the EOS tokens from `generation_config.json`.

    In older files, the settings of RoPE are in `rope_scaling` and `rope_theta`.
    """
    (architecture,) = settings.get("architectures") or ("none",)
    if architecture not in FAMILIES:
        raise ModelError(f"architecture {architecture} is not supported; use one of: {', '.join(FAMILIES)}")
    family = FAMILIES[architecture]
    _refuse(settings, family)
    heads = int(settings["num_attention_heads"])
    rope = settings.get("rope_parameters") or settings.get("rope_scaling") or {}
    eos = (generation or {}).get("eos_token_id", settings.get("eos_token_id"))
    moe = None
    if family == "qwen3_moe":
        moe = MoeConfig(
            n_experts=int(settings.get("num_experts") or settings["num_local_experts"]),  # the newer name
            n_active=int(settings["num_experts_per_tok"]),
            intermediate_size=int(settings["moe_intermediate_size"]),
            normalizes_weights=bool(settings.get("norm_topk_prob", False)),
        )
    return ModelConfig(
        family=family,
        vocab_size=int(settings["vocab_size"]),
        hidden_size=int(settings["hidden_size"]),
        n_layers=int(settings["num_hidden_layers"]),
        n_heads=heads,
        n_kv_heads=int(settings.get("num_key_value_heads") or heads),
        head_size=int(settings.get("head_dim") or settings["hidden_size"] // heads),
        intermediate_size=int(settings["intermediate_size"]),
        rms_norm_eps=float(settings["rms_norm_eps"]),
        rope_theta=float(rope.get("rope_theta", settings.get("rope_theta", 10_000.0))),
        rope_scaling=_rope_scaling(rope),
        max_positions=int(settings["max_position_embeddings"]),
        ties_embeddings=bool(settings.get("tie_word_embeddings", False)),
        eos_ids=tuple(eos) if isinstance(eos, list) else () if eos is None else (int(eos),),
        moe=moe,
    )


def _refuse(settings: Mapping[str, Any], family: Family) -> None:
    """Raise ModelError for features that would be computed wrongly."""
    unsupported = {
        "attention_bias": bool(settings.get("attention_bias")),
        "mlp_bias": bool(settings.get("mlp_bias")),
        "use_sliding_window": bool(settings.get("use_sliding_window")),
        "hidden_act": settings.get("hidden_act", "silu") != "silu",
        "mlp_only_layers": bool(settings.get("mlp_only_layers")),
        "decoder_sparse_step": family == "qwen3_moe" and settings.get("decoder_sparse_step", 1) != 1,
        "quantization_config": bool(settings.get("quantization_config")),
    }
    for name, is_unsupported in unsupported.items():
        if is_unsupported:
            raise ModelError(f"{name}={settings[name]!r} is not supported")


def _rope_scaling(rope: Mapping[str, Any]) -> RopeScaling | None:
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind == "default":
        return None
    if kind != "llama3":
        raise ModelError(f"rope_type={kind!r} is not supported; use default or llama3")
    return RopeScaling(
        factor=float(rope["factor"]),
        low_freq_factor=float(rope["low_freq_factor"]),
        high_freq_factor=float(rope["high_freq_factor"]),
        original_max_position=int(rope["original_max_position_embeddings"]),
    )


def inverse_frequencies(config: ModelConfig) -> list[float]:
    """Return the angle per position for each pair of head dimensions (Su et al., 2021, arXiv:2104.09864)."""
    size = config.head_size
    plain = [config.rope_theta ** (-2.0 * i / size) for i in range(size // 2)]
    scaling = config.rope_scaling
    return plain if scaling is None else [_stretch(frequency, scaling) for frequency in plain]


def _stretch(frequency: float, scaling: RopeScaling) -> float:
    """Scale a frequency as in Llama 3.1 (Dubey et al., 2024, arXiv:2407.21783)."""
    wavelength = 2.0 * math.pi / frequency
    turns = scaling.original_max_position / wavelength
    if turns > scaling.high_freq_factor:
        return frequency
    if turns < scaling.low_freq_factor:
        return frequency / scaling.factor
    blend = (turns - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)
    return (1.0 - blend) * frequency / scaling.factor + blend * frequency
