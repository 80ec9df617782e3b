"""Rollouts that agents play: programs that talk to the model under training as if it were OpenAI's."""

from __future__ import annotations

import asyncio
import copy
import inspect
import time
from collections.abc import AsyncIterator, Awaitable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Protocol

from transformers import PreTrainedTokenizerBase

from skyrl_train.algorithms.filters import leave_out_truncated, zero_reward_on_non_stop
from skyrl_train.config.generator import GeneratorConfig
from skyrl_train.errors import ConfigError, EnvError
from skyrl_train.generators.answers import UnknownReward, is_reward
from skyrl_train.generators.base import (
    BatchMetadata,
    GeneratorInput,
    GeneratorInterface,
    GeneratorOutput,
    RolloutRequest,
    to_generator_output,
    to_requests,
)
from skyrl_train.generators.call_pool import CallPool, CallTimeout
from skyrl_train.generators.chat_template import custom_chat_template
from skyrl_train.generators.endpoint.attempts import play_until_valid
from skyrl_train.generators.endpoint.server import Endpoint
from skyrl_train.generators.endpoint.service import ModelService
from skyrl_train.generators.endpoint.session import Session
from skyrl_train.generators.rewards import RewardFunctions
from skyrl_train.generators.rollout import Rollout
from skyrl_train.inference_engines.base import InferenceEngine, SamplingParams
from skyrl_train.types import PromptRow, Trajectory

AGENT_TIMEOUT_S = 1800.0
"""For agents, where `generator.trajectory_timeout_seconds` is null."""

FINAL = frozenset({"reward_unknown", "abort"})
"""Stop reasons of invalid trajectories that another attempt would not change."""


@dataclass(frozen=True, slots=True)
class AgentResult:
    """What an agent has to say when it is done, e.g. `AgentResult(1.0, metrics={"solved": 1})`."""

    reward: float | Sequence[float] | None  # one for all, or one for each reply in their order; None: unknown
    components: Mapping[str, float] = field(default_factory=dict)  # totals by name
    metrics: Mapping[str, Any] = field(default_factory=dict)  # `environment/*`


class Agent(Protocol):
    """A function, or an async one, that solves the task of a row with any client of OpenAI's interface.

    A blocking one runs in a thread. An async one runs in the event loop that also answers it, so it must not block.
    """

    def __call__(
        self, *, base_url: str, api_key: str, model: str, row: PromptRow, session_id: str
    ) -> float | AgentResult | Awaitable[float | AgentResult | None] | None:
        """The reward. What is asked at `base_url` until then is the trajectory."""
        ...


