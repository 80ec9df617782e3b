"""The recorded conversations of a session, as tokens.

A request repeats the whole history, as messages, text or token ids. If that history was recorded, the prompt is the
recorded tokens plus the tokens of the new part. Sampled text is never tokenized again.

    The request continues                       and is recorded
    the end of a row                            in that row
    a reply that already has a continuation     in a new row, which starts with the tokens up to that reply
    no recorded reply                           in a new row
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from hashlib import blake2b
from itertools import accumulate
from typing import Any

from skyrl_train.generators.chat_template import ChatEncoder, Messages, dump_json
from skyrl_train.generators.conversation import TokenConversation
from skyrl_train.inference_engines.base import EngineResult
from skyrl_train.media.spans import ImageSpan
from skyrl_train.types import Segment
from skyrl_train.types.stop_reasons import StopReason

Digest = bytes


@dataclass(frozen=True, slots=True)
class ReplyEnd:
    """The end of a reply: the first `n_tokens` of row `row`."""

    row: int
    n_tokens: int
    was_stopped: bool  # False: truncated or aborted


@dataclass(frozen=True, slots=True)
class Prompt:
    """The prompt tokens of one request, and what identifies its history."""

    token_ids: list[int]
    images: tuple[ImageSpan, ...] = ()
    origin: ReplyEnd | None = None  # the reply that it continues
    digest: Digest | None = None  # hash of its messages, for a chat
    text: str | None = None  # for a text completion


class Recording(TokenConversation):
    """The parallel conversations of a session. A request continues one by repeating its history.

    Replies are recorded when the engine finishes them, including truncated and aborted ones.
    """

    def __init__(self, chat: ChatEncoder, *, ends_stopped_turns: bool = True) -> None:
        super().__init__(chat, None, ends_stopped_turns=ends_stopped_turns)
        self._ends: list[ReplyEnd] = []
        self._by_digest: dict[Digest, ReplyEnd] = {}
        self._by_text: list[tuple[str, ReplyEnd]] = []

    def chat_prompt(self, messages: Messages, chat: ChatEncoder, variant: str = "") -> Prompt:
        """Return the prompt of messages rendered by `chat`. `variant` identifies the template variables."""
        start = blake2b(variant.encode(), digest_size=16).digest()
        digests = list(accumulate(messages, _next_digest, initial=start))  # of the first 0, 1, 2, … messages
        for n in range(len(messages), 0, -1):
            if end := self._by_digest.get(digests[n]):
                known, ends_turn = self._tokens_until(end), self._ends_stopped_turns or not end.was_stopped
                new = chat.observation_ids(messages[n:], known[-1], ends_turn=ends_turn)
                images = [span.shift(len(known)) for span in chat.find_spans(new, messages[n:])]
                return Prompt(known + new, (*self._images_until(end), *images), end, digests[-1])
        token_ids = chat.history_ids(messages)
        return Prompt(token_ids, tuple(chat.find_spans(token_ids, messages)), digest=digests[-1])

    def text_prompt(self, text: str) -> Prompt:
        """Return the prompt of plain text."""
        matches = [(len(known), end) for known, end in self._by_text if text.startswith(known)]
        if not matches:
            return Prompt(self._chat.encode(text), text=text)
        n_known, end = max(matches, key=lambda pair: pair[0])
        known_ids = self._tokens_until(end)
        token_ids = known_ids + self._chat.encode_after(known_ids, text[n_known:])
        return Prompt(token_ids, self._images_until(end), end, text=text)

    def token_prompt(self, token_ids: Sequence[int]) -> Prompt:
        """Return the prompt of token ids."""
        matches = [end for end in self._ends if self._tokens_until(end) == list(token_ids[: end.n_tokens])]
        if not matches:
            return Prompt(list(token_ids))
        end = max(matches, key=lambda end: end.n_tokens)
        return Prompt(list(token_ids), self._images_until(end), end)

    def extends_row(self, prompt: Prompt) -> bool:
        """Return True if the prompt continues the end of a row."""
        return prompt.origin is not None and len(self.rows[prompt.origin.row].token_ids) == prompt.origin.n_tokens

    def record(self, prompt: Prompt, result: EngineResult, reply: str) -> int:
        """Record a reply and return the index of its row. `reply` is the text sent to the agent."""
        if prompt.origin is not None and self.extends_row(prompt):
            index, n_known = prompt.origin.row, prompt.origin.n_tokens
            images = [span.shift(-n_known) for span in prompt.images if span.start >= n_known]
            self.rows[index].append_observed(prompt.token_ids[n_known:], images)
        else:
            index = len(self.rows)
            self.rows.append(Segment.start(list(prompt.token_ids), prompt.images))
        self._append_turn(index, result)
        end = ReplyEnd(index, len(self.rows[index].token_ids), result.stop_reason == StopReason.STOP)
        self._ends.append(end)
        if prompt.digest is not None:
            self._by_digest[_next_digest(prompt.digest, {"role": "assistant", "content": reply})] = end
        if prompt.text is not None:
            # Unlike `reply`, `text` includes the stop string. A client repeats text, so a last token without text (EOS)
            # cannot be matched: leave it out.
            last = result.token_ids[-1:]
            n_hidden = 0 if self._chat.decode_after(last) else len(last)
            text = prompt.text + self._chat.decode_after(result.token_ids)
            self._by_text.append((text, replace(end, n_tokens=end.n_tokens - n_hidden)))
        return index

    def finish(self) -> None:
        """Drop everything after the last turn of each row, and move the row of the last turn to the end."""
        super().finish()
        if not self.turns:
            return
        last = self.turns[-1].segment
        order = [*(index for index in range(len(self.rows)) if index != last), last]
        self.rows = [self.rows[index] for index in order]
        for turn in self.turns:
            turn.segment = order.index(turn.segment)

    def _tokens_until(self, end: ReplyEnd) -> list[int]:
        return self.rows[end.row].token_ids[: end.n_tokens]

    def _images_until(self, end: ReplyEnd) -> tuple[ImageSpan, ...]:
        return tuple(span for span in self.rows[end.row].images if span.end <= end.n_tokens)


def _next_digest(digest: Digest, message: Any) -> Digest:
    """Return the hash of a history with one more message. White space around a reply is ignored, as agents strip it."""
    if message["role"] == "assistant":
        message = {**message, "content": message["content"].strip()}
    return blake2b(digest + dump_json(message, sort_keys=True).encode(), digest_size=16).digest()
