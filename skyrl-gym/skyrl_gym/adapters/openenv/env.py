"""OpenEnv environments on a server's `/ws`.

    environment.env_class=openenv environment.skyrl_gym.openenv.url=http://127.0.0.1:8000

The server's `/schema` determines how a reply becomes an action. For example, an echo environment has one text field, so
the whole reply is its value.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from skyrl_gym.adapters.actions import ActionError
from skyrl_gym.adapters.async_env import AsyncEnv
from skyrl_gym.adapters.observations import append_observation, format_observation, format_value, user_message
from skyrl_gym.adapters.openenv.actions import ActionFormat, JsonAction, TextAction, ToolAction, choose_format
from skyrl_gym.adapters.openenv.client import (
    ExecutionFailed,
    InvalidMessage,
    OpenEnvSession,
    ProtocolError,
    SessionOptions,
    StepResult,
)
from skyrl_gym.adapters.openenv.schema import action_fields, fetch_action_schema, has_tool_actions
from skyrl_gym.adapters.settings import NO_LIMIT, read_settings, reset_arguments
from skyrl_gym.envs.base_text_env import BaseTextEnvStepOutput, ConversationType
from skyrl_gym.envs.row import read_max_turns, reads_images
from skyrl_gym.images import IMAGE_TYPES, join_texts
from skyrl_gym.optional import require
from skyrl_gym.tools.messages import Content, append_to_system, format_tool_response, join_contents

ACTION_KEYS = {"text_field", "format", "fixed"}
FORMATS = ("auto", "json", "tools")
NOT_SHOWN = ("reward", "done", "metadata")


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenEnvSettings(SessionOptions):
    """The section `environment.skyrl_gym.openenv`. It also accepts the fields of `SessionOptions`.

    url: the server's address, ``http://host:port`` or with https, ws or wss.
    action: the conversion of replies to actions. `text_field` is the field that takes the reply unchanged. Without it,
        the server's schema decides, or `format`: ``json``, or ``tools`` for environments built on MCP. `fixed` are
        fields that every action has.
    reset: arguments of `reset`. A row's `seed` and `reset`, or its `extra_info`'s, override them.
    observation: the field to show, or a template with `{field}`. Defaults to the whole observation.
    image: the field with an image, e.g. `screenshot`, as a data URL or as rows of pixels. Only a model that reads
        images sees it, before the text. Images in the results of tools need no setting.
    describe_action: True to describe the format of actions in the prompt, unless it is plain text.
    missing_reward: the reward of an episode without a reward from the server. None makes the rollout invalid.
    execution_error: ``raise`` fails the rollout if the environment raises in a step, since the cause is unknown.
        ``tell`` shows the message to the model, for environments that raise on illegal actions.
    no_tool_call: the rule for a reply without a call where actions are calls: ``retry`` treats it as an invalid action,
        ``end`` ends the episode.
    """

    url: str
    action: Mapping[str, Any] = field(default_factory=dict)
    reset: Mapping[str, Any] = field(default_factory=dict)
    observation: str | None = None
    image: str | None = None
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
        """Format of actions if no `text_field` is set."""
        return self.action.get("format") or "auto"


class OpenEnvEnv(AsyncEnv):
    """One episode on an OpenEnv server: one session, from `init` to `close`.

    A step without a reward counts as 0, an episode without any reward as `missing_reward`. If the server rejects an
    action, the model reads why, and `invalid_actions` counts it. A lost session raises and is never reopened.

    With `environment.skyrl_gym.isolation=process`, the server's pings are not answered while the model writes. Turn
    them off (uvicorn's `--ws-ping-interval`), or keep the default isolation.
    """

    def __init__(self, env_config: Mapping[str, Any], extras: Mapping[str, Any]) -> None:
        super().__init__()
        require("websockets", "openenv", "OpenEnv environments")
        self.settings = read_settings(OpenEnvSettings, "openenv", env_config, extras)
        self.max_turns = read_max_turns(extras, NO_LIMIT)
        self._reset_arguments = reset_arguments(self.settings.reset, extras)
        self._reads_images = reads_images(extras)
        self._session = OpenEnvSession(self.settings.url, self.settings)
        self._format: ActionFormat | None = None
        self._n_invalid = 0
        self._n_actions = 0
        self._has_reward = False
        self._is_done = False
        self._ended_by_server = False

    async def init_async(self, prompt: ConversationType) -> tuple[ConversationType, dict[str, Any]]:
        """Open the session, reset its environment, and append the observation to the prompt.

        Raises:
            OpenEnvError: the session cannot be opened, or the reset fails.
        """
        if self._format is not None:
            raise RuntimeError("this episode has started; create a new OpenEnvEnv for the next episode")
        try:
            action_format = await self._choose_format()
            result = await self._session.reset(**self._reset_arguments)
            if result.done:
                raise ProtocolError(f"{self.settings.url} answered reset with done=true, so there is nothing to play")
            self._format = action_format or ToolAction(await self._tools())
            return self._prompt(prompt, self._format, self._format_result(result)), {}
        except BaseException:
            self._session.abort()
            raise

    async def step_async(self, action: str) -> BaseTextEnvStepOutput:
        """Send the actions in a reply one by one, until the server is done.

        Raises:
            OpenEnvError: the session or the environment fails. A rejected action does not raise.
        """
        if self._format is None or self._is_done:
            raise RuntimeError(
                "this episode is over; create a new environment" if self._is_done else "call init before step"
            )
        self.turns += 1
        try:
            actions = self._format.read(action)
        except ActionError as error:
            return self._output([self._explain_invalid(str(error))], [], [])
        if not actions and self.settings.no_tool_call == "retry":
            return self._output([self._explain_invalid("Your reply calls no tool.")], [], [])
        self._is_done = not actions
        contents: list[Content] = []
        rewards: list[float | None] = []
        for fields in actions:
            result = await self._send(fields, contents)
            if result is not None:
                rewards.append(result.reward)
                self._is_done = self._ended_by_server = result.done
            if self._is_done:
                break
        return self._output(contents, rewards, actions)

    def get_metrics(self) -> dict[str, Any]:
        """Return the numbers of turns, invalid actions and played actions, and 1 if the server ended the episode."""
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
        """Return the action format, or None for tool calls: the server lists its tools only after `reset`."""
        if text_field := self.settings.action.get("text_field"):
            return TextAction(text_field)
        if self.settings.format == "tools":
            return None
        schema = await fetch_action_schema(self.settings.url, self.settings)
        if self.settings.format == "auto":
            return None if has_tool_actions(schema) else choose_format(schema)
        return JsonAction(action_fields(schema))

    async def _tools(self) -> list[Mapping[str, Any]]:
        listed = (await self._session.step({"type": "list_tools"})).observation.get("tools")
        is_list = isinstance(listed, list) and all(isinstance(tool, Mapping) and tool.get("name") for tool in listed)
        if not is_list or not listed:
            raise ProtocolError(f"{self.settings.url} answered list_tools with tools={listed!r}, which are not tools")
        return listed

    def _prompt(self, prompt: ConversationType, action_format: ActionFormat, content: Content) -> ConversationType:
        instructions = action_format.instructions if self.settings.describe_action else ""
        if isinstance(action_format, ToolAction):
            return append_observation(append_to_system(prompt, instructions), content)
        return append_observation(append_observation(prompt, content), instructions)

    async def _send(self, fields: dict[str, Any], contents: list[Content]) -> StepResult | None:
        """Play one action and append the observation for the model to `contents`.

        Return None if the server rejected the action, or it failed and `execution_error` is `tell`.
        """
        fixed = self.settings.action.get("fixed") or {}
        try:
            result = await self._session.step({**fields, **fixed})
        except InvalidMessage as error:
            contents.append(self._explain_invalid(str(error)))
            return None
        except ExecutionFailed as error:
            if self.settings.execution_error == "raise":
                raise
            contents.append(self._explain_invalid(str(error)))
            return None
        self._n_actions += 1
        contents.append(self._format_result(result))
        return result

    def _format_result(self, result: StepResult) -> Content:
        """Format an observation for the model."""
        hidden = (*NOT_SHOWN, self.settings.image)
        observation = {name: value for name, value in result.observation.items() if name not in hidden}
        text: Content
        if self.settings.observation is not None:
            text = format_observation(result.observation, self.settings.observation)
        elif isinstance(self._format, ToolAction) and "tool_name" in observation:
            text = format_tool_response(_format_tool_result(observation, self._reads_images))
        else:
            text = format_observation(observation)
        image = result.observation.get(self.settings.image) if self.settings.image and self._reads_images else None
        return text if image is None else join_contents([[{"type": "image", "image": image}], text])

    def _explain_invalid(self, problem: str) -> str:
        """Count an invalid action, and format the explanation for the model."""
        self._n_invalid += 1
        assert self._format is not None
        is_in_system_prompt = isinstance(self._format, ToolAction)
        hint = "" if is_in_system_prompt else self._format.instructions
        return "\n".join(part for part in (problem, hint) if part)

    def _output(
        self, contents: Sequence[Content], rewards: list[float | None], actions: list[dict[str, Any]]
    ) -> BaseTextEnvStepOutput:
        self._is_done = self._is_done or self.turns == self.max_turns
        known = [reward for reward in rewards if reward is not None]
        self._has_reward = self._has_reward or bool(known)
        is_missing = self._is_done and not self._has_reward
        return BaseTextEnvStepOutput(
            observations=[] if self._is_done else [user_message(join_contents(contents))],
            reward=self.settings.missing_reward if is_missing else sum(known),
            done=self._is_done,
            metadata={"actions": actions},
        )


def _format_tool_result(observation: Mapping[str, Any], shows_images: bool) -> Content:
    """Return a tool's result, or its error."""
    if isinstance(error := observation.get("error"), Mapping):
        return f"Error ({error.get('error_type')}): {error.get('message')}"
    result = observation.get("result")
    if not isinstance(result, Mapping):
        return format_observation(result)
    parts = [part for part in result.get("content") or [] if isinstance(part, Mapping)]
    contents: list[Content] = []
    for part in parts:
        if shows_images and part.get("type") in IMAGE_TYPES:
            contents.append([dict(part)])
        elif "text" in part:
            contents.append(str(part["text"]))
    content = join_contents(contents) or format_value(result.get("data"))
    return f"Error: {join_texts(content)}" if result.get("is_error") else content
