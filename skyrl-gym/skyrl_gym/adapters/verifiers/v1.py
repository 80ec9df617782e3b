"""Second-generation verifiers environments: tasksets, tasks with rewards, and environments with one agent.

An episode calls the hooks of `Env` as verifiers does, in an asyncio task that waits while the trainer samples.
Environments that need a container or a program are rejected: `skyrl_agent.harness.verifiers` trains them.
"""

# mypy: disable-error-code="import-untyped"

from __future__ import annotations

import asyncio
import inspect
import math
from collections.abc import Iterator, Mapping
from contextlib import AsyncExitStack
from typing import Any

import verifiers.v1 as vf
from verifiers.v1.configs.agent import agent_config_fields
from verifiers.v1.harnesses.null.harness import NullHarnessConfig

from skyrl_gym.adapters.settings import NO_LIMIT
from skyrl_gym.adapters.verifiers.agent import (
    MODEL,
    NEVER_S,
    Exchange,
    Question,
    TrainedAgent,
    TrainerInterception,
    initial_messages,
    to_answer,
)
from skyrl_gym.adapters.verifiers.turn import ChatTurn, EpisodeResult, ParsedReply, VerifiersError, next_turn
from skyrl_gym.envs.base_text_env import ConversationType

NO_CLIENT = vf.EvalClientConfig(base_url="http://trainer.invalid", api_key_var="NO_API_KEY")
"""An unreachable endpoint. verifiers requires an endpoint, but the trainer has none."""

TRAIN_PROGRAM = "train it with its program and runtime: skyrl-agent train verifiers"


class Tasks:
    """The rows of a taskset, and the configuration of the environment that plays them."""

    def __init__(self, name: str, args: Mapping[str, Any], env: Mapping[str, Any]) -> None:
        """Load the taskset. Raise ValueError if a dataset row cannot store its tasks."""
        self.name = name
        kind = vf.env_config_type(name, env.get("id", ""))
        self.config: vf.EnvConfig = kind.model_validate({**env, "taskset": {**args, "id": name}})
        self._taskset = vf.load_taskset(self.config.taskset)
        self.task_type = type(self._taskset).task_type()
        data_type = self.task_type.data_type()
        if excluded := [name for name, kept in data_type.model_fields.items() if kept.exclude]:
            raise ValueError(
                f"{data_type.__name__} excludes {', '.join(excluded)} from its JSON, so rows cannot store them"
            )

    @property
    def is_infinite(self) -> bool:
        return not self._taskset.bounded

    def rows(self, split: str) -> Iterator[dict[str, Any]]:
        """Yield the taskset's rows. Raises ValueError for any split except ``train``."""
        if split != "train":
            raise ValueError(f"split={split!r} is unknown: tasksets have no splits; use the arguments of {self.name}")
        return map(self._row, self._taskset)

    def task(self, row_input: Mapping[str, Any]) -> vf.Task:
        """Create the task of a row. Raises pydantic's ValidationError if the row does not fit."""
        return self.task_type(self.task_type.data_type().model_validate(row_input), self.config.taskset.task)

    def _row(self, task: vf.Task) -> dict[str, Any]:
        data = task.data
        first = initial_messages(data.system_prompt, data.prompt)
        first = first or [{"role": "user", "content": data.description or ""}]
        return {
            "prompt": ChatTurn(first).prompt(describe_tools=False),
            "input": data.model_dump(mode="json", exclude_defaults=True),
            "example_id": data.idx,
            "answer": str(getattr(data, "answer", "")),
            "route": [],
        }


