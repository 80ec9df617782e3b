"""Rollouts of agents: programs that call the model under training over HTTP."""

import asyncio
import copy
import inspect
import logging
import time
from collections import Counter
from collections.abc import Awaitable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Protocol

from transformers import PreTrainedTokenizerBase

from skyrl_agent.endpoint.process import EndpointProcess
from skyrl_agent.endpoint.server import Endpoint
from skyrl_agent.endpoint.service import ModelService
from skyrl_agent.endpoint.session import AgentSession
from skyrl_gym.images import to_openai
from skyrl_gym.runtime.env_pool import ThreadPool
from skyrl_gym.runtime.text import describe_error
from skyrl_gym.runtime.validation import is_reward
from skyrl_train.algorithms.reward_pipeline import weigh_components
from skyrl_train.concurrency import gather_or_cancel
from skyrl_train.config.generator import GeneratorConfig
from skyrl_train.errors import ConfigError, EngineError, EngineLostError, EnvError, StalledError
from skyrl_train.generators.base import BatchMetadata, RolloutGenerator, RolloutRequest
from skyrl_train.generators.chat_template import load_chat_template
from skyrl_train.generators.rewards import RewardFunctions, is_async
from skyrl_train.generators.rollout import Rollout, play_until_valid
from skyrl_train.inference_engines.base import InferenceEngine, SamplingParams
from skyrl_train.types import PromptRow, StopReason, Trajectory
from skyrl_train.types.tokens import Phase
from skyrl_train.watchdog import AGENT, Wait

logger = logging.getLogger(__name__)

AGENT_TIMEOUT_S = 1800.0  # limit of agents if `generator.trajectory_timeout_seconds` is null


@dataclass(frozen=True, slots=True)
class AgentResult:
    """The result of an episode, e.g. `AgentResult(1.0, metrics={"solved": 1})`."""

    reward: float | Sequence[float] | None  # for the episode, or one for each reply in order; None: unknown
    components: Mapping[str, float] = field(default_factory=dict)  # totals by name
    metrics: Mapping[str, Any] = field(default_factory=dict)  # `environment/*`


class Agent(Protocol):
    """A function, blocking or async, that solves the task of a row with any client of OpenAI's or Anthropic's API.

    A blocking agent runs in a thread. An async agent runs in the trainer's event loop and must not block it.
    """

    def __call__(
        self, *, base_url: str, api_key: str, model: str, row: PromptRow, session_id: str
    ) -> float | AgentResult | Awaitable[float | AgentResult | None] | None:
        """Solve the task and return the reward. The requests to `base_url` until then form the trajectory.

        `row.prompt` is in OpenAI's format, with images as data URLs.
        """


class NoReward(EnvError):
    """A rollout has no reward. `stop_reason` becomes the stop reason of the invalid trajectory."""

    def __init__(self, stop_reason: str, message: str) -> None:
        super().__init__(message)
        self.stop_reason = stop_reason


