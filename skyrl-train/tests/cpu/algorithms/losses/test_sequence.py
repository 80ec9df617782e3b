"""Sequence-level losses against a loop in plain Python, and VESPO against values computed by hand."""

import math

import pytest
import torch
from train_kit.losses import score

from skyrl_train.algorithms.losses import sequence_ratio
from skyrl_train.config.algorithm import AlgorithmConfig, VespoConfig

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


def test_the_ratio_of_a_trajectory_is_the_geometric_mean_over_its_trained_tokens() -> None:
    log_ratio = torch.tensor([[0.1, 0.3, 9.0], [math.log(2.0), 9.0, math.log(8.0)], [math.nan, 9.0, 9.0]])
    mask = torch.tensor([[1.0, 1.0, 0.0], [1.0, 0.0, 1.0], [0.0, 0.0, 0.0]])
    assert sequence_ratio(log_ratio, mask).squeeze(-1).tolist() == pytest.approx([1.221403, 4.0, 1.0])
    ratio = sequence_ratio(torch.tensor([[500.0, 500.0], [-500.0, -500.0]]), torch.ones(2, 2))
    assert ratio.squeeze(-1).tolist() == pytest.approx([math.exp(10), 0.0])
