"""Convert dataset rows to training data: tokens and loss weights."""

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from jinja2 import TemplateError

from tx.tinker.types import Datum, UserError

ROW_FORMATS = "'messages' (a list with role and content), 'prompt' and 'completion', or 'text'"
Message = Mapping[str, Any]


def read_rows(file: Path) -> list[Mapping[str, Any]]:
    """Read the rows of a `.jsonl`, `.json` or `.parquet` file.

    Raises:
        UserError: the file is missing, malformed or empty, or a row is not an object. The message names the position.
    """
    if not file.is_file():
        raise UserError(f"--dataset {file}: file not found")
    try:
        rows = _read(file)
    except ValueError as error:
        raise UserError(f"--dataset {file} is not a valid {file.suffix or '.jsonl'} file: {error}") from error
    if not rows:
        raise UserError(f"--dataset {file} has no rows")
    for number, row in enumerate(rows, start=1):
        if not isinstance(row, Mapping):
            raise UserError(f"--dataset {file}, row {number} is {str(row)[:100]!r}; a row has {ROW_FORMATS}")
    return rows


def _read(file: Path) -> list[Mapping[str, Any]]:
    if file.suffix == ".parquet":
        import pyarrow.parquet

        table: list[Mapping[str, Any]] = pyarrow.parquet.read_table(file).to_pylist()
        return table
    text = file.read_text("utf-8")
    if file.suffix == ".json":
        content = json.loads(text)
        if not isinstance(content, list):
            raise UserError(f"--dataset {file} is not a list of rows; put one row on each line and name it .jsonl")
        return content
    rows = []
    lines = text.split("\n")  # not splitlines(): strings may contain other line separators
    for number, line in enumerate(lines, start=1):
        try:
            rows += [json.loads(line)] if line.strip() else []
        except json.JSONDecodeError as error:
            raise ValueError(f"line {number}: {error}") from error
    return rows


class ExampleBuilder:
    """A converter from rows to data, with a model's tokenizer and chat template."""

    def __init__(self, folder: Path, max_length: int) -> None:
        """Load the tokenizer in `folder`. Texts are truncated to `max_length` + 1 tokens, i.e. `max_length` targets."""
        from transformers import AutoTokenizer

        self._tokenizer = AutoTokenizer.from_pretrained(folder)
        self._max_length = max_length

    def convert(self, row_number: int, row: Mapping[str, Any]) -> list[Datum]:
        """Convert a row to one datum, or to several if the chat template rewrites earlier replies.

        It may strip their reasoning, for example. Data without a trained token within `max_length` are dropped.

        Raises:
            UserError: the row has an unknown format or no trained token, or the chat template rejects it.
        """
        present = {name: value for name, value in row.items() if value is not None}  # parquet fills columns with null
        try:
            data = [self._datum(text, spans) for text, spans in self._render_row(present)]
        except TemplateError as error:
            raise UserError(f"row {row_number}: the chat template rejects it: {error}; correct the row") from error
        except KeyError as error:
            raise UserError(f"row {row_number}: a message has no {error}; add it") from error
        except TypeError as error:
            raise UserError(f"row {row_number}: {error}; a row has {ROW_FORMATS}") from error
        except ValueError as error:
            raise UserError(f"row {row_number}: {error}") from error
        trained = [datum for datum in data if datum.inputs["weights"].any()]
        if not trained:
            raise UserError(
                f"row {row_number}: no trained token within --max-length {self._max_length}; raise --max-length, or "
                "remove the row"
            )
        return trained

    def _render_row(self, row: Mapping[str, Any]) -> Iterator[tuple[str, list[tuple[int, int]]]]:
        """Yield a row's texts, each with the spans (start, end) of its trained characters."""
        if "messages" in row:
            yield from self._conversation(row["messages"], is_last_only=False)
        elif "prompt" in row and "completion" in row and not isinstance(row["prompt"], str):
            reply = row["completion"]
            replies = [{"role": "assistant", "content": reply}] if isinstance(reply, str) else reply
            yield from self._conversation([*row["prompt"], *replies], is_last_only=True)
        elif "prompt" in row and "completion" in row:
            end = self._tokenizer.eos_token or ""
            text = row["prompt"] + row["completion"] + end
            yield text, [(len(row["prompt"]), len(text))]
        elif isinstance(row.get("text"), str):
            yield row["text"] + (self._tokenizer.eos_token or ""), [(0, len(row["text"]) + 1)]
        else:
            raise ValueError(f"its columns are {', '.join(row) or 'empty'}; a row has {ROW_FORMATS}")

    def _conversation(
        self, messages: Sequence[Message], *, is_last_only: bool
    ) -> Iterator[tuple[str, list[tuple[int, int]]]]:
        text = ""
        spans: list[tuple[int, int]] = []
        for i, message in enumerate(messages):
            if message["role"] != "assistant" or (is_last_only and i < len(messages) - 1):
                continue
            before = self._render(messages[:i], add_generation_prompt=True)
            after = self._render(messages[: i + 1])
            if not after.startswith(before):
                raise ValueError("the chat template starts a reply without its generation prompt; use another template")
            if spans and not before.startswith(text):
                yield text, spans
                spans = []
            text = after
            spans.append((len(before), len(after)))
        if not spans:
            raise ValueError("no assistant message to train on; end the row with one")
        yield text, spans

    def _render(self, messages: Sequence[Message], *, add_generation_prompt: bool = False) -> str:
        plain = [dict(message) for message in messages]
        return str(
            self._tokenizer.apply_chat_template(plain, tokenize=False, add_generation_prompt=add_generation_prompt)
        )

    def _datum(self, text: str, spans: Sequence[tuple[int, int]]) -> Datum:
        encoded = self._tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
        tokens = np.asarray(encoded["input_ids"][: self._max_length + 1], np.int32)
        starts = [start for start, _ in encoded["offset_mapping"]][: len(tokens)]
        weights = np.asarray([any(a <= start < b for a, b in spans) for start in starts], np.float32)
        return Datum(tokens[:-1], {"target_tokens": tokens[1:], "weights": weights[1:]})
