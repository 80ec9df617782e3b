"""Rollouts of the story environment with the embedded engine, and prompts and generators without any model."""

import asyncio
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from skyrl_train.errors import DataError
from skyrl_train.generators.base import BatchMetadata, RolloutGenerator, RolloutRequest
from skyrl_train.generators.chat_template import ChatEncoder
from skyrl_train.generators.gym_generator import GymGenerator
from skyrl_train.inference_engines.base import SamplingParams
from skyrl_train.types import PromptRow, Trajectory, TrajectoryID, Turn, WeightSpan
from train_kit.engines import RecordedEngine
from train_kit.environments import RELEASED
from train_kit.messages import system, user
from train_kit.trajectories import make_trajectory

STEP = {"observations": [user("on")], "reward": 1.0, "done": False, "metadata": {}}
"""The output of a step of an environment, for `story(returns={"step": …})`."""


def story(uid: str, repetition: int = 0, *, env_class: str | None = "story", **extras: Any) -> RolloutRequest:
    """Return a rollout request of `train_kit.environments.StoryEnv`; `extras` are further columns of the row."""
    prompt = [system("Go on."), user(f"Story {uid}")]
    return RolloutRequest(TrajectoryID(uid, repetition), PromptRow(uid, prompt, env_class or "story", extras))


def faulty(uid: str, env_class: str = "FaultyEnv", **extras: Any) -> RolloutRequest:
    """Return a rollout request of an environment of `train_kit.environments` that fails as `extras` specify."""
    return story(uid, env_class=f"train_kit.environments:{env_class}", **extras)


def check_faulty(trajectories: Sequence[Trajectory], requests: Sequence[RolloutRequest]) -> Counter[str]:
    """Assert that healthy rollouts are complete and faulty ones invalid; return the stop reasons of the faulty ones."""
    reasons: Counter[str] = Counter()
    for t, request in zip(trajectories, requests, strict=True):
        if request.row.env_extras.get("where", "close") == "close":
            assert t.is_valid, (t.error, request)
            assert (len(t.turns), t.total_reward) == (3, 6.0)
        else:
            assert not t.is_valid, request
            assert t.error
            reasons[t.stop_reason] += 1
    return reasons


def tokens_and_rewards(trajectories: Sequence[Trajectory]) -> list[tuple[list[int], list[float] | None]]:
    return [(t.response_ids, t.rewards) for t in trajectories]


@dataclass
class Stage:
    """A generator, its engine, and the sampling parameters."""

    generator: GymGenerator
    engine: RecordedEngine
    chat: ChatEncoder
    sampling: SamplingParams

    async def play(self, requests: Sequence[RolloutRequest], step: int = 1, seed: int = 0) -> list[Trajectory]:
        return await self.generator.rollout(requests, self.sampling, BatchMetadata(step, "train", seed))

    async def play_faulty(self, requests: Sequence[RolloutRequest]) -> list[Trajectory]:
        """Play short turns of environments that may hang, then release them and close the generator."""
        self.sampling = replace(self.sampling, max_new_tokens=2)
        RELEASED.clear()
        try:
            async with asyncio.timeout(240):
                return await self.play(requests)
        finally:
            RELEASED.set()
            await self.generator.close()

    async def play_story(self, uid: str = "a", **extras: Any) -> Trajectory:
        """Play one rollout of the story environment."""
        (trajectory,) = await self.play([story(uid, **extras)])
        return trajectory

    @property
    def sampled(self) -> list[list[int]]:
        """Sampled tokens of each turn so far."""
        return [result.token_ids for _, result in self.engine.exchanges]

    @property
    def prompts(self) -> list[list[int]]:
        """Prompt of each turn so far."""
        return [request.prompt_ids for request, _ in self.engine.exchanges]


MakeStage = Callable[..., Stage]


class Numbers:
    """Prompts 0 to n - 1; those in `broken` cannot be read."""

    fingerprint = "numbers"

    def __init__(self, n_rows: int) -> None:
        self._n_rows = n_rows
        self.broken: set[int] = set()

    def __len__(self) -> int:
        return self._n_rows

    def __getitem__(self, index: int) -> PromptRow:
        if index in self.broken:
            raise DataError(f"row {index} is broken")
        return PromptRow(str(index), [user(f"prompt {index}")], None, {})


class ScriptedGenerator(RolloutGenerator):
    """A generator without a model. A test sets its rewards (None: the rollout fails) and how long its calls take."""

    def __init__(
        self,
        reward: Callable[[TrajectoryID], float | None] = lambda id: float(id.repetition_id),
        n_passes: Callable[[RolloutRequest], int] = lambda request: 1,
    ) -> None:
        self.reward = reward
        self._n_passes = n_passes  # of the event loop
        self.calls: list[tuple[list[RolloutRequest], SamplingParams]] = []
        self.version = 0  # of the weights, when a rollout starts and when it ends
        self.n_running, self.max_running = 0, 0  # calls
        self.failing: set[int] = set()  # draws
        self.released = asyncio.Event()
        self.released.set()

    @property
    def started(self) -> list[int]:
        """The first draw of each call."""
        return [requests[0].id.draw for requests, _ in self.calls]

    async def rollout(
        self, requests: Sequence[RolloutRequest], sampling: SamplingParams, metadata: BatchMetadata
    ) -> list[Trajectory]:
        self.calls.append((list(requests), sampling))
        self.n_running += 1
        self.max_running = max(self.max_running, self.n_running)
        try:
            first = self.version
            for _ in range(self._n_passes(requests[0])):
                await asyncio.sleep(0)
            await self.released.wait()
            if requests[0].id.draw in self.failing:
                raise DataError(f"draw {requests[0].id.draw} failed")
            return [self._trajectory(request.id, first) for request in requests]
        finally:
            self.n_running -= 1

    def _trajectory(self, id: TrajectoryID, first_version: int) -> Trajectory:
        reward = self.reward(id)
        spans = (WeightSpan(first_version, 1), WeightSpan(self.version, 1))
        turn = Turn(0, 2, 2, reward or 0.0, "stop", spans)
        played = make_trajectory(rewards=(0.0, reward or 0.0), turns=[turn])
        return replace(played, id=id, error="it broke" if reward is None else None)
