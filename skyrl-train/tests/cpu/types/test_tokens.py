from dataclasses import replace
from typing import Any

import pytest
from train_kit.trajectories import make_segment, make_trajectory

from skyrl_train.types import PromptRow

TRAJECTORY = make_trajectory("17", [0.25, 0.0, 1.0], repetition=3)


@pytest.mark.parametrize("name", ["loss_mask", "logprobs", "rewards"])
def test_a_segment_refuses_a_list_of_another_length_than_its_response(name: str) -> None:
    with pytest.raises(AssertionError, match=rf"{name}: 2 values, 3 tokens"):
        replace(make_segment([0.25, 0.0, 1.0]), **{name: [1, 1]})


def test_only_a_valid_trajectory_has_a_total_reward() -> None:
    assert TRAJECTORY.is_valid
    assert TRAJECTORY.total_reward == 1.25
    invalid = replace(TRAJECTORY, error="the environment crashed")
    assert not invalid.is_valid
    assert invalid.rewards is None
    with pytest.raises(AssertionError, match=r"17.*3.*is invalid: the environment crashed"):
        _ = invalid.total_reward


@pytest.mark.parametrize(
    ("extras", "data_source"),
    [({"data_source": "gsm8k"}, "gsm8k"), ({}, "unknown"), ({"data_source": None}, "unknown")],
)
def test_a_prompt_row_names_its_data_source(extras: dict[str, Any], data_source: str) -> None:
    assert PromptRow("17", [{"role": "user", "content": "2 + 2?"}], None, extras).data_source == data_source
