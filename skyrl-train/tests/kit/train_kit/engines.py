"""Inference engines under test, and reference results from transformers and the trainer."""

import asyncio
import copy
import functools
import os
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from contextlib import aclosing, asynccontextmanager, suppress
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from pathlib import Path
from string import ascii_lowercase
from typing import Any

import pytest
import torch
from transformers import (
    LogitsProcessor,
    MinPLogitsWarper,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from skyrl_train.errors import EngineError
from skyrl_train.generators.base import RolloutRequest
from skyrl_train.generators.rollout import Rollout
from skyrl_train.inference_engines.base import EngineRequest, EngineResult, InferenceEngine, SamplingParams, TokenChunk
from skyrl_train.inference_engines.hf import PackedEngine
from skyrl_train.inference_engines.hf.embedded import EmbeddedEngine
from skyrl_train.models.loading import load_tokenizer
from skyrl_train.models.logprobs import response_logprobs
from skyrl_train.types import PromptRow, TrajectoryID
from skyrl_train.weight_sync.base import Transport
from train_kit.models import load_on_cpu
from train_kit.weight_sync import sync_weights

LIMITS = {"max_num_seqs": 32, "max_num_batched_tokens": 1024, "max_cache_bytes": 1 << 28}
"""Options of an embedded engine with room for every test."""


def make_engine(path: Path, pid_file: Path | None = None, **limits: Any) -> Callable[[], PackedEngine]:
    """Return a picklable function that creates an embedded engine of the model at `path`, in float32.

    It writes its process id to `pid_file`, because a process forked from the zygote has a different id than its shim.
    """
    return partial(_make_engine, path, pid_file, **limits)


def _make_engine(path: Path, pid_file: Path | None, **limits: Any) -> PackedEngine:
    if pid_file is not None:
        pid_file.write_text(str(os.getpid()))
    model, tokenizer = _load(path)
    return PackedEngine(copy.deepcopy(model), tokenizer, owns_model=True, **{**LIMITS, **limits})


@functools.cache
def _load(path: Path) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """Load a model once per process. Each connection to an engine process creates a separate engine."""
    return load_on_cpu(path), load_tokenizer(str(path))


@dataclass(frozen=True)
class EngineKit:
    """The backend under test. Each test gets a new one."""

    new: Callable[..., InferenceEngine]
    """Create an engine of `model`, closed after the test. Takes `max_num_seqs` and `max_num_batched_tokens`."""
    model: PreTrainedModel
    """The policy, in float32, with at least 512 tokens of context. Tests may change its weights."""
    tokenizer: PreTrainedTokenizerBase
    tolerance: float
    """Maximum absolute difference from the trainer's log-probs."""
    cache_block_size: int
    """Number of tokens per block of the prefix cache."""
    transport: Transport = "shared"
    """Transport of new weights: "auto" if the engine is in another process."""
    n_reserved_tokens: int = 0
    """Number of tokens of the model's context that the backend does not use."""
    temperature: float = 1.0
    """Temperature of requests by default. 0 for backends that do not derive tokens from the seed."""

    @property
    def eos_id(self) -> int:
        """The EOS token."""
        return int(self.tokenizer.eos_token_id)

    def prompt(self, n_tokens: int, seed: int = 0) -> list[int]:
        """Return random tokens without special ones."""
        generator = torch.Generator().manual_seed(1000 * seed + n_tokens)
        return torch.randint(3, len(self.tokenizer), (n_tokens,), generator=generator).tolist()

    def request(
        self, n_prompt: int, n_new: int = 8, seed: int = 0, session: str | None = None, **sampling: Any
    ) -> EngineRequest:
        """Return a request whose prompt depends on its length and seed."""
        sampling.setdefault("temperature", self.temperature)
        return EngineRequest(self.prompt(n_prompt, seed), SamplingParams(n_new, **sampling), seed, session)

    def greedy(self, prompt_ids: list[int], n_new: int) -> list[int]:
        """Generate greedily with transformers."""
        return greedy(self.model, prompt_ids, n_new, self.eos_id)

    def trainer_logprobs(
        self, request: EngineRequest, result: EngineResult, temperature: float | None = None
    ) -> list[float]:
        """Return the trainer's log-probs of the sampled tokens, by default at the temperature of the request."""
        return trainer_logprobs(self.model, request, result, temperature)

    def logits(self, request: EngineRequest, result: EngineResult) -> torch.Tensor:
        """Return the logits (n, V) from which the tokens were sampled."""
        with torch.no_grad():
            input_ids = torch.tensor([request.prompt_ids + result.token_ids], device=self.model.device)
            logits = self.model(input_ids).logits[0].cpu()
        return logits[len(request.prompt_ids) - 1 : -1]

    def sampling_logprobs(self, request: EngineRequest, result: EngineResult) -> list[float]:
        """Return the log-probs of the sampled tokens under the penalized and truncated distribution."""
        logprobs = []
        for i, logits in enumerate(self.logits(request, result)):
            shaped = shaped_logits(logits, request, result.token_ids[:i], self.eos_id)
            logprobs.append(shaped.log_softmax(-1)[result.token_ids[i]].item())
        return logprobs

    async def sync(self, engine: InferenceEngine, version: int) -> None:
        """Send the current weights of `model` to the engine, as `version`."""
        await sync_weights(engine, self.model.named_parameters, version, self.transport)

    def add_noise(self, scale: float = 0.02, seed: int = 1) -> None:
        """Change every weight of the policy."""
        generator = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for parameter in self.model.parameters():
                noise = scale * torch.randn(parameter.shape, generator=generator)
                parameter.add_(noise.to(parameter.device))

    def teach_spelling(self) -> None:
        """Make the policy spell the alphabet: b follows a, and so on. After z come `7`, the EOS token, and a again."""
        token_ids = self.tokenizer.convert_tokens_to_ids([*ascii_lowercase, "7", self.tokenizer.eos_token, "a"])
        with torch.no_grad():
            for layer in self.model.model.layers:  # the state of each token is its embedding
                layer.self_attn.o_proj.weight.zero_()
                layer.mlp.down_proj.weight.zero_()
            embeddings, head = self.model.get_input_embeddings().weight.zero_(), self.model.lm_head.weight.zero_()
            for dimension, (token_id, next_id) in enumerate(pairwise(token_ids)):
                embeddings[token_id, dimension] = 1
                head[next_id, dimension] = 10


def greedy(model: PreTrainedModel, prompt_ids: list[int], n_new: int, eos_id: int) -> list[int]:
    """Generate greedily with transformers."""
    input_ids = torch.tensor([prompt_ids], device=model.device)
    options = {"do_sample": False, "max_new_tokens": n_new, "eos_token_id": eos_id, "pad_token_id": 0}
    output = model.generate(input_ids, attention_mask=torch.ones_like(input_ids), **options)
    return output[0, len(prompt_ids) :].tolist()


@torch.no_grad()
@asynccontextmanager
async def embedded_kit(
    create: Callable[..., EmbeddedEngine[Any]],
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    tolerance: float = 1e-5,
) -> AsyncIterator[EngineKit]:
    """Yield a kit whose engines generate with the tensors of `model`, and close them afterwards."""
    engines = []

    def new(**options: int) -> EmbeddedEngine[Any]:
        engines.append(create(model, tokenizer, **LIMITS | options))
        return engines[-1]

    yield EngineKit(new, model, tokenizer, tolerance, cache_block_size=1)
    for engine in engines:
        await engine.close()


def trainer_logprobs(
    model: PreTrainedModel, request: EngineRequest, result: EngineResult, temperature: float | None = None
) -> list[float]:
    """Return the trainer's log-probs of the sampled tokens, by default at the temperature of the request."""
    sequences = torch.tensor([request.prompt_ids + result.token_ids], device=model.device)
    mask = torch.ones(1, len(result.token_ids), device=model.device)
    temperature = temperature or request.sampling.temperature or 1.0
    images = [request.images]
    scores = response_logprobs(model, sequences, torch.ones_like(sequences), mask, temperature, images=images)
    return scores.logprobs[0].tolist()


async def distance(engine: InferenceEngine, kit: EngineKit) -> float:
    """Return the maximum difference between the log-probs of the engine and of the trainer."""
    request = kit.request(40, 20, temperature=0.8, ignore_eos=True)
    (result,) = await engine.generate([request])
    expected = kit.trainer_logprobs(request, result)
    return max(abs(a - b) for a, b in zip(result.logprobs or [], expected, strict=True))


class Listener:
    """A task that streams one request and collects its chunks. Tests can wait for tokens."""

    def __init__(self, engine: InferenceEngine, request: EngineRequest) -> None:
        self.chunks: list[TokenChunk] = []
        self.task = asyncio.create_task(self._listen(engine, request))

    @property
    def token_ids(self) -> list[int]:
        """Tokens received so far."""
        return [token_id for chunk in self.chunks for token_id in chunk.token_ids]

    @property
    def logprobs(self) -> list[float]:
        """Log-probs received so far."""
        return [logprob for chunk in self.chunks for logprob in chunk.logprobs]

    @property
    def n_tokens(self) -> int:
        """Number of tokens received so far."""
        return len(self.token_ids)

    async def wait_for(self, n_tokens: int) -> None:
        """Wait for this many tokens, for at most a minute."""
        async with asyncio.timeout(60):
            while self.n_tokens < n_tokens:
                await asyncio.sleep(0.001)

    async def settle(self) -> int:
        """Wait until no more tokens arrive (a paused engine may still send some), and return their number."""
        async with asyncio.timeout(10):
            n_before = -1
            while self.n_tokens > n_before:
                n_before = self.n_tokens
                await asyncio.sleep(0.1)
        return n_before

    async def result(self) -> EngineResult:
        """Return the result of the whole request."""
        return await self.task

    async def _listen(self, engine: InferenceEngine, request: EngineRequest) -> EngineResult:
        async with aclosing(engine.stream(request)) as chunks:
            async for chunk in chunks:
                self.chunks.append(chunk)
        result = self.chunks[-1].result
        assert result is not None
        return result


def assert_same(actual: EngineResult, expected: EngineResult, tolerance: float) -> None:
    assert actual.token_ids == expected.token_ids
    assert actual.stop_reason == expected.stop_reason
    assert actual.logprobs == pytest.approx(expected.logprobs, abs=2 * tolerance)


def assert_agrees(kit: EngineKit, request: EngineRequest, result: EngineResult) -> None:
    """Assert that the log-probs equal the trainer's."""
    assert result.logprobs == pytest.approx(kit.trainer_logprobs(request, result), abs=kit.tolerance), request.sampling


def start(engine: InferenceEngine, request: EngineRequest, method: str) -> asyncio.Task[EngineResult]:
    """Start a task that serves a request with `generate` or `stream`."""
    if method == "stream":
        return Listener(engine, request).task

    async def generate() -> EngineResult:
        (result,) = await engine.generate([request])
        return result

    return asyncio.create_task(generate())


class RecordedEngine(PackedEngine):
    """The embedded engine, with a record of its requests and results."""

    def __init__(self, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, **limits: Any) -> None:
        super().__init__(model, tokenizer, **{**LIMITS, **limits})
        self.exchanges: list[tuple[EngineRequest, EngineResult]] = []
        self.ended: list[str] = []

    async def generate(self, requests: Sequence[EngineRequest]) -> list[EngineResult]:
        recorded = copy.deepcopy(list(requests))
        results = await super().generate(requests)
        self.exchanges += zip(recorded, results, strict=True)
        return results

    async def stream(self, request: EngineRequest) -> AsyncGenerator[TokenChunk, None]:
        recorded = copy.deepcopy(request)
        async with aclosing(super().stream(request)) as chunks:
            async for chunk in chunks:
                if chunk.result is not None:
                    self.exchanges.append((recorded, chunk.result))
                yield chunk

    async def end_session(self, session_id: str) -> None:
        self.ended.append(session_id)
        await super().end_session(session_id)

    def session(self, id: TrajectoryID, attempt: int = 0) -> list[tuple[EngineRequest, EngineResult]]:
        """Return the exchanges of one attempt at a rollout, in order."""
        session_id = Rollout(RolloutRequest(id, PromptRow(id.instance_id, [], None, {})), 0, attempt).session_id
        return [(request, result) for request, result in self.exchanges if request.session_id == session_id]


class SharedEngines:
    """Engines that tests share, one per set of options, because starting an engine is slow."""

    def __init__(self, start: Callable[..., InferenceEngine], model: PreTrainedModel, transport: Transport) -> None:
        self._start = start
        self._model = model
        self._transport = transport
        self._engines: dict[str, InferenceEngine] = {}

    def new(self, **options: Any) -> InferenceEngine:
        """Return an engine with the initial weights, as version 0, and an empty cache."""
        key = repr(sorted(options.items()))
        if key not in self._engines:
            self._engines[key] = self._start(**options)
        return self._engines[key]

    async def reset(self) -> None:
        """Abort unfinished requests, restore the initial weights, and drop closed engines."""
        for key, engine in list(self._engines.items()):
            try:
                await engine.abort()
                with suppress(EngineError):
                    await engine.resume()
                await engine.wake_up()
                await sync_weights(engine, self._model.named_parameters, 0, self._transport)
            except EngineError:
                del self._engines[key]
                await engine.close()

    async def close(self) -> None:
        """Close all engines."""
        for engine in self._engines.values():
            await engine.close()


def shaped_logits(logits: torch.Tensor, request: EngineRequest, sampled: list[int], eos_id: int) -> torch.Tensor:
    """Return the logits (V,) after penalties, temperature and truncation, with processors of transformers."""
    sampling = request.sampling
    scores, input_ids = logits[None].clone(), torch.tensor([request.prompt_ids + sampled])
    if sampling.repetition_penalty != 1:
        scores = RepetitionPenaltyLogitsProcessor(sampling.repetition_penalty)(input_ids, scores)
    for token_id in set(sampled):
        scores[0, token_id] -= sampling.presence_penalty + sampling.frequency_penalty * sampled.count(token_id)
    if len(sampled) < sampling.min_new_tokens:
        scores[0, [eos_id, *sampling.stop_token_ids]] = -torch.inf
    warpers: list[LogitsProcessor] = [TemperatureLogitsWarper(sampling.temperature)]
    if sampling.min_p > 0:
        warpers.append(MinPLogitsWarper(sampling.min_p))
    if sampling.top_k > 0:
        warpers.append(TopKLogitsWarper(sampling.top_k))
    if sampling.top_p < 1:
        warpers.append(TopPLogitsWarper(sampling.top_p))
    for warper in warpers:
        scores = warper(input_ids, scores)
    return scores[0]
