"""The contract of all backends.

A test module provides the fixtures `backend` and `load`, and inherits from `TrainingContract` for every model family
and
from `SamplingContract` for one.
"""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pytest
from tokenizers import Tokenizer, decoders
from tokenizers.models import WordLevel

from tx.models.config import LoraConfig
from tx.tinker.backends.base import Backend
from tx.tinker.types import (
    AdamParams,
    Datum,
    Pass,
    SampleRequest,
    SampleResult,
    SamplingParams,
    UserError,
)
from tx_kit.backends import (
    LENGTHS,
    LORA,
    MIDDLE,
    STEP,
    WHOLE,
    Load,
    assert_same,
    datum,
    learn,
    losses,
    next_tokens,
    prompt_logprobs,
    request,
    run,
    running_and_waiting,
    sample,
    some_data,
)
from tx_kit.models import VOCABULARY


class _Models:
    @pytest.fixture
    def model(self, backend: Backend) -> str:
        """A model after a few steps."""
        backend.create_model("m", LORA)
        for seed in range(2):
            learn(backend, "m", some_data(seed))
        return "m"


class TrainingContract(_Models):
    """Tests of training, saved folders, and reported log-probs."""

    def test_a_new_model_is_the_base_model(self, backend: Backend) -> None:
        backend.create_model("m", LORA)
        found = prompt_logprobs(backend, datum(64).tokens, backend.base_weights())
        np.testing.assert_allclose(found, losses(backend, "m", [next_tokens(datum(64).tokens)])[0], atol=1e-5)

    def test_learning_lowers_the_loss(self, backend: Backend) -> None:
        backend.create_model("m", LORA)
        first, *_, last = [learn(backend, "m", some_data()) for _ in range(6)]
        assert last < 0.95 * first

    def test_a_forward_pass_adds_no_gradient(self, backend: Backend) -> None:
        backend.create_model("m", LORA)
        before = losses(backend, "m", some_data())
        assert backend.optim_step("m", STEP)["skyrl.ai/grad_norm"] == 0
        assert_same(losses(backend, "m", some_data()), before)

    def test_gradients_accumulate_over_passes(self, backend: Backend) -> None:
        """Splitting data into passes, and so into micro-batches, does not change the sum."""
        data = sorted(some_data(), key=lambda one: len(one.tokens))
        n_short = len(data) - len(MIDDLE) - 1
        for model_id in ("whole", "parts"):
            backend.create_model(model_id, LORA)
        run(backend, Pass("whole", data, "cross_entropy"))
        for part in (data[:n_short], *([one] for one in data[n_short:])):
            run(backend, Pass("parts", part, "cross_entropy"))
        norms = [backend.optim_step(model_id, STEP)["skyrl.ai/grad_norm"] for model_id in ("whole", "parts")]
        np.testing.assert_allclose(*norms, rtol=1e-5)
        for one, other in zip(losses(backend, "whole", data), losses(backend, "parts", data), strict=True):
            np.testing.assert_allclose(one, other, atol=2e-5)

    def test_dropped_gradients_have_no_effect(self, backend: Backend) -> None:
        for model_id in ("m", "twin"):
            backend.create_model(model_id, LORA)
        run(backend, Pass("m", some_data(1), "cross_entropy"))
        backend.drop_gradients("m")
        backend.drop_gradients("m")
        backend.drop_gradients("nobody")
        for _ in range(2):
            assert learn(backend, "m", some_data()) == learn(backend, "twin", some_data())

    @pytest.mark.parametrize("norm", ["inf", "nan"])
    def test_a_gradient_that_is_infinite_or_nan_changes_nothing(self, backend: Backend, norm: str) -> None:
        data = some_data(lengths=MIDDLE)
        for model_id in ("m", "twin"):
            backend.create_model(model_id, LORA)
            learn(backend, model_id, data)
        size = np.float32(3e38 if norm == "inf" else "nan")
        inputs = {name: value * size if name == "weights" else value for name, value in data[0].inputs.items()}
        run(backend, Pass("m", [Datum(data[0].tokens, inputs), *data[1:]], "cross_entropy"))
        with pytest.raises(UserError, match=f"the norm of the gradients is (nan|{norm})"):
            backend.optim_step("m", STEP)
        for _ in range(2):  # compares weights, and through a step the moments
            assert learn(backend, "m", data) == learn(backend, "twin", data)
        assert backend.optim_step("m", STEP)["skyrl.ai/grad_norm"] == 0

    def test_training_is_independent_of_other_models(self, backend: Backend) -> None:
        names = {f"m{i}": LoraConfig(rank=rank, seed=i) for i, rank in enumerate((2, 8, 5))}
        for name, lora in names.items():
            backend.create_model(name, lora)
            backend.create_model(f"{name} alone", lora)
        for step in range(2):
            run(backend, *(Pass(name, some_data(i + step), "cross_entropy") for i, name in enumerate(names)))
            for i, name in enumerate(names):
                backend.optim_step(name, STEP)
                learn(backend, f"{name} alone", some_data(i + step))
        for name in names:
            assert_same(losses(backend, name, some_data()), losses(backend, f"{name} alone", some_data()))

    def test_the_size_of_files_is_known_before_they_are_written(self, backend: Backend, tmp_path: Path) -> None:
        for name, lora in (("adapter", LORA), ("whole", WHOLE)):
            backend.create_model(name, lora)
            for with_optimizer, save in ((True, backend.save_model), (False, backend.save_weights)):
                folder = tmp_path / name / save.__name__
                folder.mkdir(parents=True)
                save(name, folder)
                n_written = sum(file.stat().st_size for file in folder.iterdir())
                expected = backend.n_bytes(name, with_optimizer=with_optimizer)
                assert expected / 3 <= n_written < 1.2 * expected + 50_000  # the ranks of experts may be padded

    def test_full_fine_tuning(self, backend: Backend, tmp_path: Path) -> None:
        data = some_data(lengths=MIDDLE)
        for name, lora in (("adapter", LORA), ("m", WHOLE)):
            backend.create_model(name, lora)
        base = learn(backend, "adapter", data)
        first, *_, last = [learn(backend, "m", data) for _ in range(4)]
        np.testing.assert_allclose(first, base, rtol=1e-6)
        assert last < 0.95 * first
        backend.create_model("another", LORA)
        assert learn(backend, "another", data) == base  # which all models share
        backend.save_model("m", tmp_path)
        backend.load_model("resumed", tmp_path, with_optimizer=True)
        ask = request(datum(30).tokens.tolist(), temperature=0.0)
        frozen = [backend.weights_of("m"), backend.load_weights(tmp_path)]
        before = sample(backend, *((ask, weights) for weights in frozen))
        for _ in range(3):  # compares weights, a step, and the moments
            assert learn(backend, "m", data) == learn(backend, "resumed", data)
        for found in (*before, *sample(backend, *((ask, weights) for weights in frozen))):
            assert found.samples == before[0].samples
        (now,) = sample(backend, (ask, backend.weights_of("m")))
        assert now.samples[0].logprobs != before[0].samples[0].logprobs

    def test_a_missing_model(self, backend: Backend) -> None:
        with pytest.raises(UserError, match="there is no model x"):
            run(backend, Pass("x", [datum(5)], "cross_entropy"))

    def test_each_step_has_its_own_settings(self, backend: Backend, model: str) -> None:
        before = losses(backend, model, some_data())
        run(backend, Pass(model, some_data(), "cross_entropy"))
        metrics = backend.optim_step(model, AdamParams(learning_rate=0.0))
        assert metrics["skyrl.ai/grad_norm"] > 0
        assert_same(losses(backend, model, some_data()), before)

    def test_several_targets_per_position(self, backend: Backend) -> None:
        """Several targets per position equal several sequences with one target each."""
        one = datum(64)
        targets = [(one.inputs["target_tokens"] + shift) % VOCABULARY for shift in (0, 1)]
        weights = [np.linspace(0, top, 64, dtype=np.float32) for top in (0.5, 0.25)]
        single = [Datum(one.tokens, {"target_tokens": t, "weights": w}) for t, w in zip(targets, weights, strict=True)]
        several = {"target_tokens": np.stack(targets, axis=1), "weights": np.stack(weights, axis=1)}
        for model_id in ("together", "apart"):
            backend.create_model(model_id, LORA)
        (found,) = run(backend, Pass("together", [Datum(one.tokens, several)], "cross_entropy"))
        alone = [run(backend, Pass("apart", [each], "cross_entropy"))[0] for each in single]
        np.testing.assert_allclose(found.loss, sum(each.loss for each in alone), rtol=1e-6)
        np.testing.assert_allclose(found.logprobs[0], np.stack([each.logprobs[0] for each in alone], 1), atol=1e-5)
        for model_id in ("together", "apart"):
            backend.optim_step(model_id, STEP)
        np.testing.assert_allclose(*(losses(backend, name, [one])[0] for name in ("together", "apart")), atol=2e-5)

    def test_masked_values_may_be_anything(self, backend: Backend) -> None:
        backend.create_model("m", LORA)
        one, norms = datum(64), []
        for nothing in (0, (-100, 10**6)):
            inputs = {name: value.copy() for name, value in one.inputs.items()}
            inputs["target_tokens"][3:5], inputs["weights"][3:5] = nothing, 0
            (found,) = run(backend, Pass("m", [Datum(one.tokens, inputs)], "cross_entropy"))
            np.testing.assert_array_equal(found.token_losses[0][3:5], 0.0)
            assert np.isfinite(found.logprobs[0]).all()
            norms.append(backend.optim_step("m", AdamParams(learning_rate=0.0, eps=0.0))["skyrl.ai/grad_norm"])
        assert norms[0] == norms[1] > 0
        assert np.isfinite(losses(backend, "m", [one])[0]).all()

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

    def test_models_are_created_and_deleted(self, backend: Backend) -> None:
        backend.create_model("m", LORA)
        with pytest.raises(UserError, match="model m already exists"):
            backend.create_model("m", LORA)
        assert backend.models() == {"m": LORA}
        backend.delete_model("m")
        assert backend.models() == {}
        with pytest.raises(UserError, match="there is no model m"):
            backend.optim_step("m", STEP)

    # -- folders

    def test_a_checkpoint_resumes_exactly(self, backend: Backend, model: str, tmp_path: Path) -> None:
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
        with pytest.raises(UserError, match="no optimizer state"):
            backend.load_model("o", tmp_path, with_optimizer=True)

    # -- log-probs

    def test_sample_logprobs_match_prompt_logprobs(self, backend: Backend, model: str) -> None:
        weights = backend.weights_of(model)
        (found,) = sample(backend, (request(n=2, max_tokens=20), weights))
        for one in found.samples:
            again = prompt_logprobs(backend, np.array([5, 6, 7, *one.tokens], np.int32), weights)
            np.testing.assert_allclose(again[2:], one.logprobs, atol=1e-5)

    def test_prompts_are_scored_as_in_training(self, backend: Backend, model: str) -> None:
        prompts = [datum(length + 1).tokens for length in LENGTHS]
        trained = losses(backend, model, [next_tokens(prompt) for prompt in prompts])
        for prompt, expected in zip(prompts, trained, strict=True):
            found = prompt_logprobs(backend, prompt, backend.weights_of(model))
            np.testing.assert_allclose(found, expected, atol=1e-5)


