"""Environments of verifiers' second generation: tasksets, tasks with rewards, and environments of one agent.

An episode is played as verifiers plays it, by the hooks of `Env`, in a task of the event loop that rests while the
trainer samples. It needs no container: what does is refused.
"""

# mypy: disable-error-code="import-untyped"

from __future__ import annotations

import asyncio
import math
from collections.abc import Iterator, Mapping
from contextlib import AsyncExitStack
from typing import Any

import verifiers.v1 as vf
from verifiers.v1.configs.agent import agent_config_fields
from verifiers.v1.harnesses.null.harness import NullHarnessConfig

from skyrl_gym.adapters.settings import NO_LIMIT
from skyrl_gym.adapters.verifiers_agent import (
    MODEL,
    NEVER_S,
    Exchange,
    Question,
    TrainedAgent,
    TrainerInterception,
    answer_of,
    opening,
)
from skyrl_gym.adapters.verifiers_turn import Outcome, Reply, Turn, VerifiersError, next_turn
from skyrl_gym.envs.base_text_env import ConversationType

NO_CLIENT = vf.EvalClientConfig(base_url="http://trainer.invalid", api_key_var="NO_API_KEY")
"""An endpoint that cannot be reached, for the record: the model is not behind one."""


class TasksetPackage:
    """See `Package`."""

    def __init__(self, name: str, args: Mapping[str, Any], env: Mapping[str, Any]) -> None:
        self._name = name
        kind = vf.env_config_type(name, env.get("id", ""))
        self._config = kind.model_validate({**env, "taskset": {**args, "id": name}})
        self._role = _only_role(self._config)
        self._env = vf.load_environment(_seated(self._config, self._role, NO_LIMIT))
        self._task_type = type(self._env.taskset).task_type()
        _check(self._task_type)

    @property
    def is_infinite(self) -> bool:
        """See `Package.is_infinite`."""
        return not self._env.taskset.bounded

    def rows(self, split: str) -> Iterator[dict[str, Any]]:
        """See `Package.rows`."""
        if split != "train":
            raise ValueError(f"split={split!r}: a taskset has no splits; choose tasks by the arguments of {self._name}")
        return map(self._row, self._env.taskset)

    def episode(self, row_input: Mapping[str, Any], max_turns: int) -> TasksetEpisode:
        """See `Package.episode`."""
        data = self._task_type.data_type().model_validate(row_input)
        env = vf.load_environment(_seated(self._config, self._role, max_turns))
        return TasksetEpisode(env, self._task_type(data, self._config.taskset.task))

    def _row(self, task: vf.Task) -> dict[str, Any]:
        data = task.data
        first = opening(data.system_prompt, data.prompt) or [{"role": "user", "content": data.description or ""}]
        return {
            "prompt": Turn(first).prompt(describe_tools=False),
            "input": data.model_dump(mode="json", exclude_defaults=True),
            "example_id": data.idx,
            "answer": str(getattr(data, "answer", "")),
            "route": [],
        }


class TasksetEpisode:
    """See `Episode`. While it lasts, it has three descriptors, and a folder in verifiers' cache."""

    def __init__(self, env: vf.Env[Any], task: vf.Task) -> None:
        self._env = env
        self._task = task
        self._exchange = Exchange()
        self._playing: asyncio.Task[Outcome] | None = None
        self._question: Question | None = None
        self._messages: list[dict[str, Any]] = []
        self._n_turns = 0

    async def begin(self, prompt: ConversationType) -> Turn:
        """See `Episode.begin`. The conversation begins as the task has it, and not with `prompt`."""
        self._playing = asyncio.create_task(self._play())
        turn = await self._next()
        if isinstance(turn, Outcome):
            raise VerifiersError(f"{self._name} is over ({turn.stop_condition}) before anybody says a word")
        return turn

    async def reply(self, reply: Reply) -> Turn | Outcome:
        """See `Episode.reply`."""
        question, self._question = self._question, None
        if question is None or question.answer.done():
            raise VerifiersError(f"{self._name} no longer waits for a reply")
        self._n_turns += 1
        answer = answer_of(reply, self._n_turns)
        self._messages.append(_dict(answer.message))
        question.answer.set_result(answer)
        return await self._next()

    async def close(self) -> None:
        """See `Episode.close`."""
        playing, self._playing = self._playing, None
        if playing is None:
            return
        playing.cancel()
        await asyncio.wait([playing])
        if not playing.cancelled():
            playing.result()

    async def _next(self) -> Turn | Outcome:
        """What the environment asks next, or what the episode was worth."""
        assert self._playing is not None
        asked = asyncio.create_task(self._exchange.question())
        try:
            await asyncio.wait([self._playing, asked], return_when=asyncio.FIRST_COMPLETED)
            if not self._playing.done():
                self._question = asked.result()
                return self._turn(self._question.request)
        finally:
            asked.cancel()
        playing, self._playing = self._playing, None
        return playing.result()

    def _turn(self, request: vf.Request) -> Turn:
        before, self._messages = self._messages, [_dict(message) for message in request.messages]
        tools = [_function(tool) for tool in request.tools or []]
        return next_turn(before, self._messages, tools)

    async def _play(self) -> Outcome:
        """One episode, from the environment's `start` to its `stop`."""
        env, task = self._env, self._task
        episode: vf.Episode = vf.Episode(
            env=vf.EnvInfo(id=env.config.env_id),
            task=vf.TraceTask(type=type(task).__name__, data=task.data, key=task.key, hash=task.hash),
        )
        async with AsyncExitStack() as stack:
            tools = await stack.enter_async_context(env.shared_tools())
            server = await stack.enter_async_context(TrainerInterception(self._exchange, tools))
            agents = vf.Agents(
                env.config,
                lambda name, spec: TrainedAgent(spec, name, self._exchange, server, tools, episode.traces),
            )
            stack.push_async_callback(env.stop)
            await env.start()
            await env.setup(agents)
            await env.run(task, agents)
            if not episode.traces:
                raise VerifiersError(f"{type(env).__name__}.run ran no agent on a task of {self._name}")
            await env.finalize(task, episode)
        return _outcome(self._name, episode.traces[0])

    @property
    def _name(self) -> str:
        return f"{self._env.config.env_id} ({type(self._task).__name__})"


