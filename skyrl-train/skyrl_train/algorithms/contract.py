"""Check estimators and policy losses on an example batch before a run starts."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import cache
from typing import Any, Literal

from skyrl_train.algorithms.inputs import INPUTS, collect_settings, named_inputs, required_inputs
from skyrl_train.algorithms.off_policy import ROLLOUT_GAP_METRICS
from skyrl_train.algorithms.registry import (
    ADVANTAGE_ESTIMATORS,
    POLICY_LOSSES,
    AdvantageEstimator,
    Comparison,
    EstimatorTraits,
    LossTraits,
    PolicyLoss,
)
from skyrl_train.config.algorithm import AlgorithmConfig
from skyrl_train.errors import ConfigError
from skyrl_train.lazy import torch

RESERVED_METRICS = frozenset(
    {"policy_loss", "final_loss", "policy_kl", "policy_entropy", "policy_lr", "grad_norm", "skipped_updates"}
).union(ROLLOUT_GAP_METRICS)
"""Metrics that the trainer itself logs for each update, so a loss cannot use their names."""


@cache
def example_mask() -> torch.Tensor:
    """Return the mask of sampled tokens (4, 6) of the example: two prompts, two trajectories each, some multi-turn."""
    return torch.tensor([[1.0, 1, 0, 1, 1, 0], [1, 1, 1, 0, 1, 1], [1, 0, 1, 0, 0, 0], [1, 1, 1, 1, 1, 1]])


@dataclass(frozen=True, slots=True)
class ResolvedPolicyLoss:
    """A policy loss with a uniform signature and return type. It can be pickled if `function` can."""

    function: Callable[..., tuple[torch.Tensor, Any]]
    traits: LossTraits
    n_arguments: int
    """Number of arguments, of the six in `__call__`, that `function` accepts."""
    reduces: bool
    """True if it returns a scalar for the whole mini-batch instead of one loss per token."""

    @property
    def scope(self) -> Literal["token", "batch"]:
        """`batch` for a loss that must see the whole mini-batch in one call, else `token`."""
        return "batch" if self.reduces or self.traits.whole_batch else "token"

    def __call__(
        self,
        log_probs: torch.Tensor,
        old_log_probs: torch.Tensor,
        advantages: torch.Tensor,
        config: AlgorithmConfig,
        loss_mask: torch.Tensor,
        rollout_logprobs: torch.Tensor | None,
    ) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        """Return the loss of each token (B, R), or a scalar if it `reduces`, and detached metrics (B, R) by name.

        A metric that is one number is repeated on every token, so its mean is that number.
        """
        inputs = (log_probs, old_log_probs, advantages, config, loss_mask, rollout_logprobs)
        loss, metrics = self.function(*inputs[: self.n_arguments])
        on_tokens = {}
        for name, value in _by_name(metrics).items():
            tensor = torch.as_tensor(value, dtype=log_probs.dtype, device=log_probs.device)
            on_tokens[name] = tensor.detach().expand_as(log_probs)
        return loss, on_tokens


def check_advantage_estimator(estimator: AdvantageEstimator, config: AlgorithmConfig) -> None:
    """Raise ConfigError if an estimator requires an unknown input, or does not return two tensors (B, R)."""
    if unknown := sorted(required_inputs(estimator) - INPUTS):
        raise ConfigError(
            f"{_estimator_key(config)} requires {', '.join(unknown)}, which no run provides; give it a default, or use "
            f"one of {', '.join(sorted(INPUTS))}"
        )
    mask = example_mask()
    outputs = _estimate(estimator, config, _noise())
    if not (isinstance(outputs, tuple) and len(outputs) == 2 and all(_has_shape(x, mask.shape) for x in outputs)):
        raise ConfigError(
            f"{_estimator_key(config)} returned {_describe(outputs)} for rewards of shape {tuple(mask.shape)}; return "
            "advantages and returns, both with the shape of the rewards"
        )


def estimator_traits(config: AlgorithmConfig) -> EstimatorTraits:
    """Return the traits of the configured estimator. Undeclared traits are observed on the example.

    Raises:
        ConfigError: the estimator is not registered, or fails on the example.
    """
    name = config.advantage_estimator
    declared = ADVANTAGE_ESTIMATORS.traits(name)
    values = asdict(declared)
    if None not in values.values():
        return declared
    observed = asdict(observe_estimator(ADVANTAGE_ESTIMATORS.get(name), config))
    return EstimatorTraits(**{key: observed[key] if value is None else value for key, value in values.items()})


def observe_estimator(estimator: AdvantageEstimator, config: AlgorithmConfig) -> EstimatorTraits:
    """Return the traits that an estimator shows on the example with random rewards.

    Three probes show what it compares:

    1. Change the baseline and all rewards but the first trajectory's. If the first advantages stay, it is `nothing`.
    2. Give all trajectories of a prompt the same total. Advantages other than 0 come from a `baseline`.
    3. Move parts of these totals to other tokens. Advantages other than 0 compare `parts`, else `samples`.
    """

    def advantages(rewards: torch.Tensor, baseline: float = 0.0) -> torch.Tensor:
        return _estimate(estimator, config, rewards, baseline)[0]

    def is_not_zero(values: torch.Tensor) -> bool:
        return bool((values[mask > 0].abs() > 1e-4).any())

    mask = example_mask()
    noise = _noise()
    on_noise = advantages(noise)
    sampled = on_noise[mask > 0]
    others = torch.tensor([[0.0], [1], [1], [1]]) * mask
    # Totals are equal within each prompt: 1 and 1, 0.5 and 0.5. `moved` pays two of them on later tokens.
    equal, moved = torch.zeros_like(mask), torch.zeros_like(mask)
    equal[:, 0] = moved[[0, 1, 2, 3], [0, 4, 0, 3]] = torch.tensor([1.0, 1.0, 0.5, 0.5])
    compares: Comparison = "samples"
    if not sampled.any():
        compares = "baseline"
    elif torch.allclose(advantages(noise + others, baseline=1.0)[0], advantages(noise - others, baseline=-1.0)[0]):
        compares = "nothing"  # the first trajectory's advantages do not depend on the other rewards
    elif is_not_zero(advantages(equal)):
        compares = "baseline"
    elif is_not_zero(advantages(moved)):
        compares = "parts"
    mean_of_row = (on_noise * mask).sum(dim=-1, keepdim=True) / mask.sum(dim=-1, keepdim=True)
    return EstimatorTraits(
        compares=compares,
        per_token=is_not_zero(on_noise - mean_of_row),
        whitens=bool(sampled.mean().abs() < 1e-4 and (sampled.std() - 1).abs() < 1e-3),
    )


def resolve_policy_loss(config: AlgorithmConfig) -> ResolvedPolicyLoss:
    """Look up `trainer.algorithm.policy_loss_type` and return the loss, checked by `check_policy_loss`."""
    name = config.policy_loss_type
    return check_policy_loss(POLICY_LOSSES.get(name), config, POLICY_LOSSES.traits(name))


def check_policy_loss(
    loss: PolicyLoss, config: AlgorithmConfig, traits: LossTraits | None = None
) -> ResolvedPolicyLoss:
    """Call a policy loss on two example trajectories and return it with a uniform signature.

    Raises:
        ConfigError: it returns neither a scalar nor one loss per token, returns metrics that cannot be logged, or
            returns a scalar although the configuration weights single tokens.
    """
    key = f"trainer.algorithm.policy_loss_type={config.policy_loss_type}"
    log_probs = torch.tensor([[-1.0, -0.5, -2.0], [-0.1, -1.5, -1.0]], requires_grad=True)
    old = log_probs.detach()
    advantages, mask = torch.tensor([[1.0, 1.0, 0.0], [-1.0, -1.0, -1.0]]), torch.tensor([[1.0, 1, 0], [1, 1, 1]])
    parameters = inspect.signature(loss).parameters.values()
    n_arguments = sum(p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD) for p in parameters)
    if any(p.kind is p.VAR_POSITIONAL for p in parameters):
        n_arguments = 6
    inputs: tuple[Any, ...] = (log_probs, old, advantages, config, mask, old)
    outputs = _call(key, lambda: loss(*inputs[:n_arguments]))
    if not (isinstance(outputs, tuple) and len(outputs) == 2 and (_has_shape(outputs[0], (2, 3), ()))):
        raise ConfigError(
            f"{key} returned {_describe(outputs)} for log-probs of shape (2, 3); return the loss of each token, or one "
            "for all, and a dict of metrics"
        )
    for name, value in _by_name(outputs[1]).items():
        if not (isinstance(value, int | float) or _has_shape(value, (2, 3), ())):
            raise ConfigError(
                f"{key} returned {_describe(value)} as metric {name!r}; return a number, or one for each token, and no "
                "metrics as {}"
            )
        if name in RESERVED_METRICS:
            raise ConfigError(f"{key} returned a metric {name!r}, which the trainer logs itself; choose another name")
    reduces = outputs[0].ndim == 0
    token_settings = {
        "off_policy_correction": config.off_policy_correction.is_on,
        "off_policy_sequence_mask_threshold": config.off_policy_sequence_mask_threshold is not None,
        "top_entropy_quantile": config.top_entropy_quantile < 1,
    }
    factors = [f"trainer.algorithm.{name}" for name, is_on in token_settings.items() if is_on]
    if reduces and factors:
        raise ConfigError(
            f"{key} returns a scalar, but {' and '.join(factors)} weight single tokens; return the loss of each token, "
            "or remove these settings"
        )
    return ResolvedPolicyLoss(loss, traits or LossTraits(), n_arguments, reduces)


def _by_name(metrics: Any) -> dict[str, Any]:
    """Return metrics by name. As in SkyRL, a single value is the fraction of clipped tokens."""
    return metrics if isinstance(metrics, dict) else {"ppo_clip_ratio": metrics}


def _noise() -> torch.Tensor:
    """Return random rewards (4, 6) on every sampled token."""
    mask = example_mask()
    return torch.rand(mask.shape, generator=torch.Generator().manual_seed(1)) * mask


def _estimate(
    estimator: AdvantageEstimator, config: AlgorithmConfig, rewards: torch.Tensor, baseline: float = 0.0
) -> Any:
    """Call an estimator on the example, with `baseline` added to values and to rewards of greedy rollouts."""
    mask = example_mask()
    random = torch.Generator().manual_seed(0)
    tokens = -torch.rand(mask.shape, generator=random)
    computed: dict[str, Any] = {
        "values": torch.rand(mask.shape, generator=random) + baseline,
        "old_log_probs": tokens,
        "ref_log_probs": tokens - torch.rand(mask.shape, generator=random),
        "entropies": -tokens,
        "sum_pi_squared": tokens.exp(),
        "greedy_rewards": torch.full((len(mask),), 0.25 + baseline),
    }
    first, *others = dict.fromkeys([*config.gdpo.weights, "reward", "format", "length"])
    components = {first: rewards[:, 0]} | dict.fromkeys(others, rewards[:, 1:].sum(dim=-1) / len(others))
    required = required_inputs(estimator)
    inputs = {
        "token_level_rewards": rewards.clone(),
        "response_mask": mask.clone(),
        "index": ["a", "a", "b", "b"],
        "reward_components": components,
        **collect_settings(config),
        **{name: value for name, value in computed.items() if name in required},
    }
    return _call(_estimator_key(config), lambda: estimator(**named_inputs(estimator, inputs)))


def _estimator_key(config: AlgorithmConfig) -> str:
    return f"trainer.algorithm.advantage_estimator={config.advantage_estimator}"


def _call(key: str, call: Callable[[], Any]) -> Any:
    try:
        return call()
    except ConfigError:
        raise
    except Exception as error:  # user code raises anything
        hint = ""
        if isinstance(error, KeyError) and error.args and str(error.args[0]).isidentifier():
            hint = f". If it is a custom setting, set trainer.algorithm.custom.{error.args[0]}"
        raise ConfigError(f"{key} failed on an example batch: {type(error).__name__}: {error}{hint}") from error


def _has_shape(value: object, *shapes: tuple[int, ...]) -> bool:
    return isinstance(value, torch.Tensor) and tuple(value.shape) in shapes


def _describe(outputs: object) -> str:
    values = outputs if isinstance(outputs, tuple) else (outputs,)
    return ", ".join(
        f"a tensor of shape {tuple(v.shape)}" if isinstance(v, torch.Tensor) else type(v).__name__ for v in values
    )
