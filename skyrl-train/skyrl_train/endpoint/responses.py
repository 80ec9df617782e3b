"""OpenAI's Responses: requests, and replies as output items. A reply becomes up to three kinds of items:

    reasoning (the thought)   message (the text)   function_call or custom_tool_call (each call)

In the input, the items of one reply follow each other in this order, and become one message of the chat.
"""

import json
import time
from collections.abc import Iterable, Sequence
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
from skyrl_train.endpoint.wire import NOT_OFFERED, ChatRequest, ContentPart, Count, RequestError, WireModel, refuse

ENCRYPTED = "reasoning.encrypted_content"
REPLY_FIELDS = ("reasoning_content", "content", "tool_calls")  # of a reply's message, in the order of its items


class InputItem(WireModel):
    """An item of the input."""

    type: str = "message"
    role: str | None = None
    content: str | list[ContentPart] | None = None
    summary: list[ContentPart] | None = None
    encrypted_content: str | None = None
    call_id: str | None = None
    namespace: str | None = None
    name: str | None = None
    arguments: str | None = None
    input: str | None = None
    output: str | list[ContentPart] | None = None

    def to_field(self) -> tuple[str, Any] | None:
        """Return the field of a reply's message that the item becomes, or None if it belongs to no reply."""
        if self.type == "message" and self.role == "assistant":
            return "content", dump_parts(self.content)
        if self.type == "reasoning":
            parts = self.content if isinstance(self.content, list) and self.content else self.summary or ()
            text = "".join(part.text or "" for part in parts)
            sealed = self.encrypted_content or ""
            return "reasoning_content", text or open_thought(sealed, "input")
        if self.type not in ("function_call", "custom_tool_call"):
            return None
        name = f"{self.namespace}__{self.name}" if self.namespace else self.name
        arguments: Any = self.arguments if self.type == "function_call" else {"input": self.input or ""}
        call = {"id": self.call_id, "type": "function", "function": {"name": name, "arguments": arguments}}
        return "tool_calls", [call]

    def to_message(self) -> Json:
        """Return the message of an item that belongs to no reply."""
        if self.type == "message":
            return {"role": self.role or "", "content": dump_parts(self.content)}
        if self.type in ("function_call_output", "custom_tool_call_output"):
            return {"role": "tool", "tool_call_id": self.call_id, "content": dump_parts(self.output)}
        refuse(f"items of type {self.type!r} are not supported; remove them", param="input")


class ReasoningOptions(WireModel):
    """`reasoning` of a request."""

    effort: str | None = None


class ResponsesRequest(BlockRequest):
    """The body of POST /v1/responses."""

    not_offered = {
        **{name: values for name, values in NOT_OFFERED.items() if name not in ("store", "truncation")},
        **dict.fromkeys(
            ("background", "conversation", "prompt", "top_logprobs", "chat_template_kwargs"), (None, False, 0)
        ),
        "truncation": (None, "disabled"),
    }

    input: str | list[InputItem]
    instructions: str | None = None
    max_output_tokens: Count | None = None
    tools: list[dict[str, Any]] | None = None
    parallel_tool_calls: bool | None = None
    previous_response_id: str | None = None
    store: bool | None = None
    reasoning: ReasoningOptions | None = None
    text: dict[str, Any] | None = None
    include: list[str] | None = None

    def to_chat(self, stored: StoredMessages | None, warned: set[str]) -> ChatRequest:
        """Return the equivalent chat request."""
        if self.store and stored is None:
            refuse("store=true needs a session; use the URL of a session, or remove store", param="store")
        for name, values in {"format": (None, {"type": "text"}), "verbosity": (None, "medium")}.items():
            if (value := (self.text or {}).get(name)) not in values:
                refuse(f"text.{name}={json.dumps(value)[:80]} is not supported; remove it", param="text")
        if "message.output_text.logprobs" in (self.include or ()):
            refuse("include has message.output_text.logprobs, which is not supported; remove it", param="include")
        instructions = [{"role": "system", "content": self.instructions}] if self.instructions else []
        messages = [*instructions, *self.read_messages(stored)]
        tools = [tool for one in self.tools or () for tool in _read_tool(one, warned)]
        extra = self.model_extra or {}
        return self._translate(
            messages,
            tools,
            max_completion_tokens=self.max_output_tokens,
            parallel_tool_calls=self.parallel_tool_calls,
            tool_choice=extra.get("tool_choice"),
            reasoning_effort=self.reasoning and self.reasoning.effort,
        )

    def read_messages(self, stored: StoredMessages | None) -> list[Json]:
        """Return the messages of the previous response and of the input."""
        previous = self.previous_response_id
        if previous is not None and previous not in (stored or {}):
            message = f"there is no stored response {previous!r} in this session; send its messages as input"
            refuse(message, param="previous_response_id", code="previous_response_not_found")
        messages = [] if previous is None or stored is None else list(stored[previous])
        items = [InputItem(role="user", content=self.input)] if isinstance(self.input, str) else self.input
        n_before = len(messages)
        for item in items:
            field = item.to_field()
            if field is None:
                messages.append(item.to_message())
                continue
            name, value = field
            last = messages[-1] if len(messages) > n_before else {"role": None}
            later = REPLY_FIELDS[REPLY_FIELDS.index(name) :]
            if last["role"] != "assistant" or (name != "tool_calls" and any(key in last for key in later)):
                messages.append({"role": "assistant"})
            messages[-1][name] = [*messages[-1].get(name, ()), *value] if name == "tool_calls" else value
        return messages

    def new_builder(self, stored: StoredMessages | None) -> "ResponsesBuilder":
        """Return the builder of the response. It adds the messages to `stored` unless the client forbids it."""
        return ResponsesBuilder(self, None if self.store is False else stored)