class TasksetPackage(Tasks):
    """A `Package` with a second-generation taskset, played as a chat in this process."""

    def __init__(self, name: str, args: Mapping[str, Any], env: Mapping[str, Any]) -> None:
        super().__init__(name, args, env)
        self._role = _only_role(self.config)
        if self.task_type.NEEDS_CONTAINER:
            raise ValueError(f"{self.task_type.__name__} needs a container (NEEDS_CONTAINER); {TRAIN_PROGRAM}")

    def episode(self, row_input: Mapping[str, Any], max_turns: int) -> TasksetEpisode:
        """Create a rollout in a new environment of the same configuration."""
        task = self.task(row_input)
        spec = agent_config_fields(self.config)[self._role]
        graders = [hook.__name__ for hook in task.hooks("reward") if "runtime" in inspect.signature(hook).parameters]
        if graders and spec.harness is None:
            raise ValueError(
                f"{self.name}: the reward {graders[0]} looks at the agent's files, but a chat has no shell; "
                f"{TRAIN_PROGRAM}. If the tools of the task change them, set "
                f"environment.skyrl_gym.verifiers.env.{self._role}.harness.id=null"
            )
        return TasksetEpisode(vf.load_environment(_with_trainer(self.config, self._role, max_turns)), task)


class TasksetEpisode:
    """A `VerifiersEpisode` of a taskset.

    Until it ends, it holds three file descriptors and a folder in verifiers' cache.
    """

    def __init__(self, env: vf.Env[Any], task: vf.Task) -> None:
        self._env = env
        self._task = task
        self._exchange = Exchange()
        self._playing: asyncio.Task[EpisodeResult] | None = None
        self._question: Question | None = None
        self._messages: list[dict[str, Any]] = []
        self._n_turns = 0

    async def start(self, prompt: ConversationType) -> ChatTurn:
        """Start the environment with its task's prompt. `prompt` is ignored."""
        self._playing = asyncio.create_task(self._play())
        turn = await self._next()
        if isinstance(turn, EpisodeResult):
            raise VerifiersError(f"{self._name} ended before the first reply ({turn.stop_condition})")
        return turn

    async def reply(self, reply: ParsedReply) -> ChatTurn | EpisodeResult:
        """Answer the open question, and return the next turn or the result."""
        question, self._question = self._question, None
        if question is None or question.answer.done():
            raise VerifiersError(f"{self._name} no longer waits for a reply")
        self._n_turns += 1
        answer = to_answer(reply, self._n_turns)
        self._messages.append(_dict(answer.message))
        question.answer.set_result(answer)
        return await self._next()

    async def close(self) -> None:
        """Cancel the episode if it is running. Idempotent."""
        playing, self._playing = self._playing, None
        if playing is None:
            return
        playing.cancel()
        await asyncio.wait([playing])
        if not playing.cancelled():
            playing.result()

    async def _next(self) -> ChatTurn | EpisodeResult:
        """Wait for the environment's next question or the result of the episode."""
        assert self._playing is not None
        next_question = asyncio.create_task(self._exchange.question())
        try:
            await asyncio.wait([self._playing, next_question], return_when=asyncio.FIRST_COMPLETED)
            if not self._playing.done():
                self._question = next_question.result()
                request = self._question.request
                before, self._messages = self._messages, [_dict(message) for message in request.messages]
                tools = [_function(tool) for tool in request.tools or []]
                return next_turn(before, self._messages, tools)
        finally:
            next_question.cancel()
        playing, self._playing = self._playing, None
        return playing.result()

    async def _play(self) -> EpisodeResult:
        """Run the episode, from the environment's `start` to its `stop`."""
        env, task = self._env, self._task
        episode: vf.Episode = vf.Episode(
            env=vf.EnvInfo(id=env.config.env_id),
            task=vf.TraceTask(type=type(task).__name__, data=task.data, key=task.key, hash=task.hash),
        )
        async with AsyncExitStack() as stack:
            tools = await stack.enter_async_context(env.shared_tools())
            server = await stack.enter_async_context(TrainerInterception(self._exchange, tools))
            agents = vf.Agents(
                env.config, lambda name, spec: TrainedAgent(spec, name, self._exchange, server, tools, episode.traces)
            )
            stack.push_async_callback(env.stop)
            await env.start()
            await env.setup(agents)
            await env.run(task, agents)
            if not episode.traces:
                raise VerifiersError(f"{type(env).__name__}.run ran no agent on a task of {self._name}")
            await env.finalize(task, episode)
        trace = episode.traces[0]
        if not trace.ok:
            error = trace.last_error
            raise VerifiersError(f"{self._name}: {f'{error.type}: {error.message}' if error else 'not completed'}")
        return read_result(trace, self._name)

    @property
    def _name(self) -> str:
        return f"{self._env.config.env_id} ({type(self._task).__name__})"


