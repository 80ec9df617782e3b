"""Tokenized demonstrations, with a loss mask on exactly the answers.

An answer is everything the model must generate after the template's assistant header, up to and including the EOS
token. The prompt (with the header) and the answer are tokenized separately, as in generation, so training and
generation use the same tokens. A turn whose prompt begins with all text so far extends the row. If the template
rewrites the history, e.g. removes the reasoning of earlier turns, the turn starts a new row with the history that the
model will see.
"""

import hashlib
import logging
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from transformers import PreTrainedTokenizerBase

from skyrl_train.config.supervised import SupervisedDataConfig
from skyrl_train.dataset.batch import build_training_batch
from skyrl_train.dataset.demonstrations import Demonstration, read_answers
from skyrl_train.dataset.files import JoinedRows
from skyrl_train.errors import DataError, InvalidRow, SkippedRow
from skyrl_train.media.spans import ImageSpan
from skyrl_train.rendering.template import ChatTemplate
from skyrl_train.types import DrawnPrompt, Segment, StopReason, TrainingBatch, Trajectory, TrajectoryID

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class TokenRow:
    """Tokens of a conversation, the mask of trained tokens, and the images."""

    token_ids: list[int]
    loss_mask: list[int]  # 1 on answers and their EOS tokens
    images: list[ImageSpan] = field(default_factory=list)  # in order

    def truncate(self, max_length: int, side: str) -> None:
        """Drop tokens on one side, and with any token of an image all of its tokens."""
        n_tokens = len(self.token_ids)
        start, end = (0, max_length) if side == "right" else (n_tokens - max_length, n_tokens)
        for span in self.images:
            if span.start < start < span.end:
                start = span.end
            elif span.start < end < span.end:
                end = span.start
        self.token_ids, self.loss_mask = self.token_ids[start:end], self.loss_mask[start:end]
        self.images = [span.shift(-start) for span in self.images if start <= span.start and span.end <= end]
        if self.loss_mask:
            self.loss_mask[0] = 0

    def segment(self) -> Segment:
        """Return the row as a segment whose response begins with the first trained token."""
        n_prompt = self.loss_mask.index(1)
        mask = self.loss_mask[n_prompt:]
        return Segment(self.token_ids, n_prompt, mask, [0.0] * len(mask), images=self.images)


