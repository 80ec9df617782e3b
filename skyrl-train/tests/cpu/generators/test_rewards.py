import asyncio
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from train_kit.messages import user
from train_kit.rollouts import STEP, MakeStage, Numbers, story
from train_kit.trajectories import make_trajectory
from train_kit.vision_models import ask, conversation_row, picture
from train_kit.workers import SingleRankGroup, config, policy_objective
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from skyrl_gym.runtime.validation import MAX_REWARD
from skyrl_train.algorithms import advantage_estimator
from skyrl_train.config import load_config
from skyrl_train.config.generator import SamplingConfig
from skyrl_train.dataset.batch import build_training_batch
from skyrl_train.dataset.order import ShuffledPrompts
from skyrl_train.errors import ConfigError
from skyrl_train.generators.chat_template import ChatEncoder
from skyrl_train.generators.rewards import (
    REWARD_FUNCTIONS,
    RewardFunction,
    RewardFunctions,
    RewardSample,
    judge,
    register_reward_function,
)
from skyrl_train.generators.source import Rollouts
from skyrl_train.learner import Learner
from skyrl_train.media.processing import load_image_processor
from skyrl_train.types import PromptRow, Trajectory, TrajectoryID

Register = Callable[..., None]
AddRewards = Callable[..., Any]
DONE = {"observations": [], "reward": 1.0, "done": True, "metadata": {}}


@pytest.fixture
def register() -> Iterator[Callable[..., None]]:
    """Register reward functions until the end of the test."""
    names = []

    def add(name: str, function: RewardFunction, **options: Any) -> None:
        register_reward_function(name, **options)(function)
        names.append(name)

    yield add
    for name in names:
        del REWARD_FUNCTIONS[name]


STORIES = [story(uid, i, returns={"step": DONE}) for uid in "ab" for i in range(2)]
"""Two samples each of two prompts, with an environment reward of 1."""


@pytest.fixture
def add_rewards(tiny_tokenizer: PreTrainedTokenizerBase) -> Callable[..., Any]:
    """Add the rewards of a registered function to trajectories, without an engine."""

    async def add(name: str, *trajectories: Trajectory) -> list[Trajectory]:
        cfg = load_config({"generator": {"reward_functions": [name]}}).generator
        return await RewardFunctions(cfg, ChatEncoder(tiny_tokenizer)).add_to(list(trajectories))

    return add


class Stories(Numbers):
    """Episodes that are cut off after two turns. The prompts differ in their number only."""

    def __getitem__(self, index: int) -> PromptRow:
        step = STEP | {"reward": 7.0, "metadata": {"reward_components": {"right": 1.0}}}
        extras = {"returns": {"step": step, "grade_unfinished": 4.0}}
        return PromptRow(str(index), [user(f"Story {index}")], "story", extras)