def _only_role(config: vf.EnvConfig) -> str:
    """The agent that is trained.

    Raises:
        ValueError: there are several, or it is more than a chat.
    """
    kind = vf.environment_class(config.taskset.id, config.id).__name__
    roles = agent_config_fields(config)
    if len(roles) != 1:
        names = ", ".join(roles) or "none"
        raise ValueError(f"{kind} has the agents {names}; only environments of one agent are played here")
    [(role, spec)] = roles.items()
    harness = config.agent_harnesses()[role]
    is_chat = harness.id == "null" or (spec.harness is None and harness.id == "bash")  # bash is what nobody chose
    if not is_chat:
        raise ValueError(
            f"{kind} plays {role} with {type(harness).__name__} ({harness.id}), a program of its own; here it can only "
            "chat, with the tools of the task. If that will do, set "
            f"environment.skyrl_gym.verifiers.env.{role}.harness.id=null"
        )
    if "runtime" in spec.model_fields_set and not isinstance(spec.runtime, vf.SubprocessConfig):
        raise ValueError(f"{kind} runs {role} in {type(spec.runtime).__name__}; only subprocess is played here")
    return role


def _seated(config: vf.EnvConfig, role: str, max_turns: int) -> vf.EnvConfig:
    """The configuration with the trainer in the agent's seat. Who retries, and how long all may take, is up to it."""
    spec = agent_config_fields(config)[role]
    limits = [limit for limit in (spec.max_turns, max_turns) if limit is not None and limit != NO_LIMIT]
    harness = spec.harness if isinstance(spec.harness, NullHarnessConfig) else NullHarnessConfig(id="null")
    seat = spec.model_copy(
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
    return config.model_copy(update={role: seat})


def _check(task_type: type[vf.Task]) -> None:
    """Raises ValueError for tasks that need a container, or that a dataset cannot keep."""
    if task_type.NEEDS_CONTAINER:
        raise ValueError(f"{task_type.__name__} needs a container (NEEDS_CONTAINER), and there is none here")
    data_type = task_type.data_type()
    excluded = [name for name, kept in data_type.model_fields.items() if kept.exclude]
    if excluded:
        raise ValueError(f"{data_type.__name__} leaves {', '.join(excluded)} out of its JSON, so that rows lack them")


def _dict(message: Any) -> dict[str, Any]:
    fields: dict[str, Any] = message.model_dump(exclude_none=True)
    return fields


def _function(tool: vf.Tool) -> dict[str, Any]:
    function = {"name": tool.name, "description": tool.description, "parameters": tool.parameters}
    return {"type": "function", "function": function}


def _outcome(name: str, trace: vf.Trace) -> Outcome:
    """What a finished conversation was worth.

    Raises:
        VerifiersError: it failed, or nobody scored it.
    """
    if not trace.ok:
        error = trace.last_error
        raise VerifiersError(f"{name}: {f'{error.type}: {error.message}' if error else 'not completed'}")
    unscored = [key for key, reward in trace.rewards.items() if reward is None]
    if unscored or not trace.rewards:
        which = ", ".join(unscored) or "no reward"
        raise VerifiersError(f"{name} was not scored: {which} ({trace.stop_condition})")
    rewards = {key: reward for key, reward in trace.rewards.items() if reward is not None}
    if not math.isfinite(trace.reward):
        raise VerifiersError(f"the reward of {name} is {trace.reward}, the sum of {rewards}")
    scores = {key: reward.score for key, reward in rewards.items()}
    metrics = {key: metric for key, metric in trace.metrics.items() if metric is not None}
    components = {key: reward.value for key, reward in rewards.items()}
    return Outcome(trace.reward, components, {**metrics, **scores}, trace.stop_condition)
