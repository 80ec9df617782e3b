"""Text of tokens, for stop strings. The server knows tokens only, but for this."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

from tx.tinker.types import UserError

MOST_STOP_CHARACTERS = 64
"""Of a stop string."""
CHARACTER_BYTES = 4
"""The most that a character has."""
UNKNOWN = "\N{REPLACEMENT CHARACTER}"
"""What bytes say that are no character."""


class Decoder:
    """The tokenizer in a model's folder, read when it is first needed."""

    def __init__(self, folder: Path) -> None:
        self._file = folder / "tokenizer.json"

    def check(self, strings: Sequence[str]) -> None:
        """Whether samples can be stopped at some strings.

        Raises:
            UserError: there is no tokenizer.
        """
        if strings and not self._file.is_file():
            raise UserError(f"stop strings need the model's tokenizer, and {self._file} is not there; give tokens")

    def holds_any(self, tokens: Sequence[int], strings: Sequence[str]) -> bool:
        """Whether the end of what tokens say holds one of some strings.

        A string that the last token completes is in no more tokens than it has bytes. One more is looked at, since some
        tokenizers drop a space at the start. Where these begin in the middle of a character, some cannot decode what
        follows, either: then the rest of the character is looked at, too.
        """
        n_bytes = max(len(string.encode()) for string in strings)
        for n_more in range(1, 1 + CHARACTER_BYTES):
            text = self._tokenizer.decode(list(tokens[-n_bytes - n_more :]), skip_special_tokens=False)
            if any(string in text for string in strings):
                return True
            if not text.startswith(UNKNOWN):
                break
        return False

    @cached_property
    def _tokenizer(self) -> Any:
        from tokenizers import Tokenizer

        return Tokenizer.from_file(str(self._file))
