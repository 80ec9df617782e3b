"""Environments of OpenEnv: whatever a server plays on `/ws`, over our own client.

    environment.env_class=openenv environment.skyrl_gym.openenv.url=http://127.0.0.1:8000

is all that an environment with one field of text needs, such as echo; the server's `/schema` says what others take.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from skyrl_gym.adapters.actions import ActionError
from skyrl_gym.adapters.awaited_env import AwaitedEnv
from skyrl_gym.adapters.observations import as_text, described, user_message, with_observation
from skyrl_gym.adapters.openenv_actions import ActionFormat, JsonAction, TextAction, ToolAction, format_of
from skyrl_gym.adapters.openenv_client import (
    ExecutionFailed,
    InvalidMessage,
    OpenEnvSession,
    ProtocolError,
    SessionOptions,
    StepResult,
)
from skyrl_gym.adapters.openenv_schema import action_fields, action_schema, is_of_tools
from skyrl_gym.adapters.settings import max_turns, read_settings, reset_arguments
from skyrl_gym.envs.base_text_env import BaseTextEnvStepOutput, ConversationType
from skyrl_gym.optional import require
from skyrl_gym.tools.messages import readable, tool_response, with_system

ACTION_KEYS = {"text_field", "format", "fixed"}
FORMATS = ("auto", "json", "tools")
NOT_SHOWN = ("reward", "done", "metadata")


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenEnvSettings(SessionOptions):
    """The section `environment.skyrl_gym.openenv`, with the keys of `SessionOptions`.

    url: of the server, ``http://host:port`` or with https, ws or wss.
    action: how a reply becomes an action. `text_field` is the field that takes the reply as it stands; without it, the
        server's schema decides, or `format`: ``json``, or ``tools`` for environments built on MCP. `fixed` are fields
        that every action has.
    reset: arguments of `reset`; the `seed` and `reset` of a row, or of its `extra_info`, come on top.
    observation: the field that is shown, or a text with `{field}` in it; by default, all of the observation.
    describe_action: whether the prompt says how to write an action, where that is not plain text.
    missing_reward: the reward of an episode in which the server never gave one; None makes its rollout invalid.
    execution_error: ``raise`` fails the rollout when the environment raises in a step, since nobody can tell whose
        fault it is; ``tell`` shows the message to the model, for environments that raise on illegal actions.
    no_tool_call: what a reply without a call is, where actions are calls: ``retry`` an invalid one, ``end`` the last.
    """

    url: str
    action: Mapping[str, Any] = field(default_factory=dict)
    reset: Mapping[str, Any] = field(default_factory=dict)
    observation: str | None = None
    describe_action: bool = True
    missing_reward: float | None = None
    execution_error: str = "raise"
    no_tool_call: str = "retry"

    def __post_init__(self) -> None:
        SessionOptions.__post_init__(self)
        allowed = {"execution_error": ("raise", "tell"), "no_tool_call": ("retry", "end")}
        for name, values in allowed.items():
            if getattr(self, name) not in values:
                raise ValueError(f"{name}={getattr(self, name)!r} is unknown; use {' or '.join(values)}")
        if unknown := sorted(self.action.keys() - ACTION_KEYS):
            raise ValueError(f"action.{unknown[0]} is unknown; known: {', '.join(sorted(ACTION_KEYS))}")
        if self.format not in FORMATS:
            raise ValueError(f"action.format={self.format!r} is unknown; use one of {', '.join(FORMATS)}")

    @property
    def format(self) -> str:
        """How replies are read, where no `text_field` is set."""
        return self.action.get("format") or "auto"


class OpenEnvEnv(AwaitedEnv):
    """One episode on an OpenEnv server: one session, from `init` to `close`.

    A step without a reward is worth 0; an episode without any, `missing_reward`. What the server does not accept as an
    action is told to the model, and counts in `invalid_actions`. A lost session raises, and is never opened again.

    With `environment.skyrl_gym.isolation=process` nobody answers the server's pings while the model writes: let it send
    none (uvicorn's `--ws-ping-interval`), or keep the default.
    """

    def __init__(self, env_config: Mapping[str, Any], extras: Mapping[str, Any]) -> None:
        super().__init__()
        require("websockets", "openenv", "OpenEnv environments")
        self.settings = read_settings(OpenEnvSettings, "openenv", env_config, extras)
        self.max_turns = max_turns(extras)
        self._reset_arguments = reset_arguments(self.settings.reset, extras)
        self._session = OpenEnvSession(self.settings.url, self.settings)
        self._format: ActionFormat | None = None
        self._n_invalid = 0
        self._n_actions = 0
        self._is_paid = False
        self._is_done = False
        self._ended_by_server = False

    async def init_async(self, prompt: ConversationType) -> tuple[ConversationType, dict[str, Any]]:
        """Open the session, reset its environment, and append what it shows to the prompt.

        Raises:
            OpenEnvError: see `OpenEnvSession.reset`.
        """
        if self._format is not None:
            raise RuntimeError("this episode has begun; make a new OpenEnvEnv for the next one")
        try:
            action_format = await self._choose_format()
            result = await self._session.reset(**self._reset_arguments)
            if result.done:
                raise ProtocolError(f"{self.settings.url} answers reset with done=true: there is nothing to play")
            self._format = action_format or ToolAction(await self._tools())
            return self._prompt(prompt, self._format, self._shown(result)), {}
        except BaseException:
            self._session.abort()
            raise

    async def step_async(self, action: str) -> BaseTextEnvStepOutput:
        """Send the actions in a reply, one after the other, until the server says done.

        Raises:
            OpenEnvError: see `OpenEnvSession.step`; an action that is not accepted is told to the model instead.
        """
        if self._format is None or self._is_done:
            raise RuntimeError("this episode is over; make a new one" if self._is_done else "call init before step")
        self.turns += 1
        try:
            actions = self._format.read(action)
        except ActionError as error:
            return self._output([self._told(str(error))], [], [])
        if not actions and self.settings.no_tool_call == "retry":
            return self._output([self._told("Your reply calls no tool.")], [], [])
        self._is_done = not actions
        texts: list[str] = []
        rewards: list[float | None] = []
        for fields in actions:
            result = await self._send(fields, texts)
            if result is not None:
                rewards.append(result.reward)
                self._is_done = self._ended_by_server = result.done
            if self._is_done:
                break
        return self._output(texts, rewards, actions)

    def get_metrics(self) -> dict[str, Any]:
        """Turns, actions that were no actions, actions that were played, and whether the server ended the episode."""
        return {
            "steps": self.turns,
            "invalid_actions": self._n_invalid,
            "actions": self._n_actions,
            "ended_by_env": int(self._ended_by_server),
        }

    async def _release(self) -> None:
        await self._session.close()

    def _abandon(self) -> None:
        self._session.abort()

    async def _choose_format(self) -> ActionFormat | None:
        """How to read replies; None for calls of tools, which the server lists after `reset`."""
        if text_field := self.settings.action.get("text_field"):
            return TextAction(text_field)
        if self.settings.format == "tools":
            return None
        schema = await action_schema(self.settings.url, self.settings)
        if self.settings.format == "auto":
            return None if is_of_tools(schema) else format_of(schema)
        return JsonAction(action_fields(schema))

    async def _tools(self) -> list[Mapping[str, Any]]:
        listed = (await self._session.step({"type": "list_tools"})).observation.get("tools")
        is_list = isinstance(listed, list) and all(isinstance(tool, Mapping) and tool.get("name") for tool in listed)
        if not is_list or not listed:
            raise ProtocolError(f"{self.settings.url} answers list_tools with tools={listed!r}; there must be some")
        return listed

    def _prompt(self, prompt: ConversationType, action_format: ActionFormat, text: str) -> ConversationType:
        instructions = action_format.instructions if self.settings.describe_action else ""
        if isinstance(action_format, ToolAction):
            return with_observation(with_system(prompt, instructions), text)
        return with_observation(prompt, "\n\n".join(part for part in (text, instructions) if part))

    async def _send(self, fields: dict[str, Any], texts: list[str]) -> StepResult | None:
        """Play one action, and add what there is to read of it to `texts`; None if it was not played."""
        fixed = self.settings.action.get("fixed") or {}
        try:
            result = await self._session.step({**fields, **fixed})
        except InvalidMessage as error:
            texts.append(self._told(str(error)))
            return None
        except ExecutionFailed as error:
            if self.settings.execution_error == "raise":
                raise
            texts.append(self._told(str(error)))
            return None
        self._n_actions += 1
        texts.append(self._shown(result))
        return result

    def _shown(self, result: StepResult) -> str:
        """What the model reads of an observation."""
        seen = result.observation
        if self.settings.observation is not None:
            return described(seen, self.settings.observation)
        if isinstance(self._format, ToolAction) and "tool_name" in seen:
            return tool_response(_tool_text(seen))
        return described({name: value for name, value in seen.items() if name not in NOT_SHOWN})

    def _told(self, problem: str) -> str:
        """What the model reads of an action that was none."""
        self._n_invalid += 1
        assert self._format is not None
        is_known = isinstance(self._format, ToolAction)  # the system prompt is not repeated
        hint = "" if is_known else self._format.instructions
        return readable("\n".join(part for part in (problem, hint) if part))

    def _output(
        self, texts: list[str], rewards: list[float | None], actions: list[dict[str, Any]]
    ) -> BaseTextEnvStepOutput:
        self._is_done = self._is_done or self.turns == self.max_turns
        return BaseTextEnvStepOutput(
            observations=[] if self._is_done else [user_message("\n".join(texts))],
            reward=self._reward([reward for reward in rewards if reward is not None]),
            done=self._is_done,
            metadata={"actions": actions},
        )

    def _reward(self, given: list[float]) -> float | None:
        self._is_paid = self._is_paid or bool(given)
        if self._is_done and not self._is_paid:
            return self.settings.missing_reward
        return sum(given)


def _tool_text(seen: Mapping[str, Any]) -> str:
    """What a tool answered: its text where there is some, or why it did not answer."""
    if isinstance(error := seen.get("error"), Mapping):
        return readable(f"Error ({error.get('error_type')}): {error.get('message')}")
    result = seen.get("result")
    if not isinstance(result, Mapping):
        return described(result)
    content = [part for part in result.get("content") or [] if isinstance(part, Mapping) and "text" in part]
    text = "\n".join(str(part["text"]) for part in content) or as_text(result.get("data"))
    return readable(f"Error: {text}" if result.get("is_error") else text)
