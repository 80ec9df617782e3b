"""Environments of verifiers' first generation: `load_environment`, rollouts that are a dict of state, and rubrics.

What `MultiTurnEnv.rollout` does in a loop around the model, an episode does from one reply to the next. It needs
verifiers before 0.3, of which nothing is imported before an environment is loaded.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import json
import math
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from types import SimpleNamespace
from typing import Any

from skyrl_gym.adapters.verifiers_turn import Outcome, Reply, Turn, VerifiersError, next_turn
from skyrl_gym.envs.base_text_env import ConversationType

MODEL = "policy"
NO_TOOL_CALLED = "no_tools_called"
"""The stop condition of `ToolEnv` for a reply without calls."""

_failures: ContextVar[list[Exception] | None] = ContextVar("failures of reward functions", default=None)


class EnvironmentPackage:
    """See `Package`. The environment is shared by all rollouts, which keep what is theirs in their state."""

    is_infinite = False

    def __init__(self, name: str, args: Mapping[str, Any]) -> None:
        self._vf: Any = importlib.import_module("verifiers")
        with _own_signals():
            self._env = self._vf.load_environment(name, **args)
        self._name = name
        for rubric in _rubrics(self._env):
            rubric.funcs = [_noted(function) for function in rubric.funcs]

    def rows(self, split: str) -> Iterator[dict[str, Any]]:
        """See `Package.rows`."""
        if split not in ("train", "eval"):
            raise ValueError(f"split={split!r} is unknown; {self._name} has train and eval")
        dataset = self._env.get_dataset() if split == "train" else self._env.get_eval_dataset()
        return map(self._row, dataset)

    def episode(self, row_input: Mapping[str, Any], max_turns: int) -> EnvironmentEpisode:
        """See `Package.episode`."""
        env, row_input = _routed(self._vf, self._env, row_input)
        return EnvironmentEpisode(self._vf, env, row_input, max_turns)

    def _row(self, row: Mapping[str, Any]) -> dict[str, Any]:
        row_input = {name: value for name, value in row.items() if name != "prompt" and value is not None}
        prompt = _normalized(_without_none(row["prompt"]), "prompt")
        route = _info(row_input).get("env_id")
        return {
            "prompt": Turn(_dicts(prompt)).prompt(describe_tools=False),
            "input": row_input,
            "example_id": row_input["example_id"],
            "answer": str(row_input.get("answer", "")),
            "route": [route] if isinstance(route, str) else list(route or []),
        }


class EnvironmentEpisode:
    """See `Episode`."""

    def __init__(self, vf: Any, env: Any, row_input: Mapping[str, Any], max_turns: int) -> None:
        _check(vf, env)
        self._vf = vf
        self._env = env
        self._input = row_input
        self._max_turns = max_turns
        self._state: Any = None
        self._prompt: Any = None
        self._n_turns = 0
        self._is_released = False

    async def begin(self, prompt: ConversationType) -> Turn:
        """See `Episode.begin`."""
        row_input = {**self._input, "prompt": prompt}
        self._state = await self._env.init_state(row_input, _no_client(self._vf), MODEL)
        self._state["timing"].generation.start = time.time()
        self._state = await self._noting(self._env.setup_state(self._state)) or self._state
        messages = await self._next_prompt(None)
        if messages is None:
            await self._score()
            raise VerifiersError(f"{self._name} is over ({self._state['stop_condition']}) before anybody says a word")
        return Turn(messages, 0, self._tools())

    async def reply(self, reply: Reply) -> Turn | Outcome:
        """See `Episode.reply`."""
        self._n_turns += 1
        response = self._response(reply)
        await self._noting(self._env.add_model_response(self._state, self._prompt, response))
        before = [*_dicts(self._prompt), *_dicts(self._said())]
        after = await self._next_prompt(reply.problem)
        return await self._score() if after is None else next_turn(before, after, self._tools())

    async def close(self) -> None:
        """See `Episode.close`."""
        if self._state is None or self._is_released:
            return
        try:
            await self._release()
        finally:
            await self._env.rubric.cleanup(self._state)

    async def _next_prompt(self, problem: str | None) -> list[dict[str, Any]] | None:
        """What the model reads next; None where the episode is over. `problem` is what the last reply did wrong."""
        while not await self._is_over(tries_to_call=problem is not None):
            if problem is not None:
                self._prompt = [*self._prompt, *self._said(), self._vf.UserMessage(content=problem)]
                return _dicts(self._prompt)
            messages = await self._noting(self._env.get_prompt_messages(self._state))
            if messages is not None and self._state.get("final_env_response") is None:
                self._prompt = _normalized(messages, "prompt_messages")
                return _dicts(self._prompt)
        return None

    async def _is_over(self, tries_to_call: bool) -> bool:
        state = self._state
        is_over: bool = await self._env.is_completed(state)
        if is_over and tries_to_call and state["stop_condition"] == NO_TOOL_CALLED:
            is_over = state["is_completed"] = False
            state["stop_condition"] = None
        if not is_over and self._n_turns >= self._max_turns:
            is_over = state["is_completed"] = True
            state["stop_condition"] = "max_turns_reached"
        return is_over

    async def _noting(self, awaited: Awaitable[Any]) -> Any:
        """What a method of the environment returns. An error of verifiers goes to the state, as it does there."""
        try:
            return await awaited
        except self._vf.OverlongPromptError:
            self._state["prompt_too_long"] = self._state["is_truncated"] = True
        except self._vf.Error as error:
            self._state["error"] = error
        return None

    def _response(self, reply: Reply) -> Any:
        """A reply as a client of verifiers returns it."""
        types = self._vf.types
        calls = [
            types.ToolCall(id=f"call_{self._n_turns}_{i}", name=call.name, arguments=json.dumps(call.arguments))
            for i, call in enumerate(reply.calls)
        ]
        message = types.ResponseMessage(
            content=reply.text,
            tool_calls=calls or None,
            finish_reason="tool_calls" if calls else "stop",
            is_truncated=False,
        )
        return types.Response(id=f"reply_{self._n_turns}", created=int(time.time()), model=MODEL, message=message)

    def _said(self) -> Any:
        """The model's last message, as the environment keeps it."""
        return self._state["trajectory"][-1]["completion"]

    def _tools(self) -> list[dict[str, Any]]:
        described = [tool.model_dump(exclude_none=True) for tool in self._state["tool_defs"] or []]
        return [{"type": "function", "function": function} for function in described]

    async def _score(self) -> Outcome:
        """Clean up, and let the rubric judge, in the order of verifiers."""
        state = self._state
        try:
            await self._release()
            error = state.get("error")
            if error is not None and not _is_of_model(self._vf, error):
                raise VerifiersError(f"{self._name}: {type(error).__name__}: {error}") from error
            with _noting_failures() as failures:
                await self._env.rubric.score_rollout(state)
        finally:
            await self._env.rubric.cleanup(state)
        for failure in failures:
            if _is_of_infrastructure(self._vf, failure):
                raise VerifiersError(f"a reward function of {self._name}: {failure!r}") from failure
        return self._outcome(len(failures))

    async def _release(self) -> None:
        self._is_released = True
        await self._env.cleanup(self._state)

    def _outcome(self, n_failures: int) -> Outcome:
        reward, scores = self._state["reward"], dict(self._state["metrics"] or {})
        weights = {
            function.__name__: weight
            for rubric in _rubrics(self._env)
            for function, weight in zip(rubric.funcs, rubric.weights, strict=True)
            if weight
        }
        components = {name: scores[name] * weight for name, weight in weights.items() if name in scores}
        if not math.isfinite(reward):
            raise VerifiersError(f"the reward of {self._name} is {reward}, of {scores}")
        adds_up = math.isclose(sum(components.values()), reward, abs_tol=1e-9)
        metrics = {**scores, "failed_reward_functions": n_failures}
        return Outcome(float(reward), components if adds_up else {}, metrics, self._state["stop_condition"])

    @property
    def _name(self) -> str:
        return self._env.env_id or type(self._env).__name__


