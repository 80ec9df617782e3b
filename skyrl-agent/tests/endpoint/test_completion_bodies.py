"""Streamed pieces of text add up to the whole reply, for any tokens and stop strings."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from skyrl_agent.endpoint.completions import (
    ChatRequest,
    ChatResponseBuilder,
    CompletionRequest,
    FinishedChoice,
    ResponseBuilder,
)
from skyrl_agent.endpoint.replies import Reply, TextStream
from skyrl_train.generators.chat_template import ChatEncoder
from skyrl_train.inference_engines.base import EngineResult, StopReason

WORDS = st.text(alphabet="ab =1é漢😀", max_size=12)


def result_of(token_ids: list[int], stop_reason: StopReason = "stop") -> EngineResult:
    return EngineResult(token_ids, [0.0] * len(token_ids), stop_reason, ())


def sampled_until(chat: ChatEncoder, token_ids: list[int], stops: list[str]) -> EngineResult:
    """Return the result of an engine that samples `token_ids` up to the token that completes a stop string."""
    for n in range(1, len(token_ids) + 1):
        if any(stop in chat.decode(token_ids[:n]) for stop in stops):
            return result_of(token_ids[:n])
    return result_of(token_ids, "length")


@given(text=WORDS, cuts=st.lists(st.integers(1, 3), max_size=40), stops=st.lists(WORDS.filter(bool), max_size=2))
@pytest.mark.parametrize("keeps_stop", [False, True])
def test_pieces_add_up(chat: ChatEncoder, text: str, cuts: list[int], stops: list[str], keeps_stop: bool) -> None:
    result = sampled_until(chat, chat.encode(text), stops)
    stream = TextStream(chat.decode, stops, keeps_stop=keeps_stop)
    pieces, position = [], 0
    for n in [*cuts, len(result.token_ids)]:
        pieces.append(stream.push(result.token_ids[position : position + n]))
        position += n
    pieces.append(stream.finish(result))
    whole = TextStream(chat.decode, stops, keeps_stop=keeps_stop).finish(result)
    assert "".join(pieces) == whole == stream.text
    assert keeps_stop or not any(stop in whole for stop in stops)


def test_text_is_emitted_as_soon_as_it_is_certain(chat: ChatEncoder) -> None:
    stream = TextStream(chat.decode, [], keeps_stop=False)
    assert [stream.push([token_id]) for token_id in chat.encode("L1")] == ["L", "1"]
    smile = chat.encode("😀")
    assert [stream.push([token_id]) for token_id in smile] == [*[""] * (len(smile) - 1), "😀"]


def test_an_ignored_early_stop_string_stays_in_the_text(chat: ChatEncoder) -> None:
    token_ids = chat.encode("1a1a")
    assert len(token_ids) == 4
    assert TextStream(chat.decode, ["a"], keeps_stop=False).finish(result_of(token_ids)) == "1a1"


def test_only_stop_strings_are_cut_from_the_text(chat: ChatEncoder) -> None:
    token_ids = [*chat.encode("1a"), chat.eos_token_id]
    assert TextStream(chat.decode, ["b"], keeps_stop=False).finish(result_of(token_ids)) == "1a"
    assert TextStream(chat.decode, ["a"], keeps_stop=False).finish(result_of(token_ids, "length")) == "1a"


PARTS = ["a", "\N{REPLACEMENT CHARACTER}", "\N{REPLACEMENT CHARACTER}"]  # tokens 1 and 2 are parts of characters


def finished(tops: list[dict[int, float]]) -> list[FinishedChoice]:
    result = EngineResult([0, 1], [-0.5, -0.25], "length", (), top_logprobs=tops)
    return [FinishedChoice([5], result, Reply("a"))]


def test_the_bytes_of_a_part_of_a_character_are_unknown() -> None:
    request = ChatRequest(model="tiny", messages=[{"role": "user", "content": "?"}], logprobs=True)
    (choice,) = ChatResponseBuilder(request, PARTS.__getitem__).complete(finished([{}, {}]))["choices"]
    assert [token["bytes"] for token in choice["logprobs"]["content"]] == [[97], None]


def test_of_tokens_with_the_same_text_the_likeliest_is_reported() -> None:
    request = CompletionRequest(model="tiny", prompt="?", logprobs=2)
    tops = [{0: -0.5, 1: -1.0}, {1: -0.25, 2: -3.0}]
    (choice,) = ResponseBuilder(request, PARTS.__getitem__).complete(finished(tops))["choices"]
    assert choice["logprobs"]["top_logprobs"] == [{"a": -0.5, PARTS[1]: -1.0}, {PARTS[1]: -0.25}]
