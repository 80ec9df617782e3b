"""An agent's conversation with the model. It records the sampled tokens for training."""

import logging
import re
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

from transformers import PreTrainedTokenizerBase

from skyrl_gym.runtime.text import clean_text, describe_error
from skyrl_gym.runtime.validation import clean_messages
from skyrl_gym.tools.calls import strip_thoughts
from skyrl_gym.tools.messages import join_contents
from skyrl_train.errors import EngineError
from skyrl_train.generators.chat_template import ChatEncoder, cannot_fit
from skyrl_train.generators.conversation import StepwiseConversation, TokenConversation
from skyrl_train.generators.rollout import Rollout
from skyrl_train.inference_engines.base import EngineInfo, EngineRequest, EngineResult, SamplingParams
from skyrl_train.types import Message, StopReason

logger = logging.getLogger(__name__)

ZERO_WIDTH_SPACE = "\u200b"


class SamplingEngine(Protocol):
    """The part of `InferenceEngine` that agents use."""

    @property
    def info(self) -> EngineInfo:
        """Limits of the engine."""

    async def generate(self, requests: Sequence[EngineRequest]) -> list[EngineResult]:
        """Return one result per request, in order."""

    async def end_session(self, session_id: str) -> None:
        """Drop a session's cache."""


class ContextWindowExceeded(Exception):
    """The history or the reply reached the token limit."""


class PromptTooLong(Exception):
    """The first prompt leaves no room for a reply."""


class EngineAborted(EngineError):
    """The engine aborted the request of a turn."""


@dataclass(frozen=True, slots=True)
class ChatReply:
    """A sampled turn."""

    text: str
    is_truncated: bool  # reached the maximum number of tokens per turn