class AgentGenerator(GeneratorInterface):
    """Serves the model to agents, and makes trajectories of what they asked.

    Of `generator.*` it reads what concerns sampling, the chat template, retries, filters and time; turns are the
    agents' own business.
    """

    def __init__(
        self,
        agent: Agent,
        generator_cfg: GeneratorConfig,
        inference_engine_client: InferenceEngine,
        tokenizer: PreTrainedTokenizerBase,
        *,
        model_name: str = "policy",
        host: str = "127.0.0.1",
        port: int = 0,
        public_url: str | None = None,
        max_concurrent_agents: int = 128,
    ) -> None:
        """The server starts with the first rollout. `public_url` is how agents on other machines reach it.

        Raises:
            ConfigError: a setting that only an agent loop of ours could follow.
        """
        _check_config(generator_cfg)
        self._agent = agent
        self._cfg = generator_cfg
        self._address = (host, port, public_url)
        self._model_name = model_name
        self._service = ModelService(
            inference_engine_client,
            tokenizer,
            model_name=model_name,
            chat_template=custom_chat_template(generator_cfg.chat_template),
            chat_template_kwargs=generator_cfg.chat_template_kwargs,
            ends_stopped_turns=generator_cfg.append_eos_token_after_stop_str_in_multi_turn,
            max_input_length=generator_cfg.max_input_length if generator_cfg.max_turns > 1 else None,
        )
        self._rewards = RewardFunctions(
            generator_cfg.reward_functions, generator_cfg.reward_weights, self._service.chat
        )
        self._limit_s = generator_cfg.trajectory_timeout_seconds or AGENT_TIMEOUT_S
        self._slots = asyncio.Semaphore(max_concurrent_agents)
        self._pool = None if _is_async(agent) else CallPool(max_concurrent_agents, self._limit_s, "skyrl-agent")
        self._endpoint: Endpoint | None = None
        self._starting = asyncio.Lock()
        self._n_rolling = 0

    async def generate(self, input_batch: GeneratorInput) -> GeneratorOutput:
        """See `GeneratorInterface.generate`."""
        sampling = SamplingParams(**input_batch["sampling_params"])
        trajectories = await self.rollout(to_requests(input_batch), sampling, input_batch["batch_metadata"])
        return to_generator_output(trajectories)

    async def rollout(
        self, requests: Sequence[RolloutRequest], sampling: SamplingParams, metadata: BatchMetadata
    ) -> list[Trajectory]:
        """See `GeneratorInterface.rollout`. An agent that fails makes an invalid trajectory, never reward 0."""
        async with self._serving() as endpoint:
            rollouts = await play_until_valid(
                requests,
                metadata,
                partial(self._play_all, endpoint, sampling),
                n_retries=self._cfg.n_rollout_retries,
                final=FINAL,
            )
        trajectories = await self._rewards.add_to([rollout.trajectory() for rollout in rollouts])
        if self._cfg.zero_reward_on_non_stop:
            trajectories = zero_reward_on_non_stop(trajectories)
        if self._cfg.apply_overlong_filtering:
            trajectories = leave_out_truncated(trajectories)
        return trajectories

    async def close(self) -> None:
        """See `GeneratorInterface.close`: no thread and no socket is left."""
        if self._endpoint is not None:
            await self._endpoint.close()
        if self._pool is not None:
            await asyncio.to_thread(self._pool.close)

    @asynccontextmanager
    async def _serving(self) -> AsyncIterator[Endpoint]:
        """The endpoint. Outside of rollouts it uses the engine for nobody: weights change then."""
        async with self._starting:
            if self._endpoint is None:
                endpoint = Endpoint(self._service)
                await endpoint.start(*self._address)
                self._endpoint = endpoint
        self._n_rolling += 1
        self._endpoint.serve_others()
        try:
            yield self._endpoint
        finally:
            self._n_rolling -= 1
            if self._n_rolling == 0:
                await self._endpoint.hold_others()

    async def _play_all(self, endpoint: Endpoint, sampling: SamplingParams, rollouts: Sequence[Rollout]) -> None:
        async with asyncio.TaskGroup() as tasks:
            for rollout in rollouts:
                tasks.create_task(self._play(endpoint, sampling, rollout))

    async def _play(self, endpoint: Endpoint, sampling: SamplingParams, rollout: Rollout) -> None:
        async with self._slots:
            session = endpoint.open_session(sampling, rollout.seed, rollout.request.id.to_string())
            started = time.perf_counter()
            try:
                result = await self._ask(endpoint.url(session), rollout, session)
            finally:
                await endpoint.end_session(session)
            rollout.generate_s = session.generate_s
            rollout.env_s = max(0.0, time.perf_counter() - started - session.generate_s)
        _take(rollout, session, result)

    async def _ask(self, base_url: str, rollout: Rollout, session: Session) -> AgentResult | None:
        """What the agent returns; None if it failed, which ends the rollout as invalid."""
        call = partial(
            self._agent,
            base_url=base_url,
            api_key=session.id,  # anything will do
            model=self._model_name,
            row=copy.deepcopy(rollout.request.row),  # agents append to its messages
            session_id=session.id,
        )
        limit = asyncio.timeout(None if self._pool else self._limit_s)
        try:
            async with limit:
                returned = await (self._pool.run(call) if self._pool else call())  # type: ignore[misc]
            return _weighed(_checked(returned), self._cfg.reward_weights)
        except (Exception, SystemExit) as error:  # noqa: BLE001, the boundary of a rollout
            if isinstance(error, CallTimeout) or limit.expired():
                rollout.fail("agent_timeout", f"the agent was not done after {self._limit_s:g} s")
            elif isinstance(error, UnknownReward):
                rollout.fail("reward_unknown", str(error))
            else:
                _note_failure(rollout, session, error)
            return None


