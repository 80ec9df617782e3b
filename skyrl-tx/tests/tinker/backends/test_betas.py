from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest
import torch

from tx.tinker.backends.jax import adam as jax_adam
from tx.tinker.backends.torch import adam as torch_adam
from tx.tinker.types import AdamParams


@pytest.mark.parametrize(
    "settings",
    [
        AdamParams(learning_rate=0.01, beta1=1 - 1e-9, beta2=1 - 1e-12, eps=0.0),  # rounds to 1 in float32
        AdamParams(learning_rate=0.01, beta1=0.0, beta2=0.0, eps=0.0),
    ],
)
def test_the_first_step_is_the_learning_rate_for_any_betas(settings: AdamParams) -> None:
    gradient = np.array([0.5, -2.0, 0.0], np.float32)
    expected = [-0.01, 0.01, 0.0]
    zeros = jnp.zeros(3)
    found, _, _ = jax_adam.adam_step(
        zeros, jax_adam.new_moments(zeros), jnp.asarray(gradient), jax_adam.step_of(settings)
    )
    np.testing.assert_allclose(found, expected, rtol=1e-4)
    tensor = torch.zeros(3)
    torch_adam.adam_step(torch_adam.new_optimizer([tensor]), [torch.from_numpy(gradient)], settings)
    np.testing.assert_allclose(tensor, expected, rtol=1e-4)
