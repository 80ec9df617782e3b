"""bfloat16 models are trained in float32."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from safetensors.torch import load_file
from tx_kit.backends import datum, learn

from tx.models.config import LoraConfig
from tx.tinker.backends.base import Backend
from tx.tinker.backends.factory import BackendName, new_backend
from tx.tinker.types import AdamParams

WHOLE = LoraConfig(rank=0)
DATA = [datum(40)]
NORM = "model.norm.weight"  # numbers about 1, where bfloat16 has steps of 0.004 and 0.008


@pytest.fixture(scope="module", params=["jax", "torch"])
def backend(request: pytest.FixtureRequest, models: Path) -> Backend:
    name: BackendName = request.param
    return new_backend(name, models / "llama", {"dtype": "bfloat16", "cache_gib": 0.001}, "org/tiny")


def saved(backend: Backend, model_id: str, folder: Path) -> dict[str, np.ndarray]:
    """Save and load weights and optimizer state, in float32."""
    folder.mkdir()
    backend.save_model(model_id, folder)
    tensors = load_file(folder / "model.safetensors") | load_file(folder / "optimizer.safetensors")
    assert {str(one.dtype) for name, one in tensors.items() if name.startswith("model.")} == {"torch.bfloat16"}
    assert not any(
        name.startswith(("first.", "second.", "wide.")) and one.itemsize < 4 for name, one in tensors.items()
    )
    return {name: one.float().numpy() for name, one in tensors.items()}


def test_resuming_from_a_checkpoint_is_exact(backend: Backend, tmp_path: Path) -> None:
    backend.create_model("straight", WHOLE)
    for _ in range(2):
        learn(backend, "straight", DATA)
    saved(backend, "straight", tmp_path / "second")
    backend.load_model("resumed", tmp_path / "second", with_optimizer=True)
    for model_id in ("straight", "resumed"):
        learn(backend, model_id, DATA)
    straight, resumed = (saved(backend, name, tmp_path / name) for name in ("straight", "resumed"))
    assert straight.keys() == resumed.keys()
    for name, one in straight.items():
        np.testing.assert_array_equal(one, resumed[name], err_msg=name)


def test_steps_too_small_for_bfloat16_accumulate(backend: Backend, tmp_path: Path) -> None:
    backend.create_model("small", WHOLE)
    start = saved(backend, "small", tmp_path / "start")
    for _ in range(16):
        learn(backend, "small", DATA, AdamParams(learning_rate=1e-3))
    end = saved(backend, "small", tmp_path / "end")
    update_param = end[f"wide.{NORM}"] - start[NORM]
    assert np.median(np.abs(update_param)) > 8e-3
    np.testing.assert_allclose(end[NORM], end[f"wide.{NORM}"], rtol=2**-8)
