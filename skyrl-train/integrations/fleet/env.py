"""Fleet tasks as an environment, played through OpenEnv's `FleetTaskEnv`.

    environment.skyrl_gym.fleet_task.tasks_file=~/data/fleet/tasks.json

Rows of `integrations.fleet.prepare_dataset` name their task. OpenEnv provisions the software, lists its tools, calls
them and runs the task's verifier. The Fleet SDK is never used directly.
"""

import asyncio
import datetime
import importlib
import inspect
import logging
import os
import re
import sys
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from statistics import fmean
from typing import Any, Protocol

from integrations.fleet.context import CONTEXT_TOOL_NAMES, CONTEXT_TOOLS, Context, ContextToolError
from integrations.fleet.prompts import DONE, describe_images, format_result, image_parts, is_error, system_prompt
from integrations.fleet.tasks import NEEDS_IMAGES, TOOL_USE, FleetTask, tasks_by_key
from skyrl_gym.adapters.async_env import AsyncEnv
from skyrl_gym.adapters.observations import user_message
from skyrl_gym.adapters.settings import read_settings
from skyrl_gym.envs.base_text_env import BaseTextEnvStepOutput, ConversationType
from skyrl_gym.envs.row import read_max_turns, reads_images
from skyrl_gym.error import Error, InvalidSettings
from skyrl_gym.images import find_images, read_parts
from skyrl_gym.runtime.text import describe_error
from skyrl_gym.tools.arguments import convert_arguments
from skyrl_gym.tools.calls import ToolCall, ToolCallError, parse_tool_calls, strip_thoughts
from skyrl_gym.tools.messages import Content, append_content, format_tool_response, join_contents
from skyrl_gym.tools.screen import Coordinates, Screen

logger = logging.getLogger(__name__)

ENV_CLASS = "fleet_task"
ENTRY_POINT = "integrations.fleet.env:FleetTaskEnv"
OPENENV_MODULE = "envs.fleet_env.task_env"
INSTALL = (
    "python -m venv .venv-fleet && .venv-fleet/bin/pip install -e skyrl-gym -r "
    "skyrl-train/integrations/fleet/requirements.txt"
)
"""Commands that install OpenEnv, to run in the repository's root."""

DEFAULT_MAX_TURNS = 50
MAX_RETRY_WAIT_S = 60.0
COMPUTER_TOOL = "computer"
CALL = re.compile(r"<(tool_call|function_call)>.*?(</\1>|\Z)", re.DOTALL)

TRANSIENT = (
    "health check",
    "timeout",
    "timed out",
    "connection",
    "temporarily",
    "rate limit",
    "too many",
    "retryable:true",
    "retryable: true",
)
"""Lower-case substrings of provisioning errors that may not occur again."""


class ProvisioningError(Error):
    """A task's software could not be started."""


