"""Functions around a training step of SkyRL."""

from typing import Any

import pytest
from train_kit.trajectories import make_segment, make_trajectory

from skyrl_train.compat.skyrl.generator import to_generator_output
from skyrl_train.compat.skyrl.trainer_utils import validate_generator_output, zero_variance_filter
from skyrl_train.errors import DataError


def test_lists_of_equal_lengths_are_valid() -> None:
    output: Any = to_generator_output(
        [make_trajectory("a", [0, 1]), make_trajectory("b", [1], earlier=[make_segment()])]
    )
    validate_generator_output(2, output)
    for changes in ({"rewards": [1.0]}, {"loss_masks": [[1]] * 3}, {"is_last_step": [True] * 3}):
        with pytest.raises(DataError):
            validate_generator_output(2, output | changes)


def test_prompts_of_equal_rewards_are_left_out() -> None:
    rewards = [1.0, 1.0, [0.5, 0.5], [0.0, 2.0], 3.0]
    assert zero_variance_filter(rewards, ["a", "a", "b", "b", "c"]) == [2, 3, 4]
