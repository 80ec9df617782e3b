"""Stages for rollouts with the real engine, and for agents that call its endpoint."""

import functools
from collections.abc import AsyncIterator, Iterator
from typing import Any

import pytest
from train_kit.engines import RecordedEngine
from train_kit.environments import AsyncStoryEnv, Journal, StoryEnv
from train_kit.processes import no_leaks
from train_kit.rollouts import MakeStage, Stage
from transformers import PreTrainedModel, PreTrainedTokenizerBase

import skyrl_gym
from skyrl_gym.envs.registration import deregister
from skyrl_train.config import load_config
from skyrl_train.generators.chat_template import ChatEncoder
from skyrl_train.generators.gym_generator import GymGenerator
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
        gym_generator = GymGenerator(cfg.generator, cfg.environment.skyrl_gym, engine, tiny_tokenizer)
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