def _take(rollout: Rollout, session: Session, result: AgentResult | None) -> None:
    """Make the rollout what was recorded, and give it its reward."""
    turns = session.recording.turns
    rollout.turns = turns
    rollout.conversation = session.recording if turns else None
    if result is None:
        return
    rewards = result.reward if isinstance(result.reward, Sequence) else [result.reward]
    if any(record.result.stop_reason == "abort" for record in turns):
        rollout.fail("abort", "the engine was told to abort it")
    elif not turns:
        rollout.fail("agent_silent", "the agent returned without a reply of the model")
    elif isinstance(result.reward, Sequence) and len(rewards) != len(turns):
        error = f"the agent returned {len(rewards)} rewards for {len(turns)} replies; return one for each"
        rollout.fail("agent_error", error)
    else:
        rollout.reward_components = {name: float(value) for name, value in result.components.items()}
        rollout.env_metrics = dict(result.metrics)
        rollout.stop_reason = turns[-1].result.stop_reason
        for record, reward in zip(turns[-len(rewards) :], rewards, strict=True):
            record.reward = float(reward)  # type: ignore[arg-type]  # an unknown one was told before


def _weighed(result: AgentResult, weights: Mapping[str, float]) -> AgentResult:
    """With the weighted sum of its components for a reward, if any of them has a weight."""
    if not weights.keys() & result.components.keys():
        return result
    return replace(result, reward=sum(weights.get(name, 1.0) * value for name, value in result.components.items()))


def _note_failure(rollout: Rollout, session: Session, error: BaseException) -> None:
    """The agent's own fault, unless the engine failed it."""
    if session.engine_failure is not None:
        rollout.fail("engine_error", session.engine_failure, error)
    else:
        rollout.fail("agent_error", f"the agent raised {type(error).__name__}: {error}", error)


def _checked(returned: Any) -> AgentResult:
    """What an agent returned.

    Raises:
        EnvError: it is no reward.
        UnknownReward: it is None.
    """
    result = returned if isinstance(returned, AgentResult) else AgentResult(returned)
    if result.reward is None:
        raise UnknownReward("the agent returned None: the reward is unknown")
    reward = list(result.reward) if isinstance(result.reward, Sequence) else result.reward
    if not is_reward(reward) or (result.components and not is_reward(list(result.components.values()))):
        raise EnvError(f"the agent returned {returned!r}; rewards must be finite numbers")
    return result


def _check_config(cfg: GeneratorConfig) -> None:
    """ConfigError for settings of the agent loop that an agent of one's own cannot know."""
    not_here = {
        "step_wise_trajectories": cfg.step_wise_trajectories,
        "inject_context_status": cfg.inject_context_status,
        "use_conversation_multi_turn=false": not cfg.use_conversation_multi_turn,
        "max_response_length": cfg.max_response_length is not None,
    }
    named = [f"generator.{name}" for name, is_set in not_here.items() if is_set]
    if named:
        raise ConfigError(
            f"{', '.join(named)}: these shape the turns of an environment, and an endpoint's agents take their turns "
            "as they like; leave them out"
        )


def _is_async(agent: Agent) -> bool:
    return inspect.iscoroutinefunction(agent) or inspect.iscoroutinefunction(getattr(agent, "__call__", None))  # noqa: B004
