"""Agents that call tools, with requests as pi 0.73, opencode 1.18 and mini-swe-agent 2.4 send them."""

import asyncio
import copy
import json
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from typing import Any

import httpx
import pytest
from agent_kit.endpoints import MODEL, EndpointStage
from agent_kit.scripted import HERMES, CharacterEngine, hermes_tokenizer, take_turns, trained_texts, write_call
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError
from train_kit.messages import system, user
from train_kit.templates import FAMILIES
from transformers import PreTrainedTokenizerBase

from skyrl_agent.endpoint import AgentSession, ModelService
from skyrl_agent.endpoint.completions import ChatRequest
from skyrl_agent.endpoint.recorder import Recording
from skyrl_agent.endpoint.replies import ReplyFormat
from skyrl_agent.endpoint.wire import RequestError
from skyrl_gym.tools.strict_json import BadJSON
from skyrl_train.errors import ConfigError
from skyrl_train.generators.chat_template import ChatEncoder
from skyrl_train.inference_engines.base import EngineResult, SamplingParams
from skyrl_train.types import StopReason

Json = dict[str, Any]

TOOL: Json = {
    "type": "function",
    "function": {
        "name": "read",
        "description": "Read a file.",
        "parameters": {
            "type": "object",
            "properties": {"path": {"type": "string"}, "limit": {"type": "integer"}},
            "required": ["path"],
        },
    },
}
REPLIES = [
    "<think>\nRead it first.\n</think>\n\n" + write_call("read", path="é.py", limit=2.0),
    "I look again.\n" + write_call("read", path="b.py") + "\n" + write_call("read", path="c.py"),
    "<think>\nDone.\n</think>\n\nIt is right.",
]
"""Replies with a thought and a call, with text and two calls, and with an answer."""


def echo_pi(message: Json) -> Json:
    """Repeat a reply as pi does: null contents and thoughts vanish, and arguments are written without spaces."""
    calls = [compact(call) for call in message.get("tool_calls", ())]
    content = {"content": message["content"]} if message["content"] else {}
    return {"role": "assistant", **content, **({"tool_calls": calls} if calls else {})}


def echo_opencode(message: Json) -> Json:
    """Repeat a reply as opencode does: with an empty content, and with thoughts."""
    thought = {"reasoning_content": message["reasoning_content"]} if "reasoning_content" in message else {}
    return {**echo_pi(message), "content": message["content"] or "", **thought}


def echo_mini(message: Json) -> Json:
    """Repeat a reply as mini-swe-agent does: null contents vanish, and keys are in another order."""
    calls = [dict(reversed(call.items())) for call in message.get("tool_calls", ())]
    fields = {"content": message["content"], "role": "assistant", "tool_calls": calls}
    return {name: value for name, value in fields.items() if value}


def compact(call: Json) -> Json:
    arguments = json.dumps(json.loads(call["function"]["arguments"]), separators=(",", ":"), ensure_ascii=False)
    return {**call, "function": {**call["function"], "arguments": arguments.replace("2.0", "2")}}


STREAMS: Json = {"stream": True, "stream_options": {"include_usage": True}}
AGENTS: dict[str, tuple[Json, Callable[[Json], Json]]] = {
    "pi": ({**STREAMS, "max_completion_tokens": 16384, "store": False}, echo_pi),
    "opencode": ({**STREAMS, "max_tokens": 32000, "tool_choice": "auto"}, echo_opencode),
    "mini": ({}, echo_mini),
}
TITLE: Json = {
    "model": MODEL,
    "max_tokens": 32000,
    **STREAMS,
    "messages": [system("You output ONLY a thread title."), user("Generate a title:\n"), user('"Check é.py."')],
}


