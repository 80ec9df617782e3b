"""The agent loop: an environment and a model take turns until the environment says it is done.

    start → generate → step → generate → step → … → finish

Tokens are the truth: a turn's prompt is the previous prompt, the sampled tokens, and the observation's tokens.
"""

from __future__ import annotations

import asyncio
import copy
import logging
import math
import time
from collections.abc import Callable, Coroutine, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from numbers import Real
from typing import Any, TypeVar, cast

from omegaconf import OmegaConf
from transformers import PreTrainedTokenizerBase

import skyrl_gym
from skyrl_gym.envs.base_text_env import BaseTextEnv, BaseTextEnvStepOutput
from skyrl_train.algorithms.filters import leave_out_truncated, zero_reward_on_non_stop
from skyrl_train.config.environment import SkyRLGymConfig
from skyrl_train.config.generator import GeneratorConfig
from skyrl_train.dataset.prompts import is_conversation
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
    seed: int
    env: BaseTextEnv | None = None
    token_ids: list[int] = field(default_factory=list)
    n_prompt: int = 0
    loss_mask: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    turns: list[Turn] = field(default_factory=list)
    weight_versions: list[int] = field(default_factory=list)
    reward_components: dict[str, float] = field(default_factory=dict)
    env_metrics: dict[str, Any] = field(default_factory=dict)
    timing: dict[str, float] = field(default_factory=lambda: {"generate": 0.0, "env": 0.0})
    stop_reason: str | None = None  # set when the rollout is over
    error: str | None = None
    cause: Exception | None = None  # of the error, when an environment raised it

    @property
    def env_class(self) -> str:
        return self.request.row.env_class or "unknown"

    def append(self, token_ids: Sequence[int], logprobs: Sequence[float] | None) -> None:
        """Add sampled tokens, or observation tokens when there are no log-probs."""
        self.token_ids.extend(token_ids)
        self.loss_mask.extend([0 if logprobs is None else 1] * len(token_ids))
        self.logprobs.extend([0.0] * len(token_ids) if logprobs is None else logprobs)

    def fail(self, stop_reason: str, error: str, cause: Exception | None = None) -> None:
        """End as an invalid trajectory; what went wrong first is the reason."""
        if self.error is None:
            self.stop_reason, self.error, self.cause = stop_reason, error, cause

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
            reward_components=self.reward_components,
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

    def __init__(
        self,
        generator_cfg: GeneratorConfig,
        skyrl_gym_cfg: SkyRLGymConfig,
        inference_engine_client: InferenceEngine,
        tokenizer: PreTrainedTokenizerBase,
        model_name: str | None = None,
    ) -> None:
        """`model_name` is for callers that know the engine by name; one engine needs none."""
        self._cfg = generator_cfg
        self._gym_cfg = skyrl_gym_cfg
        self._engine = inference_engine_client
        self._chat = ChatEncoder(tokenizer)
        n_workers = skyrl_gym_cfg.max_env_workers
        self._pool = ThreadPoolExecutor(n_workers, thread_name_prefix="skyrl-gym-env") if n_workers else None

    def __init_subclass__(cls, **kwargs: Any) -> None:
        """A subclass that overrides `generate` alone, as SkyRL's do, is asked through it."""
        super().__init_subclass__(**kwargs)
        if "generate" in vars(cls) and "rollout" not in vars(cls):
            cls.rollout = GeneratorInterface.rollout  # type: ignore[method-assign]

    async def generate(self, input_batch: GeneratorInput) -> GeneratorOutput:
        """See `GeneratorInterface.generate`."""
        sampling = SamplingParams(**input_batch["sampling_params"])
        metadata = input_batch["batch_metadata"]
        trajectories = await SkyRLGymGenerator.rollout(self, to_requests(input_batch), sampling, metadata)
        return to_generator_output(trajectories)

    async def rollout(
        self, requests: Sequence[RolloutRequest], sampling: SamplingParams, metadata: BatchMetadata
    ) -> list[Trajectory]:
        """See `GeneratorInterface.rollout`. A rollout whose environment fails comes back invalid, never as reward 0."""
        rollouts = [_Rollout(request, metadata.rollout_seed(request.id)) for request in requests]
        groups = [rollouts] if self._cfg.batched else [[rollout] for rollout in rollouts]
        async with asyncio.TaskGroup() as tasks:
            for group in groups:
                tasks.create_task(self._play(group, sampling))
        _report_failures(rollouts)
        trajectories = [rollout.trajectory() for rollout in rollouts]
        if self._cfg.zero_reward_on_non_stop:
            trajectories = zero_reward_on_non_stop(trajectories)
        if self._cfg.apply_overlong_filtering:
            trajectories = leave_out_truncated(trajectories)
        return trajectories

    def close(self) -> None:
        """End the environment threads."""
        if self._pool is not None:
            self._pool.shutdown(wait=True, cancel_futures=True)

    async def _play(self, rollouts: Sequence[_Rollout], sampling: SamplingParams) -> None:
        """Play rollouts turn by turn, all of them in step."""
        try:
            await self._each(self._start(rollout) for rollout in rollouts)
            while active := self._still_playing(rollouts):
                started = time.perf_counter()
                results = await self._engine.generate([_engine_request(rollout, sampling) for rollout in active])
                seconds = time.perf_counter() - started
                await self._each(self._take_turn(*pair, seconds) for pair in zip(active, results, strict=True))
        finally:
            await self._each(self._finish(rollout) for rollout in rollouts)

    def _still_playing(self, rollouts: Sequence[_Rollout]) -> list[_Rollout]:
        """Rollouts that take another turn; those whose conversation has grown too long end here."""
        longest = self._engine.context_length - 1  # leaves room for a token
        limit = min(self._cfg.max_input_length or longest, longest)
        active = [rollout for rollout in rollouts if rollout.stop_reason is None]
        for rollout in active:
            if len(rollout.token_ids) > limit:
                if rollout.turns:
                    rollout.stop_reason = "length"
                else:
                    n_tokens = len(rollout.token_ids)
                    rollout.fail("prompt_too_long", f"the prompt has {n_tokens} tokens and the limit is {limit}")
        return [rollout for rollout in active if rollout.stop_reason is None]

    async def _each(self, coroutines: Iterable[Coroutine[Any, Any, None]]) -> None:
        """Run coroutines concurrently, the first error cancels the rest; one by one where calls are inline anyway."""
        if self._pool is None:
            for coroutine in coroutines:
                await coroutine
            return
        async with asyncio.TaskGroup() as tasks:
            for coroutine in coroutines:
                tasks.create_task(coroutine)

    async def _start(self, rollout: _Rollout) -> None:
        """Make the environment and encode its first prompt."""
        row = rollout.request.row
        extras = copy.deepcopy(row.env_extras)
        extras["max_turns"] = self._cfg.max_turns

        def start() -> list[Any]:
            env_config = OmegaConf.create(self._gym_cfg.env_config(rollout.env_class))
            env = skyrl_gym.make(rollout.env_class, env_config=env_config, extras=extras)
            rollout.env = cast(BaseTextEnv, env)
            prompt, _ = env.init(copy.deepcopy(row.prompt))
            return prompt

        with _boundary(rollout, "init"):
            prompt = await self._in_thread(rollout, start)
            if not prompt or not is_conversation(prompt):
                raise EnvError(f"init() returned prompt={prompt!r}; it must be a list of messages")
            rollout.token_ids = self._chat.prompt_ids(prompt)
            rollout.n_prompt = len(rollout.token_ids)

    async def _take_turn(self, rollout: _Rollout, result: EngineResult, seconds: float) -> None:
        """Append the sampled turn, let the environment answer, and append its observation."""
        n_prompt = len(rollout.token_ids)
        rollout.append(result.token_ids, result.logprobs)
        rollout.timing["generate"] += seconds
        env, action = rollout.env, self._chat.decode(result.token_ids)
        assert env is not None
        with _boundary(rollout, "step"):
            output = _checked(await self._in_thread(rollout, lambda: env.step(action)), action)
            start = n_prompt - rollout.n_prompt
            end = start + len(result.token_ids)
            rollout.turns.append(Turn(start, end, n_prompt, float(output["reward"]), result.stop_reason))
            for name, reward in _components(output).items():
                rollout.reward_components[name] = rollout.reward_components.get(name, 0.0) + reward
            rollout.weight_versions.append(result.weight_version)
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
            with _boundary(rollout, "get_metrics"):
                env_metrics = await self._in_thread(rollout, env.get_metrics)
                if not isinstance(env_metrics, dict):
                    raise EnvError(f"get_metrics() returned {env_metrics!r}; it must be a dict")
                rollout.env_metrics = env_metrics
        try:
            await self._in_thread(rollout, env.close)
        except Exception:  # what it was good for is over: the rollout stays what it is
            logger.warning("%s.close failed after rollout %s", rollout.env_class, rollout.request.id, exc_info=True)

    async def _in_thread(self, rollout: _Rollout, call: Callable[[], T]) -> T:
        """Call into an environment without holding up the others.

        A thread cannot be interrupted. When the rollout is cancelled, its call ends first, so that nothing closes an
        environment that is still being made or is still at work.
        """
        started = time.perf_counter()
        try:
            if self._pool is None:
                return call()
            running = self._pool.submit(call)
            future = asyncio.wrap_future(running)
            try:
                return await asyncio.shield(future)
            except asyncio.CancelledError:
                if not running.cancel():
                    await asyncio.wait([future])
                raise
        finally:
            rollout.timing["env"] += time.perf_counter() - started


