"""What clients send: OpenAI's chat and text completions, with the usual extras of vLLM.

Fields that are not known here are ignored, so that newer clients go on working. Those that are known, not offered, and
would change the answer are refused: `NOT_OFFERED`.
"""

from __future__ import annotations

import json
import reprlib
from collections.abc import Mapping
from typing import Annotated, Any

from annotated_types import Ge, Gt, Le, MaxLen, MinLen
from pydantic import AfterValidator, BaseModel, ConfigDict

from skyrl_train.generators.endpoint.errors import refuse

NonEmpty = Annotated[str, MinLen(1)]
TokenId = Annotated[int, Ge(0)]
Count = Annotated[int, Ge(1)]
Penalty = Annotated[float, Ge(-2), Le(2)]

MOST_CHOICES = 128
MOST_PROMPTS = 1024
MOST_TOP_LOGPROBS = 20
LEAST_TOP_P = 1e-9  # of the most likely token alone; 0 means the same

NOTHING: tuple[Any, ...] = (None, False, [], {}, "")
NOT_OFFERED: Mapping[str, tuple[Any, ...]] = {
    "add_generation_prompt": (None, True),
    "allowed_token_ids": NOTHING,
    "audio": NOTHING,
    "bad_words": NOTHING,
    "best_of": (None, 1),
    "chat_template": NOTHING,
    "continue_final_message": NOTHING,
    "documents": NOTHING,
    "echo": NOTHING,
    "function_call": (None, "none", "auto"),
    "functions": NOTHING,
    "guided_choice": NOTHING,
    "guided_grammar": NOTHING,
    "guided_json": NOTHING,
    "guided_regex": NOTHING,
    "logit_bias": NOTHING,
    "modalities": (None, ["text"]),
    "prompt_logprobs": NOTHING,
    "response_format": (None, {"type": "text"}),
    "skip_special_tokens": (None, True),
    "structured_outputs": NOTHING,
    "suffix": NOTHING,
    "tool_choice": (None, "none", "auto"),
    "truncate_prompt_tokens": NOTHING,
    "use_beam_search": NOTHING,
    "web_search_options": NOTHING,
}
"""Known fields, and the values with which they ask for nothing."""


class WireModel(BaseModel):
    """A JSON object: no number is taken for a string, or the other way round."""

    model_config = ConfigDict(strict=True, extra="allow", allow_inf_nan=False)


class ContentPart(WireModel):
    """A piece of a message's content."""

    type: str
    text: str | None = None


class ChatMessage(WireModel):
    """A message of a chat request."""

    role: NonEmpty
    content: str | list[ContentPart] | None = None
    name: str | None = None
    tool_calls: list[dict[str, Any]] | None = None
    tool_call_id: str | None = None
    reasoning_content: str | None = None

    def rendered(self) -> dict[str, Any]:
        """What the chat template reads: plain text, the arguments of tool calls as objects, nothing that is empty."""
        message: dict[str, Any] = {"role": self.role, "content": self._text()}
        for name in ("name", "tool_call_id", "reasoning_content"):
            if value := getattr(self, name):
                message[name] = value
        if self.tool_calls:
            message["tool_calls"] = [_with_arguments(call) for call in self.tool_calls]
        return message

    def _text(self) -> str:
        if isinstance(self.content, str) or self.content is None:
            return self.content or ""
        for part in self.content:
            if part.type != "text" or part.text is None:
                refuse(f"a content part of type {part.type!r}: this model reads text only", param="messages")
        return "".join(part.text or "" for part in self.content)


class StreamOptions(WireModel):
    """`stream_options` of a request."""

    include_usage: bool | None = None


