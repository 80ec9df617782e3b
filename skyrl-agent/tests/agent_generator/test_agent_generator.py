"""Agents that use only OpenAI's interface produce the same trajectories as any other generator."""

import asyncio
import re
import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import openai
import pytest
from agent_kit.agents import (
    SAMPLING,
    TRAIN,
    AgentStage,
    ask_once,
    ask_once_blocking,
    assert_equal_trajectories,
    catch_requests,
)
from agent_kit.endpoints import HELLO, new_client
from endpoint_catch.agent import play_catch
from train_kit.engines import LIMITS, RecordedEngine
from train_kit.messages import user
from train_kit.models import load_on_cpu
from train_kit.processes import no_leaks
from train_kit.vision_models import draw
from train_kit.weight_sync import sync_weights
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from examples.catch.env import CatchEnv
from skyrl_agent.agent_generator import AgentGenerator, AgentResult
from skyrl_gym.images import read_image
from skyrl_train.config import load_config
from skyrl_train.dataset.batch import build_training_batch
from skyrl_train.errors import ConfigError
from skyrl_train.generators.base import rollout_requests
from skyrl_train.generators.chat_template import ChatEncoder
from skyrl_train.generators.gym_generator import GymGenerator
from skyrl_train.generators.rewards import REWARD_FUNCTIONS, register_reward_function
from skyrl_train.inference_engines.base import SamplingParams
from skyrl_train.inference_engines.hf.general import GeneralEngine
from skyrl_train.types import DrawnPrompt, PromptRow, Trajectory


def assert_matches_engine(t: Trajectory, engine: RecordedEngine) -> None:
    """Assert that the trajectory is the prompt of a request followed by the sampled reply."""
    wholes = [request.prompt_ids + result.token_ids for request, result in engine.exchanges]
    assert t.prompt_ids + t.response_ids in wholes


async def test_trajectories_equal_those_of_the_agent_loop(agent_stage: AgentStage, catch: None) -> None:
    """Sampling is greedy because seeds depend on the request here and on the rollout there."""
    greedy = replace(SAMPLING, temperature=0.0)
    cfg = load_config({"generator": {"max_turns": 5}})
    loop = GymGenerator(cfg.generator, cfg.environment.skyrl_gym, agent_stage.engine, agent_stage.tokenizer)
    expected = await loop.rollout(catch_requests(2, 2), greedy, TRAIN)
    await loop.close()
    trajectories = await agent_stage.play(play_catch, catch_requests(2, 2), greedy)
    assert_equal_trajectories(trajectories, expected)
    for t, other in zip(trajectories, expected, strict=True):
        turns, others = ([replace(turn, weight_spans=()) for turn in one.turns] for one in (t, other))
        assert turns == others
        assert (t.id, len(t.segments)) == (other.id, 1)


