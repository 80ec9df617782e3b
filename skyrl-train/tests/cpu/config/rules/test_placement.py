from __future__ import annotations

import pytest
from train_kit.rules import ASYNC, GAE, SERVER, Cases, RuleContract, find_warnings, load

from skyrl_train.config.rules import placement

PLACEMENT = "trainer.placement"
OFFLOAD = f"{PLACEMENT}.offload_idle"
MEGATRON = "trainer.strategy=megatron"
SIZES = "trainer.policy.megatron_config"

REFUSED: Cases = {
    # launcher_starts_every_process
    f"{PLACEMENT}.policy_num_gpus_per_node=8 {PLACEMENT}.launcher=inline": [],
    f"{PLACEMENT}.colocate_all=false {PLACEMENT}.launcher=inline": [f"{PLACEMENT}.launcher=auto"],
    # asynchronous_engine_has_its_own_devices
    f"{ASYNC} {PLACEMENT}.launcher=ray": [f"{PLACEMENT}.launcher=auto", SERVER],
    # critic_has_the_size_of_its_devices
    f"{GAE} {PLACEMENT}.critic_num_gpus_per_node=2": [
        f"{PLACEMENT}.policy_num_gpus_per_node=2",
        f"{PLACEMENT}.critic_num_gpus_per_node=1",
    ],
    # idle_memory_is_shared
    f"{OFFLOAD}=true {PLACEMENT}.colocate_all=false": [f"{PLACEMENT}.colocate_all=true {PLACEMENT}.launcher=ray"],
    f"{OFFLOAD}=true": ["generator.backend=vllm", f"{OFFLOAD}=false"],
    f"{OFFLOAD}=true {ASYNC}": [],
    f"{OFFLOAD}=true {SERVER}": [],
    # strategy_has_its_settings
    f"{SIZES}.tensor_model_parallel_size=2": [],
    f"{MEGATRON} trainer.ref.fsdp_config.cpu_offload=true": [],
    f"{MEGATRON} trainer.policy.sequence_parallel_size=2": ["trainer.policy.sequence_parallel_size=1"],
    f"{MEGATRON} trainer.critic.sequence_parallel_size=2": ["trainer.critic.sequence_parallel_size=1"],
    # megatron_has_its_models
    f"{MEGATRON} {GAE}": ["trainer.critic.model.path=null trainer.algorithm.advantage_estimator=grpo"],
    f"{MEGATRON} {SIZES}.sequence_parallel=true": [],
}
WARNED: Cases = {
    # asynchronous_settings_have_an_effect
    "trainer.fully_async.max_staleness_steps=2": [],
    # critic_is_placed_if_there_is_one
    f"{PLACEMENT}.critic_num_gpus_per_node=4": [
        f"{PLACEMENT}.colocate_all=false {GAE}",
        f"{PLACEMENT}.policy_num_gpus_per_node=4 generator.num_inference_engines=4",
    ],
    # colocation_has_an_effect
    f"{PLACEMENT}.colocate_policy_ref=false": [],
    # megatron_has_ranks
    MEGATRON: [f"{PLACEMENT}.policy_num_gpus_per_node=2 generator.num_inference_engines=2"],
}


class TestPlacement(RuleContract):
    module, refused, warned = placement, REFUSED, WARNED
    tested_elsewhere = ("ray_is_installed", "megatron_is_installed", "_fsdp_problems", "_megatron_problems")


def test_megatron_trains_an_adapter() -> None:
    load(f"{MEGATRON} trainer.policy.model.lora.rank=8")


@pytest.mark.parametrize("sharing", ["true", "false"])
def test_gpus_of_a_critic_that_does_not_exist_start_no_processes(sharing: str) -> None:
    overrides = f"{PLACEMENT}.critic_num_gpus_per_node=4 {PLACEMENT}.colocate_all={sharing}"
    (warning,) = find_warnings(overrides)
    assert "has no effect, because the run has no critic" in warning
    assert load(overrides).trainer.placement.uses_ray == (sharing == "false")
