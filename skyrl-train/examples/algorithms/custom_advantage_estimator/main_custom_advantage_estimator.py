"""Train on Catch with a custom advantage estimator.

bash examples/algorithms/custom_advantage_estimator/run_custom_advantage_estimator.sh
"""

from typing import Any

import torch

from examples.catch.main_catch import main
from skyrl_train.algorithms import register_advantage_estimator


@register_advantage_estimator("median_baseline")
def median_baseline(
    token_level_rewards: torch.Tensor, response_mask: torch.Tensor, index: list[str], **_: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return A = S - median_group(S), where S is the sum of a trajectory's rewards. Unlike a mean, a median ignores
    outliers.

    Rewards and mask are (B, R), `index` [B] names each row's prompt. Returns advantages and returns (B, R).
    """
    scores = token_level_rewards.sum(dim=-1)  # (B,)
    groups = {uid: scores[torch.tensor([i == uid for i in index])] for uid in set(index)}
    baseline = torch.stack([groups[uid].median() for uid in index])  # (B,)
    advantages = torch.where(response_mask > 0, (scores - baseline)[:, None], 0.0)
    return advantages, advantages


if __name__ == "__main__":
    main()
