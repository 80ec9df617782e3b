from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from transformers import AutoModelForCausalLM

from tx.models import config
from tx.models.checkpoints import load_params, named_tensors, params_of
from tx.models.config import read_config


@pytest.mark.parametrize("max_unrolled", [0, 8])
def test_round_trip(folder: Path, monkeypatch: pytest.MonkeyPatch, max_unrolled: int) -> None:
    monkeypatch.setattr(config, "MAX_UNROLLED", max_unrolled)
    shape = read_config(folder)
    params = load_params(folder, shape, jnp.float32)
    written = dict(named_tensors(params, shape))
    for name, tensor in AutoModelForCausalLM.from_pretrained(folder).state_dict().items():
        if name in written:
            np.testing.assert_array_equal(written[name], tensor.numpy())
    again = params_of(written, shape, jnp.float32)
    jax.tree.map(np.testing.assert_array_equal, params, again)