@asynccontextmanager
async def scripted(
    replies: Sequence[str] = REPLIES, tokenizer: PreTrainedTokenizerBase | None = None
) -> AsyncIterator[tuple[EndpointStage, AgentSession, Any]]:
    """Serve scripted replies. The last value posts a body to a session, and returns the choice, joined if streamed."""
    tokenizer = tokenizer or hermes_tokenizer()
    async with (
        EndpointStage(CharacterEngine(tokenizer, take_turns(replies)), tokenizer) as stage,
        httpx.AsyncClient(timeout=60) as http,
    ):
        session = await stage.session(max_new_tokens=1000)

        async def post(body: Json, **headers: str) -> Json:
            url = f"{stage.endpoint.url(session)}/chat/completions"
            answer = await http.post(url, json={"model": MODEL, **body}, headers=headers)
            assert answer.status_code == 200, answer.text
            return join_chunks(answer.text) if body.get("stream") else answer.json()["choices"][0]

        yield stage, session, post


def join_chunks(events: str) -> Json:
    """Join the chunks of a choice, as clients do."""
    message: Json = {"role": "assistant", "content": None}
    joined: Json = {"message": message, "finish_reason": None}
    *chunks, done = [line.removeprefix("data: ") for line in events.splitlines() if line]
    assert done == "[DONE]"
    for choice in (choice for chunk in chunks for choice in json.loads(chunk)["choices"]):
        joined["finish_reason"] = choice["finish_reason"] or joined["finish_reason"]
        for name in ("content", "reasoning_content"):
            if piece := choice["delta"].get(name):
                message[name] = (message.get(name) or "") + piece
        for call in choice["delta"].get("tool_calls", ()):
            assert call["index"] == len(message.setdefault("tool_calls", []))
            message["tool_calls"].append({name: value for name, value in call.items() if name != "index"})
    return joined


async def solve(post: Any, agent: str) -> list[Json]:
    """Play the conversation of an agent until a reply without calls, and return the choices."""
    options, echo = AGENTS[agent]
    messages: list[Json] = [system("You help."), {"role": "user", "content": [{"type": "text", "text": "Check é.py."}]}]
    choices: list[Json] = []
    while not choices or choices[-1]["finish_reason"] == "tool_calls":
        choices.append(await post({"messages": messages, "tools": [TOOL], **options}))
        message = choices[-1]["message"]
        results = [
            {"role": "tool", "content": f"result {call['id']}", "tool_call_id": call["id"]}
            for call in message.get("tool_calls", ())
        ]
        messages += [echo(message), *results]
    return choices


@pytest.mark.parametrize("agent", AGENTS)
async def test_a_conversation_is_one_row_of_the_sampled_tokens(agent: str) -> None:
    async with scripted() as (stage, session, post):
        first, second, third = await solve(post, agent)
        await post(TITLE)
        await stage.endpoint.end_session(session)
        recording, tokenizer, sample = session.recording, stage.chat.tokenizer, stage.engine.sample
    assert [choice["finish_reason"] for choice in (first, second, third)] == ["tool_calls", "tool_calls", "stop"]
    assert (first["message"]["content"], first["message"]["reasoning_content"]) == (None, "Read it first.")
    assert [call["function"] for call in first["message"]["tool_calls"]] == [
        {"name": "read", "arguments": '{"path": "é.py", "limit": 2.0}'}
    ]
    assert second["message"]["content"] == "I look again."
    assert [json.loads(call["function"]["arguments"])["path"] for call in second["message"]["tool_calls"]] == [
        "b.py",
        "c.py",
    ]
    assert third["message"]["content"] == "It is right."
    assert recording.exclude_side_rows() == 1
    recording.finish()
    title, row = recording.rows
    assert sum(title.loss_mask) == 0
    turns = recording.turns[1:]
    assert [row.response_ids[turn.start : turn.end] for turn in turns] == [sample(reply) for reply in REPLIES]
    assert sum(row.loss_mask) == sum(turn.end - turn.start for turn in turns)
    assert trained_texts(tokenizer, row) == [f"{reply}<|im_end|>" for reply in REPLIES]
    assert [row.logprobs[turn.start : turn.end] for turn in turns] == [
        result.logprobs for _, result in stage.engine.exchanges[:3]
    ]
    (request, _) = stage.engine.exchanges[2]
    assert request.prompt_ids == row.token_ids[: len(request.prompt_ids)]
    assert len({request.session_id for request, _ in stage.engine.exchanges[:3]}) == 1, "the cache is reused"
    ids = [call["id"] for call in second["message"]["tool_calls"]]
    assert tokenizer.decode(row.token_ids).count(f"<|im_start|>tool\nresult {ids[1]}<|im_end|>") == 1


