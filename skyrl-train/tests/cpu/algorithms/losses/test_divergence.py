import math

import pytest
import torch
from train_kit.losses import score

from skyrl_train.algorithms.losses import dppo
from skyrl_train.config.algorithm import AlgorithmConfig
from skyrl_train.config.policy_loss import DppoConfig

TV = AlgorithmConfig(dppo=DppoConfig(dppo_type="binary_tv", delta_low=0.1, delta_high=0.2))
KL = AlgorithmConfig(dppo=DppoConfig(dppo_type="binary_kl", delta_low=0.1, delta_high=0.2))


@pytest.mark.parametrize(
    ("config", "mu", "pi", "advantage", "is_kept"),
    [
        (TV, 0.5, 0.69, 1.0, True),
        (TV, 0.5, 0.71, 1.0, False),  # a good token that rose too far
        (TV, 0.5, 0.71, -1.0, True),  # a bad token is pushed back
        (TV, 0.5, 0.41, -1.0, True),
        (TV, 0.5, 0.39, -1.0, False),  # a bad token that fell too far
        (TV, 0.5, 0.29, 1.0, True),  # a good token is pulled back
        (TV, 0.5, 0.29, 0.5, True),
        (TV, 0.5, 0.71, 0.0, True),  # zero advantage
        (TV, 0.5, 0.29, 0.0, True),
        (TV, 0.01, 0.09, 1.0, True),  # nine times as likely, and still rare
        # KL(0.5, 0.75) = 0.143841, KL(0.5, 0.8) = 0.223144, and the same of 0.25, 0.2; KL(0.5, 0.3) = 0.087177
        (KL, 0.5, 0.75, 1.0, True),
        (KL, 0.5, 0.8, 1.0, False),
        (KL, 0.5, 0.8, -1.0, True),
        (KL, 0.5, 0.3, -1.0, True),
        (KL, 0.5, 0.25, -1.0, False),
        (KL, 0.5, 0.2, 1.0, True),
    ],
)
def test_both_signs_on_both_sides_of_the_trust_region(
    config: AlgorithmConfig, mu: float, pi: float, advantage: float, is_kept: bool
) -> None:
    log_pi, weight = math.log(pi), pi / mu if is_kept else 0.0
    scored = score("dppo", [[log_pi]], [[advantage]], old=[[-99.0]], rollout=[[math.log(mu)]], config=config)
    assert scored.loss == [[pytest.approx(-weight * advantage * log_pi)]]
    assert scored.gradient == [[pytest.approx(-weight * advantage)]]
    assert scored.metrics["masked_token_ratio"] == [[float(not is_kept)]]


def test_without_rollout_log_probs_the_old_policy_is_the_reference() -> None:
    log_probs, old = [[math.log(0.6), math.log(0.9)]], [[math.log(0.5)] * 2]
    scored = score("dppo", log_probs, [[1.0, 1.0]], old=old, config=TV)
    assert scored.gradient[0] == pytest.approx([-1.2, 0.0])


@pytest.mark.parametrize("advantage", [1.0, -1.0])
def test_the_weight_of_a_token_is_bounded(advantage: float) -> None:
    scored = score("dppo", [[math.log(0.1)]], [[advantage]], rollout=[[math.log(0.001)]], config=TV)
    assert scored.gradient == [[pytest.approx(-20 * advantage)]]


@pytest.mark.parametrize(
    ("log_mu", "log_pi", "is_kept"),
    [  # single precision rounds probabilities this close to 1 up to it
        (-1e-6, -1e-9, True),  # 1e-6 · log(1e-6 / 1e-9) = 7e-6
        (-1e-6, 0.0, True),
        (-0.01, -1e-8, True),  # 0.01 · log(0.01 / 1e-8) - 0.01 = 0.128
        (0.0, 0.0, True),
        (-0.7, 0.0, False),  # about 0.5 · log(0.5 / tiny)
        (-500.0, -1e-3, False),
    ],
)
def test_the_kl_divergence_of_certain_tokens(log_mu: float, log_pi: float, is_kept: bool) -> None:
    behavior, log_probs = torch.tensor([[log_mu]]), torch.tensor([[log_pi]])
    ones = torch.ones(1, 1)
    loss, metrics = dppo(log_probs, behavior, ones, KL, ones, behavior)
    assert loss.isfinite().all()
    assert metrics["masked_token_ratio"].item() == (not is_kept)
