"""The agent loop: an environment and a model take turns until the environment says it is done.

    start → generate → step → generate → step → … → finish

Tokens are the truth: a turn's prompt is the previous prompt, the sampled tokens, and the observation's tokens.
"""

from __future__ import annotations

import asyncio
import copy
import hashlib
import logging
import math
import time
from collections.abc import Callable, Coroutine, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, TypeVar

import skyrl_gym
from skyrl_gym.envs.base_text_env import BaseTextEnv, BaseTextEnvStepOutput

from skyrl_train.config import SkyRLConfig
from skyrl_train.errors import EnvError
from skyrl_train.generators.base import (
    BatchMetadata,
    GeneratorInput,
    GeneratorInterface,
    GeneratorOutput,
    RolloutRequest,
    to_generator_output,
    to_requests,
)
from skyrl_train.generators.chat_template import ChatEncoder
from skyrl_train.inference_engines.base import EngineRequest, EngineResult, InferenceEngine, SamplingParams
from skyrl_train.types import Trajectory, Turn

logger = logging.getLogger(__name__)
T = TypeVar("T")


@dataclass(slots=True)
class _Rollout:
    """A trajectory in the making. `token_ids` is the whole conversation, `n_prompt` of them before the first turn."""

    request: RolloutRequest
    env_class: str
    seed: int
    env: BaseTextEnv | None = None
    token_ids: list[int] = field(default_factory=list)
    n_prompt: int = 0
    loss_mask: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    turns: list[Turn] = field(default_factory=list)
    weight_versions: list[int] = field(default_factory=list)
    env_metrics: dict[str, Any] = field(default_factory=dict)
    timing: dict[str, float] = field(default_factory=lambda: {"generate": 0.0, "env": 0.0})
    stop_reason: str | None = None  # set when the rollout is over
    error: str | None = None

    def append(self, token_ids: Sequence[int], logprobs: Sequence[float] | None) -> None:
        """Add sampled tokens, or observation tokens when there are no log-probs."""
        self.token_ids.extend(token_ids)
        self.loss_mask.extend([0 if logprobs is None else 1] * len(token_ids))
        self.logprobs.extend([0.0] * len(token_ids) if logprobs is None else logprobs)

    def fail(self, stop_reason: str, error: str) -> None:
        """End as an invalid trajectory."""
        self.stop_reason = stop_reason
        self.error = error

    def trajectory(self) -> Trajectory:
        """What the trainer sees: the response ends with the last sampled token."""
        end = self.turns[-1].end if self.turns else 0
        rewards: list[float] | None = None
        if self.error is None:
            rewards = [0.0] * end
            for turn in self.turns:
                rewards[turn.end - 1] += turn.reward
        assert self.stop_reason is not None
        return Trajectory(
            id=self.request.id,
            env_class=self.env_class,
            data_source=self.request.row.data_source,
            prompt_ids=self.token_ids[: self.n_prompt],
            response_ids=self.token_ids[self.n_prompt : self.n_prompt + end],
            loss_mask=self.loss_mask[:end],
            logprobs=self.logprobs[:end],
            rewards=rewards,
            stop_reason=self.stop_reason,
            turns=tuple(self.turns),
            env_metrics=self.env_metrics,
            env_extras=self.request.row.env_extras,
            weight_versions=tuple(self.weight_versions),
            timing=self.timing,
            error=self.error,
        )


