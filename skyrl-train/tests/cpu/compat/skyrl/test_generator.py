"""SkyRL's parallel lists, in both directions, and generators that implement `generate` or `rollout`."""

import copy
import math
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image
from train_kit.messages import user
from train_kit.trajectories import make_segment, make_trajectory

from skyrl_gym.images import read_image
from skyrl_train.compat.skyrl.generator import (
    GeneratorInput,
    GeneratorInterface,
    GeneratorOutput,
    SkyRLGymGenerator,
    edit_as_lists,
    returns_totals,
    to_generator_input,
    to_generator_output,
    to_requests,
    to_trajectories,
)
from skyrl_train.config import load_config
from skyrl_train.errors import DataError
from skyrl_train.generators.base import BatchMetadata, RolloutRequest
from skyrl_train.inference_engines.base import SamplingParams
from skyrl_train.media.spans import ImageSpan
from skyrl_train.types import PromptRow, Segment, Trajectory, TrajectoryID, Turn, WeightSpan

SAMPLING = SamplingParams(max_new_tokens=4, temperature=0.5, stop=("END",))


def request(uid: str, repetition: int = 0, env_class: str | None = "guess", **extras: Any) -> RolloutRequest:
    return RolloutRequest(TrajectoryID(uid, repetition), PromptRow(uid, [user(f"What is {uid}?")], env_class, extras))


REQUESTS = [request("a"), request("b")]


def two_prompts() -> GeneratorInput:
    return to_generator_input(REQUESTS, SAMPLING, BatchMetadata(3, "train"))


def two_answers(**changes: Any) -> GeneratorOutput:
    answers = to_generator_output([make_trajectory("a", [0, 1]), make_trajectory("b", [0.5])])
    return GeneratorOutput(**(answers | changes))  # type: ignore[typeddict-item]


@st.composite
def segments(draw: st.DrawFn) -> Segment:
    n_tokens = draw(st.integers(1, 4))
    per_token = {"min_size": n_tokens, "max_size": n_tokens}
    turn = Turn(0, n_tokens, 3, 0.5, "stop", weight_spans=(WeightSpan(draw(st.integers(0, 9)), n_tokens),))
    return make_segment(
        draw(st.lists(st.floats(-2, 2), **per_token)),
        prompt_ids=draw(st.lists(st.integers(0, 99), min_size=1, max_size=4)),
        response_ids=draw(st.lists(st.integers(0, 99), **per_token)),
        loss_mask=draw(st.lists(st.integers(0, 1), **per_token)),
        logprobs=draw(st.lists(st.floats(-9, 0), **per_token)),
        sampling_logprobs=draw(st.none() | st.lists(st.floats(-9, 0), **per_token)),
        turns=draw(st.sampled_from([(), (turn,), (turn, turn)])),
    )


@st.composite
def trajectories(draw: st.DrawFn) -> Trajectory:
    """Generate trajectories without `greedy_reward`, which no generator sets."""
    extras = draw(st.dictionaries(st.sampled_from(["data_source", "index"]), st.sampled_from(["x", "y"])))
    rows = draw(st.lists(segments(), min_size=1, max_size=3))
    error = draw(st.none() | st.sampled_from(["it broke", "it hung"]))
    if error is not None:  # rewards of an invalid trajectory are unused and not part of the view
        rows = [replace(segment, rewards=[0.0] * len(segment.rewards)) for segment in rows]
    return Trajectory(
        id=TrajectoryID(draw(st.text(min_size=1, max_size=3)), draw(st.integers(0, 9)), draw(st.integers(0, 99))),
        env_class=draw(st.sampled_from(["guess", "catch"])),
        data_source=extras.get("data_source", "unknown"),
        segments=tuple(rows),
        stop_reason=draw(st.sampled_from(["stop", "length", "env_error"])),
        error=error,
        env_metrics=draw(st.dictionaries(st.sampled_from("mn"), st.integers())),
        env_extras=extras,
        timing=draw(st.dictionaries(st.sampled_from(["generate", "env"]), st.floats(0, 9))),
        n_attempts=draw(st.integers(1, 3)),
        reward_components=draw(st.dictionaries(st.sampled_from("ab"), st.floats(-2, 2))),
    )


@settings(max_examples=30)
@given(st.lists(trajectories(), max_size=3))
def test_trajectories_survive_the_parallel_list_view(drawn: list[Trajectory]) -> None:
    requests = [RolloutRequest(t.id, PromptRow(t.id.instance_id, [], t.env_class, t.env_extras)) for t in drawn]
    input_batch = to_generator_input(requests, SAMPLING, BatchMetadata(1, "train"))
    assert to_requests(input_batch) == requests
    assert to_trajectories(to_generator_output(drawn), requests) == drawn


