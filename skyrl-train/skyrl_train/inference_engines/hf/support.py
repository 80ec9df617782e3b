"""Check that a model supports packed sequences. Some architectures mix neighboring tokens outside attention."""

from __future__ import annotations

import logging

import torch
from transformers import PreTrainedModel

from skyrl_train.errors import EngineError
from skyrl_train.inference_engines.base import EngineRequest, SamplingParams
from skyrl_train.inference_engines.hf.attention import hidden_states
from skyrl_train.inference_engines.hf.kv_memory import UNIT, KVMemory
from skyrl_train.inference_engines.hf.region_table import Region
from skyrl_train.inference_engines.hf.scheduler import CachedSequence, Row
from skyrl_train.models.last_layer import is_narrow, widen_last_layer
from skyrl_train.models.loading import autocast
from skyrl_train.models.prefix_sharing import LOW_PRECISION_TOLERANCE, TOLERANCE

logger = logging.getLogger(__name__)

FIRST, SECOND = (5, 3), (1, 4)  # tokens of two sequences that the first and the second pass read


@torch.inference_mode()
def check_supported(model: PreTrainedModel, bf16: bool) -> None:
    """Compare the hidden states of two short sequences, packed with a cache and separate without a cache.

    If only the narrowed last layer changes them, it is widened to compute all tokens.

    Raises:
        EngineError: a pass fails, or the hidden states differ.
    """
    _check_packed(model, bf16, last_only=False)
    if is_narrow(model):
        try:
            _check_packed(model, bf16, last_only=True)
        except EngineError as error:
            logger.info("The last layer computes all tokens: %s", error)
            widen_last_layer(model)


def _check_packed(model: PreTrainedModel, bf16: bool, *, last_only: bool) -> None:
    """Compare the packed and separate states of all tokens, or with `last_only` of each pass's last tokens."""
    memory = KVMemory(len(FIRST) * UNIT)
    sequences = []
    for i, n_tokens in enumerate(map(sum, zip(FIRST, SECOND, strict=True))):
        request = EngineRequest(list(range(2, 2 + n_tokens)), SamplingParams(max_new_tokens=1), seed=0)
        sequence = CachedSequence(request, n_tokens)
        sequence.region = Region(i * UNIT, UNIT, sequence.token_ids, session_id=None)
        sequences.append(sequence)
    packed, separate = [], []
    cannot = f"the embedded engine cannot run a {type(model).__name__}, use generator.backend=vllm"
    try:
        with autocast(model.device, bf16):
            for lengths in (FIRST, SECOND):
                rows = [Row(sequence, n_tokens) for sequence, n_tokens in zip(sequences, lengths, strict=True)]
                states = hidden_states(model, memory, rows, last_only=last_only).float()
                packed.append(states.split(1 if last_only else list(lengths)))
                for row in rows:
                    row.region.n_cached += row.n_new
            for sequence in sequences:
                input_ids = torch.tensor([sequence.token_ids], device=model.device)
                output = model.base_model(input_ids=input_ids, use_cache=False)
                separate.append(output.last_hidden_state[0].float())  # (t, H)
    except Exception as error:
        raise EngineError(f"{cannot}: {error}") from error
    tolerance = LOW_PRECISION_TOLERANCE if bf16 or model.dtype != torch.float32 else TOLERANCE
    for i, (expected, first) in enumerate(zip(separate, FIRST, strict=True)):
        states = torch.cat([parts[i] for parts in packed])  # (t, H)
        if last_only:
            expected = expected[[first - 1, -1]]
        difference = ((states - expected).abs().max() / expected.abs().max()).item()
        if not difference < tolerance:
            raise EngineError(f"{cannot}: its hidden states differ by {difference:.1%} from those it should have")
