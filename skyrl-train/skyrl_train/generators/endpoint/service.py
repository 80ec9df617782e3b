"""The engine as a service: requests to prompts, prompts to replies, and what is recorded of them. No HTTP here."""

from __future__ import annotations

import asyncio
import json
import secrets
import time
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from typing import Any

from transformers import PreTrainedTokenizerBase

from skyrl_train.errors import EngineError
from skyrl_train.generators.base import seed_of
from skyrl_train.generators.chat_template import ChatEncoder
from skyrl_train.generators.endpoint.recorder import Prompt, Recording
from skyrl_train.generators.endpoint.responses import (
    Answer,
    ChatAnswer,
    CompletionAnswer,
    Json,
    Reply,
    SampledTokens,
    TextStream,
    reply_text,
)
from skyrl_train.generators.endpoint.session import Owners, Session, free_sampling
from skyrl_train.generators.endpoint.wire import (
    MAX_PROMPTS,
    ChatRequest,
    CompletionOptions,
    CompletionRequest,
    RequestError,
    refuse,
)
from skyrl_train.inference_engines.base import EngineRequest, EngineResult, InferenceEngine, SamplingParams

TEMPLATE_VARIANTS = 64
"""Sets of tools and template variables whose renderings are kept."""


@dataclass(frozen=True, slots=True)
class Choice:
    """One reply to come."""

    prompt: Prompt
    sampling: SamplingParams
    session: Session | None
    engine_request: Callable[[], EngineRequest]  # called once, when the engine is asked


@dataclass(frozen=True, slots=True)
class Job:
    """A request that is understood: its choices in order, and how they will be told."""

    asked: CompletionOptions
    choices: list[Choice]
    answer: Answer

    @property
    def owners(self) -> Owners:
        """Sessions that the request belongs to."""
        return frozenset(choice.session for choice in self.choices)


Exchange = tuple[EngineRequest, EngineResult]

OnTokens = Callable[[int, SampledTokens], None]
"""Called with the index of a choice and its new tokens."""


