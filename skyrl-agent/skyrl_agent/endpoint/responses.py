"""OpenAI's Responses: requests, and replies as output items. A reply becomes up to three kinds of items:

    reasoning (the thought)   message (the text)   function_call (each call)

In the input, the items of one reply follow each other in this order, and become one message of the chat.
"""

import time
from collections.abc import Sequence
from typing import Any, ClassVar

from skyrl_agent.endpoint.blocks import Block, BlockBuilder, BlockEvents, BlockRequest, open_thought, seal_thought
from skyrl_agent.endpoint.completions import ChatRequest, FinishedChoice, Json
from skyrl_agent.endpoint.replies import wire_call
from skyrl_agent.endpoint.wire import NOT_OFFERED, UNSET, Count, RequestError, WireModel, refuse

ENCRYPTED = "reasoning.encrypted_content"
TEXT: Json = {"format": {"type": "text"}}
LOGPROBS = "message.output_text.logprobs"
REPLY_FIELDS = ("reasoning_content", "content", "tool_calls")  # of a reply's message, in the order of its items


OPEN, CLOSE = ["output_item.added", "content_part.added"], ["content_part.done", "output_item.done"]
EVENTS: BlockEvents = {
    "thought": (OPEN, ["reasoning_text.delta"], ["reasoning_text.done", *CLOSE]),
    "text": (OPEN, ["output_text.delta"], ["output_text.done", *CLOSE]),
    "call": (OPEN[:1], ["function_call_arguments.delta"], ["function_call_arguments.done", *CLOSE[1:]]),
}
ID_PREFIXES = {"thought": "rs", "text": "msg", "call": "fc"}


class InputItem(WireModel):
    """An item of the input."""

    type: str = "message"
    role: str | None = None
    content: str | list[Json] | None = None
    summary: list[Json] | None = None
    output: str | list[Json] | None = None

    def to_message(self) -> Json:
        """Convert the item to a chat message. An item of a reply has only the field that it adds to the message."""
        extra = self.model_extra or {}
        id, name = extra.get("call_id"), extra.get("name")
        if self.type == "message":
            return {"role": self.role or "", "content": self.content}
        if self.type == "function_call_output":
            return {"role": "tool", "tool_call_id": id, "content": self.output}
        if self.type == "reasoning":
            parts = self.content if isinstance(self.content, list) and self.content else self.summary or []
            text = "".join(str(part.get("text") or "") for part in parts)
            thought = text or open_thought(extra.get("encrypted_content"), "input")
            return {"role": "assistant", "reasoning_content": thought}
        if self.type != "function_call":
            refuse(f"items of type {self.type[:80]!r} are not supported; remove them", param="input")
        name = f"{extra['namespace']}__{name}" if extra.get("namespace") else name
        return {"role": "assistant", "tool_calls": [wire_call(id, name, extra.get("arguments"))]}


class ResponsesRequest(BlockRequest):
    """The body of POST /v1/responses."""

    not_offered: ClassVar = {
        **NOT_OFFERED,
        **dict.fromkeys(("background", "chat_template_kwargs", "conversation", "previous_response_id"), UNSET),
        **dict.fromkeys(("prompt", "store", "top_logprobs"), UNSET),
        "text": (None, {}, TEXT, {"verbosity": "medium"}, TEXT | {"verbosity": "medium"}),
        "truncation": (None, "disabled"),
    }

    input: str | list[InputItem]
    instructions: str | None = None
    max_output_tokens: Count | None = None
    parallel_tool_calls: bool | None = None
    reasoning: Json | None = None
    include: list[str] | None = None

    def to_chat(self, warned: set[str]) -> ChatRequest:
        """Return the equivalent chat request."""
        if LOGPROBS in (self.include or ()):
            refuse(f"include has {LOGPROBS}, which is not supported; remove it", param="include")
        messages: list[Json] = [{"role": "system", "content": self.instructions}] if self.instructions else []
        for item in [InputItem(role="user", content=self.input)] if isinstance(self.input, str) else self.input:
            message = item.to_message()
            last = messages[-1] if messages and messages[-1]["role"] == message["role"] == "assistant" else {}
            (name,) = message.keys() & set(REPLY_FIELDS)
            if name == "tool_calls" and last:
                last[name] = [*last.get(name, ()), *message[name]]
            elif last and not last.keys() & set(REPLY_FIELDS[REPLY_FIELDS.index(name) :]):
                last[name] = message[name]
            else:
                messages.append(message)
        return self._translate(
            messages,
            warned,
            max_completion_tokens=self.max_output_tokens,
            parallel_tool_calls=self.parallel_tool_calls,
            tool_choice=(self.model_extra or {}).get("tool_choice"),
            reasoning_effort=(self.reasoning or {}).get("effort"),
        )


