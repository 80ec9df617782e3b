"""Questions about documents longer than the context: the agent reads section by section and keeps a summary.

Source: MemAgent (Yu et al., 2025, arXiv:2507.02259).
"""

import re
from bisect import bisect_left, bisect_right
from collections.abc import Mapping, Sequence
from typing import Any

from transformers import PreTrainedTokenizerBase

from skyrl_agent.tasks.base import BaseTask
from skyrl_agent.tasks.general_react import GeneralReactTask, get_question
from skyrl_train.errors import DataError
from skyrl_train.types import Message

MAX_SECTION_CHARS = 16_000
MAX_SECTION_TOKENS = 4_000  # about 16,000 characters of English, and 4,000 of Japanese
DOCUMENT = re.compile(r"(?=\bDocument \d+:)")

SYSTEM = "You read a long text section by section to answer a question, and remember only what you write down."
SECTION = """Question: {question}

Your memory of earlier sections:
{memory}

Section {number} of {n_sections}:
{section}

{progress}"""


class Reader:
    """A trajectory's position in its document, and its memory."""

    def __init__(
        self,
        question: str,
        context: str,
        max_section_chars: int = MAX_SECTION_CHARS,
        tokenizer: PreTrainedTokenizerBase | None = None,
        max_section_tokens: int = MAX_SECTION_TOKENS,
    ) -> None:
        """Split the context with `split_sections`. Without a tokenizer, only characters count."""
        self._question = question
        starts = [] if tokenizer is None else find_token_starts(context, tokenizer)
        self._sections = split_sections(context, max_section_chars, starts, max_section_tokens)
        self._index = 0

    @property
    def is_at_end(self) -> bool:
        """True if no section follows."""
        return self._index == len(self._sections) - 1

    def messages(self, memory: str = "") -> list[Message]:
        """Return the history for the current section."""
        progress = "This is the last section. Finish with your answer." if self.is_at_end else "More sections follow."
        content = SECTION.format(
            question=self._question,
            memory=memory or "(empty)",
            number=self._index + 1,
            n_sections=len(self._sections),
            section=self._sections[self._index],
            progress=progress,
        )
        return [Message(role="system", content=SYSTEM), Message(role="user", content=content)]

    def next_messages(self, memory: str) -> list[Message]:
        """Return the history for the next section."""
        self._index += 1
        return self.messages(memory)


def split_sections(
    context: str, max_chars: int, token_starts: Sequence[int] = (), max_tokens: int = MAX_SECTION_TOKENS
) -> list[str]:
    """Split a text into sections of at most `max_chars` characters and `max_tokens` tokens.

    A section ends before a document, "Document 2: …". If a document is longer than a section, the section ends inside
    it, after a space if any. `token_starts` are the positions of the text's tokens in ascending order.

    Example: documents of 300, 500 and 1500 characters with `max_chars` 1000. Documents 1 and 2 form the first section,
    since 2300 characters do not fit. Document 3 is cut after the last space before its 1000th character, and its rest
    is the third section.
    """
    documents = [match.start() for match in DOCUMENT.finditer(context)]
    sections, start = [], 0
    while start < len(context):
        end = min(start + max_chars, len(context))
        next_token = bisect_left(token_starts, start) + max_tokens
        if next_token < len(token_starts):
            end = min(end, max(token_starts[next_token], start + 1))
        if end < len(context):
            n_before = bisect_right(documents, end)  # 0 in a preface: there is no document to end before
            last = documents[n_before - 1] if n_before else start
            end = last if last > start else context.rfind(" ", start + 1, end) + 1 or end
        sections.append(context[start:end].strip())
        start = end
    return [section for section in sections if section] or [""]


def find_token_starts(text: str, tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """Return the position of each token in a text. For a slow tokenizer, tokens are spread evenly."""
    encoded = tokenizer(text, add_special_tokens=False, return_offsets_mapping=tokenizer.is_fast, verbose=False)
    if tokenizer.is_fast:
        return sorted(start for start, _ in encoded["offset_mapping"])
    n_tokens = len(encoded["input_ids"])
    return [i * len(text) // n_tokens for i in range(n_tokens)]


class MemAgentTask(BaseTask):
    """Questions about the text in the column `context`, for an agent with the tools finish and next_with_summary."""

    max_section_chars = MAX_SECTION_CHARS
    max_section_tokens = MAX_SECTION_TOKENS

    @classmethod
    def initialize_runtime(cls, instance: Mapping[str, Any], tokenizer: PreTrainedTokenizerBase) -> Reader:
        """Return a reader of the text."""
        limits = cls.max_section_chars, tokenizer, cls.max_section_tokens
        return Reader(get_question(instance), get_context(instance), *limits)

    @classmethod
    def get_instruction(cls, runtime: Reader) -> list[Message]:
        """Return the messages that show the first section."""
        return runtime.messages()

    @classmethod
    def evaluate_result(cls, result: Any, instance: Mapping[str, Any], data_source: str) -> float:
        """Return the reward of an answer, as `GeneralReactTask` does."""
        return GeneralReactTask.evaluate_result(result, instance, data_source)

    @classmethod
    def check_instance(cls, instance: Any, data_source: str) -> None:
        """Raise DataError for a row without a text or a ground truth, or with an unknown data source."""
        GeneralReactTask.check_instance(instance, data_source)
        get_context(instance)


def get_context(instance: Mapping[str, Any]) -> str:
    """Return a row's text: its column `context`, or `context` in `extra_info`."""
    context = instance.get("context") or (instance.get("extra_info") or {}).get("context")
    if not isinstance(context, str) or not context:
        raise DataError("the instance has no text in `context` or `extra_info.context`")
    return context
