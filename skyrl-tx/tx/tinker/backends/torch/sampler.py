"""Continuous batching: samples join and leave the running batch between tokens.

Lanes that sample from the same weights are a group, which reads one token of each in one pass of fixed size; prompts
are read by themselves. Attention pads each lane to a length that follows from its own. So a lane's tokens do not
depend on the others: not on how many there are, nor on their lengths.

The passes and their cache are those of the embedded engine of `skyrl_train`; it is not used as a whole since its
batches change size, and since it knows neither adapters nor log-probs of prompts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import numpy as np
import torch
from transformers import PreTrainedModel

from skyrl_train.inference_engines.hf.attention import hidden_states, padded_length
from skyrl_train.inference_engines.hf.kv_memory import UNIT, Copy, Extents, KVMemory
from skyrl_train.inference_engines.hf.region_table import Region
from skyrl_train.inference_engines.hf.scheduler import CachedSequence, Row
from skyrl_train.inference_engines.sampling import Choice, choose_tokens
from skyrl_train.models.logprobs import CHUNK_LOGITS, lm_head_logits
from tx.tinker.backends.requests import Turns
from tx.tinker.backends.torch.groups import Group, Lane, Ongoing, idle_sequence, top_of
from tx.tinker.backends.torch.weights import Weights
from tx.tinker.types import Sample, SampleRequest, SampleResult

READ_AT_ONCE = 1024  # tokens of a prompt
STEPS_AT_ONCE = 8  # tokens of a lane


class Sampler:
    """All requests of a backend. `step` does a little of what there is to do."""

    def __init__(
        self,
        *,
        n_tokens: int,
        n_lanes: int,
        most_groups: int,
        ends_with: Callable[[Sequence[int], Sequence[str]], bool],
    ) -> None:
        """`n_tokens`: of the cache. `ends_with`: whether tokens, decoded, hold one of some strings."""
        self.longest = max(1, n_tokens // UNIT) * UNIT
        n_idle = n_lanes * UNIT
        self._memory = KVMemory(n_idle + self.longest)
        self._extents = Extents(self._memory.size)
        self._extents.allocate(n_idle)
        self.n_free = self.longest
        """Tokens of the cache that nobody uses."""
        self._idle = [idle_sequence(Region(place * UNIT, UNIT, [0], None)) for place in range(n_lanes)]
        self._most_groups = most_groups
        self._ends_with = ends_with
        self._waiting: Turns[Ongoing] = Turns()
        self._groups: list[Group] = []

    @property
    def is_idle(self) -> bool:
        """Whether there is nothing to do."""
        return not self._waiting and not self._groups

    @property
    def n_running(self) -> int:
        """Samples on their way."""
        return sum(1 for group in self._groups for lane in group.lanes if lane.request is not None)

    @property
    def n_waiting(self) -> int:
        """Requests that have not begun, or not all of whose samples have."""
        return len(self._waiting)

    def add(self, ask: SampleRequest, weights: Weights, done: Callable[[SampleResult], None]) -> Callable[[], None]:
        """Take a request, which the caller has checked; `done` gets its result. Returns what cancels it."""
        return self._waiting.add(Ongoing(ask, weights, done))

    @torch.inference_mode()
    def step(self) -> None:
        """A few times: let waiting samples begin where there is room, and choose a token in every lane."""
        for _ in range(STEPS_AT_ONCE):
            for request in self._waiting.take_cancelled():
                self._free_spare(request)
            self._waiting.begin(self._begin)
            for group in self._groups:
                self._choose(group)
            self._groups = [group for group in self._groups if group.is_used]
            if self.is_idle:
                break

    # -- beginning

    def _begin(self, request: Ongoing) -> bool:
        """Let the next sample of a request begin; False where there is no room."""
        group = next((one for one in self._groups if one.weights is request.weights and one.free is not None), None)
        if group is None:
            if len(self._groups) == self._most_groups:
                return False
            group = Group(request.weights, [Lane(idle, idle) for idle in self._idle])
        start = request.spare.pop() if request.spare else self._new_region(request)
        if start is None:
            return False
        if group not in self._groups:
            self._groups.append(group)
        lane = group.free
        assert lane is not None
        lane.number = request.n_begun
        lane.sequence, lane.request = request.sequence(lane.number, start), request
        request.n_begun += 1
        if not request.n_left:
            self._free_spare(request)
        return True

    def _new_region(self, request: Ongoing) -> int | None:
        """Where a sample has room, and the prompt but for its last token is stored; None where there is none."""
        start = self._allocate(request.capacity)
        if start is None:
            return None
        if not request.regions:
            self._read(request, start)
        elif request.n_read:
            self._memory.copy([Copy(request.regions[0], start, request.n_read)])
        request.regions.append(start)
        return start

    def _allocate(self, capacity: int) -> int | None:
        """Where there is room; if need be, what requests keep for later is freed, theirs first whose turn comes last.

        A request that has no region then reads its prompt again.
        """
        keeping = [one for one in reversed(self._waiting) if one.spare]
        if capacity > self.n_free + sum(one.capacity * len(one.spare) for one in keeping):
            return None
        while (start := self._extents.allocate(capacity)) is None and keeping:
            self._free_spare(keeping.pop(0))
        if start is not None:
            self.n_free -= capacity
        return start

    def _read(self, request: Ongoing, region: int) -> None:
        ask, model = request.ask, request.weights.model
        sequence = request.sequence(0, region)
        assert sequence.region is not None
        tells = request.needs_logprobs
        targets = torch.tensor(sequence.token_ids, device=model.device)[1:]
        found: list[tuple[np.ndarray, ...]] = []
        with request.weights.applied():
            for start in range(0, request.n_read, READ_AT_ONCE):
                end = min(start + READ_AT_ONCE, request.n_read)
                sequence.region.n_cached = start
                states = hidden_states(model, self._memory, [Row(sequence, end - start)])  # (n, H)
                if tells:
                    found += _told(model, states, targets[start:end], ask.n_top_prompt)
        if tells:
            request.note_prompt(found)

    # -- choosing

    def _choose(self, group: Group) -> None:
        """A token in every lane of a group."""
        model = group.weights.model
        lanes = sorted(group.lanes, key=lambda lane: (padded_length(lane.row), lane.row.start))
        with group.weights.applied():
            states = hidden_states(model, self._memory, [lane.row for lane in lanes], is_isolated=True)  # (S, H)
            choices = choose_tokens(lm_head_logits(model, states), [lane.draw for lane in lanes])
        for lane, choice in zip(lanes, choices, strict=True):
            if lane.request is not None:
                self._take(lane, lane.request, choice)

    def _take(self, lane: Lane, request: Ongoing, choice: Choice) -> None:
        sequence, params = lane.sequence, request.ask.params
        assert sequence.region is not None
        sequence.region.n_cached += 1
        sequence.append(choice, 0)
        tokens = sequence.token_ids[sequence.n_prompt :]
        is_stopped = choice.token_id in params.stop_tokens or (
            bool(params.stop_strings) and self._ends_with(tokens, params.stop_strings)
        )
        if is_stopped or len(tokens) == params.max_tokens or request.is_cancelled:
            lane.sequence, lane.request = lane.idle, None
            self._end(sequence, request, lane.number, is_stopped)

    def _end(self, sequence: CachedSequence, request: Ongoing, number: int, is_stopped: bool) -> None:
        assert sequence.region is not None
        if request.n_left and not request.is_cancelled:
            request.spare.append(sequence.region.start)
        else:
            self._free(request, sequence.region.start)
        tokens = sequence.token_ids[sequence.n_prompt :]
        request.end(number, Sample(tokens, sequence.logprobs, is_stopped, top_of(sequence)))

    def _free_spare(self, request: Ongoing) -> None:
        while request.spare:
            self._free(request, request.spare.pop())

    def _free(self, request: Ongoing, region: int) -> None:
        request.regions.remove(region)
        self._extents.free(region, request.capacity)
        self.n_free += request.capacity


def _told(
    model: PreTrainedModel, states: torch.Tensor, targets: torch.Tensor, k: int
) -> Iterator[tuple[np.ndarray, ...]]:
    """Log-probs of targets (n,) after hidden states (n, H), and the k likeliest tokens with theirs (n, k), in parts."""
    n_rows = max(1, CHUNK_LOGITS // model.get_output_embeddings().weight.shape[0])
    for part, chosen in zip(states.split(n_rows), targets.split(n_rows), strict=True):
        logprobs = lm_head_logits(model, part).log_softmax(dim=-1)
        best = logprobs.topk(min(k, logprobs.shape[-1]))
        of_chosen = logprobs.gather(-1, chosen[:, None])[:, 0]
        yield tuple(one.cpu().numpy() for one in (of_chosen, best.indices.int(), best.values))
