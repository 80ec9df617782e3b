"""Anthropic's Messages: requests, and replies as content blocks."""

import json
from collections.abc import Sequence
from typing import Any

from skyrl_gym.tools.calls import ToolCall
from skyrl_train.endpoint.blocks import (
    BlockBuilder,
    BlockRequest,
    StoredMessages,
    check_hosted,
    dump_parts,
    offer_tool,
    open_thought,
    seal_thought,
)
from skyrl_train.endpoint.completions import FinishedChoice, Json
from skyrl_train.endpoint.wire import NOT_OFFERED, ChatRequest, ContentPart, NonEmpty, RequestError, WireModel, refuse

ERROR_TYPES = {
    **{400: "invalid_request_error", 401: "authentication_error", 403: "permission_error", 404: "not_found_error"},
    **{405: "invalid_request_error", 413: "request_too_large", 429: "rate_limit_error", 503: "overloaded_error"},
}
DELTAS = {
    "thought": ("thinking_delta", "thinking"),
    "text": ("text_delta", "text"),
    "call": ("input_json_delta", "partial_json"),
}


class ContentBlock(ContentPart):
    """A block of a message's content."""

    thinking: str | None = None
    signature: str | None = None
    id: str | None = None
    name: str | None = None
    input: dict[str, Any] | None = None
    tool_use_id: str | None = None
    content: str | list[ContentPart] | None = None


class InputMessage(WireModel):
    """A message of the request."""

    role: NonEmpty
    content: str | list[ContentBlock]

    def to_messages(self) -> list[Json]:
        """Return the messages of a chat. Each tool result becomes a message of its own."""
        if isinstance(self.content, str):
            return [{"role": self.role, "content": self.content}]
        messages: list[Json] = []
        message: Json = {"role": self.role, "content": []}
        for block in self.content:
            if block.type == "tool_result":
                result = {"role": "tool", "tool_call_id": block.tool_use_id, "content": dump_parts(block.content)}
                messages += [message, result] if message["content"] else [result]
                message = {"role": self.role, "content": []}
            elif block.type == "tool_use":
                function = {"name": block.name, "arguments": block.input or {}}
                call = {"id": block.id, "type": "function", "function": function}
                message.setdefault("tool_calls", []).append(call)
            elif block.type == "thinking":
                thought = block.thinking or open_thought(block.signature or "", "messages")
                message["reasoning_content"] = message.get("reasoning_content", "") + thought
            else:
                message["content"].append(block.model_dump(exclude_none=True))
        is_result = bool(messages) and not message["content"]
        return messages if is_result else [*messages, message]


class Tool(WireModel):
    """A tool of the request."""

    type: str | None = None
    name: str | None = None
    description: str | None = None
    input_schema: dict[str, Any] | None = None
    strict: bool | None = None


class MessagesRequest(BlockRequest):
    """The body of POST /v1/messages and of /v1/messages/count_tokens."""

    not_offered = {
        **{name: values for name, values in NOT_OFFERED.items() if name != "tool_choice"},
        **dict.fromkeys(("container", "mcp_servers", "chat_template_kwargs", "speed"), (None, [], {}, "standard")),
    }

    messages: list[InputMessage]
    system: str | list[ContentPart] | None = None
    stop_sequences: list[NonEmpty] | None = None
    tools: list[Tool] | None = None
    tool_choice: dict[str, Any] | None = None
    thinking: dict[str, Any] | None = None
    output_config: dict[str, Any] | None = None
    context_management: dict[str, Any] | None = None

    def to_chat(self, stored: StoredMessages | None, warned: set[str]) -> ChatRequest:
        """Return the equivalent chat request."""
        config, choice = self.output_config or {}, self.tool_choice or {}
        if config.get("format") is not None:
            refuse("output_config.format is not supported; remove it", param="output_config")
        for edit in (self.context_management or {}).get("edits") or ():
            if not isinstance(edit, dict) or edit.get("keep") != "all":
                message = "context_management removes parts of the history, which is not supported; remove it"
                refuse(message, param="context_management")
        blocks = [self.system] if isinstance(self.system, str) else [part.text for part in self.system or ()]
        messages = [{"role": "system", "content": text} for text in blocks if text]
        messages += [message for one in self.messages for message in one.to_messages()]
        tools = []
        for tool in self.tools or ():
            if tool.type not in (None, "custom"):
                check_hosted(tool.type, warned)
            else:
                tools.append(offer_tool(tool.name, tool.description, tool.input_schema, tool.strict))
        return self._translate(
            messages,
            tools,
            stop=self.stop_sequences or self.stop,
            parallel_tool_calls=False if choice.get("disable_parallel_tool_use") else None,
            tool_choice=choice.get("type"),
            reasoning_effort=config.get("effort"),
        )

    def new_builder(self, stored: StoredMessages | None) -> "MessagesBuilder":
        """Return the builder of the response."""
        return MessagesBuilder(self)


