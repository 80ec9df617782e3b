import pytest
from train_kit.rules import RuleContract, find_warnings, load

from skyrl_train.config.rules import placement

PLACEMENT = "trainer.placement"
MEGATRON = "trainer.strategy=megatron"


class TestPlacement(RuleContract):
    module = placement
    tested_elsewhere = ("packages_are_installed", "sharding_fits_ranks", "_fsdp_problems")


def test_megatron_trains_an_adapter() -> None:
    load(f"{MEGATRON} trainer.policy.model.lora.rank=8")


@pytest.mark.parametrize("sharing", ["true", "false"])
def test_gpus_of_a_critic_that_does_not_exist_start_no_processes(sharing: str) -> None:
    overrides = f"{PLACEMENT}.critic_num_gpus_per_node=4 {PLACEMENT}.colocate_all={sharing}"
    (warning,) = find_warnings(overrides)
    assert "has no effect, because the run has no critic" in warning
    assert load(overrides).trainer.placement.uses_ray == (sharing == "false")
