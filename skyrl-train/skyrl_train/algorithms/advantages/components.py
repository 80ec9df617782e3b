"""An estimator that compares each named component of the reward with the group separately."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from skyrl_train.algorithms.advantages.by_group import group_normalized
from skyrl_train.algorithms.advantages.groups import on_sampled_tokens
from skyrl_train.algorithms.masked import masked_whiten
from skyrl_train.algorithms.registry import register_advantage_estimator
from skyrl_train.config.algorithm import AlgorithmConfig
from skyrl_train.errors import ConfigError
from skyrl_train.lazy import torch


@register_advantage_estimator("gdpo", compares="parts", per_token=False, whitens=True)
def gdpo(
    response_mask: torch.Tensor,
    index: list[str],
    reward_components: Mapping[str, torch.Tensor],
    config: AlgorithmConfig,
    **_: Any,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute group reward-decoupled advantages: normalize each component in its group, add them up, whiten the sum.

    A = whiten(Σ_c w_c · (S_c - mean_group(S_c)) / (std_group(S_c) + 1e-6)), where S_c (B,) is a trajectory's total of
    component c and w_c its weight in `gdpo.weights`, by default 1. GRPO on the sum could not distinguish trajectories
    that earned the same sum in different ways, and a component with a large spread would hide one with a small spread.
    Whitening over the batch's sampled tokens keeps the size of advantages independent of the number of components.
    `token_level_rewards` is not read.

    Source: GDPO (Liu et al., 2026, arXiv:2601.05242).

    Raises:
        ConfigError: there are no components, or `gdpo.weights` names an unknown one.
    """
    weights = config.gdpo.weights
    _check(weights, reward_components)
    # In double precision, because whitening magnifies the rounding of components that cancel.
    total = torch.stack(
        [
            weights.get(name, 1.0) * group_normalized(scores.double(), index)
            for name, scores in reward_components.items()
        ]
    ).sum(dim=0)  # (B,)
    advantages = masked_whiten(on_sampled_tokens(total, response_mask), response_mask)  # (B, R)
    advantages = advantages.to(next(iter(reward_components.values())).dtype)
    return advantages, advantages


def _check(weights: Mapping[str, float], components: Mapping[str, torch.Tensor]) -> None:
    if not components:
        raise ConfigError(
            "trainer.algorithm.advantage_estimator=gdpo needs the components of rewards, and no environment reports "
            'any; return metadata={"reward_components": {name: reward}} from step()'
        )
    unknown = sorted(set(weights) - set(components))
    if unknown:
        raise ConfigError(
            f"trainer.algorithm.gdpo.weights names {', '.join(unknown)}, which no environment reports; "
            f"the components are: {', '.join(sorted(components))}"
        )
