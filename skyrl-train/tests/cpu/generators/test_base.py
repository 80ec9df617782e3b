"""The parallel-list view of rollouts, there and back."""

from __future__ import annotations

import math
from dataclasses import asdict
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from trajectories import make_trajectory

from skyrl_train.errors import DataError
from skyrl_train.generators.base import (
    BatchMetadata,
    GeneratorInput,
    GeneratorInterface,
    GeneratorOutput,
    RolloutRequest,
    rollout_requests,
    to_generator_input,
    to_generator_output,
    to_requests,
    to_trajectories,
)
from skyrl_train.inference_engines.base import SamplingParams
from skyrl_train.types import Message, PromptRow, Segment, Trajectory, TrajectoryID

SAMPLING = SamplingParams(max_new_tokens=4, temperature=0.5, stop=("END",))


def request(uid: str, repetition: int = 0, env_class: str | None = "guess", **extras: Any) -> RolloutRequest:
    prompt = [Message(role="user", content=f"What is {uid}?")]
    return RolloutRequest(TrajectoryID(uid, repetition), PromptRow(uid, prompt, env_class, extras))


def two_prompts() -> GeneratorInput:
    return to_generator_input([request("a"), request("b")], SAMPLING, BatchMetadata(3, "train"))


def two_answers(**changes: Any) -> GeneratorOutput:
    answers = to_generator_output([make_trajectory("a", [0, 1]), make_trajectory("b", [0.5])])
    return GeneratorOutput(**(answers | changes))  # type: ignore[typeddict-item]


@st.composite
def segments(draw: st.DrawFn) -> Segment:
    n_tokens = draw(st.integers(1, 3))
    per_token = {"min_size": n_tokens, "max_size": n_tokens}
    return Segment(
        prompt_ids=draw(st.lists(st.integers(0, 99), min_size=1, max_size=4)),
        response_ids=draw(st.lists(st.integers(0, 99), **per_token)),
        loss_mask=draw(st.lists(st.integers(0, 1), **per_token)),
        logprobs=draw(st.lists(st.floats(-9, 0), **per_token)),
        rewards=draw(st.lists(st.floats(-2, 2), **per_token)),
    )


@st.composite
def trajectories(draw: st.DrawFn) -> Trajectory:
    """What a parallel-list view can hold: turns, timing and the like stay behind."""
    n_tokens = draw(st.integers(1, 5))
    per_token = {"min_size": n_tokens, "max_size": n_tokens}
    extras = draw(st.dictionaries(st.sampled_from(["data_source", "index"]), st.sampled_from(["x", "y"])))
    rewards = draw(st.none() | st.lists(st.floats(-2, 2), **per_token))
    stop_reason = draw(st.sampled_from(["stop", "length", "env_error"]))
    return make_trajectory(
        draw(st.text(min_size=1, max_size=3)),
        rewards,
        repetition=draw(st.integers(0, 9)),
        env_class=draw(st.sampled_from(["guess", "catch"])),
        data_source=extras.get("data_source", "unknown"),
        prompt_ids=draw(st.lists(st.integers(0, 99), min_size=1, max_size=4)),
        response_ids=draw(st.lists(st.integers(0, 99), **per_token)),
        loss_mask=draw(st.lists(st.integers(0, 1), **per_token)),
        logprobs=draw(st.lists(st.floats(-9, 0), **per_token)),
        stop_reason=stop_reason,
        env_metrics=draw(st.dictionaries(st.sampled_from("mn"), st.integers())),
        env_extras=extras,
        earlier=() if rewards is None else tuple(draw(st.lists(segments(), max_size=2))),
        error=stop_reason if rewards is None else None,
    )


@settings(max_examples=60)
@given(st.lists(trajectories(), max_size=4))
def test_trajectories_survive_the_parallel_list_view(many: list[Trajectory]) -> None:
    requests = [RolloutRequest(t.id, PromptRow(t.id.instance_id, [], t.env_class, t.env_extras)) for t in many]
    input_batch = to_generator_input(requests, SAMPLING, BatchMetadata(1, "train"))
    assert to_requests(input_batch) == requests
    assert to_trajectories(to_generator_output(many), input_batch) == many


def test_the_input_view_has_skyrls_fields() -> None:
    assert two_prompts() == {
        "prompts": [[{"role": "user", "content": "What is a?"}], [{"role": "user", "content": "What is b?"}]],
        "env_classes": ["guess", "guess"],
        "env_extras": [{}, {}],
        "sampling_params": {
            **asdict(SamplingParams(max_new_tokens=4)),
            "temperature": 0.5,
            "stop": ("END",),
        },
        "trajectory_ids": [TrajectoryID("a", 0), TrajectoryID("b", 0)],
        "batch_metadata": BatchMetadata(3, "train"),
    }


