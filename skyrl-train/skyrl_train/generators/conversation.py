"""Conversations as tokens: the prompt of each turn, and the rows to train on.

    prompt → turn → observations → turn → …

`TokenConversation`, the default, tokenizes sampled text again only if the history is replaced. For the other three
classes, see `conversation_factory`.
"""

from bisect import bisect_right
from collections.abc import Callable
from functools import partial
from itertools import takewhile

import numpy as np

from skyrl_gym.images import find_images
from skyrl_train.config.generator import GeneratorConfig
from skyrl_train.errors import ConfigError, EnvError
from skyrl_train.generators.chat_template import ChatEncoder, Messages
from skyrl_train.inference_engines.base import EngineResult
from skyrl_train.media.spans import ImageSpan
from skyrl_train.types import Message, Segment, StopReason, Turn


class TokenConversation:
    """A conversation whose next prompt is the previous prompt + sampled tokens + tokens of the observations."""

    def __init__(self, chat: ChatEncoder, prompt: Messages | None, *, ends_stopped_turns: bool = True) -> None:
        """Start the first row with `prompt`, if it is not None.

        With `ends_stopped_turns`, a turn that ended at a stop string gets the template's end-of-turn token.
        """
        self._chat = chat
        self._ends_stopped_turns = ends_stopped_turns
        self.rows: list[Segment] = []
        self.turns: list[Turn] = []
        if prompt is not None:
            self._start_row(chat.prompt_ids(prompt), prompt)

    def next_prompt(self) -> list[int]:
        """Return the engine's prompt for the next turn."""
        return self.rows[-1].token_ids

    @property
    def images(self) -> tuple[ImageSpan, ...]:
        """Images in the engine's prompt for the next turn."""
        return tuple(self.rows[-1].images)

    @property
    def n_response_tokens(self) -> int:
        """Number of tokens so far, excluding the prompt."""
        return sum(row.response_length for row in self.rows)

    def add_turn(self, result: EngineResult, text: str) -> None:
        """Add a sampled turn. `text` is what the environment receives."""
        self._append_turn(len(self.rows) - 1, result)

    def replace_turn(self, text: str) -> None:
        """Replace the last turn with the text that the environment acted on.

        Tokens of the common prefix are kept. The rest is tokenized and not trained on. If the text continues after the
        whole reply, the continuation replaces the EOS token.
        """
        row, turn = self.rows[-1], self.turns[-1]
        token_ids = row.token_ids[row.n_prompt + turn.start :]
        n_kept = _n_common_tokens(self._chat.decode, token_ids, text)
        kept = self._chat.decode(token_ids[:n_kept])
        replacement = self._chat.encode_after(row.token_ids[: row.n_prompt + turn.start + n_kept], text[len(kept) :])
        while replacement and n_kept and self._chat.decode(token_ids[: n_kept - 1]) == kept:
            n_kept -= 1
        row.truncate(turn.start + n_kept)
        row.append_observed(replacement)
        turn.end = row.response_length

    def observe(self, observations: Messages) -> None:
        """Add the environment's messages."""
        row = self.rows[-1]
        ends_turn = self._ends_stopped_turns or self.turns[-1].stop_reason != StopReason.STOP
        token_ids = self._chat.observation_ids(observations, row.token_ids[-1], ends_turn=ends_turn)
        row.append_observed(token_ids, self._chat.find_spans(token_ids, observations))

    def replace_history(self, messages: Messages) -> None:
        """Replace the whole conversation. `messages` start a new row."""
        self._start_row(self._chat.history_ids(messages), messages)

    def finish(self) -> None:
        """Drop everything after the last turn, and truncate each row after its last turn."""
        del self.rows[max((turn.segment for turn in self.turns), default=0) + 1 :]
        for index, row in enumerate(self.rows):
            row.truncate(max((turn.end for turn in self.turns if turn.segment == index), default=0))

    def _start_row(self, token_ids: list[int], messages: Messages = ()) -> None:
        """Start a row with the tokens of `messages`, which may have images."""
        self.rows.append(Segment.start(token_ids, self._chat.find_spans(token_ids, messages)))

    def _append_turn(self, index: int, result: EngineResult) -> None:
        row = self.rows[index]
        n_tokens, start = len(row.token_ids), row.response_length
        row.append_sampled(result.token_ids, result.logprobs, result.sampling_logprobs)
        if result.experts is not None:  # of all tokens of the row so far
            row.experts = result.experts
        turn = Turn(start, row.response_length, n_tokens, 0.0, result.stop_reason, result.weight_spans, segment=index)
        self.turns.append(turn)


