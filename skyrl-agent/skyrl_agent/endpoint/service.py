"""Turns requests into prompts and prompts into replies, and records them. This module knows nothing about HTTP."""

import asyncio
import json
import logging
import secrets
import time
from collections.abc import AsyncGenerator, Callable, Iterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, aclosing, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from functools import lru_cache, partial
from typing import Any

from transformers import PreTrainedTokenizerBase

from skyrl_agent.endpoint.completions import (
    MAX_PROMPTS,
    ChatRequest,
    ChatResponseBuilder,
    CompletionRequest,
    FinishedChoice,
    Json,
    ResponseBuilder,
)
from skyrl_agent.endpoint.messages import MessagesBuilder, MessagesRequest
from skyrl_agent.endpoint.recorder import Prompt, Recording
from skyrl_agent.endpoint.replies import ReplyFormat, ReplyStream, TextStream
from skyrl_agent.endpoint.responses import ResponsesBuilder, ResponsesRequest
from skyrl_agent.endpoint.session import AgentSession, Owners, Sampled, free_sampling
from skyrl_agent.endpoint.wire import CompletionOptions, RequestError, refuse
from skyrl_gym.images import find_images
from skyrl_gym.tools.calls import HARMONY_THOUGHT
from skyrl_train.concurrency import gather_or_cancel
from skyrl_train.errors import DataError, EngineError, OutOfMemoryError, SamplingError
from skyrl_train.generators.chat_template import CONTEXT_TOKENS, ChatEncoder
from skyrl_train.inference_engines.base import (
    EngineRequest,
    EngineResult,
    InferenceEngine,
    SamplingParams,
    TokenChunk,
    hash_seed,
)
from skyrl_train.rendering.template import ChatTemplate

logger = logging.getLogger(__name__)

ChatBody = ChatRequest | ResponsesRequest | MessagesRequest
BodyBuilder = ResponseBuilder | ResponsesBuilder | MessagesBuilder

TEMPLATE_VARIANTS = 64  # maximum number of cached chat encoders, one per set of template variables


@dataclass(frozen=True, slots=True)
class Choice:
    """One reply to generate."""

    prompt: Prompt
    sampling: SamplingParams
    session: AgentSession | None
    engine_request: Callable[[], EngineRequest]  # called once, when generation starts


@dataclass(frozen=True, slots=True)
class Job:
    """A validated request, its choices in order, and the builder of its response."""

    request: CompletionOptions
    choices: list[Choice]
    builder: BodyBuilder
    form: ReplyFormat = field(default_factory=ReplyFormat)
    is_retry: bool = False

    @property
    def owners(self) -> Owners:
        """The sessions of the request's choices."""
        return frozenset(choice.session for choice in self.choices)

    def in_progress(self) -> AbstractAsyncContextManager[list[Sampled] | None]:
        """Wait for the request that this one retries, and return its replies. See `AgentSession.in_progress`."""
        first = self.choices[0]
        if first.session is None or first.prompt.digest is None:
            return nullcontext()
        return first.session.in_progress(first.prompt, first.sampling, len(self.choices) if self.is_retry else 0)


OnTokens = Callable[[int, TokenChunk], None]  # called with the index of a choice and its new tokens


