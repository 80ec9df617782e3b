"""The properties of turns that every tokenizer with a chat template has: RL and SFT agree on their tokens."""

from collections.abc import Callable
from typing import Any

from transformers import PreTrainedTokenizerBase

from skyrl_train.dataset.supervised import TokenRow
from skyrl_train.generators.chat_template import ChatEncoder
from skyrl_train.rendering.template import ChatTemplate, Messages
from train_kit.messages import assistant, user

REPLIES = ["It is 4.", "A", "s", "<b>4</b>", "assistant", "Füße 😀", "4\n\nYes.", "4, the answer"]

Encode = Callable[[Messages], list[TokenRow]]
"""Returns the rows of a demonstration."""


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


def check_replies(
    tokenizer: PreTrainedTokenizerBase, encode: Encode, reply_format: str, variables: dict[str, Any], before: Messages
) -> None:
    """Assert that exactly the reply is trained, after the prompt of generation, with the tokens of the whole text.

    The model has to write `reply_format`, with the content in place of "{}".
    """
    template = ChatTemplate(tokenizer, variables=variables)
    n_joint = 0
    for reply in REPLIES:
        messages = [*before, user("What is 2 plus 2?"), assistant(reply)]
        (row,) = encode(messages)
        expected = reply_format.format(reply)
        assert trained_texts(tokenizer, row) == [expected]
        prompt = template.prompt(messages[:-1])
        assert all(message["content"] in prompt for message in messages[:-1])
        n_prompt = row.loss_mask.index(1)
        prompt_ids = ChatEncoder(tokenizer, template_kwargs=variables).prompt_ids(messages[:-1])
        assert row.token_ids[:n_prompt] == template.encode(prompt) == prompt_ids
        joint = template.encode(prompt + expected)
        if joint[:n_prompt] == row.token_ids[:n_prompt]:  # the reply does not merge with the prompt
            assert row.token_ids == joint
            n_joint += 1
    assert n_joint == len(REPLIES) or "\n" in reply_format[:1]


def check_turns(
    tokenizer: PreTrainedTokenizerBase, encode: Encode, reply_format: str, variables: dict[str, Any]
) -> None:
    """Assert that two turns of RL and of SFT have the same tokens."""
    messages = [user("What is 2 plus 2?"), assistant("It is 4."), user("Yes?"), assistant("A")]
    rows = encode(messages)
    trained = [text for row in rows for text in trained_texts(tokenizer, row)]
    assert trained == [reply_format.format(reply) for reply in ("It is 4.", "A")]
    chat = ChatEncoder(tokenizer, template_kwargs=variables)
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
