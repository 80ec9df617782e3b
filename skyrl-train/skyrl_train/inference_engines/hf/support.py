"""Check how a model can be run. Some architectures mix neighboring tokens outside attention."""

import logging
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from transformers import PreTrainedModel

from skyrl_train.errors import EngineError
from skyrl_train.inference_engines.base import EngineRequest, SamplingParams
from skyrl_train.inference_engines.hf.attention import hidden_states
from skyrl_train.inference_engines.hf.kv_memory import UNIT, KVMemory
from skyrl_train.inference_engines.hf.padded_cache import PaddedCache
from skyrl_train.inference_engines.hf.region_table import Region
from skyrl_train.inference_engines.hf.scheduler import CachedSequence, Row
from skyrl_train.models.attributes import crossing_windows
from skyrl_train.models.last_layer import is_narrow, widen_last_layer
from skyrl_train.models.loading import autocast
from skyrl_train.models.prefix_sharing import LOW_PRECISION_TOLERANCE, TOLERANCE, find_mask_fault, read_alone
from skyrl_train.out_of_memory import is_out_of_memory

logger = logging.getLogger(__name__)

FIRST, SECOND = (5, 3), (1, 4)  # tokens of two sequences that the first and the second pass read


@torch.inference_mode()
@crossing_windows
def check_supported(model: PreTrainedModel, bf16: bool) -> None:
    """Compare the hidden states of two short sequences, packed with a cache and separate without a cache.

    Raise EngineError if a pass fails or the states differ. If only the narrowed last layer changes them, widen it to
    compute all tokens.
    """
    _check_packed(model, bf16, last_only=False)
    if is_narrow(model):
        try:
            _check_packed(model, bf16, last_only=True)
        except EngineError as error:
            logger.info("The last layer computes all tokens, because %s", error)
            widen_last_layer(model)


def _check_packed(model: PreTrainedModel, bf16: bool, *, last_only: bool) -> None:
    """Raise EngineError unless packed and separate states agree: of all tokens, or of the last of each pass."""
    memory = KVMemory(len(FIRST) * UNIT)
    sequences = []
    for i, n_tokens in enumerate(map(sum, zip(FIRST, SECOND, strict=True))):
        request = EngineRequest(list(range(2, 2 + n_tokens)), SamplingParams(max_new_tokens=1), seed=0)
        sequence = CachedSequence(request, n_tokens)
        sequence.region = Region(i * UNIT, UNIT, sequence.token_ids, session_id=None)
        sequences.append(sequence)
    packed = []
    failure = f"a {type(model).__name__} cannot be packed"
    if (fault := find_mask_fault(model.config)) is not None:
        raise EngineError(f"{failure}: {fault}")
    with _failing_as(failure), autocast(model.device, bf16):
        for lengths in (FIRST, SECOND):
            rows = [Row(sequence, n_tokens) for sequence, n_tokens in zip(sequences, lengths, strict=True)]
            states = hidden_states(model, memory, rows, last_only=last_only).float()
            packed.append(states.split(1 if last_only else list(lengths)))
            for row in rows:
                row.region.n_cached += row.n_new
        separate = [read_alone(model, sequence.token_ids) for sequence in sequences]
    for i, (expected, first) in enumerate(zip(separate, FIRST, strict=True)):
        states = torch.cat([parts[i] for parts in packed])  # (t, H)
        if last_only:
            expected = expected[[first - 1, -1]]
        _compare(states, expected, model, bf16, failure)


@torch.inference_mode()
@crossing_windows
def check_cache(model: PreTrainedModel, bf16: bool, *, is_padded: bool) -> bool:
    """Compare the hidden states of three sequences with the model's own cache and without a cache.

    A and B start together and read two more tokens, C joins, all read one, B leaves, and A and C read one. They have
    different lengths if `is_padded`, else the same. Finally A and C read three tokens at once, as the next turn of a
    session does.

    Return True if all states agree, False if only the last ones differ. Otherwise, raise EngineError.
    """
    failure = f"the embedded engine cannot run a {type(model).__name__}, use generator.backend=vllm"
    if is_padded and getattr(model.config.get_text_config(), "attn_temperature_tuning", False):
        # Llama 4 scales attention by the number of the column, whatever `position_ids` are, from column 8,192 on.
        raise EngineError(f"{failure}: padding would change the temperature of its attention")
    tokens = {name: list(range(start, start + 12)) for name, start in (("A", 2), ("B", 5), ("C", 8))}
    n_read = dict.fromkeys(tokens, 0)
    cache, joining = PaddedCache(model), PaddedCache(model)
    states: dict[str, list[torch.Tensor]] = {name: [] for name in tokens}  # after the tokens at `positions`
    positions: dict[str, list[int]] = {name: [] for name in tokens}

    def read(cache: PaddedCache, **n_new: int) -> None:
        rows = [tokens[name][n_read[name] : n_read[name] + n] for name, n in n_new.items()]
        for (name, n), state in zip(n_new.items(), cache.read(rows), strict=True):
            n_read[name] += n
            states[name].append(state.float())
            positions[name].append(n_read[name] - 1)

    def compare(names: str, failure: str) -> None:
        for name in names:
            _compare(torch.stack(states[name]), expected[name][positions[name]], model, bf16, failure)

    with _failing_as(failure), autocast(model.device, bf16):
        read(cache, **({"A": 5, "B": 3} if is_padded else {"A": 4, "B": 4}))
        read(cache, A=1, B=1)
        read(cache, A=1, B=1)
        read(joining, C=2 if is_padded else 6)
        cache.join(joining)
        read(cache, A=1, B=1, C=1)
        cache.select([0, 2])
        read(cache, A=1, C=1)
        expected = {name: read_alone(model, row) for name, row in tokens.items()}
    compare("ABC", failure)
    failure = f"a {type(model).__name__} cannot read several tokens after others"
    try:
        with _failing_as(failure), autocast(model.device, bf16):
            read(cache, A=3, C=3)
        compare("AC", failure)
    except EngineError as error:
        logger.info("Every turn reads its whole conversation, because %s", error)
        return False
    return True


@contextmanager
def _failing_as(failure: str) -> Iterator[None]:
    """Turn any exception but a lack of memory into an EngineError. A model may raise anything."""
    try:
        yield
    except Exception as error:
        if is_out_of_memory(error):
            raise
        # A layer raises AttributeError if it looks for a recurrent or latent state that the cache does not have.
        reason = "its layers need a different cache" if isinstance(error, AttributeError) else error
        raise EngineError(f"{failure}: {reason}") from error


def _compare(states: torch.Tensor, expected: torch.Tensor, model: PreTrainedModel, bf16: bool, failure: str) -> None:
    tolerance = LOW_PRECISION_TOLERANCE if bf16 or model.dtype != torch.float32 else TOLERANCE
    difference, scale = (states - expected).abs().max().item(), expected.abs().max().item()
    if not difference <= tolerance * scale:
        raise EngineError(f"{failure}: its hidden states, up to {scale:.2g}, are wrong by {difference:.2g}")
