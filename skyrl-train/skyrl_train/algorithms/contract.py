"""Whether an estimator or a loss keeps its contract, seen on a few made-up tokens before a run starts."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from skyrl_train.algorithms.registry import AdvantageEstimator, PolicyLoss, named_inputs, required_inputs
from skyrl_train.config.algorithm import AlgorithmConfig
from skyrl_train.errors import ConfigError

ALWAYS_THERE = frozenset(
    {"token_level_rewards", "response_mask", "index", "config", "gamma", "lambd", "grpo_norm_by_std"}
)
"""What every estimator is given."""

ON_DEMAND = frozenset({"old_log_probs", "ref_log_probs", "entropies", "sum_pi_squared", "greedy_rewards"})
"""What is computed when an estimator requires it."""

FROM_CRITIC, FROM_ENVIRONMENT = "values", "reward_components"
INPUTS = ALWAYS_THERE | ON_DEMAND | {FROM_CRITIC, FROM_ENVIRONMENT}


def check_advantage_estimator(estimator: AdvantageEstimator, config: AlgorithmConfig, *, has_critic: bool) -> None:
    """Raise ConfigError if something it requires will not be there, or if it does not return two tensors (B, R)."""
    key = f"trainer.algorithm.advantage_estimator={config.advantage_estimator}"
    required = required_inputs(estimator)
    if unknown := sorted(required - INPUTS):
        raise ConfigError(
            f"{key} requires {', '.join(unknown)}, which no run provides; give it a default, or take one of "
            f"{', '.join(sorted(INPUTS))}"
        )
    if FROM_CRITIC in required and not has_critic:
        raise ConfigError(f"{key} needs the values of a critic, and there is none; set trainer.critic.model.path")
    outputs = _call(key, lambda: estimator(**named_inputs(estimator, _some_inputs(config, required))))
    if not (isinstance(outputs, tuple) and len(outputs) == 2 and all(_has_shape(x, (2, 3)) for x in outputs)):
        raise ConfigError(
            f"{key} returned {_describe(outputs)} for rewards of shape (2, 3); return advantages and returns, both of "
            "the shape of the rewards"
        )


def returns_scalar(loss: PolicyLoss, config: AlgorithmConfig) -> bool:
    """Whether a policy loss reduces by itself; ConfigError if it returns neither a scalar nor a loss for each token."""
    key = f"trainer.algorithm.policy_loss_type={config.policy_loss_type}"
    log_probs = torch.tensor([[-1.0, -0.5, -2.0], [-0.1, -1.5, -1.0]], requires_grad=True)
    old = log_probs.detach()
    advantages, mask = torch.tensor([[1.0, 1.0, 0.0], [-1.0, -1.0, -1.0]]), torch.tensor([[1.0, 1, 0], [1, 1, 1]])
    outputs = _call(key, lambda: loss(log_probs, old, advantages, config, mask, old))
    if not (isinstance(outputs, tuple) and len(outputs) == 2 and (_has_shape(outputs[0], (2, 3), ()))):
        raise ConfigError(
            f"{key} returned {_describe(outputs)} for log-probs of shape (2, 3); return the loss of each token, or of "
            "the whole, and metrics beside it"
        )
    return outputs[0].ndim == 0


def _some_inputs(config: AlgorithmConfig, required: Iterable[str]) -> dict[str, Any]:
    """Two trajectories of one prompt, three tokens each; the second ends early."""
    tokens = torch.tensor([[-0.5, -1.0, -0.2], [-0.3, -0.7, 0.0]])
    mask = torch.tensor([[1.0, 1.0, 1.0], [1.0, 1.0, 0.0]])
    of_tokens = dict.fromkeys(("old_log_probs", "ref_log_probs", "values"), tokens)
    of_tokens |= {"entropies": -tokens, "sum_pi_squared": tokens.exp()}
    optional: dict[str, Any] = of_tokens | {
        "greedy_rewards": torch.zeros(2),
        "reward_components": {name: torch.tensor([1.0, 0.0]) for name in config.gdpo.weights or ("reward",)},
    }
    return {
        "token_level_rewards": torch.tensor([[0.0, 0.0, 1.0], [0.0, 0.0, 0.0]]),
        "response_mask": mask,
        "index": ["prompt", "prompt"],
        **hyperparameters(config),
        **{name: optional[name] for name in required if name in optional},
    }


def hyperparameters(config: AlgorithmConfig) -> dict[str, Any]:
    """The settings that every estimator is given."""
    return {
        "config": config,
        "gamma": config.gamma,
        "lambd": config.lambd,
        "grpo_norm_by_std": config.grpo_norm_by_std,
    }


def _call(key: str, call: Any) -> Any:
    try:
        return call()
    except ConfigError:
        raise
    except Exception as error:  # the boundary to a function of the user's own
        raise ConfigError(f"{key} failed on a made-up example: {type(error).__name__}: {error}") from error


def _has_shape(value: object, *shapes: tuple[int, ...]) -> bool:
    return isinstance(value, torch.Tensor) and tuple(value.shape) in shapes


def _describe(outputs: object) -> str:
    values = outputs if isinstance(outputs, tuple) else (outputs,)
    return ", ".join(
        f"a tensor of shape {tuple(v.shape)}" if isinstance(v, torch.Tensor) else type(v).__name__ for v in values
    )
