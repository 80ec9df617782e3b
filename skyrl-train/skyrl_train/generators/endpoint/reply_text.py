"""From sampled tokens to the text of a reply: whole, or piece by piece as they come."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from skyrl_train.inference_engines.base import EngineResult

Decode = Callable[[Sequence[int]], str]

INCOMPLETE = "\N{REPLACEMENT CHARACTER}"
"""What the bytes of a character decode to while some of them are missing."""


def reply_text(decode: Decode, result: EngineResult, stops: Sequence[str], *, keeps_stop: bool) -> str:
    """The text of a whole reply, up to the stop string that ended it."""
    text = decode(result.token_ids)
    if keeps_stop or not stops or result.stop_reason != "stop":
        return text
    n_before = len(decode(result.token_ids[:-1]).rstrip(INCOMPLETE))  # the last token completed the stop string
    found = [text.find(stop, max(0, n_before - len(stop) + 1)) for stop in stops]
    return text[: min((start for start in found if start >= 0), default=len(text))]


class TextStream:
    """Turns tokens into text as they come. The pieces, joined, are the text of the whole reply.

    Held back: bytes of a character that is not complete, and what may turn out to be part of a stop string.
    """

    def __init__(self, decode: Decode, stops: Sequence[str], *, keeps_stop: bool) -> None:
        self._decode = decode
        self._stops = stops
        self._keeps_stop = keeps_stop
        self._waits = bool(stops) and not keeps_stop
        self._n_held = max((len(stop) for stop in stops), default=1) - 1  # may begin a stop string
        self._token_ids: list[int] = []
        self._window = 0  # where the tokens begin that are decoded together with new ones
        self._n_read = 0  # tokens that are in `_text` or `_pending`
        self._pending = ""
        self.text = ""  # handed out so far

    def push(self, token_ids: Sequence[int]) -> str:
        """The text that new tokens add, as far as it is certain."""
        if not token_ids:
            return ""
        self._token_ids += token_ids
        before = self._decode(self._token_ids[self._window : self._n_read])
        now = self._decode(self._token_ids[self._window :])
        if now.endswith(INCOMPLETE):
            return ""
        n_certain = len(self._pending) - self._n_held  # these tokens are not the ones that end the reply
        self._pending += now[len(before) :]
        self._window, self._n_read = self._n_read, len(self._token_ids)
        return self._hand_out(self._pending[: max(0, n_certain)] if self._waits else self._pending)

    def finish(self, result: EngineResult) -> str:
        """The rest."""
        whole = reply_text(self._decode, result, self._stops, keeps_stop=self._keeps_stop)
        return self._hand_out(whole[len(self.text) :] if whole.startswith(self.text) else "")

    def _hand_out(self, piece: str) -> str:
        self._pending = self._pending[len(piece) :]
        self.text += piece
        return piece
