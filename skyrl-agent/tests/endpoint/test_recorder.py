"""Recordings of sessions: requests that repeat the history continue with the sampled tokens."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from train_kit.messages import assistant, system, user
from train_kit.templates import FAMILIES

from skyrl_agent.endpoint.recorder import Prompt, Recording
from skyrl_agent.endpoint.replies import Reply
from skyrl_train.generators.chat_template import ChatEncoder
from skyrl_train.inference_engines.base import EngineResult, StopReason
from skyrl_train.types import Message


class ScriptedConversation:
    """A recording with scripted replies, sampled one character per token, unlike any tokenizer would encode them."""

    def __init__(self, chat: ChatEncoder) -> None:
        self.chat = chat
        self.recording = Recording(chat)
        self.results: list[EngineResult] = []

    def sampled(self, text: str, *, ends: bool = True) -> list[int]:
        ids = [token_id for character in text for token_id in self.chat.encode(character)]
        return [*ids, self.chat.eos_token_id] if ends else ids

    def answer(self, prompt: Prompt, text: str, stop_reason: StopReason = "stop") -> int:
        token_ids = self.sampled(text, ends=stop_reason == "stop")
        logprobs = [-0.5 - i for i in range(len(token_ids))]
        self.results.append(EngineResult(token_ids, logprobs, stop_reason, ()))
        return self.recording.record(prompt, self.results[-1], Reply(text))

    def ask(self, messages: list[Message]) -> Prompt:
        return self.recording.chat_prompt(messages, self.chat)


@pytest.fixture
def conversation(chat: ChatEncoder) -> ScriptedConversation:
    return ScriptedConversation(chat)


OPENING = [system("Go on."), user("State")]
HISTORY = [*OPENING, assistant("Act"), user("State")]


def test_a_chat_continues_with_the_sampled_tokens(conversation: ScriptedConversation) -> None:
    first = conversation.ask(OPENING)
    assert (first.token_ids, first.origin) == (conversation.chat.prompt_ids(OPENING), None)
    conversation.answer(first, "Action")
    second = conversation.ask([*OPENING, assistant("Action"), user("State")])
    between = conversation.chat.observation_ids([user("State")], conversation.chat.eos_token_id)
    assert second.token_ids == first.token_ids + conversation.sampled("Action") + between
    assert conversation.chat.encode("Action") != conversation.sampled("Action", ends=False), "the test is void"
    conversation.answer(second, "L")
    conversation.recording.finish()
    (row,) = conversation.recording.rows
    assert row.token_ids == second.token_ids + conversation.sampled("L")
    assert row.loss_mask == [1] * len(conversation.sampled("Action")) + [0] * len(between) + [1, 1]
    assert row.logprobs[-2:] == [-0.5, -1.5]
    assert [record.prompt_length for record in conversation.recording.turns] == [
        len(first.token_ids),
        len(second.token_ids),
    ]


def test_a_truncated_turn_gets_an_eos_token(conversation: ScriptedConversation) -> None:
    first = conversation.ask(OPENING)
    conversation.answer(first, "Act", "length")
    second = conversation.ask(HISTORY)
    text = conversation.chat.decode_all(second.token_ids[len(first.token_ids) :])
    assert text == "Act<|im_end|>\n<|im_start|>user\nState<|im_end|>\n<|im_start|>assistant\n"


def test_white_space_around_a_reply_is_ignored(conversation: ScriptedConversation) -> None:
    conversation.answer(conversation.ask(OPENING), " Act\n")
    assert conversation.ask(HISTORY).origin is not None


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
def test_an_edited_history_starts_a_new_row(conversation: ScriptedConversation, edited: list[Message]) -> None:
    conversation.answer(conversation.ask(OPENING), "Act")
    prompt = conversation.ask(edited)
    assert (prompt.origin, prompt.token_ids) == (None, conversation.chat.prompt_ids(edited))
    assert conversation.answer(prompt, "L") == 1
    conversation.recording.finish()
    assert [row.n_prompt for row in conversation.recording.rows] == [
        len(conversation.chat.prompt_ids(m)) for m in (OPENING, edited)
    ]


def test_other_tools_start_a_new_history(conversation: ScriptedConversation) -> None:
    conversation.answer(conversation.recording.chat_prompt(OPENING, conversation.chat, "tools"), "Act")
    assert conversation.recording.chat_prompt(HISTORY, conversation.chat, "others").origin is None
    assert conversation.recording.chat_prompt(HISTORY, conversation.chat, "tools").origin is not None


def test_a_second_reply_to_the_same_prompt_has_its_own_row(conversation: ScriptedConversation) -> None:
    conversation.answer(conversation.ask(OPENING), "Act")
    both = [conversation.ask(HISTORY), conversation.ask(HISTORY)]
    assert [conversation.answer(prompt, text) for prompt, text in zip(both, ("L", "R"), strict=True)] == [0, 1]
    main, branch = conversation.recording.rows
    assert branch.n_prompt == len(both[1].token_ids), "the history is trained in the other row"
    assert branch.loss_mask == [1, 1]
    assert main.token_ids[: branch.n_prompt] == branch.token_ids[: branch.n_prompt]
    longer = conversation.ask([*HISTORY, assistant("R"), user("Action")])
    assert longer.token_ids[: len(branch.token_ids)] == branch.token_ids
    assert conversation.answer(longer, "S") == 1


def test_a_request_from_an_earlier_point_starts_a_row_with_sampled_tokens(conversation: ScriptedConversation) -> None:
    history = OPENING
    for text in ("Act", "ion"):
        conversation.answer(conversation.ask(history), text)
        history = [*history, assistant(text), user("State")]
    branch_prompt = conversation.ask([*OPENING, assistant("Act"), user("Other")])
    assert conversation.answer(branch_prompt, "L") == 1
    first = conversation.recording.rows[0]
    n_shared = first.n_prompt + len(conversation.sampled("Act"))
    assert branch_prompt.token_ids[:n_shared] == first.token_ids[:n_shared]


def test_the_row_of_the_last_turn_comes_last(conversation: ScriptedConversation) -> None:
    conversation.answer(conversation.ask(OPENING), "Act")
    conversation.answer(conversation.ask([user("Summary")]), "L")
    conversation.answer(conversation.ask(HISTORY), "R")
    conversation.recording.finish()
    assert [row.n_prompt for row in conversation.recording.rows] == [
        len(conversation.chat.prompt_ids(messages)) for messages in ([user("Summary")], OPENING)
    ]
    assert [turn.segment for turn in conversation.recording.turns] == [1, 0, 1]


def test_replies_that_differ_only_in_their_thoughts(conversation: ScriptedConversation) -> None:
    """A client may repeat a thought, and then continues that reply. Otherwise it continues the last one."""
    prompts = [conversation.ask(OPENING) for _ in range(2)]
    for prompt, thought in zip(prompts, ("A", "B"), strict=True):
        conversation.recording.record(prompt, EngineResult([7], [0.0], "stop", ()), Reply("Act", thought))
    origins = []
    for thought in ("A", "B", None, "C"):
        repeated = {**assistant("Act"), **({"reasoning_content": thought} if thought else {})}
        origins.append(conversation.ask([*OPENING, repeated, user("State")]).origin)
    assert [origin and origin.row for origin in origins] == [0, 1, 1, 1]


def test_token_prompts_that_start_with_recorded_tokens_continue_their_row(conversation: ScriptedConversation) -> None:
    first = conversation.recording.token_prompt([5, 6, 7])
    conversation.answer(first, "Act")
    so_far = [5, 6, 7, *conversation.sampled("Act")]
    assert conversation.answer(conversation.recording.token_prompt([*so_far, 9, 9]), "L") == 0
    assert conversation.answer(conversation.recording.token_prompt([5, 6, 8]), "L") == 1
    assert conversation.answer(conversation.recording.token_prompt([*so_far, 9, 8]), "L") == 2
    rows = conversation.recording.rows
    assert [row.n_prompt for row in rows] == [3, 3, len(so_far) + 2]
    assert rows[0].loss_mask == [1] * len(conversation.sampled("Act")) + [0, 0, 1, 1]


def test_a_truncated_reply_can_be_continued(conversation: ScriptedConversation) -> None:
    conversation.answer(conversation.recording.token_prompt([5, 6]), "Act", "length")
    again = conversation.recording.token_prompt([5, 6, *conversation.sampled("Act", ends=False)])
    assert conversation.answer(again, "ion") == 0
    assert 0 not in conversation.recording.rows[0].loss_mask


def test_text_prompts_continue_with_the_sampled_tokens(conversation: ScriptedConversation) -> None:
    conversation.answer(conversation.recording.text_prompt("State"), "Act", "length")
    second = conversation.recording.text_prompt("StateAct: ball")
    first_ids = [*conversation.chat.encode("State"), *conversation.sampled("Act", ends=False)]
    assert second.token_ids == first_ids + conversation.chat.encode(": ball")
    assert conversation.answer(second, "L") == 0
    assert conversation.recording.text_prompt("Other").origin is None


def test_a_text_prompt_without_the_sampled_eos_token_starts_a_new_row(conversation: ScriptedConversation) -> None:
    conversation.answer(conversation.recording.text_prompt("State"), "Act")
    second = conversation.recording.text_prompt("StateAct: ball")
    assert second.token_ids == [
        *conversation.chat.encode("State"),
        *conversation.sampled("Act", ends=False),
        *conversation.chat.encode(": ball"),
    ]
    assert conversation.answer(second, "L") == 1


def test_a_reply_without_tokens_does_not_change_later_prompts(conversation: ScriptedConversation) -> None:
    first = conversation.recording.text_prompt("State")
    conversation.recording.record(first, EngineResult([], [], "abort", ()), Reply(""))
    assert conversation.recording.text_prompt("State").token_ids == first.token_ids


@settings(max_examples=50)
@given(data=st.data())
def test_every_sampled_token_is_trained_exactly_once(chat: ChatEncoder, data: st.DataObject) -> None:
    """For any requests and order of replies, each reply occurs once in the rows with mask 1."""
    conversation = ScriptedConversation(chat)
    histories: list[list[Message]] = [OPENING]
    pending: list[tuple[list[Message], Prompt]] = []
    replies: list[tuple[Prompt, str]] = []
    for _ in range(data.draw(st.integers(1, 12))):
        if pending and data.draw(st.booleans()):
            history, prompt = pending.pop(data.draw(st.integers(0, len(pending) - 1)))
            text = data.draw(st.sampled_from(["", "L", "Act", "State"]))
            conversation.answer(prompt, text, data.draw(st.sampled_from(["stop", "length"])) if text else "stop")
            replies.append((prompt, text))
            histories.append([*history, assistant(text), user(data.draw(st.sampled_from("ab")))])
        else:
            history = data.draw(st.sampled_from(histories))
            pending.append((history, conversation.ask(history)))
    conversation.recording.finish()
    rows, turns = conversation.recording.rows, conversation.recording.turns
    assert len(turns) == len(replies)
    for turn, (prompt, _), result in zip(turns, replies, conversation.results, strict=True):
        row = rows[turn.segment]
        assert row.response_ids[turn.start : turn.end] == result.token_ids
        assert row.loss_mask[turn.start : turn.end] == [1] * len(result.token_ids)
        assert row.logprobs[turn.start : turn.end] == result.logprobs
        assert row.token_ids[: row.n_prompt + turn.start] == prompt.token_ids
    assert sum(sum(row.loss_mask) for row in rows) == sum(len(result.token_ids) for result in conversation.results)


def test_a_space_at_the_end_of_a_completion_is_a_token_of_the_history() -> None:
    """SentencePiece has a token for it, which decodes to nothing on its own."""
    chat = ChatEncoder(FAMILIES["zephyr"].tokenizer())
    recording, space = Recording(chat), chat.tokenizer.convert_tokens_to_ids("▁")
    first = recording.text_prompt("It")
    recording.record(first, EngineResult([space], [-0.5], "length", ()), Reply(" "))
    assert space not in chat.encode("It is")
    assert recording.text_prompt("It is").token_ids[: len(first.token_ids) + 1] == [*first.token_ids, space]
