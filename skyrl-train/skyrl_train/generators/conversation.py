"""A conversation as tokens: what the engine reads before each turn, and the rows that are learned from in the end.

    prompt → turn → observations → turn → …

Four ways to keep it. `TokenConversation`, the default, never renders what was sampled again. The others follow from
the configuration; see `conversation_class`.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from itertools import groupby, takewhile

from skyrl_train.config.generator import GeneratorConfig
from skyrl_train.errors import ConfigError
from skyrl_train.generators.chat_template import ChatEncoder, Messages
from skyrl_train.inference_engines.base import EngineResult
from skyrl_train.types import Message, SegmentBuilder


@dataclass(slots=True)
class Place:
    """Where a turn stands: tokens `start` to `end` of the response of row `row`."""

    row: int
    start: int
    end: int


class TokenConversation:
    """Tokens are the truth: the next prompt is the last one, the sampled tokens, and those of the observations."""

    def __init__(self, chat: ChatEncoder, prompt: Messages | None, *, ends_stopped_turns: bool = True) -> None:
        """`prompt` begins the first row; None: there is none yet.

        `ends_stopped_turns`: a turn that a stop string ended gets the template's end of turn.
        """
        self._chat = chat
        self._ends_stopped_turns = ends_stopped_turns
        self.rows: list[SegmentBuilder] = []
        self.places: list[Place] = []
        if prompt is not None:
            self._begin_row(chat.prompt_ids(prompt))

    def next_prompt(self) -> list[int]:
        """What the engine reads now."""
        return self.rows[-1].token_ids

    @property
    def n_response_tokens(self) -> int:
        """Tokens so far, the prompt left out."""
        return sum(row.response_length for row in self.rows)

    def add_turn(self, result: EngineResult, text: str) -> None:
        """The model has spoken: `text` is what the environment is told."""
        row = self.rows[-1]
        start = row.response_length
        row.append_sampled(result.token_ids, result.logprobs, result.sampling_logprobs)
        self.places.append(Place(len(self.rows) - 1, start, row.response_length))

    def replace_turn(self, text: str) -> None:
        """The environment has understood the last turn as another text.

        As far as it begins like what was sampled, the tokens are kept. The rest is read by the model, but nobody
        sampled it, so that it is not learned from.
        """
        row, place = self.rows[-1], self.places[-1]
        token_ids = row.token_ids[row.n_prompt + place.start :]
        n_kept = _n_tokens_in_common(self._chat.decode, token_ids, text)
        row.truncate(place.start + n_kept)
        row.append_observed(self._chat.encode(text.removeprefix(self._chat.decode(token_ids[:n_kept]))))
        place.end = row.response_length

    def observe(self, observations: Messages, *, was_stopped: bool) -> None:
        """Add what the environment says; `was_stopped` by something else than its length."""
        row = self.rows[-1]
        ends_turn = self._ends_stopped_turns or not was_stopped
        row.append_observed(self._chat.observation_ids(observations, row.token_ids[-1], ends_turn=ends_turn))

    def replace_history(self, messages: Messages) -> None:
        """The conversation is now `messages`: they begin a new row."""
        self._begin_row(self._chat.prompt_ids(messages))

    def finish(self) -> None:
        """The rollout is over: the last row is that of the last turn, and rows end with their turns."""
        del self.rows[max((place.row for place in self.places), default=0) + 1 :]
        for index, row in enumerate(self.rows):
            ends = [place.end for place in self.places if place.row == index]
            row.truncate(max(ends, default=0))

    def _begin_row(self, token_ids: list[int]) -> None:
        self.rows.append(SegmentBuilder(token_ids, len(token_ids)))


class SingleMessageConversation(TokenConversation):
    """All turns make one assistant message: observations are plain text in it, and only the last turn has an end."""

    def observe(self, observations: Messages, *, was_stopped: bool) -> None:
        """See `TokenConversation.observe`."""
        row, place = self.rows[-1], self.places[-1]
        if row.token_ids[-1] == self._chat.eos_token_id and place.end > place.start:
            row.truncate(row.response_length - 1)
            place.end = row.response_length
        row.append_observed([token for message in observations for token in self._chat.encode(message["content"])])


class StepwiseConversation(TokenConversation):
    """The template renders the whole history before each turn, and each turn has a row of its own.

    With `merges`, a turn whose prompt begins with the row before goes on with it.
    """

    def __init__(self, chat: ChatEncoder, prompt: Messages, *, merges: bool) -> None:
        super().__init__(chat, prompt)
        self._merges = merges
        self._messages = [dict(message) for message in prompt]

    @property
    def n_response_tokens(self) -> int:
        """See `TokenConversation.n_response_tokens`: of the history as it is now."""
        return len(self.next_prompt()) - self.rows[0].n_prompt

    def add_turn(self, result: EngineResult, text: str) -> None:
        """See `TokenConversation.add_turn`."""
        super().add_turn(result, text)
        self._messages.append(dict(Message(role="assistant", content=text)))

    def replace_turn(self, text: str) -> None:
        """See `TokenConversation.replace_turn`. What was sampled is learned from; only the history changes."""
        self._messages[-1]["content"] = text

    def observe(self, observations: Messages, *, was_stopped: bool) -> None:
        """See `TokenConversation.observe`."""
        self._messages += [dict(message) for message in observations]
        self._continue()

    def replace_history(self, messages: Messages) -> None:
        """See `TokenConversation.replace_history`."""
        self._messages = [dict(message) for message in messages]
        self._continue()

    def _continue(self) -> None:
        prompt = self._chat.prompt_ids(self._messages)
        row = self.rows[-1]
        n_tokens = len(row.token_ids)
        if self._merges and prompt[:n_tokens] == row.token_ids:
            row.append_observed(prompt[n_tokens:])
        else:
            self._begin_row(prompt)


class RetokenizedConversation(StepwiseConversation):
    """The template renders the whole history before each turn, and once more in the end, as the only row.

    The template's generation blocks say which tokens are the model's. They may not be those that were sampled, so
    there are no log-probs. What an environment put in the place of a turn is not learned from.
    """

    def __init__(self, chat: ChatEncoder, prompt: Messages) -> None:
        super().__init__(chat, prompt, merges=False)
        self._replaced: set[int] = set()  # numbers of turns

    def replace_turn(self, text: str) -> None:
        """See `TokenConversation.replace_turn`."""
        super().replace_turn(text)
        self._replaced.add(len(self.places) - 1)

    def finish(self) -> None:
        """See `TokenConversation.finish`."""
        while self._messages and self._messages[-1]["role"] != "assistant":
            self._messages.pop()
        n_turns = len(self.places)
        token_ids, is_assistant = self._chat.conversation_ids(self._messages) if self._messages else ([], [])
        turns = _runs_of_ones(is_assistant)[-n_turns:]  # the prompt may have messages of the assistant
        if not n_turns or not turns:
            super().finish()
            return
        n_prompt = self.rows[0].n_prompt
        if token_ids[:n_prompt] != self.rows[0].token_ids[:n_prompt]:  # the history was rewritten
            n_prompt = turns[0].start
        # a history that lost turns has fewer of them: those rewards go to the first that is left
        turns = [turns[0]] * (n_turns - len(turns)) + turns
        self.places = [Place(0, turn.start - n_prompt, turn.end - n_prompt) for turn in turns]
        row = SegmentBuilder(token_ids, n_prompt, [0] * (len(token_ids) - n_prompt), logprobs=None)
        for number, place in enumerate(self.places):
            row.loss_mask[place.start : place.end] = [int(number not in self._replaced)] * (place.end - place.start)
        row.truncate(self.places[-1].end)
        self.rows = [row]


MakeConversation = Callable[[Messages], TokenConversation]


def conversation_class(cfg: GeneratorConfig, chat: ChatEncoder) -> MakeConversation:
    """How the configuration wants conversations kept."""
    if cfg.step_wise_trajectories:
        return partial(StepwiseConversation, chat, merges=cfg.merge_stepwise_output)
    if not cfg.use_conversation_multi_turn:
        return partial(SingleMessageConversation, chat)
    if cfg.chat_template.name_or_path is not None:
        _check_generation_blocks(cfg.chat_template.name_or_path, chat)
        return partial(RetokenizedConversation, chat)
    return partial(TokenConversation, chat, ends_stopped_turns=cfg.append_eos_token_after_stop_str_in_multi_turn)


def _check_generation_blocks(name: str, chat: ChatEncoder) -> None:
    _, is_assistant = chat.conversation_ids([{"role": "user", "content": "?"}, {"role": "assistant", "content": "!"}])
    if 1 not in is_assistant:
        raise ConfigError(
            f"generator.chat_template.name_or_path={name!r} does not say what is learned from; put the text of "
            "assistant messages between {% generation %} and {% endgeneration %}"
        )


def _n_tokens_in_common(decode: Callable[[list[int]], str], token_ids: list[int], text: str) -> int:
    """How many of the tokens spell a beginning of `text`."""
    in_common = takewhile(lambda pair: pair[0] == pair[1], zip(decode(token_ids), text, strict=False))
    n_characters = sum(1 for _ in in_common)
    lengths = range(len(token_ids) + 1)
    n_tokens = bisect_right(lengths, n_characters, key=lambda n: len(decode(token_ids[:n]))) - 1
    while not text.startswith(decode(token_ids[:n_tokens])):  # half a character looks like another one
        n_tokens -= 1
    return n_tokens


def _runs_of_ones(mask: list[int]) -> list[Place]:
    """Where the neighbouring ones of a mask are."""
    runs, position = [], 0
    for is_one, group in groupby(mask):
        n = len(list(group))
        if is_one:
            runs.append(Place(0, position, position + n))
        position += n
    return runs
