"""Save and load adapters in peft's layout."""

from collections.abc import Iterator, Mapping
from pathlib import Path

import jax.numpy as jnp
import numpy as np
from safetensors.numpy import load_file, save_file

from tx.models import peft
from tx.models.checkpoints import MLP, layer_names
from tx.models.config import AdapterConfig, ModelConfig
from tx.models.lora import HEAD, Adapter, Factors, covered_names, padded_rank, rank_of, shapes

MODULES = {"q": "q_proj", "k": "k_proj", "v": "v_proj", "o": "o_proj", **MLP, HEAD: "lm_head"}


def save_adapter(folder: Path, adapter: Adapter, lora: AdapterConfig, config: ModelConfig, base_model: str) -> None:
    """Write an adapter into a folder."""
    modules = [MODULES[name] for name in covered_names(lora, config)]
    has_experts = config.moe is not None and lora.train_mlp
    expert_ranks = {hf_names: rank_of(name, lora, config) for name, hf_names in MLP.items()} if has_experts else {}
    peft.write_config(folder, lora, base_model, modules, expert_ranks)
    save_file(dict(named_factors(adapter, lora, config)), folder / peft.WEIGHTS, metadata={"format": "pt"})


def load_adapter(folder: Path, lora: AdapterConfig, config: ModelConfig) -> Adapter:
    """Load an adapter from a folder.

    Raises:
        ValueError: a tensor is missing, or does not have the shape that `lora` and the model need.
    """
    return adapter_of(load_file(folder / peft.WEIGHTS), lora, config)


def named_factors(adapter: Adapter, lora: AdapterConfig, config: ModelConfig) -> Iterator[tuple[str, np.ndarray]]:
    """Yield tensors by their names in peft, (rank, in) and (out, rank), without padding."""
    for name, path, block, where in _matrices(lora, config):
        factors = adapter.head if block is None else adapter.blocks[block][name]
        assert factors is not None
        rank = rank_of(name, lora, config)
        name_of_a, name_of_b = peft.factor_names(path)
        yield name_of_a, np.ascontiguousarray(np.asarray(factors.a)[where][..., :rank].T)
        yield name_of_b, np.ascontiguousarray(np.asarray(factors.b)[where][:rank].T)


def adapter_of(tensors: Mapping[str, np.ndarray], lora: AdapterConfig, config: ModelConfig) -> Adapter:
    """Build an adapter from tensors: the inverse of `named_factors`."""
    arrays: dict[tuple[int | None, str], tuple[np.ndarray, np.ndarray]] = {}
    for name, path, block, where in _matrices(lora, config):
        if (block, name) not in arrays:
            *experts, n_in, n_out = shapes(config)[name]
            leading = (*([] if block is None else [config.blocks[block]]), *experts)
            padded = padded_rank(name, lora, config)
            sizes = ((n_in, padded), (padded, n_out))
            arrays[block, name] = tuple(np.zeros((*leading, *size), np.float32) for size in sizes)  # type: ignore[assignment]
        a, b = arrays[block, name]
        rank = rank_of(name, lora, config)
        name_of_a, name_of_b = peft.factor_names(path)
        a[where][..., :rank] = peft.get_tensor(tensors, name_of_a, (rank, a.shape[-2])).T
        b[where][:rank] = peft.get_tensor(tensors, name_of_b, (b.shape[-1], rank)).T
    factors = {place: Factors(jnp.asarray(a), jnp.asarray(b)) for place, (a, b) in arrays.items()}
    names = [name for name in covered_names(lora, config) if name != HEAD]
    blocks = tuple({name: factors[block, name] for name in names} for block in range(len(config.blocks)))
    return Adapter(blocks, factors.get((None, HEAD)))


def _matrices(lora: AdapterConfig, config: ModelConfig) -> Iterator[tuple[str, str, int | None, tuple[int, ...]]]:
    """Yield each matrix with an adapter: (name, path in the model, block, index in the block's array)."""
    hf_names = layer_names(config)
    names = covered_names(lora, config)
    layer = 0
    for block, n_layers in enumerate(config.blocks):
        for i in range(n_layers):
            for name in names:
                if name == HEAD:
                    continue
                path = f"model.layers.{layer}.{hf_names[name].removesuffix('.weight')}"
                if "{expert}" not in path:
                    yield name, path, block, (i,)
                    continue
                assert config.moe is not None
                for expert in range(config.moe.n_experts):
                    yield name, path.format(expert=expert), block, (i, expert)
            layer += 1
    if HEAD in names:
        yield HEAD, "lm_head", None, ()
