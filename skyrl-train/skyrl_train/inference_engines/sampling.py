"""Batched sampling of the next token. Each row has its own parameters and random numbers."""

import threading
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import torch

from skyrl_train.inference_engines.base import SamplingParams

CHUNK = 512  # vocabulary tokens per partial sum in the search
CPU_BLOCK = 1 << 18  # logits per pass over all rows on a CPU: 1 MiB, so that they stay in the cache
CHUNK_LOGITS = 1 << 24  # maximum logits in memory at once: 64 MiB
CANDIDATES = 1024  # number of most likely tokens to try first for top-p, usually enough


@dataclass(slots=True)
class Draw:
    """Everything but the logits that determines a sequence's next token."""

    sampling: SamplingParams
    seed: int
    token_ids: Sequence[int]  # prompt and response so far
    n_prompt: int
    eos_ids: frozenset[int]  # of the model
    is_shaped: bool = field(init=False)  # penalties or truncation change the distribution

    def __post_init__(self) -> None:
        self.is_shaped = self.sampling.penalizes or self.sampling.truncates

    @property
    def banned(self) -> list[int]:
        """Tokens that must not be sampled yet: they would end the response before `min_new_tokens`."""
        if len(self.token_ids) - self.n_prompt >= self.sampling.min_new_tokens:
            return []
        return list({*(() if self.sampling.ignore_eos else self.eos_ids), *self.sampling.stop_token_ids})


class SampledToken(NamedTuple):
    """A sampled token. `logprob` is the model's at the row's temperature, before penalties and truncation."""

    token_id: int
    logprob: float
    sampling_logprob: float | None = None  # after penalties and truncation, if any
    top_logprobs: dict[int, float] | None = None  # on request


