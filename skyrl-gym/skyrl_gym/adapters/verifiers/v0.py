"""First-generation verifiers environments: `load_environment`, rollouts with a state dict, and rubrics.

`MultiTurnEnv.rollout` is a loop around the model. An episode runs that loop one reply at a time. This module needs
verifiers before 0.3, and imports it only when an environment is loaded.
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

from skyrl_gym.adapters.verifiers.turn import ChatTurn, EpisodeResult, ParsedReply, VerifiersError, next_turn
from skyrl_gym.envs.base_text_env import ConversationType

MODEL = "policy"
NO_TOOL_CALLED = "no_tools_called"
"""Stop condition of `ToolEnv` for a reply without calls."""

_failures: ContextVar[list[Exception] | None] = ContextVar("failures of reward functions", default=None)


class EnvironmentPackage:
    """A `Package` with a first-generation environment. Rollouts share it, but keep their own state."""

    is_infinite = False

    def __init__(self, name: str, args: Mapping[str, Any]) -> None:
        self._vf: Any = importlib.import_module("verifiers")
        with _ignored_signals():
            self._env = self._vf.load_environment(name, **args)
        self._name = name
        for rubric in _rubrics(self._env):
            rubric.funcs = [_record_errors(function) for function in rubric.funcs]

    def rows(self, split: str) -> Iterator[dict[str, Any]]:
        """Yield the rows of the split ``train`` or ``eval``."""
        if split not in ("train", "eval"):
            raise ValueError(f"split={split!r} is unknown; {self._name} has train and eval")
        dataset = self._env.get_dataset() if split == "train" else self._env.get_eval_dataset()
        return map(self._row, dataset)

    def episode(self, row_input: Mapping[str, Any], max_turns: int) -> EnvironmentEpisode:
        """Create a rollout in the environment, or in the group member that the row names."""
        env, member_input = self._env, dict(row_input)
        while isinstance(env, self._vf.EnvGroup):
            info = _info(member_input)
            route = info.pop("env_id", None)
            name, *rest = [route] if isinstance(route, str) else route or env.env_names[:1]
            env = env.get_env_for_name(name)
            if rest:
                info["env_id"] = rest[0] if len(rest) == 1 else rest
            member_input["info"] = info
        return EnvironmentEpisode(self._vf, env, member_input, max_turns)

    def _row(self, row: Mapping[str, Any]) -> dict[str, Any]:
        row_input = {name: value for name, value in row.items() if name != "prompt" and value is not None}
        prompt = _normalize(_without_none(row["prompt"]), "prompt")
        route = _info(row_input).get("env_id")
        return {
            "prompt": ChatTurn(_dicts(prompt)).prompt(describe_tools=False),
            "input": row_input,
            "example_id": row_input["example_id"],
            "answer": str(row_input.get("answer", "")),
            "route": [route] if isinstance(route, str) else list(route or []),
        }


class EnvironmentEpisode:
    """A `VerifiersEpisode` of a first-generation environment."""

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

    async def start(self, prompt: ConversationType) -> ChatTurn:
        """Set up the state, and return the first turn."""
        row_input = {**self._input, "prompt": prompt}
        self._state = await self._env.init_state(row_input, _no_client(self._vf), MODEL)
        self._state["timing"].generation.start = time.time()
        self._state = await self._record_error(self._env.setup_state(self._state)) or self._state
        messages = await self._next_prompt(None)
        if messages is None:
            await self._score()
            raise VerifiersError(f"{self._name} ended before the first reply ({self._state['stop_condition']})")
        return ChatTurn(messages, 0, self._tools())

    async def reply(self, reply: ParsedReply) -> ChatTurn | EpisodeResult:
        """Add the reply to the state, and return the next turn or the result."""
        self._n_turns += 1
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
        response = types.Response(id=f"reply_{self._n_turns}", created=int(time.time()), model=MODEL, message=message)
        await self._record_error(self._env.add_model_response(self._state, self._prompt, response))
        before = [*_dicts(self._prompt), *_dicts(self._last_message())]
        after = await self._next_prompt(reply.problem)
        return await self._score() if after is None else next_turn(before, after, self._tools())

    async def close(self) -> None:
        """Clean up the state. Idempotent."""
        if self._state is None or self._is_released:
            return
        try:
            await self._release()
        finally:
            await self._env.rubric.cleanup(self._state)

    async def _next_prompt(self, problem: str | None) -> list[dict[str, Any]] | None:
        """Return the next messages, or None if the episode is over. `problem` is the mistake in the last reply."""
        while not await self._is_over(has_invalid_calls=problem is not None):
            if problem is not None:
                self._prompt = [*self._prompt, *self._last_message(), self._vf.UserMessage(content=problem)]
                return _dicts(self._prompt)
            messages = await self._record_error(self._env.get_prompt_messages(self._state))
            if messages is not None and self._state.get("final_env_response") is None:
                self._prompt = _normalize(messages, "prompt_messages")
                return _dicts(self._prompt)
        return None

    async def _is_over(self, has_invalid_calls: bool) -> bool:
        state = self._state
        is_over: bool = await self._env.is_completed(state)
        if is_over and has_invalid_calls and state["stop_condition"] == NO_TOOL_CALLED:
            is_over = state["is_completed"] = False
            state["stop_condition"] = None
        if not is_over and self._n_turns >= self._max_turns:
            is_over = state["is_completed"] = True
            state["stop_condition"] = "max_turns_reached"
        return is_over

    async def _record_error(self, awaitable: Awaitable[Any]) -> Any:
        """Await an environment method, and store its errors in the state as verifiers does."""
        try:
            return await awaitable
        except self._vf.OverlongPromptError:
            self._state["prompt_too_long"] = self._state["is_truncated"] = True
        except self._vf.Error as error:
            self._state["error"] = error
        return None

    def _last_message(self) -> Any:
        """Return the model's last message as the environment stores it."""
        return self._state["trajectory"][-1]["completion"]

    def _tools(self) -> list[dict[str, Any]]:
        functions = [tool.model_dump(exclude_none=True) for tool in self._state["tool_defs"] or []]
        return [{"type": "function", "function": function} for function in functions]

    async def _score(self) -> EpisodeResult:
        """Clean up and score the rollout, in verifiers' order."""
        state = self._state
        try:
            await self._release()
            error = state.get("error")
            if error is not None and not _is_models_fault(self._vf, error):
                raise VerifiersError(f"{self._name}: {type(error).__name__}: {error}") from error
            with _collect_failures() as failures:
                await self._env.rubric.score_rollout(state)
        finally:
            await self._env.rubric.cleanup(state)
        for failure in failures:
            if _is_infrastructure_error(self._vf, failure):
                raise VerifiersError(f"a reward function of {self._name} failed: {failure!r}") from failure
        reward, scores = self._state["reward"], dict(self._state["metrics"] or {})
        weights = {
            function.__name__: weight
            for rubric in _rubrics(self._env)
            for function, weight in zip(rubric.funcs, rubric.weights, strict=True)
            if weight
        }
        components = {name: scores[name] * weight for name, weight in weights.items() if name in scores}
        if not math.isfinite(reward):
            raise VerifiersError(f"the reward of {self._name} is {reward}, computed from {scores}")
        adds_up = math.isclose(sum(components.values()), reward, abs_tol=1e-9)
        metrics = {**scores, "failed_reward_functions": len(failures)}
        return EpisodeResult(float(reward), components if adds_up else {}, metrics, self._state["stop_condition"])

    async def _release(self) -> None:
        self._is_released = True
        await self._env.cleanup(self._state)

    @property
    def _name(self) -> str:
        return self._env.env_id or type(self._env).__name__


