"""The choice of the next token of every row at once, each with its own parameters and random numbers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from skyrl_train.inference_engines.base import SamplingParams

CHUNK = 512  # tokens of the vocabulary that share a partial sum in the search
CANDIDATES = 1024  # most likely tokens, which usually hold the top-p mass


@dataclass(frozen=True, slots=True)
class Draw:
    """The inputs of a sequence's next token besides its logits."""

    sampling: SamplingParams
    seed: int
    token_ids: Sequence[int]  # prompt and response so far
    n_prompt: int
    eos_ids: frozenset[int]  # of the model

    @property
    def banned(self) -> list[int]:
        """Tokens that must not be sampled, since they would end a response before `min_new_tokens`."""
        if len(self.token_ids) - self.n_prompt >= self.sampling.min_new_tokens:
            return []
        return [*(() if self.sampling.ignore_eos else self.eos_ids), *self.sampling.stop_token_ids]


@dataclass(frozen=True, slots=True)
class SampledToken:
    """A sampled token. `logprob` is of the model at the row's temperature, before penalties and truncation."""

    token_id: int
    logprob: float
    sampling_logprob: float | None = None  # after penalties and truncation; None without them
    raw_logprob: float | None = None  # at temperature 1, on request
    top_logprobs: dict[int, float] | None = None  # on request


def choose_tokens(logits: torch.Tensor, draws: Sequence[Draw]) -> list[SampledToken]:
    """Sample one token a row by searching the cumulative distribution.

    Args:
        logits: (B, V) float32; overwritten, so that only rows with penalties, truncation or raw log-probs are copied.
        draws: [B] how to sample each row. Temperature 0 takes the most likely token.
    """
    raw_rows = [row for row, draw in enumerate(draws) if draw.sampling.with_raw_logprobs]
    shaped_rows = [row for row, draw in enumerate(draws) if _is_shaped(draw)]
    greedy_rows = [row for row, draw in enumerate(draws) if draw.sampling.temperature == 0]
    raw = logits[raw_rows]  # (b, V)
    shaped = _shaped(logits, [(row, draws[row]) for row in shaped_rows])  # (s, V)
    if any(d.sampling.temperature not in (0, 1) for d in draws):
        logits.div_(torch.tensor([[d.sampling.temperature or 1.0] for d in draws], device=logits.device))
    tempered = logits[shaped_rows]  # (s, V)
    # argmax of the logits, since exponentials of close ones may be equal
    most_likely = logits.argmax(dim=-1) if len(greedy_rows) == len(draws) else logits[greedy_rows].argmax(dim=-1)
    top = _top_logits(logits, draws)

    highest = logits.amax(dim=-1, keepdim=True)  # (B, 1)
    weights = logits.sub_(highest).exp_()  # (B, V), not normalized
    sums = _chunk_sums(weights)  # (B, V / CHUNK)
    log_total = sums.sum(dim=-1).log()  # (B,) of the weights
    if shaped_rows:
        weights[shaped_rows] = (shaped - shaped.amax(dim=-1, keepdim=True)).exp_()
        sums[shaped_rows] = _chunk_sums(weights[shaped_rows])
    randomness = uniforms([draw.seed for draw in draws], [len(draw.token_ids) for draw in draws])
    token_ids = _search(weights, sums, torch.from_numpy(randomness).to(logits.device))  # (B,)
    token_ids[greedy_rows] = most_likely
    for i, row in enumerate(shaped_rows):
        if draws[row].sampling.temperature == 0:
            token_ids[row] = shaped[i].argmax()

    logprobs = _gather_chosen(weights, token_ids).log() - log_total  # (B,)
    log_normalizer = (highest[:, 0] + log_total)[shaped_rows]
    logprobs[shaped_rows] = _gather_chosen(tempered, token_ids[shaped_rows]) - log_normalizer
    sampling_logprobs = _gather_chosen(shaped, token_ids[shaped_rows]) - shaped.logsumexp(dim=-1)
    raw_logprobs = _gather_chosen(raw, token_ids[raw_rows]) - raw.logsumexp(dim=-1)
    sampling_by_row = dict(zip(shaped_rows, sampling_logprobs.tolist(), strict=True))
    raw_by_row = dict(zip(raw_rows, raw_logprobs.tolist(), strict=True))
    top_by_row = {
        row: dict(zip(ids, (values - highest[row, 0] - log_total[row]).tolist(), strict=True))
        for row, (ids, values) in top.items()
    }
    return [
        SampledToken(token_id, logprob, sampling_by_row.get(row), raw_by_row.get(row), top_by_row.get(row))
        for row, (token_id, logprob) in enumerate(zip(token_ids.tolist(), logprobs.tolist(), strict=True))
    ]


def _gather_chosen(values: torch.Tensor, token_ids: torch.Tensor) -> torch.Tensor:
    """Return the value (b,) of each row's token in (b, V)."""
    return values.gather(-1, token_ids[:, None])[:, 0]


