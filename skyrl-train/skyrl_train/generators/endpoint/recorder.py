"""What an agent and the model said to each other, as tokens, however the agent puts its requests.

A request names the whole history again, as messages, as text or as token ids. Where it repeats what was recorded, the
next prompt is made of the recorded tokens and of the new part alone: nothing that was sampled is tokenised again.

    request ─ same history → the row goes on
            ─ an earlier moment of it, or a moment where another reply went on → a new row that begins with its tokens
            ─ anything else → a new row
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from hashlib import blake2b
from typing import Any

from skyrl_train.generators.chat_template import ChatEncoder, Messages
from skyrl_train.generators.conversation import Place, TokenConversation
from skyrl_train.generators.rollout import TurnRecord
from skyrl_train.inference_engines.base import EngineResult

Digest = bytes


@dataclass(frozen=True, slots=True)
class Moment:
    """The end of a reply: the first `n_tokens` of row `row`."""

    row: int
    n_tokens: int
    was_stopped: bool = True  # by something else than its length


@dataclass(frozen=True, slots=True)
class Prompt:
    """What the model reads for one request, and how the request told it."""

    token_ids: list[int]
    origin: Moment | None = None  # what it goes on with
    digest: Digest | None = None  # of the messages, where it was told as messages
    text: str | None = None  # where it was told as text


class Recording(TokenConversation):
    """Conversations side by side, which requests continue by repeating what was said.

    A reply is recorded when it is complete; a request that was given up leaves no trace.
    """

    def __init__(self, chat: ChatEncoder, *, ends_stopped_turns: bool = True) -> None:
        """`ends_stopped_turns`: see `TokenConversation`."""
        super().__init__(chat, None, ends_stopped_turns=ends_stopped_turns)
        self.turns: list[TurnRecord] = []
        self._moments: list[Moment] = []
        self._by_digest: dict[Digest, Moment] = {}
        self._by_text: list[tuple[str, Moment]] = []

    def chat_prompt(self, messages: Messages, chat: ChatEncoder, variant: str = "") -> Prompt:
        """The prompt of messages that `chat` renders; `variant` tells it from other ways to render them."""
        digests = _digests(variant, messages)
        for n in range(len(messages), 0, -1):
            if moment := self._by_digest.get(digests[n - 1]):
                token_ids = self._until(moment)
                ends_turn = self._ends_stopped_turns or not moment.was_stopped
                token_ids += chat.observation_ids(messages[n:], token_ids[-1], ends_turn=ends_turn)
                return Prompt(token_ids, moment, digests[-1])
        return Prompt(chat.prompt_ids(messages), digest=digests[-1])

    def text_prompt(self, text: str) -> Prompt:
        """The prompt of plain text."""
        told = [(len(known), moment) for known, moment in self._by_text if text.startswith(known)]
        if not told:
            return Prompt(self._chat.encode(text), text=text)
        n_told, moment = max(told, key=lambda pair: pair[0])
        return Prompt(self._until(moment) + self._chat.encode(text[n_told:]), moment, text=text)

    def token_prompt(self, token_ids: Sequence[int]) -> Prompt:
        """The prompt of token ids."""
        told = [moment for moment in self._moments if self._until(moment) == list(token_ids[: moment.n_tokens])]
        return Prompt(list(token_ids), max(told, key=lambda moment: moment.n_tokens, default=None))

    def goes_on(self, prompt: Prompt) -> bool:
        """Whether it continues a row that nobody else has continued meanwhile."""
        return prompt.origin is not None and len(self.rows[prompt.origin.row].token_ids) == prompt.origin.n_tokens

    def add(self, prompt: Prompt, result: EngineResult, reply: str) -> int:
        """Record a reply, and `reply` as the text of it that the agent was given; returns its row."""
        if prompt.origin is not None and self.goes_on(prompt):
            index = prompt.origin.row
            self.rows[index].append_observed(prompt.token_ids[prompt.origin.n_tokens :])
        else:
            index = len(self.rows)
            self._begin_row(list(prompt.token_ids))
        row = self.rows[index]
        start = row.response_length
        row.append_sampled(result.token_ids, result.logprobs, result.sampling_logprobs)
        self.places.append(Place(index, start, row.response_length))
        self.turns.append(TurnRecord(result, len(prompt.token_ids)))
        moment = Moment(index, len(row.token_ids), result.stop_reason == "stop")
        self._moments.append(moment)
        if prompt.digest is not None:
            self._by_digest[_next_digest(prompt.digest, {"role": "assistant", "content": reply})] = moment
        if prompt.text is not None:
            self._by_text.append(self._as_text(prompt.text, result, moment))
        return index

    def finish(self) -> None:
        """See `TokenConversation.finish`. The row of the last turn comes last: it speaks for the trajectory."""
        super().finish()
        if not self.places:
            return
        last = self.places[-1].row
        order = [*(index for index in range(len(self.rows)) if index != last), last]
        self.rows = [self.rows[index] for index in order]
        for place in self.places:
            place.row = order.index(place.row)

    def _until(self, moment: Moment) -> list[int]:
        return self.rows[moment.row].token_ids[: moment.n_tokens]

    def _as_text(self, prompt: str, result: EngineResult, moment: Moment) -> tuple[str, Moment]:
        """All text so far, its stop string included. A last token that has no text is not part of it."""
        last = result.token_ids[-1:]
        n_hidden = 0 if self._chat.decode(last) else len(last)
        text = prompt + self._chat.decode(result.token_ids)
        return text, replace(moment, n_tokens=moment.n_tokens - n_hidden)


def _digests(variant: str, messages: Messages) -> list[Digest]:
    """A hash for each beginning of a history."""
    digests = [blake2b(variant.encode(), digest_size=16).digest()]
    for message in messages:
        digests.append(_next_digest(digests[-1], message))
    return digests[1:]


def _next_digest(digest: Digest, message: Any) -> Digest:
    """The hash of a history with one more message. White space around a reply does not count: agents strip it."""
    if message["role"] == "assistant":
        message = {**message, "content": message["content"].strip()}
    return blake2b(digest + json.dumps(message, sort_keys=True).encode(), digest_size=16).digest()
