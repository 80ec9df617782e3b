"""Detect stop strings in tokens. Only this part of the server decodes text."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

from tx.tinker.types import UserError

MAX_STOP_CHARACTERS = 64
"""Maximum length of a stop string."""
CHARACTER_BYTES = 4
"""Maximum bytes of a character in UTF-8."""
UNKNOWN = "\N{REPLACEMENT CHARACTER}"
"""The decoding of bytes that are not a character."""


class StopStringMatcher:
    """The tokenizer in a model's folder, loaded on first use."""

    def __init__(self, folder: Path) -> None:
        self._file = folder / "tokenizer.json"

    def check(self, strings: Sequence[str]) -> None:
        """Check that samples can stop at strings.

        Raises:
            UserError: there is no tokenizer.
        """
        if strings and not self._file.is_file():
            raise UserError(
                f"stop strings need the model's tokenizer, and {self._file} does not exist; use stop tokens"
            )

    def contains_any(self, tokens: Sequence[int], strings: Sequence[str]) -> bool:
        """Return whether the decoded end of the tokens contains one of the strings.

        A string that the last token completes spans at most as many tokens as it has bytes. One more token is decoded,
        since some tokenizers drop a leading space. If these tokens begin inside a character, some tokenizers cannot
        decode what follows, either: then the rest of the character is decoded, too.
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