@pytest.mark.catch_tokenizer
async def test_the_stages_of_the_reward_pipeline_run_in_the_documented_order(
    make_stage: MakeStage, register: Register, tiny_model: PreTrainedModel
) -> None:
    """Every stage changes the reward, and exchanging two stages would change the result."""

    def repeat(samples: Sequence[RewardSample]) -> list[float]:
        seen = [sample.trajectory.total_reward for sample in samples]
        assert seen == [8.0] * len(samples)  # two turns with 1 × 2 for "right" instead of 7, and the final reward of 4
        return [MAX_REWARD if samples[0].trajectory.id.instance_id == "1" else 8.0] * len(samples)

    register("repeat", repeat)
    options = {"reward_functions": ["repeat"], "reward_weights": {"right": 2.0, "repeat": 2.0}}
    stage = make_stage(max_turns=2, zero_reward_on_non_stop=True, **options)
    cfg = config(
        algorithm={
            "overlong_buffer_len": 4,
            "overlong_buffer_penalty_factor": 8.0,
            "kl_loss_coef": 0.5,
            "use_kl_loss": False,
            "use_kl_in_reward": True,
            "kl_estimator_type": "k1",
        },
        train_batch_size=2,
        policy_mini_batch_size=2,
    )
    rollouts = {"n_samples_per_prompt": 8, "sampling_params": SamplingConfig(max_generate_length=4)}
    cfg = cfg.model_copy(update={"generator": cfg.generator.model_copy(update=rollouts)})
    step = await Rollouts(cfg, stage.generator, ShuffledPrompts(Stories(2), 2, seed=0)).take(1)
    for t in step.played:
        is_stopped = t.last_stop_reason == "stop"
        assert t.is_valid != (is_stopped and t.id.instance_id == "1"), "rewards are set to 0 before they are rejected"
        if t.is_valid:
            assert t.total_reward == (8.0 + 2 * 8.0 if is_stopped else 0.0)
    assert {t.total_reward if t.is_valid else None for t in step.played} == {24.0, 0.0, None}
    before = {t.id: t.total_reward for t in step.played if t.is_valid}
    for t in step.trajectories:
        n_tokens = max(turn.end - turn.start for turn in t.turns)
        assert t.total_reward == pytest.approx(before[t.id] - 8.0 * n_tokens / 4), "also rewards that were set to 0"
    batch = build_training_batch(step.trajectories, 0)
    old = torch.full_like(batch.loss_mask, -1.5)
    policy = SingleRankGroup("policy", tiny_model, cfg.trainer, policy_objective(cfg.trainer)).group
    learner = Learner(cfg.trainer, advantage_estimator("grpo"), policy=policy)
    penalized, _ = learner.advantages(replace(batch, old_logprobs=old, ref_logprobs=old - 0.25))
    expected = [t.total_reward - 0.5 * 0.25 * sum(t.loss_mask) for t in step.trajectories]
    assert penalized.rewards is not None
    assert penalized.rewards.sum(dim=1).tolist() == pytest.approx(expected)


async def test_a_group_function_sees_the_samples_of_one_prompt(make_stage: MakeStage, register: Register) -> None:
    groups: list[list[str]] = []

    def rank(samples: Sequence[RewardSample]) -> list[float]:
        groups.append([sample.trajectory.id.to_string() for sample in samples])
        assert all(sample.prompt.startswith("<|im_start|>system") and sample.response for sample in samples)
        return [float(i) for i in range(len(samples))]

    register("rank", rank)
    trajectories = await make_stage(reward_functions=["rank"], reward_weights={"rank": 0.5}).play(STORIES)
    assert groups == [["a_0", "a_1"], ["b_0", "b_1"]]
    assert [t.total_reward for t in trajectories] == [1.0, 1.5, 1.0, 1.5]
    assert [t.reward_components for t in trajectories] == [{"rank": 0.0}, {"rank": 1.0}] * 2


async def test_two_draws_of_a_row_are_two_groups(add_rewards: AddRewards, register: Register) -> None:
    register("size", lambda samples: [float(len(samples))] * len(samples))
    many = [make_trajectory("a", [0.0], repetition=i, draw=draw) for draw in (4, 5) for i in range(2)]
    assert [t.total_reward for t in await add_rewards("size", *many)] == [2.0] * 4


async def test_a_batch_function_is_awaited_once(make_stage: MakeStage, register: Register) -> None:
    sizes = []

    async def centre(samples: Sequence[RewardSample]) -> list[float]:
        await asyncio.sleep(0)
        sizes.append(len(samples))
        return [2.0] * len(samples)

    register("centre", centre, level="batch")
    trajectories = await make_stage(reward_functions=["centre"]).play(STORIES)
    assert sizes == [4]
    assert [t.rewards[-1] for t in trajectories] == [3.0] * 4


@pytest.mark.parametrize("weight", [1.0, 2.0])
async def test_a_reward_function_may_reward_tokens(make_stage: MakeStage, register: Register, weight: float) -> None:
    register("each", lambda samples: [[np.float32(0.25)] * len(s.trajectory.response_ids) for s in samples])
    for t in await make_stage(reward_functions=["each"], reward_weights={"each": weight}).play(STORIES):
        assert t.rewards == [0.25 * weight] * (len(t.response_ids) - 1) + [1 + 0.25 * weight]
        assert t.reward_components == {"each": 0.25 * len(t.response_ids)}
        assert {type(reward) for reward in [*t.rewards, *t.reward_components.values()]} == {float}


