import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from train_kit.engines import shaped_logits

from skyrl_train.inference_engines import sampling
from skyrl_train.inference_engines.base import EngineRequest, SamplingParams
from skyrl_train.inference_engines.sampling import Draw, SampledToken, choose_in_chunks, choose_tokens, uniforms

PROBABILITIES = torch.tensor([0.05, 0.4, 0.15, 0.1, 0.3])
LOGITS = PROBABILITIES.log() + 3
Sample = Callable[..., list[SampledToken]]
ALMOST_ONE = float(np.float32(1) - np.float32(2**-24))


def params(**options: Any) -> SamplingParams:
    return SamplingParams(max_new_tokens=1, **options)


def draw(token_ids: Sequence[int] = (9,), n_prompt: int | None = None, seed: int = 0, **options: Any) -> Draw:
    return Draw(params(**options), seed, token_ids, len(token_ids) if n_prompt is None else n_prompt, frozenset({2}))


@pytest.fixture
def sample(monkeypatch: pytest.MonkeyPatch) -> Sample:
    """Sample from the logits (V,) once per given uniform number."""

    def choose(u: Iterable[float], logits: torch.Tensor = LOGITS, **options: Any) -> list[SampledToken]:
        numbers = np.asarray(list(u), dtype=np.float32)
        monkeypatch.setattr(sampling, "uniforms", lambda *_: numbers)
        return choose_tokens(logits.repeat(len(numbers), 1), [draw(**options)] * len(numbers))

    return choose


def support(sample: Sample, **options: Any) -> set[int]:
    """Return the tokens that can be sampled."""
    return {choice.token_id for choice in sample([*(i / 512 for i in range(512)), ALMOST_ONE], **options)}


def counts(n: int, **options: Any) -> torch.Tensor:
    """Count how often each of five tokens is sampled with n seeds."""
    choices = choose_tokens(LOGITS.repeat(n, 1), [draw(seed=seed, **options) for seed in range(n)])
    return torch.bincount(torch.tensor([choice.token_id for choice in choices]), minlength=5)


@pytest.mark.parametrize(
    ("options", "limit"),  # of chi-square, exceeded by one in a thousand with 4 or 2 degrees of freedom
    [({}, 18.5), ({"temperature": 0.5}, 18.5), ({"temperature": 2.0}, 18.5), ({"top_k": 3}, 13.8)],
)
def test_tokens_follow_the_softmax_of_the_tokens_that_are_kept(options: dict[str, Any], limit: float) -> None:
    n = 10_000
    weights, kept = (LOGITS / options.get("temperature", 1)).softmax(-1).topk(options.get("top_k", 5))
    expected, sampled = n * weights / weights.sum(), counts(n, **options)[kept]
    assert sampled.sum() == n
    assert ((sampled - expected).square() / expected).sum() < limit


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
        ({"top_p": 0.41}, {1, 4}),  # the token that crosses the threshold is kept
        ({"top_p": 0.8}, {1, 4, 2}),
        ({"top_p": 1e-6}, {1}),  # one token is always kept
        ({"min_p": 0.2}, {1, 4, 2, 3}),  # at least 0.2 · 0.4
        ({"min_p": 0.5}, {1, 4}),
        ({"min_p": 1.0}, {1}),
        ({"top_k": 4, "top_p": 0.8, "min_p": 0.5}, {1, 4}),
        ({"top_k": 2, "top_p": 0.5}, {1}),  # after top-k: .57, .43
        ({"min_p": 0.5, "top_p": 0.56}, {1}),
        ({"top_p": 0.6, "temperature": 0.5}, {1, 4}),  # of the tempered distribution: .57, .32, .08, …
        ({"top_p": 0.5, "temperature": 0.5}, {1}),
    ],
)
def test_truncation_keeps_exactly_the_right_tokens(sample: Sample, options: dict[str, Any], tokens: set[int]) -> None:
    assert support(sample, **options) == tokens


