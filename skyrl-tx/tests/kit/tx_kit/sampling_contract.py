"""The contract of backends in sampling. A test module provides the fixtures `backend`, without models, and `load`, and
inherits.
"""

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tokenizers import Tokenizer, decoders
from tokenizers.models import WordLevel

from tx.models.config import AdapterConfig
from tx.tinker.backends.base import Backend, Weights
from tx.tinker.types import SampleRequest, SampleResult, SamplingParams, UserError
from tx_kit.backends import (
    Load,
    next_tokens,
    prompt_logprobs,
    random_data,
    random_datum,
    running_and_waiting,
    sample,
    sample_request,
    target_logprobs,
    train,
)
from tx_kit.models import VOCABULARY
from tx_kit.training_contract import trained_model


def prompt_of(length: int, seed: int = 0) -> list[int]:
    tokens: list[int] = random_datum(length, seed).tokens.tolist()
    return tokens


def sampling_counts(backend: Backend) -> dict[str, int]:
    """Return the numbers of samples and requests, and the free memory."""
    return {name: n for name, n in backend.counts().items() if name != "programs compiled"}


class SamplingContract:
    """Tests of sampling."""

    @pytest.fixture
    def model(self, backend: Backend) -> str:
        return trained_model(backend)

    @pytest.fixture
    def base(self, backend: Backend) -> Weights:
        return backend.base_weights()

    def test_frozen_weights_do_not_change(self, backend: Backend, model: str, tmp_path: Path) -> None:
        request = sample_request(prompt_of(30), max_tokens=5, seed=2, scores_prompt=True)
        backend.capture(model, with_optimizer=False)(tmp_path)
        frozen = [backend.weights_of(model), backend.base_weights(), backend.load_weights(tmp_path)]
        before = sample(backend, *((request, weights) for weights in frozen))
        train(backend, model, random_data(4))
        after = sample(backend, *((request, weights) for weights in frozen))
        now, _ = sample(backend, (request, backend.weights_of(model)), (request, frozen[0]))
        for one, other in zip(before, after, strict=True):
            assert one.samples == other.samples
            np.testing.assert_array_equal(one.prompt_logprobs, other.prompt_logprobs)
        np.testing.assert_array_equal(before[0].prompt_logprobs, before[2].prompt_logprobs)
        for other in (before[0], before[1]):
            with pytest.raises(AssertionError):
                np.testing.assert_array_equal(now.prompt_logprobs, other.prompt_logprobs)

    def test_samples_are_independent_of_each_other(self, backend: Backend, model: str) -> None:
        """Prompts around the size of a page of the cache, 64, with three weights and all settings at once."""
        backend.create_model("n", AdapterConfig(rank=3, seed=9))
        train(backend, "n", random_data(5))
        weights = [backend.weights_of(model), backend.weights_of("n"), backend.base_weights()]
        lengths = ((1, 17, 64, 65), (3, 30, 63), (2, 7, 66, 129))
        requests = [
            (
                sample_request(
                    prompt_of(length),
                    n=1 + length % 3,
                    max_tokens=4 + length % 7,
                    seed=length,
                    temperature=(1.0, 0.7, 0.0)[length % 3],
                    top_k=(-1, 5)[length % 2],
                    top_p=(1.0, 0.9)[length // 2 % 2],
                ),
                its_weights,
            )
            for its_weights, its_lengths in zip(weights, lengths, strict=True)
            for length in its_lengths
        ]
        # Requests of similar length with the same weights: adjacent in the cache, and candidates for one batch.
        requests += [(sample_request(prompt_of(70 + 5 * i), n=2, max_tokens=12, seed=i), weights[2]) for i in range(8)]
        together = sample(backend, *requests)
        for one, result in zip(requests, together, strict=True):
            (alone,) = sample(backend, one)
            assert alone.samples == result.samples

    def test_long_prompts_are_scored_as_in_training(self, backend: Backend, model: str) -> None:
        prompt = random_datum(530).tokens
        found = prompt_logprobs(backend, prompt, backend.weights_of(model))
        np.testing.assert_allclose(found, target_logprobs(backend, model, [next_tokens(prompt)])[0], atol=1e-5)

    def test_seeds(self, backend: Backend, base: Weights) -> None:
        first, again, other, unseeded = sample(
            backend, *((sample_request(n=4, max_tokens=12, seed=seed), base) for seed in (7, 7, 8, None))
        )
        assert first.samples == again.samples
        assert len({tuple(one.tokens) for one in (*first.samples, *other.samples, *unseeded.samples)}) == 12

    @pytest.mark.parametrize(
        "params", [{"temperature": 0.0}, {"temperature": 1e-9}, {"temperature": 1e-20}, {"top_k": 1}, {"top_p": 1e-6}]
    )
    def test_greedy_settings(self, backend: Backend, base: Weights, params: dict[str, Any]) -> None:
        settings = [{"seed": 1, **params}, {"seed": 2, **params}, {"temperature": 0.0}]
        found = [one.samples[0] for one in sample(backend, *((sample_request(**one), base) for one in settings))]
        assert found[0].tokens == found[1].tokens == found[2].tokens
        assert np.isfinite(found[0].logprobs).all()

    def test_stop_tokens_end_a_sample(self, backend: Backend, base: Weights) -> None:
        (free,) = sample(backend, (sample_request(max_tokens=12), base))
        tokens = list(free.samples[0].tokens)
        (stopped,) = sample(backend, (sample_request(max_tokens=12, stop_tokens=(tokens[4],)), base))
        expected = tokens[: tokens.index(tokens[4]) + 1]
        assert (list(stopped.samples[0].tokens), stopped.samples[0].is_stopped) == (expected, True)
        assert (len(tokens), free.samples[0].is_stopped) == (12, False)

    def test_stop_strings_end_a_sample(self, backend: Backend, load: Load, tmp_path: Path) -> None:
        folder = shutil.copytree(backend.base_model.folder, tmp_path / "model")
        other = load(folder)
        base = other.base_weights()
        with pytest.raises(UserError, match="stop strings need the model's tokenizer"):
            other.sample(sample_request(stop_strings=("x",)), base, lambda _: None)
        tokenizer = Tokenizer(WordLevel({f"<{token}>": token for token in range(VOCABULARY)}, unk_token="<0>"))
        tokenizer.decoder = decoders.Fuse()
        tokenizer.save(str(folder / "tokenizer.json"))
        (free,) = sample(other, (sample_request(max_tokens=12), base))
        tokens = list(free.samples[0].tokens)
        ending = f"{tokens[4]}><{tokens[5]}"  # spans two tokens
        (stopped,) = sample(other, (sample_request(max_tokens=12, stop_strings=("nothing", ending)), base))
        assert (list(stopped.samples[0].tokens), stopped.samples[0].is_stopped) == (tokens[:6], True)

    def test_the_most_likely_tokens_are_reported(self, backend: Backend, base: Weights) -> None:
        params = SamplingParams(max_tokens=1, seed=0)
        (found,) = sample(backend, (SampleRequest([5, 6, 7], params, n_top_sampled=8, n_top_prompt=3), base))
        top, top_prompt = found.samples[0].top, found.top_prompt
        assert top is not None
        assert top_prompt is not None
        assert (top.tokens.shape, top_prompt.tokens.shape) == ((1, 8), (3, 3))
        assert np.isnan(top_prompt.logprobs[0]).all()
        assert (np.diff(top.logprobs[0]) <= 0).all()
        (limited,) = sample(backend, (sample_request(n=100, max_tokens=1, top_k=3), base))
        assert {one.tokens[0] for one in limited.samples} == set(top.tokens[0, :3].tolist())

        # top_p applies to what top_k leaves: this one is less than the first token's share of two, but more than its
        # share of all.
        first, second = np.exp(top.logprobs[0, :2])
        top_p = float(first + first / (first + second)) / 2
        (limited,) = sample(backend, (sample_request(n=60, max_tokens=1, top_k=2, top_p=top_p), base))
        assert {one.tokens[0] for one in limited.samples} == {int(top.tokens[0, 0])}

    def test_samples_follow_their_logprobs(self, backend: Backend, base: Weights) -> None:
        n = 500
        (found,) = sample(backend, (sample_request(n=n, max_tokens=1, temperature=0.5), base))
        for token in {one.tokens[0] for one in found.samples}:
            logprobs = {one.logprobs[0] for one in found.samples if one.tokens[0] == token}
            share = sum(one.tokens[0] == token for one in found.samples) / n
            odds = float(np.exp(logprobs.pop()))
            assert logprobs == set()
            assert abs(share - odds) < 5 * np.sqrt(odds * (1 - odds) / n) + 1e-3

    def test_cancelled_samples_make_room(self, backend: Backend, base: Weights) -> None:
        results: list[SampleResult | Exception] = []
        cancel = backend.sample(sample_request(n=4, max_tokens=200), base, results.append)
        backend.step()
        assert running_and_waiting(backend) == (4, 0)
        cancel()
        while backend.step():
            pass
        assert running_and_waiting(backend) == (0, 0)
        assert results == []
        (after,) = sample(backend, (sample_request(), base))
        assert len(after.samples) == 1

    def test_the_longest_request_fits(self, backend: Backend, base: Weights) -> None:
        prompt = np.resize(prompt_of(100), backend.base_model.max_context - 3).tolist()
        (found,) = sample(backend, (sample_request(prompt, n=2, max_tokens=3), base))
        assert [len(one.tokens) for one in found.samples] == [3, 3]

    def test_more_than_fits_waits(self, backend: Backend, base: Weights) -> None:
        found: list[SampleResult | Exception] = []
        for i in range(20):
            backend.sample(sample_request(n=8, max_tokens=20, seed=i), base, found.append)
        backend.step()
        running, waiting = running_and_waiting(backend)
        assert 0 < running < 160
        assert waiting > 0
        while backend.step():
            pass
        assert [len(one.tokens) for result in found for one in result.samples] == [20] * 160  # type: ignore[union-attr]

    def test_one_sample_does_not_wait_for_thousands(self, backend: Backend, base: Weights) -> None:
        found: dict[str, SampleResult | Exception] = {}
        before = sampling_counts(backend)
        many, one = sample_request(n=2000, max_tokens=20), sample_request(max_tokens=20, seed=2)
        cancel = backend.sample(many, base, lambda result: found.update(many=result))
        for _ in range(2):
            backend.step()
        backend.sample(one, base, lambda result: found.update(one=result))
        n_steps = 0
        while "one" not in found:
            n_steps += backend.step()
        assert n_steps <= 8  # until lanes are free, and as many again; all the samples take more than a hundred
        assert list(found) == ["one"]
        cancel()
        while backend.step():
            pass
        assert sampling_counts(backend) == before
        (alone,) = sample(backend, (one, base))
        assert alone.samples == found["one"].samples  # type: ignore[union-attr]

    def test_prompts_that_fill_the_cache_do_not_block_others(self, backend: Backend, model: str) -> None:
        """Prompts of requests that are far from their turn are evicted, and prefilled again."""
        weights, before = backend.weights_of(model), sampling_counts(backend)
        requests = [sample_request(prompt_of(900, i), n=3, max_tokens=9, seed=i, scores_prompt=True) for i in range(16)]
        found = sample(backend, *((one, weights) for one in requests))
        assert sampling_counts(backend) == before
        for i in (0, 15):
            (alone,) = sample(backend, (requests[i], weights))
            assert alone.samples == found[i].samples
            np.testing.assert_array_equal(alone.prompt_logprobs, found[i].prompt_logprobs)
