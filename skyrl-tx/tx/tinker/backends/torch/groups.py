"""Requests and the lanes of their samples. Lanes with the same weights form groups of fixed size."""

from dataclasses import dataclass, field

import numpy as np
import torch

from skyrl_train.inference_engines.base import EngineRequest, SamplingParams
from skyrl_train.inference_engines.hf.kv_memory import UNIT
from skyrl_train.inference_engines.hf.region_table import Region
from skyrl_train.inference_engines.hf.scheduler import CachedSequence, Row
from skyrl_train.inference_engines.sampling import Draw
from tx.tinker.backends import requests
from tx.tinker.backends.torch.weights import Weights
from tx.tinker.types import TopLogprobs

SEED_DISTANCE = 0x9E3779B97F4A7C15  # between requests, whose samples have consecutive seeds


@dataclass(slots=True, eq=False)
class TorchRequestState(requests.RequestState[Weights]):
    """A request in progress, with its samples' cache regions."""

    regions: list[int] = field(default_factory=list)
    """Offsets of its samples' cache regions. Each region begins with the prefilled prompt."""
    spare: list[int] = field(default_factory=list)
    """Regions of finished samples, to be reused by samples that have not started."""
    position_offset: int = 0
    """Position of the first sampled token, minus the length of the prompt."""
    last_state: torch.Tensor | None = None
    """Hidden state (1, H) after a prompt that ends with an image. A lane reads only text."""

    @property
    def n_prefilled(self) -> int:
        """Number of prefilled prompt tokens: all but the last, or all if the prompt ends with an image."""
        images, n_prompt = self.spec.images, len(self.spec.prompt)
        return n_prompt if images and images[-1].end == n_prompt else n_prompt - 1

    @property
    def capacity(self) -> int:
        """Cache tokens that a sample needs, without the last token, since it is never read."""
        return -(-(len(self.spec.prompt) + self.spec.params.max_tokens - 1) // UNIT) * UNIT

    def create_sequence(self, index: int, start: int) -> CachedSequence:
        """Create the sequence of a sample. The region at `start` has its prefilled prompt, if any is prefilled."""
        params, prompt = self.spec.params, list(self.spec.prompt)
        sampling = SamplingParams(
            max_new_tokens=params.max_tokens,
            temperature=self.temperature,
            top_k=params.top_k if params.top_k > 0 else -1,
            top_p=params.top_p,
            n_top_logprobs=self.spec.n_top_sampled,
        )
        request = EngineRequest(prompt, sampling, self.seed * SEED_DISTANCE + index)
        sequence = CachedSequence(request, len(prompt) + params.max_tokens, position_offset=self.position_offset)
        sequence.region = Region(start, self.capacity, sequence.token_ids, None, self.n_prefilled)
        return sequence


@dataclass(slots=True, eq=False)
class TorchLane:
    """A running sample, or an idle lane that reads a dummy token."""

    idle: CachedSequence
    sequence: CachedSequence
    request: TorchRequestState | None = None
    number: int = 0
    """The sample's index in its request."""

    @property
    def row(self) -> Row:
        """The lane's part of a forward pass."""
        return Row(self.sequence, 1)

    @property
    def draw(self) -> Draw:
        """Sampling settings of the next token."""
        sequence = self.sequence
        return Draw(sequence.sampling, sequence.request.seed, sequence.token_ids, sequence.n_prompt, frozenset())


@dataclass(slots=True, eq=False)
class TorchGroup:
    """Lanes that form a batch."""

    weights: Weights
    lanes: list[TorchLane]

    @property
    def free(self) -> TorchLane | None:
        """An unused lane, or None."""
        return next((lane for lane in self.lanes if lane.request is None), None)

    @property
    def is_used(self) -> bool:
        """True if any lane is in use."""
        return any(lane.request is not None for lane in self.lanes)


def idle_sequence(region: Region) -> CachedSequence:
    """Create the sequence that an idle lane reads."""
    request = EngineRequest([0], SamplingParams(max_new_tokens=1), seed=0)
    sequence = CachedSequence(request, max_tokens=1)
    sequence.region = region
    return sequence


def top_of(sequence: CachedSequence) -> TopLogprobs | None:
    """Return the most likely tokens at each position, if requested."""
    if not sequence.top_logprobs:
        return None
    tokens = np.array([list(row) for row in sequence.top_logprobs], np.int32)
    return TopLogprobs(tokens, np.array([list(row.values()) for row in sequence.top_logprobs], np.float32))