async def test_an_edited_history_of_calls_starts_a_new_row() -> None:
    async with scripted() as (_, session, post):
        messages = [user("Check it.")]
        reply = (await post({"messages": messages, "tools": [TOOL]}))["message"]
        (call,) = reply["tool_calls"]
        others = [
            {**call, "function": {**call["function"], "arguments": '{"path": "é.py", "limit": 3}'}},
            {**call, "function": {**call["function"], "name": "write"}},
        ]
        for calls in ([], *([other] for other in others), [call, call]):
            edited = {**echo_pi(reply), "content": "", "tool_calls": calls}
            result = {"role": "tool", "content": "1", "tool_call_id": call["id"]}
            await post({"messages": [*messages, edited, result], "tools": [TOOL]})
        await post({"messages": [*messages, echo_pi(reply), user("Continue.")], "tools": [TOOL]})
        assert [turn.segment for turn in session.recording.turns] == [0, 1, 2, 3, 4, 0]


async def test_renamed_ids_continue_the_row_if_they_are_renamed_consistently() -> None:
    async with scripted([*REPLIES[1:], *REPLIES[2:] * 2]) as (_, session, post):
        reply = (await post({"messages": [user("Check.")], "tools": [TOOL]}))["message"]
        renamed = [{**call, "id": f"mine-{i}"} for i, call in enumerate(reply["tool_calls"])]
        results = [{"role": "tool", "content": f"{i}", "tool_call_id": f"mine-{i}"} for i in (0, 1)]
        messages = [user("Check."), {**echo_pi(reply), "tool_calls": renamed}, *results]
        answer = (await post({"messages": messages, "tools": [TOOL]}))["message"]
        ids = [call["id"] for call in reply["tool_calls"]]
        for order in ((0, 0), (0, 1)):  # both results of one call, and one of each
            again = [{**one, "tool_call_id": ids[i]} for one, i in zip(results, order, strict=True)]
            history = [user("Check."), echo_pi(reply), *again, echo_pi(answer)]
            await post({"messages": [*history, user("Sure?")], "tools": [TOOL]})
        assert [turn.segment for turn in session.recording.turns] == [0, 0, 1, 0]


async def test_the_template_reads_the_recorded_ids() -> None:
    """Mistral's templates accept only ids of nine characters."""
    tokenizer = hermes_tokenizer()
    chat = ChatEncoder(tokenizer, HERMES.replace("{{ m.content }}", "{{ m.tool_call_id }}{{ m.content }}"))
    recording, form = Recording(chat), ReplyFormat(tools={})
    reply = form.split(REPLIES[1], is_truncated=False, seed=1)
    prompt = recording.chat_prompt([user("?")], chat)
    recording.record(prompt, EngineResult([5], [0.0], StopReason.STOP, ()), reply)
    calls = [{**call, "id": f"mine-{i}"} for i, call in enumerate(reply.wire_calls())]
    echoed = {"role": "assistant", "content": reply.content, "tool_calls": calls}
    result = {"role": "tool", "content": "2", "tool_call_id": "mine-1"}
    continued = recording.chat_prompt([user("?"), echoed, result], chat)
    assert continued.origin is not None
    assert f"{reply.calls[1].id}2<|im_end|>" in chat.decode_all(continued.token_ids)
    assert len(str(reply.calls[1].id)) == 9


def test_a_template_that_rewrites_calls_of_the_past_is_refused() -> None:
    chat = ChatEncoder(
        hermes_tokenizer(), HERMES.replace("\n</tool_call>", "{{ '!' if loop.last else '' }}</tool_call>")
    )
    rewriting = ChatEncoder(
        hermes_tokenizer(), HERMES.replace("\n</tool_call>", "{{ '!' if m == messages[-1] else '' }}</tool_call>")
    )
    calls = [{"id": "0", "type": "function", "function": {"name": "read", "arguments": {}}}]
    result = {"role": "tool", "content": "1", "tool_call_id": "0"}
    assert chat.observation_ids([result], chat.eos_token_id or 0, calls=calls)
    with pytest.raises(ConfigError, match="does not show the text of assistant messages or their calls"):
        rewriting.observation_ids([result], chat.eos_token_id or 0, calls=calls)


