"""Chat templates: messages to token ids.

The template renders the messages that enter a conversation: first the prompt, then each observation.
"""

import json
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerBase

from skyrl_gym.images import EncodedImage
from skyrl_train.config.generator import ChatTemplateConfig
from skyrl_train.errors import ConfigError, DataError
from skyrl_train.media.spans import ImageSpan
from skyrl_train.rendering.messages import replace_function
from skyrl_train.rendering.template import MARK, ChatTemplate, Messages
from skyrl_train.types import Segment

CONTEXT_TOKENS = 32  # trailing tokens decoded as context to tokenize the text after them
CACHED_TOKENS = 2**18  # the samples of a group share a prompt, and many environments repeat observations
TURN_ENDS = ("<|endoftext|>", "<|end_of_text|>", "<|eot_id|>", "<|eom_id|>")  # in addition to the template's own
MAX_CHARS_PER_TOKEN = 32  # longer text certainly exceeds a token limit, and is not even tokenized
TEMPLATES = Path(__file__).parent / "templates"
TURN: Mapping[str, Any] = {"role": "assistant", "content": MARK}
"""A sampled turn, for what the template writes after it."""


class _Cached:
    """A function from messages to token ids with an LRU cache of `CACHED_TOKENS` tokens."""

    def __init__(self, encode: Callable[[Messages], list[int]]) -> None:
        self._encode = encode
        self._results: OrderedDict[str, list[int]] = OrderedDict()  # by JSON, most recently used last
        self._n_tokens = 0

    def __call__(self, messages: Messages) -> list[int]:
        key = dump_json(messages)
        if key in self._results:
            self._results.move_to_end(key)
            return self._results[key].copy()
        token_ids = self._results[key] = self._encode(messages)
        self._n_tokens += len(token_ids)
        while self._n_tokens > CACHED_TOKENS:
            self._n_tokens -= len(self._results.popitem(last=False)[1])
        return token_ids.copy()


def dump_json(messages: Any, *, sort_keys: bool = False) -> str:
    """Return messages as JSON that identifies them, with the digests of their images."""
    return json.dumps(messages, sort_keys=sort_keys, default=_digest)


def _digest(value: Any) -> str:
    if isinstance(value, EncodedImage):
        return value.digest
    raise TypeError(f"a message has a {type(value).__name__}, which is not JSON")