class ConversationEncoder:
    """Tokenizes demonstrations with a tokenizer's chat template."""

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        template_kwargs: Mapping[str, Any] | None = None,
        eos_ids: Collection[int] = (),
    ) -> None:
        """Set up the chat template with `template_kwargs`. Turns end with the EOS token or one of `eos_ids`."""
        self._tokenizer = tokenizer
        self._template = ChatTemplate(tokenizer, variables=template_kwargs)
        self._end_ids = {tokenizer.eos_token_id, *eos_ids}

    def find_text_model(self) -> str | None:
        """Return the path of the tokenizer's model if it reads only text, or None if it reads images."""
        return self._template.find_text_model()

    def encode(self, demonstration: Demonstration) -> list[TokenRow]:
        """Tokenize a conversation with read images. The result has one row, unless the template rewrites the history.

        Raise DataError if the template rejects the conversation or does not render an answer.
        """
        try:
            self._template.check_roles(demonstration.messages)
            self._template.check_written(demonstration.messages, demonstration.tools)
            return self._encode(demonstration)
        except DataError as error:
            raise DataError(f"{demonstration.location}: {error}") from error

    def _encode(self, demonstration: Demonstration) -> list[TokenRow]:
        rows: list[TokenRow] = []
        text, n_written = "", 0  # text of the last row, and its number of messages
        messages, tools = demonstration.messages, demonstration.tools
        for index in demonstration.trained:
            start = demonstration.reply_start if index == demonstration.n_context else None
            if not rows and tools:
                self._template.check_tools(messages[: index or 1], tools)  # the reply may be the first message
            prompt, whole_answer = self._template.turn(messages, index, tools, start)
            if rows and prompt.startswith(text):
                row, new = rows[-1], messages[n_written:index]
                added = self._template.encode_after(text, self._template.expand(prompt[len(text) :], new))
            else:
                rows.append(row := TokenRow([], []))
                new = messages[:index]
                added = self._template.encode(self._template.expand(prompt, new))
            row.images += [span.shift(len(row.token_ids)) for span in self._template.find_spans(added, new)]
            answer_ids, answer = self._encode_answer(prompt, whole_answer, messages[index], index)
            row.token_ids += added + answer_ids
            row.loss_mask += [0] * len(added) + [1] * len(answer_ids)
            text, n_written = prompt + answer, index + 1
        for row in rows:
            row.loss_mask[0] = 0  # nothing precedes the first token, so it cannot be predicted
        return rows

    def _encode_answer(self, prompt: str, answer: str, message: Mapping[str, Any], index: int) -> tuple[list[int], str]:
        """Return tokens and text of an answer up to its end-of-turn token. Append the EOS token if there is none.

        Templates add text after the end of a turn: ChatML a "\\n", Phi-3.5 a "\\n" and, after the last turn, its EOS
        token. The model stops at the first end token, so cut there. Search only the trailing special tokens and white
        space.
        """
        token_ids = self._template.encode_after(prompt, answer)
        end_texts = self._tokenizer.convert_ids_to_tokens(sorted(self._end_ids))  # None for ids without a token
        if written := next((end for end in end_texts if end and end in str(message)), None):
            raise DataError(
                f"message {index} contains {written}, the end of a turn, as text; remove it, since the chat template "
                "adds it"
            )
        n_tail = 0
        special_ids = {*self._tokenizer.all_special_ids, *self._end_ids}
        while n_tail < len(token_ids):
            token_id = token_ids[-1 - n_tail]
            if token_id not in special_ids and str(self._tokenizer.decode([token_id])).strip():
                break
            n_tail += 1
        ends = [i for i in range(len(token_ids) - n_tail, len(token_ids)) if token_ids[i] in self._end_ids]
        if ends:
            end_text = str(self._tokenizer.convert_ids_to_tokens(token_ids[ends[0]]))
            return token_ids[: ends[0] + 1], answer[: answer.index(end_text) + len(end_text)]
        content, stripped = str(message["content"]), answer.rstrip()  # drop white space that the template adds
        with_blanks = stripped + content[len(content.rstrip()) :]
        answer = with_blanks if answer.startswith(with_blanks) else stripped
        answer_ids = [*self._template.encode_after(prompt, answer), self._tokenizer.eos_token_id]
        return answer_ids, answer + str(self._tokenizer.eos_token)


Answers = tuple[tuple[Segment, ...], ...]
"""A dataset row: the segments of one demonstration, or of the chosen and the rejected answer."""

SegmentReader = Callable[[Sequence[TokenRow]], tuple[Segment, ...]]
"""A function that turns an answer's rows, each with a trained token, into segments."""


def build_segments(rows: Sequence[TokenRow]) -> tuple[Segment, ...]:
    """Return one segment per row."""
    return tuple(row.segment() for row in rows)


def build_rewarded_segment(
    token_ids: Sequence[int], pad_token_id: int | None, images: Sequence[ImageSpan] = ()
) -> Segment:
    """Return a segment on which a value head reads the last non-pad token, as sequence-classification models do.

    Values are read one position before a trained token, so append a copy of the last token and train only on the copy:
    [5, 6, 7, pad] becomes [5, 6, 7, 7], and the value is read at the first 7. The copy itself has no effect.
    """
    end = len(token_ids)
    while end > 1 and token_ids[end - 1] == pad_token_id:
        end -= 1
    return Segment([*token_ids[:end], token_ids[end - 1]], end, [1], [0.0], images=list(images))


