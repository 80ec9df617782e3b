import math

import pytest
import torch

from skyrl_train.algorithms.advantages import group_statistics, trajectory_scores
from skyrl_train.algorithms.advantages.groups import Cells


def test_statistics_of_interleaved_groups() -> None:
    scores = torch.tensor([1.0, 5.0, 2.0, 7.0, 6.0])
    mean, std, size = group_statistics(scores, ["a", "b", "a", "alone", "a"])
    assert mean.tolist() == [3, 5, 3, 7, 3]
    assert std.tolist() == pytest.approx([math.sqrt(7), 0, math.sqrt(7), 0, math.sqrt(7)])
    assert size.tolist() == [3, 1, 3, 1, 3]


@pytest.mark.parametrize(
    ("scores", "is_flat"), [([1, 1 + 9e-7], True), ([1, 1 + 1.1e-6], False), ([50, 50.00004], True)]
)
def test_scores_that_differ_by_rounding_have_zero_std(scores: list[float], is_flat: bool) -> None:
    _, std, _ = group_statistics(torch.tensor(scores, dtype=torch.float64), ["a", "a"])
    assert (std == 0).all() == is_flat


def test_cells_return_the_statistic_of_each_values_cell() -> None:
    cells = Cells(torch.tensor([2, 0, 2, 2]), n_cells=4)
    values = torch.tensor([1.0, 5.0, -2.0, 4.0])
    assert cells.total(values).tolist() == [3, 5, 3, 3]
    assert cells.extreme(values, "amax").tolist() == [4, 5, 4, 4]
    assert cells.extreme(values, "amin").tolist() == [-2, 5, -2, -2]
    assert cells.weighted_mean(values, torch.tensor([3.0, 0.0, 0.0, 1.0])).tolist() == [1.75, 0, 1.75, 1.75]


def test_a_score_is_the_sum_of_its_row_ignoring_nan_outside_the_mask() -> None:
    rewards = torch.tensor([[1.0, 2.0, math.nan], [math.nan, 0.0, 1.0], [0.5, 0.0, 0.25]])
    mask = torch.tensor([[1.0, 0.0, 0.0], [1.0, 1.0, 1.0], [0.0, 0.0, 0.0]])
    scores = trajectory_scores(rewards, mask)
    assert scores[0] == 3
    assert scores[1].isnan()
    assert scores[2] == 0.75
