"""OpenAI's Responses: requests, and replies as output items. A reply becomes up to three kinds of items:

    reasoning (the thought)   message (the text)   function_call (each call)

In the input, the items of one reply follow each other in this order, and become one message of the chat.
"""

import json
import time
from collections.abc import Sequence
from typing import Any, ClassVar

from skyrl_gym.tools.calls import ToolCall
from skyrl_train.endpoint.blocks import BlockBuilder, BlockRequest, open_thought, seal_thought
from skyrl_train.endpoint.completions import FinishedChoice, Json
from skyrl_train.endpoint.wire import NOT_OFFERED, UNSET, ChatRequest, Count, RequestError, WireModel, refuse

ENCRYPTED = "reasoning.encrypted_content"
TEXT: Json = {"format": {"type": "text"}}
LOGPROBS = "message.output_text.logprobs"
REPLY_FIELDS = ("reasoning_content", "content", "tool_calls")  # of a reply's message, in the order of its items
TEXTS = {
    "message": ("output_text", "text"),
    "reasoning": ("reasoning_text", "text"),
    "function_call": ("function_call_arguments", "arguments"),
    "custom_tool_call": ("custom_tool_call_input", "input"),
}
"""Names of an item's text in events, and of the field that holds it."""


class InputItem(WireModel):
    """An item of the input."""

    type: str = "message"
    role: str | None = None
    content: str | list[Json] | None = None
    summary: list[Json] | None = None
    output: str | list[Json] | None = None

    def to_message(self) -> Json:
        """Return the item as a chat message. Items of a reply have only the field that they add to its message."""
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
        function = {"name": name, "arguments": extra.get("arguments")}
        call = {"id": id, "type": "function", "function": function}
        return {"role": "assistant", "tool_calls": [call]}


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

    def new_builder(self) -> "ResponsesBuilder":
        """Return the builder of the response."""
        return ResponsesBuilder(self)


class ResponsesBuilder(BlockBuilder):
    """The bodies and events of /v1/responses."""

    def __init__(self, request: ResponsesRequest) -> None:
        super().__init__()
        self._request = request
        self._n_events = 0
        self._items: list[Json] = []
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
        return [self._event(f"response.{name}", response=response) for name in ("created", "in_progress")]

    def finish(self, replies: Sequence[FinishedChoice]) -> list[Json]:
        """Return the event with the whole response."""
        body = self._body(replies[0], self._items)
        return [self._event(f"response.{body['status']}", response=body)]

    def fail(self, error: RequestError) -> Json:
        """Return the event of a failed response."""
        details = {"code": error.code or "server_error", "message": error.message}
        return self._event("response.failed", response=self._response | {"status": "failed", "error": details})

    def _body(self, finished: FinishedChoice, blocks: list[Json]) -> Json:
        n_prompt, n_cached, n_sampled = finished.count_tokens()
        usage = {"input_tokens": n_prompt, "input_tokens_details": {"cached_tokens": n_cached, "cache_write_tokens": 0}}
        usage |= {"output_tokens": n_sampled, "output_tokens_details": {"reasoning_tokens": 0}}
        usage |= {"total_tokens": n_prompt + n_sampled}
        end: Json = {"status": "completed"}
        if finished.is_truncated:
            end = {"status": "incomplete", "incomplete_details": {"reason": "max_output_tokens"}}
        return self._response | {"output": blocks, "usage": usage, **end}

    def _block(self, index: int, kind: str, value: str | ToolCall) -> Json:
        status = {"status": "incomplete" if self._is_truncated and kind == "text" else "completed"}
        if isinstance(value, ToolCall):
            item = {"id": f"fc_{self._hex}{index}", "type": "function_call", "call_id": value.id, "name": value.name}
            arguments = {"arguments": json.dumps(value.arguments, ensure_ascii=False)}
            return {**item, **self._namespaces.get(value.name, {}), **arguments, **status}
        content = {"content": [self._part(kind, value)], **status}
        if kind == "text":
            return {"id": f"msg_{self._hex}{index}", "type": "message", "role": "assistant", **content}
        sealed = {"encrypted_content": seal_thought(value)} if ENCRYPTED in (self._request.include or ()) else {}
        return {"id": f"rs_{self._hex}{index}", "type": "reasoning", "summary": [], **content, **sealed}

    def _part(self, kind: str, text: str) -> Json:
        part = {"type": "reasoning_text", "text": text}
        return part if kind == "thought" else {"type": "output_text", "text": text, "annotations": [], "logprobs": []}

    def _open(self, kind: str, value: str | ToolCall) -> list[Json]:
        item = self._block(self._index, kind, value)
        empty: Json = {"content": []} if isinstance(value, str) else {TEXTS[item["type"]][1]: ""}
        added = self._event("response.output_item.added", item=item | {"status": "in_progress"} | empty)
        parts = {"part": self._part(kind, "")} if isinstance(value, str) else None
        return [added, self._event("response.content_part.added", item, **parts)] if parts else [added]

    def _extend(self, kind: str, value: str | ToolCall) -> list[Json]:
        item = self._block(self._index, kind, value)
        name, field = TEXTS[item["type"]]
        return [self._event(f"response.{name}.delta", item, delta=item.get(field, value))]

    def _close(self, kind: str, value: str | ToolCall) -> list[Json]:
        item = self._block(self._index, kind, value)
        self._items.append(item)
        name, field = TEXTS[item["type"]]
        texts = {field: item.get(field, value)} | ({"name": item["name"]} if field == "arguments" else {})
        events = [self._event(f"response.{name}.done", item, **texts)]
        if isinstance(value, str):
            events.append(self._event("response.content_part.done", item, part=self._part(kind, value)))
        return [*events, self._event("response.output_item.done", item=item)]

    def _event(self, type: str, inside: Json | None = None, **fields: Any) -> Json:
        """Return an event. `inside` is the item whose text it changes."""
        event: Json = {"type": type, "sequence_number": self._n_events, **fields}
        self._n_events += 1
        if "response" not in fields:
            event["output_index"] = self._index
        if inside is not None:
            event["item_id"] = inside["id"]
            event |= {"content_index": 0} if "content" in inside else {}
            event |= {"logprobs": []} if "output_text." in type else {}
        return event