class Chat:
    """A history of messages that the model continues.

    Agents add messages with `append`, or start over with `reset`, and then call `generate`. Sampled tokens are never
    tokenized again: the next prompt is the previous prompt, the sampled tokens, and the tokens of the new messages. A
    new history starts a new row of training data.

    Example: the prompt is [1, 2, 3], the model samples [7, 8], and a tool result adds [4, 5]. The next prompt is [1, 2,
    3, 7, 8, 4, 5], even if the tokenizer would encode the text of [7, 8] as a single token 9. All turns are then one
    training row with loss mask 1 for 7 and 8, and the log-probs from sampling belong to exactly these tokens.
    """

    def __init__(
        self,
        rollout: Rollout,
        engine: SamplingEngine,
        encoder: ChatEncoder,
        sampling: SamplingParams,
        *,
        max_response_length: int,
        renders_history: bool = False,
        removes_thoughts: bool = False,
        logs_turns: bool = False,
    ) -> None:
        """Start an empty history.

        Args:
            rollout: the rollout whose conversation records the tokens.
            max_response_length: maximum number of tokens after the first prompt of a history.
            renders_history: let the chat template render the whole history before each turn. Turns whose prompt does
                not start with the tokens of earlier turns get a new row.
            removes_thoughts: remove earlier turns' thoughts from the history. Implies `renders_history`.
            logs_turns: log each turn.
        """
        self._rollout = rollout
        self._engine = engine
        self._encoder = encoder
        self._sampling = sampling
        self._max_response_length = max_response_length
        self._removes_thoughts = removes_thoughts
        self._logs_turns = logs_turns
        added = encoder.tokenizer.added_tokens_decoder.values()
        special = sorted((token.content for token in added if token.special), key=len, reverse=True)
        self._special_tokens = re.compile("|".join(map(re.escape, special)) or r"(?!)")
        self._new_conversation: Callable[[list[Message]], TokenConversation] = (
            (lambda prompt: StepwiseConversation(encoder, prompt, merges=True))
            if renders_history or removes_thoughts
            else (lambda prompt: TokenConversation(encoder, prompt))
        )
        self._messages: list[Message] = []
        self._new: list[Message] = []  # not in the conversation yet
        self._is_reset = False
        self._can_continue = True  # without a new message
        self._n_prompt = 0  # number of tokens in the history's first prompt

    @property
    def tokenizer(self) -> PreTrainedTokenizerBase:
        """The model's tokenizer."""
        return self._encoder.tokenizer

    @property
    def messages(self) -> list[Message]:
        """The history so far, including replies."""
        return [*self._messages, *self._new]

    @property
    def has_new_messages(self) -> bool:
        """True if the history has messages after the last reply."""
        return bool(self._new)

    def append(self, role: str, content: str) -> None:
        """Add a message to the history. Special tokens in it become plain text, since they could end the turn."""
        self._new.append({"role": role, "content": self._neutralize(content)})

    def append_to_last(self, text: str) -> None:
        """Add a paragraph to the last message. The model must not have read it yet."""
        last = self._new[-1]
        content: Any = join_contents([last["content"], "", self._neutralize(text)])
        self._new[-1] = Message(role=last["role"], content=content)

    def reset(self, messages: Sequence[Mapping[str, Any]]) -> None:
        """Replace the history. Messages may have images, if the model reads them."""
        self._messages, self._is_reset = [], True
        self._new = [Message(role=m["role"], content=m["content"]) for m in clean_messages(messages)]

    async def generate(self) -> ChatReply:
        """Sample a reply and add it to the history.

        Raises:
            PromptTooLong: there is no room for the first reply.
            ContextWindowExceeded: the history is too long, or the reply reached its maximum length.
            EngineError: the engine failed.
            RuntimeError: there is no new message since the last complete reply.
        """
        if not self._new and not self._can_continue:
            raise RuntimeError("the history ends with the model's reply; append a message before the next one")
        conversation = self._flush()
        n_left = self._count_remaining_tokens(conversation)
        n_tokens = min(self._sampling.max_new_tokens, n_left)
        result, text = await self._sample(conversation, replace(self._sampling, max_new_tokens=n_tokens))
        conversation.add_turn(result, text)
        if result.stop_reason == "abort":
            raise EngineAborted("the engine aborted the request")
        if self._logs_turns:
            logger.info("%s, turn %d: %s", self._rollout.request.id.to_string(), len(conversation.turns), text)
        is_cut_off = self._can_continue = result.stop_reason == StopReason.LENGTH
        if is_cut_off and n_tokens == n_left:
            raise ContextWindowExceeded
        content = strip_thoughts(text).lstrip() if self._removes_thoughts else text
        if content != text:
            conversation.replace_turn(content)
        self._messages.append({"role": "assistant", "content": content})
        return ChatReply(text, is_cut_off)

    async def close(self) -> None:
        """Free the conversation's cache in the engine."""
        await self._engine.end_session(self._rollout.session_id)

    def _count_remaining_tokens(self, conversation: TokenConversation) -> int:
        """Return the maximum number of tokens for the next reply."""
        n_prompt, n_context = len(conversation.next_prompt()), self._engine.info.context_length
        n_left = min(self._max_response_length - (n_prompt - self._n_prompt), n_context - n_prompt)
        if n_left < 1 and not conversation.turns:
            raise PromptTooLong(
                f"the prompt has {n_prompt} tokens, and the engine reads {n_context}, those of the reply included"
            )
        if n_left < 1:
            raise ContextWindowExceeded
        return n_left

    async def _sample(self, conversation: TokenConversation, sampling: SamplingParams) -> tuple[EngineResult, str]:
        """Return a reply and its text. Raises EngineError if generation fails."""
        started, rollout = time.perf_counter(), self._rollout
        prompt_ids, images = conversation.next_prompt(), conversation.images
        if images and not self._engine.info.reads_images:
            raise EngineError(
                "the prompt has images, but this engine reads only text; use infer_backend=skyrl-train with the "
                "embedded engine or vLLM"
            )
        try:
            request = EngineRequest(prompt_ids, sampling, rollout.seed, rollout.session_id, images)
            (result,) = await self._engine.generate([request])
            text = self._encoder.decode(result.token_ids)
        except EngineError:
            raise
        except Exception as error:
            raise EngineError(f"generation failed with {describe_error(error)}") from error
        if not result.token_ids and result.stop_reason != "abort":
            raise EngineError("the engine returned no token")
        rollout.generate_s += time.perf_counter() - started
        return result, text

    def _neutralize(self, text: str) -> str:
        """Split special tokens in a text with an invisible character."""
        text = clean_text(text)
        return self._special_tokens.sub(lambda found: found[0][0] + ZERO_WIDTH_SPACE + found[0][1:], text)

    def _flush(self) -> TokenConversation:
        """Add the new messages to the conversation.

        Raises:
            PromptTooLong, ContextWindowExceeded: the new messages have far more text than fits.
        """
        conversation, n_context = self._rollout.conversation, self._engine.info.context_length
        if conversation is None or self._is_reset:
            if cannot_fit(self._new, n_context):
                if self._rollout.turns:
                    raise ContextWindowExceeded
                raise PromptTooLong(f"the prompt has far more text than the {n_context} tokens that the engine reads")
            if conversation is None:
                conversation = self._rollout.conversation = self._new_conversation(self._new)
            else:
                conversation.replace_history(self._new)
            self._n_prompt = len(conversation.next_prompt())
        elif self._new:
            if cannot_fit(self._new, min(n_context, self._max_response_length)):
                raise ContextWindowExceeded
            conversation.observe(self._new)
        self._messages, self._new, self._is_reset = self.messages, [], False
        return conversation
