import math

import pytest
import torch
from train_kit.losses import score

from skyrl_train.algorithms.losses import dppo
from skyrl_train.config.algorithm import (
    AlgorithmConfig,
    CispoConfig,
    DppoConfig,
    DroConfig,
    RolloutIsConfig,
    SapoConfig,
)
from skyrl_train.errors import ConfigError


def test_reinforce_and_cross_entropy_ignore_the_ratio() -> None:
    log_probs, advantages, far = [[-0.3, -2.0, -1.0]], [[1.5, -0.5, 0.0]], [[-9.0] * 3]
    reinforce = score("policy_gradient", log_probs, advantages, old=far, rollout=far)
    assert reinforce.loss[0] == pytest.approx([0.45, -1.0, 0.0])
    assert reinforce.gradient[0] == pytest.approx([-1.5, 0.5, 0.0])
    cross_entropy = score("cross_entropy", log_probs, advantages, old=far, rollout=far)
    assert cross_entropy.loss[0] == pytest.approx([0.3, 2.0, 1.0])
    assert cross_entropy.gradient[0] == [-1.0] * 3
    assert reinforce.metrics == cross_entropy.metrics == {}


def test_importance_sampling_never_clips() -> None:
    ratios, advantages = [0.1, 0.1, 10.0, 10.0], [2.0, -2.0, 2.0, -2.0]
    log_probs = [[-5 + math.log(ratio) for ratio in ratios]]
    scored = score("importance_sampling", log_probs, [advantages], old=[[-5.0] * 4])
    assert scored.loss[0] == scored.gradient[0] == pytest.approx([-0.2, 0.2, -20.0, 20.0])
    assert scored.metrics["importance_ratio"][0] == pytest.approx(ratios)


@pytest.mark.parametrize("advantage", [2.0, -2.0])
@pytest.mark.parametrize(
    ("ratio", "weight"), [(0.4, 0.0), (0.6, 0.6), (1.0, 1.0), (2.9, 2.9), (3.1, 0.0)]
)  # the ratio to the engine is what counts; to the old policy it is e
def test_rollout_is_masks_tokens_on_both_sides(advantage: float, ratio: float, weight: float) -> None:
    config = AlgorithmConfig(rollout_is=RolloutIsConfig(ratio_low=0.5, ratio_high=3.0))
    log_prob = -4 + math.log(ratio)
    scored = score("rollout_is", [[log_prob]], [[advantage]], old=[[log_prob - 1]], rollout=[[-4.0]], config=config)
    assert scored.loss == [[pytest.approx(-weight * advantage * log_prob)]]
    assert scored.gradient == [[pytest.approx(-weight * advantage)]]
    assert scored.metrics["masked_token_ratio"] == [[float(weight == 0)]]


def test_rollout_is_requires_rollout_log_probs() -> None:
    with pytest.raises(ConfigError, match=r"policy_loss_type=rollout_is needs .* try importance_sampling"):
        score("rollout_is", [[-1.0]], [[1.0]])


@pytest.mark.parametrize("advantage", [2.0, -2.0])
@pytest.mark.parametrize(("ratio", "weight"), [(0.3, 0.5), (0.7, 0.7), (2.5, 2.5), (4.0, 3.0)])
def test_cispo_clips_the_weight_for_either_sign_of_the_advantage(advantage: float, ratio: float, weight: float) -> None:
    config = AlgorithmConfig(cispo=CispoConfig(cispo_eps_clip_low=0.5, cispo_eps_clip_high=2.0))
    log_prob = -3 + math.log(ratio)
    scored = score("cispo", [[log_prob]], [[advantage]], old=[[-3.0]], config=config)
    assert scored.loss == [[pytest.approx(-weight * advantage * log_prob)]]
    assert scored.gradient == [[pytest.approx(-weight * advantage)]]
    assert scored.metrics["ppo_clip_ratio"] == [[float(weight != ratio)]]


@pytest.mark.parametrize(
    ("ratio", "advantage", "loss", "gradient"),
    [  # the gradient is -4 σ(1 - σ) ρA, with σ(0.5) = 0.622459, σ(0.525) = 0.628317 and σ(-x) = 1 - σ(x)
        (1.5, 1.0, -2.489837, -1.410022),
        (1.5, -1.0, 2.393585, 1.401209),
        (0.5, 1.0, -1.510163, -0.470007),
        (0.5, -1.0, 1.415939, 0.467070),
        (1.0, 2.0, -4.0, -2.0),
        (1.0, -2.0, 3.809524, 2.0),
        (1.5, 0.0, 0.0, 0.0),
    ],
)
def test_sapo_closes_its_gate_smoothly_on_both_sides(
    ratio: float, advantage: float, loss: float, gradient: float
) -> None:
    scored = score("sapo", [[-3 + math.log(ratio)]], [[advantage]], old=[[-3.0]])
    assert scored.loss == [[pytest.approx(loss, abs=2e-6)]]
    assert scored.gradient == [[pytest.approx(gradient, abs=2e-6)]]


def test_the_gate_of_sapo_scales_the_gradient() -> None:
    config = AlgorithmConfig(sapo=SapoConfig(tau_pos=2.0, tau_neg=4.0))
    advantages = [[3.0, 3.0, -3.0, -3.0]]
    log_probs = [[-3 + math.log(ratio) for ratio in (1.7, 1.0, 1.7, 0.2)]]
    gated = score("sapo", log_probs, advantages, old=[[-3.0] * 4], config=config)
    plain = score("importance_sampling", log_probs, advantages, old=[[-3.0] * 4])
    shares = [gate / full for gate, full in zip(gated.gradient[0], plain.gradient[0], strict=True)]
    assert gated.metrics["sapo_gate"][0] == pytest.approx(shares)
    assert shares == pytest.approx([0.634740, 1.0, 0.216152, 0.150527], abs=1e-6)  # 1 / cosh²(τ(ρ - 1) / 2)


@pytest.mark.parametrize(
    ("log_prob", "advantage", "loss", "gradient"),
    [  # -(A log π - 0.1 (log ρ)²) with log ρ = ±0.5, and -(A - 0.2 log ρ)
        (-1.0, 2.0, 2.025, -1.9),
        (-1.0, -2.0, -1.975, 2.1),
        (-2.0, 2.0, 4.025, -2.1),
        (-2.0, -2.0, -3.975, 1.9),
    ],
)
def test_dro_pulls_back_to_the_old_policy(log_prob: float, advantage: float, loss: float, gradient: float) -> None:
    config = AlgorithmConfig(dro=DroConfig(beta=0.2))
    scored = score("dro", [[log_prob]], [[advantage]], old=[[-1.5]], config=config)
    assert scored.loss == [[pytest.approx(loss)]]
    assert scored.gradient == [[pytest.approx(gradient)]]
    assert scored.metrics["dro_penalty"] == [[pytest.approx(0.025)]]


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