class OpenEnvTask(Protocol):
    """The part of OpenEnv's `FleetTaskEnv` that is used here."""

    conversation_messages: list[dict[str, Any]] | None
    """The episode's messages, for verifiers that grade them."""

    async def reset_async(self) -> dict[str, Any]:
        """Start the software. Return `prompt`, `tools`, and other metadata."""

    async def step_async(self, action: dict[str, Any]) -> tuple[Any, float | None, bool, dict[str, Any]]:
        """Play `{"tool", "params", "done"}`. Return observation, reward, done and info.

        The verifier runs when the episode is done. Only then does the reward count.
        """

    def close(self) -> None:
        """Stop the software."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetSettings:
    """The section `environment.skyrl_gym.fleet_task`. The API key is only read from the variable FLEET_API_KEY.

    tasks_file: the task file that the dataset was prepared from. A row's `tasks_file` overrides it.
    ttl_seconds: seconds after which Fleet stops an episode's software. At least the rollout's time limit.
    enable_context_tools: True to offer tools that search the context and drop old turns.
    max_output_chars: maximum characters of a tool result that the model sees.
    n_provisioning_attempts: maximum attempts to start the software. Only transient failures are retried.
    provisioning_wait_s: seconds before the second attempt. Doubled before each further attempt.
    partial_reward: True to reward the fraction of a task's checks that succeed, instead of 0 or 1.
    coordinates: unit of the model's coordinates on screenshots, ``pixels`` or ``thousandths`` of their size.
    """

    tasks_file: str | None = None
    ttl_seconds: int = 1800
    enable_context_tools: bool = False
    max_output_chars: int = 10_000
    n_provisioning_attempts: int = 3
    provisioning_wait_s: float | int = 2.0
    partial_reward: bool = False
    coordinates: Coordinates = "pixels"

    def __post_init__(self) -> None:
        """Raise InvalidSettings for a value out of range."""
        for name in ("ttl_seconds", "max_output_chars", "n_provisioning_attempts"):
            if getattr(self, name) < 1:
                raise InvalidSettings(
                    f"environment.skyrl_gym.fleet_task.{name}={getattr(self, name)} must be at least 1"
                )


class FleetTaskEnv(AsyncEnv):
    """A Fleet task, from provisioning to its verifier.

    The verifier's result is the only reward. It runs however the episode ends: when the model writes `<done>`, at the
    maximum number of turns, or when the conversation is too long. If the result is unknown, the reward is None.
    """

    validates_rows = True

    @classmethod
    def check_packages(cls) -> None:
        """Raise ImportError, with the install command, if Fleet's OpenEnv cannot be imported."""
        _openenv_class()

    def __init__(self, env_config: Mapping[str, Any], extras: Mapping[str, Any]) -> None:
        """Find the row's task.

        Raises:
            InvalidSettings: the configuration is invalid.
            ValueError: the task does not exist, or the model cannot see its screenshots.
        """
        super().__init__()
        if "api_key" in (env_config or {}):
            raise InvalidSettings(
                "environment.skyrl_gym.fleet_task.api_key would be written to config.yaml and to the trackers; export "
                "FLEET_API_KEY instead"
            )
        self.settings = read_settings(FleetSettings, ENV_CLASS, env_config, extras)
        self.max_turns = read_max_turns(extras, DEFAULT_MAX_TURNS)
        self.task = _find_task(self.settings, extras)
        self._api_key = os.environ.get("FLEET_API_KEY", "")
        if not self._api_key:
            raise InvalidSettings("environment.skyrl_gym.fleet_task needs the variable FLEET_API_KEY; export it")
        self._env: OpenEnvTask | None = None
        self._parameters: dict[str, Mapping[str, Any]] = {}  # the schemas of the tools' arguments
        self._reads_images = reads_images(extras)
        self._screen: Screen | None = None  # of the first screenshot
        self._is_abandoned = False
        self._context = Context([], self.settings.max_output_chars)
        self._transcript: list[dict[str, Any]] = []  # including the turns that context tools drop
        self._is_graded = False
        self._is_verified = False
        self._n_calls = 0
        self._n_errors = 0
        self._n_attempts = 0

    async def init_async(self, prompt: ConversationType) -> tuple[ConversationType, dict[str, Any]]:
        """Provision the software. Return the task, and the system message with the software's tools.

        Raises:
            ImportError: OpenEnv with its Fleet environment cannot be imported.
            ProvisioningError: the software cannot be started, or it has no tool for the task.
        """
        if self._env is not None:
            raise RuntimeError("this episode has started; create a new FleetTaskEnv for the next episode")
        try:
            observation = await self._provision()
            tools = _select_tools(observation.get("tools") or [], self.task)
        except BaseException:
            self._is_abandoned = True  # a thread may still be starting the software
            await self._release()
            raise
        self._parameters = {_tool_name(tool): (tool.get("function") or tool).get("parameters") or {} for tool in tools}
        if self.settings.enable_context_tools:
            tools = [*tools, *CONTEXT_TOOLS]
        task = user_message(str(observation.get("prompt") or self.task.prompt))
        if images := self._find_images(observation.get("initial_screenshot")):
            task = append_content(task, images)
        today = datetime.datetime.now(datetime.UTC).date()
        variables = self.task.config.get("env_variables") or {}
        system = system_prompt(self.task.env_key, variables, tools, today, self._screen)
        self._context.prompt = [{"role": "system", "content": system}, task]
        self._transcript += map(_without_images, self._context.prompt)
        facts = {"task_key": self.task.key, "env_key": self.task.env_key, "modality": self.task.modality}
        return list(self._context.prompt), facts

    async def step_async(self, action: str) -> BaseTextEnvStepOutput:
        """Execute the tool call in a reply. Run the verifier if the reply has `<done>` or is the last.

        Raises:
            Exception: OpenEnv fails, but not because of the call. A failed call is shown to the model.
        """
        if self._env is None or self._is_graded:
            raise RuntimeError("this episode is over" if self._is_graded else "call init before step")
        self.turns += 1
        statement = CALL.sub("", strip_thoughts(action)).lower()
        is_done = DONE in statement or "[done]" in statement
        reward = None
        metadata: dict[str, Any] = {"task_key": self.task.key, "turn": self.turns, "tool_call": None, "error": None}
        reply = {"role": "assistant", "content": action}
        self._context.turns.append([reply])
        self._transcript.append(reply)
        content: Content
        try:
            calls = parse_tool_calls(action)
        except ToolCallError as error:
            self._n_calls += 1
            content = self._explain(str(error), metadata)
        else:
            if calls:
                content, reward = await self._execute(calls, metadata)
            else:
                content = 'No tool call found. Write <tool_call>{"name": …, "arguments": {…}}</tool_call>, or <done>.'
        if self._is_graded:  # by the tool, e.g. submit_final_answer
            return self._last_output(reward, metadata, str(metadata.get("done_reason") or "tool"))
        if is_done or self.turns >= self.max_turns:
            return self._last_output(await self._grade(), metadata, "agent_done" if is_done else "max_turns")
        observation = user_message(format_tool_response(content) if calls_tool(metadata) else content)
        history = self._context.messages if metadata.pop("has_dropped_turns", False) else None
        self._context.turns[-1].append(observation)
        self._transcript.append(_without_images(observation))
        if history is not None:
            metadata["modified_chat_history"] = history
        return BaseTextEnvStepOutput(observations=[observation], reward=0.0, done=False, metadata=metadata)

    async def grade_unfinished_async(self) -> float | None:
        """Run the verifier for an episode that the trainer ended. Return None if its result is unknown."""
        return await self._grade()

    def get_metrics(self) -> dict[str, Any]:
        """Return the numbers of turns, calls and failed calls, and 1 if the verifier graded the task."""
        return {
            "env_key": self.task.env_key,
            "turns": self.turns,
            "tool_calls": self._n_calls,
            "tool_errors": self._n_errors,
            "is_verified": int(self._is_verified),
            "provisioning_attempts": self._n_attempts,
        }

    @staticmethod
    def aggregate_metrics(metrics: Sequence[Mapping[str, Any]]) -> dict[str, float]:
        """Aggregate the episodes of each Fleet environment, as `github/avg_turns`, and of all, as `avg_turns`."""
        groups: defaultdict[str, list[Mapping[str, Any]]] = defaultdict(list)
        for episode in metrics:
            groups[episode["env_key"]].append(episode)
        totals = _aggregate(metrics)
        totals["total_episodes"] = totals.pop("num_episodes")
        return totals | {
            f"{env_key}/{name}": value
            for env_key, episodes in sorted(groups.items())
            for name, value in _aggregate(episodes).items()
        }

    async def _provision(self) -> dict[str, Any]:
        """Start the software and return OpenEnv's first observation. Transient failures are retried."""
        kind = _openenv_class()
        settings, wait_s = self.settings, self.settings.provisioning_wait_s
        while True:
            self._n_attempts += 1
            try:
                env = await asyncio.to_thread(self._create, kind)  # older versions provision in the constructor
                return await env.reset_async()
            except Exception as error:
                await self._release()
                if not is_transient(error) or self._n_attempts >= settings.n_provisioning_attempts:
                    raise ProvisioningError(
                        f"Failed to create OpenEnv FleetTaskEnv: {describe_error(error)} (task {self.task.key}, "
                        f"attempt {self._n_attempts} of {settings.n_provisioning_attempts})"
                    ) from error
                logger.info("Provisioning of %s failed and is repeated: %s", self.task.env_key, describe_error(error))
            await asyncio.sleep(min(wait_s, MAX_RETRY_WAIT_S))
            wait_s *= 2

    def _create(self, kind: Any) -> OpenEnvTask:
        """Create OpenEnv's environment. Close it immediately if the episode was cancelled meanwhile."""
        options = {"partial_reward": True} if self.settings.partial_reward else {}
        self._env = env = kind(
            dict(self.task.config),
            api_key=self._api_key,
            ttl_seconds=self.settings.ttl_seconds,
            max_steps=self.max_turns + 1,  # the last turn is graded here
            **options,
        )
        env.conversation_messages = self._transcript
        if self._is_abandoned:
            self._abandon()
        return env

    async def _execute(self, calls: list[ToolCall], metadata: dict[str, Any]) -> tuple[Content, float | None]:
        """Execute the first call. Return the result for the model, and the reward if the call ended the episode."""
        assert self._env is not None
        call = calls[0]
        self._n_calls += 1
        metadata["tool_call"] = {"name": call.name, "arguments": call.arguments}
        if self.settings.enable_context_tools and call.name in CONTEXT_TOOL_NAMES:
            try:
                text = self._context.call(call)
            except ContextToolError as error:
                return self._explain(str(error), metadata), None
            metadata["has_dropped_turns"] = call.name == "manage_context"
            return text, None
        arguments = convert_arguments(call.arguments, self._parameters.get(call.name, {}))
        if call.name == COMPUTER_TOOL and self._screen is not None and self.settings.coordinates != "pixels":
            try:
                arguments = _convert_coordinates(arguments, self._screen)
            except ValueError as error:
                return self._explain(str(error), metadata), None
        action = {"tool": call.name, "params": arguments, "done": False}
        _, reward, self._is_graded, info = await self._env.step_async(action)
        result, failure = info.get("tool_result"), info.get("tool_error")
        if self._is_graded:
            metadata["done_reason"] = info.get("done_reason")
        images: list[dict[str, Any]] = []
        if failure or is_error(result):
            text = self._explain(format_result(failure or result), metadata)
        elif images := self._find_images(result):
            text = self._context.add_output(format_result(result, image_notice=""))
        else:
            text = self._context.add_output(format_result(result))
        if len(calls) > 1:
            text += f"\nOnly the first of your {len(calls)} calls was executed."
        content = join_contents([images, text] if text else [images]) if images else text
        return content, self._known_reward(reward, info) if self._is_graded else None

    def _find_images(self, result: Any) -> list[dict[str, Any]]:
        """Return the images of a result, or none if the model does not read images. Remember the size of the first."""
        images = image_parts(result) if self._reads_images else []
        if images and self._screen is None:
            image, *_ = find_images([{"content": read_parts(images)}])
            self._screen = Screen(image.width, image.height, self.settings.coordinates)
        return images

    def _explain(self, problem: str, metadata: dict[str, Any]) -> str:
        """Count a failed call. Return its error for the model."""
        self._n_errors += 1
        problem = problem.removeprefix("Error: ")
        metadata["error"] = problem
        return self._context.truncate(f"Error: {problem}")

    async def _grade(self) -> float | None:
        """Run the verifier and return its result, or None if unknown."""
        assert self._env is not None
        self._is_graded = True
        try:
            _, reward, is_done, info = await self._env.step_async({"done": True})
        except Exception as error:  # noqa: BLE001, the boundary of a verifier
            logger.warning("The verifier of the Fleet task %s failed: %s", self.task.key, describe_error(error))
            return None
        return self._known_reward(reward, info) if is_done else None

    def _known_reward(self, reward: float | None, info: Mapping[str, Any]) -> float | None:
        """Return the reward, or None if the verifier did not compute it."""
        self._is_verified = reward is not None and bool(info.get("reward_computed", True))
        if self._is_verified and _handle(self._env) is None:  # OpenEnv then returns 0.0
            logger.warning("OpenEnv lost the software of the Fleet task %s: its verifier did not run", self.task.key)
            self._is_verified = False
        return reward if self._is_verified else None

    def _last_output(self, reward: float | None, metadata: dict[str, Any], reason: str) -> BaseTextEnvStepOutput:
        metadata.pop("has_dropped_turns", None)
        return BaseTextEnvStepOutput(
            observations=[], reward=reward, done=True, metadata=metadata | {"done_reason": reason}
        )

    async def _release(self) -> None:
        env, self._env = self._env, None
        if env is None:
            return
        handle = _handle(env)  # closing clears it
        closings = [close_async] if (close_async := getattr(env, "close_async", None)) else []
        for close in [*closings, partial(asyncio.to_thread, env.close)]:
            try:
                await close()
                if inspect.iscoroutinefunction(getattr(handle, "close", None)):
                    await handle.close()  # OpenEnv 0.1.1 does not await this call, and the software would keep running
                break
            except Exception as error:  # noqa: BLE001, Fleet stops the software after `ttl_seconds`
                logger.warning("Stopping the Fleet task %s failed: %s", self.task.key, describe_error(error))

    def _abandon(self) -> None:
        env, self._env = self._env, None
        if env is not None:
            env.close()


