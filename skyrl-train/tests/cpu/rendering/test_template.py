"""Turns of 36 template families: the prompt of generation, and after it exactly the tokens of the rendered text."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import pytest
from train_kit.messages import assistant, user
from train_kit.templates import FAMILIES
from transformers import PreTrainedTokenizerBase

from skyrl_train.dataset.demonstrations import Demonstration
from skyrl_train.dataset.supervised import ConversationEncoder, TokenRow
from skyrl_train.errors import DataError
from skyrl_train.generators.chat_template import ChatEncoder
from skyrl_train.rendering.template import ChatTemplate, Messages

REPLIES = ["It is 4.", "A", "s", "<b>4</b>", "assistant", "Füße 😀", "4\n\nYes.", "4, the answer"]


@lru_cache
def load(family: str) -> PreTrainedTokenizerBase:
    return FAMILIES[family].tokenizer()


def encode(family: str, messages: Messages) -> list[TokenRow]:
    tokenizer = load(family)
    eos_ids = tokenizer.convert_tokens_to_ids(["<|end|>"] if family == "phi-3.5" else [])
    encoder = ConversationEncoder(tokenizer, FAMILIES[family].variables, eos_ids)
    return encoder.encode(Demonstration("row 0", [dict(message) for message in messages], 0))


def trained_texts(tokenizer: PreTrainedTokenizerBase, row: TokenRow) -> list[str]:
    """Return the text of each trained stretch."""
    stretches: list[list[int]] = []
    for i, (token, is_trained) in enumerate(zip(row.token_ids, row.loss_mask, strict=True)):
        if is_trained and not row.loss_mask[i - 1]:
            stretches.append([])
        if is_trained:
            stretches[-1].append(token)
    # a space at the beginning of a decoded text is dropped by some tokenizers, so it is decoded after a letter
    (letter,) = tokenizer("a", add_special_tokens=False)["input_ids"][-1:]
    before = tokenizer.decode([letter])
    return [str(tokenizer.decode([letter, *tokens])).removeprefix(before) for tokens in stretches]


@pytest.mark.parametrize("family", FAMILIES)
def test_exactly_the_reply_is_trained_after_the_prompt_of_generation(family: str) -> None:
    tokenizer, template = load(family), ChatTemplate(load(family), variables=FAMILIES[family].variables)
    n_joint = 0
    for reply in REPLIES:
        messages = [user("What is 2 plus 2?"), assistant(reply)]
        (row,) = encode(family, messages)
        expected = FAMILIES[family].reply.format(reply)
        assert trained_texts(tokenizer, row) == [expected]
        prompt = template.prompt(messages[:1])
        n_prompt = row.loss_mask.index(1)
        assert (
            row.token_ids[:n_prompt]
            == template.encode(prompt)
            == ChatEncoder(tokenizer, template_kwargs=FAMILIES[family].variables).prompt_ids(messages[:1])
        )
        joint = template.encode(prompt + expected)
        if joint[:n_prompt] == row.token_ids[:n_prompt]:  # the reply does not merge with the prompt
            assert row.token_ids == joint
            n_joint += 1
    assert n_joint == len(REPLIES) or "\n" in FAMILIES[family].reply[:1]


@pytest.mark.parametrize("family", FAMILIES)
def test_turns_of_rl_and_of_sft_have_the_same_tokens(family: str) -> None:
    tokenizer = load(family)
    messages = [user("What is 2 plus 2?"), assistant("It is 4."), user("Yes?"), assistant("A")]
    rows = encode(family, messages)
    assert [text for row in rows for text in trained_texts(tokenizer, row)] == [
        FAMILIES[family].reply.format(reply) for reply in ("It is 4.", "A")
    ]
    chat = ChatEncoder(tokenizer, template_kwargs=FAMILIES[family].variables)
    first, last = rows[0], rows[-1]
    n_prompt = first.loss_mask.index(1)
    assert first.token_ids[:n_prompt] == chat.prompt_ids(messages[:1])
    if len(rows) == 1:  # the template keeps past turns as they were
        n_first = n_prompt + first.loss_mask[n_prompt:].index(0)
        n_second = n_first + first.loss_mask[n_first:].index(1)
        observed = chat.observation_ids(messages[2:3], first.token_ids[n_first - 1])
        assert first.token_ids[n_first:n_second] == observed
        assert last.token_ids[:n_second] == chat.prompt_ids(messages[:3])
    else:
        assert last.token_ids[: last.loss_mask.index(1)] == chat.history_ids(messages[:3])


@pytest.mark.parametrize("family", [name for name in FAMILIES if name != "gpt-oss"])
def test_environments_do_not_read_the_end_of_a_turn(family: str) -> None:
    tokenizer, reply = load(family), FAMILIES[family].reply.format("It is 4.")
    token_ids = tokenizer("a" + reply, add_special_tokens=False)["input_ids"]
    assert (
        ChatEncoder(tokenizer, template_kwargs=FAMILIES[family].variables)
        .decode(token_ids)
        .rstrip()
        .endswith("It is 4.")
    )


@pytest.mark.parametrize("family", ["qwq", "r1-distill", "minimax m2", "qwen3", "smollm3", "deepseek-v3.1, thinking"])
@pytest.mark.parametrize("opening", ["<think>\n", "<think>"])
def test_a_thought_is_trained_even_if_the_template_drops_it_from_past_turns(family: str, opening: str) -> None:
    tokenizer = load(family)
    (row,) = encode(family, [user("2 + 2?"), assistant(f"{opening}2 and 2.\n</think>\n\nIt is 4.")])
    text = str(tokenizer.decode(row.token_ids))
    assert text.count("<think>") == text.count("</think>") == 1
    (trained,) = trained_texts(tokenizer, row)
    assert "2 and 2.\n</think>It is 4." in trained.replace("\n\n", "")


@pytest.mark.parametrize(
    ("family", "message", "reason"),
    [
        ("qwen3 without thinking", assistant("<think>\nHm.\n</think>\n\n4"), "has a thought|cannot be separated"),
        ("deepseek-v3.1", assistant("Hm.</think>4"), "has a thought"),
        ("chatml", assistant("4") | {"reasoning_content": "Hm."}, "does not write the thought in message 1"),
        ("llama 3", assistant("") | {"tool_calls": [{"function": {"name": "add", "arguments": {}}}]}, "call of add"),
        ("r1-distill", {"role": "bot", "content": "4"}, "has the role 'bot'"),
        ("chatml", assistant("4<|im_end|>"), "contains <|im_end|>, the end of a turn"),
    ],
)
def test_what_the_template_does_not_write_is_refused(family: str, message: Any, reason: str) -> None:
    with pytest.raises(DataError, match=reason.replace("<|im_end|>", r"<\|im_end\|>")):
        encode(family, [user("2 + 2?"), message])


STARTS = {
    "chatml": ("Let me see", "<|im_start|>assistant\nLet me see"),
    "llama 2": ("Let me see", "[/INST] Let me see"),
    "mistral v7": ("The answer is ", "[/INST]The answer is "),
    "r1-distill": ("<think>\nHm", "<｜Assistant｜><think>\nHm"),
    "qwq": ("<think>", "assistant\n<think>\n"),
    "qwen3": ("<think>\nHm", "assistant\n<think>\nHm"),
    "qwen3 without thinking": ("It is", "<think>\n\n</think>\n\nIt is"),
    "gemma": ("A.\n", "model\nA.\n"),
    "gpt-oss": ("It is", "<|start|>assistant<|channel|>final<|message|>It is"),
}


@pytest.mark.parametrize("family", STARTS)
def test_a_reply_that_the_prompt_begins_is_continued(family: str) -> None:
    start, end = STARTS[family]
    prompt = ChatTemplate(load(family), variables=FAMILIES[family].variables).prompt([user("2 + 2?"), assistant(start)])
    assert prompt.endswith(end)
    assert prompt.count(start.strip()) == 1