class AgentGenerator(RolloutGenerator):
    """A generator that serves the model to agents and trains on the recorded requests.

    Sampling, the chat template, retries, filters and time limits follow `generator.*`. Agents control their own turns.
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
        in_own_process: bool = True,
        trains_side_requests: bool = False,
    ) -> None:
        """Prepare the server. It starts with the first rollout.

        Args:
            agent: The program to train.
            model_name: The model name that requests use.
            host: The address to listen on.
            port: The port to listen on. 0 picks a free port.
            public_url: The server's address for agents on other machines.
            max_concurrent_agents: Maximum number of rollouts at once.
            in_own_process: Run the server in a separate process. False runs it in the trainer's event loop: it starts
                faster, but requests and the trainer then wait for each other.
            trains_side_requests: Train on the replies to requests with neither tools nor earlier replies, such as the
                title of a conversation, even if the agent offers tools in other requests.

        Raises:
            ConfigError: a setting applies only to the turns of environments.
        """
        unsupported = {
            "step_wise_trajectories": generator_cfg.step_wise_trajectories,
            "inject_context_status": generator_cfg.inject_context_status,
            "use_conversation_multi_turn=false": not generator_cfg.use_conversation_multi_turn,
            "max_response_length": generator_cfg.max_response_length is not None,
        }
        if named := [f"generator.{name}" for name, is_set in unsupported.items() if is_set]:
            raise ConfigError(
                f"{', '.join(named)}: agents control their own turns, so only environments can use this; remove it"
            )
        self._agent = agent
        self.generator_cfg = generator_cfg
        self._address = (host, port, public_url)
        self._make_service = partial(
            ModelService,
            tokenizer=tokenizer,
            model_name=model_name,
            chat_template=load_chat_template(generator_cfg.chat_template),
            chat_template_kwargs=generator_cfg.chat_template_kwargs,
            ends_stopped_turns=generator_cfg.append_eos_token_after_stop_str_in_multi_turn,
            max_input_length=generator_cfg.max_input_length if generator_cfg.max_turns > 1 else None,
        )
        self._engine, self._model_name, self._in_own_process = inference_engine_client, model_name, in_own_process
        self._rewards = RewardFunctions(generator_cfg, self._make_service(self._engine).chat)
        self._limit_s = generator_cfg.trajectory_timeout_seconds or AGENT_TIMEOUT_S
        self._slots = asyncio.Semaphore(max_concurrent_agents)
        self._pool = None if is_async(agent) else ThreadPool(max_concurrent_agents, None, "skyrl-agent")
        self._endpoint: Endpoint | EndpointProcess | None = None
        self._starting = asyncio.Lock()
        self._n_rolling = 0
        self._trains_side_requests = trains_side_requests
        self._counts: dict[Phase, list[Counter[str]]] = {"train": [], "eval": []}  # since the last `take_metrics`

    async def rollout(
        self, requests: Sequence[RolloutRequest], sampling: SamplingParams, metadata: BatchMetadata
    ) -> list[Trajectory]:
        """Return one trajectory per request, in order. If an agent fails, its trajectory is invalid, not scored 0."""

        async def play(rollouts: Sequence[Rollout]) -> None:
            await gather_or_cancel(self._play(sampling, rollout) for rollout in rollouts)

        n_retries = self.generator_cfg.n_rollout_retries
        # Outside of rollouts, requests without a session wait, because weights may change.
        self._n_rolling += 1
        try:
            await (await self._get_endpoint()).serve_others()
            trajectories = await play_until_valid(requests, metadata, play, n_retries=n_retries)
        finally:
            self._n_rolling -= 1
            if self._n_rolling == 0 and self._endpoint is not None:
                with suppress(EngineLostError):  # a process that has ended holds no requests
                    await self._endpoint.hold_others()
        return await self._rewards.add_to(trajectories)

    def take_metrics(self, phase: Phase = "train") -> dict[str, float]:
        """Return `agent/*` if any rollout offered tools."""
        rollouts, self._counts[phase] = self._counts[phase], []
        with_tools = [counts for counts in rollouts if counts["with_tools"]]
        if not with_tools:
            return {}
        n_without_calls = sum(not counts["with_calls"] for counts in with_tools)
        totals = sum(rollouts, Counter())
        return {
            "agent/no_tool_calls": n_without_calls / len(with_tools),
            "agent/malformed_tool_calls": totals["malformed"] / totals["with_tools"],
            "agent/side_requests": float(totals["side"]),
            "agent/repeated_replies": float(totals["repeated"]),
        }

    async def close(self) -> None:
        """Close the server and end all threads."""
        if self._endpoint is not None:
            await self._endpoint.close()
        if self._pool is not None:
            await self._pool.close()

    async def _get_endpoint(self) -> Endpoint | EndpointProcess:
        """Return the endpoint. Start it on first use, and restart it if its process has crashed."""
        async with self._starting:
            if isinstance(self._endpoint, EndpointProcess) and self._endpoint.is_lost:
                logger.warning("The endpoint's process has crashed; starting a new one")
                await self._endpoint.close()
                self._endpoint = None
            if self._endpoint is None:
                engine, make = self._engine, self._make_service
                endpoint = EndpointProcess(engine, make) if self._in_own_process else Endpoint(make(engine))
                await endpoint.start(*self._address)
                self._endpoint = endpoint
            return self._endpoint

    async def _play(self, sampling: SamplingParams, rollout: Rollout) -> None:
        async with self._slots:
            try:
                endpoint = await self._get_endpoint()
                session = await endpoint.open_session(sampling, rollout.seed, rollout.session_id)
            except (EngineLostError, StalledError) as error:
                is_stalled = isinstance(error, StalledError)
                rollout.fail(StopReason.STALLED if is_stalled else StopReason.ENGINE_ERROR, str(error), error)
                return
            started = time.perf_counter()
            with _invalidate_on_error(rollout, session):
                try:
                    with Wait(AGENT, rollout, f"session {session.id}", self._limit_s):
                        returned = await self._call_agent(endpoint.url(session), session.id, rollout.request.row)
                finally:
                    await endpoint.end_session(session)
                    rollout.conversation = session.recording if session.recording.turns else None
                    if session.counts["with_tools"] and not self._trains_side_requests:
                        session.counts["side"] = session.recording.exclude_side_rows()
                    self._counts[rollout.request.id.phase].append(session.counts)
                    rollout.generate_s = session.generate_s
                    rollout.env_s = max(0.0, time.perf_counter() - started - session.generate_s)
                _apply_result(rollout, returned, self.generator_cfg.reward_weights, session.counts["side"])

    async def _call_agent(self, base_url: str, session_id: str, row: PromptRow) -> Any:
        """Call the agent and return its result, or raise NoReward if it exceeds its time limit."""
        call = partial(
            self._agent,
            base_url=base_url,
            api_key=session_id,  # not checked
            model=self._model_name,
            row=copy.deepcopy(replace(row, prompt=to_openai(row.prompt))),  # agents may append to its messages
            session_id=session_id,
        )
        limit = asyncio.timeout(self._limit_s)
        try:
            async with limit:
                returned = await self._pool.run(call) if self._pool else call()
                return await returned if inspect.isawaitable(returned) else returned
        except TimeoutError as error:
            if not limit.expired():  # the agent raised it
                raise
            raise NoReward(StopReason.AGENT_TIMEOUT, f"the agent did not finish within {self._limit_s:g} s") from error


@contextmanager
def _invalidate_on_error(rollout: Rollout, session: AgentSession) -> Iterator[None]:
    """Make the rollout invalid if its agent raises or the engine failed at the end. Its own cancellation propagates.

    An agent may catch the error of a failed request and still return a reward.
    """
    try:
        yield
        if session.engine_failure is not None:
            raise EngineError(session.engine_failure)
    except (Exception, SystemExit, asyncio.CancelledError) as error:
        task = asyncio.current_task()
        if isinstance(error, asyncio.CancelledError) and task is not None and task.cancelling():
            raise
        failure = str(error) if isinstance(error, EngineLostError) else session.engine_failure
        if failure is not None:
            rollout.fail(StopReason.ENGINE_ERROR, failure, error)
        elif isinstance(error, NoReward):
            rollout.fail(error.stop_reason, str(error))
        else:
            rollout.fail(StopReason.AGENT_ERROR, f"the agent raised {describe_error(error)}", error)


def _apply_result(rollout: Rollout, returned: Any, weights: Mapping[str, float], n_side: int) -> None:
    """Set the rewards of the turns from the agent's result, and end the rollout. Raise NoReward if it is invalid.

    The first `n_side` turns are not trained on and get no reward.
    """
    result = returned if isinstance(returned, AgentResult) else AgentResult(returned)
    reward = list(result.reward) if isinstance(result.reward, Sequence) else result.reward
    if reward is None:
        raise NoReward(StopReason.REWARD_UNKNOWN, "the agent returned None: the reward is unknown")
    if not isinstance(result.components, Mapping) or not isinstance(result.metrics, Mapping):
        raise NoReward(
            StopReason.AGENT_ERROR, f"the agent returned {returned!r}; components and metrics must be mappings"
        )
    if not is_reward(reward) or (result.components and not is_reward(list(result.components.values()))):
        raise NoReward(StopReason.AGENT_ERROR, f"the agent returned {returned!r}; rewards must be finite numbers")
    components = {str(name): float(value) for name, value in result.components.items()}
    reward = weigh_components(reward, components, weights)
    turns = rollout.turns
    if any(turn.stop_reason == StopReason.ABORT for turn in turns):
        raise NoReward(StopReason.ABORT, "the engine aborted a request")
    if not turns:
        raise NoReward(StopReason.AGENT_SILENT, "the agent returned without any reply from the model")
    turns = turns[n_side:]
    rewards = reward if isinstance(reward, list) else [0.0] * (len(turns) - 1) + [reward]
    if len(rewards) != len(turns):
        message = f"the agent returned {len(rewards)} rewards for {len(turns)} replies; return one for each"
        raise NoReward(StopReason.AGENT_ERROR, message)
    for turn, value in zip(turns, rewards, strict=True):
        turn.reward = float(value)
    rollout.reward_components, rollout.env_metrics = components, dict(result.metrics)
    rollout.stop_reason = turns[-1].stop_reason
