"""OpenAI's Responses and Anthropic's Messages through the official SDKs: every API records what chat completions do."""

import asyncio
import base64
import json
import logging
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

import anthropic
import pytest
from agent_kit.endpoints import MODEL, EndpointStage, LiveEndpoint
from agent_kit.scripted import CharacterEngine, hermes_tokenizer, take_turns, write_call
from anthropic import AsyncAnthropic
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from train_kit.vision_models import draw

from skyrl_agent.endpoint import AgentSession
from skyrl_agent.endpoint.completions import ChatRequest
from skyrl_agent.endpoint.messages import MessagesRequest
from skyrl_agent.endpoint.responses import ResponsesRequest
from skyrl_gym.images import read_image

Json = dict[str, Any]

PNG = base64.b64encode(read_image(draw("red")).content).decode()
SCHEMA: Json = {
    "type": "object",
    "properties": {"path": {"type": "string"}, "all": {"type": "boolean", "default": False}},
    "required": ["path"],
}
REPLIES = [
    "<think>\nRead it first.\n</think>\n\n" + write_call("read", path="é.py"),
    "<think>\nHm.\n</think>\n\nI look again.\n" + "\n".join(write_call("read", path=path) for path in ("b.py", "c.py")),
    "<think>\nDone.\n</think>\n\nIt is right.",
]


class Api:
    """A conversation through one API. `ask` returns the thought, the text and the calls of the reply."""

    def __init__(self, stage: EndpointStage, session: AgentSession | None) -> None:
        self.url = stage.endpoint.url(session)
        self.openai = stage.client(session)
        http = anthropic.DefaultAsyncHttpxClient(verify=False)
        root = self.url.removesuffix("/v1")
        self.anthropic = AsyncAnthropic(base_url=root, api_key="x", max_retries=0, http_client=http)
        self.history: list[Any] = []
        self.body: Any = None

    async def ask(
        self, text: str | None = None, *, streams: bool = False, **options: Any
    ) -> tuple[str, str, list[Any]]:
        raise NotImplementedError

    def add_results(self, calls: Sequence[Any]) -> None:
        raise NotImplementedError


class Chat(Api):
    tools: Any = ({"type": "function", "function": {"name": "read", "description": "Read.", "parameters": SCHEMA}},)

    async def ask(
        self, text: str | None = None, *, streams: bool = False, **options: Any
    ) -> tuple[str, str, list[Any]]:
        self.history += [{"role": "user", "content": text}] if text else []
        messages = [{"role": "system", "content": "You help.\n\nBe brief."}, *self.history]
        completions = self.openai.chat.completions
        self.body = await completions.create(model=MODEL, messages=messages, tools=list(self.tools), **options)
        message = self.body.choices[0].message
        self.history.append(message)
        calls = [
            (call.id, call.function.name, json.loads(call.function.arguments)) for call in message.tool_calls or ()
        ]
        return getattr(message, "reasoning_content", ""), message.content or "", calls

    def add_results(self, calls: Sequence[Any]) -> None:
        self.history += [
            {"role": "tool", "tool_call_id": id, "content": f"result {args['path']}"} for id, _, args in calls
        ]


class Responses(Api):
    tools: Any = ({"type": "function", "name": "read", "description": "Read.", "parameters": SCHEMA, "strict": False},)

    async def ask(
        self, text: str | None = None, *, streams: bool = False, **options: Any
    ) -> tuple[str, str, list[Any]]:
        self.history += [{"role": "user", "content": [{"type": "input_text", "text": text}]}] if text else []
        start = [{"type": "message", "role": "developer", "content": [{"type": "input_text", "text": "Be brief."}]}]
        common: Json = {"model": MODEL, "tools": list(self.tools), "instructions": "You help."}
        common |= {"input": [*start, *self.history], **options}
        if streams:
            async with self.openai.responses.stream(**common) as stream:
                deltas = [event.delta async for event in stream if event.type.endswith(".delta")]
                self.body = await stream.get_final_response()
            assert "".join(deltas) == "".join(map(_text_of, self.body.output))
        else:
            self.body = await self.openai.responses.create(**common)
        self.history += [item.to_dict() for item in self.body.output]
        return self._read(self.body.output)

    @staticmethod
    def _read(items: Sequence[Any]) -> tuple[str, str, list[Any]]:
        texts = {item.type: _text_of(item) for item in items}
        calls = [
            (item.call_id, item.name, json.loads(item.arguments)) for item in items if item.type == "function_call"
        ]
        return texts.get("reasoning", ""), texts.get("message", ""), calls

    def add_results(self, calls: Sequence[Any]) -> None:
        self.history += [
            {"type": "function_call_output", "call_id": id, "output": f"result {args['path']}"} for id, _, args in calls
        ]


