"""Models and adapters that ranks cannot divide are refused, with the reason."""

from typing import Any

import pytest
import torch
from train_kit.models import SMALL, create_model, load_on_cpu
from train_kit.ranks import single_rank
from train_kit.strategies import Strategies, param
from transformers import Lfm2Config, LlamaConfig, MistralConfig, PreTrainedConfig, Qwen3Config

from skyrl_train.errors import ConfigError
from skyrl_train.workers.group import WorkerGroup

DYNAMIC_ROPE = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}


MODELS: dict[str, tuple[PreTrainedConfig, str]] = {  # a layout and what it cannot divide
    "tokens, heads": (
        Qwen3Config(**SMALL | {"num_attention_heads": 5, "num_key_value_heads": 1}),
        r"trainer\.policy\.sequence_parallel_size=2 must divide the model's 5 attention heads; try one of 1, 5",
    ),
    "tokens, convolutions": (
        Lfm2Config(**SMALL, layer_types=["conv", "full_attention"], block_ff_dim=24),
        r"trainer\.policy\.sequence_parallel_size=2 cannot split the tokens of a Lfm2ForCausalLM across ranks, "
        "because shared prefixes would change",
    ),
    "tensor, heads": (
        LlamaConfig(**SMALL | {"num_key_value_heads": 1}),
        r"tensor_model_parallel_size=2 must divide the 1 key-value heads of .*_size=1",
    ),
    "pipeline, layers": (
        LlamaConfig(**SMALL | {"num_hidden_layers": 3}),
        r"pipeline_model_parallel_size=2 must divide the 3 layers of .*_size=1",
    ),
    "tensor, activation": (
        LlamaConfig(**SMALL, hidden_act="gelu"),
        "does not support the activation gelu; set trainer.strategy=fsdp2",
    ),
    "tensor, bias": (
        LlamaConfig(**SMALL, attention_bias=True),
        r"does not support the tensor model\.layers\.0\.self_attn\..*bias of a Llama",
    ),
    "tensor, rope": (LlamaConfig(**SMALL, rope_parameters=DYNAMIC_ROPE), "of rope_type dynamic"),
    "tensor, architecture": (
        MistralConfig(**SMALL),
        r"strategy=megatron does not support a MistralForCausalLM; set .*=fsdp2",
    ),
}


@pytest.mark.parametrize(
    ("layout", "config", "message"),
    [param(name.partition(",")[0], *model, name=name) for name, model in MODELS.items()],
)
async def test_models_that_cannot_be_divided(
    strategies: Strategies, layout: str, config: PreTrainedConfig, message: str
) -> None:
    folder = strategies.new_folder()
    create_model(config).save_pretrained(folder)
    with pytest.raises(ConfigError, match=message):
        await strategies.load(folder, layout)
    await strategies.load("qwen3", layout)  # with the same ranks


@pytest.mark.parametrize(
    ("layout", "modules", "message"),
    [
        param(
            "tensor",
            ["q_proj", "lm_head"],
            r"has no adapter for the head lm_head; leave it out of .*target_modules, or",
            name="head",
        ),
        param(
            "pipeline",
            r"model\.layers\.1\..*_proj",
            r"has no matrix of the layers 0 to 0, .*parallel_size=2 stages .*size=1",
            name="stage",
        ),
        param("tensor", ["gate"], "has no module gate; its linear modules are", name="module"),
    ],
)
async def test_adapters_that_cannot_be_divided(strategies: Strategies, layout: str, modules: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        await strategies.load("llama", layout, {"rank": 2, "target_modules": modules})


def test_ranks_that_are_not_a_multiple_of_the_size(strategies: Strategies) -> None:
    with pytest.raises(ConfigError, match=r"trainer\.policy\.sequence_parallel_size=2 must divide the 1 rank of the"):
        WorkerGroup(strategies.spec("qwen3", "tokens"), [single_rank()])


async def test_nan_weights_are_refused_by_the_rank_that_reads_them(strategies: Strategies) -> None:
    model, folder = load_on_cpu(strategies.path("qwen3")), strategies.new_folder()
    with torch.no_grad():
        model.model.layers[1].mlp.up_proj.weight[-1, -1] = torch.nan
    model.save_pretrained(folder)
    with pytest.raises(ConfigError, match=r"has NaN or infinite weights in model\.layers\.1\.mlp\.up_proj\.weight"):
        await strategies.load(folder, "fsdp2")