@pytest.mark.parametrize("reward", [1.0, 0.0, []])
async def test_a_reward_for_an_empty_response_is_invalid(reward: float | list[float]) -> None:
    class Silent(GeneratorInterface):
        async def generate(self, input_batch: GeneratorInput) -> GeneratorOutput:
            return two_answers(
                response_ids=[[], [5]], loss_masks=[[], [1]], rollout_logprobs=[[], [-1.0]], rewards=[reward, 0.5]
            )

    first, second = await Silent().play(REQUESTS, SAMPLING, BatchMetadata(3, "train"))
    assert (first.stop_reason, first.is_valid) == ("empty_response", False)
    assert first.error == "the response is empty and cannot carry a reward"
    assert second.rewards == [0.5]


@pytest.mark.parametrize(("reward", "is_valid"), [(1.0, False), (0.0, True), ([], True)])
def test_an_earlier_empty_response_is_valid_without_a_reward(reward: float | list[float], is_valid: bool) -> None:
    answers = to_generator_output([make_trajectory("a", [0.5])] * 2)
    changes = {"response_ids": [[], [5]], "loss_masks": [[], [1]], "rollout_logprobs": None, "rewards": [reward, 0.5]}
    (trajectory,) = to_trajectories(
        GeneratorOutput(**(answers | changes | {"is_last_step": [False, True]})),  # type: ignore[typeddict-item]
        [request("a")],
    )
    assert trajectory.is_valid == is_valid
    assert trajectory.stop_reason == ("stop" if is_valid else "empty_response")


@pytest.mark.parametrize("reward", [1, 1.0, True])
def test_a_single_reward_is_put_on_the_last_trained_token(reward: float) -> None:
    first, second = to_trajectories(two_answers(rewards=[reward, None]), REQUESTS)
    assert first.rewards == [0.0, 1.0]
    assert (second.is_valid, second.error) == (False, "stop")
    first, second = to_trajectories(two_answers(rewards=[reward, 2.0], loss_masks=[[1, 0], [0]]), REQUESTS)
    assert first.rewards == [1.0, 0.0]
    assert second.rewards == [2.0], "without trained tokens the reward still counts in its group"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"rewards": [[0, 1]]}, "returned 1 rewards for 2 prompts"),
        ({"rollout_logprobs": []}, "returned 0 rollout_logprobs for 2 prompts"),
        ({"env_metrics": []}, "returned 0 env_metrics for 2 prompts"),
        ({"reward_components": [{}]}, "returned 1 reward_components for 2 prompts"),
        ({"turns": [()]}, "returned 1 turns for 2 prompts"),
        ({"trajectory_ids": [TrajectoryID("b", 0), TrajectoryID("a", 0)]}, r"trajectory_ids\[0\]=.*'b'.* but .*'a'"),
        ({"stop_reasons": ["stop"] * 3}, "returned 3 stop_reasons for 2 prompts"),
        ({"stop_reasons": ["stop", None]}, r"stop_reasons\[1\]=None is not text; return one such as 'stop'"),
        ({"loss_masks": [[1, 1], [1, 1]]}, r"loss_masks\[1\] has 2 values for 1 response tokens"),
        ({"rollout_logprobs": [[], [-1.0]]}, r"rollout_logprobs\[0\] has 0 values for 2 response tokens"),
        ({"rewards": [[1.0], 0.5]}, r"rewards\[0\] has 1 values for 2 response tokens"),
        ({"rewards": [[1.0, math.nan], 0.5]}, r"rewards\[0\]=\[1\.0, nan\] are not all finite"),
    ],
)  # fmt: skip
def test_lists_of_wrong_lengths_or_values_are_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(DataError, match=message):
        to_trajectories(two_answers(**changes), REQUESTS)


async def test_a_generator_only_has_to_implement_generate() -> None:
    class Parrot(GeneratorInterface):
        async def generate(self, input_batch: GeneratorInput) -> GeneratorOutput:
            assert input_batch["batch_metadata"] == BatchMetadata(7, "eval")
            return to_generator_output(
                [make_trajectory(rewards=[float(i)]) for i in range(len(input_batch["prompts"]))]
            )

    requests = [request("a", 0), request("a", 1, env_class=None, data_source="birds")]
    first, second = await Parrot().play(requests, SAMPLING, BatchMetadata(7, "eval"))
    assert (first.id, first.env_class, first.rewards) == (TrajectoryID("a", 0), "guess", [0.0])
    assert (second.id, second.env_class, second.data_source) == (TrajectoryID("a", 1), "unknown", "birds")


