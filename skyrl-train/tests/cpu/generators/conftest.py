"""A stage for rollouts with the real engine, and a record of its requests and results."""

from __future__ import annotations

import copy
import functools
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterator, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any

import pytest
from generators.environments import Journal, StoryEnv
from transformers import PreTrainedModel, PreTrainedTokenizerBase

import skyrl_gym
from skyrl_gym.envs.registration import deregister
from skyrl_train.config import load_config
from skyrl_train.generators.base import BatchMetadata, RolloutRequest
from skyrl_train.generators.chat_template import ChatEncoder
from skyrl_train.generators.skyrl_gym_generator import SkyRLGymGenerator
from skyrl_train.inference_engines.base import EngineRequest, EngineResult, SamplingParams, TokenChunk
from skyrl_train.inference_engines.hf import HFEngine
from skyrl_train.types import Message, PromptRow, Trajectory, TrajectoryID


class RecordedEngine(HFEngine):
    """The engine, with a record of its requests and results."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.exchanges: list[tuple[EngineRequest, EngineResult]] = []
        self.ended: list[str] = []

    async def generate(self, requests: Sequence[EngineRequest]) -> list[EngineResult]:
        recorded = copy.deepcopy(list(requests))
        results = await super().generate(requests)
        self.exchanges += zip(recorded, results, strict=True)
        return results

    async def stream(self, request: EngineRequest) -> AsyncGenerator[TokenChunk, None]:
        recorded = copy.deepcopy(request)
        async with aclosing(super().stream(request)) as chunks:
            async for chunk in chunks:
                if chunk.result is not None:
                    self.exchanges.append((recorded, chunk.result))
                yield chunk

    async def end_session(self, session_id: str) -> None:
        self.ended.append(session_id)
        await super().end_session(session_id)

    def session(self, session_id: str) -> list[tuple[EngineRequest, EngineResult]]:
        """Return the exchanges of one attempt at a rollout, in order."""
        return [(request, result) for request, result in self.exchanges if request.session_id == session_id]


@dataclass
class Stage:
    """A generator, its engine, and the sampling parameters."""

    generator: SkyRLGymGenerator
    engine: RecordedEngine
    chat: ChatEncoder
    sampling: SamplingParams = field(default_factory=lambda: SamplingParams(max_new_tokens=4))

    async def play(self, requests: Sequence[RolloutRequest], step: int = 1, seed: int = 0) -> list[Trajectory]:
        return await self.generator.rollout(requests, self.sampling, BatchMetadata(step, "train", seed))


MakeStage = Callable[..., Stage]


def story(uid: str, repetition: int = 0, *, env_class: str | None = "story", **extras: Any) -> RolloutRequest:
    """Return a rollout request of the story environment; `extras` are further columns of the row."""
    prompt = [Message(role="system", content="Go on."), Message(role="user", content=f"Story {uid}")]
    return RolloutRequest(TrajectoryID(uid, repetition), PromptRow(uid, prompt, env_class or "story", extras))


@pytest.fixture
def journal() -> Iterator[Journal]:
    """Register the story environment and return its journal."""
    journal = Journal()
    skyrl_gym.register("story", functools.partial(StoryEnv, journal))
    yield journal
    deregister("story")


@pytest.fixture(scope="session")
def talker(tiny_model: PreTrainedModel, tiny_tokenizer: PreTrainedTokenizerBase) -> PreTrainedModel:
    """The tiny model, biased to end every other turn; with random weights it hardly ever would."""
    model = copy.deepcopy(tiny_model)
    model.get_output_embeddings().weight.data[tiny_tokenizer.eos_token_id] *= 4
    return model


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
        engine = RecordedEngine(
            model, tiny_tokenizer, max_num_seqs=16, max_num_batched_tokens=512, max_cache_bytes=2**24
        )
        gym_generator = SkyRLGymGenerator(cfg.generator, cfg.environment.skyrl_gym, engine, tiny_tokenizer)
        stages.append(Stage(gym_generator, engine, ChatEncoder(tiny_tokenizer)))
        return stages[-1]

    yield make
    for stage in stages:
        await stage.generator.close()
        await stage.engine.close()
