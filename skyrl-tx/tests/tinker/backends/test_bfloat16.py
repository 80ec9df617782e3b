"""bfloat16 models are trained in float32."""

from pathlib import Path

import numpy as np
import pytest
from safetensors.torch import load_file
from tx_kit.backends import LORA, WHOLE, load, next_tokens, random_data, random_datum, sample, sample_request, train

from tx.tinker.backends.base import Backend
from tx.tinker.backends.factory import BackendName
from tx.tinker.types import AdamParams

DATA = random_data(lengths=(40,))
NORM = "model.norm.weight"  # numbers about 1, where bfloat16 has steps of 0.004 and 0.008


@pytest.fixture(scope="module", params=["jax", "torch"])
def name(request: pytest.FixtureRequest) -> BackendName:
    backend: BackendName = request.param
    return backend


@pytest.fixture(scope="module")
def backend(name: BackendName, shallow_model: Path) -> Backend:
    return load(name, shallow_model, dtype="bfloat16")


def save_and_load(backend: Backend, model_id: str, folder: Path) -> dict[str, np.ndarray]:
    """Save weights and optimizer state, and load them in float32."""
    folder.mkdir()
    backend.capture(model_id, with_optimizer=True)(folder)
    tensors = load_file(folder / "model.safetensors") | load_file(folder / "optimizer.safetensors")
    assert {str(one.dtype) for name, one in tensors.items() if name.startswith("model.")} == {"torch.bfloat16"}
    wide = [one for name, one in tensors.items() if name.startswith(("first.", "second.", "wide."))]
    assert all(one.itemsize == 4 for one in wide)
    return {name: one.float().numpy() for name, one in tensors.items()}


def test_losses_and_logprobs_are_close_to_those_of_float32(
    name: BackendName, backend: Backend, shallow_model: Path
) -> None:
    prompt = random_datum(49).tokens
    data = [next_tokens(prompt), *random_data(lengths=(40, 33))]
    losses, logprobs = [], []
    for one in (backend, load(name, shallow_model)):
        one.create_model("adapter", LORA)
        losses.append([train(one, "adapter", data) for _ in range(4)])
        request = sample_request(prompt.tolist(), max_tokens=9, scores_prompt=True)
        (sampled,) = sample(one, (request, one.weights_of("adapter")))
        assert len(sampled.samples[0].tokens) == 9
        logprobs.append(sampled.prompt_logprobs[1:])  # type: ignore[index]
    assert losses[0][-1] < 0.95 * losses[0][0]
    np.testing.assert_allclose(*losses, rtol=1e-2)
    np.testing.assert_allclose(*logprobs, atol=0.2)
    with pytest.raises(AssertionError):
        np.testing.assert_allclose(*logprobs, atol=1e-5)


def test_resuming_from_a_checkpoint_is_exact(backend: Backend, tmp_path: Path) -> None:
    backend.create_model("straight", WHOLE)
    for _ in range(2):
        train(backend, "straight", DATA)
    save_and_load(backend, "straight", tmp_path / "second")
    backend.load_model("resumed", tmp_path / "second", with_optimizer=True)
    for model_id in ("straight", "resumed"):
        train(backend, model_id, DATA)
    straight, resumed = (save_and_load(backend, name, tmp_path / name) for name in ("straight", "resumed"))
    assert straight.keys() == resumed.keys()
    for name, one in straight.items():
        np.testing.assert_array_equal(one, resumed[name], err_msg=name)


def test_steps_too_small_for_bfloat16_accumulate(backend: Backend, tmp_path: Path) -> None:
    backend.create_model("small", WHOLE)
    start = save_and_load(backend, "small", tmp_path / "start")
    for _ in range(16):
        train(backend, "small", DATA, AdamParams(learning_rate=1e-3))
    end = save_and_load(backend, "small", tmp_path / "end")
    moved = end[f"wide.{NORM}"] - start[NORM]
    assert np.median(np.abs(moved)) > 8e-3
    np.testing.assert_allclose(end[NORM], end[f"wide.{NORM}"], rtol=2**-8)
