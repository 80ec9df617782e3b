import pytest
from train_kit.trajectories import make_segment, make_trajectory

from skyrl_train.algorithms.filters import informative_groups, leave_out_truncated


def test_groups_of_unequal_rewards_and_groups_of_one_are_informative() -> None:
    rewards = [1.0, 0.0, 0.5, 1.0, 1.0, 7.0]
    assert informative_groups(rewards, ["a", "b", "a", "c", "c", "alone"], 1e-6) == {"a", "b", "alone"}


@pytest.mark.parametrize(("tolerance", "is_informative"), [(0.0, True), (0.24, True), (0.25, False), (0.3, False)])
def test_the_tolerance_is_a_standard_deviation(tolerance: float, is_informative: bool) -> None:
    assert informative_groups([0.5, 1.0], ["a", "a"], tolerance) == ({"a"} if is_informative else set())


def test_equal_rewards_are_uninformative_at_zero_tolerance() -> None:
    assert informative_groups([0.1] * 7, ["a"] * 7, 0.0) == informative_groups([], [], 0.0) == set()


def test_truncated_trajectories_are_masked_from_the_loss_and_keep_their_rewards() -> None:
    earlier = make_segment([0.0, 0.0, 0.75], loss_mask=[1, 0, 1])
    cut_off = make_trajectory("cut", [0.0, 0.5], loss_mask=[1, 1], earlier=[earlier], stop_reason="length")
    ended = make_trajectory("ended", [0.0, 1.0], earlier=[earlier])
    invalid = make_trajectory("invalid", None, stop_reason="length", error="no answer")
    empty = make_trajectory("empty", [], stop_reason="length")
    failed = make_trajectory("failed", [0.25], stop_reason="too long")
    masked, *others = leave_out_truncated([cut_off, ended, invalid, empty, failed])
    assert [row.loss_mask for row in masked.segments] == [[0, 0, 0], [0, 0]]
    assert [row.rewards for row in masked.segments] == [[0.0, 0.0, 0.75], [0.0, 0.5]]
    assert others == [ended, invalid, empty, failed]
    assert cut_off.loss_mask == [1, 1], "the input is unchanged"
