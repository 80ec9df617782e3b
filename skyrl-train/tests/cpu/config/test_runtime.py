"""Accepted settings that run differently in a single process."""

from __future__ import annotations

import pytest

from skyrl_train.config import parse_cli, what_runs_here
from skyrl_train.config.problems import FIELDS
from skyrl_train.config.runtime import TABLE

ALWAYS = {"trainer.strategy", "trainer.flash_attn", "generator.weight_sync_backend"}
ON_CPU = {"trainer.bf16"}


def keys(overrides: list[str], has_gpu: bool = True, has_vllm: bool = False) -> set[str]:
    lines = what_runs_here(parse_cli(overrides), has_gpu=has_gpu, has_vllm=has_vllm)
    return {line.split("=")[0] for line in lines}


def test_lines_for_the_default_configuration() -> None:
    assert keys([]) == ALWAYS
    assert keys([], has_gpu=False) == ALWAYS | ON_CPU
    assert keys(["trainer.bf16=false"], has_gpu=False) == ALWAYS
    assert keys(["trainer.flash_attn=false"]) == ALWAYS - {"trainer.flash_attn"}


@pytest.mark.parametrize(
    "override",
    [
        "trainer.placement.colocate_all=false",
        "trainer.placement.policy_num_nodes=2",
        "trainer.placement.policy_num_gpus_per_node=4",
        "trainer.placement.ref_num_nodes=2",
        "trainer.placement.ref_num_gpus_per_node=4",
        "trainer.placement.critic_num_nodes=2",
        "trainer.placement.critic_num_gpus_per_node=4",
        "generator.backend=vllm",
        "generator.num_inference_engines=2",
        "generator.inference_engine_tensor_parallel_size=2",
        "generator.async_engine=false",
        "generator.gpu_memory_utilization=0.4",
        "generator.enforce_eager=false",
    ],
)
def test_a_setting_that_runs_differently_has_a_line(override: str) -> None:
    assert keys([override]) == ALWAYS | {override.split("=")[0]}


def test_a_critic_in_one_process_has_no_line() -> None:
    critic = ["trainer.algorithm.advantage_estimator=gae", "trainer.critic.model.path=tiny"]
    assert keys([*critic, "trainer.critic_mini_batch_size=64"]) == ALWAYS
    lines = what_runs_here(parse_cli(["trainer.placement.critic_num_nodes=2"]), has_gpu=True, has_vllm=False)
    assert "trainer.placement.critic_num_nodes=2: one process: one worker on one device" in lines


def test_vllm_options_have_a_line_unless_vllm_runs() -> None:
    options = ["generator.enforce_eager=false", "generator.engine_init_kwargs.block_size=32"]
    assert keys(["generator.backend=vllm", *options], has_vllm=True) == ALWAYS
    unsupported = {"generator.enforce_eager", "generator.engine_init_kwargs"}
    assert keys(["generator.backend=hf", *options], has_vllm=True) == ALWAYS | unsupported
    assert keys(["generator.backend=vllm", *options], has_vllm=False) == ALWAYS | unsupported | {"generator.backend"}


def test_a_line_names_the_key_the_value_and_the_actual_behaviour() -> None:
    lines = what_runs_here(parse_cli([]), has_gpu=False, has_vllm=False)
    assert lines == [
        "trainer.strategy=fsdp2: one process holds the whole model; nothing is sharded",
        "trainer.bf16=true: a CPU computes in float32",
        "trainer.flash_attn=true: PyTorch's SDPA, which has a flash kernel of its own on a GPU",
        "generator.weight_sync_backend=nccl: the engine is in the trainer's process; nothing is sent",
    ]


def test_the_table_names_each_existing_key_once() -> None:
    rows = [key for key, _, _ in TABLE]
    assert set(rows) <= FIELDS.keys()
    assert len(rows) == len(set(rows))
