import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel
from tx_kit.models import SHAPE, VOCABULARY

from skyrl_train.inference_engines.base import EngineRequest, SamplingParams
from skyrl_train.inference_engines.hf.attention import PlanRuns, hidden_states, join_neighbors
from skyrl_train.inference_engines.hf.kv_memory import UNIT, KVMemory
from skyrl_train.inference_engines.hf.region_table import Region
from skyrl_train.inference_engines.hf.scheduler import CachedSequence, Row
from tx.tinker.backends.torch import isolated
from tx.tinker.backends.torch.isolated import join_equal_lengths, padded_length

CAPACITY = 3 * UNIT


def sequence_of(length: int, index: int) -> CachedSequence:
    """Return a sequence in the region `index`."""
    generator = torch.Generator().manual_seed(length)
    token_ids = torch.randint(3, 61, (length,), generator=generator).tolist()
    request = EngineRequest(token_ids, SamplingParams(max_new_tokens=1), seed=0)
    sequence = CachedSequence(request, CAPACITY)
    sequence.region = Region(index * CAPACITY, CAPACITY, sequence.token_ids, session_id=None)
    return sequence


@torch.inference_mode()
def last_states(model: PreTrainedModel, lengths: list[int], plan_runs: PlanRuns) -> dict[int, torch.Tensor]:
    """Return each sequence's last state by index. One pass reads all last tokens. Earlier tokens are cached."""
    memory = KVMemory(len(lengths) * CAPACITY)
    rows = []
    for index, length in enumerate(lengths):
        sequence = sequence_of(length, index)
        hidden_states(model, memory, [Row(sequence, length - 1)])
        sequence.region.n_cached = length - 1
        rows.append(Row(sequence, 1))
    rows.sort(key=lambda row: (padded_length(row), row.start))
    states = hidden_states(model, memory, rows, plan_runs=plan_runs)
    return {row.start // CAPACITY: state for row, state in zip(rows, states, strict=True)}


@pytest.mark.parametrize("max_copied", [UNIT, 512])
def test_states_of_isolated_passes_are_bitwise_independent_of_other_lengths(
    monkeypatch: pytest.MonkeyPatch, max_copied: int
) -> None:
    model = LlamaForCausalLM(LlamaConfig(vocab_size=VOCABULARY, **SHAPE)).eval()
    monkeypatch.setattr(isolated, "MAX_COPIED", max_copied)
    for length in (5, 40, 61, 100, 150):
        single = last_states(model, [length, 7, 7, 7], join_equal_lengths)
        for batch_lengths in ([length, 90, length, 59], [length] * 4, [7, length, 130, 150]):
            states = last_states(model, batch_lengths, join_equal_lengths)
            expected = last_states(model, batch_lengths, join_neighbors)
            for index, other in enumerate(batch_lengths):
                torch.testing.assert_close(states[index], expected[index])
                if other == length:
                    torch.testing.assert_close(states[index], single[0], rtol=0, atol=0)


def test_padded_lengths() -> None:
    lengths = (1, 64, 65, 128, 129, 257, 512, 513, 1024, 1025)
    rows = [Row(sequence_of(length, 0), 1) for length in lengths]
    for row in rows:
        row.sequence.region.n_cached = len(row.sequence.token_ids) - 1
    assert [padded_length(row) for row in rows] == [64, 64, 128, 128, 256, 512, 512, 1024, 1024, 1536]