def _text_of(item: Any) -> str:
    return item.arguments if item.type == "function_call" else item.content[0].text


class Messages(Api):
    """The history is written as Claude Code does: with default arguments, and markers that move."""

    tools: Any = ({"name": "read", "description": "Read.", "input_schema": SCHEMA},)

    async def ask(
        self, text: str | None = None, *, streams: bool = False, **options: Any
    ) -> tuple[str, str, list[Any]]:
        if text:
            marked = {"type": "text", "text": text, "cache_control": {"type": "ephemeral"}}
            self.history.append({"role": "user", "content": [marked]})
        system = [{"type": "text", "text": text} for text in ("You help.", "Be brief.")]
        common: Json = {"model": MODEL, "max_tokens": 1000, "tools": list(self.tools), "system": system}
        common |= {"messages": self.history, **options}
        if streams:
            async with self.anthropic.messages.stream(**common) as stream:
                self.body = await stream.get_final_message()
        else:
            self.body = await self.anthropic.messages.create(**common)
        blocks = {block.type: block for block in self.body.content}
        uses = [block for block in self.body.content if block.type == "tool_use"]
        if text:
            self.history[-1]["content"] = text
        echoed = [block.to_dict() for block in self.body.content]
        self.history.append({"role": "assistant", "content": [_add_defaults(block) for block in echoed]})
        thought, content = blocks.get("thinking"), blocks.get("text")
        calls = [(block.id, block.name, block.input) for block in uses]
        return thought.thinking if thought else "", content.text if content else "", calls

    def add_results(self, calls: Sequence[Any]) -> None:
        results = [
            {"type": "tool_result", "tool_use_id": id, "content": [{"type": "text", "text": f"result {args['path']}"}]}
            for id, _, args in calls
        ]
        self.history.append({"role": "user", "content": results})


def _add_defaults(block: Json) -> Json:
    return {**block, "input": {"all": False, **block["input"]}} if block["type"] == "tool_use" else block


APIS: dict[str, type[Api]] = {"chat": Chat, "responses": Responses, "messages": Messages}
BLOCK_APIS = ["responses", "messages"]


@asynccontextmanager
async def scripted(replies: Sequence[str] = REPLIES) -> AsyncIterator[tuple[EndpointStage, AgentSession]]:
    tokenizer = hermes_tokenizer()
    async with EndpointStage(CharacterEngine(tokenizer, take_turns(replies)), tokenizer) as stage:
        yield stage, await stage.session(max_new_tokens=1000)


async def play(api: Api, *, streams: bool = False) -> list[tuple[str, str, list[Any]]]:
    """Play the conversation until a reply without calls."""
    turns = [await api.ask("Check é.py.", streams=streams)]
    while turns[-1][2]:
        api.add_results(turns[-1][2])
        turns.append(await api.ask(streams=streams))
    return turns


@pytest.mark.parametrize("name", BLOCK_APIS)
@pytest.mark.parametrize("streams", [False, True])
async def test_every_api_records_the_row_of_chat_completions(name: str, streams: bool) -> None:
    rows, replies = [], []
    for api in (APIS["chat"], APIS[name]):
        async with scripted() as (stage, session):
            replies.append(await play(api(stage, session), streams=streams))
            rows.append(session.recording.rows)
            assert session.counts == {"with_tools": 3, "with_calls": 2, "malformed": 0}
    assert replies[0] == replies[1]
    assert rows[0] == rows[1]
    (row,) = rows[1]
    assert sum(row.loss_mask) == sum(len(stage.engine.sample(reply)) for reply in REPLIES)


