"""Whether a model computes packed what it computes alone: some architectures mix neighbouring tokens by themselves."""

from __future__ import annotations

import torch
from transformers import PreTrainedModel

from skyrl_train.errors import EngineError
from skyrl_train.inference_engines.base import EngineRequest, SamplingParams
from skyrl_train.inference_engines.hf.attention import hidden_states
from skyrl_train.inference_engines.hf.kv_memory import UNIT, KVMemory
from skyrl_train.inference_engines.hf.region_table import Region
from skyrl_train.inference_engines.hf.scheduler import CachedSequence, Row
from skyrl_train.models.loading import autocast

FIRST, SECOND = (5, 3), (1, 4)  # tokens of two sequences that a first and a second pass read
TOLERANCE, LOW_PRECISION_TOLERANCE = 1e-3, 3e-2  # of the largest value: float32, and anything shorter


@torch.inference_mode()
def check_supported(model: PreTrainedModel, bf16: bool) -> None:
    """Read two short sequences, packed and with a cache, and each alone and without.

    Raises:
        EngineError: the model does not run so, or its hidden states differ.
    """
    sequences = [
        _sequence(first + second, i * UNIT) for i, (first, second) in enumerate(zip(FIRST, SECOND, strict=True))
    ]
    memory = KVMemory(len(sequences) * UNIT)
    tolerance = LOW_PRECISION_TOLERANCE if bf16 or model.dtype != torch.float32 else TOLERANCE
    try:
        with autocast(model.device, bf16):
            packed = [_read(model, memory, sequences, lengths) for lengths in (FIRST, SECOND)]
            alone = [_alone(model, sequence.token_ids) for sequence in sequences]
    except Exception as error:
        raise EngineError(f"{_cannot(model)}: {error}") from error
    for i, expected in enumerate(alone):
        states = torch.cat([parts[i] for parts in packed])  # (t, H)
        difference = ((states - expected).abs().max() / expected.abs().max()).item()
        if not difference < tolerance:
            raise EngineError(
                f"{_cannot(model)}: its hidden states differ by {difference:.1%} from those it should have"
            )


def _sequence(n_tokens: int, start: int) -> CachedSequence:
    token_ids = list(range(2, 2 + n_tokens))
    request = EngineRequest(token_ids, SamplingParams(max_new_tokens=1), seed=0)
    nobody_waits = None
    sequence = CachedSequence(request, nobody_waits, 0, n_tokens, token_ids)  # type: ignore[arg-type]
    sequence.region = Region(start, UNIT, token_ids, session_id=None)
    return sequence


def _read(
    model: PreTrainedModel, memory: KVMemory, sequences: list[CachedSequence], lengths: tuple[int, ...]
) -> list[torch.Tensor]:
    """Hidden states (t, H) of the next tokens of each sequence."""
    rows = [Row(sequence, n_tokens) for sequence, n_tokens in zip(sequences, lengths, strict=True)]
    states = hidden_states(model, memory, rows).float().split(lengths)
    for row in rows:
        assert row.sequence.region is not None
        row.sequence.region.n_cached += row.n_new
    return list(states)


def _alone(model: PreTrainedModel, token_ids: list[int]) -> torch.Tensor:
    """Hidden states (t, H)."""
    input_ids = torch.tensor([token_ids], device=model.device)
    states: torch.Tensor = model.base_model(input_ids=input_ids, use_cache=False).last_hidden_state[0].float()
    return states


def _cannot(model: PreTrainedModel) -> str:
    return f"the embedded engine cannot run a {type(model).__name__}, use generator.backend=vllm"
