"""Messages to token ids, through the tokenizer's chat template.

The template is applied to what *enters* a conversation: the prompt, then each observation. What the model sampled
is never rendered again, so a conversation is exactly the tokens the engine saw.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any

from transformers import PreTrainedTokenizerBase

from skyrl_train.errors import ConfigError

ASSISTANT_TURN = "ASSISTANT_TURN"  # stands for a sampled turn while its surroundings are rendered
CACHED_TEXTS = 4096  # the samples of a group share their prompt, and many environments repeat their observations


class ChatEncoder:
    """Encodes prompts and observations for one tokenizer."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        """Raises ConfigError if the tokenizer's chat template cannot join turns."""
        self._tokenizer = tokenizer
        self._prompt = lru_cache(maxsize=CACHED_TEXTS)(self._render_prompt)
        self._after_turn = lru_cache(maxsize=CACHED_TEXTS)(self._render_after_turn)
        self._after_turn("[]")  # a template that cannot is refused now, not in the first rollout

    def prompt_ids(self, messages: Sequence[Mapping[str, Any]]) -> list[int]:
        """The conversation so far and the header of the assistant's turn."""
        return list(self._prompt(json.dumps(list(messages))))

    def observation_ids(self, observations: Sequence[Mapping[str, Any]], last_token_id: int) -> list[int]:
        """What stands between a sampled turn and the next: its end, the observations, the assistant's header.

        The end of the turn is left out when the model sampled it itself (`last_token_id` is that token); a turn that
        was cut by its length, or ended by a stop string, gets one, so that the conversation stays well formed.
        """
        token_ids = self._after_turn(json.dumps(list(observations)))
        n_end = token_ids.index(last_token_id) + 1 if last_token_id in token_ids else 0
        is_end = not self.decode_all(token_ids[: max(0, n_end - 1)]).strip()  # some templates put a space before it
        return list(token_ids[n_end:] if is_end else token_ids)

    def decode(self, token_ids: Sequence[int]) -> str:
        """Text for an environment: without special tokens."""
        return str(self._tokenizer.decode(list(token_ids), skip_special_tokens=True))

    def decode_all(self, token_ids: Sequence[int]) -> str:
        """Text for people: with special tokens."""
        return str(self._tokenizer.decode(list(token_ids), skip_special_tokens=False))

    def _render_prompt(self, messages: str) -> tuple[int, ...]:
        """Token ids of a prompt; `messages` are JSON, as the key of a cache."""
        return tuple(self._encode(self._render(json.loads(messages))))

    def _render_after_turn(self, observations: str) -> tuple[int, ...]:
        """Token ids of everything after a sampled turn; `observations` are JSON, as the key of a cache."""
        before = [{"role": "user", "content": "?"}, {"role": "assistant", "content": ASSISTANT_TURN}]
        _, found, tail = self._render([*before, *json.loads(observations)]).partition(ASSISTANT_TURN)
        token_ids = self._encode(tail)
        if not found or not token_ids:
            raise ConfigError(
                "the tokenizer's chat template does not show the text of assistant messages, so turns cannot be "
                "joined; use a template with plain user and assistant turns"
            )
        return tuple(token_ids)

    def _render(self, messages: Sequence[Mapping[str, Any]]) -> str:
        conversation = [dict(message) for message in messages]
        return str(self._tokenizer.apply_chat_template(conversation, tokenize=False, add_generation_prompt=True))

    def _encode(self, text: str) -> list[int]:
        return self._tokenizer(text, add_special_tokens=False)["input_ids"]
