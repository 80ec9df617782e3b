import pickle
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from train_kit import golden

from skyrl_train.algorithms.contract import (
    RESERVED_METRICS,
    check_advantage_estimator,
    check_policy_loss,
    resolve_policy_loss,
)
from skyrl_train.algorithms.inputs import named_inputs, required_inputs
from skyrl_train.algorithms.losses import clipped_surrogate
from skyrl_train.algorithms.registry import ADVANTAGE_ESTIMATORS, POLICY_LOSSES, LossTraits
from skyrl_train.config.algorithm import AlgorithmConfig, OffPolicyCorrectionConfig
from skyrl_train.errors import ConfigError

CONFIG = AlgorithmConfig(advantage_estimator="mine", policy_loss_type="mine")
Tensors = tuple[torch.Tensor, torch.Tensor]


@pytest.mark.parametrize("name", ADVANTAGE_ESTIMATORS.list_available())
def test_every_estimator_meets_its_contract(name: str) -> None:
    check_advantage_estimator(ADVANTAGE_ESTIMATORS.get(name), CONFIG)


def test_an_estimator_in_skyrls_form_is_accepted() -> None:
    def mine(
        token_level_rewards: torch.Tensor, response_mask: torch.Tensor, index: Any, values: Any = None, **kwargs: Any
    ) -> Tensors:
        assert kwargs["gamma"] == 1.0
        assert kwargs["grpo_norm_by_std"]
        return token_level_rewards * response_mask, token_level_rewards * response_mask

    check_advantage_estimator(mine, CONFIG)


def test_an_estimator_is_called_with_the_inputs_in_its_signature() -> None:
    def few(token_level_rewards: int, index: int) -> Any: ...
    def optional(token_level_rewards: int, values: int = 0) -> Any: ...
    def everything(index: int, **_: Any) -> Any: ...

    available = {"token_level_rewards": 1, "index": 2, "gamma": 3}
    assert named_inputs(few, available) == {"token_level_rewards": 1, "index": 2}
    assert named_inputs(optional, available) == {"token_level_rewards": 1}
    assert named_inputs(everything, available) == available
    assert required_inputs(few) == {"token_level_rewards", "index"}
    assert required_inputs(optional) == {"token_level_rewards"}
    assert required_inputs(everything) == {"index"}


def unknown_input(token_level_rewards: torch.Tensor, verifier_scores: torch.Tensor) -> Tensors:
    return token_level_rewards, verifier_scores


def failing(token_level_rewards: torch.Tensor, **_: Any) -> Tensors:
    return token_level_rewards.undefined, token_level_rewards


def without_setting(token_level_rewards: torch.Tensor, config: AlgorithmConfig, **_: Any) -> Tensors:
    return token_level_rewards * config.custom["tau"], token_level_rewards


ESTIMATORS: dict[str, Callable[..., Any]] = {
    "an input that no run provides": unknown_input,
    "an error": failing,
    "a custom setting that is not set": without_setting,
    "one tensor": lambda **_: torch.zeros(2, 3),
    "rows in place of tokens": lambda **_: (torch.zeros(2), torch.zeros(2)),
    "nothing": lambda **_: None,
}
LOSSES: dict[str, Callable[..., Any]] = {
    "one tensor": lambda *_: torch.zeros(2, 3),
    "rows in place of tokens": lambda *_: (torch.zeros(2), {}),
    "a number": lambda *_: (0.0, {}),
    "a custom setting that is not set": lambda *inputs: (inputs[0] * inputs[3].custom["negative_share"], {}),
    "no metrics": lambda log_probs, *_: (log_probs, None),
    "a metric of rows": lambda log_probs, *_: (log_probs, {"mine": torch.zeros(2)}),
    "a metric of text": lambda log_probs, *_: (log_probs, {"mine": "high"}),
}


def test_functions_that_break_the_contract_are_refused(pytestconfig: pytest.Config) -> None:
    printed = {}
    for kind, functions, check in (
        ("estimator", ESTIMATORS, check_advantage_estimator),
        ("loss", LOSSES, check_policy_loss),
    ):
        for what, function in functions.items():
            printed[f"{kind}: {what}"] = [golden.catch(ConfigError, partial(check, function, CONFIG))]
    golden.compare("algorithms/contract", printed, pytestconfig)


@pytest.mark.parametrize("name", POLICY_LOSSES.list_available())
def test_every_loss_returns_one_value_per_token(name: str) -> None:
    assert not check_policy_loss(POLICY_LOSSES.get(name), CONFIG).reduces