class ModelService:
    """The model that an endpoint serves under a name."""

    def __init__(
        self,
        engine: InferenceEngine,
        tokenizer: PreTrainedTokenizerBase,
        *,
        model_name: str,
        chat_template: str | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        ends_stopped_turns: bool = True,
        max_input_length: int | None = None,
    ) -> None:
        """Create the service. `max_input_length` limits prompts, in tokens. None means the engine's limit."""
        max_length = engine.info.longest_sequence - 1  # leaves room for at least one sampled token
        self.model_name = model_name
        self.engine = engine
        self.max_input_length = min(max_input_length or max_length, max_length)
        self.chat = ChatEncoder(tokenizer, chat_template, chat_template_kwargs)
        self._vocabulary_size = len(tokenizer)
        self._tokenizer = tokenizer
        self._template = chat_template
        self._template_kwargs = dict(chat_template_kwargs or {})
        self._ends_stopped_turns = ends_stopped_turns
        self._chat_variant = lru_cache(maxsize=TEMPLATE_VARIANTS)(self._make_chat_variant)
        self._token_text = lru_cache(maxsize=1 << 16)(lambda token: self.chat.decode_after([token], shows_all=True))
        self._warned: set[str] = set()

    def new_recording(self) -> Recording:
        """Return an empty recording."""
        return Recording(self.chat, ends_stopped_turns=self._ends_stopped_turns)

    # -- from requests to jobs

    def chat_job(self, body: ChatBody, session: AgentSession | None, *, is_retry: bool = False) -> Job:
        """Validate and encode a request of any chat API. Raise RequestError if it is invalid.

        With `is_retry`, the client repeats a request. It gets the recorded reply, if there is one.
        """
        request, prompt, form = self.encode_chat(body, session)
        choices = self._choices(request, "messages", prompt, session)
        builder: BodyBuilder
        match body:
            case ChatRequest():
                builder = ChatResponseBuilder(body, self._token_text)
            case ResponsesRequest():
                builder = ResponsesBuilder(body)
            case MessagesRequest():
                builder = MessagesBuilder(body)
        return Job(request, choices, builder, form, is_retry)

    def encode_chat(self, body: ChatBody, session: AgentSession | None) -> tuple[ChatRequest, Prompt, ReplyFormat]:
        """Return a request as a chat request, its prompt, and the format of the replies."""
        request = body if isinstance(body, ChatRequest) else body.to_chat(self._warned)
        self._check(request)
        with _encoding("tools"):
            parameters = request.tool_parameters
        with _encoding("messages"):
            effort = {"reasoning_effort": request.reasoning_effort} if request.reasoning_effort else {}
            tools = {"tools": request.tools} if request.tools else {}
            variables = effort | (request.chat_template_kwargs or {}) | tools
            variant = json.dumps(variables) if variables else ""  # unsorted: their order may matter to the template
            messages = [message.to_message() for message in request.messages]
            if find_images(messages) and self.chat.find_text_model() is not None:
                refuse(f"the model {self.model_name!r} reads only text; remove the images", param="messages")
            chat, form = self._chat_variant(variant)
            prompt = self._recording(session).chat_prompt(messages, chat, variant, tools=parameters or None)
        start = self.chat.decode_all(prompt.token_ids[-CONTEXT_TOKENS:]).rstrip()
        open_tag = next((tag for tag in form.thought_tags if start.endswith(tag)), None)
        offered = parameters if parameters and request.may_call_tools else None
        max_calls = 1 if request.parallel_tool_calls is False else None
        form = replace(form, open_tag=open_tag, tools=offered, max_calls=max_calls)
        return request, prompt, form

    def completion_job(self, request: CompletionRequest, sessions: Sequence[AgentSession | None]) -> Job:
        """Validate and encode a text completion, with one session per prompt. Raise RequestError if it is invalid."""
        self._check(request)
        if not 0 < len(request.prompts) <= MAX_PROMPTS:
            refuse(f"{len(request.prompts)} prompts; send between 1 and {MAX_PROMPTS}", param="prompt")
        choices: list[Choice] = []
        for text_or_ids, session in zip(request.prompts, sessions, strict=True):
            recording = self._recording(session)
            if isinstance(text_or_ids, str):
                with _encoding("prompt"):
                    prompt = recording.text_prompt(text_or_ids)
            else:
                self._check_tokens(text_or_ids, "prompt")
                prompt = recording.token_prompt(text_or_ids)
            choices += self._choices(request, "prompt", prompt, session)
        return Job(request, choices, ResponseBuilder(request, self._token_text))

    def _check(self, request: CompletionOptions) -> None:
        if request.model != self.model_name:
            message = f"there is no model {request.model!r} here; this is {self.model_name!r}"
            refuse(message, param="model", code="model_not_found")
        self._check_tokens(request.stop_token_ids or (), "stop_token_ids")
        request.check_offered()

    def _check_tokens(self, token_ids: Sequence[int], param: str) -> None:
        if token_ids and max(token_ids) >= self._vocabulary_size:
            refuse(f"token {max(token_ids)}: the vocabulary has {self._vocabulary_size} tokens, from 0", param=param)

    def _recording(self, session: AgentSession | None) -> Recording:
        return self.new_recording() if session is None else session.recording

    def _choices(
        self, request: CompletionOptions, param: str, prompt: Prompt, session: AgentSession | None
    ) -> list[Choice]:
        n_tokens, max_tokens = len(prompt.token_ids), self.max_input_length
        if not n_tokens:
            refuse("the prompt is empty", param=param)
        if n_tokens > max_tokens:
            message = (
                f"This model's maximum context length is {max_tokens} tokens before its reply, and your {param} "
                f"resulted in {n_tokens} tokens; send less"
            )
            refuse(message, param=param, code="context_length_exceeded")
        if session is not None:
            sampling = session.sampling_for(request, self._warned)
            new_request = partial(session.engine_request, prompt, sampling)
            return [Choice(prompt, sampling, session, new_request)] * request.n_choices
        sampling = free_sampling(request, self.engine.info.longest_sequence - n_tokens)
        # SkyRL's clients pass a session id so that the engine keeps the conversation's cache.
        cache = f"client/{request.session_id}" if isinstance(request.session_id, str | int) else None
        base = secrets.randbits(64) if request.seed is None else request.seed
        new_request = partial(EngineRequest, prompt.token_ids, sampling, session_id=cache, images=prompt.images)
        seeds = [hash_seed(f"{base}/{index}") for index in range(request.n_choices)]
        return [Choice(prompt, sampling, None, partial(new_request, seed=seed)) for seed in seeds]

    def _make_chat_variant(self, variant: str) -> tuple[ChatEncoder, ReplyFormat]:
        """Return the encoder for a request's template variables, and the format of the replies to its prompts.

        `variant` is the variables' JSON, usable as a cache key.
        """
        variables = self._template_kwargs | (json.loads(variant) if variant else {})
        tools = variables.get("tools")
        template = ChatTemplate(self._tokenizer, self._template, variables | {"tools": None})
        is_bare = None
        if tools:
            try:
                template.check_tools([{"role": "user", "content": "?"}], tools)
            except DataError as error:
                refuse(str(error), param="tools", code="unsupported")
            is_bare = template.find_call_style(tools)
            if is_bare is None and "calls" not in self._warned:
                self._warned.add("calls")
                logger.warning(
                    "The chat template writes tool calls in a format that is not parsed, so replies may have none."
                )
        tags = template.thought_tags | (HARMONY_THOUGHT if template.has_channels else {})
        form = ReplyFormat(tags, has_channels=template.has_channels, calls_are_bare=bool(is_bare))
        chat = ChatEncoder(self._tokenizer, self._template, variables) if variant else self.chat
        return chat, form

    # -- from jobs to answers

    async def answer(self, job: Job) -> Json:
        """Return the complete answer. Raise RequestError if the engine fails."""
        async with job.in_progress() as repeated:
            sampled = await self._generate(job, None, repeated)
            return job.builder.complete(self._finish(job, self._streams(job), sampled))

    async def stream(self, job: Job) -> AsyncGenerator[Json | str]:
        """Yield the events of the response. Raise RequestError if the engine fails."""
        tokens: asyncio.Queue[tuple[int, TokenChunk] | None] = asyncio.Queue()
        async with job.in_progress() as repeated:
            for index, one in enumerate(repeated or ()):
                tokens.put_nowait((index, TokenChunk(one.result.token_ids, one.result.logprobs or [])))
            generating = asyncio.create_task(self._generate(job, lambda *new: tokens.put_nowait(new), repeated))
            generating.add_done_callback(lambda _: tokens.put_nowait(None))
            streams = self._streams(job)
            try:
                for event in job.builder.start([choice.prompt.token_ids for choice in job.choices]):
                    yield event
                while (new := await tokens.get()) is not None:
                    for event in job.builder.chunk(new[0], *streams[new[0]].push(new[1].token_ids), new[1]):
                        yield event
                sampled = await generating
            finally:
                generating.cancel()
                await asyncio.gather(generating, return_exceptions=True)
            replies = self._finish(job, streams, sampled)
        for index, finished in enumerate(replies):
            for event in job.builder.end(index, finished):
                yield event
        for last_event in job.builder.finish(replies):
            yield last_event

    def _streams(self, job: Job) -> list[ReplyStream]:
        keeps_stop = bool(job.request.include_stop_str_in_output)
        # The text of a completion continues its prompt.
        decode = self.chat.decode_after if isinstance(job.request, CompletionRequest) else self.chat.decode
        texts = [TextStream(decode, choice.sampling.stop, keeps_stop=keeps_stop) for choice in job.choices]
        return [ReplyStream(text, job.form) for text in texts]

    def _finish(self, job: Job, streams: Sequence[ReplyStream], sampled: Sequence[Sampled]) -> list[FinishedChoice]:
        """Record and return the replies."""
        replies = []
        for choice, stream, one in zip(job.choices, streams, sampled, strict=True):
            thought, content, reply = stream.finish(one.result, one.request.seed)
            if choice.session is not None and not one.is_recorded:
                choice.session.record(choice.prompt, one, reply)
            replies.append(FinishedChoice(choice.prompt.token_ids, one.result, reply, thought, content))
        return replies

    async def _generate(self, job: Job, on_tokens: OnTokens | None, repeated: list[Sampled] | None) -> list[Sampled]:
        """Return the engine's request and result of each choice. With `on_tokens`, stream new tokens to it."""
        if repeated is not None:
            return repeated
        started = time.perf_counter()
        sessions = [session for session in job.owners if session is not None]
        requests = [choice.engine_request() for choice in job.choices]
        try:
            results = self.engine.generate(requests) if on_tokens is None else self._stream_all(requests, on_tokens)
            return [Sampled(request, result) for request, result in zip(requests, await results, strict=True)]
        except BaseException as error:
            for choice, request in zip(job.choices, requests, strict=True):
                if choice.session is not None:
                    choice.session.give_up(request)
            if isinstance(error, SamplingError):
                refuse(str(error))
            if not isinstance(error, EngineError | OutOfMemoryError):
                raise
            for session in sessions:
                session.engine_failure = session.engine_failure or str(error)
            raise RequestError(500, f"the engine failed: {error}", code="engine_error") from error
        finally:
            for session in sessions:
                session.generate_s += time.perf_counter() - started

    async def _stream_all(self, requests: Sequence[EngineRequest], on_tokens: OnTokens) -> list[EngineResult]:
        """Stream all requests concurrently, and return their results."""

        async def stream(index: int, request: EngineRequest) -> EngineResult:
            result: EngineResult | None = None
            async with aclosing(self.engine.stream(request)) as chunks:
                async for chunk in chunks:
                    on_tokens(index, chunk)
                    result = chunk.result
            assert result is not None, "the last chunk has the result"
            return result

        return await gather_or_cancel(stream(index, request) for index, request in enumerate(requests))


@contextmanager
def _encoding(param: str) -> Iterator[None]:
    """Convert any exception in the block to a RequestError for `param`."""
    try:
        yield
    except RequestError:
        raise
    except DataError as error:
        refuse(str(error), param=param)
    except Exception as error:  # noqa: BLE001, chat templates may raise anything
        refuse(f"cannot encode {param}: {type(error).__name__}: {error}", param=param)
