import pytest
import torch
from train_kit.models import SMALL, create_model
from transformers import MistralConfig, PreTrainedModel

from skyrl_train.inference_engines.base import EngineRequest, SamplingParams
from skyrl_train.inference_engines.hf import attention
from skyrl_train.inference_engines.hf.attention import hidden_states
from skyrl_train.inference_engines.hf.kv_memory import UNIT, KVMemory
from skyrl_train.inference_engines.hf.region_table import Region
from skyrl_train.inference_engines.hf.scheduler import CachedSequence, Row
from skyrl_train.inference_engines.hf.support import check_supported
from skyrl_train.models.last_layer import is_narrow, narrow_last_layer

CAPACITY = 3 * UNIT


def sequence_of(length: int, index: int, n_cached: int = 0) -> CachedSequence:
    """Return a sequence in the region `index`."""
    generator = torch.Generator().manual_seed(length)
    token_ids = torch.randint(3, 61, (length,), generator=generator).tolist()
    request = EngineRequest(token_ids, SamplingParams(max_new_tokens=1), seed=0)
    sequence = CachedSequence(request, CAPACITY)
    sequence.region = Region(index * CAPACITY, CAPACITY, sequence.token_ids, session_id=None, n_cached=n_cached)
    return sequence


@torch.inference_mode()
def test_a_first_chunk_beside_a_later_one_of_the_same_size(tiny_model: PreTrainedModel) -> None:
    memory, separate = KVMemory(2 * CAPACITY), KVMemory(2 * CAPACITY)
    later = sequence_of(20, 1)
    for pool in (memory, separate):
        hidden_states(tiny_model, pool, [Row(later, 12)])
    rows = [Row(sequence_of(8, 0), 8), Row(sequence_of(20, 1, n_cached=12), 8)]
    batched = hidden_states(tiny_model, memory, rows)
    expected = torch.cat([hidden_states(tiny_model, separate, [row]) for row in rows])
    torch.testing.assert_close(batched, expected)


@torch.inference_mode()
def test_a_smaller_region_beside_a_larger_one_at_the_end_of_memory(tiny_model: PreTrainedModel) -> None:
    memory = KVMemory(CAPACITY + UNIT)
    large, small = sequence_of(150, 0), sequence_of(40, 1)
    small.region.capacity = UNIT
    expected = [hidden_states(tiny_model, memory, [Row(one, len(one.token_ids))])[-1] for one in (large, small)]
    for sequence in (large, small):
        sequence.region.n_cached = len(sequence.token_ids) - 1
    batched = hidden_states(tiny_model, memory, [Row(large, 1), Row(small, 1)])
    torch.testing.assert_close(batched, torch.stack(expected))


def make_mistral(sliding_window: int | None) -> PreTrainedModel:
    return create_model(MistralConfig(**SMALL, sliding_window=sliding_window)).eval()


def samples_of(prompt_lengths: list[int], n_sampled: list[list[int]]) -> list[CachedSequence]:
    """Return samples of each prompt, with the given numbers of sampled tokens, in neighboring regions."""
    generator = torch.Generator().manual_seed(0)
    sequences = []
    for n_prompt, lengths in zip(prompt_lengths, n_sampled, strict=True):
        prompt = torch.randint(3, 61, (n_prompt,), generator=generator).tolist()
        for length in lengths:
            sequence = CachedSequence(EngineRequest(prompt, SamplingParams(max_new_tokens=99), seed=0), CAPACITY)
            sequence.token_ids += torch.randint(3, 61, (length,), generator=generator).tolist()
            start = len(sequences) * CAPACITY
            sequence.region = Region(start, CAPACITY, sequence.token_ids, session_id=None)
            sequences.append(sequence)
    return sequences


