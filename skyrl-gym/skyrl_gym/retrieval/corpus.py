"""The documents of a retrieval server."""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any, TypedDict

TEXT_FIELDS = ("contents", "text", "content", "passage")


class Document(TypedDict):
    """One document: what it is called, and what a model reads of it."""

    id: str
    contents: str


def read_corpus(file: Path) -> list[Document]:
    """The documents in a file of JSON lines, which may be compressed (`.gz`).

    A line is `{"id": …, "contents": …}`. `text`, `content` or `passage` will do for `contents`, before which a `title`
    is written on a line of its own; without an id, it is the number of the line.

    Raises:
        ValueError: a line that is none of this, or no line at all.
    """
    with _opened(file) as lines:
        documents = list(_documents(lines, file))
    if not documents:
        raise ValueError(f"the corpus {file} has no documents")
    return documents


def _opened(file: Path) -> IO[str]:
    if file.suffix == ".gz":
        return gzip.open(file, "rt", encoding="utf-8")
    return file.open(encoding="utf-8")


def _documents(lines: IO[str], file: Path) -> Iterator[Document]:
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            told = json.loads(line)
        except ValueError as error:
            raise ValueError(f"line {number} of the corpus {file} is not JSON: {error}") from error
        yield _document(told, f"line {number} of the corpus {file}", str(number))


def _document(told: Any, where: str, number: str) -> Document:
    if not isinstance(told, dict):
        raise ValueError(f'{where} is not an object; write {{"id": …, "contents": …}}')
    name = next((name for name in TEXT_FIELDS if isinstance(told.get(name), str)), None)
    if name is None:
        raise ValueError(f"{where} has no text; its keys are {', '.join(told) or 'none'}, and contents is needed")
    title = told.get("title")
    heading = f"{title}\n" if name != "contents" and isinstance(title, str) and title else ""
    return Document(id=str(told.get("id", number)), contents=heading + told[name])
