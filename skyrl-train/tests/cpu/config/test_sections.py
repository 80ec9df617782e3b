"""Configuration sections: immutability, descriptions, and the defaults of SkyRL."""

import math
from typing import Any

import pytest
import torch
from pydantic import ValidationError
from torch.optim.lr_scheduler import LRScheduler
from transformers.trainer_utils import SchedulerType

from skyrl_train.config import AlgorithmConfig, OptimizerConfig, load_config
from skyrl_train.config.base import describe_field, value_at
from skyrl_train.config.problems import FIELDS, show
from skyrl_train.launch.specs import optimizer_spec
from skyrl_train.workers.worker import make_scheduler


def test_every_key_has_help_and_a_description_of_its_values() -> None:
    for key, field in FIELDS.items():
        assert field.description, f"{key} has no docstring"
        assert describe_field(field), key


def test_a_loaded_configuration_is_immutable() -> None:
    cfg = load_config()
    for section, name, value in [(cfg.trainer, "epochs", 2), (cfg.environment.skyrl_gym, "max_env_workers", 1)]:
        with pytest.raises(ValidationError, match="frozen"):
            setattr(section, name, value)


def test_loaded_configurations_share_no_lists() -> None:
    load_config().data.train_data.append("another")
    load_config().trainer.logger.append("wandb")
    load_config().trainer.algorithm.custom["tau"] = 0.3
    load_config().trainer.algorithm.gdpo.weights["format"] = 0.5
    assert load_config().data.train_data == ["$HOME/data/gsm8k/train.parquet"]
    assert load_config().trainer.logger == ["tensorboard"]
    assert (load_config().trainer.algorithm.custom, AlgorithmConfig().custom) == ({}, {})
    assert (load_config().trainer.algorithm.gdpo.weights, AlgorithmConfig().gdpo.weights) == ({}, {})


DEFAULTS_OF_SKYRL = """
trainer.train_batch_size=1024 trainer.policy_mini_batch_size=256 trainer.policy.optimizer_config.lr=1e-06
trainer.policy.model.dtype=float32 trainer.algorithm.kl_estimator_type=k3 trainer.algorithm.kl_loss_coef=0.001
trainer.placement.policy_num_gpus_per_node=1 trainer.critic.model.path=null trainer.critic.optimizer_config.lr=5e-06
trainer.critic_mini_batch_size=256 trainer.update_ref_every_epoch=false trainer.algorithm.gamma=1.0
trainer.algorithm.lambd=1.0 trainer.algorithm.clip_ratio_c=3.0 trainer.algorithm.value_clip=0.2
trainer.algorithm.use_kl_loss=true trainer.algorithm.use_kl_in_reward=false trainer.algorithm.kl_ctrl.type=fixed
trainer.algorithm.kl_ctrl.kl_target=0.1 trainer.algorithm.kl_ctrl.horizon=10000 trainer.algorithm.sapo.tau_neg=1.05
trainer.algorithm.dynamic_sampling.type=null trainer.algorithm.dynamic_sampling.max_sample_batches=30
trainer.algorithm.dynamic_sampling.min_replace_ratio=0.3 trainer.algorithm.clip_cov.clip_ratio=0.0002
trainer.algorithm.clip_cov.clip_cov_lb=1.0 trainer.algorithm.clip_cov.clip_cov_ub=5.0
trainer.algorithm.kl_cov.kl_cov_frac=0.2 trainer.algorithm.kl_cov.ppo_kl_coef=1.0
trainer.algorithm.off_policy_correction.token_tis_ratio_clip_high=2.0
trainer.algorithm.off_policy_correction.sequence_tis_ratio_clip_high=5.0
trainer.algorithm.zero_variance_filter_tol=1e-06 generator.zero_reward_on_non_stop=false
generator.apply_overlong_filtering=false generator.n_samples_per_prompt=5
generator.eval_sampling_params.temperature=0.0 environment.skyrl_gym.max_env_workers=32
"""


def test_defaults_are_those_of_skyrl() -> None:
    cfg = load_config()
    for setting in DEFAULTS_OF_SKYRL.split():
        key = setting.partition("=")[0]
        assert f"{key}={show(value_at(cfg, key))}" == setting


SCHEDULERS = describe_field(FIELDS["trainer.policy.optimizer_config.scheduler"]).removeprefix("one of ").split(", ")


def make_optimizer(**settings: Any) -> tuple[torch.optim.Optimizer, LRScheduler]:
    """Return an optimizer of one parameter, and its scheduler for 10 steps."""
    optimizer = torch.optim.AdamW([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
    cfg = OptimizerConfig.model_validate(settings)
    return optimizer, make_scheduler(optimizer, optimizer_spec(cfg, "trainer.policy.optimizer_config", 10))


@pytest.mark.parametrize("name", SCHEDULERS)
def test_every_scheduler_can_be_built_from_its_name_and_step_counts(name: str) -> None:
    optimizer, scheduler = make_optimizer(scheduler=name, num_warmup_steps=2)
    optimizer.step()
    scheduler.step()
    assert math.isfinite(scheduler.get_last_lr()[0])


def test_unsupported_schedulers_need_further_arguments() -> None:
    missing = {kind.value for kind in SchedulerType} - set(SCHEDULERS)
    known = {"reduce_lr_on_plateau", "cosine_with_min_lr", "cosine_warmup_with_min_lr", "warmup_stable_decay", "greedy"}
    assert missing <= known, "transformers has a new scheduler; check that its name alone suffices"


def test_a_custom_section_reaches_its_environment() -> None:
    section = {"topk": 3, "nested": {"a": [1]}}
    gym = load_config({"environment": {"skyrl_gym": {"search": section}}}).environment.skyrl_gym
    assert gym.env_config("search") == section
    assert gym.env_config("gsm8k") == {}
    assert gym.env_config("llm_as_a_judge") == {"model": "gpt-4o-mini", "base_url": None}
    assert gym.max_env_workers == 32


def test_wsd_rises_stays_and_decays_over_the_configured_fractions() -> None:
    optimizer, scheduler = make_optimizer(scheduler="wsd", warmup_ratio=0.2, wsd_decay_ratio=0.5, lr=1.0)
    rates = []
    for _ in range(11):
        rates.append(scheduler.get_last_lr()[0])
        optimizer.step()
        scheduler.step()
    half_cosine = [0.5 + 0.5 * math.cos(math.pi * n / 4) for n in range(5)]
    assert rates == pytest.approx([0.0, 0.5, 1.0, 1.0, 1.0, 1.0, *half_cosine])
