"""Tools for the engine contract: the backend under test, requests, and expected results."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from contextlib import aclosing
from dataclasses import dataclass, field
from itertools import pairwise
from string import ascii_lowercase
from typing import Any

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

from skyrl_train.config.policy import LoraConfig
from skyrl_train.inference_engines.base import (
    EngineRequest,
    EngineResult,
    InferenceEngine,
    SamplingParams,
    TokenChunk,
)
from skyrl_train.models.logprobs import response_logprobs
from skyrl_train.models.lora import add_adapter, sync_tensors, trained_parameters
from skyrl_train.types.specs import LoraSpec, SyncKind, TensorSpec
from skyrl_train.weight_sync import (
    MirroredReceiver,
    Receipt,
    SyncOptions,
    SyncPlan,
    WeightMirror,
    WeightSync,
    send,
)
from skyrl_train.weight_sync.base import Transport
from skyrl_train.weight_sync.transfer import SentWeights

NamedTensors = Iterable[tuple[str, torch.Tensor]]
SYNC_TIMEOUT_S = 20.0


@dataclass(frozen=True)
class EngineKit:
    """The backend under test; each test has its own."""

    new: Callable[..., InferenceEngine]
    """Create an engine of `model` that is closed after the test; takes `max_num_seqs` and `max_num_batched_tokens`."""
    model: PreTrainedModel
    """The policy, in float32, with at least 512 tokens of context; a test may change its weights."""
    tokenizer: PreTrainedTokenizerBase
    tolerance: float
    """Maximum absolute difference from the log-probs of the trainer."""
    cache_block_size: int
    """Number of tokens per block of the prefix cache."""
    transport: Transport = "shared"
    """Transport of new weights; "auto" if the engine is in another process."""
    n_reserved_tokens: int = 0
    """Number of tokens of the model's context that the backend does not use."""

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
        return EngineRequest(self.prompt(n_prompt, seed), SamplingParams(n_new, **sampling), seed, session)

    def greedy(self, prompt_ids: list[int], n_new: int) -> list[int]:
        """Generate greedily with transformers."""
        input_ids = torch.tensor([prompt_ids], device=self.model.device)
        output = self.model.generate(
            input_ids,
            attention_mask=torch.ones_like(input_ids),
            do_sample=False,
            max_new_tokens=n_new,
            eos_token_id=self.eos_id,
            pad_token_id=self.tokenizer.pad_token_id,
        )
        return output[0, len(prompt_ids) :].tolist()

    def trainer_logprobs(
        self, request: EngineRequest, result: EngineResult, temperature: float | None = None
    ) -> list[float]:
        """Return the trainer's log-probs of the sampled tokens, by default at the temperature of the request."""
        if temperature is None:
            temperature = request.sampling.temperature or 1.0
        sequences = torch.tensor([request.prompt_ids + result.token_ids], device=self.model.device)
        mask = torch.ones(1, len(result.token_ids), device=self.model.device)
        with torch.no_grad():
            scores = response_logprobs(self.model, sequences, torch.ones_like(sequences), mask, temperature)
        return scores.logprobs[0].tolist()

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
            shaped = _shaped(logits, request, result.token_ids[:i], self.eos_id)
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
        """Make the policy spell the alphabet: b follows a, and so on; after z come `7`, the EOS token, and a again."""
        token_ids = self.tokenizer.convert_tokens_to_ids([*ascii_lowercase, "7", self.tokenizer.eos_token, "a"])
        with torch.no_grad():
            for layer in self.model.model.layers:  # the state of each token is its embedding
                layer.self_attn.o_proj.weight.zero_()
                layer.mlp.down_proj.weight.zero_()
            embeddings, head = self.model.get_input_embeddings().weight.zero_(), self.model.lm_head.weight.zero_()
            for dimension, (token_id, next_id) in enumerate(pairwise(token_ids)):
                embeddings[token_id, dimension] = 1
                head[next_id, dimension] = 10