class ChatEncoder:
    """Tokenizes prompts and observations with a tokenizer's chat template."""

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        template: str | None = None,
        template_kwargs: Mapping[str, Any] | None = None,
    ) -> None:
        """Load `template` (default: the tokenizer's) with `template_kwargs`. ConfigError if it cannot join turns."""
        self.tokenizer = tokenizer
        self._template = ChatTemplate(tokenizer, template, template_kwargs)
        self._prompt = _Cached(partial(self._encode_messages, self._template.prompt))
        self._history = _Cached(partial(self._encode_messages, partial(self._template.render, adds_header=True)))
        self._after_turn = _Cached(self._encode_after_turn)
        try:
            tail = self._after_turn([TURN])  # fail here, not in the first rollout
        except DataError as error:
            raise ConfigError(
                f"the chat template failed to render a user message and a reply: {error}. Correct the tokenizer's "
                "template, or set a different one in generator.chat_template."
            ) from error
        self.eos_token_id: int | None = tokenizer.eos_token_id
        vocabulary = tokenizer.get_added_vocab()
        end_ids = [vocabulary[token] for token in TURN_ENDS if token in vocabulary]
        if "<|channel|>" not in vocabulary:  # in gpt-oss, <|end|> also ends a thought, and `strip_thoughts` needs it
            special_ids = {i for i, token in tokenizer.added_tokens_decoder.items() if token.special}
            end_ids += [token for token in tail if token in special_ids][:1]
        self._text_ids = self.encode("a")  # see `decode_after`
        self._token_texts: dict[int, str] = {}  # of `decode_each`
        self._hidden_ids = {tokenizer.bos_token_id, self.eos_token_id, tokenizer.pad_token_id, *end_ids}

    def prompt_ids(self, messages: Messages) -> list[int]:
        """Tokenize a prompt and the assistant's header. If the prompt ends with a partial reply, continue the reply."""
        return self._prompt(messages)

    def history_ids(self, messages: Messages) -> list[int]:
        """Tokenize complete messages and the header of the next assistant turn."""
        return self._history(messages)

    def observation_ids(
        self,
        observations: Messages,
        last_token_id: int,
        *,
        ends_turn: bool = True,
        calls: Sequence[Mapping[str, Any]] | None = None,
    ) -> list[int]:
        """Return the tokens between two sampled turns: end-of-turn token, observations, assistant header.

        The end-of-turn token is left out if the model sampled it as `last_token_id`. Turns that were cut off or ended
        at a stop string get one, to keep the conversation well formed. With `ends_turn=False`, no turn gets one.
        `calls` are those of the first turn, as templates may write results only after them.
        """
        marked = [replace_function(call, arguments={"argument": MARK}) for call in calls or ()]
        turn = {**TURN, "content": "", "tool_calls": marked} if marked else TURN
        token_ids = self._after_turn([turn, *observations])
        end_of_turn = last_token_id if ends_turn else self.eos_token_id
        n_end = token_ids.index(end_of_turn) + 1 if end_of_turn in token_ids else 0
        is_end = not self.decode_all(token_ids[: max(0, n_end - 1)]).strip()  # some templates put a space before it
        return token_ids[n_end:] if is_end else token_ids

    def find_text_model(self) -> str | None:
        """Return the path of the tokenizer's model if it reads only text, or None if it reads images."""
        return self._template.find_text_model()

    def find_spans(self, token_ids: Sequence[int], messages: Messages) -> list[ImageSpan]:
        """Return where the images of messages are in the tokens that this encoder returned for them."""
        return self._template.find_spans(token_ids, messages)

    def conversation_ids(self, messages: Messages) -> tuple[list[int], list[int]]:
        """Return a conversation's tokens and a mask that is 1 in the template's generation blocks."""
        encoded: Any = self.tokenizer.apply_chat_template(
            self._template.prepare(messages),
            return_dict=True,
            return_assistant_tokens_mask=True,
            **self._template.options,
        )
        return list(encoded["input_ids"]), list(encoded["assistant_masks"])

    def encode(self, text: str) -> list[int]:
        """Tokenize text at the start of a sequence."""
        return self._template.encode(text)

    def encode_after(self, token_ids: Sequence[int], text: str) -> list[int]:
        """Tokenize text that follows `token_ids`."""
        return self._template.encode_after(self.decode_all(token_ids[-CONTEXT_TOKENS:]), text)

    def decode(self, token_ids: Sequence[int]) -> str:
        """Decode for an environment, without padding and without tokens that start or end a turn.

        Other special tokens stay, because some models use them for `<tool_call>` or the channels of a reply.
        """
        return self.decode_all([token for token in token_ids if token not in self._hidden_ids])

    def decode_after(self, token_ids: Sequence[int], *, shows_all: bool = False) -> str:
        """Decode tokens that follow other text. Alone, the first would lose its space: Llama's "▁is" becomes "is"."""
        decode = self.decode_all if shows_all else self.decode
        return decode([*self._text_ids, *token_ids])[len(decode(self._text_ids)) :]

    def decode_all(self, token_ids: Sequence[int]) -> str:
        """Decode for display, with all special tokens."""
        return str(self.tokenizer.decode(list(token_ids), skip_special_tokens=False))

    def decode_each(self, token_ids: Sequence[int]) -> list[str]:
        """Decode each token by itself. A token with a part of a character becomes "�"."""
        for token in set(token_ids) - self._token_texts.keys():
            self._token_texts[token] = self.decode_after([token], shows_all=True)
        return [self._token_texts[token] for token in token_ids]

    def decode_segment(self, segment: Segment, start: int, end: int, mark: Callable[[ImageSpan], str]) -> str:
        """Decode the tokens between `start` and `end` for display. `mark` returns the text for an image."""
        images = [span for span in segment.images if start <= span.start < end]
        starts, ends = [start, *(span.end for span in images)], [*(span.start for span in images), end]
        first, *rest = [segment.token_ids[i:j] for i, j in zip(starts, ends, strict=True)]
        text = self.decode_all(first)
        for span, token_ids in zip(images, rest, strict=True):
            text += mark(span) + self.decode_after(token_ids, shows_all=True)
        return text

    def _encode_messages(self, render: Callable[[Messages], str], messages: Messages) -> list[int]:
        self._template.check_written(messages)
        return self.encode(self._template.expand(render(messages), messages))

    def _encode_after_turn(self, messages: Messages) -> list[int]:
        """Tokenize everything that the template puts after a sampled turn: render `MARK` in the turn, cut after it.

        `messages` are the turn and the observations. In a turn with calls, the mark is the argument of a call:

            assistant⏎<tool_call>{"name": "read", "arguments": {"argument": "MARK"}}</tool_call><end>⏎tool⏎Found.<end>⏎…

        The end of the call is a part of the turn, up to the end-of-turn token. It is the end of the text without
        observations.
        """
        turn, *observations = messages
        start = [{"role": "user", "content": "?"}, turn]
        self._template.check_written([*start, *observations])
        before, found, tail = self._template.render([*start, *observations], adds_header=True).rpartition(MARK)
        n_sampled = 0
        if "tool_calls" in turn:
            end, end_of_turn = (
                self._template.render([*start[:1], one], adds_header=False).rpartition(MARK)[2] for one in (turn, TURN)
            )
            n_sampled = len(end) - len(end_of_turn) if end.endswith(end_of_turn) else self._template.find_end(end)
            found = found if n_sampled >= 0 and tail.startswith(end[:n_sampled]) else ""
        before, tail = before + found + tail[:n_sampled], tail[n_sampled:]
        token_ids = self._template.encode_after(before, self._template.expand(tail, messages))
        if not found or not token_ids:
            raise ConfigError(
                "the chat template does not show the text of assistant messages or their calls, so turns cannot be "
                "joined; use a template with plain user and assistant turns"
            )
        return token_ids


def cannot_fit(messages: Messages, max_tokens: int) -> bool:
    """Return True for messages with far more text than `max_tokens`. Tokenizing them could take minutes."""
    n_chars = sum(len(str(value)) for message in messages for value in message.values())
    return n_chars > MAX_CHARS_PER_TOKEN * max_tokens


def load_chat_template(config: ChatTemplateConfig) -> str | None:
    """Return the configured template, or None for the tokenizer's. ConfigError if it is unknown or unreadable."""
    name = config.name_or_path
    if name is None:
        return None
    if config.source == "name":
        known = {path.stem: path for path in sorted(TEMPLATES.glob("*.jinja"))}
        if name not in known:
            raise ConfigError(
                f"generator.chat_template.name_or_path={name!r} is not a built-in template (available: "
                f"{', '.join(known)}). To load a file, set generator.chat_template.source=file."
            )
        return known[name].read_text(encoding="utf-8")
    return read_chat_template(name, "generator.chat_template.name_or_path")


def read_chat_template(path: str, key: str) -> str:
    """Read a template file. `key` is the configuration key in the ConfigError if that fails."""
    try:
        return Path(path).read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"cannot read {key}={path!r}: {error.strerror}") from error
