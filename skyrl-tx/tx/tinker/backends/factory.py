"""The backend that is asked for by name. The packages of the others need not be there."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from tx.tinker.backends.base import Backend

BackendName = Literal["jax", "torch"]


def new_backend(backend: BackendName, base_model: str, settings: Mapping[str, Any], name: str | None = None) -> Backend:
    """A backend with a model loaded, which users call `name`; by default as it is given here."""
    folder = model_folder(base_model)
    if backend == "torch":
        from tx.tinker.backends.torch.backend import TorchBackend
        from tx.tinker.backends.torch.config import TorchConfig

        return TorchBackend(folder, name or base_model, TorchConfig(**settings))
    from tx.tinker.backends.jax.backend import JaxBackend
    from tx.tinker.backends.jax.config import JaxConfig

    return JaxBackend(folder, name or base_model, JaxConfig(**settings))


def model_folder(name: str) -> Path:
    """The folder of a model: the one that is named, or a download of the Hugging Face repository."""
    folder = Path(name).expanduser()
    if folder.is_dir():
        return folder
    from huggingface_hub import snapshot_download

    return Path(snapshot_download(name, allow_patterns=["*.json", "*.safetensors", "*.txt", "*.model", "*.jinja"]))