def test_sampling_and_top_log_probs(sample: Sample) -> None:
    kept = torch.tensor([0.0, 0.4, 0.0, 0.0, 0.3]).log().log_softmax(-1)
    for choice in sample([0.1, 0.6, 0.9], top_k=2):
        assert choice.sampling_logprob == pytest.approx(float(kept[choice.token_id]), abs=1e-6)
    assert {choice.sampling_logprob for choice in sample([0.1, 0.9], temperature=0.5)} == {None}
    (choice,) = sample([0.01], temperature=0.5, n_top_logprobs=2)
    expected = (LOGITS / 0.5).log_softmax(-1)
    assert list(choice.top_logprobs or {}) == [1, 4]
    assert choice.top_logprobs == pytest.approx({1: float(expected[1]), 4: float(expected[4])}, abs=1e-6)
    (choice,) = sample([0.01], n_top_logprobs=99)
    assert list(choice.top_logprobs or {}) == [1, 4, 2, 3, 0]


@given(
    temperature=st.sampled_from([0.5, 1.0, 1.7]),
    top_k=st.sampled_from([-1, 1, 3, 700, 5000]),
    top_p=st.sampled_from([1.0, 0.999, 0.5, 0.01]),
    min_p=st.sampled_from([0.0, 0.001, 0.1, 0.5, 1.0]),
    repetition_penalty=st.sampled_from([1.0, 1.3, 0.7]),
    seed=st.integers(0, 99),
)
def test_the_distribution_equals_that_of_transformers(seed: int, **options: Any) -> None:
    logits = 2 * torch.randn(3000, generator=torch.Generator().manual_seed(seed))
    token_ids = [5, 7, 7, 2999, 11]
    expected = shaped_logits(logits, EngineRequest(token_ids[:2], params(**options), seed), token_ids[2:], eos_id=2)
    (shaped,) = sampling._shaped(logits[None].clone(), [(0, draw(token_ids, n_prompt=2, **options))])
    kept, expected_kept = shaped.isfinite(), expected.isfinite()
    assert (kept != expected_kept).sum() <= 1  # at the top-p threshold rounding may decide about one token
    both = kept & expected_kept
    torch.testing.assert_close(shaped[both].softmax(-1), expected[both].softmax(-1), atol=1e-5, rtol=1e-4)


def test_presence_and_frequency_count_the_response_alone() -> None:
    logits = torch.zeros(1, 5)
    penalized = draw([0, 1, 3, 3, 1], n_prompt=2, presence_penalty=1.0, frequency_penalty=0.25)
    assert sampling._shaped(logits, [(0, penalized)]).tolist() == [[0.0, -1.25, 0.0, -1.5, 0.0]]


def test_greedy_sampling_applies_penalties_and_takes_the_larger_of_almost_equal_logits(sample: Sample) -> None:
    assert sample([0.5], temperature=0.0)[0].token_id == 1
    (choice,) = sample([0.5], temperature=0.0, token_ids=[1], n_prompt=0, presence_penalty=9.0)
    assert choice.token_id == 4
    assert choice.logprob == pytest.approx(float(PROBABILITIES[4].log()), abs=1e-6)
    logits = torch.tensor([1.0, 1.0000001, 0.0])  # their exponentials round to the same number
    assert logits[0] < logits[1]
    assert sample([0.0], logits, temperature=0.0)[0].token_id == 1


def test_a_token_that_is_banned_for_two_reasons_counts_once(sample: Sample) -> None:
    (choice,) = sample([0.5], min_new_tokens=1, stop_token_ids=(2,))  # token 2 is also the EOS token
    assert choice.logprob == pytest.approx(math.log(PROBABILITIES[choice.token_id]))
    assert choice.sampling_logprob == pytest.approx(math.log(PROBABILITIES[choice.token_id] / 0.85))


def test_sampling_works_outside_of_inference_mode_after_it() -> None:
    logits, draws = torch.randn(3, 2000), [draw(seed=seed) for seed in range(3)]
    with torch.inference_mode():
        expected = choose_tokens(logits.clone(), draws)
    assert choose_tokens(logits.clone(), draws) == expected


def test_the_ends_of_the_interval_never_reach_an_impossible_token(sample: Sample) -> None:
    logits = torch.tensor([-torch.inf, 0.0, -torch.inf, 1.0, -torch.inf])
    assert [choice.token_id for choice in sample([0.0, ALMOST_ONE, 1.0], logits)] == [1, 3, 3]