def choose_in_chunks(
    draws: Sequence[Draw], n_tokens: int, compute_logits: Callable[[slice], torch.Tensor]
) -> list[SampledToken]:
    """Sample one token per row, `CHUNK_LOGITS` logits at a time. `compute_logits` maps a slice of rows to (b, V)."""
    n_rows = max(1, CHUNK_LOGITS // n_tokens)
    chunks = [slice(i, i + n_rows) for i in range(0, len(draws), n_rows)]
    return [choice for rows in chunks for choice in choose_tokens(compute_logits(rows), draws[rows])]


def choose_tokens(logits: torch.Tensor, draws: Sequence[Draw]) -> list[SampledToken]:
    """Sample one token per row by a search in the cumulative distribution.

    Args:
        logits: (B, V) float32. Overwritten, so that only rows with penalties or truncation are copied.
        draws: [B] how to sample each row. Temperature 0 is greedy.
    """
    shaped_rows = [row for row, draw in enumerate(draws) if draw.is_shaped]
    greedy_rows = [row for row, draw in enumerate(draws) if draw.sampling.temperature == 0]
    banned = [
        (row, column, token_id)
        for row, draw in enumerate(draws)
        if not draw.is_shaped
        for column, token_id in enumerate(draw.banned)
    ]
    shaped = _shaped(logits, [(row, draws[row]) for row in shaped_rows]) if shaped_rows else None  # (s, V)
    if any(draw.sampling.temperature not in (0, 1) for draw in draws):
        logits.div_(torch.tensor([[draw.sampling.temperature or 1.0] for draw in draws], device=logits.device))
    top: dict[int, tuple[list[int], torch.Tensor]] = {}  # by row: most likely tokens, their logits
    for row, draw in enumerate(draws):
        if (n_top := min(draw.sampling.n_top_logprobs, logits.shape[-1])) > 0:
            best = logits[row].topk(n_top)
            top[row] = (best.indices.tolist(), best.values)
    excluded = _exclude(logits, banned)  # (B, maximum number of banned tokens in a row)
    sums = _chunk_logsumexp(logits)  # (B, V / CHUNK)
    log_normalizer = torch.cat([sums, excluded], dim=-1).logsumexp(dim=-1)  # (B,) of the model
    if shaped is not None:
        tempered = logits[shaped_rows]  # (s, V)
        logits[shaped_rows] = shaped
        sums[shaped_rows] = _chunk_logsumexp(shaped)
    randomness = uniforms([draw.seed for draw in draws], [len(draw.token_ids) for draw in draws])
    token_ids = _search(logits, sums, torch.from_numpy(randomness).to(logits.device))  # (B,)
    if greedy_rows:
        greedy = logits if len(greedy_rows) == len(draws) else logits[greedy_rows]
        token_ids[greedy_rows] = greedy.argmax(dim=-1)

    chosen = _gather_chosen(logits, token_ids)  # (B,)
    logprobs = chosen - log_normalizer
    sampling_by_row = {}
    if shaped is not None:
        logprobs[shaped_rows] = _gather_chosen(tempered, token_ids[shaped_rows]) - log_normalizer[shaped_rows]
    if shaped is not None or banned:
        sampling_logprobs = (chosen - sums.logsumexp(dim=-1)).tolist()
        sampling_by_row = {row: sampling_logprobs[row] for row in (*shaped_rows, *(row for row, _, _ in banned))}
    top_by_row = {
        row: dict(zip(ids, (values - log_normalizer[row]).tolist(), strict=True)) for row, (ids, values) in top.items()
    }
    return [
        SampledToken(token_id, logprob, sampling_by_row.get(row), top_by_row.get(row))
        for row, (token_id, logprob) in enumerate(zip(token_ids.tolist(), logprobs.tolist(), strict=True))
    ]


def _exclude(logits: torch.Tensor, banned: Sequence[tuple[int, int, int]]) -> torch.Tensor:
    """Set the logits (B, V) of banned tokens to -inf in place. Return their previous values (B, n), padded with -inf.

    `banned` lists (row, column in the result, token id).
    """
    if not banned:
        return logits[:, :0]
    rows, columns, tokens = torch.from_numpy(np.array(banned)).to(logits.device).T
    excluded = logits.new_full((len(logits), 1 + int(columns.max())), -torch.inf)
    excluded[rows, columns] = logits[rows, tokens]
    logits[rows, tokens] = -torch.inf
    return excluded


def _gather_chosen(values: torch.Tensor, token_ids: torch.Tensor) -> torch.Tensor:
    """Return the value (b,) of each row's token in (b, V)."""
    return values.gather(-1, token_ids[:, None])[:, 0]


def uniforms(seeds: Sequence[int], positions: Sequence[int]) -> np.ndarray:
    """Return a number in [0, 1) for each (seed, position), the same on all machines: SplitMix64 of the pair.

    Source: Fast Splittable Pseudorandom Number Generators (Steele, Lea and Flood, OOPSLA 2014).
    """
    state = np.array([seed % 2**64 for seed in seeds], dtype=np.uint64)
    state = _mix(state) + np.asarray(positions, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    return (_mix(state) >> np.uint64(40)).astype(np.float32) / np.float32(2**24)


def _mix(state: np.ndarray) -> np.ndarray:
    state = (state ^ (state >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    state = (state ^ (state >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return state ^ (state >> np.uint64(31))


# -- the sampling distribution


def _shaped(logits: torch.Tensor, draws: Sequence[tuple[int, Draw]]) -> torch.Tensor:
    """Copy the given rows' logits (s, V) and apply penalties, temperature and truncation (-inf)."""
    shaped = logits[[row for row, _ in draws]]  # a copy
    for values, (_, draw) in zip(shaped, draws, strict=True):
        _penalize(values, draw)
    temperature = torch.tensor([draw.sampling.temperature or 1.0 for _, draw in draws], device=logits.device)
    shaped.div_(temperature[:, None])
    if truncated := [row for row, (_, draw) in enumerate(draws) if draw.sampling.truncates]:
        shaped[truncated] = _truncated(shaped[truncated], [draws[row][1].sampling for row in truncated])
    return shaped


def _penalize(logits: torch.Tensor, draw: Draw) -> None:
    """Apply one row's penalties to its logits (V,) in place, and set banned tokens to -inf."""
    sampling = draw.sampling
    if sampling.repetition_penalty != 1:
        present = torch.from_numpy(np.asarray(draw.token_ids, dtype=np.int64)).to(logits.device)  # with duplicates
        values = logits[present]
        logits[present] = torch.where(
            values > 0, values / sampling.repetition_penalty, values * sampling.repetition_penalty
        )
    if sampling.presence_penalty or sampling.frequency_penalty:
        counts = Counter(draw.token_ids[draw.n_prompt :])
        sampled = torch.tensor(list(counts), dtype=torch.long, device=logits.device)
        n_occurrences = torch.tensor(list(counts.values()), dtype=logits.dtype, device=logits.device)
        logits[sampled] -= sampling.presence_penalty + sampling.frequency_penalty * n_occurrences
    if banned := draw.banned:
        logits[banned] = -torch.inf


def _truncated(logits: torch.Tensor, params: Sequence[SamplingParams]) -> torch.Tensor:
    """Apply min-p, then top-k, then top-p to logits (b, V). Excluded tokens become -inf. Ties stay together."""
    n_tokens = logits.shape[-1]

    def column(values: Iterable[float]) -> torch.Tensor:
        return torch.tensor(list(values), device=logits.device)[:, None]

    min_p = column(p.min_p for p in params)  # (b, 1)
    highest = logits.amax(dim=-1, keepdim=True)
    logits = logits.masked_fill(logits < highest + min_p.log(), -torch.inf)
    if any(p.top_k > 0 for p in params):
        n_kept = [min(p.top_k, n_tokens) if p.top_k > 0 else n_tokens for p in params]
        n_largest = max((n for n, p in zip(n_kept, params, strict=True) if p.top_k > 0))
        ordered = logits.topk(n_largest, dim=-1).values
        is_cut = column(p.top_k > 0 for p in params)
        last = column(min(n, n_largest) - 1 for n in n_kept)
        logits = logits.masked_fill(is_cut & (logits < ordered.gather(-1, last)), -torch.inf)
    if any(p.top_p < 1 for p in params):
        threshold = _top_p_threshold(logits, column(p.top_p for p in params))
        logits = logits.masked_fill(logits < threshold, -torch.inf)
    return logits


def _top_p_threshold(logits: torch.Tensor, top_p: torch.Tensor) -> torch.Tensor:
    """Return the logit threshold (b, 1) of top-p: the minimum of the smallest set with at least `top_p` (b, 1) mass.

    Sorting the whole vocabulary is slow, so try the `CANDIDATES` most likely tokens first. -inf where top_p is 1.
    """
    log_total = logits.logsumexp(dim=-1, keepdim=True)
    for n_largest in (min(CANDIDATES, logits.shape[-1]), logits.shape[-1]):
        ordered = logits.topk(n_largest, dim=-1).values  # (b, n)
        probs = (ordered - log_total).exp()
        mass_before = probs.cumsum(dim=-1) - probs
        n_kept = (mass_before < top_p).sum(dim=-1, keepdim=True).clamp(min=1)
        if bool(((n_kept < n_largest) | (top_p >= 1)).all()):
            break
    return ordered.gather(-1, n_kept - 1).masked_fill(top_p >= 1, -torch.inf)


# -- the search


_thread_local = threading.local()


def _scratch(size: int, like: torch.Tensor) -> torch.Tensor:
    """Return uninitialized memory (size,) that later calls in this thread reuse.

    Allocating a block of logits takes three times as long as summing it.
    """
    scratch: torch.Tensor | None = getattr(_thread_local, "scratch", None)
    if scratch is None or len(scratch) < size or scratch.dtype != like.dtype or scratch.device != like.device:
        with torch.inference_mode(False):  # an inference tensor could not be used outside inference mode
            scratch = _thread_local.scratch = torch.empty(size, dtype=like.dtype, device=like.device)
    return scratch


def _chunk_logsumexp(logits: torch.Tensor) -> torch.Tensor:
    """Return log Σ exp (B, ⌈V / CHUNK⌉) of each chunk of `logits` (B, V).

    On a CPU, work on blocks that fit into the cache.
    """
    n_rows, n_tokens = logits.shape
    n_whole = n_tokens // CHUNK * CHUNK
    n_logits = CPU_BLOCK if logits.device.type == "cpu" else logits.numel()
    step = max(1, n_logits // max(1, n_rows) // CHUNK) * CHUNK
    parts = []
    scratch = _scratch(n_rows * min(step, n_whole), logits)
    for start in range(0, n_whole, step):
        block = logits[:, start : min(start + step, n_whole)].unflatten(-1, (-1, CHUNK))  # (B, c, CHUNK)
        highest = block.amax(dim=-1).clamp_(min=torch.finfo(logits.dtype).min)  # finite even if all are -inf
        shifted = torch.sub(block, highest[..., None], out=scratch[: block.numel()].view(block.shape))
        parts.append(shifted.exp_().sum(dim=-1).log_().add_(highest))
    if n_whole < n_tokens:
        parts.append(logits[:, n_whole:].logsumexp(dim=-1, keepdim=True))
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim=-1)


def _search(logits: torch.Tensor, sums: torch.Tensor, uniforms: torch.Tensor) -> torch.Tensor:
    """Return the first token (B,) at which the cumulative distribution of `logits` (B, V) exceeds `uniforms` (B,).

    `sums` are the log Σ exp of the chunks. First find the chunk: with chunk masses 0.2, 0.5, 0.3 and the number 0.6, it
    is the second, and the token is where the cumulative sum inside that chunk exceeds 0.6 - 0.2 = 0.4. Only one chunk
    per row needs a cumulative sum. A row with NaN gets an arbitrary token with log-prob NaN.
    """
    n_tokens = logits.shape[-1]
    highest = sums.amax(dim=-1, keepdim=True)
    cumulative = (sums - highest).exp_().cumsum(dim=-1)  # (B, n)
    target = uniforms * cumulative[:, -1]
    chunk = _first_above(cumulative, target)  # (B,)
    before = torch.where(chunk > 0, cumulative.gather(-1, (chunk - 1).clamp(min=0)[:, None])[:, 0], 0.0)
    columns = chunk[:, None] * CHUNK + torch.arange(min(CHUNK, n_tokens), device=logits.device)  # (B, CHUNK)
    inside = (logits.gather(-1, columns.clamp_(max=n_tokens - 1)) - highest).exp_()  # may repeat the last token
    token = _first_above(inside.cumsum(dim=-1), target - before)
    return (chunk * CHUNK + token).clamp(max=n_tokens - 1)


def _first_above(cumulative: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """Return the first column (B,) whose cumulative sum exceeds the target.

    Rounding may push the target up to the total, but no column exceeds that, so clamp it to just below.
    """
    total = cumulative[:, -1]
    below = torch.minimum(target, total.nextafter(torch.zeros_like(total)))
    found = torch.searchsorted(cumulative, below[:, None], right=True)[:, 0]
    return found.clamp(max=cumulative.shape[-1] - 1)
