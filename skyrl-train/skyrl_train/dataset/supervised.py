"""Demonstrations as tokens, with a mask of exactly the answers.

An answer is what the model has to produce after the template's header of an assistant's turn, up to its EOS token. A
prompt is tokenized with the header and an answer separately, as in generation, so that training and generation agree
on the tokens. A turn whose prompt begins with all text so far extends the row. Templates that rewrite the history, such
as those that remove the reasoning of earlier turns, start a new row with the history that the model will see.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from transformers import PreTrainedTokenizerBase

from skyrl_gym.runtime.text import describe_error
from skyrl_train.config.sft import SupervisedDataConfig
from skyrl_train.dataset.batch import build_training_batch
from skyrl_train.dataset.demonstrations import Demonstration, read_answers
from skyrl_train.dataset.files import Rows
from skyrl_train.errors import DataError, InvalidRow, SkippedRow
from skyrl_train.types import DrawnPrompt, Segment, TrainingBatch, Trajectory, TrajectoryID

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class TokenRow:
    """Tokens of a conversation, and which of them are trained."""

    token_ids: list[int]
    loss_mask: list[int]  # 1 on answers and their EOS tokens

    def truncate(self, max_length: int, side: str) -> None:
        """Drop tokens on one side."""
        kept = slice(max_length) if side == "right" else slice(-max_length, None)
        self.token_ids, self.loss_mask = self.token_ids[kept], self.loss_mask[kept]
        self.loss_mask[0] = 0

    def segment(self) -> Segment:
        """Return the row as a segment whose response begins with the first trained token."""
        n_prompt = self.loss_mask.index(1)
        mask = self.loss_mask[n_prompt:]
        return Segment(self.token_ids, n_prompt, mask, [0.0] * len(mask))


class ConversationEncoder:
    """An encoder of demonstrations for one tokenizer."""

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        template_kwargs: Mapping[str, Any] | None = None,
        eos_ids: Collection[int] = (),
    ) -> None:
        """Pass `template_kwargs` to the chat template. Turns end with the tokenizer's EOS token or one of `eos_ids`."""
        self._tokenizer = tokenizer
        self._template_kwargs = dict(template_kwargs or {})
        self._eos_ids = {tokenizer.eos_token_id, *eos_ids}

    def encode(self, demonstration: Demonstration) -> list[TokenRow]:
        """Return the rows of a conversation: one, unless the template rewrites the history.

        Raises:
            DataError: the template refuses the conversation, or does not show what has to be trained.
        """
        rows: list[TokenRow] = []
        text = ""  # text of the last row
        for index in range(demonstration.n_context, len(demonstration.messages)):
            if demonstration.messages[index]["role"] != "assistant":
                continue
            prompt, answer = self._render_turn(demonstration, index)
            if rows and prompt.startswith(text):
                row = rows[-1]
                added = self._encode(prompt[len(text) :])
            else:
                rows.append(row := TokenRow([], []))
                added = self._encode(prompt)
            answer_ids, ending = self._encode_answer(answer, demonstration, index)
            row.token_ids += added + answer_ids
            row.loss_mask += [0] * len(added) + [1] * len(answer_ids)
            text = prompt + ending
        for row in rows:
            row.loss_mask[0] = 0  # no token precedes the first one to predict it from
        return rows

    def _render_turn(self, demonstration: Demonstration, index: int) -> tuple[str, str]:
        """Return the prompt of an assistant's turn, with its header, and the text that the template puts after it."""
        messages, tools = demonstration.messages, demonstration.tools
        prompt = self._render(demonstration, messages[:index], tools, adds_header=True)
        text = self._render(demonstration, messages[: index + 1], tools, adds_header=False)
        if text.startswith(prompt):
            answer = text[len(prompt) :]
        else:  # the header may hold more than that of a past turn, such as an empty reasoning
            past = self._render(demonstration, messages[:index], tools, adds_header=False)
            turn = text.removeprefix(past)
            start = turn.find(str(messages[index]["content"]))
            if start < 1 or not (text.startswith(past) and prompt.startswith(past + turn[:start])):
                raise DataError(
                    f"{demonstration.location}: the chat template writes message {index} in another place than after "
                    f"the header of the assistant's turn, {prompt[-40:]!r}, so the answer cannot be separated from "
                    "the prompt; use a template whose generation prompt is the beginning of a turn"
                )
            answer = turn[start:]
        names = [call.get("function", call).get("name") for call in messages[index].get("tool_calls", ())]
        if missing := [name for name in names if str(name) not in answer]:
            raise DataError(
                f"{demonstration.location}: the chat template does not write the call of {missing[0]} in message "
                f"{index}; use a template with tool calls (data.chat_template)"
            )
        return prompt, answer

    def _encode_answer(self, answer: str, demonstration: Demonstration, index: int) -> tuple[list[int], str]:
        """Return the tokens of an answer up to its EOS token, which is added if there is none, and their text."""
        token_ids = self._encode(answer)
        ends = [position for position, token in enumerate(token_ids) if token in self._eos_ids]
        if not ends:  # drop white space that the template adds
            content, stripped = str(demonstration.messages[index]["content"]), answer.rstrip()
            with_blanks = stripped + content[len(content.rstrip()) :]
            answer = with_blanks if answer.startswith(with_blanks) else stripped
            return [*self._encode(answer), self._tokenizer.eos_token_id], answer + str(self._tokenizer.eos_token)
        end_text = str(self._tokenizer.convert_ids_to_tokens(token_ids[ends[0]]))
        if len(ends) > 1 or answer.partition(end_text)[2].strip():
            raise DataError(
                f"{demonstration.location}: message {index} contains {end_text}, the end of a turn, as text; remove "
                "it, since the chat template adds it"
            )
        return token_ids[: ends[0] + 1], answer[: answer.index(end_text) + len(end_text)]

    def _encode(self, text: str) -> list[int]:
        return list(self._tokenizer(text, add_special_tokens=False)["input_ids"]) if text else []

    def _render(
        self, demonstration: Demonstration, messages: Sequence[Mapping[str, Any]], tools: Any, *, adds_header: bool
    ) -> str:
        try:
            return str(
                self._tokenizer.apply_chat_template(
                    [dict(message) for message in messages],
                    tools=tools,
                    tokenize=False,
                    add_generation_prompt=adds_header,
                    **self._template_kwargs,
                )
            )
        except Exception as error:  # the boundary of a template, which may do anything
            roles = ", ".join(message["role"] for message in messages)
            raise DataError(
                f"{demonstration.location}: the chat template refuses messages with the roles {roles or 'none'} "
                f"({describe_error(error)}); change the row, or the template"
            ) from error


