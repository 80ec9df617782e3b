"""Requests that repeat what was said go on with the tokens that were sampled."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from transformers import PreTrainedTokenizerBase

from skyrl_train.generators.chat_template import ChatEncoder
from skyrl_train.generators.endpoint.recorder import Prompt, Recording
from skyrl_train.inference_engines.base import EngineResult, StopReason
from skyrl_train.types import Message


def user(text: str) -> Message:
    return Message(role="user", content=text)


def assistant(text: str) -> Message:
    return Message(role="assistant", content=text)


@pytest.fixture(scope="module")
def chat(tiny_tokenizer: PreTrainedTokenizerBase) -> ChatEncoder:
    return ChatEncoder(tiny_tokenizer)


class Talk:
    """A recording, and a model that says what it is told to, a character a token: no tokenizer would say it so."""

    def __init__(self, chat: ChatEncoder) -> None:
        self.chat = chat
        self.recording = Recording(chat)

    def sampled(self, text: str, *, ends: bool = True) -> list[int]:
        ids = [token_id for character in text for token_id in self.chat.encode(character)]
        return [*ids, self.chat.eos_token_id] if ends else ids

    def answer(self, prompt: Prompt, text: str, stop_reason: StopReason = "stop") -> int:
        token_ids = self.sampled(text, ends=stop_reason == "stop")
        logprobs = [-0.5 - i for i in range(len(token_ids))]
        return self.recording.record(prompt, EngineResult(token_ids, logprobs, stop_reason, ()), text)

    def ask(self, messages: list[Message]) -> Prompt:
        return self.recording.chat_prompt(messages, self.chat)


@pytest.fixture
def talk(chat: ChatEncoder) -> Talk:
    return Talk(chat)


OPENING = [Message(role="system", content="Go on."), user("State")]


def test_a_chat_goes_on_with_the_sampled_tokens(talk: Talk) -> None:
    first = talk.ask(OPENING)
    assert (first.token_ids, first.origin) == (talk.chat.prompt_ids(OPENING), None)
    talk.answer(first, "Action")
    second = talk.ask([*OPENING, assistant("Action"), user("State")])
    between = talk.chat.observation_ids([user("State")], talk.chat.eos_token_id)
    assert second.token_ids == first.token_ids + talk.sampled("Action") + between
    assert talk.chat.encode("Action") not in [talk.sampled("Action", ends=False)], "the test would see no difference"
    talk.answer(second, "L")
    talk.recording.finish()
    (row,) = talk.recording.rows
    assert row.token_ids == second.token_ids + talk.sampled("L")
    assert row.loss_mask == [1] * len(talk.sampled("Action")) + [0] * len(between) + [1, 1]
    assert row.logprobs[-2:] == [-0.5, -1.5]
    assert [record.prompt_length for record in talk.recording.turns] == [len(first.token_ids), len(second.token_ids)]


def test_a_turn_that_was_cut_gets_an_end(talk: Talk) -> None:
    first = talk.ask(OPENING)
    talk.answer(first, "Act", "length")
    second = talk.ask([*OPENING, assistant("Act"), user("State")])
    text = talk.chat.decode_all(second.token_ids[len(first.token_ids) :])
    assert text == "Act<|im_end|>\n<|im_start|>user\nState<|im_end|>\n<|im_start|>assistant\n"


def test_white_space_around_a_reply_does_not_count(talk: Talk) -> None:
    talk.answer(talk.ask(OPENING), " Act\n")
    assert talk.ask([*OPENING, assistant("Act"), user("State")]).origin is not None


@pytest.mark.parametrize(
    "edited",
    [
        [*OPENING, assistant("Other"), user("State")],
        [OPENING[0], user("Other"), assistant("Act"), user("State")],
        [OPENING[1], assistant("Act"), user("State")],
        [user("Summary")],
    ],
    ids=["reply", "question", "no system prompt", "summary"],
)
def test_an_edited_history_begins_a_new_row(talk: Talk, edited: list[Message]) -> None:
    talk.answer(talk.ask(OPENING), "Act")
    prompt = talk.ask(edited)
    assert (prompt.origin, prompt.token_ids) == (None, talk.chat.prompt_ids(edited))
    assert talk.answer(prompt, "L") == 1
    talk.recording.finish()
    assert [row.n_prompt for row in talk.recording.rows] == [len(talk.chat.prompt_ids(m)) for m in (OPENING, edited)]


def test_other_tools_are_another_history(talk: Talk) -> None:
    talk.answer(talk.recording.chat_prompt(OPENING, talk.chat, "tools"), "Act")
    history = [*OPENING, assistant("Act"), user("State")]
    assert talk.recording.chat_prompt(history, talk.chat, "others").origin is None
    assert talk.recording.chat_prompt(history, talk.chat, "tools").origin is not None


def test_a_second_reply_to_the_same_question_has_a_row_of_its_own(talk: Talk) -> None:
    talk.answer(talk.ask(OPENING), "Act")
    history = [*OPENING, assistant("Act"), user("State")]
    both = [talk.ask(history), talk.ask(history)]
    assert [talk.answer(prompt, text) for prompt, text in zip(both, ("L", "R"), strict=True)] == [0, 1]
    main, branch = talk.recording.rows
    assert branch.n_prompt == len(both[1].token_ids), "what came before was learned in the other row"
    assert branch.loss_mask == [1, 1]
    assert main.token_ids[: branch.n_prompt] == branch.token_ids[: branch.n_prompt]
    longer = talk.ask([*history, assistant("R"), user("Action")])
    assert longer.token_ids[: len(branch.token_ids)] == branch.token_ids
    assert talk.answer(longer, "S") == 1


def test_going_back_begins_a_row_with_the_sampled_tokens(talk: Talk) -> None:
    history = OPENING
    for text in ("Act", "ion"):
        talk.answer(talk.ask(history), text)
        history = [*history, assistant(text), user("State")]
    back = talk.ask([*OPENING, assistant("Act"), user("Other")])
    assert talk.answer(back, "L") == 1
    first = talk.recording.rows[0]
    n_shared = first.n_prompt + len(talk.sampled("Act"))
    assert back.token_ids[:n_shared] == first.token_ids[:n_shared]


def test_the_row_of_the_last_turn_comes_last(talk: Talk) -> None:
    talk.answer(talk.ask(OPENING), "Act")
    talk.answer(talk.ask([user("Summary")]), "L")
    talk.answer(talk.ask([*OPENING, assistant("Act"), user("State")]), "R")
    talk.recording.finish()
    assert [row.n_prompt for row in talk.recording.rows] == [
        len(talk.chat.prompt_ids(messages)) for messages in ([user("Summary")], OPENING)
    ]
    assert [turn.row for turn in talk.recording.turns] == [1, 0, 1]


def test_a_question_without_an_answer_leaves_no_trace(talk: Talk) -> None:
    talk.answer(talk.ask(OPENING), "Act")
    talk.ask([*OPENING, assistant("Act"), user("Never answered")])
    other = talk.ask([*OPENING, assistant("Act"), user("State")])
    assert talk.answer(other, "L") == 0
    assert len(talk.recording.rows) == 1


def test_token_ids_that_begin_with_the_recorded_ones_go_on(talk: Talk) -> None:
    first = talk.recording.token_prompt([5, 6, 7])
    talk.answer(first, "Act")
    so_far = [5, 6, 7, *talk.sampled("Act")]
    assert talk.answer(talk.recording.token_prompt([*so_far, 9, 9]), "L") == 0
    assert talk.answer(talk.recording.token_prompt([5, 6, 8]), "L") == 1
    assert talk.answer(talk.recording.token_prompt([*so_far, 9, 8]), "L") == 2
    rows = talk.recording.rows
    assert [row.n_prompt for row in rows] == [3, 3, len(so_far) + 2]
    assert rows[0].loss_mask == [1] * len(talk.sampled("Act")) + [0, 0, 1, 1]


def test_a_reply_that_was_cut_can_be_gone_on_with(talk: Talk) -> None:
    talk.answer(talk.recording.token_prompt([5, 6]), "Act", "length")
    again = talk.recording.token_prompt([5, 6, *talk.sampled("Act", ends=False)])
    assert talk.answer(again, "ion") == 0
    assert 0 not in talk.recording.rows[0].loss_mask


def test_text_goes_on_with_the_sampled_tokens(talk: Talk) -> None:
    talk.answer(talk.recording.text_prompt("State"), "Act", "length")
    second = talk.recording.text_prompt("StateAct: ball")
    first_ids = [*talk.chat.encode("State"), *talk.sampled("Act", ends=False)]
    assert second.token_ids == first_ids + talk.chat.encode(": ball")
    assert talk.answer(second, "L") == 0
    assert talk.recording.text_prompt("Other").origin is None


def test_an_end_of_turn_that_text_does_not_show_is_not_gone_on_with(talk: Talk) -> None:
    talk.answer(talk.recording.text_prompt("State"), "Act")
    second = talk.recording.text_prompt("StateAct: ball")
    assert second.token_ids == [
        *talk.chat.encode("State"),
        *talk.sampled("Act", ends=False),
        *talk.chat.encode(": ball"),
    ]
    assert talk.answer(second, "L") == 1


def test_a_reply_without_tokens_hides_nothing(talk: Talk) -> None:
    first = talk.recording.text_prompt("State")
    talk.recording.record(first, EngineResult([], [], "abort", ()), "")
    assert talk.recording.text_prompt("State").token_ids == first.token_ids


@given(data=st.data())
def test_nothing_sampled_is_lost_or_learned_twice(chat: ChatEncoder, data: st.DataObject) -> None:
    """Whatever is asked, in whatever order it is answered: each reply stands once in the rows with mask 1."""
    talk = Talk(chat)
    histories: list[list[Message]] = [OPENING]
    waiting: list[tuple[list[Message], Prompt]] = []
    replies: list[tuple[Prompt, str]] = []
    for _ in range(data.draw(st.integers(1, 12))):
        if waiting and data.draw(st.booleans()):
            history, prompt = waiting.pop(data.draw(st.integers(0, len(waiting) - 1)))
            text = data.draw(st.sampled_from(["", "L", "Act", "State"]))
            talk.answer(prompt, text, data.draw(st.sampled_from(["stop", "length"])) if text else "stop")
            replies.append((prompt, text))
            histories.append([*history, assistant(text), user(data.draw(st.sampled_from("ab")))])
        else:
            history = data.draw(st.sampled_from(histories))
            waiting.append((history, talk.ask(history)))
    talk.recording.finish()
    rows, turns = talk.recording.rows, talk.recording.turns
    assert len(turns) == len(replies)
    for turn, (prompt, _) in zip(turns, replies, strict=True):
        row = rows[turn.row]
        response = row.token_ids[row.n_prompt :]
        assert response[turn.start : turn.end] == turn.result.token_ids
        assert row.loss_mask[turn.start : turn.end] == [1] * len(turn.result.token_ids)
        assert row.logprobs[turn.start : turn.end] == turn.result.logprobs
        assert row.token_ids[: row.n_prompt + turn.start] == prompt.token_ids
    assert sum(sum(row.loss_mask) for row in rows) == sum(len(record.result.token_ids) for record in turns)
