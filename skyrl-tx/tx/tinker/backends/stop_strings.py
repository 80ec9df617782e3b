"""Detect stop strings in sampled tokens. Only this part of the server decodes text."""

from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

from tx.tinker.types import UserError

MAX_STOP_CHARACTERS = 64
"""Maximum length of a stop string."""
MAX_CHARACTER_BYTES = 4
"""Maximum bytes of a UTF-8 character."""
UNKNOWN = "\N{REPLACEMENT CHARACTER}"
"""Decoding of bytes that are not a character."""


class StopStringMatcher:
    """Matcher of stop strings, with the tokenizer in a model's folder. The tokenizer is loaded on first use."""

    def __init__(self, folder: Path) -> None:
        self._file = folder / "tokenizer.json"

    def check(self, strings: Sequence[str]) -> None:
        """Check that samples can stop at strings.

        Raises:
            UserError: there is no tokenizer.
        """
        if strings and not self._file.is_file():
            raise UserError(
                f"stop strings need the model's tokenizer, but {self._file} does not exist; use stop tokens"
            )

    def contains_any(self, tokens: Sequence[int], strings: Sequence[str]) -> bool:
        """Return True if the decoded end of the tokens contains one of the strings.

        A string that the last token completes spans at most as many tokens as it has bytes: the 4 bytes of "stop" are
        in the last 4 tokens. One more token is decoded, since some tokenizers drop a leading space. If these tokens
        begin inside a multi-byte character, some tokenizers cannot decode the text after it either. In that
        case, the tokens before are decoded too, back to the start of the character.
        """
        n_bytes = max(len(string.encode()) for string in strings)
        for n_more in range(1, 1 + MAX_CHARACTER_BYTES):
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