def _check(vf: Any, env: Any) -> None:
    """Raises ValueError for an environment that cannot be played reply by reply, or whose rewards compare rollouts."""
    name = f"{env.env_id or 'the environment'} ({type(env).__name__})"
    if not isinstance(env, vf.MultiTurnEnv):
        raise ValueError(f"{name} is no MultiTurnEnv, and cannot be played turn by turn")
    if type(env).rollout is not vf.MultiTurnEnv.rollout:
        raise ValueError(f"{name} has a rollout of its own, which calls the model itself; it cannot be played here")
    groups = [f.__name__ for rubric in _rubrics(env) for f in rubric.funcs if rubric._is_group_func(f)]
    if groups:
        raise ValueError(
            f"{name} rewards rollouts in comparison with others, by {', '.join(groups)}; here each is rewarded alone: "
            "give the function singular arguments (completion, state, …), or leave it out"
        )
    if not env.score_rollouts:
        raise ValueError(f"{name} has score_rollouts=False, so that its rewards are never computed; set it to True")


def _routed(vf: Any, env: Any, row_input: Mapping[str, Any]) -> tuple[Any, dict[str, Any]]:
    """The member of an `EnvGroup` that plays a row, and the row as that member knows it."""
    row_input = dict(row_input)
    while isinstance(env, vf.EnvGroup):
        info = _info(row_input)
        route = info.pop("env_id", None)
        name, *rest = [route] if isinstance(route, str) else route or env.env_names[:1]
        env = env.get_env_for_name(name)
        if rest:
            info["env_id"] = rest[0] if len(rest) == 1 else rest
        row_input["info"] = info
    return env, row_input


