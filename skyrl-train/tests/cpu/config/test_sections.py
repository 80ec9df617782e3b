"""Configuration sections: immutability, descriptions, and schedulers."""

import math
from typing import Any

import pytest
import torch
from pydantic import ValidationError
from torch.optim.lr_scheduler import LRScheduler
from transformers.trainer_utils import SchedulerType

from skyrl_train.config import AlgorithmConfig, OptimizerConfig, load_config
from skyrl_train.config.base import describe_field
from skyrl_train.config.problems import FIELDS
from skyrl_train.types.specs import OptimizerSpec
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


SCHEDULERS = describe_field(FIELDS["trainer.policy.optimizer_config.scheduler"]).removeprefix("one of ").split(", ")


def make_optimizer(**settings: Any) -> tuple[torch.optim.Optimizer, LRScheduler]:
    """Return an optimizer of one parameter, and its scheduler for 10 steps."""
    optimizer = torch.optim.AdamW([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
    cfg = OptimizerConfig.model_validate(settings)
    return optimizer, make_scheduler(optimizer, OptimizerSpec(cfg, 10))


@pytest.mark.parametrize("name", SCHEDULERS)
def test_every_scheduler_can_be_built_from_its_name_and_step_counts(name: str) -> None:
    optimizer, scheduler = make_optimizer(scheduler=name, num_warmup_steps=2)
    optimizer.step()
    scheduler.step()
    assert math.isfinite(scheduler.get_last_lr()[0])


@pytest.mark.parametrize("n_warmup_steps", [10, 12])
@pytest.mark.parametrize("name", SCHEDULERS)
def test_warm_up_may_take_the_whole_run(name: str, n_warmup_steps: int) -> None:
    optimizer, scheduler = make_optimizer(scheduler=name, num_warmup_steps=n_warmup_steps)
    rates = []
    for _ in range(10):
        rates.append(scheduler.get_last_lr()[0])
        optimizer.step()
        scheduler.step()
    assert rates == pytest.approx([1.0] * 10 if name == "constant" else [i / n_warmup_steps for i in range(10)])


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
