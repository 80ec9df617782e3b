"""The configuration of supervised fine-tuning."""

from __future__ import annotations

import logging
import sys
from typing import Any

import pytest
import yaml

from skyrl_train.config import to_yaml
from skyrl_train.config.base import as_section
from skyrl_train.config.generate import main as generate
from skyrl_train.config.loading import validate, validate_cfg
from skyrl_train.config.sft import SFT, SFTConfig
from skyrl_train.errors import ConfigError

DATA = {"train_data": "train.jsonl"}


def load(**sections: Any) -> SFTConfig:
    return validate({"data": DATA, **sections}, SFT)


def test_the_generated_files_are_up_to_date() -> None:
    assert generate(["--check"]) == 0


def test_the_defaults_are_those_of_the_recipe() -> None:
    cfg = load()
    optimizer = cfg.trainer.policy.optimizer_config
    assert (optimizer.lr, optimizer.adam_betas, optimizer.weight_decay) == (2e-6, (0.9, 0.98), 0.05)
    assert (cfg.trainer.train_batch_size, cfg.trainer.micro_train_batch_size_per_gpu) == (32, 8)
    assert (cfg.data.max_length, cfg.trainer.eval_interval, cfg.trainer.ckpt_interval) == (None, 50, 50)


def test_yaml_is_read_back() -> None:
    cfg = load(trainer={"run_name": "r"})
    assert validate(yaml.safe_load(to_yaml(cfg)), SFT) == cfg


@pytest.mark.parametrize("old", SFT.aliases)
def test_aliases_name_keys_that_exist(old: str) -> None:
    assert old not in SFT.fields
    assert as_section(SFT.fields[SFT.aliases[old].key].annotation) is None


