"""Messages between a verifiers environment and the model, for both generations of verifiers."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from skyrl_gym.adapters.actions import ActionError, parse_calls
from skyrl_gym.envs.base_text_env import ConversationType, MessageType
from skyrl_gym.error import Error
from skyrl_gym.runtime.text import clean_text
from skyrl_gym.tools.arguments import convert_arguments
from skyrl_gym.tools.calls import ToolCall
from skyrl_gym.tools.messages import append_to_system, format_tool_response, format_tools_prompt

CALL = "<tool_call>\n{call}\n</tool_call>"
USER_ROLES = ("user", "tool", "text")


class VerifiersError(Error):
    """The environment or one of its services failed, through no fault of the model."""


@dataclass(frozen=True, slots=True)
class ParsedReply:
    """The model's reply, without lone surrogates.

    calls: the tool calls, if there are tools.
    problem: the reason why the calls cannot be parsed, for the model. `calls` is then empty.
    """

    text: str
    calls: Sequence[ToolCall] = ()
    problem: str | None = None


@dataclass(frozen=True, slots=True)
class ChatTurn:
    """The conversation before the model's next reply.

    messages: the whole conversation in verifiers' format, each message as a dict.
    n_read: the number of leading messages that the model has read or written, 0 if the environment rewrote them.
    tools: the tools, as functions of the OpenAI API.
    """

    messages: Sequence[Mapping[str, Any]]
    n_read: int = 0
    tools: Sequence[Mapping[str, Any]] = ()

    def prompt(self, describe_tools: bool) -> ConversationType:
        """Return the whole conversation for a chat template, optionally with the tools in its system message."""
        messages = chat_messages(self.messages)
        return (
            append_to_system(messages, format_tools_prompt(self.tools)) if describe_tools and self.tools else messages
        )

    def observations(self) -> ConversationType:
        """Return the messages that the model has not read yet."""
        return chat_messages(self.messages[self.n_read :])


@dataclass(frozen=True, slots=True)
class EpisodeResult:
    """The result of an episode.

    reward: the sum of the weighted rewards.
    components: the weighted rewards by name. Empty if they do not add up to `reward`.
    metrics: all scores by name, before weights.
    """

    reward: float
    components: Mapping[str, float] = field(default_factory=dict)
    metrics: Mapping[str, float] = field(default_factory=dict)
    stop_condition: str | None = None


class VerifiersEpisode(Protocol):
    """One rollout of verifiers. The trainer samples the replies."""

    async def start(self, prompt: ConversationType) -> ChatTurn:
        """Set up the environment, and return the first turn."""

    async def reply(self, reply: ParsedReply) -> ChatTurn | EpisodeResult:
        """Process a reply, and return the next turn or the result."""

    async def close(self) -> None:
        """Release the environment's resources, at any time. Idempotent."""


def parse_reply(text: str, tools: Sequence[Mapping[str, Any]]) -> ParsedReply:
    """Parse a reply and its calls of `tools` (functions of the OpenAI API). Without tools, a reply has no calls."""
    text = clean_text(text)
    if not tools:
        return ParsedReply(text)
    parameters = {tool["function"]["name"]: tool["function"].get("parameters") or {} for tool in tools}
    try:
        calls = parse_calls(text)
    except ActionError as problem:
        return ParsedReply(text, problem=str(problem))
    return ParsedReply(
        text, [ToolCall(call.name, convert_arguments(call.arguments, parameters.get(call.name, {}))) for call in calls]
    )


def next_turn(
    before: Sequence[Mapping[str, Any]], after: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]]
) -> ChatTurn:
    """Return the turn with the conversation `after` for a model that has read the conversation `before`."""
    is_continued = list(after[: len(before)]) == list(before)
    return ChatTurn(after, len(before) if is_continued else 0, tools)


def chat_messages(messages: Sequence[Mapping[str, Any]]) -> ConversationType:
    """Convert verifiers' messages for any chat template: text only, with tool calls and results in Qwen's format.

    Tool results and a user message right after them are merged, since many templates reject two user messages in a row.

    Raises:
        ValueError: a message contains anything but text.
    """
    merged: ConversationType = []
    was_result = False
    for message in messages:
        is_result = message["role"] == "tool"
        new = _chat_message(message)
        if merged and new["role"] == merged[-1]["role"] == "user" and (is_result or was_result):
            merged[-1]["content"] += f"\n{new['content']}"
        else:
            merged.append(new)
        was_result = is_result
    return merged


def _chat_message(message: Mapping[str, Any]) -> MessageType:
    role = message["role"]
    text = message_text(message.get("content"))
    if role == "assistant":
        thoughts = message.get("reasoning_content")
        text = f"<think>\n{thoughts}\n</think>\n\n{text}" if thoughts else text
        return {"role": role, "content": _with_calls(text, message)}
    if role == "tool":
        text = format_tool_response(text)
    return {"role": "user" if role in USER_ROLES else role, "content": text}


def message_text(content: Any) -> str:
    """Return the text of a message.

    Raises:
        ValueError: the message contains an image or another part that is not text.
    """
    if content is None or isinstance(content, str):
        return content or ""
    for part in content:
        if part.get("type") != "text":
            raise ValueError(f"the environment sent a part of type {part.get('type')!r}; the model reads only text")
    return "\n".join(part["text"] for part in content)


def _with_calls(text: str, message: Mapping[str, Any]) -> str:
    """Append the calls to the text, unless the text contains them already."""
    calls = message.get("tool_calls") or []
    if not calls or "<tool_call>" in text or "<function" in text:
        return text
    texts = (CALL.format(call=_format_call(call)) for call in calls)
    return "\n".join(part for part in (text, *texts) if part)


def _format_call(call: Mapping[str, Any]) -> str:
    try:
        arguments = json.loads(call["arguments"])
    except ValueError:
        arguments = call["arguments"]
    return json.dumps({"name": call["name"], "arguments": arguments}, ensure_ascii=False)
