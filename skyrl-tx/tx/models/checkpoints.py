"""Load and save models in Hugging Face folders. Their matrices are (out, in), ours (in, out)."""

import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from safetensors import safe_open

from tx.models.config import INDEX, SINGLE, ModelConfig, ModelError
from tx.models.decoder import Params

ATTENTION = {
    "attention_norm": "input_layernorm.weight",
    "mlp_norm": "post_attention_layernorm.weight",
    "q": "self_attn.q_proj.weight",
    "k": "self_attn.k_proj.weight",
    "v": "self_attn.v_proj.weight",
    "o": "self_attn.o_proj.weight",
}
QK_NORM = {"q_norm": "self_attn.q_norm.weight", "k_norm": "self_attn.k_norm.weight"}
MLP = {"gate": "gate_proj", "up": "up_proj", "down": "down_proj"}
MATRICES = {"q", "k", "v", "o", "gate", "up", "down", "router"}


PlaceWeight = Callable[[str, jax.Array], jax.Array]
"""Places a weight on its devices, by its name in `Params`."""


def layer_names(config: ModelConfig) -> dict[str, str]:
    """Return the Hugging Face names of a layer's tensors without prefix. `{expert}` is an expert's index."""
    names = ATTENTION | (QK_NORM if config.has_qk_norm else {})
    if config.moe is None:
        return names | {name: f"mlp.{hf_name}.weight" for name, hf_name in MLP.items()}
    experts = {name: f"mlp.experts.{{expert}}.{hf_name}.weight" for name, hf_name in MLP.items()}
    return names | experts | {"router": "mlp.gate.weight"}


def load_params(folder: Path, config: ModelConfig, dtype: Any, place: PlaceWeight | None = None) -> Params:
    """Load the weights in a folder as `dtype`. Each is placed before the next is read.

    Raises:
        ModelError: the folder has no safetensors, or a tensor is missing or has the wrong shape.
    """
    with ExitStack() as files:
        tensors = _Tensors(folder, files)
        return _assemble(lambda name: jnp.asarray(tensors.get(name), dtype=dtype), config, place)


def params_of(
    tensors: Mapping[str, np.ndarray], config: ModelConfig, dtype: Any, place: PlaceWeight | None = None
) -> Params:
    """Build parameters from tensors: the inverse of `named_tensors`."""
    return _assemble(lambda name: jnp.asarray(tensors[name], dtype=dtype), config, place)


def named_tensors(params: Params, config: ModelConfig) -> Iterator[tuple[str, np.ndarray]]:
    """Yield a model's tensors by their Hugging Face names. They are contiguous, since safetensors writes raw memory."""
    yield "model.embed_tokens.weight", np.asarray(params.embed)
    yield "model.norm.weight", np.asarray(params.norm)
    if params.head is not None:
        yield "lm_head.weight", np.ascontiguousarray(np.asarray(params.head).T)
    layers = (
        {name: stack[i] for name, stack in block.items()} for block in params.blocks for i in range(len(block["q"]))
    )
    for number, layer in enumerate(layers):
        for name, hf_name in layer_names(config).items():
            array = np.asarray(layer[name])
            for expert, tensor in enumerate(array) if "{expert}" in hf_name else [(0, array)]:
                turned = np.ascontiguousarray(_transpose(name, tensor))
                yield f"model.layers.{number}.{hf_name.format(expert=expert)}", turned


def _assemble(get: Callable[[str], jax.Array], config: ModelConfig, place: PlaceWeight | None) -> Params:
    layers = iter(range(config.n_layers))
    put = place or (lambda _, weight: weight)
    blocks = []
    with jax.default_device(jax.local_devices(backend="cpu")[0]):  # a whole weight need not fit on one device
        for n_layers in config.blocks:
            block_layers = [next(layers) for _ in range(n_layers)]
            named = layer_names(config).items()
            blocks.append(
                {
                    name: put(name, jnp.stack([_layer_tensor(get, config, name, hf_name, i) for i in block_layers]))
                    for name, hf_name in named
                }
            )
        return Params(
            embed=put("embed", get("model.embed_tokens.weight")),
            blocks=tuple(blocks),
            norm=put("norm", get("model.norm.weight")),
            head=None if config.ties_embeddings else put("head", get("lm_head.weight").T),
        )


def _layer_tensor(
    get: Callable[[str], jax.Array], config: ModelConfig, name: str, hf_name: str, layer: int
) -> jax.Array:
    path = f"model.layers.{layer}.{hf_name}"
    if "{expert}" not in path:
        turned: jax.Array = _transpose(name, get(path))
        return turned
    assert config.moe is not None
    return jnp.stack([get(path.format(expert=i)).T for i in range(config.moe.n_experts)])


def _transpose(name: str, tensor: Any) -> Any:
    return tensor.T if name in MATRICES else tensor


class _Tensors:
    """The tensors in a folder, in one file or several with an index. They are read one by one."""

    def __init__(self, folder: Path, files: ExitStack) -> None:
        self._folder = folder
        self._files = files
        self._open: dict[str, Any] = {}
        self._index: Mapping[str, str] | None = None
        if (folder / INDEX).is_file():
            self._index = json.loads((folder / INDEX).read_text(encoding="utf-8"))["weight_map"]
        elif not (folder / SINGLE).is_file():
            raise ModelError(f"{folder} holds neither {SINGLE} nor {INDEX}")

    def get(self, name: str) -> Any:
        """Read a tensor. Raise ModelError if it is missing."""
        file = SINGLE if self._index is None else self._index.get(name)
        if file is None or name not in (tensors := self._file(file)).keys():  # noqa: SIM118, not a dict
            raise ModelError(f"{self._folder} has no tensor {name}")
        return tensors.get_tensor(name)

    def _file(self, name: str) -> Any:
        if name not in self._open:
            self._open[name] = self._files.enter_context(safe_open(self._folder / name, framework="flax"))
        return self._open[name]