def uniforms(seeds: Sequence[int], positions: Sequence[int]) -> np.ndarray:
    """Return a number in [0, 1) for each (seed, position), the same on every machine: SplitMix64 of the pair.

    Source: Fast Splittable Pseudorandom Number Generators (Steele, Lea and Flood, OOPSLA 2014).
    """
    state = np.array([seed % 2**64 for seed in seeds], dtype=np.uint64)
    state = _mix(state) + np.asarray(positions, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    return (_mix(state) >> np.uint64(40)).astype(np.float32) / np.float32(2**24)


def _mix(state: np.ndarray) -> np.ndarray:
    state = (state ^ (state >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    state = (state ^ (state >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return state ^ (state >> np.uint64(31))


# -- the distribution that is sampled from


def _is_shaped(draw: Draw) -> bool:
    return draw.sampling.penalizes or draw.sampling.truncates or bool(draw.banned)


def _shaped(logits: torch.Tensor, draws: Sequence[tuple[int, Draw]]) -> torch.Tensor:
    """Return a copy of the given rows' logits (s, V) after penalties, temperature and truncation (-inf)."""
    shaped = logits[[row for row, _ in draws]]  # a copy
    for values, (_, draw) in zip(shaped, draws, strict=True):
        _penalize(values, draw)
    temperature = torch.tensor([draw.sampling.temperature or 1.0 for _, draw in draws], device=logits.device)
    shaped.div_(temperature[:, None])
    params = [draw.sampling for _, draw in draws]
    truncated = [row for row, p in enumerate(params) if p.truncates]
    if truncated:
        shaped[truncated] = _truncated(shaped[truncated], [params[row] for row in truncated])
    return shaped


def _penalize(logits: torch.Tensor, draw: Draw) -> None:
    """Apply the penalties of one row to its logits (V,) in place, and rule out its banned tokens."""
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
    """Return the logits (b, V) with -inf for tokens excluded by min-p, then top-k, then top-p. Ties stay together."""
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
    """Return the smallest logit (b, 1) of the smallest set that holds `top_p` (b, 1) of the mass; -inf where p is 1."""
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


def _chunk_sums(weights: torch.Tensor) -> torch.Tensor:
    """Return sums (B, ⌈V / CHUNK⌉) over neighboring tokens of `weights` (B, V)."""
    n_whole = weights.shape[-1] // CHUNK * CHUNK
    sums = weights[:, :n_whole].unflatten(-1, (-1, CHUNK)).sum(dim=-1) if n_whole else weights[:, :0]
    if n_whole == weights.shape[-1]:
        return sums
    return torch.cat([sums, weights[:, n_whole:].sum(dim=-1, keepdim=True)], dim=-1)


def _search(weights: torch.Tensor, sums: torch.Tensor, uniforms: torch.Tensor) -> torch.Tensor:
    """Return the first token (B,) at which the cumulative sum of `weights` (B, V) passes uniform · total.

    The search finds the chunk in the cumulative `sums`, then the token in the chunk. A row with NaN gets an arbitrary
    token, whose log-prob is NaN.
    """
    n_tokens = weights.shape[-1]
    cumulative = sums.cumsum(dim=-1)  # (B, n)
    target = uniforms * cumulative[:, -1]
    chunk = _first_above(cumulative, target)  # (B,)
    before = torch.where(chunk > 0, cumulative.gather(-1, (chunk - 1).clamp(min=0)[:, None])[:, 0], 0.0)
    offsets = torch.arange(min(CHUNK, n_tokens), device=weights.device)
    columns = chunk[:, None] * CHUNK + offsets  # (B, CHUNK)
    inside = weights.gather(-1, columns.clamp(max=n_tokens - 1)).masked_fill(columns >= n_tokens, 0.0)
    token = _first_above(inside.cumsum(dim=-1), target - before)
    return (chunk * CHUNK + token).clamp(max=n_tokens - 1)


def _first_above(cumulative: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """Return the first column (B,) whose cumulative sum exceeds the target, which rounding may push to the total."""
    total = cumulative[:, -1]
    below = torch.minimum(target, total.nextafter(torch.zeros_like(total)))
    found = torch.searchsorted(cumulative, below[:, None], right=True)[:, 0]
    return found.clamp(max=cumulative.shape[-1] - 1)


def _top_logits(logits: torch.Tensor, draws: Sequence[Draw]) -> dict[int, tuple[list[int], torch.Tensor]]:
    """Return the most likely tokens and their logits for each row that requests them."""
    return {
        row: (best.indices.tolist(), best.values)
        for row, draw in enumerate(draws)
        if (n := min(draw.sampling.n_top_logprobs, logits.shape[-1])) > 0
        for best in [logits[row].topk(n)]
    }
