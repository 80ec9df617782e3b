"""Questions about documents that are longer than the context: the agent reads section by section and keeps a summary.

Source: MemAgent (Yu et al., 2025, arXiv:2507.02259).
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from skyrl_agent.tasks.base import BaseTask
from skyrl_agent.tasks.general_react import GeneralReactTask, get_question
from skyrl_train.errors import DataError
from skyrl_train.types import Message

MAX_SECTION_CHARS = 16_000  # about 4,000 tokens
DOCUMENT = re.compile(r"(?=\bDocument \d+:)")

SYSTEM = "You read a long text section by section to answer a question, and remember only what you write down."
SECTION = """Question: {question}

Your memory of earlier sections:
{memory}

Section {number} of {n_sections}:
{section}

{progress}"""


class Reader:
    """The place of a trajectory in its document, and its memory."""

    def __init__(self, question: str, context: str, max_section_chars: int = MAX_SECTION_CHARS) -> None:
        """Divide the context into sections of whole documents, "Document 1: …", as far as they fit."""
        self._question = question
        self._sections = split_sections(context, max_section_chars)
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


def split_sections(context: str, max_chars: int) -> list[str]:
    """Divide a text into sections of at most `max_chars` characters, between documents where possible."""
    sections = [""]
    for document in filter(None, DOCUMENT.split(context)):
        if len(sections[-1]) + len(document) > max_chars and sections[-1]:
            sections.append("")
        while len(document) > max_chars:
            cut = document.rfind(" ", 1, max_chars) + 1 or max_chars
            sections[-1], document = document[:cut], document[cut:]
            sections.append("")
        sections[-1] += document
    return [section.strip() for section in sections if section.strip()] or [""]


class MemAgentTask(BaseTask):
    """Questions about the text in the column `context`, for an agent with the tools finish and next_with_summary."""

    max_section_chars = MAX_SECTION_CHARS

    @classmethod
    def initialize_runtime(cls, instance: Mapping[str, Any]) -> Reader:
        """Return the reader of the text."""
        return Reader(get_question(instance), get_context(instance), cls.max_section_chars)

    @classmethod
    def get_instruction(cls, runtime: Reader) -> list[Message]:
        """Return the messages with the first section."""
        return runtime.messages()

    @classmethod
    def evaluate_result(cls, result: Any, instance: Mapping[str, Any], data_source: str) -> float:
        """Return the reward of an answer, as `GeneralReactTask` does."""
        return GeneralReactTask.evaluate_result(result, instance, data_source)

    @classmethod
    def check_instance(cls, instance: Any, data_source: str) -> None:
        """Raise DataError for a row without a text or a ground truth, or of an unknown data source."""
        GeneralReactTask.check_instance(instance, data_source)
        get_context(instance)


def get_context(instance: Mapping[str, Any]) -> str:
    """Return the text of a row: its column `context`, or that of `extra_info`."""
    context = instance.get("context") or (instance.get("extra_info") or {}).get("context")
    if not isinstance(context, str) or not context:
        raise DataError("the instance has no text in `context` or `extra_info.context`")
    return context
