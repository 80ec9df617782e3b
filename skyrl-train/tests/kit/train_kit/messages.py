"""Messages of conversations, and their tokens."""

from collections.abc import Sequence
from typing import Any

from transformers import PreTrainedTokenizerBase

from skyrl_train.types import Message


def system(content: str) -> Message:
    return Message(role="system", content=content)


def user(content: str) -> Message:
    return Message(role="user", content=content)


def assistant(content: str) -> Message:
    return Message(role="assistant", content=content)


def render(tokenizer: PreTrainedTokenizerBase, messages: Sequence[Any], **options: Any) -> list[int]:
    """Return the tokens of a whole conversation, as the chat template renders it."""
    text = tokenizer.apply_chat_template(messages, tokenize=False, **options)
    return list(tokenizer(text, add_special_tokens=False)["input_ids"])


def render_prompt(tokenizer: PreTrainedTokenizerBase, messages: Sequence[Any]) -> list[int]:
    """Return the tokens of a conversation and of the header of the next reply."""
    return render(tokenizer, messages, add_generation_prompt=True)
