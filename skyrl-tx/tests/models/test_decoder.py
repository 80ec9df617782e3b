from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM
from tx_kit.models import VOCABULARY

from tx.models import config
from tx.models.checkpoints import load_params, named_tensors, params_of
from tx.models.config import ModelConfig, read_config
from tx.models.decoder import Params, hidden_states, logits_of


@partial(jax.jit, static_argnames="shape")
def logits(shape: ModelConfig, params: Params, tokens: np.ndarray) -> jax.Array:
    positions = jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape)
    hidden, _ = hidden_states(shape, params, None, jnp.asarray(tokens), positions)
    return logits_of(params, None, hidden)


@pytest.mark.parametrize("length", [7, pytest.param(200, marks=pytest.mark.nightly)])
def test_logits_match_transformers(folder: Path, length: int) -> None:
    shape, tokens = read_config(folder), np.random.default_rng(0).integers(0, VOCABULARY, (3, length))
    ours = logits(shape, load_params(folder, shape, jnp.float32), tokens)
    with torch.no_grad():
        theirs = AutoModelForCausalLM.from_pretrained(folder)(torch.tensor(tokens)).logits.numpy()
    np.testing.assert_allclose(ours, theirs, atol=1e-5)


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