def calls_tool(metadata: Mapping[str, Any]) -> bool:
    """Return True if a turn's observation is the result of a call, or its error."""
    return metadata["tool_call"] is not None or metadata["error"] is not None


def _handle(env: Any) -> Any:
    """Return OpenEnv's handle of the software, or None."""
    return getattr(getattr(env, "_orch", None), "_fleet_env", None)


def is_transient(error: Exception) -> bool:
    """Return True for a provisioning error that may not occur again."""
    message = str(error).lower()
    return isinstance(error, TimeoutError | ConnectionError) or any(part in message for part in TRANSIENT)


def _openenv_class() -> Any:
    """Return OpenEnv's class for Fleet tasks. Raise ImportError if it or a package that it needs is missing."""
    try:
        return importlib.import_module(OPENENV_MODULE).FleetTaskEnv
    except ImportError as error:
        cause = error.__cause__ or error  # OpenEnv catches some ImportErrors and hides their reason
        raise ImportError(
            f"{sys.executable} cannot import {OPENENV_MODULE} of Fleet's OpenEnv: {cause}. Install it in a virtual "
            f"environment of its own ({INSTALL}), and set environment.skyrl_gym.isolation=process and "
            "environment.skyrl_gym.python to the absolute path of .venv-fleet/bin/python",
            name=error.name,
        ) from error