class SkyRLGymGenerator(GeneratorInterface):
    """Plays `skyrl_gym` environments with an inference engine.

    With `generator.batched` all rollouts of a call take their turns in lock-step; otherwise each goes at its own
    pace and the engine batches whatever is waiting. The rollouts themselves are the same.
    """

    def __init__(self, cfg: SkyRLConfig, engine: InferenceEngine, chat: ChatEncoder) -> None:
        self._cfg = cfg
        self._engine = engine
        self._chat = chat
        n_workers = cfg.environment.skyrl_gym.max_env_workers
        self._pool = ThreadPoolExecutor(n_workers, thread_name_prefix="skyrl-gym-env") if n_workers else None

    async def generate(self, input_batch: GeneratorInput) -> GeneratorOutput:
        """See `GeneratorInterface.generate`."""
        sampling = SamplingParams(**input_batch["sampling_params"])
        trajectories = await self.rollout(to_requests(input_batch), sampling, input_batch["batch_metadata"])
        return to_generator_output(trajectories)

    async def rollout(
        self, requests: Sequence[RolloutRequest], sampling: SamplingParams, metadata: BatchMetadata
    ) -> list[Trajectory]:
        """See `GeneratorInterface.rollout`. A rollout whose environment fails comes back invalid, never as reward 0."""
        rollouts = [self._new_rollout(request, metadata) for request in requests]
        groups = [rollouts] if self._cfg.generator.batched else [[rollout] for rollout in rollouts]
        async with asyncio.TaskGroup() as tasks:
            for group in groups:
                tasks.create_task(self._play(group, sampling))
        return [rollout.trajectory() for rollout in rollouts]

    def close(self) -> None:
        """End the environment threads."""
        if self._pool is not None:
            self._pool.shutdown(wait=True, cancel_futures=True)

    def _new_rollout(self, request: RolloutRequest, metadata: BatchMetadata) -> _Rollout:
        env_class = request.row.env_class or self._cfg.environment.env_class
        return _Rollout(request, env_class, _seed(self._cfg.trainer.seed, metadata, request))

    async def _play(self, rollouts: Sequence[_Rollout], sampling: SamplingParams) -> None:
        """Play rollouts turn by turn, all of them in step."""
        try:
            await _each(self._start(rollout) for rollout in rollouts)
            while active := self._still_playing(rollouts, sampling):
                started = time.perf_counter()
                results = await self._engine.generate([_engine_request(rollout, sampling) for rollout in active])
                seconds = time.perf_counter() - started
                await _each(self._take_turn(*pair, seconds) for pair in zip(active, results, strict=True))
        finally:
            await _each(self._finish(rollout) for rollout in rollouts)

    def _still_playing(self, rollouts: Sequence[_Rollout], sampling: SamplingParams) -> list[_Rollout]:
        """Rollouts that take another turn; those whose conversation has grown too long end here."""
        limit = self._cfg.generator.max_input_length or self._engine.context_length - sampling.max_new_tokens
        active = [rollout for rollout in rollouts if rollout.stop_reason is None]
        for rollout in active:
            if len(rollout.token_ids) > limit:
                if rollout.turns:
                    rollout.stop_reason = "length"
                else:
                    n_tokens = len(rollout.token_ids)
                    rollout.fail("prompt_too_long", f"the prompt has {n_tokens} tokens, max_input_length is {limit}")
        return [rollout for rollout in active if rollout.stop_reason is None]

    async def _start(self, rollout: _Rollout) -> None:
        """Make the environment and encode its first prompt."""
        row = rollout.request.row
        extras = copy.deepcopy(row.env_extras)
        extras["max_turns"] = self._cfg.generator.max_turns

        def start() -> list[Any]:
            env_config = self._cfg.environment.skyrl_gym.env_config(rollout.env_class)
            rollout.env = skyrl_gym.make(rollout.env_class, env_config=env_config, extras=extras)
            prompt, _ = rollout.env.init(copy.deepcopy(row.prompt))
            return prompt

        prompt = await self._guarded(rollout, "init", start)
        if prompt is not None:
            rollout.token_ids = self._chat.prompt_ids(prompt)
            rollout.n_prompt = len(rollout.token_ids)

    async def _take_turn(self, rollout: _Rollout, result: EngineResult, seconds: float) -> None:
        """Append the sampled turn, let the environment answer, and append its observation."""
        n_prompt = len(rollout.token_ids)
        rollout.append(result.token_ids, result.logprobs)
        rollout.weight_versions.append(result.weight_version)
        rollout.timing["generate"] += seconds
        env, action = rollout.env, self._chat.decode(result.token_ids)
        assert env is not None
        output = await self._guarded(rollout, "step", lambda: _checked(env.step(action)))
        if output is None:
            return
        start = n_prompt - rollout.n_prompt
        end = start + len(result.token_ids)
        rollout.turns.append(Turn(start, end, n_prompt, float(output["reward"]), result.stop_reason))
        if output["done"]:
            rollout.stop_reason = result.stop_reason
        else:
            rollout.append(self._chat.observation_ids(output["observations"], result.token_ids[-1]), None)

    async def _finish(self, rollout: _Rollout) -> None:
        """Collect the environment's metrics, close it, and free the engine's cache of the conversation."""
        self._engine.end_session(rollout.request.id.to_string())
        env = rollout.env
        if env is None:
            return
        if rollout.error is None:
            rollout.env_metrics = await self._guarded(rollout, "get_metrics", env.get_metrics) or {}
        await self._guarded(rollout, "close", env.close)

    async def _guarded(self, rollout: _Rollout, method: str, call: Callable[[], T]) -> T | None:
        """Call into an environment; what it raises ends this rollout as invalid, and no other."""
        started = time.perf_counter()
        try:
            if self._pool is None:
                return call()
            return await asyncio.get_running_loop().run_in_executor(self._pool, call)
        except Exception as error:  # the boundary of a rollout
            logger.warning("%s.%s failed in rollout %s", rollout.env_class, method, rollout.request.id, exc_info=True)
            rollout.fail("env_error", f"{rollout.env_class}.{method} raised {type(error).__name__}: {error}")
            return None
        finally:
            rollout.timing["env"] += time.perf_counter() - started


async def _each(coroutines: Iterable[Coroutine[Any, Any, None]]) -> None:
    """Run coroutines concurrently; the first error cancels the rest."""
    async with asyncio.TaskGroup() as tasks:
        for coroutine in coroutines:
            tasks.create_task(coroutine)


def _engine_request(rollout: _Rollout, sampling: SamplingParams) -> EngineRequest:
    return EngineRequest(rollout.token_ids, sampling, rollout.seed, rollout.request.id.to_string())


def _seed(seed: int, metadata: BatchMetadata, request: RolloutRequest) -> int:
    """The randomness of one rollout: a function of what it is, not of when or beside what it runs."""
    identity = f"{seed}/{metadata.training_phase}/{metadata.global_step}/{request.id.to_string()}"
    return int.from_bytes(hashlib.blake2b(identity.encode(), digest_size=8).digest(), "big")


def _checked(output: BaseTextEnvStepOutput) -> BaseTextEnvStepOutput:
    """An environment's answer, or EnvError naming what is wrong with it."""
    for name in ("observations", "reward", "done"):
        if name not in output:
            raise EnvError(f"step() returned no {name!r}; return BaseTextEnvStepOutput(observations, reward, done)")
    reward = output["reward"]
    if not isinstance(reward, (int, float)) or not math.isfinite(reward):
        raise EnvError(f"step() returned reward={reward!r}; it must be a finite number")
    return output
