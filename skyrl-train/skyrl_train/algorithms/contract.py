"""Whether an estimator or a loss keeps its contract, seen on a few made-up tokens before a run starts."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch

from skyrl_train.algorithms.inputs import FROM_CRITIC, INPUTS, named_inputs, required_inputs, settings
from skyrl_train.algorithms.registry import AdvantageEstimator, PolicyLoss, call_policy_loss
from skyrl_train.config.algorithm import AlgorithmConfig
from skyrl_train.errors import ConfigError

RESERVED_METRICS = frozenset(
    {"policy_loss", "final_loss", "policy_kl", "policy_entropy", "policy_lr", "grad_norm", "skipped_updates"}
)
"""What the trainer itself logs of an update."""


def check_advantage_estimator(estimator: AdvantageEstimator, config: AlgorithmConfig, *, has_critic: bool) -> None:
    """Raise ConfigError if something it requires will not be there, or if it does not return two tensors (B, R)."""
    key = f"trainer.algorithm.advantage_estimator={config.advantage_estimator}"
    required = required_inputs(estimator)
    if unknown := sorted(required - INPUTS):
        raise ConfigError(
            f"{key} requires {', '.join(unknown)}, which no run provides; give it a default, or take one of "
            f"{', '.join(sorted(INPUTS))}"
        )
    if FROM_CRITIC & required and not has_critic:
        raise ConfigError(
            f"{key} needs the values of a critic, and there is none; set trainer.critic.model.path, or give the "
            "argument `values` a default of None if it can do without"
        )
    outputs = _call(key, lambda: estimator(**named_inputs(estimator, _some_inputs(config, required))))
    if not (isinstance(outputs, tuple) and len(outputs) == 2 and all(_has_shape(x, (2, 3)) for x in outputs)):
        raise ConfigError(
            f"{key} returned {_describe(outputs)} for rewards of shape (2, 3); return advantages and returns, both of "
            "the shape of the rewards"
        )


def check_policy_loss(loss: PolicyLoss, config: AlgorithmConfig) -> bool:
    """Whether a policy loss reduces to a scalar by itself.

    Raises:
        ConfigError: it returns neither a scalar nor a loss for each token, metrics that cannot be logged, or a scalar
            where the configuration weighs single tokens.
    """
    key = f"trainer.algorithm.policy_loss_type={config.policy_loss_type}"
    log_probs = torch.tensor([[-1.0, -0.5, -2.0], [-0.1, -1.5, -1.0]], requires_grad=True)
    old = log_probs.detach()
    advantages, mask = torch.tensor([[1.0, 1.0, 0.0], [-1.0, -1.0, -1.0]]), torch.tensor([[1.0, 1, 0], [1, 1, 1]])
    outputs = _call(key, lambda: call_policy_loss(loss, log_probs, old, advantages, config, mask, old))
    if not (isinstance(outputs, tuple) and len(outputs) == 2 and (_has_shape(outputs[0], (2, 3), ()))):
        raise ConfigError(
            f"{key} returned {_describe(outputs)} for log-probs of shape (2, 3); return the loss of each token, or of "
            "the whole, and metrics beside it"
        )
    _check_metrics(key, outputs[1])
    is_scalar = outputs[0].ndim == 0
    if is_scalar and (factors := _factors_on_tokens(config)):
        raise ConfigError(
            f"{key} returns a scalar, of which {' and '.join(factors)} cannot weigh single tokens; return the loss of "
            "each token, or leave them out"
        )
    return is_scalar


def _check_metrics(key: str, metrics: object) -> None:
    """The share of clipped tokens as a number, or numbers and tensors by name."""
    if not isinstance(metrics, dict):
        metrics = {"ppo_clip_ratio": metrics}
    for name, value in metrics.items():
        if not (isinstance(value, int | float) or _has_shape(value, (2, 3), ())):
            raise ConfigError(
                f"{key} returned {_describe(value)} as metric {name!r}; return a number, or one for each token, and no "
                "metrics as {}"
            )
        if name in RESERVED_METRICS:
            raise ConfigError(f"{key} returned a metric {name!r}, which the trainer logs itself; take another name")


def _factors_on_tokens(config: AlgorithmConfig) -> list[str]:
    """The settings under `trainer.algorithm` that multiply the loss of single tokens."""
    is_on = {
        "off_policy_correction": config.off_policy_correction.is_on,
        "off_policy_sequence_mask_threshold": config.off_policy_sequence_mask_threshold is not None,
        "top_entropy_quantile": config.top_entropy_quantile < 1,
    }
    return [f"trainer.algorithm.{name}" for name, on in is_on.items() if on]


def _some_inputs(config: AlgorithmConfig, required: Iterable[str]) -> dict[str, Any]:
    """Two trajectories of one prompt, three tokens each; the second ends early."""
    tokens = torch.tensor([[-0.5, -1.0, -0.2], [-0.3, -0.7, 0.0]])
    mask = torch.tensor([[1.0, 1.0, 1.0], [1.0, 1.0, 0.0]])
    computed: dict[str, Any] = dict.fromkeys(("old_log_probs", "ref_log_probs", "values"), tokens)
    computed |= {"entropies": -tokens, "sum_pi_squared": tokens.exp(), "greedy_rewards": torch.zeros(2)}
    return {
        "token_level_rewards": torch.tensor([[0.0, 0.0, 1.0], [0.0, 0.0, 0.0]]),
        "response_mask": mask,
        "index": ["prompt", "prompt"],
        "reward_components": {name: torch.tensor([1.0, 0.0]) for name in config.gdpo.weights or ("reward",)},
        **settings(config),
        **{name: computed[name] for name in required if name in computed},
    }


def _call(key: str, call: Callable[[], Any]) -> Any:
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
