import math

import pytest
from train_kit.losses import score

from skyrl_train.config.algorithm import AlgorithmConfig

CONFIG = AlgorithmConfig(eps_clip_low=0.2, eps_clip_high=0.3, clip_ratio_c=3.0)

CLIPPED = [  # ratio, advantage, loss, gradient, is_clipped. The gradient of -ρA in log π is -ρA, a clip has none
    (0.5, 2.0, -1.0, -1.0, 0),  # a good token that became rarer is still pushed up
    (0.5, -2.0, 1.6, 0.0, 1),  # a bad token is pushed down only to 1 - eps_clip_low
    (1.1, 2.0, -2.2, -2.2, 0),
    (1.1, -2.0, 2.2, 2.2, 0),
    (2.0, 2.0, -2.6, 0.0, 1),  # a good token is pushed up only to 1 + eps_clip_high
    (2.0, -2.0, 4.0, 4.0, 0),  # a bad token that became likelier is still pushed down
    (5.0, 2.0, -2.6, 0.0, 1),
]


@pytest.mark.parametrize(("ratio", "advantage", "loss", "gradient", "is_clipped"), CLIPPED)
@pytest.mark.parametrize("name", ["regular", "dual_clip"])
def test_both_signs_on_both_sides_of_each_clip(
    name: str, ratio: float, advantage: float, loss: float, gradient: float, is_clipped: float
) -> None:
    scored = score(name, [[-1.5 + math.log(ratio)]], [[advantage]], old=[[-1.5]], config=CONFIG)
    assert scored.loss == [[pytest.approx(loss)]]
    assert scored.gradient == [[pytest.approx(gradient)]]
    assert scored.metrics["ppo_clip_ratio"] == [[is_clipped]]


def test_the_clip_is_at_a_fifth_by_default() -> None:
    log_probs = [[-2.0 + math.log(1.5)], [-2.0 + math.log(0.5)]]
    for name in ("regular", "dual_clip"):
        scored = score(name, log_probs, [[1.0], [-1.0]], old=[[-2.0]] * 2)
        assert scored.loss == [[pytest.approx(-1.2)], [pytest.approx(0.8)]]


@pytest.mark.parametrize(
    ("ratio", "advantage", "loss", "gradient", "is_bounded"),
    [
        (2.9, -2.0, 5.8, 5.8, 0),
        (5.0, -2.0, 6.0, 0.0, 1),  # a bad token that became much likelier is bounded by clip_ratio_c
        (5.0, 2.0, -2.6, 0.0, 0),  # a good one has the ordinary clip
        (0.1, -2.0, 1.6, 0.0, 0),
    ],
)
def test_the_dual_clip_bounds_only_bad_tokens_that_became_much_likelier(
    ratio: float, advantage: float, loss: float, gradient: float, is_bounded: float
) -> None:
    scored = score("dual_clip", [[-3 + math.log(ratio)]], [[advantage]], old=[[-3.0]], config=CONFIG)
    assert scored.loss == [[pytest.approx(loss)]]
    assert scored.gradient == [[pytest.approx(gradient)]]
    assert scored.metrics["dual_clip_ratio"] == [[is_bounded]]
