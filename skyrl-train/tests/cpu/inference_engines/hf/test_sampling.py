"""Sampling: the right distribution, the right support, and randomness that belongs to the request alone."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from skyrl_train.inference_engines.base import SamplingParams
from skyrl_train.inference_engines.hf.sampling import sample_tokens, uniforms

PROBABILITIES = torch.tensor([0.05, 0.4, 0.15, 0.1, 0.3])
LOGITS = PROBABILITIES.log() + 3
ALMOST_ONE = float(np.float32(1) - np.float32(2**-24))


def params(**options: Any) -> SamplingParams:
    return SamplingParams(max_new_tokens=1, **options)


def sample(
    u: torch.Tensor | np.ndarray, logits: torch.Tensor = LOGITS, **options: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    """Sample the same logits (V,) once for each uniform number."""
    rows = torch.as_tensor(u, dtype=torch.float32)
    return sample_tokens(logits.expand(len(rows), -1), [params(**options)] * len(rows), rows)


def support(**options: Any) -> set[int]:
    """The tokens that any randomness can reach."""
    grid = torch.cat([torch.arange(0, 1, 1 / 512), torch.tensor([ALMOST_ONE])])
    return set(sample(grid, **options)[0].tolist())


@pytest.mark.parametrize("temperature", [1.0, 0.5, 2.0])
def test_tokens_follow_the_softmax(temperature: float) -> None:
    n = 40_000
    token_ids, _ = sample(uniforms(range(n), [7] * n), temperature=temperature)
    expected = (LOGITS / temperature).softmax(-1) * n
    chi_square = ((torch.bincount(token_ids, minlength=5) - expected).square() / expected).sum()
    assert chi_square < 18.5  # 4 degrees of freedom: one in a thousand


def test_truncated_tokens_follow_the_renormalised_softmax() -> None:
    n = 40_000
    token_ids, _ = sample(uniforms(range(n), [7] * n), top_k=3)
    expected = torch.tensor([0.0, 0.4, 0.15, 0.0, 0.3]) / 0.85 * n
    counts = torch.bincount(token_ids, minlength=5)
    assert counts[[0, 3]].tolist() == [0, 0]
    kept = [1, 2, 4]
    assert ((counts[kept] - expected[kept]).square() / expected[kept]).sum() < 13.8  # 2 degrees of freedom


@pytest.mark.parametrize(
    ("options", "tokens"),
    [
        ({}, {0, 1, 2, 3, 4}),
        ({"temperature": 0.0}, {1}),
        ({"temperature": 0.0, "top_k": 3}, {1}),
        ({"top_k": 1}, {1}),
        ({"top_k": 2}, {1, 4}),
        ({"top_k": 50}, {0, 1, 2, 3, 4}),
        ({"top_p": 0.39}, {1}),
        ({"top_p": 0.41}, {1, 4}),  # the token that crosses the line is kept
        ({"top_p": 0.8}, {1, 4, 2}),
        ({"top_p": 0.0}, {1}),  # one token is always left
        ({"min_p": 0.2}, {1, 4, 2, 3}),  # at least 0.2 · 0.4
        ({"min_p": 0.5}, {1, 4}),
        ({"min_p": 1.0}, {1}),
        ({"top_k": 4, "top_p": 0.8, "min_p": 0.5}, {1, 4}),
        ({"top_p": 0.6, "temperature": 0.5}, {1, 4}),  # of the tempered distribution: .57, .32, .08, …
        ({"top_p": 0.5, "temperature": 0.5}, {1}),
    ],
)
def test_truncation_leaves_exactly_the_right_tokens(options: dict[str, Any], tokens: set[int]) -> None:
    assert support(**options) == tokens


@pytest.mark.parametrize(
    ("options", "temperature"),
    [({}, 1.0), ({"temperature": 0.5}, 0.5), ({"temperature": 0.0}, 1.0), ({"top_k": 2, "temperature": 2.0}, 2.0)],
)
def test_log_probs_are_of_the_tempered_distribution_before_truncation(
    options: dict[str, Any], temperature: float
) -> None:
    token_ids, logprobs = sample(np.array([0.1, 0.6, 0.9]), **options)
    torch.testing.assert_close(logprobs, (LOGITS / temperature).log_softmax(-1)[token_ids])


def test_the_ends_of_the_interval_never_reach_an_impossible_token() -> None:
    logits = torch.tensor([-torch.inf, 0.0, -torch.inf, 1.0, -torch.inf])
    assert sample(np.array([0.0, ALMOST_ONE, 1.0]), logits)[0].tolist() == [1, 3, 3]


def test_the_last_token_is_in_reach_in_a_large_vocabulary() -> None:
    logits = torch.zeros(150_000)
    token_ids, _ = sample(np.array([0.0, ALMOST_ONE]), logits)
    assert token_ids[0] == 0
    assert token_ids[1] > 149_900  # float32 sums are coarse, but not that coarse


def test_every_row_has_its_own_parameters() -> None:
    rows = [params(temperature=0.0), params(), params(top_k=1), params(temperature=3.0), params(min_p=0.9)]
    token_ids, logprobs = sample_tokens(LOGITS.expand(5, -1), rows, torch.full((5,), 0.99))
    alone = [sample_tokens(LOGITS[None], [row], torch.tensor([0.99])) for row in rows]
    assert token_ids.tolist() == [1, 4, 1, 4, 1]
    torch.testing.assert_close(token_ids, torch.cat([ids for ids, _ in alone]))
    torch.testing.assert_close(logprobs, torch.cat([values for _, values in alone]))


def test_logits_that_are_not_finite_show_in_the_log_prob_only() -> None:
    logits = torch.stack([LOGITS, torch.full_like(LOGITS, torch.nan)])
    for options in ({}, {"temperature": 0.0}, {"top_p": 0.5}):
        token_ids, logprobs = sample_tokens(logits, [params(**options)] * 2, torch.tensor([0.5, 0.5]))
        assert 0 <= token_ids[1] < 5
        assert logprobs[0].isfinite()
        assert logprobs[1].isnan()


# -- randomness


@given(seed=st.integers(-(2**70), 2**70), position=st.integers(0, 2**31))
def test_a_uniform_is_at_least_zero_and_below_one_and_reproducible(seed: int, position: int) -> None:
    (u,) = uniforms([seed], [position])
    assert u.dtype == np.float32
    assert 0 <= u < 1
    assert uniforms([5, seed], [1, position])[1] == u


def test_uniforms_are_splitmix64() -> None:
    published = [0xE220A8397B1DCDAF, 0x6E789E6AA1B965F4, 0x06C45D188009454F]  # its first outputs for seed 0
    assert (uniforms([0, 0, 0], [1, 2, 3]) * 2**24).tolist() == [output >> 40 for output in published]


def test_no_seed_continues_where_another_one_is() -> None:
    step = 0x9E3779B97F4A7C15  # from one position to the next
    assert (uniforms([step] * 8, range(8)) != uniforms([0] * 8, range(1, 9))).all()


def test_uniforms_look_random_over_seeds_and_over_positions() -> None:
    n = 20_000
    for u in (uniforms(range(n), [3] * n), uniforms([3] * n, range(n))):
        counts, _ = np.histogram(u, bins=20, range=(0, 1))
        assert ((counts - n / 20) ** 2 / (n / 20)).sum() < 43.8  # 19 degrees of freedom: one in a thousand
        assert abs(np.corrcoef(u[:-1], u[1:])[0, 1]) < 0.03
