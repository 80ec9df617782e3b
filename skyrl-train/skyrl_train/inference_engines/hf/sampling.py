"""Choosing the next token of every row at once, each row with its own parameters and its own randomness."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from skyrl_train.inference_engines.base import SamplingParams


def sample_tokens(
    logits: torch.Tensor, params: Sequence[SamplingParams], uniforms: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Sample one token a row by searching the cumulative distribution.

    Args:
        logits: (B, V) float32.
        params: [B] how to sample each row; temperature 0 takes the most likely token.
        uniforms: (B,) in [0, 1), the randomness of each row.

    Returns:
        Token ids (B,) and their log-probs (B,) at the row's temperature (1 where that is 0), before top-k, top-p
        and min-p cut the distribution: the number the trainer computes.
    """
    temperature = torch.tensor([p.temperature for p in params], device=logits.device)
    greedy = temperature == 0
    logprobs = (logits / temperature.where(~greedy, 1.0)[:, None]).log_softmax(dim=-1)  # (B, V)
    token_ids = logprobs.argmax(dim=-1) if bool(greedy.any()) else None
    if token_ids is None or not bool(greedy.all()):
        sampled = _search(_truncated(logprobs, params), uniforms)
        token_ids = sampled if token_ids is None else token_ids.where(greedy, sampled)
    return token_ids, logprobs.gather(-1, token_ids[:, None])[:, 0]


def uniforms(seeds: Sequence[int], positions: Sequence[int]) -> np.ndarray:
    """A number in [0, 1) for each (seed, position), the same on every machine: SplitMix64 of the pair.

    Source: Fast Splittable Pseudorandom Number Generators (Steele, Lea and Flood, OOPSLA 2014).
    """
    state = np.array([seed % 2**64 for seed in seeds], dtype=np.uint64)
    state = _mix(state) + np.asarray(positions, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    return (_mix(state) >> np.uint64(40)).astype(np.float32) / np.float32(2**24)


def _mix(state: np.ndarray) -> np.ndarray:
    state = (state ^ (state >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    state = (state ^ (state >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return state ^ (state >> np.uint64(31))


def _search(probs: torch.Tensor, uniforms: torch.Tensor) -> torch.Tensor:
    """The first token (B,) at which the cumulative sum of `probs` (B, V) passes uniform · total.

    A row that holds a NaN gets some token; its log-prob is NaN.
    """
    cumulative = probs.cumsum(dim=-1)
    total = cumulative[:, -1]
    target = torch.minimum(uniforms * total, total.nextafter(torch.zeros_like(total)))
    return torch.searchsorted(cumulative, target[:, None], right=True)[:, 0].clamp(max=probs.shape[-1] - 1)


def _truncated(logprobs: torch.Tensor, params: Sequence[SamplingParams]) -> torch.Tensor:
    """Probabilities (B, V), zero where a row's top-k, top-p or min-p rules a token out; not normalised."""
    probs = logprobs.exp()
    rows = [row for row, p in enumerate(params) if p.top_k > 0 or p.top_p < 1 or p.min_p > 0]
    if not rows:
        return probs
    some = probs[rows]  # (n, V)
    ordered, order = some.sort(dim=-1, descending=True)
    n_tokens = some.shape[-1]
    top_k = torch.tensor([params[r].top_k if params[r].top_k > 0 else n_tokens for r in rows], device=some.device)
    top_p = torch.tensor([params[r].top_p for r in rows], device=some.device)
    min_p = torch.tensor([params[r].min_p for r in rows], device=some.device)
    keep = torch.arange(n_tokens, device=some.device) < top_k[:, None]
    mass_before = ordered.cumsum(dim=-1) - ordered
    keep &= (mass_before < top_p[:, None]) | (top_p[:, None] >= 1)
    keep &= ordered >= min_p[:, None] * ordered[:, :1]
    keep[:, 0] = True
    probs[rows] = some * torch.zeros_like(keep).scatter(-1, order, keep)
    return probs
