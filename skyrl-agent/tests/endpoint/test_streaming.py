"""Streams: joined chunks equal the response without streaming."""

import json
from collections.abc import Iterable
from typing import Any

import pytest
from agent_kit.endpoints import HELLO, MODEL, LiveEndpoint

OPTIONS = {"model": MODEL, "seed": 3, "max_tokens": 30}


def join_chat_chunks(chunks: Iterable[Any]) -> dict[int, dict[str, Any]]:
    """Join the chunks of a stream into choices."""
    choices: dict[int, dict[str, Any]] = {}
    for chunk in chunks:
        for choice in chunk.choices:
            joined = choices.setdefault(choice.index, {"text": "", "ids": [], "logprobs": [], "reasons": []})
            joined["text"] += choice.delta.content or ""
            joined["ids"] += choice.token_ids or [] if hasattr(choice, "token_ids") else []
            joined["logprobs"] += choice.logprobs.content if choice.logprobs else []
            joined["reasons"] += [choice.finish_reason] if choice.finish_reason else []
    return choices


@pytest.mark.catch_tokenizer
@pytest.mark.parametrize("stop", [None, ["a"], ["ll=", "y=1"]])
@pytest.mark.parametrize("ignore_eos", [False, True])
def test_a_chat_stream_equals_the_plain_response(live: LiveEndpoint, stop: list[str] | None, ignore_eos: bool) -> None:
    options: dict[str, Any] = {**OPTIONS, "messages": HELLO, "n": 3, "stop": stop, "logprobs": True}
    extra = {"return_token_ids": True, "ignore_eos": ignore_eos}
    plain = live.client.chat.completions.create(**options, extra_body=extra)
    chunks = list(live.client.chat.completions.create(**options, extra_body=extra, stream=True))
    choices = join_chat_chunks(chunks)
    assert {chunk.id for chunk in chunks} == {chunks[0].id}
    assert {chunk.object for chunk in chunks} == {"chat.completion.chunk"}
    assert [choice.delta.role for choice in chunks[0].choices] == ["assistant"] * 3
    assert chunks[0].prompt_token_ids == live.chat.prompt_ids(HELLO)
    for choice in plain.choices:
        joined = choices[choice.index]
        assert joined["text"] == choice.message.content
        assert joined["ids"] == choice.token_ids
        assert joined["reasons"] == [choice.finish_reason]
        assert [t.logprob for t in joined["logprobs"]] == pytest.approx([t.logprob for t in choice.logprobs.content])


def test_top_logprobs_are_in_the_last_chunk(live: LiveEndpoint) -> None:
    options: dict[str, Any] = {**OPTIONS, "messages": HELLO, "logprobs": True, "top_logprobs": 2}
    plain = live.client.chat.completions.create(**options)
    chunks = list(live.client.chat.completions.create(**options, stream=True))
    joined, expected = chunks[-1].choices[0].logprobs.content, plain.choices[0].logprobs.content
    assert [token.token for token in joined] == [token.token for token in expected]
    for one, other in zip(joined, expected, strict=True):
        assert [top.logprob for top in one.top_logprobs] == pytest.approx([top.logprob for top in other.top_logprobs])
    assert not any(choice.logprobs for chunk in chunks[:-1] for choice in chunk.choices)


def test_usage_is_the_last_chunk_if_requested(live: LiveEndpoint) -> None:
    options: dict[str, Any] = {**OPTIONS, "messages": HELLO}
    plain = live.client.chat.completions.create(**options)
    with_usage = {"stream": True, "stream_options": {"include_usage": True}}
    *before, last = live.client.chat.completions.create(**options, **with_usage)
    assert (last.choices, last.usage.total_tokens) == ([], plain.usage.total_tokens)
    assert [chunk.usage for chunk in before] == [None] * len(before)
    assert all(chunk.choices for chunk in live.client.chat.completions.create(**options, stream=True))


def test_a_stream_of_completions_equals_the_plain_response(live: LiveEndpoint) -> None:
    options: dict[str, Any] = {**OPTIONS, "prompt": ["State", "Action"], "logprobs": 0}
    plain = live.client.completions.create(**options)
    texts, offsets = ["", ""], [[], []]
    for chunk in live.client.completions.create(**options, stream=True):
        for choice in chunk.choices:
            texts[choice.index] += choice.text
            offsets[choice.index] += choice.logprobs.text_offset if choice.logprobs else []
    assert texts == [choice.text for choice in plain.choices]
    assert offsets == [choice.logprobs.text_offset for choice in plain.choices]


def test_the_event_stream_ends_like_that_of_openai(live: LiveEndpoint) -> None:
    body = {**OPTIONS, "messages": HELLO, "stream": True}
    with live.http.stream("POST", f"{live.url}/chat/completions", json=body) as answer:
        events = [line for line in answer.iter_lines() if line]
    assert answer.headers["content-type"].startswith("text/event-stream")
    assert all(event.startswith("data: ") for event in events)
    assert events[-1] == "data: [DONE]"
    assert json.loads(events[-2].removeprefix("data: "))["choices"][0]["finish_reason"] in ("stop", "length")


def test_an_invalid_request_is_refused_before_the_stream_starts(live: LiveEndpoint) -> None:
    body = {**OPTIONS, "model": "other", "messages": HELLO, "stream": True}
    answer = live.http.post(f"{live.url}/chat/completions", json=body)
    assert (answer.status_code, answer.json()["error"]["code"]) == (400, "model_not_found")