async def test_a_session_may_change_its_api() -> None:
    async with scripted() as (stage, session):
        chat, responses, messages = (api(stage, session) for api in APIS.values())
        _, _, calls = await chat.ask("Check é.py.")
        echoed = {"type": "function_call", "call_id": calls[0][0], "name": "read", "arguments": json.dumps(calls[0][2])}
        responses.history = [{"role": "user", "content": "Check é.py."}, echoed]
        responses.add_results(calls)
        _, text, more = await responses.ask()
        messages.history = [
            {"role": "user", "content": "Check é.py."},
            {
                "role": "assistant",
                "content": [{"type": "tool_use", "id": "mine", "name": "read", "input": calls[0][2]}],
            },
            {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "mine", "content": "result é.py"}]},
        ]
        uses = [{"type": "tool_use", "id": id, "name": "read", "input": arguments} for id, _, arguments in more]
        messages.history.append({"role": "assistant", "content": [{"type": "text", "text": text}, *uses]})
        messages.add_results(more)
        assert (await messages.ask())[1] == "It is right."
        assert (len(session.recording.rows), len(session.recording.turns)) == (1, 3)


async def test_thoughts_that_a_client_hides_come_back() -> None:
    """The thought is part of the prompt even if nothing is recorded."""
    async with scripted() as (stage, _):
        responses, messages = Responses(stage, None), Messages(stage, None)
        await responses.ask("Check é.py.", include=["reasoning.encrypted_content"])
        del responses.history[1]["content"]
        thought, _, _ = await messages.ask(
            "Check é.py.", streams=True, thinking={"type": "adaptive", "display": "omitted"}
        )
        assert (thought, messages.body.content[0].signature != "") == ("", True)
        for api in (responses, messages):
            await api.ask("Go on.")
            prompt = stage.chat.decode_all(stage.engine.exchanges[-1][0].prompt_ids)
            assert prompt.count("<think>\nRead it first.\n</think>") == 1


@pytest.mark.parametrize("streams", [False, True])
async def test_the_end_of_a_reply_is_reported(streams: bool) -> None:
    async with scripted(REPLIES) as (stage, session):
        api, messages = Responses(stage, session), Messages(stage, session)
        body: Any = await api.openai.responses.create(model=MODEL, input="?", max_output_tokens=4, stream=streams)
        if streams:
            *_, event = [event async for event in body]
            assert event.type == "response.incomplete"
            body = event.response
        assert (body.status, body.incomplete_details.reason) == ("incomplete", "max_output_tokens")
        assert (body.output_text, body.output[0].status, body.usage.output_tokens) == ("A ti", "incomplete", 4)
        await messages.ask("?", streams=streams, max_tokens=4)
        assert (messages.body.stop_reason, messages.body.usage.output_tokens) == ("max_tokens", 4)
        counted = await messages.anthropic.messages.count_tokens(
            model=MODEL, messages=[{"role": "user", "content": "?"}]
        )
        assert counted.input_tokens == body.usage.input_tokens == len(stage.engine.exchanges[0][0].prompt_ids)


