"""Sequence-level losses against a loop in plain Python, and VESPO against values computed by hand."""

from __future__ import annotations

import math
import random

import pytest
import torch
from train_kit.losses import score

from skyrl_train.algorithms.losses import sequence_ratio
from skyrl_train.config.algorithm import AlgorithmConfig
from skyrl_train.config.policy_loss import GmpoConfig, VespoConfig

CONFIG = AlgorithmConfig(eps_clip_low=0.2, eps_clip_high=0.2, gmpo=GmpoConfig(log_ratio_clip=0.2))
FAR_OFF = 9.0  # the log-ratio of a token outside the mask
MASK = [[1.0, 1.0, 0.0]]


def log_probs_of(log_ratios: list[float]) -> tuple[list[list[float]], list[list[float]]]:
    """Return one row of log-probs and old log-probs, with a third token that is not trained."""
    old = [-1.0, -2.0, -10.0]
    return [[o + r for o, r in zip(old, [*log_ratios, FAR_OFF], strict=True)]], [old]


@pytest.mark.parametrize("name", ["gspo", "gspo_token", "luspo", "gmpo"])
def test_a_runaway_trajectory_of_negative_advantage_is_bounded(name: str) -> None:
    scored = score(name, [[-0.5, -0.5]], [[-1.0, -1.0]], old=[[-300.0, -300.0]])
    assert scored.loss[0] == pytest.approx([math.exp(10) * (2 if name == "luspo" else 1)] * 2)
    assert scored.gradient == [[0.0, 0.0]]


@pytest.mark.parametrize("name", ["gspo", "gspo_token"])
def test_per_token_advantages_stay_on_their_tokens(name: str) -> None:
    log_probs, old = log_probs_of([0.04, 0.06])
    ratio = math.exp(0.05)
    scored = score(name, log_probs, [[1.0, -2.0, 0.0]], old=old, mask=MASK)
    assert scored.loss[0][:2] == pytest.approx([-ratio, 2 * ratio])
    assert scored.gradient[0] == pytest.approx([-ratio, 2 * ratio, 0])


@pytest.mark.parametrize(
    ("log_ratios", "advantage", "phi"),
    [
        ([math.log(4), -math.log(2)], 3.0, 0.199148),  # w = 2: 2² e^(3 - 6)
        ([math.log(4), -math.log(2)], -3.0, 1.082682),  # w = 2: 2³ e^(2 - 4)
        ([math.log(0.25), math.log(2)], -1.5, 0.339785),  # w = 1/2: (1/2)³ e^(2 - 1)
        ([math.log(0.25), math.log(2)], 1.5, 1.120422),  # w = 1/2: (1/2)² e^(3 - 3/2)
        ([1.5, -1.5], 2.0, 1.0),
        ([1.5, -1.5], -2.0, 1.0),
        ([700.0, 100.0], 1.0, 0.0),  # w overflows
        ([-700.0, -100.0], -1.0, 0.0),
    ],
)
def test_vespo_weights_by_the_full_ratio_of_the_trajectory(
    log_ratios: list[float], advantage: float, phi: float
) -> None:
    log_probs, old = log_probs_of(log_ratios)
    scored = score("vespo", log_probs, [[advantage] * 3], old=old, mask=MASK)
    assert scored.metrics["vespo_weight"][0][:2] == pytest.approx([phi] * 2, rel=2e-6)
    assert scored.loss[0][:2] == pytest.approx([-phi * advantage * x for x in log_probs[0][:2]], rel=2e-6)
    assert scored.gradient[0] == pytest.approx([-phi * advantage] * 2 + [0], rel=2e-6)


def test_vespo_reads_its_settings_and_counts_zero_as_positive() -> None:
    config = AlgorithmConfig(vespo=VespoConfig(k_pos=1.0, lambda_pos=0.5, k_neg=2.0, lambda_neg=1.5))
    scored = score("vespo", [[-1.0], [-1.0]], [[0.0], [-1.0]], old=[[-2.0], [-2.0]], config=config)
    positive, negative = math.exp(0.5 + 1 - 0.5 * math.e), math.exp(1.5 + 2 - 1.5 * math.e)
    assert scored.metrics["vespo_weight"] == [[pytest.approx(positive)], [pytest.approx(negative)]]


def in_plain_python(name: str, log_ratios: list[float], advantage: float) -> tuple[float, list[float], list[bool]]:
    """Return the loss of one trajectory, its derivative in the log-prob of each token, and the clipped tokens."""
    n, c = len(log_ratios), CONFIG.gmpo.log_ratio_clip
    if name == "gmpo":  # clips tokens in the direction of their advantage
        kept = [r < c if advantage > 0 else r > -c for r in log_ratios]
        bound = c if advantage > 0 else -c
        mean = sum(r if keep else bound for r, keep in zip(log_ratios, kept, strict=True)) / n
        gradient = [-advantage * math.exp(mean) / n * keep for keep in kept]
        return -advantage * math.exp(mean), gradient, [not keep for keep in kept]
    ratio, scale = math.exp(sum(log_ratios) / n), n if name == "luspo" else 1
    is_clipped = (advantage > 0 and ratio > 1.2) or (advantage < 0 and ratio < 0.8)
    if is_clipped:
        return -advantage * (1.2 if advantage > 0 else 0.8) * scale, [0.0] * n, [True] * n
    return -advantage * ratio * scale, [-advantage * ratio / n * scale] * n, [False] * n


@pytest.mark.parametrize("name", ["gspo", "gspo_token", "luspo", "gmpo"])
def test_rows_of_many_lengths_against_a_loop(name: str) -> None:
    random_source = random.Random(0)
    lengths = [random_source.randint(1, 5) for _ in range(60)]
    old = [[random_source.uniform(-3, -1) for _ in range(5)] for _ in lengths]
    log_probs = [[o + random_source.gauss(0, 0.5) for o in row] for row in old]
    advantages = [[random_source.gauss(0, 1)] * 5 for _ in lengths]
    mask = [[1.0] * n + [0.0] * (5 - n) for n in lengths]
    scored = score(name, log_probs, advantages, old=old, mask=mask, config=CONFIG)
    n_clipped = 0
    for i, n in enumerate(lengths):
        log_ratios = [log_probs[i][t] - old[i][t] for t in range(n)]
        loss, gradient, is_clipped = in_plain_python(name, log_ratios, advantages[i][0])
        assert scored.loss[i][:n] == pytest.approx([loss] * n)
        assert scored.gradient[i] == pytest.approx([n * g for g in gradient] + [0] * (5 - n))
        assert scored.metrics["ppo_clip_ratio"][i][:n] == is_clipped
        n_clipped += any(is_clipped)
    assert 5 < n_clipped < 55


def test_the_ratio_of_a_trajectory_is_the_geometric_mean_over_its_trained_tokens() -> None:
    log_ratio = torch.tensor([[0.1, 0.3, 9.0], [math.log(2.0), 9.0, math.log(8.0)], [math.nan, 9.0, 9.0]])
    mask = torch.tensor([[1.0, 1.0, 0.0], [1.0, 0.0, 1.0], [0.0, 0.0, 0.0]])
    assert sequence_ratio(log_ratio, mask).squeeze(-1).tolist() == pytest.approx([1.221403, 4.0, 1.0])


def test_the_ratio_of_a_trajectory_never_overflows() -> None:
    ratio = sequence_ratio(torch.tensor([[500.0, 500.0], [-500.0, -500.0]]), torch.ones(2, 2))
    assert ratio.squeeze(-1).tolist() == pytest.approx([math.exp(10), 0.0])