@pytest.mark.parametrize("sliding_window", [None, 50, 500])
@pytest.mark.parametrize(
    ("prompt_lengths", "n_sampled"),
    [
        ([64, 64], [[5, 5, 5], [5, 5, 5]]),
        ([70, 130, 64], [[1, 9], [3], [20, 4, 33, 1]]),  # groups and sequences of different sizes
        ([140], [[1, 2, 3]]),
    ],
)
@torch.inference_mode()
def test_a_shared_prefix_changes_no_state(
    monkeypatch: pytest.MonkeyPatch, prompt_lengths: list[int], n_sampled: list[list[int]], sliding_window: int | None
) -> None:
    model = make_mistral(sliding_window)
    states = []
    for min_saved in (1, 10**12):
        monkeypatch.setattr(attention, "MIN_SAVED", min_saved)
        sequences = samples_of(prompt_lengths, n_sampled)
        memory = KVMemory(len(sequences) * CAPACITY)
        for sequence in sequences:
            hidden_states(model, memory, [Row(sequence, len(sequence.token_ids) - 1)])
            sequence.region.n_cached = len(sequence.token_ids) - 1
        rows = [Row(sequence, 1) for sequence in sequences]
        prefix = attention._find_shared_prefix(rows, memory, torch.device("cpu"))
        assert (prefix is not None) == (min_saved == 1)
        if prefix is not None:
            assert prefix.stored.length == min(prompt_lengths) // UNIT * UNIT
            assert prefix.members.shape == (len(prompt_lengths), max(map(len, n_sampled)))
            assert prefix.members.flatten()[prefix.slots].tolist() == list(range(len(rows)))
        states.append(hidden_states(model, memory, rows))
    torch.testing.assert_close(*states)


@pytest.mark.parametrize(
    ("n_prompt", "n_sampled", "n_cached", "length"),
    [
        (128, [[0, 0]], 127, 64),  # only stored tokens are shared
        (128, [[0, 0]], 63, None),
        (64, [[9] * 4, [9] * 4, [9]], 64, 64),
        (64, [[9] * 8, *[[9]] * 7], 64, None),  # padding would more than double the rows
    ],
)
def test_the_length_of_a_shared_prefix(
    monkeypatch: pytest.MonkeyPatch, n_prompt: int, n_sampled: list[list[int]], n_cached: int, length: int | None
) -> None:
    monkeypatch.setattr(attention, "MIN_SAVED", 1)
    rows = [Row(sequence, 1) for sequence in samples_of([n_prompt] * len(n_sampled), n_sampled)]
    for row in rows:
        row.region.n_cached = n_cached
    prefix = attention._find_shared_prefix(rows, KVMemory(999), torch.device("cpu"))
    assert (prefix and prefix.stored.length) == length


@pytest.mark.parametrize("sliding_window", [None, 50])
@torch.inference_mode()
def test_a_last_layer_of_last_tokens_only_computes_the_same_states(sliding_window: int | None) -> None:
    model = make_mistral(sliding_window)
    states = []
    for narrow in (False, True):
        if narrow:
            narrow_last_layer(model)
        n_computed: list[int] = []
        hook = model.base_model.layers[-1].mlp.register_forward_pre_hook(
            lambda _, inputs, n_computed=n_computed: n_computed.append(inputs[0].shape[1])
        )
        sequences = [sequence_of(length, i) for i, length in enumerate((90, 40, 41, 20))]
        memory = KVMemory(len(sequences) * CAPACITY)
        first = [Row(sequence, n) for sequence, n in zip(sequences, (70, 8, 8, 19), strict=True)]
        states.append(hidden_states(model, memory, first, last_only=True))
        for row in first:
            row.region.n_cached = row.n_new
        rest = [Row(row.sequence, len(row.sequence.token_ids) - row.n_new) for row in first]  # the last has one token
        states.append(hidden_states(model, memory, rest, last_only=True))
        assert n_computed == ([4, 4] if narrow else [105, 86])
        hook.remove()
    torch.testing.assert_close(states[:2], states[2:])


def test_a_model_that_fails_on_last_tokens_alone_computes_all() -> None:
    model = make_mistral(None)
    narrow_last_layer(model)
    check_supported(model, bf16=False)
    assert is_narrow(model)

    def refuse(module: torch.nn.Module, inputs: tuple[torch.Tensor, ...]) -> None:
        if inputs[0].shape[1] == 2:  # the last tokens of two sequences
            raise ValueError("two tokens")

    model.base_model.layers[-1].mlp.register_forward_pre_hook(refuse)
    check_supported(model, bf16=False)
    assert not is_narrow(model)
