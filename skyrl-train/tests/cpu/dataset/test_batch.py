import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from train_kit.trajectories import make_trajectory

from skyrl_train.dataset.batch import build_training_batch
from skyrl_train.types import Trajectory, Turn, WeightSpan

PAD = 99


def test_a_batch_by_hand() -> None:
    short = make_trajectory(
        "a", prompt_ids=[1], response_ids=[2, 3, 4], loss_mask=[1, 0, 1], logprobs=[-1.0, 0.0, -2.0], rewards=[0, 0, 1]
    )
    long = make_trajectory("b", prompt_ids=[5, 6, 7], response_ids=[8], loss_mask=[1], logprobs=[-3.0], rewards=[-1])
    batch = build_training_batch([short, long], PAD)
    assert batch.sequences.tolist() == [[PAD, PAD, 1, 2, 3, 4], [5, 6, 7, 8, PAD, PAD]]
    assert batch.attention_mask.tolist() == [[0, 0, 1, 1, 1, 1], [1, 1, 1, 1, 0, 0]]
    assert batch.loss_mask.tolist() == [[1, 0, 1], [1, 0, 0]]
    assert batch.rewards.tolist() == [[0, 0, 1], [-1, 0, 0]]
    assert batch.rollout_logprobs.tolist() == [[-1, 0, -2], [-3, 0, 0]]
    assert batch.draws.tolist() == [ord("a"), ord("b")]
    assert (batch.sequences.dtype, batch.loss_mask.dtype) == (torch.int64, torch.float32)


def test_versions_come_from_weight_spans_and_are_minus_one_elsewhere() -> None:
    spans = (WeightSpan(7, 2), WeightSpan(8, 1))
    turns = [Turn(0, 1, 2, 0.0, "stop", (WeightSpan(6, 1),)), Turn(2, 5, 5, 0.0, "stop", spans)]
    sampled = make_trajectory("0", [0.0] * 6, turns=turns)
    batch = build_training_batch([sampled, make_trajectory("1")], PAD)
    assert batch.versions is not None
    assert batch.versions.tolist() == [[6, -1, 7, 7, 8, -1], [-1] * 6]


tokens = st.lists(st.integers(0, PAD), min_size=1, max_size=6)


@st.composite
def trajectories(draw: st.DrawFn) -> Trajectory:
    response_ids = draw(tokens)
    n_tokens = len(response_ids)
    numbers = st.floats(-4, 4, width=32)
    return make_trajectory(
        str(draw(st.integers(0, 3))),
        prompt_ids=draw(tokens),
        response_ids=response_ids,
        loss_mask=draw(st.lists(st.integers(0, 1), min_size=n_tokens, max_size=n_tokens)),
        logprobs=draw(st.lists(numbers, min_size=n_tokens, max_size=n_tokens)),
        rewards=draw(st.lists(numbers, min_size=n_tokens, max_size=n_tokens)),
    )


@settings(max_examples=60)
@given(st.lists(trajectories(), min_size=1, max_size=5))
def test_trajectories_can_be_rebuilt_from_a_batch(drawn: list[Trajectory]) -> None:
    batch = build_training_batch(drawn, PAD)
    first_response = batch.sequences.shape[1] - batch.response_length
    for row, t in enumerate(drawn):
        is_token = batch.attention_mask[row].bool()
        n_response = int(is_token[first_response:].sum())
        rebuilt = make_trajectory(
            str(int(batch.draws[row])),
            prompt_ids=batch.sequences[row, :first_response][is_token[:first_response]].tolist(),
            response_ids=batch.sequences[row, first_response:][is_token[first_response:]].tolist(),
            loss_mask=batch.loss_mask[row, :n_response].int().tolist(),
            logprobs=batch.rollout_logprobs[row, :n_response].tolist(),
            rewards=batch.rewards[row, :n_response].tolist(),
        )
        assert rebuilt == t
        for padded in (batch.loss_mask, batch.rewards, batch.rollout_logprobs):
            assert not padded[row, n_response:].any()
        assert set(batch.sequences[row][~is_token].tolist()) <= {PAD}