async def test_calls_are_parsed_only_if_the_request_allows_them() -> None:
    async with scripted([REPLIES[1]] * 3) as (_, session, post):
        messages, text = [user("Check.")], REPLIES[1]
        plain = await post({"messages": messages, "tools": [TOOL], "tool_choice": "none"})
        assert (plain["message"]["content"], plain["finish_reason"]) == (text, "stop")
        one = await post({"messages": messages, "tools": [TOOL], "parallel_tool_calls": False})
        assert [json.loads(call["function"]["arguments"])["path"] for call in one["message"]["tool_calls"]] == ["b.py"]
        unclosed = text.removesuffix("\n</tool_call>")
        short = await post({"messages": messages, "tools": [TOOL], "max_tokens": len(unclosed)})
        assert (short["message"]["content"], short["finish_reason"]) == (unclosed, "length")
        one_call = text[: text.index("</tool_call>") + len("</tool_call>") + 3]
        short = await post({"messages": messages, "tools": [TOOL], "max_tokens": len(one_call)})
        assert (len(short["message"]["tool_calls"]), short["finish_reason"]) == (1, "length")
        assert session.counts == {"with_tools": 4, "with_calls": 2, "malformed": 1}


READ = {"name": "read", "arguments": {"path": "a"}}
OPENED = HERMES.replace("assistant\n{% endif %}", "assistant\n<think>\n{% endif %}")
BARE = HERMES.replace('<tool_call>\n{"name"', '{"name"').replace("}}\n</tool_call>", "}}")


@pytest.mark.parametrize(
    ("template", "text", "thought"),
    [(OPENED, "Hm\n</think>\n\n" + write_call("read", path="a"), "Hm"), (BARE, json.dumps(READ), None)],
    ids=["the prompt opens a thought", "calls have no tags"],
)
@pytest.mark.parametrize("streams", [False, True])
async def test_the_template_determines_the_format_of_replies(
    template: str, text: str, thought: str | None, streams: bool
) -> None:
    tokenizer = copy.deepcopy(hermes_tokenizer())
    tokenizer.chat_template = template
    async with scripted([text], tokenizer) as (_, _, post):
        choice = await post({"messages": [user("?")], "tools": [TOOL], "stream": streams})
    assert choice["message"].get("reasoning_content") == thought
    assert [one["function"]["name"] for one in choice["message"]["tool_calls"]] == ["read"]


@pytest.mark.parametrize("streams", [False, True])
async def test_a_retried_request_gets_the_recorded_reply(streams: bool) -> None:
    async with scripted() as (stage, session, post):
        body = {"messages": [user("Check.")], "tools": [TOOL], "stream": streams}
        first = await post(body, **{"x-stainless-retry-count": "0"})
        assert await post(body, **{"x-stainless-retry-count": "1"}) == first
        assert (len(session.recording.turns), len(stage.engine.exchanges), session.counts["repeated"]) == (1, 1, 1)
        await post(body, **{"x-stainless-retry-count": "0"})
        await post({**body, "max_tokens": 7}, **{"x-stainless-retry-count": "1"})
        await post({**body, "max_tokens": 7, "n": 2, "stream": False}, **{"x-stainless-retry-count": "1"})
        assert len(session.recording.turns) == 5, "requests that are no retries, or retries of unanswered ones"


