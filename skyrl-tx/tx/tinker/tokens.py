"""Text of tokens, for stop strings. The server knows tokens only, but for this."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

LOOKED_AT = 64
"""Of the last tokens; a stop string is not longer than these."""


class Decoder:
    """The tokenizer in a model's folder, read when it is first needed."""

    def __init__(self, folder: Path) -> None:
        self._file = folder / "tokenizer.json"

    @property
    def is_there(self) -> bool:
        """Whether the folder has one."""
        return self._file.is_file()

    def holds_any(self, tokens: Sequence[int], strings: Sequence[str]) -> bool:
        """Whether the end of what tokens say holds one of some strings."""
        text = self._tokenizer.decode(list(tokens[-LOOKED_AT:]), skip_special_tokens=False)
        return any(string in text for string in strings)

    @cached_property
    def _tokenizer(self) -> Any:
        from tokenizers import Tokenizer

        return Tokenizer.from_file(str(self._file))