@contextmanager
def _boundary(rollout: _Rollout, method: str) -> Iterator[None]:
    """What an environment raises, or what its answer makes us raise, ends its rollout as invalid, and no other."""
    try:
        yield
    except Exception as error:  # noqa: BLE001, the boundary of a rollout
        rollout.fail("env_error", f"{rollout.env_class}.{method} raised {type(error).__name__}: {error}", error)


def _report_failures(rollouts: Sequence[_Rollout]) -> None:
    """One warning for each kind of failure, with the traceback of the first."""
    kinds: dict[tuple[str | None, str], list[_Rollout]] = {}
    for rollout in rollouts:
        if rollout.error is not None:
            kinds.setdefault((rollout.stop_reason, type(rollout.cause).__name__), []).append(rollout)
    for failed in kinds.values():
        first = failed[0]
        logger.warning(
            "%d of %d rollouts are invalid; the first, %s: %s",
            *(len(failed), len(rollouts), first.request.id.to_string(), first.error),
            exc_info=first.cause,
        )


def _engine_request(rollout: _Rollout, sampling: SamplingParams) -> EngineRequest:
    return EngineRequest(rollout.token_ids, sampling, rollout.seed, rollout.request.id.to_string())


def _checked(output: BaseTextEnvStepOutput, action: str) -> BaseTextEnvStepOutput:
    """An environment's answer, or EnvError naming what is wrong with it."""
    if not isinstance(output, dict):
        raise EnvError(f"step() returned {output!r}; return BaseTextEnvStepOutput(observations, reward, done)")
    for name in ("observations", "reward", "done"):
        if name not in output:
            raise EnvError(f"step() returned no {name!r}; return BaseTextEnvStepOutput(observations, reward, done)")
    if output.get("postprocessed_action") not in (None, action):
        raise EnvError(
            "step() returned a postprocessed_action: replacing what was sampled is not supported; leave it out, and "
            "interpret the action inside step()"
        )
    if not _is_reward(output["reward"]):
        raise EnvError(f"step() returned reward={output['reward']!r}; it must be a finite number")
    if not output["done"] and not is_conversation(output["observations"]):
        raise EnvError(f"step() returned observations={output['observations']!r}; they must be a list of messages")
    return output


def _components(output: BaseTextEnvStepOutput) -> dict[str, float]:
    """The named parts of a turn's reward, which an environment may report as `metadata["reward_components"]`."""
    components = (output.get("metadata") or {}).get("reward_components") or {}
    if not isinstance(components, Mapping) or not all(_is_reward(reward) for reward in components.values()):
        raise EnvError(f"step() returned reward_components={components!r}; they must be finite numbers by name")
    return {name: float(reward) for name, reward in components.items()}


def _is_reward(value: object) -> bool:
    return isinstance(value, Real) and math.isfinite(value)
