"""Documents of the retrieval server."""

import gzip
import json
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any, TypedDict

TEXT_FIELDS = ("contents", "text", "content", "passage")


class Document(TypedDict):
    """A document with its id and text."""

    id: str
    contents: str


def read_corpus(file: Path) -> list[Document]:
    """Read the documents of a JSON Lines file, plain or compressed (`.gz`).

    A line is `{"id": …, "contents": …}`. `text`, `content` or `passage` may replace `contents`. The `title`, if any, is
    then added on a line before the text. Documents without an id get their line number.

    Raises:
        ValueError: a line has any other format, or the file has no lines.
    """
    with _open(file) as lines:
        documents = list(_documents(lines, file))
    if not documents:
        raise ValueError(f"the corpus {file} has no documents")
    return documents


def _open(file: Path) -> IO[str]:
    if file.suffix == ".gz":
        return gzip.open(file, "rt", encoding="utf-8")
    return file.open(encoding="utf-8")


def _documents(lines: IO[str], file: Path) -> Iterator[Document]:
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            record = json.loads(line)
        except ValueError as error:
            raise ValueError(f"line {number} of the corpus {file} is not JSON: {error}") from error
        yield _parse_document(record, f"line {number} of the corpus {file}", str(number))


def _parse_document(record: Any, where: str, number: str) -> Document:
    if not isinstance(record, dict):
        raise ValueError(f'{where} is not an object; use {{"id": …, "contents": …}}')
    name = next((name for name in TEXT_FIELDS if isinstance(record.get(name), str)), None)
    if name is None:
        raise ValueError(f"{where} has no text; its keys are {', '.join(record) or 'none'}; add contents")
    title = record.get("title")
    heading = f"{title}\n" if name != "contents" and isinstance(title, str) and title else ""
    return Document(id=str(record.get("id", number)), contents=heading + record[name])
