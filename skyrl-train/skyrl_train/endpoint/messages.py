"""Anthropic's Messages: requests, and replies as content blocks."""

import json
from collections.abc import Sequence
from typing import ClassVar

from skyrl_gym.tools.calls import ToolCall
from skyrl_train.endpoint.blocks import BlockBuilder, BlockRequest, open_thought, seal_thought
from skyrl_train.endpoint.completions import FinishedChoice, Json
from skyrl_train.endpoint.wire import NOT_OFFERED, ChatRequest, NonEmpty, RequestError, WireModel, refuse

ERROR_TYPES = {
    400: "invalid_request_error",
    404: "not_found_error",
    405: "invalid_request_error",
    503: "overloaded_error",
}
DELTAS = {"thought": "thinking", "text": "text", "call": "partial_json"}  # the field that extends a block


class InputMessage(WireModel):
    """A message of the request."""

    role: NonEmpty
    content: str | list[Json]

    def to_chat(self) -> list[Json]:
        """Return the messages of a chat. A tool result becomes a separate message."""
        if isinstance(self.content, str):
            return [{"role": self.role, "content": self.content}]
        results: list[Json] = []
        message: Json = {"role": self.role, "content": []}
        for block in self.content:
            if block.get("type") == "tool_result":
                if message["content"]:
                    refuse("tool_result blocks must come before all other blocks of a message", param="messages")
                results.append(
                    {"role": "tool", "tool_call_id": block.get("tool_use_id"), "content": block.get("content")}
                )
            elif block.get("type") == "tool_use":
                function = {"name": block.get("name"), "arguments": block.get("input") or {}}
                message.setdefault("tool_calls", []).append(
                    {"id": block.get("id"), "type": "function", "function": function}
                )
            elif block.get("type") == "thinking":
                thought = block.get("thinking") or open_thought(block.get("signature"), "messages")
                message["reasoning_content"] = thought
            else:
                message["content"].append(block)
        return results + ([message] if message["content"] or not results else [])


class MessagesRequest(BlockRequest):
    """The body of POST /v1/messages and of /v1/messages/count_tokens."""

    not_offered: ClassVar = {
        **{name: values for name, values in NOT_OFFERED.items() if name != "tool_choice"},
        **dict.fromkeys(("container", "mcp_servers", "chat_template_kwargs", "speed"), (None, [], {}, "standard")),
    }

    messages: list[InputMessage]
    system: str | list[Json] | None = None
    stop_sequences: list[NonEmpty] | None = None
    tool_choice: Json | None = None
    thinking: Json | None = None
    output_config: Json | None = None
    context_management: Json | None = None

    def to_chat(self, warned: set[str]) -> ChatRequest:
        """Return the equivalent chat request."""
        config, choice, edits = self.output_config or {}, self.tool_choice or {}, self.context_management or {}
        if config.get("format") is not None:
            refuse("output_config.format is not supported; remove it", param="output_config")
        if any(not isinstance(edit, dict) or edit.get("keep") != "all" for edit in edits.get("edits") or ()):
            message = "context_management removes parts of the history, which is not supported; remove it"
            refuse(message, param="context_management")
        blocks = [{"text": self.system}] if isinstance(self.system, str) else self.system or ()
        system = [{"role": "system", "content": [{"type": "text", **block}]} for block in blocks]
        return self._translate(
            [*system, *(message for one in self.messages for message in one.to_chat())],
            warned,
            stop=self.stop_sequences or self.stop,
            parallel_tool_calls=False if choice.get("disable_parallel_tool_use") else None,
            tool_choice=choice.get("type"),
            reasoning_effort=config.get("effort"),
        )

    def new_builder(self) -> "MessagesBuilder":
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
        """Return the events before the first block."""
        usage = {"input_tokens": len(prompts[0]), "output_tokens": 0}
        return [{"type": "message_start", "message": self._message(None, None, [], usage)}, {"type": "ping"}]

    def finish(self, replies: Sequence[FinishedChoice]) -> list[Json]:
        """Return the events with the stop reason and the token counts."""
        body = self._body(replies[0], [])
        delta = {name: body[name] for name in ("stop_reason", "stop_sequence")}
        return [{"type": "message_delta", "delta": delta, "usage": body["usage"]}, {"type": "message_stop"}]

    def fail(self, error: RequestError) -> Json:
        """Return the event of an error."""
        return error_body(error)

    def _body(self, finished: FinishedChoice, blocks: list[Json]) -> Json:
        stop = finished.stop if finished.stop in (self._request.stop_sequences or ()) else None
        reason = "tool_use" if finished.reply.calls else "stop_sequence" if stop is not None else "end_turn"
        n_prompt, n_cached, n_sampled = finished.count_tokens()
        usage = {"input_tokens": n_prompt - n_cached, "output_tokens": n_sampled, "cache_read_input_tokens": n_cached}
        return self._message("max_tokens" if finished.is_truncated else reason, stop, blocks, usage)

    def _message(self, reason: str | None, stop: str | None, blocks: list[Json], usage: Json) -> Json:
        message = {"id": f"msg_{self._hex}", "type": "message", "role": "assistant", "model": self._request.model}
        usage = {"cache_creation_input_tokens": 0, **usage}
        return message | {"content": blocks, "stop_reason": reason, "stop_sequence": stop, "usage": usage}

    def _block(self, index: int, kind: str, value: str | ToolCall) -> Json:
        if isinstance(value, ToolCall):
            return {"type": "tool_use", "id": value.id, "name": value.name, "input": value.arguments}
        if kind == "text":
            return {"type": "text", "text": value}
        return {"type": "thinking", "thinking": value * self._shows_thoughts, "signature": seal_thought(value)}

    def _open(self, kind: str, value: str | ToolCall) -> list[Json]:
        block = self._block(self._index, kind, value) | ({"input": {}} if kind == "call" else {})
        return [{"type": "content_block_start", "index": self._index, "content_block": block}]

    def _extend(self, kind: str, value: str | ToolCall) -> list[Json]:
        text = json.dumps(value.arguments, ensure_ascii=False) if isinstance(value, ToolCall) else value
        delta = {"type": "input_json_delta" if kind == "call" else f"{DELTAS[kind]}_delta", DELTAS[kind]: text}
        return [self._delta(delta)] if kind != "thought" or self._shows_thoughts else []

    def _close(self, kind: str, value: str | ToolCall) -> list[Json]:
        block = self._block(self._index, kind, value)
        signature = {"type": "signature_delta", "signature": block.get("signature")}
        stop = {"type": "content_block_stop", "index": self._index}
        return [self._delta(signature), stop] if kind == "thought" else [stop]

    def _delta(self, delta: Json) -> Json:
        return {"type": "content_block_delta", "index": self._index, "delta": delta}