class ModelService:
    """One model under one name."""

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
        """`max_input_length` is the longest prompt in tokens; None: what the engine has room for."""
        longest = engine.info.longest_sequence - 1  # leaves room for a token
        self.model_name = model_name
        self.engine = engine
        self.max_input_length = min(max_input_length or longest, longest)
        self.chat = ChatEncoder(tokenizer, chat_template, chat_template_kwargs)
        self._n_vocabulary = len(tokenizer)
        self._tokenizer = tokenizer
        self._template = chat_template
        self._template_kwargs = dict(chat_template_kwargs or {})
        self._ends_stopped_turns = ends_stopped_turns
        self._chat_variant = lru_cache(maxsize=TEMPLATE_VARIANTS)(self._make_chat_variant)
        self._spell = lru_cache(maxsize=1 << 16)(lambda token_id: self.chat.decode_all([token_id]))
        self._warned: set[str] = set()

    def new_recording(self) -> Recording:
        """For a session."""
        return Recording(self.chat, ends_stopped_turns=self._ends_stopped_turns)

    # -- from requests to jobs

    def chat_job(self, asked: ChatRequest, session: Session | None) -> Job:
        """A chat request.

        Raises:
            RequestError: it cannot be answered.
        """
        self._check(asked)
        prompt = _encoded("messages", lambda: self._chat_prompt(asked, self._recording(session)))
        return Job(asked, self._choices(asked, "messages", prompt, session), ChatAnswer(asked, self._spell))

    def completion_job(self, asked: CompletionRequest, sessions: Sequence[Session | None]) -> Job:
        """A text completion, with one session for each prompt.

        Raises:
            RequestError: it cannot be answered.
        """
        self._check(asked)
        choices: list[Choice] = []
        for told, session in zip(asked.prompts, sessions, strict=True):
            prompt = self._completion_prompt(told, self._recording(session))
            choices += self._choices(asked, "prompt", prompt, session)
        return Job(asked, choices, CompletionAnswer(asked, self._spell))

    def _check(self, asked: CompletionOptions) -> None:
        if asked.model != self.model_name:
            message = f"there is no model {asked.model!r} here; this is {self.model_name!r}"
            refuse(message, param="model", code="model_not_found")
        if isinstance(asked, CompletionRequest) and not 0 < len(asked.prompts) <= MAX_PROMPTS:
            refuse(f"{len(asked.prompts)} prompts; send between 1 and {MAX_PROMPTS}", param="prompt")
        self._check_tokens(asked.stop_token_ids or (), "stop_token_ids")
        asked.check_offered()

    def _check_tokens(self, token_ids: Sequence[int], param: str) -> None:
        if token_ids and max(token_ids) >= self._n_vocabulary:
            refuse(f"token {max(token_ids)}: the vocabulary has {self._n_vocabulary} tokens, from 0", param=param)

    def _recording(self, session: Session | None) -> Recording:
        return self.new_recording() if session is None else session.recording

    def _chat_prompt(self, asked: ChatRequest, recording: Recording) -> Prompt:
        messages = [message.rendered() for message in asked.messages]
        variables = asked.template_variables
        variant = json.dumps(variables) if variables else ""  # in the client's order, which the template shows
        return recording.chat_prompt(messages, self._chat_variant(variant), variant)

    def _completion_prompt(self, told: str | list[int], recording: Recording) -> Prompt:
        if isinstance(told, str):
            return _encoded("prompt", lambda: recording.text_prompt(told))
        self._check_tokens(told, "prompt")
        return recording.token_prompt(told)

    def _choices(self, asked: CompletionOptions, param: str, prompt: Prompt, session: Session | None) -> list[Choice]:
        n_tokens, n_most = len(prompt.token_ids), self.max_input_length
        if not n_tokens:
            refuse("the prompt is empty", param=param)
        if n_tokens > n_most:
            message = (
                f"This model's maximum context length is {n_most} tokens before its reply, and your {param} resulted "
                f"in {n_tokens} tokens; send less"
            )
            refuse(message, param=param, code="context_length_exceeded")
        if session is not None:
            sampling = session.sampling_for(asked, self._warned)
            request = partial(session.engine_request, prompt, sampling)
            return [Choice(prompt, sampling, session, request)] * asked.n_choices
        sampling = free_sampling(asked, self.engine.info.longest_sequence - n_tokens)
        # of SkyRL's clients, who name a conversation for the sake of the engine's cache
        cache = f"client/{asked.session_id}" if isinstance(asked.session_id, str | int) else None
        base = secrets.randbits(64) if asked.seed is None else asked.seed
        seeds = [seed_of(f"{base}/{index}") for index in range(asked.n_choices)]
        requests = [partial(EngineRequest, prompt.token_ids, sampling, seed, cache) for seed in seeds]
        return [Choice(prompt, sampling, None, request) for request in requests]

    def _make_chat_variant(self, variant: str) -> ChatEncoder:
        """The encoder with the template variables of a request; `variant` is JSON, as the key of a cache."""
        if not variant:
            return self.chat
        return ChatEncoder(self._tokenizer, self._template, self._template_kwargs | json.loads(variant))

    # -- from jobs to answers

    async def answer(self, job: Job) -> Json:
        """The whole answer.

        Raises:
            RequestError: the engine failed.
        """
        exchanges = await self._generate(job)
        keeps_stop = bool(job.asked.include_stop_str_in_output)
        texts = [
            reply_text(self.chat.decode, result, request.sampling.stop, keeps_stop=keeps_stop)
            for request, result in exchanges
        ]
        return job.answer.whole(self._record(job, exchanges, texts))

    async def stream(self, job: Job) -> AsyncGenerator[Json]:
        """The answer in chunks, as tokens come. The most likely tokens, if asked for, come with the last chunk.

        Raises:
            RequestError: the engine failed.
        """
        events: asyncio.Queue[tuple[int, SampledTokens] | None] = asyncio.Queue()
        generating = asyncio.create_task(self._generate(job, lambda index, tokens: events.put_nowait((index, tokens))))
        generating.add_done_callback(lambda _: events.put_nowait(None))
        keeps_stop = bool(job.asked.include_stop_str_in_output)
        texts = [TextStream(self.chat.decode, choice.sampling.stop, keeps_stop=keeps_stop) for choice in job.choices]
        tells_logprobs_last = bool(job.asked.n_top_logprobs)
        try:
            yield job.answer.first_chunk([choice.prompt.token_ids for choice in job.choices])
            while (event := await events.get()) is not None:
                index, tokens = event
                piece = texts[index].push(tokens.token_ids)
                yield job.answer.chunk(index, piece, replace(tokens, logprobs=None) if tells_logprobs_last else tokens)
            exchanges = await generating
        finally:
            generating.cancel()
            await asyncio.gather(generating, return_exceptions=True)
        rests = [text.finish(result) for text, (_, result) in zip(texts, exchanges, strict=True)]
        replies = self._record(job, exchanges, [text.text for text in texts])
        for index, (rest, reply) in enumerate(zip(rests, replies, strict=True)):
            tokens = SampledTokens.of(reply.result) if tells_logprobs_last else SampledTokens([], None)
            yield job.answer.last_chunk(index, rest, tokens, reply.result.stop_reason)
        if job.asked.includes_usage:
            yield job.answer.usage_chunk(replies)

    async def _generate(self, job: Job, on_tokens: OnTokens | None = None) -> list[Exchange]:
        """What the engine is asked and answers, choice by choice."""
        started = time.perf_counter()
        sessions = [session for session in job.owners if session is not None]
        requests = [choice.engine_request() for choice in job.choices]
        try:
            answering = self.engine.generate(requests) if on_tokens is None else self._follow(requests, on_tokens)
            return list(zip(requests, await answering, strict=True))
        except BaseException as error:
            for choice, request in zip(job.choices, requests, strict=True):
                if choice.session is not None:
                    choice.session.give_up(request)
            if not isinstance(error, EngineError):
                raise
            for session in sessions:
                session.engine_failure = session.engine_failure or str(error)
            raise RequestError(500, f"the engine failed: {error}", code="engine_error") from error
        finally:
            for session in sessions:
                session.generate_s += time.perf_counter() - started

    async def _follow(self, requests: Sequence[EngineRequest], on_tokens: OnTokens) -> list[EngineResult]:
        """Stream every request, and return the results."""

        async def follow(index: int, request: EngineRequest) -> EngineResult:
            result: EngineResult | None = None
            async with aclosing(self.engine.stream(request)) as chunks:
                async for chunk in chunks:
                    on_tokens(index, SampledTokens(chunk.token_ids, chunk.logprobs))
                    result = chunk.result
            assert result is not None, "the last chunk has the result"
            return result

        tasks = [asyncio.create_task(follow(index, request)) for index, request in enumerate(requests)]
        try:
            return await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    def _record(self, job: Job, exchanges: Sequence[Exchange], texts: Sequence[str]) -> list[Reply]:
        replies = []
        for choice, (request, result), text in zip(job.choices, exchanges, texts, strict=True):
            if choice.session is not None:
                choice.session.record(choice.prompt, request, result, text)
            replies.append(Reply(choice.prompt.token_ids, result, text))
        return replies


def _encoded(param: str, encode: Callable[[], Prompt]) -> Prompt:
    """What `encode` returns; that chat template and tokenizer accept what a client sent is the client's business."""
    try:
        return encode()
    except RequestError:
        raise
    except Exception as error:  # noqa: BLE001, templates are programs, and fail like programs
        refuse(f"{param} cannot be turned into tokens: {type(error).__name__}: {error}", param=param)
