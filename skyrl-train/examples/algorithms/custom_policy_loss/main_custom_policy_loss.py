"""Train on Catch with a custom policy loss.

bash examples/algorithms/custom_policy_loss/run_custom_policy_loss.sh
"""

import torch

from examples.catch.main_catch import main
from skyrl_train.algorithms import register_policy_loss
from skyrl_train.algorithms.losses import importance_ratio
from skyrl_train.config.algorithm import AlgorithmConfig


@register_policy_loss("soft_clip")
def soft_clip(
    log_probs: torch.Tensor,
    old_log_probs: torch.Tensor,
    advantages: torch.Tensor,
    config: AlgorithmConfig,
    loss_mask: torch.Tensor,
    rollout_logprobs: torch.Tensor | None,
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Return -(1 + w tanh((ρ - 1) / w)) A with ρ = π / π_old: the ratio saturates at 1 ± w instead of being clipped.

    All tensors (B, R), w = `custom.width`. Metric `ratio_distance`: |ρ - 1|.
    """
    width = config.custom["width"]
    distance = importance_ratio(log_probs, old_log_probs) - 1  # (B, R)
    loss = -(1 + width * torch.tanh(distance / width)) * advantages
    return loss, {"ratio_distance": distance.abs()}


if __name__ == "__main__":
    main()
