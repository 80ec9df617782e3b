from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from omegaconf import OmegaConf
from train_kit import golden
from train_kit.rules import (
    ALGORITHM,
    CORRECTION,
    CORRECTION_SWITCHES,
    KL_IN_REWARD,
    RuleContract,
    describe,
    find_refusal,
    find_warnings,
    load,
)

from skyrl_train.algorithms import register_advantage_estimator, register_policy_loss, rules
from skyrl_train.algorithms.registry import ADVANTAGE_ESTIMATORS, POLICY_LOSSES, Registry
from skyrl_train.algorithms.rules import ALGORITHM_RULES, reads_reference
from skyrl_train.config import validate_cfg
from skyrl_train.errors import ConfigError

ESTIMATOR, LOSS = f"{ALGORITHM}.advantage_estimator", f"{ALGORITHM}.policy_loss_type"
MINE, MY_LOSS = f"{ESTIMATOR}=mine", f"{LOSS}=mine"
ZERO_VARIANCE, FILTER = f"{ALGORITHM}.zero_variance_filter=true", f"{ALGORITHM}.dynamic_sampling.type=filter"
NORMALIZE, NO_KL = f"{ALGORITHM}.advantage_batch_normalize=true", f"{ALGORITHM}.use_kl_loss=false"
SEQUENCE_MEAN, TOKEN_WEIGHTS = f"{ALGORITHM}.loss_reduction=sequence_mean", f"{CORRECTION}.tis_ratio_type=token"
CRITIC, TEACHER = "trainer.critic.model.path=tiny", "trainer.ref.model.path=teacher"
ONE_SAMPLE, UPDATE_REF = "generator.n_samples_per_prompt=1", "trainer.update_ref_every_epoch=true"


class TestAlgorithms(RuleContract):
    module = rules


def select(registry: Registry[Any, Any], **traits: Any) -> list[str]:
    """Return the registered functions with the given traits."""
    names = registry.list_available()
    return [n for n in names if all(getattr(registry.traits(n), trait) == value for trait, value in traits.items())]


def with_models(estimator: str) -> str:
    return f"{ESTIMATOR}={estimator} {TEACHER}" + (f" {CRITIC}" if estimator.startswith("gae") else "")


def test_groups_are_filtered_for_estimators_that_compare_their_rewards() -> None:
    for name in select(ADVANTAGE_ESTIMATORS, compares="nothing"):
        for filter_setting in (FILTER, f"{ALGORITHM}.dynamic_sampling.type=replace", ZERO_VARIANCE):
            assert "compares no rewards" in find_refusal(f"{ESTIMATOR}={name} {TEACHER} {filter_setting}")
    for comparison in ("baseline", "parts"):
        for name in select(ADVANTAGE_ESTIMATORS, compares=comparison):
            assert len(find_warnings(f"{with_models(name)} {ZERO_VARIANCE}")) == 1, name


@pytest.mark.parametrize("switch", CORRECTION_SWITCHES)
def test_a_correction_is_refused_with_a_loss_that_it_does_not_suit(switch: str) -> None:
    names = select(POLICY_LOSSES, whole_batch=True) + select(POLICY_LOSSES, reads_rollout_logprobs=True)
    assert names == ["clip_cov", "kl_cov", "dppo", "rollout_is"]
    for name in names:
        assert f"{switch}=" in find_refusal(f"{LOSS}={name} {CORRECTION_SWITCHES[switch]}")


def test_the_reference_is_read_for_a_kl_divergence_or_by_the_estimator() -> None:
    assert reads_reference(load("").trainer.algorithm)
    assert reads_reference(load(KL_IN_REWARD).trainer.algorithm)
    for name in ADVANTAGE_ESTIMATORS.list_available():
        algorithm = load(f"{NO_KL} {with_models(name)}").trainer.algorithm
        assert reads_reference(algorithm) == (name == "on_policy_distillation")


Tensors = tuple[torch.Tensor, torch.Tensor]


def mean_baseline(
    token_level_rewards: torch.Tensor, response_mask: torch.Tensor, index: list[str], **_: Any
) -> Tensors:
    scores = token_level_rewards.sum(dim=-1)
    means = [scores[[other == uid for other in index]].mean() for uid in index]
    advantages = (scores - torch.stack(means))[:, None] * response_mask
    return advantages, advantages


def reward_to_go(token_level_rewards: torch.Tensor, response_mask: torch.Tensor, **_: Any) -> Tensors:
    returns = token_level_rewards.flip(-1).cumsum(-1).flip(-1) * response_mask
    return returns - 0.5 * response_mask, returns


def equal_everywhere(token_level_rewards: torch.Tensor, response_mask: torch.Tensor, **_: Any) -> Tensors:
    advantages = (token_level_rewards.sum() * response_mask).float()
    return advantages, advantages


def critic_baseline(token_level_rewards: torch.Tensor, response_mask: torch.Tensor, values: torch.Tensor) -> Tensors:
    return (token_level_rewards - values) * response_mask, token_level_rewards


def optional_values(token_level_rewards: torch.Tensor, values: torch.Tensor | None = None) -> Tensors:
    return token_level_rewards, token_level_rewards


def any_input(token_level_rewards: torch.Tensor, **kwargs: Any) -> Tensors:
    return token_level_rewards, token_level_rewards