async def distance(engine: InferenceEngine, kit: EngineKit) -> float:
    """Return the maximum difference between the log-probs of the engine and of the trainer."""
    request = kit.request(40, 20, temperature=0.8, ignore_eos=True)
    (result,) = await engine.generate([request])
    expected = kit.trainer_logprobs(request, result)
    return max(abs(a - b) for a, b in zip(result.logprobs or [], expected, strict=True))


class Listener:
    """A task that streams one request and collects its chunks; a test can wait for tokens."""

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


@dataclass(frozen=True, slots=True)
class TensorSource:
    """A `WeightSource` in this process."""

    named_tensors: Callable[[], NamedTensors]
    sent_weights: SentWeights = field(default_factory=SentWeights)

    async def tensor_specs(self, kind: SyncKind = "full") -> list[TensorSpec]:
        """Return name, shape and dtype of each tensor."""
        return [TensorSpec(name, tuple(tensor.shape), tensor.dtype) for name, tensor in self.named_tensors()]

    async def send_weights(self, plan: SyncPlan) -> Receipt:
        """Send the tensors as planned; a broadcast blocks until they are received."""
        tensors = ((name, tensor.detach()) for name, tensor in self.named_tensors())
        return await asyncio.to_thread(send, plan, tensors, self.sent_weights if plan.tracks_changes else None)


def add_random_adapter(model: PreTrainedModel, **settings: Any) -> None:
    """Add an adapter that changes the model."""
    add_adapter(model, LoraSpec(LoraConfig(**settings), "trainer.policy.model.lora", "base"))
    change_adapter(model, 0)


def change_adapter(model: PreTrainedModel, version: int) -> None:
    """Give the adapter random values, which depend on the version."""
    generator = torch.Generator().manual_seed(version)
    with torch.no_grad():
        for parameter in trained_parameters(model).values():
            parameter.copy_(0.2 * torch.randn(parameter.shape, generator=generator))


@dataclass(frozen=True, slots=True)
class AdapterSource:
    """A `WeightSource` of a model with an adapter, in this process."""

    model: PreTrainedModel

    async def tensor_specs(self, kind: SyncKind = "full") -> list[TensorSpec]:
        """Return name, shape and dtype of each tensor."""
        named = sync_tensors(self.model, kind, torch.Tensor.detach)
        return [TensorSpec(name, tuple(tensor.shape), tensor.dtype) for name, tensor in named]

    async def send_weights(self, plan: SyncPlan) -> Receipt:
        """Send the tensors as planned."""
        return await asyncio.to_thread(send, plan, sync_tensors(self.model, plan.kind, torch.Tensor.detach))


class MirroredSink:
    """A `WeightSink` that uses tensors only after the last one has arrived."""

    n_weight_copies = 1

    def __init__(self) -> None:
        self.mirror = WeightMirror()
        self.tensors: dict[str, torch.Tensor] = {}
        self.kinds: list[SyncKind] = []  # of the syncs so far

    async def receive_weights(self, plan: SyncPlan) -> Receipt:
        """Receive whole tensors."""
        self.kinds.append(plan.kind)
        receiver = MirroredReceiver(plan, self.mirror)
        received = await asyncio.to_thread(list, receiver)
        self.tensors = {name: tensor.clone() for name, tensor in received}
        return receiver.receipt


async def sync_weights(
    engine: InferenceEngine,
    named_tensors: Callable[[], NamedTensors],
    version: int,
    transport: Transport = "shared",
) -> None:
    """Send weights to the engine, as `version`."""
    options = SyncOptions(transport, timeout_s=SYNC_TIMEOUT_S)
    await WeightSync(TensorSource(named_tensors), {"the engine": engine}, options)(version)


def _shaped(logits: torch.Tensor, request: EngineRequest, sampled: list[int], eos_id: int) -> torch.Tensor:
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
