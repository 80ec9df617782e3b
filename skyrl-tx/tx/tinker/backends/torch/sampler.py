"""Continuous batching: samples join and leave the running batch between tokens.

Lanes with the same weights form a group. A group's forward passes have a fixed size and read one token per lane.
Prompts are prefilled separately, and attention pads each lane to a length that depends only on the lane's length. So a
lane's tokens depend neither on the number of other lanes nor on their lengths.

The forward passes and the cache come from the embedded engine of `skyrl_train`. The whole engine is unsuitable, because
its batch size varies and it supports neither adapters nor prompt log-probs.
"""

from collections.abc import Callable, Iterator, Sequence

import numpy as np
import torch
from transformers import PreTrainedModel

from skyrl_train.inference_engines.hf.attention import hidden_states
from skyrl_train.inference_engines.hf.kv_memory import UNIT, Copy, Extents, KVMemory
from skyrl_train.inference_engines.hf.region_table import Region
from skyrl_train.inference_engines.hf.scheduler import CachedSequence, Row
from skyrl_train.inference_engines.sampling import SampledToken, choose_tokens
from skyrl_train.models.logprobs import CHUNK_LOGITS, lm_head_logits
from tx.tinker.backends.requests import TurnQueue
from tx.tinker.backends.torch.groups import TorchGroup, TorchLane, TorchRequestState, idle_sequence, top_of
from tx.tinker.backends.torch.images import read_with_images
from tx.tinker.backends.torch.isolated import join_equal_lengths, padded_length
from tx.tinker.backends.torch.weights import Weights
from tx.tinker.types import Sample, SampleRequest, SampleResult

PROMPT_CHUNK = 1024  # tokens of a prompt chunk
STEPS_PER_CALL = 8  # tokens sampled per lane in one call of `step`


