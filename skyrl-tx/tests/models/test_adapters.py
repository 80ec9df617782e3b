from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM
from tx_kit.models import VOCABULARY

from tx.models import config
from tx.models.adapters import adapter_of, load_adapter, named_factors, save_adapter
from tx.models.checkpoints import load_params
from tx.models.config import AdapterConfig, ModelConfig, read_config
from tx.models.decoder import Params, hidden_states, logits_of
from tx.models.lora import Adapter, BatchAdapters, new_adapter, rows_of


def random_adapter(lora: AdapterConfig, shape: ModelConfig) -> Adapter:
    rng = np.random.default_rng(7)
    new = named_factors(new_adapter(lora, shape, seed=0), lora, shape)
    return adapter_of({name: rng.standard_normal(one.shape).astype(np.float32) * 0.1 for name, one in new}, lora, shape)


@pytest.mark.parametrize(
    ("kind", "lora"),
    [
        ("qwen3", AdapterConfig(rank=6)),
        ("llama", AdapterConfig(rank=8, train_mlp=False)),
        ("llama", AdapterConfig(rank=1, alpha=2.0)),
    ],
)
def test_matches_peft(models: Path, tmp_path: Path, kind: str, lora: AdapterConfig) -> None:
    folder = models / kind
    shape = read_config(folder)
    params, adapter = load_params(folder, shape, jnp.float32), random_adapter(lora, shape)
    save_adapter(tmp_path, adapter, lora, shape, str(folder))
    tokens = np.random.default_rng(0).integers(0, VOCABULARY, (2, 30))
    rows = rows_of([adapter, adapter], jnp.full(2, lora.scale))

    @jax.jit
    def logits(params: Params, rows: BatchAdapters, tokens: np.ndarray) -> jax.Array:
        hidden, _ = hidden_states(shape, params, rows, tokens, jnp.broadcast_to(jnp.arange(30), (2, 30)))
        return logits_of(params, rows, hidden)

    theirs = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(folder), tmp_path)
    with torch.no_grad():
        expected = theirs(torch.tensor(tokens)).logits.numpy()
    np.testing.assert_allclose(logits(params, rows, tokens), expected, atol=1e-4)


@pytest.mark.parametrize("max_unrolled", [0, 8])
def test_round_trip(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, max_unrolled: int) -> None:
    monkeypatch.setattr(config, "MAX_UNROLLED", max_unrolled)
    shape, lora = read_config(folder), AdapterConfig(rank=12)
    adapter = random_adapter(lora, shape)
    save_adapter(tmp_path, adapter, lora, shape, "base")
    jax.tree.map(np.testing.assert_array_equal, adapter, load_adapter(tmp_path, lora, shape))
    with pytest.raises(ValueError, match=r"lora_A\.weight has shape \(12, 32\) instead of \(9, 32\)"):
        load_adapter(tmp_path, AdapterConfig(rank=9), shape)