async def test_litellm_plays_catch(agent_stage: AgentStage, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LITELLM_LOCAL_MODEL_COST_MAP", "True")  # otherwise importing litellm sends a request
    import litellm

    monkeypatch.setattr(litellm, "suppress_debug_info", True)

    async def play(*, base_url: str, api_key: str, model: str, row: PromptRow, session_id: str) -> AgentResult:
        game = CatchEnv(env_config={}, extras=row.env_extras)
        messages, rewards = list(row.prompt), []
        while not game.state.is_over:
            answer = await litellm.acompletion(f"openai/{model}", messages, api_base=base_url, api_key=api_key)
            message = answer.choices[0].message
            turn = game.step(message.content)
            rewards.append(turn["reward"])
            messages += [message.model_dump(), *turn["observations"]]
        return AgentResult(rewards, metrics=game.get_metrics())

    for t in await agent_stage.play(play, catch_requests(2)):
        assert (t.is_valid, len(t.segments), len(t.turns), t.env_metrics["steps"]) == (True, 1, 5, 5)
        assert_matches_engine(t, agent_stage.engine)


async def test_a_blocking_agent_runs_in_a_thread(agent_stage: AgentStage) -> None:
    names: set[str] = set()

    def blocking(**options: Any) -> float:
        names.add(threading.current_thread().name)
        return ask_once_blocking(**options)

    trajectories = await agent_stage.play(blocking, catch_requests(6))
    assert all(t.is_valid and t.total_reward == 1.0 for t in trajectories)
    assert all(name.startswith("skyrl-agent") for name in names)


async def test_a_function_may_return_an_awaitable(agent_stage: AgentStage) -> None:
    (t,) = await agent_stage.play(lambda **options: ask_once(**options), catch_requests(1))
    assert (t.is_valid, t.total_reward) == (True, 1.0)


async def test_a_single_reward_is_put_on_the_last_token(agent_stage: AgentStage) -> None:
    async def graded_agent(**options: Any) -> AgentResult:
        await play_catch(**options)
        return AgentResult(1, components={"form": 0.25, 2: 0.75}, metrics={"solved": True})

    (t,) = await agent_stage.play(graded_agent, catch_requests(1))
    assert t.rewards[-1] == t.total_reward == 1.0
    assert t.stop_reason == t.turns[-1].stop_reason
    assert (t.reward_components, t.env_metrics) == ({"form": 0.25, "2": 0.75}, {"solved": True})


async def test_configured_reward_functions_and_weights_apply(agent_stage: AgentStage) -> None:
    @register_reward_function("in pairs")
    def in_pairs(samples: Any) -> list[float]:
        return [float(len(samples))] * len(samples)

    async def graded_agent(**options: Any) -> AgentResult:
        await ask_once(**options)
        return AgentResult([9.0], components={"form": 0.25, "answer": 0.75})

    weights = {"reward_functions": ["in pairs"], "reward_weights": {"form": 2.0, "in pairs": 10.0}}
    try:
        first, second = await agent_stage.play(graded_agent, catch_requests(1, 2), **weights)
    finally:
        del REWARD_FUNCTIONS["in pairs"]
    assert first.total_reward == second.total_reward == 2 * 0.25 + 0.75 + 10 * 2
    assert first.reward_components == {"form": 0.25, "answer": 0.75, "in pairs": 2.0}


@pytest.mark.parametrize("in_own_process", [False, True])
async def test_an_agent_sends_the_images_of_its_row(
    in_own_process: bool, vision_model_path: Path, vision_tokenizer: PreTrainedTokenizerBase, forked_processes: None
) -> None:
    """The prompt of its row is in the form of OpenAI's client."""
    cfg = load_config({"generator": {"n_rollout_retries": 0}}).generator
    engine = GeneralEngine(load_on_cpu(vision_model_path), vision_tokenizer, **LIMITS)
    generator = AgentGenerator(ask_once, cfg, engine, vision_tokenizer, in_own_process=in_own_process)
    red = read_image(draw("red"))
    row = PromptRow("0", [user([{"type": "image", "image": red}, {"type": "text", "text": "Where?"}])], None, {})
    requests = rollout_requests([DrawnPrompt(0, row, 0)], 1, "agent")
    (trajectory,) = await generator.rollout(requests, SAMPLING, TRAIN)
    await generator.close()
    await engine.close()
    assert trajectory.error is None
    (segment,) = trajectory.segments
    assert [span.image for span in segment.images] == [red]
    assert segment.prompt_ids == ChatEncoder(vision_tokenizer).prompt_ids(row.prompt)


async def test_an_agent_that_edits_its_history_produces_several_rows(agent_stage: AgentStage) -> None:
    async def forgetful(*, base_url: str, api_key: str, model: str, row: PromptRow, session_id: str) -> float:
        async with new_client(base_url) as client:
            for text in ("Summarize", "State"):
                await client.chat.completions.create(model=model, messages=[user(text)])
        return 1.0

    (t,) = await agent_stage.play(forgetful, catch_requests(1))
    assert [len(segment.turns) for segment in t.segments] == [1, 1]
    assert (t.total_reward, [sum(segment.rewards) for segment in t.segments]) == (1.0, [0.0, 1.0])
    for segment, (request, result) in zip(t.segments, agent_stage.engine.exchanges, strict=True):
        assert segment.token_ids == request.prompt_ids + result.token_ids
    batch = build_training_batch([t], agent_stage.tokenizer.pad_token_id)
    assert batch.is_last_row.tolist() == [False, True]


# -- failures


async def failing(**options: Any) -> float:
    await ask_once(**options)
    raise KeyError("missing")


async def silent(**_: Any) -> float:
    return 1.0


async def cancelled(**options: Any) -> float:
    await ask_once(**options)
    raise asyncio.CancelledError("its own task")


async def endless(**options: Any) -> float:
    await ask_once(**options)
    await asyncio.sleep(3600)
    return 1.0


RELEASED = threading.Event()


def endless_in_a_thread(**options: Any) -> float:
    ask_once_blocking(**options)
    RELEASED.wait()
    return 1.0


def returns(value: Any) -> Callable[..., Any]:
    async def agent(**options: Any) -> Any:
        await ask_once(**options)
        return value

    return agent


@pytest.mark.parametrize(
    ("agent", "stop_reason", "error"),
    [
        (failing, "agent_error", "the agent raised KeyError: 'missing'"),
        (cancelled, "agent_error", "the agent raised CancelledError: its own task"),
        (silent, "agent_silent", "the agent returned without any reply from the model"),
        (endless, "agent_timeout", "the agent did not finish within 2 s"),
        (endless_in_a_thread, "agent_timeout", "the agent did not finish within 2 s"),
        (returns(None), "reward_unknown", "the agent returned None: the reward is unknown"),
        (returns(AgentResult(None)), "reward_unknown", "the agent returned None: the reward is unknown"),
        (returns("1.0"), "agent_error", "the agent returned '1.0'; rewards must be finite numbers"),
        (returns(float("nan")), "agent_error", "the agent returned nan; rewards must be finite numbers"),
        (returns(AgentResult([1.0, 2.0])), "agent_error", "returned 2 rewards for 1 replies; return one for each"),
        (returns(AgentResult(1.0, components={"a": "b"})), "agent_error", "rewards must be finite numbers"),
        (returns(AgentResult(1.0, components=[1.0])), "agent_error", "components and metrics must be mappings"),
        (returns(AgentResult(1.0, metrics=None)), "agent_error", "components and metrics must be mappings"),
    ],
)
async def test_an_agent_that_fails_makes_its_own_rollout_invalid(
    agent_stage: AgentStage, agent: Any, stop_reason: str, error: str
) -> None:
    good, bad = catch_requests(2)

    async def async_agent(**options: Any) -> Any:
        return await (agent if options["row"].uid == bad.row.uid else ask_once)(**options)

    def blocking_agent(**options: Any) -> Any:
        return (agent if options["row"].uid == bad.row.uid else ask_once_blocking)(**options)

    RELEASED.clear()
    limit = 2 if stop_reason == "agent_timeout" else 60
    either = blocking_agent if agent is endless_in_a_thread else async_agent
    first, second = await agent_stage.play(either, [good, bad], trajectory_timeout_seconds=limit)
    RELEASED.set()
    assert (first.is_valid, first.total_reward) == (True, 1.0)
    assert (second.is_valid, second.stop_reason, second.rewards) == (False, stop_reason, None)
    assert error in second.error
    assert len(second.turns) == (0 if agent is silent else 1), "turns are kept for inspection"


async def test_failures_are_retried_a_bounded_number_of_times(agent_stage: AgentStage) -> None:
    attempts: list[str] = []

    async def second_time_lucky(**options: Any) -> float:
        attempts.append(options["session_id"])
        await ask_once(**options)
        if len(attempts) < 2:
            raise RuntimeError("bad luck")
        return 1.0

    (t,) = await agent_stage.play(second_time_lucky, catch_requests(1), n_rollout_retries=3)
    assert (t.is_valid, t.n_attempts, len(attempts), len(set(attempts))) == (True, 2, 2, 2)
    assert len(t.turns) == 1, "turns of the first attempt are dropped"
    (t,) = await agent_stage.play(failing, catch_requests(1), n_rollout_retries=2)
    assert (t.is_valid, t.n_attempts) == (False, 3)
    (t,) = await agent_stage.play(returns(None), catch_requests(1), n_rollout_retries=2)
    assert t.n_attempts == 1


async def test_a_failing_engine_is_an_engine_error(agent_stage: AgentStage, monkeypatch: pytest.MonkeyPatch) -> None:
    async def hides_the_failure(**request: Any) -> None:
        with suppress(openai.InternalServerError):
            await ask_once(**request)

    monkeypatch.setattr(agent_stage.engine, "_forward", lambda step: 1 / 0)
    for agent in (ask_once, hides_the_failure):
        (t,) = await agent_stage.play(agent, catch_requests(1))
        assert (t.is_valid, t.stop_reason) == (False, "engine_error")


async def test_an_aborted_reply_makes_the_rollout_invalid(agent_stage: AgentStage) -> None:
    generator = agent_stage.generator(ask_once)
    await agent_stage.engine.pause()
    rollout = asyncio.create_task(generator.rollout(catch_requests(1), SAMPLING, TRAIN))
    while not agent_stage.engine._unfinished():
        await asyncio.sleep(0.001)
    await agent_stage.engine.abort()
    await agent_stage.engine.resume()
    (t,) = await rollout
    assert (t.is_valid, t.stop_reason) == (False, "abort")


async def test_agents_receive_copies_of_their_inputs(agent_stage: AgentStage) -> None:
    requests = catch_requests(1, 2)
    n_messages = len(requests[0].row.prompt)

    async def careless(**options: Any) -> float:
        assert len(options["row"].prompt) == n_messages
        options["row"].prompt.append(user("More"))
        return await ask_once(**options)

    assert all(t.is_valid for t in await agent_stage.play(careless, requests, max_concurrent_agents=1))


async def test_max_concurrent_agents_is_respected(agent_stage: AgentStage) -> None:
    n_running, max_running = 0, 0

    async def counting_agent(**options: Any) -> float:
        nonlocal n_running, max_running
        n_running += 1
        max_running = max(max_running, n_running)
        reward = await ask_once(**options)
        n_running -= 1
        return reward

    await agent_stage.play(counting_agent, catch_requests(9), max_concurrent_agents=4)
    assert max_running == 4


async def test_a_leftover_request_of_an_agent_is_refused_after_its_rollout(agent_stage: AgentStage) -> None:
    leftover: list[asyncio.Task[float]] = []

    async def leaves_a_request(**options: Any) -> float:
        reward = await ask_once(**options)
        await agent_stage.engine.pause()
        leftover.append(asyncio.create_task(ask_once(**options)))
        while not agent_stage.engine._unfinished():
            await asyncio.sleep(0.001)
        return reward

    (t,) = await agent_stage.play(leaves_a_request, catch_requests(1))
    assert (t.is_valid, len(t.turns)) == (True, 1)
    await agent_stage.engine.resume()
    await sync_weights(agent_stage.engine, agent_stage.model.named_parameters, 1)
    with pytest.raises(openai.NotFoundError):
        await leftover[0]


async def test_configured_filters_apply(agent_stage: AgentStage) -> None:
    options = {"zero_reward_on_non_stop": True, "apply_overlong_filtering": True}
    some_end = SamplingParams(max_new_tokens=6)
    trajectories = await agent_stage.play(ask_once, catch_requests(16), some_end, **options)
    assert {(t.stop_reason, t.total_reward, 1 in t.loss_mask) for t in trajectories} == {
        ("stop", 1.0, True),
        ("length", 0.0, False),
    }


@pytest.mark.parametrize(
    "setting",
    [
        {"step_wise_trajectories": True},
        {"inject_context_status": True},
        {"use_conversation_multi_turn": False},
        {"max_response_length": 5},
    ],
)
def test_settings_of_the_agent_loop_are_refused(agent_stage: AgentStage, setting: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=f"generator.{next(iter(setting))}"):
        agent_stage.generator(ask_once, **setting)


async def test_close_releases_threads_files_and_tasks(
    talker: PreTrainedModel, tiny_tokenizer: PreTrainedTokenizerBase
) -> None:
    async with no_leaks():
        agent_stage = AgentStage(talker, tiny_tokenizer)
        await agent_stage.play(ask_once, catch_requests(3))
        await agent_stage.play(ask_once_blocking, catch_requests(3))
        await agent_stage.close()


@pytest.mark.usefixtures("forked_processes")
async def test_the_agent_of_the_page_plays(agent_stage: AgentStage) -> None:
    page = (Path(__file__).parents[3] / "docs/guides/endpoint.md").read_text(encoding="utf-8")
    names: dict[str, Any] = {"__name__": "page"}
    exec(re.findall(r"```python\n(.*?)```", page, re.DOTALL)[0], names)
    cfg = load_config({"generator": {"n_rollout_retries": 0}})
    experiment = object.__new__(names["Experiment"])
    generator = experiment.get_generator(cfg, agent_stage.tokenizer, agent_stage.engine)
    row = PromptRow("0", HELLO, None, {"reward_spec": {"ground_truth": ""}})
    requests = rollout_requests([DrawnPrompt(0, row, 0)], 2, "maths")
    trajectories = await generator.rollout(requests, SamplingParams(max_new_tokens=4), TRAIN)
    assert [(t.is_valid, t.total_reward) for t in trajectories] == [(True, 1.0)] * 2
    assert [[len(segment.turns) for segment in t.segments] for t in trajectories] == [[2]] * 2
    await generator.close()