def _info(row_input: Mapping[str, Any]) -> dict[str, Any]:
    info = row_input.get("info") or {}
    return dict(json.loads(info) if isinstance(info, str) else info)


def _rubrics(env: Any) -> Iterator[Any]:
    """All rubrics of an environment that may have functions of their own; those of the members of a group, too."""
    waiting = [env.rubric]
    while waiting:
        rubric = waiting.pop(0)
        waiting += getattr(rubric, "rubrics", [])
        yield rubric
    for member in getattr(env, "envs", []):
        yield from _rubrics(member)


def _normalized(messages: Any, name: str) -> Any:
    """Messages as verifiers has them, from those that environments and datasets write as dicts."""
    module: Any = importlib.import_module("verifiers.utils.message_utils")
    return module.normalize_messages(messages, field_name=name)


def _dicts(messages: Any) -> list[dict[str, Any]]:
    return [message.model_dump(exclude_none=True) for message in messages]


def _without_none(prompt: Any) -> Any:
    """A prompt without the fields that a dataset added because another row has them."""
    if isinstance(prompt, list):
        return [{name: value for name, value in message.items() if value is not None} for message in prompt]
    return prompt


def _is_of_model(vf: Any, error: Exception) -> bool:
    """Whether the model called a tool wrongly, in an environment that stops at that."""
    return isinstance(error, vf.ToolError) and not _is_of_infrastructure(vf, error)


def _is_of_infrastructure(vf: Any, error: BaseException | None) -> bool:
    """Whether an error, or one that led to it, is of a sandbox, a connection, a judge, a file."""
    import httpx
    import openai

    kinds = (vf.InfraError, vf.ModelError, OSError, httpx.HTTPError, openai.OpenAIError)
    while error is not None:
        if isinstance(error, kinds):
            return True
        error = error.__cause__ or error.__context__
    return False


def _noted(function: Callable[..., Any]) -> Callable[..., Any]:
    """A reward function whose errors can be told apart: verifiers makes a reward of 0 of all of them."""

    @functools.wraps(function)
    def noted(*args: Any, **kwargs: Any) -> Any:
        with _noting_one():
            score = function(*args, **kwargs)
        return awaited(score) if inspect.isawaitable(score) else score

    async def awaited(score: Awaitable[Any]) -> Any:
        with _noting_one():
            return await score

    return noted


@contextmanager
def _noting_one() -> Iterator[None]:
    try:
        yield
    except Exception as failure:
        if (failures := _failures.get()) is not None:
            failures.append(failure)
        raise


@contextmanager
def _noting_failures() -> Iterator[list[Exception]]:
    """The errors of reward functions while this lasts."""
    failures: list[Exception] = []
    token = _failures.set(failures)
    try:
        yield failures
    finally:
        _failures.reset(token)


@contextmanager
def _own_signals() -> Iterator[None]:
    """Keeps verifiers from handling SIGINT and SIGTERM: the trainer does, and only the main thread may."""
    module: Any = importlib.import_module("verifiers.envs.environment")
    signal = module.signal
    module.signal = SimpleNamespace(**{**vars(signal), "signal": lambda *_: None})
    try:
        yield
    finally:
        module.signal = signal


def _no_client(vf: Any) -> Any:
    """A client for states that need one. Nobody may call it: the trainer's model answers between turns, not within."""
    client_type: Any = importlib.import_module("verifiers.clients").Client

    async def refuse(*_: Any, **__: Any) -> Any:
        raise RuntimeError("the environment asks the model within a turn, which only its own loop could answer")

    methods = {**dict.fromkeys(client_type.__abstractmethods__, refuse), "get_response": refuse}
    return type("NoClient", (client_type,), methods)(None)