def error_body(error: RequestError) -> Json:
    """Return Anthropic's error body."""
    # Claude Code compacts its history if it reads this sentence.
    prefix = "prompt is too long: " if error.code == "context_length_exceeded" else ""
    details = {"type": ERROR_TYPES.get(error.status, "api_error"), "message": prefix + error.message}
    return {"type": "error", "error": details, "request_id": None}


class MessagesBuilder(BlockBuilder):
    """The bodies and events of /v1/messages."""

    def __init__(self, request: MessagesRequest) -> None:
        super().__init__()
        self._request = request
        self._shows_thoughts = (request.thinking or {}).get("display") != "omitted"

    def start(self, prompts: Sequence[list[int]]) -> list[Json]:
        """Return the event before the first block."""
        usage = {"input_tokens": len(prompts[0]), "output_tokens": 0}
        return [{"type": "message_start", "message": self._message(None, None, [], usage)}, {"type": "ping"}]

    def finish(self, replies: Sequence[FinishedChoice]) -> list[Json]:
        """Return the events with the stop reason and the token counts."""
        (finished,) = replies
        body = self._body(finished, [])
        delta = {name: body[name] for name in ("stop_reason", "stop_sequence")}
        return [{"type": "message_delta", "delta": delta, "usage": body["usage"]}, {"type": "message_stop"}]

    def fail(self, error: RequestError) -> Json:
        """Return the event of an error."""
        return error_body(error)

    def _body(self, finished: FinishedChoice, blocks: list[Json]) -> Json:
        stop = finished.stop if finished.stop in (self._request.stop_sequences or ()) else None
        reason = "tool_use" if finished.reply.calls else "stop_sequence" if stop is not None else "end_turn"
        n_prompt, n_cached, n_sampled = finished.count_tokens()
        usage = {"input_tokens": n_prompt - n_cached, "output_tokens": n_sampled}
        usage |= {"cache_read_input_tokens": n_cached, "cache_creation_input_tokens": 0}
        return self._message("max_tokens" if finished.is_truncated else reason, stop, blocks, usage)

    def _message(self, reason: str | None, stop: str | None, blocks: list[Json], usage: Json) -> Json:
        message = {"id": f"msg_{self._hex}", "type": "message", "role": "assistant", "model": self._request.model}
        return message | {"content": blocks, "stop_reason": reason, "stop_sequence": stop, "usage": usage}

    def _block(self, index: int, kind: str, value: Any) -> Json:
        if isinstance(value, ToolCall):
            return {"type": "tool_use", "id": value.id, "name": value.name, "input": value.arguments}
        if kind == "text":
            return {"type": "text", "text": value}
        thinking = value if self._shows_thoughts else ""
        return {"type": "thinking", "thinking": thinking, "signature": seal_thought(value)}

    def _open(self, kind: str, value: Any) -> list[Json]:
        empty = {"input": {}} if kind == "call" else {}
        block = self._block(self._index, kind, value) | empty
        return [{"type": "content_block_start", "index": self._index, "content_block": block}]

    def _extend(self, kind: str, value: Any) -> list[Json]:
        if kind == "thought" and not self._shows_thoughts:
            return []
        type, name = DELTAS[kind]
        text = json.dumps(value.arguments, ensure_ascii=False) if isinstance(value, ToolCall) else value
        return [self._delta({"type": type, name: text})]

    def _close(self, kind: str, value: Any) -> list[Json]:
        signature = {"type": "signature_delta", "signature": seal_thought(value)} if kind == "thought" else None
        return [*([self._delta(signature)] if signature else []), {"type": "content_block_stop", "index": self._index}]

    def _delta(self, delta: Json) -> Json:
        return {"type": "content_block_delta", "index": self._index, "delta": delta}