@pytest.mark.parametrize(
    ("sections", "message"),
    [
        ({"data": {"train_data": []}}, r"data\.train_data=\[\] leaves nothing to train on"),
        (
            {"trainer": {"policy": {"optimizer_config": {"num_warmup_steps": 3, "warmup_ratio": 0.1}}}},
            r"num_warmup_steps=3 and trainer\.policy\.optimizer_config\.warmup_ratio=0\.1 both set the warm-up",
        ),
        (
            {"trainer": {"policy": {"optimizer_config": {"lr": 100, "weight_decay": 1}}}},
            "must be below 1, or a step erases the weights",
        ),
        (
            {"trainer": {"policy": {"model": {"lora": {"lora_path": "adapter", "target_modules": ["q_proj"]}}}}},
            r"target_modules=\[q_proj\]: the adapter in .*lora_path=.*adapter has its own matrices",
        ),
        ({"trainer": {"run_name": ".."}}, r"trainer\.run_name=\.\. must be the name of a folder"),
        ({"trainer": {"resume_mode": "from_path"}}, r"trainer\.resume_mode=from_path needs trainer\.resume_path"),
        ({"data": {**DATA, "val_data": ["a.jsonl", "./a.jsonl"]}}, "twice, so its rows would count twice"),
        ({"trainer": {"eval_batch_size": 4}}, r"there is no key trainer\.eval_batch_size"),
        (
            {"trainer": {"placement": {"launcher": "inline", "policy_num_gpus_per_node": 2}}},
            r"policy_num_gpus_per_node=2 takes several processes, but trainer\.placement\.launcher=inline is one",
        ),
        ({"trainer": {"placement": {"colocate_all": False}}}, r"there is no key trainer\.placement\.colocate_all"),
        ({"trainer": {"policy": {"fsdp_config": {"cpu_offload": True}}}}, "a single rank holds the whole model"),
        (
            {"trainer": {"placement": {"policy_num_nodes": 3}, "policy": {"fsdp_config": {"fsdp_size": 2}}}},
            r"fsdp_size=2 must divide the 3 ranks of the policy; try 1 or 3, or -1 for all",
        ),
        (
            {
                "trainer": {
                    "placement": {"policy_num_gpus_per_node": 6},
                    "policy": {"fsdp_config": {"reshard_after_forward": 4}},
                }
            },
            r"reshard_after_forward=4 must be a true divisor of the 6 ranks .*; try 2 or 3 or true or false",
        ),
        (
            {
                "trainer": {
                    "strategy": "megatron",
                    "placement": {"policy_num_gpus_per_node": 2},
                    "policy": {"megatron_config": {"tensor_model_parallel_size": 3, "pipeline_model_parallel_size": 2}},
                }
            },
            r"tensor_model_parallel_size=3 times .*pipeline_model_parallel_size=2 must divide the 2 ranks of the "
            r"policy; set trainer\.placement\.policy_num_gpus_per_node=6, or lower",
        ),
        (
            {
                "trainer": {
                    "strategy": "megatron",
                    "placement": {"policy_num_gpus_per_node": 6},
                    "policy": {"megatron_config": {"tensor_model_parallel_size": 2, "context_parallel_size": 2}},
                }
            },
            r"tensor_model_parallel_size=2 times \S+\.context_parallel_size=2 must divide the 6 ranks of the policy; "
            r"set trainer\.placement\.policy_num_gpus_per_node=4, or lower",
        ),
        (
            {
                "trainer": {
                    "policy": {"megatron_config": {"transformer_config_kwargs": {"recompute_granularity": "full"}}}
                }
            },
            r"transformer_config_kwargs=.*: Megatron-Core's settings follow from the model; for recomputation, set "
            r"trainer\.gradient_checkpointing=true; remove the key",
        ),
        (
            {"trainer": {"policy": {"sequence_parallel_size": 2}}},
            r"sequence_parallel_size=2 must divide the 1 rank of the policy; .*policy_num_gpus_per_node=2",
        ),
        (
            {
                "trainer": {
                    "placement": {"policy_num_gpus_per_node": 4},
                    "policy": {"sequence_parallel_size": 3},
                }
            },
            r"sequence_parallel_size=3 must divide the 4 ranks of the policy; try 1 or 2 or 4",
        ),
        (
            {"trainer": {"sequence_parallel_backend": "ring"}},
            r"sequence_parallel_backend=ring must be ulysses",
        ),
        ({"trainer": {"ckpt_interval": 0}}, "must be -1 or an integer >= 1; the default is trainer.ckpt_interval=50"),
    ],
)
def test_conflicts_are_refused(sections: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load(**sections)


def test_sharding_under_torchrun_is_that_of_its_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "1")
    monkeypatch.setenv("WORLD_SIZE", "4")
    fsdp = {"cpu_offload": True, "fsdp_size": 2}
    policy = load(trainer={"policy": {"fsdp_config": fsdp, "sequence_parallel_size": 4}}).trainer.policy
    assert (policy.fsdp_config.fsdp_size, policy.sequence_parallel_size) == (2, 4)


def test_several_ranks_need_ray_or_torchrun(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)  # as if it were not installed
    ranks = {"policy_num_gpus_per_node": 2}
    with pytest.raises(
        ConfigError, match=r"needs Ray, .* or start the ranks with trainer\.placement\.launcher=torchrun"
    ):
        load(trainer={"placement": ranks})
    placement = load(trainer={"placement": {**ranks, "launcher": "torchrun"}}).trainer.placement
    assert placement.uses_torchrun
    with pytest.raises(ConfigError, match=r"needs Ray, .* or train in one process with .*launcher=inline"):
        validate_cfg({"trainer": {"placement": ranks}})
    with pytest.raises(ConfigError, match="launcher=torchrun must be one of auto, inline, ray;"):
        validate_cfg({"trainer": {"placement": {**ranks, "launcher": "torchrun"}}})


def test_validation_on_the_training_data_is_reported(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        load(data={**DATA, "val_data": "train.jsonl"})
    assert "train.jsonl is in data.train_data and in data.val_data" in caplog.text