async def test_texts_have_one_placeholder_per_image(
    vision_tokenizer: PreTrainedTokenizerBase, register: Register
) -> None:
    chat, texts = ChatEncoder(vision_tokenizer), []

    def read(samples: Sequence[RewardSample]) -> list[float]:
        texts.extend((sample.prompt, sample.response) for sample in samples)
        return [0.0] * len(samples)

    register("read", read)
    row = conversation_row(chat, ask(picture(0), "What? ", picture(1)), ask("And this?", picture(2)))
    functions = RewardFunctions(load_config({"generator": {"reward_functions": ["read"]}}).generator, chat)
    await functions.add_to([Trajectory(TrajectoryID("a", 0), "env", "data", (row,), "stop")])
    processor = load_image_processor(vision_tokenizer.name_or_path)
    assert processor is not None
    placeholder = vision_tokenizer.convert_ids_to_tokens(processor.token_id)
    ((prompt, response),) = texts
    assert [text.count(placeholder) for text in (prompt, response)] == [2, 1]
    assert "What?" in prompt
    assert "And this?" in response


async def test_the_reward_of_a_trajectory_is_on_a_sampled_token(add_rewards: AddRewards, register: Register) -> None:
    """A reward on the observation after it would be lost, because observations are not trained."""
    register("half", lambda samples: [np.float32(0.5)] * len(samples))
    (t,) = await add_rewards("half", make_trajectory(rewards=[0.0, 1.0, 0.0, 0.0], loss_mask=[1, 1, 0, 0]))
    assert t.rewards == [0.0, 1.5, 0.0, 0.0]
    assert {type(reward) for reward in [*t.rewards, *t.reward_components.values()]} == {float}


@pytest.mark.parametrize("answer", [[None, 1.0], [float("nan"), 1.0], [1.0], ["good", 1.0], [[1.0] * 99, 1.0]])
async def test_unknown_rewards_are_invalid(make_stage: MakeStage, register: Register, answer: list[Any]) -> None:
    register("odd", lambda samples: answer)
    trajectories = await make_stage(reward_functions=["odd"]).play(STORIES)
    n_valid = 1 if answer[0] is None else 0
    assert [t.is_valid for t in trajectories] == ([False, True] if n_valid else [False, False]) * 2
    assert {t.stop_reason for t in trajectories if not t.is_valid} == {"reward_unknown"}
    assert trajectories[0].error == "reward function odd returned no reward"


def first_word(samples: Sequence[RewardSample]) -> list[float]:
    return [next(float(word) for word in () if word) for _ in samples]


async def cancel_a_task(samples: Any) -> list[float]:
    task = asyncio.create_task(asyncio.sleep(60))
    task.cancel()
    await task
    return []


async def exit_later(samples: Any) -> list[float]:
    sys.exit(0)


@pytest.mark.parametrize(
    "function", [first_word, cancel_a_task, exit_later, lambda samples: sys.exit(0), judge(cancel_a_task, n_retries=0)]
)
async def test_a_function_that_would_end_the_program_gives_no_reward(
    make_stage: MakeStage, register: Register, function: Any
) -> None:
    register("fatal", function)
    async with asyncio.timeout(60):  # StopIteration in a thread would leave its future pending
        trajectories = await make_stage(reward_functions=["fatal"]).play(STORIES)
    assert {t.stop_reason for t in trajectories} == {"reward_unknown"}


@pytest.mark.parametrize("level", ["group", "batch"])
async def test_a_judge_retries_and_limits_concurrency(make_stage: MakeStage, register: Register, level: str) -> None:
    n_open, max_open, n_calls = 0, 0, Counter[str]()

    async def ask(sample: RewardSample) -> float:
        nonlocal n_open, max_open
        name = sample.trajectory.id.to_string()
        n_calls[name] += 1
        n_open += 1
        max_open = max(max_open, n_open)
        try:
            await asyncio.sleep(0.01)
            if name == "a_1" and n_calls[name] < 3:
                raise ConnectionError("busy")
            if name == "b_0":
                await asyncio.sleep(60)
        finally:
            n_open -= 1
        return 0.5

    register("judge", judge(ask, max_concurrency=2, timeout_s=0.2, first_wait_s=0.01), level=level)
    trajectories = await make_stage(reward_functions=["judge"]).play(STORIES)
    assert n_calls == {"a_0": 1, "a_1": 3, "b_0": 3, "b_1": 1}
    assert max_open == 2
    assert [t.is_valid for t in trajectories] == [True, True, False, True]
    assert trajectories[1].total_reward == 1.5


