"""Anthropic's Messages: requests, and replies as content blocks."""

from collections.abc import Sequence
from typing import ClassVar

from skyrl_agent.endpoint.blocks import Block, BlockBuilder, BlockEvents, BlockRequest, open_thought, seal_thought
from skyrl_agent.endpoint.completions import ChatRequest, FinishedChoice, Json
from skyrl_agent.endpoint.replies import wire_call
from skyrl_agent.endpoint.wire import NOT_OFFERED, NonEmpty, RequestError, WireModel, refuse

ERROR_TYPES = {
    400: "invalid_request_error",
    404: "not_found_error",
    405: "invalid_request_error",
    503: "overloaded_error",
}
START, STOP = ["content_block_start"], ["content_block_stop"]
EVENTS: BlockEvents = {
    "thought": (START, ["thinking_delta"], ["signature_delta", *STOP]),
    "text": (START, ["text_delta"], STOP),
    "call": (START, ["input_json_delta"], STOP),
}
"""Events of a block. The deltas are the types of `content_block_delta`."""
DELTA_FIELDS = {
    "thinking_delta": "thinking",
    "signature_delta": "signature",
    "text_delta": "text",
    "input_json_delta": "partial_json",
}


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
                result = {"tool_call_id": block.get("tool_use_id"), "content": block.get("content")}
                results.append({"role": "tool", **result})
            elif block.get("type") == "tool_use":
                call = wire_call(block.get("id"), block.get("name"), block.get("input") or {})
                message.setdefault("tool_calls", []).append(call)
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


def error_body(error: RequestError) -> Json:
    """Return Anthropic's error body."""
    # Claude Code recognizes this prefix and compacts its history.
    prefix = "prompt is too long: " if error.code == "context_length_exceeded" else ""
    details = {"type": ERROR_TYPES.get(error.status, "api_error"), "message": prefix + error.message}
    return {"type": "error", "error": details, "request_id": None}


class MessagesBuilder(BlockBuilder):
    """The bodies and events of /v1/messages."""

    def __init__(self, request: MessagesRequest) -> None:
        self._request = request
        self._shows_thoughts = (request.thinking or {}).get("display") != "omitted"
        start, delta, stop = EVENTS["thought"]
        super().__init__({**EVENTS, "thought": (start, delta if self._shows_thoughts else [], stop)})

    def start(self, prompts: Sequence[list[int]]) -> list[Json]:
        """Return the events before the first block."""
        usage = {"input_tokens": len(prompts[0]), "output_tokens": 0}
        return [{"type": "message_start", "message": self._message(None, None, [], usage)}, {"type": "ping"}]

    def finish(self, replies: Sequence[FinishedChoice]) -> list[Json | str]:
        """Return the events with the stop reason and the token counts."""
        body = self._body(replies[0])
        delta = {name: body[name] for name in ("stop_reason", "stop_sequence")}
        return [{"type": "message_delta", "delta": delta, "usage": body["usage"]}, {"type": "message_stop"}]

    def fail(self, error: RequestError) -> Json:
        """Return the event of an error."""
        return error_body(error)

    def _body(self, finished: FinishedChoice) -> Json:
        stop = finished.reply.stop if finished.reply.stop in (self._request.stop_sequences or ()) else None
        reason = "tool_use" if finished.reply.calls else "stop_sequence" if stop is not None else "end_turn"
        n_prompt, n_cached, n_sampled = finished.count_tokens()
        usage = {"input_tokens": n_prompt - n_cached, "output_tokens": n_sampled, "cache_read_input_tokens": n_cached}
        return self._message("max_tokens" if finished.is_truncated else reason, stop, self._blocks, usage)

    def _message(self, reason: str | None, stop: str | None, blocks: list[Json], usage: Json) -> Json:
        message = {"id": f"msg_{self._hex}", "type": "message", "role": "assistant", "model": self._request.model}
        usage = {"cache_creation_input_tokens": 0, **usage}
        return message | {"content": blocks, "stop_reason": reason, "stop_sequence": stop, "usage": usage}

    def _render(self, block: Block) -> Json:
        if block.call is not None:
            return {"type": "tool_use", "id": block.call.id, "name": block.call.name, "input": block.call.arguments}
        if block.kind == "text":
            return {"type": "text", "text": block.text}
        shown = block.text if self._shows_thoughts else ""
        return {"type": "thinking", "thinking": shown, "signature": seal_thought(block.text)}

    def _block_event(self, name: str, block: Block, piece: str) -> Json:
        if name == "content_block_stop":
            return {"type": name, "index": block.index}
        if name == "content_block_start":
            content = self._render(block) | ({} if block.call is None else {"input": {}})
            return {"type": name, "index": block.index, "content_block": content}
        text = seal_thought(block.text) if name == "signature_delta" else piece
        return {"type": "content_block_delta", "index": block.index, "delta": {"type": name, DELTA_FIELDS[name]: text}}