def _find_task(settings: FleetSettings, extras: Mapping[str, Any]) -> FleetTask:
    """Return a row's task. Raise ValueError if the row or the task file does not have it."""
    path = extras.get("tasks_file") or settings.tasks_file
    if not path:
        raise InvalidSettings("environment.skyrl_gym.fleet_task.tasks_file is missing; set it to the file of the tasks")
    key = extras.get("task_key")
    if not isinstance(key, str) or not key:
        raise ValueError(f"task_key={key!r} must name a Fleet task; write rows with integrations.fleet.prepare_dataset")
    tasks = tasks_by_key(str(path))
    if key not in tasks:
        raise ValueError(
            f"task_key={key!r} is not in {path}, whose {len(tasks)} tasks begin with {', '.join(list(tasks)[:5])}; "
            "prepare the dataset from the same file"
        )
    task = tasks[key]
    if task.modality != TOOL_USE and extras.get("reads_images") is False:  # unknown while rows are checked
        raise ValueError(f"the task {key} has the modality {task.modality}, {NEEDS_IMAGES}")
    return task


def _select_tools(tools: Sequence[Mapping[str, Any]], task: FleetTask) -> list[Mapping[str, Any]]:
    """Return the tools of the task's modality: all tools except `computer`, or only `computer`."""
    is_tool_use = task.modality == TOOL_USE
    selected = [tool for tool in tools if (_tool_name(tool) != COMPUTER_TOOL) == is_tool_use]
    if not selected:
        names = ", ".join(map(_tool_name, tools)) or "none"
        raise ProvisioningError(f"{task.env_key} has no tool for the modality {task.modality}; it has: {names}")
    return selected


