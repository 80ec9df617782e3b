"""The contract of backends in training. A test module provides the fixture `backend`, without models, and inherits."""

from pathlib import Path

import numpy as np
import pytest

from tx.models.config import AdapterConfig
from tx.tinker.backends.base import Backend
from tx.tinker.types import AdamParams, Datum, Pass, UserError
from tx_kit.backends import (
    LENGTHS,
    LORA,
    STEP,
    WHOLE,
    assert_close_arrays,
    assert_same,
    next_tokens,
    prompt_logprobs,
    random_data,
    random_datum,
    run_pass,
    run_passes,
    sample,
    sample_request,
    target_logprobs,
    train,
)
from tx_kit.models import VOCABULARY

DATA = random_data()


def trained_model(backend: Backend, lora: AdapterConfig = LORA) -> str:
    backend.create_model("m", lora)
    for seed in range(2):
        train(backend, "m", random_data(seed))
    return "m"


class TrainingContract:
    """Tests of training, saved folders, and reported log-probs."""

    @pytest.fixture
    def model(self, backend: Backend) -> str:
        return trained_model(backend)

    def test_models_are_created_and_deleted(self, backend: Backend) -> None:
        backend.create_model("m", LORA)
        with pytest.raises(UserError, match="model m already exists"):
            backend.create_model("m", LORA)
        assert backend.models() == {"m": LORA}
        backend.delete_model("m")
        assert backend.models() == {}
        with pytest.raises(UserError, match="there is no model m"):
            backend.optim_step("m", STEP)
        with pytest.raises(UserError, match="there is no model m"):
            run_pass(backend, "m", DATA)

    def test_a_new_model_is_the_base_model(self, backend: Backend) -> None:
        backend.create_model("m", LORA)
        prompts = [random_datum(length + 1).tokens for length in LENGTHS]
        scored, *_ = target_logprobs(backend, "m", [next_tokens(prompt) for prompt in prompts])
        np.testing.assert_allclose(prompt_logprobs(backend, prompts[0], backend.base_weights()), scored, atol=1e-5)

    def test_learning_lowers_the_loss(self, backend: Backend) -> None:
        """Forward passes add no gradient."""
        backend.create_model("m", LORA)
        before = target_logprobs(backend, "m", DATA)
        assert backend.optim_step("m", STEP)["skyrl.ai/grad_norm"] == 0
        assert_same(target_logprobs(backend, "m", DATA), before)
        first, *_, last = [train(backend, "m", DATA) for _ in range(6)]
        assert last < 0.95 * first

    def test_gradients_accumulate_over_passes_and_micro_batches(self, backend: Backend) -> None:
        """On JAX, five sequences are a micro-batch of four and one of a single sequence."""
        data = random_data(lengths=(40, 33, 48, 41, 47))
        for model_id in ("whole", "parts"):
            backend.create_model(model_id, LORA)
        run_pass(backend, "whole", data)
        for datum in data:
            run_pass(backend, "parts", [datum])
        norms = [backend.optim_step(model_id, STEP)["skyrl.ai/grad_norm"] for model_id in ("whole", "parts")]
        np.testing.assert_allclose(*norms, rtol=1e-5)
        whole, parts = (target_logprobs(backend, model_id, DATA) for model_id in ("whole", "parts"))
        assert_close_arrays(whole, parts, 2e-5)

    def test_dropped_gradients_have_no_effect(self, backend: Backend) -> None:
        for model_id in ("m", "twin"):
            backend.create_model(model_id, LORA)
        run_pass(backend, "m", random_data(1))
        backend.drop_gradients("m")
        backend.drop_gradients("m")
        backend.drop_gradients("nobody")
        for _ in range(2):
            assert train(backend, "m", DATA) == train(backend, "twin", DATA)

    @pytest.mark.parametrize("norm", ["inf", "nan"])
    def test_a_gradient_that_is_infinite_or_nan_changes_nothing(self, backend: Backend, norm: str) -> None:
        for model_id in ("m", "twin"):
            backend.create_model(model_id, LORA)
            train(backend, model_id, DATA)
        size = np.float32(3e38 if norm == "inf" else "nan")
        inputs = {**DATA[0].inputs, "weights": DATA[0].inputs["weights"] * size}
        run_pass(backend, "m", [Datum(DATA[0].tokens, inputs), *DATA[1:]])
        with pytest.raises(UserError, match=f"the norm of the gradients is (nan|{norm})"):
            backend.optim_step("m", STEP)
        for _ in range(2):  # compares weights, and through a step the moments
            assert train(backend, "m", DATA) == train(backend, "twin", DATA)
        assert backend.optim_step("m", STEP)["skyrl.ai/grad_norm"] == 0

    def test_training_is_independent_of_other_models(self, backend: Backend) -> None:
        names = {f"m{i}": AdapterConfig(rank=rank, seed=i) for i, rank in enumerate((2, 8, 5))}
        for name, lora in names.items():
            backend.create_model(name, lora)
            backend.create_model(f"{name} alone", lora)
        for step in range(2):
            run_passes(backend, *(Pass(name, random_data(i + step), "cross_entropy") for i, name in enumerate(names)))
            for i, name in enumerate(names):
                backend.optim_step(name, STEP)
                train(backend, f"{name} alone", random_data(i + step))
        for name in names:
            assert_same(target_logprobs(backend, name, DATA), target_logprobs(backend, f"{name} alone", DATA))

    def test_full_fine_tuning(self, backend: Backend, tmp_path: Path) -> None:
        for name, lora in (("adapter", LORA), ("m", WHOLE)):
            backend.create_model(name, lora)
        base = train(backend, "adapter", DATA)
        first, *_, last = [train(backend, "m", DATA) for _ in range(4)]
        np.testing.assert_allclose(first, base, rtol=1e-6)
        assert last < 0.95 * first
        backend.create_model("another", LORA)
        assert train(backend, "another", DATA) == base  # which all models share
        backend.capture("m", with_optimizer=True)(tmp_path)
        backend.load_model("resumed", tmp_path, with_optimizer=True)
        greedy = sample_request(random_datum(30).tokens.tolist(), temperature=0.0)
        frozen = [backend.weights_of("m"), backend.load_weights(tmp_path)]
        before = sample(backend, *((greedy, weights) for weights in frozen))
        for _ in range(3):  # compares weights, a step, and the moments
            assert train(backend, "m", DATA) == train(backend, "resumed", DATA)
        for found in (*before, *sample(backend, *((greedy, weights) for weights in frozen))):
            assert found.samples == before[0].samples
        (now,) = sample(backend, (greedy, backend.weights_of("m")))
        assert now.samples[0].logprobs != before[0].samples[0].logprobs

    def test_several_targets_per_position(self, backend: Backend) -> None:
        """Several targets per position equal several sequences with one target each."""
        one = random_datum(48)
        targets = [(one.inputs["target_tokens"] + shift) % VOCABULARY for shift in (0, 1)]
        weights = [np.linspace(0, top, 48, dtype=np.float32) for top in (0.5, 0.25)]
        single = [Datum(one.tokens, {"target_tokens": t, "weights": w}) for t, w in zip(targets, weights, strict=True)]
        several = {"target_tokens": np.stack(targets, axis=1), "weights": np.stack(weights, axis=1)}
        for model_id in ("together", "apart"):
            backend.create_model(model_id, LORA)
        found = run_pass(backend, "together", [Datum(one.tokens, several)])
        alone = [run_pass(backend, "apart", [each]) for each in single]
        np.testing.assert_allclose(found.loss, sum(each.loss for each in alone), rtol=1e-6)
        np.testing.assert_allclose(found.logprobs[0], np.stack([each.logprobs[0] for each in alone], 1), atol=1e-5)
        for model_id in ("together", "apart"):
            backend.optim_step(model_id, STEP)
        assert_close_arrays(*(target_logprobs(backend, model_id, DATA) for model_id in ("together", "apart")), 2e-5)

    def test_masked_values_may_be_anything(self, backend: Backend) -> None:
        backend.create_model("m", LORA)
        norms = []
        for nothing in (0, (-100, 10**6)):
            inputs = {name: value.copy() for name, value in DATA[0].inputs.items()}
            inputs["target_tokens"][3:5], inputs["weights"][3:5] = nothing, 0
            found = run_pass(backend, "m", [Datum(DATA[0].tokens, inputs), *DATA[1:]])
            np.testing.assert_array_equal(found.token_losses[0][3:5], 0.0)
            assert np.isfinite(found.logprobs[0]).all()
            norms.append(backend.optim_step("m", AdamParams(learning_rate=0.0, eps=0.0))["skyrl.ai/grad_norm"])
        assert norms[0] == norms[1] > 0
        assert np.isfinite(target_logprobs(backend, "m", DATA)[0]).all()

    def test_the_size_of_files_is_known_before_they_are_written(self, backend: Backend, tmp_path: Path) -> None:
        for name, lora in (("adapter", LORA), ("whole", WHOLE)):
            backend.create_model(name, lora)
            for with_optimizer in (True, False):
                folder = tmp_path / name / str(with_optimizer)
                folder.mkdir(parents=True)
                backend.capture(name, with_optimizer=with_optimizer)(folder)
                n_written = sum(file.stat().st_size for file in folder.iterdir())
                expected = backend.n_bytes(name, with_optimizer=with_optimizer)
                assert expected / 3 <= n_written < 1.2 * expected + 50_000  # the ranks of experts may be padded

    def test_a_checkpoint_resumes_exactly(self, backend: Backend, model: str, tmp_path: Path) -> None:
        """With its optimizer, which weights alone do not have."""
        backend.capture(model, with_optimizer=False)(tmp_path)
        with pytest.raises(UserError, match="no optimizer state"):
            backend.load_model("resumed", tmp_path, with_optimizer=True)
        backend.capture(model, with_optimizer=True)(tmp_path)
        backend.load_model("resumed", tmp_path, with_optimizer=True)
        backend.load_model("fresh", tmp_path, with_optimizer=False)
        before = target_logprobs(backend, model, DATA)
        for name in ("resumed", "fresh"):
            assert_same(target_logprobs(backend, name, DATA), before)
        for name in (model, "resumed", "fresh"):
            train(backend, name, random_data(9))
        after = target_logprobs(backend, model, DATA)
        assert_same(target_logprobs(backend, "resumed", DATA), after)
        with pytest.raises(AssertionError):
            assert_same(target_logprobs(backend, "fresh", DATA), after)

    def test_samples_and_prompts_are_scored_as_in_training(self, backend: Backend, model: str) -> None:
        weights = backend.weights_of(model)
        (found,) = sample(backend, (sample_request(n=2, max_tokens=20), weights))
        for one in found.samples:
            again = prompt_logprobs(backend, np.array([5, 6, 7, *one.tokens], np.int32), weights)
            np.testing.assert_allclose(again[2:], one.logprobs, atol=1e-5)
        prompts = [random_datum(length + 1).tokens for length in (3, 31, 32, *LENGTHS)]
        trained = target_logprobs(backend, model, [next_tokens(prompt) for prompt in prompts])
        for prompt, expected in zip(prompts, trained, strict=True):
            scored = prompt_logprobs(backend, prompt, weights)
            np.testing.assert_allclose(scored, expected, atol=1e-5)