class SamplingContract(_Models):
    """Tests of sampling."""

    def test_frozen_weights_do_not_change(self, backend: Backend, model: str, tmp_path: Path) -> None:
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

    def test_samples_are_independent_of_each_other(self, backend: Backend, model: str) -> None:
        backend.create_model("n", LoraConfig(rank=3, seed=9))
        learn(backend, "n", some_data(5))
        weights = [backend.weights_of(model), backend.weights_of("n"), backend.base_weights()]
        requests = [
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
        # Requests of similar length with the same weights: adjacent in the cache, and candidates for one batch.
        requests += [
            (request(datum(70 + 5 * i).tokens.tolist(), n=2, max_tokens=12, seed=i), weights[2]) for i in range(8)
        ]
        together = sample(backend, *requests)
        for one, result in zip(requests, together, strict=True):
            (alone,) = sample(backend, one)
            assert alone.samples == result.samples

    def test_long_prompts_are_scored_as_in_training(self, backend: Backend, model: str) -> None:
        prompt = datum(600).tokens
        found = prompt_logprobs(backend, prompt, backend.weights_of(model))
        np.testing.assert_allclose(found, losses(backend, model, [next_tokens(prompt)])[0], atol=1e-5)

    def test_seeds(self, backend: Backend) -> None:
        base = backend.base_weights()
        first, again, other, unseeded = sample(
            backend, *((request(n=4, max_tokens=12, seed=seed), base) for seed in (7, 7, 8, None))
        )
        assert first.samples == again.samples
        assert len({tuple(one.tokens) for one in (*first.samples, *other.samples, *unseeded.samples)}) == 12

    @pytest.mark.parametrize(
        "params", [{"temperature": 0.0}, {"temperature": 1e-9}, {"temperature": 1e-20}, {"top_k": 1}, {"top_p": 1e-6}]
    )
    def test_greedy_settings(self, backend: Backend, params: dict[str, float]) -> None:
        base = backend.base_weights()
        one, other = sample(backend, *((request(max_tokens=12, seed=seed, **params), base) for seed in (1, 2)))
        (greedy,) = sample(backend, (request(max_tokens=12, temperature=0.0), base))
        assert one.samples[0].tokens == other.samples[0].tokens == greedy.samples[0].tokens
        assert np.isfinite(one.samples[0].logprobs).all()

    def test_stop_tokens_end_a_sample(self, backend: Backend) -> None:
        base = backend.base_weights()
        (free,) = sample(backend, (request(max_tokens=12), base))
        fifth = free.samples[0].tokens[4]
        expected = list(free.samples[0].tokens)[: list(free.samples[0].tokens).index(fifth) + 1]
        (stopped,) = sample(backend, (request(max_tokens=12, stop_tokens=(fifth,)), base))
        assert (list(stopped.samples[0].tokens), stopped.samples[0].is_stopped) == (expected, True)
        assert (len(free.samples[0].tokens), free.samples[0].is_stopped) == (12, False)

    def test_stop_strings_end_a_sample(self, backend: Backend, load: Load, tmp_path: Path) -> None:
        folder = shutil.copytree(backend.base_model.folder, tmp_path / "model")
        other = load(folder)
        base = other.base_weights()
        with pytest.raises(UserError, match="stop strings need the model's tokenizer"):
            other.sample(request(stop_strings=("x",)), base, lambda _: None)
        tokenizer = Tokenizer(WordLevel({f"<{token}>": token for token in range(VOCABULARY)}, unk_token="<0>"))
        tokenizer.decoder = decoders.Fuse()
        tokenizer.save(str(folder / "tokenizer.json"))
        (free,) = sample(other, (request(max_tokens=12), base))
        tokens = list(free.samples[0].tokens)
        ending = f"{tokens[4]}><{tokens[5]}"  # spans two tokens
        (stopped,) = sample(other, (request(max_tokens=12, stop_strings=("nothing", ending)), base))
        assert (list(stopped.samples[0].tokens), stopped.samples[0].is_stopped) == (tokens[:6], True)

    def test_the_most_likely_tokens_are_reported(self, backend: Backend) -> None:
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
        many = SampleRequest([5, 6, 7], SamplingParams(max_tokens=1, seed=0, top_k=3), n_samples=100)
        (limited,) = sample(backend, (many, backend.base_weights()))
        assert {one.tokens[0] for one in limited.samples} == set(top.tokens[0, :3].tolist())

    def test_top_p_applies_to_what_top_k_leaves(self, backend: Backend) -> None:
        base = backend.base_weights()
        ask = SampleRequest([5, 6, 7], SamplingParams(max_tokens=1, seed=0), n_top_sampled=2)
        (found,) = sample(backend, (ask, base))
        assert found.samples[0].top is not None
        first, second = np.exp(found.samples[0].top.logprobs[0])
        top_p = (
            first + first / (first + second)
        ) / 2  # less than the first's share of the two, but more than its share of all
        (limited,) = sample(backend, (request(n=60, max_tokens=1, top_k=2, top_p=float(top_p)), base))
        assert {one.tokens[0] for one in limited.samples} == {int(found.samples[0].top.tokens[0, 0])}

    def test_samples_follow_their_logprobs(self, backend: Backend) -> None:
        n = 500
        ask = SampleRequest([5, 6, 7], SamplingParams(max_tokens=1, seed=0, temperature=0.5), n_samples=n)
        (found,) = sample(backend, (ask, backend.base_weights()))
        for token in {one.tokens[0] for one in found.samples}:
            logprobs = {one.logprobs[0] for one in found.samples if one.tokens[0] == token}
            share = sum(one.tokens[0] == token for one in found.samples) / n
            odds = float(np.exp(logprobs.pop()))
            assert logprobs == set()
            assert abs(share - odds) < 5 * np.sqrt(odds * (1 - odds) / n) + 1e-3

    def test_cancelled_samples_make_room(self, backend: Backend) -> None:
        results: list[SampleResult | Exception] = []
        cancel = backend.sample(request(n=4, max_tokens=200), backend.base_weights(), results.append)
        backend.step()
        assert running_and_waiting(backend) == (4, 0)
        cancel()
        while backend.step():
            pass
        assert running_and_waiting(backend) == (0, 0)
        assert results == []
        (after,) = sample(backend, (request(), backend.base_weights()))
        assert len(after.samples) == 1

    def test_the_longest_request_fits(self, backend: Backend) -> None:
        prompt = np.resize(datum(100).tokens, backend.base_model.max_context - 3).tolist()
        (found,) = sample(backend, (request(prompt, n=2, max_tokens=3), backend.base_weights()))
        assert [len(one.tokens) for one in found.samples] == [3, 3]

    def test_more_than_fits_waits(self, backend: Backend) -> None:
        found: list[SampleResult | Exception] = []
        for i in range(20):
            backend.sample(request(n=8, max_tokens=20, seed=i), backend.base_weights(), found.append)
        backend.step()
        running, waiting = running_and_waiting(backend)
        assert 0 < running < 160
        assert waiting > 0
        while backend.step():
            pass
        assert [len(one.tokens) for result in found for one in result.samples] == [20] * 160
