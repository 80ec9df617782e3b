"""Packed passes, where what is asked of them is more than that their numbers are right: see `test_contract.py`."""

from __future__ import annotations

import torch
from transformers import PreTrainedModel

from skyrl_train.inference_engines.base import EngineRequest, SamplingParams
from skyrl_train.inference_engines.hf.attention import hidden_states
from skyrl_train.inference_engines.hf.kv_memory import UNIT, KVMemory
from skyrl_train.inference_engines.hf.region_table import Region
from skyrl_train.inference_engines.hf.scheduler import CachedSequence, Row

NOBODY_WAITS = None


def sequence_of(length: int, place: int, capacity: int = 2 * UNIT) -> CachedSequence:
    """In a region beside those of the places before."""
    generator = torch.Generator().manual_seed(length)
    token_ids = torch.randint(3, 61, (length,), generator=generator).tolist()
    request = EngineRequest(token_ids, SamplingParams(max_new_tokens=1), seed=0)
    sequence = CachedSequence(request, NOBODY_WAITS, 0, capacity, token_ids)
    sequence.region = Region(place * capacity, capacity, token_ids, session_id=None)
    return sequence


@torch.inference_mode()
def last_states(model: PreTrainedModel, lengths: list[int], *, is_alone: bool) -> torch.Tensor:
    """The states (n, H) after sequences whose last tokens are read in one pass, and the others before it."""
    memory = KVMemory(len(lengths) * 2 * UNIT)
    sequences = [sequence_of(length, place) for place, length in enumerate(lengths)]
    for sequence in sequences:
        hidden_states(model, memory, [Row(sequence, len(sequence.token_ids) - 1)])
        sequence.region.n_cached = len(sequence.token_ids) - 1
    return hidden_states(model, memory, [Row(sequence, 1) for sequence in sequences], is_alone=is_alone)


def test_lengths_of_others_change_no_bit_of_a_sequence_that_is_alone(tiny_model: PreTrainedModel) -> None:
    for length in (5, 17, 40):
        apart, beside = ([length, 7, 7, 7], [length, 100, length, 61])
        one, other = (last_states(tiny_model, lengths, is_alone=True) for lengths in (apart, beside))
        torch.testing.assert_close(one[0], other[0], rtol=0, atol=0)
        torch.testing.assert_close(other[2], other[0], rtol=0, atol=0)
        joined = last_states(tiny_model, beside, is_alone=False)
        torch.testing.assert_close(joined, other)
