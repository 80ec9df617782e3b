"""Names and calling conventions of SkyRL that scripts rely on."""

import torch

from skyrl_train.algorithms.advantages import grpo
from skyrl_train.algorithms.losses import clipped_surrogate
from skyrl_train.compat.skyrl import algorithms as ppo_utils
from skyrl_train.compat.skyrl.algorithms import reduce_loss
from skyrl_train.config.algorithm import AlgorithmConfig


def test_advantages_of_a_registered_estimator_and_their_normalization() -> None:
    rewards, mask = torch.tensor([[0.0, 1.0], [0.0, 3.0]]), torch.ones(2, 2)
    inputs = {"token_level_rewards": rewards, "response_mask": mask, "index": ["a", "a"]}
    expected = grpo(**inputs, grpo_norm_by_std=False)
    config = AlgorithmConfig(grpo_norm_by_std=False)
    computed = ppo_utils.compute_advantages_and_returns(**inputs, adv_estimator="grpo", config=config, values=None)
    torch.testing.assert_close(computed, expected)
    batch = ppo_utils.normalize_advantages_dict({"advantages": computed[0], "loss_mask": mask})
    torch.testing.assert_close(batch["advantages"], torch.tensor([[-1.0, -1.0], [1.0, 1.0]]))


def test_a_loss_can_be_called_without_a_mask_and_reduced() -> None:
    log_probs, old = torch.tensor([[-1.0, -2.0]]), torch.tensor([[-1.0, -2.0]])
    loss, metrics = clipped_surrogate(log_probs, old, torch.tensor([[1.0, 3.0]]), AlgorithmConfig())
    assert reduce_loss(loss, None, "token_mean").item() == -2.0
    assert metrics["ppo_clip_ratio"].sum() == 0
