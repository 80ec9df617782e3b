"""The backend that is asked for by name. The packages of the others need not be there."""

from __future__ import annotations

from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal

from pydantic import ValidationError

from tx.models.config import ModelError
from tx.tinker.backends.base import Backend
from tx.tinker.backends.jax.config import JaxConfig
from tx.tinker.backends.torch.config import TorchConfig

BackendName = Literal["jax", "torch"]
TORCH_PACKAGES = ("skyrl_train", "torch", "transformers")  # of the extra


def settings_of(backend: BackendName, told: Mapping[str, Any]) -> JaxConfig | TorchConfig:
    """A backend's own settings.

    Raises:
        ValueError: one is wrong, or the backend's packages are not installed.
    """
    missing = [name for name in TORCH_PACKAGES if backend == "torch" and find_spec(name) is None]
    if missing:
        raise ValueError(
            f"{', '.join(missing)} is not installed; pip install ./skyrl-gym ./skyrl-train './skyrl-tx[torch]'"
        )
    kind = TorchConfig if backend == "torch" else JaxConfig
    try:
        return kind(**told)
    except ValidationError as error:
        wrong = "; ".join(f"{'.'.join(map(str, one['loc']))}={one['input']!r}: {one['msg']}" for one in error.errors())
        known = ", ".join(kind.model_fields)
        raise ValueError(f"{wrong}; {backend} knows {known}") from error


def new_backend(backend: BackendName, folder: Path, told: Mapping[str, Any], name: str) -> Backend:
    """A backend with the model of a folder loaded, which users call `name`."""
    settings = settings_of(backend, told)
    if isinstance(settings, TorchConfig):
        from tx.tinker.backends.torch.backend import TorchBackend

        return TorchBackend(folder, name, settings)
    from tx.tinker.backends.jax.backend import JaxBackend

    return JaxBackend(folder, name, settings)


def model_folder(name: str) -> Path:
    """The folder of a model: the one that is named, or a download of the Hugging Face repository.

    Raises:
        ModelError: there is neither.
    """
    folder = Path(name).expanduser()
    if folder.is_dir():
        return folder
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(name, allow_patterns=["*.json", "*.safetensors", "*.txt", "*.model", "*.jinja"]))
    except (OSError, ValueError) as error:
        reason = str(error).partition("\n")[0]
        raise ModelError(
            f"base_model={name!r} is no folder here, and Hugging Face does not give it: {reason}"
        ) from error