@pytest.mark.parametrize("reward", [1, 1.0, True])
def test_one_reward_for_the_response_stands_on_its_last_token(reward: float) -> None:
    first, second = to_trajectories(two_answers(rewards=[reward, None]), two_prompts())
    assert first.rewards == [0.0, 1.0]
    assert (second.is_valid, second.error) == (False, "stop")


def test_one_reward_for_the_response_stands_on_a_token_that_is_trained() -> None:
    first, second = to_trajectories(two_answers(rewards=[1.0, 2.0], loss_masks=[[1, 0], [0]]), two_prompts())
    assert first.rewards == [1.0, 0.0]
    assert second.rewards == [2.0], "nothing is trained, and the reward still counts in its group"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"rewards": [[0, 1]]}, "returned 1 rewards for 2 prompts"),
        ({"rollout_logprobs": []}, "returned 0 rollout_logprobs for 2 prompts"),
        ({"env_metrics": []}, "returned 0 env_metrics for 2 prompts"),
        ({"reward_components": [{}]}, "returned 1 reward_components for 2 prompts"),
        ({"stop_reasons": ["stop"] * 3}, "returned 3 stop_reasons for 2 prompts"),
        ({"loss_masks": [[1, 1], [1, 1]]}, r"loss_masks\[1\] has 2 values for 1 response tokens"),
        ({"rollout_logprobs": [[], [-1.0]]}, r"rollout_logprobs\[0\] has 0 values for 2 response tokens"),
        ({"rewards": [[1.0], 0.5]}, r"rewards\[0\] has 1 values for 2 response tokens"),
        ({"rewards": [[1.0, math.nan], 0.5]}, r"rewards\[0\]=\[1\.0, nan\] are not all finite"),
    ],
)  # fmt: skip
def test_lists_of_different_lengths_are_named_with_both(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(DataError, match=message):
        to_trajectories(two_answers(**changes), two_prompts())


async def test_a_generator_only_has_to_implement_generate() -> None:
    class Parrot(GeneratorInterface):
        async def generate(self, input_batch: GeneratorInput) -> GeneratorOutput:
            assert input_batch["batch_metadata"] == BatchMetadata(7, "eval")
            return to_generator_output(
                [make_trajectory(rewards=[float(i)]) for i in range(len(input_batch["prompts"]))]
            )

    requests = [request("a", 0), request("a", 1, env_class=None, data_source="birds")]
    first, second = await Parrot().rollout(requests, SAMPLING, BatchMetadata(7, "eval"))
    assert (first.id, first.env_class, first.rewards) == (TrajectoryID("a", 0), "guess", [0.0])
    assert (second.id, second.env_class, second.data_source) == (TrajectoryID("a", 1), "unknown", "birds")


def test_requests_name_an_environment_and_repeat_prompts_side_by_side() -> None:
    rows = [PromptRow("0", [], None, {}), PromptRow("1", [], "catch", {})]
    requests = rollout_requests(rows, 2, "gsm8k")
    assert [request.id.to_string() for request in requests] == ["0_0", "0_1", "1_0", "1_1"]
    assert [request.row.env_class for request in requests] == ["gsm8k", "gsm8k", "catch", "catch"]
    assert rows[0].env_class is None


def test_a_rollouts_randomness_follows_from_what_it_is() -> None:
    first = BatchMetadata(1, "train", seed=1).rollout_seed(TrajectoryID("0", 0))
    others = [
        BatchMetadata(1, "train", seed=2).rollout_seed(TrajectoryID("0", 0)),
        BatchMetadata(2, "train", seed=1).rollout_seed(TrajectoryID("0", 0)),
        BatchMetadata(1, "eval", seed=1).rollout_seed(TrajectoryID("0", 0)),
        BatchMetadata(1, "train", seed=1).rollout_seed(TrajectoryID("1", 0)),
        BatchMetadata(1, "train", seed=1).rollout_seed(TrajectoryID("0", 1)),
    ]
    assert len({first, *others}) == 6
    assert BatchMetadata(1, "train", seed=1).rollout_seed(TrajectoryID("0", 0)) == first


def test_log_probs_may_be_missing() -> None:
    first, _ = to_trajectories(two_answers(rollout_logprobs=None), two_prompts())
    assert first.logprobs is None
    assert to_generator_output([first])["rollout_logprobs"] is None