def _convert_coordinates(arguments: Mapping[str, Any], screen: Screen) -> dict[str, Any]:
    """Return a computer's arguments with coordinates in pixels. Raise ValueError for a point outside the screen."""
    return {
        name: list(screen.to_pixels(value)) if name.endswith("coordinate") else value
        for name, value in arguments.items()
    }


def _without_images(message: Mapping[str, Any]) -> dict[str, Any]:
    """Return a message for verifiers, which read text: a screenshot may have a megabyte."""
    return {**message, "content": describe_images(message["content"])}


def _tool_name(tool: Mapping[str, Any]) -> str:
    return str((tool.get("function") or tool).get("name"))


def _aggregate(episodes: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    turns = [episode["turns"] for episode in episodes]
    n_calls = sum(episode["tool_calls"] for episode in episodes)
    n_errors = sum(episode["tool_errors"] for episode in episodes)
    return {
        "num_episodes": len(episodes),
        "avg_turns": fmean(turns),
        "min_turns": min(turns),
        "max_turns": max(turns),
        "avg_tool_calls": n_calls / len(episodes),
        "tool_calls_per_turn": n_calls / max(1, sum(turns)),
        "avg_tool_errors": n_errors / len(episodes),
        "total_tool_errors": n_errors,
        "tool_error_rate": n_errors / max(1, n_calls),
        "avg_provisioning_attempts": fmean(episode["provisioning_attempts"] for episode in episodes),
    }