class SingleMessageConversation(TokenConversation):
    """A conversation with all turns in one assistant message. Observations are plain text inside it.

    Only the last turn keeps its EOS token.
    """

    def observe(self, observations: Messages) -> None:
        """Remove the EOS token of the last turn and add the environment's messages as text."""
        row, turn = self.rows[-1], self.turns[-1]
        if row.token_ids[-1] == self._chat.eos_token_id and turn.end > turn.start:
            row.truncate(row.response_length - 1)
            turn.end = row.response_length
        for message in observations:
            if not isinstance(message["content"], str):
                raise EnvError(
                    "an observation has an image, which cannot be written inside an assistant message; set "
                    "generator.use_conversation_multi_turn=true"
                )
            row.append_observed(self._chat.encode_after(row.token_ids, message["content"]))


class StepwiseConversation(TokenConversation):
    """A conversation with one row per turn. The template renders the whole history before each turn.

    With `merges`, a turn whose prompt starts with the previous row extends that row.
    """

    def __init__(self, chat: ChatEncoder, prompt: Messages, *, merges: bool) -> None:
        super().__init__(chat, prompt)
        self._merges = merges
        self._messages = [dict(message) for message in prompt]

    @property
    def n_response_tokens(self) -> int:
        """Number of tokens in the current history, excluding the prompt."""
        return len(self.next_prompt()) - self.rows[0].n_prompt

    def add_turn(self, result: EngineResult, text: str) -> None:
        """Add a sampled turn, and add its text to the history."""
        super().add_turn(result, text)
        self._messages.append(dict(Message(role="assistant", content=text)))

    def replace_turn(self, text: str) -> None:
        """Replace the last turn in the history. The sampled tokens are still trained on."""
        self._messages[-1]["content"] = text

    def observe(self, observations: Messages) -> None:
        """Add the environment's messages to the history and render it."""
        self.replace_history([*self._messages, *observations])

    def replace_history(self, messages: Messages) -> None:
        """Replace the history and render it."""
        self._messages = [dict(message) for message in messages]
        prompt = self._chat.history_ids(self._messages)
        row = self.rows[-1]
        n_tokens = len(row.token_ids)
        images = self._chat.find_spans(prompt, self._messages)
        n_images = len(row.images)
        if self._merges and prompt[:n_tokens] == row.token_ids and images[:n_images] == row.images:
            row.append_observed(prompt[n_tokens:])
            row.images = images
        else:
            self.rows.append(Segment.start(prompt, images))


