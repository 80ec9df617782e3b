"""Requests, and the lanes that their samples run in: those with the same weights are in groups of fixed size."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from skyrl_train.inference_engines.base import MIN_TEMPERATURE, EngineRequest, SamplingParams
from skyrl_train.inference_engines.hf.kv_memory import UNIT
from skyrl_train.inference_engines.hf.region_table import Region
from skyrl_train.inference_engines.hf.scheduler import CachedSequence, Row
from skyrl_train.inference_engines.sampling import Draw
from tx.tinker.backends import requests
from tx.tinker.backends.torch.weights import Weights
from tx.tinker.types import TopLogprobs

FAR = 0x9E3779B97F4A7C15  # between the seeds of two requests: those of their samples are neighbours


@dataclass(slots=True, eq=False)
class Ongoing(requests.Ongoing[Weights]):
    """A request on its way, and where its prompt is."""

    regions: list[int] = field(default_factory=list)
    """Where those of its samples begin. Each holds the prompt but for its last token."""
    spare: list[int] = field(default_factory=list)
    """Those of samples that are done, for others that have not begun."""

    @property
    def capacity(self) -> int:
        """Tokens that a sample takes of the cache: the last one is not read."""
        return -(-(len(self.ask.prompt) + self.ask.params.max_tokens - 1) // UNIT) * UNIT

    def sequence(self, number: int, start: int) -> CachedSequence:
        """The sample of a number, of which nothing is chosen yet, and whose region begins at `start`."""
        params, prompt = self.ask.params, list(self.ask.prompt)
        temperature = max(params.temperature, MIN_TEMPERATURE) if params.temperature > 0 else 0.0
        how = SamplingParams(
            max_new_tokens=params.max_tokens,
            temperature=temperature,
            top_k=params.top_k if params.top_k > 0 else -1,
            top_p=params.top_p,
            n_top_logprobs=self.ask.n_top_sampled,
        )
        request = EngineRequest(prompt, how, self.seed * FAR + number)
        sequence = CachedSequence(request, len(prompt) + params.max_tokens)
        sequence.region = Region(start, self.capacity, sequence.token_ids, None, self.n_read)
        return sequence


@dataclass(slots=True, eq=False)
class Lane:
    """A sample on its way, or nothing: then it reads a token that nobody needs."""

    idle: CachedSequence
    sequence: CachedSequence
    request: Ongoing | None = None
    number: int = 0
    """Of the sample in its request."""

    @property
    def row(self) -> Row:
        """Its part of a pass."""
        return Row(self.sequence, 1)

    @property
    def draw(self) -> Draw:
        """How its next token is chosen."""
        sequence = self.sequence
        return Draw(sequence.sampling, sequence.request.seed, sequence.token_ids, sequence.n_prompt, frozenset())


@dataclass(slots=True, eq=False)
class Group:
    """Lanes that are one batch."""

    weights: Weights
    lanes: list[Lane]

    @property
    def free(self) -> Lane | None:
        """A lane that is not in use."""
        return next((lane for lane in self.lanes if lane.request is None), None)

    @property
    def is_used(self) -> bool:
        """Whether any lane is."""
        return any(lane.request is not None for lane in self.lanes)


def idle_sequence(region: Region) -> CachedSequence:
    """What a lane reads that is not in use."""
    request = EngineRequest([0], SamplingParams(max_new_tokens=1), seed=0)
    sequence = CachedSequence(request, max_tokens=1)
    sequence.region = region
    return sequence


def top_of(sequence: CachedSequence) -> TopLogprobs | None:
    """The likeliest tokens of each position, if the request asks for them."""
    if not sequence.top_logprobs:
        return None
    tokens = np.array([list(one) for one in sequence.top_logprobs], np.int32)
    return TopLogprobs(tokens, np.array([list(one.values()) for one in sequence.top_logprobs], np.float32))
