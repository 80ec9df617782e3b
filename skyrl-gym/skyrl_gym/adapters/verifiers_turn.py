"""What an environment of verifiers says to the model, and what the model answers; the same for both generations."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from skyrl_gym.adapters.actions import ActionError, calls_in
from skyrl_gym.envs.base_text_env import ConversationType, MessageType
from skyrl_gym.error import Error
from skyrl_gym.tools.calls import ToolCall
from skyrl_gym.tools.messages import readable, tool_response, tools_prompt, with_system

CALL = "<tool_call>\n{call}\n</tool_call>"
SHOWN_AS_USER = ("user", "tool", "text")


class VerifiersError(Error):
    """The environment, or what it depends on, has failed; the model has not."""


@dataclass(frozen=True, slots=True)
class Reply:
    """What the model wrote, without lone surrogates.

    calls: the tools that it calls, where there are tools.
    problem: why the calls cannot be read, for the model; then there are none.
    """

    text: str
    calls: Sequence[ToolCall] = ()
    problem: str | None = None


@dataclass(frozen=True, slots=True)
class Turn:
    """What there is to read before the next reply.

    messages: the whole conversation as verifiers has it, each message as a dict.
    n_read: how many of them, from the first on, the model has read or written; 0 where the environment rewrote them.
    tools: what the model may call, as OpenAI's interface describes functions.
    """

    messages: Sequence[Mapping[str, Any]]
    n_read: int = 0
    tools: Sequence[Mapping[str, Any]] = ()

    def prompt(self, describe_tools: bool) -> ConversationType:
        """The whole conversation for a chat template, with the tools in its system message."""
        shown = chat_messages(self.messages)
        return with_system(shown, tools_prompt(self.tools)) if describe_tools and self.tools else shown

    def observations(self) -> ConversationType:
        """What the model has not read yet."""
        return chat_messages(self.messages[self.n_read :])


@dataclass(frozen=True, slots=True)
class Outcome:
    """What an episode was worth.

    reward: the sum of the weighted rewards.
    components: the weighted rewards by name; empty where they do not add up to `reward`.
    metrics: all scores by name, before weights.
    """

    reward: float
    components: Mapping[str, float] = field(default_factory=dict)
    metrics: Mapping[str, float] = field(default_factory=dict)
    stop_condition: str | None = None


class Episode(Protocol):
    """One rollout of verifiers, in which somebody else samples the replies."""

    async def begin(self, prompt: ConversationType) -> Turn:
        """Set the environment up; what it wants to be answered first."""
        ...

    async def reply(self, reply: Reply) -> Turn | Outcome:
        """What comes of a reply: more to read, or the end."""
        ...

    async def close(self) -> None:
        """Release what the environment holds, wherever the episode is. Calling it again does nothing."""
        ...


def read_reply(text: str, has_tools: bool) -> Reply:
    """A reply and the calls in it."""
    text = readable(text)
    if not has_tools:
        return Reply(text)
    try:
        return Reply(text, calls_in(text))
    except ActionError as problem:
        return Reply(text, problem=str(problem))


def next_turn(
    before: Sequence[Mapping[str, Any]], after: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]]
) -> Turn:
    """The turn whose conversation is `after`, for a model that knows the conversation `before`."""
    is_continued = list(after[: len(before)]) == list(before)
    return Turn(after, len(before) if is_continued else 0, tools)


def chat_messages(messages: Sequence[Mapping[str, Any]]) -> ConversationType:
    """Messages of verifiers for any chat template: text alone, tool calls and results in it as Qwen writes them.

    Results, and what the user says right after them, make one message of the user: many templates refuse two in a row.

    Raises:
        ValueError: a message holds something else than text.
    """
    shown: ConversationType = []
    was_result = False
    for message in messages:
        is_result = message["role"] == "tool"
        new = _chat_message(message)
        if shown and new["role"] == shown[-1]["role"] == "user" and (is_result or was_result):
            shown[-1]["content"] += f"\n{new['content']}"
        else:
            shown.append(new)
        was_result = is_result
    return shown


def _chat_message(message: Mapping[str, Any]) -> MessageType:
    role = message["role"]
    text = readable(text_of(message.get("content")))
    if role == "assistant":
        return {"role": role, "content": _with_calls(_with_thoughts(text, message), message)}
    if role == "tool":
        text = tool_response(text)
    return {"role": "user" if role in SHOWN_AS_USER else role, "content": text}


def text_of(content: Any) -> str:
    """The text of a message.

    Raises:
        ValueError: there is an image, or another thing that is no text.
    """
    if content is None or isinstance(content, str):
        return content or ""
    for part in content:
        if part.get("type") != "text":
            raise ValueError(f"the environment shows a part of type {part.get('type')!r}; the model reads only text")
    return "\n".join(part["text"] for part in content)


def _with_thoughts(text: str, message: Mapping[str, Any]) -> str:
    thoughts = message.get("reasoning_content")
    return f"<think>\n{thoughts}\n</think>\n\n{text}" if thoughts else text


def _with_calls(text: str, message: Mapping[str, Any]) -> str:
    """The text with the calls that it does not have in it: those of an example in a prompt."""
    calls = message.get("tool_calls") or []
    if not calls or "<tool_call>" in text or "<function" in text:
        return text
    written = (CALL.format(call=_call(call)) for call in calls)
    return "\n".join(part for part in (text, *written) if part)


def _call(call: Mapping[str, Any]) -> str:
    try:
        arguments = json.loads(call["arguments"])
    except ValueError:
        arguments = call["arguments"]
    return json.dumps({"name": call["name"], "arguments": arguments}, ensure_ascii=False)