@pytest.mark.parametrize("streams", [False, True])
async def test_the_stop_sequence_is_reported(stage: EndpointStage, streams: bool) -> None:
    api = Messages(stage, None)
    api.tools = ()
    options: Json = {"streams": streams, "max_tokens": 40, "extra_body": {"ignore_eos": True, "temperature": 0}}
    _, whole, _ = await api.ask("State", **options)
    api.history.clear()
    stop = whole[len(whole) // 2 :][:2]
    _, text, _ = await api.ask("State", stop_sequences=["never said", stop], **options)
    assert text == whole[: whole.index(stop)]
    assert (api.body.stop_reason, api.body.stop_sequence) == ("stop_sequence", stop)


async def test_events_of_a_stream() -> None:
    async with scripted(REPLIES[1:]) as (stage, session):
        api = Responses(stage, session)
        stream = await api.openai.responses.create(model=MODEL, input="?", tools=list(api.tools), stream=True)
        events = [event async for event in stream]
        assert [event.sequence_number for event in events] == list(range(len(events)))
        kinds = [event.type.removeprefix("response.") for event in events]
        call = [
            "output_item.added",
            "function_call_arguments.delta",
            "function_call_arguments.done",
            "output_item.done",
        ]
        start, end = ("output_item.added", "content_part.added"), ("content_part.done", "output_item.done")
        assert [kind for kind in kinds if not kind.endswith("text.delta")] == [
            *("created", "in_progress", *start, "reasoning_text.done", *end, *start, "output_text.done", *end),
            *(*call, *call, "completed"),
        ]
        assert [event.item for event in events if event.type.endswith("item.done")] == events[-1].response.output
        raw = await Messages(stage, session).anthropic.messages.create(
            model=MODEL,
            max_tokens=1000,
            messages=[{"role": "user", "content": "??"}],
            tools=list(Messages.tools),
            stream=True,
        )
        names = [event.type async for event in raw]
        block = ["content_block_start", "content_block_delta", "content_block_stop"]
        assert [name for i, name in enumerate(names) if name != names[i - 1]] == [
            *("message_start", *block * 4, "message_delta", "message_stop")
        ]


async def test_tools_of_codex(caplog: pytest.LogCaptureFixture) -> None:
    """Tools in a namespace are functions for the model. Hosted tools are left out."""
    inner = {"type": "function", "name": "stop", "parameters": {"type": "object"}}
    tools: Any = [
        {"type": "namespace", "name": "agents", "description": "Agents.", "tools": [inner]},
        {"type": "web_search", "external_web_access": True},
    ]
    async with scripted([write_call("agents__stop"), "Done."]) as (stage, session):
        client = stage.client(session)
        history: list[Any] = [{"role": "user", "content": "?"}]
        (call,) = (await client.responses.create(model=MODEL, input=history, tools=tools)).output
        assert (call.type, call.namespace, call.name, call.arguments) == ("function_call", "agents", "stop", "{}")
        history += [call.to_dict(), {"type": "function_call_output", "call_id": call.call_id, "output": "2"}]
        for _ in range(2):
            assert (await client.responses.create(model=MODEL, input=history, tools=tools)).output_text == "Done."
        assert [turn.segment for turn in session.recording.turns] == [0, 0, 1]
    prompt = stage.chat.decode_all(stage.engine.exchanges[0][0].prompt_ids)
    assert "agents__stop" in prompt
    assert "web_search" not in prompt
    assert len([one for one in caplog.records if one.levelno == logging.WARNING]) == 1


REFUSED: list[tuple[str, Json, str]] = [
    ("responses", {"background": True}, "background"),
    ("responses", {"store": True}, "store"),
    ("responses", {"previous_response_id": "resp_1"}, "previous_response_id"),
    ("responses", {"truncation": "auto"}, "truncation"),
    ("responses", {"text": {"format": {"type": "json_object"}}}, "text"),
    ("responses", {"tool_choice": "required"}, "tool_choice"),
    ("responses", {"tools": [{"type": "computer", "name": "a"}]}, "tools"),
    ("responses", {"input": [{"type": "item_reference", "id": "a"}]}, "input"),
    ("responses", {"input": [{"type": "reasoning", "summary": [], "encrypted_content": "gAAA"}]}, "input"),
    ("responses", {"input": [{"type": "message", "role": "", "content": ""}]}, "messages"),
    ("responses", {"include": ["message.output_text.logprobs"]}, "include"),
    ("messages", {"tool_choice": {"type": "any"}}, "tool_choice"),
    ("messages", {"tools": [{"type": "bash_20250124", "name": "bash"}]}, "tools"),
    ("messages", {"output_config": {"format": {"type": "json_schema", "schema": {}}}}, "output_config"),
    ("messages", {"context_management": {"edits": [{"type": "clear_tool_uses_20250919"}]}}, "context_management"),
    ("messages", {"messages": [{"role": "user", "content": [{"type": "document", "source": {}}]}]}, "messages"),
]
BODIES: dict[str, Json] = {
    "responses": {"input": "?", "max_output_tokens": 2},
    "messages": {"messages": [{"role": "user", "content": "?"}], "max_tokens": 2},
}


@pytest.mark.parametrize(("name", "change", "param"), REFUSED)
def test_unsupported_fields_are_refused(live: LiveEndpoint, name: str, change: Json, param: str) -> None:
    answer = live.http.post(f"{live.url}/{name}", json={"model": MODEL, **BODIES[name], **change})
    assert answer.status_code == 400, answer.text
    body = answer.json()
    assert body["error"]["type"] == "invalid_request_error"
    assert body["error"]["param"] == param if name == "responses" else body["type"] == "error"


async def test_each_client_raises_its_own_errors(stage: EndpointStage, monkeypatch: pytest.MonkeyPatch) -> None:
    session = await stage.session()
    api = Messages(stage, session)
    create, common = api.anthropic.messages.create, {"model": MODEL, "max_tokens": 2}
    hello: Any = [{"role": "user", "content": "State: ball=(3,0)"}]
    with pytest.raises(anthropic.BadRequestError, match="prompt is too long: This model's maximum context length"):
        await create(messages=[{"role": "user", "content": "1" * 600}], **common)
    with pytest.raises(anthropic.NotFoundError, match="there is no model 'other'"):
        await api.anthropic.models.retrieve("other")
    assert (await api.anthropic.models.retrieve(MODEL)).type == "model"
    for models in (await api.anthropic.models.list(), await api.openai.models.list()):
        assert [model.id for model in models.data] == [MODEL]

    def broken(*_: Any) -> Any:
        raise RuntimeError("out of luck")

    monkeypatch.setattr(stage.engine, "_forward", broken)
    with pytest.raises(anthropic.InternalServerError, match="out of luck"):
        await create(messages=hello, **common)
    with pytest.raises(anthropic.APIStatusError, match="out of luck"):
        async for _ in await create(messages=hello, stream=True, **common):
            pass
    events = [event async for event in await api.openai.responses.create(model=MODEL, input=hello, stream=True)]
    assert (events[-1].type, events[-1].response.status) == ("response.failed", "failed")
    assert "out of luck" in events[-1].response.error.message
    await stage.endpoint.end_session(session)
    with pytest.raises(anthropic.NotFoundError, match="there is no open session"):
        await create(messages=hello, **common)


async def test_a_session_may_be_named_by_the_api_key(stage: EndpointStage) -> None:
    hello: Any = [{"role": "user", "content": "State: ball=(3,0)"}]
    root = stage.endpoint.url().removesuffix("/v1")
    session, other = await stage.session(), await stage.session()
    for url, credentials in (
        *((root, {"api_key": "x", "default_headers": {"x-api-key": session.id}}), (root, {"auth_token": session.id})),
        (stage.endpoint.url(session).removesuffix("/v1"), {"api_key": other.id}),
    ):
        async with AsyncAnthropic(base_url=url, max_retries=0, **credentials) as client:
            assert (await client.messages.create(model=MODEL, max_tokens=2, messages=hello)).content
    chat = stage.client().with_options(api_key=session.id, default_headers={"X-Session-Id": "its own"})
    await chat.responses.create(model=MODEL, input=hello)
    assert (len(session.recording.turns), len(other.recording.turns)) == (4, 0)


@pytest.mark.parametrize("name", BLOCK_APIS)
async def test_closing_a_stream_cancels_the_generation(stage: EndpointStage, name: str) -> None:
    session = await stage.session(max_new_tokens=400, ignore_eos=True)
    api = APIS[name](stage, session)
    if name == "responses":
        stream: Any = await api.openai.responses.create(model=MODEL, input="State", stream=True)
    else:
        hello: Any = [{"role": "user", "content": "State"}]
        stream = await api.anthropic.messages.create(model=MODEL, max_tokens=400, messages=hello, stream=True)
    for _ in range(5):
        await anext(stream.__aiter__())
    await stream.close()
    await stage.until_n_requests(0)
    assert (stage.engine.exchanges, session.recording.turns) == ([], [])


@pytest.mark.parametrize("is_lost", [False, True])
async def test_a_retry_waits_for_the_request_in_progress(stage: EndpointStage, is_lost: bool) -> None:
    session = await stage.session()
    client = stage.client(session)

    def ask(n_retries: int) -> asyncio.Task[Any]:
        headers = {"x-stainless-retry-count": str(n_retries)}
        return asyncio.create_task(client.responses.create(model=MODEL, input="State", extra_headers=headers))

    await stage.engine.pause()
    first = ask(0)
    await stage.until_n_requests(1)
    retries = [ask(1), ask(2)]
    await asyncio.sleep(0.1)
    if is_lost:
        first.cancel()
    await stage.engine.resume()
    texts = {(await retry).output_text for retry in retries}
    assert len(texts | ({(await first).output_text} if not is_lost else set())) == 1
    assert (len(session.recording.turns), len(stage.engine.exchanges)) == (1, 1)
    assert session.counts["repeated"] == (1 if is_lost else 2)


def test_images_have_the_form_of_each_api() -> None:
    url = "data:image/png;base64," + PNG
    chat = [{"type": "image_url", "image_url": {"url": url}}]
    source = {"type": "base64", "media_type": "image/png", "data": PNG}
    requests = [
        ChatRequest(model=MODEL, messages=[{"role": "user", "content": chat}]),
        ResponsesRequest(model=MODEL, input=[{"role": "user", "content": [{"type": "input_image", "image_url": url}]}]),
        MessagesRequest(model=MODEL, messages=[{"role": "user", "content": [{"type": "image", "source": source}]}]),
    ]
    translated = [one if isinstance(one, ChatRequest) else one.to_chat(set()) for one in requests]
    contents = [one.messages[0].to_message()["content"] for one in translated]
    assert contents[0] == contents[1] == contents[2]
    assert contents[0][0]["type"] == "image"


SMALL = st.one_of(st.none(), st.booleans(), st.integers(-2, 3), st.sampled_from(["", "a", "\ud800", "read", "auto"]))
JSON = st.recursive(
    SMALL, lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.sampled_from("abcd"), inner, max_size=2)
)
PART_TYPES = ["text", "input_text", "output_text", "image", "tool_use", "tool_result", "thinking", "reasoning_text"]
PART_KEYS = ["text", "thinking", "signature", "id", "name", "input", "tool_use_id", "content", "source", "image_url"]
PARTS = st.fixed_dictionaries(
    {"type": st.sampled_from(PART_TYPES), "text": st.just("a")},
    optional={key: JSON | st.just("a") | st.just({"path": "a"}) for key in PART_KEYS if key != "text"},
)
CONTENTS = st.one_of(st.just("a"), st.lists(PARTS, max_size=2), JSON)
ROLES = st.sampled_from(["user", "assistant", "system", "developer", "tool", "?"])
ITEM_TYPES = ["message", "reasoning", "function_call", "function_call_output", "custom_tool_call", "item_reference"]
ITEMS = st.fixed_dictionaries(
    {"type": st.sampled_from(ITEM_TYPES), "role": ROLES, "content": CONTENTS},
    optional=dict.fromkeys(("call_id", "name", "arguments", "input", "output", "summary", "namespace"), JSON),
)
TOOLS = st.lists(
    st.fixed_dictionaries(
        {"type": st.sampled_from(["function", "custom", "namespace", "web_search", "x"])},
        optional=dict.fromkeys(("name", "parameters", "input_schema", "tools", "format", "description"), JSON),
    ),
    max_size=2,
)
COMMON = {"tools": TOOLS | JSON, "stream": st.booleans(), "tool_choice": JSON, "metadata": JSON, "temperature": JSON}
FUZZED: dict[str, Any] = {
    "responses": st.fixed_dictionaries(
        {"input": st.lists(ITEMS, max_size=3) | JSON},
        optional={**COMMON, **dict.fromkeys(("instructions", "text", "reasoning", "include", "store"), JSON)},
    ),
    "messages": st.fixed_dictionaries(
        {"messages": st.lists(st.fixed_dictionaries({"role": ROLES, "content": CONTENTS}), max_size=3) | JSON},
        optional={**COMMON, **dict.fromkeys(("system", "thinking", "output_config", "stop_sequences"), CONTENTS)},
    ),
}
FUZZED["messages/count_tokens"] = FUZZED["messages"]


@pytest.mark.parametrize("name", FUZZED)
@settings(max_examples=60, suppress_health_check=[HealthCheck.too_slow])
@given(data=st.data())
def test_no_request_causes_a_server_error(live: LiveEndpoint, name: str, data: Any) -> None:
    body = {"model": MODEL, "max_tokens": 2, **data.draw(FUZZED[name])}
    answer = live.http.post(f"{live.url}/{name}", content=json.dumps(body))
    assert answer.status_code in (200, 400), answer.text
    assert "response.failed" not in answer.text
    assert answer.status_code == 200 or answer.json()["error"]["message"]