def test_log_probs_may_be_missing() -> None:
    first, _ = to_trajectories(two_answers(rollout_logprobs=None), REQUESTS)
    assert first.logprobs is None
    assert to_generator_output([first])["rollout_logprobs"] is None


def test_fields_that_no_longer_fit_a_shortened_response_are_dropped() -> None:
    """A `generate` written for SkyRL shortens only the lists of SkyRL."""
    turn = Turn(0, 2, 3, 1.0, "stop")
    long = make_trajectory("a", [0, 1], turns=(turn,), sampling_logprobs=[-1.0, -1.0])
    output = to_generator_output([long, make_trajectory("b", turns=(replace(turn, end=1),))])
    for name in ("response_ids", "loss_masks", "rewards", "rollout_logprobs"):
        output[name] = [values[:1] for values in output[name]]  # type: ignore[literal-required]
    first, second = to_trajectories(output, REQUESTS)
    assert (first.turns, first.segments[0].sampling_logprobs) == ((), None)
    assert len(second.turns) == 1


CONFIGURED = load_config({"generator": {"sampling_params": {"max_generate_length": 7, "top_p": 0.5}}}).generator


class RecordingGenerator(GeneratorInterface):
    """A generator that implements `rollout` and records its calls."""

    def __init__(self) -> None:
        self.generator_cfg = CONFIGURED
        self.calls: list[tuple[list[RolloutRequest], SamplingParams, BatchMetadata]] = []

    async def rollout(
        self, requests: Sequence[RolloutRequest], sampling: SamplingParams, metadata: BatchMetadata
    ) -> list[Trajectory]:
        self.calls.append((list(requests), sampling, metadata))
        span = WeightSpan(4, 1)
        turn = Turn(0, 1, 2, 1.0, "stop", weight_spans=(span,))
        return [replace(make_trajectory("x", [1.0], turns=(turn,), n_attempts=2), id=r.id) for r in requests]


class DoublingGenerator(RecordingGenerator):
    """A user-defined `generate` in the style of SkyRL."""

    async def generate(self, input_batch: GeneratorInput) -> GeneratorOutput:
        output = await super().generate(input_batch)
        output["rewards"] = [[2 * reward for reward in rewards] for rewards in output["rewards"]]
        output["rollout_metrics"]["mine"] = len(input_batch["prompts"])
        return output


async def test_generate_accepts_a_batch_without_trainer_fields() -> None:
    played = RecordingGenerator()
    prompts = [[user("?")]] * 2
    batch = GeneratorInput(
        prompts=prompts, env_classes=["guess"] * 2, env_extras=None, sampling_params=None, trajectory_ids=None
    )
    output = await played.generate(batch)
    ((requests, sampling, metadata),) = played.calls
    assert output["rewards"] == [[1.0], [1.0]]
    assert len({request.id.to_string() for request in requests}) == 2
    assert [request.row.env_extras for request in requests] == [{}, {}]
    assert sampling == SamplingParams(7, top_p=0.5)
    assert metadata == BatchMetadata(0, "train")


async def test_the_most_derived_override_decides() -> None:
    doubled = DoublingGenerator()
    (t,) = await doubled.play([request("a")], SAMPLING, BatchMetadata(3, "train"))
    assert (t.rewards, t.weight_versions, t.n_attempts) == ([2.0], [4], 2)
    ((requests, sampling, metadata),) = doubled.calls
    assert (requests, sampling, metadata) == ([request("a")], SAMPLING, BatchMetadata(3, "train"))

    class Again(DoublingGenerator):
        async def rollout(self, *arguments: Any) -> list[Trajectory]:
            played = await super().rollout(*arguments)  # of `RecordingGenerator`: this bypasses `generate`
            return [replace(t, segments=(make_segment([t.total_reward + 0.5]),)) for t in played]

    (t,) = await Again().play([request("a")], SAMPLING, BatchMetadata(3, "train"))
    assert t.rewards == [1.5]
    assert (await Again().generate(two_prompts()))["rewards"] == [[3.0], [3.0]], "`generate` doubles them"


async def test_an_override_may_be_mixed_in() -> None:
    class Tripled:
        async def generate(self, input_batch: GeneratorInput) -> GeneratorOutput:
            output = await super().generate(input_batch)
            return {**output, "rewards": [3.0 for _ in output["rewards"]]}

    class Mixed(Tripled, RecordingGenerator):
        pass

    (t,) = await Mixed().play([request("a")], SAMPLING, BatchMetadata(3, "train"))
    assert t.rewards == [3.0]