Answers = tuple[tuple[Segment, ...], ...]
"""A row of a dataset: the segments of a demonstration, or of the chosen and of the rejected answer to a prompt."""

SegmentReader = Callable[[Sequence[TokenRow]], tuple[Segment, ...]]
"""Returns the segments of an answer, whose rows all have a trained token."""


def build_segments(rows: Sequence[TokenRow]) -> tuple[Segment, ...]:
    """Return a segment for each row."""
    return tuple(row.segment() for row in rows)


def build_rewarded_segments(rows: Sequence[TokenRow], pad_token_id: int) -> tuple[Segment, ...]:
    """Return the segment of an answer's last row, as `build_rewarded_segment`."""
    return (build_rewarded_segment(rows[-1].token_ids, pad_token_id),)


def build_rewarded_segment(token_ids: Sequence[int], pad_token_id: int | None) -> Segment:
    """Return a segment whose only trained token follows the given ones, so that its value is read at their end.

    That is the last token other than the pad token, where models for sequence classification read it. The trained token
    itself, a copy of that, has no effect.
    """
    end = len(token_ids)
    while end > 1 and token_ids[end - 1] == pad_token_id:
        end -= 1
    return Segment([*token_ids[:end], token_ids[end - 1]], end, [1], [0.0])


class SupervisedDataset:
    """The rows of supervised data, of at most `data.max_length` tokens; longer ones are truncated if configured.

    Of more than `max_checked_rows`, only a sample is checked at first. Rows are then tokenized when they are drawn, and
    one that is invalid, too long or without a trained token is skipped.
    """

    def __init__(
        self,
        sources: Sequence[str],
        encoder: ConversationEncoder,
        data: SupervisedDataConfig,
        read_segments: SegmentReader = build_segments,
        n_context: int | None = None,
        max_checked_rows: int | None = None,
    ) -> None:
        """Read, check and tokenize the rows, for a model with a context of `n_context` tokens.

        Raises:
            DataError: a source cannot be read, a row is invalid or too long, or no row has a trained token.
        """
        self._encoder = encoder
        self._data = data
        self._read_segments = read_segments
        self._max_length = data.row_length(n_context)
        self._n_truncated = 0
        self._source = Rows(sources)
        sample = self._source.sample(max_checked_rows)
        encoded = [self._encode(demonstrations) for demonstrations in read_answers(self._source, sample, data)]
        self._rows = [row for row in encoded if row is not None]
        self._is_checked = len(sample) == len(self._source)
        self._report(", ".join(sources), len(encoded))
        if not self._is_checked:
            self._rows = []

    def _report(self, names: str, n_rows: int) -> None:
        """Log the number of rows and what was left out of them; DataError if no row is left."""
        n_dropped = n_rows - len(self._rows)
        if not self._rows:
            raise DataError(
                f"all {n_dropped} rows of {names} lost their answer, because prompts have more than "
                f"data.max_length={self._max_length} tokens; raise it, or set data.truncation=left"
            )
        n_tokens = sum(len(segment.token_ids) for answers in self._rows for answer in answers for segment in answer)
        logger.info("%s: %d rows, %d tokens", names, len(self._rows), n_tokens)
        if not self._is_checked:
            logger.info(
                "They are a sample of %d rows, data.max_checked_rows=%d; each other row is checked when it is drawn",
                *(len(self._source), n_rows),
            )
        if self._n_truncated:
            logger.warning(
                "%s: %d rows were truncated to data.max_length=%d tokens on the %s, and %d dropped, which had no "
                "trained token left",
                *(names, self._n_truncated, self._max_length, self._data.truncation, n_dropped),
            )
        if n_equal := sum(len(answers) == 2 and answers[0] == answers[1] for answers in self._rows):
            logger.warning(
                "%s: %d of %d pairs have equal answers, which teach nothing; remove them",
                *(names, n_equal, len(self._rows)),
            )

    def _encode(self, demonstrations: Sequence[Demonstration]) -> Answers | None:
        """Return the segments of a row; None if an answer has no trained token left."""
        encoded = [self._fit(self._encoder.encode(demonstration), demonstration) for demonstration in demonstrations]
        return tuple(map(self._read_segments, encoded)) if all(encoded) else None

    def _fit(self, rows: Sequence[TokenRow], demonstration: Demonstration) -> list[TokenRow]:
        """Truncate rows to `data.max_length`; return those that have a trained token left."""
        for row in rows:
            if (length := len(row.token_ids)) <= self._max_length:
                continue
            if self._data.truncation == "error":
                raise DataError(
                    f"{demonstration.location} has {length} tokens, more than data.max_length="
                    f"{self._max_length}; raise it, or set data.truncation=right or left"
                )
            row.truncate(self._max_length, self._data.truncation)
            self._n_truncated += 1
        return [row for row in rows if any(row.loss_mask)]

    @cached_property
    def fingerprint(self) -> str:
        """A hash of all rows in their order."""
        if not self._is_checked:
            return self._source.digest
        digest = hashlib.blake2b(digest_size=16)
        for answers in self._rows:
            segments = [segment for answer in answers for segment in answer]
            digest.update(repr([(s.token_ids, s.n_prompt, s.loss_mask) for s in segments]).encode())
        return digest.hexdigest()

    def __len__(self) -> int:
        return len(self._rows) if self._is_checked else len(self._source)

    def __getitem__(self, index: int) -> Answers:
        """Return a row; if not all were checked at first, SkippedRow or InvalidRow for one that cannot be used."""
        if self._is_checked:
            return self._rows[index]
        try:
            (demonstrations,) = read_answers(self._source, [index], self._data)
            answers = self._encode(demonstrations)
        except DataError as error:
            raise InvalidRow(str(error)) from error
        if answers is None:
            raise SkippedRow(
                f"{self._source.location(index)} has no trained token within data.max_length={self._max_length}"
            )
        return answers


def build_supervised_batch(rows: Sequence[DrawnPrompt[Answers]], pad_token_id: int) -> TrainingBatch:
    """Return a batch of the rows' segments. Each answer is a trajectory."""
    return build_training_batch(
        [
            Trajectory(TrajectoryID(str(row.draw), index, row.draw), "", "", segments, stop_reason="stop")
            for row in rows
            for index, segments in enumerate(row.row)
        ],
        pad_token_id,
    )