class TorchSampler:
    """The PyTorch backend's sampler. `step` does a slice of the work."""

    def __init__(
        self, *, n_tokens: int, n_lanes: int, max_groups: int, ends_with: Callable[[Sequence[int], Sequence[str]], bool]
    ) -> None:
        """Create a sampler with a cache of `n_tokens`. `ends_with` finds strings at the end of decoded tokens."""
        self.max_length = max(1, n_tokens // UNIT) * UNIT
        n_idle = n_lanes * UNIT
        self._memory = KVMemory(n_idle + self.max_length)
        self._extents = Extents(self._memory.size)
        self._extents.allocate(n_idle)
        self.n_free = self.max_length
        """Number of free cache tokens."""
        self._idle = [idle_sequence(Region(index * UNIT, UNIT, [0], None)) for index in range(n_lanes)]
        self._max_groups = max_groups
        self._ends_with = ends_with
        self._waiting: TurnQueue[TorchRequestState] = TurnQueue()
        self._groups: list[TorchGroup] = []

    @property
    def is_idle(self) -> bool:
        """True if no sample is running or waiting."""
        return not self._waiting and not self._groups

    @property
    def n_running(self) -> int:
        """Number of running samples."""
        return sum(1 for group in self._groups for lane in group.lanes if lane.request is not None)

    @property
    def n_waiting(self) -> int:
        """Number of requests with samples that have not started."""
        return len(self._waiting)

    def add(self, spec: SampleRequest, weights: Weights, done: Callable[[SampleResult], None]) -> Callable[[], None]:
        """Queue a validated request. Return a function that cancels it. `done` gets the result."""
        return self._waiting.add(TorchRequestState(spec, weights, done))

    @torch.inference_mode()
    def step(self) -> None:
        """Repeat a few times: start the waiting samples that fit, then sample one token per lane."""
        for _ in range(STEPS_PER_CALL):
            for request in self._waiting.take_cancelled():
                self._free_spare(request)
            self._waiting.begin(self._begin)
            for group in self._groups:
                self._choose(group)
            self._groups = [group for group in self._groups if group.is_used]
            if self.is_idle:
                break

    # -- begin

    def _begin(self, request: TorchRequestState) -> bool:
        """Begin a request's next sample. Return False if it does not fit."""
        fitting = (other for other in self._groups if other.weights is request.weights and other.free is not None)
        group = next(fitting, None)
        if group is None:
            if len(self._groups) == self._max_groups:
                return False
            group = TorchGroup(request.weights, [TorchLane(idle, idle) for idle in self._idle])
        start = request.spare.pop() if request.spare else self._new_region(request)
        if start is None:
            return False
        if group not in self._groups:
            self._groups.append(group)
        lane = group.free
        assert lane is not None
        lane.number = request.n_begun
        lane.sequence, lane.request = request.create_sequence(lane.number, start), request
        request.n_begun += 1
        if not request.n_left:
            self._free_spare(request)
        if request.last_state is not None:
            assert lane.sequence.region is not None
            lane.sequence.region.n_cached -= 1  # `_take` counts the last token of the prompt
            with request.weights.applied():
                logits = lm_head_logits(request.weights.model, request.last_state)
            self._take(lane, request, choose_tokens(logits, [lane.draw])[0])
        return True

    def _new_region(self, request: TorchRequestState) -> int | None:
        """Allocate a region and fill it with the prefilled prompt. Return its offset, or None if nothing is free."""
        start = self._allocate(request.capacity)
        if start is None:
            return None
        if not request.regions:
            self._read(request, start)
        elif request.n_prefilled:
            self._memory.copy([Copy(request.regions[0], start, request.n_prefilled)])
        request.regions.append(start)
        return start

    def _allocate(self, capacity: int) -> int | None:
        """Allocate a region. If necessary, free the spare regions of waiting requests, last in turn first.

        A request that loses all of its regions prefills its prompt again.
        """
        keeping = [waiting for waiting in reversed(self._waiting) if waiting.spare]
        if capacity > self.n_free + sum(waiting.capacity * len(waiting.spare) for waiting in keeping):
            return None
        while (start := self._extents.allocate(capacity)) is None and keeping:
            self._free_spare(keeping.pop(0))
        if start is not None:
            self.n_free -= capacity
        return start

    def _read(self, request: TorchRequestState, region: int) -> None:
        spec, model = request.spec, request.weights.model
        sequence = request.create_sequence(0, region)
        needs_logprobs = request.needs_logprobs
        targets = torch.tensor(sequence.token_ids, device=model.device)[1:]
        found: list[tuple[np.ndarray, ...]] = []
        n_read = 0
        with request.weights.applied():
            for states in self._prefill(request, sequence):
                chosen = targets[n_read : n_read + len(states)]
                n_read += len(states)
                if needs_logprobs:
                    found += _score_prompt(model, states[: len(chosen)], chosen, spec.n_top_prompt)
        if needs_logprobs:
            request.record_prompt(found)

    def _prefill(self, request: TorchRequestState, sequence: CachedSequence) -> Iterator[torch.Tensor]:
        """Read the prompt: up to its last image in one pass, then in chunks. Yield each pass's hidden states (n, H)."""
        model, n_tokens, n_read = request.weights.model, request.n_prefilled, 0
        assert sequence.region is not None
        if images := request.spec.images:
            n_read = images[-1].end
            states, request.position_offset = read_with_images(model, self._memory, sequence, images, n_read)
            sequence.position_offset = request.position_offset
            request.last_state = states[-1:] if n_read == len(request.spec.prompt) else None
            yield states
        for start in range(n_read, n_tokens, PROMPT_CHUNK):
            sequence.region.n_cached = start
            yield hidden_states(model, self._memory, [Row(sequence, min(PROMPT_CHUNK, n_tokens - start))])

    # -- sample

    def _choose(self, group: TorchGroup) -> None:
        """Sample a token in every lane of a group."""
        model = group.weights.model
        lanes = sorted(group.lanes, key=lambda lane: (padded_length(lane.row), lane.row.start))
        with group.weights.applied():
            rows = [lane.row for lane in lanes]
            states = hidden_states(model, self._memory, rows, plan_runs=join_equal_lengths)  # (S, H)
            choices = choose_tokens(lm_head_logits(model, states), [lane.draw for lane in lanes])
        for lane, choice in zip(lanes, choices, strict=True):
            if lane.request is not None:
                self._take(lane, lane.request, choice)

    def _take(self, lane: TorchLane, request: TorchRequestState, choice: SampledToken) -> None:
        sequence, params = lane.sequence, request.spec.params
        assert sequence.region is not None
        sequence.region.n_cached += 1
        sequence.append(choice, 0)
        tokens = sequence.token_ids[sequence.n_prompt :]
        is_stopped = choice.token_id in params.stop_tokens or (
            bool(params.stop_strings) and self._ends_with(tokens, params.stop_strings)
        )
        if is_stopped or len(tokens) == params.max_tokens or request.is_cancelled:
            lane.sequence, lane.request = lane.idle, None
            if request.n_left and not request.is_cancelled:
                request.spare.append(sequence.region.start)
            else:
                self._free(request, sequence.region.start)
            request.end(lane.number, Sample(tokens, sequence.logprobs, is_stopped, top_of(sequence)))

    def _free_spare(self, request: TorchRequestState) -> None:
        while request.spare:
            self._free(request, request.spare.pop())

    def _free(self, request: TorchRequestState, region: int) -> None:
        request.regions.remove(region)
        self._extents.free(region, request.capacity)
        self.n_free += request.capacity


def _score_prompt(
    model: PreTrainedModel, states: torch.Tensor, targets: torch.Tensor, k: int
) -> Iterator[tuple[np.ndarray, ...]]:
    """Yield log-probs of targets (n,) after hidden states (n, H), and the top tokens and log-probs (n, k), in
    chunks.
    """
    n_rows = max(1, CHUNK_LOGITS // model.get_output_embeddings().weight.shape[0])
    for part, chosen in zip(states.split(n_rows), targets.split(n_rows), strict=True):
        logprobs = lm_head_logits(model, part).log_softmax(dim=-1)
        best = logprobs.topk(min(k, logprobs.shape[-1]))
        of_chosen = logprobs.gather(-1, chosen[:, None])[:, 0]
        yield tuple(tensor.cpu().numpy() for tensor in (of_chosen, best.indices.int(), best.values))
