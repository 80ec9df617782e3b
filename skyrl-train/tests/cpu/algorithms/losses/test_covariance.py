import math

import pytest
import torch
from train_kit.losses import score

from skyrl_train.algorithms.losses.covariance import token_covariance
from skyrl_train.config.algorithm import AlgorithmConfig, ClipCovConfig, KLCovConfig

# Means over the mask are -2 and 0, so the covariances are 1.9, -1.9 | 1.9, -1.9, and 0 on two further tokens.
LOG_PROBS = [[-0.1, -0.1, -50.0, -2.0], [-3.9, -3.9, -2.0, 50.0]]
ADVANTAGES = [[1.0, -1.0, -70.0, 3.0], [-1.0, 1.0, -3.0, 70.0]]
MASK = [[1.0, 1.0, 0.0, 1.0], [1.0, 1.0, 1.0, 0.0]]
HIGH = [(0, 0), (1, 0)]


def clip_cov_config(share: float, **bounds: float) -> AlgorithmConfig:
    return AlgorithmConfig(clip_cov=ClipCovConfig(clip_ratio=share, **bounds))


def marked(rows: list[list[float]]) -> list[tuple[int, int]]:
    return [(i, j) for i, row in enumerate(rows) for j, value in enumerate(row) if value]


@pytest.mark.parametrize(
    ("share", "bounds", "candidates", "n_masked"),
    [
        (2e-4, {}, HIGH, 1),  # a share of less than one token is one
        (0.34, {}, HIGH, 2),  # ⌊0.34 · 6⌋
        (0.45, {"clip_cov_lb": -9.0}, [(0, 0), (0, 1), (0, 3), (1, 0), (1, 1), (1, 2)], 2),  # ⌊2.7⌋
        (1.0, {}, HIGH, 2),  # no more than the candidates
        (1.0, {"clip_cov_lb": 1.95}, [], 0),
        (1.0, {"clip_cov_ub": 1.85}, [], 0),
        (1.0, {"clip_cov_lb": -2.0, "clip_cov_ub": -1.0}, [(0, 1), (1, 1)], 2),
        (0.5, {"clip_cov_lb": -9.0}, [(0, 0), (0, 1), (0, 3), (1, 0), (1, 1), (1, 2)], 3),
    ],
)
def test_clip_cov_masks_a_few_tokens_of_high_covariance(
    share: float, bounds: dict[str, float], candidates: list[tuple[int, int]], n_masked: int
) -> None:
    torch.manual_seed(0)
    scored = score("clip_cov", LOG_PROBS, ADVANTAGES, mask=MASK, config=clip_cov_config(share, **bounds))
    masked = marked(scored.metrics["masked_token_ratio"])
    assert set(masked) <= set(candidates)
    assert len(masked) == n_masked
    for i, j in marked(MASK):
        expected = 0.0 if (i, j) in masked else -ADVANTAGES[i][j]
        assert scored.loss[i][j] == expected
        assert scored.gradient[i][j] == expected


def test_clip_cov_draws_from_all_candidates_with_the_generator_of_torch() -> None:
    def draw(seed: int) -> list[tuple[int, int]]:
        torch.manual_seed(seed)
        scored = score("clip_cov", LOG_PROBS, ADVANTAGES, mask=MASK, config=clip_cov_config(2e-4))
        return marked(scored.metrics["masked_token_ratio"])

    drawn = [draw(seed) for seed in range(12)]
    assert drawn == [draw(seed) for seed in range(12)]
    assert {token for tokens in drawn for token in tokens} == set(HIGH)


@pytest.mark.parametrize(
    ("ratio", "loss", "gradient", "is_clipped", "is_masked"),
    [(1.5, -1.2, 0.0, 1, 0), (0.5, 0.0, 0.0, 0, 1), (1.1, 0.0, 0.0, 0, 1)],
)
def test_clip_cov_does_not_mask_tokens_that_ppo_clips(
    ratio: float, loss: float, gradient: float, is_clipped: float, is_masked: float
) -> None:
    old = [[-0.1 - math.log(ratio), *LOG_PROBS[0][1:]], LOG_PROBS[1]]
    scored = score("clip_cov", LOG_PROBS, ADVANTAGES, old=old, mask=MASK, config=clip_cov_config(1.0))
    assert scored.loss[0][0] == pytest.approx(loss)
    assert scored.gradient[0][0] == pytest.approx(gradient)
    assert scored.metrics["ppo_clip_ratio"][0][0] == is_clipped
    assert scored.metrics["masked_token_ratio"][0][0] == is_masked
    assert scored.metrics["masked_token_ratio"][1][0] == 1


def test_the_covariance_is_detached() -> None:
    log_probs = torch.tensor(LOG_PROBS, requires_grad=True)
    covariance = token_covariance(log_probs, torch.tensor(ADVANTAGES), torch.tensor(MASK))
    assert [covariance[i, j].item() for i, j in marked(MASK)] == pytest.approx([1.9, -1.9, 0.0, 1.9, -1.9, 0.0])
    assert not covariance.requires_grad


# Covariances with means -1.4 and 0.5: 1.95, -1.35 | 0.8, -0.3; log-ratios 0.2, 0.4 | -0.5, -0.1
KL_LOG_PROBS, KL_ADVANTAGES = [[-0.1, -0.5, -50.0], [-3.0, -2.0, 50.0]], [[2.0, -1.0, 70.0], [0.0, 1.0, -70.0]]
KL_OLD, KL_MASK = [[-0.3, -0.9, -1.0], [-2.5, -1.9, -1.0]], [[1.0, 1.0, 0.0], [1.0, 1.0, 0.0]]


@pytest.mark.parametrize(
    ("share", "penalized"),
    [
        (0.2, [(0, 0)]),  # a share of less than one token is one
        (0.5, [(0, 0), (1, 0)]),
        (0.7, [(0, 0), (1, 0)]),  # ⌊0.7 · 4⌋
        (0.75, [(0, 0), (1, 0), (1, 1)]),
        (1.0, [(0, 0), (0, 1), (1, 0), (1, 1)]),
    ],
)
def test_kl_cov_penalizes_the_tokens_of_highest_covariance(share: float, penalized: list[tuple[int, int]]) -> None:
    config = AlgorithmConfig(kl_cov=KLCovConfig(kl_cov_frac=share, ppo_kl_coef=0.7))
    scored = score("kl_cov", KL_LOG_PROBS, KL_ADVANTAGES, old=KL_OLD, mask=KL_MASK, config=config)
    assert marked(scored.metrics["kl_cov_ratio"]) == penalized
    for i, j in marked(KL_MASK):
        log_ratio, advantage = KL_LOG_PROBS[i][j] - KL_OLD[i][j], KL_ADVANTAGES[i][j]
        penalty, slope = (0.7 * abs(log_ratio), math.copysign(0.7, log_ratio)) if (i, j) in penalized else (0.0, 0.0)
        assert scored.loss[i][j] == pytest.approx(-math.exp(log_ratio) * advantage + penalty)
        assert scored.gradient[i][j] == pytest.approx(-math.exp(log_ratio) * advantage + slope)


@pytest.mark.parametrize("name", ["clip_cov", "kl_cov"])
def test_a_mini_batch_without_a_trained_token(name: str) -> None:
    scored = score(name, LOG_PROBS, ADVANTAGES, mask=[[0.0] * 4] * 2)
    zeros = [[0.0] * 4] * 2
    assert scored.gradient == zeros
    assert all(metric == zeros for metric in scored.metrics.values())