class SupervisedDataset:
    """Tokenized rows of supervised data, each of at most `data.max_length` tokens.

    `data.truncation` decides whether longer rows are truncated or rejected. If there are more than `max_checked_rows`,
    only a sample is checked up front, so all rows are tokenized when they are drawn, and skipped if they are invalid,
    too long or without a trained token. Rows with images are always tokenized again when they are drawn, because their
    images may not fit into memory.
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
        """Read, check and tokenize the rows for a model with a context of `n_context` tokens.

        Raise DataError if a source or an image cannot be read, a row is invalid or too long, or no row has a trained
        token, and ConfigError if a row has images and the model's image processor cannot be loaded.
        """
        self._encoder = encoder
        self._data = data
        self._read_segments = read_segments
        self._max_length = data.row_length(n_context)
        self._n_truncated = self._n_tokens = self._n_equal = 0  # of the checked rows
        self._source = JoinedRows(sources)
        sample = self._source.sample(max_checked_rows)
        self._rows: list[Answers | int] = []  # or the index in the source, for rows with images
        digest = hashlib.blake2b(digest_size=16)
        for index, demonstrations in zip(sample, self._read(sample), strict=True):
            if (row := self._encode(demonstrations)) is not None:
                segments = [segment for answer in row for segment in answer]
                self._rows.append(index if any(segment.images for segment in segments) else row)
                self._n_tokens += sum(len(segment.token_ids) for segment in segments)
                self._n_equal += len(row) == 2 and row[0] == row[1]
                content = [(d.messages, d.n_context, d.tools, d.reply_start) for d in demonstrations]
                digest.update(repr(content).encode())
        self._is_checked = len(sample) == len(self._source)
        self._report(", ".join(sources), len(sample))
        if not self._is_checked:
            self._rows.clear()
        self.fingerprint = digest.hexdigest() if self._is_checked else self._source.digest
        """A hash of all rows in their order, not of their tokens, because a template may insert today's date."""

    def _report(self, names: str, n_rows: int) -> None:
        """Log the number of rows and what was truncated or dropped. DataError if no row is left."""
        n_dropped = n_rows - len(self._rows)
        if not self._rows:
            raise DataError(
                f"all {n_dropped} rows of {names} lost their answer, because prompts have more than "
                f"data.max_length={self._max_length} tokens; raise it, or set data.truncation=left"
            )
        logger.info("%s: %d rows, %d tokens", names, len(self._rows), self._n_tokens)
        if not self._is_checked:
            logger.info(
                "They are a sample of %d rows (data.max_checked_rows=%d); other rows are checked when they are drawn",
                *(len(self._source), n_rows),
            )
        if self._n_truncated:
            logger.warning(
                "%s: truncated %d rows to data.max_length=%d tokens on the %s, and dropped %d rows without a trained "
                "token left",
                *(names, self._n_truncated, self._max_length, self._data.truncation, n_dropped),
            )
        if self._n_equal:
            logger.warning(
                "%s: %d of %d pairs have equal answers, so they teach nothing; remove them",
                *(names, self._n_equal, len(self._rows)),
            )

    def _read(self, indices: Sequence[int]) -> Iterator[list[Demonstration]]:
        """Yield the answers of rows, with their images."""
        for answers in read_answers(self._source, indices, self._data, self._encoder.find_text_model):
            yield [answer.read_images() for answer in answers]

    def _encode(self, demonstrations: Sequence[Demonstration]) -> Answers | None:
        """Return the segments of a row, or None if an answer has no trained token left."""
        encoded = [self._fit(self._encoder.encode(demonstration), demonstration) for demonstration in demonstrations]
        return tuple(map(self._read_segments, encoded)) if all(encoded) else None

    def _fit(self, rows: Sequence[TokenRow], demonstration: Demonstration) -> list[TokenRow]:
        """Truncate rows to `data.max_length` and return the rows with a trained token left."""
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

    def __len__(self) -> int:
        return len(self._rows) if self._is_checked else len(self._source)

    def __getitem__(self, index: int) -> Answers:
        """Return a row.

        A row not checked up front may raise InvalidRow, or SkippedRow if it has no trained token. So may a row whose
        images have changed.
        """
        row = self._rows[index] if self._is_checked else index
        if not isinstance(row, int):
            return row
        try:
            (demonstrations,) = self._read([row])
            answers = self._encode(demonstrations)
        except DataError as error:
            raise InvalidRow(str(error)) from error
        if answers is None:
            raise SkippedRow(
                f"{demonstrations[0].location} has no trained token within data.max_length={self._max_length}"
            )
        return answers


def build_supervised_batch(rows: Sequence[DrawnPrompt[Answers]], pad_token_id: int) -> TrainingBatch:
    """Build a batch from the rows' segments. Each answer is one trajectory."""
    return build_training_batch(
        [
            Trajectory(TrajectoryID(str(row.draw), index, row.draw), "", "", segments, stop_reason=StopReason.STOP)
            for row in rows
            for index, segments in enumerate(row.row)
        ],
        pad_token_id,
    )