class RetokenizedConversation(StepwiseConversation):
    """A conversation with a single row: the whole history as the template renders it at the end.

    The template also renders the history before each turn. Its generation blocks mark the trained tokens, which may
    differ from the sampled tokens, so there are no log-probs. Turns that the environment replaced are not trained on.
    """

    def __init__(self, chat: ChatEncoder, prompt: Messages) -> None:
        super().__init__(chat, prompt, merges=False)
        self._turn_indices: list[int | None] = [None] * len(prompt)  # turn of each message, None if not sampled
        self._replaced: set[int] = set()  # turn indices

    def add_turn(self, result: EngineResult, text: str) -> None:
        """Add a sampled turn, and add its text to the history."""
        super().add_turn(result, text)
        self._turn_indices.append(len(self.turns) - 1)

    def replace_turn(self, text: str) -> None:
        """Replace the last turn in the history, and exclude it from training."""
        super().replace_turn(text)
        self._replaced.add(len(self.turns) - 1)

    def replace_history(self, messages: Messages) -> None:
        """Replace the history and render it.

        An assistant message is matched with an equal turn of the previous history, so it is still trained on. Matches
        keep their order, from the last message backwards: if the old turns are A, B, A and the new messages B, A, the
        new A is the old third turn.
        """
        n_left = len(self._messages)
        indices: list[int | None] = []
        for message in reversed(messages):
            index = None
            for position in range(n_left - 1, -1, -1) if message["role"] == "assistant" else ():
                old = self._messages[position]
                if old["role"] == "assistant" and old["content"] == message["content"]:
                    index, n_left = self._turn_indices[position], position
                    break
            indices.append(index)
        self._turn_indices = indices[::-1]
        super().replace_history(messages)

    def finish(self) -> None:
        """Render the history up to its last assistant message as the only row."""
        while self._messages and self._messages[-1]["role"] != "assistant":
            self._messages.pop()
        if find_images(self._messages):
            raise EnvError(
                "a message has an image, but with generator.chat_template.name_or_path the whole conversation is "
                "tokenized again, which supports text only; remove the setting"
            )
        token_ids, is_assistant = self._chat.conversation_ids(self._messages) if self._messages else ([], [])
        indices = [i for m, i in zip(self._messages, self._turn_indices, strict=False) if m["role"] == "assistant"]
        runs = np.flatnonzero(np.diff([0, *is_assistant, 0])).reshape(-1, 2).tolist()  # start and end of each run of 1
        # match from the end: a template may render no tokens for an empty message
        pairs = zip(reversed(indices), reversed(runs), strict=False)
        spans = {index: span for index, span in pairs if index is not None}
        if not spans:
            super().finish()
            return
        n_prompt = self.rows[0].n_prompt
        if token_ids[:n_prompt] != self.rows[0].token_ids[:n_prompt]:  # the history was rewritten
            n_prompt = spans[min(spans)][0]
        row = Segment.start(token_ids[:n_prompt])
        row.append_observed(token_ids[n_prompt:])
        row.logprobs = None
        for index, turn in enumerate(self.turns):
            # if a turn is no longer in the history, its reward goes to the next turn that is, or else to the last
            start, end = spans[min((i for i in spans if i >= index), default=max(spans))]
            turn.segment, turn.start, turn.end = 0, start - n_prompt, end - n_prompt
            if index in spans and index not in self._replaced:
                row.loss_mask[turn.start : turn.end] = [1] * (end - start)
        row.truncate(self.turns[-1].end)
        self.rows = [row]


def conversation_factory(cfg: GeneratorConfig, chat: ChatEncoder) -> Callable[[Messages], TokenConversation]:
    """Return a function that makes a conversation from a prompt. ConfigError if the template marks no tokens."""
    if cfg.step_wise_trajectories:
        return partial(StepwiseConversation, chat, merges=cfg.merge_stepwise_output)
    if not cfg.use_conversation_multi_turn:
        return partial(SingleMessageConversation, chat)
    if (name := cfg.chat_template.name_or_path) is not None:
        _, mask = chat.conversation_ids([{"role": "user", "content": "?"}, {"role": "assistant", "content": "!"}])
        if 1 not in mask:
            raise ConfigError(
                f"generator.chat_template.name_or_path={name!r} does not mark the tokens to train on; put the text of "
                "assistant messages between {% generation %} and {% endgeneration %}"
            )
        return partial(RetokenizedConversation, chat)
    return partial(TokenConversation, chat, ends_stopped_turns=cfg.append_eos_token_after_stop_str_in_multi_turn)


def _n_common_tokens(decode: Callable[[list[int]], str], token_ids: list[int], text: str) -> int:
    """Return the length of the longest prefix of `token_ids` that decodes to a prefix of `text`."""
    matches = takewhile(lambda pair: pair[0] == pair[1], zip(decode(token_ids), text, strict=False))
    n_characters = sum(1 for _ in matches)
    lengths = range(len(token_ids) + 1)
    n_tokens = bisect_right(lengths, n_characters, key=lambda n: len(decode(token_ids[:n]))) - 1
    while not text.startswith(decode(token_ids[:n_tokens])):  # an incomplete character decodes to "�"
        n_tokens -= 1
    return n_tokens