async def test_metrics_of_generate_are_averaged_over_calls_of_a_phase_and_returned_once() -> None:
    doubled = DoublingGenerator()
    for n, phase in ((1, "train"), (2, "train"), (3, "eval")):
        await doubled.play([request("a", i) for i in range(n)], SAMPLING, BatchMetadata(3, phase))  # type: ignore[arg-type]
    assert doubled.take_metrics("eval") == {"mine": 3}
    assert doubled.take_metrics() == {"mine": 1.5}
    assert doubled.take_metrics() == doubled.take_metrics("eval") == {}


async def test_a_generator_without_generate_and_rollout_is_refused() -> None:
    class Nothing(GeneratorInterface):
        pass

    with pytest.raises(NotImplementedError, match="Nothing has neither `generate` nor `rollout`"):
        await Nothing().generate(two_prompts())


@settings(max_examples=20)
@given(drawn=st.lists(trajectories().filter(lambda t: t.is_valid), min_size=1, max_size=2))
def test_editing_the_lists_changes_only_what_is_edited(drawn: list[Trajectory]) -> None:
    drawn = [replace(t, greedy_reward=0.5, data_source="elsewhere") for t in drawn]

    def raise_rewards(lists: GeneratorOutput) -> GeneratorOutput:
        for rewards in lists["rewards"]:
            assert isinstance(rewards, list)
            rewards[0] += 1
        return lists

    expected = [
        replace(t, segments=tuple(replace(s, rewards=[s.rewards[0] + 1, *s.rewards[1:]]) for s in t.segments))
        for t in drawn
    ]
    before = copy.deepcopy(drawn)
    assert edit_as_lists(drawn, raise_rewards, with_totals=False) == expected
    assert drawn == before
    assert edit_as_lists(drawn, lambda lists: {}, with_totals=False) == drawn  # type: ignore[typeddict-item]


def test_images_are_refused() -> None:
    """The lists have only the placeholder tokens, and training on these as text would be wrong."""
    image = read_image(Image.new("RGB", (8, 8)))
    t = make_trajectory("17", repetition=3)
    t.segments[0].images.append(ImageSpan(0, 2, image))
    message = "trajectory 17_3 has an image, which SkyRL's parallel lists cannot contain; override `rollout`"
    for convert in (to_generator_output, partial(edit_as_lists, edit=lambda lists: lists, with_totals=False)):
        with pytest.raises(DataError, match=message):
            convert([make_trajectory("1"), t])
    prompt: Any = [user("Look."), {"role": "user", "content": [{"type": "image", "image": image}]}]
    requests = [RolloutRequest(TrajectoryID("17", 3), PromptRow("17", prompt, None, {}))]
    with pytest.raises(DataError, match="the prompt of trajectory 17_3 has an image"):
        to_generator_input(requests, SAMPLING, BatchMetadata(3, "train"))


def test_totals_are_edited_on_the_last_sampled_token() -> None:
    def lower(lists: GeneratorOutput) -> GeneratorOutput:
        lists["rewards"] = [total - 1 for total in lists["rewards"]]  # type: ignore[operator]
        return lists

    (edited,) = edit_as_lists([make_trajectory(rewards=[0, 2.5, 0], loss_mask=[1, 1, 0])], lower, with_totals=True)
    assert edited.rewards == [0, 1.5, 0]


@pytest.mark.parametrize(("batched", "max_turns", "expected"), [(True, 1, 2.0), (True, 2, [2.0]), (False, 1, [2.0])])
async def test_batched_single_turns_have_totals_as_in_skyrl(batched: bool, max_turns: int, expected: Any) -> None:
    class Player(GeneratorInterface):
        generator_cfg = load_config({"generator": {"batched": batched, "max_turns": max_turns}}).generator

        async def rollout(self, requests: Any, sampling: Any, metadata: Any) -> list[Trajectory]:
            return [make_trajectory(request.id.instance_id, [2.0]) for request in requests]

    output = await Player().generate(two_prompts())
    assert output["rewards"] == [expected] * 2


async def test_a_generator_returns_totals_if_its_last_answer_had_totals() -> None:
    class Player(GeneratorInterface):
        rewards: list[Any]

        async def generate(self, input_batch: GeneratorInput) -> GeneratorOutput:
            return two_answers(rewards=self.rewards)

    player = Player()
    assert not returns_totals(player)
    for rewards, expected in (([1.0, None], True), ([[0.0, 1.0], [1.0]], False)):
        player.rewards = rewards
        await player.play(REQUESTS, SAMPLING, BatchMetadata(1, "train"))
        assert returns_totals(player) is expected


def test_a_subclass_with_a_method_that_is_never_called_is_refused() -> None:
    with pytest.raises(TypeError, match=r"Mine\.agent_loop would never be called.*Override generate\(input_batch\)"):

        class Mine(SkyRLGymGenerator):
            async def agent_loop(self, prompt: object) -> None: ...
