import pytest

from skyrl_agent.integrations.tinker.data import apply_overlong_filtering, training_data
from skyrl_train.types import Segment, Trajectory, TrajectoryID


def trajectory(draw: int, sample: int, reward: float, n_prompt: int = 2, error: str | None = None) -> Trajectory:
    segment = Segment(
        token_ids=[*range(n_prompt), 7, 8, 9],
        n_prompt=n_prompt,
        loss_mask=[1, 0, 1],
        rewards=[0.0, 0.0, reward],
        logprobs=[-0.5, 0.0, -0.25],
    )
    return Trajectory(TrajectoryID(str(draw), sample, draw), "fleet_task", "notes", (segment,), "stop", error=error)


def test_data_align_advantages_with_the_next_token() -> None:
    data, metrics = training_data([trajectory(0, 0, 1.0), trajectory(0, 1, 0.0)], 10)
    first, second = data
    assert first.model_input.to_ints() == [0, 1, 7, 8]
    inputs = {name: list(tensor.data) for name, tensor in first.loss_fn_inputs.items()}
    assert inputs["target_tokens"] == [1, 7, 8, 9]
    assert inputs["logprobs"] == [0.0, -0.5, 0.0, -0.25]
    advantage = 0.5 / (0.5**0.5 + 1e-6)  # the unbiased deviation of 0 and 1
    assert inputs["advantages"] == pytest.approx([0.0, advantage, 0.0, advantage], rel=1e-5)
    assert list(second.loss_fn_inputs["advantages"].data)[1] == pytest.approx(-advantage, rel=1e-5)
    assert metrics["advantage/mean"] == pytest.approx(0.0, abs=1e-6)


def test_invalid_trajectories_are_in_no_baseline() -> None:
    valid = [trajectory(0, 0, 1.0), trajectory(0, 1, 0.0), trajectory(1, 0, 1.0), trajectory(1, 1, 1.0)]
    invalid = [trajectory(0, 2, 0.0, error="verifier"), trajectory(1, 2, 0.0, error="verifier")]
    expected, actual = training_data(valid, 10)[0], training_data([*valid[:2], *invalid, *valid[2:]], 10)[0]
    assert len(actual) == 2  # the second prompt's rewards are equal
    assert [repr(datum) for datum in actual] == [repr(datum) for datum in expected]


def test_overlong_sequences_are_truncated_and_not_trained_on() -> None:
    (segment,) = trajectory(0, 0, 1.0).segments
    assert apply_overlong_filtering(segment, 5) is segment
    cut = apply_overlong_filtering(segment, 4)
    assert (cut.token_ids, cut.loss_mask) == ([0, 1, 7, 8], [0, 0])
    data, metrics = training_data([trajectory(0, 0, 1.0, n_prompt=3), trajectory(0, 1, 0.0)], 5)
    assert len(data) == 1  # and the reward of the other one still counts in the baseline
    assert metrics["rollouts/truncated_overlong"] == 1
