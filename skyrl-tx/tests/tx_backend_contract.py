"""What every backend keeps to. A test module makes `backend` a fixture and inherits from `BackendContract`."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pytest
from tx_tiny_models import VOCABULARY

from tx.models.config import LoraConfig
from tx.tinker.backends.base import Backend, Weights
from tx.tinker.types import (
    AdamParams,
    Datum,
    Pass,
    PassResult,
    SampleRequest,
    SampleResult,
    SamplingParams,
    UserError,
)

LORA = LoraConfig(rank=8, seed=3)
STEP = AdamParams(learning_rate=1e-2)


def datum(length: int, seed: int = 0, weight: float = 1.0) -> Datum:
    """A random sequence with random targets."""
    rng = np.random.default_rng(seed * 1000 + length)
    tokens, targets = rng.integers(0, VOCABULARY, (2, length)).astype(np.int32)
    return Datum(tokens, {"target_tokens": targets, "weights": np.full(length, weight, np.float32)})


def some_data(seed: int = 0) -> list[Datum]:
    """Of lengths that take several shapes."""
    return [datum(length, seed) for length in (5, 40, 33, 100, 31, 64)]


def run(backend: Backend, *asked: Pass) -> list[PassResult]:
    """The results of passes that take turns."""
    results: dict[int, PassResult] = {}
    waiting = deque((number, backend.compute(one)) for number, one in enumerate(asked))
    while waiting:
        number, parts = waiting.popleft()
        result = next(parts)
        if result is None:
            waiting.append((number, parts))
        else:
            results[number] = result
    return [results[number] for number in range(len(asked))]


def learn(backend: Backend, model_id: str, data: Sequence[Datum], params: AdamParams = STEP) -> float:
    """One step; the loss before it."""
    (result,) = run(backend, Pass(model_id, data, "cross_entropy"))
    backend.optim_step(model_id, params)
    return result.loss


def losses(backend: Backend, model_id: str, data: Sequence[Datum]) -> list[np.ndarray]:
    """Log-probs of the targets now."""
    (result,) = run(backend, Pass(model_id, data, "cross_entropy", is_forward_only=True))
    return list(result.logprobs)


def sample(backend: Backend, *asked: tuple[SampleRequest, Weights]) -> list[SampleResult]:
    """The results of requests that run at the same time."""
    found: dict[int, SampleResult | Exception] = {}

    def note(number: int) -> Callable[[SampleResult | Exception], None]:
        return lambda result: found.__setitem__(number, result)

    for number, (request, weights) in enumerate(asked):
        backend.sample(request, weights, note(number))
    while backend.step():
        pass
    results = []
    for number in range(len(asked)):
        result = found[number]
        if isinstance(result, Exception):
            raise result
        results.append(result)
    return results


def request(prompt: Sequence[int] = (5, 6, 7), *, n: int = 1, max_tokens: int = 8, **params: object) -> SampleRequest:
    """A request with a seed."""
    return SampleRequest(prompt, SamplingParams(max_tokens=max_tokens, **({"seed": 1} | params)), n)  # type: ignore[arg-type]


def assert_same(one: Sequence[np.ndarray], other: Sequence[np.ndarray]) -> None:
    """To the last bit."""
    for a, b in zip(one, other, strict=True):
        np.testing.assert_array_equal(a, b)


class BackendContract:
    """Tests of training, of folders and of sampling."""

    @pytest.fixture
    def model(self, backend: Backend) -> str:
        """A model that has learned a little."""
        backend.create_model("m", LORA)
        for seed in range(2):
            learn(backend, "m", some_data(seed))
        return "m"

    # -- training

    def test_a_new_model_is_the_base_model(self, backend: Backend) -> None:
        backend.create_model("m", LORA)
        tokens = datum(20).tokens
        targets = Datum(tokens[:-1], {"target_tokens": tokens[1:], "weights": np.ones(19, np.float32)})
        ask = SampleRequest(tokens.tolist(), SamplingParams(max_tokens=1, seed=0), wants_prompt_logprobs=True)
        (found,) = sample(backend, (ask, backend.base_weights()))
        assert found.prompt_logprobs is not None
        np.testing.assert_allclose(found.prompt_logprobs[1:], losses(backend, "m", [targets])[0], atol=1e-5)

    def test_learning_lowers_the_loss(self, backend: Backend) -> None:
        backend.create_model("m", LORA)
        first, *_, last = [learn(backend, "m", some_data()) for _ in range(6)]
        assert last < 0.95 * first

    def test_a_forward_pass_changes_nothing(self, backend: Backend, model: str) -> None:
        before = losses(backend, model, some_data())
        backend.optim_step(model, AdamParams(weight_decay=0.0, learning_rate=0.0))
        assert_same(losses(backend, model, some_data()), before)

    @pytest.mark.parametrize("n_parts", [2, 6])
    def test_passes_add_up(self, backend: Backend, n_parts: int) -> None:
        data = some_data()
        for model_id in ("whole", "parts"):
            backend.create_model(model_id, LORA)
        learn(backend, "whole", data)
        for start in range(0, len(data), len(data) // n_parts):
            run(backend, Pass("parts", data[start : start + len(data) // n_parts], "cross_entropy"))
        backend.optim_step("parts", STEP)
        for one, other in zip(losses(backend, "whole", data), losses(backend, "parts", data), strict=True):
            np.testing.assert_allclose(one, other, atol=2e-5)

    def test_models_learn_the_same_beside_others(self, backend: Backend) -> None:
        names = [f"m{i}" for i in range(8)]
        for i, name in enumerate(names):
            backend.create_model(name, LoraConfig(rank=(2, 8, 12)[i % 3], seed=i))
            backend.create_model(f"{name} alone", LoraConfig(rank=(2, 8, 12)[i % 3], seed=i))
        for step in range(2):
            run(backend, *(Pass(name, some_data(i + step), "cross_entropy") for i, name in enumerate(names)))
            for i, name in enumerate(names):
                backend.optim_step(name, STEP)
                learn(backend, f"{name} alone", some_data(i + step))
        for name in names:
            assert_same(losses(backend, name, some_data()), losses(backend, f"{name} alone", some_data()))

    def test_a_model_that_is_not_there(self, backend: Backend) -> None:
        with pytest.raises(UserError, match="there is no model x"):
            run(backend, Pass("x", [datum(5)], "cross_entropy"))

    def test_settings_of_a_step_are_its_own(self, backend: Backend, model: str) -> None:
        before = losses(backend, model, some_data())
        run(backend, Pass(model, some_data(), "cross_entropy"))
        metrics = backend.optim_step(model, AdamParams(learning_rate=0.0))
        assert metrics["skyrl.ai/grad_norm"] > 0
        assert_same(losses(backend, model, some_data()), before)

    def test_several_targets_of_a_position(self, backend: Backend, model: str) -> None:
        one = datum(12)
        two = np.stack([one.inputs["target_tokens"], (one.inputs["target_tokens"] + 1) % VOCABULARY], axis=1)
        weights = np.stack([np.full(12, 0.5), np.full(12, 0.25)], axis=1).astype(np.float32)
        (found,) = run(
            backend, Pass(model, [Datum(one.tokens, {"target_tokens": two, "weights": weights})], "cross_entropy")
        )
        single = losses(backend, model, [one])[0]
        assert found.logprobs[0].shape == (12, 2)
        np.testing.assert_allclose(found.logprobs[0][:, 0], single, atol=1e-5)
        np.testing.assert_allclose(found.loss, -(found.logprobs[0] * weights).sum(), rtol=1e-5)

    @pytest.mark.parametrize("loss_fn", ["importance_sampling", "ppo", "cispo", "dro", "gspo"])
    def test_policy_losses(self, backend: Backend, model: str, loss_fn: str) -> None:
        data = []
        for one, lp in zip(some_data(), losses(backend, model, some_data()), strict=True):
            inputs = {"target_tokens": one.inputs["target_tokens"], "logprobs": lp}
            inputs["advantages"] = np.where(np.arange(len(lp)) % 2, 1.0, -1.0).astype(np.float32)
            if loss_fn == "gspo":
                inputs["sequence_ratio_mask"] = np.ones(len(lp), np.float32)
            data.append(Datum(one.tokens, inputs))
        before = losses(backend, model, some_data())
        run(backend, Pass(model, data, loss_fn))
        backend.optim_step(model, STEP)
        gain = [now - lp for now, lp in zip(losses(backend, model, some_data()), before, strict=True)]
        signs = [one.inputs["advantages"] for one in data]
        assert sum((g * s).sum() for g, s in zip(gain, signs, strict=True)) > 0

    def test_models_come_and_go(self, backend: Backend) -> None:
        backend.create_model("m", LORA)
        with pytest.raises(UserError, match="there is a model m already"):
            backend.create_model("m", LORA)
        assert backend.models() == {"m": LORA}
        backend.delete_model("m")
        assert backend.models() == {}
        with pytest.raises(UserError, match="there is no model m"):
            backend.optim_step("m", STEP)

    def test_counts(self, backend: Backend) -> None:
        assert all(isinstance(n, int) and n >= 0 for n in backend.counts().values())

    # -- folders

    def test_a_checkpoint_goes_on_where_it_was(self, backend: Backend, model: str, tmp_path: Path) -> None:
        backend.save_model(model, tmp_path)
        backend.load_model("resumed", tmp_path, with_optimizer=True)
        backend.load_model("fresh", tmp_path, with_optimizer=False)
        before = losses(backend, model, some_data())
        assert_same(losses(backend, "resumed", some_data()), before)
        assert_same(losses(backend, "fresh", some_data()), before)
        for name in (model, "resumed", "fresh"):
            learn(backend, name, some_data(9))
        after = losses(backend, model, some_data())
        assert_same(losses(backend, "resumed", some_data()), after)
        with pytest.raises(AssertionError):
            assert_same(losses(backend, "fresh", some_data()), after)

    def test_weights_alone_have_no_optimizer(self, backend: Backend, model: str, tmp_path: Path) -> None:
        backend.save_weights(model, tmp_path)
        backend.load_model("n", tmp_path, with_optimizer=False)
        with pytest.raises(UserError, match="no state of an optimizer"):
            backend.load_model("o", tmp_path, with_optimizer=True)

    # -- sampling

    def test_samplers_are_frozen(self, backend: Backend, model: str, tmp_path: Path) -> None:
        ask = SampleRequest(datum(30).tokens.tolist(), SamplingParams(max_tokens=5, seed=2), wants_prompt_logprobs=True)
        backend.save_weights(model, tmp_path)
        frozen = [backend.weights_of(model), backend.base_weights(), backend.load_weights(tmp_path)]
        before = sample(backend, *((ask, weights) for weights in frozen))
        learn(backend, model, some_data(4))
        after = sample(backend, *((ask, weights) for weights in frozen))
        now, _ = sample(backend, (ask, backend.weights_of(model)), (ask, frozen[0]))
        for one, other in zip(before, after, strict=True):
            assert one.samples == other.samples
            np.testing.assert_array_equal(one.prompt_logprobs, other.prompt_logprobs)
        np.testing.assert_array_equal(before[0].prompt_logprobs, before[2].prompt_logprobs)
        for other in (before[0], before[1]):
            with pytest.raises(AssertionError):
                np.testing.assert_array_equal(now.prompt_logprobs, other.prompt_logprobs)

    def test_samples_are_the_same_beside_others(self, backend: Backend, model: str) -> None:
        backend.create_model("n", LoraConfig(rank=3, seed=9))
        learn(backend, "n", some_data(5))
        weights = [backend.weights_of(model), backend.weights_of("n"), backend.base_weights()]
        asked = [
            (
                request(
                    datum(length).tokens.tolist(),
                    n=1 + length % 3,
                    max_tokens=4 + length % 7,
                    seed=length,
                    temperature=(1.0, 0.7, 0.0)[length % 3],
                    top_k=(-1, 5)[length % 2],
                    top_p=(1.0, 0.9)[length // 2 % 2],
                ),
                weights[i % 3],
            )
            for i, length in enumerate((1, 2, 3, 17, 63, 64, 65, 66, 129, 40, 7, 300))
        ]
        together = sample(backend, *asked)
        for one, result in zip(asked, together, strict=True):
            (alone,) = sample(backend, one)
            assert alone.samples == result.samples

    def test_logprobs_of_samples_are_those_of_prompts(self, backend: Backend, model: str) -> None:
        weights = backend.weights_of(model)
        (found,) = sample(backend, (request(n=2, max_tokens=20), weights))
        for one in found.samples:
            whole = [5, 6, 7, *one.tokens]
            ask = SampleRequest(whole, SamplingParams(max_tokens=1), wants_prompt_logprobs=True)
            (again,) = sample(backend, (ask, weights))
            assert again.prompt_logprobs is not None
            np.testing.assert_allclose(again.prompt_logprobs[3:], one.logprobs, atol=1e-5)

    def test_prompts_are_scored_as_in_training(self, backend: Backend, model: str) -> None:
        for length in (2, 33, 64, 65, 130, 600):
            tokens = datum(length).tokens
            ask = SampleRequest(tokens.tolist(), SamplingParams(max_tokens=1), wants_prompt_logprobs=True)
            (found,) = sample(backend, (ask, backend.weights_of(model)))
            targets = Datum(tokens[:-1], {"target_tokens": tokens[1:], "weights": np.ones(length - 1, np.float32)})
            assert found.prompt_logprobs is not None
            assert np.isnan(found.prompt_logprobs[0])
            np.testing.assert_allclose(found.prompt_logprobs[1:], losses(backend, model, [targets])[0], atol=1e-5)

    def test_seeds(self, backend: Backend) -> None:
        base = backend.base_weights()
        first, again, other, unseeded = sample(
            backend, *((request(n=4, max_tokens=12, seed=seed), base) for seed in (7, 7, 8, None))
        )
        assert first.samples == again.samples
        assert len({tuple(one.tokens) for one in (*first.samples, *other.samples, *unseeded.samples)}) == 12

    @pytest.mark.parametrize("params", [{"temperature": 0.0}, {"top_k": 1}, {"top_p": 1e-6}])
    def test_ways_to_be_greedy(self, backend: Backend, params: dict[str, float]) -> None:
        base = backend.base_weights()
        one, other = sample(backend, *((request(max_tokens=12, seed=seed, **params), base) for seed in (1, 2)))
        (greedy,) = sample(backend, (request(max_tokens=12, temperature=0.0), base))
        assert one.samples[0].tokens == other.samples[0].tokens == greedy.samples[0].tokens

    def test_stop_tokens_end_a_sample(self, backend: Backend) -> None:
        base = backend.base_weights()
        (free,) = sample(backend, (request(max_tokens=12), base))
        fifth = free.samples[0].tokens[4]
        expected = list(free.samples[0].tokens)[: list(free.samples[0].tokens).index(fifth) + 1]
        (stopped,) = sample(backend, (request(max_tokens=12, stop_tokens=(fifth,)), base))
        assert (list(stopped.samples[0].tokens), stopped.samples[0].is_stopped) == (expected, True)
        assert (len(free.samples[0].tokens), free.samples[0].is_stopped) == (12, False)

    def test_what_may_be_chosen(self, backend: Backend) -> None:
        ask = SampleRequest(
            [5, 6, 7], SamplingParams(max_tokens=1, seed=0), n_samples=1, n_top_sampled=8, n_top_prompt=3
        )
        (found,) = sample(backend, (ask, backend.base_weights()))
        top, top_prompt = found.samples[0].top, found.top_prompt
        assert top is not None
        assert top_prompt is not None
        assert (top.tokens.shape, top_prompt.tokens.shape) == ((1, 8), (3, 3))
        assert np.isnan(top_prompt.logprobs[0]).all()
        assert (np.diff(top.logprobs[0]) <= 0).all()
        many = SampleRequest([5, 6, 7], SamplingParams(max_tokens=1, seed=0, top_k=3), n_samples=300)
        (limited,) = sample(backend, (many, backend.base_weights()))
        assert {one.tokens[0] for one in limited.samples} == set(top.tokens[0, :3].tolist())

    def test_top_p_is_a_part_of_what_top_k_leaves(self, backend: Backend) -> None:
        base = backend.base_weights()
        ask = SampleRequest([5, 6, 7], SamplingParams(max_tokens=1, seed=0), n_top_sampled=2)
        (found,) = sample(backend, (ask, base))
        assert found.samples[0].top is not None
        first, second = np.exp(found.samples[0].top.logprobs[0])
        top_p = (first + first / (first + second)) / 2  # the first is less than that of all, and more of the two
        (limited,) = sample(backend, (request(n=60, max_tokens=1, top_k=2, top_p=float(top_p)), base))
        assert {one.tokens[0] for one in limited.samples} == {int(found.samples[0].top.tokens[0, 0])}

    def test_samples_are_distributed_as_they_say(self, backend: Backend) -> None:
        n = 2000
        ask = SampleRequest([5, 6, 7], SamplingParams(max_tokens=1, seed=0, temperature=0.5), n_samples=n)
        (found,) = sample(backend, (ask, backend.base_weights()))
        for token in {one.tokens[0] for one in found.samples}:
            said = {one.logprobs[0] for one in found.samples if one.tokens[0] == token}
            share = sum(one.tokens[0] == token for one in found.samples) / n
            odds = float(np.exp(said.pop()))
            assert said == set()
            assert abs(share - odds) < 5 * np.sqrt(odds * (1 - odds) / n) + 1e-3

    def test_what_is_cancelled_makes_room(self, backend: Backend) -> None:
        results: list[SampleResult | Exception] = []
        cancel = backend.sample(request(n=4, max_tokens=200), backend.base_weights(), results.append)
        backend.step()
        cancel()
        while backend.step():
            pass
        assert results == []
        (after,) = sample(backend, (request(), backend.base_weights()))
        assert len(after.samples) == 1

    def test_the_longest_request_fits(self, backend: Backend) -> None:
        prompt = np.resize(datum(100).tokens, backend.base_model.max_context - 3).tolist()
        (found,) = sample(backend, (request(prompt, n=2, max_tokens=3), backend.base_weights()))
        assert [len(one.tokens) for one in found.samples] == [3, 3]

    def test_more_than_fits_waits(self, backend: Backend) -> None:
        asked = [(request(n=8, max_tokens=20 + i, seed=i), backend.base_weights()) for i in range(20)]
        found = sample(backend, *asked)
        assert [len(result.samples[0].tokens) for result in found] == [20 + i for i in range(20)]
