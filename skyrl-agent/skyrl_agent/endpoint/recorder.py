"""The recorded conversations of a session, as tokens.

A request repeats the whole history, as messages, text or token ids. If that history was recorded, the prompt is the
recorded tokens plus the tokens of the new part. Sampled text is never tokenized again. Histories are equal if their
`canonical_messages` are: clients write arguments, empty contents and the ids of calls in their own way.

    The request continues                       and is recorded
    the end of a row                            in that row
    a reply that already has a continuation     in a new row, which starts with the tokens up to that reply
    no recorded reply                           in a new row
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from hashlib import blake2b
from itertools import accumulate
from typing import Any

from skyrl_agent.endpoint.replies import Reply
from skyrl_gym.stop_reasons import StopReason
from skyrl_gym.tools.calls import parse_arguments
from skyrl_train.generators.chat_template import ChatEncoder, Messages, dump_json
from skyrl_train.generators.conversation import TokenConversation
from skyrl_train.inference_engines.base import EngineResult
from skyrl_train.media.spans import ImageSpan
from skyrl_train.rendering.messages import find_thought, get_function
from skyrl_train.types import Segment

Digest = bytes
Tools = Mapping[str, Mapping[str, Any]]  # JSON Schema of the arguments of each offered tool, by name

MAX_NUMBER = 10**308  # larger integers do not fit a float


@dataclass(frozen=True, slots=True)
class ReplyEnd:
    """The end of a reply: the first `n_tokens` of row `row`."""

    row: int
    n_tokens: int
    was_stopped: bool  # False: truncated or aborted
    call_ids: tuple[str, ...] = ()  # as sent to the agent


@dataclass(frozen=True, slots=True)
class Prompt:
    """The prompt tokens of one request, and what identifies its history."""

    token_ids: list[int]
    images: tuple[ImageSpan, ...] = ()
    origin: ReplyEnd | None = None  # the reply that it continues
    digest: Digest | None = None  # hash of its messages, for a chat
    text: str | None = None  # for a text completion
    tools: Tools | None = None
    is_side: bool = False  # it offers no tools, and its messages have no reply


class Recording(TokenConversation):
    """The parallel conversations of a session. A request continues one by repeating its history.

    Replies are recorded when the engine finishes them, including truncated and aborted ones.
    """

    def __init__(self, chat: ChatEncoder, *, ends_stopped_turns: bool = True) -> None:
        super().__init__(chat, None, ends_stopped_turns=ends_stopped_turns)
        self._ends: list[ReplyEnd] = []
        self._by_digest: dict[Digest, dict[str | None, ReplyEnd]] = {}  # by thought, as clients may leave it out
        self._by_text: list[tuple[str, ReplyEnd]] = []
        self.side_rows: set[int] = set()  # rows that start with a side request

    def chat_prompt(
        self, messages: Messages, chat: ChatEncoder, variant: str = "", *, tools: Tools | None = None
    ) -> Prompt:
        """Return the prompt of messages rendered by `chat`. `variant` identifies the template variables."""
        start = blake2b(variant.encode(), digest_size=16).digest()
        # The hashes of the first 0, 1, … messages.
        digests = list(accumulate(canonical_messages(messages, tools), _next_digest, initial=start))
        for n in range(len(messages), 0, -1):
            if ends := self._by_digest.get(digests[n]):
                end = ends.get(find_thought(messages[n - 1])) or next(reversed(ends.values()))
                known, ends_turn = self._tokens_until(end), self._ends_stopped_turns or not end.was_stopped
                reply, *after = _rename_calls(messages[n - 1 :], end.call_ids)
                new = chat.observation_ids(after, known[-1], ends_turn=ends_turn, calls=reply.get("tool_calls"))
                images = [span.shift(len(known)) for span in chat.find_spans(new, after)]
                return Prompt(known + new, (*self._images_until(end), *images), end, digests[-1], tools=tools)
        token_ids = chat.history_ids(messages)
        images = chat.find_spans(token_ids, messages)
        is_side = tools is None and all(message["role"] != "assistant" for message in messages)
        return Prompt(token_ids, tuple(images), digest=digests[-1], tools=tools, is_side=is_side)

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

    def record(self, prompt: Prompt, result: EngineResult, reply: Reply) -> int:
        """Record a reply and return the index of its row. `reply` is its form as sent to the agent."""
        if prompt.origin is not None and self.extends_row(prompt):
            index, n_known = prompt.origin.row, prompt.origin.n_tokens
            images = [span.shift(-n_known) for span in prompt.images if span.start >= n_known]
            self.rows[index].append_observed(prompt.token_ids[n_known:], images)
        else:
            index = len(self.rows)
            self.rows.append(Segment.start(list(prompt.token_ids), prompt.images))
            if prompt.is_side:
                self.side_rows.add(index)
        self._append_turn(index, result)
        call_ids = tuple(str(call.id) for call in reply.calls)
        end = ReplyEnd(index, len(self.rows[index].token_ids), result.stop_reason == StopReason.STOP, call_ids)
        self._ends.append(end)
        if prompt.digest is not None:
            (message,) = canonical_messages([reply.to_message()], prompt.tools)
            self._by_digest.setdefault(_next_digest(prompt.digest, message), {})[reply.thought or None] = end
        if prompt.text is not None:
            # Unlike `reply`, `text` includes the stop string. A client repeats text, so a last token without text (EOS)
            # cannot be matched: leave it out.
            last = result.token_ids[-1:]
            n_hidden = 0 if self._chat.decode_after(last) else len(last)
            text = prompt.text + self._chat.decode_after(result.token_ids)
            self._by_text.append((text, replace(end, n_tokens=end.n_tokens - n_hidden)))
        return index

    def exclude_side_rows(self) -> int:
        """Exclude `side_rows` from training. Move their turns to the front, and return the number of these turns.

        Coding agents ask for a title in a separate conversation. The final answer of a task, which may be requested
        without tools, is not a side row.
        """
        for index in self.side_rows:
            self.rows[index].loss_mask = [0] * self.rows[index].response_length
        self.turns.sort(key=lambda turn: turn.segment not in self.side_rows)
        return sum(turn.segment in self.side_rows for turn in self.turns)

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


def canonical_messages(messages: Messages, tools: Tools | None = None) -> list[Any]:
    """Return a form of messages that is equal for histories that differ only in how a client writes the replies.

    Keep the stripped text of replies, and the names and arguments of their calls. Drop thoughts and call ids, and
    arguments that equal the default in the tool's schema, because Claude Code adds missing ones. Tool results refer to
    the index of their call.
    """
    canonical: list[Any] = []
    indices: dict[Any, int] = {}  # of the latest calls, by id
    for message in messages:
        if message["role"] == "assistant":
            calls = parse_arguments(message).get("tool_calls") or []
            indices = {call.get("id"): index for index, call in enumerate(calls)}
            functions = [get_function(call) for call in calls]
            called = [(one.get("name"), _canonical_arguments(one, tools or {})) for one in functions]
            content = message["content"]
            content = content.strip() if isinstance(content, str) else content
            canonical.append({"role": "assistant", "content": content or "", "calls": called})
        else:
            id = message.get("tool_call_id")
            canonical.append(message if id is None else {**message, "tool_call_id": indices.get(id, id)})
    return canonical


def _canonical_arguments(function: Mapping[str, Any], tools: Tools) -> Any:
    """Return the arguments of a call without those that equal their default."""
    arguments, schema = function.get("arguments"), tools.get(str(function.get("name")), {}).get("properties")
    if isinstance(arguments, dict) and isinstance(schema, dict):
        defaults = {name: one["default"] for name, one in schema.items() if isinstance(one, dict) and "default" in one}
        arguments = {
            name: value for name, value in arguments.items() if name not in defaults or value != defaults[name]
        }
    return _canonical_numbers(arguments)


def _canonical_numbers(value: Any) -> Any:
    """Convert all numbers to floats, as JavaScript does: 1.0 equals 1, and 2**53 + 1 equals 2**53."""
    if isinstance(value, dict):
        return {name: _canonical_numbers(part) for name, part in value.items()}
    if isinstance(value, list):
        return [_canonical_numbers(part) for part in value]
    if isinstance(value, bool) or not isinstance(value, int | float) or abs(value) > MAX_NUMBER:
        return value
    return float(value) + 0.0  # not -0.0


def _rename_calls(messages: Messages, ids: Sequence[str]) -> Messages:
    """Restore the recorded `ids` of a reply's calls, which a client may have renamed, in the messages from it on."""
    reply, *after = messages
    calls = reply.get("tool_calls") or []
    renamed = {call.get("id"): id for call, id in zip(calls, ids, strict=False)}
    return [
        {**reply, "tool_calls": [{**call, "id": renamed.get(call.get("id"))} for call in calls]},
        *(
            {**message, "tool_call_id": renamed[id]} if (id := message.get("tool_call_id")) in renamed else message
            for message in after
        ),
    ]


def _next_digest(digest: Digest, message: Any) -> Digest:
    """Return the hash of a history with one more canonical message."""
    return blake2b(digest + dump_json(message, sort_keys=True).encode(), digest_size=16).digest()
