"""What the shape of a model is, from the `config.json` of its Hugging Face folder."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

MOST_UNROLLED = 64
ALPHA = 32.0
Family = Literal["qwen3", "qwen3_moe", "llama"]

FAMILIES: Mapping[str, Family] = {
    "Qwen3ForCausalLM": "qwen3",
    "Qwen3MoeForCausalLM": "qwen3_moe",
    "LlamaForCausalLM": "llama",
}


class ModelError(ValueError):
    """A model cannot be used here; the message says why."""


@dataclass(frozen=True, slots=True)
class RopeScaling:
    """Llama 3's: long wavelengths are stretched by `factor`, short ones kept, those between blended."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_position: int


@dataclass(frozen=True, slots=True)
class MoeConfig:
    """A mixture of experts in place of each layer's MLP."""

    n_experts: int
    n_active: int  # per token
    intermediate_size: int  # of one expert
    normalizes_weights: bool  # so that those of the active ones sum to 1


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """A decoder, e.g. Qwen3-0.6B: 28 layers, 16 heads of 128 over 8 pairs of keys and values."""

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
        """Whether heads of queries and keys are normalised."""
        return self.family != "llama"

    @property
    def blocks(self) -> tuple[int, ...]:
        """How many layers lie in one array, and are scanned. Otherwise each is its own: samples come more than twice as
        fast from 28 layers, since a scan copies each layer's weights; but a program grows with them.
        """
        return (1,) * self.n_layers if self.n_layers <= MOST_UNROLLED else (self.n_layers,)

    @property
    def n_groups(self) -> int:
        """Query heads for a head of keys and values."""
        return self.n_heads // self.n_kv_heads

    def cache_bytes(self, itemsize: int) -> int:
        """What keys and values of a token take, of numbers of so many bytes."""
        return 2 * self.n_layers * self.n_kv_heads * self.head_size * itemsize


@dataclass(frozen=True, slots=True)
class LoraConfig:
    """What an adapter covers; the defaults are those of the client."""

    rank: int = 32
    seed: int | None = None
    train_attn: bool = True
    train_mlp: bool = True
    train_unembed: bool = True
    alpha: float = ALPHA

    @property
    def scale(self) -> float:
        """Of the product."""
        return self.alpha / self.rank

    def expert_rank(self, n_experts: int) -> int:
        """An expert gets its share of the rank, at least 1: together they have what one MLP would have."""
        return max(1, self.rank // n_experts)


def read_config(folder: Path) -> ModelConfig:
    """The configuration of the model in a folder.

    Raises:
        ModelError: there is no `config.json`, or the model is of another kind, or uses what is not supported.
    """
    file = folder / "config.json"
    if not file.is_file():
        raise ModelError(f"{folder} holds no config.json; give the folder of a Hugging Face model")
    try:
        told = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ModelError(f"{file} is no JSON: {error}") from error
    return config_of(told, generation=_generation(folder))


def config_of(told: Mapping[str, Any], generation: Mapping[str, Any] | None = None) -> ModelConfig:
    """The configuration that a `config.json` tells, with the end-of-sequence tokens of `generation_config.json`."""
    (architecture,) = told.get("architectures") or ("none",)
    if architecture not in FAMILIES:
        raise ModelError(f"architecture {architecture} is not supported; these are: {', '.join(FAMILIES)}")
    family = FAMILIES[architecture]
    _refuse(told, family)
    heads = int(told["num_attention_heads"])
    rope = _rope_parameters(told)
    return ModelConfig(
        family=family,
        vocab_size=int(told["vocab_size"]),
        hidden_size=int(told["hidden_size"]),
        n_layers=int(told["num_hidden_layers"]),
        n_heads=heads,
        n_kv_heads=int(told.get("num_key_value_heads") or heads),
        head_size=int(told.get("head_dim") or told["hidden_size"] // heads),
        intermediate_size=int(told["intermediate_size"]),
        rms_norm_eps=float(told["rms_norm_eps"]),
        rope_theta=float(rope.get("rope_theta", told.get("rope_theta", 10_000.0))),
        rope_scaling=_rope_scaling(rope),
        max_positions=int(told["max_position_embeddings"]),
        ties_embeddings=bool(told.get("tie_word_embeddings", False)),
        eos_ids=_ids((generation or {}).get("eos_token_id", told.get("eos_token_id"))),
        moe=_moe(told) if family == "qwen3_moe" else None,
    )


def _generation(folder: Path) -> Mapping[str, Any]:
    file = folder / "generation_config.json"
    told: Mapping[str, Any] = json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {}
    return told


def _refuse(told: Mapping[str, Any], family: Family) -> None:
    """Raises ModelError for what would silently come out differently."""
    unsupported = {
        "attention_bias": bool(told.get("attention_bias")),
        "mlp_bias": bool(told.get("mlp_bias")),
        "use_sliding_window": bool(told.get("use_sliding_window")),
        "hidden_act": told.get("hidden_act", "silu") != "silu",
        "mlp_only_layers": bool(told.get("mlp_only_layers")),
        "decoder_sparse_step": family == "qwen3_moe" and told.get("decoder_sparse_step", 1) != 1,
        "quantization_config": bool(told.get("quantization_config")),
    }
    for name, is_unsupported in unsupported.items():
        if is_unsupported:
            raise ModelError(f"{name}={told[name]!r} is not supported")


def _rope_parameters(told: Mapping[str, Any]) -> Mapping[str, Any]:
    """Newer configurations have `rope_parameters`, older ones `rope_scaling` beside `rope_theta`."""
    rope: Mapping[str, Any] = told.get("rope_parameters") or told.get("rope_scaling") or {}
    return rope


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


def _moe(told: Mapping[str, Any]) -> MoeConfig:
    return MoeConfig(
        n_experts=int(told.get("num_experts") or told["num_local_experts"]),  # its newer name
        n_active=int(told["num_experts_per_tok"]),
        intermediate_size=int(told["moe_intermediate_size"]),
        normalizes_weights=bool(told.get("norm_topk_prob", False)),
    )


def _ids(told: Any) -> tuple[int, ...]:
    if told is None:
        return ()
    return tuple(told) if isinstance(told, list) else (int(told),)


def inverse_frequencies(config: ModelConfig) -> list[float]:
    """Radians a position, for each pair of a head's dimensions (Su et al., 2021, arXiv:2104.09864)."""
    size = config.head_size
    plain = [config.rope_theta ** (-2.0 * i / size) for i in range(size // 2)]
    scaling = config.rope_scaling
    return plain if scaling is None else [_stretched(frequency, scaling) for frequency in plain]


def _stretched(frequency: float, scaling: RopeScaling) -> float:
    """Llama 3.1's (Dubey et al., 2024, arXiv:2407.21783)."""
    wavelength = 2.0 * math.pi / frequency
    turns = scaling.original_max_position / wavelength
    if turns > scaling.high_freq_factor:
        return frequency
    if turns < scaling.low_freq_factor:
        return frequency / scaling.factor
    blend = (turns - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)
    return (1.0 - blend) * frequency / scaling.factor + blend * frequency
