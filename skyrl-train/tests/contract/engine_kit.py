"""What the contract of engines needs: a backend under test, requests, and what they must come to."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
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

from skyrl_train.inference_engines.base import EngineRequest, EngineResult, InferenceEngine, SamplingParams
from skyrl_train.models.logprobs import response_logprobs


@dataclass(frozen=True)
class EngineKit:
    """A backend under test. Every test has its own."""

    new: Callable[..., InferenceEngine]
    """Makes an engine of `model`, closed after the test; takes `max_num_seqs` and `max_num_batched_tokens`."""
    model: PreTrainedModel
    """The policy, in float32, of at least 512 tokens of context; a test may change its weights."""
    tokenizer: PreTrainedTokenizerBase
    tolerance: float
    """How far log-probs may be from the trainer's."""
    reused_at_once: int
    """A cache is used in pieces of this many tokens."""

    @property
    def eos_id(self) -> int:
        """The token that ends a response."""
        return int(self.tokenizer.eos_token_id)

    def prompt(self, n_tokens: int, seed: int = 0) -> list[int]:
        """Random tokens, none of them special."""
        generator = torch.Generator().manual_seed(1000 * seed + n_tokens)
        return torch.randint(3, len(self.tokenizer), (n_tokens,), generator=generator).tolist()

    def request(
        self, n_prompt: int, n_new: int = 8, seed: int = 0, session: str | None = None, **sampling: Any
    ) -> EngineRequest:
        """A request whose prompt belongs to its length and seed."""
        return EngineRequest(self.prompt(n_prompt, seed), SamplingParams(n_new, **sampling), seed, session)

    def greedy(self, prompt_ids: list[int], n_new: int) -> list[int]:
        """What transformers generates."""
        output = self.model.generate(
            torch.tensor([prompt_ids]),
            attention_mask=torch.ones(1, len(prompt_ids), dtype=torch.long),
            do_sample=False,
            max_new_tokens=n_new,
            eos_token_id=self.eos_id,
            pad_token_id=self.tokenizer.pad_token_id,
        )
        return output[0, len(prompt_ids) :].tolist()

    def trainer_logprobs(
        self, request: EngineRequest, result: EngineResult, temperature: float | None = None
    ) -> list[float]:
        """What the trainer computes for the sampled tokens, at the request's temperature unless told otherwise."""
        if temperature is None:
            temperature = request.sampling.temperature or 1.0
        sequences = torch.tensor([request.prompt_ids + result.token_ids])
        mask = torch.ones(1, len(result.token_ids))
        with torch.no_grad():
            scores = response_logprobs(self.model, sequences, torch.ones_like(sequences), mask, temperature)
        return scores.logprobs[0].tolist()

    def logits(self, request: EngineRequest, result: EngineResult) -> torch.Tensor:
        """The logits (n, V) that each sampled token was chosen from."""
        with torch.no_grad():
            logits = self.model(torch.tensor([request.prompt_ids + result.token_ids])).logits[0]
        return logits[len(request.prompt_ids) - 1 : -1]

    def sampling_logprobs(self, request: EngineRequest, result: EngineResult) -> list[float]:
        """Log-probs of the distribution that should have been sampled from, one token after the other."""
        logprobs = []
        for i, logits in enumerate(self.logits(request, result)):
            shaped = _shaped(logits, request, result.token_ids[:i], self.eos_id)
            logprobs.append(shaped.log_softmax(-1)[result.token_ids[i]].item())
        return logprobs

    def add_noise(self, scale: float = 0.02, seed: int = 1) -> None:
        """Change every weight of the policy."""
        generator = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for parameter in self.model.parameters():
                parameter.add_(scale * torch.randn(parameter.shape, generator=generator))

    def teach_spelling(self) -> None:
        """Make the policy continue a with b, b with c, and so on; after z come `7`, the end, and a again."""
        token_ids = self.tokenizer.convert_tokens_to_ids([*ascii_lowercase, "7", self.tokenizer.eos_token, "a"])
        with torch.no_grad():
            for layer in self.model.model.layers:  # each token's state is its embedding and nothing else
                layer.self_attn.o_proj.weight.zero_()
                layer.mlp.down_proj.weight.zero_()
            embeddings, head = self.model.get_input_embeddings().weight.zero_(), self.model.lm_head.weight.zero_()
            for dimension, (token_id, next_id) in enumerate(pairwise(token_ids)):
                embeddings[token_id, dimension] = 1
                head[next_id, dimension] = 10


class Listener:
    """An `on_tokens` that remembers, so that a test can wait for tokens."""

    def __init__(self) -> None:
        self.told: list[tuple[int, list[int], list[float]]] = []

    def __call__(self, index: int, token_ids: list[int], logprobs: list[float]) -> None:
        self.told.append((index, token_ids, logprobs))

    @property
    def n_tokens(self) -> int:
        """How many it heard of."""
        return sum(len(token_ids) for _, token_ids, _ in self.told)

    async def heard(self, n_tokens: int) -> None:
        """Wait for so many tokens, for ten seconds at most."""
        async with asyncio.timeout(60):
            while self.n_tokens < n_tokens:
                await asyncio.sleep(0.001)


def _shaped(logits: torch.Tensor, request: EngineRequest, sampled: list[int], eos_id: int) -> torch.Tensor:
    """Logits (V,) after penalties, temperature and truncation, by transformers' own processors where it has them."""
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