def _check(vf: Any, env: Any) -> None:
    """Raise ValueError if an environment cannot be played reply by reply, compares rollouts, or is not scored."""
    name = f"{env.env_id or 'the environment'} ({type(env).__name__})"
    if not isinstance(env, vf.MultiTurnEnv):
        raise ValueError(f"{name} is not a MultiTurnEnv, so it cannot be played turn by turn")
    if type(env).rollout is not vf.MultiTurnEnv.rollout:
        raise ValueError(f"{name} overrides rollout, which calls the model itself; it cannot be played turn by turn")
    groups = [f.__name__ for rubric in _rubrics(env) for f in rubric.funcs if rubric._is_group_func(f)]
    if groups:
        raise ValueError(
            f"{name} rewards rollouts in comparison with others, by {', '.join(groups)}, which is not supported; give "
            "the function singular arguments (completion, state, …), or remove it"
        )
    if not env.score_rollouts:
        raise ValueError(f"{name} has score_rollouts=False, so its rewards are never computed; set it to True")


def _info(row_input: Mapping[str, Any]) -> dict[str, Any]:
    info = row_input.get("info") or {}
    return dict(json.loads(info) if isinstance(info, str) else info)


def _rubrics(env: Any) -> Iterator[Any]:
    """Yield all rubrics of an environment, including nested rubrics and group members' rubrics."""
    pending = [env.rubric]
    while pending:
        rubric = pending.pop(0)
        pending += getattr(rubric, "rubrics", [])
        yield rubric
    for member in getattr(env, "envs", []):
        yield from _rubrics(member)


