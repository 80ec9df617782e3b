"""Streams: the chunks, put together, are the plain answer."""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any

import pytest
from generators.endpoint.conftest import HELLO, MODEL, LiveEndpoint

OPTIONS = {"model": MODEL, "seed": 3, "max_tokens": 30}


def joined_chat(chunks: Iterable[Any]) -> dict[int, dict[str, Any]]:
    """The choices that a stream adds up to."""
    choices: dict[int, dict[str, Any]] = {}
    for chunk in chunks:
        for choice in chunk.choices:
            told = choices.setdefault(choice.index, {"text": "", "ids": [], "logprobs": [], "reasons": []})
            told["text"] += choice.delta.content or ""
            told["ids"] += choice.token_ids or [] if hasattr(choice, "token_ids") else []
            told["logprobs"] += choice.logprobs.content if choice.logprobs else []
            told["reasons"] += [choice.finish_reason] if choice.finish_reason else []
    return choices


@pytest.mark.parametrize("stop", [None, ["a"], ["ll=", "y=1"]])
@pytest.mark.parametrize("ignore_eos", [False, True])
def test_a_chat_stream_adds_up_to_the_plain_answer(
    live: LiveEndpoint, stop: list[str] | None, ignore_eos: bool
) -> None:
    options: dict[str, Any] = {**OPTIONS, "messages": HELLO, "n": 3, "stop": stop, "logprobs": True}
    extra = {"return_token_ids": True, "ignore_eos": ignore_eos}
    plain = live.client.chat.completions.create(**options, extra_body=extra)
    chunks = list(live.client.chat.completions.create(**options, extra_body=extra, stream=True))
    choices = joined_chat(chunks)
    assert {chunk.id for chunk in chunks} == {chunks[0].id}
    assert {chunk.object for chunk in chunks} == {"chat.completion.chunk"}
    assert [choice.delta.role for choice in chunks[0].choices] == ["assistant"] * 3
    assert chunks[0].prompt_token_ids == live.chat.prompt_ids(HELLO)
    for choice in plain.choices:
        told = choices[choice.index]
        assert told["text"] == choice.message.content
        assert told["ids"] == choice.token_ids
        assert told["reasons"] == [choice.finish_reason]
        assert [t.logprob for t in told["logprobs"]] == pytest.approx([t.logprob for t in choice.logprobs.content])


def test_most_likely_tokens_come_with_the_last_chunk(live: LiveEndpoint) -> None:
    options: dict[str, Any] = {**OPTIONS, "messages": HELLO, "logprobs": True, "top_logprobs": 2}
    plain = live.client.chat.completions.create(**options)
    chunks = list(live.client.chat.completions.create(**options, stream=True))
    told, expected = chunks[-1].choices[0].logprobs.content, plain.choices[0].logprobs.content
    assert [token.token for token in told] == [token.token for token in expected]
    for one, other in zip(told, expected, strict=True):
        assert [top.logprob for top in one.top_logprobs] == pytest.approx([top.logprob for top in other.top_logprobs])
    assert not any(choice.logprobs for chunk in chunks[:-1] for choice in chunk.choices)


def test_usage_comes_last_where_it_is_asked_for(live: LiveEndpoint) -> None:
    options: dict[str, Any] = {**OPTIONS, "messages": HELLO}
    plain = live.client.chat.completions.create(**options)
    with_usage = {"stream": True, "stream_options": {"include_usage": True}}
    *before, last = live.client.chat.completions.create(**options, **with_usage)
    assert (last.choices, last.usage.total_tokens) == ([], plain.usage.total_tokens)
    assert [chunk.usage for chunk in before] == [None] * len(before)
    assert all(chunk.choices for chunk in live.client.chat.completions.create(**options, stream=True))


def test_a_stream_of_completions_adds_up_to_the_plain_answer(live: LiveEndpoint) -> None:
    options: dict[str, Any] = {**OPTIONS, "prompt": ["State", "Action"], "logprobs": 0}
    plain = live.client.completions.create(**options)
    texts, offsets = ["", ""], [[], []]
    for chunk in live.client.completions.create(**options, stream=True):
        for choice in chunk.choices:
            texts[choice.index] += choice.text
            offsets[choice.index] += choice.logprobs.text_offset if choice.logprobs else []
    assert texts == [choice.text for choice in plain.choices]
    assert offsets == [choice.logprobs.text_offset for choice in plain.choices]


def test_the_events_end_as_openais_do(live: LiveEndpoint) -> None:
    body = {**OPTIONS, "messages": HELLO, "stream": True}
    with live.http.stream("POST", f"{live.url}/chat/completions", json=body) as answer:
        events = [line for line in answer.iter_lines() if line]
    assert answer.headers["content-type"].startswith("text/event-stream")
    assert all(event.startswith("data: ") for event in events)
    assert events[-1] == "data: [DONE]"
    assert json.loads(events[-2].removeprefix("data: "))["choices"][0]["finish_reason"] in ("stop", "length")


def test_a_mistake_is_refused_before_the_stream_begins(live: LiveEndpoint) -> None:
    body = {**OPTIONS, "model": "other", "messages": HELLO, "stream": True}
    answer = live.http.post(f"{live.url}/chat/completions", json=body)
    assert (answer.status_code, answer.json()["error"]["code"]) == (400, "model_not_found")
