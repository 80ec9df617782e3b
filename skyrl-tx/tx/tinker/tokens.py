"""Text of tokens, for stop strings. The server knows tokens only, but for this."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

from tx.tinker.types import UserError

LOOKED_AT = 64
"""Of the last tokens; a stop string is not longer than these."""


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
        """Whether the end of what tokens say holds one of some strings."""
        text = self._tokenizer.decode(list(tokens[-LOOKED_AT:]), skip_special_tokens=False)
        return any(string in text for string in strings)

    @cached_property
    def _tokenizer(self) -> Any:
        from tokenizers import Tokenizer

        return Tokenizer.from_file(str(self._file))