def _read_tool(tool: Json, warned: set[str]) -> Iterable[Json]:
    """Yield the functions that a tool consists of. A namespace has several, and hosted tools none."""
    kind, name = str(tool.get("type")), tool.get("name")
    if kind == "function":
        yield offer_tool(name, tool.get("description"), tool.get("parameters"), tool.get("strict"))
    elif kind == "custom":
        shape = tool.get("format")
        grammar = shape.get("definition") if isinstance(shape, dict) else None
        rule = f"\n\nThe input follows this grammar:\n{grammar}" if grammar else ""
        parameters = {"type": "object", "properties": {"input": {"type": "string"}}, "required": ["input"]}
        yield offer_tool(name, f"{tool.get('description') or ''}{rule}", parameters)
    elif kind == "namespace" and isinstance(inner := tool.get("tools"), list):
        for one in inner:
            if not isinstance(one, dict):
                refuse(f"a tool of the namespace {name!r} is not an object", param="tools")
            yield from _read_tool({**one, "name": f"{name}__{one.get('name')}"}, warned)
    else:
        check_hosted(kind, warned)


class ResponsesBuilder(BlockBuilder):
    """The bodies and events of /v1/responses."""

    def __init__(self, request: ResponsesRequest, stored: StoredMessages | None) -> None:
        super().__init__()
        self._request = request
        self._stored = stored
        self._id = f"resp_{self._hex}"
        self._created = time.time()
        self._n_events = 0
        self._items: list[Json] = []
        self._messages = [] if stored is None else request.read_messages(stored)
        names = [(one.get("name"), one) for one in request.tools or ()]
        self._custom = {name for name, one in names if one.get("type") == "custom"}
        self._namespaces = {
            f"{name}__{inner.get('name')}": (name, inner.get("name"))
            for name, one in names
            if one.get("type") == "namespace"
            for inner in one["tools"]
        }

    def start(self, prompts: Sequence[list[int]]) -> list[Json]:
        """Return the events before the first item."""
        return [
            self._event(f"response.{kind}", response=self._response("in_progress"))
            for kind in ("created", "in_progress")
        ]

    def finish(self, replies: Sequence[FinishedChoice]) -> list[Json]:
        """Return the event with the whole response."""
        (finished,) = replies
        body = self._body(finished, self._items)
        return [self._event(f"response.{body['status']}", response=body)]

    def fail(self, error: RequestError) -> Json:
        """Return the event of a failed response."""
        code = error.code if error.code == "context_length_exceeded" else "server_error"
        details = {"error": {"code": code, "message": error.message}}
        return self._event("response.failed", response=self._response("failed") | details)

    def _body(self, finished: FinishedChoice, blocks: list[Json]) -> Json:
        if self._stored is not None:
            self._stored[self._id] = [*self._messages, finished.reply.to_message()]
        n_prompt, n_cached, n_sampled = finished.count_tokens()
        body = self._response("incomplete" if finished.is_truncated else "completed")
        if finished.is_truncated:
            body["incomplete_details"] = {"reason": "max_output_tokens"}
        usage = {"input_tokens": n_prompt, "input_tokens_details": {"cached_tokens": n_cached, "cache_write_tokens": 0}}
        usage |= {"output_tokens": n_sampled, "output_tokens_details": {"reasoning_tokens": 0}}
        return body | {"output": blocks, "usage": usage | {"total_tokens": n_prompt + n_sampled}}

    def _response(self, status: str) -> Json:
        """Return a response without output."""
        request, extra = self._request, self._request.model_extra or {}
        return {
            "id": self._id,
            "object": "response",
            "created_at": self._created,
            "status": status,
            "error": None,
            "incomplete_details": None,
            "instructions": request.instructions,
            "metadata": extra.get("metadata") or {},
            "model": request.model,
            "output": [],
            "parallel_tool_calls": request.parallel_tool_calls is not False,
            "previous_response_id": request.previous_response_id,
            "store": self._stored is not None,
            "temperature": request.temperature,
            "text": {"format": {"type": "text"}},
            "tool_choice": extra.get("tool_choice") or "auto",
            "tools": request.tools or [],
            "top_p": request.top_p,
            "truncation": "disabled",
            "max_output_tokens": request.max_output_tokens,
            "usage": None,
        }

    def _block(self, index: int, kind: str, value: Any) -> Json:
        if isinstance(value, ToolCall):
            return self._call(index, value)
        status = "incomplete" if self._is_truncated else "completed"
        if kind == "text":
            item = {"id": f"msg_{self._hex}{index}", "type": "message", "role": "assistant", "status": status}
            return item | {"content": [self._part(kind, value)]}
        item = {
            "id": f"rs_{self._hex}{index}",
            "type": "reasoning",
            "summary": [],
            "content": [self._part(kind, value)],
        }
        return item | ({"encrypted_content": seal_thought(value)} if ENCRYPTED in (self._request.include or ()) else {})

    def _call(self, index: int, call: ToolCall) -> Json:
        item = {"call_id": call.id, "name": call.name, "status": "completed"}
        if call.name in self._custom:
            text = call.arguments["input"] if set(call.arguments) == {"input"} else json.dumps(call.arguments)
            return {"id": f"ctc_{self._hex}{index}", "type": "custom_tool_call", **item, "input": str(text)}
        if call.name in self._namespaces:
            namespace, name = self._namespaces[call.name]
            item |= {"namespace": namespace, "name": name}
        arguments = json.dumps(call.arguments, ensure_ascii=False)
        return {"id": f"fc_{self._hex}{index}", "type": "function_call", **item, "arguments": arguments}

    def _part(self, kind: str, text: str) -> Json:
        if kind == "thought":
            return {"type": "reasoning_text", "text": text}
        return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}

    def _open(self, kind: str, value: Any) -> list[Json]:
        item = self._block(self._index, kind, value) | {"status": "in_progress"}
        if kind == "call":
            return [self._event("response.output_item.added", item=item | {_text_field(item): ""})]
        events = [self._event("response.output_item.added", item=item | {"content": []})]
        return [*events, self._event("response.content_part.added", item, part=self._part(kind, ""))]

    def _extend(self, kind: str, value: Any) -> list[Json]:
        item = self._block(self._index, kind, value)
        piece = item[_text_field(item)] if kind == "call" else value
        return [self._event(f"response.{_stem(item)}.delta", item, delta=piece)]

    def _close(self, kind: str, value: Any) -> list[Json]:
        item = self._block(self._index, kind, value)
        self._items.append(item)
        name = _text_field(item) if kind == "call" else "text"
        events = [self._event(f"response.{_stem(item)}.done", item, **{name: item[name] if kind == "call" else value})]
        if kind != "call":
            events.append(self._event("response.content_part.done", item, part=self._part(kind, value)))
        return [*events, self._event("response.output_item.done", item=item)]

    def _event(self, type: str, inside: Json | None = None, **fields: Any) -> Json:
        """Return an event. `inside` is the item that it changes."""
        event: Json = {"type": type, "sequence_number": self._n_events, **fields}
        self._n_events += 1
        if inside is not None:
            event["item_id"] = inside["id"]
            if "content" in inside:
                event["content_index"] = 0
            if "output_text." in type:
                event["logprobs"] = []
        return event if "response" in fields else event | {"output_index": self._index}


def _text_field(item: Json) -> str:
    """Return the field of a call's item that holds its text."""
    return "arguments" if "arguments" in item else "input"


def _stem(item: Json) -> str:
    """Return the middle of the names of the events that write an item's text."""
    stems = {"message": "output_text", "reasoning": "reasoning_text", "function_call": "function_call_arguments"}
    return stems.get(item["type"], "custom_tool_call_input")
