"""Models that Megatron-Core divides: their weights, and those that it cannot divide."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from train_kit.megatron import PIPELINE, TENSOR, exported_tensors, load_model_group, model_spec
from train_kit.models import SMALL, create_model, load_on_cpu
from transformers import LlamaConfig, MistralConfig, PreTrainedConfig

from skyrl_train.config.policy import MegatronConfig
from skyrl_train.errors import ConfigError
from skyrl_train.launch.process import ProcessRank

pytest.importorskip("megatron.core", reason="needs megatron-core, the extra mcore of skyrl-train")
pytestmark = pytest.mark.megatron


async def test_an_export_has_the_weights_that_were_loaded(
    two_ranks: list[ProcessRank], paths: dict[str, Path], tmp_path: Path
) -> None:
    for model, path in paths.items():
        for megatron in (TENSOR, PIPELINE):
            group = await load_model_group(two_ranks, model_spec(path, megatron))
            exported = await exported_tensors(group, tmp_path / model)
            for name, tensor in load_on_cpu(path).state_dict().items():
                assert torch.equal(exported[name], tensor), name


DYNAMIC_ROPE = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}


@pytest.mark.parametrize(
    ("config", "megatron", "message"),
    [
        (
            LlamaConfig(**SMALL | {"num_key_value_heads": 1}),
            TENSOR,
            r"tensor_model_parallel_size=2 must divide the 1 key-value heads of .*_size=1",
        ),
        (
            LlamaConfig(**SMALL | {"num_hidden_layers": 3}),
            PIPELINE,
            r"pipeline_model_parallel_size=2 must divide the 3 layers of .*_size=1",
        ),
        (
            LlamaConfig(**SMALL, hidden_act="gelu"),
            TENSOR,
            "does not support the activation gelu; set trainer.strategy=fsdp2",
        ),
        (
            LlamaConfig(**SMALL, attention_bias=True),
            TENSOR,
            r"does not support the tensor model\.layers\.0\.self_attn\..*bias of a Llama",
        ),
        (LlamaConfig(**SMALL, rope_parameters=DYNAMIC_ROPE), TENSOR, "of type dynamic"),
        (MistralConfig(**SMALL), TENSOR, r"strategy=megatron does not support a MistralForCausalLM; set .*=fsdp2"),
    ],
    ids=["heads", "layers", "activation", "bias", "rope", "architecture"],
)
async def test_models_that_cannot_be_divided_are_refused(
    two_ranks: list[ProcessRank], tmp_path: Path, config: PreTrainedConfig, megatron: MegatronConfig, message: str
) -> None:
    create_model(config).save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match=message):
        await load_model_group(two_ranks, model_spec(tmp_path, megatron))