def read_result(trace: vf.Trace, name: str) -> EpisodeResult:
    """Return the reward of a completed trace, and its metrics. Raise VerifiersError if it was not scored."""
    unscored = [key for key, reward in trace.rewards.items() if reward is None]
    if unscored or not trace.rewards:
        missing = ", ".join(unscored) or "no reward"
        raise VerifiersError(f"{name} was not scored: {missing} ({trace.stop_condition})")
    rewards = {key: reward for key, reward in trace.rewards.items() if reward is not None}
    if not math.isfinite(trace.reward):
        raise VerifiersError(f"the reward of {name} is {trace.reward}, the sum of {rewards}")
    scores = {key: reward.score for key, reward in rewards.items()}
    metrics = {key: metric for key, metric in trace.metrics.items() if metric is not None}
    components = {key: reward.value for key, reward in rewards.items()}
    return EpisodeResult(trace.reward, components, {**metrics, **scores}, trace.stop_condition)


def _only_role(config: vf.EnvConfig) -> str:
    """Return the name of the trained agent.

    Raises:
        ValueError: there are several agents, or the agent needs more than a chat.
    """
    kind = vf.environment_class(config.taskset.id, config.id).__name__
    roles = agent_config_fields(config)
    if len(roles) != 1:
        raise ValueError(f"{kind} has the agents {', '.join(roles) or 'none'}, and a chat has one; {TRAIN_PROGRAM}")
    [(role, spec)] = roles.items()
    harness = config.agent_harnesses()[role]
    is_chat = harness.id == "null" or (spec.harness is None and harness.id == "bash")  # bash is the default
    if not is_chat:
        raise ValueError(
            f"{kind} plays {role} with {type(harness).__name__} ({harness.id}), a separate program; "
            f"{TRAIN_PROGRAM}. If a chat with the tools of the task is sufficient, set "
            f"environment.skyrl_gym.verifiers.env.{role}.harness.id=null"
        )
    if "runtime" in spec.model_fields_set and not isinstance(spec.runtime, vf.SubprocessConfig):
        raise ValueError(f"{kind} runs {role} in {type(spec.runtime).__name__}, and a chat in none; {TRAIN_PROGRAM}")
    return role


def _with_trainer(config: vf.EnvConfig, role: str, max_turns: int) -> vf.EnvConfig:
    """Return the configuration with the trainer as agent, and without verifiers' retries and time limits."""
    spec = agent_config_fields(config)[role]
    limits = [limit for limit in (spec.max_turns, max_turns) if limit is not None and limit != NO_LIMIT]
    harness = spec.harness if isinstance(spec.harness, NullHarnessConfig) else NullHarnessConfig(id="null")
    trained_spec = spec.model_copy(
        update={
            "harness": harness,
            "runtime": vf.SubprocessConfig(),
            "model": MODEL,
            "client": NO_CLIENT,
            "max_turns": min(limits, default=None),
            "retries": vf.RetryConfig(),
            "timeout": spec.timeout.model_copy(update={"rollout": NEVER_S}),
        }
    )
    return config.model_copy(update={role: trained_spec})


def _dict(message: Any) -> dict[str, Any]:
    fields: dict[str, Any] = message.model_dump(exclude_none=True)
    return fields


def _function(tool: vf.Tool) -> dict[str, Any]:
    function = {"name": tool.name, "description": tool.description, "parameters": tool.parameters}
    return {"type": "function", "function": function}