class CompletionOptions(WireModel):
    """What chat and text completions have in common. None is a field that was not set."""

    model: NonEmpty
    max_tokens: Count | None = None
    temperature: Annotated[float, Ge(0), Le(2)] | None = None
    top_p: Annotated[float, Ge(0), Le(1), AfterValidator(lambda p: p or LEAST_TOP_P)] | None = None
    n: Annotated[int, Ge(1), Le(MOST_CHOICES)] | None = None
    stop: NonEmpty | Annotated[list[NonEmpty], MaxLen(16)] | None = None
    seed: Annotated[int, Ge(-(2**63)), Le(2**63 - 1)] | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    top_k: Annotated[int, Ge(-1), AfterValidator(lambda k: k or -1)] | None = None  # 0, too, is off
    min_p: Annotated[float, Ge(0), Le(1)] | None = None
    repetition_penalty: Annotated[float, Gt(0.01), Le(100)] | None = None
    min_tokens: Annotated[int, Ge(0)] | None = None
    stop_token_ids: Annotated[list[TokenId], MaxLen(64)] | None = None
    ignore_eos: bool | None = None
    include_stop_str_in_output: bool | None = None
    return_token_ids: bool | None = None
    session_id: str | int | list[str | int] | None = None

    @property
    def n_choices(self) -> int:
        """Replies asked for, to each prompt."""
        return self.n or 1

    @property
    def n_most(self) -> int | None:
        """Most tokens of a reply."""
        return self.max_tokens

    @property
    def n_top_logprobs(self) -> int | None:
        """How many most likely tokens are to be reported at each position; None: no log-probs at all."""
        raise NotImplementedError

    @property
    def stops(self) -> tuple[str, ...]:
        """Strings that end a reply."""
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())

    @property
    def includes_usage(self) -> bool:
        """Whether the last chunk of a stream is to tell how many tokens there were."""
        return self.stream_options is not None and bool(self.stream_options.include_usage)

    def check_offered(self) -> None:
        """Refuse what would be answered wrongly if it were ignored."""
        for name, values in NOT_OFFERED.items():
            asked = (self.model_extra or {}).get(name)
            if asked not in values:
                refuse(
                    f"{name}={reprlib.repr(asked)} is not offered here; leave {name} out",
                    param=name,
                    code="unsupported",
                )


class ChatRequest(CompletionOptions):
    """The body of POST /v1/chat/completions."""

    messages: Annotated[list[ChatMessage], MinLen(1)]
    max_completion_tokens: Count | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Ge(0), Le(MOST_TOP_LOGPROBS)] | None = None
    tools: list[dict[str, Any]] | None = None
    chat_template_kwargs: dict[str, Any] | None = None

    @property
    def n_most(self) -> int | None:
        """See `CompletionOptions.n_most`; the newer name wins."""
        return self.max_completion_tokens or self.max_tokens

    @property
    def n_top_logprobs(self) -> int | None:
        """See `CompletionOptions.n_top_logprobs`."""
        return (self.top_logprobs or 0) if self.logprobs else None

    @property
    def template_variables(self) -> dict[str, Any]:
        """What the chat template is handed besides the messages."""
        return (self.chat_template_kwargs or {}) | ({"tools": self.tools} if self.tools else {})

    def check_offered(self) -> None:
        """See `CompletionOptions.check_offered`."""
        super().check_offered()
        if self.top_logprobs and not self.logprobs:
            refuse(f"top_logprobs={self.top_logprobs} without logprobs; set logprobs to true", param="top_logprobs")


class CompletionRequest(CompletionOptions):
    """The body of POST /v1/completions: one prompt or several, as text or as token ids."""

    prompt: str | list[TokenId] | list[str] | list[list[TokenId]]
    max_tokens: Count | None = 16
    logprobs: Annotated[int, Ge(0), Le(MOST_TOP_LOGPROBS)] | None = None

    @property
    def n_top_logprobs(self) -> int | None:
        """See `CompletionOptions.n_top_logprobs`."""
        return self.logprobs

    @property
    def prompts(self) -> list[str | list[int]]:
        """Each prompt."""
        if isinstance(self.prompt, str):
            return [self.prompt]
        prompts: list[Any] = list(self.prompt)
        return [prompts] if prompts and isinstance(prompts[0], int) else prompts


def _with_arguments(call: dict[str, Any]) -> dict[str, Any]:
    """A tool call whose arguments are an object, as chat templates expect; OpenAI's clients send them as a string."""
    function = call.get("function")
    if not isinstance(function, dict) or not isinstance(function.get("arguments"), str):
        return call
    try:
        arguments = json.loads(function["arguments"])
    except ValueError:
        return call
    return {**call, "function": {**function, "arguments": arguments}}