class ResponsesBuilder(BlockBuilder):
    """The bodies and events of /v1/responses."""

    def __init__(self, request: ResponsesRequest) -> None:
        super().__init__(EVENTS)
        self._request = request
        self._n_events = 0
        self._namespaces = {
            f"{tool.get('name')}__{inner.get('name')}": {"namespace": tool.get("name"), "name": inner.get("name")}
            for tool in request.tools or ()
            if tool.get("type") == "namespace"
            for inner in tool["tools"]
        }
        same = ("model", "instructions", "temperature", "top_p", "max_output_tokens")
        extra = request.model_extra or {}
        self._response: Json = {
            **{name: getattr(request, name) for name in same},
            **dict.fromkeys(("error", "incomplete_details", "usage")),
            "id": f"resp_{self._hex}",
            "object": "response",
            "created_at": time.time(),
            "output": [],
            "metadata": extra.get("metadata") or {},
            "parallel_tool_calls": request.parallel_tool_calls is not False,
            "store": False,
            "text": TEXT,
            "tool_choice": extra.get("tool_choice") or "auto",
            "tools": request.tools or [],
            "truncation": "disabled",
        }

    def start(self, prompts: Sequence[list[int]]) -> list[Json]:
        """Return the events before the first item."""
        response = self._response | {"status": "in_progress"}
        return [self._event(name, response=response) for name in ("created", "in_progress")]

    def finish(self, replies: Sequence[FinishedChoice]) -> list[Json | str]:
        """Return the event with the whole response."""
        body = self._body(replies[0])
        return [self._event(body["status"], response=body)]

    def fail(self, error: RequestError) -> Json:
        """Return the event of a failed response."""
        details = {"code": error.code or "server_error", "message": error.message}
        return self._event("failed", response=self._response | {"status": "failed", "error": details})

    def _body(self, finished: FinishedChoice) -> Json:
        n_prompt, n_cached, n_sampled = finished.count_tokens()
        usage = {"input_tokens": n_prompt, "input_tokens_details": {"cached_tokens": n_cached, "cache_write_tokens": 0}}
        usage |= {"output_tokens": n_sampled, "output_tokens_details": {"reasoning_tokens": 0}}
        usage |= {"total_tokens": n_prompt + n_sampled}
        end: Json = {"status": "completed"}
        if finished.is_truncated:
            end = {"status": "incomplete", "incomplete_details": {"reason": "max_output_tokens"}}
        return self._response | {"output": self._blocks, "usage": usage, **end}

    def _render(self, block: Block) -> Json:
        item: Json = {"id": self._item_id(block), "status": "completed"}
        if block.call is not None:
            names = {"name": block.call.name, **self._namespaces.get(block.call.name, {})}
            return {**item, "type": "function_call", "call_id": block.call.id, **names, "arguments": block.text}
        item["content"] = [self._part(block)]
        if block.kind == "text":
            status = "incomplete" if self._is_truncated else "completed"
            return {**item, "type": "message", "role": "assistant", "status": status}
        sealed = {"encrypted_content": seal_thought(block.text)} if ENCRYPTED in (self._request.include or ()) else {}
        return {**item, "type": "reasoning", "summary": [], **sealed}

    def _part(self, block: Block) -> Json:
        if block.kind == "thought":
            return {"type": "reasoning_text", "text": block.text}
        return {"type": "output_text", "text": block.text, "annotations": [], "logprobs": []}

    def _block_event(self, name: str, block: Block, piece: str) -> Json:
        kind, step = name.split(".")
        event = self._event(name, output_index=block.index)
        if kind == "output_item":
            empty: Json = {} if block.call is not None else {"content": []}
            started = self._render(block) | {"status": "in_progress"} | empty if step == "added" else None
            return event | {"item": started or self._blocks[-1]}
        event["item_id"] = self._item_id(block)
        event |= {"content_index": 0} if block.call is None else {}
        event |= {"logprobs": []} if kind == "output_text" else {}
        if kind == "content_part":
            return event | {"part": self._part(block)}
        if step == "delta":
            return event | {"delta": piece}
        if block.call is None:
            return event | {"text": block.text}
        return event | {"name": self._blocks[-1]["name"], "arguments": block.text}

    def _event(self, name: str, **fields: Any) -> Json:
        event = {"type": f"response.{name}", "sequence_number": self._n_events, **fields}
        self._n_events += 1
        return event

    def _item_id(self, block: Block) -> str:
        return f"{ID_PREFIXES[block.kind]}_{self._hex}{block.index}"
