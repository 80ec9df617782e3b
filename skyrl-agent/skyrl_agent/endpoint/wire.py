"""Options and errors that all APIs share. They are OpenAI's, with the usual extras of vLLM.

Unknown fields are ignored, so that newer clients keep working. Known fields that would change the answer but are not
supported are rejected (see `NOT_OFFERED`).

The types of the `openai` package are not used. Its request types check neither ranges nor message contents, and its
response types make this code longer and each chunk slower to build.
"""

import reprlib
from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, NoReturn

from annotated_types import Ge, Gt, Le, MaxLen, MinLen
from pydantic import AfterValidator, BaseModel, ConfigDict

NonEmpty = Annotated[str, MinLen(1)]
TokenId = Annotated[int, Ge(0)]
Count = Annotated[int, Ge(1)]
Penalty = Annotated[float, Ge(-2), Le(2)]

MAX_CHOICES = 128
MIN_TOP_P = 1e-9  # keeps only the most likely token, as 0 does

UNSET: tuple[Any, ...] = (None, False, [], {}, "")
NOT_OFFERED: Mapping[str, tuple[Any, ...]] = {
    **dict.fromkeys(("allowed_token_ids", "audio", "bad_words", "chat_template", "continue_final_message"), UNSET),
    **dict.fromkeys(("documents", "echo", "functions", "logit_bias", "prompt_logprobs", "structured_outputs"), UNSET),
    **dict.fromkeys(("guided_choice", "guided_grammar", "guided_json", "guided_regex", "suffix"), UNSET),
    **dict.fromkeys(("truncate_prompt_tokens", "use_beam_search", "web_search_options"), UNSET),
    "add_generation_prompt": (None, True),
    "best_of": (None, 1),
    "function_call": (None, "none", "auto"),
    "modalities": (None, ["text"]),
    "response_format": (None, {"type": "text"}),
    "skip_special_tokens": (None, True),
    "tool_choice": (None, "none", "auto"),
}
"""Known fields that are rejected, with the values that are accepted because they change nothing."""


class RequestError(Exception):
    """An error response to a request.

    OpenAI's clients raise BadRequestError for status 400 and NotFoundError for 404. For 500 and 503 they retry first,
    and then raise InternalServerError.
    """

    def __init__(self, status: int, message: str, *, param: str | None = None, code: str | None = None) -> None:
        """Create the error. `param` names the field of the request. `code` identifies the error for programs."""
        super().__init__(message)
        self.status = status
        self.message = message
        self.param = param
        self.code = code

    def body(self) -> dict[str, Any]:
        """Return OpenAI's error body."""
        kind = "invalid_request_error" if self.status < 500 else "server_error"
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}


def refuse(message: str, *, param: str | None = None, code: str | None = None) -> NoReturn:
    """Raise a RequestError with status 400: the client must change its request."""
    raise RequestError(400, message, param=param, code=code)


def invalid(error: Mapping[str, Any]) -> RequestError:
    """Convert a validation error of pydantic to a RequestError with status 400."""
    is_json = error["type"] != "json_invalid"  # otherwise the location is a position in the text
    where = [str(part) for part in error["loc"] if is_json]
    return RequestError(400, f"{'.'.join(where) or 'body'}: {error['msg']}", param=where[0] if where else None)


def unavailable(reason: str) -> RequestError:
    """Return an error with status 503. Clients retry it."""
    return RequestError(503, reason, code="unavailable")


def unknown_session(session_id: str) -> RequestError:
    """Return an error with status 404. Clients do not retry it."""
    message = f"there is no open session {session_id!r}: it has ended, or never started"
    return RequestError(404, message, code="session_not_found")


class WireModel(BaseModel):
    """A JSON object with strict validation: strings and numbers are not converted into each other."""

    model_config = ConfigDict(strict=True, extra="allow", allow_inf_nan=False)


class StreamOptions(WireModel):
    """`stream_options` of a request."""

    include_usage: bool | None = None


class CompletionOptions(WireModel):
    """Fields that all requests share. None means not set."""

    not_offered: ClassVar[Mapping[str, tuple[Any, ...]]] = NOT_OFFERED

    model: NonEmpty
    max_tokens: Count | None = None
    temperature: Annotated[float, Ge(0), Le(2)] | None = None
    top_p: Annotated[float, Ge(0), Le(1), AfterValidator(lambda p: p or MIN_TOP_P)] | None = None
    n: Annotated[int, Ge(1), Le(MAX_CHOICES)] | None = None
    stop: NonEmpty | Annotated[list[NonEmpty], MaxLen(16)] | None = None
    seed: Annotated[int, Ge(-(2**63)), Le(2**63 - 1)] | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    top_k: Annotated[int, Ge(-1), AfterValidator(lambda k: k or -1)] | None = None  # 0 also means off
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
        """Number of replies to each prompt."""
        return self.n or 1

    @property
    def max_new_tokens(self) -> int | None:
        """Maximum number of tokens of a reply."""
        return self.max_tokens

    @property
    def n_top_logprobs(self) -> int | None:
        """Number of most likely tokens to report at each position. None requests no logprobs at all."""
        raise NotImplementedError

    @property
    def stops(self) -> tuple[str, ...]:
        """Strings that end a reply."""
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())

    @property
    def includes_usage(self) -> bool:
        """True if a stream ends with a chunk that counts tokens."""
        return self.stream_options is not None and bool(self.stream_options.include_usage)

    def check_offered(self) -> None:
        """Reject unsupported fields that would change the answer."""
        for name, values in self.not_offered.items():
            value = (self.model_extra or {}).get(name)
            if value not in values:
                message = f"{name}={reprlib.repr(value)} is not supported; remove {name}"
                refuse(message, param=name, code="unsupported")