@pytest.mark.parametrize("family", [name for name in FAMILIES if FAMILIES[name].call])
def test_results_follow_a_call_as_the_template_writes_them(family: str) -> None:
    """The text after a recorded call equals the text that the template writes after the same call."""
    chat = ChatEncoder(FAMILIES[family].tokenizer(), template_kwargs=FAMILIES[family].variables)
    recording = Recording(chat)
    call = {"id": "call00001", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}
    calling = {"role": "assistant", "content": "", "tool_calls": [call]}
    history = [user("2 + 2?"), calling, {"role": "tool", "content": "4", "tool_call_id": "call00001"}]
    token_ids = chat.tokenizer(FAMILIES[family].call, add_special_tokens=False)["input_ids"]
    form = ReplyFormat(tools={}, calls_are_bare="llama 3.1" in family)
    reply = form.split('<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>', is_truncated=False, seed=1)
    prompt = recording.chat_prompt(history[:1], chat)
    recording.record(prompt, EngineResult(token_ids, [0.0] * len(token_ids), StopReason.STOP, ()), reply)
    continued = recording.chat_prompt(history, chat)
    assert continued.token_ids[: len(recording.rows[0].token_ids)] == recording.rows[0].token_ids
    mark = "1" if "<arg_value>" in str(FAMILIES[family].call) else "1}"
    sampled_only = (
        FAMILIES[family].eos if "glm" in family else ""
    )  # GLM samples an EOS that its template does not write
    texts = [chat.decode_all(ids).rpartition(mark)[2] for ids in (continued.token_ids, chat.history_ids(history))]
    assert texts[0].replace(sampled_only, "") == texts[1]


KEYS = st.sampled_from(["type", "properties", "path", "enum", "anyOf", "$ref", "name", "function", "arguments", "id"])
LEAVES = st.none() | st.booleans() | st.integers(-3, 3) | st.sampled_from(["string", "integer", "path", "#", ""])
JSON_VALUES = st.recursive(LEAVES, lambda inner: st.lists(inner, max_size=2) | st.dictionaries(KEYS, inner, max_size=2))
SCHEMAS = st.fixed_dictionaries({"properties": st.fixed_dictionaries({"path": JSON_VALUES})}) | JSON_VALUES
FUNCTIONS = st.fixed_dictionaries({"name": st.just("read"), "parameters": SCHEMAS})
TOOLS = st.fixed_dictionaries({"type": st.just("function"), "function": FUNCTIONS | st.just({"name": 5})})
ARGUMENTS = st.sampled_from(["", "{}", "[", "null", '{"path": 1e400}']) | st.dictionaries(KEYS, JSON_VALUES)
CALLED = st.fixed_dictionaries({"name": st.just("read"), "arguments": ARGUMENTS})
CALLS = st.fixed_dictionaries({"function": CALLED | JSON_VALUES}, optional={"id": LEAVES, "type": LEAVES})
HISTORIES = st.lists(
    st.fixed_dictionaries(
        {"role": st.sampled_from(["assistant", "tool", "user"]), "content": st.none() | st.text(max_size=3)},
        optional={"tool_calls": st.lists(CALLS, max_size=2), "tool_call_id": st.sampled_from(["path", ""])},
    ),
    min_size=1,
    max_size=4,
)


@settings(max_examples=200)
@given(history=HISTORIES, tools=st.lists(TOOLS, min_size=1, max_size=2))
def test_no_tools_or_calls_of_a_client_are_an_error_of_the_server(history: list[Json], tools: list[Json]) -> None:
    """Every request gets a reply, or an error that names the mistake."""
    text = write_call("read", path="a") + "<function=read><parameter=path>5</parameter></function>"
    tokenizer = hermes_tokenizer()
    service = ModelService(CharacterEngine(tokenizer, lambda _: text), tokenizer, model_name=MODEL)  # type: ignore[arg-type]
    session = AgentSession("a", SamplingParams(max_new_tokens=500), 1, service.new_recording())

    async def ask() -> None:
        request = ChatRequest.model_validate({"model": MODEL, "messages": history, "tools": tools})
        answer = await service.answer(service.chat_job(request, session))
        assert len(answer["choices"][0]["message"]["tool_calls"]) == 2

    with suppress(ValidationError, RequestError):
        asyncio.run(ask())


def test_a_schema_that_is_too_deep_is_refused() -> None:
    deep: Json = {}
    for _ in range(300):
        deep = {"allOf": [deep]}
    tool = {"type": "function", "function": {"name": "read", "parameters": {"properties": {"path": deep}}}}
    with pytest.raises(BadJSON, match="too deeply"):
        _ = ChatRequest.model_validate({"model": MODEL, "messages": [user("?")], "tools": [tool]}).tool_parameters