def reference_penalty(token_level_rewards: torch.Tensor, ref_log_probs: torch.Tensor) -> Tensors:
    return token_level_rewards - ref_log_probs, token_level_rewards


def optional_reference(token_level_rewards: torch.Tensor, ref_log_probs: torch.Tensor | None = None) -> Tensors:
    return token_level_rewards, token_level_rewards


def component_sum(response_mask: torch.Tensor, reward_components: dict[str, torch.Tensor]) -> Tensors:
    advantages = sum(reward_components.values())[:, None] * response_mask
    return advantages, advantages


def whitened(token_level_rewards: torch.Tensor, response_mask: torch.Tensor) -> Tensors:
    tokens = token_level_rewards[response_mask > 0]
    return (token_level_rewards - tokens.mean()) / tokens.std() * response_mask, token_level_rewards


def failing(token_level_rewards: torch.Tensor) -> Tensors:
    return token_level_rewards.undefined, token_level_rewards


OWN_ESTIMATORS: list[tuple[Callable[..., Tensors], dict[str, Any], str]] = [
    (mean_baseline, {}, ONE_SAMPLE),
    (mean_baseline, {}, f"{LOSS}=gmpo {SEQUENCE_MEAN}"),
    (mean_baseline, {}, CRITIC),
    (mean_baseline, {}, f"{NO_KL} {UPDATE_REF}"),
    (reward_to_go, {}, f"{LOSS}=gmpo"),
    (reward_to_go, {}, ONE_SAMPLE),
    (equal_everywhere, {}, ONE_SAMPLE),
    (equal_everywhere, {"compares": "samples"}, ONE_SAMPLE),
    (equal_everywhere, {}, f"{LOSS}=gmpo {SEQUENCE_MEAN}"),
    (equal_everywhere, {"per_token": True}, f"{LOSS}=gmpo {SEQUENCE_MEAN}"),
    (equal_everywhere, {}, ZERO_VARIANCE),
    (equal_everywhere, {"compares": "nothing"}, ZERO_VARIANCE),
    (critic_baseline, {}, ""),
    (critic_baseline, {}, CRITIC),
    (optional_values, {}, CRITIC),
    (any_input, {}, CRITIC),
    (reference_penalty, {}, f"{NO_KL} {UPDATE_REF}"),
    (component_sum, {}, KL_IN_REWARD),
    (whitened, {}, NORMALIZE),
    (failing, {}, ""),
]


def token_loss(log_probs: torch.Tensor, *_: Any) -> tuple[torch.Tensor, float]:
    return -log_probs, 0.0


def no_metrics(log_probs: torch.Tensor, *_: Any) -> torch.Tensor:
    return log_probs


OWN_LOSSES: list[tuple[Callable[..., Any], dict[str, Any], str]] = [
    (token_loss, {}, TOKEN_WEIGHTS),
    (token_loss, {"whole_batch": True}, TOKEN_WEIGHTS),
    (token_loss, {"reads_rollout_logprobs": True}, TOKEN_WEIGHTS),
    (token_loss, {}, f"{ESTIMATOR}=reinforce++"),
    (token_loss, {"per_sequence": True}, f"{ESTIMATOR}=reinforce++"),
    (token_loss, {"reads_eps_clip": False, "loss_reduction": "prompt_mean"}, f"{ALGORITHM}.eps_clip_high=0.3"),
    (no_metrics, {}, ""),
]


@contextmanager
def registered(register: Callable[..., Any], function: Callable[..., Any], **traits: Any) -> Iterator[None]:
    """Register a function as `mine`."""
    register("mine", **traits)(function)
    try:
        yield
    finally:
        (ADVANTAGE_ESTIMATORS if register is register_advantage_estimator else POLICY_LOSSES).unregister("mine")


def test_own_functions_obey_the_rules(pytestconfig: pytest.Config) -> None:
    printed = {}
    for register, setting, cases in (
        (register_advantage_estimator, MINE, OWN_ESTIMATORS),
        (register_policy_loss, MY_LOSS, OWN_LOSSES),
    ):
        for function, traits, overrides in cases:
            declared = "".join(f" {name}={value}" for name, value in traits.items())
            with registered(register, function, **traits):
                printed[f"{function.__name__}{declared}: {overrides}".rstrip(": ")] = describe(f"{setting} {overrides}")
    golden.compare("algorithms/own_functions", printed, pytestconfig)


@pytest.mark.parametrize(("function", "is_read"), [(reference_penalty, True), (optional_reference, False)])
def test_the_reference_is_read_by_an_own_estimator_that_requires_it(
    function: Callable[..., Tensors], is_read: bool
) -> None:
    with registered(register_advantage_estimator, function):
        assert reads_reference(load(f"{MINE} {NO_KL}").trainer.algorithm) == is_read


def test_problems_of_functions_and_settings_are_in_one_error() -> None:
    overrides = f"{MINE} {MY_LOSS} trainer.policy_mini_batch_size=48"
    with (
        registered(register_advantage_estimator, failing),
        registered(register_policy_loss, no_metrics),
        pytest.raises(ConfigError) as caught,
    ):
        validate_cfg(OmegaConf.from_dotlist(overrides.split()), ALGORITHM_RULES)
    text = str(caught.value)
    assert text.startswith("3 problems in the configuration:")
    for words in ("=48 must divide", "=mine failed on an example batch: AttributeError", "=mine returned a tensor"):
        assert words in text