def _normalize(messages: Any, name: str) -> Any:
    """Convert messages of environments and datasets (objects or dicts) to verifiers' format."""
    module: Any = importlib.import_module("verifiers.utils.message_utils")
    return module.normalize_messages(messages, field_name=name)


def _dicts(messages: Any) -> list[dict[str, Any]]:
    return [message.model_dump(exclude_none=True) for message in messages]


def _without_none(prompt: Any) -> Any:
    """Remove message fields that a dataset filled with None because other rows have them."""
    if isinstance(prompt, list):
        return [{name: value for name, value in message.items() if value is not None} for message in prompt]
    return prompt


def _is_models_fault(vf: Any, error: Exception) -> bool:
    """Return True if a wrong tool call caused the error that ended the episode."""
    return isinstance(error, vf.ToolError) and not _is_infrastructure_error(vf, error)


def _is_infrastructure_error(vf: Any, error: BaseException | None) -> bool:
    """Return True if an error or one of its causes comes from a sandbox, a connection, a judge or a file."""
    import httpx
    import openai

    kinds = (vf.InfraError, vf.ModelError, OSError, httpx.HTTPError, openai.OpenAIError)
    while error is not None:
        if isinstance(error, kinds):
            return True
        error = error.__cause__ or error.__context__
    return False


def _record_errors(function: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a reward function to record its errors, since verifiers turns them all into a reward of 0."""

    @functools.wraps(function)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        with _record_failure():
            score = function(*args, **kwargs)
        return await_score(score) if inspect.isawaitable(score) else score

    async def await_score(score: Awaitable[Any]) -> Any:
        with _record_failure():
            return await score

    return wrapper


@contextmanager
def _record_failure() -> Iterator[None]:
    try:
        yield
    except Exception as failure:
        if (failures := _failures.get()) is not None:
            failures.append(failure)
        raise


@contextmanager
def _collect_failures() -> Iterator[list[Exception]]:
    """Collect the errors of reward functions inside the block."""
    failures: list[Exception] = []
    token = _failures.set(failures)
    try:
        yield failures
    finally:
        _failures.reset(token)


@contextmanager
def _ignored_signals() -> Iterator[None]:
    """Keep verifiers from installing signal handlers: the trainer has its own, and only the main thread may."""
    module: Any = importlib.import_module("verifiers.envs.environment")
    signal = module.signal
    module.signal = SimpleNamespace(**{**vars(signal), "signal": lambda *_: None})
    try:
        yield
    finally:
        module.signal = signal


def _no_client(vf: Any) -> Any:
    """Return the client that a state requires. It rejects calls: the trainer replies only between turns."""
    client_type: Any = importlib.import_module("verifiers.clients").Client

    async def refuse(*_: Any, **__: Any) -> Any:
        raise RuntimeError("the environment calls the model within a turn, which is not supported")

    methods = {**dict.fromkeys(client_type.__abstractmethods__, refuse), "get_response": refuse}
    return type("NoClient", (client_type,), methods)(None)
