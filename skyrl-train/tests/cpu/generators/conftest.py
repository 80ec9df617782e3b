"""Stages for rollouts with the real engine, and for agents that call its endpoint."""

from __future__ import annotations

import copy
import functools
from collections.abc import AsyncIterator, Iterator
from typing import Any

import pytest
from train_kit.endpoints import AgentStage, EndpointStage, LiveEndpoint, serving
from train_kit.engines import RecordedEngine
from train_kit.environments import AsyncStoryEnv, Journal, StoryEnv
from train_kit.processes import no_leaks
from train_kit.rollouts import MakeStage, Stage
from transformers import PreTrainedModel, PreTrainedTokenizerBase

import skyrl_gym
from skyrl_gym.envs.registration import deregister
from skyrl_train.config import load_config
from skyrl_train.generators.chat_template import ChatEncoder
from skyrl_train.generators.skyrl_gym_generator import SkyRLGymGenerator
from skyrl_train.inference_engines.base import SamplingParams


@pytest.fixture
def journal() -> Iterator[Journal]:
    """Register the environments `story` and `async_story`, and return their journal."""
    journal = Journal()
    skyrl_gym.register("story", functools.partial(StoryEnv, journal))
    skyrl_gym.register("async_story", functools.partial(AsyncStoryEnv, journal))
    yield journal
    deregister("story")
    deregister("async_story")


@pytest.fixture(scope="session")
def talker(tiny_model: PreTrainedModel, tiny_tokenizer: PreTrainedTokenizerBase) -> PreTrainedModel:
    """The tiny model, biased to end every other turn; with random weights it hardly ever would."""
    model = copy.deepcopy(tiny_model)
    model.get_output_embeddings().weight.data[tiny_tokenizer.eos_token_id] *= 4
    return model


@pytest.fixture(scope="session")
def chat(tiny_tokenizer: PreTrainedTokenizerBase) -> ChatEncoder:
    """The chat template of the tiny tokenizer."""
    return ChatEncoder(tiny_tokenizer)


@pytest.fixture
async def make_stage(
    talker: PreTrainedModel, tiny_tokenizer: PreTrainedTokenizerBase, journal: Journal
) -> AsyncIterator[MakeStage]:
    """Create stages, by default with `talker`; other arguments are keys of `generator` and `skyrl_gym`."""
    stages: list[Stage] = []

    def make(skyrl_gym: dict[str, Any] | None = None, model: PreTrainedModel = talker, **generator: Any) -> Stage:
        environment = {"env_class": "story", "skyrl_gym": {"max_env_workers": 4} | (skyrl_gym or {})}
        generator = {"max_turns": 9, "n_rollout_retries": 0} | generator
        cfg = load_config({"trainer": {"max_prompt_length": 1}, "generator": generator, "environment": environment})
        engine = RecordedEngine(model, tiny_tokenizer)
        gym_generator = SkyRLGymGenerator(cfg.generator, cfg.environment.skyrl_gym, engine, tiny_tokenizer)
        stages.append(Stage(gym_generator, engine, ChatEncoder(tiny_tokenizer), SamplingParams(max_new_tokens=4)))
        return stages[-1]

    yield make
    for stage in stages:
        await stage.generator.close()
        await stage.engine.close()


@pytest.fixture
async def without_leaks() -> AsyncIterator[None]:
    """Check that the test leaves nothing running."""
    async with no_leaks():
        yield


@pytest.fixture
async def stage(talker: PreTrainedModel, tiny_tokenizer: PreTrainedTokenizerBase) -> AsyncIterator[EndpointStage]:
    """An endpoint in the event loop of the test."""
    async with EndpointStage(talker, tiny_tokenizer) as stage:
        yield stage


@pytest.fixture(scope="module")
def live(talker: PreTrainedModel, tiny_tokenizer: PreTrainedTokenizerBase) -> Iterator[LiveEndpoint]:
    """An endpoint in a separate thread."""
    with serving(talker, tiny_tokenizer) as live:
        yield live


@pytest.fixture
async def agent_stage(talker: PreTrainedModel, tiny_tokenizer: PreTrainedTokenizerBase) -> AsyncIterator[AgentStage]:
    """Generators that run agents."""
    agent_stage = AgentStage(talker, tiny_tokenizer)
    yield agent_stage
    await agent_stage.close()


@pytest.fixture
def litellm(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setenv("LITELLM_LOCAL_MODEL_COST_MAP", "True")  # otherwise importing litellm sends a request
    import litellm

    monkeypatch.setattr(litellm, "suppress_debug_info", True)
    return litellm