def test_a_metric_with_a_reserved_name_is_refused() -> None:
    for name in RESERVED_METRICS:
        with pytest.raises(ConfigError, match=rf"=mine returned a metric '{name}', which the trainer logs itself"):
            check_policy_loss(lambda log_probs, *_, name=name: (log_probs, {name: 0.0}), CONFIG)


@pytest.mark.parametrize(
    "settings",
    [
        {"off_policy_correction": OffPolicyCorrectionConfig(tis_ratio_type="token")},
        {"off_policy_sequence_mask_threshold": 0.1},
        {"top_entropy_quantile": 0.5},
    ],
    ids=lambda settings: next(iter(settings)),
)
def test_settings_that_weight_tokens_refuse_a_scalar_loss(settings: dict[str, Any]) -> None:
    config = AlgorithmConfig(policy_loss_type="mine", **settings)
    with pytest.raises(ConfigError, match=rf"returns a scalar, but trainer\.algorithm\.{next(iter(settings))}"):
        check_policy_loss(lambda log_probs, *_: (log_probs.mean(), 0.0), config)
    assert not check_policy_loss(lambda log_probs, *_: (log_probs, 0.0), config).reduces


INPUTS = tuple(torch.full((2, 3), float(n)) for n in range(3))


def call_resolved(function: Any) -> Any:
    """Resolve a loss function and call it; return its loss and metrics."""
    mask, rollout = torch.ones(2, 3), torch.zeros(2, 3)
    return check_policy_loss(function, CONFIG)(*INPUTS, CONFIG, mask, rollout)


def test_a_loss_receives_as_many_arguments_as_it_accepts() -> None:
    def three(log_probs: Any, old_log_probs: Any, advantages: Any) -> Any:
        return log_probs, {"old": old_log_probs, "advantages": advantages}

    def four(log_probs: Any, old_log_probs: Any, advantages: Any, config: Any) -> Any:
        assert config is CONFIG
        return log_probs, {}

    def five(log_probs: Any, old_log_probs: Any, advantages: Any, config: Any, loss_mask: Any = None) -> Any:
        return log_probs, {"mask": loss_mask}

    def variadic(*inputs: Any) -> Any:
        assert len(inputs) == 6
        return inputs[0], 0.0

    loss, metrics = call_resolved(three)
    assert loss is INPUTS[0]
    assert [value.unique().tolist() for value in metrics.values()] == [[1.0], [2.0]]
    assert call_resolved(four)[1] == {}
    assert call_resolved(five)[1]["mask"].tolist() == [[1.0] * 3] * 2
    assert call_resolved(variadic)[1].keys() == {"ppo_clip_ratio"}


@pytest.mark.parametrize(
    "metrics", [0.25, {"ppo_clip_ratio": torch.tensor(0.25)}, {"ppo_clip_ratio": INPUTS[0] + 0.25}]
)
def test_metrics_are_returned_as_detached_tensors_by_name(metrics: Any) -> None:
    def mine(log_probs: torch.Tensor, *_: Any) -> Any:
        scaled = (
            {name: value * log_probs.exp() for name, value in metrics.items()} if isinstance(metrics, dict) else 0.25
        )
        return log_probs, scaled

    log_probs = torch.zeros(2, 3, requires_grad=True)
    loss, measured = check_policy_loss(mine, CONFIG)(log_probs, *INPUTS[1:], CONFIG, torch.ones(2, 3), None)
    assert loss is log_probs
    assert measured["ppo_clip_ratio"].tolist() == [[0.25] * 3] * 2
    assert not measured["ppo_clip_ratio"].requires_grad


def test_a_loss_has_batch_scope_if_it_returns_a_scalar_or_declares_it() -> None:
    assert check_policy_loss(clipped_surrogate, CONFIG).scope == "token"
    assert check_policy_loss(clipped_surrogate, CONFIG, LossTraits(whole_batch=True)).scope == "batch"
    assert check_policy_loss(lambda log_probs, *_: (log_probs.mean(), 0.0), CONFIG).scope == "batch"
    for name, scope in (("regular", "token"), ("kl_cov", "batch")):
        resolved = resolve_policy_loss(AlgorithmConfig(policy_loss_type=name))
        assert resolved.scope == scope
        assert pickle.loads(pickle.dumps(resolved)) == resolved