async def test_a_judge_doubles_its_wait_after_each_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    waits: list[float] = []

    async def fail(sample: RewardSample) -> float:
        raise ConnectionError("busy")

    async def record(seconds: float) -> None:
        waits.append(seconds)

    monkeypatch.setattr(asyncio, "sleep", record)
    ask = judge(fail, n_retries=3, first_wait_s=0.5)
    assert await ask([RewardSample(make_trajectory(), "?", "!")]) == [None]
    assert waits == [0.5, 1.0, 2.0]


def test_a_judge_limits_concurrency_in_successive_event_loops() -> None:
    n_open, max_open = 0, 0

    async def ask(sample: RewardSample) -> float:
        nonlocal n_open, max_open
        n_open += 1
        max_open = max(max_open, n_open)
        await asyncio.sleep(0.001)
        n_open -= 1
        return 1.0

    function = judge(ask, max_concurrency=2)
    samples = [RewardSample(make_trajectory(str(i)), "?", "!") for i in range(5)]

    async def by_group() -> list[Any]:
        return await asyncio.gather(*(function([sample]) for sample in samples))

    for _ in range(2):
        assert asyncio.run(by_group()) == [[1.0]] * 5
    assert max_open == 2


async def test_a_blocking_function_does_not_block_the_event_loop(make_stage: MakeStage, register: Register) -> None:
    """The function waits for the event loop. Its calls never overlap, also of rollouts that are played at once."""
    loop, n_running = asyncio.get_running_loop(), 0

    def slow(samples: Sequence[RewardSample]) -> list[float]:
        nonlocal n_running
        n_running += 1
        assert n_running == 1
        asyncio.run_coroutine_threadsafe(asyncio.sleep(0.01), loop).result(timeout=60)
        n_running -= 1
        return [1.0] * len(samples)

    register("slow", slow)
    stage = make_stage(reward_functions=["slow"])
    for trajectories in await asyncio.gather(*(stage.play(STORIES) for _ in range(3))):
        assert [t.total_reward for t in trajectories] == [2.0] * 4


async def test_a_weight_of_an_unknown_component_is_logged_once(
    make_stage: MakeStage, register: Register, caplog: pytest.LogCaptureFixture
) -> None:
    register("brevity", lambda samples: [0.5] * len(samples))
    stage = make_stage(reward_functions=["brevity"], reward_weights={"brevety": 2.0, "brevity": 2.0})
    for _ in range(2):
        await stage.play(STORIES)
    (record,) = (record for record in caplog.records if "reward_weights" in record.message)
    assert "lists brevety, which none of 4 trajectories reports; they report brevity" in record.message


async def test_components_of_an_environment_are_weighted(make_stage: MakeStage) -> None:
    answer = DONE | {"metadata": {"reward_components": {"right": 1.0, "brief": 0.5, "polite": 0.25}}}
    stage = make_stage(reward_weights={"right": 2.0, "brief": 0.0})
    t = await stage.play_story(returns={"step": answer})
    assert t.total_reward == 2.25
    assert t.reward_components == {"right": 1.0, "brief": 0.5, "polite": 0.25}
    t = await make_stage(reward_weights={"other": 3.0}).play_story(returns={"step": answer})
    assert t.total_reward == 1.0


def test_names_of_reward_functions_are_checked_at_construction(make_stage: MakeStage, register: Register) -> None:
    register("brevity", lambda samples: [])
    with pytest.raises(ConfigError, match=r"'brevety' is not registered; available: brevity"):
        make_stage(reward_functions=["brevety"])
    with pytest.raises(ConfigError, match="already registered"):
        register_reward_function("brevity")(lambda samples: [])