@pytest.mark.parametrize("n_tokens", [511, 512, 513, 1024, 150_000])
def test_the_last_token_can_be_sampled_in_any_vocabulary(sample: Sample, n_tokens: int) -> None:
    first, middle, last = sample([0.0, 0.5, ALMOST_ONE], torch.zeros(n_tokens))
    assert first.token_id == 0
    assert middle.token_id == pytest.approx(n_tokens / 2, abs=1)
    assert last.token_id > n_tokens - 50  # float32 sums are inexact, but only slightly


@given(seed=st.integers(0, 2**32), n_tokens=st.integers(1, 2000))
def test_the_search_equals_torch_searchsorted(seed: int, n_tokens: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    weights = torch.rand(3, n_tokens, generator=generator, dtype=torch.float64) + 1e-3
    u = torch.rand(3, generator=generator, dtype=torch.float64)
    cumulative = weights.cumsum(-1)
    expected = torch.searchsorted(cumulative, (u * cumulative[:, -1])[:, None], right=True)[:, 0]
    logits = weights.log()
    assert sampling._search(logits, sampling._chunk_logsumexp(logits), u).tolist() == expected.tolist()


def test_every_row_has_its_own_parameters() -> None:
    rows = [
        draw(temperature=0.0),
        draw(seed=1),
        draw(top_k=1),
        draw(seed=2, temperature=3.0),
        draw(min_p=0.9, n_top_logprobs=2),
        draw([0, 1, 1], n_prompt=1, seed=3, presence_penalty=2.0, top_p=0.7),
    ]
    batched = choose_tokens(LOGITS.repeat(6, 1), rows)
    assert [choice.token_id for choice in batched[:3:2]] == [1, 1]
    for choice, row in zip(batched, rows, strict=True):
        (single,) = choose_tokens(LOGITS[None].clone(), [row])
        assert (choice.token_id, choice.top_logprobs) == (single.token_id, single.top_logprobs)
        for name in ("logprob", "sampling_logprob"):
            assert getattr(choice, name) == pytest.approx(getattr(single, name), abs=1e-6)


def test_nan_logits_give_a_nan_log_prob_and_a_valid_token() -> None:
    logits = torch.stack([LOGITS, torch.full_like(LOGITS, torch.nan)])
    for options in ({}, {"temperature": 0.0}, {"top_p": 0.5}):
        good, bad = choose_tokens(logits.clone(), [draw(**options)] * 2)
        assert 0 <= bad.token_id < 5
        assert math.isfinite(good.logprob)
        assert math.isnan(bad.logprob)


# -- randomness


@given(seed=st.integers(-(2**70), 2**70), position=st.integers(0, 2**31))
def test_a_uniform_is_at_least_zero_and_below_one_and_reproducible(seed: int, position: int) -> None:
    (u,) = uniforms([seed], [position])
    assert u.dtype == np.float32
    assert 0 <= u < 1
    assert uniforms([5, seed], [1, position])[1] == u


def test_uniforms_are_splitmix64_of_all_bits_of_a_seed() -> None:
    published = [0xE220A8397B1DCDAF, 0x6E789E6AA1B965F4, 0x06C45D188009454F]  # its first outputs for seed 0
    assert (uniforms([0, 0, 0], [1, 2, 3]) * 2**24).tolist() == [output >> 40 for output in published]
    step = 0x9E3779B97F4A7C15  # from one position to the next
    assert (uniforms([step] * 8, range(8)) != uniforms([0] * 8, range(1, 9))).all()
    assert len(set(uniforms([1 << bit for bit in range(64)], [1] * 64))) == 64


@pytest.mark.parametrize(("n_logits", "sizes"), [(11, [2, 2, 1]), (1, [1] * 5)])
def test_chunks_limit_the_logits_and_change_no_token(
    n_logits: int, sizes: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sampling, "CHUNK_LOGITS", n_logits)
    logits, draws, chunks = LOGITS.repeat(5, 1), [draw(seed=seed) for seed in range(5)], []

    def compute(rows: slice) -> torch.Tensor:
        chunks.append(logits[rows].clone())
        return chunks[-1]

    assert choose_in_chunks(draws, 5, compute) == choose_tokens(logits.clone(), draws)
    assert [len(chunk) for chunk in chunks] == sizes
